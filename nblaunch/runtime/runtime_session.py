"""The sessions of a runtime: ranks that stay, the client that owns them, and those that follow them.

Everything here runs on the hub's thread, unless a method says otherwise.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import msgspec

from nblaunch._errors import LaunchError, NblaunchError
from nblaunch._help import FailureKind
from nblaunch._results import held_by
from nblaunch.group.group import WorkerGroup
from nblaunch.group.lifecycle import Trigger
from nblaunch.group.machine import RestartAsked
from nblaunch.group.standby import GroupAndLogs
from nblaunch.host.hub import Hub
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import client as wire
from nblaunch.protocol.messages import Names, Prepare
from nblaunch.protocol.reports import session_busy, session_ended
from nblaunch.protocol.state import RankState, State
from nblaunch.runtime.archive import Archive
from nblaunch.runtime.connections import ClientConnection
from nblaunch.runtime.jobs import RunningJob
from nblaunch.runtime.worker_groups import PersistentRanks

_CLOSE_SECONDS = 10.0


class RuntimeSession:
    """Persistent ranks; one job at a time."""

    def __init__(
        self, opened: wire.OpenRanks, kept: PersistentRanks, owner: ClientConnection, archive: Archive
    ) -> None:
        """Follow the ranks, which are not started yet."""
        self.key = opened.session
        self.name = opened.name
        self.options: LaunchOptions = opened.options
        self.placement: wire.Placement = kept.place.placement
        self.prepare: Prepare = kept.place.prepare
        self.detached = opened.detached
        self.linger = opened.options.linger
        self._idle_since = time.monotonic()
        self.unused: Callable[[], None] = lambda: None
        """Called when a job has ended, or a client has gone."""
        self.made: GroupAndLogs = kept.made
        self.group: WorkerGroup = kept.made.group
        self.nodes = kept.nodes
        """The nodes that an engine places for the session; runs on fresh ranks may use them."""
        self._leave_nodes = kept.leave
        self.owner: ClientConnection | None = owner
        """The owner, which submits jobs; other followers of other processes watch."""
        self.followers: set[ClientConnection] = {owner}
        self.tenure = 0
        """How often the owner has changed to another process."""
        self.running: RunningJob | None = None
        self.archive = archive
        """The jobs that the user submitted, and that have ended."""
        self.unreleased: set[int] = set()
        """Jobs to which a result refers, and so to the logs of these ranks."""
        self._logs: dict[int, Mapping[int, Mapping[int, wire.RankLogFiles]]] = {}
        """Logs of finished jobs that can still be opened, oldest first."""
        archive.forgotten = self._forgotten
        self.started = time.time()
        self._restarted = False
        self.group.listener = self

    @property
    def open(self) -> bool:
        return not self.group.closed.is_set()

    @property
    def world_size(self) -> int:
        return self.group.state.world_size

    @property
    def grace(self) -> float:
        """The grace period of the running job, or of the ranks without one, in seconds."""
        running = self.running
        return max(self.options.grace, 0.0 if running is None else running.order.options.grace)

    @property
    def linger_left(self) -> float | None:
        """In how many seconds a detached session ends; None for others, and while it is in use."""
        if not self.detached or self.followers or self.running is not None:
            return None
        return self.linger - (time.monotonic() - self._idle_since)

    # --- jobs ----------------------------------------------------------------------------------------

    def refuse_if_busy(self) -> None:
        if not self.open:
            raise LaunchError(
                session_ended(self.name, self.group.why_closed), phase="job", kind=FailureKind.SESSION_ENDED
            )
        if self.running is not None:
            queries = self.running.given_by if self.running.order.query else None
            by = "" if queries is None else f"{queries.name} (process {queries.pid})"
            raise NblaunchError(session_busy(self.name, queried_by=by), kind=FailureKind.SESSION_BUSY)

    def submit(self, hub: Hub, job: RunningJob, jobs: dict[int, RunningJob]) -> None:
        """Submit a job to the ranks, which is one of `jobs` as long as the archive does not keep it."""
        self.running = job
        self.unreleased.add(job.number)
        job.when_over.append(functools.partial(self._over, job, jobs))
        job.let_go = functools.partial(self._let_go, job.number)
        job.begin(hub, self.group, self.prepare)

    def _let_go(self, number: int) -> None:
        self.unreleased.discard(number)
        self._forgotten(number)

    def _forgotten(self, number: int) -> None:
        """Free the space of logs that cannot be opened any more."""
        if number in self.unreleased or self._logs.pop(number, None) is None:
            return
        running: Mapping[int, Mapping[int, wire.RankLogFiles]] = {}
        if self.running is not None:
            running = self.running.logs
        # Those of a job that no rank has begun are empty.
        self.group.logs.free_before(next(filter(None, (*self._logs.values(), running)), {}))

    def _over(self, job: RunningJob, jobs: dict[int, RunningJob]) -> None:
        if not job.order.internal:
            self._logs[job.number] = job.logs
            self.archive.add(job)
        if self.archive.get(job.number) is not None:
            jobs.pop(job.number, None)
            self.unreleased.discard(job.number)
        if self.running is job:
            self.running = None
            self._idle_since = time.monotonic()
            if self.linger_left is not None:
                self.unused()
        if self._restarted:
            self._restarted = False
            self.group.post(Trigger.FORGET_NOTES)

    def keeps(self, number: int) -> bool:
        """Whether a job is this session's own, also when no client refers to it."""
        running = self.running
        mine = running is not None and running.number == number and not running.order.internal
        return self.detached and (mine or self.archive.get(number) is not None)

    def interrupt(self) -> None:
        running = self.running
        if running is not None:
            running.interrupt(sparing=True)

    # --- the ranks; on a thread that may wait ----------------------------------------------------------

    def restart(self) -> None:
        if not self.open:
            raise LaunchError(session_ended(self.name), phase="job", kind=FailureKind.SESSION_ENDED)
        before = self.group.attempt
        self.group.post(RestartAsked("the session was restarted"))
        deadline = time.monotonic() + self.options.grace + _CLOSE_SECONDS
        while self.group.attempt == before and time.monotonic() < deadline:
            if self.group.closed.wait(0.01):
                break
        self._restarted = True

    def close(self) -> None:
        """End the ranks and wait until they have exited."""
        job = self.running
        if job is not None and not job.ended.is_set():
            if self.detached:
                job.ended_with = f"session {self.name!r} was stopped, and the job that ran with it."
            self.interrupt()
            job.ended.wait(self.grace)
        self.group.post(Trigger.DISMISS)
        if not self.group.closed.wait(_CLOSE_SECONDS):
            self.group.stop()
            self.group.closed.wait(_CLOSE_SECONDS)
        self.group.close()
        # Nothing may write in the private directory while it is removed.
        self.archive.flush()
        self._leave_nodes()

    def record(self) -> wire.SessionRecord:
        """Return what each rank is doing, and the memory that is its own."""
        running, owner = self.running, self.owner
        shown = None if running is None or running.order.internal else running
        memory = self.group.memory()
        ranks = {} if running is None or running.end is not None else running.state.ranks
        open_questions = () if running is None else running.known.questions
        prompts = {each.rank: each.prompt for each in reversed(open_questions)}
        asks = {rank: f"asks {prompt!r:.60}" for rank, prompt in prompts.items()}
        doing = running.state.doing if running is not None and running.end is None else ""
        members = sorted(self.group.state.ranks.items())
        return wire.SessionRecord(
            name=self.name,
            # If an engine places the nodes, the placement is provisional.
            world_size=len(members) or self.placement.nproc,
            backend=self.placement.backend,
            attempt=self.group.attempt,
            detached=self.detached,
            linger_left=self.linger_left,
            client=None if owner is None else owner.record.pid,
            running="" if shown is None else shown.order.title,
            running_since=None if shown is None else shown.started,
            session=self.key,
            ranks=tuple(
                wire.RankStatus(
                    rank=rank,
                    state=self._word(known.node, ranks.get(rank)),
                    pid=known.pid,
                    device=known.device,
                    memory=memory.get(rank),
                    waiting=_waiting(ranks.get(rank)) or asks.get(rank, doing),
                    asks=prompts.get(rank),
                    node=known.node,
                    cpu=self._cpu(rank, ranks.get(rank)),
                )
                for rank, known in members
            ),
            started=self.started,
            engine=self.group.life.engine,
            grace=self.grace,
        )

    def _cpu(self, rank: int, job: RankState | None) -> float | None:
        used = self.group.usages.get(rank) or (job.usage if job is not None else None)
        return None if used is None else used.cpu_percent

    def _word(self, node: str, job: RankState | None) -> str:
        if not self.open:
            return "gone"
        if not node or not self.group.life.all_ready:
            return "starting"
        return "running" if job is not None and job.state is State.RUNNING else "idle"

    def job_records(self) -> tuple[wire.JobRecord, ...]:
        running = self.running
        now = () if running is None or running.order.internal else (running.record,)
        return (*self.archive.records, *now)

    # --- what the group reports ------------------------------------------------------------------------

    def names_changed(self, names: Names) -> None:
        event = wire.NamesChanged(session=self.key, names=names)
        # Which objects a rank has lost is of use to the process alone that has sent them.
        brief = wire.NamesChanged(session=self.key, names=msgspec.structs.replace(names, lost=()))
        for connection in self.followers:
            connection.names(event if self.other_owner(connection) is None else brief)

    def ranks_replaced(self, attempt: int) -> None:
        size, backend = self.group.state.world_size, self.group.backend
        self.placement = replace(self.placement, nproc=size, backend=backend or self.placement.backend)
        self._tell(wire.RanksReplaced(session=self.key, attempt=attempt, world_size=size, backend=backend))

    def ranks_renumbered(self, attempt: int, kept: Mapping[int, int]) -> None:
        size = self.group.state.world_size
        self.placement = replace(self.placement, nproc=size)
        reborn = self.group.reborn
        self._tell(
            wire.RanksRenumbered(
                session=self.key, attempt=attempt, world_size=size, kept=dict(kept), reborn=reborn
            )
        )

    def ranks_revived(self, ranks: Collection[int], attempt: int) -> None:
        """Have no client give variables to these ranks once more, by their numbers in `attempt`."""
        if attempt < self.group.numbered_in:
            return  # they have other numbers now
        lost = self.group.life.lost
        left = {rank: each for rank, each in self.group.reborn.items() if rank not in ranks or rank in lost}
        self.group.reborn = left
        size = self.group.state.world_size
        same = {rank: rank for rank in range(size)}
        self._tell(
            wire.RanksRenumbered(
                session=self.key, attempt=self.group.attempt, world_size=size, kept=same, reborn=left
            )
        )

    def group_closed(self) -> None:
        self._tell(wire.SessionEnded(session=self.key, why=self.group.why_closed))

    def _tell(self, event: wire.RuntimeEvent) -> None:
        for connection in self.followers:
            connection.event(event)

    # --- its clients -----------------------------------------------------------------------------------

    def other_owner(self, connection: ClientConnection) -> ClientConnection | None:
        """Return the owner, if it is another process than that of `connection`."""
        owner = self.owner
        return None if owner is None or owner.same_process_as(connection) else owner

    def refuse_unless_owner(self, connection: ClientConnection) -> None:
        self.refuse_other_versions(connection)
        other = self.other_owner(connection)
        if other is not None:
            raise NblaunchError(held_by(self.name, other.record), kind=FailureKind.SESSION_TAKEN)

    def refuse_other_versions(self, connection: ClientConnection) -> None:
        """Raise for a client whose pickles these ranks cannot read."""
        if why := connection.why_it_only_watches(self.name):
            raise NblaunchError(why, kind=FailureKind.OTHER_VERSION)

    def follow(self, connection: ClientConnection, *, take: bool) -> None:
        """Report to this client; make it the owner, unless another one is and it does not `take`."""
        if take:
            self.refuse_other_versions(connection)
        self.followers.add(connection)
        if connection.why_it_only_watches(self.name):
            return
        if take or self.other_owner(connection) is None:
            self.take_jobs_of(connection)

    def take_jobs_of(self, connection: ClientConnection) -> None:
        """Make this client the owner: it alone submits jobs and answers the questions of the ranks."""
        before, self.owner = self.owner, connection
        job = self.running
        if job is not None and not job.order.query and not job.is_of(connection):
            job.owner = connection
        if before is None or not before.same_process_as(connection):
            self.tenure += before is not None
            self._tell(wire.OwnerChanged(session=self.key, by=connection.record))

    def leave(self, connection: ClientConnection) -> None:
        """Send a connection nothing more; if it was the owner, another one of its process is."""
        if connection in self.followers:
            self.followers.discard(connection)
            self._idle_since = time.monotonic()
        if self.owner is not connection:
            return
        other = next((each for each in self.followers if each.same_process_as(connection)), None)
        if other is not None:
            self.take_jobs_of(other)
        else:
            self.owner = None
            self.tenure += 1
            self._tell(wire.OwnerChanged(session=self.key))


def _waiting(known: RankState | None) -> str:
    return "" if known is None or known.state.final else known.waiting
