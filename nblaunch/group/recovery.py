"""Whether interrupted ranks are in a long step on their GPUs, or wait for a rank that does not come.

A rank on a GPU waits in any call that needs a result, `.item()` for one, and a step may take seconds. It
takes more than one look to tell a long step from a stuck one, and an abort costs all groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from nblaunch.diagnose.failures import blames_a_peer
from nblaunch.diagnose.hang import by_group, difference_of
from nblaunch.group.stacks import StackRequest, between_ranks
from nblaunch.protocol.messages import (
    Collective,
    DeadVariable,
    Exited,
    FreeCollective,
    Interrupt,
    InterruptSeen,
    Message,
    Raised,
    Recover,
    Recovered,
    ReportWhere,
    ToRank,
    Where,
)
from nblaunch.protocol.reports import format_ranks
from nblaunch.protocol.state import RunState

# How long all GPUs may do nothing but one collective, in which all of its ranks are.
_STEP_SECONDS = 30.0
# A collective ends within milliseconds of the last of its ranks, and NCCL's watchdog notes it within 0.1 s.
_LOOK_AGAIN_SECONDS = 0.2


class Steps:
    """Looks at the same ranks, one time after the other."""

    def __init__(self) -> None:
        """Begin without a look."""
        self._done: Mapping[int, tuple[int, ...]] | None = None
        self._since = 0.0

    def stuck(self, answers: Mapping[int, Where], state: RunState, now: float, grace: float) -> bool:
        """Return whether the ranks wait for something that will not come; `state` is that of the job."""
        done = {rank: answer.done for rank, answer in answers.items()}
        if done != self._done:
            self._done, self._since = done, now
        unmoved = now - self._since
        under_way, absent = _looked_at(answers)
        if under_way:
            return unmoved >= max(_STEP_SECONDS, grace)
        if any(rank not in state.ranks or state.ranks[rank].state.final for rank in absent):
            return True
        idle = [
            rank
            for rank, known in state.ranks.items()
            if not known.state.final
            and rank in answers
            and not (answers[rank].inside or answers[rank].pending)
        ]
        # A rank that computes has not seen the interrupt yet: that is soon, or it is not what is waited for.
        return unmoved >= (grace / 2 if idle or not absent else _LOOK_AGAIN_SECONDS)


def _looked_at(answers: Mapping[int, Where]) -> tuple[bool, set[int]]:
    """Return whether a collective is under way that all of its ranks are in, and who is missing in others."""
    under_way, absent = False, set[int]()
    for first in _open(answers):
        members = first.ranks or tuple(answers)
        begun = {rank: each for rank in members if (each := _same(answers.get(rank), first)) is not None}
        missing = set(members) - begun.keys()
        if missing or difference_of(begun) is not None:
            absent |= missing
        else:
            under_way = True
    return under_way, absent


def _open(answers: Mapping[int, Where]) -> Iterator[Collective]:
    for answer in answers.values():
        yield from (each for each in answer.recent or answer.collectives if not each.completed)


def _same(answer: Where | None, wanted: Collective) -> Collective | None:
    """Return what a rank has begun as the collective of this number."""
    known = () if answer is None else answer.recent or answer.collectives
    return next((each for each in known if each.key == wanted.key and each.sequence == wanted.sequence), None)


# --- Making the ranks of a kept group fit for another job after one that failed or was interrupted.
#
# Ranks that agree on how many collectives they have done, and have none open, are left as they are. All
# others form their default process group again, under a new prefix of the same store; what they hold in
# memory is not touched. Everything here happens on the hub's thread.


# Only a rank that holds its interpreter does not answer; but a busy machine may take its time.
_FITNESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it; `failed` says which rank could not and why, empty if all could."""

    reformed: bool
    failed: str = ""
    dead: str = ""
    """Which variables belong to a group that is gone, and what revives each; empty if there are none."""


class Recovery:
    """Heals a group, one time after the other; `send(rank, message)` reaches one rank."""

    def __init__(self, send: Callable[[int, ToRank], None]) -> None:
        """Begin with nothing to heal."""
        self._send = send
        self._number = 0
        self._members: frozenset[int] = frozenset()
        self._stack_request: StackRequest | None = None
        self._ask_until = 0.0
        self._reform = False
        self._began = 0.0
        self._waiting: set[int] = set()
        self._errors: dict[int, str] = {}
        self._dead: dict[DeadVariable, list[int]] = {}

    @property
    def busy(self) -> bool:
        """Whether answers are being waited for."""
        return self._stack_request is not None or bool(self._waiting)

    def begin(self, members: Iterable[int], interruption: Interruption) -> None:
        """Find out what the ranks need; they answer once they have ended the job."""
        self._members = frozenset(members)
        self._reform = interruption.cut
        self._stack_request = StackRequest(self._members)
        self._ask_until = time.monotonic() + _FITNESS_SECONDS
        interruption.ask(self._stack_request)

    @property
    def reforming_since(self) -> float | None:
        """Since when ranks are forming their process group again (monotonic); None if they are not."""
        return self._began if self._reform and self._waiting else None

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks that have not said yet that they are ready."""
        return self._members if self._stack_request is not None else frozenset(self._waiting)

    def abandon(self) -> None:
        """Expect no answer: the ranks are no more."""
        self._stack_request, self._waiting = None, set()

    def tick(self, now: float) -> None:
        """Go on once all have answered, or have had the time to."""
        stack_request = self._stack_request
        if stack_request is None or not (stack_request.complete.is_set() or now >= self._ask_until):
            return
        self._stack_request = None
        self._number += 1
        self._began = now
        self._reform = self._reform or not agree(stack_request.answers, self._members)
        self._waiting, self._errors, self._dead = set(self._members), {}, {}
        shared_ends = between_ranks(stack_request.answers) if self._reform else {}
        for rank in self._members:
            self._send(rank, Recover(self._number, self._reform, shared_ends.get(rank, ())))

    def recovered(self, message: Recovered) -> Outcome | None:
        """Take one rank's answer; return the outcome with the last of them, or the first that failed."""
        if message.number != self._number or message.rank not in self._waiting:
            return None
        self._waiting.discard(message.rank)
        if message.unusable:
            self._errors[message.rank] = (
                f"the GPU context of rank {message.rank} is unusable: {message.unusable}"
            )
        elif message.error:
            self._errors[message.rank] = (
                f"the process group could not be formed again on rank {message.rank}: {message.error}"
            )
        for dead in message.dead:
            self._dead.setdefault(dead, []).append(message.rank)
        if self._errors:
            # The others may wait for this one in the barrier, for as long as a group's timeout.
            self._waiting = set()
        if self._waiting:
            return None
        failed = "; ".join(error for _, error in sorted(self._errors.items()))
        return Outcome(self._reform, failed, self._named_dead())

    def _named_dead(self) -> str:
        by_rank = {
            dead: "" if len(ranks) == len(self._members) else f" on {format_ranks(ranks)}"
            for dead, ranks in self._dead.items()
        }
        named = [f"{dead.name}{where} ({dead.remedy})" for dead, where in by_rank.items()]
        return ", ".join(named)


def agree(answers: Mapping[int, Where], members: frozenset[int]) -> bool:
    """Return whether all ranks have done the same collectives, and have no operation open.

    >>> agree({0: Where(rank=0, frames=(), pending=0)}, frozenset({0}))
    True
    """
    if answers.keys() != members or any(answer.pending != 0 for answer in answers.values()):
        return False
    last = by_group({rank: answer.collectives for rank, answer in answers.items()})
    return all(len({each.sequence for each in ranks.values()}) == 1 for ranks in last.values())


# --- Interrupting a job: KeyboardInterrupt in every rank, then freeing those stuck in a collective.
#
# A rank in C code sees the interrupt when that ends, and is left alone until then. From the moment it has
# seen
# it, it has the grace period to end its job: to save something, say, with collectives among the ranks. Only
# then is it interrupted once more, for the last time. Everything here happens on the hub's thread.


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
        self._stack_requests: list[StackRequest] = []
        self._look_at: float | None = None
        self._pause = _FREE_SECONDS
        self._look: tuple[StackRequest, float] | None = None
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

    def ask(self, stack_request: StackRequest) -> None:
        """Ask every rank that `stack_request` expects an answer of."""
        self._stack_requests.append(stack_request)
        for rank in list(stack_request.missing):
            self._send(rank, ReportWhere())

    def answered(self, answer: Where, state: RunState) -> None:
        """Take one rank's answer."""
        for stack_request in self._stack_requests:
            stack_request.answer(answer)
        self._stack_requests = [
            stack_request for stack_request in self._stack_requests if not stack_request.complete.is_set()
        ]
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
            stack_request = StackRequest(rank.rank for rank in members.ranks.values() if rank.node)
            self._look = (stack_request, now + _ANSWER_SECONDS)
            self.ask(stack_request)
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
        stack_request, deadline = self._look
        # A rank that was silent the last time, because its C code holds the interpreter, is not waited for.
        if not stack_request.missing <= self._silent and now < deadline:
            return
        self._look, self._silent = None, set(stack_request.missing)
        answers = dict(stack_request.answers)
        waiting = [rank for rank in self._interrupted if rank in answers and _in_collective(answers[rank])]
        handled = any(known.handles_it for known in self._interrupted.values())
        self._pause = _FREE_SECONDS if waiting or handled else min(2 * self._pause, _LOOK_SECONDS)
        self._look_at = now + self._pause if self._interrupted else None
        # Ranks that save something may do so with collectives: what others wait in may be one of these.
        if not waiting or handled:
            return
        if any(answer.nccl for answer in answers.values()):
            if self._steps.stuck(answers, state, now, self._grace):
                self._abort(stack_request)
        elif not _in_step(answers, state) or now >= self._since + _IN_STEP_SECONDS:
            shared_ends = between_ranks(answers)
            for rank in waiting:
                if rank in state.ranks and not state.ranks[rank].state.final:
                    self.cut = True
                    self._send(rank, FreeCollective(fds=shared_ends.get(rank, ())))

    def _abort(self, stack_request: StackRequest) -> None:
        """Have all ranks abort NCCL: where only some do, that hangs, or frees memory that others write to."""
        if self._aborted_at is not None:
            return
        self.cut, self._aborted_at = True, time.monotonic()
        shared_ends = between_ranks(stack_request.answers)
        for rank in sorted(stack_request.answers.keys() | stack_request.missing):
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
