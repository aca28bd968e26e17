"""The check that every test goes through finds what a test could leave behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

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
    stack.enter_context(Path(__file__).open())  # noqa: SIM115 - the stack closes it


def connection(stack):
    stack.enter_context(socket.socket())


def shared_memory(stack):
    path = Path("/dev/shm/nblaunch-left-behind")  # noqa: S108 - what is looked for
    path.touch()
    stack.callback(path.unlink)


def temporary_file(stack):
    descriptor, path = tempfile.mkstemp("left-behind.txt")
    os.close(descriptor)
    stack.callback(os.unlink, path)


def child(stack):
    stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


def orphan(stack):
    """Leave a process that is no descendant of ours any more."""
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdout=sys.stderr)"
    reader, writer = os.pipe()
    stack.callback(os.close, writer)
    subprocess.run([sys.executable, "-c", code], stdin=reader, stderr=subprocess.DEVNULL, check=True)
    os.close(reader)


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
        (temporary_file, "left-behind.txt is there"),
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


def test_a_directory_that_goes_while_it_is_looked_at_is_not_left_behind(leftovers, monkeypatch):
    before = leftovers()
    made = Path(tempfile.mkdtemp(prefix="left-behind"))
    (made / "file").touch()

    def going(path, _):
        yield path / "file"
        shutil.rmtree(made)
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "rglob", going)
    assert before.found(logs=True) == []
    assert not made.exists()
