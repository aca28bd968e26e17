"""How a job ends that does not end by itself: interrupts, its timeout, and hangs; every decision on that.

All is frozen, pure, and reads no clock: `now` is monotonic. `nblaunch.group.lifecycle` holds `Ending` in the
state of the job and `Interruption` in that of the group, has an `EndingStep` decide, and does what follows.

First a survey: where are the ranks? Then they are told to end, by KeyboardInterrupt. Fresh ranks have the
grace period for that. Those of a session hold variables: a rank in C code is waited for, and one that is
importing, which the second interrupt only breaks off.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from nblaunch.diagnose.failures import blames_a_peer
from nblaunch.diagnose.hang import difference_of
from nblaunch.group.machine import LocateRanks, Machine, Order, RestartAsked, Send, Sends, Survey
from nblaunch.group.recovery import free
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol.client import EarlyEnd
from nblaunch.protocol.reports import HangReport, LocatedAll, format_ranks
from nblaunch.protocol.state import RunState

NEVER = float("inf")
ANSWER_SECONDS = 1.0
"""How long ranks have to say where they are."""
ASK_SECONDS = 0.3
"""The same while a user waits for an interrupt."""
END_SECONDS = 30.0
"""An agent that cannot be moved (uninterruptible ranks) must not hold the job longer."""


class Why(enum.IntEnum):
    """Why a machine surveys the ranks of its job; numbers from 0 on are others who have asked."""

    INTERRUPT = -1
    TIMEOUT = -2
    HANG = -3
    LATE = -4
    IMPORTS = -5


# `--hang-after`: notice ranks that are silent inside one collective, without stopping the run.

_Operation = tuple[tuple[str, str, tuple[int, ...]], int]
"""Key and sequence number of a collective."""
_Pending = tuple[_Operation, ...]
"""The collectives that a rank has begun and not ended."""


class HangWatch(msgspec.Struct, frozen=True):
    """Says when to ask where the ranks are, after a silence, and which answers show another hang.

    A rank with no message and no output does not hang for that (it may compute); one that is still in the
    collective in which it was `seconds` ago does.
    """

    seconds: float | None = None
    """None: nothing is watched."""
    silent_since: float = 0.0
    before: Mapping[int, _Pending] = {}
    reported: frozenset[_Operation] = frozenset()

    def heard(self, now: float) -> HangWatch:
        """Begin again: something was heard, or the silence counts for nothing."""
        return replace(self, silent_since=now, before={})

    def due(self, now: float) -> bool:
        """Return whether the run has been silent for so long that its ranks are to be asked."""
        if self.seconds is None:
            return False
        return now - self.silent_since >= (self.seconds if self.before else self.seconds / 2)

    def hangs(self, report: HangReport, now: float) -> tuple[HangWatch, bool]:
        """Return whether the run hangs where it did not hang before; `now` is when the ranks were asked."""
        if now < self.silent_since:
            return self, False  # something was heard meanwhile
        here = {rank: pending for rank, known in report.collectives.items() if (pending := _pending(known))}
        still = (pending for rank, pending in here.items() if self.before.get(rank) == pending)
        stuck = frozenset(operation for pending in still for operation in pending)
        if not self.before:
            # Outside of collectives, as at first, ranks are asked again after the same time.
            return replace(self, before=here, silent_since=self.silent_since if here else now), False
        # Fewer than before are no other hang: to nccl2 (torch 2.15) what has ended is open for a second.
        after = replace(self, silent_since=now, before=here, reported=self.reported | stuck)
        return after, not stuck <= self.reported


def _pending(collectives: tuple[messages.Collective, ...]) -> _Pending:
    return tuple((known.key, known.sequence) for known in collectives if not known.completed)


# Interrupted ranks that are still at work: shown about once a second with where they are, and for how long.

# All but ranks in C code answer an interrupt sooner than this.
_FIRST_SECONDS = 0.6
_BETWEEN_SECONDS = 1.0
_STOPPED = "its process is stopped"
_GONE = "its process has ended"


class LateRanks(msgspec.Struct, frozen=True):
    """Interrupted ranks that are still at work, as they are shown."""

    survey_at: float = 0.0
    """When to survey again."""
    ranks: Mapping[int, str] = {}
    stopped: Mapping[int, float] = {}
    """Those whose process is stopped (SIGSTOP), and how many seconds ago each was interrupted."""

    @classmethod
    def found(
        cls, waited_for: Mapping[int, float], report: HangReport, asked: float, now: float
    ) -> LateRanks:
        """Return what to show; `asked` is when ranks were asked for the `report`."""
        places = _places(report)
        late = {rank: asked - since for rank, since in overdue(waited_for, asked).items()}
        shown = {
            rank: f"interrupted {seconds:.0f} s ago, {places.get(rank, 'still at work')}"
            for rank, seconds in late.items()
        }
        stopped = {rank: seconds for rank, seconds in late.items() if _STOPPED in places.get(rank, "")}
        # faulthandler takes its time for each rank that holds its interpreter.
        return cls(now + max(_BETWEEN_SECONDS, 2 * (now - asked)), shown, stopped)


def overdue(waited_for: Mapping[int, float], now: float) -> dict[int, float]:
    """Return the interrupted ranks that have not ended in time, and since when they are waited for."""
    return {rank: since for rank, since in waited_for.items() if now - since > _FIRST_SECONDS}


def _places(report: HangReport) -> dict[int, str]:
    found = {rank: f"still {group.headline}" for group in report.groups for rank in group.ranks}
    for rank, stack in report.silent.items():
        innermost = next((line.strip() for line in reversed(stack.splitlines()) if line.strip()), "")
        if innermost.startswith((_STOPPED, _GONE)):
            found[rank] = f"but {innermost}"
        else:
            at = f", at {innermost}" if innermost else ""
            found[rank] = f"still in C code that holds its interpreter{at}"
    return found


# Whether interrupted ranks are in a long step on their GPUs, or wait for a rank that does not come.
#
# A rank on a GPU waits in any call that needs a result, such as `.item()`, and a step may take seconds. It
# takes more than one survey to tell a long step from a stuck one, and an abort costs all groups.


# How long all GPUs may do nothing but one collective, which all of its ranks have begun.
_STEP_SECONDS = 30.0
# A collective ends within milliseconds of the last of its ranks, and NCCL's watchdog notices within 0.1 s.
_SURVEY_AGAIN_SECONDS = 0.2


class Steps(msgspec.Struct, frozen=True):
    """How far the GPUs of the ranks are, and since when."""

    done: Mapping[int, tuple[int, ...]] | None = None
    since: float = 0.0

    def after(self, answers: Mapping[int, messages.Where], now: float) -> Steps:
        done = {rank: answer.done for rank, answer in answers.items()}
        return self if done == self.done else Steps(done, now)

    def stuck(self, answers: Mapping[int, messages.Where], state: RunState, now: float, grace: float) -> bool:
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
        return unmoved >= (grace / 2 if idle or not absent else _SURVEY_AGAIN_SECONDS)


def _at_work(state: RunState) -> list[int]:
    return [rank for rank, known in state.ranks.items() if not known.state.final]


def _progress(answers: Mapping[int, messages.Where]) -> tuple[bool, set[int]]:
    """Return whether all ranks of some open collective have begun it, and which ranks the others lack."""
    recent = {rank: answer.recent or answer.collectives for rank, answer in answers.items()}
    under_way, absent = False, set[int]()
    for first in (each for known in recent.values() for each in known if not each.completed):
        members = first.ranks or tuple(answers)
        begun: dict[int, messages.Collective] = {}
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


# Interrupting a job: KeyboardInterrupt in every rank, then freeing those stuck in a collective.
#
# A rank in C code, or in an import, sees the interrupt when that ends, and is left alone until then. Once it
# has seen it, it has the grace period to end its job: it may save something, with collectives among the
# ranks. Only then is it interrupted once more, for the last time.


# Python code answers an interrupt within milliseconds; a rank that does not is in C code.
_FREE_SECONDS = 0.25
# How often ranks in C code are surveyed when there is nothing to free: a collective may begin in there.
_SURVEY_SECONDS = 1.0
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
        return self.seen is not None and self.handled and not self.last

    def seen_for(self, seconds: float, now: float) -> bool:
        """Whether it has seen the interrupt, so long ago or longer."""
        return self.seen is not None and now >= self.seen + seconds


class Interruption(msgspec.Struct, frozen=True):
    """The interruption of a job: surveys the ranks, frees the stuck ones, interrupts the others again."""

    begun: bool = False
    cut: bool = False
    """Whether connections between ranks have been cut."""
    lost: frozenset[str] = frozenset()
    """Addresses of lost machines: a connection to one may never end."""
    number: int = 0
    interrupted: Mapping[int, Interrupted] = {}
    survey_at: float | None = None
    pause: float = _FREE_SECONDS
    survey: Survey | None = None
    silent: frozenset[int] = frozenset()
    steps: Steps = Steps()
    aborted_at: float | None = None

    @property
    def waited_for(self) -> Mapping[int, float]:
        """The ranks that have been interrupted and are still at work, and since when (monotonic)."""
        return {rank: known.since for rank, known in self.interrupted.items()}

    @property
    def busy(self) -> bool:
        return self.survey_at is not None or self.survey is not None or bool(self.interrupted)

    def without(self, address: str) -> Interruption:
        """Return this with a lost machine's `address` added; "" if other ranks run at that address."""
        return replace(self, lost=self.lost | {address}) if address else self

    def fresh(self) -> Interruption:
        """Return the value for the next job, before it is interrupted."""
        return Interruption(number=self.number)

    def over(self) -> Interruption:
        """Expect nothing more of the ranks: the job has ended."""
        return replace(self, interrupted={}, survey_at=None, survey=None)

    def begin(self, state: RunState, now: float) -> tuple[Interruption, Sends]:
        """Raise KeyboardInterrupt in every rank that has not ended its job."""
        number, ranks = self.number + 1, _at_work(state)
        since = {rank: self.waited_for.get(rank, now) for rank in ranks}
        begun = replace(
            self,
            begun=True,
            number=number,
            interrupted={**self.interrupted, **{rank: Interrupted(number, since[rank]) for rank in ranks}},
            survey_at=now + _FREE_SECONDS,
            pause=_FREE_SECONDS,
        )
        return begun, tuple(Send(rank, messages.Interrupt(number)) for rank in ranks)

    def at_once(self) -> tuple[Interruption, Sends]:
        """Interrupt ranks that are still at work once more, also those that are importing."""
        number = self.number + 1
        again = {rank: replace(known, number=number, seen=None) for rank, known in self.interrupted.items()}
        sends = (
            Send(rank, messages.Interrupt(number, last=known.last, at_once=True))
            for rank, known in again.items()
        )
        return replace(self, number=number, interrupted=again), tuple(sends)

    def seen(self, message: messages.InterruptSeen, now: float) -> Interruption:
        """Register that a rank has seen the interrupt: its grace period begins."""
        known = self.interrupted.get(message.rank)
        if known is None or known.number != message.number:
            return self
        seen = replace(known, seen=now, handled=message.handled)
        return replace(self, interrupted={**self.interrupted, message.rank: seen})

    def left_alone(self, rank: int) -> Interruption:
        """Stop waiting for this rank to end the job: it saves first."""
        return replace(self, interrupted={key: each for key, each in self.interrupted.items() if key != rank})

    def tick(
        self, state: RunState, members: RunState, now: float, grace: float
    ) -> tuple[Interruption, Sends]:
        """Do what is due; `state` is that of the job, `members` are all ranks of the group."""
        if not self.busy:
            return self, ()
        at_work = set(_at_work(state))
        waited = {rank: known for rank, known in self.interrupted.items() if rank in at_work}
        after, sends = (
            replace(self, interrupted=waited, survey_at=self.survey_at if waited else None),
            Sends(),
        )
        if after.survey_at is not None and now >= after.survey_at:
            # Also those that have finished, or take no part: a stuck rank may wait for one of these.
            everyone = (rank.rank for rank in members.ranks.values() if rank.node)
            survey, sends = Survey.begin(everyone, now + _ANSWER_SECONDS)
            after = replace(after, survey_at=None, survey=survey)
        after, freed = _free_stuck(after, state, now, grace)
        return after, (*sends, *freed)

    def answered(
        self, answer: messages.Where, state: RunState, now: float, grace: float
    ) -> tuple[Interruption, Sends]:
        if self.survey is None:
            return self, ()
        return _free_stuck(replace(self, survey=self.survey.with_answer(answer)), state, now, grace)

    def press(self, now: float, grace: float) -> tuple[Interruption, Sends]:
        """Interrupt ranks for the last time that have seen the interrupt, and whose grace period is over."""
        interrupted, number, sends = dict(self.interrupted), self.number, list[Send]()
        for rank, known in self.interrupted.items():
            if not known.last and known.seen_for(grace, now):
                number += 1
                interrupted[rank] = replace(known, number=number, last=True, seen=None)
                sends.append(Send(rank, messages.Interrupt(number, last=True)))
        if not sends:
            return self, ()
        after = replace(self, interrupted=interrupted, number=number)
        if after.survey is None:
            after = replace(after, survey_at=now, pause=_FREE_SECONDS)
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

    def as_stopped(self, message: messages.FromRank) -> messages.FromRank | messages.Exited:
        """After an interrupt, a rank that ends because of it has not failed: it was stopped."""
        if not self.begun or not isinstance(message, messages.Raised):
            return message
        failure = message.failure
        if failure.type != "builtins.KeyboardInterrupt" and not blames_a_peer(failure):
            return message
        return messages.Exited(rank=message.rank, exitcode=failure.exitcode, time=failure.time, expected=True)


def _free_stuck(
    interruption: Interruption, state: RunState, now: float, grace: float
) -> tuple[Interruption, Sends]:
    """Cut the connections of ranks that are stuck in a collective, once it is known which these are."""
    survey = interruption.survey
    # A rank that was silent the last time, because its C code holds the interpreter, is not waited for.
    if survey is None or not (survey.missing <= interruption.silent or survey.over(now)):
        return interruption, ()
    answers = survey.answers
    waiting = [rank for rank in interruption.interrupted if rank in answers and _in_collective(answers[rank])]
    handled = any(known.handles_it for known in interruption.interrupted.values())
    pause = _FREE_SECONDS if waiting or handled else min(2 * interruption.pause, _SURVEY_SECONDS)
    survey_at = now + pause if interruption.interrupted else None
    after = replace(interruption, survey=None, silent=survey.missing, pause=pause, survey_at=survey_at)
    # Ranks that save something may do so with collectives: what others wait in may be one of these.
    if not waiting or handled:
        return after, ()
    if any(answer.nccl for answer in answers.values()):
        after = replace(after, steps=after.steps.after(answers, now))
        if after.aborted_at is not None or not after.steps.stuck(answers, state, now, grace):
            return after, ()
        # All ranks abort NCCL: where only some do, that hangs, or frees memory that others write to.
        everyone = answers.keys() | survey.missing
        return replace(after, cut=True, aborted_at=now), free(everyone, answers, interruption.lost)
    since = min(known.since for known in interruption.interrupted.values())
    if _in_step(answers, state) and now < since + _IN_STEP_SECONDS:
        return after, ()
    at_work = _at_work(state)
    sends = free([rank for rank in waiting if rank in at_work], answers, interruption.lost)
    return replace(after, cut=after.cut or bool(sends)), sends


def _in_collective(answer: messages.Where) -> bool:
    """Return whether a rank's stack, or its flight recorder, shows an open collective."""
    return answer.inside or bool(answer.pending)


def _in_step(answers: Mapping[int, messages.Where], state: RunState) -> bool:
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


class Ending(msgspec.Struct, frozen=True):
    """The limits of a job, and how far its early end has come."""

    timeout: float | None = None
    grace: float = 0.0
    """How long its ranks may take to end by themselves."""
    deadline: float = NEVER
    paused_at: float | None = None
    """When it was last seen that time counts towards no limit; None while it does."""
    hang: HangWatch = HangWatch()
    late: LateRanks = LateRanks()
    begun: bool = False
    """Whether something ends the job."""
    interrupts: int = 0
    """How often the user has interrupted the job."""
    timed_out: bool = False
    told: bool = False
    """Whether the ranks have been told to end."""
    interrupted: bool = False
    """Whether they have been interrupted for that: by the user, or kept ones after the timeout."""
    where: str = ""
    """Where the ranks were before that."""
    findings: tuple[str, ...] = ()
    noticed: int = 0
    """How many notices there were before."""
    broken_off: bool = False
    """Whether the imports of the ranks were broken off."""
    skipped: bool = False
    """Whether the ranks are not waited for any more."""
    lost: str = ""
    """Whose variables are lost by that."""
    skip_at: float = NEVER
    """When the grace period of fresh ranks is over."""
    abandon_at: float = NEVER
    """When the job ends, whatever its ranks do."""

    @classmethod
    def begin(cls, options: LaunchOptions, began: float, *, internal: bool = False) -> Ending:
        deadline = NEVER if options.timeout is None else began + options.timeout
        # Nobody would see a hang of a job that the user does not see.
        hang = HangWatch(None if internal else options.hang_after, began)
        return cls(options.timeout, options.grace, deadline, hang=hang)

    def paused(self, now: float, *, goes_on: bool) -> Ending:
        """Let the time count for no limit since the last call, and from now on if the pause `goes_on`."""
        since = now if self.paused_at is None else self.paused_at
        return replace(
            self,
            deadline=self.deadline + (now - since),
            paused_at=now if goes_on else None,
            hang=self.hang.heard(now),
        )

    @property
    def early(self) -> EarlyEnd | None:
        """The reason for the client; None if the job ends by itself."""
        if not self.begun:
            return None
        if self.timed_out:
            message = f"the run was given {self.timeout:g} s and did not end in that time: {self.where}"
            return EarlyEnd(timeout=True, message="\n".join((message, *self.findings)))
        lost = (
            f"; it was interrupted again, so {self.lost} were replaced and their variables are lost"
            if self.lost
            else ""
        )
        message = "\n".join((f"the run was interrupted: {self.where}{lost}", *self.findings))
        return EarlyEnd(timeout=False, message=message, notices_from=self.noticed)


class Situation(msgspec.Struct, frozen=True):
    """The state of a job and its ranks, as far as its end depends on it."""

    run: RunState
    members: RunState
    present: RunState
    """The ranks that are not lost."""
    kept: bool
    at_work: bool
    """Whether the ranks have it, and have not all ended it."""
    asks: bool
    """Whether a rank has asked the user something."""
    replacing: bool
    searches: Collection[int]
    """Why ranks are being asked where they are."""


Consequence: TypeAlias = (
    LocatedAll | messages.Noticed | messages.Waiting | LocateRanks | RestartAsked | Send | Order
)
"""A message to fold, or an action."""


class EndingStep(Machine[Ending, Consequence]):
    """One step towards the end of a job."""

    def __init__(self, state: Ending, interruption: Interruption, job: Situation, now: float) -> None:
        super().__init__(state, now)
        self.interruption = interruption
        self.job = job

    def change(self, changed: tuple[Interruption, Sends]) -> None:
        self.interruption, sends = changed
        self.act(*sends)

    def interrupt(self, *, sparing: bool = False) -> None:
        self.set(interrupts=self.state.interrupts + (not sparing))
        ending = self.state
        if not ending.begun:
            survey = LocateRanks(Why.INTERRUPT, ASK_SECONDS)
            self.set([survey], begun=True, noticed=len(self.job.run.notices))
        elif ending.told:
            if not sparing and (ending.interrupts > 1 or ending.timed_out):
                self.interrupt_again()
            else:
                self.begin_interruption()

    def located(self, why: int, report: HangReport, asked: float) -> None:
        """Go on once it is known where the ranks are; they were `asked` then."""
        match why:
            case Why.HANG:
                self.check_for_hang(report, asked)
            case Why.LATE:
                self.show_late(report, asked)
            case Why.IMPORTS:
                self.break_off_imports(report)
            case _:
                self.keep_where(report)
                self.tell_ranks()

    def keep_where(self, report: HangReport) -> None:
        """Keep where the ranks were that are about to be told to end, or have just ended."""
        if self.job.run.awaits_nodes:
            self.set(where=self.job.run.where)
        else:
            where = report.summary or self.job.run.where
            self.set([LocatedAll(report=report)], where=where, findings=report.findings)

    def tell_ranks(self) -> None:
        """Have the ranks end the job, which the user has interrupted, or which has timed out."""
        ending, kept, stops = self.state, self.job.kept, self.now + self.state.grace
        if ending.timed_out and not kept:
            self.set([Order.STOP_AGENT], told=True, abandon_at=stops + END_SECONDS)
            return
        self.set(told=True, interrupted=True, skip_at=NEVER if kept else stops)
        self.begin_interruption()
        if not self.job.at_work:
            # Nothing of the user's runs yet, or only what a rank that has failed does at its end.
            self.act(Order.FINISH_JOB if kept else Order.STOP_AGENT)
            if kept:
                return
        if ending.interrupts > 1 and not ending.timed_out:
            self.interrupt_again()  # it came while the ranks were asked

    def begin_interruption(self) -> None:
        """Raise KeyboardInterrupt in every rank that has not ended the job."""
        self.change(self.interruption.begin(self.job.run, self.now))

    def interrupt_again(self) -> None:
        """Break off imports of persistent ranks, which costs no variable; else wait no longer."""
        ending, kept = self.state, self.job.kept
        if (kept and ending.skipped) or Why.IMPORTS in self.job.searches:
            return
        if kept and not (ending.timed_out or ending.broken_off):
            self.act(LocateRanks(Why.IMPORTS, ASK_SECONDS, self.interruption.waited_for))
        elif kept or not ending.timed_out:
            self.skip_grace()

    def break_off_imports(self, report: HangReport) -> None:
        late = self.interruption.waited_for.keys()
        importing = {rank for group in report.groups if group.importing for rank in group.ranks}
        if not late or not late <= importing or self.state.interrupts > 2:  # noqa: PLR2004 - a third came
            self.skip_grace()
            return
        self.change(self.interruption.at_once())
        self.set(broken_off=True)

    def skip_grace(self) -> None:
        job, waited_for = self.job, self.interruption.waited_for
        lost = format_ranks(job.members.ranks) if job.kept else ""
        abandon_at = min(self.state.abandon_at, self.now + self.state.grace + END_SECONDS)
        self.set([Order.SKIP_GRACE], skipped=True, skip_at=NEVER, abandon_at=abandon_at, lost=lost)
        if not job.kept:
            self.act(Order.STOP_AGENT)
        elif waited_for:
            late = format_ranks(waited_for)
            self.replace_ranks(f"{late} had not ended when the job was interrupted again")
        else:
            self.replace_ranks("it was interrupted twice")

    def replace_ranks(self, reason: str) -> None:
        self.act(RestartAsked(reason))
        self.job = replace(self.job, replacing=True)

    def tick(self) -> None:
        self.change(self.interruption.tick(self.job.run, self.job.present, self.now, self.patience))
        self.press()
        self.watch()

    def answered(self, answer: messages.Where) -> None:
        self.change(self.interruption.answered(answer, self.job.run, self.now, self.patience))

    @property
    def waits_for_ranks(self) -> bool:
        """Whether interrupted ranks are waited for: they hold variables, or they save."""
        return self.job.kept or bool(self.job.run.preempted)

    @property
    def patience(self) -> float:
        """The grace period, as far as ranks that wait for each other are left alone for it."""
        return self.state.grace if self.waits_for_ranks else 0.0

    def press(self) -> None:
        """Replace persistent ranks that have seen the interrupt twice and go on with their job."""
        job, now = self.job, self.now
        if not (self.waits_for_ranks and job.at_work):
            return
        self.change(self.interruption.press(now, self.state.grace))
        if job.replacing or not job.kept:
            return
        if unfreed := self.interruption.unfreed(now):
            self.replace_ranks(
                f"{format_ranks(unfreed)} could not be freed: NCCL did not abort its collective"
            )
        elif deaf := self.interruption.deaf(now):
            self.replace_ranks(
                f"{format_ranks(deaf)} went on after two interrupts, --grace {self.state.grace:g} s apart"
            )

    def watch(self) -> None:
        now, pauses = self.now, self.job.asks or self.job.run.awaits_nodes
        # Time spent in a prompt or in an engine's queue counts for no limit.
        if pauses or self.state.paused_at is not None:
            self.state = self.state.paused(now, goes_on=pauses)
        ending = self.state
        if now >= ending.abandon_at:
            self.act(Order.FINISH_JOB)
            return
        if now >= ending.skip_at:
            self.skip_grace()
        elif now >= ending.deadline and not ending.begun:
            self.set([LocateRanks(Why.TIMEOUT, ANSWER_SECONDS)], begun=True, timed_out=True)
        elif now >= ending.deadline and ending.told and not ending.interrupts:
            # An interrupt that spares the ranks has told them to end, and does not wait for ever either.
            self.set(timed_out=True)
        elif not ending.begun and ending.hang.due(now) and Why.HANG not in self.job.searches:
            self.act(LocateRanks(Why.HANG, ANSWER_SECONDS))
        self.check_for_late()

    def check_for_hang(self, report: HangReport, asked: float) -> None:
        watch, hangs = self.state.hang.hangs(report, asked)
        self.set(hang=watch)
        if hangs:
            told = messages.Noticed(text=f"nothing heard for {watch.seconds:g} s\n{report}")
            self.act(LocatedAll(report=report), told)

    def check_for_late(self) -> None:
        """Find out where interrupted ranks are that do not end, unless that was done a moment ago."""
        job, shown = self.job, self.state.late
        # Fresh ranks have the grace period, and no longer.
        waits = not job.replacing and (job.kept or not self.state.begun)
        if not waits or self.now < shown.survey_at or Why.LATE in job.searches:
            return
        late = overdue(self.interruption.waited_for, self.now)
        if late or shown.ranks:
            self.act(LocateRanks(Why.LATE, ASK_SECONDS, late))

    def show_late(self, report: HangReport, asked: float) -> None:
        late = LateRanks.found(self.interruption.waited_for, report, asked, self.now)
        self.set([messages.Waiting(ranks=dict(late.ranks))], late=late)
        stopped = [rank for rank, seconds in late.stopped.items() if seconds > self.state.grace]
        if self.state.timed_out and stopped and not self.job.replacing:
            # There may be nobody to continue it, and it is not in the middle of anything.
            self.replace_ranks(f"{format_ranks(stopped)} could not be interrupted: stopped by SIGSTOP")
