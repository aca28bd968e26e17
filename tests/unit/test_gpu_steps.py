"""Whether GPU ranks that were interrupted are in a long step or stuck, told from what they say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nblaunch.diagnose.failures import explain, explain_exit
from nblaunch.diagnose.hang import report
from nblaunch.group.ending import Interruption, Steps
from nblaunch.protocol.messages import Collective, FailureRecord, FreeCollective, Where
from nblaunch.protocol.state import RunState, State

GRACE = 5.0


class Looks:
    """Looks at the same ranks, one time after the other."""

    def __init__(self) -> None:
        self.steps = Steps()

    def stuck(self, given: dict[int, Where], state: RunState, now: float, grace: float) -> bool:
        self.steps = self.steps.after(given, now)
        return self.steps.stuck(given, state, now, grace)


def state_of(size: int, *ended: int) -> RunState:
    fresh = RunState.fresh(size)
    ranks = {
        rank: replace(known, node="here", state=State.STOPPED if rank in ended else State.RUNNING)
        for rank, known in fresh.ranks.items()
    }
    return replace(fresh, ranks=ranks)


def reduce(
    sequence: int, *, group: str = "default_pg", ranks: tuple[int, ...] = (), size: int = 2
) -> Collective:
    return Collective(
        group=group, sequence=sequence, operation="all_reduce", sizes=((size,),), backend="nccl", ranks=ranks
    )


def where(rank: int, *begun: Collective, done: int = 0) -> Where:
    return Where(
        rank=rank,
        frames=(),
        collectives=begun[-1:],
        recent=begun,
        pending=len(begun),
        inside=bool(begun),
        nccl=True,
        done=(done,),
    )


def answers(*given: Where) -> dict[int, Where]:
    return {each.rank: each for each in given}


def test_a_collective_that_all_ranks_are_in_is_a_long_step():
    steps, given = Looks(), answers(where(0, reduce(7)), where(1, reduce(7)))
    assert not any(steps.stuck(given, state_of(2), now, GRACE) for now in range(25))
    assert steps.stuck(given, state_of(2), 31, GRACE), "a GPU that is gone never ends it"


def test_a_collective_that_a_broken_gpu_has_begun_is_stuck_at_once():
    given = answers(
        where(0, reduce(7)), replace(where(1, reduce(7)), broken="CUDA error: device-side assert")
    )
    assert Looks().stuck(given, state_of(2, 1), 0, GRACE)


def test_progress_gives_it_more_time():
    steps = Looks()
    for now in range(100):
        given = answers(where(0, reduce(now), done=now), where(1, reduce(now), done=now))
        assert not steps.stuck(given, state_of(2), now, GRACE)


def test_a_rank_ahead_by_some_collectives_waits_for_those_under_way():
    steps, given = Looks(), answers(where(0, reduce(7), reduce(8), reduce(9)), where(1, reduce(7)))
    assert not any(steps.stuck(given, state_of(2), now, GRACE) for now in range(25))


def test_a_rank_whose_peer_has_ended_its_job_is_stuck_at_once():
    assert Looks().stuck(answers(where(0, reduce(8)), where(1)), state_of(2, 1), 0, GRACE)


def test_parts_of_the_ranks_are_looked_at_each_by_itself():
    left, right = (0, 1), (2, 3)
    given = answers(
        *(where(rank, reduce(5, group="mesh", ranks=left)) for rank in left),
        *(where(rank, reduce(9, group="mesh", ranks=right)) for rank in right),
    )
    steps = Looks()
    assert not any(steps.stuck(given, state_of(4), now, GRACE) for now in range(25))


def test_ranks_in_collectives_that_do_not_match_are_stuck_once_nothing_moves():
    steps, given = Looks(), answers(where(0, reduce(7)), where(1, reduce(3, group="1", ranks=(0, 1))))
    assert not steps.stuck(given, state_of(2), 0, GRACE), "one look says nothing"
    assert steps.stuck(given, state_of(2), 0.3, GRACE)


def test_a_rank_that_computes_is_waited_for_until_it_sees_the_interrupt():
    steps, given = Looks(), answers(where(0, reduce(7)), where(1))
    assert not any(steps.stuck(given, state_of(2), tenths / 10, GRACE) for tenths in range(24))
    assert steps.stuck(given, state_of(2), 3, GRACE)


def test_an_abort_goes_to_all_ranks_once():
    state = state_of(3, 1)
    interruption, sent = Interruption().begin(state_of(3), 0.0)
    for tenths in range(3, 20):
        interruption, sends = interruption.tick(state, state, tenths / 10, GRACE)
        sent += sends
        for each in (where(0, reduce(8)), where(1), where(2)):
            interruption, sends = interruption.answered(each, state, tenths / 10, GRACE)
            sent += sends
    assert sorted(each.rank for each in sent if isinstance(each.message, FreeCollective)) == [0, 1, 2]
    assert interruption.cut
    assert interruption.unfreed(interruption.waited_for[0] + 100) == (0, 2)


def test_a_member_that_has_begun_nothing_in_a_group_is_named():
    told = report(answers(where(0, reduce(1, group="2", ranks=(0, 1))), where(1), where(2))).findings
    assert told == ("rank 0 is in all_reduce #1 of group 2, which rank 1 has not started",)


WATCHDOG = """
[rank0]:[E1122 07:17:36.152124104 ProcessGroupNCCL.cpp:730] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=4000) ran for 4100 \
milliseconds before timing out.
[rank0]:[E1122 07:17:42.542 ProcessGroupNCCL.cpp:2180] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group \
watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation timeout: Work...
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f4b17763bfd in /site-packages/torch/lib/libc10.so)
"""
WATCHDOG_OF_NCCL2 = """
[rank0]:[E1126 00:10:44.941749017 WorkNCCL.cpp:372] [TC][rank=0][name=0] Operation timed out after 3973 ms
[rank0]:[E1126 00:10:59.972663640 ProcessGroupNCCL.cpp:638] [TC][rank=0][name=0] Aborting process on rank 0 \
due to timeout - timeout watchdog detected operation timeout
"""
POISONED = """
[rank0]:[E1122 ProcessGroupNCCL.cpp:2180] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog \
thread terminated with exception: CUDA error: an illegal memory access was encountered
"""


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (WATCHDOG, "NCCL's watchdog: ALLREDUCE #2 timed out after 4 s: not all ranks came to it"),
        (WATCHDOG_OF_NCCL2, "NCCL's watchdog: a collective timed out after 4 s: not all ranks came to it"),
        (POISONED, "NCCL's watchdog: CUDA error: an illegal memory access was encountered"),
    ],
    ids=["timeout", "timeout, torch 2.15", "context"],
)
def test_what_nccls_watchdog_said_is_the_reason(stderr, said):
    why = explain_exit(-6, "", {}, stderr=stderr)
    assert why.reason == f"was killed by SIGABRT ({said})"
    assert stderr.strip().splitlines()[0][:80] in why.details
    assert "NCCL" not in explain_exit(-6, "", {}, stderr="something else").reason


def died(stderr: str, when: float) -> FailureRecord:
    reason = explain_exit(-6, "", {}, stderr=stderr).reason
    return FailureRecord(type="ProcessExited", message=reason, exitcode=-6, time=when)


def test_a_rank_whose_collective_timed_out_is_a_consequence_and_one_with_a_broken_gpu_is_not():
    mistake = FailureRecord(type="builtins.ValueError", message="too late", time=2.0)
    told = [(each.rank, each.consequence_of) for each in explain({0: died(WATCHDOG, 1.0), 1: mistake})]
    assert told == [(1, None), (0, 1)]
    told = [
        (each.rank, each.consequence_of) for each in explain({0: died(WATCHDOG, 1.0), 1: died(POISONED, 2.0)})
    ]
    assert told == [(1, None), (0, 1)]
    assert [each.consequence_of for each in explain({0: died(WATCHDOG, 1.0)})] == [None]
