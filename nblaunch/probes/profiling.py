"""torch.profiler around a rank's job, reduced to what the profile of all ranks needs, and as a trace.

    begin    the hub's clock; the recorder of collectives; the profiler, or it waits for the first step
    job      the main thread is profiled; steps are noted; a thread drains torch's flight recorder
    end      the profiler stops; the hub's clock again; trace and summary are made, and sent

What is profiled are the operators of the main thread and of autograd's threads, CUDA's kernels, and gloo's
work on its own threads. Which collective each of those is (group, sequence number, sizes) only the flight
recorder knows, which forgets: so it is read while the job runs.

A profile that takes too long is ended, on the main thread, wherever that is: the profiler's state belongs to
the thread that has started it.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import platform
import re
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C import _distributed_c10d
from torch.autograd.profiler import profile

from nblaunch.insight.intervals import Interval, merged
from nblaunch.insight.profile import TRACE_EPOCH, CollectiveCall, RankProfile
from nblaunch.insight.trace import TracePart, packed
from nblaunch.probes import steps
from nblaunch.protocol.messages import Insight

MOST_SECONDS = 60.0
"""Of a profile without a range of steps: beyond, memory and traces grow too large to be of use."""
MOST_EVENTS = 400_000
"""In a rank's part of the trace; some 40 MB, a tenth of that compressed."""
_MOST_INTERVALS = 100_000
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.03
_DRAIN_AT = 96
"""Collectives since the last drain: the recorder of a rank has 256, unless the user set another size."""
_CLOCK_SAMPLES, _CLOCK_SECONDS = 24, 1.0
_GAP = 20_000
"""Nanoseconds: operators that are not further apart count as one piece of work, with the Python between."""
_SLACK = 20_000
"""Nanoseconds by which the profiler's clock may differ from the flight recorder's."""
UNKNOWN = "unknown"
"""The group of a collective that the flight recorder had forgotten before it was read."""
_COMMUNICATION = re.compile(
    r"c10d::|gloo:|nccl|_?c10d_functional|record_param_comms|symm_mem::", re.IGNORECASE
)
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_STEP_THREAD = 999_999
_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4}
_BYTES |= {"Half": 2, "BFloat16": 2, "Short": 2}
_DUMP = getattr(_distributed_c10d, "_dump_fr_trace_json", None)

ClockSamples = list[tuple[int, int, int]]
AskClock = Callable[[int, float], ClockSamples]
SendProfile = Callable[[bytes, bytes], None]


class TraceEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """An event of Chrome's format, as Kineto writes it, times in microseconds."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float = 0.0
    dur: float = 0.0
    id: int | str | None = None
    bp: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    traceEvents: list[TraceEvent]  # noqa: N815 - the format's name
    baseTimeNanoseconds: int = 0  # noqa: N815 - the format's name


class FlightRecord(msgspec.Struct, gc=False):
    """A collective as the flight recorder has it."""

    record_id: int = -1
    process_group: tuple[str, ...] = ()
    collective_seq_id: int = 0
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    time_created_ns: int = 0
    is_p2p: bool = False


class _GroupStatus(msgspec.Struct):
    last_enqueued_collective: str = "0"


class _Dump(msgspec.Struct):
    entries: list[FlightRecord] = []
    pg_status: dict[str, _GroupStatus] = {}


_decode_dump = msgspec.json.Decoder(_Dump)


class _Collectives:
    """Reads the flight recorder of gloo now and then, on a thread, before it forgets."""

    def __init__(self) -> None:
        self._since = time.time_ns()
        self.found: dict[int, FlightRecord] = {}
        self._drained = self._enqueued()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nblaunch-profile", daemon=True)
        self._thread.start()

    def _enqueued(self) -> int:
        with contextlib.suppress(Exception):  # a torch without this recorder
            status = _decode_dump.decode(_DUMP(includeCollectives=False)).pg_status if _DUMP else {}
            return sum(int(each.last_enqueued_collective) for each in status.values())
        return 0

    def _run(self) -> None:
        pause, before = _SHORTEST_PAUSE, self._drained
        while not self._over.wait(pause):
            now = self._enqueued()
            # Rarely where there are few: each look takes the interpreter from the program.
            wanted = pause * _DRAIN_AT / (2 * max(now - before, 1))
            pause = min(max(wanted, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            before = now
            if now - self._drained >= _DRAIN_AT:
                self._drain()

    def _drain(self) -> None:
        self._drained = self._enqueued()
        with contextlib.suppress(Exception):
            entries = _decode_dump.decode(_DUMP()).entries if _DUMP else []
            self.found |= {
                each.record_id: each
                for each in entries
                if each.time_created_ns >= self._since and not each.is_p2p
            }

    def end(self) -> list[FlightRecord]:
        """Return all collectives since the beginning, oldest first."""
        self._over.set()
        self._thread.join()
        self._drain()
        return sorted(self.found.values(), key=lambda each: each.time_created_ns)


class Profiling:
    """The profile of one job of this rank: a context manager around the job."""

    def __init__(
        self, rank: int, insight: Insight, ask_clock: AskClock, directory: Path, send: SendProfile
    ) -> None:
        """`send` gets the reduced profile and the trace's part; `directory` is the group's private one."""
        self._rank, self._wanted, self._send = rank, insight.profile_steps, send
        self._ask_clock = ask_clock
        self._file = directory / f"trace-{rank}-{os.getpid()}.json"
        self._profiler: Any = None
        self._collectives: _Collectives | None = None
        self._marks: list[tuple[int | None, int]] = []
        self._began = self._ended = 0
        self._warnings: list[str] = []
        self._clocks: list[ClockSamples] = []
        self._limit: _Limit | None = None

    def __enter__(self) -> None:
        """Begin, unless it begins with a step."""
        with self._harmless():
            self._clocks.append(self._ask_clock(_CLOCK_SAMPLES, _CLOCK_SECONDS))
            self._collectives = _Collectives()
            steps.listen(self._stepped)
            self._limit = _Limit(MOST_SECONDS, self._too_long)
            # Also where only some steps are wanted: code that begins none has steps that the notebook finds.
            self._start()

    def __exit__(self, *_: object) -> None:
        """End, and send what there is."""
        try:
            with self._harmless():
                if self._limit is not None:
                    self._limit.end()
                steps.forget(self._stepped)
                self._stop()
                self._finish()
        finally:
            # An interrupt may have come: the next job must find no profiler that is running.
            self._stop()
            if self._collectives is not None:
                self._collectives.end()
            self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Make of any exception a warning: a profile that fails must not fail the job."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as above
            warnings.warn(f"the profile failed: {type(error).__name__}: {error}", stacklevel=2)

    def _stepped(self, number: int | None) -> None:
        now = time.time_ns()
        if self._wanted is not None and number is not None:
            first, last = self._wanted
            if self._profiler is not None and not first <= number <= last:
                if self._marks:
                    self._marks.append((None, now))
                    self._stop()
                else:
                    self._discard()
            elif self._profiler is None and not self._ended and first <= number <= last:
                self._start()
                now = time.time_ns()
        if self._profiler is not None:
            self._marks.append((number, now))

    def _discard(self) -> None:
        """Stop before the first wanted step, and forget all so far."""
        profiler, self._profiler = self._profiler, None
        if self._limit is not None:
            self._limit.end()
            self._limit = _Limit(MOST_SECONDS, self._too_long)
        profiler.__exit__(None, None, None)

    def _start(self) -> None:
        # Not torch.profiler.profile, which loads the compiler for it: three seconds of each rank.
        device = "cuda" if torch.cuda.is_available() else None
        profiler = profile(use_cpu=True, use_device=device, use_kineto=True)
        with warnings.catch_warnings(), _quiet_kineto():
            warnings.simplefilter("ignore")
            profiler.__enter__()
        self._profiler, self._began = profiler, time.time_ns()
        if self._limit is not None:
            self._limit.start()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._ended = time.time_ns()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        profiler.__exit__(None, None, None)
        profiler.export_chrome_trace(str(self._file))

    def _too_long(self) -> None:
        """End the profile: it has taken as long as it may."""
        if self._profiler is not None:
            self._warnings.append(
                f"the profile covers the first {MOST_SECONDS:.0f} s; choose steps with --profile-steps"
            )
            with self._harmless():
                self._stop()

    def _finish(self) -> None:
        self._clocks.append(self._ask_clock(_CLOCK_SAMPLES, _CLOCK_SECONDS))
        clock = HubClock(self._clocks)
        recorded = self._collectives.end() if self._collectives is not None else []
        recorded = [each for each in recorded if self._began <= each.time_created_ns <= self._ended]
        events: list[TraceEvent] = []
        base = 0
        if self._file.is_file():
            trace = msgspec.json.decode(self._file.read_bytes(), type=_Trace)
            events, base = trace.traceEvents, trace.baseTimeNanoseconds
        for each in events:
            # On the hub's clock, and since a moment that is the same on all ranks.
            if each.ts:
                local = base + int(each.ts * 1000)
                each.ts = (local + clock.offset(local) - TRACE_EPOCH) / 1e3
        for entry in recorded:
            entry.time_created_ns += clock.offset(entry.time_created_ns)
        calls = collective_calls(events, recorded)
        if lost := sum(call.group == UNKNOWN for call in calls):
            self._warnings.append(
                f"{lost} collectives have no group and size: torch's flight recorder had forgotten them. Run "
                "with a larger TORCH_FR_BUFFER_SIZE"
            )
        compute = merged(compute_intervals(events), _GAP)
        if len(compute) > _MOST_INTERVALS:
            self._warnings.append(f"its last {len(compute) - _MOST_INTERVALS} intervals of work are left out")
        began, ended = (each + clock.offset(each) for each in (self._began, self._ended))
        marks = [(number, moment + clock.offset(moment)) for number, moment in self._marks]
        found = tuple(_steps(marks, ended))
        part = self._trace(events, found)
        reduced = RankProfile(
            rank=self._rank,
            host=platform.node(),
            began=began,
            ended=ended,
            steps=found,
            wanted=self._wanted,
            compute=tuple(compute[:_MOST_INTERVALS]),
            calls=tuple(calls),
            clock_error=clock.error,
            warnings=tuple(self._warnings),
            trace_size=part.size,
            trace_crc=part.crc,
        )
        self._send(msgspec.msgpack.encode(reduced), part.data)

    def _trace(self, events: Sequence[TraceEvent], found: Sequence[tuple[int, int, int]]) -> TracePart:
        """Return this rank's part of the trace: its process is its rank, and so has the same place always."""
        own, left = of_rank(events, self._rank, platform.node(), os.getpid())
        if left:
            self._warnings.append(
                f"{left:,} events are left out of the trace; choose steps with --profile-steps"
            )
        own += [
            TraceEvent(
                "X",
                f"step {number}",
                "step",
                self._rank,
                _STEP_THREAD,
                (a - TRACE_EPOCH) / 1e3,
                (b - a) / 1e3,
            )
            for number, a, b in found
        ]
        return packed(b",\n".join(map(msgspec.json.encode, own)))


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep Kineto, which reads this with the first profile, from a line on stderr for each profile."""
    known = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "6")
    try:
        yield
    finally:
        if known is None:
            del os.environ[_LOG_LEVEL]


class _Limit:
    """Calls a function on the main thread after some seconds, wherever that thread is."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._over = threading.Event()
        self._act = act
        self._seconds = seconds
        # Kept as long as this object: the interpreter may call it after the job.
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._on_main)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._wait, name="nblaunch-profile-limit", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _wait(self) -> None:
        if not self._over.wait(self._seconds):
            _alive.append(self)
            ctypes.pythonapi.Py_AddPendingCall(self._call, None)

    def _on_main(self, _: object) -> int:
        with contextlib.suppress(ValueError):
            _alive.remove(self)
        try:
            if not self._over.is_set():
                self._act()
        except KeyboardInterrupt:
            # Nothing can be raised from here: have it raised in the program.
            _thread.interrupt_main()
        return 0


_alive: deque[_Limit] = deque()
"""Limits whose call is pending."""


class HubClock:
    """A rank's clock against the hub's: measured before and after, and in between on a straight line."""

    def __init__(self, clocks: Iterable[ClockSamples]) -> None:
        """Each sample is a list of (asked, hub's time, answered); of each the quickest answer counts."""
        self._points: list[tuple[int, int]] = []
        errors = []
        for samples in clocks:
            if samples:
                asked, there, here = min(samples, key=lambda each: each[2] - each[0])
                middle = (asked + here) // 2
                self._points.append((middle, there - middle))
                errors.append((here - asked) / 2e9)
        self.error = max(errors, default=None)
        """In seconds: half of a round trip; None without any answer."""

    def offset(self, moment: int) -> int:
        """Return the hub's clock minus this rank's clock at a moment, in nanoseconds."""
        if not self._points:
            return 0
        (first, before), (last, after) = self._points[0], self._points[-1]
        if last <= first:
            return before
        share = min(max((moment - first) / (last - first), 0.0), 1.0)
        return before + round((after - before) * share)


def _steps(marks: Sequence[tuple[int | None, int]], ended: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, begin, end) of the steps; the last one ends with the profile."""
    for place, (number, begin) in enumerate(marks):
        if number is not None:
            end = marks[place + 1][1] if place + 1 < len(marks) else ended
            yield number, begin, max(begin, end)


def _nanoseconds(event: TraceEvent) -> Interval:
    begin = TRACE_EPOCH + round(event.ts * 1000)
    return begin, begin + round(event.dur * 1000)


def compute_intervals(events: Sequence[TraceEvent]) -> list[Interval]:
    """Return when the rank computed: GPU kernels, or without any the operators of the CPU.

    An operator around a collective is not computing: only its other parts count.
    """
    work = [
        each
        for each in events
        if each.cat in _GPU_WORK and each.ph == "X" and not each.name.startswith("nccl")
    ]
    if work:
        return [_nanoseconds(each) for each in work]
    threads: dict[object, list[TraceEvent]] = defaultdict(list)
    for each in events:
        if each.cat == "cpu_op" and each.ph == "X":
            threads[each.tid].append(each)
    found: list[Interval] = []
    for own in threads.values():
        own.sort(key=lambda each: (each.ts, -each.dur))
        around: list[tuple[float, int]] = []
        communicates: set[int] = set()
        for place, each in enumerate(own):
            while around and around[-1][0] <= each.ts:
                around.pop()
            if _COMMUNICATION.match(each.name):
                communicates |= {place, *(outer for _, outer in around)}
            around.append((each.ts + each.dur, place))
        found += [_nanoseconds(each) for place, each in enumerate(own) if place not in communicates]
    return found


def collective_calls(events: Sequence[TraceEvent], recorded: Sequence[FlightRecord]) -> list[CollectiveCall]:
    """Return the collectives: gloo's with what the flight recorder has of them, and NCCL's kernels."""
    waiting: dict[str, deque[FlightRecord]] = defaultdict(deque)
    for entry in recorded:
        waiting[entry.profiling_name].append(entry)
    calls: list[CollectiveCall] = []
    counts: dict[str, int] = defaultdict(int)
    for event in sorted((each for each in events if each.ph == "X"), key=lambda each: each.ts):
        if event.cat == "kernel" and event.name.startswith("nccl"):
            if (call := _of_nccl(event, counts)) is not None:
                calls.append(call)
            continue
        backend, colon, operation = event.name.partition(":")
        if event.cat != "user_annotation" or not colon or backend != "gloo" or operation in ("send", "recv"):
            continue
        began, ended = _nanoseconds(event)
        known = waiting[event.name]
        counts[operation] += 1
        if known and known[0].time_created_ns <= began + _SLACK:
            entry = known.popleft()
            group, sequence, size = _group(entry.process_group), entry.collective_seq_id, _size(entry)
            called = min(entry.time_created_ns, began)
        else:
            # The recorder has forgotten it, or this torch has none: the order has to do.
            group, sequence, size, called = UNKNOWN, counts[operation], 0, began
        calls.append(CollectiveCall(group, sequence, operation, size, called, began, ended))
    return calls


def _of_nccl(event: TraceEvent, counts: dict[str, int]) -> CollectiveCall | None:
    """Return a kernel of NCCL as a call; Kineto writes which collective it is beside it."""
    about: dict[str, Any] = msgspec.json.decode(event.args)
    operation = str(about.get("Collective name") or "").lstrip("_")
    if not operation or operation in ("send", "recv", "coalesced"):
        return None
    group = str(about.get("Process Group Description") or about.get("Process Group Name") or "")
    counts[f"{group} {operation}"] += 1
    sequence = about.get("Seq", counts[f"{group} {operation}"])
    size = int(about.get("In msg nelems", 0)) * _BYTES.get(str(about.get("dtype", "")), 1)
    began, ended = _nanoseconds(event)
    return CollectiveCall(group, int(sequence), operation, size, began, began, ended)


def _group(names: Sequence[str]) -> str:
    number, description = (*names, "", "")[:2]
    return description if description not in ("", "undefined") else number


def _size(entry: FlightRecord) -> int:
    size = 0
    for number, sizes in enumerate(entry.input_sizes):
        elements = 1
        for each in sizes:
            elements *= each
        kind = entry.input_dtypes[number] if number < len(entry.input_dtypes) else ""
        size += elements * _BYTES.get(kind, 1)
    return size


def of_rank(events: Sequence[TraceEvent], rank: int, host: str, pid: int) -> tuple[list[TraceEvent], int]:
    """Return the events as those of a process that is named after the rank; and how many are left out."""
    kept: list[TraceEvent] = []
    others: dict[object, int] = {}
    for each in events:
        if (
            isinstance(each.pid, str)
            or each.ph == "i"
            or (each.ph == "M" and each.name.startswith("process_"))
        ):
            continue
        if each.pid == pid:
            each.pid = rank
        else:
            # A GPU: numbers of processes must differ from rank to rank.
            each.pid = others.setdefault(each.pid, 1_000_000 * (rank + 1) + int(each.pid))
        if each.id is not None:
            each.id = f"{rank}.{each.id}"
        kept.append(each)
    left = max(len(kept) - MOST_EVENTS, 0)
    kept = kept[:MOST_EVENTS]
    names = [(rank, f"rank {rank} ({host})")]
    names += [(number, f"rank {rank} GPU {gpu}") for gpu, number in others.items()]
    for number, name in names:
        for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": rank})):
            raw = msgspec.Raw(msgspec.json.encode(args))
            kept.append(TraceEvent("M", what, pid=number, args=raw))
    steps_name = msgspec.Raw(msgspec.json.encode({"name": "steps"}))
    kept.append(TraceEvent("M", "thread_name", pid=rank, tid=_STEP_THREAD, args=steps_name))
    return kept, left
