"""What a rank's children leave behind is reaped; the rank's own are left to whoever waits for them."""

from __future__ import annotations

import psutil
import pytest

import nblaunch


@pytest.fixture(scope="module")
def session():
    """Give a session that the tests of this file share."""
    with nblaunch.Session(nproc=1) as opened:
        yield opened


def test_orphans_of_a_rank_are_reaped_while_it_works_and_afterwards(session):
    session.cell(
        """
import psutil, subprocess, time
def has_ended(process):
    try:
        return process.status() == "zombie"
    except psutil.NoSuchProcess:
        return False  # reaped since it was listed
def zombies():
    return [each.pid for each in psutil.Process().children(recursive=True) if has_ended(each)]
for _ in range(10):
    subprocess.run("sleep 0.05 &", shell=True)
deadline = time.monotonic() + 10
time.sleep(0.2)
while zombies() and time.monotonic() < deadline:
    time.sleep(0.05)
assert zombies() == []
# These end when the cell has ended.
for _ in range(3):
    subprocess.run("sleep 0.1 &", shell=True)
""",
        namespace={},
    )
    left = session.cell(
        """
deadline = time.monotonic() + 10
time.sleep(0.2)
while zombies() and time.monotonic() < deadline:
    time.sleep(0.05)
zombies()
""",
        namespace={},
    )
    assert left.values == [[]]


def test_orphans_are_reaped_while_a_session_is_idle(session, eventually):
    left = session.cell(
        """
import os, subprocess
def orphans():
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return file.read().split()
pids = [int(subprocess.check_output("sleep 2 >/dev/null & echo $!", shell=True)) for _ in range(3)]
pids, set(map(str, pids)) <= set(orphans())
""",
        namespace={},
    )
    pids, are_its_children = left.values[0]
    assert are_its_children
    eventually(lambda: not any(psutil.pid_exists(each) for each in pids), "the orphans are reaped")


def test_the_exit_status_of_a_ranks_own_child_is_there_however_late_it_is_read(session):
    result = session.cell(
        """
import multiprocessing, os, subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "exit 3"])
spawned = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 4"], os.environ)
forked = os.fork()
if forked == 0:
    os._exit(5)
process = multiprocessing.get_context("fork").Process(target=os._exit, args=(6,))
process.start()
time.sleep(1)
codes = [child.wait()] + [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (spawned, forked)]
process.join()
[*codes, process.exitcode]
""",
        namespace={},
    )
    assert result.values == [[3, 4, 5, 6]]
