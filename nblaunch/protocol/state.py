"""The state of a run: a pure fold of messages into frozen states.

`advance(state, message)` returns the state after a message and leaves the old one alone. It accepts any
messages in any order: one that is late, repeated or from an unknown rank changes nothing that is already
final. Views and results read only this.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from typing import Protocol, Self, TypeAlias, assert_never

import msgspec
from msgspec.structs import asdict, replace

from nblaunch.protocol import messages
from nblaunch.protocol.metrics import MetricLog, logged, next_attempt
from nblaunch.protocol.ranks import Blocks
from nblaunch.protocol.reports import HangReport, LocatedAll, awaited_nodes, format_ranks
from nblaunch.protocol.transcript import Transcript, cleared, displayed, printed

Message: TypeAlias = messages.FromRank | messages.AboutRank | LocatedAll
"""A message that `advance` folds."""


class State(enum.StrEnum):
    """A rank's state, or a run's: ranks end in one of the four before the last, which is a run's alone."""

    INIT = "INIT"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    LOST = "LOST"
    PREEMPTED = "PREEMPTED"

    @property
    def final(self) -> bool:
        """Whether a rank in this state has its outcome."""
        return self in _FINAL


# A tuple: an enum's member has a slow hash.
_FINAL = (State.SUCCEEDED, State.FAILED, State.STOPPED, State.LOST)
_FAILING = (State.FAILED, State.LOST)


_NOTICES = 20
NOTICE_CHARACTERS = 2000
_LATE = "threads of an earlier cell printed before this one began: that output comes first"


class RankState(msgspec.Struct, frozen=True, gc=False):
    """One rank in one attempt."""

    rank: int
    local_rank: int = -1
    node: str = ""
    device: str = ""
    pid: int | None = None
    state: State = State.INIT
    phase: messages.Phase = messages.Phase.FORK
    transcript: Transcript = Transcript()
    value: messages.Payload | None = None
    value_text: str = ""
    value_html: str = ""
    value_not_sent: str = ""
    """Why the value is only shown."""
    failure: messages.FailureRecord | None = None
    exitcode: int | None = None
    started: float | None = None
    ended: float | None = None
    warning: str = ""
    usage: messages.Usage | None = None
    """Its last measured use of resources; only while a view shows it."""
    peak_gpu_memory: int | None = None
    """The most bytes that torch had allocated on a GPU, once the job has ended."""
    memory: messages.MemoryUse | None = None
    """Its use of memory, once the job has ended."""
    collectives: int | None = None
    """How many collectives of the default group it had begun then."""
    unwritten: int = 0
    """How many bytes of its output were lost to a full disk."""
    profile: messages.Payload | None = None
    """Its profile, with `--profile`; see `Profiled`."""
    waiting: str = ""
    """If it has been interrupted and does not end: since when, and where it is."""
    finishing: str = ""
    """Its work after its job, whether that has failed or not."""

    @property
    def used(self) -> messages.MemoryUse | None:
        """The memory that it used; if it could not tell, as it was measured last."""
        if self.memory is not None or self.usage is None:
            return self.memory
        known = self.usage
        return messages.MemoryUse(known.memory, known.memory_peak, known.gpu_memory)

    @property
    def place(self) -> messages.RankPlace:
        """Where it runs, and how far it is."""
        return messages.RankPlace(self.local_rank, self.node, self.device, self.pid, self.phase)


# A dict of so few is copied as fast.
_FEW = 64


class Ranks(Blocks[RankState]):
    """The ranks of a large run, and how many of them are how far."""

    __slots__ = ("failing", "fresh", "open")
    open: int
    """How many are in no final state."""
    failing: int
    """How many have failed, or are lost."""
    fresh: int
    """How many do not exist yet."""

    def __init__(self, ranks: Mapping[int, RankState]) -> None:
        super().__init__(ranks)
        self.open = self.failing = self.fresh = 0
        for known in ranks.values():
            self.count(known.state, 1)

    def count(self, state: State, more: int) -> None:
        if state not in _FINAL:
            self.open += more
            if state is State.INIT:
                self.fresh += more
        elif state in _FAILING:
            self.failing += more

    def changed(self, news: Mapping[int, RankState]) -> Self:
        after = super().changed(news)
        after.open, after.failing, after.fresh = self.open, self.failing, self.fresh
        for rank, known in news.items():
            before = self[rank].state
            if before is not known.state:
                after.count(before, -1)
                after.count(known.state, 1)
        return after


def _changed(ranks: Mapping[int, RankState], news: Mapping[int, RankState]) -> Mapping[int, RankState]:
    if isinstance(ranks, Ranks):
        return ranks.changed(news)
    return {**ranks, **news} if len(ranks) <= _FEW else Ranks(ranks).changed(news)


def hosts_of(ranks: Mapping[int, RankState]) -> dict[int, str]:
    """Return on which host each rank runs; empty unless they are on more than one."""
    hosts = {rank: known.node for rank, known in ranks.items() if known.node}
    return hosts if len(set(hosts.values())) > 1 else {}


class AttemptState(msgspec.Struct, frozen=True):
    """One attempt of the worker group, numbered from 0; `reason` says why it was started."""

    number: int
    world_size: int
    reason: str
    started: float
    ended: float | None = None
    ranks: Mapping[int, RankState] = {}


class RunState(msgspec.Struct, frozen=True):
    """A run: its present ranks, and the attempts before this one."""

    world_size: int
    ranks: Mapping[int, RankState]
    attempt: AttemptState
    earlier: tuple[AttemptState, ...] = ()
    notices: tuple[str, ...] = ()
    hang: HangReport | None = None
    """Where the ranks were at the last survey."""
    doing: str = ""
    """The work of all ranks after the job, before it is over for the user."""
    engine: messages.EngineStatus | None = None
    """The last report on the nodes, where an engine places them."""
    preempted: str = ""
    """Why its nodes are taken back, once its ranks save because of that."""
    backend: str = ""
    """Of the default process group, where it is known only once the nodes are there."""
    metrics: MetricLog = MetricLog()
    """The metrics that ranks have logged, in all attempts."""
    profile: messages.Illustrated = messages.Illustrated()
    """The profile of a finished run, as it is shown."""

    @classmethod
    def fresh(cls, world_size: int, ranks: tuple[int, ...] | None = None, *, time: float = 0.0) -> RunState:
        """Return the initial state; `ranks` are those that take part, None for all."""
        members = tuple(range(world_size)) if ranks is None else ranks
        return cls(
            world_size=world_size,
            ranks={rank: RankState(rank) for rank in members},
            attempt=AttemptState(0, world_size, "started", time),
        )

    @property
    def began(self) -> float:
        return (*self.earlier, self.attempt)[0].started

    @property
    def begun(self) -> bool:
        if isinstance(self.ranks, Ranks):
            return self.ranks.fresh < len(self.ranks)
        return any(rank.state is not State.INIT for rank in self.ranks.values())

    @property
    def awaits_nodes(self) -> bool:
        """Whether no rank exists because an engine has not placed the nodes yet."""
        return self.engine is not None and self.engine.state.early and not self.begun

    @property
    def where(self) -> str:
        """Where the ranks are, in one line, as far as their messages tell."""
        if self.engine is not None and self.awaits_nodes:
            return awaited_nodes(self.engine)
        groups: dict[str, list[int]] = {}
        for rank in self.ranks.values():
            starting = rank.state in (State.INIT, State.STARTING)
            groups.setdefault(f"phase '{rank.phase}'" if starting else rank.state.value, []).append(rank.rank)
        return ", ".join(f"{format_ranks(ranks)} {word}" for word, ranks in groups.items())

    @property
    def finished(self) -> bool:
        if isinstance(self.ranks, Ranks):
            return not self.ranks.open
        return all(rank.state.final for rank in self.ranks.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that failed no rank."""
        bad_ends = [rank.warning for rank in self.ranks.values() if rank.warning]
        not_sent: dict[str, list[int]] = {}
        for number, rank in sorted(self.ranks.items()):
            if rank.value_not_sent:
                not_sent.setdefault(rank.value_not_sent, []).append(number)
        shown = [
            f"the value of {format_ranks(ranks)} is only shown: {why}" for why, ranks in not_sent.items()
        ]
        preempted = f"preempted: {self.preempted}" if self.preempted else ""
        return (*bad_ends, *shown, *filter(None, [self.unwritten, preempted]))

    @property
    def unwritten(self) -> str:
        """How much output of which ranks was lost to a full disk; empty if none was."""
        lost = {rank: known.unwritten for rank, known in sorted(self.ranks.items()) if known.unwritten}
        parts = [f"{size:,} bytes of rank {rank}" for rank, size in lost.items()]
        where = "the disk that takes what ranks print is full (TMPDIR, --log-dir)"
        return f"{where}: {', '.join(parts)} were dropped" if parts else ""

    @property
    def failed(self) -> bool:
        if isinstance(self.ranks, Ranks):
            return self.ranks.failing > 0
        return any(rank.state in _FAILING for rank in self.ranks.values())

    @property
    def attempts(self) -> tuple[AttemptState, ...]:
        """Every attempt, oldest first, the present one last."""
        ends = [rank.ended for rank in self.ranks.values() if rank.ended is not None]
        ended = max(ends, default=None) if self.finished else None
        return (*self.earlier, replace(self.attempt, ranks=self.ranks, ended=ended))

    @property
    def summary(self) -> State:
        states = [rank.state for rank in self.ranks.values()]
        if self.preempted and self.finished and any(word is not State.SUCCEEDED for word in states):
            return State.PREEMPTED
        if self.failed:
            return State.FAILED
        if self.finished:
            return State.STOPPED if State.STOPPED in states else State.SUCCEEDED
        if State.RUNNING in states or State.SUCCEEDED in states:
            return State.RUNNING
        return State.STARTING if State.STARTING in states else State.INIT


def advance(state: RunState, message: Message) -> RunState:
    """Return the state after `message`.

    A message of a rank that does not take part is ignored.

    >>> from nblaunch.protocol.messages import Started
    >>> advance(RunState.fresh(1), Started(rank=0, time=1.0)).ranks[0].state
    <State.RUNNING: 'RUNNING'>
    """
    match message:
        case messages.AttemptStarted():
            return _next_attempt(state, message)
        case messages.EngineStatus() | messages.NodesJoined():
            return _placed(state, message)
        case (
            messages.Noticed()
            | LocatedAll()
            | messages.RunPreempted()
            | messages.Illustrated()
            | messages.Logged()
            | messages.RankNotice()
        ):
            return _noted(state, message)
        case messages.JobSent():
            return _job_sent(state, message)
        case messages.Measured():
            return _measured(state, message)
        case messages.Waiting():
            return _waiting(state, message)
        case messages.RunEnded():
            ranks = {rank: _end_unfinished(known, message) for rank, known in state.ranks.items()}
            return replace(state, ranks=ranks)
        case messages.JobAssigned():
            return _assigned(state, message)
        case _:
            known = state.ranks.get(message.rank)
            if known is None:
                return state
            after = _advance_rank(known, message)
            if after is known:
                return state
            return replace(state, ranks=_changed(state.ranks, {message.rank: after}))


def _placed(state: RunState, message: messages.EngineStatus | messages.NodesJoined) -> RunState:
    engine: messages.EngineStatus | None
    if isinstance(message, messages.EngineStatus):
        engine = message
    else:
        engine = state.engine and replace(state.engine, state=message.state, joined=message.joined)
    return state if state.engine == engine else replace(state, engine=engine)


def _noted(
    state: RunState,
    message: messages.Noticed
    | LocatedAll
    | messages.RunPreempted
    | messages.Illustrated
    | messages.Logged
    | messages.RankNotice,
) -> RunState:
    """Return the state with what concerns all its ranks, or kept for all of them together."""
    match message:
        case messages.Noticed(text=text):
            # Groups are formed again after a death, and after the failure that it leads to: said once.
            others = [each for each in state.notices if each != text]
            return replace(state, notices=(*others, text)[-_NOTICES:])
        case LocatedAll(report=report):
            return replace(state, hang=report)
        case messages.RunPreempted(why=why):
            return replace(state, preempted=why)
        case messages.Logged():
            return _logged(state, message)
        case messages.RankNotice(rank=rank, text=text):
            # The first ones count: what follows a NaN is NaN.
            if rank not in state.ranks or len(state.notices) >= _NOTICES:
                return state
            return _noted(state, messages.Noticed(text=f"rank {rank}: {text[:NOTICE_CHARACTERS]}"))
        case messages.Illustrated():
            return replace(state, profile=message)


def _next_attempt(state: RunState, message: messages.AttemptStarted) -> RunState:
    if message.number < state.attempt.number:
        return state
    backend = message.backend or state.backend
    if message.number == state.attempt.number:
        state = replace(_resized(state, message.world_size), backend=backend)
        pids, ranks = message.pids, state.ranks
        # Of many nodes each sends one: all ranks only if there is something to change in each.
        waits = ranks.fresh if isinstance(ranks, Ranks) else len(ranks)
        news = {
            rank: replace(ranks[rank], pid=pid, state=_at_least_starting(ranks[rank].state))
            for rank, pid in pids.items()
            if rank in ranks
        }
        if waits:
            news |= {
                rank: replace(known, state=_at_least_starting(known.state))
                for rank, known in ranks.items()
                if rank not in news
            }
        return replace(state, ranks=_changed(ranks, news))
    ended = replace(state.attempt, ranks=state.ranks, ended=message.time)
    # The job goes to all ranks of the attempt, or to the same ones if it was for some.
    some = len(state.ranks) < state.world_size
    numbers = state.ranks if some else range(max(message.world_size, 0))
    return RunState(
        world_size=message.world_size,
        ranks={rank: RankState(rank, state=State.STARTING, pid=message.pids.get(rank)) for rank in numbers},
        attempt=AttemptState(message.number, message.world_size, message.reason, message.time),
        earlier=(*state.earlier, ended),
        notices=state.notices,
        engine=state.engine,
        preempted=state.preempted,
        backend=backend,
        metrics=next_attempt(state.metrics),
    )


def _logged(state: RunState, message: messages.Logged) -> RunState:
    after = logged(state.metrics, message) if message.rank in state.ranks else state.metrics
    return state if after is state.metrics else replace(state, metrics=after)


def _resized(state: RunState, world_size: int) -> RunState:
    """Return the state with as many ranks as the nodes of the rendezvous have: it is not known earlier."""
    if state.begun or world_size <= state.world_size or len(state.ranks) < state.world_size:
        return state
    ranks = {rank: state.ranks.get(rank, RankState(rank)) for rank in range(world_size)}
    attempt = replace(state.attempt, world_size=world_size)
    return replace(state, world_size=world_size, ranks=ranks, attempt=attempt)


def _assigned(state: RunState, message: messages.JobAssigned) -> RunState:
    if state.begun or message.attempt < state.attempt.number:
        return state
    ranks = {
        rank: replace(known, state=State.STARTING if place.node else State.INIT, **asdict(place))
        for rank, known in state.ranks.items()
        if (place := message.ranks.get(rank)) is not None
    }
    return replace(state, ranks=ranks, attempt=replace(state.attempt, number=message.attempt))


def _job_sent(state: RunState, message: messages.JobSent) -> RunState:
    news = {
        rank: replace(known, phase=messages.Phase.JOB)
        for rank in message.ranks
        if (known := state.ranks.get(rank)) is not None and not known.state.final
    }
    return replace(state, ranks=_changed(state.ranks, news)) if news else state


def _measured(state: RunState, message: messages.Measured) -> RunState:
    news = {
        rank: replace(known, usage=usage)
        for rank, usage in message.usages.items()
        if (known := state.ranks.get(rank)) is not None and not known.state.final and known.usage != usage
    }
    return replace(state, ranks=_changed(state.ranks, news)) if news else state


def _waiting(state: RunState, message: messages.Waiting) -> RunState:
    news = {
        rank: replace(known, waiting=where)
        for rank, known in state.ranks.items()
        if not known.state.final and known.waiting != (where := message.ranks.get(rank, ""))
    }
    if message.doing != state.doing:
        state = replace(state, doing=message.doing)
    return replace(state, ranks=_changed(state.ranks, news)) if news else state


def _at_least_starting(state: State) -> State:
    return State.STARTING if state is State.INIT else state


_OF_THE_JOB = (
    messages.Started,
    messages.Reached,
    messages.Unwritten,
    messages.Returned,
    messages.Raised,
    messages.Profiled,
)


def _advance_rank(known: RankState, message: Message) -> RankState:
    if known.state.final and isinstance(message, _OF_THE_JOB):
        return known
    match message:
        case messages.Hello():
            return replace(
                known,
                local_rank=message.local_rank,
                node=message.node,
                pid=message.pid,
                state=_at_least_starting(known.state),
                phase=known.phase if known.state.final else messages.Phase.CONNECT,
            )
        case messages.Entered():
            phase = known.phase if known.state.final else message.phase
            return replace(known, phase=phase, device=message.device or known.device)
        case messages.Started():
            warning = _LATE if message.late else known.warning
            return replace(
                known, state=State.RUNNING, phase=messages.Phase.JOB, started=message.time, warning=warning
            )
        case messages.Printed() | messages.Displayed() | messages.Cleared():
            return replace(known, transcript=_written(known.transcript, message))
        case messages.Reached() | messages.Unwritten() | messages.Profiled() | messages.Finishing():
            return _counted(known, message)
        case messages.Returned():
            return replace(
                known,
                state=State.SUCCEEDED,
                value=message.value,
                value_text=message.text,
                value_html=message.html,
                value_not_sent=message.not_sent,
                finishing="",
                ended=message.time,
                peak_gpu_memory=message.peak_gpu_memory,
                memory=message.memory,
            )
        case messages.Raised():
            failure = message.failure
            return replace(
                known,
                state=State.FAILED,
                failure=failure,
                phase=failure.phase,
                exitcode=failure.exitcode,
                finishing="",
                ended=failure.time,
                peak_gpu_memory=message.peak_gpu_memory,
                memory=message.memory,
            )
        case messages.Colored() if known.failure is not None:
            return replace(known, failure=replace(known.failure, colored=message.text))
        case messages.Unreadable() if known.state is State.SUCCEEDED:
            return replace(known, state=State.FAILED, failure=message.failure)
        case messages.Exited():
            return _exited(known, message)
        case _:
            return known  # of interest to the worker group only


def _counted(
    known: RankState, message: messages.Reached | messages.Unwritten | messages.Profiled | messages.Finishing
) -> RankState:
    if isinstance(message, messages.Reached):
        # The same count is no news: a rank that is asked each second would never be silent.
        same = known.collectives == message.collectives
        return known if same else replace(known, collectives=message.collectives)
    if isinstance(message, messages.Profiled):
        return replace(known, profile=message.data)
    if isinstance(message, messages.Finishing):
        return replace(known, finishing=message.what)
    return replace(known, unwritten=message.size)


def _written(
    transcript: Transcript, message: messages.Printed | messages.Displayed | messages.Cleared
) -> Transcript:
    match message:
        case messages.Printed():
            return printed(transcript, message.stream, message.text)
        case messages.Displayed():
            return displayed(transcript, message)
        case messages.Cleared():
            return cleared(transcript, wait=message.wait)
        case _:
            assert_never(message)


def _exited(known: RankState, message: messages.Exited) -> RankState:
    known = replace(known, finishing="") if known.finishing else known
    if known.state.final:
        if known.state is State.SUCCEEDED and known.exitcode is None:
            bad = message.exitcode != 0 and not message.expected
            warning = f"rank {known.rank} {describe_exit(message.exitcode)} after its value was here"
            return replace(known, exitcode=message.exitcode, warning=warning if bad else "")
        return replace(known, exitcode=message.exitcode) if known.exitcode is None else known
    if message.expected:
        return replace(known, state=State.STOPPED, exitcode=message.exitcode, ended=message.time)
    failure = messages.FailureRecord(
        type="ProcessExited",
        message=message.reason or describe_exit(message.exitcode),
        traceback=message.details,
        exitcode=message.exitcode,
        time=message.time,
        phase=known.phase,
    )
    return replace(known, state=State.FAILED, failure=failure, exitcode=message.exitcode, ended=message.time)


def _end_unfinished(known: RankState, message: messages.RunEnded) -> RankState:
    known = replace(known, finishing="") if known.finishing else known
    if known.state.final:
        return known
    state = State.STOPPED if message.stopped else State.LOST
    return replace(known, state=state, ended=message.time)


def signal_name(exitcode: int | None) -> str | None:
    """Return `"SIGKILL"` for -9, None for an exit code that is no signal."""
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def describe_exit(exitcode: int) -> str:
    """Describe how a process ended.

    >>> describe_exit(-9)
    'was killed by SIGKILL'
    """
    name = signal_name(exitcode)
    if name is not None:
        return f"was killed by {name}"
    if exitcode == 0:
        return "ended with exit code 0 but returned no value (os._exit?)"
    return f"ended with exit code {exitcode}"


# On their way to those who follow a run from another process: a whole state, and then each message that has
# changed it. Both folds have the same states.

_THE_RUNTIME = "nblaunch's runtime process"
_run_state: msgspec.msgpack.Decoder[RunState] = msgspec.msgpack.Decoder(RunState)
_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode_state(data: bytes) -> RunState:
    return messages.decoded(_run_state, data, _THE_RUNTIME)


def decode_folded(data: bytes) -> Message:
    return messages.decoded(_message, data, _THE_RUNTIME)


class View(Protocol):
    """Shows a run, on the thread that waits for it. `draw` is called often, also when nothing has changed."""

    @property
    def shows_usage(self) -> bool:
        """Whether it shows what the ranks use: only then are they measured."""

    def open(self, state: RunState) -> None:
        """Begin; nothing has run yet."""

    def draw(self, state: RunState) -> None:
        """Show what is new."""

    def close(self, state: RunState) -> None:
        """Show the end, and leave nothing behind that needs a kernel; called exactly once."""
