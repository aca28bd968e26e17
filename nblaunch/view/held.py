"""What a rank has written to a terminal and may still write over: it is printed once it is finished."""

from __future__ import annotations

import re

from nblaunch._protocol import Stream
from nblaunch.view.terminal import Screen, plain

_PENDING_CHARACTERS = 16 * 1024
# A program that has not gone back up for as many lines has finished its bars.
_CALM_LINES = 20
_WAY_UP = re.compile(r"(?:\r|\x1b\[\d*K|\x1b\[\d{0,3}[AF])+")
_STEPS = re.compile(r"\x1b\[(\d*)[AF]")


class Held:
    """The end of one stream: its last line, and above it the lines of bars that are drawn again and again."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._text = ""
        self._reach = 0
        self._calm = 0

    @property
    def text(self) -> str:
        """Return what is held, as a terminal shows it now."""
        return plain(self._text)

    def take(self, text: str) -> str | None:
        """Return the lines that are finished now, None if there are none."""
        self._look_for_bars(text)
        text = self._text + text
        return self._finished_above_bars(text) if self._reach else self._finished(text)

    def _look_for_bars(self, text: str) -> None:
        reach = _furthest_up(text) if "\x1b[" in text else 0
        self._calm = 0 if reach else self._calm + text.count("\n")
        if reach or self._calm > _CALM_LINES:
            self._reach = reach

    def _finished(self, text: str) -> str | None:
        whole, newline, rest = text.rpartition("\n")
        if len(rest) > _PENDING_CHARACTERS:
            # A progress bar that has drawn itself often: what it has drawn over is not needed.
            rest = rest[max(rest.rfind("\r", 0, len(rest) - 1), 0) :]
        self._text = rest
        return plain(whole + newline).removesuffix(newline) if newline else None

    def _finished_above_bars(self, text: str) -> str | None:
        screen = _Block()
        screen.write(Stream.STDOUT, text)
        row, column = screen.place
        lines = [line.text for line in screen.lines()]
        lines += [""] * (row + 1 - len(lines))
        finished = max(row - self._reach, 0)
        # As they are now, with the cursor where it is.
        up = len(lines) - 1 - row
        back = f"\x1b[{up}A" if up else ""
        self._text = "\n".join(lines[finished:]) + f"{back}\r" + (f"\x1b[{column}C" if column else "")
        return "\n".join(lines[:finished]) if finished else None


class _Block(Screen):
    """A screen that says where the cursor is."""

    @property
    def place(self) -> tuple[int, int]:
        """Return the row and the column in which the next character will be."""
        cursor = self._cursors[Stream.STDOUT]
        return cursor.row, cursor.column


def _furthest_up(text: str) -> int:
    r"""Return by how many lines the cursor went up at one time, at most.

    >>> _furthest_up("outer\ninner\r\x1b[2K\x1b[1A\x1b[2Kouter")
    1
    """
    ways = ((int(steps or 1) for steps in _STEPS.findall(way)) for way in _WAY_UP.findall(text))
    return max((sum(way) for way in ways), default=0)
