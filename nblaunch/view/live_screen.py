"""A screen that is read while it is written: its lines are numbered, and those that changed are known."""

from __future__ import annotations

from collections.abc import Iterable

from nblaunch._protocol import Stream
from nblaunch.view.terminal import Cursor, Row, Screen, Style

WIDEST = 2_000
"""Characters of a line that are drawn; a panel shows no more of it, and no line grows for ever."""
_REACHABLE = 200
"""Lines that a program can still move its cursor up to."""


class LiveScreen(Screen):
    """Takes text for ever; what has scrolled away is forgotten."""

    def __init__(self) -> None:
        """Begin with no line."""
        super().__init__()
        self._touched: dict[int, Row] = {}

    @property
    def next_number(self) -> int:
        """Return the number that the next line will have."""
        return self._made

    def write(self, stream: Stream, text: str) -> None:
        """Draw `text`."""
        super().write(stream, text)
        if len(self._rows) > 2 * _REACHABLE:
            self._forget()

    def touched(self) -> dict[int, Row]:
        """Return the lines that have been written on since this was asked, by number."""
        touched, self._touched = self._touched, {}
        return touched

    def skip(self, lines: int, broken: Iterable[Stream]) -> None:
        """Leave out numbers for `lines` that are not drawn; `broken` streams go on with a new line."""
        self._made += lines
        for stream in broken:
            self._cursors.pop(stream, None)

    def seal(self) -> int:
        """Let nothing move the lines so far any more; return the number of what comes now, a display."""
        self._cursors = {}
        self._made += 1
        return self._made - 1

    def clear(self) -> None:
        """Forget all lines."""
        self._rows, self._cursors, self._touched = [], {}, {}

    def _forget(self) -> None:
        del self._rows[:-_REACHABLE]
        first = self._rows[0].number
        for cursor in self._cursors.values():
            gone = sum(row.number < first for row in cursor.rows)
            del cursor.rows[:gone]
            if cursor.row < gone:
                # A bar whose line has scrolled away goes on with a new one.
                cursor.row, cursor.column = len(cursor.rows), 0
            else:
                cursor.row -= gone

    def _write_plain(self, stream: Stream, cursor: Cursor, text: str) -> None:
        """Draw whole lines at the end, which is what programs print, without looking for their place."""
        if cursor.column or cursor.row != len(cursor.rows):
            first, newline, text = text.partition("\n")
            super()._write_plain(stream, cursor, first + newline)
        if cursor.column or cursor.row != len(cursor.rows):
            super()._write_plain(stream, cursor, text)
            return
        *lines, last = text.split("\n")
        rows = [Row(stream, line[:WIDEST], number=number) for number, line in enumerate(lines, self._made)]
        self._made += len(rows)
        self._rows += rows
        cursor.rows += rows
        cursor.row = len(cursor.rows)
        self._touched.update((row.number, row) for row in rows)
        if last:
            self._put(stream, cursor, last)

    def _row(self, stream: Stream, cursor: Cursor) -> Row:
        row = super()._row(stream, cursor)
        self._touched[row.number] = row
        return row

    def _put(self, stream: Stream, cursor: Cursor, text: str) -> None:
        end = cursor.column + len(text)
        if end > WIDEST:
            text = text[: max(WIDEST - cursor.column, 0)]
        if text:
            super()._put(stream, cursor, text)
        cursor.column = end

    def _sequence(self, stream: Stream, cursor: Cursor, final: str, arguments: str) -> None:
        super()._sequence(stream, cursor, final, arguments)
        if final == "J":
            self._touched.update((row.number, row) for row in cursor.rows[cursor.row :])


def code_of(style: Style) -> int:
    """Return a style as one small number, as the panel's script reads it."""
    return style.color + 8 * style.bold + 16 * style.italic + 32 * style.underline
