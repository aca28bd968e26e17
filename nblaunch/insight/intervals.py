"""Intervals of time: sorted lists of (begin, end), which do not touch unless noted otherwise."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def merged(intervals: Iterable[Interval], gap: int = 0) -> list[Interval]:
    """Return the union, sorted; intervals at most `gap` apart become one, empty ones vanish.

    >>> merged([(5, 7), (0, 3), (3, 4), (9, 9)])
    [(0, 4), (5, 7)]
    """
    found: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[0] < each[1]):
        if found and begin - found[-1][1] <= gap:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Return the length of all, which do not overlap.

    >>> length([(0, 4), (5, 7)])
    6
    """
    return sum(end - begin for begin, end in intervals)


def clipped(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """Return the part of a union between two moments.

    >>> clipped([(0, 4), (5, 7), (8, 9)], 3, 6)
    [(3, 4), (5, 6)]
    """
    found = []
    for number in range(max(bisect_right(intervals, (begin, begin)) - 1, 0), len(intervals)):
        first, last = intervals[number]
        if first >= end:
            break
        if last > begin:
            found.append((max(first, begin), min(last, end)))
    return found


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions.

    >>> common([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    found, first, second = [], 0, 0
    while first < len(one) and second < len(other):
        begin = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if begin < end:
            found.append((begin, end))
        if one[first][1] <= other[second][1]:
            first += 1
        else:
            second += 1
    return found
