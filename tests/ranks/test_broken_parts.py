"""When a part of nblaunch itself breaks, the run ends with an error that names it, and the next run works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import disks
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


def failing_without_a_cause(job, nproc, error):
    started = time.monotonic()
    with pytest.raises(error) as caught:
        nblaunch.run(job, nproc=nproc)
    assert soon(time.monotonic() - started, nproc)
    return caught.value


# --- the fork server and its keeper ----------------------------------------------------------------


@pytest.mark.slow
@SIZES
def test_all_ranks_are_lost_with_the_fork_server(nproc, tmp_path):
    must_work(nproc)
    usual(nproc)
    thread = strike(tmp_path, nproc, fork_server().kill)
    failed = failing(waiting(tmp_path), nproc)
    thread.join()
    assert soon(failed.seconds, nproc)
    assert str(failed.error).startswith(
        f"ranks 0-{nproc - 1} of {nproc} failed: was lost with the fork server, which all ranks are forks of"
    )
    assert [each.state for each in failed.result.ranks] == ["FAILED"] * nproc
    assert {each.signal for each in failed.result.failures} == {"SIGKILL"}
    assert [each.stdout for each in failed.result.ranks] == ["begun\n"] * nproc
    # The next one has to be started; that takes as long as the first.
    must_work(nproc)


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


# --- a full disk -----------------------------------------------------------------------------------

FULL_DISK = """
import json, os, shutil, sys, time
import nblaunch, torch

def fill():
    descriptor = os.open(os.path.join(os.environ["TMPDIR"], "full"), os.O_CREAT | os.O_WRONLY)
    for size in (4096, 1):
        try:
            while os.write(descriptor, b"x" * size):
                pass
        except OSError:
            pass
    os.close(descriptor)

def prints():
    print("x" * 200_000)    # more room than anything else here can give back meanwhile

def silent(tensor):
    return tensor + 1

def attempt(job, *arguments):
    started = time.monotonic()
    try:
        result = nblaunch.run(job, args=arguments, nproc=2)
        outcome = [[len(str(value)) for value in result.values], list(result.warnings)]
    except nblaunch.NblaunchError as error:
        outcome = f"{type(error).__name__}: {error}"
    return outcome, time.monotonic() - started

outcomes = {}
fill()
outcomes["first"] = attempt(prints)
outcomes["full"] = attempt(prints)
outcomes["silent"] = attempt(silent, torch.zeros(1_000_000))
os.unlink(os.path.join(os.environ["TMPDIR"], "full"))
outcomes["again"] = attempt(prints)
print(json.dumps(outcomes))
"""


@pytest.fixture
def on_a_tiny_disk(tmp_path):
    """Give a function that runs a program whose TMPDIR is a file system of one megabyte."""
    disks.need_mounts_of_its_own()
    # A short path: one that is too long for a socket is replaced by a directory elsewhere.
    disk = Path(tempfile.mkdtemp(prefix="d-"))

    def run(source):
        (tmp_path / "program.py").write_text(textwrap.dedent(source))
        command = (
            'mount -t tmpfs -o size=1m none "$TMPDIR" && "$@"; code=$?; ls "$TMPDIR" >&2; '
            'umount -l "$TMPDIR"; exit $code'
        )
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", command, "sh", sys.executable, "program.py"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(disk), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    yield run
    disk.rmdir()


NONE, ONES = len("None"), len("tensor([1., 1., 1.,  ..., 1., 1., 1.])")


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_beginning_is_passed_over(on_a_tiny_disk):
    done = on_a_tiny_disk(FULL_DISK)
    assert done.returncode == 0, done.stderr
    outcomes = {name: outcome for name, ((outcome, _), _) in json.loads(done.stdout).items()}
    assert outcomes == {"first": [NONE] * 2, "full": [NONE] * 2, "silent": [ONES] * 2, "again": [NONE] * 2}
    assert done.stderr == ""
