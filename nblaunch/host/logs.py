"""Reading what ranks print: the tail of two growing files, in the order that the rank has sent.

A private file is bounded: what is older than its last 256 MB becomes a hole, once it has been read. Offsets
stay as they are, and nobody who writes to the file notices.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from nblaunch._results import read_text
from nblaunch.protocol.messages import Offsets, Printed, Stream

MOST_BYTES = 256 << 20
"""The most that is kept of each private log file."""
_STEP = 1 << 20
# FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE.
_HOLE = 2 | 1


@dataclass(slots=True)
class LogFile:
    """One log file, read so far up to `position`."""

    path: str
    position: int = 0
    seen: int = 0
    freed: int = 0
    file: io.FileIO | None = None
    decoder: codecs.IncrementalDecoder | None = None

    def size(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self.path if self.file is None else self.file.fileno()).st_size
        return 0

    def unread(self, end: int) -> Iterator[bytes]:
        """Yield the unread bytes before `end`."""
        if end <= self.position:
            return
        with contextlib.suppress(OSError):
            if self.file is None:
                self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
            fd = self.file.fileno()
            while data := os.pread(fd, min(_STEP, end - self.position), self.position):
                self.position += len(data)
                yield data

    def read(self, end: int) -> Iterator[str]:
        for data in self.unread(end):
            self.decoder = self.decoder or codecs.getincrementaldecoder("utf-8")("replace")
            yield self.decoder.decode(data)

    @property
    def printed(self) -> int:
        """The end of the decoded text, which excludes an incomplete character."""
        return self.position - (0 if self.decoder is None else len(self.decoder.getstate()[0]))

    def free(self, end: int) -> None:
        """Give back the room of what was read before `end`, in large steps.

        A file system that cannot make holes (NFS before 4.2) keeps it.
        """
        end = min(end, self.position)
        end -= end % _STEP
        if end <= self.freed or sys.platform != "linux":
            return
        with contextlib.suppress(OSError), open(self.path, "r+b", buffering=0) as file:
            ctypes.CDLL(None).fallocate(file.fileno(), _HOLE, ctypes.c_int64(0), ctypes.c_int64(end))
        self.freed = end

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class LogTail:
    """The output of one rank, as `Printed` messages."""

    __slots__ = ("_bounded", "_brief", "_files", "_rank")

    def __init__(
        self, rank: int, stdout: str, stderr: str, *, bounded: bool = False, brief: bool = False
    ) -> None:
        """With `bounded` the files keep their last `MOST_BYTES`; `brief` files are closed after each read."""
        self._rank, self._bounded, self._brief = rank, bounded, brief
        self._files = {Stream.STDOUT: LogFile(stdout), Stream.STDERR: LogFile(stderr)}

    def renumbered(self, rank: int) -> LogTail:
        self._rank = rank
        return self

    def poll(self) -> Iterator[Printed]:
        """Yield the text that was there at the last call.

        Not the newest: messages with its order may be under way.
        """
        for stream, file in self._files.items():
            end, file.seen = file.seen, file.size()
            yield from self._read(stream, end)

    @property
    def idle(self) -> bool:
        return all(file.position >= file.seen for file in self._files.values())

    @property
    def printed(self) -> Offsets:
        return Offsets(*(file.printed for file in self._files.values()))

    def up_to(self, offsets: Offsets) -> Iterator[Printed]:
        """Yield the text before a moment in the rank's life."""
        yield from self._read(Stream.STDOUT, offsets.stdout)
        yield from self._read(Stream.STDERR, offsets.stderr)

    def rest(self) -> Iterator[Printed]:
        for stream, file in self._files.items():
            yield from self._read(stream, file.size())

    def free(self, before: Offsets | None) -> None:
        """Give back the room of the text before a moment; None: of all that has been read."""
        for stream, file in self._files.items():
            file.free(file.position if before is None else getattr(before, stream.value))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def skip_to(self, offsets: Offsets) -> None:
        self._files[Stream.STDOUT].position = offsets.stdout
        self._files[Stream.STDERR].position = offsets.stderr

    def _read(self, stream: Stream, end: int) -> Iterator[Printed]:
        file = self._files[stream]
        for text in file.read(end):
            if text:
                yield Printed(rank=self._rank, stream=stream, text=text, end=file.printed)
        if self._bounded:
            file.free(file.position - MOST_BYTES)
        if self._brief:
            file.close()


def read_end(path: str, most: int) -> str:
    """Return the last `most` bytes of a log file as text; empty if it is gone."""
    return read_text(path, max(LogFile(path).size() - most, 0))
