"""Reading what ranks print: the tail of two growing files, in the order that the rank has sent."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from nblaunch.protocol.messages import Offsets, Printed, Stream

_STEP = 1 << 20


@dataclass(slots=True)
class _File:
    """One log file, read so far up to `position`."""

    path: str
    position: int = 0
    seen: int = 0
    file: io.FileIO | None = None
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def size(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self.path).st_size
        return 0

    def read(self, end: int) -> Iterator[str]:
        if end <= self.position:
            return
        with contextlib.suppress(OSError):
            if self.file is None:
                self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed by `LogTail.close`
            fd = self.file.fileno()
            while data := os.pread(fd, min(_STEP, end - self.position), self.position):
                self.position += len(data)
                yield self.decoder.decode(data)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class LogTail:
    """The output of one rank, as `Printed` messages."""

    def __init__(self, rank: int, stdout: str, stderr: str) -> None:
        self._rank = rank
        self._files = {Stream.STDOUT: _File(stdout), Stream.STDERR: _File(stderr)}

    def poll(self) -> Iterator[Printed]:
        """Yield the text that was there at the last call.

        Not the newest: messages with its order may be under way.
        """
        for stream, file in self._files.items():
            end, file.seen = file.seen, file.size()
            yield from self._read(stream, end)

    def up_to(self, offsets: Offsets) -> Iterator[Printed]:
        """Yield the text before a moment in the rank's life."""
        yield from self._read(Stream.STDOUT, offsets.stdout)
        yield from self._read(Stream.STDERR, offsets.stderr)

    def rest(self) -> Iterator[Printed]:
        """Yield all text that is left."""
        for stream, file in self._files.items():
            yield from self._read(stream, file.size())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def skip_to(self, offsets: Offsets) -> None:
        """Skip the text before a moment."""
        self._files[Stream.STDOUT].position = offsets.stdout
        self._files[Stream.STDERR].position = offsets.stderr

    def _read(self, stream: Stream, end: int) -> Iterator[Printed]:
        file = self._files[stream]
        for text in file.read(end):
            if text:
                yield Printed(rank=self._rank, stream=stream, text=text, end=file.position)


def read_text(path: str, start: int = 0, end: int | None = None) -> str:
    """Return the text of a log file between two offsets; empty if it is gone."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        return file.read(-1 if end is None else max(end - start, 0)).decode("utf-8", "replace")
    return ""


def read_end(path: str, most: int) -> str:
    """Return the last `most` bytes of a log file as text; empty if it is gone."""
    return read_text(path, max(_File(path).size() - most, 0))
