"""A rank's standard streams: output goes straight into its log files, input comes from the notebook.

torchelastic has put two files under descriptors 1 and 2. Every write reaches them at once, so that printed
text survives SIGKILL; native code and forked processes write to the same files. Two files do not show which
text came first, so the rank sends `Switched` when one stream takes over from the other.

What a full disk does not take is dropped, and nothing fails: `Unwritten` says how much. What native code and
forked processes write themselves is not counted.

Programs that a rank starts write into pipes, which a thread copies to the files: a shell that opens
/dev/stdout to write would empty the file.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import getpass
import io
import os
import pdb  # noqa: T100 - it is what users of breakpoint() ask for
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from nblaunch.protocol.messages import Answer, Asked, FromRank, Offsets, Stream

_DESCRIPTORS = {Stream.STDOUT: 1, Stream.STDERR: 2}
_LONGEST_HELD = 64 * 1024
_MOST_KEPT = 1024 * 1024
_HELD_SECONDS = 0.05
"""How long a line may wait for its end while other threads write; `print` writes both in one go."""
_CHUNK = 64 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REPORT_SECONDS = 1.0
"""How often a job reports what it has lost, until its end."""
_NOT_THE_USERS = ("IPython.*", "nblaunch.*")


def _written() -> Offsets:
    def position(fd: int) -> int:
        try:
            # Not the size: a file that was made larger by truncation is not text.
            return os.lseek(fd, 0, os.SEEK_CUR)
        except OSError:
            return 0

    return Offsets(stdout=position(1), stderr=position(2))


class _RankOutput:
    """Puts the text of all threads into the two files, line by line, in order."""

    def __init__(self) -> None:
        self.announce: Callable[[Offsets], None] | None = None
        self.report: Callable[[int], None] | None = None
        """Called with how many bytes of this job a full disk has not taken."""
        self.between_jobs = False
        """Whether text of other threads than the main one is kept for the next job."""
        self.main_saves = False
        """Whether then also the main thread's is: it prints what no job has asked for."""
        self._last = Stream.STDOUT
        self.kept: list[tuple[Stream, bytes]] = []
        """What threads have printed since the last job."""
        self._unwritten = self._reported = 0
        self._report_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self._held: dict[tuple[int, Stream], tuple[bytes, float]] = {}
        self._others: set[int] = set()
        self._open: dict[Stream, float] = {}
        self.pipes: dict[Stream, tuple[int, int]] = {}

    def begin_in_child(self) -> None:
        """In a fork: text that other threads hold, and output of programs, is the parent's."""
        self._begin()
        self.announce, self.report, self.between_jobs, self.kept = None, None, False, []

    def write(self, stream: Stream, text: bytes) -> None:
        """Write whole lines; write an unfinished line only if no other thread can break into it."""
        thread, main = threading.get_ident(), threading.main_thread().ident
        if thread != main:
            self._wait_for_line_end(stream)
        with self.lock:
            self.copy_pipes()
            if thread != main:
                self._others.add(thread)
            elif self._others:
                self._others &= {each.ident for each in threading.enumerate()}
            if self._held or self._others:
                text = self._whole_lines(stream, text, thread)
            self._put(stream, text, thread == main)

    def _whole_lines(self, stream: Stream, text: bytes, thread: int) -> bytes:
        """Return what may be written of the text that a thread holds and has added; hold the rest."""
        held, since = self._held.pop((thread, stream), (b"", 0.0))
        if held and time.monotonic() - since > _HELD_SECONDS:
            self._put(stream, held)
            held = b""
        text = held + text
        # A `\r` ends a state of a progress bar; text behind it comes with the next one, or with a flush.
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not self._others or len(text) - end > _LONGEST_HELD:
            end = len(text)
        if end < len(text):
            self._held[thread, stream] = text[end:], time.monotonic()
        return text[:end]

    def _wait_for_line_end(self, stream: Stream) -> None:
        """Give the main thread time to end a line that it began before any other thread had written."""
        while time.monotonic() - self._open.get(stream, 0.0) < _HELD_SECONDS:
            time.sleep(0.001)

    def settle(self) -> None:
        """Write the unfinished lines of this thread, and of threads that are gone or idle."""
        self.copy_pipes()
        if not self._held:
            return
        alive, now = {each.ident for each in threading.enumerate()}, time.monotonic()
        for (thread, stream), (text, since) in list(self._held.items()):
            mine = thread == threading.get_ident()
            if mine or thread not in alive or now - since > _HELD_SECONDS:
                del self._held[thread, stream]
                self._put(stream, text, mine)

    def _put(self, stream: Stream, text: bytes, from_main: bool = False) -> None:  # noqa: FBT001, FBT002 - one caller each
        if not text:
            return
        if self.between_jobs and (self.main_saves or not from_main):
            self.kept.append((stream, text))
            if sum(len(each) for _, each in self.kept) > _MOST_KEPT:
                del self.kept[0]
            return
        if stream is not self._last:
            self._last = stream
            if self.announce is not None:
                self.announce(_written())
        if from_main and not text.endswith(b"\n"):
            self._open[stream] = time.monotonic()
        else:
            self._open.pop(stream, None)
        self.write_all(_DESCRIPTORS[stream], text)

    def write_all(self, fd: int, data: memoryview | bytes) -> None:
        """Write to a file what its disk takes, and count the rest."""
        view: memoryview | bytes = data
        with self.lock:
            try:
                while view:
                    written = os.write(fd, view)
                    view = memoryview(view)[written:] if written < len(view) else b""
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._unwritten += len(view)
                if not self.between_jobs and time.monotonic() >= self._report_at:
                    self._report_unwritten()

    def _report_unwritten(self) -> None:
        if self._unwritten > self._reported and self.report is not None:
            self._report_at = time.monotonic() + _REPORT_SECONDS
            self._reported = self._unwritten
            self.report(self._unwritten)

    def begin_job(self) -> None:
        """Write the text that was kept for this job; from now on threads write to the files."""
        with self.lock:
            self.between_jobs = False
            self._unwritten = self._reported = 0
            self._report_at = 0.0
            kept, self.kept = self.kept, []
            for stream, text in kept:
                self._put(stream, text)

    def end_job(self, *, keep: bool) -> Offsets:
        """Return `offsets()`; with `keep`, text that threads print from now on waits for the next job."""
        with self.lock:
            self.settle()
            if not self.between_jobs:
                self._report_unwritten()
            self.between_jobs = keep
            return _written()

    def offsets(self) -> Offsets:
        with self.lock:
            self.settle()
            return _written()

    def copy_pipes(self) -> None:
        for stream, (reading, _) in self.pipes.items():
            with contextlib.suppress(BlockingIOError):
                while data := os.read(reading, _CHUNK):
                    self._put(stream, data)
                    if len(data) < _CHUNK:
                        break


output = _RankOutput()
os.register_at_fork(after_in_child=output.begin_in_child)


class _RawStream(io.FileIO):
    """The stream below a standard stream, for programs that write bytes."""

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        output.write_all(self.fileno(), view)
        return len(view)


class _RankStream(io.TextIOWrapper):
    """A standard stream without a buffer of its own; never fails for a character it cannot encode.

    Lines of several threads do not run together: while more than one writes, each thread's line is written
    when it ends, or is flushed.
    """

    def __init__(self, stream: Stream) -> None:
        raw = _RawStream(_DESCRIPTORS[stream], "wb", closefd=False)
        super().__init__(
            raw,  # for programs that use `.buffer`; text does not pass through it
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        self._stream = stream

    def write(self, text: str, /) -> int:
        if self.closed or not isinstance(text, str):
            return super().write(text)
        output.write(self._stream, text.encode("utf-8", self.errors or "strict"))
        return len(text)

    def flush(self) -> None:
        with output.lock:
            output.settle()
        super().flush()


def capture_descriptors() -> None:
    """Put this attempt's log files under descriptors 1 and 2 on macOS, where torchelastic does not."""
    if sys.platform == "darwin":
        directory = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
        for stream, target in _DESCRIPTORS.items():
            file = os.open(directory / f"{stream}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, target)
            os.close(file)


def install(announce: Callable[[Offsets], None], report: Callable[[int], None]) -> None:
    output.announce, output.report = announce, report
    for name, stream in (("stdout", Stream.STDOUT), ("stderr", Stream.STDERR)):
        made = _RankStream(stream)
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    _pipe_programs()


def _pipe_programs() -> None:
    popen: Any = subprocess.Popen
    handles = getattr(popen, "_get_handles", None)  # where None becomes "inherit"
    if handles is None:
        return

    def with_pipes(self: object, stdin: Any, stdout: Any, stderr: Any) -> Any:
        if stdout is None or stdout is sys.stdout:
            stdout = _pipe_for(Stream.STDOUT)
        if stderr is None or stderr is sys.stderr:
            stderr = _pipe_for(Stream.STDERR)
        return handles(self, stdin, stdout, stderr)

    ended: Any = getattr(popen, "_handle_exitstatus", None)  # called once the exit status is known

    def with_all_that_it_wrote(self: object, *status: Any, **keywords: Any) -> None:
        ended(self, *status, **keywords)
        with output.lock:
            output.copy_pipes()  # what the rank writes from here on comes after it

    popen._get_handles = with_pipes  # noqa: SLF001 - see above
    if ended is not None:
        popen._handle_exitstatus = with_all_that_it_wrote  # noqa: SLF001 - see above
    os.system = _system


def _pipe_for(stream: Stream) -> int:
    """Return the end of a pipe that a program may write to; earlier text is written first."""
    with output.lock:
        output.settle()
        if stream not in output.pipes:
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            output.pipes[stream] = reading, writing
            name = f"nblaunch-programs-{stream}"
            threading.Thread(target=_copy, args=(reading,), name=name, daemon=True).start()
        return output.pipes[stream][1]


def _copy(reading: int) -> None:
    import select

    waiting = select.poll()
    waiting.register(reading, select.POLLIN)
    while True:
        waiting.poll()
        # Output that cannot be written is lost.
        with contextlib.suppress(OSError), output.lock:
            output.copy_pipes()


def _system(command: str | bytes | os.PathLike[Any]) -> int:
    """Run a command in a subshell as `os.system` does, with its output in a pipe."""
    done = subprocess.run(["/bin/sh", "-c", command], close_fds=False, check=False).returncode  # noqa: S603
    return done << 8 if done >= 0 else -done


# Standard input: `input()`, `getpass()` and debuggers ask the user at the notebook. The main thread waits for
# the answer, which the control thread receives; an interrupt ends the wait.


class Questions:
    """Asks one question after the other."""

    def __init__(self, rank: int, send: Callable[[FromRank], None]) -> None:
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.rank = rank
        self._send = send
        self._number = 0

    def install(self) -> Callable[[Answer], None]:
        """Replace the functions that read from a terminal: a rank has none. Return what takes answers."""
        builtins.input = self.input
        getpass.getpass = self.getpass
        sys.breakpointhook = _breakpoint_hook
        return self._answers.put

    def input(self, prompt: object = "", /) -> str:
        """Return a line that the user types in the notebook. Raises `EOFError` if the notebook cannot ask."""
        return self._ask(str(prompt), password=False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: object) -> str:
        del stream
        return self._ask(prompt, password=True)

    def _ask(self, prompt: str, *, password: bool) -> str:
        self._number += 1
        self._send(
            Asked(
                rank=self.rank,
                number=self._number,
                prompt=prompt.encode("utf-8", "replace").decode(),
                password=password,
                offsets=output.offsets(),
            )
        )
        while (answer := self._answers.get()).number != self._number:
            pass  # it answers a question that was interrupted
        if answer.error:
            raise EOFError(answer.error)
        return answer.text


def _breakpoint_hook(*arguments: Any, **keywords: Any) -> Any:
    """Start a debugger at the line that calls `breakpoint()`."""
    if os.environ.get("PYTHONBREAKPOINT", "pdb.set_trace") not in ("", "pdb.set_trace"):
        return sys.__breakpointhook__(*arguments, **keywords)  # noqa: T100 - as Python itself does
    _debugger().set_trace(sys._getframe(1))  # noqa: SLF001 - as pdb itself does
    return None


def post_mortem(trace: TracebackType) -> None:
    debugger = _debugger()
    debugger.reset()
    debugger.interaction(None, trace)


def _debugger() -> pdb.Pdb:
    # Without a SIGINT handler of its own: an interrupt ends the run, and asks no further question.
    return pdb.Pdb(nosigint=True, skip=_NOT_THE_USERS)
