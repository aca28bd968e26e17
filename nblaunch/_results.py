"""What a run gives back: every rank's value, failure and output."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from nblaunch._errors import NblaunchError, RunFailedError
from nblaunch.protocol.messages import FrameRecord, Phase
from nblaunch.protocol.reports import HangReport, nearest_frame, place
from nblaunch.protocol.state import RunState, State
from nblaunch.protocol.transcript import Display


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why one rank failed.

    `exception` is the original where it could be pickled, else None; `type` its qualified name.
    `exitcode` is torchelastic's: negative for a signal, 1 for a raise, n for `sys.exit(n)`.
    `reason` is the failure in one line, with the user's own line where there is one. `consequence_of` is the
    rank whose failure explains this one, or None. `shown` is the traceback as IPython shows it, in colours,
    with the lines around.
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

    @property
    def frame(self) -> FrameRecord | None:
        """The innermost frame of the notebook, else of a file that is no installed library's."""
        return nearest_frame(self.frames)

    @property
    def where(self) -> str:
        """The user's own line: `cell line 4`."""
        return place(self.frame) if self.frame is not None else ""


class LogText:
    """A long text that stays in the file where a rank wrote it until it is asked for."""

    def __init__(self, path: str, start: int, end: int, keep: object) -> None:
        """Know where it is; `keep` is what removes the file when nobody refers to it."""
        self._path, self._start, self._end, self._keep = path, start, end, keep

    def __str__(self) -> str:
        """Read the text. Raises `FileNotFoundError` if its directory has been removed."""
        try:
            with Path(self._path).open("rb") as file:
                file.seek(self._start)
                return file.read(self._end - self._start).decode("utf-8", "replace")
        except FileNotFoundError:
            msg = (
                f"what a rank printed ({(self._end - self._start) / 1e6:.0f} MB) was kept in {self._path}, "
                "which has been removed. Read it while log_dir is there."
            )
            raise FileNotFoundError(msg) from None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the text itself."""
        return str, (str(self),)


class _Printed:
    """An attribute whose value is a text, or a `LogText`, which is read each time it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else str(vars(instance)[self._name])

    def __set__(self, instance: object, value: str | LogText) -> None:
        vars(instance)[self._name] = value


@dataclass(frozen=True)
class RankResult:
    """One rank's part of a run. Times are seconds since the epoch, as `time.time()` gives them.

    `stdout` and `stderr` are read from the rank's log files when they are asked for, if they are long.
    `peak_gpu_memory` is the most bytes that torch had allocated at a time on one GPU during the run, as
    `torch.cuda.max_memory_allocated` counts them; None where the rank has not used CUDA, or left no word.
    """

    rank: int
    local_rank: int
    node: str
    device: str
    state: State
    value: Any
    failure: RankFailure | None
    stdout: str
    stderr: str
    displays: tuple[Display, ...]
    exitcode: int | None
    attempt: int
    started: float | None
    ended: float | None
    pid: int | None
    peak_gpu_memory: int | None = None


# Not in the class: a dataclass would take them for defaults.
setattr(RankResult, "stdout", _Printed("stdout"))  # noqa: B010 - for the type checker they are texts
setattr(RankResult, "stderr", _Printed("stderr"))  # noqa: B010 - see above


class RankResults:
    """The ranks that took part, by their own numbers; iterates over `RankResult` in rank order."""

    __slots__ = ("_by_rank",)

    def __init__(self, results: Iterable[RankResult]) -> None:
        """Keep the results, in rank order."""
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
    """One attempt of the worker group; `reason` is started, failure or membership.

    `ranks` are the ranks as this attempt left them, each with its output and its times.
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
    ranks that took part; iterating gives `values`, in rank order.

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
    """Where the ranks were when the run was last looked at: at its timeout, its interrupt, its silence."""
    _warnings: tuple[str, ...] = ()
    _late: list[str] = field(default_factory=list, repr=False)
    """Grows when a rank leaves badly after its value has come."""
    _log_dir: Path | None = None
    _events: EventLog = field(default_factory=lambda: EventLog(complete=True), repr=False)
    _state: RunState | None = field(default=None, repr=False)
    _keep: object = field(default=None, repr=False)
    """Holds the private log directory: it is removed when the last result of it is collected."""

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
        """The first failure in time that is no consequence of another; None if none failed."""
        return self.failures[0] if self.failures else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong without failing the run; ranks may still add to it while they leave."""
        return (*self._warnings, *self._late)

    @property
    def events(self) -> tuple[Event, ...]:
        """What torchelastic has recorded of the ranks, oldest first; waits (5 s at most) until they are gone.

        In a session: since it began, up to the end of this run.

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
        """What views draw: the folded messages of the run."""
        if self._state is None:
            msg = "this result was unpickled; the state of its run was not kept"
            raise AttributeError(msg)
        return self._state

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
        msg = f"result[{rank}] was asked for, but rank {rank} has no value: {why}"
        raise RunFailedError(msg, result=self, root_cause=result.failure or self.root_cause)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the values, in rank order."""
        return iter(self.values)

    def __len__(self) -> int:
        """Return the number of ranks that took part."""
        return len(self.ranks)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the values and the output, not the live state nor the log directory."""
        return {**self.__dict__, "_late": list(self._late), "_state": None, "_keep": None}

    def __repr__(self) -> str:
        """Say how the run ended, in one line without times or pids."""
        state = "ok" if self.ok else "failed"
        root = self.root_cause
        why = f", root cause: rank {root.rank}: {root.reason}" if root else ""
        return f"<RunResult of {len(self)} ranks, {state}{why}>"


# torchelastic's own events of a run: typed, with the JSON as torch writes it.


_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Event:
    """One event as torchelastic records it, such as `torchelastic.worker.status.SUCCEEDED`.

    `source` is `AGENT` or `WORKER`; `timestamp` is when it was recorded, in seconds since the epoch (torch
    leaves its own at 0); `metadata` says which rank, which role, which error; `json` is the text that
    torch's event handlers receive.
    """

    name: str
    source: str
    timestamp: float
    metadata: Mapping[str, Any]
    json: str

    @classmethod
    def parse(cls, text: str, timestamp: float) -> Event:
        """Return the event that torch has written as `text`.

        >>> Event.parse('{"name": "n", "source": "AGENT", "timestamp": 0, "metadata": {}}', 1.5).source
        'AGENT'
        """
        known = json.loads(text)
        return cls(known["name"], known["source"], timestamp, known["metadata"], text)

    @property
    def rank(self) -> int | None:
        """The rank that it is about, None for the group."""
        number: int | None = self.metadata.get("global_rank")
        return number


class EventLog:
    """The events of one worker group; any thread may add to it, and read it."""

    def __init__(self, events: tuple[Event, ...] = (), *, complete: bool = False) -> None:
        """Begin with `events`; a `complete` log gets no others."""
        self._events = list(events)
        self._complete = threading.Event()
        if complete:
            self._complete.set()

    def add(self, event: Event) -> None:
        """Take an event."""
        self._events.append(event)

    def close(self) -> None:
        """Take note that there will be no others."""
        self._complete.set()

    def so_far(self) -> tuple[Event, ...]:
        """Return what there is."""
        return tuple(self._events)

    def all(self) -> tuple[Event, ...]:
        """Return everything: a run's values are here before its ranks have ended, which takes a moment."""
        self._complete.wait(_END_SECONDS)
        return self.so_far()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the events."""
        return _complete_log, (self.all(),)


def _complete_log(events: tuple[Event, ...]) -> EventLog:
    return EventLog(events, complete=True)


# What stands in the notebook for a value that stayed on its rank.


class NotSentError(NblaunchError, TypeError, AttributeError):
    """A value that was not sent is used; the message says why it was not, and how to get it.

    An `AttributeError` too: `hasattr` and variable explorers ask any object for any attribute.
    """


class NotSent:
    """Stands for a value that was shown and not sent.

    Its text is the value's. `reason` says why the value is not here and how to get it; whatever else is
    done with it raises `NotSentError` with that reason. It is equal to itself alone, and can be pickled.
    """

    __slots__ = ("_text", "reason", "type_name")

    _text: str
    reason: str
    type_name: str

    def __init__(self, text: str, type_name: str, reason: str) -> None:
        """Keep the value's repr, its type's name, and why it is not here."""
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
        """Raise; protocols ask for underscored names, and must only learn that there are none."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotSentError(self.reason)


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
