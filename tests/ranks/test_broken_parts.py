"""When a part of nblaunch itself breaks, the run ends with an error that names it, and the next run works."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest
from chaos import failing, must_work, soon, usual
from lanes import sampled

import nblaunch
from nblaunch.client.local import local

SIZES = pytest.mark.parametrize("nproc", sampled([2, 4], ci=1))


def waiting(flags):
    """Return a job that says that it has begun, and then waits for ever."""

    def job():
        print("begun", flush=True)
        (flags / os.environ["RANK"]).touch()
        time.sleep(1000)

    return job


def strike(flags, nproc, blow):
    """Do `blow` once all ranks have begun."""

    def wait_and_strike():
        while len(list(flags.iterdir())) < nproc:
            time.sleep(0.005)
        blow()

    thread = threading.Thread(target=wait_and_strike)
    thread.start()
    return thread


def keeper():
    return psutil.Process(local().runtime.keeper.pid)


def fork_server():
    (server,) = (each for each in keeper().children() if each.pid != local().runtime.welcome.pid)
    return server


# --- the fork server and its keeper ----------------------------------------------------------------


def test_a_run_with_a_restart_left_survives_the_fork_server(tmp_path):
    must_work(2)

    def job():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0:
            (tmp_path / os.environ["RANK"]).touch()
            time.sleep(1000)
        return attempt

    thread = strike(tmp_path, 2, fork_server().kill)
    result = nblaunch.run(job, nproc=2, max_restarts=1)
    thread.join()
    assert result.values == [1, 1]
    first = result.attempts[0]
    assert ["was lost with the fork server" in each.reason for each in first.failures] == [True, True]


# --- the agent's thread ----------------------------------------------------------------------------

BROKEN_AGENT = """
from nblaunch.host.agent import RankAgent

def broken(*_):
    raise ZeroDivisionError("injected")

"""


@pytest.mark.slow
@SIZES
def test_an_agent_that_raises_ends_its_ranks_and_says_what_it_raised(nproc, tmp_path, poke):
    usual(nproc)
    poke(BROKEN_AGENT)
    poke(f"""
from pathlib import Path
watched = RankAgent._monitor_workers
def break_once_all_have_begun(self, group):
    if len(list(Path({str(tmp_path)!r}).iterdir())) == {nproc}:
        raise ZeroDivisionError("injected")
    return watched(self, group)
RankAgent._monitor_workers = break_once_all_have_begun
""")
    started = time.monotonic()
    with pytest.raises(nblaunch.LaunchError) as caught:
        nblaunch.run(waiting(tmp_path), nproc=nproc)
    assert soon(time.monotonic() - started, nproc)
    assert str(caught.value) == "phase 'job' broke: ZeroDivisionError: injected"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    poke("RankAgent._monitor_workers = watched")
    must_work(nproc)


@pytest.mark.slow
def test_an_agent_that_cannot_even_start_its_ranks_says_so(poke):
    usual(2)
    poke(f"{BROKEN_AGENT}whole, RankAgent._start_workers = RankAgent._start_workers, broken")
    with pytest.raises(nblaunch.LaunchError, match="ZeroDivisionError: injected"):
        nblaunch.run(os.getpid, nproc=2)
    poke("RankAgent._start_workers = whole")
    must_work(2)


# --- a rank's end of it ----------------------------------------------------------------------------


@SIZES
def test_a_rank_that_loses_its_connection_is_a_failure(nproc):
    """Libraries that become a daemon close every descriptor; ZMQ then ends the process."""

    def job():
        if os.environ["RANK"] == "1":
            os.closerange(3, 1000)
            time.sleep(1000)

    failed = failing(job, nproc)
    assert failed.root.rank == 1
    assert failed.root.signal == "SIGABRT"
    must_work(nproc)


def test_a_thread_that_never_ends_does_not_keep_a_sessions_ranks_for_ever():
    """As long as the agent waits for ranks that have leave to end."""

    def job():
        threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()
        return "value"

    usual(2)
    session = nblaunch.Session(2, shutdown_timeout=1)
    assert session.run(job).values == ["value"] * 2
    started = time.monotonic()
    session.close()
    assert soon(time.monotonic() - started, 2, waited=1)
