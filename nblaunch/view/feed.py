"""What ranks write, as it is sent to the panel: what is new, and no more of it than a page can take."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from nblaunch._state import RunState
from nblaunch.view.cost import fair_limit
from nblaunch.view.tail import Piece, Tail

READ_CHARACTERS = 20_000
"""Text of all ranks together that is drawn in one tick; of more only the end."""
SENT_CHARACTERS = 16_000
"""Lines of all ranks together that are sent in one tick."""
WHOLE_CHARACTERS = 1_500_000
"""Pieces of all ranks together that a page gets which begins anew; of more the latest."""
_LEAST = 300
_RATE = 300_000
_BURST = 600_000
_LARGEST = 2_000_000


class Lines(TypedDict):
    """News of one rank: `told` are number, place in the pieces, number, place, ...

    With `clear`, all that was there before goes, and `clear` is the number that the first piece now has.
    """

    told: list[int]
    clear: NotRequired[int]


class News(TypedDict):
    """What ranks have written since the last tick; equal pieces are sent once."""

    attempt: int
    pieces: list[Piece]
    tails: dict[str, Lines]


class Feed:
    """Reads all ranks' transcripts, again and again.

    jupyter_server drops what a kernel sends above 1 MB a second: lines have a budget for each tick, displays
    (a figure is some 30 KB) one that fills up with time. A display that is updated often shows its latest
    content whenever there is room.
    """

    def __init__(self) -> None:
        """Begin with nothing read."""
        self._tails: dict[int, Tail] = {}
        self._attempt = 0
        self._allowance = float(_BURST)
        self._filled: float | None = None

    def news(self, state: RunState, now: float) -> News | None:
        """Return what is new, or None; `now` is in seconds."""
        if state.attempt.number != self._attempt:
            self._attempt, self._tails = state.attempt.number, {}
        cleared = self._read(state)
        self._fill(now)
        telling = _Telling(self._attempt)
        for rank, tail in cleared.items():
            telling.clear(rank, tail.base)
        busy = {rank: tail for rank, tail in self._tails.items() if tail.busy}
        limit = max(fair_limit((tail.cost() for tail in busy.values()), SENT_CHARACTERS), _LEAST)
        for rank, tail in busy.items():
            for number, piece in tail.lines(limit):
                telling.tell(rank, number, piece)
        for rank, tail in busy.items():
            # After a while without any, one of any size.
            first = _LARGEST if self._allowance >= _BURST else 0
            for number, piece, cost in tail.displays(int(self._allowance), first):
                # What many ranks display alike is sent once.
                self._allowance -= cost if telling.tell(rank, number, piece) else 0
        return telling.news()

    def whole(self) -> News:
        """Return all that has been told and is still there, for a page that begins anew."""
        telling = _Telling(self._attempt)
        limit = WHOLE_CHARACTERS // max(len(self._tails), 1)
        for rank, tail in self._tails.items():
            telling.clear(rank, tail.base)
            for number, piece in tail.latest(limit):
                telling.tell(rank, number, piece)
        return telling.whole()

    def _read(self, state: RunState) -> dict[int, Tail]:
        """Read what is new; return the tails that were cleared."""
        waiting: dict[int, int] = {}
        for rank, known in state.ranks.items():
            tail = self._tails.get(rank)
            if tail is None:
                tail = self._tails[rank] = Tail()
            if tail.seen is not known.transcript:
                waiting[rank] = tail.unread(known.transcript)
        limit = max(fair_limit(waiting.values(), READ_CHARACTERS), _LEAST)
        return {
            rank: self._tails[rank]
            for rank in waiting
            if self._tails[rank].read(state.ranks[rank].transcript, limit)
        }

    def _fill(self, now: float) -> None:
        if self._filled is not None:
            self._allowance = min(self._allowance + _RATE * (now - self._filled), _BURST)
        self._filled = now


class _Telling:
    """Collects pieces, each of them once."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._places: dict[Piece, int] = {}
        self._tails: dict[str, Lines] = {}

    def clear(self, rank: int, base: int) -> None:
        self._lines(rank)["clear"] = base

    def tell(self, rank: int, number: int, piece: Piece) -> bool:
        """Take a piece of a rank; return whether it is the first of its kind."""
        places = self._places
        first = piece not in places
        place = places.setdefault(piece, len(places))
        self._lines(rank)["told"] += (number, place)
        return first

    def news(self) -> News | None:
        return self.whole() if self._tails else None

    def whole(self) -> News:
        return News(attempt=self._attempt, pieces=list(self._places), tails=self._tails)

    def _lines(self, rank: int) -> Lines:
        key = str(rank)
        if key not in self._tails:
            self._tails[key] = Lines(told=[])
        return self._tails[key]
