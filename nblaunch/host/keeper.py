"""The keeper: a small process that outlives what it keeps by a moment and leaves nothing behind.

    kernel --> keeper --+--> fork server --> rank, rank, ...
                        +--> runtime

The runtime is forked from the fork server, which has torch, and becomes the keeper's child when the process
between them has ended. So a fork server that is killed takes its ranks along, and not the runtime.
In place of a runtime there may be a node program (`nodes.host`).

The keeper is the subreaper of everything below it: a child that a rank left behind, even one that started a
session of its own, becomes the keeper's child when that rank is gone. So "no process of ours is alive" is one
rule: *a child of the keeper that is neither the fork server nor the runtime does not live*. It is applied

* when the runtime orders it, at the end of each worker group, and
* when the fork server is gone: then the runtime may order another one. Where there is none yet, the keeper
  goes too, and
* when the runtime is gone, or the kernel that it is bound to, for whatever reason, or at SIGUSR1: then all
  go, the private directory, and the runtime's entry in the registry. Once the runtime is gone, the keeper
  runs the commands that it registered: they give back what is no process of ours, such as a job in a queue.
  SIGUSR1 is the only signal that the keeper heeds, for a runtime that does not answer.

A detached runtime has no such kernel.

This file runs as a program of its own and imports nothing of torch; the fork server is its child and
imports torch after the fork, so the keeper stays small.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from nblaunch import _process_tree
from nblaunch._locks import hold
from nblaunch._process_tree import become_subreaper, die_with_parent
from nblaunch.host import descriptors

ORDER = struct.Struct("<cBH")
"""The header of an order: its kind, its number, and the length of the rest."""
SWEEP = b"s"
PING = b"p"
END = b"e"
"""End the fork server."""
START = b"f"
"""Start another fork server; with it comes the end of a socket that it is to read requests from."""
ADOPTED = b"a"
"""The rest is the runtime's process id, now that it is the keeper's child."""
NAMED = b"n"
"""The rest is the path of the runtime's entry in the registry, to be removed in the end."""
DETACH = b"d"
"""Outlive the kernel."""
AT_END = b"c"
"""The rest is a command to run at the end: a JSON list of its words (see `split_command`)."""
FORGET = b"g"
"""The rest is a command of `AT_END` that is revoked."""

ANSWER = struct.Struct("<BB")
"""The order's number, and an error number: 0 if all is well."""
GONE = errno.ESRCH
"""There is no fork server."""

Birth = tuple[str, tuple[int, ...]]
"""The function that the forked runtime calls, and its own descriptors."""

_PATIENCE = 0.02
_TRACKER_PATIENCE = 1.0
_NODES_PATIENCE = 5.0
_SWEEP_SECONDS = 3.0
# How long commands delay the keeper's end, and how long they may take.
_COMMANDS_PATIENCE, _COMMANDS_SECONDS = 2.0, 30.0
# Without pidfd: how often to look whether the kernel is there.
_PARENT_STEP = 0.05
# Cleaners of temporary directories remove what is days old.
_FRESHEN_SECONDS = 3600


def keep_runtime(link_fd: int, kernel_pid: int, root: str, live: str) -> None:
    """Keep a fork server and the runtime that it forks; returns never.

    The runtime ends with process `kernel_pid`, which is the keeper's parent; 0: with no other process.
    In the runtime the function named `live` ("module:name") is called with `link_fd`, its ends of the
    requests' and the orders' sockets, `root` and the keeper's process id.
    """
    orders, its_orders = socket.socketpair()
    requests, its_requests = socket.socketpair()
    keeper = _Keeper(orders, kernel_pid, root)
    signal.signal(signal.SIGUSR1, lambda *_: keeper.end())
    try:
        its_fds = link_fd, its_requests.detach(), its_orders.detach()
        keeper.fork_server(requests.detach(), (live, its_fds))
        for fd in its_fds:
            os.close(fd)
        keeper.watch()
    except Exception:  # noqa: BLE001 - nothing else would report it
        sys.excepthook(*sys.exc_info())
    finally:
        keeper.end()


class _Keeper:
    """The keeper's own process."""

    def __init__(self, orders: socket.socket, kernel_pid: int, root: str) -> None:
        become_subreaper()
        descriptors.raise_soft_limit()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A stray signal to all processes must not orphan the ranks.
            signal.signal(number, signal.SIG_IGN)
        # Orphans of ranks and of node programs become its children, and must not stay zombies.
        self._children_end, waking = os.pipe()
        for fd in (self._children_end, waking):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup descriptor needs a handler
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self._orders = orders
        self._kernel = kernel_pid
        self._root = root
        self._held = hold(root)
        """Holds the lock by which others know that the directory is in use."""
        self._entry = ""
        self._at_end: list[bytes] = []
        self._server = self._runtime = 0
        self._alive = -1
        """A pipe that the fork server has the other end of: it ends with the keeper."""
        self._ends: dict[int, int] = {}
        """Process id -> a descriptor that becomes readable when it ends."""

    def fork_server(self, requests_fd: int, runtime: Birth | None = None) -> None:
        """Fork a fork server that reads `requests_fd`; it forks the runtime first, if there is to be one."""
        me = os.getpid()
        alive, self._alive = os.pipe()
        try:
            self._server = os.fork()
            if self._server == 0:
                self._be_server(me, requests_fd, alive, runtime)
        except OSError:
            os.close(self._alive)
            raise
        finally:
            os.close(requests_fd)
            os.close(alive)
        self._ends[self._server] = process_end(self._server)

    def _be_server(self, keeper: int, requests_fd: int, alive: int, runtime: Birth | None) -> NoReturn:
        try:
            for number in (signal.SIGUSR1, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            waking = signal.set_wakeup_fd(-1)
            for fd in (self._children_end, waking):
                os.close(fd)
            for fd in (self._orders.detach(), self._alive, *self._held, *self._ends.values()):
                os.close(fd)
            die_with_parent(keeper)
            from nblaunch.host.preload import serve

            serve(requests_fd, alive, self._root, runtime)
        except BaseException:  # noqa: BLE001 - what follows in this process is the keeper's
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def watch(self) -> None:
        """Obey orders until nothing is to be kept any more."""
        if self._kernel:
            # The socket alone is not enough: a process that the user forked from the kernel holds it open.
            self._ends[self._kernel] = process_end(self._kernel)
        freshen_at = time.monotonic() + _FRESHEN_SECONDS
        while self._kernel in (0, os.getppid()):
            poller = select.poll()
            for fd in (self._orders.fileno(), self._children_end, *self._ends.values()):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(max(freshen_at - time.monotonic(), 0) * 1000)}
            if time.monotonic() >= freshen_at:
                freshen(self._root)
                freshen_at = time.monotonic() + _FRESHEN_SECONDS
            if self._children_end in ready:
                os.read(self._children_end, select.PIPE_BUF)
                _reap(_children() - {self._server, self._runtime}, deadline=0)
            ended = {pid for pid, fd in self._ends.items() if fd in ready}
            if ended & {self._kernel, self._runtime} or (self._server in ended and not self._runtime):
                return
            if self._server in ended:
                self._lose_server()
            if self._orders.fileno() in ready and not self._obey():
                return  # the other end is closed

    def _obey(self) -> bool:
        header, fds, _, _ = socket.recv_fds(self._orders, ORDER.size, 1, socket.MSG_WAITALL)
        if len(header) < ORDER.size:
            return False
        kind, number, length = ORDER.unpack(header)
        rest = self._orders.recv(length, socket.MSG_WAITALL) if length else b""
        error = 0
        if kind == ADOPTED:
            self._runtime = int(rest)
            self._ends[self._runtime] = process_end(self._runtime)
        elif kind == NAMED:
            self._entry = os.fsdecode(rest)
        elif kind == AT_END:
            self._at_end.append(rest)
        elif kind == FORGET and rest in self._at_end:
            self._at_end.remove(rest)
        elif kind == DETACH and self._kernel:
            os.close(self._ends.pop(self._kernel))
            self._kernel = 0
        elif kind == START:
            self._lose_server()
            try:
                self.fork_server(fds[0])
            except OSError as refused:
                error = refused.errno or 1
        elif kind == END:
            self._lose_server()
        elif kind == SWEEP:
            _sweep({self._server, self._runtime})
        gone = self._server not in self._ends
        self._orders.sendall(ANSWER.pack(number, error or (GONE if gone else 0)))
        return True

    def _lose_server(self) -> None:
        """End the fork server, if it is there, and all that it has forked but the runtime."""
        _sweep({self._runtime})
        if self._server:
            os.close(self._ends.pop(self._server))
            os.close(self._alive)
            self._server = 0

    def end(self) -> NoReturn:
        for pid in (self._server, self._runtime):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            _reap({self._server, self._runtime} - {0}, time.monotonic() + _SWEEP_SECONDS)
        # Before nodes are awaited: they may be too busy to end by themselves.
        apart = _run_apart(self._at_end)
        _sweep({apart}, _ends_with_its_nodes, _NODES_PATIENCE)
        _await(apart)
        shutil.rmtree(self._root, ignore_errors=True)
        if self._entry:
            with contextlib.suppress(OSError):
                os.unlink(self._entry)
        os._exit(0)


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
    """Write a byte once process `pid` has ended; leaves a child to be reaped by others."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # it is the parent
        while os.getppid() == pid:
            time.sleep(_PARENT_STEP)
    # To close it is not enough: a fork server that was started later has a copy.
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more
        os.write(writing, b"e")
    os.close(writing)


def freshen(root: str) -> None:
    """Touch all files of the runtime directory: cleaners of temporary directories go by age."""
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)


def _sweep(
    spare: set[int], by_itself: Callable[[int], bool] | None = None, patience: float = _TRACKER_PATIENCE
) -> None:
    """Kill and reap every child but those to `spare`; their children become the keeper's, and are killed too.

    A child that ends `by_itself` has `patience` seconds to do so. A process in uninterruptible sleep (a dead
    network disk) outlives SIGKILL until that sleep ends. It is left to the next sweep: the kernel waits for
    this one.
    """
    by_itself = by_itself or _ends_by_itself
    started = time.monotonic()
    while children := _children() - spare:
        now = time.monotonic()
        if now > started + max(_SWEEP_SECONDS, patience + _TRACKER_PATIENCE):
            return
        spared = now < started + patience
        for pid in children:
            if not (spared and by_itself(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _reap(children, now + _PATIENCE)


def split_command(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Part a command into the variables that it begins with, NAME=VALUE each, and its words.

    Every user of this machine can read a command line, and a variable may be a password.

    >>> split_command(["TOKEN=1=2", "scancel", "x=3"])
    ({'TOKEN': '1=2'}, ['scancel', 'x=3'])
    """
    variables, words = {}, list(command)
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words


def _run_apart(commands: list[bytes]) -> int:
    """Run commands in a process that outlives the keeper where one is slow, as Slurm's controller may be.

    Returns its process id; 0 where there are no commands.
    """
    apart = os.fork() if commands else 0
    if commands and apart == 0:
        try:
            _run(commands)
        finally:
            os._exit(0)
    return apart


def _await(apart: int) -> None:
    """Wait for a process that runs commands, as long as it may delay the keeper's end."""
    deadline = time.monotonic() + _COMMANDS_PATIENCE
    while apart and os.waitpid(apart, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(_PATIENCE)
    _sweep({apart})


def _run(commands: list[bytes]) -> None:
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for command in commands:
        variables, words = split_command(json.loads(command))
        environ = {**os.environ, **variables}
        # posix_spawnp would search the PATH of this process.
        program = shutil.which(words[0], path=environ.get("PATH"))
        with contextlib.suppress(OSError):
            if program is not None:  # else it is not there any more
                os.posix_spawn(program, words, environ, setsigdef=ours)
    deadline = time.monotonic() + _COMMANDS_SECONDS
    with contextlib.suppress(ChildProcessError):  # no child is left
        while commands and time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_PATIENCE)
    _sweep(set())


def _reap(children: set[int], deadline: float) -> None:
    for pid in children:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                break  # others come first
            time.sleep(0.0005)


def _ends_by_itself(pid: int) -> bool:
    """Return whether an orphan is a process that cleans up and then ends by itself.

    Python's resource tracker removes the shared memory that a rank left, as soon as the rank's last child has
    ended. The keeper of a node program on this machine removes that node's directory; the keeper of a run
    that a rank started removes that run's.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as its, open("/proc/self/cmdline", "rb") as own:
            command = its.read()
            keeper = b"nblaunch.host.keeper" in command and command != own.read()
    except OSError:
        return False
    return keeper or b"multiprocessing.resource_tracker" in command


def _ends_with_its_nodes(pid: int) -> bool:
    """Return whether an orphan ends by itself, those included that have placed nodes.

    A node ends, and cleans up, when its connection to the runtime ends; then srun and ssh end. If srun is
    killed, the process that it has forked kills the whole step, before the nodes have cleaned up.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as its:
            program = its.read().partition(b"\0")[0]
    except OSError:
        return False
    return os.path.basename(program) in (b"srun", b"ssh") or _ends_by_itself(pid)


def _children() -> set[int]:
    listed = _process_tree.children()
    if listed is None:
        import psutil  # only here: the keeper is small

        listed = {each.pid for each in psutil.Process().children()}
    return listed
