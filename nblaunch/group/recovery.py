"""Interrupting the ranks of a job, and making them fit for the next one: two pure machines.

`Interruption` and `Recovery` are frozen. A method that changes one returns the next value, and the messages
to send. Neither reads a clock: `now` is monotonic. `nblaunch.group.lifecycle` holds both in its state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from nblaunch.diagnose.failures import blames_a_peer
from nblaunch.diagnose.hang import connections_between, difference_of
from nblaunch.group.fitness import Tallies, unfit
from nblaunch.protocol.messages import (
    Collective,
    DeadVariable,
    Exited,
    FreeCollective,
    FromRank,
    Interrupt,
    InterruptSeen,
    Raised,
    Recover,
    Recovered,
    ReportWhere,
    ToRank,
    Where,
)
from nblaunch.protocol.reports import format_ranks
from nblaunch.protocol.state import RunState


class Send(msgspec.Struct, frozen=True):
    """Send a message to one rank."""

    rank: int
    message: ToRank


Sends = tuple[Send, ...]


class Survey(msgspec.Struct, frozen=True):
    """The question where ranks are: those that have not answered, and the answers of the others."""

    missing: frozenset[int]
    until: float = float("inf")
    answers: Mapping[int, Where] = {}

    @classmethod
    def of(cls, ranks: Iterable[int], until: float = float("inf")) -> tuple[Survey, Sends]:
        """Return a survey of these ranks, and its questions."""
        survey = cls(frozenset(ranks), until)
        return survey, tuple(Send(rank, ReportWhere()) for rank in sorted(survey.missing))

    def with_answer(self, answer: Where) -> Survey:
        """Return the survey with one rank's answer."""
        return Survey(self.missing - {answer.rank}, self.until, {**self.answers, answer.rank: answer})

    def over(self, now: float) -> bool:
        """Whether all ranks have answered, or have had the time to."""
        return not self.missing or now >= self.until


# Whether interrupted ranks are in a long step on their GPUs, or wait for a rank that does not come.
#
# A rank on a GPU waits in any call that needs a result, such as `.item()`, and a step may take seconds. It
# takes more than one look to tell a long step from a stuck one, and an abort costs all groups.


# How long all GPUs may do nothing but one collective, which all of its ranks have begun.
_STEP_SECONDS = 30.0
# A collective ends within milliseconds of the last of its ranks, and NCCL's watchdog notices within 0.1 s.
_LOOK_AGAIN_SECONDS = 0.2


class Steps(msgspec.Struct, frozen=True):
    """How far the GPUs of the ranks are, and since when."""

    done: Mapping[int, tuple[int, ...]] | None = None
    since: float = 0.0

    def after(self, answers: Mapping[int, Where], now: float) -> Steps:
        """Return this with one more look."""
        done = {rank: answer.done for rank, answer in answers.items()}
        return self if done == self.done else Steps(done, now)

    def stuck(self, answers: Mapping[int, Where], state: RunState, now: float, grace: float) -> bool:
        """Return whether the ranks wait for something that will not come; `state` is that of the job."""
        if any(answer.broken for answer in answers.values()):
            return True  # what it has begun to its recorder will never run
        unmoved = now - self.since
        under_way, absent = _progress(answers)
        if under_way:
            return unmoved >= max(_STEP_SECONDS, grace)
        at_work = _at_work(state)
        if not absent <= set(at_work):
            return True
        idle = any(rank in answers and not _in_collective(answers[rank]) for rank in at_work)
        # A rank that computes sees the interrupt soon, or is not what the others wait for.
        return unmoved >= (grace / 2 if idle or not absent else _LOOK_AGAIN_SECONDS)


def _at_work(state: RunState) -> list[int]:
    return [rank for rank, known in state.ranks.items() if not known.state.final]


def _progress(answers: Mapping[int, Where]) -> tuple[bool, set[int]]:
    """Return whether all ranks of some open collective have begun it, and which ranks the others lack."""
    recent = {rank: answer.recent or answer.collectives for rank, answer in answers.items()}
    under_way, absent = False, set[int]()
    for first in (each for known in recent.values() for each in known if not each.completed):
        members = first.ranks or tuple(answers)
        begun: dict[int, Collective] = {}
        for rank in members:
            for each in recent.get(rank, ()):
                if each.key == first.key and each.sequence == first.sequence:
                    begun.setdefault(rank, each)
        missing = set(members) - begun.keys()
        if missing or difference_of(begun) is not None:
            absent |= missing
        else:
            under_way = True
    return under_way, absent


# Recovery: making the ranks of a kept group fit for another job after one that failed or was interrupted.
#
# Ranks of a group that is fit (`nblaunch.group.fitness`) are left as they are. All others form their default
# process group again, under a new prefix of the same store, and keep what they hold in memory. Ranks that do
# not get ready in time are replaced.


# Only a rank that holds its interpreter does not answer; but a busy machine may take its time.
_FITNESS_SECONDS = 5.0
# A wait that is shorter than this needs no explanation.
_SHOWN_SECONDS = 1.0
# How long ranks that are seen to be busy with it may take to form their group again.
_RECOVERY_SECONDS = 60.0


class RecoveryOutcome(msgspec.Struct, frozen=True):
    """How a recovery has ended; `failed` says which rank is not fit and why, empty if all are."""

    reformed: bool
    failed: str = ""
    unfit: str = ""
    """Why the group was formed again; "" where connections had been cut, as after an interrupt."""
    in_place: bool = False
    """Whether all groups go on: they were formed again behind the same objects."""
    why_not: str = ""
    """What went wrong in that, if it was tried."""
    dead: str = ""
    """The variables that belong to a group that is gone, and what revives each; empty if there are none."""
    stepped: str = ""
    """The optimizers and models whose step a GPU ran behind an aborted collective; "" if there are none."""


class Recovery(msgspec.Struct, frozen=True):
    """The recoveries of a group, one after the other."""

    number: int = 0
    members: frozenset[int] = frozenset()
    fitness: Survey | None = None
    """What the ranks need; they answer once they have ended the job."""
    reform: bool = False
    called: Tallies = {}
    """What the ranks have called within the job."""
    succeeded: bool = False
    unfit: str = ""
    """Why the group is formed again."""
    gone: frozenset[str] | None = None
    """The addresses of lost machines if ranks are lost; the other ranks then only end what they do.

    They form the process group afterwards, without the lost ranks.
    """
    began: float = 0.0
    waiting: frozenset[int] = frozenset()
    dead: Mapping[DeadVariable, tuple[int, ...]] = {}
    stepped: Mapping[str, tuple[int, ...]] = {}
    overdue_at: float | None = None
    """When ranks that are not ready are asked whether they still recover, or were asked long enough ago."""
    until: float = 0.0
    late: Survey | None = None
    lost: bool = False
    """Whether ranks that are not ready do nothing about it, or have had too long."""

    @property
    def busy(self) -> bool:
        """Whether answers are expected."""
        return self.overdue_at is not None

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks that have not reported that they are ready."""
        return self.members if self.fitness is not None else self.waiting

    def takes_long(self, now: float) -> bool:
        """Whether forming the process group takes a time that needs an explanation: on GPUs, seconds."""
        return self.reform and bool(self.waiting) and now >= self.began + _SHOWN_SECONDS

    def begin(  # noqa: PLR0913 - all that is known of the ranks
        self,
        members: Iterable[int],
        now: float,
        grace: float,
        *,
        cut: bool,
        gone: frozenset[str] | None = None,
        called: Tallies | None = None,
        succeeded: bool = False,
    ) -> tuple[Recovery, Sends]:
        """Find out what the ranks need; `cut` says whether connections between them have been cut.

        They have `called` so much within the job, which may have `succeeded`.
        """
        fitness, sends = Survey.of(members, now + _FITNESS_SECONDS)
        begun = Recovery(
            self.number,
            fitness.missing,
            fitness,
            reform=cut,
            called=called or {},
            succeeded=succeeded,
            gone=gone,
            until=now + _RECOVERY_SECONDS,
        )
        return begun.patient(now, grace), sends

    def patient(self, now: float, grace: float) -> Recovery:
        """Give ranks that send messages their time: a busy machine is slow, not broken."""
        return replace(self, overdue_at=now + max(grace, 1.0))

    def abandoned(self) -> Recovery:
        """Expect no answer: the ranks are gone, or about to be."""
        return Recovery(self.number)

    def answered(self, answer: Where) -> Recovery:
        """Take one rank's answer."""
        if self.fitness is None and self.late is None:
            return self
        fitness = self.fitness and self.fitness.with_answer(answer)
        return replace(self, fitness=fitness, late=self.late and self.late.with_answer(answer))

    def tick(self, now: float) -> tuple[Recovery, Sends]:
        """Go on once all have answered, or have had the time to; find out whether ranks are `lost`."""
        after, sends = replace(self, lost=False) if self.lost else self, Sends()
        if self.fitness is not None and self.fitness.over(now):
            after, sends = self._recover(self.fitness.answers, now)
        if after.overdue_at is None or now < after.overdue_at:
            return after, sends
        if after.late is None:
            late, questions = Survey.of(after.awaited)
            return replace(after, late=late, overdue_at=now + 1.0), (*sends, *questions)
        # Ranks at it are not lost: a large heap takes time to collect.
        busy = after.late.missing or any(where.frames for where in after.late.answers.values())
        return replace(after, late=None, overdue_at=now + 1.0, lost=not busy or now >= after.until), sends

    def _recover(self, answers: Mapping[int, Where], now: float) -> tuple[Recovery, Sends]:
        number = self.number + 1
        why = unfit(answers, self.members, self.called, succeeded=self.succeeded) if not self.reform else ""
        reform = self.gone is None and (self.reform or bool(why))
        shared_ends = between_ranks(answers) if reform else {}
        # A rank that forms its group with lost ranks would wait without end.
        freed = () if self.gone is None else _free(answers, answers, self.gone)
        sends = (
            Send(rank, Recover(number, reform, shared_ends.get(rank, ()))) for rank in sorted(self.members)
        )
        begun = replace(
            self,
            fitness=None,
            number=number,
            began=now,
            reform=reform,
            unfit=why,
            waiting=self.members,
            lost=False,
        )
        return begun, (*freed, *sends)

    def recovered(self, message: Recovered) -> tuple[Recovery, RecoveryOutcome | None]:
        """Take one rank's answer; return the outcome with the last of them, or the first that failed."""
        rank = message.rank
        if message.number != self.number or rank not in self.waiting:
            return self, None
        failed = ""
        if message.unusable:
            failed = f"the GPU context of rank {rank} is unusable: {message.unusable}"
        elif message.error:
            failed = f"the process group could not be formed again on rank {rank}: {message.error}"
        waiting = self.waiting - {rank}
        dead = {**self.dead, **{each: (*self.dead.get(each, ()), rank) for each in message.dead}}
        stepped = {**self.stepped, **{each: (*self.stepped.get(each, ()), rank) for each in message.stepped}}
        # After a failure the others may wait for this one in the barrier, for as long as a group's timeout.
        if waiting and not failed:
            return replace(self, waiting=waiting, dead=dead, stepped=stepped), None
        remedies = _remedies(dead, len(self.members))
        names = ", ".join(f"{each}{_where(on, len(self.members))}" for each, on in stepped.items())
        return self.abandoned(), RecoveryOutcome(
            self.reform, failed, self.unfit, message.in_place, message.why_not, remedies, names
        )


def _remedies(dead: Mapping[DeadVariable, tuple[int, ...]], members: int) -> str:
    return ", ".join(f"{each.name}{_where(on, members)} ({each.remedy})" for each, on in dead.items())


def _where(on: tuple[int, ...], members: int) -> str:
    return "" if len(on) == members else f" on {format_ranks(on)}"


def between_ranks(answers: Mapping[int, Where]) -> dict[int, tuple[int, ...]]:
    """Return each rank's descriptors of connections whose other end is another rank's."""
    found = connections_between(answers)
    return {rank: tuple(each.fd for each in connections) for rank, connections in found.items()}


# Interrupting a job: KeyboardInterrupt in every rank, then freeing those stuck in a collective.
#
# A rank in C code, or in an import, sees the interrupt when that ends, and is left alone until then. Once it
# has seen it, it has the grace period to end its job: it may save something, with collectives among the
# ranks. Only then is it interrupted once more, for the last time.


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


class Interrupted(msgspec.Struct, frozen=True):
    """A rank that has been interrupted and has not ended its job; times are monotonic."""

    number: int
    since: float
    seen: float | None = None
    handled: bool = True
    last: bool = False

    @property
    def handles_it(self) -> bool:
        """Whether it has seen the interrupt, and has time for its own handling of it."""
        return self.seen is not None and self.handled and not self.last

    def seen_for(self, seconds: float, now: float) -> bool:
        """Whether it has seen the interrupt, so long ago or longer."""
        return self.seen is not None and now >= self.seen + seconds


class Interruption(msgspec.Struct, frozen=True):
    """The interruption of a job: looks where ranks are, frees the stuck, presses those that go on."""

    begun: bool = False
    cut: bool = False
    """Whether connections between ranks have been cut."""
    lost: frozenset[str] = frozenset()
    """Addresses of lost machines: a connection to one may never end."""
    number: int = 0
    interrupted: Mapping[int, Interrupted] = {}
    look_at: float | None = None
    pause: float = _FREE_SECONDS
    look: Survey | None = None
    silent: frozenset[int] = frozenset()
    steps: Steps = Steps()
    grace: float = 0.0
    aborted_at: float | None = None

    @property
    def waited_for(self) -> Mapping[int, float]:
        """The ranks that have been interrupted and are still at work, and since when (monotonic)."""
        return {rank: known.since for rank, known in self.interrupted.items()}

    @property
    def busy(self) -> bool:
        """Whether something is due."""
        return self.look_at is not None or self.look is not None or bool(self.interrupted)

    def without(self, address: str) -> Interruption:
        """Return this with a lost machine's `address` added; "" if other ranks run at that address."""
        return replace(self, lost=self.lost | {address}) if address else self

    def fresh(self) -> Interruption:
        """Return the value for the next job, before it is interrupted."""
        return Interruption(number=self.number, grace=self.grace)

    def over(self) -> Interruption:
        """Expect nothing more of the ranks: the job has ended."""
        return replace(self, interrupted={}, look_at=None, look=None)

    def begin(self, state: RunState, now: float) -> tuple[Interruption, Sends]:
        """Raise KeyboardInterrupt in every rank that has not ended its job."""
        number, ranks = self.number + 1, _at_work(state)
        since = {rank: self.waited_for.get(rank, now) for rank in ranks}
        begun = replace(
            self,
            begun=True,
            number=number,
            interrupted={**self.interrupted, **{rank: Interrupted(number, since[rank]) for rank in ranks}},
            look_at=now + _FREE_SECONDS,
            pause=_FREE_SECONDS,
        )
        return begun, tuple(Send(rank, Interrupt(number)) for rank in ranks)

    def at_once(self) -> tuple[Interruption, Sends]:
        """Interrupt ranks that are still at work once more, also those that are importing."""
        number = self.number + 1
        again = {rank: replace(known, number=number, seen=None) for rank, known in self.interrupted.items()}
        sends = (
            Send(rank, Interrupt(number, last=known.last, at_once=True)) for rank, known in again.items()
        )
        return replace(self, number=number, interrupted=again), tuple(sends)

    def seen(self, message: InterruptSeen, now: float) -> Interruption:
        """Register that a rank has seen the interrupt: its grace period begins."""
        known = self.interrupted.get(message.rank)
        if known is None or known.number != message.number:
            return self
        seen = replace(known, seen=now, handled=message.handled)
        return replace(self, interrupted={**self.interrupted, message.rank: seen})

    def left_alone(self, rank: int) -> Interruption:
        """Stop waiting for this rank to end the job: it saves first."""
        return replace(self, interrupted={key: each for key, each in self.interrupted.items() if key != rank})

    def tick(self, state: RunState, members: RunState, now: float) -> tuple[Interruption, Sends]:
        """Do what is due; `state` is that of the job, `members` are all ranks of the group."""
        if not self.busy:
            return self, ()
        at_work = set(_at_work(state))
        waited = {rank: known for rank, known in self.interrupted.items() if rank in at_work}
        after, sends = replace(self, interrupted=waited, look_at=self.look_at if waited else None), Sends()
        if after.look_at is not None and now >= after.look_at:
            # Also those that have finished, or take no part: a stuck rank may wait for one of these.
            everyone = (rank.rank for rank in members.ranks.values() if rank.node)
            look, sends = Survey.of(everyone, now + _ANSWER_SECONDS)
            after = replace(after, look_at=None, look=look)
        after, freed = _free_stuck(after, state, now)
        return after, (*sends, *freed)

    def answered(self, answer: Where, state: RunState, now: float) -> tuple[Interruption, Sends]:
        """Take one rank's answer."""
        if self.look is None:
            return self, ()
        return _free_stuck(replace(self, look=self.look.with_answer(answer)), state, now)

    def press(self, now: float, grace: float) -> tuple[Interruption, Sends]:
        """Interrupt ranks for the last time that have seen the interrupt, and whose grace period is over."""
        interrupted, number, sends = dict(self.interrupted), self.number, list[Send]()
        for rank, known in self.interrupted.items():
            if not known.last and known.seen_for(grace, now):
                number += 1
                interrupted[rank] = replace(known, number=number, last=True, seen=None)
                sends.append(Send(rank, Interrupt(number, last=True)))
        if not sends:
            return (self if grace == self.grace else replace(self, grace=grace)), ()
        after = replace(self, grace=grace, interrupted=interrupted, number=number)
        if after.look is None:
            after = replace(after, look_at=now, pause=_FREE_SECONDS)
        return after, tuple(sends)

    def deaf(self, now: float) -> tuple[int, ...]:
        """Return the ranks that have seen the last interrupt, and go on all the same."""
        last = {rank: known for rank, known in self.interrupted.items() if known.last}
        return tuple(rank for rank, known in last.items() if known.seen_for(_LAST_SECONDS, now))

    def unfreed(self, now: float) -> tuple[int, ...]:
        """Return the ranks that do not come back although NCCL was to abort what they wait for."""
        if self.aborted_at is None or now < self.aborted_at + _ABORT_SECONDS:
            return ()
        return tuple(rank for rank, known in self.interrupted.items() if known.seen is None)

    def as_stopped(self, message: FromRank) -> FromRank | Exited:
        """After an interrupt, a rank that ends because of it has not failed: it was stopped."""
        if not self.begun or not isinstance(message, Raised):
            return message
        failure = message.failure
        if failure.type != "builtins.KeyboardInterrupt" and not blames_a_peer(failure):
            return message
        return Exited(rank=message.rank, exitcode=failure.exitcode, time=failure.time, expected=True)


def _free_stuck(interruption: Interruption, state: RunState, now: float) -> tuple[Interruption, Sends]:
    """Cut the connections of ranks that are stuck in a collective, once it is known which these are."""
    look = interruption.look
    # A rank that was silent the last time, because its C code holds the interpreter, is not waited for.
    if look is None or not (look.missing <= interruption.silent or look.over(now)):
        return interruption, ()
    answers = look.answers
    waiting = [rank for rank in interruption.interrupted if rank in answers and _in_collective(answers[rank])]
    handled = any(known.handles_it for known in interruption.interrupted.values())
    pause = _FREE_SECONDS if waiting or handled else min(2 * interruption.pause, _LOOK_SECONDS)
    look_at = now + pause if interruption.interrupted else None
    after = replace(interruption, look=None, silent=look.missing, pause=pause, look_at=look_at)
    # Ranks that save something may do so with collectives: what others wait in may be one of these.
    if not waiting or handled:
        return after, ()
    if any(answer.nccl for answer in answers.values()):
        after = replace(after, steps=after.steps.after(answers, now))
        if after.aborted_at is not None or not after.steps.stuck(answers, state, now, interruption.grace):
            return after, ()
        # All ranks abort NCCL: where only some do, that hangs, or frees memory that others write to.
        everyone = answers.keys() | look.missing
        return replace(after, cut=True, aborted_at=now), _free(everyone, answers, interruption.lost)
    since = min(known.since for known in interruption.interrupted.values())
    if _in_step(answers, state) and now < since + _IN_STEP_SECONDS:
        return after, ()
    at_work = _at_work(state)
    sends = _free([rank for rank in waiting if rank in at_work], answers, interruption.lost)
    return replace(after, cut=after.cut or bool(sends)), sends


def _free(ranks: Collection[int], answers: Mapping[int, Where], lost: frozenset[str]) -> Sends:
    """Free these ranks by shutting down their connections to each other and to lost machines."""
    ends = between_ranks(answers)
    for rank, where in answers.items():
        away = (each.fd for each in where.connections if each.remote[0].removeprefix("::ffff:") in lost)
        ends[rank] = (*ends.get(rank, ()), *away)
    return tuple(Send(rank, FreeCollective(fds=ends.get(rank, ()))) for rank in sorted(ranks))


def _in_collective(answer: Where) -> bool:
    """Return whether a rank's stack, or its flight recorder, shows an open collective."""
    return answer.inside or bool(answer.pending)


def _in_step(answers: Mapping[int, Where], state: RunState) -> bool:
    """Return whether all ranks are in one and the same collective, and none has ended its job."""
    if any(rank.state.final for rank in state.ranks.values()):
        return False
    begun = {
        frozenset(
            (each.group, each.sequence, each.operation, each.sizes, each.dtypes)
            for each in answer.collectives
            if not each.completed
        )
        for answer in answers.values()
    }
    return len(begun) == 1 and frozenset() not in begun
