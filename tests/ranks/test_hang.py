"""A run that hangs says who is where, in which collective, and who has not come."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from chaos import failing, must_work, on_ranks, soon, usual
from lanes import sampled
from torch import distributed

import nblaunch
from nblaunch import HangReport
from nblaunch.diagnose import hang
from nblaunch.group.ending import HangWatch
from nblaunch.protocol.messages import Collective, FrameRecord, Where

SIZES = pytest.mark.parametrize("nproc", sampled([2, 4], ci=1))


def line_of(comment):
    """Return the number of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}")]
    return number


def hanging(job, nproc, **options):
    """Run a job that hangs until its timeout; return the report and the error's text."""
    usual(nproc)
    seconds = 0.5 + 3 * usual(nproc)
    failed = failing(job, nproc, timeout=seconds, grace=1.0, **options)
    assert isinstance(failed.error, nblaunch.RunTimeoutError)
    report = failed.error.hang_report
    assert isinstance(report, HangReport)
    assert failed.seconds >= seconds
    # The ranks are asked for a second at most, and gone a second after they have been told to end.
    assert soon(failed.seconds, nproc, seconds + 1.0 + 1.0)
    assert failed.result.root_cause is None
    assert failed.result.hang_report is report
    return report, str(failed.error)


def by_ranks(report):
    return {group.ranks: group.headline for group in report.groups}


def others(nproc, *but):
    return tuple(rank for rank in range(nproc) if rank not in but)


def said(ranks):
    return nblaunch.protocol.reports.format_ranks(ranks)


# --- who is where ----------------------------------------------------------------------------------


def sleep_on_rank_1():
    one = torch.ones(1)
    distributed.all_reduce(one)
    if os.environ["RANK"] == "1":
        time.sleep(1000)  # the sleeper
    distributed.all_reduce(one)  # the others


@SIZES
def test_ranks_are_grouped_by_their_stacks_and_the_late_one_is_named(nproc):
    report, text = hanging(sleep_on_rank_1, nproc)
    waiting = others(nproc, 1)
    assert by_ranks(report) == {
        waiting: f"in all_reduce, {__file__}, line {line_of('the others')}: "
        "distributed.all_reduce(one)  # the others",
        (1,): f"at {__file__}, line {line_of('the sleeper')}: time.sleep(1000)  # the sleeper",
    }
    are = "is" if len(waiting) == 1 else "are"
    finding = f"{said(waiting)} {are} in all_reduce #2, which rank 1 has not started"
    assert report.findings == (finding,)
    assert finding in text
    assert f"[{said(waiting)}] in all_reduce" in text
    assert {rank: known[0].sequence for rank, known in report.collectives.items()} == {
        rank: 1 if rank == 1 else 2 for rank in range(nproc)
    }
    for group in report.groups:
        assert group.frames[0].function == "sleep_on_rank_1"
        assert not any("/nblaunch/" in frame.filename for frame in group.frames)
    assert str(report).count("in sleep_on_rank_1\n") == 2
    must_work(nproc)


def receive_from_each_other():
    rank = int(os.environ["RANK"])
    if rank < 2:
        distributed.recv(torch.ones(1), src=1 - rank)  # the deadlock
    return "not one of the two"


@SIZES
def test_two_ranks_that_wait_for_each_other_are_one_group(nproc):
    report, _ = hanging(receive_from_each_other, nproc)
    (group,) = report.groups
    assert group.ranks == (0, 1)
    assert group.headline.startswith(f"in recv, {__file__}, line {line_of('the deadlock')}: distributed.recv")
    assert report.finished == others(nproc, 0, 1)
    assert ("had finished" in str(report)) is (nproc > 2)
    must_work(nproc)


def work_in_a_group():
    rank = int(os.environ["RANK"])
    pair = distributed.new_group([0, 1])
    if rank < 2:
        distributed.all_reduce(torch.ones(1), group=pair)
    if rank == 0:
        time.sleep(1000)
    if rank == 1:
        distributed.all_reduce(torch.ones(1), group=pair)


def test_a_group_of_the_programs_own_is_told_from_the_default_group():
    report, _ = hanging(work_in_a_group, 4)
    assert report.finished == (2, 3)
    assert any(
        finding.startswith("rank 1 is in all_reduce #2 of group ")
        and finding.endswith("rank 0 has not started")
        for finding in report.findings
    )


# --- collectives that do not match -----------------------------------------------------------------


def differ_in_operation():
    one = torch.ones(2)
    distributed.barrier()
    if os.environ["RANK"] == "0":
        distributed.broadcast(one, 0)
    else:
        distributed.all_reduce(one)
    distributed.barrier()


def differ_in_dtype():
    # As many bytes, so gloo does not notice: the sums are wrong, and the ranks hang somewhere else.
    distributed.barrier()
    dtype = torch.float32 if os.environ["RANK"] == "0" else torch.int32
    distributed.all_reduce(torch.ones(2, dtype=dtype))
    if os.environ["RANK"] == "0":
        time.sleep(1000)
    distributed.barrier()


@SIZES
@pytest.mark.parametrize(
    ("job", "what", "first", "second"),
    [
        (differ_in_operation, "operation", "broadcast", "all_reduce"),
        (differ_in_dtype, "dtype", "Float", "Int"),
    ],
    ids=["operation", "dtype"],
)
def test_a_collective_in_which_the_ranks_differ_is_named(nproc, job, what, first, second):
    report, text = hanging(job, nproc)
    finding = f"collective #2 differs in {what}: rank 0: {first}; {said(others(nproc, 0))}: {second}"
    assert report.findings[0] == finding
    assert finding in text
    must_work(nproc)


def end_gloo_itself():
    dtype = torch.float32 if os.environ["RANK"] == "0" else torch.float64
    distributed.all_reduce(torch.ones(2, dtype=dtype))


@SIZES
def test_a_difference_that_ends_a_rank_is_explained_by_its_last_output(nproc):
    """Gloo ends the process that receives more than it expects."""
    failed = failing(end_gloo_itself, nproc)
    assert failed.root.signal == "SIGABRT"
    assert "EnforceNotMet" in failed.root.last_output
    assert "EnforceNotMet" in str(failed.error)
    failed.others_are_explained()
    must_work(nproc)


# --- ranks that do not answer ----------------------------------------------------------------------


def hold_the_interpreter():
    if os.environ["RANK"] == "1":
        ctypes.PyDLL(None).pause()  # the holder
    distributed.barrier()


def count_in_c():
    if os.environ["RANK"] == "1":
        sum(range(10**12))  # the counter
    distributed.barrier()


@SIZES
def test_a_rank_whose_interpreter_is_held_is_shown_by_faulthandler(nproc):
    report, text = hanging(count_in_c, nproc)
    assert list(report.silent) == [1]
    place = f'File "{__file__}", line {line_of("the counter")}, in count_in_c'
    assert report.silent[1].strip() == place
    assert "[rank 1] gave no answer" in text
    assert place in str(report)
    assert [group.ranks for group in report.groups] == [others(nproc, 1)]
    must_work(nproc)


@SIZES
def test_a_rank_that_is_stopped_is_told_and_ended(nproc):
    report, text = hanging(on_ranks({1}, lambda: os.kill(os.getpid(), signal.SIGSTOP)), nproc)
    assert report.silent == {1: "its process is stopped (SIGSTOP); kill -CONT would let it go on"}
    assert [group.ranks for group in report.groups] == [others(nproc, 1)]
    assert "[rank 1] gave no answer" in text
    must_work(nproc)


def test_a_rank_that_answers_while_its_stacks_are_read_is_in_the_report_once():
    """The signal that asks for them ends the call that held the interpreter."""
    report, _ = hanging(hold_the_interpreter, 2)
    told = [rank for group in report.groups for rank in group.ranks] + list(report.silent)
    assert sorted(told) == [0, 1]


# --- through a notebook ----------------------------------------------------------------------------


def test_a_cell_that_hangs_is_reported_in_lines_of_the_cell(kernel):
    kernel.ok("import time, torch, torch.distributed as dist")
    error = kernel.fails(
        """
        %%distributed -n 4 --timeout 3 --grace 0.5 --out res
        one = torch.ones(1)
        if rank == 1:
            time.sleep(1000)
        if rank == 2:
            sum(range(10**12))
        dist.all_reduce(one)
        """
    )
    assert error.ename == "RunTimeoutError"
    assert "[ranks 0,3] in all_reduce, cell line 7: dist.all_reduce(one)" in error.evalue
    assert "[rank 1] at cell line 4: time.sleep(1000)" in error.evalue
    assert "[rank 2] gave no answer" in error.evalue
    assert "ranks 0,3 are in all_reduce #1, which rank 1 has not started" in error.evalue
    assert kernel.value("sorted({str(each.state) for each in res.ranks})") == ["STOPPED"]


# --- without stopping ------------------------------------------------------------------------------


@SIZES
def test_hang_after_reports_once_and_lets_the_run_go_on(nproc, tmp_path, poke):
    flag = tmp_path / "reported"

    def job():
        distributed.barrier()
        while os.environ["RANK"] == "1" and not flag.exists():
            time.sleep(0.05)  # until it has been reported
        distributed.all_reduce(torch.ones(1))
        return "done"

    usual(nproc)
    poke(f"""
from pathlib import Path
from nblaunch.group.ending import HangWatch
original = HangWatch.hangs
def hangs(self, report, now):
    after, told = original(self, report, now)
    if told:
        Path({str(flag)!r}).touch()
    return after, told
HangWatch.hangs = hangs
""")
    result = nblaunch.run(job, nproc=nproc, hang_after=0.5)
    assert result.values == ["done"] * nproc
    (warning,) = result.warnings
    assert warning.startswith("nothing heard for 0.5 s\n")
    assert "in all_reduce #2, which rank 1 has not started" in warning
    assert "until it has been reported" in warning
    assert "until it has been reported" in str(result.hang_report)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("looks", "told"),
    [
        (
            [{1, 2}, {1, 2}, {2}, {2}],
            [1],
        ),  # as nccl2 (torch 2.15) has it: what has ended is open for a second
        ([{1}, {1}, {1}], [1]),
        ([{1}, {1}, {1, 2}, {1, 2}], [1, 3]),
        ([{1}, {2}, {3}], []),
    ],
)
def test_a_hang_is_told_once_also_where_less_of_it_is_left(looks, told):
    answers = iter(looks)

    watch = HangWatch(0.0)

    def hangs(look):
        nonlocal watch
        if not watch.due(float(look)):
            return False
        open_now = tuple(Collective("0", number, "all_reduce") for number in sorted(next(answers)))
        watch, hang = watch.hangs(HangReport((), {0: open_now}), float(look))
        return hang

    assert [look for look, _ in enumerate(looks) if hangs(look)] == told


def compute_for_long():
    distributed.barrier()  # from here on they are at the same place, whatever else the machine does
    ends = time.monotonic() + 2.0
    while time.monotonic() < ends:
        pass
    distributed.barrier()


def test_a_rank_that_only_computes_in_silence_is_no_hang():
    """All ranks do, and no collective is open."""
    result = nblaunch.run(compute_for_long, nproc=2, hang_after=0.6)
    assert result.ok
    assert result.warnings == ()


# --- the report itself -----------------------------------------------------------------------------


def where(rank, *collectives, line=1):
    frame = FrameRecord(filename="Cell In[1]", line=line, function="<module>", source="")
    return Where(rank=rank, frames=(frame,), collectives=collectives[-1:], recent=collectives)


def collective(sequence, operation="all_reduce", size: int | None = 2, *, completed=False):
    sizes = ((size,),) if size is not None else ()
    dtypes = ("Float",) if size is not None else ()
    return Collective(
        group="default_pg",
        sequence=sequence,
        operation=operation,
        sizes=sizes,
        dtypes=dtypes,
        completed=completed,
    )


def findings(*answers):
    return hang.report({answer.rank: answer for answer in answers}).findings


@pytest.mark.quick
def test_ranks_that_agree_and_wait_for_nobody_give_no_finding():
    assert findings(where(0, collective(3)), where(1, collective(3))) == ()
    assert findings(where(0, collective(3, completed=True)), where(1, collective(2, completed=True))) == ()
    assert findings(where(0), where(1)) == ()


@pytest.mark.quick
def test_only_the_first_difference_of_a_group_is_told():
    told = findings(
        where(0, collective(1), collective(2, size=1), collective(3, "broadcast")),
        where(1, collective(1), collective(2, size=5), collective(3, "barrier")),
    )
    assert told == ("collective #2 differs in shape: rank 0: [1]; rank 1: [5]",)


@pytest.mark.quick
@pytest.mark.parametrize("operation", ["scatter", "gather", "all_to_all", "_allgather_base"])
def test_operations_to_which_ranks_bring_different_tensors_may_differ(operation):
    told = findings(where(0, collective(1, operation)), where(1, collective(1, operation, size=None)))
    assert told == ()
