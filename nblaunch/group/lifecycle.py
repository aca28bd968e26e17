"""How long ranks may take to come into being, phase by phase, and what is said when they do not."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from nblaunch._cgroups import oom_kills
from nblaunch._results import EventLog
from nblaunch.diagnose import hang
from nblaunch.diagnose.failures import explain_exit
from nblaunch.elastic.logs import read_end, read_text
from nblaunch.elastic.settings import AgentSettings
from nblaunch.elastic.thread import AgentThread
from nblaunch.group.hub import Hub
from nblaunch.group.job import Job, RankLogs
from nblaunch.group.members import Nodes
from nblaunch.group.recovery import Interruption, Recovery
from nblaunch.group.stacks import StackRequest
from nblaunch.protocol import nodes as wire
from nblaunch.protocol.messages import (
    Arrived,
    AttemptStarted,
    Entered,
    Exited,
    Hello,
    Leave,
    Message,
    Names,
    Noticed,
    Phase,
    Prepare,
    Proceed,
    Recovered,
    ReportReached,
    RunEnded,
    ToRank,
    Waiting,
    fatal_path,
)
from nblaunch.protocol.reports import format_ranks
from nblaunch.protocol.state import RunState, State, advance

CONNECT_SECONDS = 60.0
PROCESS_GROUP_SECONDS = 120.0


class Phases:
    """The phases of one attempt that have a limit, one after the other: connect, process group."""

    def __init__(self) -> None:
        """Begin without a limit."""
        self._phase: Phase | None = None
        self._deadline = float("inf")
        self._reached: dict[Phase, set[int]] = {Phase.CONNECT: set(), Phase.PROCESS_GROUP: set()}

    @property
    def without_limit(self) -> bool:
        """Whether nothing becomes overdue."""
        return self._deadline == float("inf")

    def begin_connect(self) -> None:
        """Limit the time until ranks that have been forked are heard, if they have not been already."""
        if self._phase is None:
            self._begin(Phase.CONNECT, CONNECT_SECONDS)

    def begin_process_group(self, world_size: int) -> None:
        """Limit the time in which ranks form their group, once the last of them is connected."""
        if self._phase is not Phase.PROCESS_GROUP and len(self._reached[Phase.CONNECT]) == world_size:
            self._begin(Phase.PROCESS_GROUP, PROCESS_GROUP_SECONDS)

    def reached(self, phase: Phase, rank: int) -> None:
        """Take note that a rank has come to the end of a phase."""
        self._reached[phase].add(rank)

    def wait_without_limit(self, world_size: int) -> None:
        """All are connected, and nobody has told them to go on: that may take as long as it likes."""
        if len(self._reached[Phase.CONNECT]) == world_size:
            self._deadline = float("inf")

    def passed(self) -> None:
        """All phases are over."""
        self._deadline = float("inf")

    def overdue(self, now: float, state: RunState) -> tuple[str, str] | None:
        """Return the phase whose time is over, and what is to be said of it; once."""
        if now <= self._deadline or self._phase is None:
            return None
        self._deadline = float("inf")
        late = state.ranks.keys() - self._reached[self._phase]
        seconds = CONNECT_SECONDS if self._phase is Phase.CONNECT else PROCESS_GROUP_SECONDS
        what = f"phase '{self._phase}' did not finish in {seconds:.0f} s"
        return self._phase.value, f"{what}: {format_ranks(late)} did not come that far"

    def _begin(self, phase: Phase, seconds: float) -> None:
        self._phase, self._deadline = phase, time.monotonic() + seconds


# --- Processes that are gone: why, and when all that they had to say has arrived.


# A rank's last words may still lie in the socket when its process is gone.
_LAST_WORDS_SECONDS = 0.05
# NCCL's watchdog writes some 10 KB when it ends a process.
_STDERR_BYTES = 200_000


class Exits:
    """The exits of one attempt's ranks; used on the hub's thread only."""

    def __init__(self, directory: Path) -> None:
        """Nobody has gone; dying ranks write their stacks to `directory`."""
        self.ranks: set[int] = set()
        """Who has gone."""
        self._directory = directory
        self._waiting: dict[int, tuple[float, Exited]] = {}
        self._oom_before = oom_kills()

    @property
    def waiting(self) -> bool:
        """Whether last words are being waited for."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Begin another attempt."""
        self.ranks, self._waiting = set(), {}

    def note(self, exited: Exited, now: float) -> None:
        """Take note of a process that is gone."""
        self.ranks.add(exited.rank)
        self._waiting[exited.rank] = (now + _LAST_WORDS_SECONDS, exited)

    def due(self, job: Job | None, now: float) -> Iterator[Exited]:
        """Yield exits of ranks that have no more to say, or have had the time to."""
        for rank, (when, exited) in list(self._waiting.items()):
            if job is not None and not job.has_outcome(rank) and now < when:
                continue
            del self._waiting[rank]
            yield exited

    def explained(self, exited: Exited, titles: Mapping[str, str], stderr: str = "") -> Exited:
        """Return the exit with its reason, and with the stacks that the rank has written.

        `stderr` is the path of what it has printed there.
        """
        if exited.expected or exited.reason:
            return exited
        dump = read_text(str(fatal_path(str(self._directory), exited.rank)))
        said = read_end(stderr, _STDERR_BYTES) if stderr else ""
        why = explain_exit(exited.exitcode, dump, titles, oom_before=self._oom_before, stderr=said)
        return msgspec.structs.replace(exited, reason=why.reason, details=why.details)


# --- The course of the jobs of a worker group: dispatched, settled, healed or restarted, ended.
#
# A group of one run is let go with its job. A kept group goes on: ranks that are stuck are freed, the
# process group is formed again where it may be broken, and only ranks that do not come back are replaced.


# How long the other ranks may take to say what happened to them once one has failed.
SETTLE_SECONDS = 0.1
# Only a rank that holds its interpreter does not answer.
_LEFT_OPEN_SECONDS = 2.0
# Who waits for less than this needs no explanation.
_SAY_SECONDS = 1.0
REFORMING = "re-forming the process group"
# How long ranks that are seen to be at it may take to form their group again.
RECOVERY_SECONDS = 60.0
REFORMED = (
    "process group re-formed; variables kept; groups you made yourself (new_group, DeviceMesh) are gone"
)


class Lifecycle:
    """What becomes of a group's jobs; all methods run on the hub's thread."""

    _agent: AgentThread
    _exits: Exits

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
        self._late: StackRequest | None = None
        self._recover_until = 0.0
        self._interruption = Interruption(self._send)
        self._recovery = Recovery(self._send)
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
        if not job.internal:
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
        if job.stack_request is None:
            job.stack_request = StackRequest(self.state.ranks)
            self._interruption.ask(job.stack_request)
            job.settle_at = time.monotonic() + _LEFT_OPEN_SECONDS
        elif job.stack_request.complete.is_set() or time.monotonic() >= (job.settle_at or 0.0):
            left = hang.report(job.stack_request.answers).findings
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
        if self._exits.ranks:
            return  # the agent ends the others, and starts the group again
        if not job.state.finished:
            self._free(job)
            return
        job.settled, self._restart_at = True, None
        if job.succeeded:
            self._finish(job)
        else:
            self._restart_at = time.monotonic() + max(self.settings.grace, 1.0)
            self._recover_until, self._late = time.monotonic() + RECOVERY_SECONDS, None
            self._recovery.begin(self.state.ranks, self._interruption)

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
        reforming = self._recovery.reforming_since
        if job is not None and reforming is not None and now >= reforming + _SAY_SECONDS:
            job.fold(Waiting(doing=REFORMING))

    def _overdue(self, now: float) -> None:
        """Replace ranks that do not come back, unless they are at it: a large heap takes time to collect."""
        if self._restart_at is None or now < self._restart_at:
            return
        if self._late is None:
            self._late = StackRequest(self._recovery.awaited)
            self._interruption.ask(self._late)
            self._restart_at = now + 1.0
            return
        late, self._late = self._late, None
        busy = late.missing | {rank for rank, where in late.answers.items() if where.frames}
        if busy and now < self._recover_until:
            self._restart_at = now + 1.0
        else:
            self._restart("ranks did not come back within the grace period")
            self._note(f"{format_ranks(self._recovery.awaited)} did not get ready for another job")

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
        if job is not None and not job.ended.is_set() and not job.internal:
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

    def _on_recovered(self, message: Recovered) -> None:
        outcome = self._recovery.recovered(message)
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
