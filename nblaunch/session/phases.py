"""How long ranks may take to come into being, phase by phase, and what is said when they do not."""

from __future__ import annotations

import time

from nblaunch._protocol import Phase
from nblaunch._reports import format_ranks
from nblaunch._state import RunState

CONNECT_SECONDS = 60.0
PROCESS_GROUP_SECONDS = 120.0


class Phases:
    """The phases of one attempt that have a limit, one after the other: connect, process group."""

    def __init__(self) -> None:
        """Begin without a limit."""
        self._phase: Phase | None = None
        self._deadline = float("inf")
        self._reached: dict[Phase, set[int]] = {Phase.CONNECT: set(), Phase.PROCESS_GROUP: set()}

    @property
    def without_limit(self) -> bool:
        """Whether nothing becomes overdue."""
        return self._deadline == float("inf")

    def begin_connect(self) -> None:
        """Limit the time until ranks that have been forked are heard, if they have not been already."""
        if self._phase is None:
            self._begin(Phase.CONNECT, CONNECT_SECONDS)

    def begin_process_group(self, world_size: int) -> None:
        """Limit the time in which ranks form their group, once the last of them is connected."""
        if self._phase is not Phase.PROCESS_GROUP and len(self._reached[Phase.CONNECT]) == world_size:
            self._begin(Phase.PROCESS_GROUP, PROCESS_GROUP_SECONDS)

    def reached(self, phase: Phase, rank: int) -> None:
        """Take note that a rank has come to the end of a phase."""
        self._reached[phase].add(rank)

    def wait_without_limit(self, world_size: int) -> None:
        """All are connected, and nobody has told them to go on: that may take as long as it likes."""
        if len(self._reached[Phase.CONNECT]) == world_size:
            self._deadline = float("inf")

    def passed(self) -> None:
        """All phases are over."""
        self._deadline = float("inf")

    def overdue(self, now: float, state: RunState) -> tuple[str, str] | None:
        """Return the phase whose time is over, and what is to be said of it; once."""
        if now <= self._deadline or self._phase is None:
            return None
        self._deadline = float("inf")
        late = state.ranks.keys() - self._reached[self._phase]
        seconds = CONNECT_SECONDS if self._phase is Phase.CONNECT else PROCESS_GROUP_SECONDS
        what = f"phase '{self._phase}' did not finish in {seconds:.0f} s"
        return self._phase.value, f"{what}: {format_ranks(late)} did not come that far"

    def _begin(self, phase: Phase, seconds: float) -> None:
        self._phase, self._deadline = phase, time.monotonic() + seconds
