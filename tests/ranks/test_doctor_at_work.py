"""What the doctor finds in this very process, with a fork server and in a rank."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE, eventually

import nblaunch
from nblaunch.checks import nccl, own_runtime
from nblaunch.checks.doctor import Check, examine
from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.report import Level
from nblaunch.client.local import OwnRuntime, local

BOUND = 5.0


# How long these take depends on what else the machine does: in time, or "no answer within ...".
TIMED = {"torch", "NCCL", "GPU", "fork server"}


def only(findings):
    """Return the one finding of a check."""
    (finding,) = findings
    return finding


def named(name, found):
    return only([level, summary, advice] for each, level, summary, advice in found if each == name)


@pytest.mark.usefixtures("nothing_more")
def test_a_real_run_names_every_check_and_advises_wherever_something_is_wrong_and_leaves_nothing():
    before = set(threading.enumerate())
    started = time.monotonic()
    report = nblaunch.doctor()
    assert report.seconds <= time.monotonic() - started < BOUND
    names = [each.name for each in report.findings]
    assert {"versions", "torch", "NCCL", "fork server", "processes", "hand-over", "loopback"} <= set(names)
    assert {"hostname", "temp dir", "leftovers", "open files"} <= set(names)
    assert {"process limit", "memory", "CPU threads", "notebook", "this process"} <= set(names)
    assert any(name.startswith("GPU") for name in names)
    for each in report.findings:
        assert each.summary
        assert "\n" not in each.summary
        assert each.level is Level.OK or each.advice, each
    assert [each for each in report.findings if "could not be checked" in each.summary] == []
    assert report.ok, str(report)
    (forked,) = [each.summary for each in report.findings if each.name == "fork server"]
    assert re.fullmatch(r"started after \d+\.\d\d s; a rank is forked in \d+ ms|no answer .*", forked)
    # What had no answer in time goes on; nothing has, on a machine that is not busy.
    stuck = [each for each in report.findings if "no answer" in each.summary]
    assert stuck or set(threading.enumerate()) <= before


def test_in_a_rank_the_doctor_says_that_it_is_one_and_starts_nothing():
    def ask():
        import nblaunch

        return [(each.name, each.level, each.summary) for each in nblaunch.doctor().findings]

    (found,) = nblaunch.run(ask, nproc=1, init_process_group=False).values
    name, level, summary = only(found)
    assert (name, level) == ("this process", Level.PROBLEM)
    assert summary == "it is rank 0 of a run, and a rank cannot start ranks of its own"


# --- what it starts ends with it ------------------------------------------------------------------------


def keepers():
    return [each for each in psutil.Process().children() if "keeper" in " ".join(each.cmdline())]


def looking():
    return [each for each in threading.enumerate() if each.name.startswith("nblaunch-doctor")]


@pytest.fixture
def nothing_more():
    """Check that the doctor has left neither a keeper nor a private directory, at once."""
    there = set(Path(tempfile.gettempdir()).iterdir()), keepers()
    yield
    assert (set(Path(tempfile.gettempdir()).iterdir()), keepers()) == there


@pytest.mark.usefixtures("nothing_more")
def test_nothing_is_left_where_a_check_raises_or_the_user_interrupts(monkeypatch):
    def fail(own):
        own.fork(PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(nccl, "all_reduce", fail)
    with pytest.raises(KeyboardInterrupt):
        nblaunch.doctor(nccl=True)


@pytest.mark.usefixtures("nothing_more")
def test_a_check_that_outlasts_the_doctor_leaves_nothing_either():
    own, goes_on = DoctorRuntime(), threading.Event()

    def slow(own):
        goes_on.wait(PATIENCE)
        own.directory.make("late-")
        own.fork(PATIENCE)
        return []

    (found,) = examine([Check("slow", own.of(slow), seconds=0.1)]).findings
    assert found.summary.startswith("no answer within 0.1 s")
    own.close()
    goes_on.set()
    eventually(lambda: not looking(), "the end of the check")


@pytest.mark.usefixtures("nothing_more")
def test_a_check_that_waits_for_a_fork_server_goes_on_no_longer_than_the_doctor():
    own = DoctorRuntime()

    def stuck(own):
        own.started = OwnRuntime(own.directory.root())
        keeper = psutil.Process(own.started.keeper.pid)
        eventually(keeper.children, "the fork server's start")
        keeper.children()[0].suspend()
        own.fork(PATIENCE)
        return []

    (found,) = examine([Check("stuck", own.of(stuck), seconds=1.5)]).findings
    assert found.summary.startswith("no answer within 1.5 s")
    started = time.monotonic()
    own.close()
    assert time.monotonic() - started < BOUND
    eventually(lambda: not looking(), "the end of the check")


# --- the runtime of this process ------------------------------------------------------------------------


def test_a_runtime_that_is_up_is_described_and_none_is_started():
    local().close()
    assert list(own_runtime.of_this_process()) == []
    assert local().started is None
    with nblaunch.Session(nproc=1, init_process_group=False):
        found = only(own_runtime.of_this_process())
    pid = local().runtime.welcome.pid
    assert found.level is Level.OK
    assert re.fullmatch(rf"process {pid}, \d+ MiB of its own, 1 session", found.summary), found.summary
    assert only(own_runtime.of_this_process()).summary.endswith("0 sessions")
