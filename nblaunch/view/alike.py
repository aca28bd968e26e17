"""Ranks that are alike share a row: which these are, and how a row says what they have in common.

What makes ranks alike is their keys, which the caller has made of what it shows. Figures that may differ
within a row (a peak of memory, a device's number) are shown as a range.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

from nblaunch.protocol.reports import format_ranks, plural, ranks_by_answer, size

LEAST = 3
"""Fewer ranks that are alike keep a row each: two rows are read as quickly as one."""
MOST_ROWS = 16
"""Rows beside which there is room for the rest of a run on one screen."""
_LABEL = 40
_LINE_LABEL = 80
_DEVICE = re.compile(r"(.*?)(\d+)")
_DEVICES_NAMED = 3
_COLUMNS_WIDTH = 100
_GAP = 2


def rows_of(keys: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
    """Return the ranks of each row: those with equal keys together if there are at least three.

    Every rank stands in one row. Ranks rise within a row, and rows by their lowest rank.

    >>> rows_of({0: "a", 1: "a", 2: "a", 3: "b", 4: "a"})
    [(0, 1, 2, 4), (3,)]
    >>> rows_of({0: "a", 1: "a"})
    [(0,), (1,)]
    """
    alike = ranks_by_answer(keys).values()
    rows = [
        row for ranks in alike for row in ([ranks] if len(ranks) >= LEAST else [(each,) for each in ranks])
    ]
    return sorted(rows)


def finest(levels: Iterable[tuple[Mapping[int, Hashable], int]]) -> list[tuple[int, ...]]:
    """Return the rows by the first keys that make no more rows than they describe, else by the last keys.

    >>> finest([({0: 1, 1: 2, 2: 3, 3: 4}, 3), ({0: "a", 1: "a", 2: "a", 3: "a"}, 3)])
    [(0, 1, 2, 3)]
    """
    rows: list[tuple[int, ...]] = []
    for keys, most in levels:
        rows = rows_of(keys)
        if len(rows) <= most:
            break
    return rows


def levels_of(figures: Mapping[int, int | None]) -> dict[int, int]:
    """Return a number for each rank: the same for those whose figures differ by a quarter at most.

    >>> levels_of({0: 100, 1: 120, 2: 300, 3: None})
    {3: 0, 0: 1, 1: 1, 2: 2}
    """
    found: dict[int, int] = {}
    number, least = 0, 0
    for rank, figure in sorted(figures.items(), key=lambda each: each[1] or 0):
        if figure and (not least or figure > least + least // 4):
            number, least = number + 1, figure
        found[rank] = number if figure else 0
    return found


def label(ranks: Sequence[int], limit: int = _LABEL) -> str:
    """Return a row's ranks as its first cell has them; how many there are where they would fill a line.

    >>> label([0, 1, 2, 4]), label(range(0, 100, 2))
    ('0-2,4', '50 ranks (0,2,4,6,8,10,12,14,16,18,20,…)')
    """
    numbers = format_ranks(ranks).partition(" ")[2]
    if len(numbers) <= limit:
        return numbers
    count = f"{plural(len(set(ranks)), 'rank')} ("
    shown = numbers[: limit - len(count)].rpartition(",")[0]
    return f"{count}{shown},…)"


def is_whole(ranks: Sequence[int]) -> bool:
    """Return whether a row's first cell names all of its ranks."""
    return not label(ranks).endswith(")")


def named(ranks: Sequence[int]) -> str:
    """Return the ranks as a line begins with them: `ranks 0-2,4`; how many where they would fill it."""
    text = label(ranks, _LINE_LABEL)
    return text if text.endswith(")") else format_ranks(ranks)


def sizes(counts: Iterable[int | None]) -> str:
    """Return the range of numbers of bytes; empty where none is known.

    >>> sizes([231 << 20, None, 240 << 20]), sizes([3 << 29, 3 << 29]), sizes([900 << 20, 2 << 30])
    ('231-240 MiB', '1.5 GiB', '900 MiB - 2.0 GiB')
    """
    known = [count for count in counts if count]
    if not known:
        return ""
    low, high = size(min(known)), size(max(known))
    if low == high:
        return low
    number, unit = low.split()
    return f"{number}-{high}" if high.endswith(unit) else f"{low} - {high}"


def devices(names: Iterable[str]) -> str:
    """Return the devices of a row.

    >>> devices(["cuda:0", "cuda:1", "cuda:2"]), devices(["cpu", "cpu"]), devices(["cpu", "cuda:0"])
    ('cuda:0-2', 'cpu', 'cpu, cuda:0')
    """
    every = sorted(set(filter(None, names)))
    found = [_DEVICE.fullmatch(each) for each in every]
    if len(every) > 1 and all(found) and len({each[1] for each in found if each}) == 1:
        numbers = label([int(each[2]) for each in found if each])
        return f"{found[0][1]}{numbers}" if found[0] and "(" not in numbers else plural(len(every), "device")
    return ", ".join(every) if len(every) <= _DEVICES_NAMED else plural(len(every), "device")


def beside(entries: Sequence[str]) -> int:
    """Return how many of these texts a line holds side by side, one at least."""
    return max((_COLUMNS_WIDTH + _GAP) // (max(map(len, entries), default=0) + _GAP), 1)


def in_columns(entries: Sequence[str], count: int) -> list[str]:
    """Return short texts, so many in a line.

    >>> in_columns(["rank 0: 1", "rank 1: 2", "rank 10: 3"], 2)
    ['rank 0: 1   rank 1: 2', 'rank 10: 3']
    """
    wide = max(map(len, entries), default=0) + _GAP
    lines = (entries[start : start + count] for start in range(0, len(entries), count))
    return ["".join(each.ljust(wide) for each in line).rstrip() for line in lines]
