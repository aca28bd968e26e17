"""Making the ranks of a kept group fit for another job, after one that failed or was interrupted.

`Recovery` is a pure machine, and frozen. A method that changes it returns the next value, and the messages to
send. It reads no clock: `now` is monotonic. `nblaunch.group.lifecycle` holds it in its state.

Ranks of a group that is fit (`nblaunch.group.fitness`) are left as they are. All others form their default
process group again, under a new prefix of the same store, and keep what they hold in memory. Ranks that do
not get ready in time are replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from nblaunch.diagnose.hang import connections_between
from nblaunch.group.fitness import Tallies, unfit
from nblaunch.group.machine import Send, Sends, Survey
from nblaunch.protocol.messages import DeadVariable, FreeCollective, Recover, Recovered, Where
from nblaunch.protocol.reports import format_ranks

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
        freed = () if self.gone is None else free(answers, answers, self.gone)
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


def free(ranks: Collection[int], answers: Mapping[int, Where], lost: frozenset[str]) -> Sends:
    """Free these ranks by shutting down their connections to each other and to lost machines."""
    ends = between_ranks(answers)
    for rank, where in answers.items():
        away = (each.fd for each in where.connections if each.remote[0].removeprefix("::ffff:") in lost)
        ends[rank] = (*ends.get(rank, ()), *away)
    return tuple(Send(rank, FreeCollective(fds=ends.get(rank, ()))) for rank in sorted(ranks))
