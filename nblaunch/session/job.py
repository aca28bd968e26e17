"""One job of a worker group: what is known of it, its values, and its end.

Everything here happens on the hub's thread; `state` is an immutable snapshot that any thread may read,
`ended` an event that any thread may wait for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from nblaunch._protocol import (
    Asked,
    CellJob,
    Dispatch,
    Exited,
    FailureRecord,
    Message,
    Phase,
    Printed,
    Raised,
    Returned,
    ScriptJob,
)
from nblaunch._reports import HangReport
from nblaunch._state import RunState, State, advance, looked_at
from nblaunch.job import shared
from nblaunch.session.inquiry import Inquiry
from nblaunch.session.rank_logs import Logs
from nblaunch.session.shown import EVERYTHING, Shown


class Job:
    """A job that has been given to a group, or is about to be."""

    def __init__(
        self,
        dispatches: Mapping[int | None, Dispatch],
        state: RunState,
        *,
        aside: bool = False,
        shown: Shown = EVERYTHING,
    ) -> None:
        """Begin with `state`, in which nothing has happened; of one `aside` nobody sees the result.

        `dispatches` has what each rank is sent; None stands for those that it does not name.
        """
        self.aside = aside
        self.shown = shown
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
        self.dispatched = False
        self.arrived: set[int] = set()
        """Ranks on which all of the payload has arrived."""
        self.whole: Callable[[], None] = lambda: None
        """Called when it has arrived on every rank, and before any of them begins."""
        self.interrupted = False
        self.settle_at: float | None = None
        self.settled = False
        self.open = False
        """Whether a rank has returned while NCCL had operations that had not ended."""
        self.inquiry: Inquiry | None = None
        """Where the ranks were then."""
        self.unmatched = False
        """Whether these operations wait for a rank that has returned without them."""

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

    @property
    def succeeded(self) -> bool:
        """Whether every rank has a value."""
        return all(rank.state is State.SUCCEEDED for rank in self.state.ranks.values())

    def has_outcome(self, rank: int) -> bool:
        """Whether there is nothing more to wait for from a rank."""
        known = self.state.ranks.get(rank)
        return known is None or known.state.final or self.ended.is_set()

    def take_value(self, message: Returned) -> Returned | Raised | None:
        """Map a value while its rank still holds it; return what is to be folded for it."""
        if self.ended.is_set():
            return None
        self.open = self.open or message.open
        try:
            self.values[message.rank] = shared.get(message.value, private=False)
        except (FileNotFoundError, ProcessLookupError):
            return None  # the process is gone: its exit says so, and came first
        except Exception as error:  # noqa: BLE001 - no descriptor left, no memory: the rank waits to be told
            failure = FailureRecord(
                type=f"{type(error).__module__}.{type(error).__qualname__}",
                message=f"the notebook could not take the value over: {error}",
                time=time.time(),
                phase=Phase.VALUE,
            )
            return Raised(rank=message.rank, failure=failure, offsets=message.offsets)
        return message

    def fold(self, message: Message) -> None:
        """Take a message into account; after the end only what warns of a rank that left badly."""
        if isinstance(message, Printed) and not self.shown.shows(self._local(message.rank), message.stream):
            return  # it is in the rank's files, and from there in the result
        before = self.state
        after = advance(before, message)
        if not self.ended.is_set():
            self.state = after
        elif isinstance(message, Exited) and message.rank in after.ranks:
            warning = after.ranks[message.rank].warning
            if warning and warning != before.ranks[message.rank].warning:
                self.late.append(warning)

    def _local(self, rank: int) -> int:
        """Return a rank's number on its node: the agent's word, since a virtual local rank is always 0."""
        known = self.logs.get(self.state.attempt.number, {}).get(rank)
        return known.worker.local_rank if known is not None else self.state.ranks[rank].local_rank

    def keep(self, report: HangReport) -> None:
        """Keep a report of where the ranks are."""
        self.state = looked_at(self.state, report)

    def begin_again(self) -> None:
        """Forget what the attempt before this one has left undone."""
        self.settle_at, self.settled, self.dispatched = None, False, False
        self.open, self.inquiry, self.unmatched = False, None, False
        self.values = {}
