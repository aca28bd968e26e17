"""What ranks wrote, as lines and displays; what several ranks have in common stands once."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice

import msgspec

from nblaunch._budget import cost_of_text, fair_limit, shortened
from nblaunch.insight.folding import merged
from nblaunch.protocol.messages import Stream
from nblaunch.protocol.reports import ranks_by_answer
from nblaunch.protocol.state import RankState, RunState
from nblaunch.protocol.transcript import Display, Entry, Text, Transcript
from nblaunch.view.screen import PLAIN, Line, Screen, plain

DRAWN_CHARACTERS = 1_000_000
"""Text of all ranks together that is drawn at the end of a run; several times what can be shown."""
_LINE_WEIGHT = 20
_RECENT_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class Omission:
    """What is left out: lines, or characters where there is no whole line; and displays."""

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
class Folded:
    """What these ranks wrote and displayed, in an order that keeps the order of each rank."""

    ranks: tuple[int, ...]
    rows: tuple[Written, ...]
    mixed: bool = False
    """Whether there are items that not all of the ranks have."""

    @property
    def items(self) -> tuple[Item, ...]:
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
        return tuple(item for item in self.items if isinstance(item, Display))


def folded(state: RunState) -> list[Folded]:
    """Return the ranks' output in rank order; ranks that have lines in common share a `Folded`.

    Equal lines appear there once, with the ranks that wrote them. The order depends on what each rank
    wrote, not on when it arrived. Ranks without output are left out.
    """
    transcripts = {rank: known.transcript for rank, known in state.ranks.items()}
    alike = ranks_by_answer(
        {
            rank: (_key(each.entries), each.omitted, each.omitted_displays)
            for rank, each in transcripts.items()
        }
    )
    by_ranks = {ranks: transcripts[ranks[0]] for ranks in alike.values()}
    # Drawing is what costs; and different text may look the same once drawn.
    limit = fair_limit((_weight(each.entries) for each in by_ranks.values()), DRAWN_CHARACTERS)
    groups: dict[tuple[Hashable, ...], tuple[tuple[Item, ...], list[int]]] = {}
    for ranks, transcript in by_ranks.items():
        items = items_of(_trimmed(transcript, limit))
        groups.setdefault(_key(items), (items, []))[1].extend(ranks)
    return _merged([(tuple(sorted(ranks)), key, items) for key, (items, ranks) in groups.items() if items])


def _merged(groups: list[tuple[tuple[int, ...], tuple[Hashable, ...], tuple[Item, ...]]]) -> list[Folded]:
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
        outputs.append(Folded(everyone, shown, mixed=len(ranks) > 1))
    return sorted(outputs, key=lambda output: output.ranks)


def _weight(entries: Iterable[Entry]) -> int:
    """Return the cost of drawing these, in characters; a line costs as much as some characters."""
    return sum(
        len(entry.text) + _LINE_WEIGHT * entry.text.count("\n")
        for entry in entries
        if isinstance(entry, Text)
    )


def _trimmed(transcript: Transcript, limit: int) -> Transcript:
    """Return the transcript, its middle left out where it weighs more than `limit`."""
    if _weight(transcript.entries) <= limit:
        return transcript
    head, rest = _split(transcript.head or transcript.tail, limit // 3)
    if transcript.head:
        rest += transcript.tail
    last, dropped = _split([_turned(entry) for entry in reversed(rest)], limit - limit // 3)
    texts = [entry.text for entry in dropped if isinstance(entry, Text)]
    return msgspec.structs.replace(
        transcript,
        head=tuple(head),
        tail=(
            *(entry for entry in reversed(dropped) if isinstance(entry, Display)),
            *(_turned(entry) for entry in reversed(last)),
        ),
        omitted=transcript.omitted + sum(map(len, texts)),
        omitted_lines=transcript.omitted_lines + sum(text.count("\n") for text in texts),
    )


def _split(entries: Sequence[Entry], room: int) -> tuple[list[Entry], list[Entry]]:
    """Split entries where they weigh `room`, within a text if necessary."""
    for index, entry in enumerate(entries):
        weight = _weight([entry])
        if isinstance(entry, Text) and weight > room:
            place = len(entry.text) * room // weight
            first, rest = Text(entry.stream, entry.text[:place]), Text(entry.stream, entry.text[place:])
            return [*entries[:index], first], [rest, *entries[index + 1 :]]
        room -= weight
    return list(entries), []


def _turned(entry: Entry) -> Entry:
    return Text(entry.stream, entry.text[::-1]) if isinstance(entry, Text) else entry


def _key(items: Iterable[Item | Text]) -> tuple[Hashable, ...]:
    return tuple(
        json.dumps([item.data, item.metadata], sort_keys=True, default=repr)
        if isinstance(item, Display)
        else item
        for item in items
    )


def items_of(transcript: Transcript) -> tuple[Item, ...]:
    """Return a transcript as lines, displays and what was left out between its head and its tail."""
    head, tail = _joined(transcript.head), _joined(transcript.tail)
    if transcript.omitted_lines:
        lines = transcript.omitted_lines + _cut_half_lines(head, tail)
        omission = Omission(lines, transcript.omitted, transcript.omitted_displays)
        items = [*_draw(head), omission, *_draw(tail)]
    elif transcript.omitted:
        # One endless line: the mark stays in it, or the next `\r` writes over it.
        stream = next((entry.stream for entry in tail if isinstance(entry, Text)), Stream.STDOUT)
        mark = Text(stream, f"… {transcript.omitted} characters left out …")
        items = _draw([*head, mark, *tail])
    elif transcript.omitted_displays:
        items = [*_draw(head), Omission(displays=transcript.omitted_displays), *_draw(tail)]
    else:
        items = _draw([*head, *tail])
    while items and isinstance(items[-1], Line) and not items[-1].text.strip():
        items.pop()
    return tuple(items)


def _joined(entries: Iterable[Entry]) -> list[Entry]:
    joined: list[Entry] = []
    for stream, group in groupby(entries, key=lambda entry: getattr(entry, "stream", None)):
        if stream is None:
            joined += group
        else:
            joined.append(Text(stream, "".join(entry.text for entry in group if isinstance(entry, Text))))
    return joined


def _cut_half_lines(head: list[Entry], tail: list[Entry]) -> int:
    """Cut the half lines on both sides of an omission; return how many more lines that leaves out.

    The end of the head's half line is among the omitted line ends already; the tail's is not.
    """
    for index, entry in reversed(list(enumerate(head))):
        if isinstance(entry, Text):
            head[index] = Text(entry.stream, entry.text[: entry.text.rfind("\n") + 1])
            break
    for index, entry in enumerate(tail):
        if isinstance(entry, Text):
            _, newline, rest = entry.text.partition("\n")
            tail[index] = Text(entry.stream, rest) if newline else entry
            return len(newline)
    return 0


def _draw(entries: Iterable[Entry]) -> list[Item]:
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


def omission_text(omission: Omission, rank: int, *, errors: bool = False) -> str:
    """Return a note on omitted output, and where to find it; `errors` for stderr."""
    parts = []
    if omission.lines:
        parts.append(f"{omission.lines} lines")
    elif omission.characters:
        parts.append(f"{omission.characters} characters")
    stream = ("stderr" if errors else "stdout") if parts else "displays"
    if omission.displays:
        parts.append(f"{omission.displays} displays")
    return f"… {' and '.join(parts)} left out, see result.ranks[{rank}].{stream} …"


def only_errors(output: Folded) -> set[tuple[int, ...]]:
    streams: dict[tuple[int, ...], set[Stream]] = {}
    for row in output.rows:
        if isinstance(row.item, Line):
            streams.setdefault(row.ranks, set()).add(row.item.stream)
    return {ranks for ranks, found in streams.items() if found == {Stream.STDERR}}


def latest(transcript: Transcript, count: int) -> list[Entry]:
    """Return the last `count` characters and displays of the transcript, in order."""
    found: list[Entry] = []
    for entry in chain(reversed(transcript.tail), reversed(transcript.head)):
        if count <= 0:
            break
        found.append(Text(entry.stream, entry.text[-count:]) if isinstance(entry, Text) else entry)
        count -= size_of(entry)
    return found[::-1]


def size_of(entry: Entry) -> int:
    """Return how much an entry adds to `Transcript.written`."""
    return len(entry.text) if isinstance(entry, Text) else 1


def last_line(transcript: Transcript) -> str:
    """Return the last line that is not blank, as a terminal shows it; only its end where it is long."""
    found = latest(transcript, _RECENT_CHARACTERS)
    screen = Screen()
    redrawn = False
    for entry in found:
        if isinstance(entry, Text):
            screen.write(entry.stream, entry.text)
            redrawn = redrawn or "\r" in entry.text.replace("\r\n", "\n")
    lines = [line.text.strip() for line in screen.lines()]
    if _is_shortened(found, transcript) and not any(lines[1:]) and not redrawn:
        return f"… {lines[0]}" if lines else ""
    return next(filter(None, reversed(lines)), "")


def _is_shortened(found: list[Entry], transcript: Transcript) -> bool:
    """Whether the first of the `latest` entries is only the end of one."""
    backwards = chain(reversed(transcript.tail), reversed(transcript.head))
    whole = next(islice(backwards, len(found) - 1, None)) if found else None
    return whole is not None and size_of(whole) > size_of(found[0])


def text_of(display: Display, kind: str) -> str:
    """Return a display's text of a MIME type, empty if it is blank or not text."""
    text = display.data.get(kind)
    if isinstance(text, list):  # as a notebook file has it
        text = "".join(each for each in text if isinstance(each, str))
    return text if isinstance(text, str) and text.strip() else ""


def display_text(display: Display) -> str:
    """Return a display as text: its text/plain, or what it is."""
    for kind in ("text/plain", "text/markdown", "text/latex"):
        if text := text_of(display, kind):
            return plain(text).rstrip("\n")
    return plain(f"<{', '.join(sorted(display.data)) or 'empty display'}>")


def display_rows(display: Display, ranks: tuple[int, ...], note: str = "") -> list[Written]:
    """Return a display that these ranks made as lines of text, with a note below."""
    lines = [*display_text(display).split("\n"), *([note] if note else [])]
    return [Written(ranks, Line(((PLAIN, line),))) for line in lines]


def only_text(outputs: Iterable[Folded]) -> list[Folded]:
    """Return the outputs, displays as lines."""
    return [
        replace(
            each,
            rows=tuple(
                chain.from_iterable(
                    display_rows(row.item, row.ranks) if isinstance(row.item, Display) else [row]
                    for row in each.rows
                )
            ),
        )
        for each in outputs
    ]


def by_rank(state: RunState, of: Callable[[RankState], str]) -> list[tuple[tuple[int, ...], str]]:
    """Return `of` of each rank, in rank order, equal answers folded; empty ones are left out.

    >>> by_rank(RunState.fresh(3), lambda rank: "odd" if rank.rank % 2 else "even")
    [((0, 2), 'even'), ((1,), 'odd')]
    """
    answers = ranks_by_answer({rank: of(known) for rank, known in state.ranks.items()})
    return [(ranks, answer) for answer, ranks in answers.items() if answer]


# Output cut to what a saved notebook can hold: lines left out of the middle, and counted.


LINE_COST = 8_000
"""Bytes of one line; a longer one is cut in its middle."""
_LINE_OVERHEAD = 40
_STYLE_COST = 120
_SHARES = 2


def cost_of_line(line: Line) -> int:
    """Return how many bytes a line takes in a saved notebook, with its spans."""
    styled = sum(style != PLAIN for style, _ in line.runs) + (line.stream is Stream.STDERR)
    return cost_of_text(line.text) + _LINE_OVERHEAD + _STYLE_COST * styled


def fit(
    outputs: Sequence[Folded], budget: int, *, prefix: Callable[[Folded, tuple[int, ...]], int]
) -> list[Folded]:
    """Return the outputs with lines left out where all together take more bytes than `budget`.

    The lines that the same ranks wrote have a share for each of these ranks; what one share leaves, the
    others may use. Displays stay. `prefix` returns the cost of a line's prefix.
    """
    outputs = [
        replace(each, rows=tuple(replace(row, item=_short(row.item, LINE_COST)) for row in each.rows))
        for each in outputs
    ]
    prefixes = [
        {ranks: prefix(each, ranks) for ranks in {row.ranks for row in each.rows}} for each in outputs
    ]
    shares: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, each in enumerate(outputs):
        # Where nearly every line has other ranks, a share for each of them could hold none.
        by_first = len(prefixes[number]) > _SHARES * len(each.ranks) + _SHARES
        for place, row in enumerate(each.rows):
            shares.setdefault((number, row.ranks[:1] if by_first else row.ranks), []).append(place)

    def rows_of(number: int, places: Sequence[int]) -> list[Written]:
        return [outputs[number].rows[place] for place in places]

    costs = {
        (number, ranks): sum(
            cost_of_line(row.item) + prefixes[number][row.ranks]
            for row in rows_of(number, places)
            if isinstance(row.item, Line)
        )
        for (number, ranks), places in shares.items()
    }
    limit = fair_limit((cost // len(ranks) for (_, ranks), cost in costs.items() for _ in ranks), budget)
    kept: list[dict[int, Written | None]] = [dict(enumerate(each.rows)) for each in outputs]
    for (number, ranks), places in shares.items():
        if costs[number, ranks] > limit * len(ranks):
            rows = rows_of(number, places)
            more = max(prefixes[number][row.ranks] for row in rows)
            kept[number].update(zip(places, _cut(rows, limit * len(ranks), more), strict=True))
    return [
        replace(each, rows=tuple(filter(None, rows.values())))
        for each, rows in zip(outputs, kept, strict=True)
    ]


def _short(item: Item, limit: int) -> Item:
    """Return a line that takes no more than `limit` bytes; one that takes more loses its colours too."""
    if not isinstance(item, Line) or cost_of_line(item) <= limit:
        return item
    return Line(((PLAIN, shortened(item.text, limit)),), item.stream)


def _cut(rows: Sequence[Written], budget: int, more: int) -> list[Written | None]:
    """Return the first third and the last two thirds of what may be shown, in whole lines.

    What is left out is None in the result, with an omission where it began.
    """
    limit = max(budget // 8, 80)
    items = [row.item for row in rows]
    first = _items_within(items, budget // 3, limit, more)
    last = len(items) - _items_within(items[first:][::-1], budget - budget // 3, limit, more)
    middle: list[Written | None] = [
        row if isinstance(row.item, Display) else None for row in rows[first:last]
    ]
    if None in middle:
        dropped = [row for row in rows[first:last] if not isinstance(row.item, Display)]
        ranks = tuple(sorted({rank for each in {row.ranks for row in dropped} for rank in each}))
        middle[middle.index(None)] = Written(ranks, _omission([row.item for row in dropped]))
    return [
        None if row is None else replace(row, item=_short(row.item, limit))
        for row in [*rows[:first], *middle, *rows[last:]]
    ]


def _omission(dropped: Iterable[Item]) -> Omission:
    """Return one mark for lines that are left out and for the omissions among them."""
    parts = [
        item if isinstance(item, Omission) else Omission(1, len(item.text) + 1)
        for item in dropped
        if not isinstance(item, Display)
    ]
    return Omission(
        sum(part.lines for part in parts),
        sum(part.characters for part in parts),
        sum(part.displays for part in parts),
    )


def _items_within(items: Sequence[Item], budget: int, longest: int, more: int) -> int:
    """Return how many items from the start are within `budget`; an omission ends them.

    Lines are to be cut to `longest` bytes; `more` is the cost of a prefix.
    """
    for index, item in enumerate(items):
        if isinstance(item, Omission):
            return index
        if isinstance(item, Line):
            budget -= min(cost_of_line(item), longest + _LINE_OVERHEAD) + more
            if budget < 0:
                return index
    return len(items)
