"""Why a process ended without a word: the signal by name, and what the system knows about it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from nblaunch._cgroups import oom_kills, tightest_memory
from nblaunch._frames import readable_stacks
from nblaunch._state import describe_exit, signal_name

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
