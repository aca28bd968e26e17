"""The jobs of a runtime: who watches each, what is held for it, and how it ends.

Everything here runs on the hub's thread, unless a method says otherwise.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec.structs import replace

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._results import EventLog
from nblaunch.capture.shared_memory import hold
from nblaunch.group.ending import Ending
from nblaunch.group.group import WorkerGroup
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import JobState, Replied
from nblaunch.host.hub import Hub
from nblaunch.host.settings import AgentSettings
from nblaunch.protocol import client as wire
from nblaunch.protocol import messages
from nblaunch.protocol.messages import encode
from nblaunch.protocol.state import Message, RankState, RunState, decode_state
from nblaunch.runtime.connections import ClientConnection
from nblaunch.runtime.metrics_file import MetricsFile

# A job that is over by then is not measured.
_YOUNG_SECONDS = 0.1
_TICK_SECONDS = 0.05
# How long the end of a job waits for the file of its metrics: a disk may hang.
_FILE_SECONDS = 10.0


class RunningJob(Job):
    """A job that a client has submitted, until no result refers to it."""

    def __init__(
        self,
        order: wire.JobOrder,
        owner: ClientConnection,
        given_by: wire.ClientRecord,
        directory: Callable[[], Path],
        tenure: int = 0,
    ) -> None:
        """Hold what the job brings, in `directory()` if need be: after that, its client may go.

        `tenure` is the session's. Raises `OSError` if the client has gone already.
        """
        self._brought = ExitStack()
        self._began = time.monotonic()
        options = order.options
        super().__init__(
            self._held(order, directory, tenure),
            JobState(
                decode_state(order.state),
                internal=order.internal,
                ending=Ending.begin(options, self._began, internal=order.internal),
            ),
            options=options,
            directory=directory,
        )
        self.number = order.number
        self.order = order
        self.given_by = given_by
        self.owner: ClientConnection | None = owner
        """Whose user interrupts it, and answers the questions of its ranks."""
        self.watchers: set[ClientConnection] = {owner}
        self.results = Counter([given_by.pid])
        """By process, how many results refer to it, or will."""
        self._takers: set[ClientConnection] = set()
        """Clients that know of its end, and may map the values."""
        self._values_released = False
        self.started = time.time()
        self.end: wire.JobEnd | None = None
        self._ended_at: float | None = None
        self.private_logs: Path | None = None
        """The directory of its logs, if it has one of its own."""
        self.events = EventLog()
        self.group: WorkerGroup | None = None
        self.when_over: list[Callable[[], None]] = []
        """Called once it has ended."""
        self.ended_with = ""
        """Why it is ended from outside: another client stops the session."""
        self.let_go: Callable[[], None] = lambda: None
        """Called once no result refers to it."""
        self._measured_by: WorkerGroup | None = None
        self._interrupted = False
        """Whether that was before it began."""
        path = options.metrics_file
        self._file = None if path is None or order.internal else MetricsFile(path)
        self._file_due: float | None = None
        self.listeners += [self._publish] if self._file is None else [self._publish, self._file.take]

    def _held(
        self, order: wire.JobOrder, directory: Callable[[], Path], tenure: int
    ) -> dict[int | None, messages.Dispatch]:
        held: dict[messages.Payload, messages.Payload] = {}
        dispatches: dict[int | None, messages.Dispatch] = {}
        try:
            for ranks, dispatch in order.dispatches:
                payload = dispatch.payload
                if payload not in held:
                    kept = hold(payload, directory)
                    self._brought.callback(kept.close)
                    held[payload] = kept.payload
                here = msgspec.structs.replace(
                    dispatch, payload=held[payload], tenure=tenure, query=order.query
                )
                dispatches |= dict.fromkeys(ranks or (None,), here)
        except BaseException:
            self._brought.close()
            raise
        return dispatches

    # --- its course ----------------------------------------------------------------------------------

    def begin(self, hub: Hub, group: WorkerGroup, prepare: messages.Prepare) -> None:
        self.group, self._hub = group, hub
        hub.after_turn.append(self._due)
        if self._interrupted:
            ending = replace(self.known.ending, begun=True, interrupted=True, where=self.state.where)
            self.known = replace(self.known, ending=ending)
            self.finish(time.time())
            if not group.keep:
                group.abandon()
            return
        group.begin(self, prepare)
        group.start()

    def interrupt(self, *, sparing: bool = False) -> None:
        """Interrupt the job; the second time its ranks are ended, unless `sparing` them.

        A query of ranks is interrupted once. From any thread.
        """
        if self.group is None:
            self._interrupted = True
        elif not (self.order.query and self.known.ending.begun):
            self.group.interrupt(self, sparing=sparing or self.order.query)

    def _due(self) -> float:
        """Do what is due after a turn of the hub; return in how many seconds the next is."""
        now = time.monotonic()
        if self._file_due is not None:
            if now >= self._file_due:
                why = f"metrics_file={self.order.options.metrics_file!r}: the disk hangs"
                self._hub.call(lambda: self._file_is_whole(why))
            return max(self._file_due - now, _TICK_SECONDS)
        if self._measured_by is not None or not self.order.usage:
            return math.inf
        if now < self._began + _YOUNG_SECONDS:
            return self._began + _YOUNG_SECONDS - now
        self._measure()
        return _TICK_SECONDS

    def _measure(self) -> None:
        group = self.group
        if group is None:
            return  # it has not begun
        with contextlib.suppress(RuntimeError):  # the system refuses a thread: the next tick asks again
            group.measure(wanted=True)
            self._measured_by = group

    def finish(self, when: float, error: BaseException | None = None) -> None:
        """End the job: its clients are told, and its session can take another one."""
        super().finish(when, error)
        if self._measured_by is not None:
            self._measured_by.measure(wanted=False)
        if self._file is None:
            self._conclude()
        else:
            # Finish the file first: users read it as soon as the result is there.
            file, hub = self._file, self._hub
            self._file_due = time.monotonic() + _FILE_SECONDS
            file.close(lambda: hub.call(lambda: self._file_is_whole(file.problem)))

    def _file_is_whole(self, problem: str) -> None:
        if self.end is None:
            self.late += [problem] if problem else []
            self._conclude()

    def _conclude(self) -> None:
        group, error, early = self.group, self.error, self.known.ending.early
        if self.ended_with:
            error, early = LaunchError(self.ended_with, phase="job", kind=FailureKind.SESSION_ENDED), None
        self.end = wire.JobEnd(
            error=None if error is None else wire.ErrorRecord.of(error),
            launch_failure=self.known.launch_failure,
            interrupted=self.known.ending.interrupted,
            early=early,
            logs={attempt: tuple(ranks.values()) for attempt, ranks in self.logs.items()},
            log_dir="" if group is None else self._own_directory(group.settings),
            backend="" if group is None else group.backend,
        )
        self._ended_at = time.time()
        if group is not None:
            self.events = EventLog(group.events.so_far(), complete=True) if group.keep else group.events
            if self._due in self._hub.after_turn:
                self._hub.after_turn.remove(self._due)
        self._brought.close()
        for connection in self.watchers:
            if connection.behind:
                connection.event(self.refreshed(connection))
            connection.last_event(wire.JobEnded(job=self.number, end=self.end))
        self._takers, self.watchers = self.watchers, set()
        for act in self.when_over:
            act()

    def _own_directory(self, settings: AgentSettings) -> str:
        """Return the directory of the run's logs: below it are attempts, below those ranks and files."""
        if settings.options.logs_specs is not None:
            return str(settings.log_dir)  # what is where below it only the user's class knows
        files = next((each for ranks in self.logs.values() for each in ranks.values()), None)
        return "" if files is None else files.stdout.rsplit(os.sep, 3)[0]

    def drop_values(self) -> None:
        """Close the returned values: clients that watch the job from now on get none."""
        self._values_released = True
        self.release_values()

    def taken_by(self, connection: ClientConnection) -> None:
        """Note that a client has mapped the values; once all clients have, they are released."""
        if connection in self._takers:
            self._takers.discard(connection)
            if not self._takers:
                self.drop_values()

    # --- those who watch -----------------------------------------------------------------------------

    def _publish(self, _: Message, raw: bytes) -> None:
        for connection in self.watchers:
            connection.folded(self.number, raw)

    def payload_kept(self) -> None:
        for connection in self.watchers:
            connection.event(wire.PayloadKept(job=self.number))

    def asked(self, message: messages.Asked) -> None:
        """Ask the owner, where it watches; later it finds the question in its snapshot."""
        there = [each for each in self.watchers if self.is_of(each)]
        if there:
            chosen = self.owner if self.owner in there else there[0]
            chosen.event(wire.Question(job=self.number, asked=message))

    def is_of(self, connection: ClientConnection) -> bool:
        """Whether this client's user may interrupt the job, and answers its questions."""
        return self.owner is not None and self.owner.same_process_as(connection)

    def questions_for(self, connection: ClientConnection) -> tuple[messages.Asked, ...]:
        return self.known.questions if self.is_of(connection) else ()

    def reply(self, rank: int, answer: messages.Answer) -> None:
        if self.group is not None:
            self.group.post(Replied(rank, answer))

    def leave(self, connection: ClientConnection) -> None:
        self.watchers.discard(connection)
        self.taken_by(connection)
        if self.owner is connection:
            self.owner = None

    @property
    def record(self) -> wire.JobRecord:
        return wire.JobRecord(
            number=self.number,
            title=self.order.title,
            state=self.state.summary.value,
            started=self.started,
            ended=self._ended_at,
            given_by=self.given_by.name,
        )

    def snapshot(self, connection: ClientConnection) -> wire.JobSnapshot:
        state = self.state
        if self._values_released:
            state = without_values(
                state, "those who waited for the job have taken it, and it is kept no longer"
            )
        elif self.end is not None:
            self._takers.add(connection)
        return wire.JobSnapshot(
            job=self.record,
            state=encode(state),
            options=self.order.options,
            questions=self.questions_for(connection),
            end=self.end,
            logs={} if self.end is not None else self._log_files(),
        )

    def refreshed(self, connection: ClientConnection) -> wire.JobRefreshed:
        return wire.JobRefreshed(
            job=self.number,
            state=encode(self.state),
            questions=self.questions_for(connection),
            logs=self._log_files(),
        )

    def _log_files(self) -> dict[int, tuple[wire.RankLogFiles, ...]]:
        if self.end is not None:
            return self.end.logs
        return {} if self.group is None else self.group.logs.so_far(self.logs)


def without_values(state: RunState, why: str) -> RunState:
    """Return a state without its values, except for inline ones."""
    return replace(state, ranks={rank: _without_value(each, why) for rank, each in state.ranks.items()})


def _without_value(known: RankState, why: str) -> RankState:
    if known.profile is not None and known.profile.inline is None:
        known = replace(known, profile=None)
    if known.value is None or known.value.inline is not None:
        return known
    return replace(known, value=None, value_not_sent=why)
