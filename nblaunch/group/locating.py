"""Finding out where the ranks of a group are: one pure machine, whose end is a report.

Ranks that do not answer have their stacks read from outside. Ranks that seem to wait for each other are asked
once more.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec
from msgspec.structs import replace

from nblaunch.diagnose import hang
from nblaunch.group.machine import Sends, Survey
from nblaunch.protocol.messages import Phase, Where
from nblaunch.protocol.reports import HangReport
from nblaunch.protocol.state import RunState, State, hosts_of

# How long a node may take to read the stacks of its ranks, and how much longer this machine may.
_NODE_SECONDS, _HERE_SECONDS = 1.0, 4.0
# A busy machine may leave a transfer alone for as long as that.
_SETTLED_SECONDS, _SETTLED_LATE_SECONDS = 0.5, 1.2
_SETTLED_SOON = {"gloo", "store", "nccl"}
_NODE_SILENT = "  its node has not answered either"


class LocatingStage(enum.Enum):
    """How far a search is."""

    ASKING = "ranks are asked"
    READING = "the stacks of silent ranks are read"
    SETTLING = "what seems to be a deadlock has the time to end"
    AGAIN = "ranks that seem to wait for each other are asked once more"


class Locating(msgspec.Struct, frozen=True):
    """A search for ranks that is under way; times are monotonic."""

    began: float
    seconds: float
    """How long ranks have for an answer."""
    survey: Survey
    stage: LocatingStage = LocatingStage.ASKING
    until: float = 0.0
    state: RunState | None = None
    """The job before stacks were read: the signal for that may end what a rank is in, and then the job."""
    silent: frozenset[int] = frozenset()
    """The ranks whose stacks are to be read."""
    stacks: Mapping[int, str] = {}
    circles: frozenset[int] = frozenset()
    """The ranks that seemed to wait for each other."""
    first: Mapping[int, Where] = {}
    """The answers before ranks were asked once more."""

    @classmethod
    def begin(cls, ranks: Iterable[int], seconds: float, now: float) -> tuple[Locating, Sends]:
        survey, sends = Survey.begin(ranks, now + seconds)
        return cls(now, seconds, survey), sends

    def with_answer(self, answer: Where) -> Locating:
        return replace(self, survey=self.survey.with_answer(answer))

    def with_stacks(self, stacks: Mapping[int, str]) -> Locating:
        known = {rank: text for rank, text in stacks.items() if rank in self.silent}
        return replace(self, stacks={**self.stacks, **known}) if known else self

    def over(self, remote: AbstractSet[int], now: float) -> bool:
        match self.stage:
            case LocatingStage.ASKING | LocatingStage.AGAIN:
                return self.survey.over(now)
            case LocatingStage.READING:
                unread = self.silent - self.stacks.keys()
                here = _HERE_SECONDS if unread - remote else 0.0
                return not unread or now >= self.until + here
            case LocatingStage.SETTLING:
                return now >= self.until

    def go_on(
        self, state: RunState, remote: AbstractSet[int], now: float
    ) -> tuple[Locating | HangReport, Sends]:
        """Return what follows a stage that is over, and its questions; `state` is that of the job.

        Ranks whose stacks are to be read are `silent`. `remote` are on other machines, and alive.
        """
        if self.stage is LocatingStage.ASKING and (silent := self._ranks_to_read(state, remote)):
            until = now + _NODE_SECONDS
            return replace(self, stage=LocatingStage.READING, state=state, silent=silent, until=until), ()
        if self.stage is LocatingStage.SETTLING:
            # No two ranks answer at the same time: in between, each may have sent what the other awaits.
            # What `isend` and `irecv` have begun is not in gloo's recorder at all.
            survey, sends = Survey.begin(self.circles, now + self.seconds)
            return replace(self, stage=LocatingStage.AGAIN, survey=survey, first=self.survey.answers), sends
        report = self.report(state, remote)
        if self.stage is LocatingStage.AGAIN or not report.deadlocks:
            return report, ()
        circles = frozenset(rank for circle in report.deadlocks for rank in circle)
        # After how long it is known that an operation of these ranks has ended, if it has: NCCL's watchdog
        # looks ten times a second, that of ProcessGroupNCCL2 (torch 2.15) once.
        backends = {each.backend for rank in circles for each in self.survey.answers[rank].waits}
        until = now + (_SETTLED_SECONDS if backends <= _SETTLED_SOON else _SETTLED_LATE_SECONDS)
        return replace(self, stage=LocatingStage.SETTLING, state=None, circles=circles, until=until), ()

    def _ranks_to_read(self, state: RunState, remote: AbstractSet[int]) -> frozenset[int]:
        return frozenset(
            rank
            for rank in self.survey.missing
            if (known := state.ranks.get(rank)) is not None
            and (known.finishing or not known.state.final)
            # A process that has not sent `Hello` yet would be ended by the signal that dumps a stack.
            and (rank in remote or (known.pid is not None and known.node))
        )

    @property
    def answers(self) -> Mapping[int, Where]:
        """The answers of ranks; where the second answer differs from the first, the rank no longer waits."""
        if self.stage is LocatingStage.AGAIN:
            return {**self.first, **without_other_waits(self.first, self.survey.answers, self.circles)}
        return self.survey.answers

    def report(self, state: RunState, remote: AbstractSet[int]) -> HangReport:
        """Return the report, for ranks that did not answer with the stacks that were read."""
        # A rank may answer while its stack is read: it is in the report once.
        state = self.state or state
        answers = {rank: answer for rank, answer in self.answers.items() if rank not in self.stacks}
        silent, finished, elsewhere = dict[int, str](), list[int](), dict[int, str]()
        for rank, known in state.ranks.items():
            answer = answers.get(rank)
            if known.state is State.SUCCEEDED:
                finished.append(rank)
                answers.pop(rank, None)
            elif known.state.final and not known.finishing:
                continue
            elif answer is None and rank in self.silent:
                silent[rank] = self.stacks.get(rank, _NODE_SILENT if rank in remote else "")
            elif answer is None or not answer.frames:
                idle = "idle" if known.phase is Phase.READY else f"in phase '{known.phase}'"
                elsewhere[rank] = f"finishing: {known.finishing}" if known.finishing else idle
        return hang.report(
            answers,
            silent=dict(sorted(silent.items())),
            finished=finished,
            finishing={rank: known.finishing for rank, known in state.ranks.items() if known.finishing},
            elsewhere=elsewhere,
            hosts=hosts_of(state.ranks),
        )


def without_other_waits(
    first: Mapping[int, Where], again: Mapping[int, Where], ranks: Collection[int]
) -> dict[int, Where]:
    """Return the first answers of these ranks, without waits that have ended, or in which data has come."""
    before, after = hang.connections_between(first), hang.connections_between(again)
    return {
        rank: first[rank]
        if rank in again
        and again[rank].waits == first[rank].waits
        and set(after.get(rank, ())) <= set(before.get(rank, ()))
        else replace(first[rank], waits=())
        for rank in ranks
    }
