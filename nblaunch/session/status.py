"""What a session is doing, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank of a session: its state is `idle`, `running`, `starting` or `gone`; `memory` in bytes.

    `waiting` says since when a rank has been interrupted, and what it is in; empty unless a job waits for it.
    """

    rank: int
    state: str
    pid: int | None
    device: str
    memory: int | None
    waiting: str = ""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What a session is doing; `attempt` counts how often its ranks were started anew."""

    name: str
    world_size: int
    backend: str
    attempt: int
    ranks: tuple[RankStatus, ...]

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - IPython's own protocol
        """Show the lines in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        """Return a line for the session, and one for each rank."""
        lines = [f"session {self.name!r}: {self.world_size} ranks, {self.backend}"]
        for each in self.ranks:
            memory = f", {each.memory / 1e6:.0f} MB" if each.memory is not None else ""
            waiting = f", {each.waiting}" if each.waiting else ""
            lines.append(f"  rank {each.rank}: {each.state}, {each.device}{memory}{waiting}")
        return "\n".join(lines)


def alive(pid: int | None) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return pid is not None and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def own_memory(pid: int | None) -> int | None:
    """Return the bytes that belong to a process alone, None if that cannot be told."""
    if pid is None:
        return None
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return None
