"""SIGTERM to a rank that has something to save, and no order to do so."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

STUCK = """
import ctypes
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
print("ready", flush=True)
lock(mutex), lock(mutex)
"""
AT_WORK = """
import time
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
CHILD = """
import os, signal, time
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"x")
    time.sleep(60)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
print("ready", flush=True)
time.sleep(1.5)
"""


def begin(source: str) -> subprocess.Popen[str]:
    source = f"from nblaunch.rank import preempt\npreempt.add(print)\n{source}"
    program = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    return program


@pytest.mark.parametrize("source", [STUCK, AT_WORK], ids=["stuck", "at work"])
def test_a_rank_without_an_order_to_save_ends_by_the_signal_also_where_no_handler_runs(source):
    with begin(source) as program:
        began = time.monotonic()
        while psutil.Process(program.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < began + 10
        began = time.monotonic()
        program.terminate()
        try:
            assert program.wait(10) == -signal.SIGTERM
        finally:
            program.kill()
        assert time.monotonic() - began > 0.5


def test_the_signal_of_a_child_does_not_end_the_rank():
    with begin(CHILD) as program:
        assert program.wait(10) == 0
