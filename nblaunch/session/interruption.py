"""Interrupting a job: KeyboardInterrupt in every rank, then freeing those stuck in a collective.

A rank in C code sees the interrupt when that ends, and is left alone until then. From the moment it has seen
it, it has the grace period to end its job: to save something, say, with collectives among the ranks. Only
then is it interrupted once more, for the last time. Everything here happens on the hub's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nblaunch._protocol import (
    Exited,
    FreeCollective,
    Interrupt,
    InterruptSeen,
    Message,
    Raised,
    ReportWhere,
    ToRank,
    Where,
)
from nblaunch._state import RunState
from nblaunch.diagnose.root_cause import blames_a_peer
from nblaunch.session.inquiry import Inquiry, between_ranks
from nblaunch.session.steps import Steps

# Python code answers an interrupt within milliseconds; a rank that does not is in C code.
_FREE_SECONDS = 0.25
# How often ranks in C code are looked at when there is nothing to free: a collective may begin in there.
_LOOK_SECONDS = 1.0
# A busy machine may take its time; a connection is found only if both of its ends are known.
_ANSWER_SECONDS = 2.0
# A large collective that all ranks are in ends by itself.
_IN_STEP_SECONDS = 2.0
# An abort takes NCCL a second or two, and a program may have many groups.
_ABORT_SECONDS = 15.0
# How long a rank may take to end after the last interrupt.
_LAST_SECONDS = 2.0


@dataclass(slots=True)
class _Interrupted:
    """A rank that has been interrupted and has not ended its job; times are monotonic."""

    number: int
    since: float
    seen: float | None = None
    handled: bool = True
    last: bool = False

    @property
    def handles_it(self) -> bool:
        """Whether it has seen the interrupt, and has time to do what it does then."""
        return self.seen is not None and self.handled and not self.last


class Interruption:
    """Asks ranks where they are, and interrupts them; `send(rank, message)` reaches one rank."""

    def __init__(self, send: Callable[[int, ToRank], None]) -> None:
        """Begin uninterrupted."""
        self.begun = False
        self.cut = False
        """Whether connections between ranks have been cut."""
        self.waited_for: Mapping[int, float] = {}
        """The ranks that have been interrupted and are still at work, and since when; for any thread."""
        self._send = send
        self._number = 0
        self._interrupted: dict[int, _Interrupted] = {}
        self._inquiries: list[Inquiry] = []
        self._look_at: float | None = None
        self._pause = _FREE_SECONDS
        self._look: tuple[Inquiry, float] | None = None
        self._silent: set[int] = set()
        self._steps = Steps()
        self._grace = 0.0
        self._aborted_at: float | None = None

    def reset(self) -> None:
        """Begin uninterrupted: another job."""
        self.begun = self.cut = False
        self._steps, self._aborted_at = Steps(), None
        self._interrupted, self.waited_for, self._silent = {}, {}, set()
        self._look_at = self._look = None

    @property
    def busy(self) -> bool:
        """Whether something is due."""
        return self._look_at is not None or self._look is not None or bool(self._interrupted)

    def ask(self, inquiry: Inquiry) -> None:
        """Ask every rank that `inquiry` expects an answer of."""
        self._inquiries.append(inquiry)
        for rank in list(inquiry.missing):
            self._send(rank, ReportWhere())

    def answered(self, answer: Where, state: RunState) -> None:
        """Take one rank's answer."""
        for inquiry in self._inquiries:
            inquiry.answer(answer)
        self._inquiries = [inquiry for inquiry in self._inquiries if not inquiry.complete.is_set()]
        self._free_stuck(state, time.monotonic())

    def begin(self, state: RunState) -> None:
        """Raise KeyboardInterrupt in every rank that has not ended its job."""
        self.begun = True
        now = time.monotonic()
        self._number += 1
        for rank in state.ranks.values():
            if not rank.state.final:
                before = self._interrupted.get(rank.rank)
                since = before.since if before is not None else now
                self._interrupted[rank.rank] = _Interrupted(self._number, since)
                self._send(rank.rank, Interrupt(self._number))
        self._note_whom()
        self._look_at, self._pause = now + _FREE_SECONDS, _FREE_SECONDS

    def seen(self, message: InterruptSeen) -> None:
        """Take note that a rank knows: its time begins."""
        known = self._interrupted.get(message.rank)
        if known is not None and known.number == message.number:
            known.seen, known.handled = time.monotonic(), message.handled

    def tick(self, state: RunState, members: RunState, now: float) -> None:
        """Do what is due; `state` is that of the job, `members` are all ranks of the group."""
        ended = [
            rank for rank in self._interrupted if rank not in state.ranks or state.ranks[rank].state.final
        ]
        for rank in ended:
            del self._interrupted[rank]
        if ended:
            self._note_whom()
        if not self._interrupted:
            self._look_at = None
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            # Also those that have finished, or take no part: a stuck rank may wait for one of these.
            inquiry = Inquiry(rank.rank for rank in members.ranks.values() if rank.node)
            self._look = (inquiry, now + _ANSWER_SECONDS)
            self.ask(inquiry)
        self._free_stuck(state, now)

    def press(self, now: float, grace: float) -> None:
        """Interrupt ranks for the last time that have seen the interrupt, and whose grace period is over."""
        self._grace = grace
        for rank, known in self._interrupted.items():
            if known.seen is not None and not known.last and now >= known.seen + grace:
                self._number += 1
                known.number, known.last, known.seen = self._number, True, None
                self._send(rank, Interrupt(self._number, last=True))
                if self._look is None:
                    self._look_at, self._pause = now, _FREE_SECONDS

    def deaf(self, now: float) -> tuple[int, ...]:
        """Return the ranks that have seen the last interrupt, and go on all the same."""
        return tuple(
            sorted(
                rank
                for rank, known in self._interrupted.items()
                if known.last and known.seen is not None and now >= known.seen + _LAST_SECONDS
            )
        )

    def unfreed(self, now: float) -> tuple[int, ...]:
        """Return the ranks that do not come back although NCCL was to abort what they wait for."""
        if self._aborted_at is None or now < self._aborted_at + _ABORT_SECONDS:
            return ()
        return tuple(sorted(rank for rank, known in self._interrupted.items() if known.seen is None))

    def _note_whom(self) -> None:
        self.waited_for = {rank: known.since for rank, known in self._interrupted.items()}

    def _free_stuck(self, state: RunState, now: float) -> None:
        """Cut the connections of ranks that are stuck in a collective, once it is known which these are."""
        if self._look is None:
            return
        inquiry, deadline = self._look
        # A rank that was silent the last time, because its C code holds the interpreter, is not waited for.
        if not inquiry.missing <= self._silent and now < deadline:
            return
        self._look, self._silent = None, set(inquiry.missing)
        answers = dict(inquiry.answers)
        waiting = [rank for rank in self._interrupted if rank in answers and _in_collective(answers[rank])]
        handled = any(known.handles_it for known in self._interrupted.values())
        self._pause = _FREE_SECONDS if waiting or handled else min(2 * self._pause, _LOOK_SECONDS)
        self._look_at = now + self._pause if self._interrupted else None
        # Ranks that save something may do so with collectives: what others wait in may be one of these.
        if not waiting or handled:
            return
        if any(answer.nccl for answer in answers.values()):
            if self._steps.stuck(answers, state, now, self._grace):
                self._abort(inquiry)
        elif not _in_step(answers, state) or now >= self._since + _IN_STEP_SECONDS:
            shared_ends = between_ranks(answers)
            for rank in waiting:
                if rank in state.ranks and not state.ranks[rank].state.final:
                    self.cut = True
                    self._send(rank, FreeCollective(fds=shared_ends.get(rank, ())))

    def _abort(self, inquiry: Inquiry) -> None:
        """Have all ranks abort NCCL: where only some do, that hangs, or frees memory that others write to."""
        if self._aborted_at is not None:
            return
        self.cut, self._aborted_at = True, time.monotonic()
        shared_ends = between_ranks(inquiry.answers)
        for rank in sorted(inquiry.answers.keys() | inquiry.missing):
            self._send(rank, FreeCollective(fds=shared_ends.get(rank, ())))

    @property
    def _since(self) -> float:
        return min((known.since for known in self._interrupted.values()), default=0.0)

    def as_stopped(self, message: Message) -> Message:
        """After an interrupt, a rank that ends because of it has not failed: it was stopped."""
        if not self.begun or not isinstance(message, Raised):
            return message
        failure = message.failure
        if failure.type != "builtins.KeyboardInterrupt" and not blames_a_peer(failure):
            return message
        return Exited(rank=message.rank, exitcode=failure.exitcode, time=failure.time, expected=True)


def _in_collective(answer: Where) -> bool:
    """Return whether a rank's stack, or its flight recorder, shows an open collective."""
    return answer.inside or bool(answer.pending)


def _in_step(answers: Mapping[int, Where], state: RunState) -> bool:
    """Return whether all ranks are in one and the same collective, and nobody has left."""
    if any(rank.state.final for rank in state.ranks.values()):
        return False
    begun = [
        frozenset(
            (each.group, each.sequence, each.operation, each.sizes, each.dtypes)
            for each in answer.collectives
            if not each.completed
        )
        for answer in answers.values()
    ]
    return bool(begun) and bool(begun[0]) and len(set(begun)) == 1
