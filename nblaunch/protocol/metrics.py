"""The numbers that ranks have logged, as they travel, and all those of a run: an append-only log.

A log shares all that it has with the log that it is made from. A batch is one message of one rank; nothing is
unpacked before it is read.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec

from nblaunch._metrics import Metrics, Points
from nblaunch.protocol.messages import Logged

MOST_NAMES = 500
"""So many different names a rank may log in a run."""
NAME_CHARACTERS = 200

_BLOCK = 64


class MetricLog(msgspec.Struct, frozen=True):
    """All batches of a run, in the order in which they came; those of earlier attempts come first."""

    blocks: tuple[tuple[tuple[Logged, ...], ...], ...] = ()
    block: tuple[tuple[Logged, ...], ...] = ()
    last: tuple[Logged, ...] = ()
    batches: int = 0
    points: int = 0
    attempts: tuple[int, ...] = ()
    """How many batches there were when each attempt but the first began."""

    def __bool__(self) -> bool:
        """Whether anything has been logged."""
        return self.batches > 0

    def since(self, batches: int) -> Iterator[Logged]:
        first, skipped = divmod(batches, _BLOCK * _BLOCK)
        runs = chain(chain.from_iterable(self.blocks[first:]), self.block, (self.last,))
        small, skipped = divmod(skipped, _BLOCK)
        if first > len(self.blocks):
            return iter(())
        return islice(chain.from_iterable(islice(runs, small, None)), skipped, None)


def logged(log: MetricLog, batch: Logged) -> MetricLog:
    """Return the log with a batch at its end; one that is empty or broken changes nothing."""
    count = _count(batch)
    if not count:
        return log
    blocks, block, last = log.blocks, log.block, (*log.last, batch)
    if len(last) == _BLOCK:
        block, last = (*block, last), ()
        if len(block) == _BLOCK:
            blocks, block = (*blocks, block), ()
    return MetricLog(blocks, block, last, log.batches + 1, log.points + count, log.attempts)


def next_attempt(log: MetricLog) -> MetricLog:
    if not log:
        return log
    return msgspec.structs.replace(log, attempts=(*log.attempts, log.batches))


def table(log: MetricLog) -> Metrics:
    return Metrics(lambda: map(points_of, log.since(0)))


def points_of(batch: Logged) -> Points:
    return Points(
        batch.rank,
        batch.names,
        _column("H", batch.which),
        _column("q", batch.steps),
        _column("d", batch.times),
        _column("d", batch.values),
    )


def _count(batch: Logged) -> int:
    """Return the number of points, 0 if the columns do not fit together: ranks are not trusted."""
    count, rest = divmod(len(batch.values), 8)
    whole = not rest and len(batch.steps) == len(batch.times) == 8 * count and len(batch.which) == 2 * count
    if not whole or not count or len(batch.names) > MOST_NAMES:
        return 0
    named = max(_column("H", batch.which)) < len(batch.names)
    return count if named and max(map(len, batch.names)) <= NAME_CHARACTERS else 0


def in_json(value: float) -> float | str:
    """Return a number as JSON may have it: NaN and infinities are texts, which Python's `float` reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def packed(kind: str, column: Iterable[float]) -> bytes:
    data: array[Any] = array(kind, column)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def _column(kind: str, data: bytes) -> array[Any]:
    column: array[Any] = array(kind)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
