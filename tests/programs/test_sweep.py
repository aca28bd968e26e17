"""The keeper's sweep ends although a process outlives SIGKILL, as one in uninterruptible sleep does."""

from __future__ import annotations

import json

SOURCE = """
import json, os, signal, subprocess, time
from nblaunch.host import keeper

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


KEEPER = """
import json, os, subprocess, sys, time
from nblaunch.host import keeper

directory = sys.argv[1]
# What stands for the keeper of a node: it removes its directory a moment after its parent has ended.
code = f"'nblaunch.host.keeper'; import os, time; time.sleep(0.3); os.rmdir({directory!r})"
other = subprocess.Popen([sys.executable, "-S", "-c", code])
deaf = subprocess.Popen([sys.executable, "-S", "-c", code.replace("0.3", "100")])
started = time.monotonic()
keeper._sweep(spare=set())
print(json.dumps([os.path.exists(directory), time.monotonic() - started, keeper._children() == set()]))
"""


def test_the_keeper_of_a_node_has_time_to_remove_what_is_its_own(script, tmp_path):
    (tmp_path / "its").mkdir()
    ended = script(KEEPER, str(tmp_path / "its"))
    assert ended.returncode == 0, ended
    there, took, alone = json.loads(ended.stdout)
    assert (there, alone, took < 3) == (False, True, True)
