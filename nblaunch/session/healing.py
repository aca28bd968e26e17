"""Making the ranks of a kept group fit for another job after one that failed or was interrupted.

Ranks that agree on how many collectives they have done, and have none open, are left as they are. All
others form their default process group again, under a new prefix of the same store; what they hold in
memory is not touched. Everything here happens on the hub's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nblaunch._protocol import DeadVariable, Heal, Healed, ToRank, Where
from nblaunch._reports import format_ranks
from nblaunch.diagnose.hang import by_group
from nblaunch.session.inquiry import Inquiry, between_ranks
from nblaunch.session.interruption import Interruption

# Only a rank that holds its interpreter does not answer; but a busy machine may take its time.
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it; `failed` says which rank could not and why, empty if all could."""

    reformed: bool
    failed: str = ""
    dead: str = ""
    """Which variables belong to a group that is gone, and what revives each; empty if there are none."""


class Healing:
    """Heals a group, one time after the other; `send(rank, message)` reaches one rank."""

    def __init__(self, send: Callable[[int, ToRank], None]) -> None:
        """Begin with nothing to heal."""
        self._send = send
        self._number = 0
        self._members: frozenset[int] = frozenset()
        self._inquiry: Inquiry | None = None
        self._ask_until = 0.0
        self._reform = False
        self._began = 0.0
        self._waiting: set[int] = set()
        self._errors: dict[int, str] = {}
        self._dead: dict[DeadVariable, list[int]] = {}

    @property
    def busy(self) -> bool:
        """Whether answers are being waited for."""
        return self._inquiry is not None or bool(self._waiting)

    def begin(self, members: Iterable[int], interruption: Interruption) -> None:
        """Find out what the ranks need; they answer once they have ended the job."""
        self._members = frozenset(members)
        self._reform = interruption.cut
        self._inquiry = Inquiry(self._members)
        self._ask_until = time.monotonic() + _ANSWER_SECONDS
        interruption.ask(self._inquiry)

    @property
    def reforming_since(self) -> float | None:
        """Since when ranks are forming their process group again (monotonic); None if they are not."""
        return self._began if self._reform and self._waiting else None

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks that have not said yet that they are ready."""
        return self._members if self._inquiry is not None else frozenset(self._waiting)

    def abandon(self) -> None:
        """Expect no answer: the ranks are no more."""
        self._inquiry, self._waiting = None, set()

    def tick(self, now: float) -> None:
        """Go on once all have answered, or have had the time to."""
        inquiry = self._inquiry
        if inquiry is None or not (inquiry.complete.is_set() or now >= self._ask_until):
            return
        self._inquiry = None
        self._number += 1
        self._began = now
        self._reform = self._reform or not agree(inquiry.answers, self._members)
        self._waiting, self._errors, self._dead = set(self._members), {}, {}
        shared_ends = between_ranks(inquiry.answers) if self._reform else {}
        for rank in self._members:
            self._send(rank, Heal(self._number, self._reform, shared_ends.get(rank, ())))

    def healed(self, message: Healed) -> Outcome | None:
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
