"""Output cut to what a saved notebook can hold: lines left out of the middle, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from nblaunch._protocol import Stream
from nblaunch._transcript import Display
from nblaunch.view.cost import cost_of_text, fair_limit, shortened
from nblaunch.view.output import Item, Omission, Output, Written
from nblaunch.view.terminal import PLAIN, Line

LINE_COST = 8_000
"""Bytes of one line; a longer one is cut in its middle."""
_LINE_OVERHEAD = 40
_STYLE_COST = 120
_SHARES = 2


def cost_of_line(line: Line) -> int:
    """Return how many bytes a line takes in a saved notebook, its prefix or its spans included."""
    styled = sum(style != PLAIN for style, _ in line.runs) + (line.stream is Stream.STDERR)
    return cost_of_text(line.text) + _LINE_OVERHEAD + _STYLE_COST * styled


def fit(
    outputs: Sequence[Output], budget: int, *, prefix: Callable[[Output, tuple[int, ...]], int] = lambda *_: 0
) -> list[Output]:
    """Return the outputs with lines left out where all together take more bytes than `budget`.

    The lines that the same ranks wrote have a share for each of these ranks; what one share does not use is
    there for the others. Displays stay. `prefix` says what a line costs beside itself.
    """
    outputs = [replace(each, rows=tuple(map(_short_row, each.rows))) for each in outputs]
    shares = [share for number, each in enumerate(outputs) for share in _shares(number, each, prefix)]
    limit = fair_limit((share.cost // share.ranks for share in shares for _ in range(share.ranks)), budget)
    cut: list[dict[int, Written | None]] = [{} for _ in outputs]
    for share in shares:
        if share.cost > limit * share.ranks:
            rows = [outputs[share.output].rows[place] for place in share.places]
            kept = _cut(rows, limit * share.ranks, share.prefix)
            cut[share.output].update(zip(share.places, kept, strict=True))
    return [
        replace(each, rows=tuple(filter(None, (rows.get(place, row) for place, row in enumerate(each.rows)))))
        for each, rows in zip(outputs, cut, strict=True)
    ]


@dataclass(slots=True)
class _Share:
    """The rows of one output that the same ranks wrote, by their places, and what they cost."""

    output: int
    ranks: int
    places: list[int] = field(default_factory=list)
    cost: int = 0
    prefix: int = 0


def _shares(
    number: int, output: Output, prefix: Callable[[Output, tuple[int, ...]], int]
) -> Iterable[_Share]:
    prefixes = {ranks: prefix(output, ranks) for ranks in {row.ranks for row in output.rows}}
    # Where nearly every line has other ranks, a share for each of them could hold none.
    by_first = len(prefixes) > _SHARES * len(output.ranks) + _SHARES
    shares: dict[tuple[int, ...], _Share] = {}
    for place, row in enumerate(output.rows):
        ranks = row.ranks[:1] if by_first else row.ranks
        share = shares.setdefault(ranks, _Share(number, len(ranks)))
        more = prefixes[row.ranks]
        share.prefix = max(share.prefix, more)
        share.places.append(place)
        if isinstance(row.item, Line):
            share.cost += cost_of_line(row.item) + more
    return shares.values()


def _short_row(row: Written) -> Written:
    return replace(row, item=_short(row.item, LINE_COST)) if isinstance(row.item, Line) else row


def _short(line: Line, limit: int) -> Line:
    """Return a line that takes no more than `limit` bytes; one that takes more loses its colours too."""
    if cost_of_line(line) <= limit:
        return line
    return Line(((PLAIN, shortened(line.text, limit)),), line.stream)


def _cut(rows: Sequence[Written], budget: int, more: int) -> list[Written | None]:
    """Keep the first third and the last two thirds of what may be shown, in whole lines.

    What is left out is None in the result, and an omission stands where it began.
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
        replace(row, item=_short(row.item, limit)) if row is not None and isinstance(row.item, Line) else row
        for row in [*rows[:first], *middle, *rows[last:]]
    ]


def _omission(dropped: Iterable[Item]) -> Omission:
    """Return one mark for lines that are left out, and what had been left out among them."""
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
