"""A run in a terminal: its lines as they come, above a status line."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from nblaunch._results import nodes_line
from nblaunch.protocol.messages import Stream
from nblaunch.protocol.reports import HangReport, by_host
from nblaunch.protocol.state import RunState, State, hosts_of
from nblaunch.protocol.transcript import Display, Transcript
from nblaunch.view.output import display_text, latest, size_of
from nblaunch.view.screen import Screen, plain
from nblaunch.view.summary import (
    AGAIN,
    RANKS_LISTED,
    attempt_lines,
    elapsed,
    finishing,
    hang_lines,
    waits,
)
from nblaunch.view.text import prefixed

# Standard streams that erase the status line first: what the program's threads print stays whole.


class Aside:
    """A stream that calls `before()` ahead of each write; in all else it is the stream itself."""

    def __init__(self, stream: TextIO, before: Callable[[], None]) -> None:
        self._stream = stream
        self._before = before

    def write(self, text: str) -> int:
        self._before()
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self._before()
        self._stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class StepAside:
    """Puts such streams in the place of `sys.stdout` and `sys.stderr`, where these are terminals."""

    def __init__(self, before: Callable[[], None]) -> None:
        """Call `before()`, on the printing thread, ahead of all that is printed."""
        self._replaced: dict[str, tuple[object, TextIO]] = {}
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced[name] = (Aside(stream, before), stream)
                setattr(sys, name, self._replaced[name][0])

    def end(self) -> None:
        """Put the streams back, unless other code has replaced them."""
        for name, (aside, stream) in self._replaced.items():
            if getattr(sys, name) is aside:
                setattr(sys, name, stream)
        self._replaced = {}


# What a rank may still write over: it is printed once it is finished.


_PENDING_CHARACTERS = 16 * 1024
# A program that has not gone back up for as many lines has finished its bars.
_CALM_LINES = 20
_WAY_UP = re.compile(r"(?:\r|\x1b\[\d*K|\x1b\[\d{0,3}[AF])+")
_STEPS = re.compile(r"\x1b\[(\d*)[AF]")


class Held:
    """The end of one stream: its last line, and above it the lines of bars that are being redrawn."""

    def __init__(self) -> None:
        self._text = ""
        self._reach = 0
        self._calm = 0

    @property
    def text(self) -> str:
        return plain(self._text)

    def take(self, text: str) -> str | None:
        """Add `text`; return the lines that are now finished, None if there are none."""
        self._find_bars(text)
        text = self._text + text
        return self._finished_above_bars(text) if self._reach else self._finished(text)

    def _find_bars(self, text: str) -> None:
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
        screen = Screen()
        screen.write(Stream.STDOUT, text)
        row, column = screen.cursor(Stream.STDOUT).row, screen.cursor(Stream.STDOUT).column
        lines = [line.text for line in screen.lines()]
        lines += [""] * (row + 1 - len(lines))
        finished = max(row - self._reach, 0)
        # The unfinished lines as they are now, and the cursor where it is.
        up = len(lines) - 1 - row
        back = f"\x1b[{up}A" if up else ""
        self._text = "\n".join(lines[finished:]) + f"{back}\r" + (f"\x1b[{column}C" if column else "")
        return "\n".join(lines[:finished]) if finished else None


def _furthest_up(text: str) -> int:
    r"""Return by how many lines the cursor went up at once, at most.

    >>> _furthest_up("outer\ninner\r\x1b[2K\x1b[1A\x1b[2Kouter")
    1
    """
    ways = ((int(steps or 1) for steps in _STEPS.findall(way)) for way in _WAY_UP.findall(text))
    return max((sum(way) for way in ways), default=0)


# The lines of a run, each with its rank and once, and the status line below them.


# Down one row, scrolling if it is the last, and there, without wrapping, the status; then back to where the
# cursor was. So a line that the user's program has begun, or prints meanwhile, keeps its place.
_BELOW, _BACK = "\x1bD\x1b7\r\x1b[?7l", "\x1b[?7h\x1b[K\x1b8\x1b[A"
_ERASE = "\x1b[J"


class Terminal:
    """Prints a run's lines, and keeps the status line below them while the run lasts.

    The status line is erased before anything is printed, and at the end. Where there are no cursor movements
    (a file, `TERM=dumb`), there is none.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Show a run on `stream`; `clock` gives seconds."""
        self._stream = stream
        self._clock = clock
        self._began = clock()
        self._lines = LiveLines()
        self._lock = threading.RLock()
        self._drawn = False
        self._aside: StepAside | None = None

    def open(self, age: float = 0.0) -> None:
        """Begin; from now on, the status line is erased before the program's other threads print.

        `age` is how long the run has gone on, in seconds.
        """
        self._began -= age
        if _width(self._stream):
            self._aside = StepAside(self._erase)

    def draw(self, state: RunState) -> None:
        """Print the lines that are new, and the status."""
        lines = list(self._lines.take(state))
        status = _within_columns(self._status(state), _width(self._stream) - 1)
        # Every time: other code may have written over it, past the streams that step aside.
        if lines or status:
            self._print(lines, f"{_BELOW}{status}{_BACK}" if status else "")

    def close(self, state: RunState, ending: str) -> None:
        if self._aside is not None:
            self._aside.end()
        self._print([*self._lines.take(state), *self._lines.rest(), ending], "")

    def _print(self, lines: list[str], status: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        with self._lock:
            # An interrupt may come before all is written: from now on there may be a status to erase.
            erase, self._drawn = _ERASE if self._drawn else "", bool(status) or self._drawn
            # In one piece, so that nothing flickers.
            self._write(erase + text + status)
            self._drawn = bool(status)

    def _erase(self) -> None:
        with self._lock:
            if self._drawn:
                self._write(_ERASE)
                self._drawn = False

    def _write(self, text: str) -> None:
        # A character that the terminal cannot encode must not end the view.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()

    def _status(self, state: RunState) -> str:
        counts = Counter(rank.state for rank in state.ranks.values())
        parts = [f"{counts[each]} {each.lower()}" for each in State if counts[each]]
        hosts = hosts_of(state.ranks)
        if len(state.ranks) > RANKS_LISTED and len(hosts) == len(state.ranks):
            parts = by_host({rank: known.state.lower() for rank, known in state.ranks.items()}, hosts)
        if state.earlier:
            parts.append(f"attempt {state.attempt.number}")
        if state.engine is not None:
            line = plain(nodes_line(state.engine, time.time()))
            # What is awaited comes first: a narrow terminal cuts the end off.
            parts = [line] if state.awaits_nodes else [*parts, line]
        parts += [f"rank {rank} {what}" for rank, what in (finishing(state) | waits(state)).items()]
        status = f"[nblaunch] {', '.join(parts)}, {elapsed(self._clock() - self._began)}"
        bar = self._lines.unfinished
        return f"{status} | {bar}" if bar else status


def _width(stream: TextIO) -> int:
    """Return how many columns there are to draw a status line in, 0 where none can be drawn."""
    if os.environ.get("TERM") in (None, "", "dumb"):
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _within_columns(text: str, width: int) -> str:
    for index, character in enumerate(text):
        width -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if width < 0:
            return text[:index]
    return text


class LiveLines:
    """Reads each state of a run, and yields what it has not yielded yet."""

    def __init__(self) -> None:
        self._attempt = 0
        self._attempts_shown = 0
        self._hang: HangReport | None = None
        self._waited: set[int] = set()
        self._read: dict[int, int] = {}
        self._held: dict[tuple[int, Stream], Held] = {}

    def take(self, state: RunState) -> Iterator[str]:
        """Yield the whole lines that are new, in rank order."""
        if state.attempt.number != self._attempt:
            yield from self.rest()
            self._attempt, self._read = state.attempt.number, {}
            yield from attempt_lines(state)[self._attempts_shown :]
            self._attempts_shown = len(attempt_lines(state))
        for rank, known in sorted(state.ranks.items()):
            yield from self._take_rank(rank, known.transcript)
        if state.hang is not self._hang:
            self._hang = state.hang
            yield from hang_lines(state)
        late = {rank: what for rank, what in waits(state).items() if rank not in self._waited}
        if late:
            self._waited |= late.keys()
            yield from (prefixed((rank,), what) for rank, what in late.items())
            yield f"[nblaunch] {AGAIN}"

    @property
    def unfinished(self) -> str:
        """Return the unfinished line of the lowest rank that has one, such as a progress bar; else empty."""
        for (rank, _), held in sorted(self._held.items()):
            lines = [line.strip() for line in held.text.split("\n")]
            if any(lines):
                return f"rank {rank}: {next(filter(None, reversed(lines)))}"
        return ""

    def rest(self) -> Iterator[str]:
        for (rank, _), held in sorted(self._held.items()):
            if held.text.strip():
                yield prefixed((rank,), held.text)
        self._held = {}

    def _take_rank(self, rank: int, transcript: Transcript) -> Iterator[str]:
        new = transcript.written - self._read.get(rank, 0)
        self._read[rank] = transcript.written
        entries = latest(transcript, new)
        missing = new - sum(map(size_of, entries))
        if missing > 0 and transcript.omitted:
            yield prefixed((rank,), f"… {missing} characters left out, see result.ranks[{rank}].stdout …")
        for entry in entries:
            if isinstance(entry, Display):
                yield prefixed((rank,), display_text(entry))
                continue
            finished = self._held.setdefault((rank, entry.stream), Held()).take(entry.text)
            if finished is not None:
                yield prefixed((rank,), finished)
