"""One job of a worker group: its state, its values, its output, and its end.

Everything here runs on the hub's thread. `Job.state` is an immutable snapshot that any thread may read, and
`Job.ended` an event that any thread may wait for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from nblaunch.capture import shared_memory
from nblaunch.diagnose.failures import value_lost
from nblaunch.elastic.logs import LogTail
from nblaunch.elastic.settings import Worker
from nblaunch.options.kinds import streams_of
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import (
    Asked,
    CellJob,
    Cleared,
    Dispatch,
    Displayed,
    FromRank,
    Noticed,
    Offsets,
    Printed,
    Raised,
    Returned,
    RunEnded,
    ScriptJob,
    Started,
    Stream,
    Switched,
    Waiting,
)
from nblaunch.protocol.reports import HangReport
from nblaunch.protocol.state import RankState, RunState, advance, looked_at

# Which of the ranks' output is shown; all of it is kept in files, and in the result.

_BITS = {Stream.STDOUT: 1, Stream.STDERR: 2}


@dataclass(frozen=True, slots=True)
class OutputFilter:
    """The options `--redirects`, `--tee` and `--local-ranks-filter`, all with torchrun's meaning."""

    redirects: str = "0"
    tee: str = "0"
    local_ranks: frozenset[int] | None = None

    @classmethod
    def of(cls, options: LaunchOptions) -> OutputFilter:
        """Return the filter that these options describe."""
        some = options.local_ranks_filter
        return cls(options.redirects, options.tee, None if some is None else frozenset(some))

    def shows(self, local_rank: int, stream: Stream) -> bool:
        """Whether a stream of a local rank is shown.

        >>> OutputFilter(redirects="3", tee="0:1").shows(0, Stream.STDOUT)
        True
        """
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        bit = _BITS[stream]
        return not streams_of(self.redirects, local_rank) & bit or bool(
            streams_of(self.tee, local_rank) & bit
        )


EVERYTHING = OutputFilter()


# The log files of a group's ranks, attempt by attempt: new text, and which part of it is the job's.


@dataclass(frozen=True, slots=True)
class Logs:
    """The log files of one rank in one attempt, and which part of them its job wrote."""

    worker: Worker
    started: Offsets = field(default_factory=Offsets)
    ended: Offsets | None = None


class RankLogs:
    """The log files of all ranks of a group; used on the hub's thread only."""

    def __init__(self) -> None:
        self.attempts: dict[int, dict[int, Logs]] = {}
        self._present: dict[int, Logs] = {}
        self._tails: dict[int, LogTail] = {}

    def begin_job(self, attempt: int) -> dict[int, dict[int, Logs]]:
        """Return the logs of a job that begins now, by attempt and rank; they are updated from now on."""
        self._present = {rank: Logs(logs.worker) for rank, logs in self._present.items()}
        self.attempts = {attempt: self._present} if self._present else {}
        return self.attempts

    def begin(self, attempt: int, workers: tuple[Worker, ...]) -> None:
        """Follow the files of an attempt's processes."""
        self.close()
        self._present = self.attempts[attempt] = {}
        self.extend(workers)

    def extend(self, workers: tuple[Worker, ...]) -> None:
        """Follow the files of more processes of the same attempt: another node's."""
        for worker in workers:
            self._present[worker.rank] = Logs(worker)
            self._tails[worker.rank] = LogTail(worker.rank, worker.stdout, worker.stderr)

    def stderr_of(self, rank: int) -> str:
        """Return the path of a rank's stderr; empty if it is not known."""
        known = self._present.get(rank)
        return known.worker.stderr if known is not None else ""

    def close(self) -> None:
        """Close the files of the present attempt."""
        for tail in self._tails.values():
            tail.close()
        self._tails, self._present = {}, {}

    def before(self, message: FromRank) -> Iterator[Printed]:
        """Yield the output that precedes `message`; keep the offsets where the rank's job begins and ends."""
        tail, known = self._tails.get(message.rank), self._present.get(message.rank)
        if tail is None or known is None:
            return
        match message:
            case Started(offsets=offsets):
                # What a rank prints before its job (gloo's greeting) is not the job's output.
                tail.skip_to(offsets)
                self._present[message.rank] = Logs(known.worker, offsets, known.ended)
            case Switched(moments=moments):
                for offsets in moments:
                    yield from tail.up_to(offsets)
            case Displayed(offsets=offsets) | Cleared(offsets=offsets) | Asked(offsets=offsets):
                yield from tail.up_to(offsets)
            case Returned(offsets=offsets) | Raised(offsets=offsets):
                self._present[message.rank] = Logs(known.worker, known.started, offsets)
                yield from tail.up_to(offsets)
            case _:
                pass

    def news(self, ranks: Mapping[int, RankState]) -> Iterator[Printed]:
        """Yield the new output of ranks whose job has begun."""
        for rank, tail in self._tails.items():
            if rank in ranks and ranks[rank].started is not None:
                yield from tail.poll()

    def rest(self, rank: int) -> Iterator[Printed]:
        """Yield the remaining output of a rank that is gone."""
        tail = self._tails.get(rank)
        if tail is not None:
            yield from tail.rest()

    def rest_of_all(self) -> Iterator[Printed]:
        """Yield the remaining output of all ranks."""
        for rank in self._tails:
            yield from self.rest(rank)


# The job.


class Job:
    """A job that has been given to a group, or is about to be."""

    def __init__(
        self,
        dispatches: Mapping[int | None, Dispatch],
        state: RunState,
        *,
        internal: bool = False,
        output: OutputFilter = EVERYTHING,
    ) -> None:
        """`state` is the initial run state; the result of an `internal` job is never shown.

        `dispatches` are the messages to the ranks; that of None is for all that have none of their own.
        """
        self.internal = internal
        self.output = output
        self.dispatch = dispatches[None]
        self._dispatches = dispatches
        self.state = state
        self.values: dict[int, tuple[memoryview, ...]] = {}
        self.logs: Mapping[int, Mapping[int, Logs]] = {}
        """The log files, by attempt and rank."""
        self.error: BaseException | None = None
        self.launch_failure: tuple[str, str] | None = None
        self.late: list[str] = []
        """Warnings since the end of the job."""
        self.questions: deque[Asked] = deque()
        """Questions of ranks to the user, the oldest first."""
        self.ended = threading.Event()
        self.whole: Callable[[], None] = lambda: None
        """Called when the payload is whole on every rank, before any of them begins."""
        self.interrupted = False

    @property
    def titles(self) -> dict[str, str]:
        """The titles of the files that this job's code was compiled under, as the user knows them."""
        titles = {filename: title for filename, (title, _) in self.dispatch.sources.items()}
        job = self.dispatch.job
        if isinstance(job, CellJob):
            titles[job.filename] = job.title
        elif isinstance(job, ScriptJob) and job.file:
            titles[job.file] = job.title
        return titles

    def dispatch_to(self, rank: int) -> Dispatch:
        """Return the message to a rank."""
        return self._dispatches.get(rank, self.dispatch)

    def take_value(self, message: Returned) -> Returned | Raised | None:
        """Map a value while its rank still holds it; return the message to fold."""
        if self.ended.is_set():
            return None
        try:
            self.values[message.rank] = shared_memory.get(message.value, private=False)
        except (FileNotFoundError, ProcessLookupError):
            return None  # the process is gone: its exit says so, and came first
        except Exception as error:  # noqa: BLE001 - no descriptor or memory left: the rank waits for an answer
            failure = value_lost(error, time.time())
            return Raised(rank=message.rank, failure=failure, offsets=message.offsets)
        return message

    def shows(self, printed: Printed) -> bool:
        """Whether output is shown; all of it is in the rank's files, and in the result."""
        # As the agent counts: a virtual local rank is always 0.
        known = self.logs.get(self.state.attempt.number, {}).get(printed.rank)
        rank = self.state.ranks.get(printed.rank)
        if rank is None:
            return False  # it takes no part
        local_rank = known.worker.local_rank if known is not None else rank.local_rank
        return self.output.shows(local_rank, printed.stream)

    def notice(self, text: str) -> None:
        """Show a text with the result; only before the job is given to a group."""
        self.state = advance(self.state, Noticed(text=text))

    def keep(self, report: HangReport) -> None:
        """Keep a report of where the ranks are; only for a job that the group does not run."""
        self.state = looked_at(self.state, report)

    def end(self, time: float) -> None:
        """End the job as it is now: its result can be made."""
        if self.ended.is_set():
            return
        if self.state.doing:
            self.state = advance(self.state, Waiting())
        if not self.state.finished:
            self.state = advance(self.state, RunEnded(time=time, stopped=self.error is None))
        self.ended.set()
