"""NCCL collectives that hang: who waits for whom, what the watchdog said, and what becomes of the run."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import nblaunch

pytestmark = pytest.mark.gpu(2, shared=True)

FINDING = "rank 0 is in all_reduce #2, which rank 1 has not started"
LEFT_OPEN = "the run ended with a collective open, which was aborted: "


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Have torch imported where ranks are forked from: the tests' limits are for what comes after."""
    nblaunch.run(os.getpid, nproc=1)


def one_too_many_and_wait() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(one)
        one.item()
    elif rank == 1:
        time.sleep(1000)


def test_a_timeout_says_who_waits_for_whom():
    with pytest.raises(nblaunch.RunTimeoutError, match=FINDING) as caught:
        nblaunch.run(one_too_many_and_wait, nproc=2, timeout=3)
    assert caught.value.hang_report.findings == (FINDING,)


def test_hang_after_says_it_while_the_run_goes_on():
    with pytest.raises(nblaunch.RunTimeoutError) as caught:
        nblaunch.run(one_too_many_and_wait, nproc=2, timeout=5, hang_after=1)
    (said,) = [each for each in caught.value.result.warnings if "nothing heard for 1 s" in each]
    assert FINDING in said


# NCCL 2.22 and later connects ranks in the first collective, or transfer, of its kind: that call waits for
# the peers, on the CPU, and is not recorded by then. So each test has one of these end first.


def two_orders() -> None:
    import torch.distributed as dist

    rank, one = dist.get_rank(), torch.ones(1, device="cuda")
    left, right = (dist.new_group(group_desc=name) for name in ("left", "right"))
    for group in (left, right):
        dist.all_reduce(one, group=group)
    torch.cuda.synchronize()
    for group in (left, right) if rank == 0 else (right, left):
        dist.all_reduce(one, group=group)
    one.item()


def receive_from_each_other() -> None:
    import torch.distributed as dist

    rank, one = dist.get_rank(), torch.ones(1, device="cuda")
    for sender in range(2):
        dist.send(one, 1 - rank) if rank == sender else dist.recv(one, 1 - rank)
    torch.cuda.synchronize()
    dist.recv(one, src=1 - rank)
    one.item()


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (
            two_orders,
            "deadlock: rank 0 is in all_reduce #2 of left and waits for rank 1; rank 1 is in all_reduce #2",
        ),
        (receive_from_each_other, "deadlock: ranks 0-1 are in recv and wait for each other. "),
    ],
    ids=["groups", "receives"],
)
def test_a_deadlock_is_named_though_both_ranks_have_queued_everything(job, says):
    with pytest.raises(nblaunch.RunTimeoutError) as caught:
        nblaunch.run(job, nproc=2, timeout=6)
    (finding,) = caught.value.hang_report.findings
    assert finding.startswith(says)


def gloo_and_nccl() -> None:
    import torch.distributed as dist

    on_gpu, on_cpu = torch.ones(1, device="cuda"), torch.ones(1)
    for _ in range(3):
        dist.all_reduce(on_cpu)
    dist.all_reduce(on_gpu)
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        dist.all_reduce(on_gpu)
    time.sleep(1000)


def test_collectives_of_gloo_and_of_nccl_are_counted_apart():
    with pytest.raises(nblaunch.RunTimeoutError) as caught:
        nblaunch.run(gloo_and_nccl, nproc=2, timeout=3)
    assert caught.value.hang_report.findings == (FINDING,)


def one_too_many() -> int:
    import torch.distributed as dist

    for _ in range(2 - dist.get_rank()):
        dist.all_reduce(torch.ones(1, device="cuda"))
    return dist.get_rank()


def test_a_run_that_leaves_a_collective_open_says_so_and_holds_up_nobody():
    result = nblaunch.run(one_too_many, nproc=2)
    assert result.values == [0, 1]
    assert result.warnings == (f"{LEFT_OPEN}rank 0 is in all_reduce #2, which rank 1 has not started",)
    started = time.monotonic()
    assert nblaunch.run(os.getpid, nproc=2).ok
    assert time.monotonic() - started < 4, "torch would wait for the collective's end"


def still_at_work() -> int:
    import torch.distributed as dist

    one = torch.ones(1, device="cuda")
    torch.cuda._sleep(300_000_000)
    dist.all_reduce(one)
    return dist.get_rank()


def test_a_run_that_ends_while_its_gpus_are_at_work_is_in_order():
    result = nblaunch.run(still_at_work, nproc=2)
    assert (result.values, result.warnings) == ([0, 1], ())


def mistake_after_a_collective() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("before its collective")
    dist.all_reduce(torch.ones(1, device="cuda"))


def test_ranks_of_a_run_that_failed_wait_for_no_collective():
    started = time.monotonic()
    result = nblaunch.run(mistake_after_a_collective, nproc=2, check=False)
    assert result.root_cause.rank == 1
    assert nblaunch.run(os.getpid, nproc=2).ok
    assert time.monotonic() - started < 8


def note_how_it_ends(directory: str) -> None:
    import signal

    import torch.distributed as dist

    def end(*_: object) -> None:
        Path(directory, str(dist_rank)).write_text(f"group {dist.is_initialized()}")
        os._exit(1)

    dist_rank = dist.get_rank()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    one = torch.ones(1, device="cuda")
    for _ in range(2 - dist_rank):
        dist.all_reduce(one)
    while True:
        time.sleep(0.01)


def test_all_ranks_let_go_of_nccl_before_the_first_is_killed(tmp_path):
    with pytest.raises(nblaunch.RunTimeoutError):
        nblaunch.run(note_how_it_ends, args=(str(tmp_path),), nproc=2, timeout=3, grace=2)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == {"0": "group False", "1": "group False"}


# --- NCCL's watchdog -------------------------------------------------------------------------------

WATCHDOG = {
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "3",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "300",
    "TORCH_NCCL_COORD_CHECK_MILSEC": "100",
}


def time_out_once() -> tuple[str, int]:
    from datetime import timedelta

    import torch.distributed as dist

    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    if attempt == 0:
        if rank == 0:
            dist.all_reduce(one)
        time.sleep(1000)
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        time.sleep(0.2)
        dist.all_reduce(one)
        torch.cuda.synchronize()
    return "attempt", attempt


def test_an_attempt_outlives_the_nccl_timeout_of_the_one_before(tmp_path):
    env = {**WATCHDOG, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    result = nblaunch.run(time_out_once, nproc=2, max_restarts=1, env=env, log_dir=tmp_path / "logs")
    assert result.values == [("attempt", 1)] * 2
    (failure,) = result.attempts[0].failures
    assert failure.rank == 0
    # ProcessGroupNCCL2, torch 2.15's default, looks once a second, and names no operation.
    said = r"NCCL's watchdog: (ALLREDUCE #2|a collective) timed out after [12] s: not all ranks came to it"
    assert re.search(said, failure.reason), failure.reason
    assert "frame #" not in failure.last_output
    dumps = [path.name for path in (tmp_path / "logs").rglob("nccl_trace_rank_*")]
    assert "nccl_trace_rank_0" in dumps


LATER_THAN_NCCL_WAITS = """
import time
from datetime import timedelta
group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
one = torch.ones(1, device=device)
dist.all_reduce(one, group=group)
one.item()
if rank == 1:
    time.sleep(5)
dist.all_reduce(one, group=group)
one.item()
"""


@pytest.mark.parametrize("backend", ["nccl", "nccl-legacy"])
def test_nccls_own_time_limit_ends_no_rank_of_a_session(backend):
    """TORCH_NCCL_RETHROW_CUDA_ERRORS=0 silences timeouts, too (pytorch#196187): as a session wants it.

    nccl2, torch 2.15's default, does not heed it: there, groups have no limit of less than a day.
    """
    if backend != "nccl" and not dist.is_backend_available(backend):
        pytest.skip(f"this torch has no {backend}")
    total = "one = torch.ones(1, device=device)\ndist.all_reduce(one)\n(os.getpid(), kept, one.item())"
    with nblaunch.Session(2, backend=f"cpu:gloo,cuda:{backend}", env=WATCHDOG) as session:
        session.cell("import os, torch, torch.distributed as dist\nkept = rank")
        before = session.cell(total, namespace={}).values
        assert session.cell(LATER_THAN_NCCL_WAITS, namespace={}).values == [4.0, 4.0]
        assert session.cell(total, namespace={}).values == before


UNHEARD = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
SAID = "TORCH_NCCL_RETHROW_CUDA_ERRORS=0 a collective that times out is aborted, nobody is told"


@pytest.mark.parametrize(
    ("backend", "more", "told"),
    [
        ("nccl-legacy", {}, 2),
        # torch heeds it since 2.15.
        ("nccl-legacy", {"TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "1"}, 0 if torch.__version__ >= "2.15" else 2),
        ("nccl2", {}, 0),
    ],
    ids=["unheard", "torn down", "not heeded"],
)
def test_timeouts_that_nccl_would_keep_to_itself_are_warned_of(backend, more, told):
    if not dist.is_backend_available(backend):
        if backend == "nccl2":
            pytest.skip(f"this torch has no {backend}")
        backend = "nccl"
    result = nblaunch.run(os.getpid, nproc=2, backend=f"cpu:gloo,cuda:{backend}", env=UNHEARD | more)
    assert sum(SAID in each for each in result.warnings) == told


def test_a_session_in_which_the_user_has_nccl_handle_errors_hears_of_them():
    handled = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    with nblaunch.Session(2, env=handled) as session:
        result = session.cell("import os\nos.environ.get('TORCH_NCCL_RETHROW_CUDA_ERRORS')")
    assert (result.values, result.warnings) == ([None, None], ())
