"""A rank's output in order, bounded: its beginning and its end, and how much lies between.

The whole text is in the rank's log files and in `result.ranks[r].stdout`; this is the part that a view can
show. All functions return a new transcript and leave the old one alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from nblaunch.protocol.messages import Displayed, Stream

HEAD_CHARACTERS = 32 * 1024
TAIL_CHARACTERS = 64 * 1024
CHUNK_CHARACTERS = 4 * 1024
MAXIMUM_DISPLAYS = 200
# An entry costs more than its characters: a rank that writes one character to stdout and one to stderr
# in turn must not make 100,000 entries, each of them copied with every message.
_ENTRY_COST = 16
_DISPLAY_COST = 320


class Text(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive text of one stream; an array when encoded, which tells it from a `Display`."""

    stream: Stream
    text: str


@dataclass(frozen=True, slots=True)
class Display:
    """One rich display, as the Jupyter protocol sends it.

    `data` maps MIME types to content (PNG as base64 text), `metadata` is what came with it. `display_id`
    names it for later updates, None without.

    >>> result.ranks[0].displays[0].data["text/plain"]                     # doctest: +SKIP
    '<Figure size 640x480 with 1 Axes>'
    """

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    display_id: str | None = None


Entry = Text | Display


class Transcript(msgspec.Struct, frozen=True):
    """Entries in order: `head`, then `omitted` characters in `omitted_lines` lines, then `tail`."""

    head: tuple[Entry, ...] = ()
    tail: tuple[Entry, ...] = ()
    omitted: int = 0
    omitted_lines: int = 0
    omitted_displays: int = 0
    clear_pending: bool = False
    written: int = 0
    """Characters and displays so far, cleared ones included: a reader's place in the stream."""
    lines: int = 0
    """Line ends so far, cleared ones included."""
    clears: int = 0
    head_cost: int = 0
    tail_cost: int = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.head + self.tail

    @property
    def displays(self) -> tuple[Display, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, Display))


def printed(transcript: Transcript, stream: Stream, text: str) -> Transcript:
    """Return the transcript with `text` at its end.

    The entries depend on the text alone, not on the pieces in which it arrived.
    """
    if not text:
        return transcript
    transcript = _apply_pending_clear(transcript)
    while text:
        transcript, text = _append_text(transcript, stream, text)
    return transcript


def displayed(transcript: Transcript, message: Displayed) -> Transcript:
    display_id = message.transient.get("display_id")
    known_id = display_id if isinstance(display_id, str) else None
    display = Display(message.data, message.metadata, known_id)
    if message.update:
        return _update(transcript, display)
    return _append_display(_apply_pending_clear(transcript), display)


def cleared(transcript: Transcript, *, wait: bool) -> Transcript:
    if wait:
        return replace(transcript, clear_pending=True)
    return Transcript(written=transcript.written, lines=transcript.lines, clears=transcript.clears + 1)


def without_displays(transcript: Transcript, count: int) -> Transcript:
    left = itertools.count(1)

    def kept(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(each for each in entries if not isinstance(each, Display) or next(left) > count)

    head = kept(transcript.head)
    return replace(
        transcript,
        head=head,
        tail=kept(transcript.tail),
        omitted_displays=transcript.omitted_displays + count,
    )


def _apply_pending_clear(transcript: Transcript) -> Transcript:
    return cleared(transcript, wait=False) if transcript.clear_pending else transcript


def _update(transcript: Transcript, display: Display) -> Transcript:
    def changed(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(
            display if isinstance(entry, Display) and entry.display_id == display.display_id else entry
            for entry in entries
        )

    if display.display_id is None:
        return transcript
    return replace(transcript, head=changed(transcript.head), tail=changed(transcript.tail))


def _append_text(transcript: Transcript, stream: Stream, text: str) -> tuple[Transcript, str]:
    """Append as much of `text` as fits in one entry; return the rest too."""
    if not transcript.tail:
        room = HEAD_CHARACTERS - transcript.head_cost
        head, cost, rest = _filled(transcript.head, stream, text, room)
        if cost:
            grown = _counted(transcript, text[: len(text) - len(rest)])
            return replace(grown, head=head, head_cost=transcript.head_cost + cost), rest
    tail, cost, rest = _filled(transcript.tail, stream, text, CHUNK_CHARACTERS + _ENTRY_COST)
    grown = _counted(transcript, text[: len(text) - len(rest)])
    return _bounded(replace(grown, tail=tail, tail_cost=transcript.tail_cost + cost)), rest


def _counted(transcript: Transcript, text: str) -> Transcript:
    return replace(
        transcript, written=transcript.written + len(text), lines=transcript.lines + text.count("\n")
    )


def _append_display(transcript: Transcript, display: Display) -> Transcript:
    written = transcript.written + 1
    if not transcript.tail and transcript.head_cost + _DISPLAY_COST <= HEAD_CHARACTERS:
        cost = transcript.head_cost + _DISPLAY_COST
        return replace(transcript, head=(*transcript.head, display), head_cost=cost, written=written)
    return _bounded(replace(transcript, tail=(*transcript.tail, display), written=written), displays=True)


def _filled(
    entries: tuple[Entry, ...], stream: Stream, text: str, room: int
) -> tuple[tuple[Entry, ...], int, str]:
    """Fill the last entry, or begin a new one; return the entries, the cost and the rest of the text.

    An entry is filled before the next one begins, so that the entries do not depend on the pieces in which
    the text arrived.
    """
    last = entries[-1] if entries else None
    if isinstance(last, Text) and last.stream is stream and len(last.text) < CHUNK_CHARACTERS:
        taken = text[: max(min(CHUNK_CHARACTERS - len(last.text), room), 0)]
        return (*entries[:-1], Text(stream, last.text + taken)), len(taken), text[len(taken) :]
    taken = text[: max(min(CHUNK_CHARACTERS, room - _ENTRY_COST), 0)]
    if not taken:
        return entries, 0, text
    return (*entries, Text(stream, taken)), len(taken) + _ENTRY_COST, text[len(taken) :]


def _bounded(transcript: Transcript, *, displays: bool = False) -> Transcript:
    """Drop the oldest text of the tail, or its oldest display, if there is too much."""
    if displays:
        places = [index for index, entry in enumerate(transcript.tail) if isinstance(entry, Display)]
        if len(places) <= MAXIMUM_DISPLAYS:
            return transcript
        tail = transcript.tail[: places[0]] + transcript.tail[places[0] + 1 :]
        return replace(transcript, tail=tail, omitted_displays=transcript.omitted_displays + 1)
    while transcript.tail_cost > TAIL_CHARACTERS:
        index, oldest = next(
            (index, entry) for index, entry in enumerate(transcript.tail) if isinstance(entry, Text)
        )
        transcript = replace(
            transcript,
            tail=transcript.tail[:index] + transcript.tail[index + 1 :],
            tail_cost=transcript.tail_cost - len(oldest.text) - _ENTRY_COST,
            omitted=transcript.omitted + len(oldest.text),
            omitted_lines=transcript.omitted_lines + oldest.text.count("\n"),
        )
    return transcript
