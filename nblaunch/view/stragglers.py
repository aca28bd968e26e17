"""Which ranks stay behind the others: by what they print, what they have begun, and who has finished."""

from __future__ import annotations

from nblaunch._state import RunState, State

SILENT_SECONDS = 10.0
FINISHED_SECONDS = 2.0
SILENT = "silent while the others print"
BEHIND_SECONDS = 2.0
BEHIND = "behind the others"
UNFINISHED = "most others have finished"


class Stragglers:
    """Looks at a run again and again, and remembers since when each rank is silent."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._attempt = -1
        self._written: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._begun: dict[int, int | None] = {}
        self._moved: dict[int, float] = {}
        self._most_finished: float | None = None

    def marks(self, state: RunState, now: float) -> dict[int, str]:
        """Return why ranks are taken for stragglers; `now` is in seconds."""
        if state.attempt.number != self._attempt:
            self._attempt, self._written, self._heard = state.attempt.number, {}, {}
            self._begun, self._moved = {}, {}
            self._most_finished = None
        for rank, known in state.ranks.items():
            written = known.transcript.written
            if self._written.get(rank) != written:
                self._written[rank], self._heard[rank] = written, now
            if known.collectives != self._begun.get(rank, -1):
                self._begun[rank], self._moved[rank] = known.collectives, now
        return {**self._silent(state, now), **self._behind(state, now), **self._unfinished(state, now)}

    def _behind(self, state: RunState, now: float) -> dict[int, str]:
        """Find ranks that others wait for: these have begun a collective that those have not."""
        begun = {rank: count for rank in _running(state) if (count := self._begun[rank]) is not None}
        most = max(begun.values(), default=0)
        return {
            rank: f"{_counted(most - count)} {BEHIND}"
            for rank, count in begun.items()
            if count < most and now - self._moved[rank] >= BEHIND_SECONDS
        }

    def _unfinished(self, state: RunState, now: float) -> dict[int, str]:
        finished = sum(known.state is State.SUCCEEDED for known in state.ranks.values())
        if finished * 2 <= len(state.ranks):
            self._most_finished = None
            return {}
        if self._most_finished is None:
            self._most_finished = now
        if now - self._most_finished < FINISHED_SECONDS:
            return {}
        return dict.fromkeys(_running(state), UNFINISHED)

    def _silent(self, state: RunState, now: float) -> dict[int, str]:
        """Find running ranks that have been silent for long, while more than half of the running are not.

        Where only one rank prints, as many programs have it, nobody is behind.
        """
        running = _running(state)
        fresh = [
            rank for rank in running if self._written[rank] and now - self._heard[rank] < SILENT_SECONDS / 2
        ]
        if len(fresh) * 2 <= len(running) and not (len(running) == 2 and fresh):  # noqa: PLR2004 - a pair
            return {}
        # Of two, one that has never printed may just be the one that does not.
        return {
            rank: SILENT
            for rank in running
            if now - self._heard[rank] >= SILENT_SECONDS and (len(running) > 2 or self._written[rank])  # noqa: PLR2004
        }


def _running(state: RunState) -> list[int]:
    return [rank for rank, known in state.ranks.items() if known.state is State.RUNNING]


def _counted(collectives: int) -> str:
    return "1 collective" if collectives == 1 else f"{collectives} collectives"
