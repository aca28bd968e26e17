"""The journal of a runtime's jobs as any process reads it: their messages on disk.

    <directory>/job-7/keep         the job's first state, then every message that is not output
    <directory>/job-7/out-0001     segments: every message, in order; the oldest ones are removed
    <directory>/job-7/dropped      what output the journal no longer has, by rank and reason
    <directory>/job-7/state        the last state and the record of the job, once it has ended

A frame is length, sequence number and time, then the message as it was encoded. A reader goes through the
segments, and takes what lies between two of them, or before the first, from `keep`.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

HEADER = struct.Struct("<IQd")
_POLL_SECONDS = 0.1


class Counts(msgspec.Struct, frozen=True, gc=False):
    """Output of a rank: how much of it."""

    rank: int
    characters: int = 0
    lines: int = 0
    displays: int = 0
    points: int = 0
    """Numbers that it has logged."""

    def plus(self, other: Counts) -> Counts:
        """Return the sum, of the same rank."""
        return Counts(
            self.rank,
            self.characters + other.characters,
            self.lines + other.lines,
            self.displays + other.displays,
            self.points + other.points,
        )


class Dropped(Counts, frozen=True, gc=False, kw_only=True):
    """Output of a rank that the journal of a job no longer has."""

    why: str


def directory_of(directory: Path, job_number: int) -> Path:
    """Return where the files of a job are."""
    return directory / f"job-{job_number}"


@dataclass(frozen=True, slots=True)
class JournalRead:
    """What the journal has of a job.

    `state` is the first one as long as there is no `record`, and then the last one. `frames` are the messages
    in order, read as they are taken.
    """

    state: bytes | None
    frames: Iterator[bytes]
    dropped: tuple[Dropped, ...]
    record: bytes | None


def read(directory: Path, job_number: int) -> JournalRead:
    """Return what the journal has of a job now; also if its writer was killed, or never made a file."""
    path = directory_of(directory, job_number)
    state, record = _final_of(path)
    if record is None:
        state = next((raw for _, raw in _FrameFile(path / "keep").new()), None)
    dropped: tuple[Dropped, ...] = ()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        dropped = msgspec.msgpack.decode((path / "dropped").read_bytes(), type=tuple[Dropped, ...])
    return JournalRead(state, _JobReader(path).new(rest=True), dropped, record)


def follow(directory: Path, job_number: int, lives: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the messages of a job, those that are there and then each new one, until the job has ended.

    Ends too once the job is forgotten, or `lives` says that its runtime is gone.
    """
    path = directory_of(directory, job_number)
    reader = _JobReader(path)
    seen = False
    while True:
        seen = seen or path.exists()
        over = (path / "state").exists() or (seen and not path.exists()) or not lives()
        yield from reader.new(rest=over)
        if over:
            return
        time.sleep(_POLL_SECONDS)


def _final_of(path: Path) -> tuple[bytes | None, bytes | None]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.msgpack.decode((path / "state").read_bytes(), type=tuple[bytes, bytes])
    return None, None


class _FrameFile:
    """A file of frames that grows, and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._file: BinaryIO | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the file open within the block: it can be read although it is removed."""
        with contextlib.ExitStack() as opened:
            with contextlib.suppress(FileNotFoundError):
                self._file = opened.enter_context(self.path.open("rb"))
            try:
                yield
            finally:
                self._file = None

    def new(self, before: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield sequence numbers and messages, up to number `before`; a frame that is not whole waits."""
        if self._file is None:
            with self.held():
                yield from self._read(before)
        else:
            yield from self._read(before)

    def _read(self, before: int | None) -> Iterator[tuple[int, bytes]]:
        file = self._file
        if file is None:
            return
        file.seek(self._position)
        while len(header := file.read(HEADER.size)) == HEADER.size:
            length, sequence, _ = HEADER.unpack(header)
            raw = file.read(length)
            if len(raw) < length or (before is not None and sequence >= before):
                return
            self._position += HEADER.size + length
            yield sequence, raw


class _JobReader:
    """The messages of a job in order, read so far up to a sequence number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keep = _FrameFile(path / "keep")
        self._segment = _FrameFile(path / "out-0000")
        self._sequence = 0

    def new(self, *, rest: bool) -> Iterator[bytes]:
        """Yield the messages that have not been read; `rest`: no segment will come after those there are."""
        read = _number_of(self._segment.path)
        later = [path for path in self._path.glob("out-*") if _number_of(path) > read]
        segments = [self._segment, *map(_FrameFile, sorted(later, key=_number_of))]
        with contextlib.ExitStack() as opened:
            # All at once: a reader may be slow, and the files of a job are removed for those of younger ones.
            for each in (self._keep, *segments):
                opened.enter_context(each.held())
            for self._segment in segments:
                yield from self._of_segment()
            if rest:
                yield from self._kept(None)

    def _of_segment(self) -> Iterator[bytes]:
        for sequence, raw in self._segment.new():
            if sequence > self._sequence + 1:
                yield from self._kept(sequence)
            self._sequence = sequence
            yield raw

    def _kept(self, before: int | None) -> Iterator[bytes]:
        """Yield the messages that were kept when a segment was dropped."""
        for sequence, raw in self._keep.new(before):
            if sequence > self._sequence:
                self._sequence = sequence
                yield raw


def _number_of(path: Path) -> int:
    return int(path.name.removeprefix("out-"))
