"""A rank's output as lines and displays; equal ones of several ranks folded, long ones cut."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from nblaunch._protocol import Stream
from nblaunch._state import RankState, RunState
from nblaunch._transcript import Display, Text, Transcript
from nblaunch.view.terminal import PLAIN, Line, Screen, plain

LINE_COST = 8_000
"""Bytes of one line; a longer one is cut in its middle."""
DRAWN_CHARACTERS = 1_000_000
"""Text of all ranks together that is drawn at the end of a run; several times what can be shown."""
_LINE_WEIGHT = 20
_RECENT_CHARACTERS = 2_000
_LINE_OVERHEAD = 40
_STYLE_COST = 120
_MAXIMUM_COST = 14
_COSTS = (("&", 4), ("<", 3), (">", 3), ("'", 5), ('"', 5), ("\\", 1), ("\n", 13))
# A notebook holds text as a list of lines, each indented and quoted: a line end takes 13 bytes more.
_COSTLY = re.compile(r"""[^ !#-%(-;=?-\[\]-~]""")


@dataclass(frozen=True, slots=True)
class Omission:
    """Lines that are not shown; where there is no whole line, characters."""

    lines: int = 0
    characters: int = 0
    displays: int = 0


Item = Line | Display | Omission


@dataclass(frozen=True, slots=True)
class Output:
    """What these ranks wrote and displayed: every one of them exactly this."""

    ranks: tuple[int, ...]
    items: tuple[Item, ...]

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
    """Return the ranks' output in rank order, once where several ranks have the same.

    Ranks without output are not there.
    """
    by_text: dict[object, tuple[Transcript, list[int]]] = {}
    for rank, known in sorted(state.ranks.items()):
        transcript = known.transcript
        raw = (_key(transcript.entries), transcript.omitted, transcript.omitted_displays)
        by_text.setdefault(raw, (transcript, []))[1].append(rank)
    # Drawing is what costs; and different text may look the same once drawn.
    weights = (_weight(transcript.entries) for transcript, _ in by_text.values())
    limit = fair_limit(weights, DRAWN_CHARACTERS)
    groups: dict[object, tuple[tuple[Item, ...], list[int]]] = {}
    for transcript, ranks in by_text.values():
        items = read(_trimmed(transcript, limit))
        groups.setdefault(_key(items), (items, []))[1].extend(ranks)
    return sorted(
        (Output(tuple(sorted(ranks)), items) for items, ranks in groups.values() if items),
        key=lambda output: output.ranks,
    )


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
    entries = transcript.entries
    start, room = 0, limit // 3
    while room > 0 and start < len(transcript.head or entries):
        room -= _weight(entries[start : start + 1])
        start += 1
    end, room = len(entries), limit - limit // 3
    while room > 0 and end > start:
        room -= _weight(entries[end - 1 : end])
        end -= 1
    dropped = [entry.text for entry in entries[start:end] if isinstance(entry, Text)]
    shown = tuple(entry for entry in entries[start:end] if isinstance(entry, Display))
    return replace(
        transcript,
        head=entries[:start],
        tail=(*shown, *entries[end:]),
        omitted=transcript.omitted + sum(map(len, dropped)),
        omitted_lines=transcript.omitted_lines + sum(text.count("\n") for text in dropped),
    )


def _key(items: Iterable[Item | Text]) -> tuple[object, ...]:
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
    return tuple(_short(item) if isinstance(item, Line) else item for item in items)


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


def _short(line: Line, limit: int = LINE_COST) -> Line:
    """Return a line that takes no more than `limit` bytes; one that takes more loses its colours too."""
    if cost_of_line(line) <= limit:
        return line
    return Line(((PLAIN, shortened(line.text, limit)),), line.stream)


def shortened(text: str, limit: int) -> str:
    """Return `text`, its middle left out where it takes more than `limit` bytes in a saved notebook.

    >>> shortened("ha" * 100, 20)
    'hahahahahahah … 181 characters left out … hahaha'
    """
    if len(text) * _MAXIMUM_COST <= limit or cost_of_text(text) <= limit:
        return text
    candidate = text[:limit]
    start = bisect_right(range(len(candidate)), limit * 2 // 3, key=lambda end: cost_of_text(candidate[:end]))
    start = max(start - 1, 0)
    rest = text[start:][-limit:]
    length = bisect_right(range(len(rest)), limit // 3, key=lambda end: cost_of_text(rest[len(rest) - end :]))
    length = max(length - 1, 0)
    left_out = len(text) - start - length
    return f"{text[:start]} … {left_out} characters left out … {text[len(text) - length :]}"


def clipped(text: str, limit: int) -> str:
    """Return the beginning of `text`, as many bytes of it as `limit` allows in a saved notebook."""
    if len(text) * _MAXIMUM_COST <= limit or cost_of_text(text) <= limit:
        return text
    candidate = text[:limit]
    end = bisect_right(range(len(candidate)), limit, key=lambda end: cost_of_text(candidate[:end]))
    return f"{text[: max(end - 1, 0)].rstrip()} …"


def cost_of_text(text: str) -> int:
    """Return how many bytes `text` takes in a saved notebook, escaped for HTML and then for JSON."""
    if not _COSTLY.search(text):
        return len(text)
    # Counting is three times as fast as escaping, and this is asked of every line of every rank.
    more = sum(extra * text.count(character) for character, extra in _COSTS)
    return len(text.encode("utf-8", "replace")) + more


def cost_of_line(line: Line) -> int:
    """Return how many bytes a line takes in a saved notebook, its prefix or its spans included."""
    styled = sum(style != PLAIN for style, _ in line.runs) + (line.stream is Stream.STDERR)
    return cost_of_text(line.text) + _LINE_OVERHEAD + _STYLE_COST * styled


def fit(
    outputs: Sequence[Output], budget: int, *, prefix: Callable[[Output], int] = lambda _: 0
) -> list[Output]:
    """Return the outputs with lines left out where all together take more bytes than `budget`.

    What one rank does not use is there for the others. Displays stay. `prefix` says what a line of an
    output costs beside itself.
    """
    extra = [prefix(each) for each in outputs]
    costs = [
        sum(cost_of_line(item) + more for item in each.items if isinstance(item, Line))
        for each, more in zip(outputs, extra, strict=True)
    ]
    limit = fair_limit(costs, budget)
    return [
        each if cost <= limit else Output(each.ranks, _cut(each.items, limit, more))
        for each, cost, more in zip(outputs, costs, extra, strict=True)
    ]


def fair_limit(costs: Iterable[int], budget: int) -> int:
    """Return the limit for each with which all together stay within `budget`.

    >>> fair_limit([10, 100, 100], 110)
    50
    """
    waiting = sorted(costs)
    while waiting:
        share = budget // len(waiting)
        if waiting[0] > share:
            return share
        budget -= waiting.pop(0)
    return budget


def _cut(items: Sequence[Item], budget: int, more: int) -> tuple[Item, ...]:
    """Keep the first third and the last two thirds of what may be shown, in whole lines."""
    limit = max(budget // 8, 80)
    first = _items_within(items, budget // 3, limit, more)
    last = len(items) - _items_within(items[first:][::-1], budget - budget // 3, limit, more)
    dropped = items[first:last]
    omission = Omission(
        lines=sum(
            1 if isinstance(item, Line) else item.lines if isinstance(item, Omission) else 0
            for item in dropped
        ),
        characters=sum(len(item.text) + 1 for item in dropped if isinstance(item, Line))
        + sum(item.characters for item in dropped if isinstance(item, Omission)),
        displays=sum(item.displays for item in dropped if isinstance(item, Omission)),
    )
    shown = [item for item in dropped if isinstance(item, Display)]
    kept = (*items[:first], omission, *shown, *items[last:])
    return tuple(_short(item, limit) if isinstance(item, Line) else item for item in kept)


def _items_within(items: Sequence[Item], budget: int, longest: int, more: int) -> int:
    """Return how many items from the start are within `budget`; an omission is no place to go on.

    Lines are to be cut to `longest` bytes; `more` is what each takes beside itself.
    """
    for index, item in enumerate(items):
        if isinstance(item, Omission):
            return index
        if isinstance(item, Line):
            budget -= min(cost_of_line(item), longest + _LINE_OVERHEAD) + more
            if budget < 0:
                return index
    return len(items)


def describe(omission: Omission, output: Output) -> str:
    """Say what was left out, and where it is."""
    parts = []
    if omission.lines:
        parts.append(f"{omission.lines} lines")
    elif omission.characters:
        parts.append(f"{omission.characters} characters")
    if omission.displays:
        parts.append(f"{omission.displays} displays")
    lines = [item for item in output.items if isinstance(item, Line)]
    only_errors = lines and all(line.stream is Stream.STDERR for line in lines)
    where = "displays" if not (omission.lines or omission.characters) else "stdout"
    where = "stderr" if where == "stdout" and only_errors else where
    return f"… {' and '.join(parts)} left out, see result.ranks[{output.ranks[0]}].{where} …"


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
    if wanted < 0 and not any(lines[1:]):
        # Only the end of this line was looked at.
        return f"… {lines[0]}" if lines else ""
    return next(filter(None, reversed(lines)), "")


def display_text(display: Display) -> str:
    """Return a display as text: its text/plain, or what it is."""
    for kind in ("text/plain", "text/markdown", "text/latex"):
        text = display.data.get(kind)
        if isinstance(text, str) and text.strip():
            return plain(text).rstrip("\n")
    return f"<{', '.join(sorted(display.data)) or 'empty display'}>"


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
