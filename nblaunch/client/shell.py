"""What a shell shows of a session's jobs: `python -m nblaunch logs`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from nblaunch import _journal
from nblaunch._errors import NblaunchError
from nblaunch._journal import Dropped
from nblaunch._registry import RuntimeEntry
from nblaunch.client.directory import find_open
from nblaunch.client.local import Runtime, local
from nblaunch.protocol import client as wire
from nblaunch.protocol.messages import Displayed, Noticed, Printed, Stream, Unwritten
from nblaunch.protocol.reports import plural
from nblaunch.protocol.state import RunState, decode_folded, decode_state
from nblaunch.protocol.transcript import Entry, Text

_ANSWER_SECONDS = 2.0
_INTERRUPTED = 130


def logs(name: str, *, follow: bool = False, job: int | None = None) -> int:
    """Print what a job of a session has printed: the running one, else the last, or that of number `job`.

    With `follow` this goes on until the job ends, or until the user interrupts it: the job goes on. Returns
    the exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # ranks print any text
    try:
        entry, session = find_open(name)
        with contextlib.closing(local().attached(entry)) as runtime:
            chosen = _chosen(runtime, session, job)
            _print_job(entry, runtime, session.session, chosen, follow=follow)
    except NblaunchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`) has what it wants: what is left is flushed to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _jobs(runtime: Runtime, session: str) -> tuple[wire.JobRecord, ...]:
    answer = runtime.ask(wire.ListJobs(session=session), _ANSWER_SECONDS)
    return answer.jobs


def _chosen(runtime: Runtime, session: wire.SessionRecord, job: int | None) -> wire.JobRecord:
    known = _jobs(runtime, session.session)
    if not known:
        msg = f"session {session.name!r} has run no job yet."
        raise NblaunchError(msg)
    if job is None:
        return known[-1]
    for each in known:
        if each.number == job:
            return each
    numbers = ", ".join(str(each.number) for each in known)
    msg = f"job {job} is none of session {session.name!r}, which has {numbers}."
    raise NblaunchError(msg)


def _print_job(
    entry: RuntimeEntry, runtime: Runtime, session: str, job: wire.JobRecord, *, follow: bool
) -> None:
    root, output = Path(entry.root), _Output()

    def goes_on() -> bool:
        """Whether more may come; a young job has no files yet, and may end without."""
        if _journal.directory_of(root, job.number).exists():
            return entry.keeper.lives
        return any(each.number == job.number and each.ended is None for each in _jobs(runtime, session))

    found = _journal.read(root, job.number)
    frames = _journal.follow(root, job.number, goes_on) if follow and job.ended is None else found.frames
    try:
        for raw in frames:
            output.take(decode_folded(raw))
        if output.any:
            output.name_dropped(_journal.read(root, job.number).dropped)
        else:
            # It has been over for long, or was for a moment only: there is what a view would show.
            answer = runtime.ask(wire.WatchJob(job=job.number))
            output.take_state(decode_state(answer.state))
    finally:
        output.end()


class _Output:
    """Prints the output of ranks, each line with its rank; a line is printed once it is whole."""

    def __init__(self) -> None:
        self.any = False
        """Whether there was any message."""
        self._begun: dict[tuple[int, Stream], str] = {}
        self._unwritten: dict[int, int] = {}

    def take(self, message: object) -> None:
        self.any = True
        match message:
            case Printed(rank=rank, stream=stream, text=text):
                self._write(rank, stream, text)
            case Displayed(rank=rank, data=data, update=False):
                self._show(rank, data)
            case Noticed(text=text):
                self._print(Stream.STDERR, text)
            case Unwritten(rank=rank, size=size):
                self._unwritten[rank] = size
            case _:
                pass

    def take_state(self, state: RunState) -> None:
        for text in state.notices:
            self._print(Stream.STDERR, text)
        for rank, known in state.ranks.items():
            transcript = known.transcript
            self._unwritten[rank] = known.unwritten
            self._take_entries(rank, transcript.head)
            lost = Dropped(
                rank,
                transcript.omitted,
                transcript.omitted_lines,
                transcript.omitted_displays,
                why="only the first and the last output is kept of older jobs",
            )
            if transcript.omitted or transcript.omitted_displays:
                self.name_dropped([lost])
            self._take_entries(rank, transcript.tail)

    def _take_entries(self, rank: int, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Text):
                self._write(rank, entry.stream, entry.text)
            else:
                self._show(rank, entry.data)

    def name_dropped(self, dropped: Iterable[Dropped]) -> None:
        for each in dropped:
            lines = max(each.lines, int(each.characters > 0))
            what = [plural(lines, "line")] if lines else []
            if each.displays:
                what.append(plural(each.displays, "display"))
            if each.points:
                what.append(plural(each.points, "logged number"))
            if what:
                self._print(Stream.STDERR, f"[rank {each.rank}] {' and '.join(what)} left out: {each.why}")

    def end(self) -> None:
        """Print lines that have no end, and what no file has."""
        for rank, stream in list(self._begun):
            self._write(rank, stream, "\n")
        why = "its log is on a full disk"
        for rank, size in sorted(self._unwritten.items()):
            if size:
                self._print(Stream.STDERR, f"[rank {rank}] {size:,} bytes left out: {why}")

    def _write(self, rank: int, stream: Stream, text: str) -> None:
        *lines, rest = (self._begun.pop((rank, stream), "") + text).split("\n")
        for line in lines:
            self._print(stream, f"[rank {rank}] {_final(line)}".rstrip())
        if rest:
            # Of a progress bar, which writes over its line, only the last state is kept.
            self._begun[rank, stream] = rest[rest.rstrip("\r").rfind("\r") + 1 :]

    def _show(self, rank: int, data: Mapping[str, object]) -> None:
        plain = data.get("text/plain")
        text = "".join(plain) if isinstance(plain, list) else plain
        for line in str(text or f"<{', '.join(data)}>").splitlines():
            self._print(Stream.STDOUT, f"[rank {rank}] {line}".rstrip())

    def _print(self, stream: Stream, line: str) -> None:
        ours = {Stream.STDOUT: sys.stdout, Stream.STDERR: sys.stderr}[stream]
        ours.write(f"{line}\n")
        ours.flush()


def _final(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]
