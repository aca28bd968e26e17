"""The life of a worker group, as one pure machine: `step(state, event, now) -> (state, actions)`.

Every decision about a group and its jobs is made here, and in the parts that this machine holds: `recovery`,
`locating`, `ending`. `step` takes any event in any state. It reads no clock (`now` is monotonic) and does
nothing itself: `nblaunch.group.group` feeds it events and performs its actions.

A group of one run is fresh: it ends with its job, and torchelastic may start it again. A persistent group (a
session's) goes on: stuck ranks are freed, a process group that may be broken is formed again, and only ranks
that do not come back are replaced.

    stage        entered when                    next, and why
    -----------  ------------------------------  ----------------------------------------------------------
    STARTING     an attempt begins               READY: every rank has formed its process group
                 deadlines: 60 s until all       (the agent is stopped if a deadline passes, or if a rank of a
                 ranks are connected, 120 s      persistent group dies here: its successors would die, too)
                 for the process group
    READY        all ranks wait for a job        RUNNING: a job is submitted, and dispatched
    RUNNING      the ranks have the job          fresh: LEAVING once all have an outcome, or 0.1 s after the
                                                 first failure
                                                 kept: READY if all succeeded, after the same number of
                                                 collectives; INTERRUPTED 0.1 s after the first failure;
                                                 RECOVERING once all have an outcome
    INTERRUPTED  the user interrupts, or a       RECOVERING: all ranks have ended the job
                 peer of a kept rank failed      in turn: KeyboardInterrupt; stuck ranks are freed; the last
                                                 interrupt, a grace period after the first was seen; then
                                                 REPLACING. A rank in C code, or in an import,
                                                 is waited for
    RECOVERING   a kept job has not succeeded,   READY: all ranks are fit for another job; the job ends
                 or unevenly                     REPLACING: one is not, or does not answer in time
    LEAVING      a fresh job has its outcomes    CLOSED, or STARTING if torchelastic starts the group again;
                                                 before that, ranks that have failed end as scripts do
    REPLACING    persistent ranks must be ended  STARTING: torchelastic starts others; the job ends
    CHANGING     the membership changes          STARTING: after the next rendezvous; a dispatched job starts
                                                 again
                 (persistent ranks go on if they can: STARTING, from READY, with other numbers, then
                 RECOVERING)
    CLOSED       the agent has ended             -

At the user's interrupt, and at the timeout, the ranks are first asked where they are, for the error. Then the
interruption begins; fresh ranks that have timed out are ended. At the end of the grace period of fresh ranks,
and at the user's second interrupt, the ranks are waited for no longer. A job that ends while its ranks are
asked was interrupted all the same.

At a `Preemption` the ranks save. The running job is interrupted, waits until all ranks have saved, and then
ends as an interrupted job does. A fresh group ends with it, without a restart.

From any stage: an exit is folded once the rank's last messages have had 0.05 s to arrive. If a persistent
rank dies, the others end the job, and regroup with another one in its place (`CHANGING` without their end).
If none is left, or nodes follow torch's rendezvous, torchelastic starts all anew, and the job ends with
STARTING. At the latest, a job ends with the agent.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from nblaunch.diagnose import hang
from nblaunch.group.ending import NEVER, Consequence, Ending, EndingStep, Interruption, Situation, Why
from nblaunch.group.fitness import Tallies, uneven
from nblaunch.group.locating import Locating
from nblaunch.group.machine import LocateRanks, Machine, Order, RestartAsked, Send, Sends, Survey
from nblaunch.group.recovery import Recovery, apart
from nblaunch.protocol import messages
from nblaunch.protocol.ranks import RankSet
from nblaunch.protocol.reports import HangReport, LocatedAll, format_ranks
from nblaunch.protocol.state import Message, RankState, RunState, State, advance

_LIMITS = {messages.Phase.CONNECT: 60.0, messages.Phase.PROCESS_GROUP: 120.0}
# A rank's last messages may still be in the socket when its process is gone.
_LAST_MESSAGES_SECONDS = 0.05
_TERMINATED = -15  # SIGTERM's exit code
# A rank on a node that SIGTERM has ended may be ahead of the notice that the node is taken back.
_NOTICE_SECONDS = 2.0
# How long the other ranks have to report their own outcome once one has failed.
_SETTLE_SECONDS = 0.1
# Only a rank that holds its interpreter does not answer.
_LEFT_OPEN_SECONDS = 2.0
STARTED_AGAIN = "rank {} is started again; the other ranks keep their variables"
RESTARTED = "the ranks were started anew: all of their variables are gone"
# Messages of the ranks themselves, whatever their job, and those after which a job is as far as before.
_OF_MEMBERS = (messages.Hello, messages.Entered, messages.AttemptStarted)
_SETTLES_NOTHING = (
    messages.Printed,
    messages.Displayed,
    messages.Logged,
    messages.Unwritten,
    messages.Measured,
    messages.Reached,
    LocatedAll,
    messages.EngineStatus,
    messages.NodesJoined,
)
# Messages after which a run has been silent for as long as before.
_UNHEARD = (messages.Measured, messages.EngineStatus, messages.NodesJoined)


# --- the state -----------------------------------------------------------------------------------


class Stage(enum.StrEnum):
    """How far a group is; the module's docstring has the table of stages."""

    STARTING = "STARTING"
    READY = "READY"
    RUNNING = "RUNNING"
    INTERRUPTED = "INTERRUPTED"
    RECOVERING = "RECOVERING"
    LEAVING = "LEAVING"
    REPLACING = "REPLACING"
    CHANGING = "CHANGING"
    CLOSED = "CLOSED"


class JobState(msgspec.Struct, frozen=True):
    """The group's job."""

    run: RunState
    internal: bool = False
    """Whether the user does not see its result: notes wait for the next job."""
    dispatched: bool = False
    arrived: RankSet = RankSet()
    """Ranks on which all of the payload has arrived."""
    ending: Ending = Ending()
    questions: tuple[messages.Asked, ...] = ()
    """Questions of its ranks to the user, the oldest first."""
    settle_at: float | None = None
    settled: bool = False
    """Whether every rank has an outcome, or has had the time to report one."""
    called: Tallies = {}
    """Collectives called within it by each rank that has ended it."""
    steps: Mapping[int, tuple[messages.StepsTaken, ...]] = {}
    """The steps of optimizers that each of these has taken within it."""
    open: bool = False
    """Whether a rank has returned while NCCL operations were open."""
    left_open: Survey | None = None
    """The survey of the ranks after that."""
    unmatched: bool = False
    """Whether these operations wait for a rank that has returned without them."""
    launch_failure: tuple[str, str] | None = None
    """Of a job that has ended: the phase of its group that exceeded its limit, and what happened."""
    ended: bool = False

    def lacks(self, world_size: int) -> bool:
        """Whether it is for a subset, and one of these ranks does not exist in a world of this size."""
        return len(self.run.ranks) < self.run.world_size and max(self.run.ranks) >= world_size

    @property
    def succeeded(self) -> bool:
        return all(rank.state is State.SUCCEEDED for rank in self.run.ranks.values())


class GroupState(msgspec.Struct, frozen=True):
    """A worker group and its job; any thread may read it."""

    persistent: bool
    members: RunState
    """The ranks themselves; the state of the job is `job.run`."""
    replaces: bool = False
    """Whether a persistent rank that has died can be replaced alone."""
    attempt: int = 0
    prepare: messages.Prepare | None = None
    engine: messages.EngineStatus | None = None
    """The engine's last report about the nodes; None without an engine."""
    connected: RankSet = RankSet()
    ready: RankSet = RankSet()
    """Ranks that have formed their process group."""
    forked: RankSet = RankSet()
    """Ranks whose processes, and log files, are known."""
    remote: RankSet = RankSet()
    """Those of them that are on another node."""
    exited: RankSet = RankSet()
    lost: RankSet = RankSet()
    """Persistent ranks that are gone while others go on, which regroup once they have ended the job."""
    away: RankSet = RankSet()
    """Ranks whose node is lost: none is started in their place."""
    adopted: RankSet = RankSet()
    """Ranks that this attempt kept from the one before."""
    regroups: bool = False
    """Whether ranks or nodes came or were lost: the remaining ranks regroup as soon as they are idle."""
    regrouping: bool = False
    """Whether `REGROUP_NODES` was ordered, and the next attempt has not begun."""
    unfolded: Mapping[int, tuple[float, messages.Exited]] = {}
    """Exits not folded yet: until then (monotonic), the rank's last messages may still arrive."""
    limited: messages.Phase | None = None
    """The phase of this attempt that was limited last, and the end of it (monotonic) while it lasts."""
    deadline: float = NEVER
    job: JobState | None = None
    interruption: Interruption = Interruption()
    recovery: Recovery = Recovery()
    replacing: bool = False
    """Whether the ranks of this attempt are being ended, and replaced."""
    changing: bool = False
    """Whether the membership changes: how the ranks of this attempt end is no failure."""
    saving: RankSet = RankSet()
    """Ranks that were ordered to save, and have not saved yet."""
    searches: Mapping[int, Locating] = {}
    """The searches for where ranks are that are under way, by who wants to know."""
    notes: tuple[str, ...] = ()
    """Notices about the ranks, for the next job with a result that the user sees."""
    launch_failure: tuple[str, str] | None = None
    """The phase that exceeded its limit, and what happened."""
    closed: bool = False

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == self.members.world_size

    @property
    def regroup_awaited(self) -> bool:
        """Whether ranks or nodes came or were lost, and the ranks are not ready yet in their new group."""
        return bool(self.lost) or self.regrouping or (bool(self.adopted) and not self.all_ready)

    @property
    def working(self) -> JobState | None:
        return self.job if self.job is not None and not self.job.ended else None

    @property
    def grace(self) -> float:
        """The grace period of the last job."""
        return 0.0 if self.job is None else self.job.ending.grace

    @property
    def at_work(self) -> RunState:
        """The state of the job if it has not ended, else that of the ranks, which are idle."""
        return self.members if self.working is None else self.working.run

    @property
    def preempted(self) -> bool:
        return self.working is not None and bool(self.working.run.preempted)

    @property
    def working_ranks(self) -> Mapping[int, RankState]:
        return {} if self.working is None else self.working.run.ranks

    @property
    def stage(self) -> Stage:
        job = self.working
        if self.closed:
            return Stage.CLOSED
        if self.replacing or self.changing:
            return Stage.REPLACING if self.replacing else Stage.CHANGING
        if self.recovery.busy:
            return Stage.RECOVERING
        if not self.persistent and self.job is not None and self.job.settled:
            return Stage.LEAVING
        if job is not None and self.interruption.begun:
            return Stage.INTERRUPTED
        if job is not None and job.dispatched:
            return Stage.RUNNING
        return Stage.READY if self.all_ready else Stage.STARTING

    @property
    def quiet(self) -> bool:
        return (
            self.working is None
            and self.deadline == NEVER
            and not self.recovery.busy
            and not self.interruption.busy
            and not self.unfolded
            and not self.searches
        )


# --- events --------------------------------------------------------------------------------------
# A message is an event itself: a rank's, fed after all output that precedes it, and what the group observes:
# output, measurements, exits, an engine's reports, notes for the next result that the user sees (`Noticed`).


class Trigger(enum.Enum):
    """An event without fields."""

    TICK = "time has passed"
    DRAINED = "all that ranks had sent has been received: no exit waits for last messages"
    HUB_LOST = "no message arrives any more"
    MEMBERSHIP_CHANGING = "the agent is about to end every rank, and to start others after a rendezvous"
    AGENT_ENDED = "the agent has ended, and so have all ranks"
    INTERRUPT = "the user interrupts the job; the second time its ranks are ended"
    INTERRUPT_SPARING = "the job is interrupted, however often; its ranks and their variables stay"
    NODE_ARRIVED = "a node came while other nodes have ranks; its ranks may join them"
    DISMISS = "the ranks of a group without a job may exit"
    FORGET_NOTES = "the user knows of all notes"


class AttemptStarting(msgspec.Struct, frozen=True):
    """The agent is about to start processes, which may connect before the last of them is forked.

    `kept` maps the numbers of ranks that keep their variables to those in the attempt before.
    """

    message: messages.AttemptStarted
    kept: Mapping[int, int] | None = None


class WorkersForked(msgspec.Struct, frozen=True):
    """Processes of this attempt exist, and their log files; `remote` are those of another node."""

    message: messages.AttemptStarted
    ranks: frozenset[int]
    remote: bool = False


class ExitExplained(msgspec.Struct, frozen=True):
    """The answer to `Explain`: an exit with its reason, once all output of the rank is observed."""

    exited: messages.Exited


class StacksRead(msgspec.Struct, frozen=True):
    """The answer to `ReadStacks`, whole or in part."""

    stacks: Mapping[int, str]


class RanksStopped(msgspec.Struct, frozen=True):
    """None of these ranks is still at work."""

    ranks: frozenset[int]


class NodeLeaving(msgspec.Struct, frozen=True):
    """A node leaves, or is lost; `enough` says whether the run can go on without it.

    `ranks` were on it. `address` is where other nodes reached it, "" if it is on the runtime's machine.
    """

    name: str
    asked: bool
    enough: bool
    ranks: frozenset[int] = frozenset()
    address: str = ""


class PrepareChanged(msgspec.Struct, frozen=True):
    """The nodes of the next attempt are known, and with them the backend; precedes its first rank."""

    backend: str
    device_type: str


class Preemption(msgspec.Struct, frozen=True):
    """The nodes will be taken back in `seconds`; None if they have been already."""

    why: str
    seconds: float | None


class JobSubmitted(msgspec.Struct, frozen=True):
    """The caller submits a job to the ranks, with its limits; without one they only become ready."""

    prepare: messages.Prepare
    job: JobState | None = None


class Replied(msgspec.Struct, frozen=True):
    """The user has answered the question of a rank."""

    rank: int
    answer: messages.Answer


_Observed: TypeAlias = messages.Printed | messages.Measured | messages.EngineStatus | messages.Noticed
_FromHosts: TypeAlias = (
    AttemptStarting | WorkersForked | messages.Exited | ExitExplained | RanksStopped | StacksRead
)
_FromFleet: TypeAlias = NodeLeaving | PrepareChanged | Preemption
_Requested: TypeAlias = JobSubmitted | Replied | LocateRanks | RestartAsked
GroupEvent: TypeAlias = messages.FromRank | _Observed | _FromHosts | _FromFleet | _Requested | Trigger


# --- actions -------------------------------------------------------------------------------------


class Publish(msgspec.Struct, frozen=True):
    """Publish a message that has changed the state of the job."""

    message: Message


class SendJob(msgspec.Struct, frozen=True):
    """Dispatch the job to one of its ranks."""

    rank: int


class Explain(msgspec.Struct, frozen=True):
    """Read the rest of a rank's output, find out why it exited, and answer with `ExitExplained`."""

    exited: messages.Exited


class ReadStacks(msgspec.Struct, frozen=True):
    """Read the stacks of ranks that do not answer, without waiting for that; see `StacksRead`."""

    ranks: frozenset[int]


class RanksLocated(msgspec.Struct, frozen=True):
    """Report where the ranks are to the one that has asked."""

    number: int
    report: HangReport


class ReleaseWorkers(msgspec.Struct, frozen=True):
    """Have the agent expect the exits of the ranks, and stop the `others`, which are still at work."""

    succeeded: bool
    others: frozenset[int]


# A notice is for those who come back to a job that has ended.
Action: TypeAlias = (
    Publish | Send | SendJob | messages.Noticed | Explain | ReadStacks | RanksLocated | ReleaseWorkers | Order
)


# --- the machine ---------------------------------------------------------------------------------


def step(state: GroupState, event: GroupEvent, now: float) -> tuple[GroupState, tuple[Action, ...]]:
    """Return the state after an event, and the actions that follow; `now` is monotonic.

    What was folded comes first: to perform the others may feed further events.
    """
    machine = _Step(state, now)
    take = _TAKES.get(event if isinstance(event, Trigger) else type(event), _Step.received)
    take(machine, event)
    machine.regroup_if_idle()
    return machine.state, (*machine.folded, *machine.actions)


class _Step(Machine[GroupState, Action]):
    """One step: the state as it changes, and the actions that follow."""

    def __init__(self, state: GroupState, now: float) -> None:
        super().__init__(state, now)
        self.folded: list[Publish] = []

    def act(self, *actions: Action) -> None:
        gone = self.state.exited
        self.actions += (each for each in actions if not isinstance(each, Send) or each.rank not in gone)

    def set_job(self, sends: Sends = (), /, **changes: Any) -> None:
        if self.state.job is not None:
            self.set(sends, job=replace(self.state.job, **changes))

    def send(self, rank: int, message: messages.ToRank) -> None:
        self.act(Send(rank, message))

    def agent_ended(self) -> None:
        self.set([Order.CLOSE_GROUP], closed=True)
        self.finish()
        # No tick will come for these.
        for why, each in self.state.searches.items():
            self.act(RanksLocated(why, each.report(self.state.at_work, self.state.remote)))
        self.set(searches={})

    def dismiss(self) -> None:
        state = self.state
        begun = state.forked or state.attempt > 0  # not so while an engine's nodes are awaited
        missing = state.exited or (begun and len(state.connected) < state.members.world_size)
        if state.persistent and (state.replacing or missing):
            # New ones are on their way, and would not hear of it.
            self.act(Order.STOP_AGENT)
            return
        self.act(ReleaseWorkers(succeeded=True, others=frozenset()))
        for rank in state.members.ranks:
            self.send(rank, messages.Leave())

    # --- messages of ranks, and observations -----------------------------------------------------

    def received(self, message: messages.FromRank) -> None:
        state = self.state
        if state.changing and isinstance(message, messages.Raised):
            return  # the membership change is what made it fail
        if self.fails_to_begin(message):
            return
        if state.recovery.busy:
            self.set(recovery=state.recovery.patient(self.now, state.grace))
        if (heard := _HEARD.get(type(message))) is not None:
            heard(self, message)
        self.fold(self.state.interruption.as_stopped(message))
        self.dispatch_when_ready()

    def replied(self, reply: Replied) -> None:
        job = self.state.job
        if job is not None:
            answered = reply.rank, reply.answer.number
            self.set_job(
                questions=tuple(each for each in job.questions if (each.rank, each.number) != answered)
            )
        self.send(reply.rank, reply.answer)

    def fails_to_begin(self, message: messages.FromRank) -> bool:
        """Replace all ranks if one that was started again cannot get ready; return whether that is so."""
        state = self.state
        new = isinstance(message, messages.Raised) and message.rank not in state.adopted | state.ready
        if not (new and state.replaces and state.adopted) or state.replacing:
            return False
        assert isinstance(message, messages.Raised)  # noqa: S101 - see above
        self.replace_ranks(f"rank {message.rank} could not be started again: {message.failure.message}")
        return True

    def take_of_job(self, message: messages.Returned | messages.Raised | messages.Asked) -> None:
        job = self.state.working
        if job is None or message.rank not in job.run.ranks:
            return
        if isinstance(message, messages.Asked):
            self.set_job(questions=(*job.questions, message))
        else:
            left_open = job.open or (isinstance(message, messages.Returned) and message.open)
            called = {**job.called, message.rank: message.tallies}
            self.set_job(open=left_open, called=called, steps={**job.steps, message.rank: message.steps})

    def connected(self, message: messages.Hello) -> None:
        state, rank = self.state, message.rank
        if state.prepare is not None and rank not in state.adopted:
            self.send(rank, replace(state.prepare, joins=True) if state.adopted else state.prepare)
        self.set(connected=state.connected.with_rank(rank))
        self.limit_process_group()

    def entered(self, message: messages.Entered) -> None:
        if message.phase is messages.Phase.READY:
            self.set(ready=self.state.ready.with_rank(message.rank))

    def payload_arrived(self, message: messages.Arrived) -> None:
        """Begin the job once its payload is whole on every rank; if one cannot load it, no rank keeps it."""
        job = self.state.working
        if job is None or self.state.interruption.begun or job.run.failed:
            return
        rank = message.rank
        arrived = job.arrived.with_rank(rank) if rank in job.run.ranks else job.arrived
        self.set_job(arrived=arrived)
        if len(job.arrived) < len(arrived) == len(job.run.ranks):
            self.act(Order.KEEP_PAYLOAD)
            for each in job.run.ranks:
                self.send(each, messages.Proceed())

    def located(self, answer: messages.Where) -> None:
        self.end_early(lambda ending: ending.answered(answer))
        state = self.state
        searches = {why: each.with_answer(answer) for why, each in state.searches.items()}
        self.set(recovery=state.recovery.answered(answer), searches=searches)
        self.search_on()
        job = state.working
        if job is not None and job.left_open is not None and not job.settled:
            self.set_job(left_open=job.left_open.with_answer(answer))
            if job.left_open.missing <= {answer.rank}:
                self.settle()

    def measured(self, message: messages.Measured) -> None:
        self.fold(message)
        ranks = self.state.at_work.ranks
        if len(ranks) > 1:
            for rank in ranks.values():
                # Nodes measure their own ranks.
                if rank.state is State.RUNNING and rank.rank not in self.state.remote:
                    self.send(rank.rank, messages.ReportReached())

    def engine_reported(self, status: messages.EngineStatus) -> None:
        before = self.state.engine
        self.set(engine=status)
        if before is None or replace(before, state=status.state, joined=status.joined) != status:
            self.fold(status)
        else:
            self.fold(messages.NodesJoined(state=status.state, joined=status.joined))

    def fold_run(self, message: Message) -> bool:
        """Fold a message into the job; return whether that changes anything. Nothing else changes its run."""
        job = self.state.working
        if job is None:
            return False
        run = advance(job.run, message)
        if run is job.run:
            return False
        ending = job.ending
        if ending.hang.seconds is not None and not isinstance(message, _UNHEARD):
            ending = replace(ending, hang=ending.hang.heard(self.now))
        self.set_job(run=run, ending=ending)
        self.folded.append(Publish(message))
        return True

    def fold(self, message: Message) -> None:
        """Fold a message into the state of the ranks or the job, and settle the job if it is over."""
        job = self.state.job
        if isinstance(message, _OF_MEMBERS):
            self.set(members=advance(self.state.members, message))
        if (
            job is not None
            and job.ended
            and isinstance(message, messages.Exited)
            and message.rank in job.run.ranks
        ):
            warning = advance(job.run, message).ranks[message.rank].warning
            if warning and warning != job.run.ranks[message.rank].warning:
                self.act(messages.Noticed(text=warning))
        if not self.fold_run(message) or isinstance(message, _SETTLES_NOTHING):
            return
        job = self.state.working
        if job is not None and job.run.finished:
            self.settle()
        elif job is not None and job.run.failed and job.settle_at is None:
            self.set_job(settle_at=self.now + _SETTLE_SECONDS)

    # --- where the ranks are ---------------------------------------------------------------------

    def locate(self, request: LocateRanks) -> None:
        why, seconds, ranks = request.number, request.seconds, request.ranks
        state = self.state
        known = () if state.closed else state.at_work.ranks.values()
        at_work = (rank.rank for rank in known if rank.node and not rank.state.final)
        asked = (rank for rank in at_work if ranks is None or rank in ranks)
        search, sends = Locating.begin(asked, seconds, self.now)
        self.set(sends, searches={**state.searches, why: search})
        self.search_on()

    def stacks_read(self, read: StacksRead) -> None:
        self.set(searches={why: each.with_stacks(read.stacks) for why, each in self.state.searches.items()})
        self.search_on()

    def search_on(self) -> None:
        remote = self.state.remote - self.state.exited
        for why in tuple(self.state.searches):
            search = self.state.searches.get(why)  # what comes of one may begin or end others
            while search is not None and search.over(remote, self.now):
                after, sends = search.go_on(self.state.at_work, remote, self.now)
                if isinstance(after, HangReport):
                    self.located_all(why, after, search.began)
                    break
                self.set(sends, searches={**self.state.searches, why: after})
                if after.silent != search.silent:
                    self.act(ReadStacks(after.silent))
                search = after

    def located_all(self, why: int, report: HangReport, asked: float) -> None:
        self.set(searches={other: each for other, each in self.state.searches.items() if other != why})
        if why >= 0:
            self.act(RanksLocated(why, report))
        else:
            self.end_early(lambda ending: ending.located(why, report, asked))

    # --- an attempt begins -----------------------------------------------------------------------

    def attempt_starting(self, event: AttemptStarting) -> None:
        message, kept = event.message, event.kept
        if message.number < self.state.attempt or self.state.closed:
            return
        adopted, remote = RankSet(kept or ()), self.state.remote
        self.set(
            attempt=message.number,
            connected=RankSet(),
            ready=RankSet(),
            forked=adopted,
            remote=RankSet(rank for rank, before in (kept or {}).items() if before in remote),
            exited=RankSet(),
            lost=RankSet(),
            away=RankSet(),
            adopted=adopted,
            regroups=False,
            regrouping=False,
            unfolded={},
            limited=None,
            deadline=NEVER,
            recovery=self.state.recovery.abandoned(),
            replacing=False,
            changing=False,
            saving=RankSet(),
        )
        if message.number > 0 and self.state.persistent:
            size = self.state.members.world_size
            if kept is None:
                self.note(RESTARTED)
            elif kept != {rank: rank for rank in kept} or message.world_size != size:
                self.note(_describe_regroup(kept, message.world_size))
            # Else a rank was started again: that was told when it died.
        job = self.state.working
        # Its ranks are gone, with all the variables it could use, or it was captured for other ranks.
        gone = job is not None and (job.dispatched or kept is not None or job.lacks(message.world_size))
        if self.state.persistent and gone:
            self.finish()
        elif job is not None:
            self.set(job=JobState(job.run, internal=job.internal, ending=job.ending))
            self.act(Order.FORGET_VALUES)
        self.fold(message)

    def workers_forked(self, event: WorkersForked) -> None:
        state, message, ranks, remote = self.state, event.message, event.ranks, event.remote
        if message.number != state.attempt or state.closed:
            return
        self.set(forked=state.forked | ranks, remote=state.remote | ranks if remote else state.remote)
        self.fold(message)
        # From now on: before, a fork server that imports torch from a slow disk has a limit of its own.
        connected = len(state.connected) == self.state.members.world_size
        if not (remote or connected) and state.limited is None:
            self.limit(messages.Phase.CONNECT)
        self.dispatch_when_ready()

    def limit(self, phase: messages.Phase) -> None:
        self.set(limited=phase, deadline=self.now + _LIMITS[phase])

    def limit_process_group(self) -> None:
        """Limit the time in which ranks form their group, once the last of them is connected."""
        state = self.state
        if len(state.connected) != state.members.world_size:
            return
        if state.adopted:
            # New ranks have prepared before they form the group with the others.
            self.set(deadline=NEVER)
            self.begin_recovery(cut=True)
        elif state.prepare is None:
            # Standby: every rank is connected and idle, so no deadline applies.
            self.set(deadline=NEVER)
        elif state.limited is not messages.Phase.PROCESS_GROUP:
            self.limit(messages.Phase.PROCESS_GROUP)

    def stop_overdue(self) -> None:
        state, phase = self.state, self.state.limited
        if phase is None or self.now <= state.deadline:
            return
        reached = state.connected if phase is messages.Phase.CONNECT else state.ready
        late = format_ranks(state.members.ranks.keys() - reached)
        what = f"phase '{phase}' did not finish in {_LIMITS[phase]:.0f} s"
        if state.adopted:
            self.set(deadline=NEVER)
            self.replace_ranks(what)
            return
        self.set(
            deadline=NEVER,
            launch_failure=(phase.value, f"{what}: {late} did not come that far"),
        )
        self.act(Order.STOP_AGENT)

    def prepare_changed(self, event: PrepareChanged) -> None:
        """Use this backend for the next attempt, unless its ranks get no process group."""
        prepare = self.state.prepare
        if prepare is not None:
            backend = None if prepare.backend is None else event.backend
            # If ranks are to leave devices alone, that holds on every node.
            kind = event.device_type if prepare.device_type else ""
            self.set(prepare=replace(prepare, backend=backend, device_type=kind))

    # --- a job begins ----------------------------------------------------------------------------

    def job_submitted(self, event: JobSubmitted) -> None:
        state = self.state
        if state.prepare is None:
            self.set(prepare=event.prepare)
            for rank in state.members.ranks.values():
                if rank.node:
                    self.send(rank.rank, event.prepare)
            self.limit_process_group()
        self.set(job=event.job)
        if event.job is None:
            return
        run = event.job.run
        self.set(interruption=state.interruption.fresh())
        if state.closed:
            self.finish()
            return
        places = {rank: known.place for rank, known in state.members.ranks.items() if rank in run.ranks}
        self.fold_run(messages.JobAssigned(ranks=places, attempt=state.attempt))
        if state.engine is not None:
            self.fold_run(state.engine)
        if not event.job.internal:
            self.set(notes=())
            for note in state.notes:
                self.fold_run(messages.Noticed(text=note))
        self.dispatch_when_ready()

    def dispatch_when_ready(self) -> None:
        """Dispatch once every rank has its process group, and its log files are known."""
        state, job = self.state, self.state.working
        if not state.all_ready or len(state.forked) < state.members.world_size:
            return
        if state.deadline != NEVER:
            self.set(deadline=NEVER)
        if job is None or job.dispatched or job.settled or state.interruption.begun:
            return
        if state.recovery.busy or state.lost or state.regrouping:
            return  # these ranks are about to form a group
        if not state.persistent and state.changing:
            return  # these ranks are about to be ended: the job is for the next ones
        # A persistent group's job goes with the ranks it was captured for: the next ones lack what these
        # have.
        self.set_job(dispatched=True)
        for rank in job.run.ranks:
            if rank not in state.exited:
                self.act(SendJob(rank))
        self.fold_run(messages.JobSent(ranks=tuple(job.run.ranks)))

    def note(self, text: str) -> None:
        """Show what has happened to the ranks with the present job, or else with the next one."""
        job = self.state.working
        if job is not None and not job.internal:
            self.fold_run(messages.Noticed(text=text))
        elif text not in self.state.notes:  # several ranks may die one after the other
            self.set(notes=(*self.state.notes, text))

    # --- a job settles ---------------------------------------------------------------------------

    def tick(self) -> None:
        now = self.now
        self.fold_exits(now)
        job = self.state.working
        if job is not None and job.settle_at is not None and now >= job.settle_at:
            self.settle()
        self.search_on()
        self.end_early(EndingStep.tick)
        self.end_waits_for_the_dead()
        recovery, then = self.state.recovery.tick(now)
        self.set(recovery=recovery)
        self.follow(then)
        self.stop_overdue()

    def settle(self) -> None:
        """Every rank of the job has an outcome, or has had the time to report one."""
        job = self.state.working
        if job is None or job.settled or self.state.changing:
            return
        if self.state.preempted and (self.state.saving or not job.run.finished):
            return  # a failure does not end ranks that save
        if self.state.persistent:
            self.settle_persistent(job)
            return
        if job.succeeded and not self.left_nothing_open(job):
            return
        self.set_job(settled=True, settle_at=None)
        others = frozenset(rank.rank for rank in job.run.ranks.values() if not rank.state.final)
        self.act(ReleaseWorkers(job.succeeded, others))
        if job.succeeded and not self.state.interruption.begun:
            self.finish()  # all values are here: the ranks leave while the user goes on
        if not others:
            self.send_leave(job.run.ranks)
        if self.state.interruption.begun:
            self.act(Order.STOP_AGENT)  # also: no restart

    def settle_persistent(self, job: JobState) -> None:
        state = self.state
        self.set_job(settle_at=None)
        if not job.dispatched:
            if not state.adopted:
                self.act(Order.STOP_AGENT)  # a rank failed before it had the job: its successor would, too
        elif state.exited - state.lost:
            pass  # the agent ends the others, and starts the group again
        elif not job.run.finished:
            # A peer of the ranks that are still at work has given up, and so do they.
            if not state.interruption.begun:
                self.end_early(EndingStep.begin_interruption)
        else:
            self.set_job(settled=True)
            if job.succeeded and not uneven(job.called, self.present().ranks):
                self.finish()
            else:
                for each in () if job.succeeded else apart(job.steps):
                    self.fold_run(messages.Noticed(text=each))
                self.begin_recovery()

    def begin_recovery(self, *, cut: bool = False) -> None:
        """Make the ranks fit for another job; if some are lost, for a group without these."""
        state, ranks = self.state, self.present().ranks
        cut = cut or state.interruption.cut
        gone = state.interruption.lost if state.lost else None
        job = state.job
        recovery, sends = state.recovery.begin(
            ranks,
            self.now,
            state.grace,
            cut=cut,
            gone=gone,
            called={} if job is None else job.called,
            succeeded=job is not None and job.succeeded,
        )
        self.set(sends, recovery=recovery)

    def left_nothing_open(self, job: JobState) -> bool:
        """Whether all open NCCL operations will end; where a rank has left some, asks all ranks first."""
        if not job.open or job.unmatched:
            return True
        if job.left_open is None:
            left_open, sends = Survey.begin(self.state.members.ranks, self.now + _LEFT_OPEN_SECONDS)
            self.set_job(sends, left_open=left_open, settle_at=left_open.until)
            return False
        if not job.left_open.over(self.now):
            return False
        left = hang.report(job.left_open.answers).findings
        self.set_job(unmatched=bool(left))
        for each in left:
            self.fold_run(
                messages.Noticed(text=f"the run ended with a collective open, which was aborted: {each}")
            )
        return True

    def finish(self) -> None:
        job, remote = self.state.working, self.state.remote - self.state.exited
        if job is None:
            return
        for why in self.state.searches.keys() & {Why.INTERRUPT, Why.TIMEOUT}:
            # It counts, although the job has ended while its ranks were asked.
            report = self.state.searches[why].report(job.run, remote)
            self.end_early(functools.partial(EndingStep.keep_where, report=report))
        self.set_job(ended=True, settle_at=None, launch_failure=self.state.launch_failure)
        others = {why: each for why, each in self.state.searches.items() if why >= 0}
        self.set(interruption=self.state.interruption.over(), searches=others)
        self.act(Order.FINISH_JOB)

    # --- interrupts, recovery, replacement -------------------------------------------------------

    def preempt(self, event: Preemption) -> None:
        state, job = self.state, self.state.working
        if state.closed:
            return
        if event.seconds is not None:
            there = RankSet(rank.rank for rank in state.members.ranks.values() if rank.node) - state.exited
            self.set(saving=state.saving | there)
            for rank in there:
                self.send(rank, messages.Preempt(event.seconds))
        if job is None or not job.dispatched or state.interruption.begun or job.run.failed:
            return  # the job ends for another reason, or begins in the time that is left
        awaited = {
            rank: (when, replace(each, expected=True)) for rank, (when, each) in state.unfolded.items()
        }
        self.set(unfolded=awaited)
        self.fold_run(messages.RunPreempted(why=event.why))
        if event.seconds is not None:
            self.end_early(EndingStep.begin_interruption)

    def take_saving(self, message: messages.Preempting | messages.Preempted) -> None:
        if isinstance(message, messages.Preempting):
            self.set(interruption=self.state.interruption.left_alone(message.rank))
            return
        for each in message.failed:
            self.note(f"rank {message.rank} did not save all: {each}")
        self.no_longer_saves(message.rank)

    def no_longer_saves(self, rank: int) -> None:
        job = self.state.working
        self.set(saving=self.state.saving - {rank})
        if self.state.preempted and job is not None and job.run.finished:
            self.settle()

    def end_early(self, decide: Callable[[EndingStep], None]) -> None:
        """Have the job end early as the machine for that decides, and do what follows."""
        state, job = self.state, self.state.working
        if job is None:
            return
        situation = Situation(
            run=job.run,
            members=state.members,
            present=self.present(),
            kept=state.persistent,
            at_work=job.dispatched and not job.settled,
            asks=bool(job.questions),
            replacing=state.replacing,
            searches=state.searches.keys(),
        )
        step = EndingStep(job.ending, state.interruption, situation, self.now)
        decide(step)
        self.set(interruption=step.interruption)
        self.set_job(ending=step.state)
        self.follow(step.actions)

    def follow(self, consequences: Iterable[Consequence]) -> None:
        for each in consequences:
            match each:
                case LocateRanks():
                    self.locate(each)
                case RestartAsked(reason):
                    self.replace_ranks(reason)
                case messages.Noticed(text=text):
                    self.note(text)
                case Order.FINISH_JOB:
                    self.finish()
                case Order() | Send():
                    self.act(each)
                case _:
                    self.fold(each)

    def recovered(self, message: messages.Recovered) -> None:
        before = self.state.recovery
        recovery, then = before.recovered(message)
        self.set(recovery=recovery)
        self.follow(then)
        job = self.state.working
        if not before.busy or recovery.busy or self.state.replacing:
            return
        if job is None or job.dispatched:
            self.finish()
        elif job.run.doing:
            self.fold_run(messages.Waiting())

    def end_waits_for_the_dead(self) -> None:
        """Replace all ranks if one has died, and another does not come back within the grace period.

        It may wait in C code for the one that has died, for as long as a store's or its own timeout.
        """
        state = self.state
        dead = state.lost - state.away
        if not (state.replaces and dead and state.interruption.begun) or state.replacing:
            return
        waited, patience = state.interruption.interrupted, max(state.grace, 1.0)
        late = [
            rank for rank, each in waited.items() if each.seen is None and self.now > each.since + patience
        ]
        if late:
            self.replace_ranks(
                f"{format_ranks(late)} did not come back, and may wait for a rank that is gone"
            )

    def replace_ranks(self, reason: str) -> None:
        if not self.state.closed:
            self.set(replacing=True, recovery=self.state.recovery.abandoned())
            self.note(reason)
            self.act(Order.RESTART_AGENT)

    # --- ranks end -------------------------------------------------------------------------------

    def worker_exited(self, exited: messages.Exited) -> None:
        state = self.state
        if exited.rank in state.exited:
            return
        job = state.working
        at_work = job is not None and job.dispatched and exited.rank in job.run.ranks
        dies = not (exited.expected or state.changing or state.replacing or state.closed)
        if state.changing or state.preempted or (exited.rank in state.lost and not at_work):
            exited = replace(exited, expected=True)
        if state.persistent and not (state.all_ready or state.adopted or exited.expected):
            self.act(Order.STOP_AGENT)  # a rank that dies while it starts would do so again
        elif state.replaces and dies and exited.rank not in state.away:
            exited = self.lose(exited, at_work=at_work)
            state = self.state
        # Slurm and others send SIGTERM to all processes of a node, in any order.
        ordered = exited.exitcode == _TERMINATED and exited.rank in state.remote and not exited.expected
        until = self.now + (_NOTICE_SECONDS if ordered else _LAST_MESSAGES_SECONDS)
        self.set(
            recovery=state.recovery if exited.rank in state.lost else state.recovery.abandoned(),
            exited=state.exited.with_rank(exited.rank),
            unfolded={**state.unfolded, exited.rank: (until, exited)},
        )
        self.fold_exits(self.now)
        if exited.rank in self.state.saving:
            self.no_longer_saves(exited.rank)

    def lose(self, exited: messages.Exited, *, at_work: bool) -> messages.Exited:
        """Have a persistent rank replaced alone that has died; return its exit as it is to be folded.

        The last rank is not lost: without ranks that go on, torchelastic starts all of them anew.
        """
        state = self.state
        if not (state.all_ready or exited.rank in state.adopted):
            self.replace_ranks(f"{format_ranks([exited.rank])} ended again before it was ready")
            return exited
        lost = state.lost.with_rank(exited.rank)
        if len(lost) == state.members.world_size:
            self.set(lost=RankSet(), regroups=False)
            return exited
        self.set(lost=lost, regroups=True)
        if at_work and not exited.expected:
            self.note(STARTED_AGAIN.format(exited.rank))
        if state.recovery.busy:
            self.begin_recovery()
        # A job that waits for its ranks was never this one's.
        waits = state.working is not None and not at_work and not state.working.dispatched
        return replace(exited, expected=exited.expected or waits)

    def fold_exits(self, now: float) -> None:
        """Fold exits of ranks whose last messages have had time to arrive, or make no difference."""
        for rank, (when, exited) in self.state.unfolded.items():
            known = self.state.working_ranks.get(rank)
            awaited = known is not None and not known.state.final
            if awaited and now < when:
                continue
            self.set(unfolded={key: each for key, each in self.state.unfolded.items() if key != rank})
            if awaited or self.noteworthy(exited):
                self.act(Explain(exited))
            else:
                self.fold(exited)

    def exit_explained(self, exited: messages.Exited) -> None:
        if self.noteworthy(exited):
            self.note(f"rank {exited.rank} {exited.reason}")
        self.fold(exited)

    def noteworthy(self, exited: messages.Exited) -> bool:
        """Whether a rank of a persistent group has died between two jobs."""
        state, bad = self.state, not exited.expected and exited.exitcode != 0
        return bad and state.persistent and not state.closed and exited.rank not in state.working_ranks

    def send_leave(self, ranks: Collection[int]) -> None:
        job = self.state.job
        if job is None:
            return
        # A rank that waits for what a failed one has not begun would wait without end.
        abort = job.unmatched or not job.succeeded
        for rank in job.run.ranks.values():
            if rank.rank in ranks and rank.state.final:
                failure = rank.failure if rank.state is State.FAILED else None
                # A process that ends with 256 would seem to have succeeded.
                exitcode = 0 if failure is None else failure.exitcode & 0xFF or 1
                self.send(rank.rank, messages.Leave(exitcode=exitcode, abort=abort))

    def node_leaving(self, event: NodeLeaving) -> None:
        state, job = self.state, self.state.working
        how = "left" if event.asked else "was lost"
        starting = state.persistent and not (state.all_ready or state.adopted)
        self.set(away=state.away | event.ranks)
        if not (event.enough or starting) or state.closed or state.replacing or state.changing:
            return  # the node's ranks have failed with it
        if state.launch_failure is not None:
            return  # the agent was stopped, and its nodes with it
        if not state.persistent and (
            job is None or job.settled or job.ending.told or state.interruption.begun
        ):
            return
        if state.persistent and not starting:
            self.note(f"node {event.name} {how}, with the variables of {format_ranks(event.ranks)}")
            away = state.interruption.without(event.address)
            self.set(lost=state.lost | event.ranks, interruption=away, regroups=True)
            if state.recovery.busy:
                self.begin_recovery()
            return
        if event.enough:
            self.note(f"node {event.name} {how}; the others begin again without it")
            self.act(Order.REJOIN_NODES)
        # Else the nodes' next rendezvous begins once another has come; without one, the agent ends.
        self.change_membership()

    def regroup_if_idle(self) -> None:
        """Order the regroup once the remaining ranks have ended the job."""
        state, job = self.state, self.state.working
        # Ranks that save answer under the number that they were ordered by.
        busy = state.recovery.busy or bool(state.saving) or (job is not None and job.dispatched)
        if not state.regroups or busy:
            return
        # An `Adopt` reaches only ranks that have sent `Hello` in this attempt.
        everyone = len(state.connected | state.lost) == state.members.world_size
        if (state.all_ready or state.adopted) and everyone:
            self.set(regroups=False, regrouping=True)
            self.act(Order.REGROUP_NODES)

    def present(self) -> RunState:
        members, lost = self.state.members, self.state.lost
        if not lost:
            return members
        return replace(
            members, ranks={rank: each for rank, each in members.ranks.items() if rank not in lost}
        )

    def change_membership(self) -> None:
        self.set(changing=True, deadline=NEVER)
        self.set_job(settle_at=None)


_TAKES: Mapping[type | Trigger, Callable[[_Step, Any], None]] = {
    Trigger.TICK: lambda step, _: step.tick(),
    Trigger.DRAINED: lambda step, _: step.fold_exits(NEVER),
    Trigger.HUB_LOST: lambda step, _: step.act(Order.STOP_AGENT),
    Trigger.MEMBERSHIP_CHANGING: lambda step, _: step.change_membership(),
    Trigger.AGENT_ENDED: lambda step, _: step.agent_ended(),
    Trigger.INTERRUPT: lambda step, _: step.end_early(EndingStep.interrupt),
    Trigger.INTERRUPT_SPARING: lambda step, _: step.end_early(
        functools.partial(EndingStep.interrupt, sparing=True)
    ),
    Trigger.NODE_ARRIVED: lambda step, _: step.set(regroups=step.state.persistent),
    Trigger.DISMISS: lambda step, _: step.dismiss(),
    Trigger.FORGET_NOTES: lambda step, _: step.set(notes=()),
    messages.Printed: _Step.fold,
    messages.Measured: _Step.measured,
    messages.EngineStatus: _Step.engine_reported,
    messages.Noticed: lambda step, noticed: step.note(noticed.text),
    messages.Exited: _Step.worker_exited,
    ExitExplained: lambda step, explained: step.exit_explained(explained.exited),
    AttemptStarting: _Step.attempt_starting,
    WorkersForked: _Step.workers_forked,
    RanksStopped: lambda step, stopped: step.send_leave(stopped.ranks),
    StacksRead: _Step.stacks_read,
    NodeLeaving: _Step.node_leaving,
    PrepareChanged: _Step.prepare_changed,
    Preemption: _Step.preempt,
    JobSubmitted: _Step.job_submitted,
    Replied: _Step.replied,
    LocateRanks: _Step.locate,
    RestartAsked: lambda step, request: step.replace_ranks(request.reason),
}
"""The handler of each event; all others are messages of ranks: `_Step.received`."""

_HEARD: Mapping[type, Callable[[_Step, Any], None]] = {
    messages.Hello: _Step.connected,
    messages.Entered: _Step.entered,
    messages.Returned: _Step.take_of_job,
    messages.Raised: _Step.take_of_job,
    messages.Asked: _Step.take_of_job,
    messages.Arrived: _Step.payload_arrived,
    messages.InterruptSeen: lambda step, seen: step.set(
        interruption=step.state.interruption.seen(seen, step.now)
    ),
    messages.Where: _Step.located,
    messages.Recovered: _Step.recovered,
    messages.Preempting: _Step.take_saving,
    messages.Preempted: _Step.take_saving,
}
"""Handlers of messages of ranks, which are also folded."""


def _describe_regroup(kept: Mapping[int, int], world_size: int) -> str:
    """Describe which ranks were kept, which have a new number, and which are new."""
    others = {rank: before for rank, before in kept.items() if rank != before}
    new = [rank for rank in range(world_size) if rank not in kept]
    parts = [
        f"the group has {world_size} rank{'' if world_size == 1 else 's'} now",
        f"variables kept: {format_ranks(kept)}",
        f"{format_ranks(others)} formerly {format_ranks(others.values())}" if others else "",
        f"new: {format_ranks(new)}" if new else "",
    ]
    return "; ".join(filter(None, parts))
