"""Why ranks failed: root causes and consequences, and their words. Nothing else decides it.

`blame` derives it from the states of the ranks, a pure fold; results and views only draw it. `explain_exit`
and `explain_out_of_memory` add what the system knows before a failure is folded into the state.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import psutil

from nblaunch._cgroups import oom_kills, tightest_memory
from nblaunch._help import FailureKind
from nblaunch.protocol.messages import DeviceMemory, FailureRecord, Phase
from nblaunch.protocol.reports import nearest_frame, place, ranks_on, readable_stacks, size
from nblaunch.protocol.state import RankState, State, describe_exit, hosts_of, signal_name

# What gloo, NCCL and TCPStore report when the *other* side went away. A rank that raises one of these
# while a peer failed for a reason of its own is a consequence, whatever the clocks say: the agent
# notices a killed rank up to one poll later than its peers notice the closed connection.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)( by (remote )?peer)?"
    r"|broken pipe|socket timeout|timed out waiting"
    r"|remote process exited|unhandled system error|peer disconnect|recvValue failed|failed to recv"
    r"|collective operation timeout|wait timeout|nccl communicator was aborted|operation was aborted"
    r"|connect timeout|connection to the (c10d|tcp) ?store"
    r"|application timeout caused pair closure",
    re.IGNORECASE,
)
_NCCL_WAITED = re.compile(r"timed out after|remote process exited|remote error|network error", re.IGNORECASE)
_CHAINED = re.compile(r"^[\w.]*(Dist\w*Error|RuntimeError): (?P<text>.*)$", re.MULTILINE)
# The errors of an exception group, each with the bar of its level before it.
_GROUPED = re.compile(r"^ *\| (?P<type>[A-Za-z_][\w.]*): (?P<text>.*)$", re.MULTILINE)
_GROUPS = ("ExceptionGroup", "BaseExceptionGroup")
_DEAD = "ProcessExited"
NODE_LOST = "was lost with its node"
"""Begins the explanation of a rank whose node has gone."""
_PORT = re.compile(r"((?:\d{1,3}(?:\.\d{1,3}){3}|::1|localhost)\]?):\d{2,5}\b")
_REASON_CHARACTERS = 2000
_COLLECTIVE_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError")


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank's failure and the rank whose failure explains it, if any."""

    rank: int
    failure: FailureRecord
    consequence_of: int | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a rank failed; as a text one line: `IndexError: out of range (cell line 4 in helper)`."""

    kind: str
    text: str
    where: str

    def __str__(self) -> str:
        """Return the reason in one line, with the user's own line where there is one."""
        text = self.text.strip().partition("\n")[0]
        text = f"{text[:_REASON_CHARACTERS]}…" if len(text) > _REASON_CHARACTERS else text
        line = ": ".join(part for part in (self.kind, text) if part)
        return f"{line} ({self.where})" if self.where else line


@dataclass(frozen=True, slots=True)
class Alike:
    """Ranks that failed for the same reason; `failure` is that of the lowest of them.

    `because_of` names the ranks that caused it; it is empty if these ranks are a cause themselves. `hosts`
    maps the attempt's ranks to their hosts; it is empty if there is only one host.
    """

    ranks: tuple[int, ...]
    reason: Reason
    failure: FailureRecord
    because_of: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict, hash=False)

    @property
    def who(self) -> str:
        """The ranks, with their hosts if there are several: `rank 3 on hB`."""
        return ranks_on(self.ranks, self.hosts)

    @property
    def kind(self) -> FailureKind | None:
        """What kind of failure it is; None for an exception of the user's own code."""
        return kind_of(self.failure)

    def line(self, draw: Callable[[Reason], str] = str) -> str:
        """Return why they failed in one line, the reason as `draw` returns it."""
        reason = draw(self.reason)
        return f"consequence of {self.because_of}: {reason}" if self.because_of else reason


@dataclass(frozen=True, slots=True)
class Blame:
    """Causes and consequences in one attempt.

    `failures` are those of all ranks, causes first. `causes` are the failures that explain the others, the
    root cause first, `consequences` the others, in the order of ranks; ranks that failed alike are one entry.
    `ended` are all ranks that ended because of a cause, with a failure of their own or without.
    """

    failures: tuple[Explained, ...]
    causes: tuple[Alike, ...]
    consequences: tuple[Alike, ...]
    ended: tuple[int, ...]

    @property
    def root(self) -> str:
        """The ranks of the root cause: `rank 1`; empty where no rank failed."""
        return self.causes[0].who if self.causes else ""

    def outcome(self, rank: RankState) -> str:
        """Return how a rank ended that has neither a value nor a failure; empty for the others."""
        match rank.state:
            case State.SUCCEEDED | State.FAILED:
                return ""
            case State.STOPPED:
                return f"STOPPED, because of {self.root}" if self.root else "STOPPED"
            case State.LOST:
                return "LOST: exited without a result or an error"
            case _:
                return str(rank.state)


def blame(ranks: Mapping[int, RankState]) -> Blame:
    """Return the causes and consequences among the ranks of an attempt.

    A mistake in a cell fails every rank in the same way. Which rank is first by the clock then differs from
    run to run, so all of them are named.
    """
    failures = explain({number: rank.failure for number, rank in ranks.items() if rank.failure is not None})
    hosts = hosts_of(ranks)
    causes = _alike((each for each in failures if each.consequence_of is None), hosts)
    followed = [each for each in failures if each.consequence_of is not None]
    root = causes[0].who if causes else ""
    consequences = [replace(each, because_of=root) for each in _alike(followed, hosts)]
    stopped = [number for number, rank in ranks.items() if rank.state is State.STOPPED]
    return Blame(
        failures=failures,
        causes=tuple(causes),
        consequences=tuple(sorted(consequences, key=lambda each: each.ranks)),
        ended=tuple(sorted([*(each.rank for each in followed), *stopped])),
    )


def _alike(failures: Iterable[Explained], hosts: Mapping[int, str]) -> list[Alike]:
    groups: dict[Reason, list[Explained]] = {}
    for each in failures:
        groups.setdefault(_stable_reason(each), []).append(each)
    return [
        Alike(
            ranks=tuple(sorted(each.rank for each in group)),
            reason=reason,
            failure=min(group, key=lambda each: each.rank).failure,
            hosts=hosts,
        )
        for reason, group in groups.items()
    ]


def reason(failure: FailureRecord) -> Reason:
    """Return why a rank failed.

    >>> str(reason(FailureRecord(type="builtins.ValueError", message="boom")))
    'ValueError: boom'
    """
    text = failure.message.strip().partition("\n")[0].rstrip()
    if failure.type == _DEAD:
        return Reason("", text, "")
    kind = failure.type.removeprefix("builtins.").removeprefix("__main__.").removeprefix("nblaunch._errors.")
    frame = nearest_frame(failure.frames)
    return Reason(kind, text, place(frame) if frame is not None else "")


def _stable_reason(explained: Explained) -> Reason:
    """Return a reason that is the same in every run and in every folder."""
    found = reason(explained.failure)
    where = found.where.rpartition("/")[2] if found.where.startswith("/") else found.where
    text = found.text if explained.consequence_of is None else without_ports(found.text)
    return Reason(found.kind, text, where)


def without_ports(text: str) -> str:
    """Return `text` without the ports of peers: they differ in every run and mean nothing to the reader."""
    return _PORT.sub(r"\1", text)


def explain(failures: Mapping[int, FailureRecord]) -> tuple[Explained, ...]:
    """Return the failures, causes first, each group in the order of time.

    >>> killed = FailureRecord(type="ProcessExited", message="was killed by SIGKILL", exitcode=-9, time=2.0)
    >>> closed = FailureRecord(type="builtins.RuntimeError", message="Connection closed by peer", time=1.0)
    >>> [(each.rank, each.consequence_of) for each in explain({0: closed, 1: killed})]
    [(1, None), (0, 1)]
    """
    in_time = sorted(failures.items(), key=lambda item: (item[1].time, item[0]))
    causes = [(rank, failure) for rank, failure in in_time if not blames_a_peer(failure)]
    if not causes:
        # A SIGTERM from outside ends one rank; its peers then blame it, perhaps before the agent notices.
        dead = [(rank, failure) for rank, failure in in_time if failure.type == _DEAD]
        causes = (dead or in_time)[:1]
    known = {rank for rank, _ in causes}
    return (
        *(Explained(rank, failure) for rank, failure in causes),
        *(Explained(rank, failure, causes[0][0]) for rank, failure in in_time if rank not in known),
    )


def blames_a_peer(failure: FailureRecord) -> bool:
    if signal_name(failure.exitcode) == "SIGTERM":
        return True
    kind = failure.type.rpartition(".")[2]
    if kind == _DEAD and NCCL_WATCHDOG in failure.message:
        return _NCCL_WAITED.search(failure.message) is not None
    if kind in _COLLECTIVE_ERRORS and _PEER_GONE.search(failure.message) is not None:
        return True
    if kind in _GROUPS:
        found = [each for each in _GROUPED.finditer(failure.traceback) if each["type"] not in _GROUPS]
        return bool(found) and all(_PEER_GONE.search(each["text"]) for each in found)
    # `raise StepFailed from error`: the traceback has the original error.
    return any(_PEER_GONE.search(found["text"]) for found in _CHAINED.finditer(failure.traceback))


_OF_TYPE = {
    "nblaunch._errors.DesyncError": FailureKind.DESYNC,
    "nblaunch._errors.NonFiniteError": FailureKind.NAN,
    "nblaunch.capture.shared_memory.NoRoomError": FailureKind.SHARED_MEMORY_FULL,
    "builtins.MemoryError": FailureKind.OUT_OF_MEMORY,
}
_OF_SIGNAL = {
    "SIGKILL": FailureKind.KILLED,
    "SIGTERM": FailureKind.KILLED,
    "SIGBUS": FailureKind.SHARED_MEMORY_FULL,
}


def kind_of(failure: FailureRecord) -> FailureKind | None:
    """Return what kind of failure it is; None for an exception of the user's own code.

    >>> str(kind_of(FailureRecord(type="ProcessExited", message="was killed by SIGKILL", exitcode=-9)))
    'killed'
    >>> kind_of(FailureRecord(type="builtins.ValueError", message="boom"))
    """
    known = _OF_TYPE.get(failure.type)
    if known is not None:
        return known
    if failure.type == _DEAD:
        return _kind_of_death(failure)
    if failure.memory is not None or failure.held or failure.type.endswith(".OutOfMemoryError"):
        return FailureKind.OUT_OF_MEMORY
    if failure.phase is Phase.VALUE:
        return FailureKind.VALUE_NOT_SENT
    return FailureKind.COLLECTIVE_TIMEOUT if blames_a_peer(failure) else None


def _kind_of_death(failure: FailureRecord) -> FailureKind:
    if NCCL_WATCHDOG in failure.message:
        return FailureKind.COLLECTIVE_TIMEOUT
    if failure.message.startswith(NODE_LOST):
        return FailureKind.NODE_LOST
    name = signal_name(failure.exitcode)
    return FailureKind.EXITED if name is None else _OF_SIGNAL.get(name, FailureKind.CRASHED)


def value_lost(error: Exception, when: float, message: str = "") -> FailureRecord:
    message = message or f"the notebook could not take the value over: {error}"
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return FailureRecord(type=kind, message=message, time=when, phase=Phase.VALUE)


# Why a process ended without a message: the signal by name, and what the system knows about it.


_STACKS_LIMIT = 16_000
NCCL_WATCHDOG = "NCCL's watchdog: "
"""Begins the explanation of a rank that NCCL's watchdog has ended."""
# torch's watchdog writes these to stderr and then calls abort(), below a page of C++ frames. The shorter
# words are those of ProcessGroupNCCL2, torch 2.15's default, which names no operation.
_TIMED_OUT = re.compile(
    r"(?:Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"OpType=(?P<operation>\w+).*?ran for|Operation timed out after) (?P<milliseconds>\d+) m"
)
_TERMINATED = re.compile(
    r"(?:watchdog thread terminated with exception|Timeout watchdog caught exception): (?P<why>.+)"
)
_PLACE = re.compile(r"^(\[[^\]]*\]\s*)+")
_NCCL_LINES = re.compile(
    r"Watchdog caught|watchdog thread terminated with exception|CUDA error|NCCL WARN|Timeout watchdog caught"
    r"|Operation timed out after|Aborting process on rank"
)
_MOST_LINES, _LINE_CHARACTERS = 10, 300


@dataclass(frozen=True, slots=True)
class Explanation:
    """One line that is the same for the same cause, and what else is known: stacks, memory in use."""

    reason: str
    details: str = ""


def explain_exit(
    exitcode: int,
    dump: str,
    titles: Mapping[str, str],
    *,
    oom_before: int | None = None,
    stderr: str = "",
) -> Explanation:
    """Explain why a process ended with `exitcode`; `dump` is what faulthandler wrote, if it did.

    `stderr` is the last that the process itself wrote. `titles` maps file names of cells to what the reader
    calls them. `oom_before` is `oom_kills()` when the process was started: a count that has grown since is
    the cause.
    """
    reason = describe_exit(exitcode)
    details = [readable_stacks(dump, titles)[:_STACKS_LIMIT]]
    match signal_name(exitcode):
        case "SIGKILL":
            reason += f" ({_killer(oom_before)})"
            details.append(_memory())
        case "SIGBUS":
            reason += " (a mapped file was cut short, or its disk is full)"
            details.append(_shared_memory())
        case "SIGABRT":
            watchdog = _nccl_watchdog(stderr)
            reason += f" ({watchdog})" if watchdog else ""
            details.insert(0, _nccl_lines(stderr))
        case _:
            pass
    return Explanation(reason, "\n".join(part for part in details if part))


def _nccl_watchdog(stderr: str) -> str:
    found = _TIMED_OUT.search(stderr)
    if found is not None:
        seconds = int(found["milliseconds"]) / 1000
        which = f"{found['operation']} #{found['number']}" if found["operation"] else "a collective"
        return f"{NCCL_WATCHDOG}{which} timed out after {seconds:.0f} s: not all ranks came to it"
    found = _TERMINATED.search(stderr)
    if found is None:
        return ""
    return NCCL_WATCHDOG + _PLACE.sub("", found["why"]).strip()[:_LINE_CHARACTERS]


def _nccl_lines(stderr: str) -> str:
    lines = [line[:_LINE_CHARACTERS] for line in stderr.splitlines() if _NCCL_LINES.search(line)]
    return "\n".join(lines[:_MOST_LINES])


def _killer(oom_before: int | None) -> str:
    now = oom_kills()
    if now is None or oom_before is None:
        return "out of memory, or somebody's kill -9"
    if now > oom_before:
        return "out of memory: the system counts a kill for it"
    return "no out-of-memory kill is counted: somebody's kill -9"


def _memory() -> str:
    memory = psutil.virtual_memory()
    used = f"memory: {memory.percent:.0f} % of {memory.total / 1e9:.0f} GB in use"
    container = tightest_memory()
    return f"{used}, the container's limit is {container[0] / 1e9:.1f} GB" if container is not None else used


def _shared_memory() -> str:
    try:
        state = os.statvfs("/dev/shm")  # noqa: S108 - only looked at
    except OSError:
        return ""
    free, size = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    left = f"shared memory (/dev/shm) has {free / 1e6:.0f} MB free of {size / 1e6:.0f} MB"
    return f"{left}; in a container, start it with a larger --shm-size"


# CUDA out of memory, in one paragraph: what was requested, what is free, and which processes hold the rest.


_OTHERS = "other processes"
_MUCH = 0.05
_SHOWN = 1 << 20
_FREE_IT = "Delete what you no longer need outside the ranks, then call torch.cuda.empty_cache()."
_JOIN_PIECES = (
    "Enough is reserved and unused, but in pieces: --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    "joins them."
)


def explain_out_of_memory(
    failure: FailureRecord, rank: int, holders: Mapping[int, str], kernel: str
) -> FailureRecord:
    """Return the failure of a rank, with a message that names what holds the memory of its GPU.

    `holders` names the owner of each process; `kernel` is its name for this one.
    """
    memory = failure.memory
    if memory is None:
        return failure
    what = failure.message.partition(".")[0]  # "CUDA out of memory", or HIP
    asked = (
        f"{what}. Tried to allocate {size(memory.asked)} on {memory.device} of rank {rank}, "
        f"where {size(memory.free)} of {size(memory.total)} are free{_limit(memory)}."
    )
    torchs = f"{size(memory.allocated)} allocated, {size(memory.reserved)} reserved"
    if memory.own is None:
        held = _not_named(memory, rank, torchs, kernel)
        kernels = reserved_here(memory.uuid)
    else:
        found = _by_holder(memory, holders)
        others = "".join(f", {owner} {size(count)}" for owner, count in found.items())
        held = f"Rank {rank} holds {size(memory.own)} (torch: {torchs}){others}."
        kernels = found.get(kernel, 0)
    return msgspec.structs.replace(failure, message=" ".join([asked, held, *_advice(memory, kernels)]))


def _limit(memory: DeviceMemory) -> str:
    if memory.limit is None or memory.reserved + memory.asked <= memory.limit:
        return ""
    return f", and torch may have {size(memory.limit)} in this rank (set_per_process_memory_fraction)"


def _by_holder(memory: DeviceMemory, holders: Mapping[int, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pid, count in memory.others.items():
        owner = holders.get(pid, _OTHERS)
        found[owner] = found.get(owner, 0) + count
    shown = {owner: count for owner, count in found.items() if count >= _SHOWN}
    return dict(sorted(shown.items(), key=lambda each: (each[0] == _OTHERS, -each[1], each[0])))


def _not_named(memory: DeviceMemory, rank: int, torchs: str, kernel: str) -> str:
    """Return what is known where the driver does not name processes, as in many containers."""
    rest = max(memory.total - memory.free - memory.reserved, 0)
    text = f"Torch holds {size(memory.reserved)} in rank {rank} ({torchs})"
    if rest < _SHOWN:
        return f"{text}."
    mine = reserved_here(memory.uuid)
    part = f", {size(mine)} of it torch in {kernel}" if mine >= _SHOWN else ""
    return f"{text}; CUDA itself and other processes hold {size(rest)}{part}."


def _advice(memory: DeviceMemory, kernels: int) -> tuple[str, ...]:
    if kernels > memory.total * _MUCH:
        return (_FREE_IT,)
    return (_JOIN_PIECES,) if memory.reserved - memory.allocated >= memory.asked else ()


def reserved_here(uuid: str) -> int:
    """Return what torch holds in this process on a GPU; initialises nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return int(torch.cuda.memory_reserved(index))
    return 0
