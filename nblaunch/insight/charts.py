"""Curves drawn as SVG, for the saved notebook: a small chart for each name, all over the same steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from nblaunch._budget import clipped, cost_of_html
from nblaunch.insight import svg
from nblaunch.insight.curves import (
    Bucket,
    Curve,
    Curves,
    in_words,
    not_finite_words,
    number,
    thinned,
)

_WIDTH, _HEIGHT = 300.0, 165.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 8.0, 22.0, 20.0
_MOST_CELLS, _LEAST_CELLS = 120, 60
_CELLS_OF_ALL = 1600
_MOST_POINTS = 60
_NAMED = 4
_NAME_CHARACTERS = 32
_LOG_FROM = 100.0
"""From this ratio of the greatest to the least value on, the scale is logarithmic."""
_MOST_LINES = 64
BAND = svg.COLOURS[0]
APART = svg.COLOURS[1:5]


class _StepScale:
    """From steps to pixels."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._across = (_WIDTH - _RIGHT - _LEFT) / max(last - first, 1)

    def __call__(self, step: float) -> float:
        return _LEFT + (step - self.first) * self._across


class _ValueScale:
    """From values to pixels, both ways up; logarithmic where the values ask for it."""

    def __init__(self, values: Iterable[float], low: float, high: float, *, log: bool = False) -> None:
        known = [value for value in values if math.isfinite(value)]
        # What a logarithm has no place for is left out.
        known = [value for value in known if value > 0] if log and max(known, default=0) > 0 else known
        least, greatest = (min(known), max(known)) if known else (0.0, 1.0)
        self.log = least > 0 and (log or greatest / least >= _LOG_FROM)
        if self.log and least == greatest:
            least, greatest = least / 1.1, greatest * 1.1
        elif not self.log and greatest - least <= 1e-12 * max(abs(least), abs(greatest)):
            more = abs(least) * 0.05 or 0.5
            least, greatest = least - more, greatest + more
        self.least, self.greatest = least, greatest
        self._low, self._high = low, high
        self._from, self._to = self._plain(least), self._plain(greatest)

    def _plain(self, value: float) -> float:
        if not self.log:
            return value
        return math.log10(value) if value > 0 else math.nan

    def __call__(self, value: float) -> float:
        if not math.isfinite(self._plain(value)):
            return math.nan
        share = (self._plain(value) / 2 - self._from / 2) / (self._to / 2 - self._from / 2 or 1.0)
        return self._low + share * (self._high - self._low)

    def ticks(self, most: int) -> list[float]:
        if self.log and len(found := svg.log_ticks(self.least, self.greatest, most)) > 1:
            return found
        return svg.ticks(self.least, self.greatest, most)


def charts(curves: Curves, room: int) -> tuple[list[str], list[str]]:
    """Return a chart for each name, and charts with one line for each rank.

    All together take at most about `room` bytes: what has no room is left out from the end, first of all
    the charts of single ranks.
    """
    shown = curves.shown()
    steps = steps_of(shown)
    most = max(_LEAST_CELLS, min(_MOST_CELLS, _CELLS_OF_ALL // max(len(shown), 1)))
    drawn: list[str] = []
    for curve in shown:
        chart = _chart(curve, steps, most)
        room -= cost_of_html(chart)
        if room < 0:
            break
        drawn.append(chart)
    by_rank: list[str] = []
    for curve in shown[: len(drawn)]:
        if not 1 < len(curve.lines) <= _MOST_LINES:
            continue
        chart = _chart_of_ranks(curve, steps)
        if cost_of_html(chart) > room:
            break
        room -= cost_of_html(chart)
        by_rank.append(chart)
    return drawn, by_rank


_LABEL_WIDTH = 44


def live_chart(curve: Curve, steps: tuple[int, int], *, log: bool, each: bool) -> str:
    """Return the chart of a run that goes on: with few points, on a logarithmic scale if that is wanted."""
    return _chart_of_ranks(curve, steps, log=log) if each else _chart(curve, steps, _LEAST_CELLS, log=log)


def steps_of(shown: Sequence[Curve]) -> tuple[int, int]:
    """Return the first and the last step of all curves: they share their x axis."""
    ends = [(min(each.sums) * each.width, max(each.sums) * each.width) for each in shown if each.sums]
    return (min(first for first, _ in ends), max(last for _, last in ends)) if ends else (0, 1)


def _chart(curve: Curve, steps: tuple[int, int], most: int, *, log: bool = False) -> str:
    cells = list(thinned(curve.cells(), most))
    apart = list(curve.apart())[:_NAMED]
    lines = {rank: _some(curve.line(rank)) for rank in apart}
    values = [value for cell in cells for value in (cell.least, cell.greatest)]
    values += [value for line in lines.values() for _, value in line]
    x, y = _scales(values, steps, log=log)
    parts = _axes(curve.name, x, y)
    end = number(curve.last_mean)
    parts.append(svg.text(_WIDTH - _RIGHT, 13, end, anchor="end", size=12, more='font-weight="600"'))
    parts += _band(cells, x, y)
    for colour, (rank, line) in zip(APART, lines.items(), strict=False):
        parts.append(_line(line, x, y, colour))
        parts.append(_label(f"rank {rank}", line, x, y, colour))
    if curve.not_finite is not None:
        words = not_finite_words(curve.not_finite)
        style = f'style="fill:{svg.COLOURS[3]}"'
        parts.append(svg.text(_LEFT + 4, _HEIGHT - _BOTTOM - 4, words, size=10, more=style))
    return svg.document(_WIDTH, _HEIGHT, parts, label=f"{curve.name}: {in_words(curve)}")


def _chart_of_ranks(curve: Curve, steps: tuple[int, int], *, log: bool = False) -> str:
    lines = {rank: _some(curve.line(rank)) for rank in sorted(curve.lines)[:_MOST_LINES]}
    x, y = _scales([value for line in lines.values() for _, value in line], steps, log=log)
    parts = _axes(curve.name, x, y)
    for index, line in enumerate(lines.values()):
        parts.append(_line(line, x, y, svg.COLOURS[index % len(svg.COLOURS)], width=1))
    label = f"{curve.name}: one line for each of {len(lines)} ranks"
    return svg.document(_WIDTH, _HEIGHT, parts, label=label)


def _some(line: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return some points of a line, its last one among them."""
    apart = -(-len(line) // _MOST_POINTS)
    return list(line[::-1][::apart][::-1]) if apart else []


def _scales(
    values: Sequence[float], steps: tuple[int, int], *, log: bool = False
) -> tuple[_StepScale, _ValueScale]:
    return _StepScale(*steps), _ValueScale(values, _HEIGHT - _BOTTOM, _TOP, log=log)


def _axes(name: str, x: _StepScale, y: _ValueScale) -> list[str]:
    parts = [svg.text(_LEFT, 13, clipped(name, _NAME_CHARACTERS, len), size=12, more='font-weight="600"')]
    if y.log:
        parts.append(svg.text(_LEFT - 6, 13, "log", anchor="end", size=9))
    for value in y.ticks(4):
        place = y(value)
        parts.append(svg.line(_LEFT, place, _WIDTH - _RIGHT, place, faint=True))
        parts.append(svg.text(_LEFT - 4, place + 3.5, svg.number(value), anchor="end", size=10))
    for step in svg.ticks(x.first, x.last, 5) if x.last > x.first else [float(x.first)]:
        place = x(step)
        anchor = "end" if place > _WIDTH - 30 else "middle"
        place = min(place, _WIDTH - _RIGHT)
        parts.append(svg.text(place, _HEIGHT - 6, svg.number(step), anchor=anchor, size=10))
    return parts


def _band(cells: Sequence[Bucket], x: _StepScale, y: _ValueScale) -> list[str]:
    known = [cell for cell in cells if math.isfinite(cell.mean)]
    upper = [(x(cell.step), y(cell.greatest)) for cell in known]
    lower = [(x(cell.step), y(cell.least)) for cell in known]
    mean = [(x(cell.step), y(cell.mean)) for cell in cells]
    parts = [svg.area(upper, lower, BAND)] if upper != lower else []
    if len(known) == 1:
        # A line of one point would not be seen.
        place, height = mean[cells.index(known[0])]
        return [*parts, svg.rectangle(place - 2, height - 2, 4, 4, BAND)]
    if known:
        parts.append(svg.polyline(mean, BAND))
    return parts


def _line(
    line: Sequence[tuple[int, float]],
    x: _StepScale,
    y: _ValueScale,
    colour: str,
    *,
    width: float = 1.5,
) -> str:
    return svg.polyline([(x(step), y(value)) for step, value in line], colour, width=width)


def _label(words: str, line: Sequence[tuple[int, float]], x: _StepScale, y: _ValueScale, colour: str) -> str:
    """Name a line at its last point that is finite."""
    places = [(x(step), y(value)) for step, value in line if math.isfinite(value)]
    if not places:
        return ""
    across = places[-1][0]
    # Above what the line does below the words.
    highest = min(down for each, down in places if each >= across - _LABEL_WIDTH)
    place = min(max(highest - 4, _TOP + 8), _HEIGHT - _BOTTOM - 4)
    return svg.text(
        min(across, _WIDTH - _RIGHT), place, words, anchor="end", size=10, more=f'style="fill:{colour}"'
    )
