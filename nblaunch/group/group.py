"""A worker group: its agent, its ranks' messages and logs, and its jobs, around one pure machine.

What happens to a group becomes an event, on the hub's thread and one after the other; the machine of
`nblaunch.group.lifecycle` decides what follows, and this module performs it. Nothing is decided here. What
other threads read are immutable snapshots.

The notebook's agent alone decides when several nodes meet again; it says so here before the first rank is
ended, and the other nodes get a message. So what ranks make of the end of their peers is never taken for a
failure.
"""

from __future__ import annotations

import functools
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias, assert_never

import msgspec

from nblaunch import _notebook
from nblaunch._errors import LaunchError, RunFailedError
from nblaunch._results import Event, EventLog
from nblaunch.diagnose import failures
from nblaunch.elastic import runtime_dir
from nblaunch.elastic.agent import AgentThread
from nblaunch.elastic.forkserver import Server
from nblaunch.elastic.settings import AgentSettings, Worker
from nblaunch.group import lifecycle
from nblaunch.group.hub import Hub
from nblaunch.group.job import Job, RankLogs
from nblaunch.group.lifecycle import GroupState, step
from nblaunch.group.recovery import Send
from nblaunch.group.stacks import ExitReasons, StackRequest
from nblaunch.group.usage import alive
from nblaunch.protocol.messages import (
    Answer,
    Asked,
    AttemptStarted,
    Exited,
    FromRank,
    Measured,
    Names,
    Noticed,
    Orders,
    Phase,
    Prepare,
    Printed,
    Raised,
    ReportWhere,
    Returned,
    ToRank,
    Waiting,
    Where,
)
from nblaunch.protocol.reports import HangReport
from nblaunch.protocol.state import RunState

_ANSWER_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 1.0
_JOIN_SECONDS = 5.0
# An abort takes NCCL a second or two; a rank that holds its interpreter does not answer.
_ABORT_SECONDS = 2.0


class Peers(Protocol):
    """The processes elsewhere that run the rest of a group's ranks; called on the hub's thread."""

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before."""

    def send(self, rank: int, message: ToRank) -> bool:
        """Send to a rank that runs elsewhere; return whether this one does."""

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        """Release the ranks, and stop the `others`, as the agent does here."""

    def rejoin(self) -> None:
        """Re-run the rendezvous, as the agent is about to do here."""

    def skip_grace(self) -> None:
        """Skip what is left of the grace period."""

    def tick(self, now: float) -> None:
        """Detect peers that are gone; `now` is monotonic."""

    def close(self, *, succeeded: bool) -> None:
        """End the peers: the run is over."""


ConnectPeers: TypeAlias = Callable[
    [Hub, AgentSettings, "WorkerGroup", Path], tuple[AgentSettings, Peers | None]
]
"""Opens a group to peers, which use its private directory; returns the settings with what these need."""


class WorkerGroup:
    """N ranks under one agent; `keep` says whether they outlive a job."""

    def __init__(
        self,
        hub: Hub,
        server: Server,
        settings: AgentSettings,
        connect_peers: ConnectPeers,
        *,
        keep: bool = False,
    ) -> None:
        """Prepare a group; `start` starts it."""
        self.group = secrets.token_hex(4)
        self.token = secrets.token_hex(16)
        self.attempt = 0
        self.keep = keep
        self.log_directory = Path()
        """Where peers keep the logs of the present attempt."""
        self.job: Job | None = None
        self.names: dict[int, Names] = {}
        """Of a kept group: the variables that each rank has."""
        self.closed = threading.Event()
        self.events = EventLog()
        """What torchelastic has recorded of these ranks."""
        self._hub = hub
        self._life = GroupState(
            kept=keep, grace=settings.grace, members=RunState.fresh(settings.nproc, time=time.time())
        )
        self._lost_keys: dict[int, tuple[int, ...]] = {}
        """Of a kept group: keys of objects that each rank has lost, until `take_lost`."""
        self._logs = RankLogs()
        self._stack_requests: list[StackRequest] = []
        self._error: BaseException | None = None
        self._let_go = threading.Event()
        self._peers: Peers | None = None
        self._started = False
        self._kept: object = None
        self._directory = server.directory.make("group-")
        self._exit_reasons = ExitReasons(self._directory)
        try:
            self.settings, self._peers = connect_peers(hub, settings, self, self._directory)
            self._agent = AgentThread(self.settings, self._rank_arguments, self, server)
        except BaseException:
            hub.call(lambda: self._close_peers(succeeded=False))
            runtime_dir.remove_tree(self._directory)
            raise

    @property
    def state(self) -> RunState:
        """The ranks themselves; what becomes of a job is in `job.state`."""
        return self._life.members

    @property
    def ready(self) -> bool:
        """Whether all ranks of this attempt have come into being."""
        return self._life.all_ready

    @property
    def waited_for(self) -> Mapping[int, float]:
        """The ranks that have been interrupted and are still at work, and since when (monotonic)."""
        return self._life.interruption.waited_for

    # --- for the caller's thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the agent, which starts the ranks; does nothing the second time."""
        if not self._started:
            self._started = True
            self._hub.add(self)
            self._agent.start()

    def begin(self, job: Job | None, prepare: Prepare) -> None:
        """Give the ranks a job, to be dispatched once all of them are ready; None only makes them ready."""

        def given() -> None:
            self.job = job
            if job is None:
                self._feed(lifecycle.JobGiven(prepare))
                return
            job.logs = self._logs.begin_job(self.attempt)
            self._feed(lifecycle.JobGiven(prepare, job.state, job.internal))

        self._hub.call(given)

    def where(self, seconds: float = _ANSWER_SECONDS) -> HangReport:
        """Ask every rank where it is; wait at most `seconds` for the answers."""
        request = StackRequest(
            rank.rank for rank in self._at_work.ranks.values() if rank.node and not rank.state.final
        )

        def ask() -> None:
            self._stack_requests.append(request)
            for rank in list(request.missing):
                self._send(rank, ReportWhere())

        self._hub.call(ask)
        request.complete.wait(seconds)
        return request.report(self._here(self._at_work), str(self._directory), self._titles)

    @property
    def _at_work(self) -> RunState:
        """The job's state while there is one, else that of the ranks, which are idle."""
        job = self.job
        return job.state if job is not None and not job.ended.is_set() else self.state

    @property
    def _titles(self) -> dict[str, str]:
        return self.job.titles if self.job is not None else {}

    def _here(self, state: RunState) -> RunState:
        """Return the state without process ids of other machines: here they are somebody else's."""
        away = self._life.remote
        ranks = {
            rank: replace(each, pid=None) if rank in away else each for rank, each in state.ranks.items()
        }
        return replace(state, ranks=ranks) if away else state

    def looked_at(self, report: HangReport) -> None:
        """Keep a report of where the ranks are with what is known of the job."""
        job, kept = self.job, threading.Event()

        def keep() -> None:
            if job is not None and (job is not self.job or job.ended.is_set()):
                job.keep(report)
            else:
                self._feed(lifecycle.StacksTaken(report))
            kept.set()

        self._hub.call(keep)
        kept.wait(_ANSWER_SECONDS)

    def measured(self, measured: Measured) -> None:
        """Keep what the ranks use with what is known of the run, and ask how far each of them is."""
        self._post(lifecycle.Observed(measured))

    def notice(self, text: str) -> None:
        """Show something about the job that does not end it."""
        self._post(lifecycle.Observed(Noticed(text=text)))

    def note(self, text: str) -> None:
        """Show something with the next job of which the user sees the result."""
        self._post(lifecycle.Noted(text))

    def forget_notes(self) -> None:
        """Show nothing of what has happened so far: the user knows."""
        self._post(lifecycle.NotesForgotten())

    def waits_for(self, ranks: Mapping[int, str]) -> None:
        """Show for each of these ranks what is said of it."""
        self._post(lifecycle.Observed(Waiting(ranks=dict(ranks))))

    def answer(self, rank: int, answer: Answer) -> None:
        """Send a rank what the user has typed."""
        self._hub.call(lambda: self._send(rank, answer))

    def interrupt(self, job: Job | None = None) -> None:
        """Raise KeyboardInterrupt in every rank at work; free those that are stuck in a collective.

        With `job` only if that is what they are at work on.
        """

        def interrupt() -> None:
            if job is not None and job is not self.job:
                self._end(job)  # the interrupt came before the job had been given to the ranks
            else:
                self._feed(lifecycle.InterruptAsked())

        self._hub.call(interrupt)

    def give_up(self, job: Job) -> None:
        """End a job that these ranks have not been given."""
        self._hub.call(lambda: self._end(job) if job is not self.job else None)

    def stop(self) -> None:
        """End the ranks: SIGTERM, then SIGKILL after the grace period."""
        self._agent.stop()

    def restart(self, reason: str) -> None:
        """End the ranks of a kept group, and start others."""
        self._post(lifecycle.RestartAsked(reason))

    def skip_grace(self) -> None:
        """Skip what is left of the grace period."""
        self._post(lifecycle.GraceSkipped())

    def take_lost(self) -> dict[int, tuple[int, ...]]:
        """Return the keys of objects that ranks have lost since the last call."""
        return {rank: self._lost_keys.pop(rank, ()) for rank in list(self._lost_keys)}

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
        self._post(lifecycle.GraceSet(settings.grace))

    def leave(self) -> None:
        """Let the ranks of a group without a job end in order."""
        self._post(lifecycle.Dismissed())

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
            self._life = replace(self._life, job=None)

    # --- from the agent's thread -----------------------------------------------------------------

    def _noted(self, action: Callable[[], None]) -> None:
        """Have the hub's thread do something, and wait until it has."""
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        self._hub.call(act)
        while not done.wait(1.0):
            if not self._hub.usable:
                msg = "the hub, which carries the ranks' messages, has ended"
                raise LaunchError(msg, phase=Phase.CONNECT.value)

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
        """Begin an attempt before the first process is forked: it may speak before the last one is."""
        started = AttemptStarted(number=number, world_size=world_size, time=time.time(), reason=reason)
        self._noted(lambda: self._on_attempt(started))

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        """Follow the processes and their log files, before those of other nodes."""
        self._noted(lambda: self._on_workers(number, world_size, workers))

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Fold the exit of a process, after what its rank has sent."""
        exited = Exited(rank=rank, exitcode=exitcode, time=time.time(), expected=expected, reason=reason)
        self._hub.call(lambda: self.rank_gone(exited))

    def membership_changing(self) -> None:
        """Expect the end of all ranks before the first is ended: what peers make of that is no failure."""

        def change() -> None:
            self._feed(lifecycle.MembershipChanging())
            if self._peers is not None:
                self._peers.rejoin()

        self._noted(change)

    def ranks_ending(self) -> None:
        """Have NCCL let go on every rank before the first is killed; waits for that with a bound.

        A kernel of NCCL's reads and writes the memory of other GPUs. Where the process that the memory
        belongs to goes first, that is an illegal access in the others, and can take down the links between
        the GPUs.
        """
        prepare = self._life.prepare
        if prepare is not None and prepare.device_type != "cpu":
            self._post(lifecycle.RanksEnding())
            self._let_go.wait(_ABORT_SECONDS)

    def others_stopped(self) -> None:
        """Let ranks that have failed go: nobody is at work any more."""
        self._post(lifecycle.OthersStopped())

    def recorded(self, event: Event) -> None:
        """Keep one of torchelastic's events."""
        self.events.add(event)

    def agent_ended(self, error: BaseException | None) -> None:
        """End the group, and its job."""
        self.events.close()
        self._hub.call(lambda: self._on_agent_end(error))

    # --- on the hub's thread: what the nodes say -------------------------------------------------

    def node_started(self, workers: tuple[Worker, ...]) -> None:
        """Follow a node's processes and their log files."""
        self._logs.extend(workers)
        self._forked(self.attempt, self.state.world_size, workers, remote=True)

    def rank_gone(self, exited: Exited) -> None:
        """Fold the exit of a process, wherever it was, after what its rank has sent."""
        self._hub.drain()
        self._feed(lifecycle.WorkerExited(exited))

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        """Let those of these ranks that have failed go: none is at work any more."""
        self._feed(lifecycle.OthersStopped(frozenset(ranks)))

    def node_leaves(self, name: str, *, asked: bool, enough: bool) -> bool:
        """Go on without a node, if there are enough; those that stay begin again."""
        self._feed(lifecycle.NodeLeaving(name, asked=asked, enough=enough))
        return self._life.changing

    def _close_peers(self, *, succeeded: bool) -> None:
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close(succeeded=succeeded)

    # --- on the hub's thread: what the ranks say -------------------------------------------------

    def receive(self, message: FromRank) -> None:
        """Feed a rank's message, after the output that came before it."""
        self._observe(self._logs.before(message))
        match message:
            case Names():
                self.names[message.rank] = message
                if message.lost:
                    self._lost_keys[message.rank] = self._lost_keys.get(message.rank, ()) + message.lost
            case Asked() if self.job is not None:
                self.job.questions.append(message)
            case Where():
                for request in self._stack_requests:
                    request.answer(message)
                self._stack_requests = [each for each in self._stack_requests if not each.complete.is_set()]
            case Returned():
                taken = self.job.take_value(message) if self.job is not None else None
                if taken is None:
                    return
                message = taken
            case _:
                pass
        self._feed(lifecycle.RankSaid(self._with_holders(message)))

    def _observe(self, output: Iterable[Printed]) -> None:
        for printed in output:
            if self.job is not None and self.job.shows(printed):
                self._feed(lifecycle.Observed(printed))

    def _with_holders(self, message: FromRank) -> FromRank:
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

    # --- on the hub's thread: the loop -----------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether nothing is due until a rank, the agent or the caller speaks."""
        return self._life.quiet

    def tick(self, now: float) -> None:
        """Read logs; do what is due."""
        job = self.job
        if job is not None and not job.ended.is_set():
            self._observe(self._logs.news(job.state.ranks))
        if self._peers is not None:
            self._peers.tick(now)
        self._feed(lifecycle.Tick(), now)

    def lost(self, error: Exception) -> None:
        """End the run: no message of its ranks arrives any more."""
        self._error = RunFailedError(
            f"lost the connection to the ranks (hub socket: {error}); they were terminated. "
            "The next run reconnects."
        )
        self._feed(lifecycle.HubLost())

    def _on_attempt(self, message: AttemptStarted) -> None:
        self._hub.drain(_LAST_DRAIN_SECONDS)
        self._feed(lifecycle.Drained())
        self._logs.close()
        self.names, self._lost_keys = {}, {}
        self._let_go.clear()
        if self._peers is not None:
            self._peers.begin_attempt()
        self._feed(lifecycle.AttemptStarting(message))

    def _on_workers(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        self._logs.begin(number, workers)
        self.log_directory = Path(workers[0].stdout).parent.parent
        self._forked(number, world_size, workers)

    def _forked(
        self, number: int, world_size: int, workers: tuple[Worker, ...], *, remote: bool = False
    ) -> None:
        pids = {worker.rank: worker.pid for worker in workers}
        message = AttemptStarted(number=number, world_size=world_size, time=time.time(), pids=pids)
        self._feed(lifecycle.WorkersForked(message, frozenset(pids), remote))

    def _on_agent_end(self, error: BaseException | None) -> None:
        try:
            self._hub.drain(_LAST_DRAIN_SECONDS)
            self._feed(lifecycle.Drained())
            self._observe(self._logs.rest_of_all())
        except Exception as broken:  # noqa: BLE001 - whoever waits for the end must see it
            error = error or broken
        finally:
            self._error = self._error or error
            self._feed(lifecycle.AgentEnded())

    def _close(self, *, succeeded: bool) -> None:
        # Here and not in `close`: a caller who is interrupted once more may never come that far.
        self._hub.remove(self)
        self._close_peers(succeeded=succeeded)
        self._logs.close()
        runtime_dir.remove_tree(self._directory)
        self.closed.set()
        self._kept = None

    def _post(self, event: lifecycle.Event) -> None:
        """Feed an event from any thread."""
        self._hub.call(functools.partial(self._feed, event))

    def _feed(self, event: lifecycle.Event, now: float | None = None) -> None:
        """Take an event, and perform what follows from it; only on the hub's thread."""
        self._life, actions = step(self._life, event, time.monotonic() if now is None else now)
        self.attempt = self._life.attempt
        job, known = self.job, self._life.job
        if job is not None and known is not None and not job.ended.is_set():
            job.state, job.interrupted = known.run, known.interrupted
        for action in actions:
            # `close`, on another thread, lets go of `self.job` as soon as the group is closed.
            self._perform(action, job)

    def _perform(self, action: lifecycle.Action, job: Job | None) -> None:
        match action:
            case Send(rank, message):
                self._send(rank, message)
            case lifecycle.Explain(exited):
                self._observe(self._logs.rest(exited.rank))
                stderr = self._logs.stderr_of(exited.rank)
                explained = self._exit_reasons.explained(exited, self._titles, stderr)
                self._feed(lifecycle.ExitExplained(explained))
            case lifecycle.LetGo():
                self._let_go.set()
            case lifecycle.CloseGroup(succeeded):
                self._close(succeeded=succeeded)
            case (
                lifecycle.ReleaseWorkers()
                | lifecycle.StopAgent()
                | lifecycle.RestartAgent()
                | lifecycle.RejoinNodes()
                | lifecycle.SkipGrace()
            ):
                self._order(action)
            case _ if job is not None:
                self._do_to_job(action, job)
            case _:
                pass

    def _order(
        self,
        action: lifecycle.ReleaseWorkers
        | lifecycle.StopAgent
        | lifecycle.RestartAgent
        | lifecycle.RejoinNodes
        | lifecycle.SkipGrace,
    ) -> None:
        """Have the agent do something, and the peers follow."""
        match action:
            case lifecycle.ReleaseWorkers(succeeded, others):
                self._agent.release(succeeded=succeeded, others=others)
                if self._peers is not None:
                    self._peers.release(succeeded=succeeded, others=others)
            case lifecycle.StopAgent():
                self._agent.stop()
            case lifecycle.RestartAgent():
                self._agent.restart()
            case lifecycle.RejoinNodes():
                self._agent.rejoin()
            case lifecycle.SkipGrace():
                self._agent.skip_grace()
                if self._peers is not None:
                    self._peers.skip_grace()
            case _:
                assert_never(action)

    def _do_to_job(
        self,
        action: lifecycle.Dispatch
        | lifecycle.KeepPayload
        | lifecycle.ForgetValues
        | lifecycle.FinishJob
        | lifecycle.Warn,
        job: Job,
    ) -> None:
        match action:
            case lifecycle.Dispatch(rank):
                self._send(rank, job.dispatch_to(rank))
            case lifecycle.KeepPayload():
                job.whole()
            case lifecycle.ForgetValues():
                job.values = {}
            case lifecycle.FinishJob(launch_failure):
                job.launch_failure = launch_failure
                self._end(job)
            case lifecycle.Warn(text):
                job.late.append(text)
            case _:
                assert_never(action)

    def _end(self, job: Job) -> None:
        job.error = job.error or self._error
        job.end(time.time())

    def _send(self, rank: int, message: ToRank) -> None:
        if self._peers is None or not self._peers.send(rank, message):
            self._hub.send(self, rank, message)
