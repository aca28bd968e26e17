"""The jobs that a session has had: what is kept of each, and within which bounds.

What a job has printed is in the log files of its ranks; of all else its last state is kept. Older states are
on disk alone, which may hang or be full: a thread writes them, and one that is not written stays in memory.

Everything here runs on the hub's thread, except `PastJob.snapshot`, which may read a file.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from msgspec.structs import replace

from nblaunch._cgroups import tightest_memory
from nblaunch._errors import NblaunchError
from nblaunch._results import EventLog
from nblaunch.capture.shared_memory import Outgoing
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import JobEnd, JobRecord, JobSnapshot
from nblaunch.protocol.messages import ProtocolError, encode
from nblaunch.protocol.reports import size
from nblaunch.protocol.state import RankState, RunState, decode_state
from nblaunch.protocol.transcript import Transcript, without_displays
from nblaunch.runtime.jobs import RunningJob, without_values

_GIB = 1 << 30
_STATE_BYTES = 64 << 20
_VALUE_BYTES = 4 * _GIB
_SHARE = 4
# How much longer the count of a rank's omitted displays gets.
_COUNT_BYTES = 8
_DISK_SECONDS = 10.0


def most_values() -> int:
    """Return how many bytes the values of a session may have: a quarter of the memory, and at most 4 GiB."""
    container = tightest_memory()
    memory = int(psutil.virtual_memory().total)
    return min((memory if container is None else min(memory, container[0])) // _SHARE, _VALUE_BYTES)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many jobs of a session are kept, and how many of their states in memory too.

    `state` is for the bytes of each state, and `values` for those of all values together.
    """

    jobs: int = 50
    in_memory: int = 3
    state: int = _STATE_BYTES
    values: int = field(default_factory=most_values)


@dataclass(slots=True, eq=False)
class PastJob:
    """A job that has ended; its `state` is None where it is on disk alone."""

    record: JobRecord
    options: LaunchOptions
    end: JobEnd
    events: EventLog
    late: list[str]
    """Warnings since its end."""
    file: Path
    """Where its state is, once it is on disk."""
    state: RunState | None = None
    values: dict[tuple[int, str], Outgoing] = field(default_factory=dict)
    taken: bool = False
    """Whether a client has mapped the values."""
    dropped_values: str = ""
    """Why there are no values any more."""

    @property
    def size(self) -> int:
        """The bytes of its values; those inside of the state count as its own."""
        return sum(sum(each.payload.sizes) for each in self.values.values() if each.payload.inline is None)

    def drop(self, what: str) -> None:
        self.record = replace(self.record, dropped="; ".join(filter(None, (self.record.dropped, what))))

    def drop_values(self, why: str) -> None:
        """Close the values."""
        self.dropped_values = why
        self.drop(f"values dropped {why}")
        self.close()

    def close(self) -> None:
        for each in self.values.values():
            each.close()
        self.values = {}

    def snapshot(self) -> JobSnapshot:
        """Return all that is kept. Raises `NblaunchError` if the state is on disk no longer."""
        state = self.state
        if state is None:
            try:
                state = decode_state(self.file.read_bytes())
            except (OSError, ProtocolError):
                msg = (
                    f"job {self.record.number} ({self.record.title}) was kept in {self.file.parent}, and its "
                    "files are gone. Run it again."
                )
                raise NblaunchError(msg) from None
        if self.dropped_values:
            state = without_values(state, f"it was dropped {self.dropped_values}")
        return JobSnapshot(job=self.record, state=encode(state), options=self.options, end=self.end)

    def store(self) -> None:
        """Move the state to the disk, if that takes it."""
        new = self.file.with_suffix(".new")
        try:
            if self.state is not None:
                new.write_bytes(encode(self.state))
                new.rename(self.file)
                self.state = None
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)


class Archive:
    """The jobs that have ended in a session, the oldest first.

    Without `keep` a client has all of a job once it has ended, and only the record stays here.
    """

    def __init__(self, directory: Path, *, keep: bool, bounds: Bounds | None = None) -> None:
        """Write states in `directory`."""
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="nblaunch-archive")
        self._directory = directory
        self._keep = keep
        self._bounds = bounds or Bounds()
        self._jobs: dict[int, PastJob] = {}
        self.forgotten: Callable[[int], None] = lambda _: None
        """Called with each job that is kept no longer."""

    @property
    def records(self) -> tuple[JobRecord, ...]:
        # A list first: it is made at once, and jobs end on another thread.
        return tuple(past.record for past in list(self._jobs.values()))

    def get(self, number: int) -> PastJob | None:
        """Return a job of which more than the record is kept."""
        return self._jobs.get(number) if self._keep else None

    def add(self, job: RunningJob) -> None:
        state = job.state
        assert job.end is not None  # noqa: S101 - it has ended
        file = self._directory / f"job-{job.number}"
        past = PastJob(job.record, job.order.options, job.end, job.events, job.late, file)
        if self._keep:
            state, displays = bounded(state, self._bounds.state)
            past.state, past.values = state, job.taken_values()
            if displays:
                past.drop(f"{displays} of the oldest displays")
        else:
            past.end = replace(job.end, logs={})  # of thousands of ranks they are megabytes
        self._jobs[job.number] = past
        while len(self._jobs) > self._bounds.jobs:
            self._forget(next(iter(self._jobs)))
        self._free()

    def taken(self, number: int) -> None:
        past = self.get(number)
        if past is not None:
            past.taken = True
            self._free()

    def close(self) -> None:
        for number in list(self._jobs):
            self._forget(number)
        self._keep = False
        self._disk.shutdown(wait=False)

    def flush(self) -> None:
        """Wait until nothing is written any more; on a thread that may wait."""
        if self._keep:
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._disk.submit(int).result(_DISK_SECONDS)

    def _forget(self, number: int) -> None:
        past = self._jobs.pop(number)
        past.close()
        if self._keep:
            past.state = None
            self._on_disk(past.remove)
        self.forgotten(number)

    def _on_disk(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # no thread is left: the end of the next job tries again
            self._disk.submit(act)

    def _free(self) -> None:
        newest_first = list(reversed(self._jobs.values()))
        for past in newest_first[self._bounds.in_memory :]:
            if past.state is not None:
                self._on_disk(past.store)
        together = 0
        for past in newest_first:
            if not past.values:
                continue
            together += past.size
            # The last job's client may be about to map them, or the user about to come back for them.
            wanted = past is newest_first[0] and not past.taken
            if together > self._bounds.values and past.size and not wanted:
                past.drop_values(f"after {size(self._bounds.values)} of newer ones")


def bounded(state: RunState, limit: int) -> tuple[RunState, int]:
    """Return a state without its oldest displays, as far as it is too large, and how many these are.

    >>> bounded(RunState.fresh(1), 1000) == (RunState.fresh(1), 0)
    True
    """
    excess = len(encode(state)) - limit
    if excess <= 0:
        return state, 0
    attempts: list[Mapping[int, RankState]] = [*(each.ranks for each in state.earlier), state.ranks]
    # Displays have no time: the first of each rank count as older than the second.
    places = sorted(
        (number, index, rank)
        for number, ranks in enumerate(attempts)
        for rank, known in ranks.items()
        for index in range(len(known.transcript.displays))
    )
    gone: Counter[tuple[int, int]] = Counter()
    empty = len(encode(Transcript()))
    excess += _COUNT_BYTES * sum(map(len, attempts))
    for number, index, rank in places:
        if excess <= 0:
            break
        display = attempts[number][rank].transcript.displays[index]
        excess -= len(encode(Transcript(head=(display,)))) - empty
        gone[number, rank] += 1

    def left(number: int) -> dict[int, RankState]:
        return {
            rank: replace(known, transcript=without_displays(known.transcript, gone[number, rank]))
            for rank, known in attempts[number].items()
        }

    earlier = tuple(replace(each, ranks=left(number)) for number, each in enumerate(state.earlier))
    return replace(state, ranks=left(len(earlier)), earlier=earlier), gone.total()
