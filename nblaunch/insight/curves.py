"""What ranks have logged, as curves over the steps: a band over the ranks, and who is apart from the others.

    MetricLog ── Curves.update ──> Curve: a Bucket for each step, or for some steps in a row
                                     ├─ least, mean and greatest value of all ranks
                                     └─ each rank's last value there

A curve has at most 256 cells: beyond that two become one, so what it takes does not grow with the run. A run
that starts again goes on from the first step that it logs: what was there before, from that step on, is
replaced.

A rank is apart where its value differs from the median of the ranks by more than 6 median absolute
deviations (or 6 thousandths of the median, where the ranks are nearly equal), in each of the last 5 cells.
Where most ranks have a number, NaN and infinities are apart. Of two ranks none is apart from the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from nblaunch.protocol.messages import Logged
from nblaunch.protocol.metrics import MetricLog, points_of
from nblaunch.protocol.reports import format_ranks, plural, ranks_do

MOST_CURVES = 24
"""So many names are drawn; the table has all."""
_MOST_KEPT = 64
_MOST_CELLS = 256
_LEAST_CELLS = 64
_VALUES_OF_A_CURVE = 64 * _MOST_CELLS

_RECENT_CELLS = 5
_DEVIATIONS = 6.0
_LEAST_DEVIATION = 1e-3
_LEAST_RANKS = 3


class Bucket(NamedTuple):
    """The finite values of all ranks at `steps` steps from `step` on."""

    step: int
    steps: int
    least: float
    mean: float
    greatest: float


class NonFiniteStep(NamedTuple):
    """The first step of a curve with values that were NaN or infinite, and each rank's first one there."""

    step: int
    values: dict[int, float]


@dataclass(slots=True)
class Curve:
    """The values of one name. `width` is how many steps a cell has; cells have the number step // width."""

    name: str
    width: int = 1
    sums: dict[int, list[float]] = field(default_factory=dict)
    """By cell: how many finite values, their sum, the least and the greatest one."""
    lines: dict[int, dict[int, float]] = field(default_factory=dict)
    """By rank and cell: the rank's last value there."""
    firsts: dict[int, float] = field(default_factory=dict)
    lasts: dict[int, float] = field(default_factory=dict)
    not_finite: NonFiniteStep | None = None
    begins_again: bool = False

    def add(self, rank: int, step: int, value: float) -> None:
        if self.begins_again:
            self._cut(step)
        cell = step // self.width
        line = self.lines.get(rank)
        if line is None:
            line = self.lines[rank] = {}
            self.firsts.setdefault(rank, value)
        line[cell] = self.lasts[rank] = value
        sums = self.sums.get(cell)
        if sums is None:
            sums = self.sums[cell] = [0, 0.0, math.inf, -math.inf]
        if math.isfinite(value):
            sums[0] += 1
            sums[1] += value
            sums[2] = min(sums[2], value)
            sums[3] = max(sums[3], value)
        elif self.not_finite is None or step < self.not_finite.step:
            self.not_finite = NonFiniteStep(step, {rank: value})
        elif step == self.not_finite.step:
            self.not_finite.values.setdefault(rank, value)

    def _cut(self, step: int) -> None:
        """Forget what is from this step on: another attempt of the run begins there."""
        self.begins_again = False
        first = step // self.width
        self.sums = {cell: sums for cell, sums in self.sums.items() if cell < first}
        lines = {
            rank: {cell: value for cell, value in line.items() if cell < first}
            for rank, line in self.lines.items()
        }
        self.lines = {rank: line for rank, line in lines.items() if line}
        self.firsts = {rank: value for rank, value in self.firsts.items() if rank in self.lines}
        self.lasts = {}
        if self.not_finite is not None and self.not_finite.step >= step:
            self.not_finite = None

    def compact(self) -> None:
        """Make two cells one until there are few enough."""
        most = min(_MOST_CELLS, max(_LEAST_CELLS, _VALUES_OF_A_CURVE // max(len(self.lines), 1)))
        while len(self.sums) > most:
            self.width *= 2
            before, self.sums = self.sums, {}
            for cell in sorted(before):
                count, total, least, greatest = before[cell]
                sums = self.sums.setdefault(cell // 2, [0, 0.0, math.inf, -math.inf])
                sums[0] += count
                sums[1] += total
                sums[2], sums[3] = min(sums[2], least), max(sums[3], greatest)
            for rank, line in self.lines.items():
                self.lines[rank] = {cell // 2: line[cell] for cell in sorted(line)}

    def cells(self) -> list[Bucket]:
        """Return the values of all ranks, in the order of the steps; NaN where none is finite."""
        return [
            Bucket(cell * self.width, self.width, least, total / count, greatest)
            if count
            else Bucket(cell * self.width, self.width, math.nan, math.nan, math.nan)
            for cell, (count, total, least, greatest) in sorted(self.sums.items())
        ]

    def line(self, rank: int) -> list[tuple[int, float]]:
        return [(cell * self.width, value) for cell, value in sorted(self.lines.get(rank, {}).items())]

    @property
    def last_mean(self) -> float:
        return _mean(self.lasts.values())

    @property
    def first_step(self) -> int:
        """The first step, to the width of a cell."""
        return min(self.sums, default=0) * self.width

    def behind(self) -> list[int]:
        """Return the ranks whose last value is far older than those of others: they log no more, or hang."""
        ends = {rank: max(self.lines[rank]) for rank in sorted(self.lasts)}
        return [rank for rank, end in ends.items() if end < max(ends.values()) - _RECENT_CELLS]

    def apart(self) -> dict[int, float]:
        """Return the ranks that are apart from the others, each with its last value."""
        apart: set[int] | None = None
        checked = 0
        for cell in sorted(self.sums, reverse=True):
            values = {rank: line[cell] for rank, line in self.lines.items() if cell in line}
            if len(values) < max(_LEAST_RANKS, len(self.lines) / 2):
                continue
            # A rank that has no value here has not come back to the others.
            near = values.keys() - _far(values)
            apart = values.keys() - near if apart is None else apart - near
            checked += 1
            if checked == _RECENT_CELLS or not apart:
                break
        return {rank: self.lasts[rank] for rank in sorted(apart or ()) if rank in self.lasts}


def _far(values: Mapping[int, float]) -> list[int]:
    """Return the ranks whose value is far from those of the others."""
    finite = [value for value in values.values() if math.isfinite(value)]
    if 2 * len(finite) <= len(values):
        return []
    middle = median(finite)
    deviation = median(abs(value - middle) for value in finite)
    limit = _DEVIATIONS * max(deviation, _LEAST_DEVIATION * abs(middle))
    return [rank for rank, value in values.items() if not abs(value - middle) <= limit]


class Curves:
    """The curves of a run, folded from its log as that grows; used by one thread."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.left_out: set[str] = set()
        """Names for which there was no room."""
        self._batches = 0

    @classmethod
    def of(cls, log: MetricLog) -> Curves:
        made = cls()
        made.update(log)
        return made

    def update(self, log: MetricLog) -> bool:
        """Fold what the log has more than last time; return whether it has. It may not be another run's."""
        if log.batches <= self._batches:
            return False
        number, attempts = self._batches, [each for each in log.attempts if each >= self._batches]
        for batch in log.since(self._batches):
            while attempts and attempts[0] <= number:  # several at once if one has logged nothing
                attempts.pop(0)
                for curve in self.curves.values():
                    curve.begins_again = True
            self._fold(batch)
            number += 1
        self._batches = number
        return True

    def _fold(self, batch: Logged) -> None:
        points, rank = points_of(batch), batch.rank
        adds = [self._curve(name) for name in points.names]
        for index, step, value in zip(points.which, points.steps, points.values, strict=True):
            curve = adds[index]
            if curve is not None:
                curve.add(rank, step, value)
        for curve in adds:
            if curve is not None:
                curve.compact()

    def _curve(self, name: str) -> Curve | None:
        curve = self.curves.get(name)
        if curve is None and len(self.curves) < _MOST_KEPT:
            curve = self.curves[name] = Curve(name)
        elif curve is None and len(self.left_out) < _MOST_KEPT * _MOST_CELLS:
            self.left_out.add(name)
        return curve

    def shown(self) -> list[Curve]:
        """Return the curves to draw, ordered by first step and name.

        So the order does not depend on which rank was heard first.
        """
        return sorted(self.curves.values(), key=lambda curve: (curve.first_step, curve.name))[:MOST_CURVES]

    @property
    def hidden(self) -> int:
        """How many names are not drawn."""
        return max(len(self.curves) - MOST_CURVES, 0) + len(self.left_out)


# In words: a line for each name.


def curve_lines(curves: Curves) -> list[str]:
    """Return a line for each name, and one for the names that are left out; no times.

    >>> log = Curves()
    >>> curve = log.curves["loss"] = Curve("loss")
    >>> for rank in range(4):
    ...     curve.add(rank, 0, 3.0 if rank == 3 else 2.0)
    ...     curve.add(rank, 9, 0.9 if rank == 3 else 0.5)
    >>> curve_lines(log)
    ['loss  2.25 -> 0.6 (mean of 4 ranks; 0.5 .. 0.9; rank 3 apart: 0.9)']
    """
    shown = curves.shown()
    wide = min(max((len(each.name) for each in shown), default=0), 24)
    lines = [f"{each.name.ljust(wide)}  {in_words(each)}" for each in shown]
    more = [f"… {plural(curves.hidden, 'more name')} in result.metrics …"] if curves.hidden else []
    return lines + more


def lines_by_rank(curves: Curves) -> list[str]:
    """Return a line for each name that is drawn, with the last value of each rank, of many of the first ones.

    >>> log = Curves()
    >>> curve = log.curves["loss"] = Curve("loss")
    >>> for rank in range(2):
    ...     curve.add(rank, 0, 0.5 + rank)
    >>> lines_by_rank(log)
    ['loss  rank 0: 0.5, rank 1: 1.5']
    """
    shown = [each for each in curves.shown() if len(each.lasts) > 1]
    wide = min(max((len(each.name) for each in shown), default=0), 24)
    lines = []
    for each in shown:
        lasts = [f"rank {rank}: {number(value)}" for rank, value in sorted(each.lasts.items())]
        more = [f"{len(lasts) - _LASTS} more"] if len(lasts) > _LASTS else []
        lines.append(f"{each.name.ljust(wide)}  {', '.join([*lasts[:_LASTS], *more])}")
    return lines


def in_words(curve: Curve) -> str:
    """Return where a curve began and ended: `2.31 -> 0.42 (mean of 8 ranks; 0.40 .. 0.45)`."""
    first, last = _mean(curve.firsts.values()), curve.last_mean
    ranks = sorted(curve.lasts)
    finite = [value for value in curve.lasts.values() if math.isfinite(value)]
    counted = f"{len(finite)} of " if 0 < len(finite) < len(ranks) else ""
    about = (
        [f"mean of {counted}{len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0]}"] if ranks else []
    )
    if len(ranks) > 1 and finite and min(finite) < max(finite):
        about.append(f"{number(min(finite))} .. {number(max(finite))}")
    behind = curve.behind()
    about += [f"{ranks_do(behind, {}, 'is', 'are')} steps behind"] if behind else []
    apart = curve.apart()
    about += [f"rank {rank} apart: {number(value)}" for rank, value in list(apart.items())[:_NAMED]]
    if len(apart) > _NAMED:
        about.append(f"{len(apart) - _NAMED} more ranks apart")
    if curve.not_finite is not None:
        about.append(not_finite_words(curve.not_finite))
    began = "" if len(curve.sums) < 2 else f"{number(first)} -> "  # noqa: PLR2004 - one point is no way
    return f"{began}{number(last)} ({'; '.join(about)})"


_NAMED = 4
_LASTS = 16


def not_finite_words(found: NonFiniteStep) -> str:
    """Return which ranks had what: `nan on ranks 0-3 at step 17`.

    >>> not_finite_words(NonFiniteStep(17, {2: math.nan, 0: math.inf, 1: math.nan}))
    'inf on rank 0, nan on ranks 1-2 at step 17'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(found.values.items()):
        ranks.setdefault(str(value), []).append(rank)
    return (
        f"{', '.join(f'{value} on {format_ranks(who)}' for value, who in ranks.items())} at step {found.step}"
    )


def number(value: float) -> str:
    """Return a number with the digits that count: 0.4213, 1.5e-07, nan.

    >>> number(0.42131), number(2.0), number(123456.0)
    ('0.4213', '2', '1.235e+05')
    """
    return f"{value:.4g}"


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(value / len(finite) for value in finite) if finite else math.nan


def thinned(cells: Sequence[Bucket], most: int) -> Iterator[Bucket]:
    """Yield at most so many cells, each of several that follow each other."""
    together = -(-len(cells) // most)
    for start in range(0, len(cells), together):
        some = cells[start : start + together]
        known = [each for each in some if math.isfinite(each.mean)]
        steps = some[-1].step + some[-1].steps - some[0].step
        if not known:
            yield Bucket(some[0].step, steps, math.nan, math.nan, math.nan)
            continue
        yield Bucket(
            some[0].step,
            steps,
            min(each.least for each in known),
            math.fsum(each.mean / len(known) for each in known),
            max(each.greatest for each in known),
        )
