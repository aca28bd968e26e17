"""The check that every test goes through finds what a test could leave behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist


def handler(stack):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    stack.callback(signal.signal, signal.SIGUSR1, before)


def variable(stack):
    os.environ["LEFT_BEHIND"] = "yes"
    stack.callback(os.environ.pop, "LEFT_BEHIND")


def directory(stack):
    stack.callback(os.chdir, Path.cwd())
    os.chdir("/")


def thread(stack):
    over = threading.Event()
    each = threading.Thread(target=over.wait, name="left-behind")
    each.start()
    stack.callback(each.join)
    stack.callback(over.set)


def process_group(stack):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)


def start_method(stack):
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    stack.callback(multiprocessing.set_start_method, before, force=True)


def open_file(stack):
    stack.enter_context(Path(__file__).open())


def connection(stack):
    stack.enter_context(socket.socket())


def shared_memory(stack):
    path = Path("/dev/shm/nblaunch-left-behind")  # noqa: S108 - what is looked for
    path.touch()
    stack.callback(path.unlink)


def temporary_file(stack):
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    stack.callback(os.unlink, path)


def child(stack):
    each = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stack.enter_context(each)


def orphan(stack):
    """Leave a process that is no descendant of ours any more."""
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid)"
    reader, writer = os.pipe()
    done = subprocess.run([sys.executable, "-c", code], stdin=reader, capture_output=True, text=True, check=True)
    os.close(reader)
    stack.callback(os.close, writer)
    assert int(done.stdout) > 0


@pytest.mark.parametrize(
    ("leave", "told"),
    [
        (handler, "handler of SIGUSR1"),
        (variable, "$LEFT_BEHIND"),
        (directory, "working directory"),
        (thread, "'left-behind' runs on"),
        (process_group, "default process group"),
        (start_method, "start method"),
        (open_file, "test_leftovers.py"),
        (connection, "more sockets"),
        (shared_memory, "nblaunch-left-behind is there"),
        (temporary_file, tempfile.gettempdir()),
        (child, "is alive"),
        (orphan, "is alive"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_is_left_behind_is_told(leftovers, leave, told):
    before = leftovers()
    assert before.found(logs=True) == []
    with ExitStack() as stack:
        leave(stack)
        assert told in "\n".join(before.found(logs=True))


def test_a_rank_that_is_left_behind_is_told_from_the_fork_server(leftovers, kernel, eventually):
    """It has the fork server's command line, and becomes the keeper's child when its own is gone."""
    kernel.ok("%%distributed -n 2\nrank")
    before = leftovers()
    fork = "import os, signal\nif os.fork() == 0:\n    signal.pause()\n"
    kernel.ok(f"import subprocess, sys, os\nleft = subprocess.Popen([sys.executable, '-c', '''{fork}'''])\nleft.wait()")
    told = SimpleNamespace(lines=before.found(logs=True))
    assert any("is alive" in line for line in told.lines)
    kernel.ok(f"import psutil\n[each.kill() for each in psutil.process_iter() if {fork!r} in each.cmdline()];")
    eventually(lambda: before.found(logs=True) == [], "the orphan is gone")
