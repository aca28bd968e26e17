"""Whose connections an interrupt cuts, and when, told from what the ranks say of themselves."""

from __future__ import annotations

from msgspec.structs import replace

from nblaunch.group.ending import Interruption
from nblaunch.group.machine import Sends
from nblaunch.protocol import messages as wire
from nblaunch.protocol.state import RunState, State

ONE, OTHER = ("127.0.0.1", 1), ("127.0.0.1", 2)


class Group:
    """Two ranks at work that have been interrupted; `after(seconds)` lets time go on."""

    def __init__(self) -> None:
        fresh = RunState.fresh(2)
        ranks = {
            rank: replace(known, node="here", state=State.RUNNING) for rank, known in fresh.ranks.items()
        }
        self.state = replace(fresh, ranks=ranks)
        self.sent: list[tuple[int, wire.ToRank]] = []
        self.answers: dict[int, wire.Where] = {}
        self.now = self.began = 1000.0
        self.take(Interruption().begin(self.state, self.now))

    def take(self, after: tuple[Interruption, Sends]) -> None:
        self.interruption, sends = after
        self.sent += [(each.rank, each.message) for each in sends]

    def seen(self, rank: int, *, handled: bool = True) -> None:
        number = [each.number for to, each in self.sent if to == rank and isinstance(each, wire.Interrupt)][
            -1
        ]
        seen = wire.InterruptSeen(rank=rank, number=number, handled=handled)
        self.interruption = self.interruption.seen(seen, self.now)

    def end(self, rank: int) -> None:
        ended = replace(self.state.ranks[rank], state=State.STOPPED)
        self.state = replace(self.state, ranks={**self.state.ranks, rank: ended})

    def after(self, seconds: float, *, grace: float = 100.0) -> None:
        self.now = self.began + seconds
        self.take(self.interruption.press(self.now, grace))
        self.take(self.interruption.tick(self.state, self.state, self.now, grace))
        for answer in self.answers.values():
            self.take(self.interruption.answered(answer, self.state, self.now, grace))

    def freed(self) -> list[int]:
        return [rank for rank, message in self.sent if isinstance(message, wire.FreeCollective)]


def where(rank: int, *begun: wire.Collective, inside: bool = False) -> wire.Where:
    ends = (ONE, OTHER) if rank == 0 else (OTHER, ONE)
    return wire.Where(
        rank=rank,
        frames=(),
        collectives=begun,
        connections=(wire.Connection(*ends, fd=10 + rank),),
        pending=len(begun),
        inside=inside,
    )


def reduce(sequence: int, *sizes: int) -> wire.Collective:
    return wire.Collective(group="default_pg", sequence=sequence, operation="all_reduce", sizes=(sizes,))


def test_a_rank_that_computes_is_left_alone():
    group = Group()
    group.answers = {0: where(0), 1: where(1)}
    for tenths in range(3, 100):
        group.after(tenths / 10)
    assert group.freed() == []
    assert set(group.interruption.waited_for) == {0, 1}


def test_a_rank_that_waits_in_a_collective_for_one_that_computes_is_freed_at_once():
    group = Group()
    group.answers = {0: where(0, inside=True), 1: where(1)}
    group.after(0.2)
    assert group.freed() == [], "Python code has the time to see it first"
    group.after(0.3)
    assert group.sent[-1] == (0, wire.FreeCollective(fds=(10,)))
    assert group.freed() == [0]
    assert group.interruption.cut


def test_a_collective_that_all_ranks_are_in_has_time_to_end():
    group = Group()
    group.answers = {0: where(0, reduce(7, 5)), 1: where(1, reduce(7, 5))}
    for tenths in range(3, 12):
        group.after(tenths / 10)
    assert group.freed() == []


def test_collectives_that_do_not_match_are_ended_at_once():
    group = Group()
    group.answers = {0: where(0, reduce(7, 5)), 1: where(1, reduce(7, 6))}
    group.after(0.3)
    assert sorted(group.freed()) == [0, 1]


def test_while_a_rank_handles_the_interrupt_nothing_is_cut_until_its_grace_period_is_over():
    group = Group()
    group.seen(0)
    group.answers = {0: where(0), 1: where(1, inside=True)}
    for tenths in range(3, 45):
        group.after(tenths / 10, grace=5)
    assert group.freed() == []
    group.after(5.5, grace=5)
    last = [message for rank, message in group.sent if rank == 0 and isinstance(message, wire.Interrupt)][-1]
    assert last.last
    group.after(6.0, grace=5)
    assert 1 in group.freed()


def test_a_rank_that_packs_its_value_or_ignores_the_signal_keeps_no_other_waiting():
    group = Group()
    group.seen(0, handled=False)
    group.answers = {0: where(0), 1: where(1, inside=True)}
    group.after(0.3)
    assert group.freed() == [1]


def test_once_that_rank_has_ended_the_other_is_freed():
    group = Group()
    group.seen(0)
    group.answers = {0: where(0), 1: where(1, inside=True)}
    group.after(0.3)
    assert group.freed() == []
    group.end(0)
    group.after(0.8)
    assert group.freed() == [1]


def test_a_rank_that_has_not_seen_the_interrupt_has_no_deadline():
    group = Group()
    group.seen(0)
    for seconds in range(1, 100):
        group.after(seconds, grace=1)
    assert group.interruption.deaf(group.began + 100) == ()
    group.seen(0)
    assert group.interruption.deaf(group.now + 1.0) == ()
    assert group.interruption.deaf(group.now + 3.0) == (0,)
