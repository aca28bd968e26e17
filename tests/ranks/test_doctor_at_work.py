"""What the doctor finds in this very process, with a fork server and in a rank."""

from __future__ import annotations

import re
import threading
import time

import pytest

import nblaunch
from nblaunch.checks import processes
from nblaunch.checks.report import Level

BOUND = 5.0


# How long these take depends on what else the machine does: in time, or "no answer within ...".
TIMED = {"torch", "NCCL", "GPU", "fork server"}


def only(findings):
    """Return the one finding of a check."""
    (finding,) = findings
    return finding


def named(name, found):
    return only([level, summary, advice] for each, level, summary, advice in found if each == name)


@pytest.fixture(autouse=True, scope="module")
def warm():
    """Start the fork server before the tests: on a busy machine that takes longer than the doctor waits."""
    assert only(processes.fork_server()).level is not Level.PROBLEM


def test_a_real_run_names_every_check_and_advises_wherever_something_is_wrong():
    report = nblaunch.doctor()
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


def test_a_run_takes_less_than_5_seconds_and_leaves_no_thread():
    before = set(threading.enumerate())
    started = time.monotonic()
    report = nblaunch.doctor()
    assert report.seconds <= time.monotonic() - started < BOUND
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


def test_the_fork_server_is_measured_by_forking_a_process():
    assert re.fullmatch(
        r"(started|ready) after \d+\.\d\d s; a rank is forked in \d+ ms",
        only(processes.fork_server()).summary,
    )
    # It runs by now.
    assert only(processes.fork_server()).summary.startswith("ready after ")
