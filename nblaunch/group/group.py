"""A worker group: its hosts, its ranks' messages and logs, and its jobs, around one pure machine.

Whatever happens to a group becomes an event, on the hub's thread and one after the other. The machine of
`nblaunch.group.lifecycle` decides what follows, and this module performs it. Nothing is decided here. Other
threads read immutable snapshots.

Only the notebook's agent decides when several nodes repeat the rendezvous. It reports that here before the
first rank is ended, and the other nodes get a message. So the failures of ranks whose peers end are never
taken for failures of the run.
"""

from __future__ import annotations

import functools
import itertools
import platform
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from nblaunch._errors import RunFailedError, RunPreemptedError
from nblaunch._help import FailureKind
from nblaunch._results import EventLog
from nblaunch._runtime_dir import remove_tree
from nblaunch.diagnose import failures, hang
from nblaunch.group import lifecycle
from nblaunch.group.job import Job, RankLogs
from nblaunch.group.lifecycle import Action, GroupEvent, GroupState, Publish, Trigger, step
from nblaunch.group.machine import LocateRanks, Order, Send
from nblaunch.host.local_host import LocalHost
from nblaunch.host.rank_host import GroupHost
from nblaunch.host.settings import AgentSettings, Worker
from nblaunch.protocol import messages
from nblaunch.protocol.client import Event
from nblaunch.protocol.reports import HangReport
from nblaunch.protocol.state import RunState, State
from nblaunch.protocol.variables import alike, known_to_all, last_known, unlike

_ANSWER_SECONDS = 1.0
_MEASURE_SECONDS = 2.0  # a busy node reads the memory of all its ranks first
_POLL_SECONDS = 0.01
# How long a survey takes besides the answers: stacks are read, and a deadlock has the time to end.
_SURVEY_SECONDS = 10.0
_LAST_DRAIN_SECONDS = 1.0
_JOIN_SECONDS = 5.0


_OF_HOSTS = {
    Order.STOP_AGENT: methodcaller("stop"),
    Order.RESTART_AGENT: methodcaller("restart"),
    Order.REJOIN_NODES: methodcaller("rejoin"),
    Order.REGROUP_NODES: methodcaller("regroup"),
    Order.SKIP_GRACE: methodcaller("skip_grace"),
}


class GroupListener(Protocol):
    """Follows the ranks of a persistent group; called on the hub's thread."""

    def names_changed(self, names: messages.Names) -> None:
        """Handle a change of the variables that a rank has."""

    def ranks_replaced(self, attempt: int) -> None:
        """Handle the start of other ranks, which have been sent nothing."""

    def ranks_renumbered(self, attempt: int, kept: Mapping[int, int]) -> None:
        """Handle an attempt that keeps ranks: `kept` maps new numbers to former ones; others are new."""

    def group_closed(self) -> None:
        """Handle the end of the last rank."""


MakeHosts: TypeAlias = Callable[["WorkerGroup", Path], Sequence[GroupHost]]
"""Makes the hosts of a group, which use its private directory."""


class WorkerGroup:
    """N ranks under one agent; `keep` says whether they outlive a job."""

    def __init__(
        self,
        local: LocalHost,
        settings: AgentSettings,
        make_hosts: MakeHosts,
        *,
        keep: bool = False,
    ) -> None:
        self.group = secrets.token_hex(4)
        self.token = secrets.token_hex(16)
        self.attempt = 0
        self.keep = keep
        self.when_closed: Callable[[], None] = lambda: None
        """The hub's thread calls it once the last rank is gone."""
        self.job: Job | None = None
        self.names: dict[int, messages.Names] = {}
        """Of a persistent group: the variables that each rank has."""
        self._names_before: dict[int, messages.Names] = {}
        """Those before the job."""
        self._gone: dict[int, tuple[Mapping[int, messages.Names], Collection[str]]] = {}
        """Ranks that have died, with what all had before the job that this cut off, and what that had brought
        to them; empty if it was none."""
        self._unlike: dict[str, int] = {}
        """Variables that ranks of lost nodes had otherwise, with the numbers that the others then had."""
        self._cut_off: Collection[str] = ()
        """Those that the others had alike before the job that was cut off with lost nodes."""
        self.reborn: dict[int, messages.LastKnown] = {}
        """Ranks that were started again, and have not got variables yet, with what they had; and new ones."""
        self.numbered_in = 0
        """The last attempt in which ranks got other numbers."""
        self.listener: GroupListener | None = None
        self.closed = threading.Event()
        self.events = EventLog()
        """Events that torchelastic has recorded for these ranks."""
        self.settings = settings
        self._hub = local.hub
        members = RunState.fresh(settings.nproc, time=time.time())
        self.life = GroupState(persistent=keep, replaces=keep and settings.rdzv is None, members=members)
        self.logs = RankLogs(settings.log_dir if settings.private_logs else None)
        self._raw: tuple[messages.FromRank | None, bytes] = None, b""
        """The message that is being fed, and the bytes that its rank has sent."""
        self._surveys = itertools.count()
        self._who_surveys: dict[int, Future[HangReport]] = {}
        """Callers that wait for a report, by the number of the survey."""
        self._error: BaseException | None = None
        self.usages: dict[int, messages.Usage] = {}
        """The last measurement of the ranks."""
        self._measuring = 0
        """How many want the ranks to be measured."""
        self._started = False
        self._unused_logs: Path | None = None
        self._hosts: Sequence[GroupHost] = ()
        self._directory = local.directory.make("group-")
        try:
            self._hosts = make_hosts(self, self._directory)
        except BaseException:
            remove_tree(self._directory)
            raise

    @property
    def state(self) -> RunState:
        """The ranks themselves; the state of the job is `job.state`."""
        return self.life.members

    @property
    def backend(self) -> str:
        """The backend of the default process group, or ""."""
        prepare = self.life.prepare
        return "" if prepare is None else prepare.backend or ""

    @property
    def why_closed(self) -> str:
        return "" if self._error is None else str(self._error)

    # --- on the caller's thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the agent, which starts the ranks; does nothing the second time."""
        if not self._started:
            self._started = True
            self._hub.add(self)
            for host in self._hosts:
                host.start()

    def abandon(self) -> None:
        """End a group that gets no job. On the hub's thread."""
        # An agent that was not started does not end either.
        self.post(Trigger.DISMISS if self._started else Trigger.AGENT_ENDED)
        self._started = True

    def begin(self, job: Job | None, prepare: messages.Prepare) -> None:
        """Submit a job, to be dispatched once all ranks are ready; None only makes them ready."""

        def submit() -> None:
            self.job, self._names_before = job, self.names.copy()
            if job is not None:
                job.logs = self.logs.begin_job(self.attempt)
            self.feed(lifecycle.JobSubmitted(prepare, None if job is None else job.known))

        self._hub.call(submit)

    def post(self, event: GroupEvent) -> None:
        """Feed an event to the machine, from any thread."""
        self._hub.call(functools.partial(self.feed, event))

    def where(self, seconds: float = _ANSWER_SECONDS) -> HangReport:
        """Ask every rank where it is; wait at most `seconds` for the answers, and read the stacks of others.

        Ranks that seem to wait for each other are asked once more.
        """
        found: Future[HangReport] = Future()

        def ask() -> None:
            number = next(self._surveys)
            self._who_surveys[number] = found
            self.feed(LocateRanks(number, seconds))

        self._hub.call(ask)
        try:
            return found.result(2 * seconds + _SURVEY_SECONDS)
        except TimeoutError:  # the hub may have ended
            return hang.report({})

    def measure(self, *, wanted: bool) -> None:
        """Count the callers that want measurements; measure while there is one. On the hub's thread."""
        before, after = self._measuring, self._measuring + (1 if wanted else -1)
        if (before > 0) != (after > 0):
            self.usages = {} if before == 0 else self.usages
            for host in self._hosts:
                host.measure(wanted=after > 0)
        self._measuring = after

    def memory(self, seconds: float = _MEASURE_SECONDS) -> dict[int, int | None]:
        """Return each rank's private memory in bytes; wait at most `seconds` if a host must measure it."""
        ranks = self.state.ranks  # once: nodes may come meanwhile
        found: dict[int, int | None] = dict.fromkeys(ranks)
        for host in self._hosts:
            found |= host.memory()
        asked = {rank for rank, each in ranks.items() if each.node and found[rank] is None} - self.life.exited
        if asked:
            self._hub.run(lambda: self.measure(wanted=True), seconds)
            deadline = time.monotonic() + seconds
            while not asked <= self.usages.keys() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            self._hub.call(lambda: self.measure(wanted=False))
        return found | {rank: used.memory for rank, used in dict(self.usages).items() if rank in asked}

    def interrupt(self, job: Job, *, sparing: bool = False) -> None:
        """Interrupt a job; the second time its ranks are ended, unless `sparing` them. From any thread."""
        trigger = Trigger.INTERRUPT_SPARING if sparing else Trigger.INTERRUPT
        self._hub.call(lambda: self.feed(trigger) if job is self.job else None)

    def stop(self) -> None:
        """End the ranks: SIGTERM, then SIGKILL after the grace period."""
        for host in self._hosts:
            host.stop()

    @property
    def waiting(self) -> bool:
        known = self.state.ranks.values()
        connected = self.job is None and not self.closed.is_set() and all(rank.node for rank in known)
        return connected and all(host.all_alive() for host in self._hosts)

    def adopt(self, settings: AgentSettings) -> None:
        self.settings = replace(self.settings, options=settings.options)
        for host in self._hosts:
            host.adopt(self.settings)

    def remove_when_closed(self, logs: Path | None) -> None:
        """Remove a log directory once the last rank is gone: ranks may be about to open their files."""
        self._unused_logs = logs
        if logs is not None and self.closed.is_set():
            remove_tree(logs)

    def close(self) -> None:
        """Wait for the thread of a group that has ended, and release its values."""
        for host in self._hosts:
            host.join(_JOIN_SECONDS if self.closed.is_set() else 0)
        # The group and its agent refer to each other; gigabytes must not wait until the collector comes.
        if self.closed.is_set():
            self.job = None
            self.life = msgspec.structs.replace(self.life, job=None)

    def recorded(self, event: Event) -> None:
        self.events.add(event)

    def agent_ended(self, error: BaseException | None) -> None:
        self.events.close()
        self._hub.call(lambda: self._on_agent_end(error))

    # --- on the hub's thread: reports of hosts -------------------------------------------------

    def attempt_starting(  # noqa: PLR0913 - what an attempt is, and what it keeps
        self,
        number: int,
        world_size: int,
        reason: str,
        *,
        backend: str = "",
        kept: Mapping[int, int] | None = None,
        replaced: Mapping[int, int] | None = None,
    ) -> None:
        """Register an attempt, of which no rank has been forked.

        `kept` maps the numbers of ranks that the attempt keeps to their former ones, and `replaced` those of
        others to the numbers of dead ranks whose places they take: without nodes, to the same.
        """
        self._hub.drain(_LAST_DRAIN_SECONDS)
        self.feed(Trigger.DRAINED)
        self.usages = {}
        started = messages.AttemptStarted(
            number=number, world_size=world_size, time=time.time(), reason=reason, backend=backend
        )
        if kept is not None:
            new = {rank: rank for rank in range(world_size) if rank not in kept}
            self._go_on(started, kept, new if replaced is None else replaced)
            return
        self.logs.close()
        self.names, self.reborn, self._gone, self._unlike, self._cut_off = {}, {}, {}, {}, ()
        for host in self._hosts:
            host.begin_attempt()
        self.feed(lifecycle.AttemptStarting(started))
        self.logs.begin(number)
        if self.listener is not None:
            self.listener.ranks_replaced(self.attempt)

    def attempt_started(
        self, number: int, world_size: int, workers: tuple[Worker, ...], *, remote: bool = False
    ) -> None:
        """Follow processes and their log files; if no more come from other nodes, expect all to connect."""
        # Brief: thousands of files must not stay open.
        self.logs.extend(workers, brief=remote)
        pids = {worker.rank: worker.pid for worker in workers}
        message = messages.AttemptStarted(number=number, world_size=world_size, time=time.time(), pids=pids)
        self.feed(lifecycle.WorkersForked(message, frozenset(pids), remote))

    def rank_gone(self, exited: messages.Exited) -> None:
        job, at_work = self.life.working, self.life.working_ranks.get(exited.rank)
        # Not whether it has begun: the message that says so may have been lost with the rank.
        # A rank whose GPU broke has failed, and does not tell what it has then.
        ended = at_work is None or (at_work.state.final and at_work.state is not State.FAILED)
        cut_off = job is not None and job.dispatched and not ended
        self._gone[exited.rank] = (self._names_before, self._brought(exited.rank)) if cut_off else ({}, ())
        self.feed(exited)

    def _brought(self, rank: int) -> Collection[str]:
        """Return the variables that the present job has brought to a rank."""
        job, known = self.job, self.life.working
        if job is None or known is None or len(known.arrived) < len(known.run.ranks):
            return ()
        objects = job.dispatch_to(rank).objects
        return () if objects is None else objects.names

    def _keep_known(self, kept: Mapping[int, int], replaced: Mapping[int, int], world_size: int) -> None:
        """Keep what is known of the variables that new ranks may get from others."""
        whole = {rank: each for rank, each in self.names.items() if rank not in self.reborn}
        reborn: dict[int, messages.LastKnown] = {}
        for rank in range(world_size):
            before = kept.get(rank, replaced.get(rank, -1))
            if before in self.reborn:
                # One that had not got any yet is still to get what it had before.
                reborn[rank] = self.reborn[before]
            elif rank in replaced:
                cut, brought = self._gone.get(before, ({}, ()))
                among = {each: known for each, known in cut.items() if each in whole} or whole
                reborn[rank] = last_known(before, among, whole if cut else None, brought)
            elif rank not in kept:
                reborn[rank] = known_to_all(whole, self._unlike, self._cut_off)
        if lost := whole.keys() - {*kept.values(), *replaced.values()}:
            # What the others have made of it since is no difference to what the lost ones had.
            cut = next((self._gone[each][0] for each in lost & self._gone.keys() if self._gone[each][0]), {})
            among = {each: known for each, known in cut.items() if each in whole} or whole
            self._unlike |= unlike(among, lost)
            self._cut_off = alike(among, kept.values()) if cut else ()
        self.reborn, self._gone = reborn, {}

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        """Release those of these ranks that have failed: none is still at work."""
        self.feed(lifecycle.RanksStopped(frozenset(ranks)))

    def membership_changing(self) -> None:
        """Expect the end of all ranks before the first is ended: how their peers fail then is no failure."""
        self.feed(Trigger.MEMBERSHIP_CHANGING)
        for host in self._hosts:
            host.follow()

    def measured(self, usages: Mapping[int, messages.Usage]) -> None:
        if self._measuring:
            self.usages |= usages
        self.feed(messages.Measured(usages=dict(usages)))

    def stacks_read(self, stacks: Mapping[int, str]) -> None:
        self.feed(lifecycle.StacksRead(stacks))

    # --- on the hub's thread: messages of ranks -------------------------------------------------

    def receive(self, message: messages.FromRank, data: bytes | None = None) -> None:
        """Feed a rank's message, after the output that came before it; `data` is what the rank has sent."""
        if isinstance(message, messages.ClockAsked):
            # Before all else: what comes between counts as an error of the rank's clock.
            self._send(message.rank, messages.ClockAnswered(message.number, time.time_ns()))
            return
        sent = message
        self._observe(self.logs.before(message))
        match message:
            case messages.Hello():
                message = msgspec.structs.replace(message, token="")  # those who follow a job need none
            case messages.Names():
                # Thousands of ranks may send the same text: keep one copy.
                known = next(iter(self.names.values()), message)
                if known.names == message.names:
                    message = msgspec.structs.replace(message, names=known.names)
                before = self.names.get(message.rank)
                self.names[message.rank] = message
                # What changes with each cell is of use here alone.
                unseen = (
                    before is not None
                    and msgspec.structs.replace(message, sketches=before.sketches) == before
                )
                if self.listener is not None and not unseen:
                    self.listener.names_changed(message)
            case messages.Asked() if self.job is not None:
                self.job.asked(message)
            case messages.Returned() | messages.Profiled():
                taken = None if self.job is None else self.job.take(message)
                if taken is None:
                    return  # its job has ended
                message = taken
            case _:
                pass
        message = self._with_holders(message)
        self._raw = (message, data) if data is not None and message is sent else (None, b"")
        self.feed(message)
        self._raw = None, b""

    def _observe(self, output: Iterable[messages.Printed]) -> None:
        for printed in output:
            if self.job is not None and self.job.shows(printed):
                self.feed(printed)

    def _with_holders(self, message: messages.FromRank) -> messages.FromRank:
        """Add to the failure of a rank that lacked GPU memory which processes hold it."""
        if not isinstance(message, messages.Raised) or message.failure.memory is None:
            return message
        node = self.state.ranks[message.rank].node
        caller, here = self.settings.caller, message.rank not in self.life.remote
        holders = {caller.pid: caller.name} if here and node == platform.node() else {}
        for group in self._hub.members():
            known = group.state.ranks.values() if isinstance(group, WorkerGroup) else ()
            name = "rank {}" if group is self else "ranks of other runs"
            holders |= {rank.pid: name.format(rank.rank) for rank in known if rank.pid and rank.node == node}
        failure = failures.explain_out_of_memory(message.failure, message.rank, holders, caller.name)
        return msgspec.structs.replace(message, failure=failure)

    # --- on the hub's thread: the loop -----------------------------------------------------------

    @property
    def quiet(self) -> bool:
        return self.life.quiet

    def tick(self, now: float) -> None:
        job = self.job
        if job is not None and not job.ended.is_set():
            self._observe(self.logs.news(job.state.ranks))
        self.feed(Trigger.TICK, now)

    def lost(self, error: Exception) -> None:
        """End the run: no message of its ranks arrives any more."""
        self._error = RunFailedError(
            f"lost the connection to the ranks (hub socket: {error}); they were terminated. "
            "The next run reconnects.",
            kind=FailureKind.CONNECTION_LOST,
        )
        self.feed(Trigger.HUB_LOST)

    def _go_on(
        self, message: messages.AttemptStarted, kept: Mapping[int, int], replaced: Mapping[int, int]
    ) -> None:
        if self.life.replaces:
            self._keep_known(kept, replaced, message.world_size)
        if any(rank != before for rank, before in (*kept.items(), *replaced.items())):
            self.numbered_in = message.number
        names = self.names
        self.names = {
            rank: msgspec.structs.replace(names[before], rank=rank)
            for rank, before in kept.items()
            if before in names
        }
        self.feed(lifecycle.AttemptStarting(message, kept))
        self.logs.renumber(message.number, kept)
        if self.listener is not None:
            self.listener.ranks_renumbered(self.attempt, kept)

    def _on_agent_end(self, error: BaseException | None) -> None:
        try:
            self._hub.drain(_LAST_DRAIN_SECONDS)
            self.feed(Trigger.DRAINED)
            self._observe(self.logs.rest_of_all())
        except Exception as broken:  # noqa: BLE001 - the caller that waits for the end must see it
            error = error or broken
        finally:
            self._error = self._error or error
            if isinstance(error, RunPreemptedError):
                self.feed(lifecycle.Preemption(str(error), None))
            self.feed(Trigger.AGENT_ENDED)

    def _close(self, *, succeeded: bool) -> None:
        # Here and not in `close`: a caller who is interrupted once more may never come that far.
        self._hub.remove(self)
        for host in self._hosts:
            host.close(succeeded=succeeded)
        self.logs.close()
        remove_tree(self._directory)
        self.closed.set()
        if self._unused_logs is not None:
            remove_tree(self._unused_logs)
        if self.listener is not None:
            self.listener.group_closed()
        self.when_closed()

    def feed(self, event: GroupEvent, now: float | None = None) -> None:
        """Feed an event to the machine, and perform the actions that follow; only on the hub's thread."""
        self.life, actions = step(self.life, event, time.monotonic() if now is None else now)
        self.attempt = self.life.attempt
        job, known = self.job, self.life.job
        if job is not None and known is not None and not job.ended.is_set():
            job.known = known
        for action in actions:
            # `close`, on another thread, drops `self.job` as soon as the group is closed.
            if not isinstance(action, Publish):
                self._perform(action, job)
            elif job is not None and job.listeners:
                # What a rank has sent need not be encoded again, if the message is still that one.
                message, (sent, data) = action.message, self._raw
                job.publish(message, data if sent is message else messages.encode(message))

    def _perform(self, action: Action, job: Job | None) -> None:
        match action:
            case Send(rank, message):
                self._send(rank, message)
            case lifecycle.Explain(exited):
                self._observe(self.logs.rest(exited.rank))
                self.feed(lifecycle.ExitExplained(exited))
            case lifecycle.ReadStacks(ranks):
                for host in self._hosts:
                    host.read_stacks(ranks)
            case lifecycle.RanksLocated(number, report):
                self._who_surveys.pop(number).set_result(report)
            case lifecycle.ReleaseWorkers(succeeded, others):
                for host in self._hosts:
                    host.release(succeeded=succeeded, others=others)
            case Order.CLOSE_GROUP:
                known = self.life.job
                self._close(succeeded=known is not None and known.succeeded)
            case Order() if action in _OF_HOSTS:
                for host in self._hosts:
                    _OF_HOSTS[action](host)
            case _ if job is not None:
                self._perform_for(job, action)

    def _perform_for(self, job: Job, action: Action) -> None:
        match action:
            case lifecycle.SendJob(rank):
                self._send(rank, job.dispatch_to(rank))
            case messages.Noticed(text=text):
                job.late.append(text)
            case Order.FINISH_JOB:
                job.finish(time.time(), self._error)
                self.usages = {}
            case Order.KEEP_PAYLOAD:
                job.payload_kept()
            case Order.FORGET_VALUES:
                job.release_values()
            case _:
                pass

    def _send(self, rank: int, message: messages.ToRank) -> None:
        any(host.send(rank, message) for host in self._hosts)
