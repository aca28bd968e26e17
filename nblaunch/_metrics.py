"""What ranks have logged, as a table: `result.metrics`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import msgspec

from nblaunch._errors import NblaunchError
from nblaunch._help import FailureKind

_NAMES_SHOWN = 10


class Points(msgspec.Struct, frozen=True, gc=False):
    """Points of a rank, in columns of equal length: `which` are indexes into `names`."""

    rank: int
    names: tuple[str, ...]
    which: Sequence[int]
    steps: Sequence[int]
    times: Sequence[float]
    values: Sequence[float]


class Metric(NamedTuple):
    """One number that `rank` has logged under `name`.

    `step` is the training step, `time` in seconds since the epoch by the clock of the rank's host, `value`
    may be NaN or infinite.
    """

    rank: int
    step: int
    time: float
    name: str
    value: float


class Metrics(Sequence[Metric]):
    """All numbers that the ranks of a run have logged, in the order in which they came.

    Those of one rank are in the order in which it has logged them; those of earlier attempts come first.

    >>> result.metrics                                                     # doctest: +SKIP
    <Metrics: 1600 points of 8 ranks: loss, lr>
    >>> result.metrics[0]                                                  # doctest: +SKIP
    Metric(rank=0, step=0, time=1790000000.5, name='loss', value=2.31)
    >>> [each.value for each in result.metrics.of("loss", rank=3)]         # doctest: +SKIP
    [2.31, 2.28]
    >>> result.metrics.to_pandas().pivot_table("value", "step", "name")    # doctest: +SKIP
    """

    __slots__ = ("_known", "_rows", "_source")

    def __init__(self, points: Iterable[Points] | Callable[[], Iterable[Points]] = ()) -> None:
        """Hold these batches, or have them given when they are asked for: most results are not asked."""
        self._source = points
        self._known: tuple[Points, ...] | None = None
        self._rows: list[Metric] | None = None

    @property
    def _batches(self) -> tuple[Points, ...]:
        if self._known is None:
            self._known = tuple(self._source() if callable(self._source) else self._source)
            self._source = ()
        return self._known

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they were first logged."""
        return tuple(dict.fromkeys(name for each in self._batches for name in each.names))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have logged anything, in their order."""
        return tuple(sorted({each.rank for each in self._batches}))

    @property
    def last(self) -> dict[str, dict[int, float]]:
        """Each name's last value on each rank: `{"loss": {0: 0.41, 1: 0.43}}`."""
        found: dict[str, dict[int, float]] = {name: {} for name in self.names}
        for each in self._batches:
            for index, value in zip(each.which, each.values, strict=True):
                found[each.names[index]][each.rank] = value
        return {name: dict(sorted(ranks.items())) for name, ranks in found.items()}

    def of(self, name: str, rank: int | None = None) -> Metrics:
        """Return the numbers of one name, and of one rank if that is given.

        Raises `KeyError` for a name that no rank has logged; a rank that has not logged it has no numbers.
        """
        if name not in self.names:
            known = ", ".join(self.names) or "nothing"
            msg = f"no rank has logged {name!r}; they have logged {known:.2000}"
            raise KeyError(msg)
        return Metrics(
            filter(None, (_part(each, name) for each in self._batches if rank in (None, each.rank)))
        )

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with the columns rank, step, time, name and value.

        Raises `NblaunchError` if pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            msg = (
                "result.metrics.to_pandas() needs pandas, which is not installed here. Run `pip install "
                "pandas`, or iterate over result.metrics."
            )
            raise NblaunchError(msg, kind=FailureKind.NOT_INSTALLED) from error
        columns: dict[str, list[Any]] = {name: [] for name in Metric._fields}
        for each in self._batches:
            columns["rank"] += [each.rank] * len(each.values)
            columns["step"] += each.steps
            columns["time"] += each.times
            columns["name"] += map(each.names.__getitem__, each.which)
            columns["value"] += each.values
        kinds = {"rank": "int64", "step": "int64", "time": "float64", "value": "float64"}
        return pandas.DataFrame(columns).astype(kinds)

    def __len__(self) -> int:
        """Return how many numbers there are."""
        return sum(len(each.values) for each in self._batches)

    def __iter__(self) -> Iterator[Metric]:
        """Iterate over the rows, `Metric(rank, step, time, name, value)`."""
        return iter(self._table)

    @overload
    def __getitem__(self, place: int) -> Metric: ...
    @overload
    def __getitem__(self, place: slice) -> list[Metric]: ...
    @overload
    def __getitem__(self, place: str) -> Metrics: ...
    def __getitem__(self, place: int | slice | str) -> Metric | list[Metric] | Metrics:
        """Return a row by its number, or what was logged under a name; see `of`."""
        return self.of(place) if isinstance(place, str) else self._table[place]

    @property
    def _table(self) -> list[Metric]:
        if self._rows is None:
            self._rows = [
                Metric(each.rank, step, time, each.names[index], value)
                for each in self._batches
                for index, step, time, value in zip(
                    each.which, each.steps, each.times, each.values, strict=True
                )
            ]
        return self._rows

    def __eq__(self, other: object) -> bool:
        """Compare the rows."""
        return self._table == other._table if isinstance(other, Metrics) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of other sequences that are compared by what they hold

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the batches."""
        return Metrics, (self._batches,)

    def __repr__(self) -> str:
        """Return one short line."""
        if not self._batches:
            return "<Metrics: nothing was logged>"
        names, ranks = self.names, self.ranks
        shown = ", ".join(f"{name:.40}" for name in names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        points = f"{len(self)} point{'s' * (len(self) != 1)}"
        return f"<Metrics: {points} of {len(ranks)} rank{'s' * (len(ranks) != 1)}: {shown}{more}>"


def _part(points: Points, name: str) -> Points | None:
    """Return the points of one name, None if there are none."""
    if name not in points.names:
        return None
    index = points.names.index(name)
    kept = [place for place, each in enumerate(points.which) if each == index]
    return Points(
        points.rank,
        (name,),
        [0] * len(kept),
        [points.steps[place] for place in kept],
        [points.times[place] for place in kept],
        [points.values[place] for place in kept],
    )
