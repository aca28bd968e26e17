"""The journal's writer: the messages of each job on disk, bounded; `nblaunch._journal` describes the files.

The thread that folds a job's messages appends them to a queue; a thread of the journal's own writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import astuple

from nblaunch._journal import HEADER, Counts, Dropped, directory_of
from nblaunch.protocol.messages import Cleared, Displayed, Logged, Printed
from nblaunch.protocol.state import Message

_MIB = 1 << 20
_BATCH_SECONDS = 0.05
_BATCH_BYTES = _MIB
_QUEUE_BYTES = 64 * _MIB
# What an entry of the queue costs beside its bytes.
_OVERHEAD = 256
_RETRY_SECONDS = 10.0
_CLOSE_SECONDS = 10.0
_NUMBER_BYTES = 8
_WHOLE_JOBS = 3
"""So many ended jobs keep their frames."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LIMIT = "limit of the journal"
_SLOW = "disk too slow"


_Losses = dict[tuple[int, str], Counts]
"""By rank and reason."""


def counts_of(message: Message) -> Counts | None:
    """Return how much output a message is; None if it is none, and has to be kept."""
    match message:
        case Printed():
            return Counts(message.rank, len(message.text), message.text.count("\n"))
        case Displayed():
            return Counts(message.rank, displays=1)
        case Logged():
            return Counts(message.rank, points=len(message.values) // _NUMBER_BYTES)
        case Cleared():
            return Counts(message.rank)
        case _:
            return None


def _lose(losses: _Losses, counts: Counts, why: str) -> None:
    known = losses.get((counts.rank, why))
    losses[counts.rank, why] = counts if known is None else known.plus(counts)


# The writer.


@dataclass(slots=True)
class _Segment:
    """One file of frames, and the output in it by rank."""

    path: Path
    size: int = 0
    output: dict[int, Counts] = field(default_factory=dict)


class _JobFiles:
    """The files of one job, and what waits to be written.

    It is used on the journal's thread, but for `over` and `refused`, which the thread that gives the messages
    changes, and `dropped`.
    """

    def __init__(self, path: Path, state: bytes, due: float, limit: int, most: int) -> None:
        """`limit` bounds all segments together, and `most` each of them; nothing is written before `due`."""
        self.path = path
        self.due = due
        self.over = False
        """Whether the job has ended: no message follows."""
        self.written = False
        """Whether its last state is on disk."""
        self.refused: _Losses = {}
        """Output that was not queued."""
        self._losses: _Losses = {}
        self._written_losses: _Losses = {}
        self._limit = limit
        self._most = min(most, limit)
        self._sequence = 0
        self._taken = 0
        self._keep = [_frame(0, time.time(), state)]
        self._frames: deque[tuple[bytes, Counts | None]] = deque()
        self._final: bytes | None = None
        self._segments: deque[_Segment] = deque()
        self._number = 0
        self._closed = True

    def take(self, raw: bytes, counts: Counts | None, when: float) -> None:
        """Take a message to be written; without `counts` it is kept."""
        self._sequence += 1
        frame = _frame(self._sequence, when, raw)
        self._frames.append((frame, counts))
        if counts is None:
            self._keep.append(frame)
        self._taken += len(frame)
        if self._taken > _BATCH_BYTES:
            self.due = 0.0

    def finish(self, final: bytes) -> None:
        """Take the job's last state and record."""
        self._final = final
        self.due = 0.0

    @property
    def waits(self) -> bool:
        """Whether there is anything to write."""
        news = self._keep or self._frames or self._losses_now() != self._written_losses
        return bool(news or (self._final is not None and not self.written))

    def write(self) -> None:
        """Write what waits; raises `OSError`, and what could not be written waits on."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        while self._keep:
            del self._keep[: _append(self.path / "keep", self._keep)]
        while self._frames:
            self._write_frames()
        losses = self._losses_now()
        if losses != self._written_losses:
            _replace(self.path / "dropped", msgspec.msgpack.encode(_named(losses)))
            self._written_losses = losses
        if self._final is not None and not self.written:
            _replace(self.path / "state", self._final)
            self._final, self.written = None, True

    def _write_frames(self) -> None:
        """Write as many frames as the present segment takes, or one that none would take."""
        first = len(self._frames[0][0])
        segment = None if self._closed else self._segments[-1]
        if segment is None or segment.size + first > self._most:
            segment = _Segment(self.path / f"out-{self._number + 1:04}")
        chunk: list[bytes] = []
        size = 0
        for frame, _ in self._frames:
            if chunk and segment.size + size + len(frame) > self._most:
                break
            chunk.append(frame)
            size += len(frame)
        if size > self._limit:
            self._drop(self._frames.popleft()[1], _LIMIT)
            return
        while sum(each.size for each in self._segments) + size > self._limit:
            self._drop_oldest(_LIMIT)
        written = _append(segment.path, chunk)
        if self._closed or segment is not self._segments[-1]:
            self._segments.append(segment)
            self._number, self._closed = self._number + 1, False
        for _ in range(written):
            frame, counts = self._frames.popleft()
            segment.size += len(frame)
            if counts is not None:
                known = segment.output.get(counts.rank)
                segment.output[counts.rank] = counts if known is None else known.plus(counts)

    def give_up(self, why: str) -> None:
        """Drop the output that waits; a message that is none is in `keep`, or waits for it."""
        for _, counts in self._frames:
            self._drop(counts, why)
        self._frames.clear()
        self._closed = True

    def free(self, why: str) -> bool:
        """Remove the oldest segment to which nothing is written any more; return whether there was one."""
        if len(self._segments) <= (not self._closed and self._final is None and not self.written):
            return False
        self._drop_oldest(why)
        return True

    def _drop_oldest(self, why: str) -> None:
        self._segments[0].path.unlink(missing_ok=True)
        for counts in self._segments.popleft().output.values():
            self._drop(counts, why)
        self._closed = self._closed or not self._segments

    def _drop(self, counts: Counts | None, why: str) -> None:
        if counts is not None:
            _lose(self._losses, counts, why)

    def _losses_now(self) -> _Losses:
        losses = self._losses.copy()
        for (_, why), counts in self.refused.copy().items():
            _lose(losses, counts, why)
        return losses

    def dropped(self) -> tuple[Dropped, ...]:
        """Return what is lost so far; for any thread."""
        return _named(self._losses_now())

    def compact(self) -> None:
        """Remove all frames: the last state stays."""
        for path in (self.path / "keep", *self.path.glob("out-*")):
            path.unlink(missing_ok=True)
        self._segments.clear()

    def remove(self) -> None:
        """Remove all."""
        shutil.rmtree(self.path, ignore_errors=True)


def _named(losses: _Losses) -> tuple[Dropped, ...]:
    return tuple(Dropped(*astuple(counts), why=why) for (_, why), counts in sorted(losses.items()))


def _frame(sequence: int, when: float, raw: bytes) -> bytes:
    return HEADER.pack(len(raw), sequence, when) + raw


def _append(path: Path, frames: Sequence[bytes]) -> int:
    """Append frames to a file, and return how many: at least one, or it raises `OSError`."""
    view = memoryview(b"".join(frames))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(fd).st_size
        written = 0
        try:
            while written < len(view):
                written += os.write(fd, view[written:])
        except OSError:
            count = whole = 0
            while whole + len(frames[count]) <= written:
                whole += len(frames[count])
                count += 1
            os.ftruncate(fd, size + whole)
            if not count:
                raise
            return count
        return len(frames)
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file, in the place of the present one."""
    new = path.with_suffix(".new")
    try:
        new.write_bytes(data)
        new.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


class Journal:
    """Writes the messages of jobs below a private directory.

    `limit` is how many bytes the segments of a job may have together, `segment` how many each of them, and
    `after` how many seconds old a job is when its first file is made: most jobs end earlier. One thread, the
    hub's, calls everything but `dropped` and `written`. No call but `close` waits for the disk, none raises.
    """

    def __init__(
        self, directory: Path, *, limit: int = 256 * _MIB, segment: int = 8 * _MIB, after: float = 0.5
    ) -> None:
        self._directory = directory
        self._limit = limit
        self._segment = segment
        self._after = after
        self._jobs: dict[int, _JobFiles] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        # What to call on the journal's thread: a function, what the entry costs, the arguments. A flat tuple,
        # since the garbage collector visits each. Each of the two sums is changed by one thread.
        self._queue: deque[tuple[Any, ...]] = deque()
        self._entered = 0
        self._left = 0
        self._news = threading.Event()
        self._enough = threading.Event()
        # Of the thread: ended jobs that have their frames, and why and until when it leaves a disk alone.
        self._whole: deque[_JobFiles] = deque()
        self._why = ""
        self._retry = 0.0

    def begin(self, job_number: int, state_bytes: bytes) -> None:
        """Begin a job with its first state."""
        path = directory_of(self._directory, job_number)
        due = time.monotonic() + self._after
        self._jobs[job_number] = _JobFiles(path, state_bytes, due, self._limit, self._segment)
        if self._thread is None and not self._closing:
            thread = threading.Thread(target=self._run, name="nblaunch-journal", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the next job tries again
                thread.start()
                self._thread = thread
        self._news.set()

    def write(self, job_number: int, raw: bytes, counts: Counts | None) -> None:
        """Write a message as it was encoded; `counts` is what `counts_of` returns for it.

        Output is dropped, and counted, while too much waits for the disk.
        """
        job = self._jobs.get(job_number)
        if job is None or job.over or self._closing:
            return
        cost = len(raw) + _OVERHEAD
        waiting = self._entered - self._left + cost
        if counts is not None and waiting > _QUEUE_BYTES:
            _lose(job.refused, counts, _SLOW)
            return
        self._call(_JobFiles.take, cost, job, raw, counts, time.time())
        if waiting > _BATCH_BYTES and not self._enough.is_set():
            self._enough.set()

    def end(self, job_number: int, final_state: bytes, record: bytes) -> None:
        """End a job: its last state and record are written, and the frames of an earlier one removed.

        The frames of the last three stay. A job to which nobody will come back is forgotten instead.
        """
        job = self._jobs.get(job_number)
        if job is not None and not job.over:
            job.over = True
            self._call(_JobFiles.finish, 0, job, msgspec.msgpack.encode((final_state, record)))

    def forget(self, job_number: int) -> None:
        """Remove all of a job."""
        job = self._jobs.pop(job_number, None)
        if job is not None:
            self._call(_JobFiles.remove, 0, job)

    def written(self, job_number: int) -> bool:
        """Return whether a job's last state is on disk; for any thread."""
        job = self._jobs.get(job_number)
        return job is not None and job.written

    def dropped(self, job_number: int) -> tuple[Dropped, ...]:
        """Return the output of a job that is lost so far, by rank and reason; for any thread."""
        job = self._jobs.get(job_number)
        return job.dropped() if job is not None else ()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._closing = True
        self._news.set()
        self._enough.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def _call(self, function: Callable[..., None], cost: int, *arguments: object) -> None:
        self._entered += cost
        self._queue.append((function, cost, *arguments))
        if not self._news.is_set():
            self._news.set()

    # On the journal's thread.

    def _run(self) -> None:
        closing = False
        while not closing:
            self._news.wait(self._until_next())
            # What comes meanwhile is written together.
            self._enough.wait(_BATCH_SECONDS)
            self._news.clear()
            self._enough.clear()
            closing = self._closing
            self._drain()

    def _until_next(self) -> float | None:
        """Return after how many seconds there is something to write, if nothing new comes; None: nothing."""
        times = [max(job.due, self._retry) for job in list(self._jobs.values()) if job.waits]
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _drain(self) -> None:
        while True:
            taken = 0
            while self._queue and taken < _BATCH_BYTES:
                function, cost, *arguments = self._queue.popleft()
                function(*arguments)
                taken += cost
            now = time.monotonic()
            for job in list(self._jobs.values()):
                if job.due <= now and job.waits:
                    self._store(job, now)
            self._left += taken
            if not self._queue:
                return

    def _store(self, job: _JobFiles, now: float) -> None:
        """Write what waits for a job's files; where the disk is full, in the place of the oldest output."""
        while now >= self._retry:
            try:
                job.write()
                break
            except OSError as error:
                full = error.errno in _FULL
                self._why = "disk full" if full else str(error.strerror)
                if not (full and self._free()):
                    self._retry = now + _RETRY_SECONDS
        else:
            job.give_up(self._why)
            with contextlib.suppress(OSError):  # what is not output may find room
                job.write()
        if job.written:
            self._compact(job)

    def _free(self) -> bool:
        with contextlib.suppress(OSError):
            return any(job.free(self._why) for job in list(self._jobs.values()))
        return False

    def _compact(self, ended: _JobFiles) -> None:
        if ended not in self._whole:
            self._whole.append(ended)
        while len(self._whole) > _WHOLE_JOBS:
            with contextlib.suppress(OSError):
                self._whole.popleft().compact()
