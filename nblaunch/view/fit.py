"""Output cut to what a saved notebook can hold: lines left out of the middle, and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nblaunch._protocol import Stream
from nblaunch._transcript import Display
from nblaunch.view.cost import cost_of_text, fair_limit, shortened
from nblaunch.view.output import Item, Omission, Output
from nblaunch.view.terminal import PLAIN, Line

LINE_COST = 8_000
"""Bytes of one line; a longer one is cut in its middle."""
_LINE_OVERHEAD = 40
_STYLE_COST = 120


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
    outputs = [replace(each, items=_short_lines(each.items, LINE_COST)) for each in outputs]
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


def _short_lines(items: Sequence[Item], limit: int) -> tuple[Item, ...]:
    return tuple(_short(item, limit) if isinstance(item, Line) else item for item in items)


def _short(line: Line, limit: int) -> Line:
    """Return a line that takes no more than `limit` bytes; one that takes more loses its colours too."""
    if cost_of_line(line) <= limit:
        return line
    return Line(((PLAIN, shortened(line.text, limit)),), line.stream)


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
    return _short_lines(kept, limit)


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
