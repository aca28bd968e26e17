r"""Text as a terminal shows it: `\r`, backspace, colours and cursor movement become lines.

A progress bar that draws itself a thousand times is one line here, its last state. What a rank writes
moves only its own lines; unknown control sequences are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from nblaunch.protocol.messages import Stream

MAXIMUM_COLUMN = 4096
_TAB = 8

_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+)"
    r"|(?P<newline>\n)"
    r"|\x1b\[(?P<arguments>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
    r"|(?P<control>[\r\b\t])"
    r"|(?P<surrogate>[\ud800-\udfff])"
    r"|[\x00-\x1f\x7f-\x9f]"
)
_COLORS = re.compile(r"\x1b\[[\d;:]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\t]")


PLAIN = 0
"""A style is a number: a colour, 1 to 6 (red, green, yellow, blue, magenta, cyan) or 0 for none,
and flags. 256 and 24-bit colours are drawn as the nearest of the six, greys as plain text: each
of the six can be read on a light and on a dark page, which an arbitrary colour cannot."""
COLOR, BOLD, ITALIC, UNDERLINE = 7, 8, 16, 32
_SET = {1: BOLD, 3: ITALIC, 4: UNDERLINE}
_UNSET = {22: BOLD, 23: ITALIC, 24: UNDERLINE, 39: COLOR}


@dataclass(frozen=True, slots=True)
class Line:
    """One finished line of one stream, as runs of equal style."""

    runs: tuple[tuple[int, str], ...]
    stream: Stream = Stream.STDOUT

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.runs)


@dataclass(slots=True)
class OpenLine:
    """A line being drawn; without `styles` all of it is plain, as nearly every line is.

    `number` counts the lines of the screen from 0.
    """

    stream: Stream
    text: str = ""
    styles: list[int] | None = None
    number: int = 0

    def put(self, column: int, text: str, style: int) -> int:
        """Write over what is at `column`; return the column after it."""
        end = column + len(text)
        if not self.text and not column and style == PLAIN:
            self.text, self.styles = text, None
            return end
        if style != PLAIN and self.styles is None:
            self.styles = [PLAIN] * len(self.text)
        if self.styles is not None:
            self.styles.extend([PLAIN] * (column - len(self.styles)))
            self.styles[column:end] = [style] * len(text)
        self.text = f"{self.text[:column]:{column}}{text}{self.text[end:]}"
        return end

    def erase(self, column: int, mode: int) -> None:
        """Erase to the end of the line (0), from its beginning (1), or all of it (2)."""
        if mode == 1:
            self.put(0, " " * min(column + 1, len(self.text)), PLAIN)
            return
        kept = column if mode == 0 else 0
        self.text = self.text[:kept]
        if self.styles is not None:
            del self.styles[kept:]

    def line(self) -> Line:
        if self.styles is None:
            return Line(((PLAIN, self.text),) if self.text else (), self.stream)
        runs: list[tuple[int, str]] = []
        start = 0
        for style, group in groupby(self.styles):
            end = start + sum(1 for _ in group)
            runs.append((style, self.text[start:end]))
            start = end
        return Line(tuple(runs), self.stream)


@dataclass(slots=True)
class Cursor:
    """Where one stream writes next; the rows are those of this stream only, oldest first."""

    stream: Stream
    rows: list[OpenLine] = field(default_factory=list)
    row: int = 0
    column: int = 0
    style: int = PLAIN

    def newline(self) -> None:
        self.row, self.column = self.row + 1, 0


class Screen:
    """Turns the text of both streams into lines.

    Each stream has a cursor of its own: a progress bar on stderr keeps its line while stdout goes on
    printing lines below it.
    """

    def __init__(self) -> None:
        self._rows: list[OpenLine] = []
        self._cursors: dict[Stream, Cursor] = {}
        self._made = 0

    def write(self, stream: Stream, text: str) -> None:
        cursor = self.cursor(stream)
        if not _CONTROL.search(text) and cursor.style == PLAIN:
            self._write_plain(cursor, text)
            return
        for token in _TOKEN.finditer(text):
            match token.lastgroup:
                case "text":
                    self._put(cursor, token.group())
                case "newline":
                    self._row(cursor)
                    cursor.newline()
                case "final":
                    self._sequence(cursor, token.group("final"), token.group("arguments"))
                case "control":
                    self._control(cursor, token.group())
                case "surrogate":
                    self._put(cursor, "\ufffd")
                case _:
                    pass

    def _write_plain(self, cursor: Cursor, text: str) -> None:
        """Draw text without control characters: nearly all text, and by far the fastest to draw."""
        first, *others = text.split("\n")
        if first:
            self._put(cursor, first)
        for line in others:
            self._row(cursor)
            cursor.newline()
            if line:
                self._put(cursor, line)

    def cursor(self, stream: Stream) -> Cursor:
        return self._cursors.setdefault(stream, Cursor(stream))

    def lines(self) -> list[Line]:
        return [row.line() for row in self._rows]

    def _row(self, cursor: Cursor) -> OpenLine:
        while len(cursor.rows) <= cursor.row:
            row = OpenLine(cursor.stream, number=self._made)
            self._made += 1
            cursor.rows.append(row)
            self._rows.append(row)
        return cursor.rows[cursor.row]

    def _put(self, cursor: Cursor, text: str) -> None:
        cursor.column = self._row(cursor).put(cursor.column, text, cursor.style)

    def _control(self, cursor: Cursor, control: str) -> None:
        if control == "\r":
            cursor.column = 0
        elif control == "\b":
            cursor.column = max(cursor.column - 1, 0)
        else:
            # A tab only moves the cursor: what it passes over stays.
            self._row(cursor)
            cursor.column += _TAB - cursor.column % _TAB

    def _sequence(self, cursor: Cursor, final: str, arguments: str) -> None:
        count = min(int(arguments), MAXIMUM_COLUMN) if _is_count(arguments) else 0
        match final:
            case "m":
                cursor.style = styled(cursor.style, arguments)
            case "K":
                self._row(cursor).erase(cursor.column, count)
            case "J" if count == 0:
                self._row(cursor).erase(cursor.column, 0)
                for row in cursor.rows[cursor.row + 1 :]:
                    row.erase(0, 0)
            case _:
                _move(cursor, final, max(count, 1))


def _move(cursor: Cursor, final: str, steps: int) -> None:
    match final:
        case "A" | "F":
            cursor.row = max(cursor.row - steps, 0)
        case "B" | "E":
            cursor.row = min(cursor.row + steps, max(len(cursor.rows) - 1, cursor.row))
        case "C":
            cursor.column = min(cursor.column + steps, max(MAXIMUM_COLUMN, cursor.column))
        case "D":
            cursor.column = max(cursor.column - steps, 0)
        case "G":
            cursor.column = steps - 1
        case _:
            pass
    if final in "EF":
        cursor.column = 0


def _is_count(arguments: str) -> bool:
    return arguments.isascii() and arguments.isdigit() and len(arguments) < len(str(MAXIMUM_COLUMN)) + 1


@lru_cache(maxsize=256)
def styled(style: int, arguments: str) -> int:
    """Return `style` after the escape sequence `ESC [ arguments m`."""
    codes = [int(part) if _is_count(part) else 0 for part in re.split("[;:]", arguments)]
    while codes:
        code = codes.pop(0)
        if code in (38, 48):
            color, codes = _extended_color(codes)
            style = style & ~COLOR | color if code == 38 else style  # noqa: PLR2004 - SGR
        elif code == 0:
            style = PLAIN
        elif 30 <= code <= 37 or 90 <= code <= 97:  # noqa: PLR2004 - SGR
            style = style & ~COLOR | code % 10 % 7
        else:
            style = style & ~_UNSET.get(code, 0) | _SET.get(code, 0)
    return style


def _extended_color(codes: list[int]) -> tuple[int, list[int]]:
    """Take the arguments of 38 or 48: `5;n` of 256 colours, or `2;r;g;b`."""
    if codes[:1] == [5]:
        return _hue_of_256((codes[1:2] or [0])[0]), codes[2:]
    if codes[:1] == [2]:
        red, green, blue = [*codes[1:4], 0, 0, 0][:3]
        return _hue(red, green, blue), codes[4:]
    return 0, codes[1:]


def _hue_of_256(number: int) -> int:
    if number < 16:  # noqa: PLR2004 - the 16 colours that have names
        return number % 8 % 7
    if number > 231:  # noqa: PLR2004 - the greys
        return 0
    red, green, blue = (number - 16) // 36, (number - 16) // 6 % 6, (number - 16) % 6
    return _hue(red * 51, green * 51, blue * 51)


def _hue(red: int, green: int, blue: int) -> int:
    low, high = min(red, green, blue), max(red, green, blue)
    if high - low < 48:  # noqa: PLR2004 - nearly grey
        return 0
    middle = (low + high) / 2
    return ((red > middle) + 2 * (green > middle) + 4 * (blue > middle)) % 7


def plain(text: str) -> str:
    """Return `text` as a terminal would leave it, without colours."""
    text = _COLORS.sub("", text)
    if not _CONTROL.search(text):
        return text
    shown = "\n".join(line.text for line in colored(text))
    return shown + "\n" if text.endswith("\n") else shown


def colored(text: str) -> list[Line]:
    screen = Screen()
    screen.write(Stream.STDOUT, text)
    return screen.lines()


# A screen that is read while it is written: it numbers its lines, and knows which of them changed.


WIDEST = 2_000
"""Characters of a line that are drawn: a panel shows no more of it, and no line grows without bound."""
_REACHABLE = 200
"""Lines that a program can still move its cursor up to."""


class LiveScreen(Screen):
    """A screen for endless text: it forgets the lines that have scrolled away."""

    def __init__(self) -> None:
        super().__init__()
        self._touched: dict[int, OpenLine] = {}

    @property
    def next_number(self) -> int:
        return self._made

    def write(self, stream: Stream, text: str) -> None:
        super().write(stream, text)
        if len(self._rows) > 2 * _REACHABLE:
            self._forget()

    def touched(self) -> dict[int, OpenLine]:
        """Return the lines written on since the last call, by number."""
        touched, self._touched = self._touched, {}
        return touched

    def skip(self, lines: int, broken: Iterable[Stream]) -> None:
        """Skip the numbers of `lines` that are not drawn; `broken` streams go on with a new line."""
        self._made += lines
        for stream in broken:
            self._cursors.pop(stream, None)

    def seal(self) -> int:
        """Fix the lines so far; return the number of the display that follows them."""
        self._cursors = {}
        self._made += 1
        return self._made - 1

    def clear(self) -> None:
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

    def _write_plain(self, cursor: Cursor, text: str) -> None:
        """Draw whole lines at the end, as programs print them, without looking for their place."""
        if cursor.column or cursor.row != len(cursor.rows):
            first, newline, text = text.partition("\n")
            super()._write_plain(cursor, first + newline)
        if cursor.column or cursor.row != len(cursor.rows):
            super()._write_plain(cursor, text)
            return
        *lines, last = text.split("\n")
        rows = [
            OpenLine(cursor.stream, line[:WIDEST], number=number)
            for number, line in enumerate(lines, self._made)
        ]
        self._made += len(rows)
        self._rows += rows
        cursor.rows += rows
        cursor.row = len(cursor.rows)
        self._touched.update((row.number, row) for row in rows)
        if last:
            self._put(cursor, last)

    def _row(self, cursor: Cursor) -> OpenLine:
        row = super()._row(cursor)
        self._touched[row.number] = row
        return row

    def _put(self, cursor: Cursor, text: str) -> None:
        end = cursor.column + len(text)
        if end > WIDEST:
            text = text[: max(WIDEST - cursor.column, 0)]
        if text:
            super()._put(cursor, text)
        cursor.column = end

    def _sequence(self, cursor: Cursor, final: str, arguments: str) -> None:
        super()._sequence(cursor, final, arguments)
        if final == "J":
            self._touched.update((row.number, row) for row in cursor.rows[cursor.row :])
