"""Which of many failures is the cause: the first in time that is not the consequence of another."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from nblaunch._cgroups import oom_kills, tightest_memory
from nblaunch._frames import readable_stacks
from nblaunch.protocol.messages import DeviceMemory, FailureRecord
from nblaunch.protocol.reports import size
from nblaunch.protocol.state import describe_exit, signal_name

# What gloo, NCCL and TCPStore say when it was the *other* side that went away. A rank that raises one
# of these while a peer failed for a reason of its own is a consequence, whatever the clocks say: the
# agent notices a killed rank up to one poll later than its peers notice the closed connection.
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
_DEAD = "ProcessExited"
_COLLECTIVE_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError")


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank's failure and the rank whose failure explains it, if any."""

    rank: int
    failure: FailureRecord
    consequence_of: int | None = None


def explain(failures: Mapping[int, FailureRecord]) -> tuple[Explained, ...]:
    """Return the failures, causes first, each group in the order of time.

    >>> from nblaunch.protocol.messages import FailureRecord
    >>> killed = FailureRecord(type="ProcessExited", message="was killed by SIGKILL", exitcode=-9, time=2.0)
    >>> closed = FailureRecord(type="builtins.RuntimeError", message="Connection closed by peer", time=1.0)
    >>> [(each.rank, each.consequence_of) for each in explain({0: closed, 1: killed})]
    [(1, None), (0, 1)]
    """
    in_time = sorted(failures.items(), key=lambda item: (item[1].time, item[0]))
    causes = [(rank, failure) for rank, failure in in_time if not blames_a_peer(failure)]
    if not causes:
        # Somebody's SIGTERM takes one rank; its peers then blame it, perhaps before the agent has noticed.
        dead = [(rank, failure) for rank, failure in in_time if failure.type == _DEAD]
        causes = (dead or in_time)[:1]
    known = {rank for rank, _ in causes}
    explained = [Explained(rank, failure) for rank, failure in causes]
    for rank, failure in in_time:
        if rank not in known:
            explained.append(Explained(rank, failure, consequence_of=causes[0][0]))
    return tuple(explained)


def blames_a_peer(failure: FailureRecord) -> bool:
    """Return whether a failure says that another rank went away."""
    if signal_name(failure.exitcode) == "SIGTERM":
        return True
    kind = failure.type.rpartition(".")[2]
    if kind == _DEAD and NCCL_WATCHDOG in failure.message:
        return _NCCL_WAITED.search(failure.message) is not None
    if kind in _COLLECTIVE_ERRORS and _PEER_GONE.search(failure.message) is not None:
        return True
    # `raise StepFailed from error`: the traceback says what it was made of.
    return any(_PEER_GONE.search(found["text"]) for found in _CHAINED.finditer(failure.traceback))


# --- Why a process ended without a word: the signal by name, and what the system knows about it.


_STACKS_LIMIT = 16_000
NCCL_WATCHDOG = "NCCL's watchdog: "
"""Begins what is said of a rank that NCCL's watchdog has ended."""
# torch's watchdog writes these to stderr and then calls abort(), below a page of C++ frames.
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"OpType=(?P<operation>\w+).*?ran for (?P<milliseconds>\d+) milliseconds"
)
_TERMINATED = re.compile(r"watchdog thread terminated with exception: (?P<why>.+)")
_PLACE = re.compile(r"^(\[[^\]]*\]\s*)+")
_NCCL_LINES = re.compile(r"Watchdog caught|watchdog thread terminated with exception|CUDA error|NCCL WARN")
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
    """Say why a process ended with `exitcode`; `dump` is what faulthandler wrote, if it did.

    `stderr` is what the process itself has said last. `titles` maps file names of cells to what the reader
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
            said = _nccl_watchdog(stderr)
            reason += f" ({said})" if said else ""
            details.insert(0, _nccl_lines(stderr))
        case _:
            pass
    return Explanation(reason, "\n".join(part for part in details if part))


def _nccl_watchdog(stderr: str) -> str:
    """Return in one line why NCCL's watchdog has ended the process; empty if it has not."""
    found = _TIMED_OUT.search(stderr)
    if found is not None:
        seconds = int(found["milliseconds"]) / 1000
        return (
            f"{NCCL_WATCHDOG}{found['operation']} #{found['number']} timed out after {seconds:.0f} s: not "
            "all ranks came to it"
        )
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
    return (
        f"shared memory (/dev/shm) has {free / 1e6:.0f} MB free of {size / 1e6:.0f} MB; in a container, "
        "start it with a larger --shm-size"
    )


# --- CUDA out of memory, in one paragraph: what was asked for, what is free, and who holds the rest.


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
    """Return the failure of a rank, its message saying who holds the memory of its GPU.

    `holders` says of each process whose it is, `kernel` how it calls this one.
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
        others = "".join(f", {who} {size(count)}" for who, count in found.items())
        held = f"Rank {rank} holds {size(memory.own)} (torch: {torchs}){others}."
        kernels = found.get(kernel, 0)
    return msgspec.structs.replace(failure, message=" ".join([asked, held, *_advice(memory, kernels)]))


def _limit(memory: DeviceMemory) -> str:
    if memory.limit is None or memory.reserved + memory.asked <= memory.limit:
        return ""
    return f", and torch may have {size(memory.limit)} in this rank (set_per_process_memory_fraction)"


def _by_holder(memory: DeviceMemory, holders: Mapping[int, str]) -> dict[str, int]:
    """Return what others hold, the largest part first; the processes that nobody knows come last."""
    found: dict[str, int] = {}
    for pid, count in memory.others.items():
        who = holders.get(pid, _OTHERS)
        found[who] = found.get(who, 0) + count
    shown = {who: count for who, count in found.items() if count >= _SHOWN}
    return dict(sorted(shown.items(), key=lambda each: (each[0] == _OTHERS, -each[1], each[0])))


def _not_named(memory: DeviceMemory, rank: int, torchs: str, kernel: str) -> str:
    """Say what is known where the driver does not name processes, as in many containers."""
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
    """Return what torch holds in this very process on a GPU; initialises nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return int(torch.cuda.memory_reserved(index))
    return 0
