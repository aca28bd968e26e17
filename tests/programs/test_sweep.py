"""The keeper's sweep ends although a process outlives SIGKILL, as one in uninterruptible sleep does."""

from __future__ import annotations

import json

SOURCE = """
import json, os, signal, subprocess, time
from nblaunch.elastic import keeper

stuck = subprocess.Popen(["sleep", "1000"])
other = subprocess.Popen(["sleep", "1000"])
kill = os.kill
# No test can put a process into uninterruptible sleep: the signal is held back instead.
os.kill = lambda pid, number: None if pid == stuck.pid else kill(pid, number)
started = time.monotonic()
keeper._sweep(spare=set())
took = time.monotonic() - started
alive = os.path.exists(f"/proc/{stuck.pid}")
os.kill = kill
keeper._sweep(spare=set())
print(json.dumps([took, alive, os.path.exists(f"/proc/{stuck.pid}"), os.path.exists(f"/proc/{other.pid}")]))
"""


def test_a_process_that_cannot_be_killed_is_left_to_the_next_sweep(script):
    ended = script(SOURCE)
    assert ended.returncode == 0, ended
    took, alive, after, other = json.loads(ended.stdout)
    assert took < 10
    assert (alive, after, other) == (True, False, False)
