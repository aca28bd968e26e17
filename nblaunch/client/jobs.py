"""A job as its client has it: what ranks run, the fold of what the runtime sends of it, and its end."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from nblaunch._errors import NblaunchError
from nblaunch._results import EventLog
from nblaunch.capture.capture import Captured
from nblaunch.client.knowledge import Delivery, KnowledgeView
from nblaunch.client.line import ClientLine, SentRequest
from nblaunch.client.local import Runtime
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import (
    Event,
    EventsOf,
    Given,
    JobEnd,
    JobEnded,
    JobRefreshed,
    LateOf,
    PayloadKept,
    Placement,
    Question,
    RankLogFiles,
    ReleaseJob,
    Remark,
    Stale,
)
from nblaunch.protocol.messages import (
    Asked,
    CellJob,
    FunctionJob,
    Noticed,
    Objects,
    PullJob,
    PushJob,
    ScriptJob,
)
from nblaunch.protocol.state import Message, RunState, advance, decode_state


@dataclass(frozen=True, slots=True)
class RankPayload:
    """What `ranks` are sent with a job, and all others that have no payload of their own."""

    captured: Captured
    ranks: frozenset[int] = frozenset()
    objects: Objects | None = None


@dataclass(frozen=True, eq=False)
class JobRanks:
    """Ranks that take jobs: a session's, or those of one run, which its job starts."""

    runtime: Runtime
    key: str
    """What the runtime calls them."""
    notices: tuple[str, ...] = ()
    """About their place, for the result of a run."""


@dataclass(eq=False, kw_only=True)
class ClientJob:
    """A job that this process submits, or watches; used by one thread at a time.

    What ranks run is decided before it is submitted; where that was refused because the ranks are others by
    then, it begins again, under another number.
    """

    title: str
    options: LaunchOptions
    placement: Placement
    work: CellJob | FunctionJob | ScriptJob | PushJob | PullJob = field(default_factory=FunctionJob)
    subset: tuple[int, ...] | None = None
    """The ranks that take part; None: all."""
    payloads: tuple[RankPayload, ...] = ()
    """One for all ranks, or one for each group of ranks that know the same; without any, nothing is sent."""
    internal: bool = False
    """Its result is never shown. Notices about the ranks are reported with the next job that is shown."""
    brief: bool = False
    """The next job waits for this one and is not refused: the user does not know of it."""
    look: bool = False
    """It only looks into a rank, which a client that watches may do too."""
    notices: tuple[str, ...] = ()

    # What a session's ranks know of the notebook, and what they know once they have this.
    deliveries: tuple[tuple[KnowledgeView, Delivery], ...] = ()
    captured_for: tuple[int, int] | None = None
    """The attempt, and the number of the session's jobs before this one; None: captured for any ranks."""
    capture_again: Callable[[ClientJob], object] = lambda _: None
    """Captures once more, for ranks that have other things by now."""
    arrived: Callable[[], object] = lambda: None
    """Called once the payloads have arrived on all ranks, and they keep them."""

    # How it is submitted.
    ranks: JobRanks
    line: ClientLine = field(init=False)
    attempt: int | None = None
    """The attempt that they have to be of, if that matters."""
    others: Callable[[object], None] = lambda _: None
    """Takes the events that are not the job's."""
    watching: Callable[[], bool] = lambda: False
    """Whether this process only watches it: another client submits jobs by now, or has submitted this one."""
    private: bool = False
    """Whether the runtime keeps values for other clients: what is written to them stays here."""

    # What has come of it.
    number: int = field(init=False)
    state: RunState = field(init=False)
    end: JobEnd | None = None
    request: SentRequest[Given | Stale] | None = None
    """The request by which this process has submitted it."""
    questions: deque[Asked] = field(default_factory=deque)
    """Questions of ranks to the user, the oldest first."""

    @property
    def backend(self) -> str:
        """Return the backend of the ranks' default process group, "" where none is formed."""
        return self.placement.backend if self.options.init_process_group else ""

    def begin(self) -> None:
        """Begin with a new number and nothing folded but the notices."""
        self.number, self.request = self.ranks.runtime.number(), None
        self.state = RunState.fresh(self.placement.nproc, self.subset, time=time.time())
        captured = (text for each in self.payloads for text in each.captured.notices)
        for text in dict.fromkeys((*self.notices, *captured)):
            self.fold(Noticed(text=text))

    def fold(self, message: Message) -> None:
        """Fold a message as the runtime has folded it."""
        self.state = advance(self.state, message)

    def take(self, event: object) -> None:
        """Take an event; those of other jobs change nothing."""
        match event:
            case PayloadKept(job=self.number):
                self.arrived()
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
