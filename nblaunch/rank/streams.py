"""A rank's standard streams: straight into its log files, and in an order that can be told.

torchelastic has put two files under descriptors 1 and 2. Text goes there with every write, so that
what was printed is there even after SIGKILL; native code and child processes write to the same files.
Two files do not say what came first, so a stream announces (`Switched`) when it takes over.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from nblaunch._protocol import Offsets, Stream

_DESCRIPTORS = {Stream.STDOUT: 1, Stream.STDERR: 2}


def offsets() -> Offsets:
    """Return how much has been written so far, by anybody, to the two files."""
    return Offsets(stdout=_written(1), stderr=_written(2))


def _written(fd: int) -> int:
    try:
        # Not the size: a file that was made larger by truncation is not text.
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return 0


class _Turn:
    """Which stream was written last, and whom to tell when that changes."""

    def __init__(self) -> None:
        self.last = Stream.STDOUT
        self.announce: Callable[[Offsets], None] | None = None

    def take(self, stream: Stream) -> None:
        if stream is not self.last:
            self.last = stream
            if self.announce is not None:
                self.announce(offsets())


_turn = _Turn()


class RankStream(io.TextIOWrapper):
    """A standard stream without a buffer of its own; never fails for a character it cannot encode."""

    def __init__(self, stream: Stream) -> None:
        """Wrap the stream's descriptor."""
        raw = io.FileIO(_DESCRIPTORS[stream], "wb", closefd=False)
        super().__init__(
            raw,  # unbuffered on purpose: write_through goes straight to it
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write through to the file."""
        _turn.take(self._stream)
        try:
            return super().write(text)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.strerror = f"{error.strerror}: the disk that takes what ranks print (TMPDIR, --log-dir)"
            raise


def capture_descriptors() -> None:
    """Put this attempt's log files under descriptors 1 and 2 on macOS, where torchelastic does not."""
    if sys.platform == "darwin":
        directory = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
        for stream, target in _DESCRIPTORS.items():
            file = os.open(directory / f"{stream}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, target)
            os.close(file)


def install(announce: Callable[[Offsets], None]) -> None:
    """Make descriptors 1 and 2 this process's `sys.stdout` and `sys.stderr`."""
    _turn.announce = announce
    for name, stream in (("stdout", Stream.STDOUT), ("stderr", Stream.STDERR)):
        made = RankStream(stream)
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
