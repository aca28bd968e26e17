"""Output as the panel gets it: numbered lines and displays, new or changed, no more than a page can take.

A piece is a line or a display as HTML, in which all that a rank wrote is escaped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from nblaunch._budget import fair_limit
from nblaunch.protocol.messages import Stream
from nblaunch.protocol.state import RunState
from nblaunch.protocol.transcript import Display, Entry, Text, Transcript
from nblaunch.view.html import STDERR, line_html
from nblaunch.view.mime import live
from nblaunch.view.output import latest
from nblaunch.view.screen import PLAIN, WIDEST, Line, LiveScreen, OpenLine

KEPT = 500
"""Pieces of a rank that the page keeps."""
READ_CHARACTERS = 20_000
"""Text of all ranks together that is drawn in one tick; of more only the end."""
SENT_CHARACTERS = 16_000
"""Lines of all ranks together that are sent in one tick, after a while without any."""
LINES_PER_SECOND = 20_000
"""Characters of lines, when ranks print without a pause: no reader follows more."""
_RATE = 300_000
_BURST = 600_000
_LARGEST = 2_000_000
_MOST_RUNS = 200
_OVERHEAD = 12
_LEAST = 300
_ROW_COST = 30

WAITING = "<em>… a display that is on its way …</em>"


@dataclass(slots=True)
class RankNews:
    """New pieces of a rank, by number; with `clear` all earlier ones go, and this is the next number."""

    sent: list[tuple[int, str]] = field(default_factory=list)
    clear: int | None = None


class Tail:
    """Reads a rank's transcript as it grows. `kept` are the pieces that were sent, by number.

    Each line and each display has the next number, also where it is left out: a gap in the numbers shows
    the page how many are missing.
    """

    def __init__(self) -> None:
        self.kept: dict[int, str] = {}
        self.base = 0
        self.seen: Transcript | None = None
        self.served = 0.0
        """When lines of it were sent last."""
        self._screen = LiveScreen()
        self._displays: dict[int, Display] = {}
        self._waiting: dict[int, Display] = {}
        self._changed: dict[int, OpenLine] = {}
        self.read_to = 0
        """How far the transcript has been read, in characters."""
        self._lines = 0
        self._clears = 0

    def read(self, transcript: Transcript, room: int) -> bool:
        """Read the new output, the last `room` characters of it; return whether it began with a clear."""
        self.seen = transcript
        cleared = transcript.clears != self._clears
        if cleared:
            self._restart(transcript)
        found = _news(transcript, transcript.written - self.read_to, room)
        self.read_to = transcript.written
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
        if len(self._changed) > 2 * KEPT:
            last = {row.stream: number for number, row in self._changed.items()}.values()
            wanted = {*list(self._changed)[-KEPT:], *self.kept, *last}
            self._changed = {number: row for number, row in self._changed.items() if number in wanted}
        if self._displays:
            self._update_displays(transcript)
        return cleared

    def cost(self) -> int:
        return sum(len(row.text) + _OVERHEAD for row in self._changed.values())

    def lines(self, room: int) -> list[tuple[int, str]]:
        """Return the lines that changed, as many of the latest as `room` allows; the others are left out.

        Lines that the page has in an older state come first: none of these is left out for good. Then the
        last line of each stream: a progress bar beside thousands of lines.
        """
        changed, self._changed = self._changed, {}
        known = [number for number in changed if number in self.kept]
        last = {changed[number].stream: number for number in sorted(changed)}.values()
        sent: list[tuple[int, str]] = []
        for place, number in enumerate(dict.fromkeys(chain(known, last, reversed(changed)))):
            if room <= 0:
                self._changed = {number: changed[number] for number in known[place:]}
                break
            piece = _drawn(changed[number])
            if self.kept.get(number) != piece:
                room -= len(changed[number].text) + _OVERHEAD
                sent.append((number, piece))
        self._keep(sent)
        return sorted(sent)

    def displays(self, room: int, first: int) -> Iterator[tuple[int, str]]:
        """Yield displays that have not been sent, as long as `room` allows.

        The first one may cost `first`. For one that has to wait, a note is sent once.
        """
        for number, display in list(self._waiting.items()):
            piece = live(display)
            limit, first = max(room, first), 0
            if len(piece) > limit:
                room = 0
                if number not in self.kept:
                    self._keep([(number, WAITING)])
                    yield number, WAITING
                continue
            room -= len(piece)
            del self._waiting[number]
            self._keep([(number, piece)])
            yield number, piece

    @property
    def busy(self) -> bool:
        return bool(self._changed or self._waiting)

    def _restart(self, transcript: Transcript) -> None:
        entries = transcript.entries
        texts = [entry.text for entry in entries if isinstance(entry, Text)]
        displays = len(entries) - len(texts) + transcript.omitted_displays
        self.read_to = transcript.written - transcript.omitted - displays - sum(map(len, texts))
        self._lines = transcript.lines - transcript.omitted_lines - sum(text.count("\n") for text in texts)
        self._clears = transcript.clears
        self._screen.clear()
        self.base = self._screen.next_number
        self.kept, self._displays, self._waiting, self._changed = {}, {}, {}, {}

    def _update_displays(self, transcript: Transcript) -> None:
        """Send a display again that has new content under its `display_id`."""
        now = {entry.display_id: entry for entry in transcript.displays}
        for number, display in self._displays.items():
            update = now.get(display.display_id, display)
            if display.display_id is not None and update is not display:
                self._displays[number] = self._waiting[number] = update

    def _keep(self, sent: list[tuple[int, str]]) -> None:
        self.kept.update(sent)
        if len(self.kept) > KEPT * 5 // 4:
            self.kept = {number: self.kept[number] for number in sorted(self.kept)[-KEPT:]}
            first = min(self.kept)
            self._displays = {number: each for number, each in self._displays.items() if number >= first}


def _news(transcript: Transcript, left: int, room: int) -> list[Entry]:
    """Return the last `room` characters of the last `left`, with all displays.

    A stream that has none among them, a progress bar beside many lines, is there with a few of its own.
    """
    found: list[Entry] = []
    streams: set[Stream] = set()
    for entry in reversed(latest(transcript, left)):
        if isinstance(entry, Display):
            found.append(entry)
            continue
        wanted = min(len(entry.text), room if entry.stream in streams else max(room, _LEAST))
        if wanted:
            taken = entry.text[-wanted:]
            room = max(room - wanted, 0)
            streams.add(entry.stream)
            found.append(Text(entry.stream, taken if wanted == len(entry.text) else _from_line_start(taken)))
    return found[::-1]


def _from_line_start(text: str) -> str:
    """Return `text` without the half line at its beginning; an endless line from where it is redrawn."""
    _, newline, rest = text.partition("\n")
    if newline:
        return rest
    _, redrawn, rest = text.partition("\r")
    return f"\r{rest}" if redrawn else text


def _broken(found: list[Entry]) -> list[Stream]:
    """Return the streams that cannot go on where they were; a bar that redraws its line can."""
    first: dict[Stream, str] = {}
    for entry in found:
        if isinstance(entry, Text):
            first.setdefault(entry.stream, entry.text)
    return [stream for stream, text in first.items() if not text.startswith("\r")]


def _drawn(row: OpenLine) -> str:
    """Return a line as the saved notebook draws it; one coloured character by character loses its colours."""
    line = row.line()
    if row.styles is None and len(row.text) >= WIDEST:
        line = Line(((PLAIN, f"{row.text} …"),), row.stream)
    elif len(line.runs) > _MOST_RUNS:
        line = Line(((PLAIN, line.text),), row.stream)
    # The panel has a style sheet: what each line of a progress bar takes of the room is nearly all text.
    return line_html(line).replace(f' style="{STDERR}"', "")


class Feed:
    """Reads the transcripts of all ranks as they grow.

    jupyter_server drops what a kernel sends above 1 MB a second: lines have a budget for each tick, displays
    (a figure is some 30 KB) one that fills up with time. A display that is updated often shows its latest
    content whenever there is room.
    """

    def __init__(self) -> None:
        self._tails: dict[int, Tail] = {}
        self.busy = False
        """Whether something waits to be sent."""
        self._attempt = 0
        self._allowance = float(_BURST)
        self._room = float(SENT_CHARACTERS)
        self._filled: float | None = None

    def news(self, state: RunState, now: float) -> Mapping[int, RankNews]:
        """Return the new pieces by rank; `now` is in seconds."""
        if state.attempt.number != self._attempt:
            self._attempt, self._tails = state.attempt.number, {}
        news: dict[int, RankNews] = defaultdict(RankNews)
        for rank, tail in self._read(state).items():
            news[rank].clear = tail.base
        passed = 0.0 if self._filled is None else now - self._filled
        self._allowance = min(self._allowance + _RATE * passed, _BURST)
        self._room = min(self._room + LINES_PER_SECOND * passed, SENT_CHARACTERS)
        self._filled = now
        busy = {rank: tail for rank, tail in self._tails.items() if tail.busy}
        # Where there is no room for all, they have turns; what many ranks print is sent once.
        turns = sorted(busy.items(), key=lambda each: each[1].served)
        room = int(max(self._room, 0))
        costs = (tail.cost() for _, tail in turns[: max(room // _LEAST, 1)])
        limit = max(fair_limit(costs, room), _LEAST)
        paid: set[tuple[str, int]] = set()
        for rank, tail in turns:
            if self._room <= 0 and paid:
                break
            tail.served = now
            counts: Counter[str] = Counter()
            for number, piece in tail.lines(limit):
                news[rank].sent.append((number, piece))
                counts[piece] += 1
                if (piece, counts[piece]) not in paid:
                    paid.add((piece, counts[piece]))
                    self._room -= len(piece) + _ROW_COST
        sent: set[str] = set()
        for rank, tail in busy.items():
            # After a while without any, one of any size.
            first = _LARGEST if self._allowance >= _BURST else 0
            for number, piece in tail.displays(int(self._allowance), first):
                news[rank].sent.append((number, piece))
                # A display that many ranks share is sent once.
                self._allowance -= 0 if piece in sent else len(piece)
                sent.add(piece)
        self.busy = any(tail.busy for tail in busy.values())
        return news

    def _read(self, state: RunState) -> dict[int, Tail]:
        """Read what is new; return the tails that were cleared."""
        waiting: dict[int, int] = {}
        for rank, known in state.ranks.items():
            tail = self._tails.setdefault(rank, Tail())
            if tail.seen is not known.transcript:
                waiting[rank] = known.transcript.written - tail.read_to
        limit = max(fair_limit(waiting.values(), READ_CHARACTERS), _LEAST)
        return {
            rank: self._tails[rank]
            for rank in waiting
            if self._tails[rank].read(state.ranks[rank].transcript, limit)
        }
