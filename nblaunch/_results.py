"""What callers get: a run's `RunResult`, its `Handle` in the background, a session's status."""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import errno
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nblaunch._errors import NblaunchError, RunFailedError, RunPreemptedError
from nblaunch._help import FailureKind
from nblaunch._metrics import Metrics
from nblaunch.insight.run_report import Report
from nblaunch.protocol.client import ClientRecord, Event, SessionRecord
from nblaunch.protocol.messages import EngineState, EngineStatus, FrameRecord, HeldMemory, MemoryUse, Phase
from nblaunch.protocol.reports import (
    HangReport,
    awaited_nodes,
    by_host,
    format_ranks,
    nearest_frame,
    place,
    plural,
    ranks_on,
)
from nblaunch.protocol.state import RunState, State
from nblaunch.protocol.transcript import Display

if TYPE_CHECKING:
    from nblaunch.insight.profile import Profile


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why one rank failed: `rank`, on the host `node`, at `time` (seconds since the epoch), in `phase`.

    `exception` is the original where it could be pickled, else None; `type` its qualified name, `message` its
    text, `traceback` as Python prints it, `frames` those of the user's code, innermost last. `shown` is the
    traceback as IPython shows it, in colours, with the lines around.
    `exitcode` is torchelastic's: negative for a signal, 1 for a raise, n for `sys.exit(n)`; `signal` is the
    signal's name (`"SIGKILL"`), or None. `last_output` are the last lines that the rank printed.
    `reason` is the failure in one line, with the user's own line where there is one. `consequence_of` is the
    rank whose failure explains this one, or None. `memory` is what the rank held when it ran out of memory,
    the ten largest parts; empty for other failures. `kind` names what has happened (`"killed"`), as that of
    the error does; None for an exception of the user's own code.

    >>> result = nblaunch.run(train, nproc=2, check=False)                 # doctest: +SKIP
    >>> result.root_cause.rank, result.root_cause.reason                   # doctest: +SKIP
    (1, 'ValueError: no data for rank 1 (cell line 4)')
    """

    rank: int
    exception: BaseException | None
    type: str
    message: str
    traceback: str
    frames: tuple[FrameRecord, ...]
    exitcode: int
    signal: str | None
    time: float
    phase: Phase
    consequence_of: int | None = None
    last_output: str = ""
    shown: str = field(default="", repr=False)
    reason: str = field(default="", repr=False)
    node: str = ""
    memory: tuple[HeldMemory, ...] = ()
    kind: FailureKind | None = None

    @property
    def frame(self) -> FrameRecord | None:
        """The innermost frame of the notebook, else of a file that is no installed library's."""
        return nearest_frame(self.frames)

    @property
    def where(self) -> str:
        """The user's own line: `cell line 4`."""
        return place(self.frame) if self.frame is not None else ""


_PIECE = 1 << 20


def read_text(path: str, start: int = 0, end: int | None = None) -> str:
    """Return the text of a log file between two offsets; empty if it is gone.

    Where the file has lost its beginning, the first line says how much of this text that was.
    """
    if start != end:
        with contextlib.suppress(OSError):
            return "".join(pieces(path, start, end))
    return ""


def pieces(path: str, start: int, end: int | None = None) -> Iterator[str]:
    """Yield the text that `read_text` returns; raise `OSError` if the file is gone."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with Path(path).open("rb") as file:
        fd = file.fileno()
        there = os.fstat(fd).st_size
        end = there if end is None else min(end, there)
        while start < end:
            kept = _kept_from(fd, start, end)
            data = os.pread(fd, min(_PIECE, end - kept), kept)
            after = kept + len(data)
            if kept > start:
                # The first line has lost its beginning, too.
                data = data[data.find(b"\n") + 1 :]
                yield f"[{after - len(data) - start:,} bytes before this are no longer kept]\n"
            yield decoder.decode(data)
            start = after if after > kept else end
    yield decoder.decode(b"", final=True)


def _kept_from(file: int, start: int, end: int) -> int:
    """Return where the text begins that a log file still has: what was before is a hole."""
    try:
        return min(os.lseek(file, start, os.SEEK_DATA), end)
    except OSError as error:
        return end if error.errno == errno.ENXIO else start


class LogText:
    """A long text that stays in the file where a rank wrote it until it is asked for."""

    def __init__(self, path: str, start: int, end: int, keep: object) -> None:
        """`keep` removes the file when it is collected."""
        self._path, self._start, self._end, self._keep = path, start, end, keep

    def __str__(self) -> str:
        """Read the text, as `read_text` does. Raises `FileNotFoundError` if its file has been removed."""
        try:
            return "".join(pieces(self._path, self._start, self._end))
        except FileNotFoundError:
            msg = (
                f"what a rank printed ({(self._end - self._start) / 1e6:.0f} MB) was kept in {self._path}, "
                "which has been removed. Read it while log_dir is there."
            )
            raise FileNotFoundError(msg) from None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the text itself."""
        return str, (str(self),)


class _PrintedText:
    """An attribute whose value is a text, or a `LogText`, which is read at each access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else str(vars(instance)[self._name])

    def __set__(self, instance: object, value: str | LogText) -> None:
        vars(instance)[self._name] = value


@dataclass(frozen=True)
class RankResult:
    """One rank's part of a run. Times are seconds since the epoch, as `time.time()` gives them.

    `rank` is its number in the world, `local_rank` that on its host, `node` the host, `device` what torch
    calls its device (`"cuda:1"`), `pid` its process. `state` is how it ended. `value` is what its job
    returned, None if it failed; `failure` is why, else None. `displays` are its figures and tables, in order.
    `exitcode` is as `RankFailure` has it. `attempt` is the number of the attempt that this is about; the job
    has `started` and `ended` at these times, None where it has not.
    `peak_gpu_memory` is the most bytes that torch had allocated at a time on one GPU during the run, as
    `torch.cuda.max_memory_allocated` counts them; None where the rank did not use CUDA, or died. `memory` is
    what it used of host and device, at its end and at most: see `MemoryUse`. Of a rank that died it is as it
    was measured last, which happens only while a view shows it; else None.
    """

    rank: int
    local_rank: int
    node: str
    device: str
    state: State
    value: Any
    failure: RankFailure | None
    stdout: str
    """What it printed. A long text is read from the rank's log file at each access."""
    stderr: str
    """What it wrote to stderr, as `stdout`."""
    displays: tuple[Display, ...]
    exitcode: int | None
    attempt: int
    started: float | None
    ended: float | None
    pid: int | None
    peak_gpu_memory: int | None = None
    memory: MemoryUse | None = None


# Not in the class: a dataclass would take them for defaults.
setattr(RankResult, "stdout", _PrintedText("stdout"))  # noqa: B010 - for the type checker they are texts
setattr(RankResult, "stderr", _PrintedText("stderr"))  # noqa: B010 - see above


class RankResults:
    """The ranks that took part, by their own numbers; iterates over `RankResult` in rank order."""

    __slots__ = ("_by_rank",)

    def __init__(self, results: Iterable[RankResult]) -> None:
        self._by_rank = {result.rank: result for result in sorted(results, key=lambda each: each.rank)}

    def __getitem__(self, rank: int) -> RankResult:
        """Return the result of `rank`; `KeyError` if it took no part."""
        try:
            return self._by_rank[rank]
        except (KeyError, TypeError):
            msg = f"rank {rank!r} took no part in this run; its ranks are {sorted(self._by_rank)}"
            raise KeyError(msg) from None

    def __iter__(self) -> Iterator[RankResult]:
        """Iterate over the results in rank order."""
        return iter(self._by_rank.values())

    def __len__(self) -> int:
        """Return the number of ranks that took part."""
        return len(self._by_rank)

    def __contains__(self, rank: object) -> bool:
        """Return whether `rank` took part."""
        return rank in self._by_rank

    def keys(self) -> tuple[int, ...]:
        """Return the rank numbers."""
        return tuple(self._by_rank)

    def values(self) -> tuple[RankResult, ...]:
        """Return the results in rank order."""
        return tuple(self._by_rank.values())

    def items(self) -> tuple[tuple[int, RankResult], ...]:
        """Return (rank, result) pairs in rank order."""
        return tuple(self._by_rank.items())

    def __repr__(self) -> str:
        """List the ranks and their states."""
        return f"RankResults({', '.join(f'{each.rank}: {each.state}' for each in self)})"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of the worker group; `number` counts from 0.

    `reason` is why it was begun: `started`, `failure` or `membership`. It had `world_size` ranks, `started`
    and `ended` at these times (seconds since the epoch), with these `failures`, if any. `ranks` are the ranks
    as this attempt left them, each with its output and its times.
    """

    number: int
    world_size: int
    reason: str
    failures: tuple[RankFailure, ...]
    started: float
    ended: float | None
    ranks: RankResults = field(default_factory=lambda: RankResults(()), repr=False)


@dataclass(frozen=True, eq=False)
class RunResult:
    """What came back from a run: one value per rank, or failures.

    `result[rank]` is that rank's value, or raises that rank's own error; `len(result)` the number of
    ranks that took part; iterating gives `values`, in rank order. `result[rank]` and `result.ranks[rank]`
    raise `KeyError` for a rank that took no part.

    `ranks` has a `RankResult` for each rank that took part, by its own number. `world_size` is the size of
    the worker group, `backend` that of the default process group (`"gloo"`, `"cpu:gloo,cuda:nccl"`). `title`
    names what ran. `failures` are those of the last attempt, the root cause first, then by time; `attempts`
    are all attempts, the oldest first.

    >>> result = nblaunch.run(lambda: 7, nproc=2)          # doctest: +SKIP
    >>> result[0], result.values, result.ok                 # doctest: +SKIP
    (7, [7, 7], True)
    """

    ranks: RankResults
    world_size: int
    backend: str = ""
    failures: tuple[RankFailure, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    title: str = ""
    hang_report: HangReport | None = None
    """Where the ranks were at the run's timeout, its interrupt or its last hang."""
    preempted: str = ""
    """Why the engine took the nodes back before the run ended; empty if it did not."""
    metrics: Metrics = field(default_factory=Metrics, repr=False)
    """What ranks have logged: a table with the columns rank, step, time, name and value."""
    _warnings: tuple[str, ...] = ()
    _late: Iterable[str] = field(default_factory=list, repr=False)
    """Grows when a rank's process ends badly after it has sent its value."""
    _log_dir: Path | None = None
    _events: EventLog = field(default_factory=lambda: EventLog(complete=True), repr=False)
    _state: RunState | None = field(default=None, repr=False)
    _keep: object = field(default=None, repr=False)
    """Has the logs of the run kept until the last result that refers to them is collected."""
    profile: Profile | None = field(default=None, repr=False)
    """What the ranks did, and who waited for whom: a `Profile`; None without `--profile`."""
    _reporter: Callable[[RunResult], Report] | Report | None = field(default=None, repr=False)
    """Makes the report, or is the one that was made for a pickle; None for a result that no run has made."""

    @property
    def ok(self) -> bool:
        """Whether every rank succeeded."""
        return all(each.state is State.SUCCEEDED for each in self.ranks)

    @property
    def values(self) -> list[Any]:
        """The values in rank order, None where a rank has none."""
        return [each.value for each in self.ranks]

    @property
    def root_cause(self) -> RankFailure | None:
        """The first failure in time that is not a consequence of another; None if no rank failed."""
        return self.failures[0] if self.failures else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong without failing the run; may still grow while the ranks exit."""
        return (*self._warnings, *self._late)

    @property
    def events(self) -> tuple[Event, ...]:
        """What torchelastic recorded, oldest first; waits until the ranks have exited, 5 s at most.

        In a session: from its start to the end of this run.

        >>> [event.name for event in result.events]                # doctest: +SKIP
        ['torchelastic.worker.status.START', ..., 'torchelastic.worker.status.SUCCEEDED']
        """
        return self._events.all()

    @property
    def log_dir(self) -> Path | None:
        """The run's own directory of logs, or None once it is removed."""
        return self._log_dir if self._log_dir is not None and self._log_dir.is_dir() else None

    @property
    def state(self) -> RunState:
        """The folded messages of the run, which views draw."""
        if self._state is None:
            msg = "this result was unpickled; the state of its run was not kept"
            raise AttributeError(msg)
        return self._state

    def report(self) -> Report:
        """Return what the run was and how it ended, in one document for a program, or for a reader.

        It is made anew at each call, and names the root cause with rank, line and reason; `Report` lists what
        else it has. It is at most 16,000 characters (4,000 tokens) long, and holds no value of `--env`.
        Raises `NblaunchError` for a result that no run has made.

        >>> error.result.report().to_dict()["root_cause"]["line"]              # doctest: +SKIP
        14
        """
        if self._reporter is None:
            msg = "this result was not made by a run, so there is nothing to report of it"
            raise NblaunchError(msg)
        return self._reporter if isinstance(self._reporter, Report) else self._reporter(self)

    @property
    def devices(self) -> dict[int, str]:
        """Each rank's device: `{0: "cuda:0", 1: "cuda:1"}`."""
        return {each.rank: each.device for each in self.ranks}

    def __getitem__(self, rank: int) -> Any:
        """Return the value of `rank`; raise that rank's own error if it failed."""
        result = self.ranks[rank]
        if result.state is State.SUCCEEDED:
            return result.value
        if result.failure is not None and result.failure.exception is not None:
            raise result.failure.exception
        why = result.failure.reason if result.failure else f"its state is {result.state}"
        msg = f"result[{rank}]: rank {rank} has no value: {why}"
        root = result.failure or self.root_cause
        raise RunFailedError(msg, result=self, root_cause=root, kind=root.kind if root else None)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the values, in rank order."""
        return iter(self.values)

    def __len__(self) -> int:
        """Return the number of ranks that took part."""
        return len(self.ranks)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the values and the output, neither the live state nor the log directory; and the report."""
        kept = {**self.__dict__, "_late": list(self._late), "_state": None, "_keep": None}
        # Made now: what it is made of is not pickled, and holds what must not travel (`--env`).
        return kept | {"_reporter": None if self._reporter is None else self.report()}

    def __repr__(self) -> str:
        """Return one line without times or pids."""
        state = "ok" if self.ok else "preempted" if self.preempted else "failed"
        root = self.root_cause
        hosts = {each.rank: each.node for each in self.ranks if each.node}
        several = hosts if len(set(hosts.values())) > 1 else {}
        why = f", root cause: {ranks_on([root.rank], several)}: {root.reason}" if root else ""
        return f"<RunResult of {len(self)} ranks, {state}{why}>"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: its result, and the error to raise once the result is where the user can reach it."""

    result: RunResult
    error: BaseException | None

    def unwrap(self, *, check: bool = True) -> RunResult:
        """Return the result, or raise the error; without `check` a failed run is no error."""
        if self.error is not None and (
            check or not isinstance(self.error, RunFailedError | RunPreemptedError)
        ):
            raise self.error
        return self.result


Perform = Callable[[threading.Event | None], Outcome]
"""Runs a job that is captured and placed; setting the event interrupts it, from any thread."""


class Handle:
    """A run in the background: what `Session.submit` returns, and a cell with `--background`.

    `result(timeout)` waits and returns its `RunResult`, or raises what the run raised; `done()` says whether
    it is over; `cancel()` interrupts it. It can be awaited: `result = await handle`.

    >>> handle = session.submit(train, args=(model,))                      # doctest: +SKIP
    >>> handle.done()                                                      # doctest: +SKIP
    False
    >>> handle.result(timeout=60).values                                   # doctest: +SKIP
    [0.31, 0.29]
    """

    def __init__(self, perform: Perform, *, claim: Callable[[], object] = lambda: None) -> None:
        """Start `perform` on a thread of its own.

        `claim` is called first, on that thread. What it takes, `perform` releases; what it raises is raised
        here.
        """
        self._future: Future[RunResult] = Future()
        self._cancelled = threading.Event()
        claimed: Future[None] = Future()
        # In the context of the cell that began it: what it shows belongs there, not to a later cell.
        context = contextvars.copy_context()
        arguments = (self._run, perform, claim, claimed)
        thread = threading.Thread(target=context.run, args=arguments, name="nblaunch-background", daemon=True)
        try:
            thread.start()
            # The thread claims: no interrupt can come between that and the `finally` that releases.
            claimed.result()
        except BaseException:
            # Nobody gets this handle: what has begun must not go on without one.
            self._cancelled.set()
            raise

    def _run(self, perform: Perform, claim: Callable[[], object], claimed: Future[None]) -> None:
        try:
            claim()
        except BaseException as refusal:  # noqa: BLE001 - the caller raises it
            claimed.set_exception(refusal)
            return
        claimed.set_result(None)
        try:
            outcome = perform(self._cancelled)
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._future.set_exception(error)
            return
        # Not raised here: its traceback would keep this frame, and with it all that the job was given.
        if outcome.error is not None:
            self._future.set_exception(outcome.error)
        else:
            self._future.set_result(outcome.result)

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the end, at most `timeout` seconds, and return the result; raise what the run raised.

        Raises `TimeoutError` if the run is not over by then; it goes on.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether the run is over."""
        return self._future.done()

    def cancel(self) -> None:
        """Interrupt the run, as the stop button does; returns at once."""
        self._cancelled.set()

    def __await__(self) -> Generator[object, None, RunResult]:
        """Wait without blocking the event loop."""
        import asyncio

        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        """Return the result or the error, shortened, once there is one."""
        if not self.done():
            return "<Handle of a run that goes on>"
        error = self._future.exception()
        return f"<Handle: {error!r:.200}>" if error is not None else f"<Handle: {self._future.result()!r}>"


# A session, as `Session.status` and `%distributed status` show it.


_RANKS_LISTED = 16
"""Above this, ranks in the same state share one line."""
_DEVICES_NAMED = 8


class SessionInfo(SessionRecord, frozen=True, kw_only=True):
    """A session of this user on this machine, as `nblaunch.sessions()` finds it by its `name`.

    It has `world_size` ranks, whose default process group has this `backend`. `kernel` is the pid of the
    process that started the session, `notebook` that process's notebook; a `detached` session outlives it.
    `pid` is the runtime's. `started` and `running_since` are in seconds since the epoch. `running` is the
    title of the running job, empty if there is none. `ranks` has a `RankStatus` for each, and `asking`,
    `memory`, `devices` and `hosts` are taken from these. `client` is the pid of the process that gives the
    session jobs, None if there is none; if no process is attached at all, the session ends in `linger_left`
    seconds. `engine` is what the engine reported last about the nodes, None without an engine. `problem` says
    why the runtime could not be asked for all of this; empty if it could.

    >>> [each.name for each in nblaunch.sessions() if each.detached]       # doctest: +SKIP
    ['train']
    """

    kernel: int
    pid: int
    notebook: str = ""
    problem: str = ""

    @property
    def asking(self) -> tuple[int, ...]:
        """The ranks that wait for input from the user."""
        return tuple(each.rank for each in self.ranks if each.asks is not None)

    @property
    def memory(self) -> int | None:
        """The ranks' private memory in bytes; None where it is not measured."""
        memory = [each.memory for each in self.ranks if each.memory is not None]
        return sum(memory) if memory else None

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that the ranks use."""
        return tuple(dict.fromkeys(each.device for each in self.ranks if each.device))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that the ranks run on."""
        return tuple(dict.fromkeys(each.node for each in self.ranks if each.node))

    def __str__(self) -> str:
        """Return one line."""
        return sessions_table([self])

    @property
    def _columns(self) -> tuple[str, ...]:
        engines = () if self.engine is None else self.engine.hosts
        on = f" on {len(self.hosts)} hosts" if len(self.hosts) > 1 and not engines else ""
        ranks = [f"{self.world_size} ranks ({self.backend}){on}"] if not self.problem else []
        named, others = self.devices[:_DEVICES_NAMED], len(self.devices) - _DEVICES_NAMED
        ranks += [*named, *([f"{others} more devices"] if others > 0 else [])]
        if self.memory is not None:
            ranks.append(f"{self.memory / 1e6:.0f} MB")
        nodes = "" if self.engine is None else nodes_line(self.engine, time.time())
        if self.engine is not None and self.engine.state.early:
            idle = nodes
        else:
            idle, ranks = "idle", [*ranks, *filter(None, [nodes])]
        doing = self.problem or (f"runs {self.running}" if self.running else idle)
        if self.running_since is not None:
            doing += f" for {_span(time.time() - self.running_since)}"
        if self.asking:
            doing += f", {format_ranks(self.asking)} {'asks' if len(self.asking) == 1 else 'ask'} for input"
        if self.linger_left is not None:
            doing += f", ends in {_span(self.linger_left)} unless it is used"
        since = time.strftime("since %b %d %H:%M", time.localtime(self.started))
        of = Path(self.notebook).name or f"kernel {self.kernel}"
        return self.name, "detached" * self.detached, ", ".join(ranks), doing, f"{since}, {of}"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - IPython's own protocol
        """Show the line in a notebook."""
        printer.text(str(self))


def sessions_table(sessions: Iterable[SessionInfo]) -> str:
    """Return a line for each session, in columns."""
    # Without characters that a terminal obeys: a job's title may have any.
    rows = [
        [
            "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cell)
            for cell in row
        ]
        for row in (each._columns for each in sessions)  # noqa: SLF001 - this module's own
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _span(seconds: float) -> str:
    if seconds >= 7200:  # noqa: PLR2004 - two hours
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(seconds, 0):.0f} s"  # noqa: PLR2004 - two minutes


class SessionStatus(SessionRecord, frozen=True):
    """What the session `name` is doing, with its `world_size`, its `backend` and a row for each of `ranks`.

    `attempt` counts how often its worker group was formed with other ranks, `engine` is what the engine
    reported last about the nodes.

    >>> print(session.status())                                            # doctest: +SKIP
    session 'default': 2 ranks, gloo
      rank 0: idle, cpu, 18 MB
      rank 1: idle, cpu, 17 MB
    """

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - IPython's own protocol
        """Show the lines in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        """Return a line for the session, and one for each rank."""
        lines = [f"session {self.name!r}: {self.world_size} ranks, {self.backend}"]
        if self.engine is not None:
            lines.append(f"  {nodes_line(self.engine, time.time())}")
        hosts = {each.rank: each.node for each in self.ranks if each.node}
        hosts = hosts if len(set(hosts.values())) > 1 else {}
        if len(self.ranks) > _RANKS_LISTED:
            doing = {each.rank: ", ".join(filter(None, (each.state, each.waiting))) for each in self.ranks}
            return "\n".join([*lines, *(f"  {line}" for line in (*by_host(doing, hosts), *self._used()))])
        ranks = (f"  {ranks_on([each.rank], hosts)}: {each.words}" for each in self.ranks)
        return "\n".join([*lines, *ranks])

    def _used(self) -> list[str]:
        """Return one line for what all ranks use together, none if it is not measured."""
        memory = [each.memory for each in self.ranks if each.memory is not None]
        cpu = [each.cpu for each in self.ranks if each.cpu is not None]
        parts = (
            [f"{sum(memory) / 1e9:.1f} GB of memory, {max(memory) / 1e6:.0f} MB at most"] if memory else []
        )
        parts += [f"CPU {sum(cpu):.0f} %"] if cpu else []
        return [f"together: {', '.join(parts)}"] if parts else []


# What an engine reports about the nodes that it places, in one line.

_SHORT_SECONDS = 600.0
_DAY_SECONDS = 72_000.0
_HOSTS_NAMED = 4


def nodes_line(status: EngineStatus, now: float) -> str:
    """Describe the wait for nodes, or the nodes and the time left; `now` is `time.time()`.

    >>> nodes_line(EngineStatus(engine="slurm", state=EngineState.RUNNING, id="3", hosts=("hA",), ends=1620),
    ... 0)
    'slurm job 3 on hA, 27 min left'
    """
    if status.state.early:
        return awaited_nodes(status, _expected(status.starts, now))
    job = f"{status.engine} job {status.id}" if status.id else status.engine
    if status.state is EngineState.ENDED:
        return f"{job} has ended" + (f" ({status.reason})" if status.reason else "")
    named, others = status.hosts[:_HOSTS_NAMED], len(status.hosts) - _HOSTS_NAMED
    hosts = ",".join(named) + (f" and {others} more" if others > 0 else "")
    where = f" on {hosts}" if hosts else f", {plural(status.joined, 'node')}" if status.joined else ""
    if status.state is EngineState.ENDING:
        return f"{job}{where}, ending"
    return f"{job}{where}" + (f", {_span(status.ends - now)} left" if status.ends is not None else "")


def time_is_short(status: EngineStatus, now: float) -> bool:
    """Return whether the engine takes the nodes back in less than ten minutes."""
    return not status.state.early and status.ends is not None and status.ends - now < _SHORT_SECONDS


def _expected(starts: float | None, now: float) -> str:
    """Return the expected start in words: `start about 18:50`; empty if it is not known, or past."""
    if starts is None or starts < now:
        return ""
    form = "%H:%M" if starts - now < _DAY_SECONDS else "%b %d %H:%M"
    return time.strftime(f"start about {form}", time.localtime(starts))


# torchelastic's own events of a run.

_END_SECONDS = 5.0


class EventLog:
    """The events of one worker group; any thread may add to it, and read it."""

    def __init__(self, events: tuple[Event, ...] = (), *, complete: bool = False) -> None:
        """`complete`: no others will follow."""
        self._events = list(events)
        self._complete = threading.Event()
        if complete:
            self._complete.set()

    def add(self, event: Event) -> None:
        """Append an event."""
        self._events.append(event)

    def close(self) -> None:
        """Mark the log as complete."""
        self._complete.set()

    def so_far(self) -> tuple[Event, ...]:
        """Return the events recorded by now."""
        return tuple(self._events)

    def all(self) -> tuple[Event, ...]:
        """Return the complete log: values arrive before the ranks have exited, which takes a moment."""
        self._complete.wait(_END_SECONDS)
        return self.so_far()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the events."""
        return functools.partial(EventLog, complete=True), (self.all(),)


def held_by(name: str, by: ClientRecord, *, in_notebook: bool = True) -> str:
    """Return the text of the error for a session to which another client gives jobs."""
    notebook = f", notebook {by.notebook}" if by.notebook else ""
    since = time.strftime("%H:%M", time.localtime(by.since))
    take = f"nblaunch.Session.attach({name!r}, take=True)"
    if in_notebook:
        take = f"%distributed attach {name} --take"
    return (
        f"session {name!r} takes jobs from {by.name} (pid {by.pid} on {by.node}{notebook}) since {since}. "
        f"Take it over with {take}."
    )


# What stands in the notebook for a value that stayed on its rank.


class NotSentError(NblaunchError, TypeError, AttributeError):
    """A value that stayed on its rank was used; the message says why it stayed, and how to get it.

    An `AttributeError` too: `hasattr` and variable explorers ask any object for any attribute.
    """

    kind = FailureKind.VALUE_NOT_SENT


class NotSent:
    """Stands for a value that was shown and not sent.

    Its text is the value's. `reason` says why the value is not here and how to get it; any other use of it
    raises `NotSentError` with that reason. It is equal to itself alone, and can be pickled.
    """

    __slots__ = ("_text", "reason", "type_name")

    _text: str
    reason: str
    type_name: str

    def __init__(self, text: str, type_name: str, reason: str) -> None:
        """`text` is the value's repr."""
        for name, given in (("_text", text), ("type_name", type_name), ("reason", reason)):
            object.__setattr__(self, name, given)

    def __repr__(self) -> str:
        """Return the value's own repr."""
        return self._text or f"<{self.type_name}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001 - IPython's protocol
        """Write the value's own repr as it is (an IPython protocol)."""
        for number, line in enumerate(repr(self).split("\n")):
            if number:
                printer.break_()
            printer.text(line)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what is here: the text and the reason."""
        return NotSent, (self._text, self.type_name, self.reason)

    def __getattr__(self, name: str) -> Any:
        """Raise; to protocols, which ask for underscored names, a plain `AttributeError`."""
        raise AttributeError(name) if name.startswith("_") else NotSentError(self.reason)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: NotSent, *_: object, **__: object) -> NoReturn:
        raise NotSentError(self.reason)

    refuse.__name__ = name
    refuse.__qualname__ = f"NotSent.{name}"
    refuse.__doc__ = "Raise `NotSentError`."
    return refuse


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OTHERS = (
    "call getitem setitem delitem iter next len contains reversed bool int float complex index round neg pos "
    "abs invert lt le gt ge enter exit await aiter anext setattr delattr"
)

_WORDS = re.compile(r"\w+")
_sided = (f"{side}{each}" for each in _WORDS.findall(_BINARY) for side in ("", "r", "i"))
for _name in (*_sided, *_WORDS.findall(_OTHERS)):
    setattr(NotSent, f"__{_name}__", _refusing(f"__{_name}__"))
