"""Are the ranks equal: questions to ranks, and what follows from their answers. Pure; no torch.

A rank lists an object as entries, one for each part, in an order that depends on the content alone: a path,
what stands there in words (`head`), and a digest of both and of the content. Two ranks have the same object
if their lists have the same digests. So equality costs one digest from each rank, and the first difference is
found by halving, but in 64 parts: each round asks one rank of each kind for digests of ranges. Tensors have
digests of blocks, and are searched in the same way.

    rounds                        what ranks read
      outline   everything          all bytes, once
      ranges    entries             nothing
      entry     one entry           nothing
      blocks    of one tensor       nothing: digests of the first round
      pieces    of some blocks      these blocks again
      elements  of some pieces      these pieces again

`compare` is a generator: it yields a `Round` and is sent the answers by rank. Who drives it decides how they
travel: `Session.diff` through the hub, `nblaunch.diff` through the process group.

An entry of a sharded tensor has a list of its own (a domain): the ranks that hold the same shard compare its
content, and all ranks its type, shape and placement.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from nblaunch.insight.difference import Compared, Difference
from nblaunch.protocol.reports import format_ranks

FAN_OUT = 64
"""Ranges in a round."""
BLOCK_BYTES = 1 << 18
PIECE_BYTES = 1 << 12
PIECES = BLOCK_BYTES // PIECE_BYTES
_BLOCK_DIGESTS = 1 << 13
"""Digests of blocks in a round, of all ranks that are asked together."""
_PIECE_BLOCKS = 1 << 7
"""Blocks whose pieces are looked at, of all ranks together."""
_ELEMENT_BYTES = 1 << 19
"""Elements that are looked at, in bytes, of all ranks together."""
_VALUE_CHARACTERS = 80
_MOST_ROWS = 50

ALL: tuple[int, ...] = ()
"""The domain of what all ranks have."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to a rank: the method of `probes.diff.Holding` that answers it, and its arguments."""

    what: Literal[
        "outline", "ranges", "entry", "has", "blocks", "pieces", "elements", "listing", "shown", "end"
    ]
    arguments: tuple[Any, ...] = ()


EntryPlace = tuple[int, tuple[int, ...], int]
"""Of an entry: the number of its object, its domain, and its index there."""


@dataclass(frozen=True, slots=True)
class Outline:
    """An object of a rank: for each domain how many entries it has, and the digest of all of them.

    `missing` says why there is no object, and is empty otherwise.
    """

    domains: Mapping[tuple[int, ...], tuple[int, bytes]] = field(default_factory=dict)
    missing: str = ""
    near: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EntryShown:
    """An entry: where, what in words, and of a tensor the number of its blocks.

    `code` says how its elements are read (as in `struct`, `F` and `D` for complex numbers, `""` if only
    their bytes count), `size` is an element's size in bytes.
    """

    path: str
    head: str
    shown: str
    digest: bytes
    blocks: int = 0
    shape: tuple[int, ...] = ()
    code: str = ""
    size: int = 1


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """A piece of a tensor: its bytes, and the values, if `code` of the entry does not read them."""

    raw: bytes
    values: bytes = b""


@dataclass(frozen=True, slots=True)
class Round:
    """A question, and which ranks are to answer it."""

    ranks: tuple[int, ...]
    ask: Ask


AnswersByRank = Mapping[int, Any]
Rounds = Generator[Round, AnswersByRank, Any]
Classes = Mapping[int, tuple[int, ...]]
"""Ranks that have the same, by the lowest of them, which answers for all."""


def compare(
    ranks: Sequence[int], names: Sequence[str], *, env: bool = False
) -> Generator[Round, AnswersByRank, Difference]:
    """Compare objects of some ranks. Raises `LookupError` for a name that no rank has."""
    everyone = tuple(sorted(ranks))
    outlines = yield Round(everyone, Ask("outline", (tuple(names), env)))
    rows: list[Compared] = []
    for place, name in enumerate(names):
        of_name = {rank: outlines[rank][place] for rank in everyone}
        rows.append((yield from _compare_name(place, name, of_name)))
    if env:
        of_env = {rank: outlines[rank][len(names)] for rank in everyone}
        rows += yield from _compare_surroundings(of_env)
    yield Round(everyone, Ask("end"))
    return Difference(everyone, tuple(rows))


def size_of(answer: object) -> int:
    return len(pickle.dumps(answer))


def classes_of(answers: Mapping[int, Any], among: Classes | None = None) -> dict[int, tuple[int, ...]]:
    """Return the ranks with equal answers, by the lowest of them; `among` are the classes so far.

    >>> classes_of({0: "a", 1: "b", 2: "a"})
    {0: (0, 2), 1: (1,)}
    """
    first: dict[Any, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for rank in sorted(answers):
        lowest = first.setdefault(answers[rank], rank)
        members = (rank,) if among is None else among[rank]
        found[lowest] = tuple(sorted((*found.get(lowest, ()), *members)))
    return found


def _compare_name(place: int, name: str, outlines: Mapping[int, Outline]) -> Rounds:
    lacking = sorted(rank for rank, each in outlines.items() if each.missing)
    notes = _notes(outlines)
    if len(lacking) == len(outlines):
        each = outlines[lacking[0]]
        meant = f" Did you mean {each.near!r}?" if each.near else ""
        msg = f"{each.missing} ({format_ranks(lacking)}).{meant}"
        raise LookupError(msg)
    if lacking:
        there = tuple(rank for rank in sorted(outlines) if rank not in lacking)
        words = (f"{name} is there", outlines[lacking[0]].missing)
        what = f"only on {format_ranks(there)}"
        return Compared(name, name, what, (there, tuple(lacking)), words, notes=notes)
    domains = sorted({domain for each in outlines.values() for domain in each.domains})
    for domain in domains:
        inside = {
            rank: each.domains.get(domain, (0, b""))
            for rank, each in outlines.items()
            if not domain or rank in domain
        }
        classes = classes_of(inside)
        if len(classes) > 1:
            counts = {rank: inside[rank][0] for rank in classes}
            row: Compared = yield from _first_difference(name, place, domain, classes, counts)
            return replace(row, notes=(*row.notes, *notes))
    return Compared(name, notes=notes)


def _notes(outlines: Mapping[int, Outline]) -> tuple[str, ...]:
    """Return the notes on omitted parts, each with its ranks unless all ranks have it."""
    notes_by_text: dict[str, list[int]] = {}
    for rank in sorted(outlines):
        for note in outlines[rank].notes:
            notes_by_text.setdefault(note, []).append(rank)
    everyone = len(outlines)
    return tuple(
        note if len(who) == everyone else f"{note} ({format_ranks(who)})"
        for note, who in notes_by_text.items()
    )


def _first_difference(
    name: str, place: int, domain: tuple[int, ...], classes: Classes, counts: Mapping[int, int]
) -> Rounds:
    """Find the first entry in which ranks differ, and say how."""

    def ask(start: int, stop: int, step: int) -> Ask:
        return Ask("ranges", (place, domain, start, stop, step))

    index: int = yield from _search(tuple(classes), ask, max(counts.values()))
    asked = (place, domain, index)
    entries: Mapping[int, EntryShown | None] = yield Round(tuple(classes), Ask("entry", asked))
    paths = {rank: None if each is None else each.path for rank, each in entries.items()}
    if len(set(paths.values())) > 1:
        return (yield from _lacking_path(name, place, classes, paths))
    there = {rank: each for rank, each in entries.items() if each is not None}
    path = there[min(there)].path
    heads = classes_of({rank: each.head for rank, each in there.items()}, classes)
    if len(heads) > 1:
        words = tuple(there[rank].head for rank in heads)
        return Compared(name, path, "types, shapes or dtypes differ", tuple(heads.values()), words)
    among = classes_of({rank: each.digest for rank, each in there.items()}, classes)
    if not there[min(there)].blocks:
        words = _told_apart({rank: there[rank] for rank in among})
        return Compared(name, path, "values differ", tuple(among.values()), words)
    return (yield from _compare_elements(name, asked, there[min(there)], among))


def _told_apart(entries: Mapping[int, EntryShown]) -> tuple[str, ...]:
    """Return the values in words, with the digest where several look the same."""
    texts = [each.shown for each in entries.values()]
    return tuple(
        text if texts.count(text) == 1 else f"{text} (digest {each.digest.hex()[:8]})".lstrip()
        for text, each in zip(texts, entries.values(), strict=True)
    )


def _lacking_path(name: str, place: int, classes: Classes, paths: Mapping[int, str | None]) -> Rounds:
    """Ranks list different paths: the first one that is not there on all ranks is the finding."""
    candidates = [path for path in dict.fromkeys(paths[rank] for rank in sorted(paths)) if path is not None]
    for path in candidates:
        found: AnswersByRank = yield Round(tuple(classes), Ask("has", (place, path)))
        if not all(found.values()):
            have = classes_of(found, classes)
            words = tuple("is there" if found[rank] else "is missing" for rank in have)
            who = tuple(rank for low in have if found[low] for rank in have[low])
            return Compared(name, path, f"only on {format_ranks(who)}", tuple(have.values()), words)
    order = classes_of(paths, classes)
    words = tuple(paths[rank] or "" for rank in order)
    return Compared(name, candidates[0], "the order of parts differs", tuple(order.values()), words)


def _search(ranks: tuple[int, ...], ask: Callable[[int, int, int], Ask], count: int) -> Rounds:
    """Return the first index at which the digests of these ranks differ."""
    low, high = 0, count
    while high - low > 1:
        step = -(-(high - low) // FAN_OUT)
        answers: AnswersByRank = yield Round(ranks, ask(low, high, step))
        differing = ranges_that_differ(answers)
        if not differing:
            msg = "the ranks' variables have changed while they were compared. Compare again."
            raise LookupError(msg)
        low += differing[0] * step
        high = min(low + step, high)
    return low


def ranges_that_differ(answers: Mapping[int, Sequence[bytes]]) -> list[int]:
    """Return the places at which these sequences of digests differ, shorter ones as if filled up.

    >>> ranges_that_differ({0: (b"a", b"b", b"c"), 1: (b"a", b"x")})
    [1, 2]
    """
    most = max(map(len, answers.values()), default=0)
    filled = [(*each, *[b""] * (most - len(each))) for each in answers.values()]
    return [place for place, column in enumerate(zip(*filled, strict=True)) if len(set(column)) > 1]


# --- within a tensor -----------------------------------------------------------------------------------


def _compare_elements(name: str, asked: EntryPlace, entry: EntryShown, classes: Classes) -> Rounds:
    """Find the elements of a tensor that differ, as many as may be moved."""
    ranks = tuple(classes)
    step = max(1, -(-entry.blocks // max(FAN_OUT, _BLOCK_DIGESTS // len(ranks))))
    digests: AnswersByRank = yield Round(ranks, Ask("blocks", (asked, 0, entry.blocks, step)))
    blocks = ranges_that_differ(digests)
    exact = step == 1
    if blocks and not exact:
        start = blocks[0] * step

        def ask(first: int, stop: int, size: int) -> Ask:
            return Ask("blocks", (asked, start + first, min(start + stop, entry.blocks), size))

        blocks = [start + (yield from _search(ranks, ask, min(step, entry.blocks - start)))]
    most = max(1, _PIECE_BLOCKS // len(ranks))
    exact, chosen = exact and len(blocks) <= most, _spread(blocks, most)
    pieces: AnswersByRank = yield Round(ranks, Ask("pieces", (asked, tuple(chosen))))
    differing = [
        block * PIECES + piece
        for place, block in enumerate(chosen)
        for piece in ranges_that_differ({rank: each[place] for rank, each in pieces.items()})
    ]
    most = max(1, _ELEMENT_BYTES // (PIECE_BYTES * len(ranks)))
    exact, chosen = exact and len(differing) <= most, _spread(differing, most)
    elements: AnswersByRank = yield Round(ranks, Ask("elements", (asked, tuple(chosen))))
    found = _ElementsFound(entry)
    for place, piece in enumerate(chosen):
        found.compare(piece, {rank: each[place] for rank, each in elements.items()})
    return found.row(name, classes, exact=exact)


def _spread(numbers: list[int], most: int) -> list[int]:
    """Return at most so many of these, the first among them, from everywhere.

    >>> _spread([0, 1, 2, 3, 4, 5], 3)
    [0, 2, 4]
    """
    return (
        [numbers[place * len(numbers) // most] for place in range(most)] if len(numbers) > most else numbers
    )


class _ElementsFound:
    """The elements that differ, piece by piece."""

    def __init__(self, entry: EntryShown) -> None:
        self._entry = entry
        self.differing = 0
        self.first: int | None = None
        self.values: dict[int, str] = {}
        self.largest: float | None = None
        self.largest_at = 0

    def compare(self, piece: int, answers: Mapping[int, ElementBytes]) -> None:
        """Take a piece of the tensor as each of these ranks has it."""
        size, base = self._entry.size, piece * PIECE_BYTES
        raws = [each.raw for each in answers.values()]
        if PIECE_BYTES % size:
            # An element that does not fit into pieces evenly is found by its bytes.
            columns = enumerate(zip(*raws, strict=False), base)
            self._count(sorted({place // size for place, column in columns if len(set(column)) > 1}))
            return
        starts = range(0, min(map(len, raws)) // size * size, size)
        places = [start // size for start in starts if len({raw[start : start + size] for raw in raws}) > 1]
        self._count([base // size + place for place in places])
        values = {}
        if self._entry.code:
            values = {rank: _values(self._entry.code, each) for rank, each in answers.items()}
        if places and not self.values:
            start, most = places[0] * size, min(size, _VALUE_CHARACTERS // 2)
            self.values = {rank: _number(each[places[0]]) for rank, each in values.items()} or {
                rank: f"bytes {each.raw[start : start + most].hex()}" for rank, each in answers.items()
            }
        for place in places if values else ():
            apart = spread_of([each[place] for each in values.values()])
            if self.largest is None or (not math.isnan(self.largest) and not apart <= self.largest):
                self.largest, self.largest_at = apart, base // size + place

    def _count(self, indices: list[int]) -> None:
        self.differing += len(indices)
        if self.first is None and indices:
            self.first = indices[0]

    def row(self, name: str, classes: Classes, *, exact: bool) -> Compared:
        entry, first = self._entry, self.first
        if first is None:
            # What is not read as elements (a conversion that loses bits) differs in bytes all the same.
            return Compared(name, entry.path, "values differ", tuple(classes.values()), exact=False)
        what = "values differ"
        if self.largest == 0:
            what = "values are equal, but not their bytes (0.0 and -0.0, or NaNs)"
        path = element_path(entry.path, entry.shape, first)
        elements = math.prod(entry.shape)
        return Compared(
            name,
            path,
            what,
            tuple(classes.values()),
            tuple(self.values.get(rank, "") for rank in classes),
            elements,
            self.differing,
            self.largest,
            element_path(entry.path, entry.shape, self.largest_at) if self.largest is not None else "",
            exact,
        )


def _values(code: str, piece: ElementBytes) -> Sequence[Any]:
    data = piece.values or piece.raw
    if code in {"F", "D"}:
        kind = "f" if code == "F" else "d"
        numbers = struct.unpack(f"={len(data) // struct.calcsize(f'={kind}')}{kind}", data)
        return [complex(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    return struct.unpack(f"={len(data) // struct.calcsize(f'={code}')}{code}", data)


def spread_of(values: Sequence[Any]) -> float:
    """Return the largest absolute difference between any two of these numbers, NaN if only some are NaN.

    >>> spread_of([1.0, 3.5, 2.0]), spread_of([0.0, -0.0]), spread_of([1.0, float("nan")])
    (2.5, 0.0, nan)
    """
    numbers = list(dict.fromkeys(values))
    nans = [number for number in values if number != number]  # noqa: PLR0124 - a NaN, also a complex one
    if nans:
        return 0.0 if len(nans) == len(values) else math.nan
    if any(isinstance(number, complex) for number in numbers):
        return max(float(abs(one - other)) for one in numbers for other in numbers)
    low, high = min(numbers), max(numbers)
    if low == high:
        return 0.0
    try:
        return float(high - low)
    except OverflowError:
        return math.inf


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def element_path(path: str, shape: Sequence[int], index: int) -> str:
    """Return the path of an element.

    >>> element_path("w", (3, 4), 7), element_path("w", (), 0)
    ('w[1, 3]', 'w')
    """
    places: list[int] = []
    for length in reversed(shape):
        index, place = divmod(index, max(length, 1))
        places.append(place)
    return f"{path}[{', '.join(map(str, reversed(places)))}]" if places else path


# --- the surroundings ----------------------------------------------------------------------------------

UNSEEDED = ("random state of Python", "random state of NumPy")
"""Parts that differ on every rank where the program seeds nothing."""


def _compare_surroundings(outlines: Mapping[int, Outline]) -> Rounds:
    """Return a row for each part of the surroundings that differs, one in all if none does."""
    notes = _notes(outlines)
    classes = classes_of({rank: each.domains.get(ALL) for rank, each in outlines.items()})
    if len(classes) == 1:
        return [Compared("environment", notes=notes)]
    ranks = tuple(classes)
    listings: AnswersByRank = yield Round(ranks, Ask("listing"))
    found = {path: {each.get(path) for each in listings.values()} for path in chain(*listings.values())}
    differing = [path for path, digests in found.items() if len(digests) > 1]
    own = [path for path in differing if path in UNSEEDED and len(found[path]) == len(outlines)]
    if own:
        # As Python and NumPy begin, unless they are seeded.
        differing = [path for path in differing if path not in own]
        notes = (*notes, f"each rank has its own {' and '.join(own)}")
    if not differing:
        return [Compared("environment", notes=notes)]
    chosen = tuple(differing[:_MOST_ROWS])
    texts: AnswersByRank = yield Round(ranks, Ask("shown", (chosen,)))
    rows = []
    for path in chosen:
        groups = classes_of({rank: listings[rank].get(path) for rank in ranks}, classes)
        words = tuple(texts[rank].get(path, "is missing") for rank in groups)
        rows.append(Compared(path, path, "differs", tuple(groups.values()), words))
    if len(differing) > len(chosen):
        more = f"{len(differing) - len(chosen)} more parts of the environment differ"
        rows[-1] = replace(rows[-1], notes=(more,))
    if own:
        rows[-1] = replace(rows[-1], notes=(*rows[-1].notes, notes[-1]))
    return rows
