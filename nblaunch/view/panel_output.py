"""Output as the panel gets it: numbered lines and displays, new or changed, no more than a page can take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NotRequired, TypedDict

from nblaunch.protocol.messages import Stream
from nblaunch.protocol.state import RunState
from nblaunch.protocol.transcript import Display, Text, Transcript
from nblaunch.view.markup import fair_limit
from nblaunch.view.mime import live
from nblaunch.view.screen import PLAIN, WIDEST, Line, LiveScreen, OpenLine

KEPT = 500
"""Pieces of a rank that the page has."""
_MOST_RUNS = 200
_OVERHEAD = 12
_LEAST = 300

WAITING = ("waiting", "")
Piece = str | tuple[object, ...]
"""What the page draws. A string is a line of plain text on stdout; `(stream, text)` and
`(stream, ((style, text), ...))` are other lines, stream 1 being stderr; a display begins with its kind."""


class Tail:
    """Reads a rank's transcript again and again. `kept` are the pieces that have been told, by number.

    Numbers go up by one with each line and each display, also those that are left out: a reader sees
    from a gap how many they were.
    """

    def __init__(self) -> None:
        """Begin at the beginning."""
        self.kept: dict[int, Piece] = {}
        self.base = 0
        self.seen: Transcript | None = None
        self._screen = LiveScreen()
        self._displays: dict[int, Display] = {}
        self._waiting: dict[int, Display] = {}
        self._changed: dict[int, OpenLine] = {}
        self._read = 0
        self._lines = 0
        self._clears = 0

    def unread(self, transcript: Transcript) -> int:
        """Return how much there is to read, in characters."""
        return transcript.written - self._read

    def read(self, transcript: Transcript, room: int) -> bool:
        """Take what is new, the last `room` characters of it; return whether it began with a clear."""
        self.seen = transcript
        cleared = transcript.clears != self._clears
        if cleared:
            self._begin_again(transcript)
        left = transcript.written - self._read
        found = _latest(transcript, left, room)
        self._read = transcript.written
        lines = sum(entry.text.count("\n") for entry in found if isinstance(entry, Text))
        skipped = max(transcript.lines - self._lines - lines, 0)
        self._lines = transcript.lines
        if skipped:
            self._screen.skip(skipped, _broken(found))
        for entry in found:
            if isinstance(entry, Text):
                self._screen.write(entry.stream, entry.text)
            else:
                number = self._screen.seal()
                self._displays[number] = self._waiting[number] = entry
        self._changed.update(self._screen.touched())
        if self._displays:
            self._update_displays(transcript)
        return cleared

    def cost(self) -> int:
        """Return what it takes to tell all lines that changed, in characters."""
        return sum(len(row.text) + _OVERHEAD for row in self._changed.values())

    def lines(self, room: int) -> Iterator[tuple[int, Piece]]:
        """Yield the lines that changed, as many of the latest as `room` allows; the others are left out.

        Those that the page has in an older state come first: of these none is left out for good. Then the
        last line of each stream: a progress bar beside thousands of lines.
        """
        changed, self._changed = self._changed, {}
        known = [number for number in changed if number in self.kept]
        last = {changed[number].stream: number for number in sorted(changed)}.values()
        told: list[tuple[int, Piece]] = []
        seen: set[int] = set()
        for place, number in enumerate(chain(known, last, reversed(changed))):
            if room <= 0:
                self._changed = {number: changed[number] for number in known[place:]}
                break
            if number in seen:
                continue
            seen.add(number)
            piece = _rendered(changed[number])
            if self.kept.get(number) != piece:
                room -= len(changed[number].text) + _OVERHEAD
                told.append((number, piece))
        self._keep(told)
        yield from sorted(told, key=lambda each: each[0])

    def displays(self, room: int, first: int) -> Iterator[tuple[int, Piece, int]]:
        """Yield displays that have not been told, with their costs, as long as `room` allows.

        The first one may cost `first`. Of one that has to wait is told that it waits.
        """
        for number, display in list(self._waiting.items()):
            piece, cost = live(display)
            limit, first = max(room, first), 0
            if cost > limit:
                room = 0
                if number not in self.kept:
                    self._keep([(number, WAITING)])
                    yield number, WAITING, 0
                continue
            room -= cost
            del self._waiting[number]
            self._keep([(number, piece)])
            yield number, piece, cost

    def latest(self, room: int) -> list[tuple[int, Piece]]:
        """Return the latest of the pieces that have been told, as many as `room` allows."""
        found: list[tuple[int, Piece]] = []
        for number, piece in sorted(self.kept.items(), reverse=True):
            room -= _size(piece)
            if room < 0:
                break
            found.append((number, piece))
        return found[::-1]

    @property
    def busy(self) -> bool:
        """Whether something waits to be told."""
        return bool(self._changed or self._waiting)

    def _begin_again(self, transcript: Transcript) -> None:
        entries = transcript.entries
        texts = [entry.text for entry in entries if isinstance(entry, Text)]
        displays = len(entries) - len(texts) + transcript.omitted_displays
        self._read = transcript.written - transcript.omitted - displays - sum(map(len, texts))
        self._lines = transcript.lines - transcript.omitted_lines - sum(text.count("\n") for text in texts)
        self._clears = transcript.clears
        self._screen.clear()
        self.base = self._screen.next_number
        self.kept, self._displays, self._waiting, self._changed = {}, {}, {}, {}

    def _update_displays(self, transcript: Transcript) -> None:
        """Tell a display again that has been given other content under its `display_id`."""
        now = {entry.display_id: entry for entry in transcript.displays}
        for number, display in self._displays.items():
            update = now.get(display.display_id, display)
            if display.display_id is not None and update is not display:
                self._displays[number] = self._waiting[number] = update

    def _keep(self, told: list[tuple[int, Piece]]) -> None:
        self.kept.update(told)
        if len(self.kept) > KEPT * 5 // 4:
            self.kept = {number: self.kept[number] for number in sorted(self.kept)[-KEPT:]}
            first = min(self.kept)
            self._displays = {number: each for number, each in self._displays.items() if number >= first}


def _latest(transcript: Transcript, left: int, room: int) -> list[Text | Display]:
    """Return the last `room` characters of the last `left`, with all displays.

    A stream that has none among them, a progress bar beside many lines, is there with a few of its own.
    """
    found: list[Text | Display] = []
    streams: set[Stream] = set()
    for entry in chain(reversed(transcript.tail), reversed(transcript.head)):
        if left <= 0:
            break
        if isinstance(entry, Display):
            found.append(entry)
            left -= 1
            continue
        new = min(len(entry.text), left)
        left -= new
        wanted = min(new, room if entry.stream in streams else max(room, _LEAST))
        if wanted:
            taken = entry.text[-wanted:]
            room = max(room - wanted, 0)
            streams.add(entry.stream)
            found.append(Text(entry.stream, taken if wanted == new else _from_line_start(taken)))
    return found[::-1]


def _from_line_start(text: str) -> str:
    """Return `text` without the half line at its beginning; an endless line from where it is drawn anew."""
    _, newline, rest = text.partition("\n")
    if newline:
        return rest
    _, drawn_anew, rest = text.partition("\r")
    return f"\r{rest}" if drawn_anew else text


def _broken(found: list[Text | Display]) -> list[Stream]:
    """Return the streams that cannot go on where they were; a bar that draws its line anew can."""
    first: dict[Stream, str] = {}
    for entry in found:
        if isinstance(entry, Text):
            first.setdefault(entry.stream, entry.text)
    return [stream for stream, text in first.items() if not text.startswith("\r")]


def _rendered(row: OpenLine) -> Piece:
    stream = int(row.stream is Stream.STDERR)
    text = f"{row.text} …" if len(row.text) >= WIDEST else row.text
    if row.styles is None:
        return (stream, text) if stream else text
    return piece_of(row.line())


def piece_of(line: Line) -> Piece:
    """Return a line as the page draws it; one that is coloured character by character loses its colours."""
    stream = int(line.stream is Stream.STDERR)
    if len(line.runs) > _MOST_RUNS:
        return (stream, line.text)
    if all(style == PLAIN for style, _ in line.runs):
        return (stream, line.text) if stream else line.text
    return (stream, line.runs)


def _size(piece: object) -> int:
    if isinstance(piece, str):
        return len(piece) + _OVERHEAD
    return sum(map(_size, piece)) if isinstance(piece, tuple) else 1


# What ranks write, as it is sent to the panel: what is new, and no more of it than a page can take.


READ_CHARACTERS = 20_000
"""Text of all ranks together that is drawn in one tick; of more only the end."""
SENT_CHARACTERS = 16_000
"""Lines of all ranks together that are sent in one tick."""
WHOLE_CHARACTERS = 1_500_000
"""Pieces of all ranks together that a page gets which begins anew; of more the latest."""
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
