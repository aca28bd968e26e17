"""However a rank ends, the run ends, quickly, names that rank and why, and the next run works."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from chaos import Failed, failing, must_work, on_ranks, soon, usual
from lanes import sampled

import nblaunch

SIZES = pytest.mark.parametrize("nproc", sampled([2, 4], ci=1))


def ended_quickly(failed: Failed, nproc: int, waited: float = 0.0) -> None:
    assert soon(failed.seconds, nproc, waited)


# --- a rank that raises ----------------------------------------------------------------------------


def fail():
    raise LookupError("nothing there")


@SIZES
def test_one_rank_raises_while_the_others_sit_in_all_reduce(nproc):
    rank = nproc - 1
    failed = failing(on_ranks({rank}, fail), nproc)
    ended_quickly(failed, nproc)
    assert (failed.root.rank, failed.root.reason.partition(" (")[0]) == (rank, "LookupError: nothing there")
    assert (failed.root.exitcode, failed.root.signal, failed.root.phase) == (1, None, "job")
    assert failed.root.last_output == f"rank {rank} goes on"
    failed.others_are_explained()
    assert str(failed.error).startswith(f"rank {rank} of {nproc} failed: LookupError: nothing there")
    assert "ended because of that" in str(failed.error)
    must_work(nproc)


@SIZES
def test_all_ranks_raise_and_none_is_the_consequence_of_another(nproc):
    failed = failing(on_ranks(range(nproc), fail), nproc)
    ended_quickly(failed, nproc)
    assert sorted(each.rank for each in failed.result.failures) == list(range(nproc))
    assert [each.consequence_of for each in failed.result.failures] == [None] * nproc
    times = [each.time for each in failed.result.failures]
    assert times == sorted(times)
    assert failed.root.time == times[0]
    assert str(failed.error).startswith(f"ranks 0-{nproc - 1} of {nproc} failed: LookupError")
    assert {each.state for each in failed.result.ranks} == {"FAILED"}
    must_work(nproc)


@SIZES
def test_of_two_causes_the_first_in_time_is_the_root_cause(nproc):
    """Also where the agent, which asks the ranks in their order, sees the later one first."""

    def job():
        from torch import distributed

        rank = int(os.environ["RANK"])
        distributed.barrier()
        if rank == 1:
            raise ValueError("first")
        # Rank 0 fails for a reason of its own, within the time that others have for their last words.
        time.sleep(0.03)
        if rank == 0:
            raise TypeError("second")
        distributed.barrier()

    failed = failing(job, nproc)
    ended_quickly(failed, nproc)
    assert (failed.root.rank, failed.root.message) == (1, "first")
    told = {each.rank: each.consequence_of for each in failed.result.failures}
    assert told.get(0) is None
    must_work(nproc)


# --- a rank that exits or dies ---------------------------------------------------------------------


@SIZES
def test_who_waits_for_a_rank_that_has_ended_well_is_told_so(nproc):
    """That a rank returns early is not a failure by itself."""
    failed = failing(on_ranks({1}, sys.exit), nproc, timeout=usual(nproc) + 1)
    assert isinstance(failed.error, nblaunch.RunTimeoutError)
    report = failed.error.hang_report
    assert report is not None
    assert report.finished == (1,)
    assert "[rank 1] had finished" in str(failed.error)
    assert failed.result.ranks[1].state == "SUCCEEDED"
    assert {each.state for each in failed.result.ranks if each.rank != 1} == {"STOPPED"}
    must_work(nproc)


def kill_itself_with(number):
    return lambda: os.kill(os.getpid(), number)


def read_a_null_pointer():
    ctypes.string_at(0)


def read_behind_the_end_of_a_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        view = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        return view[0]


def abort():
    os.abort()


DEATHS = {
    "os._exit(0)": (lambda: os._exit(0), 0, None, "ended with exit code 0 but returned no value", ""),
    "SIGKILL": (kill_itself_with(signal.SIGKILL), -9, "SIGKILL", "was killed by SIGKILL (", "in use"),
    "SIGSEGV": (read_a_null_pointer, -11, "SIGSEGV", "was killed by SIGSEGV", "in read_a_null_pointer"),
    "SIGTERM": (kill_itself_with(signal.SIGTERM), -15, "SIGTERM", "was killed by SIGTERM", ""),
    "SIGABRT": (abort, -6, "SIGABRT", "was killed by SIGABRT", "in abort"),
    "SIGBUS": (
        read_behind_the_end_of_a_file,
        -7,
        "SIGBUS",
        "was killed by SIGBUS (a mapped file was cut short",
        "shared memory (/dev/shm) has",
    ),
}


@pytest.mark.quick
@SIZES
@pytest.mark.parametrize("death", sampled(DEATHS, 1))
def test_a_rank_that_dies_while_the_others_sit_in_all_reduce(nproc, death):
    action, exitcode, name, reason, details = DEATHS[death]
    failed = failing(on_ranks({1}, action), nproc)
    ended_quickly(failed, nproc)
    root = failed.root
    assert (root.rank, root.exitcode, root.signal, root.exception) == (1, exitcode, name, None)
    assert root.reason.startswith(reason)
    assert details in root.traceback
    assert "nblaunch/" not in root.traceback
    assert root.last_output.endswith("rank 1 goes on")
    assert "rank 1 goes on" in str(failed.error)
    assert (failed.result.ranks[1].state, failed.result.ranks[1].exitcode) == ("FAILED", exitcode)
    failed.others_are_explained()
    must_work(nproc)


@SIZES
def test_the_death_of_a_rank_is_known_at_once(nproc):
    """Half a second, or what a busy machine needs for several whole runs."""

    def die():
        print(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    failed = failing(on_ranks({nproc - 1}, die), nproc)
    died = float(failed.root.last_output.splitlines()[-1])
    assert failed.root.time - died < max(0.5, 3 * usual(nproc))


# --- a rank that resists ---------------------------------------------------------------------------


def resist():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


@SIZES
def test_a_rank_that_ignores_sigterm_and_sigint_goes_after_the_grace_period(nproc):
    grace = 0.5

    def job():
        from torch import distributed

        # Meet first, so that all have their handlers when one of them fails.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        distributed.barrier()
        if os.environ["RANK"] == "0":
            raise LookupError("nothing there")
        resist()

    failed = failing(job, nproc, grace=grace)
    ended_quickly(failed, nproc, waited=grace)
    assert failed.seconds >= grace
    assert failed.root.rank == 0
    failed.others_are_explained()
    others = [(each.state, each.exitcode) for each in failed.result.ranks][1:]
    assert others == [("STOPPED", -9)] * (nproc - 1)
    must_work(nproc)


def grow_a_tree(size):
    """Start processes, half of them in sessions of their own, and a grandchild that nobody waits for."""
    sleep = ["sleep", "1000"]
    children = [subprocess.Popen(sleep, start_new_session=bool(number % 2)) for number in range(size - 2)]
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(1000)
    deadline = time.monotonic() + 60
    while len(psutil.Process().children(recursive=True)) < size:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print(*(each.pid for each in psutil.Process().children(recursive=True)))
    return children


@pytest.mark.parametrize("size", [20, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
@pytest.mark.parametrize(
    "end", sampled(["is killed", "returns", "resists while its peer raises", "raises"], ci=2)
)
def test_the_processes_of_a_rank_go_with_it(size, end, eventually):
    """The fixture looks for them as well; here they are known by name."""

    def job():
        from torch import distributed

        if os.environ["RANK"] == "1":
            grow_a_tree(size)
        distributed.barrier()
        if os.environ["RANK"] == "1":
            match end:
                case "raises":
                    fail()
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "resists while its peer raises":
                    resist()
        elif end.endswith("its peer raises"):
            fail()

    usual(2)
    started = time.monotonic()
    result = nblaunch.run(job, nproc=2, check=False, grace=0.2)
    seconds = time.monotonic() - started
    assert result.ok is (end == "returns")
    pids = [int(word) for word in result.ranks[1].stdout.splitlines()[-1].split()]
    assert len(pids) == size
    # Ranks that have succeeded leave while the user goes on.
    if end != "returns":
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "the processes of a rank have gone with it")
    assert soon(seconds, 2, waited=size / 5)
    must_work(2)


@SIZES
def test_a_rank_that_eats_all_its_memory_raises_and_says_where(nproc):
    def eat():
        limit = psutil.Process().memory_info().vms + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        eaten = []
        while True:
            eaten.append(bytearray(16 << 20))  # this line

    failed = failing(on_ranks({1}, eat), nproc)
    ended_quickly(failed, nproc)
    assert (failed.root.rank, failed.root.type) == (1, "builtins.MemoryError")
    assert failed.root.frame is not None
    assert failed.root.frame.source.endswith("# this line")
    failed.others_are_explained()
    must_work(nproc)


def test_a_rank_whose_processor_time_is_used_up_is_killed_by_the_system():
    """A limit that comes as a signal: SIGXCPU, which has no handler."""

    def burn():
        used = int(sum(os.times()[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (used + 1, used + 5))
        while True:
            pass

    failed = failing(on_ranks({1}, burn), 2)
    assert (failed.root.rank, failed.root.signal) == (1, "SIGXCPU")
    failed.others_are_explained()


# --- the same through a notebook -------------------------------------------------------------------

IN_A_CELL = {
    "raise": ("raise LookupError('nothing there')", "LookupError: nothing there (cell line 6)"),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
}


@pytest.mark.parametrize("death", IN_A_CELL)
def test_a_cell_whose_rank_fails_ends_with_the_reason_and_the_next_cell_works(kernel, death):
    statement, reason = IN_A_CELL[death]
    kernel.ok("import torch, torch.distributed as dist")
    error = kernel.fails(
        f"%%distributed -n 4 --out res\nprint('rank', rank)\ndist.barrier()\nif rank == 2:\n    pass\n"
        f"    {statement}\ndist.all_reduce(torch.ones(1))"
    )
    assert error.ename == "RunFailedError"
    assert error.evalue.startswith(f"rank 2 of 4 failed: {reason}")
    assert kernel.value("[res.root_cause.rank, res.root_cause.last_output]") == [2, "rank 2"]
    assert kernel.value("sorted({str(each.state) for each in res.ranks if each.rank != 2})") in (
        ["STOPPED"],
        ["FAILED", "STOPPED"],
        ["FAILED"],
    )
    assert kernel.value("[each.consequence_of for each in res.failures][:1]") == [None]
    assert kernel.value("{each.consequence_of for each in res.failures[1:]} <= {2}") is True
    if death == "SIGSEGV":
        assert "line 6, in <module>" in kernel.value("res.root_cause.traceback")
    assert kernel.ok("%%distributed -n 4 --out res\nrank").error is None
    assert kernel.value("res.values") == [0, 1, 2, 3]
