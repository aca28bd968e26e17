"""What ranks wrote, as lines and displays; equal ones of several ranks stand once."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from nblaunch._protocol import Stream
from nblaunch._state import RankState, RunState
from nblaunch._transcript import Display, Text, Transcript
from nblaunch.view.cost import fair_limit
from nblaunch.view.folding import merged
from nblaunch.view.terminal import Line, Screen, plain

DRAWN_CHARACTERS = 1_000_000
"""Text of all ranks together that is drawn at the end of a run; several times what can be shown."""
_LINE_WEIGHT = 20
_RECENT_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class Omission:
    """Lines that are not shown; where there is no whole line, characters."""

    lines: int = 0
    characters: int = 0
    displays: int = 0


Item = Line | Display | Omission


@dataclass(frozen=True, slots=True)
class Written:
    """An item, and the ranks that wrote it at this place."""

    ranks: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class Output:
    """What these ranks wrote and displayed, in an order that keeps each rank's own."""

    ranks: tuple[int, ...]
    rows: tuple[Written, ...]
    mixed: bool = False
    """Whether there are items that not all of the ranks have."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Return the items of all ranks."""
        return tuple(row.item for row in self.rows)

    @property
    def lines(self) -> int:
        """Return how many lines there are, those left out included."""
        return sum(
            1 if isinstance(item, Line) else item.lines if isinstance(item, Omission) else 0
            for item in self.items
        )

    @property
    def displays(self) -> tuple[Display, ...]:
        """Return the rich displays, in order."""
        return tuple(item for item in self.items if isinstance(item, Display))


def folded(state: RunState) -> list[Output]:
    """Return the ranks' output in rank order; ranks that wrote some of the same share an `Output`.

    What is equal stands once there, with the ranks that wrote it. The order depends on what each rank
    wrote, not on when it arrived. Ranks without output are not there.
    """
    by_text: dict[object, tuple[Transcript, list[int]]] = {}
    for rank, known in sorted(state.ranks.items()):
        transcript = known.transcript
        raw = (_key(transcript.entries), transcript.omitted, transcript.omitted_displays)
        by_text.setdefault(raw, (transcript, []))[1].append(rank)
    # Drawing is what costs; and different text may look the same once drawn.
    weights = (_weight(transcript.entries) for transcript, _ in by_text.values())
    limit = fair_limit(weights, DRAWN_CHARACTERS)
    groups: dict[tuple[Hashable, ...], tuple[tuple[Item, ...], list[int]]] = {}
    for transcript, ranks in by_text.values():
        items = read(_trimmed(transcript, limit))
        groups.setdefault(_key(items), (items, []))[1].extend(ranks)
    return _merged([(tuple(sorted(ranks)), key, items) for key, (items, ranks) in groups.items() if items])


def _merged(groups: list[tuple[tuple[int, ...], tuple[Hashable, ...], tuple[Item, ...]]]) -> list[Output]:
    """Return groups of ranks with equal output as one `Output` each, or merged where they share lines."""
    groups = sorted(groups, key=lambda group: group[0])
    by_key = {key: item for _, keys, items in groups for key, item in zip(keys, items, strict=True)}
    blank = {key for key, item in by_key.items() if isinstance(item, Line) and not item.text.strip()}
    marks = {key for key, item in by_key.items() if isinstance(item, Omission)}
    outputs = []
    for rows in merged([keys for _, keys, _ in groups], blank, marks):
        ranks = {
            members: tuple(sorted(rank for each in members for rank in groups[each][0]))
            for members in {members for _, members in rows}
        }
        everyone = tuple(sorted({rank for each in ranks.values() for rank in each}))
        shown = tuple(Written(ranks[members], by_key[key]) for key, members in rows)
        outputs.append(Output(everyone, shown, mixed=len(ranks) > 1))
    return sorted(outputs, key=lambda output: output.ranks)


def _weight(entries: Iterable[Text | Display]) -> int:
    """Return what drawing these takes, in characters; a line takes as much as some characters do."""
    return sum(
        len(entry.text) + _LINE_WEIGHT * entry.text.count("\n")
        for entry in entries
        if isinstance(entry, Text)
    )


def _trimmed(transcript: Transcript, limit: int) -> Transcript:
    """Return the transcript with its beginning and its end only, where it weighs more than `limit`."""
    if _weight(transcript.entries) <= limit:
        return transcript
    head, rest = _first(transcript.head or transcript.tail, limit // 3)
    if transcript.head:
        rest += transcript.tail
    last, dropped = _first([_turned(entry) for entry in reversed(rest)], limit - limit // 3)
    texts = [entry.text for entry in dropped if isinstance(entry, Text)]
    return replace(
        transcript,
        head=tuple(head),
        tail=(
            *(entry for entry in reversed(dropped) if isinstance(entry, Display)),
            *(_turned(entry) for entry in reversed(last)),
        ),
        omitted=transcript.omitted + sum(map(len, texts)),
        omitted_lines=transcript.omitted_lines + sum(text.count("\n") for text in texts),
    )


def _first(entries: Sequence[Text | Display], room: int) -> tuple[list[Text | Display], list[Text | Display]]:
    """Part entries where they weigh `room`, within a text if need be."""
    for index, entry in enumerate(entries):
        weight = _weight([entry])
        if isinstance(entry, Text) and weight > room:
            place = len(entry.text) * room // weight
            first, rest = Text(entry.stream, entry.text[:place]), Text(entry.stream, entry.text[place:])
            return [*entries[:index], first], [rest, *entries[index + 1 :]]
        room -= weight
    return list(entries), []


def _turned(entry: Text | Display) -> Text | Display:
    return Text(entry.stream, entry.text[::-1]) if isinstance(entry, Text) else entry


def _key(items: Iterable[Item | Text]) -> tuple[Hashable, ...]:
    return tuple(
        json.dumps([item.data, item.metadata], sort_keys=True, default=repr)
        if isinstance(item, Display)
        else item
        for item in items
    )


def read(transcript: Transcript) -> tuple[Item, ...]:
    """Return a transcript as lines, displays and what was left out between its head and its tail."""
    head, tail = _joined(transcript.head), _joined(transcript.tail)
    if transcript.omitted_lines:
        head, tail, more = _at_line_ends(head, tail)
        omission = Omission(transcript.omitted_lines + more, transcript.omitted, transcript.omitted_displays)
        items = [*_draw(head), omission, *_draw(tail)]
    elif transcript.omitted:
        # One endless line: the mark stays in it, or the next `\r` writes over it.
        mark = Text(_first_stream(tail), f"… {transcript.omitted} characters left out …")
        items = _draw([*head, mark, *tail])
    elif transcript.omitted_displays:
        items = [*_draw(head), Omission(displays=transcript.omitted_displays), *_draw(tail)]
    else:
        items = _draw([*head, *tail])
    while items and isinstance(items[-1], Line) and not items[-1].text.strip():
        items.pop()
    return tuple(items)


def _first_stream(entries: Iterable[Text | Display]) -> Stream:
    return next((entry.stream for entry in entries if isinstance(entry, Text)), Stream.STDOUT)


def _joined(entries: Iterable[Text | Display]) -> list[Text | Display]:
    pieces: list[list[Text | Display]] = []
    for entry in entries:
        previous = pieces[-1][-1] if pieces else None
        if isinstance(entry, Text) and isinstance(previous, Text) and previous.stream is entry.stream:
            pieces[-1].append(entry)
        else:
            pieces.append([entry])
    return [_one(piece) for piece in pieces]


def _one(piece: list[Text | Display]) -> Text | Display:
    first = piece[0]
    if isinstance(first, Display) or len(piece) == 1:
        return first
    return Text(first.stream, "".join(text.text for text in piece if isinstance(text, Text)))


def _at_line_ends(
    head: list[Text | Display], tail: list[Text | Display]
) -> tuple[list[Text | Display], list[Text | Display], int]:
    """Cut the half lines on both sides of the omission; return how many lines that leaves out more.

    The end of the head's half line is among the omitted line ends already; the tail's is not.
    """
    for index in reversed(range(len(head))):
        entry = head[index]
        if isinstance(entry, Text):
            whole = entry.text[: entry.text.rfind("\n") + 1]
            head = [*head[:index], Text(entry.stream, whole), *head[index + 1 :]]
            break
    for index, entry in enumerate(tail):
        if isinstance(entry, Text):
            _, newline, rest = entry.text.partition("\n")
            if newline:
                return head, [*tail[:index], Text(entry.stream, rest), *tail[index + 1 :]], 1
            break
    return head, tail, 0


def _draw(entries: Iterable[Text | Display]) -> list[Item]:
    """Return lines and displays in order; a display ends the lines before it."""
    items: list[Item] = []
    screen = Screen()
    for entry in entries:
        if isinstance(entry, Text):
            screen.write(entry.stream, entry.text)
        else:
            items += [*screen.lines(), entry]
            screen = Screen()
    return [*items, *screen.lines()]


def describe(omission: Omission, rank: int, *, errors: bool = False) -> str:
    """Say what was left out of a rank's output, and where it is; `errors` for stderr."""
    parts = []
    if omission.lines:
        parts.append(f"{omission.lines} lines")
    elif omission.characters:
        parts.append(f"{omission.characters} characters")
    if omission.displays:
        parts.append(f"{omission.displays} displays")
    stream = "stderr" if errors else "stdout"
    where = stream if omission.lines or omission.characters else "displays"
    return f"… {' and '.join(parts)} left out, see result.ranks[{rank}].{where} …"


def only_errors(output: Output) -> set[tuple[int, ...]]:
    """Return which of the sets of ranks in an output have written to stderr alone."""
    streams: dict[tuple[int, ...], set[Stream]] = {}
    for row in output.rows:
        if isinstance(row.item, Line):
            streams.setdefault(row.ranks, set()).add(row.item.stream)
    return {ranks for ranks, found in streams.items() if found == {Stream.STDERR}}


def last_line(transcript: Transcript) -> str:
    """Return the last line that is not blank, as a terminal shows it; only its end where it is long."""
    recent: list[Text] = []
    wanted = _RECENT_CHARACTERS
    for entry in chain(reversed(transcript.tail), reversed(transcript.head)):
        if wanted <= 0:
            break
        if isinstance(entry, Text):
            recent.append(Text(entry.stream, entry.text[-wanted:]))
            wanted -= len(entry.text)
    screen = Screen()
    for entry in reversed(recent):
        screen.write(entry.stream, entry.text)
    lines = [line.text.strip() for line in screen.lines()]
    drawn_anew = any("\r" in entry.text.replace("\r\n", "\n") for entry in recent)
    if wanted < 0 and not any(lines[1:]) and not drawn_anew:
        # Only the end of this line was looked at, and it was not drawn anew in there.
        return f"… {lines[0]}" if lines else ""
    return next(filter(None, reversed(lines)), "")


def display_text(display: Display) -> str:
    """Return a display as text: its text/plain, or what it is."""
    for kind in ("text/plain", "text/markdown", "text/latex"):
        text = display.data.get(kind)
        if isinstance(text, str) and text.strip():
            return plain(text).rstrip("\n")
    return plain(f"<{', '.join(sorted(display.data)) or 'empty display'}>")


def by_rank(state: RunState, of: Callable[[RankState], str]) -> list[tuple[tuple[int, ...], str]]:
    """Return what `of` says of each rank, in rank order, equal answers folded; empty ones left out.

    >>> by_rank(RunState.fresh(3), lambda rank: "odd" if rank.rank % 2 else "even")
    [((0, 2), 'even'), ((1,), 'odd')]
    """
    answers: dict[str, list[int]] = {}
    for rank, known in sorted(state.ranks.items()):
        answer = of(known)
        if answer:
            answers.setdefault(answer, []).append(rank)
    return [(tuple(ranks), answer) for answer, ranks in answers.items()]
