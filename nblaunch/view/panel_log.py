"""The output of all ranks as one list: each rank's lines keep their order, and equal lines stand once.

Unlike `insight.folding`, which has all lines of a run that is over, this list grows with each tick, and a
row that was sent changes only where a rank joins or leaves it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NotRequired, TypedDict

from nblaunch.protocol.reports import format_ranks, plural
from nblaunch.view.panel_output import KEPT, RankNews

ROWS = 3_000
"""Rows that the page keeps."""
WHOLE_CHARACTERS = 1_500_000
"""Rows that a page gets when it starts; of more the latest."""
_NEAR_ROWS = 60
_NEXT_PIECES = 8
_LEAST_GAP = 1e-6
_BLANK = re.compile(r"(?:\s|</?(?:b|em|i|ins|span)\b[^>]*>)*")
"""A piece of output, as HTML, in which nothing is to be seen: the tags are those of colours and of stderr."""


class LogNews(TypedDict):
    """New and changed rows of the log, and the numbers of removed ones.

    A row is `[number, numbers of ranks, HTML, number of the row before it]`, None for what has not changed;
    without the last a new row is the last one. With a fifth element it says how much is left out.
    """

    rows: list[list[object]]
    gone: list[int]
    clear: NotRequired[bool]


@dataclass(slots=True, eq=False)
class _Row:
    number: int
    order: float
    piece: str
    ranks: set[int] = field(default_factory=set)
    missing: int = 0
    gone: bool = False
    sent: tuple[str, str] | None = None

    @property
    def names(self) -> str:
        return format_ranks(self.ranks).partition(" ")[2]


@dataclass(slots=True)
class _RankRows:
    """What one rank wrote: the rows of its pieces, by their numbers, and how far down it has come."""

    next: int
    first: int
    rows: dict[int, _Row] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    reached: float = -inf


def _order(row: _Row) -> float:
    return row.order


class PanelLog:
    """Folds the news of the ranks into rows, and remembers which of these the page has."""

    def __init__(self) -> None:
        self._attempt = 0
        self._begin()
        self._cleared = False

    def _begin(self) -> None:
        self._rows: list[_Row] = []
        self._by_piece: dict[str, list[_Row]] = {}
        self._written: dict[int, _RankRows] = {}
        self._made = 0
        self._changed: dict[int, _Row] = {}
        self._gone: list[int] = []
        self._cleared = True

    def take(self, attempt: int, news: Mapping[int, RankNews]) -> LogNews | None:
        """Fold what the ranks wrote in this attempt; return what the page has to draw."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._begin()
        gaps: dict[int, int] = {}
        for rank, each in news.items():
            if each.clear is not None or rank not in self._written:
                self._clear(rank)
                base = each.clear or 0
                self._written[rank] = _RankRows(base, base)
            known = self._written[rank]
            first = next((number for number, _ in each.sent if number >= known.next), known.next)
            if first > known.next:
                gaps[rank] = first - known.next
        if gaps:
            self._leave_out(gaps)
        for rank, each in news.items():
            for place, (number, piece) in enumerate(each.sent, 1):
                self._add(rank, number, piece, each.sent[place : place + _NEXT_PIECES - 1])
            known = self._written[rank]
            for number in known.numbers[:-KEPT]:
                del known.rows[number]
            del known.numbers[:-KEPT]
        if len(self._rows) > ROWS:
            for row in self._rows[: -ROWS * 3 // 4]:
                self._forget(row)
            self._rows = self._rows[-ROWS * 3 // 4 :]
        return self._news()

    def whole(self) -> LogNews:
        """Return all rows that the page has, as many of the latest as it can take."""
        room, rows = WHOLE_CHARACTERS, []
        for row in reversed(self._rows):
            room -= len(row.piece) if row.sent else 0
            if room < 0:
                break
            rows.append(row)
        shown = [_message(row, row.names, row.piece) for row in rows[::-1] if row.sent]
        return LogNews(rows=shown, gone=[], clear=True)

    def _news(self) -> LogNews | None:
        news = LogNews(rows=[], gone=self._gone)
        changed, self._changed, self._gone = self._changed, {}, []
        last = max((row.order for row in self._rows if row.sent), default=-inf) if changed else 0
        for row in sorted(changed.values(), key=_order):
            names, known = row.names, row.sent
            if row.gone or known == (names, row.piece):
                continue
            content = None if known and known[1] == row.piece else row.piece
            shown = _message(row, None if known and known[0] == names else names, content)
            if known is None and row.order < last:
                place = self._place(row.order)
                shown[3] = self._rows[place - 1].number if place else 0
            row.sent = names, row.piece
            news["rows"].append(shown)
        if self._cleared:
            news["clear"], self._cleared = True, False
        return news if news["rows"] or news["gone"] or "clear" in news else None

    def _add(self, rank: int, number: int, piece: str, following: Sequence[tuple[int, str]]) -> None:
        """Add a piece of a rank; `following` is what the rank wrote next."""
        known = self._written[rank]
        before = known.rows.get(number)
        if before is not None and before.gone:
            before = None
        if before is not None and before.piece == piece:
            return
        if number not in known.rows:
            insort(known.numbers, number)
        known.next = max(known.next, number + 1)
        lower, upper = _bounds(known, number)
        row = self._find(piece, rank, lower, upper)
        if before is not None and row is None and len(before.ranks) == 1:
            self._unlist(before)
            before.piece = piece
            self._list(before)
            return
        if before is not None:
            self._leave(before, rank)
        if row is None and before is not None:
            row = self._insert(piece, self._place(before.order) + (rank > min(before.ranks)))
        elif row is None:
            row = self._insert(piece, self._place(self._ahead(rank, lower, upper, following)))
        row.ranks.add(rank)
        self._changed[row.number] = row
        known.rows[number] = row
        if upper == inf:
            known.reached = row.order

    def _find(self, piece: str, rank: int, lower: float, upper: float) -> _Row | None:
        rows = self._by_piece.get(piece, [])
        found = None
        for row in rows[bisect_right(rows, lower, key=_order) :]:
            if row.order >= upper:
                break
            if rank not in row.ranks:
                found = row
                break
        if found is None or not _is_blank(piece):
            return found
        # A blank line further down would put the rank's next lines below it.
        place = self._place(found.order)
        return found if not place or self._rows[place - 1].order <= lower else None

    def _ahead(self, rank: int, lower: float, upper: float, following: Sequence[tuple[int, str]]) -> float:
        """Return before which row a line belongs that only this rank has: its next shared line.

        That could not be shared otherwise; only close to the end, where the reader looks.
        """
        if len(self._rows) >= _NEAR_ROWS:
            lower = max(lower, self._rows[-_NEAR_ROWS].order)
        for _, piece in following:
            row = None if _is_blank(piece) else self._find(piece, rank, lower, upper)
            if row is not None:
                return row.order
        return upper

    def _leave_out(self, gaps: Mapping[int, int]) -> None:
        """Have one note for all that was left out in a tick."""
        row = self._rows[-1] if self._rows else None
        if row is None or not row.missing:
            row = self._insert("", len(self._rows))
            self._unlist(row)
        row.missing += sum(gaps.values())
        row.ranks |= gaps.keys()
        row.piece = f"… {plural(row.missing, 'line')} of {format_ranks(row.ranks)} left out …"
        self._changed[row.number] = row
        for rank in gaps:
            self._written[rank].reached = row.order

    def _clear(self, rank: int) -> None:
        if rank not in self._written:
            return
        for row in [row for row in self._rows if rank in row.ranks and not row.missing]:
            self._leave(row, rank)
        self._rows = [row for row in self._rows if not row.gone]

    def _insert(self, piece: str, place: int) -> _Row:
        rows = self._rows
        before = rows[place - 1].order if place else (rows[0].order - 2 if rows else 0.0)
        after = rows[place].order if place < len(rows) else before + 2
        if after - before < _LEAST_GAP:
            self._renumber()
            return self._insert(piece, place)
        self._made += 1
        row = _Row(self._made, (before + after) / 2, piece)
        rows.insert(place, row)
        self._list(row)
        return row

    def _renumber(self) -> None:
        orders = [row.order for row in self._rows]
        for known in self._written.values():
            known.reached = bisect_right(orders, known.reached) - 1.0
        for order, row in enumerate(self._rows):
            row.order = float(order)

    def _leave(self, row: _Row, rank: int) -> None:
        row.ranks.discard(rank)
        if row.ranks:
            self._changed[row.number] = row
        else:
            del self._rows[self._place(row.order)]
            self._forget(row)

    def _forget(self, row: _Row) -> None:
        self._unlist(row)
        row.gone = True
        if row.sent:
            self._gone.append(row.number)

    def _list(self, row: _Row) -> None:
        insort(self._by_piece.setdefault(row.piece, []), row, key=_order)
        self._changed[row.number] = row

    def _unlist(self, row: _Row) -> None:
        rows = self._by_piece.get(row.piece, [])
        if row in rows:
            rows.remove(row)
        if not rows:
            self._by_piece.pop(row.piece, None)

    def _place(self, order: float) -> int:
        return bisect_left(self._rows, order, key=_order)


def _bounds(known: _RankRows, number: int) -> tuple[float, float]:
    """Return between which rows a rank's piece belongs: after its previous piece, before its next one."""
    place = bisect_left(known.numbers, number)
    is_last = place == len(known.numbers) - 1
    above = known.rows[known.numbers[place - 1]] if place else None
    below = None if is_last else known.rows[known.numbers[place + 1]]
    upper = below.order if below is not None else inf
    if above is not None:
        return above.order, upper
    return known.reached if is_last and number != known.first else -inf, upper


def _is_blank(piece: str) -> bool:
    return _BLANK.fullmatch(piece) is not None


def _message(row: _Row, names: str | None, content: str | None) -> list[object]:
    return [row.number, names, content, None, 1] if row.missing else [row.number, names, content, None]
