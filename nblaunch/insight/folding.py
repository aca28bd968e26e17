"""Merges what several ranks wrote: a common item stands once, and each rank's order is kept.

The merge depends on the content alone, never on the time at which something arrived. Two sequences are
aligned as a patience diff does it: on items that both have once, then between those on the rest. Aligning
pairs of neighbours, then pairs of pairs, keeps the cost at n log n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise

MOST_ITEMS = 40_000
"""Items of all columns together that are aligned; more would take the kernel a noticeable time."""
_DEPTH = 12


_Column = list[tuple[int, int]]
"""Keys in order, and for each of them which columns have it, as bits."""


def merged(
    columns: Sequence[Sequence[Hashable]], weak: Collection[Hashable] = (), marks: Collection[Hashable] = ()
) -> list[list[tuple[Hashable, tuple[int, ...]]]]:
    """Return the columns' items with the numbers of the columns that have them, merged where they share any.

    Each list in the result is of columns that share items with one another, directly or through a third.
    Neither `weak` items (blank lines) nor `marks` (what was left out) are a reason to merge. Weak ones are
    shared only next to others that are.

    >>> merged(["axb", "ayb", "z"])
    [[('a', (0, 1)), ('x', (0,)), ('y', (1,)), ('b', (0, 1))], [('z', (2,))]]
    """
    numbers: dict[Hashable, int] = {}
    numbered = [[numbers.setdefault(item, len(numbers)) for item in column] for column in columns]
    keys = list(numbers)
    ignored = {numbers[item] for item in weak if item in numbers}
    found: list[list[tuple[Hashable, tuple[int, ...]]]] = []
    for related in _related(numbered, ignored.union(numbers[item] for item in marks if item in numbers)):
        if len(related) > 1 and sum(len(numbered[each]) for each in related) > MOST_ITEMS:
            found += [[(keys[key], (each,)) for key in numbered[each]] for each in related]
            continue
        unmerged: list[_Column] = [[(key, 1 << each) for key in numbered[each]] for each in related]
        while len(unmerged) > 1:
            pairs = [unmerged[place : place + 2] for place in range(0, len(unmerged), 2)]
            unmerged = [_merge(pair[0], pair[1], ignored) if len(pair) > 1 else pair[0] for pair in pairs]
        named = {
            bits: tuple(place for place in range(bits.bit_length()) if bits >> place & 1)
            for bits in {bits for _, bits in unmerged[0]}
        }
        found.append([(keys[key], named[bits]) for key, bits in unmerged[0]])
    return found


def _related(columns: Sequence[Sequence[int]], weak: Collection[int]) -> Iterator[list[int]]:
    """Yield the columns in sets that share no key with each other; columns without items are left out."""
    leader = list(range(len(columns)))

    def find(column: int) -> int:
        while leader[column] != column:
            leader[column] = leader[leader[column]]
            column = leader[column]
        return column

    owner: dict[int, int] = {}
    for number, column in enumerate(columns):
        for key in set(column).difference(weak):
            one, other = find(owner.setdefault(key, number)), find(number)
            leader[max(one, other)] = min(one, other)
    sets: dict[int, list[int]] = {}
    for number, column in enumerate(columns):
        if column:
            sets.setdefault(find(number), []).append(number)
    yield from sets.values()


def _merge(one: _Column, other: _Column, weak: Collection[int]) -> _Column:
    result: _Column = []
    start, other_start = 0, 0
    for place, other_place in _aligned([key for key, _ in one], [key for key, _ in other], weak):
        # What only one of them has: the lower ranks first.
        result += one[start:place] + other[other_start:other_place]
        key, members = one[place]
        result.append((key, members | other[other_place][1]))
        start, other_start = place + 1, other_place + 1
    return result + one[start:] + other[other_start:]


def _aligned(one: Sequence[int], other: Sequence[int], weak: Collection[int]) -> list[tuple[int, int]]:
    """Return pairs of places with equal keys, both places rising."""
    pairs: list[tuple[int, int]] = []
    waiting = [(0, len(one), 0, len(other), 0)]
    while waiting:
        start, end, other_start, other_end, depth = waiting.pop()
        while start < end and other_start < other_end and one[start] == other[other_start]:
            pairs.append((start, other_start))
            start, other_start = start + 1, other_start + 1
        while start < end and other_start < other_end and one[end - 1] == other[other_end - 1]:
            end, other_end = end - 1, other_end - 1
            pairs.append((end, other_end))
        if start == end or other_start == other_end or depth == _DEPTH:
            continue
        anchors = _anchors(one, range(start, end), other, range(other_start, other_end), weak)
        if not anchors:
            continue
        pairs += anchors
        ends = [(start - 1, other_start - 1), *anchors, (end, other_end)]
        waiting += [
            (before + 1, after, other_before + 1, other_after, depth + 1)
            for (before, other_before), (after, other_after) in pairwise(ends)
            if before + 1 < after and other_before + 1 < other_after
        ]
    return sorted(pairs)


def _anchors(
    one: Sequence[int], places: range, other: Sequence[int], other_places: range, weak: Collection[int]
) -> list[tuple[int, int]]:
    """Return pairs of places that surely belong together: of keys that both have once, if there are any."""
    keys, other_keys = one[places.start : places.stop], other[other_places.start : other_places.stop]
    common = set(keys).intersection(other_keys).difference(weak)
    if not common:
        return []
    counts, other_counts = Counter(keys), Counter(other_keys)
    once = {key for key in common if counts[key] == other_counts[key] == 1}
    wanted = once or common
    found: dict[tuple[int, int], int] = {}
    for place, occurrence in _occurrences(keys, wanted):
        found[occurrence] = places.start + place
    pairs = [
        (found[occurrence], other_places.start + place)
        for place, occurrence in _occurrences(other_keys, wanted)
        if occurrence in found
    ]
    return _rising(pairs)


def _occurrences(keys: Iterable[int], wanted: Collection[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the places of the wanted keys, with the key and how often it was there before."""
    seen: Counter[int] = Counter()
    for place, key in enumerate(keys):
        if key in wanted:
            yield place, (key, seen[key])
            seen[key] += 1


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest run of pairs, not necessarily adjacent, in which the first places rise too."""
    ends: list[int] = []
    last: list[int] = []
    previous: list[int] = []
    for number, (place, _) in enumerate(pairs):
        length = bisect_left(ends, place)
        previous.append(last[length - 1] if length else -1)
        if length == len(ends):
            ends.append(place)
            last.append(number)
        else:
            ends[length], last[length] = place, number
    run: list[tuple[int, int]] = []
    number = last[-1] if last else -1
    while number >= 0:
        run.append(pairs[number])
        number = previous[number]
    return run[::-1]
