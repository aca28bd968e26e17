"""Making the ranks of a persistent group fit for another job, after one that failed or was interrupted.

`Recovery` is a pure machine, and frozen. A method that changes it returns the next value, and the messages to
send. It reads no clock: `now` is monotonic. `nblaunch.group.lifecycle` holds it in its state.

Ranks of a group that is fit (`nblaunch.group.fitness`) are left as they are. All others form their default
process group again, under a new prefix of the same store, and keep what they hold in memory. Ranks that do
not get ready in time are replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from nblaunch.diagnose.hang import connections_between
from nblaunch.group.fitness import Tallies, unfit
from nblaunch.group.machine import RestartAsked, Send, Sends, Survey
from nblaunch.protocol import messages
from nblaunch.protocol.reports import format_ranks, ranks_by_answer

# Only a rank that holds its interpreter does not answer; but a busy machine may take its time.
_FITNESS_SECONDS = 5.0
# A wait that is shorter than this needs no explanation.
_SHOWN_SECONDS = 1.0
# How long ranks that are seen to be busy with it may take to form their group again.
_RECOVERY_SECONDS = 60.0


REFORMING = "re-forming the process group"
REFORMED = "process group re-formed; variables kept; groups you made yourself with new_group are gone"
NOT_IN_PLACE = "the process groups could not be formed again in place: "
UNUSABLE_IN_PLACE = "cannot be used any more, although the groups go on"
REFORMED_IN_PLACE = "process group re-formed in place; variables, models and groups go on"
STEPPED = (
    "an optimizer's step was queued on the GPU behind the interrupted collective, and ran with gradients "
    "that were not summed: its parameters and its state are wrong. Load a checkpoint, or make these anew: "
)


APART = (
    "the ranks stopped within a step of {}: it is {}. Parameters may differ between ranks: "
    "load a checkpoint, or look with %distributed diff"
)
RATES_APART = (
    "the ranks stopped between a step of {} and that of its scheduler: its learning rate is {}. Parameters "
    "will differ between ranks: set it on all of them, or load a checkpoint"
)


Consequences = tuple[Send | RestartAsked | messages.Noticed | messages.Waiting, ...]


class Recovery(msgspec.Struct, frozen=True):
    """The recoveries of a group, one after the other."""

    number: int = 0
    members: frozenset[int] = frozenset()
    fitness: Survey | None = None
    """The survey that shows whether the group is fit; ranks answer once they have ended the job."""
    reform: bool = False
    called: Tallies = {}
    """The collectives that the ranks have called within the job."""
    succeeded: bool = False
    unfit: str = ""
    """Why the group is formed again."""
    gone: frozenset[str] | None = None
    """The addresses of lost machines if ranks are lost; the other ranks then only end what they do.

    They form the process group afterwards, without the lost ranks.
    """
    began: float = 0.0
    waiting: frozenset[int] = frozenset()
    dead: Mapping[messages.DeadVariable, tuple[int, ...]] = {}
    stepped: Mapping[str, tuple[int, ...]] = {}
    overdue_at: float | None = None
    """When ranks that are not ready are asked whether they still recover, or were asked long enough ago."""
    until: float = 0.0
    late: Survey | None = None

    @property
    def busy(self) -> bool:
        return self.overdue_at is not None

    @property
    def awaited(self) -> frozenset[int]:
        return self.members if self.fitness is not None else self.waiting

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
        fitness, sends = Survey.begin(members, now + _FITNESS_SECONDS)
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

    def answered(self, answer: messages.Where) -> Recovery:
        if self.fitness is None and self.late is None:
            return self
        fitness = self.fitness and self.fitness.with_answer(answer)
        return replace(self, fitness=fitness, late=self.late and self.late.with_answer(answer))

    def tick(self, now: float) -> tuple[Recovery, Consequences]:
        """Go on once all have answered, or have had the time to; give up ranks that do not come back."""
        after, then = self, Consequences()
        if self.fitness is not None and self.fitness.over(now):
            after, then = self._recover(self.fitness.answers, now)
        if after.reform and after.waiting and now >= after.began + _SHOWN_SECONDS:
            then = (*then, messages.Waiting(doing=REFORMING))
        if after.overdue_at is None or now < after.overdue_at:
            return after, then
        if after.late is None:
            late, questions = Survey.begin(after.awaited)
            return replace(after, late=late, overdue_at=now + 1.0), (*then, *questions)
        # Ranks at it are not lost: a large heap takes time to collect.
        busy = after.late.missing or any(where.frames for where in after.late.answers.values())
        if busy and now < after.until:
            return replace(after, late=None, overdue_at=now + 1.0), then
        why = RestartAsked("ranks did not come back within the grace period")
        told = messages.Noticed(text=f"{format_ranks(after.awaited)} did not get ready for another job")
        return after.abandoned(), (*then, why, told)

    def _recover(self, answers: Mapping[int, messages.Where], now: float) -> tuple[Recovery, Consequences]:
        number = self.number + 1
        why = unfit(answers, self.members, self.called, succeeded=self.succeeded) if not self.reform else ""
        reform = self.gone is None and (self.reform or bool(why))
        shared_ends = between_ranks(answers) if reform else {}
        # A rank that forms its group with lost ranks would wait without end.
        freed = () if self.gone is None else free(answers, answers, self.gone)
        sends = (
            Send(rank, messages.Recover(number, reform, shared_ends.get(rank, ())))
            for rank in sorted(self.members)
        )
        begun = replace(
            self,
            fitness=None,
            number=number,
            began=now,
            reform=reform,
            unfit=why,
            waiting=self.members,
        )
        return begun, (*freed, *sends)

    def recovered(self, message: messages.Recovered) -> tuple[Recovery, Consequences]:
        """Take one rank's answer; with the last of them, or one that is not fit, the recovery is over."""
        rank, everyone = message.rank, len(self.members)
        if message.number != self.number or rank not in self.waiting:
            return self, ()
        if message.unusable:
            why = f"the GPU context of rank {rank} is unusable: {message.unusable}"
            return self.abandoned(), (RestartAsked(why),)
        if message.error:
            # The others may wait for this one in the barrier, for as long as a group's timeout.
            why = f"the process group could not be formed again on rank {rank}: {message.error}"
            return self.abandoned(), (RestartAsked(why),)
        waiting = self.waiting - {rank}
        dead = {**self.dead, **{each: (*self.dead.get(each, ()), rank) for each in message.dead}}
        stepped = {**self.stepped, **{each: (*self.stepped.get(each, ()), rank) for each in message.stepped}}
        if waiting:
            return replace(self, waiting=waiting, dead=dead, stepped=stepped), ()
        told = list[str]()
        if self.reform:
            # After a job that has succeeded, the user has seen no error that would explain it.
            told += [self.unfit] if self.unfit and self.succeeded else []
            told += [f"{NOT_IN_PLACE}{message.why_not}"] if message.why_not else []
            told.append(REFORMED_IN_PLACE if message.in_place else REFORMED)
            names = ", ".join(f"{each}{_where(on, everyone)}" for each, on in stepped.items())
            told += [f"{STEPPED}{names}"] if names else []
        if dead:
            remedies = ", ".join(
                f"{each.name}{_where(on, everyone)} ({each.remedy})" for each, on in dead.items()
            )
            made = UNUSABLE_IN_PLACE if message.in_place else "made for a process group that is gone"
            told.append(f"{made}, with what revives each: {remedies}")
        return self.abandoned(), tuple(messages.Noticed(text=each) for each in told)


def apart(steps: Mapping[int, tuple[messages.StepsTaken, ...]]) -> Iterator[str]:
    """Say of which optimizers the ranks of a job that has failed have stopped one step apart.

    A step of its scheduler counts, too: where that is one apart, the learning rate is another one.

    Ranks that sum gradients cannot be further apart. Others train each by itself.

    >>> done, before = (messages.StepsTaken(0, begun=n, ended=n, names=("opt",)) for n in (5, 4))
    >>> print(next(apart({0: (done,), 1: (before,)})).partition(".")[0])
    the ranks stopped within a step of opt: it is done on rank 0, not done on rank 1
    """
    by_number = {rank: {each.number: each for each in told} for rank, told in steps.items()}
    # Ranks tell of the last ones only.
    known = max((min(told) for told in by_number.values() if told), default=0)
    for number in sorted({each for told in by_number.values() for each in told if each >= known}):
        none = messages.StepsTaken(number, begun=0, ended=0, gone=True)
        taken = {rank: told.get(number, none) for rank, told in by_number.items()}
        optimizers = taken.values()
        last = max(each.begun for each in optimizers)
        one_apart = len(steps) > 1 and last - min(each.ended for each in optimizers) == 1
        names = ", ".join(next((each.names for each in optimizers if each.names), ("an optimizer",)))
        # All ranks are past one that is gone on all.
        if one_apart and not all(each.gone for each in optimizers):
            done = {
                rank: "done" if each.ended == last else "done in part" if each.begun == last else "not done"
                for rank, each in taken.items()
            }
            yield APART.format(names, _on_ranks(done))
        elif rates := _rates_apart(taken):
            yield RATES_APART.format(names, _on_ranks(rates))


def _rates_apart(taken: Mapping[int, messages.StepsTaken]) -> dict[int, str]:
    """Return an optimizer's learning rates by rank where they were the same before, and are not now."""
    alike = len({each.rates_before for each in taken.values()}) == 1
    groups = list(zip(*(each.rates for each in taken.values()), strict=False)) if alike else []
    differing = next((each for each in groups if len(set(each)) > 1), ())
    return {rank: f"{rate:.6g}" for rank, rate in zip(taken, differing, strict=False)}


def _on_ranks(by_rank: Mapping[int, str]) -> str:
    return ", ".join(f"{word} on {format_ranks(on)}" for word, on in ranks_by_answer(by_rank).items())


def _where(on: tuple[int, ...], members: int) -> str:
    return "" if len(on) == members else f" on {format_ranks(on)}"


def between_ranks(answers: Mapping[int, messages.Where]) -> dict[int, tuple[int, ...]]:
    """Return each rank's descriptors of connections whose other end is another rank's."""
    found = connections_between(answers)
    return {rank: tuple(each.fd for each in connections) for rank, connections in found.items()}


def free(ranks: Collection[int], answers: Mapping[int, messages.Where], lost: frozenset[str]) -> Sends:
    """Free these ranks by shutting down their connections to each other and to lost machines."""
    ends = between_ranks(answers)
    for rank, where in answers.items():
        away = (each.fd for each in where.connections if each.remote[0].removeprefix("::ffff:") in lost)
        ends[rank] = (*ends.get(rank, ()), *away)
    return tuple(Send(rank, messages.FreeCollective(fds=ends.get(rank, ()))) for rank in sorted(ranks))
