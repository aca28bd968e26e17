"""One job of a worker group: what is known of it, its values, its output, and its end.

Everything here happens on the hub's thread; `Job.state` is an immutable snapshot that any thread may read,
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
    """What `--redirects`, `--tee` and `--local-ranks-filter` say, all with torchrun's meaning."""

    redirects: str = "0"
    tee: str = "0"
    local_ranks: frozenset[int] | None = None

    @classmethod
    def of(cls, options: LaunchOptions) -> OutputFilter:
        """Return what these options say."""
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


# The log files of a group's ranks, attempt by attempt: what is new in them, and which part is the job's.


@dataclass(frozen=True, slots=True)
class Logs:
    """Where one rank of one attempt wrote, and from where to where its job did."""

    worker: Worker
    started: Offsets = field(default_factory=Offsets)
    ended: Offsets | None = None


class RankLogs:
    """Used on the hub's thread only."""

    def __init__(self) -> None:
        """Begin without any."""
        self.attempts: dict[int, dict[int, Logs]] = {}
        self._present: dict[int, Logs] = {}
        self._tails: dict[int, LogTail] = {}

    def known(self, ranks: int) -> bool:
        """Whether the files of the present attempt's `ranks` are known."""
        return len(self._tails) >= ranks

    def begin_job(self, attempt: int) -> dict[int, dict[int, Logs]]:
        """Return where the output of a job that begins now will be noted, attempt by attempt."""
        self._present = {rank: Logs(logs.worker) for rank, logs in self._present.items()}
        self.attempts = {attempt: self._present} if self._present else {}
        return self.attempts

    def begin(self, attempt: int, workers: tuple[Worker, ...]) -> None:
        """Take note of an attempt's processes and their files."""
        self.close()
        self._present = self.attempts[attempt] = {worker.rank: Logs(worker) for worker in workers}
        self._tails = {worker.rank: LogTail(worker.rank, worker.stdout, worker.stderr) for worker in workers}

    def extend(self, workers: tuple[Worker, ...]) -> None:
        """Take note of more processes of the same attempt: another node's."""
        for worker in workers:
            self._present[worker.rank] = Logs(worker)
            self._tails[worker.rank] = LogTail(worker.rank, worker.stdout, worker.stderr)

    def stderr_of(self, rank: int) -> str:
        """Return the path of what a rank prints to stderr; empty if it is not known here."""
        known = self._present.get(rank)
        return known.worker.stderr if known is not None else ""

    def close(self) -> None:
        """Close the files of the present attempt."""
        for tail in self._tails.values():
            tail.close()
        self._tails, self._present = {}, {}

    def before(self, message: FromRank) -> Iterator[Printed]:
        """Yield what the rank had printed when it sent `message`; note where its job begins and ends."""
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
        """Yield what ranks whose job has begun have printed since."""
        for rank, tail in self._tails.items():
            if rank in ranks and ranks[rank].started is not None:
                yield from tail.poll()

    def rest(self, rank: int) -> Iterator[Printed]:
        """Yield all that a rank that is gone has printed."""
        tail = self._tails.get(rank)
        if tail is not None:
            yield from tail.rest()

    def rest_of_all(self) -> Iterator[Printed]:
        """Yield all that has been printed."""
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
        """Begin with `state`, in which nothing has happened; of one `aside` nobody sees the result.

        `dispatches` has what each rank is sent; None stands for those that it does not name.
        """
        self.internal = internal
        self.output = output
        self.dispatch = dispatches[None]
        self._dispatches = dispatches
        self.state = state
        self.values: dict[int, tuple[memoryview, ...]] = {}
        self.logs: Mapping[int, Mapping[int, Logs]] = {}
        """Attempt -> rank -> where the output is."""
        self.error: BaseException | None = None
        self.launch_failure: tuple[str, str] | None = None
        self.late: list[str] = []
        """Warnings that came when the job had ended already."""
        self.questions: deque[Asked] = deque()
        """What ranks want to be told by the user, the oldest first."""
        self.ended = threading.Event()
        self.whole: Callable[[], None] = lambda: None
        """Called when the payload has arrived on every rank, and before any of them begins."""
        self.interrupted = False

    @property
    def titles(self) -> dict[str, str]:
        """Return what the reader calls the files that this job's code was compiled under."""
        titles = {filename: title for filename, (title, _) in self.dispatch.sources.items()}
        job = self.dispatch.job
        if isinstance(job, CellJob):
            titles[job.filename] = job.title
        elif isinstance(job, ScriptJob) and job.file:
            titles[job.file] = job.title
        return titles

    def dispatch_to(self, rank: int) -> Dispatch:
        """Return what a rank is sent."""
        return self._dispatches.get(rank, self.dispatch)

    def take_value(self, message: Returned) -> Returned | Raised | None:
        """Map a value while its rank still holds it; return what is to be folded for it."""
        if self.ended.is_set():
            return None
        try:
            self.values[message.rank] = shared_memory.get(message.value, private=False)
        except (FileNotFoundError, ProcessLookupError):
            return None  # the process is gone: its exit says so, and came first
        except Exception as error:  # noqa: BLE001 - no descriptor left, no memory: the rank waits to be told
            failure = value_lost(error, time.time())
            return Raised(rank=message.rank, failure=failure, offsets=message.offsets)
        return message

    def shows(self, printed: Printed) -> bool:
        """Whether output is shown; what is not is in the rank's files, and from there in the result."""
        # The agent's word, since a virtual local rank is always 0.
        known = self.logs.get(self.state.attempt.number, {}).get(printed.rank)
        rank = self.state.ranks.get(printed.rank)
        if rank is None:
            return False  # it takes no part
        local_rank = known.worker.local_rank if known is not None else rank.local_rank
        return self.output.shows(local_rank, printed.stream)

    def notice(self, text: str) -> None:
        """Show something with the result; only before the job is given to a group."""
        self.state = advance(self.state, Noticed(text=text))

    def keep(self, report: HangReport) -> None:
        """Keep a report of where the ranks are; only where the group does not."""
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
