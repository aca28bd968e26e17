"""A worker group: what the ranks say and the agent reports, brought together, job after job.

A group of one run has one job, is dispatched anew after a restart, and ends with it. A kept group (a
session's) goes on: its ranks keep their variables from job to job.

All methods named `_on_...`, `receive` and `tick` run on the hub's thread and are the only ones that
change anything; `state` is an immutable snapshot that any thread may read.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from nblaunch import _notebook
from nblaunch._errors import RunFailedError
from nblaunch._results import Event
from nblaunch.diagnose import failures
from nblaunch.elastic import runtime_dir
from nblaunch.elastic.forkserver import Server
from nblaunch.elastic.settings import AgentSettings, Worker
from nblaunch.elastic.thread import AgentThread
from nblaunch.group.hub import Hub
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import Exits, Phases
from nblaunch.group.spread import MultiNodeLifecycle
from nblaunch.group.stacks import StackRequest
from nblaunch.group.usage import alive
from nblaunch.protocol import nodes as wire
from nblaunch.protocol.messages import (
    Aborted,
    Answer,
    Arrived,
    Asked,
    AttemptStarted,
    Entered,
    Exited,
    FromRank,
    Hello,
    InterruptSeen,
    Measured,
    Message,
    Names,
    Noticed,
    Orders,
    Phase,
    Prepare,
    Raised,
    Recovered,
    Returned,
    Waiting,
    Where,
)
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import RunState

_ANSWER_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 1.0
_JOIN_SECONDS = 5.0


class WorkerGroup(MultiNodeLifecycle):
    """N ranks under one agent; `keep` says whether they outlive a job."""

    def __init__(self, hub: Hub, server: Server, settings: AgentSettings, *, keep: bool = False) -> None:
        """Prepare a group; `start` starts it."""
        super().__init__(hub, settings, keep=keep)
        self.token = secrets.token_hex(16)
        self._started = False
        self._kept: object = None
        self._directory = server.directory.make("group-")
        self._exits = Exits(self._directory)
        if settings.rdzv is not None and settings.rdzv.most > 1:
            settings = self._open_listener(settings.rdzv, self._directory)
        try:
            self._agent = AgentThread(settings, self._rank_arguments, self, server)
        except BaseException:
            hub.call(lambda: self._close_nodes(succeeded=False))
            runtime_dir.remove_tree(self._directory)
            raise

    # --- for the caller's thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the agent, which starts the ranks; does nothing the second time."""
        if not self._started:
            self._started = True
            self._hub.add(self)
            self._agent.start()

    def begin(self, job: Job | None, prepare: Prepare) -> None:
        """Give the ranks a job, to be dispatched once all of them are ready; None only makes them ready."""
        self._hub.call(lambda: self._begin(job, prepare))

    def where(self, seconds: float = _ANSWER_SECONDS) -> HangReport:
        """Ask every rank where it is; wait at most `seconds` for the answers."""
        stack_request = StackRequest(
            rank.rank for rank in self._at_work.ranks.values() if rank.node and not rank.state.final
        )
        self._hub.call(lambda: self._interruption.ask(stack_request))
        stack_request.complete.wait(seconds)
        return stack_request.report(self._here(self._at_work), str(self._directory), self._titles)

    @property
    def _at_work(self) -> RunState:
        """The job's state while there is one, else that of the ranks, which are idle."""
        job = self.job
        return job.state if job is not None and not job.ended.is_set() else self.state

    def looked_at(self, report: HangReport) -> None:
        """Keep a report of where the ranks are with what is known of the job."""
        job, kept = self.job, threading.Event()

        def keep() -> None:
            if job is not None:
                job.keep(report)
            kept.set()

        self._hub.call(keep)
        kept.wait(_ANSWER_SECONDS)

    def measured(self, measured: Measured) -> None:
        """Keep what the ranks use with what is known of the run, and ask how far each of them is."""
        self._hub.call(lambda: self._fold(measured))
        self._hub.call(self._ask_how_far)

    def notice(self, text: str) -> None:
        """Say something about the job that does not end it."""
        self._hub.call(lambda: self._fold(Noticed(text=text)))

    def note(self, text: str) -> None:
        """Say something with the next job of which the user sees the result."""
        self._hub.call(lambda: self._note(text))

    @property
    def waited_for(self) -> Mapping[int, float]:
        """The ranks that have been interrupted and are still at work, and since when (monotonic)."""
        return self._interruption.waited_for

    def waits_for(self, ranks: Mapping[int, str]) -> None:
        """Show for each of these ranks what is said of it."""
        self._hub.call(lambda: self._fold(Waiting(ranks=dict(ranks))))

    def answer(self, rank: int, answer: Answer) -> None:
        """Tell a rank what the user has typed."""
        self._hub.call(lambda: self._send(rank, answer))

    def interrupt(self, job: Job | None = None) -> None:
        """Raise KeyboardInterrupt in every rank at work; free those that are stuck in a collective.

        With `job` only if that is what they are at work on.
        """
        self._hub.call(lambda: self._interrupt(job))

    def give_up(self, job: Job) -> None:
        """End a job that these ranks have not been given."""
        self._hub.call(lambda: self._finish(job) if job is not self.job else None)

    def stop(self) -> None:
        """End the ranks: SIGTERM, then SIGKILL after the grace period."""
        self._agent.stop()

    def restart(self, reason: str) -> None:
        """End the ranks of a kept group, and start others."""
        self._hub.call(lambda: self._restart(reason))

    def skip_grace(self) -> None:
        """Skip what is left of the grace period."""
        self._agent.skip_grace()
        self._hub.call(lambda: self._tell_nodes(wire.SkipGrace()))
        if self.keep:
            waited_for = self.waited_for
            self.restart(
                f"{format_ranks(waited_for)} had not ended when the job was interrupted again"
                if waited_for
                else "it was interrupted twice"
            )
        else:
            self._agent.stop()

    def take_lost(self) -> dict[int, tuple[int, ...]]:
        """Return the keys of objects that ranks have lost since the last call."""
        return {rank: self.lost_keys.pop(rank, ()) for rank in list(self.lost_keys)}

    @property
    def waiting(self) -> bool:
        """Whether all ranks are connected, and have nothing to do."""
        known = self.state.ranks.values()
        connected = self.job is None and not self.closed.is_set() and all(rank.node for rank in known)
        # The system knows of a death before the agent does.
        return connected and self._agent.all_alive() and all(alive(rank.pid) for rank in known)

    def adopt(self, settings: AgentSettings) -> None:
        """Let the next job have its own grace period."""
        self.settings = replace(self.settings, grace=settings.grace)
        self._agent.adopt(self.settings)

    def leave(self) -> None:
        """Let the ranks of a group without a job end in order."""
        self._hub.call(self._dismiss)

    def keep_until_closed(self, something: object) -> None:
        """Refer to an object until the last rank is gone."""
        self._kept = something
        if self.closed.is_set():
            self._kept = None

    def close(self) -> None:
        """Wait for the last of a group that has ended, and let go of its values."""
        self._agent.join(_JOIN_SECONDS if self.closed.is_set() else 0)
        # The group and its agent refer to each other; gigabytes must not wait until the collector comes.
        if self.closed.is_set():
            self.job = None

    # --- from the agent's thread -----------------------------------------------------------------

    def _rank_arguments(self, attempt: int) -> tuple[Orders]:
        wanted = self.settings.processes
        # Of a group that starts again after days, a cleaner may have removed both.
        self._hub.be_reachable()
        self._directory.mkdir(mode=0o700, exist_ok=True)
        orders = Orders(
            self._hub.address,
            self.group,
            self.token,
            attempt,
            spill=str(self._directory),
            keep=self.keep,
            fresh=wanted.environ if wanted.start_method == "spawn" else None,
            virtual_local_rank=wanted.virtual_local_rank,
            numa_binding=wanted.numa_binding,
        )
        return (orders,)

    def attempt_starting(self, number: int, world_size: int, reason: str) -> None:
        """Take note before the first process is forked: it may speak before the last one is."""
        started = AttemptStarted(number=number, world_size=world_size, time=time.time(), reason=reason)
        self._noted(lambda: self._on_attempt(started))

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        """Take note of the processes and their log files, before those of other nodes."""
        self._noted(lambda: self._on_workers(number, world_size, workers))

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Take note of a process that is gone."""
        exited = Exited(rank=rank, exitcode=exitcode, time=time.time(), expected=expected, reason=reason)
        self._hub.call(lambda: self._on_exit(exited))

    def recorded(self, event: Event) -> None:
        """Keep one of torchelastic's events."""
        self.events.add(event)

    def agent_ended(self, error: BaseException | None) -> None:
        """Take note of the agent's end."""
        self.events.close()
        self._hub.call(lambda: self._on_agent_end(error))

    # --- on the hub's thread: what the ranks say -------------------------------------------------

    def receive(self, message: FromRank) -> None:
        """Fold a rank's message, after the output that came before it."""
        if (self._changing or self._ending) and isinstance(message, Raised):
            # It is the abort, or the change, that it has stumbled over.
            return
        self._heard()
        for printed in self._logs.before(message):
            self._fold(printed)
        match message:
            case Hello():
                if self._prepare is not None:
                    self._send(message.rank, self._prepare)
            case Entered(phase=Phase.READY):
                self._ready.add(message.rank)
                self._phases.reached(Phase.PROCESS_GROUP, message.rank)
            case Names() | Arrived() | Asked() | Recovered() | Where() | InterruptSeen() | Aborted():
                self._aside(message)
                return
            case Returned():
                taken = self.job.take_value(message) if self.job is not None else None
                if not isinstance(taken, Returned):
                    if taken is not None:
                        self.receive(taken)
                    return
            case _:
                pass
        self._fold(self._with_holders(self._interruption.as_stopped(message)))
        if isinstance(message, Hello):
            self._phases.reached(Phase.CONNECT, message.rank)
            if self._prepare is not None:
                self._phases.begin_process_group(self.state.world_size)
            else:
                self._phases.wait_without_limit(self.state.world_size)
        self._dispatch_when_ready()

    def _aside(self, message: Names | Arrived | Asked | Recovered | Where | InterruptSeen | Aborted) -> None:
        """Take what is no part of the fold."""
        match message:
            case Names():
                self.names[message.rank] = message
                if message.lost:
                    self.lost_keys[message.rank] = self.lost_keys.get(message.rank, ()) + message.lost
            case Arrived():
                self._on_arrived(message)
            case Asked():
                if self.job is not None:
                    self.job.questions.append(message)
            case Recovered():
                self._on_recovered(message)
            case Where():
                self._answered(message)
            case InterruptSeen():
                self._interruption.seen(message)
            case Aborted():
                self._note_let_go(message.rank)

    def _with_holders(self, message: Message) -> Message:
        """Let a rank that lacked GPU memory say who holds it."""
        if not isinstance(message, Raised) or message.failure.memory is None:
            return message
        node = self.state.ranks[message.rank].node
        kernel = "the calling process" if _notebook.shell() is None else "the notebook's kernel"
        holders = {os.getpid(): kernel} if node == platform.node() else {}
        for group in self._hub.members():
            known = group.state.ranks.values() if isinstance(group, WorkerGroup) else ()
            name = "rank {}" if group is self else "ranks of other runs"
            holders |= {rank.pid: name.format(rank.rank) for rank in known if rank.pid and rank.node == node}
        failure = failures.explain_out_of_memory(message.failure, message.rank, holders, kernel)
        return msgspec.structs.replace(message, failure=failure)

    def _answered(self, message: Where) -> None:
        job = self.job
        self._interruption.answered(message, job.state if job is not None else self.state)
        if (
            job is not None
            and job.stack_request is not None
            and job.stack_request.complete.is_set()
            and not job.settled
        ):
            self._settled(job)

    # --- on the hub's thread: what the agent says ------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether nothing is due until a rank, the agent or the caller speaks."""
        job = self.job
        return (
            (job is None or job.ended.is_set())
            and self._restart_at is None
            and self._phases.without_limit
            and not self._recovery.busy
            and not self._interruption.busy
            and not self._exits.waiting
        )

    def tick(self, now: float) -> None:
        """Read logs; do what is due."""
        job = self.job
        if job is not None and not job.ended.is_set():
            for printed in self._logs.news(job.state.ranks):
                self._fold(printed)
        if self._nodes is not None:
            self._nodes.tick(now)
        self._fold_exits(now)
        if job is not None and job.settle_at is not None and now >= job.settle_at:
            self._settled(job)
        self._interruption.tick(job.state if job is not None else self.state, self.state, now)
        self._press(now)
        self._recovery.tick(now)
        self._say_what_takes_long(now)
        self._overdue(now)
        failure = self._phases.overdue(now, self.state)
        if failure is not None:
            self._launch_failure = failure
            self._agent.stop()

    def lost(self, error: Exception) -> None:
        """End the run: nobody hears its ranks any more."""
        self._error = RunFailedError(
            f"lost the connection to the ranks (hub socket: {error}); they were terminated. "
            "The next run reconnects."
        )
        self._agent.stop()

    def _on_attempt(self, message: AttemptStarted) -> None:
        self._hub.drain(_LAST_DRAIN_SECONDS)
        self._fold_exits(float("inf"))
        self._logs.close()
        self.attempt = message.number
        self._ready, self.names, self.lost_keys = set(), {}, {}
        self._exits.forget()
        self._changing = self._replacing = self._ending = False
        self._let_go.clear()
        if self._nodes is not None:
            self._nodes.begin()
        self._restart_at = None
        self._recovery.abandon()
        self._phases = Phases()
        job = self.job
        if message.number > 0 and self.keep:
            self._note("the ranks were started anew: all of their variables are gone")
        if self.keep and job is not None and job.dispatched:
            # The ranks that had it are gone, and so is all that it could have been done with.
            self._finish(job)
        elif job is not None and not job.ended.is_set():
            job.begin_again()
        self._fold(message)

    def _on_workers(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        self._logs.begin(number, workers)
        if self._nodes is not None:
            self._nodes.keep_logs_at(Path(workers[0].stdout).parents[1])
        pids = {worker.rank: worker.pid for worker in workers}
        self._fold(AttemptStarted(number=number, world_size=world_size, time=time.time(), pids=pids))
        # From now on: before, a fork server that imports torch from a slow disk has a limit of its own.
        self._phases.begin_connect()
        self._dispatch_when_ready()

    def _on_exit(self, exited: Exited) -> None:
        self._hub.drain()
        if self._changing:
            exited = msgspec.structs.replace(exited, expected=True)
        if self.keep and not self.ready and not exited.expected:
            self._agent.stop()  # a rank that cannot even be started would not come into being again
        self._recovery.abandon()
        self._exits.note(exited, time.monotonic())
        self._fold_exits(time.monotonic())

    def _fold_exits(self, now: float) -> None:
        """Fold ends whose last words have had time to arrive, or that have no more to say."""
        job = self.job
        for exited in self._exits.due(job, now):
            if job is None or exited.rank not in job.state.ranks or job.ended.is_set():
                self._note_exit(exited)
                self._fold(exited)
            elif not job.has_outcome(exited.rank):
                for printed in self._logs.rest(exited.rank):
                    self._fold(printed)
                self._fold(self._explained(exited))
            else:
                self._fold(exited)

    def _note_exit(self, exited: Exited) -> None:
        """Keep why a rank of a kept group died between two jobs."""
        if self.keep and not exited.expected and not self.closed.is_set() and exited.exitcode != 0:
            self._note(f"rank {exited.rank} {self._explained(exited).reason}")

    def _explained(self, exited: Exited) -> Exited:
        return self._exits.explained(exited, self._titles, self._logs.stderr_of(exited.rank))

    def _on_agent_end(self, error: BaseException | None) -> None:
        job = self.job
        try:
            self._hub.drain(_LAST_DRAIN_SECONDS)
            self._fold_exits(float("inf"))
            if job is not None and not job.ended.is_set():
                for printed in self._logs.rest_of_all():
                    self._fold(printed)
        except Exception as broken:  # noqa: BLE001 - whoever waits for the end must see it
            error = error or broken
        finally:
            self._error = self._error or error
            # Here and not in `close`: a caller who is interrupted once more may never come that far.
            self._hub.remove(self)
            self._close_nodes(succeeded=job is not None and job.succeeded)
            self._logs.close()
            runtime_dir.remove_tree(self._directory)
            self.closed.set()
            self._kept = None
            if job is not None and not job.ended.is_set():
                self._finish(job)
