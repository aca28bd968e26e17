"""Interrupting a run: KeyboardInterrupt in every rank, then freeing those stuck in a collective.

Everything here happens on the hub's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nblaunch._protocol import (
    Exited,
    FreeCollective,
    Interrupt,
    Message,
    Raised,
    ReportWhere,
    ToRank,
    Where,
)
from nblaunch._state import RunState
from nblaunch.diagnose.root_cause import blames_a_peer
from nblaunch.session.inquiry import Inquiry, between_ranks

# Python code answers an interrupt within milliseconds; who does not is stuck in C code.
_FREE_SECONDS = 0.25
# A busy machine may take its time; a connection is found only if both of its ends have been told.
_ANSWER_SECONDS = 2.0


class Interruption:
    """Asks ranks where they are, and interrupts them; `send(rank, message)` reaches one rank."""

    def __init__(self, send: Callable[[int, ToRank], None]) -> None:
        """Begin uninterrupted."""
        self.begun = False
        self.cut = False
        """Whether connections between ranks have been cut."""
        self._send = send
        self._inquiries: list[Inquiry] = []
        self._free_at: float | None = None
        self._cut: tuple[Inquiry, float] | None = None

    def reset(self) -> None:
        """Begin uninterrupted: another job."""
        self.begun = self.cut = False
        self._free_at = self._cut = None

    @property
    def busy(self) -> bool:
        """Whether something is due."""
        return self._free_at is not None or self._cut is not None

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
        self._cut_connections(state, time.monotonic())

    def begin(self, state: RunState) -> None:
        """Raise KeyboardInterrupt in every rank that has not ended its job."""
        self.begun = True
        for rank in state.ranks.values():
            if not rank.state.final:
                self._send(rank.rank, Interrupt())
        self._free_at = time.monotonic() + _FREE_SECONDS

    def tick(self, state: RunState, members: RunState, now: float) -> None:
        """Do what is due; `state` is that of the job, `members` are all ranks of the group."""
        if self._free_at is not None and now >= self._free_at:
            self._free_at = None
            # Also those that have finished, or take no part: a stuck rank may wait for one of these.
            inquiry = Inquiry(rank.rank for rank in members.ranks.values() if rank.node)
            self._cut = (inquiry, now + _ANSWER_SECONDS)
            self.ask(inquiry)
        self._cut_connections(state, now)

    def _cut_connections(self, state: RunState, now: float) -> None:
        """Cut the connections between ranks once it is known which these are."""
        if self._cut is None or not (self._cut[0].complete.is_set() or now >= self._cut[1]):
            return
        answers = self._cut[0].answers
        # Whoever has not answered may be the other end of what a stuck rank waits on: ask once more.
        self._free_at = None if self._cut[0].complete.is_set() else now + _FREE_SECONDS
        self._cut = None
        shared_ends = between_ranks(answers)
        for rank in answers:
            if rank in state.ranks and not state.ranks[rank].state.final:
                self.cut = True
                self._send(rank, FreeCollective(fds=shared_ends.get(rank, ())))

    def as_stopped(self, message: Message) -> Message:
        """After an interrupt, a rank that ends because of it has not failed: it was stopped."""
        if not self.begun or not isinstance(message, Raised):
            return message
        failure = message.failure
        if failure.type != "builtins.KeyboardInterrupt" and not blames_a_peer(failure):
            return message
        return Exited(rank=message.rank, exitcode=failure.exitcode, time=failure.time, expected=True)
