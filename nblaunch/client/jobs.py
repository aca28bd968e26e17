"""A job as its client sees it: the fold of what the runtime sends of it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from nblaunch._errors import NblaunchError
from nblaunch._results import EventLog
from nblaunch.client.line import SentRequest
from nblaunch.options.streams import OutputFilter
from nblaunch.protocol.client import (
    Event,
    EventsOf,
    Given,
    JobEnd,
    JobEnded,
    JobRefreshed,
    LateOf,
    PayloadKept,
    Question,
    RankLogFiles,
    ReleaseJob,
    Remark,
    Stale,
)
from nblaunch.protocol.messages import Asked
from nblaunch.protocol.state import Message, RunState, advance, decode_state

if TYPE_CHECKING:
    from nblaunch.client.local import Runtime


class JobView:
    """A job that this process has given, or watches; used by the thread that waits for it."""

    def __init__(
        self,
        number: int,
        state: RunState,
        *,
        output: OutputFilter,
        kept: Callable[[], None] = lambda: None,
        private: bool = False,
    ) -> None:
        """`kept` is called when the payload has arrived on all ranks, and they keep it.

        With `private` the runtime keeps the values for others: what is written to them stays here.
        """
        self.private = private
        self.number = number
        self.state = state
        self.output = output
        self.end: JobEnd | None = None
        self.request: SentRequest[Given | Stale] | None = None
        """The request by which this process has given it."""
        self.questions: deque[Asked] = deque()
        """Questions of ranks to the user, the oldest first."""
        self._kept = kept

    def fold(self, message: Message) -> None:
        """Fold a message as the runtime has folded it."""
        self.state = advance(self.state, message)

    def take(self, event: object) -> None:
        """Take an event; those of other jobs change nothing."""
        match event:
            case PayloadKept(job=self.number):
                self._kept()
            case Question(job=self.number, asked=asked):
                self.questions.append(asked)
            case JobRefreshed(job=self.number, state=state, questions=questions):
                self.state, self.questions = decode_state(state), deque(questions)
            case JobEnded(job=self.number, end=end):
                self.end = end
            case Remark(text=text):
                print(text, flush=True)  # noqa: T201 - the run waits for the nodes that this is about
            case _:
                pass

    @property
    def error(self) -> BaseException | None:
        """What broke the group."""
        return None if self.end is None or self.end.error is None else self.end.error.error()

    @property
    def launch_failure(self) -> tuple[str, str] | None:
        """The phase that exceeded its limit, and what happened."""
        return None if self.end is None else self.end.launch_failure

    @property
    def interrupted(self) -> bool:
        """Whether the user has interrupted it."""
        return self.end is not None and self.end.interrupted

    @property
    def logs(self) -> Mapping[int, Mapping[int, RankLogFiles]]:
        """The log files, by attempt and rank."""
        if self.end is None:
            return {}
        return {attempt: {each.rank: each for each in files} for attempt, files in self.end.logs.items()}


class KeptJob:
    """What the runtime keeps of a job as long as a result refers to this: logs, events, late warnings."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        """Have the runtime release the job when this object is collected."""
        self._runtime = runtime
        self._number = number
        self._late: list[str] = []
        self._complete = False
        self._finalizer = weakref.finalize(self, runtime.note, ReleaseJob(job=number, pid=os.getpid()))
        # A program that ends stops the runtime, which removes all logs.
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[str]:
        """Yield the warnings since the end of the job."""
        if not self._complete and self._runtime.is_of(os.getpid()):
            try:
                answer = self._runtime.ask(LateOf(job=self._number))
            except NblaunchError:
                self._complete = True  # the runtime has ended
            else:
                self._late, self._complete = list(answer.texts), answer.complete
        return iter(self._late)


class RemoteEvents(EventLog):
    """torchelastic's events of a job, which the runtime has once the agent has ended."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        """Ask for them when they are looked at; the runtime has those of the last released jobs, too."""
        super().__init__()
        self._runtime: Runtime | None = runtime
        self._number = number

    def all(self) -> tuple[Event, ...]:
        """Return the complete log: values arrive before the ranks have exited, which takes a moment."""
        runtime = self._runtime
        if runtime is not None and runtime.is_of(os.getpid()):
            # Where it cannot answer, the runtime has ended, or this was one of many runs.
            with contextlib.suppress(NblaunchError), runtime.line() as line:
                answer = line.ask(EventsOf(job=self._number))
                self._events = list(answer.events)
            self._runtime = None
        return tuple(self._events)
