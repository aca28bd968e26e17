"""The profiles of all ranks on one clock: who computes, who communicates, who waits for whom.

Each rank sends a `RankProfile`, in which all times are nanoseconds of the hub's clock, as far as the rank
could measure its own against it. Here they become one `Profile`: `result.profile`.

A collective that ends on all ranks together lets none of them go on before the last one has come. So a rank
waits in it from its own entry to the last one's; the rest of it is communication. Which calls of several
ranks belong together is known from torch's flight recorder: group, operation and sequence number.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import weakref
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from nblaunch._errors import NblaunchError
from nblaunch._help import FailureKind
from nblaunch.insight.intervals import Interval, clipped, common, length, merged
from nblaunch.insight.trace import TracePart, joined, packed
from nblaunch.protocol.messages import DEFAULT_GROUP
from nblaunch.protocol.reports import format_ranks, plural

TOGETHER = ("all_reduce", "barrier", "all_gather", "reduce_scatter", "all_to_all", "alltoall", "allreduce")
"""Operations that end on no rank before all have entered, by the beginning of their names."""
_NANO = 1e-9
_LEAST_REPEATS = 3
_LEAST_SHARE = 0.6
_LONGEST_PERIOD = 1000
_NAME = "profile.json.gz"
_TEXT_STEPS = 10


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call of a collective on one rank; times in nanoseconds, `size` in bytes.

    `called` is when the program asked for it, `began` and `ended` when the backend worked on it.
    """

    group: str
    sequence: int
    operation: str
    size: int
    called: int
    began: int
    ended: int

    @property
    def key(self) -> tuple[str, int, str]:
        return self.group, self.sequence, self.operation


class RankProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has recorded, on the hub's clock; times in nanoseconds since the epoch.

    `steps` are (number, begin, end), `compute` disjoint intervals in order. `clock_error` is how wrong the
    rank's clock may be, in seconds.
    """

    rank: int
    host: str = ""
    began: int = 0
    ended: int = 0
    steps: tuple[tuple[int, int, int], ...] = ()
    wanted: tuple[int, int] | None = None
    """The steps that were asked for, if the rank did not know where they begin."""
    compute: tuple[Interval, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()
    clock_error: float | None = None
    warnings: tuple[str, ...] = ()
    trace_size: int = 0
    trace_crc: int = 0


@dataclass(frozen=True, slots=True)
class RankStep:
    """One `step` of one `rank`: all in seconds; `seconds` is the step's length.

    compute + communication - overlap + waiting + idle = seconds. `compute` is time in operators (on a GPU:
    in kernels), `communication` in collectives once all ranks were in them, `overlap` in both. `waiting` is
    time in which the rank had nothing to do but wait for the last one to enter a collective: most of it for
    rank `waits_for`. `idle` is the rest: Python, data loading, sleep.
    """

    step: int
    rank: int
    seconds: float
    compute: float
    communication: float
    overlap: float
    waiting: float
    waits_for: int | None
    idle: float


@dataclass(frozen=True, slots=True)
class Straggler:
    """The `rank` for which the others waited longest in a `step`, and in which `operation` they did.

    `seconds` is by how much it came later than the others, their median, in all collectives of the step.
    In the first step it is by how much longer it took than they, from its own beginning: ranks start their
    profilers apart. `before` says what it did meanwhile.
    """

    step: int
    rank: int
    seconds: float
    operation: str
    before: str

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"step {self.step}: rank {self.rank} came {short_time(self.seconds)} after the others to "
            f"{self.operation}; before it: {self.before}"
        )


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """All calls of one `operation` with one size in one `group`; `size` in bytes of one rank's input.

    There were `count` of them. `seconds` is the median from the last rank's entry to the end, `bandwidth` the
    size by this. `best` is the highest bandwidth that this profile has for the operation in that group, at
    sizes of the same power of two. `waiting` is what all ranks have waited in these calls together.
    """

    operation: str
    group: str
    size: int
    count: int
    seconds: float
    bandwidth: float
    best: float
    waiting: float


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """How well the clocks agree, by this number of `collectives` that end together; in seconds.

    `spread` is the median of how far apart the ranks' ends of one collective are. `violation` is the most
    that a rank has ended before another one had entered, which only a wrong clock can show.
    """

    collectives: int
    spread: float
    violation: float


class Profile:
    """What the ranks of a run did, on one clock: `result.profile` of a run with `--profile`.

    >>> result = nblaunch.run(train, nproc=8, profile=True)                # doctest: +SKIP
    >>> result.profile.straggler[3]                                        # doctest: +SKIP
    Straggler(step=3, rank=5, seconds=0.0051, operation='all_reduce 7', before='...')
    """

    def __init__(
        self,
        ranks: Mapping[int, RankProfile],
        traces: Mapping[int, TracePart],
        missing: Iterable[int] = (),
        directory: Path | None = None,
    ) -> None:
        """`missing` are the ranks that gave nothing; `directory` is for the trace, once it is asked for."""
        self._ranks = dict(sorted(ranks.items()))
        self._traces = dict(sorted(traces.items()))
        self.missing: tuple[int, ...] = tuple(sorted(missing))
        """Ranks that have no profile: they were killed, or stopped because of another one."""
        self.steps_by, self._steps = _steps_of(self._ranks)
        """How steps were found: `step` (nblaunch.step), `collectives` that repeat, or `job`, all as one."""
        self.matched_calls = _match_calls(self._ranks)
        self.clock_error: dict[int, float | None] = {
            rank: each.clock_error for rank, each in self._ranks.items()
        }
        """By rank, in seconds: half of the shortest round trip to the hub. None where there was no answer."""
        self.straggler: dict[int, Straggler] = _stragglers(self)
        """By step: the rank that the others waited for; a step without an entry has none to speak of."""
        self.summary: tuple[RankStep, ...] = tuple(_summary(self))
        """A row for each step and rank, in this order."""
        self.collectives: tuple[CollectiveUse, ...] = tuple(_uses(self.matched_calls))
        """What each operation with each size took, the longest in all first."""
        self.clock_check: ClockCheck = _checked(self.matched_calls)
        """How well the clocks of the ranks agree."""
        self._directory = directory
        self._path: Path | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a profile."""
        return tuple(self._ranks)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps."""
        return tuple(sorted({step for own in self._steps.values() for step, _, _ in own}))

    @property
    def slowest_step(self) -> tuple[int, float, int | None] | None:
        """The step that took a rank longest: its number, seconds, and its straggler, if it has one.

        The first step counts from when all ranks had begun it: they start their profilers apart.
        """
        if not self.summary:
            return None
        starts = {rank: own[0] for rank, own in self._steps.items() if own}
        begun: dict[int, int] = {}
        for step, begin, _ in starts.values():
            begun[step] = max(begin, begun.get(step, begin))
        apart = {(step, rank): (begun[step] - begin) * _NANO for rank, (step, begin, _) in starts.items()}
        seconds = {
            (row.step, row.rank): row.seconds - apart.get((row.step, row.rank), 0.0) for row in self.summary
        }
        slowest = max(seconds, key=lambda each: seconds[each])
        straggler = self.straggler.get(slowest[0])
        return slowest[0], seconds[slowest], None if straggler is None else straggler.rank

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is missing in the profile, or may be wrong."""
        found: dict[str, list[int]] = defaultdict(list)
        for rank, each in self._ranks.items():
            for text in each.warnings:
                found[text].append(rank)
        lines = [f"{format_ranks(ranks)}: {text}" for text, ranks in found.items()]
        if self.missing:
            lines.append(
                f"{format_ranks(self.missing)}: no profile, because it ended before it could be sent"
            )
        if self.steps_by == "job" and self._ranks:
            lines.append("no steps were found: call nblaunch.step() at the beginning of each")
        elif not self.steps and self._ranks:
            lines.append("none of the steps that were asked for was begun")
        return tuple(lines)

    @property
    def path(self) -> Path:
        """The trace of all ranks: one gzipped file of Chrome's trace format, for https://ui.perfetto.dev.

        It is written at the first access, beside the run's logs, and goes with them, or with this object;
        `save` keeps a copy.
        """
        if self._path is not None and self._path.is_file():
            return self._path
        if self._directory is not None:
            # A session that ends at this moment takes the directory along.
            with contextlib.suppress(OSError):
                self._path = self.save(self._directory / _NAME)
                return self._path
        own = Path(tempfile.mkdtemp(prefix="nblaunch-profile-"))
        weakref.finalize(self, shutil.rmtree, own, ignore_errors=True)
        self._path = self.save(own / _NAME)
        return self._path

    def save(self, path: str | Path) -> Path:
        """Write the trace of all ranks to a file, whose name should end in `.json.gz`; return its path."""
        path = Path(path).absolute()
        extra = b",\n".join(msgspec.json.encode(each) for each in _extra_events(self))
        path.write_bytes(joined([*self._traces.values(), packed(extra)]))
        return path

    def to_pandas(self) -> Any:
        """Return the summary as a pandas DataFrame. Raises `NblaunchError` without pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            msg = "to_pandas needs pandas, which is not installed. pip install pandas, or use .summary."
            raise NblaunchError(msg, kind=FailureKind.NOT_INSTALLED) from error
        names = RankStep.__slots__
        return pd.DataFrame([[getattr(row, name) for name in names] for row in self.summary], columns=names)

    def intervals(self, rank: int) -> dict[str, list[Interval]]:
        """Return when a rank computed, communicated and waited, in nanoseconds since the epoch."""
        own = self._ranks[rank]
        transfers, waits = [], []
        for call in own.calls:
            entry = self.matched_calls.entries.get(call.key)
            turn = call.began if entry is None else min(max(entry[0], call.began), call.ended)
            waits.append((call.began if entry is None else min(call.called, call.began), turn))
            transfers.append((turn, call.ended))
        return {
            "compute": list(own.compute),
            "communication": merged(transfers),
            "waiting": merged(waits),
        }

    def steps_of(self, rank: int) -> Sequence[tuple[int, int, int]]:
        """Return (number, begin, end) of a rank's steps, in nanoseconds since the epoch."""
        return self._steps.get(rank, ())

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        return self._ranks[rank].host

    def computed(self, rank: int) -> Sequence[Interval]:
        """Return when a rank computed, in nanoseconds since the epoch."""
        return self._ranks[rank].compute

    def began(self, rank: int) -> int:
        """Return when a rank's profile begins, in nanoseconds since the epoch."""
        return self._ranks[rank].began

    @property
    def headline(self) -> str:
        """One line that is the same for each run of the same program."""
        by = {"step": "", "collectives": ", found by repeated collectives", "job": " (the whole job)"}
        counts = plural(len(self._ranks), "rank"), plural(len(self.steps), "step")
        return f"profile: {', '.join(counts)}{by[self.steps_by]}"

    def __str__(self) -> str:
        """Return the slowest steps, the stragglers and the clock's error, as text."""
        return "\n".join([self.headline, *_lines(self)])

    def __repr__(self) -> str:
        """Return one line."""
        return f"<{self.headline}>"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what the ranks have sent; the trace is written anew where it is unpickled."""
        return {**self.__dict__, "_directory": None, "_path": None}


# Collectives: the calls of all ranks that belong together.


@dataclass(frozen=True, slots=True)
class MatchedCalls:
    """The calls by collective and rank, in the order of their first call."""

    calls: Mapping[tuple[str, int, str], Mapping[int, CollectiveCall]]
    entries: Mapping[tuple[str, int, str], tuple[int, int]] = field(default_factory=dict)
    """Of operations that end on all ranks together: when the last rank entered, and its number."""


def ends_together(operation: str) -> bool:
    """Return whether no rank leaves this operation before all have entered it.

    >>> ends_together("allreduce_coalesced"), ends_together("broadcast")
    (True, False)
    """
    return operation.lstrip("_").startswith(TOGETHER)


def _match_calls(ranks: Mapping[int, RankProfile]) -> MatchedCalls:
    calls: dict[tuple[str, int, str], dict[int, CollectiveCall]] = defaultdict(dict)
    for rank, each in ranks.items():
        for call in each.calls:
            calls[call.key][rank] = call
    ordered = dict(sorted(calls.items(), key=lambda item: min(each.called for each in item[1].values())))
    entries = {
        key: max((call.called, rank) for rank, call in found.items())
        for key, found in ordered.items()
        if len(found) > 1 and ends_together(key[2])
    }
    return MatchedCalls(ordered, entries)


def _checked(matched_calls: MatchedCalls) -> ClockCheck:
    spreads, violation = [], 0
    for key, (last, _) in matched_calls.entries.items():
        ends = [call.ended for call in matched_calls.calls[key].values()]
        spreads.append(max(ends) - min(ends))
        violation = max(violation, last - min(ends))
    spread = statistics.median(spreads) if spreads else 0.0
    return ClockCheck(len(spreads), spread * _NANO, violation * _NANO)


def _uses(matched_calls: MatchedCalls) -> Iterator[CollectiveUse]:
    taken: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    waited: dict[tuple[str, str, int], float] = defaultdict(float)
    best: dict[tuple[str, str, int], float] = defaultdict(float)
    for key, found in matched_calls.calls.items():
        calls = list(found.values())
        size = max(call.size for call in calls)
        last, _ = matched_calls.entries.get(key, (min(call.began for call in calls), 0))
        seconds = max(max(call.ended for call in calls) - max(last, min(c.began for c in calls)), 1) * _NANO
        use = (calls[0].operation, calls[0].group, size)
        taken[use].append(seconds)
        if key in matched_calls.entries:
            waited[use] += sum(max(last - call.called, 0) for call in calls) * _NANO
        alike = (*use[:2], size.bit_length())
        best[alike] = max(best[alike], size / seconds)
    for use in sorted(taken, key=lambda each: -sum(taken[each])):
        operation, group, size = use
        seconds = statistics.median(taken[use])
        top = best[operation, group, size.bit_length()]
        yield CollectiveUse(
            operation, group, size, len(taken[use]), seconds, size / seconds, top, waited[use]
        )


# Steps.

Marks = Mapping[int, Sequence[tuple[int, int, int]]]


def _steps_of(ranks: Mapping[int, RankProfile]) -> tuple[str, Marks]:
    """Return how steps were found, and by rank (number, begin, end)."""
    if any(each.steps for each in ranks.values()):
        return "step", {rank: each.steps for rank, each in ranks.items()}
    found = _by_collectives(ranks)
    wanted = next((each.wanted for each in ranks.values() if each.wanted is not None), None)
    if found and wanted is not None:
        found = {
            rank: [each for each in own if wanted[0] <= each[0] <= wanted[1]] for rank, own in found.items()
        }
    if any(found.values()):
        return "collectives", found
    return "job", {rank: [(0, each.began, each.ended)] for rank, each in ranks.items()}


def _by_collectives(ranks: Mapping[int, RankProfile]) -> dict[int, list[tuple[int, int, int]]]:
    """Return the steps by rank, where all ranks repeat the same collectives; empty where they do not."""
    matched_calls = _match_calls(ranks)
    keys = [key for key, found in matched_calls.calls.items() if len(found) == len(ranks)]
    kinds = [(key[0], key[2], next(iter(matched_calls.calls[key].values())).size) for key in keys]
    span = repeated(kinds)
    if span is None:
        return {}
    start, period, repeats = span
    steps: dict[int, list[tuple[int, int, int]]] = {}
    for rank, each in ranks.items():
        ends = [matched_calls.calls[key][rank].ended for key in keys]
        marks = [each.began if start == 0 else ends[start - 1]]
        marks += [ends[start + (number + 1) * period - 1] for number in range(repeats)]
        steps[rank] = [
            (number, marks[number], max(marks[number], marks[number + 1])) for number in range(repeats)
        ]
    return steps


def repeated(kinds: Sequence[object]) -> tuple[int, int, int] | None:
    """Return the shortest part of a sequence that repeats: where it starts, its length, how often it comes.

    It must be there three times, one right after the other, and make up most of the sequence.

    >>> repeated("xabcabcabcab")
    (1, 3, 3)
    """
    for period in range(1, min(len(kinds) // _LEAST_REPEATS, _LONGEST_PERIOD) + 1):
        longest = (0, 0)
        run = 0
        for number in range(len(kinds) - period):
            run = run + 1 if kinds[number] == kinds[number + period] else 0
            longest = max(longest, (run, number))
        alike, last = longest
        size = alike + period
        if alike and size >= max(_LEAST_REPEATS * period, _LEAST_SHARE * len(kinds)):
            return last - alike + 1, period, size // period
    return None


# The summary.


def _summary(profile: Profile) -> Iterator[RankStep]:
    rows = []
    for rank in profile.ranks:
        found = profile.intervals(rank)
        waits = _waits(profile, rank)
        for step, begin, end in profile.steps_of(rank):
            parts = {kind: clipped(intervals, begin, end) for kind, intervals in found.items()}
            rows.append(_row(step, rank, end - begin, parts, waits, (begin, end)))
    yield from sorted(rows, key=lambda row: (row.step, row.rank))


def _waits(profile: Profile, rank: int) -> list[tuple[int, int, int]]:
    """Return (begin, end, for whom) of a rank's waits, in order."""
    calls, entries = profile.matched_calls.calls, profile.matched_calls.entries
    own = [(calls[key][rank].called, *last) for key, last in entries.items() if rank in calls[key]]
    return sorted((called, last, whom) for called, last, whom in own if whom != rank and called < last)


def _row(  # noqa: PLR0913, PLR0917 - what a row is made of
    step: int,
    rank: int,
    duration: int,
    parts: Mapping[str, list[Interval]],
    waits: Sequence[tuple[int, int, int]],
    between: Interval,
) -> RankStep:
    compute, transfers = parts["compute"], parts["communication"]
    busy = merged([*compute, *transfers])
    waiting = length(parts["waiting"]) - length(common(parts["waiting"], busy))
    for_whom: dict[int, int] = defaultdict(int)
    # A wait that began before the step belongs to the one before, but for its rest.
    first = max(bisect_left(waits, (between[0],)) - 1, 0)
    for begin, end, whom in waits[first : bisect_left(waits, (between[1],))]:
        for_whom[whom] += max(min(end, between[1]) - max(begin, between[0]), 0)
    most = max(for_whom.values(), default=0)
    return RankStep(
        step,
        rank,
        duration * _NANO,
        length(compute) * _NANO,
        length(transfers) * _NANO,
        length(common(compute, transfers)) * _NANO,
        waiting * _NANO,
        next((whom for whom, waited in for_whom.items() if 0 < waited == most), None),
        (duration - length(busy) - waiting) * _NANO,
    )


def _stragglers(profile: Profile) -> dict[int, Straggler]:
    """Return by step the rank that the others waited for longest, if their clocks can tell."""
    matched_calls = profile.matched_calls
    doubt = max((each for each in profile.clock_error.values() if each is not None), default=0.0)
    late: dict[int, dict[int, list[tuple[int, int, CollectiveCall]]]] = defaultdict(lambda: defaultdict(list))
    # Ranks begin the first step apart: each has started its own profiler. What counts there is how long each
    # has taken since; the first collective brings them together.
    starts = {rank: own[0][1] for rank in profile.ranks if (own := profile.steps_of(rank))}
    apart = len(starts) == len(profile.ranks)
    for key, (last, entered_last) in matched_calls.entries.items():
        calls, steps = matched_calls.calls[key], profile.steps_of(entered_last)
        place = bisect_right(steps, last, key=lambda each: each[1]) - 1
        if place < 0 or last > steps[place][2]:
            continue
        step = steps[place][0]
        began = starts if apart and calls.keys() == starts.keys() else dict.fromkeys(calls, 0)
        apart = apart and began is not starts
        taken = {each: call.called - began[each] for each, call in calls.items()}
        rank = max(taken, key=lambda each: taken[each])
        others = statistics.median(each for other, each in taken.items() if other != rank)
        late[step][rank].append((int(others) + began[rank], calls[rank].called, calls[rank]))
    found = {}
    for step, by_rank in late.items():
        lengths = {rank: length(merged((a, b) for a, b, _ in each)) for rank, each in by_rank.items()}
        rank = max(lengths, key=lambda each: lengths[each])
        if lengths[rank] * _NANO <= doubt:
            continue
        begin, end, call = max(by_rank[rank], key=lambda each: each[1] - each[0])
        group = "" if call.group == DEFAULT_GROUP else f" of {call.group}"
        busy = length(clipped(profile.computed(rank), begin, end)) * _NANO
        rest = (end - begin) * _NANO - busy
        before = (
            f"{short_time(rest)} outside of operators" if rest > busy else f"{short_time(busy)} in operators"
        )
        operation = f"{call.operation} {call.sequence}{group}"
        found[step] = Straggler(step, rank, lengths[rank] * _NANO, operation, before)
    return dict(sorted(found.items()))


def short_time(seconds: float) -> str:
    """Return a duration with its unit.

    >>> short_time(0.00512), short_time(1.5), short_time(2.5e-5)
    ('5.12 ms', '1.5 s', '25 µs')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _lines(profile: Profile) -> Iterator[str]:
    worst = sorted(profile.straggler.values(), key=lambda each: -each.seconds)[:_TEXT_STEPS]
    yield from map(str, sorted(worst, key=lambda each: each.step))
    if len(profile.straggler) > len(worst):
        yield f"… {len(profile.straggler) - len(worst)} more in result.profile.straggler …"
    for use in profile.collectives[:_TEXT_STEPS]:
        yield (
            f"{use.operation} of {use.size:,} bytes in {use.group}: {use.count} times, "
            f"{short_time(use.seconds)} ({use.bandwidth / 1e6:.3g} MB/s, best {use.best / 1e6:.3g})"
        )
    known = [each for each in profile.clock_error.values() if each is not None]
    if known:
        check = profile.clock_check
        yield (
            f"clocks: at most {short_time(max(known))} wrong; {plural(check.collectives, 'collective')} "
            f"ended {short_time(check.spread)} apart (median)"
        )
    yield from profile.warnings


# What only all ranks together know, as events of the trace.

_WAITS = 1_000_000
"""The number of the thread that shows a rank's waits and steps."""


def trace_time(nanoseconds: int) -> float:
    """Return a time as the trace has it: microseconds, not since the epoch, which would cost precision."""
    return (nanoseconds - TRACE_EPOCH) / 1e3


TRACE_EPOCH = 1_750_000_000_000_000_000
"""Nanoseconds; a double has the microseconds since then to a hundredth."""


def _extra_events(profile: Profile) -> Iterator[dict[str, Any]]:
    for rank in profile.ranks:
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": rank,
            "tid": _WAITS,
            "ts": 0,
            "args": {"name": "waits for"},
        }
        for begin, end, whom in _waits(profile, rank):
            yield {
                "ph": "X",
                "cat": "wait",
                "name": f"waits for rank {whom}",
                "pid": rank,
                "tid": _WAITS,
                "ts": trace_time(begin),
                "dur": (end - begin) / 1e3,
            }
