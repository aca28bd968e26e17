"""Many ranks: a set in one integer, and a mapping in blocks. A change of one of thousands costs microseconds.

Both are immutable, as all that folds hold; what comes after a change shares the rest with what was before.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, Self, TypeVar, cast

V = TypeVar("V")
T = TypeVar("T")

_SHIFT = 6
_BLOCK = 1 << _SHIFT
_WITHIN = _BLOCK - 1


class RankSet(AbstractSet[int]):
    """Ranks, in their order."""

    __slots__ = ("_bits", "_size")
    _bits: int
    _size: int

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._bits = _bits_of(ranks)
        self._size = self._bits.bit_count()

    def with_rank(self, rank: int) -> RankSet:
        bit = 1 << rank
        return self if self._bits & bit else _made(self._bits | bit, self._size + 1)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank >= 0 and bool(self._bits >> rank & 1)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        digits = f"{self._bits:b}"[::-1]
        rank = digits.find("1")
        while rank >= 0:
            yield rank
            rank = digits.find("1", rank + 1)

    def __or__(self, others: Iterable[T]) -> RankSet:
        bits = self._bits | _bits_of(cast("Iterable[int]", others))
        return _made(bits, bits.bit_count())

    def __sub__(self, others: Iterable[object]) -> RankSet:
        bits = self._bits & ~_bits_of(cast("Iterable[int]", others))
        return _made(bits, bits.bit_count())

    def __le__(self, others: AbstractSet[Any]) -> bool:
        if isinstance(others, RankSet):
            return not self._bits & ~others._bits
        return super().__le__(others)

    def __repr__(self) -> str:
        return f"RankSet({list(self)})"

    __hash__ = None  # type: ignore[assignment]  # as of other collections here, which are compared alone


def _made(bits: int, size: int) -> RankSet:
    made = RankSet.__new__(RankSet)
    made._bits, made._size = bits, size  # noqa: SLF001 - of this module
    return made


def _bits_of(ranks: Iterable[int]) -> int:
    if isinstance(ranks, RankSet):
        return ranks._bits  # noqa: SLF001 - of this module
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


class Blocks(Mapping[int, V]):
    """Values by rank, in the order in which they were given."""

    __slots__ = ("_blocks", "_places")
    _blocks: list[list[V]]
    _places: Mapping[int, int]

    def __init__(self, values: Mapping[int, V]) -> None:
        self._places = {rank: place for place, rank in enumerate(values)}
        all_values = list(values.values())
        self._blocks = [all_values[start : start + _BLOCK] for start in range(0, len(all_values), _BLOCK)]

    def changed(self, news: Mapping[int, V]) -> Self:
        blocks, copied = self._blocks.copy(), set[int]()
        for rank, value in news.items():
            place = self._places[rank]
            number = place >> _SHIFT
            if number not in copied:
                copied.add(number)
                blocks[number] = blocks[number].copy()
            blocks[number][place & _WITHIN] = value
        after = self.__new__(type(self))
        after._places, after._blocks = self._places, blocks  # noqa: SLF001 - of this class
        return after

    def __getitem__(self, rank: int) -> V:
        place = self._places[rank]
        return self._blocks[place >> _SHIFT][place & _WITHIN]

    def get(self, rank: int, default: Any = None) -> Any:
        place = self._places.get(rank)
        return default if place is None else self._blocks[place >> _SHIFT][place & _WITHIN]

    def __contains__(self, rank: object) -> bool:
        return rank in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[int, V]:
        return _Items(self)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class _Values(ValuesView[V]):
    _mapping: Blocks[V]

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(self._mapping._blocks)  # noqa: SLF001 - of this module


class _Items(ItemsView[int, V]):
    _mapping: Blocks[V]

    def __iter__(self) -> Iterator[tuple[int, V]]:
        return zip(self._mapping._places, self._mapping.values(), strict=True)  # noqa: SLF001 - of this module
