"""`--hang-after`: noticing ranks that are silent inside one collective, without stopping the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields

from nblaunch._protocol import Collective
from nblaunch._reports import HangReport
from nblaunch._state import RankState, RunState

_Begun = tuple[tuple[tuple[str, str, tuple[int, ...]], int], ...]


class HangWatch:
    """Asks where the ranks are once nothing has been heard for a while, and says what it finds once.

    A rank with no message and no output is not a hang by itself (it may compute); one that is still in the
    collective in which it was `seconds` ago is.
    """

    def __init__(self, seconds: float | None, ask: Callable[[], HangReport]) -> None:
        """Watch for `seconds` of silence; None watches nothing."""
        self._seconds = seconds
        self._ask = ask
        self._state: RunState | None = None
        self._heard = time.monotonic()
        self._before: Mapping[int, _Begun] = {}
        self._told: set[_Begun] = set()

    def look(self, state: RunState) -> HangReport | None:
        """Return a report of a run in this state, if there is anything new to say about it."""
        if self._seconds is None:
            return None
        now = time.monotonic()
        if self._state is None or not silent_between(self._state, state):
            self._state, self._heard, self._before = state, now, {}
            return None
        if now - self._heard < (self._seconds if self._before else self._seconds / 2):
            return None
        report = self._ask()
        here = {rank: begun for rank, known in report.collectives.items() if (begun := _begun(known))}
        stuck = {rank for rank, begun in here.items() if self._before.get(rank) == begun}
        first_look, self._before = not self._before, here
        if first_look:
            return None
        self._heard = now
        waiting = tuple(sorted({begun for rank, begun in here.items() if rank in stuck}))
        key = tuple(pair for begun in waiting for pair in begun)
        if not stuck or key in self._told:
            return None
        self._told.add(key)
        return report


def _begun(collectives: tuple[Collective, ...]) -> _Begun:
    """Return the collectives that a rank has begun and not ended."""
    return tuple((known.key, known.sequence) for known in collectives if not known.completed)


def silent_between(before: RunState, after: RunState) -> bool:
    """Return whether nothing was heard between two states of a run; that ranks were measured says nothing."""
    return before is after or (
        before.ranks.keys() == after.ranks.keys()
        and _same(before, after, but="ranks")
        and all(_same(before.ranks[rank], known, but="usage") for rank, known in after.ranks.items())
    )


def _same(before: RunState | RankState, after: RunState | RankState, but: str) -> bool:
    # By identity: a fold keeps what a message has not changed, and comparing output would take long.
    names = (each.name for each in fields(before) if each.name != but)
    return before is after or all(getattr(before, name) is getattr(after, name) for name in names)
