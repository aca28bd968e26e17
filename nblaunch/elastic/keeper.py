"""The keeper: a small process that outlives the kernel by a moment and leaves nothing behind.

    kernel --> keeper --> fork server --> rank, rank, ...

It is the subreaper of everything below it: a child that a rank left behind, even one that started a
session of its own, becomes the keeper's child when that rank is gone. So "no process of ours is alive"
is one rule: *a child of the keeper that is not the fork server does not live*. It is applied

* when the kernel asks, at the end of each worker group (one byte on the socket, one byte back; another
  byte only asks whether the keeper and the fork server are there), and
* when the fork server is gone, or the kernel wants another one: then the keeper goes too, and
* when the kernel is gone, for whatever reason: then all go, and the runtime directory.

This file runs as a program of its own and imports nothing of torch; the fork server is its child and
imports torch after the fork, so the keeper stays small.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time

from nblaunch import _process_tree
from nblaunch._process_tree import become_subreaper, die_with_parent
from nblaunch.elastic import descriptors

SWEEP = b"s"
PING = b"p"
END = b"e"
_PATIENCE = 0.02
_TRACKER_PATIENCE = 1.0
_SWEEP_SECONDS = 3.0
# Without pidfd: how often to look whether the kernel is there.
_PARENT_STEP = 0.05
# Cleaners of temporary directories remove what is days old.
_FRESHEN_SECONDS = 3600


def main(requests_fd: int, control_fd: int, kernel_pid: int, root: str) -> None:
    """Start the fork server and keep watch; returns never."""
    become_subreaper()
    descriptors.raise_soft_limit()
    alive_read, alive_write = os.pipe()
    me = os.getpid()
    server = os.fork()
    if server == 0:
        os.close(alive_write)
        os.close(control_fd)
        die_with_parent(me)
        from nblaunch.elastic.preload import serve

        serve(requests_fd, alive_read, root)
    os.close(requests_fd)
    os.close(alive_read)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The keeper ends with the kernel; a stray signal to all processes must not orphan the ranks.
        signal.signal(number, signal.SIG_IGN)
    kernel_lives = False
    try:
        kernel_lives = _watch(socket.socket(fileno=control_fd), server, kernel_pid, root)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        _sweep(spare=0)
        if not kernel_lives or os.getppid() != kernel_pid:
            shutil.rmtree(root, ignore_errors=True)
        os._exit(0)


def _watch(control: socket.socket, server: int, kernel_pid: int, root: str) -> bool:
    """Serve the kernel's requests until it or the fork server is gone; return whether the kernel lives."""
    # The socket alone is not enough: a process that the user forked from the kernel holds it open.
    kernel_end, server_end = process_end(kernel_pid), process_end(server)
    poller = select.poll()
    for fd in (control.fileno(), kernel_end, server_end):
        poller.register(fd, select.POLLIN)
    while os.getppid() == kernel_pid:
        ready = {fd for fd, _ in poller.poll(_FRESHEN_SECONDS * 1000)}
        if ready & {kernel_end, server_end}:
            return kernel_end not in ready
        if not ready:
            freshen(root)
            continue
        # One byte is the request, the other its number, which the answer repeats.
        question = control.recv(2)
        request, number = question[:1], question[1:]
        if request not in (SWEEP, PING):
            # Nothing at all: the kernel has closed the socket, for example because it has called exec.
            return request == END
        if request == SWEEP:
            _sweep(spare=server)
        control.sendall(number)
    return False


_queues: list[object] = []  # a queue is closed when it is collected


def process_end(pid: int) -> int:
    """Return a descriptor that becomes readable when process `pid`, our parent or a child, ends."""
    if sys.platform == "darwin":
        queue = select.kqueue()
        end = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        queue.control([end], 0)
        _queues.append(queue)
        return queue.fileno()
    # Missing in a Python built on old headers (conda's, some of uv's), before Linux 5.3, in some sandboxes.
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    ended, writing = os.pipe()
    threading.Thread(target=_await_end, args=(pid, writing), name="nblaunch-await-end", daemon=True).start()
    return ended


def _await_end(pid: int, writing: int) -> None:
    """Close `writing` once process `pid` has ended; leaves a child to be reaped by others."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # it is the parent
        while os.getppid() == pid:
            time.sleep(_PARENT_STEP)
    os.close(writing)


def freshen(root: str) -> None:
    """Touch all files of the runtime directory: cleaners of temporary directories go by age."""
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)


def _sweep(spare: int) -> None:
    """Kill and reap every child but `spare`; their children become the keeper's, and are killed too.

    A process in uninterruptible sleep (a dead network disk) outlives SIGKILL until that sleep ends. It is
    left to the next sweep: the kernel waits for this one.
    """
    started = time.monotonic()
    while children := _children() - {spare}:
        now = time.monotonic()
        if now > started + _SWEEP_SECONDS:
            return
        spared = now < started + _TRACKER_PATIENCE
        for pid in children:
            if not (spared and _is_resource_tracker(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _reap(children, now + _PATIENCE)


def _reap(children: set[int], deadline: float) -> None:
    for pid in children:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                break  # others come first
            time.sleep(0.0005)


def _is_resource_tracker(pid: int) -> bool:
    """Return whether a process is Python's resource tracker.

    It removes the shared memory that a rank made and left, and ends as soon as the rank's last child has.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as arguments:
            return b"multiprocessing.resource_tracker" in arguments.read()
    except OSError:
        return False


def _children() -> set[int]:
    listed = _process_tree.children()
    if listed is None:
        import psutil  # only here: the keeper is small

        listed = {each.pid for each in psutil.Process().children()}
    return listed
