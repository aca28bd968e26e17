"""The life of a worker group, as one pure machine: `step(state, event, now) -> (state, actions)`.

Everything that decides what becomes of a group and its jobs is in this module, and in the two machines of
`nblaunch.group.recovery` that it holds. `step` takes any event in any state, reads no clock (`now` is
monotonic), and does nothing itself: `nblaunch.group.group` feeds it events and performs its actions.

A group of one run is fresh: it is let go with its job, and torchelastic may start it again. A kept group (a
session's) goes on: ranks that are stuck are freed, the process group is formed again where it may be broken,
and only ranks that do not come back are replaced.

    stage        entered when                    next, and what for
    -----------  ------------------------------  ----------------------------------------------------------
    STARTING     an attempt begins               READY: every rank has formed its process group
                 deadlines: 60 s until all       (agent stopped: a deadline has passed, or a rank of a kept
                 ranks are connected, 120 s      group has died here: others would not come into being either)
                 for the process group
    READY        all ranks wait for a job        RUNNING: a job is given, and dispatched to its ranks
    RUNNING      the job is with the ranks       fresh: LEAVING once all have an outcome, or 0.1 s after the
                                                 first failure
                                                 kept: READY if all succeeded; INTERRUPTED 0.1 s after the
                                                 first failure; RECOVERING once all have an outcome
    INTERRUPTED  the user interrupts, or a       RECOVERING: all ranks have ended the job
                 peer of a kept rank failed      in turn: KeyboardInterrupt; stuck ranks are freed; the last
                                                 interrupt, a grace period after the first was seen; then
                                                 REPLACING. A rank in C code is waited for
    RECOVERING   a kept job has not succeeded    READY: all ranks are fit for another job; the job ends
                                                 REPLACING: one is not, or does not answer in time
    LEAVING      a fresh job has its outcomes    CLOSED, or STARTING if torchelastic starts the group again
    REPLACING    kept ranks are to be ended      STARTING: torchelastic starts others; the job ends
    CHANGING     a node comes or goes            STARTING: the nodes meet again; a job that had begun starts
                                                 again
    CLOSED       the agent has ended             -

From any stage: an exit is folded once the rank's last messages have had 0.05 s to arrive. Where a kept rank
dies, torchelastic ends the others, and the job ends with STARTING. A job ends with the agent at the latest.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, assert_never

import msgspec

from nblaunch.diagnose import hang
from nblaunch.group.recovery import Interruption, Recovery, Send, Sends, Survey
from nblaunch.protocol.messages import (
    Abort,
    Aborted,
    Arrived,
    Asked,
    AttemptStarted,
    Entered,
    Exited,
    FromRank,
    Hello,
    InterruptSeen,
    Leave,
    Measured,
    Message,
    Names,
    Noticed,
    Phase,
    Prepare,
    Printed,
    Proceed,
    Raised,
    Recovered,
    ReportReached,
    Returned,
    ToRank,
    Waiting,
    Where,
)
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import RunState, State, advance, looked_at

CONNECT_SECONDS = 60.0
PROCESS_GROUP_SECONDS = 120.0
_LIMITS = {Phase.CONNECT: CONNECT_SECONDS, Phase.PROCESS_GROUP: PROCESS_GROUP_SECONDS}
# A rank's last words may still lie in the socket when its process is gone.
LAST_WORDS_SECONDS = 0.05
# How long the other ranks may take to say what happened to them once one has failed.
SETTLE_SECONDS = 0.1
# Only a rank that holds its interpreter does not answer.
_LEFT_OPEN_SECONDS = 2.0
REFORMING = "re-forming the process group"
REFORMED = (
    "process group re-formed; variables kept; groups you made yourself (new_group, DeviceMesh) are gone"
)
STARTED_AGAIN = "the ranks were started anew: all of their variables are gone"
_NEVER = float("inf")


# --- what is known -------------------------------------------------------------------------------


class Stage(enum.StrEnum):
    """How far a group is; the module's docstring says what leads from one to the next."""

    STARTING = "STARTING"
    READY = "READY"
    RUNNING = "RUNNING"
    INTERRUPTED = "INTERRUPTED"
    RECOVERING = "RECOVERING"
    LEAVING = "LEAVING"
    REPLACING = "REPLACING"
    CHANGING = "CHANGING"
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True)
class Deadline:
    """The phase of an attempt that has a limit, and when it ends (monotonic)."""

    phase: Phase | None = None
    at: float = _NEVER


@dataclass(frozen=True, slots=True)
class JobState:
    """The job that the group has been given."""

    run: RunState
    internal: bool = False
    """Nobody sees its result: notes wait for the next job."""
    dispatched: bool = False
    arrived: frozenset[int] = frozenset()
    """Ranks on which all of the payload has arrived."""
    interrupted: bool = False
    """Whether the user has interrupted it."""
    settle_at: float | None = None
    settled: bool = False
    """Whether every rank has an outcome, or has had the time to say what happened to it."""
    open: bool = False
    """Whether a rank has returned while NCCL had operations that had not ended."""
    left_open: Survey | None = None
    """Where the ranks were then."""
    unmatched: bool = False
    """Whether these operations wait for a rank that has returned without them."""
    ended: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether every rank has a value."""
        return all(rank.state is State.SUCCEEDED for rank in self.run.ranks.values())

    def has_outcome(self, rank: int) -> bool:
        """Whether there is nothing more to wait for from a rank."""
        known = self.run.ranks.get(rank)
        return known is None or known.state.final or self.ended

    def again(self) -> JobState:
        """Return the job as another attempt begins it."""
        return JobState(self.run, internal=self.internal, interrupted=self.interrupted)


@dataclass(frozen=True, slots=True)
class GroupState:
    """A worker group and its job; any thread may read it."""

    kept: bool
    grace: float
    members: RunState
    """The ranks themselves; what becomes of a job is in `job.run`."""
    attempt: int = 0
    prepare: Prepare | None = None
    connected: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    """Ranks that have formed their process group."""
    forked: frozenset[int] = frozenset()
    """Ranks whose processes, and log files, are known."""
    remote: frozenset[int] = frozenset()
    """Those of them that are on another node."""
    exited: frozenset[int] = frozenset()
    last_words: Mapping[int, tuple[float, Exited]] = field(default_factory=dict)
    """Exits that are not folded yet: what the ranks have sent may still arrive until then (monotonic)."""
    deadline: Deadline = field(default_factory=Deadline)
    job: JobState | None = None
    interruption: Interruption = field(default_factory=Interruption)
    recovery: Recovery = field(default_factory=Recovery)
    replacing: bool = False
    """Whether the ranks of this attempt are being ended, and others are to take their place."""
    changing: bool = False
    """Whether a node comes or goes: what becomes of the ranks of this attempt is no failure."""
    holding: frozenset[int] | None = None
    """Ranks that have not let go of NCCL yet, once they are about to be ended; None before that."""
    notes: tuple[str, ...] = ()
    """What has happened to the ranks, for the next job of which the user sees the result."""
    launch_failure: tuple[str, str] | None = None
    closed: bool = False

    @property
    def all_ready(self) -> bool:
        """Whether all ranks of this attempt have come into being."""
        return len(self.ready) == self.members.world_size

    @property
    def working(self) -> JobState | None:
        """The job that has not ended."""
        return self.job if self.job is not None and not self.job.ended else None

    @property
    def at_work(self) -> RunState:
        """The job's state while there is one, else that of the ranks, which are idle."""
        return self.members if self.working is None else self.working.run

    @property
    def stage(self) -> Stage:
        """How far the group is."""
        job = self.working
        if self.closed:
            return Stage.CLOSED
        if self.replacing or self.changing:
            return Stage.REPLACING if self.replacing else Stage.CHANGING
        if self.recovery.busy:
            return Stage.RECOVERING
        if not self.kept and self.job is not None and self.job.settled:
            return Stage.LEAVING
        if job is not None and self.interruption.begun:
            return Stage.INTERRUPTED
        if job is not None and job.dispatched:
            return Stage.RUNNING
        return Stage.READY if self.all_ready else Stage.STARTING

    @property
    def quiet(self) -> bool:
        """Whether nothing is due until a rank, the agent or the caller speaks."""
        return (
            self.working is None
            and self.deadline.at == _NEVER
            and not self.recovery.busy
            and not self.interruption.busy
            and not self.last_words
        )


# --- what happens --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A rank has sent a message, and all output that came before it is observed."""

    message: FromRank


@dataclass(frozen=True, slots=True)
class Observed:
    """Something is known of the ranks that they have not sent: output, measurements, a notice."""

    message: Printed | Measured | Noticed | Waiting


@dataclass(frozen=True, slots=True)
class AttemptStarting:
    """The agent is about to start processes, which may speak before the last of them is forked."""

    message: AttemptStarted


@dataclass(frozen=True, slots=True)
class WorkersForked:
    """Processes of this attempt are there, and their log files; `remote` are those of another node."""

    message: AttemptStarted
    ranks: frozenset[int]
    remote: bool = False


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A process is gone."""

    exited: Exited


@dataclass(frozen=True, slots=True)
class ExitExplained:
    """An exit's reason is known, and all output of the rank is observed: the answer to `Explain`."""

    exited: Exited


@dataclass(frozen=True, slots=True)
class Drained:
    """All that ranks had sent has been received: no exit waits for last words."""


@dataclass(frozen=True, slots=True)
class RanksEnding:
    """The agent is about to end ranks by a signal."""


@dataclass(frozen=True, slots=True)
class OthersStopped:
    """None of these ranks is at work any more; None: those of this node."""

    ranks: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class MembershipChanging:
    """The nodes are about to meet again: the agent ends every rank, and starts others."""


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """A node goes, or has gone; `enough` says whether the run can go on without it."""

    name: str
    asked: bool
    enough: bool


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The agent has ended, and so have all ranks."""


@dataclass(frozen=True, slots=True)
class HubLost:
    """No message arrives any more."""


@dataclass(frozen=True, slots=True)
class JobGiven:
    """The caller gives the ranks a job; without one they only become ready."""

    prepare: Prepare
    run: RunState | None = None
    internal: bool = False


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """The caller keeps a report of where the ranks are with the job."""

    report: HangReport


@dataclass(frozen=True, slots=True)
class Noted:
    """Something is to be shown with the next result that the user sees."""

    text: str


@dataclass(frozen=True, slots=True)
class NotesForgotten:
    """The user knows of all notes."""


@dataclass(frozen=True, slots=True)
class GraceSet:
    """The grace period from now on, in seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class InterruptAsked:
    """The user interrupts the job."""


@dataclass(frozen=True, slots=True)
class GraceSkipped:
    """The user interrupts the job once more: what is left of the grace period is skipped."""


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """The ranks of a kept group are to be replaced."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The ranks of a group without a job may end in order."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


FromAgent: TypeAlias = (
    AttemptStarting
    | WorkersForked
    | WorkerExited
    | ExitExplained
    | Drained
    | RanksEnding
    | OthersStopped
    | MembershipChanging
    | NodeLeaving
    | AgentEnded
)
FromCaller: TypeAlias = (
    JobGiven
    | StacksTaken
    | Noted
    | NotesForgotten
    | GraceSet
    | InterruptAsked
    | GraceSkipped
    | RestartAsked
    | Dismissed
)
Event: TypeAlias = RankSaid | Observed | FromAgent | FromCaller | HubLost | Tick


# --- what is to be done --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the job to one of its ranks."""

    rank: int


@dataclass(frozen=True, slots=True)
class KeepPayload:
    """The payload is whole on every rank: remember that they have it."""


@dataclass(frozen=True, slots=True)
class ForgetValues:
    """Another attempt begins the job again: let go of the values of this one."""


@dataclass(frozen=True, slots=True)
class FinishJob:
    """End the job: its result can be made."""

    launch_failure: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Warn:
    """Keep a warning that comes after the job has ended."""

    text: str


@dataclass(frozen=True, slots=True)
class Explain:
    """Read the rest of a rank's output, find out why it exited, and answer with `ExitExplained`."""

    exited: Exited


@dataclass(frozen=True, slots=True)
class ReleaseWorkers:
    """Let the agent take exits for expected ones, and stop the `others`, which are still at work."""

    succeeded: bool
    others: frozenset[int]


@dataclass(frozen=True, slots=True)
class StopAgent:
    """End the ranks, and the agent with them."""


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """End the ranks, and start others."""


@dataclass(frozen=True, slots=True)
class RejoinNodes:
    """Have the nodes meet again."""


@dataclass(frozen=True, slots=True)
class SkipGrace:
    """Kill ranks that are being ended."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """No rank is inside NCCL any more: they may be ended."""


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Let go of all that the group holds; comes before the end of its job, which makes the caller go on."""

    succeeded: bool


Action: TypeAlias = (
    Send
    | Dispatch
    | KeepPayload
    | ForgetValues
    | FinishJob
    | Warn
    | Explain
    | ReleaseWorkers
    | StopAgent
    | RestartAgent
    | RejoinNodes
    | SkipGrace
    | LetGo
    | CloseGroup
)


# --- the machine ---------------------------------------------------------------------------------


def step(state: GroupState, event: Event, now: float) -> tuple[GroupState, tuple[Action, ...]]:
    """Return the state after an event, and what is to be done; `now` is monotonic."""
    taken = _Step(state, now)
    match event:
        case RankSaid(message):
            taken.rank_said(message)
        case Observed(message):
            taken.fold(message)
            if isinstance(message, Measured):
                taken.ask_how_far()
        case Tick():
            taken.tick()
        case HubLost():
            taken.act(StopAgent())
        case (
            JobGiven()
            | StacksTaken()
            | Noted()
            | NotesForgotten()
            | GraceSet()
            | InterruptAsked()
            | GraceSkipped()
            | RestartAsked()
            | Dismissed()
        ):
            taken.from_caller(event)
        case _:
            taken.from_agent(event)
    return taken.state, tuple(taken.actions)


class _Step:
    """One step: the state as it changes, and what is to be done."""

    def __init__(self, state: GroupState, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def set_job(self, **changes: Any) -> None:
        if self.state.job is not None:
            self.set(job=replace(self.state.job, **changes))

    def send(self, rank: int, message: ToRank) -> None:
        if rank not in self.state.exited:
            self.act(Send(rank, message))

    def send_all(self, sends: Sends) -> None:
        for each in sends:
            self.send(each.rank, each.message)

    # --- what ranks say --------------------------------------------------------------------------

    def rank_said(self, message: FromRank) -> None:
        state = self.state
        if (state.changing or state.holding is not None) and isinstance(message, Raised):
            # It is the abort, or the change, that it has stumbled over.
            return
        if state.recovery.busy:
            self.set(recovery=state.recovery.patient(self.now, state.grace))
        match message:
            case Names() | Asked():
                return
            case Arrived() | Recovered() | Where() | InterruptSeen() | Aborted():
                self._answered(message)
                return
            case Hello() if state.prepare is not None:
                self.send(message.rank, state.prepare)
            case Entered(phase=Phase.READY):
                self.set(ready=state.ready | {message.rank})
            case Returned(open=True) if state.working is not None:
                self.set_job(open=True)
            case _:
                pass
        self.fold(self.state.interruption.as_stopped(message))
        if isinstance(message, Hello):
            self.set(connected=self.state.connected | {message.rank})
            self._limit_process_group()
        self._dispatch_when_ready()

    def _answered(self, message: Arrived | Recovered | Where | InterruptSeen | Aborted) -> None:
        """Take what is no part of the fold."""
        match message:
            case Arrived(rank=rank):
                self._payload_arrived(rank)
            case Recovered():
                self._recovered(message)
            case Where():
                self._located(message)
            case InterruptSeen():
                self.set(interruption=self.state.interruption.seen(message, self.now))
            case Aborted(rank=rank) if self.state.holding is not None:
                self.set(holding=self.state.holding - {rank})
                self._let_go()
            case _:
                pass

    def _payload_arrived(self, rank: int) -> None:
        """Let the job begin once its payload is whole on every rank; if it cannot be, no rank keeps it."""
        job = self.state.working
        if job is None or self.state.interruption.begun or job.run.failed:
            return
        arrived = job.arrived | {rank}
        self.set_job(arrived=arrived)
        if arrived == job.run.ranks.keys() and arrived != job.arrived:
            self.act(KeepPayload())
            for each in job.run.ranks:
                self.send(each, Proceed())

    def _located(self, answer: Where) -> None:
        state = self.state
        interruption, sends = state.interruption.answered(answer, state.at_work, self.now)
        self.set(interruption=interruption, recovery=state.recovery.answered(answer))
        self.send_all(sends)
        job = self.state.working
        if job is not None and job.left_open is not None and not job.settled:
            self.set_job(left_open=job.left_open.with_answer(answer))
            if job.left_open.missing <= {answer.rank}:
                self._settle()

    def ask_how_far(self) -> None:
        """Ask ranks at work how many collectives they have begun."""
        ranks = self.state.at_work.ranks
        if len(ranks) > 1:
            for rank in ranks.values():
                if rank.state is State.RUNNING and rank.rank not in self.state.remote:
                    self.send(rank.rank, ReportReached())

    # --- an attempt comes into being -------------------------------------------------------------

    def _limit(self, phase: Phase) -> None:
        self.set(deadline=Deadline(phase, self.now + _LIMITS[phase]))

    def _limit_process_group(self) -> None:
        """Limit the time in which ranks form their group, once the last of them is connected."""
        state = self.state
        if len(state.connected) != state.members.world_size:
            return
        if state.prepare is None:
            # Nobody has told them to go on: that may take as long as it likes.
            self.set(deadline=replace(state.deadline, at=_NEVER))
        elif state.deadline.phase is not Phase.PROCESS_GROUP:
            self._limit(Phase.PROCESS_GROUP)

    def _dispatch_when_ready(self) -> None:
        """Dispatch once every rank has its process group, and its log files are known."""
        state, job = self.state, self.state.working
        if not state.all_ready or len(state.forked) < state.members.world_size:
            return
        if state.deadline.at != _NEVER:
            self.set(deadline=replace(state.deadline, at=_NEVER))
        if job is None or job.dispatched or job.settled or state.interruption.begun:
            return
        if not state.kept and (state.changing or state.holding is not None):
            return  # these ranks are about to be ended: the job is for the next ones
        # A kept group's job goes with the ranks it was captured for: the next ones lack what these have.
        self.set_job(dispatched=True)
        for rank in job.run.ranks:
            if rank not in state.exited:
                self.act(Dispatch(rank))
            # A rank that dies at once (`os._exit`) may not live to say that its job has begun.
            self._fold_run(Entered(rank=rank, phase=Phase.JOB))

    def from_agent(self, event: FromAgent) -> None:
        match event:
            case AttemptStarting(message):
                self._attempt_starting(message)
            case WorkersForked():
                self._workers_forked(event)
            case WorkerExited(exited):
                self._worker_exited(exited)
            case ExitExplained(exited):
                if not self._at_work(exited.rank) and self._noteworthy(exited):
                    self._note(f"rank {exited.rank} {exited.reason}")
                self.fold(exited)
            case Drained():
                self._fold_exits(_NEVER)
            case RanksEnding():
                self._ranks_ending()
            case OthersStopped(ranks):
                here = self.state.members.ranks.keys() - self.state.remote
                self._send_leave(here if ranks is None else ranks)
            case MembershipChanging() | NodeLeaving():
                self._membership_changing(event)
            case AgentEnded():
                job = self.state.job
                self.set(closed=True)
                self.act(CloseGroup(succeeded=job is not None and job.succeeded))
                self._finish()
            case _:
                assert_never(event)

    def _attempt_starting(self, message: AttemptStarted) -> None:
        if message.number < self.state.attempt or self.state.closed:
            return
        self.set(
            attempt=message.number,
            connected=frozenset(),
            ready=frozenset(),
            forked=frozenset(),
            remote=frozenset(),
            exited=frozenset(),
            last_words={},
            deadline=Deadline(),
            recovery=self.state.recovery.abandoned(),
            replacing=False,
            changing=False,
            holding=None,
        )
        if message.number > 0 and self.state.kept:
            self._note(STARTED_AGAIN)
        job = self.state.working
        if job is not None and job.dispatched and self.state.kept:
            # The ranks that had it are gone, and so is all that it could have been done with.
            self._finish()
        elif job is not None:
            self.set(job=job.again())
            self.act(ForgetValues())
        self.fold(message)

    def _workers_forked(self, event: WorkersForked) -> None:
        state = self.state
        if event.message.number != state.attempt or state.closed:
            return
        self.set(forked=state.forked | event.ranks)
        if event.remote:
            self.set(remote=state.remote | event.ranks)
        self.fold(event.message)
        # From now on: before, a fork server that imports torch from a slow disk has a limit of its own.
        connected = len(state.connected) == self.state.members.world_size
        if not (event.remote or connected) and state.deadline.phase is None:
            self._limit(Phase.CONNECT)
        self._dispatch_when_ready()

    # --- an attempt ends -------------------------------------------------------------------------

    def _worker_exited(self, exited: Exited) -> None:
        state = self.state
        if exited.rank in state.exited:
            return
        if state.changing:
            exited = msgspec.structs.replace(exited, expected=True)
        if state.kept and not state.all_ready and not exited.expected:
            self.act(StopAgent())  # a rank that cannot even be started would not come into being again
        self.set(
            recovery=state.recovery.abandoned(),
            exited=state.exited | {exited.rank},
            last_words={**state.last_words, exited.rank: (self.now + LAST_WORDS_SECONDS, exited)},
        )
        self._fold_exits(self.now)

    def _at_work(self, rank: int) -> bool:
        """Whether a rank has a job that has not ended."""
        job = self.state.working
        return job is not None and rank in job.run.ranks

    def _noteworthy(self, exited: Exited) -> bool:
        """Whether a rank of a kept group has died between two jobs."""
        return self.state.kept and not exited.expected and not self.state.closed and exited.exitcode != 0

    def _fold_exits(self, now: float) -> None:
        """Fold exits of ranks whose last words have had time to arrive, or that have no more to say."""
        for rank, (when, exited) in list(self.state.last_words.items()):
            job = self.state.working
            has_outcome = job is None or job.has_outcome(rank)
            if not has_outcome and now < when:
                continue
            waiting = {key: each for key, each in self.state.last_words.items() if key != rank}
            self.set(last_words=waiting)
            if not has_outcome or (not self._at_work(rank) and self._noteworthy(exited)):
                self.act(Explain(exited))
            else:
                self.fold(exited)

    def _ranks_ending(self) -> None:
        """Have all ranks let go of NCCL before one is ended."""
        state = self.state
        if state.holding is not None:
            return
        alive = [rank.rank for rank in state.members.ranks.values() if rank.node]
        self.set(holding=frozenset(alive) - state.remote - state.exited)
        for rank in alive:
            self.send(rank, Abort())
        self._let_go()

    def _let_go(self) -> None:
        if not self.state.holding:
            self.act(LetGo())

    def _send_leave(self, only: Collection[int] | None = None) -> None:
        job = self.state.job
        if job is None:
            return
        # A rank that waits for what a failed one has not begun would wait for ever.
        abort = job.unmatched or not job.succeeded
        for rank in job.run.ranks.values():
            if only is not None and rank.rank not in only:
                continue
            if rank.state is State.FAILED and rank.failure is not None:
                self.send(rank.rank, Leave(exitcode=_as_exitcode(rank.failure.exitcode), abort=abort))
            elif rank.state.final:
                self.send(rank.rank, Leave(abort=abort))

    def _membership_changing(self, event: MembershipChanging | NodeLeaving) -> None:
        if isinstance(event, NodeLeaving):
            job = self.state.working
            if job is None or job.settled or self.state.interruption.begun or not event.enough:
                return  # the node's ranks are lost
            how = "left" if event.asked else "was lost"
            self._note(f"node {event.name} {how}; the others begin again without it")
            self.act(RejoinNodes())
        self.set(changing=True)
        self.set_job(settle_at=None)

    # --- what the caller asks --------------------------------------------------------------------

    def from_caller(self, event: FromCaller) -> None:
        match event:
            case JobGiven():
                self._job_given(event)
            case StacksTaken(report) if self.state.working is not None:
                self.set_job(run=looked_at(self.state.working.run, report))
            case Noted(text):
                self._note(text)
            case NotesForgotten():
                self.set(notes=())
            case GraceSet(seconds):
                self.set(grace=seconds)
            case InterruptAsked():
                self._interrupt()
            case GraceSkipped():
                self._skip_grace()
            case RestartAsked(reason):
                self._replace(reason)
            case Dismissed():
                self.act(ReleaseWorkers(succeeded=True, others=frozenset()))
                for rank in self.state.members.ranks:
                    self.send(rank, Leave())
            case _:
                pass

    def _job_given(self, event: JobGiven) -> None:
        state = self.state
        if state.prepare is None:
            self.set(prepare=event.prepare)
            for rank in state.members.ranks.values():
                if rank.node:
                    self.send(rank.rank, event.prepare)
            self._limit_process_group()
        self.set(job=None if event.run is None else JobState(event.run, internal=event.internal))
        if event.run is None:
            return
        self.set(interruption=state.interruption.fresh())
        if state.closed:
            self._finish()
            return
        self.set_job(run=event.run.seated(state.members.ranks, state.attempt))
        if not event.internal:
            self.set(notes=())
            for note in state.notes:
                self._fold_run(Noticed(text=note))
        self._dispatch_when_ready()

    def _note(self, text: str) -> None:
        """Show what has happened to the ranks with the job that is there, or else with the next one."""
        job = self.state.working
        if job is not None and not job.internal:
            self._fold_run(Noticed(text=text))
        else:
            self.set(notes=(*self.state.notes, text))

    def _interrupt(self) -> None:
        job = self.state.working
        if job is None:
            return
        self.set_job(interrupted=True)
        self._begin_interruption()
        if job.dispatched:
            return
        if self.state.kept:
            self._finish()
        else:
            self.act(StopAgent())  # nothing of the user's runs yet: there is nobody to wait for

    def _begin_interruption(self) -> None:
        interruption, sends = self.state.interruption.begin(self.state.at_work, self.now)
        self.set(interruption=interruption)
        self.send_all(sends)

    def _skip_grace(self) -> None:
        self.act(SkipGrace())
        waited_for = self.state.interruption.waited_for
        if not self.state.kept:
            self.act(StopAgent())
        elif waited_for:
            self._replace(f"{format_ranks(waited_for)} had not ended when the job was interrupted again")
        else:
            self._replace("it was interrupted twice")

    def _replace(self, reason: str) -> None:
        """End the ranks of a kept group, and start others."""
        if not self.state.closed:
            self.set(replacing=True, recovery=self.state.recovery.abandoned())
            self._note(reason)
            self.act(RestartAgent())

    # --- a job takes its course ------------------------------------------------------------------

    def _fold_run(self, message: Message) -> bool:
        """Fold a message into the job; return whether that changes anything."""
        job = self.state.working
        if job is None:
            return False
        run = advance(job.run, message)
        self.set_job(run=run)
        return run is not job.run

    def fold(self, message: Message) -> None:
        """Fold what is about the ranks themselves, and what is about the job; do what follows."""
        job = self.state.job
        if isinstance(message, Hello | Entered | AttemptStarted):
            self.set(members=advance(self.state.members, message))
        if job is not None and job.ended and isinstance(message, Exited) and message.rank in job.run.ranks:
            warning = advance(job.run, message).ranks[message.rank].warning
            if warning and warning != job.run.ranks[message.rank].warning:
                self.act(Warn(warning))
        if not self._fold_run(message):
            return
        job = self.state.working
        if job is not None and job.run.finished:
            self._settle()
        elif job is not None and job.run.failed and job.settle_at is None:
            self.set_job(settle_at=self.now + SETTLE_SECONDS)

    def tick(self) -> None:
        """Do what is due."""
        now = self.now
        self._fold_exits(now)
        job = self.state.working
        if job is not None and job.settle_at is not None and now >= job.settle_at:
            self._settle()
        state = self.state
        interruption, sends = state.interruption.tick(state.at_work, state.members, now)
        self.set(interruption=interruption)
        self.send_all(sends)
        self._press()
        recovery, sends = self.state.recovery.tick(now)
        self.set(recovery=recovery)
        self.send_all(sends)
        if recovery.takes_long(now):
            self._fold_run(Waiting(doing=REFORMING))
        self._replace_lost()
        self._stop_overdue()

    def _settle(self) -> None:
        """Every rank of the job has an outcome, or has had the time to say what happened to it."""
        job = self.state.working
        if job is None or job.settled or self.state.changing:
            return
        if self.state.kept:
            self._settle_kept(job)
            return
        if job.succeeded and not self._left_nothing_open():
            return
        self.set_job(settled=True, settle_at=None)
        others = frozenset(rank.rank for rank in job.run.ranks.values() if not rank.state.final)
        self.act(ReleaseWorkers(job.succeeded, others))
        if not others:
            self._send_leave()
        if self.state.interruption.begun:
            self.act(StopAgent())  # also: no restart
        elif job.succeeded:
            # All values are here: the ranks leave while the user goes on.
            self._finish()

    def _left_nothing_open(self) -> bool:
        """Whether what NCCL still does will end; looks at it first where a rank has left something open."""
        job = self.state.job
        if job is None or not job.open or job.unmatched:
            return True
        if job.left_open is None:
            left_open, sends = Survey.of(self.state.members.ranks, self.now + _LEFT_OPEN_SECONDS)
            self.set_job(left_open=left_open, settle_at=left_open.until)
            self.send_all(sends)
            return False
        if not job.left_open.over(self.now):
            return False
        left = hang.report(job.left_open.answers).findings
        self.set_job(unmatched=bool(left))
        for each in left:
            text = f"the run ended with a collective open, which was aborted: {each}"
            self._fold_run(Noticed(text=text))
        return True

    def _settle_kept(self, job: JobState) -> None:
        state = self.state
        self.set_job(settle_at=None)
        if not job.dispatched:
            self.act(StopAgent())  # they have not even come into being: others would not either
        elif state.exited:
            pass  # the agent ends the others, and starts the group again
        elif not job.run.finished:
            # Ranks that are still at work give up: a peer of theirs has.
            if not state.interruption.begun:
                self._begin_interruption()
        elif job.succeeded:
            self.set_job(settled=True)
            self._finish()
        else:
            self.set_job(settled=True)
            recovery, sends = state.recovery.begin(
                state.members.ranks, self.now, state.grace, cut=state.interruption.cut
            )
            self.set(recovery=recovery)
            self.send_all(sends)

    def _press(self) -> None:
        """Replace the ranks of a kept group that have seen the interrupt twice, and do not end their job."""
        state, job, now = self.state, self.state.working, self.now
        if not state.kept or job is None or not job.dispatched:
            return
        interruption, sends = state.interruption.press(now, state.grace)
        self.set(interruption=interruption)
        self.send_all(sends)
        unfreed, deaf = interruption.unfreed(now), interruption.deaf(now)
        if unfreed and not state.replacing:
            self._replace(f"{format_ranks(unfreed)} could not be freed: NCCL did not abort its collective")
        elif deaf and not state.replacing:
            self._replace(
                f"{format_ranks(deaf)} went on after two interrupts, --grace {state.grace:g} s apart"
            )

    def _recovered(self, message: Recovered) -> None:
        recovery, outcome = self.state.recovery.recovered(message)
        self.set(recovery=recovery)
        if outcome is None:
            return
        if outcome.failed:
            self._replace(outcome.failed)
            return
        if outcome.reformed:
            self._note(REFORMED)
        if outcome.dead:
            self._note(f"made for a process group that is gone, with what revives each: {outcome.dead}")
        self._finish()

    def _replace_lost(self) -> None:
        """Replace ranks that do not get ready for another job."""
        awaited = self.state.recovery.awaited
        recovery, sends, lost = self.state.recovery.overdue(self.now)
        self.set(recovery=recovery)
        self.send_all(sends)
        if lost:
            self._replace("ranks did not come back within the grace period")
            self._note(f"{format_ranks(awaited)} did not get ready for another job")

    def _stop_overdue(self) -> None:
        """Stop an attempt that does not come into being, once."""
        state, phase = self.state, self.state.deadline.phase
        if phase is None or self.now <= state.deadline.at:
            return
        reached = state.connected if phase is Phase.CONNECT else state.ready
        late = format_ranks(state.members.ranks.keys() - reached)
        what = f"phase '{phase}' did not finish in {_LIMITS[phase]:.0f} s"
        self.set(
            deadline=replace(state.deadline, at=_NEVER),
            launch_failure=(phase.value, f"{what}: {late} did not come that far"),
        )
        self.act(StopAgent())

    def _finish(self) -> None:
        """End the job: its result can be made."""
        if self.state.working is not None:
            self.set_job(ended=True, settle_at=None)
            self.set(interruption=self.state.interruption.over())
            self.act(FinishJob(self.state.launch_failure))


def _as_exitcode(code: int) -> int:
    """Return what a process can end with: `sys.exit(256)` would be a success."""
    return code & 0xFF or 1
