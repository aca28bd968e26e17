"""How a job ends that does not end by itself, by interrupts or its timeout, and how a hang is noticed.

All is frozen, and reads no clock: `now` is monotonic. `nblaunch.group.lifecycle` holds it in the state of the
job, and acts on it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from nblaunch.protocol.client import EarlyEnd
from nblaunch.protocol.messages import Collective
from nblaunch.protocol.reports import HangReport

NEVER = float("inf")
ANSWER_SECONDS = 1.0
"""How long ranks have to say where they are."""
ASK_SECONDS = 0.3
"""How long they have where somebody waits for an interrupt."""
END_SECONDS = 30.0
"""An agent that cannot be moved (uninterruptible ranks) must not hold the job longer."""


class Why(enum.IntEnum):
    """Why a machine looks where the ranks of its job are; numbers from 0 on are others who have asked."""

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


def _pending(collectives: tuple[Collective, ...]) -> _Pending:
    return tuple((known.key, known.sequence) for known in collectives if not known.completed)


# Interrupted ranks that are still at work: shown about once a second with where they are, and for how long.

# All but ranks in C code answer an interrupt sooner than this.
_FIRST_SECONDS = 0.6
_BETWEEN_SECONDS = 1.0
_STOPPED = "its process is stopped"


class LateRanks(msgspec.Struct, frozen=True):
    """Interrupted ranks that are still at work, as they are shown."""

    look_at: float = 0.0
    """When to look again."""
    ranks: Mapping[int, str] = {}
    stopped: Mapping[int, float] = {}
    """Those whose process is stopped (SIGSTOP), and how many seconds ago each was interrupted."""

    @classmethod
    def of(cls, waited_for: Mapping[int, float], report: HangReport, asked: float, now: float) -> LateRanks:
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
    """Return where each rank is, in one line."""
    found = {rank: f"still {group.headline}" for group in report.groups for rank in group.ranks}
    for rank, stack in report.silent.items():
        innermost = next((line.strip() for line in reversed(stack.splitlines()) if line.strip()), "")
        if innermost.startswith(_STOPPED):
            found[rank] = f"but {innermost}"
        else:
            at = f", at {innermost}" if innermost else ""
            found[rank] = f"still in C code that holds its interpreter{at}"
    return found


# The end.


class Ending(msgspec.Struct, frozen=True):
    """What ends a job early, and how far that is.

    First a look: where are the ranks? Then they are told to end. Fresh ranks have the grace period for that.
    Those of a session hold variables: a rank in C code is waited for, and one that is importing, which the
    second interrupt only breaks off.
    """

    timeout: float | None = None
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
    where: str = ""
    """Where they were before that."""
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
    give_up_at: float = NEVER
    """When the job ends, whatever its ranks do."""

    @classmethod
    def of(cls, timeout: float | None, hang_after: float | None, began: float) -> Ending:
        """Return the limits of a job that has begun."""
        deadline = NEVER if timeout is None else began + timeout
        return cls(timeout, deadline, hang=HangWatch(hang_after, began))

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
        """What the client is told of it; None if the job ends by itself."""
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
