"""The output of a session's job, printed in a shell: `python -m nblaunch logs`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nblaunch._errors import NblaunchError
from nblaunch._results import pieces
from nblaunch.client.directory import find_open
from nblaunch.client.line import ClientLine
from nblaunch.client.local import Runtime, local
from nblaunch.client.result import place_in_file
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import client as wire
from nblaunch.protocol import messages
from nblaunch.protocol.reports import plural
from nblaunch.protocol.state import NOTICE_CHARACTERS, RunState, decode_folded, decode_state
from nblaunch.protocol.transcript import Display, Entry, Text, Transcript
from nblaunch.view.output import display_text
from nblaunch.view.terminal_view import Held
from nblaunch.view.text import prefixed

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
            with runtime.line() as line:
                _print_job(line, chosen.number, follow=follow)
    except NblaunchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`) has what it wants: what is left is flushed to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _chosen(runtime: Runtime, session: wire.SessionRecord, job: int | None) -> wire.JobRecord:
    known = runtime.ask(wire.ListJobs(session=session.session), _ANSWER_SECONDS).jobs
    if not known:
        msg = f"session {session.name!r} has run no job yet."
        raise NblaunchError(msg)
    if job is None:
        return known[-1]
    for each in known:
        if each.number == job:
            return each
    numbers = ", ".join(str(each.number) for each in known)
    msg = f"session {session.name!r} has no job {job}; it has {numbers}."
    raise NblaunchError(msg)


def _print_job(line: ClientLine, job: int, *, follow: bool) -> None:
    snapshot = line.ask(wire.WatchJob(job=job))
    goes_on = follow and snapshot.end is None
    if not goes_on:
        # While this prints, nothing is to be kept for it.
        line.ask(wire.UnwatchJob(job=job))
    output = _Output(snapshot.options)
    try:
        output.catch_up(decode_state(snapshot.state), snapshot.end.logs if snapshot.end else snapshot.logs)
        while goes_on and (frame := line.next()) is not None:
            match frame[2]:
                case wire.JobRefreshed(state=state, logs=files):
                    output.catch_up(decode_state(state), files)
                case wire.JobEnded():
                    goes_on = False
                case bytes() as folded:
                    output.take(decode_folded(folded))
                case event:
                    output.take(event)
    finally:
        output.end()


@dataclass(slots=True)
class _PrintedSoFar:
    """How much of a rank's output in one attempt was printed: a number of displays, and offsets of its files.

    As in its transcript, `clear_output` takes displays back, and with `wait` only once there is more output.
    """

    displays: int = 0
    clears: int = 0
    clear_pending: bool = False
    ends: dict[messages.Stream, int] = field(default_factory=dict)

    def clear(self, *, wait: bool) -> None:
        self.clear_pending = wait
        if not wait:
            self.displays, self.clears = 0, self.clears + 1

    def begin_output(self) -> None:
        if self.clear_pending:
            self.clear(wait=False)


class _Output:
    """Prints the output of ranks, each line with its rank; a line is printed once it is whole."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._attempt = 0
        self._shown: dict[tuple[int, int], _PrintedSoFar] = {}
        """By attempt and rank."""
        self._notices: set[str] = set()
        self._held: dict[tuple[int, messages.Stream], Held] = {}
        self._unwritten: dict[int, int] = {}

    def take(self, message: object) -> None:
        match message:
            case messages.AttemptStarted(number=number):
                self._attempt = max(number, self._attempt)
            case messages.Printed(rank=rank, stream=stream, text=text, end=end):
                self._of(rank).begin_output()
                self._of(rank).ends[stream] = end
                self._write(rank, stream, text)
            case messages.Displayed(rank=rank, data=data, update=False):
                self._of(rank).begin_output()
                self._of(rank).displays += 1
                self._show(rank, Display(data))
            case messages.Cleared(rank=rank, wait=wait):
                self._of(rank).clear(wait=wait)
            case messages.Noticed(text=text):
                self._notice(text)
            case messages.RankNotice(rank=rank, text=text):
                self._notice(f"rank {rank}: {text[:NOTICE_CHARACTERS]}")
            case messages.Unwritten(rank=rank, size=size):
                self._unwritten[rank] = size

    def _of(self, rank: int) -> _PrintedSoFar:
        return self._shown.setdefault((self._attempt, rank), _PrintedSoFar())

    def catch_up(self, state: RunState, logs: Mapping[int, Iterable[wire.RankLogFiles]]) -> None:
        """Print what a job has printed so far, and this has not: at first, and if it was slow to read."""
        for text in state.notices:
            if text not in self._notices:
                self._notice(text)
        for attempt in state.attempts:
            self._attempt = attempt.number
            files = {each.rank: each for each in logs.get(attempt.number, ())}
            for rank, known in attempt.ranks.items():
                self._unwritten[rank] = known.unwritten
                self._catch_up(rank, known.transcript, files.get(rank))

    def _catch_up(self, rank: int, transcript: Transcript, files: wire.RankLogFiles | None) -> None:
        whole = not (transcript.omitted or transcript.omitted_displays or transcript.clears)
        if (self._attempt, rank) not in self._shown and (
            whole
            or files is None
            or not any(Path(place_in_file(files, each)[0]).exists() for each in messages.Stream)
        ):
            self._take_entries(rank, transcript.head)
            lines = max(transcript.omitted_lines, int(transcript.omitted > 0))
            self._left_out(rank, lines, transcript.omitted_displays, "its log is gone")
            self._take_entries(rank, transcript.tail)
        else:
            self._take_files(rank, files)
            self._take_displays(rank, transcript)
        shown = self._of(rank)
        shown.displays = len(transcript.displays) + transcript.omitted_displays
        shown.clears, shown.clear_pending = transcript.clears, transcript.clear_pending
        if files is not None:
            shown.ends = {stream: place_in_file(files, stream)[2] for stream in messages.Stream}

    def _take_files(self, rank: int, files: wire.RankLogFiles | None) -> None:
        for stream in messages.Stream:
            if files is None or not self._options.shows(files.local_rank, stream):
                continue
            path, start, end = place_in_file(files, stream)
            start = max(start, self._of(rank).ends.get(stream, 0))
            if end <= start:
                continue  # of a stream to which nothing is printed there may be no file
            try:
                for text in pieces(path, start, end):
                    self._write(rank, stream, text)
            except FileNotFoundError:
                self._print(rank, messages.Stream.STDERR, f"{stream} left out: its log is gone")

    def _take_displays(self, rank: int, transcript: Transcript) -> None:
        there, shown = transcript.displays, self._of(rank)
        total = len(there) + transcript.omitted_displays
        new = total - shown.displays if transcript.clears == shown.clears else total
        self._left_out(rank, 0, new - len(there), f"the last {len(there)} are kept")
        for display in there[max(len(there) - new, 0) :]:
            self._show(rank, display)

    def _take_entries(self, rank: int, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Text):
                self._write(rank, entry.stream, entry.text)
            else:
                self._show(rank, entry)

    def _left_out(self, rank: int, lines: int, displays: int, why: str) -> None:
        what = [plural(count, word) for count, word in ((lines, "line"), (displays, "display")) if count > 0]
        if what:
            self._print(rank, messages.Stream.STDERR, f"{' and '.join(what)} left out: {why}")

    def end(self) -> None:
        """Print lines that have no end, and what no file has."""
        for (rank, stream), held in self._held.items():
            if held.text.strip():
                self._print(rank, stream, held.text)
        for rank, size in sorted(self._unwritten.items()):
            if size:
                why = "its log is on a full disk"
                self._print(rank, messages.Stream.STDERR, f"{size:,} bytes left out: {why}")

    def _write(self, rank: int, stream: messages.Stream, text: str) -> None:
        finished = self._held.setdefault((rank, stream), Held()).take(text)
        if finished is not None:
            self._print(rank, stream, finished)

    def _show(self, rank: int, display: Display) -> None:
        self._print(rank, messages.Stream.STDOUT, display_text(display))

    def _notice(self, text: str) -> None:
        self._notices.add(text)
        _write_line(messages.Stream.STDERR, text)

    def _print(self, rank: int, stream: messages.Stream, lines: str) -> None:
        _write_line(stream, prefixed((rank,), lines))


def _write_line(stream: messages.Stream, text: str) -> None:
    ours = {messages.Stream.STDOUT: sys.stdout, messages.Stream.STDERR: sys.stderr}[stream]
    ours.write(f"{text}\n")
    ours.flush()
