"""The ranks' output: the files that torchelastic writes it to, and reading them as they grow."""

from __future__ import annotations

import codecs
import contextlib
import inspect
import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import tail_logfile

from nblaunch._errors import LaunchError, OptionError
from nblaunch.protocol.messages import Offsets, Printed, Stream

GROUP = "torchrun.logs_specs"
"""The entry points among which torchrun looks for `--logs-specs`."""

_LOOK_SECONDS = 0.1


def find(name: str | None) -> type[LogsSpecs]:
    """Return the class behind an entry point of the group, torch's own for None. Raises `OptionError`."""
    if name is None:
        return DefaultLogsSpecs
    known = metadata.entry_points(group=GROUP)
    if name not in known.names:
        there = f"there are: {', '.join(sorted(known.names))}" if known.names else "there is none"
        msg = (
            f"logs_specs={name!r} was asked for, but no installed package has an entry point of that name "
            f"in the group {GROUP}; {there}. Leave it out for torchrun's own layout."
        )
        raise OptionError(msg)
    try:
        found: type[LogsSpecs] = known[name].load()
    except Exception as error:
        msg = (
            f"logs_specs={name!r} was asked for, but it cannot be loaded: {type(error).__name__}: {error}. "
            "Mend the package that has it, or leave it out."
        )
        raise OptionError(msg) from error
    return found


def check_filters(filters: Sequence[str]) -> None:
    """Raise `OptionError` where this torch cannot filter lines."""
    if filters and "log_line_filter" not in inspect.signature(tail_logfile).parameters:
        msg = (
            "duplicate_stdout_filters= or duplicate_stderr_filters= was asked for, but torch "
            f"{torch.__version__} cannot filter lines of logs. Use a newer torch (2.13 can), or leave it out."
        )
        raise OptionError(msg)


class KeptLogs(LogsSpecs):
    """A `LogsSpecs` in which every stream has a file, and that remembers the files."""

    def __init__(self, name: str | None, log_dir: str) -> None:
        """Make an object of the class behind `name`, as torchrun does. Raises `OptionError`."""
        super().__init__(log_dir)
        self._name = name
        try:
            self._chosen = find(name)(
                log_dir=log_dir, redirects=Std.ALL, tee=Std.NONE, local_ranks_filter=None
            )
        except (TypeError, ValueError) as error:
            msg = (
                f"logs_specs={name!r} was asked for, but it cannot be made: {type(error).__name__}: {error}. "
                "torchrun gives it log_dir, redirects, tee and local_ranks_filter, and so do we."
            )
            raise OptionError(msg) from error
        self._files: LogsDest | None = None

    @property
    def root_log_dir(self) -> str:
        """Return the directory of all files."""
        return str(self._chosen.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of an attempt. Raises `LaunchError` where a stream has none."""
        files = self._files = self._chosen.reify(envs)
        for stream, paths in (("stdout", files.stdouts), ("stderr", files.stderrs)):
            without = [rank for rank in envs if not paths.get(rank)]
            if without:
                msg = (
                    f"logs_specs={self._name!r} was asked for, but it names no file for {stream} of local "
                    f"rank {without[0]}, and what a rank prints is read from files. It is given "
                    "redirects=Std.ALL, and must follow it."
                )
                raise LaunchError(msg, phase="fork")
        return files

    def filtered(self, stream: str) -> str:
        """Return the file for lines of all ranks that pass a filter: `filtered_stdout.log` of the attempt."""
        files = self._files
        assert files is not None  # noqa: S101 - asked after the ranks have been started
        own: str = getattr(files, f"filtered_{stream}", "")
        return own or os.fspath(Path(files.stdouts[0]).parents[1] / f"filtered_{stream}.log")


class FilteredLines:
    """Copies lines with certain words from the ranks' logs to a file, as torchrun's tee does.

    torch's own function runs on daemon threads: torch's thread pool would keep a notebook from ending while
    its ranks live.
    """

    def __init__(
        self, path: str, logs: Mapping[int, str], role: str, words: Sequence[str], thread: str
    ) -> None:
        """Begin; `logs` are the files by local rank."""
        self._file: TextIO = open(path, "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
        self._finished = threading.Event()
        follow: Any = tail_logfile
        self._threads = [
            threading.Thread(
                target=follow,
                name=f"{thread}-filter-{local_rank}",
                kwargs={
                    "header": f"[{role}{local_rank}]:",
                    "file": log,
                    "dst": self._file,
                    "finished": self._finished,
                    "interval_sec": _LOOK_SECONDS,
                    "log_line_filter": lambda line: any(word in line for word in words),
                },
                daemon=True,
            )
            for local_rank, log in logs.items()
        ]
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """Copy the remaining lines, and close the file."""
        self._finished.set()
        for each in self._threads:
            each.join()
        self._file.close()


# Reading what ranks print: the tail of two growing files, in the order that the rank has sent.


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
