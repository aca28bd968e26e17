"""torch's file-based expiration timers: a rank that overruns one dies, and nobody else does."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

import nblaunch
from nblaunch.client.local import local

SWITCH = "TORCHELASTIC_ENABLE_FILE_TIMER"


def overruns(rank, scope):
    """Stay in a scope of half a second for a minute, on one rank; the others wait for it."""
    import torch.distributed as dist
    from torch.distributed.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=30, scope="in time"):
        pass
    if int(os.environ["RANK"]) == rank:
        with timer.expires(after=0.5, scope=scope):
            time.sleep(60)
    dist.barrier()


@pytest.mark.quick
def test_a_rank_that_overruns_its_scope_is_killed_and_says_which_and_when():
    before = time.time()
    result = nblaunch.run(overruns, (1, "train step"), nproc=2, env={SWITCH: "1"}, check=False)
    root = result.root_cause
    assert root is not None
    assert (root.rank, root.signal, root.exitcode) == (1, "SIGKILL", -9)
    assert re.fullmatch(
        r"was killed by SIGKILL: scope 'train step' was not left by its deadline, \d\d:\d\d:\d\d "
        r"\(torch\.distributed\.elastic\.timer\.expires\)",
        root.reason,
    )
    # By nobody else, and not long after the deadline: the other limits here are a minute and more.
    assert root.time - before < 30
    names = [event.name for event in result.events]
    assert "watchdog started" in names
    assert "watchdog stopped" in names
    killed = next(event for event in result.events if event.name == "kill worker process")
    details = json.loads(killed.metadata["metadata"])
    assert details["scope_id"] == "train step"
    assert int(details["worker_pid"]) == result.ranks[1].pid
    shown = time.strftime("%H:%M:%S", time.localtime(float(details["expiration_time"])))
    assert f"deadline, {shown} " in root.reason


def test_the_notebooks_own_variable_counts_as_well_and_a_restart_has_timers_again(monkeypatch):
    def once():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            overruns(0, "first attempt")
        return Path(os.environ["TORCHELASTIC_TIMER_FILE"]).is_fifo()

    monkeypatch.setenv(SWITCH, "1")
    result = nblaunch.run(once, nproc=2, max_restarts=1)
    assert result.values == [True, True]
    assert "'first attempt'" in result.attempts[0].failures[0].reason


def test_the_pipe_is_where_the_user_wants_it_and_gone_afterwards(tmp_path):
    def where():
        return os.environ["TORCHELASTIC_TIMER_FILE"], Path(os.environ["TORCHELASTIC_TIMER_FILE"]).is_fifo()

    chosen = tmp_path / "timers"
    result = nblaunch.run(where, nproc=2, env={SWITCH: "1", "TORCHELASTIC_TIMER_FILE": str(chosen)})
    assert result.values == [(str(chosen), True)] * 2
    assert result.events  # waits until the ranks have left
    assert not chosen.exists()
    private = nblaunch.run(where, nproc=1, env={SWITCH: "1"})
    assert private.events
    assert private[0][1]
    assert not Path(private[0][0]).exists()
    assert Path(private[0][0]).parent == local().directory.root()


def test_without_the_variable_there_is_no_watchdog():
    def file():
        return os.environ.get("TORCHELASTIC_TIMER_FILE")

    result = nblaunch.run(file, nproc=1, env={SWITCH: "0"})
    assert result.values == [None]
    assert not any("watchdog" in event.name for event in result.events)


def test_the_watchdog_signals_nobody_but_ranks(start_kernel):
    """Not the notebook, whose process it runs in, and no other process that somebody names to it."""
    kernel = start_kernel()
    kernel.ok(
        "import os, subprocess, sys\nstranger = subprocess.Popen(['sleep', '60'])\nkernel = os.getpid()"
    )
    kernel.ok(
        f"""
        %%distributed -n 2 --env {SWITCH}=1 --out res
        import json, time
        pipe = os.environ["TORCHELASTIC_TIMER_FILE"]
        for pid in (kernel, stranger_pid) if rank == 0 else ():
            request = {{"version": 1, "pid": pid, "scope_id": "x", "expiration_time": 1.0, "signal": 9}}
            with open(pipe, "w") as file:
                file.write(json.dumps(request) + "\\n")
        time.sleep(1)
        "alive"
        """.replace("stranger_pid", str(kernel.value("stranger.pid")))
    )
    assert kernel.value("[res.values, stranger.poll(), os.getpid() == kernel]") == [["alive"] * 2, None, True]
    expired = kernel.value("[each.name for each in res.events].count('timer expired')")
    assert expired == 2
    kernel.ok("stranger.kill(); stranger.wait();")


def test_the_notebook_goes_on_after_a_rank_of_its_own_was_killed(kernel):
    error = kernel.fails(
        f"""
        %%distributed -n 2 --env {SWITCH}=1
        import os, time
        from torch.distributed.elastic import timer
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        if rank == 1:
            with timer.expires(after=0.3, scope="step 7"):
                time.sleep(60)
        time.sleep(60)
        """
    )
    assert error.ename == "RunFailedError"
    assert "rank 1 of 2 failed: was killed by SIGKILL: scope 'step 7' was not left" in error.evalue
    assert kernel.value("1 + 1") == 2


@pytest.mark.parametrize("used", [True, False])
def test_a_watchdog_leaves_no_thread(used, eventually):
    import threading

    def timed():
        from torch.distributed.elastic import timer

        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        if used:
            with timer.expires(after=30):
                pass

    result = nblaunch.run(timed, nproc=2, env={SWITCH: "1"})
    assert result.ok
    eventually(
        lambda: not [each for each in threading.enumerate() if "watchdog" in each.name], "none is left"
    )
