"""The course of the jobs of a worker group: dispatched, settled, healed or restarted, ended.

A group of one run is let go with its job. A kept group goes on: ranks that are stuck are freed, the
process group is formed again where it may be broken, and only ranks that do not come back are replaced.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection

from nblaunch import _node_protocol as wire
from nblaunch._events import EventLog
from nblaunch._protocol import (
    Arrived,
    AttemptStarted,
    Entered,
    Healed,
    Hello,
    Leave,
    Message,
    Names,
    Noticed,
    Phase,
    Prepare,
    Proceed,
    ReportReached,
    RunEnded,
    ToRank,
    Waiting,
)
from nblaunch._reports import format_ranks
from nblaunch._state import RunState, State, advance
from nblaunch.agent.contract import AgentSettings
from nblaunch.agent.thread import AgentThread
from nblaunch.diagnose import hang
from nblaunch.session.departures import Departures
from nblaunch.session.healing import Healing
from nblaunch.session.hub import Hub
from nblaunch.session.inquiry import Inquiry
from nblaunch.session.interruption import Interruption
from nblaunch.session.job import Job
from nblaunch.session.nodes import Nodes
from nblaunch.session.phases import Phases
from nblaunch.session.rank_logs import RankLogs

# How long the other ranks may take to say what happened to them once one has failed.
SETTLE_SECONDS = 0.1
# Only a rank that holds its interpreter does not answer.
_LEFT_OPEN_SECONDS = 2.0
# Who waits for less than this needs no explanation.
_SAY_SECONDS = 1.0
REFORMING = "re-forming the process group"
# How long ranks that are seen to be at it may take to form their group again.
HEAL_SECONDS = 60.0
REFORMED = (
    "process group re-formed; variables kept; groups you made yourself (new_group, DeviceMesh) are gone"
)


class Course:
    """What becomes of a group's jobs; all methods run on the hub's thread."""

    _agent: AgentThread
    _departures: Departures

    def __init__(self, hub: Hub, settings: AgentSettings, *, keep: bool) -> None:
        """Begin without a job."""
        self.group = secrets.token_hex(4)
        self.attempt = 0
        self.keep = keep
        self.settings = settings
        self.state = RunState.fresh(settings.nproc, time=time.time())
        """The ranks themselves; what becomes of a job is in `job.state`."""
        self.job: Job | None = None
        self.names: dict[int, Names] = {}
        """Of a kept group: the variables that each rank has."""
        self.lost_keys: dict[int, tuple[int, ...]] = {}
        """Of a kept group: keys of objects that each rank has lost, until `take_lost`."""
        self.closed = threading.Event()
        self.events = EventLog()
        """What torchelastic has recorded of these ranks."""
        self._notes: list[str] = []
        """Of a kept group: what has happened to its ranks and has not been told with a job yet."""
        self._hub = hub
        self._prepare: Prepare | None = None
        self._ready: set[int] = set()
        self._logs = RankLogs()
        self._error: BaseException | None = None
        self._launch_failure: tuple[str, str] | None = None
        self._restart_at: float | None = None
        """When ranks that are being healed are taken for lost."""
        self._late: Inquiry | None = None
        self._heal_until = 0.0
        self._interruption = Interruption(self._send)
        self._healing = Healing(self._send)
        self._nodes: Nodes | None = None
        self._replacing = False
        """Whether the ranks of this attempt are being ended, and others are to take their place."""
        self._changing = False
        """Whether a node comes or goes: what becomes of the ranks of this attempt is no failure."""
        self._phases = Phases()
        self._ending = False
        """Whether the ranks of this attempt were told to let go of NCCL, since they are about to be ended."""
        self._holding: set[int] = set()
        self._let_go = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether all ranks of this attempt have come into being."""
        return len(self._ready) == self.state.world_size

    @property
    def _titles(self) -> dict[str, str]:
        return self.job.titles if self.job is not None else {}

    def _send(self, rank: int, message: ToRank) -> None:
        if self._nodes is None or not self._nodes.send(rank, message):
            self._hub.send(self, rank, message)

    def _tell_nodes(self, message: wire.ToNode) -> None:
        if self._nodes is not None:
            self._nodes.tell(message)

    def _begin(self, job: Job | None, prepare: Prepare) -> None:
        self.job = job
        if self._prepare is None:
            self._prepare = prepare
            for rank in self.state.ranks.values():
                if rank.node:
                    self._send(rank.rank, prepare)
            self._phases.begin_process_group(self.state.world_size)
        if job is None:
            return
        job.logs = self._logs.begin_job(self.attempt)
        self._interruption.reset()
        if self.closed.is_set():
            self._finish(job)
            return
        job.state = job.state.seated(self.state.ranks, self.attempt)
        if not job.aside:
            notes, self._notes = self._notes, []
            for note in notes:
                job.fold(Noticed(text=note))
        self._dispatch_when_ready()

    def _dispatch_when_ready(self) -> None:
        """Dispatch once every rank has its process group, and its log files are known."""
        if len(self._ready) < self.state.world_size or not self._logs.known(self.state.world_size):
            return
        self._phases.passed()
        job = self.job
        if job is None or job.dispatched or job.settled or job.ended.is_set() or self._interruption.begun:
            return
        job.dispatched = True
        for rank in job.state.ranks:
            self._send(rank, job.dispatch_to(rank))
            # A rank that dies at once (`os._exit`) may not live to say that its job has begun.
            job.fold(Entered(rank=rank, phase=Phase.JOB))

    def _on_arrived(self, message: Arrived) -> None:
        """Let the job begin once its payload is whole on every rank; if it cannot be, no rank keeps it."""
        job = self.job
        if job is None or job.ended.is_set() or self._interruption.begun or job.state.failed:
            return
        job.arrived.add(message.rank)
        if job.arrived == job.state.ranks.keys():
            job.whole()
            for rank in job.state.ranks:
                self._send(rank, Proceed())

    def _after(self, job: Job) -> None:
        """Do what follows from a change of the job's state."""
        if job.ended.is_set():
            return
        if job.state.finished:
            self._settled(job)
        elif job.state.failed and job.settle_at is None:
            job.settle_at = time.monotonic() + SETTLE_SECONDS

    def _ask_how_far(self) -> None:
        state = self.job.state if self.job is not None else self.state
        if len(state.ranks) > 1:
            for rank in state.ranks.values():
                if rank.state is State.RUNNING:
                    self._hub.send(self, rank.rank, ReportReached())

    def _settled(self, job: Job) -> None:
        """Every rank of the job has an outcome, or has had the time to say what happened to it."""
        if job.settled or self._changing:
            return
        if self.keep:
            self._settled_and_kept(job)
            return
        if job.succeeded and not self._have_ended(job):
            return
        job.settled, job.settle_at = True, None
        others = frozenset(rank.rank for rank in job.state.ranks.values() if not rank.state.final)
        self._agent.release(succeeded=job.succeeded, others=others)
        self._tell_nodes(
            wire.Release(attempt=self.attempt, succeeded=job.succeeded, others=tuple(sorted(others)))
        )
        if not others:
            self._send_leave()
        if self._interruption.begun:
            self._agent.stop()  # also: no restart
        elif job.succeeded:
            # All values are here: the ranks leave while the user goes on.
            self._finish(job)

    def _have_ended(self, job: Job) -> bool:
        """Whether what NCCL still does will end; looks at it first where a rank has left something open."""
        if not job.open or job.unmatched:
            return True
        if job.inquiry is None:
            job.inquiry = Inquiry(self.state.ranks)
            self._interruption.ask(job.inquiry)
            job.settle_at = time.monotonic() + _LEFT_OPEN_SECONDS
        elif job.inquiry.complete.is_set() or time.monotonic() >= (job.settle_at or 0.0):
            left = hang.report(job.inquiry.answers).findings
            job.unmatched = bool(left)
            for each in left:
                job.fold(Noticed(text=f"the run ended with a collective open, which was aborted: {each}"))
            return True
        return False

    def _settled_and_kept(self, job: Job) -> None:
        job.settle_at = None
        if not job.dispatched:
            self._agent.stop()  # they have not even come into being: others would not either
            return
        if self._departures.ranks:
            return  # the agent ends the others, and starts the group again
        if not job.state.finished:
            self._free(job)
            return
        job.settled, self._restart_at = True, None
        if job.succeeded:
            self._finish(job)
        else:
            self._restart_at = time.monotonic() + max(self.settings.grace, 1.0)
            self._heal_until, self._late = time.monotonic() + HEAL_SECONDS, None
            self._healing.begin(self.state.ranks, self._interruption)

    def _free(self, job: Job) -> None:
        """Have the ranks that are still at work give up: a peer of theirs has."""
        if not self._interruption.begun:
            self._interruption.begin(job.state)

    def _press(self, now: float) -> None:
        """Replace the ranks of a kept group that have seen the interrupt twice, and do not end their job."""
        job = self.job
        if not self.keep or job is None or job.ended.is_set() or not job.dispatched:
            return
        self._interruption.press(now, self.settings.grace)
        unfreed = self._interruption.unfreed(now)
        if unfreed and not self._replacing:
            self._restart(f"{format_ranks(unfreed)} could not be freed: NCCL did not abort its collective")
        deaf = self._interruption.deaf(now)
        if deaf and not self._replacing:
            self._restart(
                f"{format_ranks(deaf)} went on after two interrupts, --grace {self.settings.grace:g} s apart"
            )

    def _say_what_takes_long(self, now: float) -> None:
        """Show that ranks re-form their process group: on GPUs that may take seconds."""
        job = self.job
        reforming = self._healing.reforming_since
        if job is not None and reforming is not None and now >= reforming + _SAY_SECONDS:
            job.fold(Waiting(doing=REFORMING))

    def _overdue(self, now: float) -> None:
        """Replace ranks that do not come back, unless they are at it: a large heap takes time to collect."""
        if self._restart_at is None or now < self._restart_at:
            return
        if self._late is None:
            self._late = Inquiry(self._healing.awaited)
            self._interruption.ask(self._late)
            self._restart_at = now + 1.0
            return
        late, self._late = self._late, None
        busy = late.missing | {rank for rank, where in late.answers.items() if where.frames}
        if busy and now < self._heal_until:
            self._restart_at = now + 1.0
        else:
            self._restart("ranks did not come back within the grace period")
            self._note(f"{format_ranks(self._healing.awaited)} did not get ready for another job")

    def _heard(self) -> None:
        """Give ranks that are being healed, and speak, their time: a busy machine is slow, not broken."""
        if self._restart_at is not None and self.job is not None and self.job.settled:
            self._restart_at = time.monotonic() + max(self.settings.grace, 1.0)

    def _finish(self, job: Job) -> None:
        """End the job: its result can be made."""
        job.error, job.launch_failure = job.error or self._error, self._launch_failure
        if job.state.doing:
            job.fold(Waiting())
        if not job.state.finished:
            job.fold(RunEnded(time=time.time(), stopped=job.error is None))
        job.ended.set()

    def _interrupt(self, asked: Job | None) -> None:
        job = self.job
        if asked is not None and asked is not job:
            self._finish(asked)  # the interrupt came before the job had been given to the ranks
            return
        if job is None or job.ended.is_set():
            return
        job.interrupted = True
        self._interruption.begin(job.state)
        if job.dispatched:
            return
        if self.keep:
            self._finish(job)
        else:
            self._agent.stop()  # nothing of the user's runs yet: there is nobody to wait for

    def _restart(self, reason: str) -> None:
        self._restart_at = None
        if not self.closed.is_set():
            self._replacing = True
            self._note(reason)
            self._agent.restart()

    def _note(self, text: str) -> None:
        """Tell what has happened to the ranks with the job that is there, or else with the next one."""
        job = self.job
        if job is not None and not job.ended.is_set() and not job.aside:
            job.fold(Noticed(text=text))
        else:
            self._notes.append(text)

    def forget_notes(self) -> None:
        """Tell nothing of what has happened so far: whoever would be told knows."""
        self._hub.call(self._notes.clear)

    def _dismiss(self) -> None:
        self._agent.release(succeeded=True, others=frozenset())
        for rank in self.state.ranks:
            self._send(rank, Leave())

    def _send_leave(self, only: Collection[int] | None = None) -> None:
        job = self.job
        if job is None:
            return
        # A rank that waits for what a failed one has not begun would wait for ever.
        abort = job.unmatched or not job.succeeded
        for rank in job.state.ranks.values():
            if only is not None and rank.rank not in only:
                continue
            if rank.state is State.FAILED and rank.failure is not None:
                self._send(rank.rank, Leave(exitcode=_as_exitcode(rank.failure.exitcode), abort=abort))
            elif rank.state.final:
                self._send(rank.rank, Leave(abort=abort))

    def _on_healed(self, message: Healed) -> None:
        outcome = self._healing.healed(message)
        if outcome is None:
            return
        job, self._restart_at = self.job, None
        if outcome.failed:
            self._restart(outcome.failed)
            return
        if outcome.reformed:
            self._note(REFORMED)
        if outcome.dead:
            self._note(f"made for a process group that is gone, with what revives each: {outcome.dead}")
        if job is not None and not job.ended.is_set():
            self._finish(job)

    def _fold(self, message: Message) -> None:
        """Fold what is about the ranks themselves, and what is about the job."""
        if isinstance(message, Hello | Entered | AttemptStarted):
            self.state = advance(self.state, message)
        job = self.job
        if job is not None:
            before = job.state
            job.fold(message)
            if job.state is not before:
                self._after(job)


def _as_exitcode(code: int) -> int:
    """Return what a process can end with: `sys.exit(256)` would be a success."""
    return code & 0xFF or 1
