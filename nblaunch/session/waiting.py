"""Saying which ranks an ending job waits for, where they are, and for how long; on the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from nblaunch._reports import HangReport

# An interrupt is answered sooner than this by all but ranks in C code.
_FIRST_SECONDS = 0.6
_ASK_SECONDS = 0.3
_BETWEEN_SECONDS = 1.0
STOPPED = "its process is stopped"


class Group(Protocol):
    """What is asked of the ranks."""

    @property
    def waited_for(self) -> Mapping[int, float]:
        """The ranks that have been interrupted and are still at work, and since when (monotonic)."""

    def where(self, seconds: float) -> HangReport:
        """Ask every rank where it is."""

    def waits_for(self, ranks: Mapping[int, str]) -> None:
        """Show for each of these ranks what is said of it."""


class Waiting:
    """Looks at the ranks that are waited for, about once a second."""

    def __init__(self, group: Group) -> None:
        """Begin with nothing said."""
        self._group = group
        self._look_at = 0.0
        self._said: dict[int, str] = {}
        self.stopped: dict[int, float] = {}
        """The ranks whose process is stopped (SIGSTOP), and for how many seconds each has been waited for."""

    def look(self) -> None:
        """Say which ranks are waited for, if any are, and if that was not done a moment ago."""
        now = time.monotonic()
        late = {rank: since for rank, since in self._group.waited_for.items() if now - since > _FIRST_SECONDS}
        if now < self._look_at or not (late or self._said):
            return
        places = places_of(self._group.where(_ASK_SECONDS)) if late else {}
        # faulthandler takes its time for each rank that holds its interpreter.
        self._look_at = time.monotonic() + max(_BETWEEN_SECONDS, 2 * (time.monotonic() - now))
        self._said = {
            rank: f"interrupted {now - since:.0f} s ago, {places.get(rank, 'still at work')}"
            for rank, since in late.items()
        }
        self.stopped = {rank: now - since for rank, since in late.items() if STOPPED in places.get(rank, "")}
        self._group.waits_for(self._said)


def places_of(report: HangReport) -> dict[int, str]:
    """Return where each rank is, in one line."""
    found = {rank: f"still {group.headline}" for group in report.groups for rank in group.ranks}
    for rank, stack in report.silent.items():
        innermost = next((line.strip() for line in reversed(stack.splitlines()) if line.strip()), "")
        if innermost.startswith(STOPPED):
            found[rank] = f"but {innermost}"
        else:
            at = f", at {innermost}" if innermost else ""
            found[rank] = f"still in C code that holds its interpreter{at}"
    return found
