"""What ranks have logged, as the panel gets it: the cells of curves that changed, a few times a second."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypedDict

import msgspec

from nblaunch.insight.curves import MOST_CURVES, Curve, Curves, hidden_line, in_words
from nblaunch.protocol.metrics import MetricLog
from nblaunch.view.screen import plain

BYTES_PER_SECOND = 32_000
_PAUSE_SECONDS = 0.4
_FEW_RANKS = 8
"""Of so many ranks the page always has a line each."""
_MOST_LINES = 64
_APART_DRAWN = 4


class CurveDelta(TypedDict):
    """News of one curve; with `whole` the page forgets what it had.

    `cells` are step, least, mean and greatest value of each cell, in one list; `lines` step and value by
    rank. What is not finite is None. `apart` are the ranks whose values are far from those of the others.
    """

    whole: bool
    cells: list[float | None]
    lines: dict[str, list[float | None]]
    drawn: list[int]
    apart: list[int]
    words: str


class CurveNews(TypedDict):
    """The names to draw, in their order, and the curves that have changed."""

    names: list[str]
    more: str
    ranks: int
    curves: dict[str, CurveDelta]


class CurveFeed:
    """Finds what has changed since it was last asked. The page takes about 32 kB a second at most."""

    def __init__(self) -> None:
        self.curves = Curves()
        self.by_rank = False
        """Whether a reader wants a line for each rank. Any thread may set it."""
        self._lines: dict[str, frozenset[int]] = {}
        """The ranks whose lines the page has, by name."""
        self._names: list[str] = []
        self._due = 0.0

    def news(self, log: MetricLog, now: float) -> CurveNews | None:
        """Return what is new; None if nothing is, or it was asked too soon. `now` is in seconds."""
        if not log:
            return None
        self.curves.update(log)
        if now < self._due:
            return None
        shown = self.curves.shown()
        names = [curve.name for curve in shown]
        changed = {}
        for curve in shown:
            drawn, apart = self._drawn(curve)
            known = self._lines.get(curve.name)
            if curve.changed or curve.redrawn or known is None or drawn - known:
                whole = curve.redrawn or known is None
                changed[curve.name] = _delta(curve, drawn, apart, None if whole else known)
                self._lines[curve.name] = drawn
        for curve in self.curves.curves.values():
            curve.seen()
        if not changed and names == self._names:
            return None
        self._names = names
        news = self._with(changed)
        self._due = now + max(_PAUSE_SECONDS, len(msgspec.json.encode(news)) / BYTES_PER_SECOND)
        return news

    def whole(self) -> CurveNews | None:
        """Return everything, as it was at the last `news`, or later."""
        if not self._names:
            return None
        return self._with(
            {
                curve.name: _delta(curve, *self._drawn(curve), None)
                for curve in self.curves.shown()
                if curve.name in self._lines
            }
        )

    def _with(self, changed: dict[str, CurveDelta]) -> CurveNews:
        return CurveNews(
            names=[plain(name) for name in self._names],
            more=hidden_line(self.curves) if self.curves.hidden else "",
            ranks=max((len(curve.lines) for curve in self.curves.shown()), default=0),
            curves={plain(name): delta for name, delta in changed.items()},
        )

    def _drawn(self, curve: Curve) -> tuple[frozenset[int], list[int]]:
        """Return the ranks of which the page gets a line, and those that are apart."""
        apart = list(curve.apart())
        if self.by_rank or len(curve.lines) <= _FEW_RANKS:
            return frozenset(sorted(curve.lines)[:_MOST_LINES]), apart
        return frozenset(apart[:_APART_DRAWN]), apart


def _delta(curve: Curve, drawn: frozenset[int], apart: list[int], known: frozenset[int] | None) -> CurveDelta:
    """Return the changes of a curve; `known` are the ranks whose lines the page has, None: nothing at all."""
    numbers = sorted(curve.sums if known is None else curve.changed & curve.sums.keys())
    cells: list[float | None] = []
    for number in numbers:
        step, _, *values = curve.cell(number)
        cells += [step, *map(_short, values)]
    lines = {}
    for rank in sorted(drawn):
        line = curve.lines.get(rank, {})
        # A line that the page does not have is sent from its beginning.
        wanted: Iterable[int] = numbers if known is not None and rank in known else sorted(line)
        points: list[float | None] = []
        for number in wanted:
            if number in line:
                points += [number * curve.width, _short(line[number])]
        if points:
            lines[str(rank)] = points
    return CurveDelta(
        whole=known is None,
        cells=cells,
        lines=lines,
        drawn=sorted(drawn),
        apart=apart[:MOST_CURVES],
        words=plain(in_words(curve)),
    )


def _short(value: float) -> float | None:
    """Return a number with the digits that a drawing needs."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
