"""The doctor's look at what the system allows: files, processes, memory, threads."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from nblaunch.diagnose.report import Finding, ok, problem, size, warning

_GIB = 1 << 30
_MIB = 1 << 20
# Measured with torch 2.13: pipes, log files and sockets of the kernel, and the threads of a rank.
_FILES_AT_ALL = 40
_FILES_PER_RANK = 4
_TASKS_AT_ALL = 20
_TASKS_PER_RANK = 10
_FEW_RANKS = 2
_MANY_RANKS = 32
_FILES_WANTED = 1024
_MEMORY_WANTED = 1 * _GIB
_MEMORY_NEEDED = 256 * _MIB
_NO_LIMIT = 1 << 60
"""What cgroups of version 1 write for "no limit" is a little less than 2**63."""


def open_files() -> Iterator[Finding]:
    """Compare the limit on open files with what ranks take in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    used = psutil.Process().num_fds()
    ranks = max(soft - used - _FILES_AT_ALL, 0) // _FILES_PER_RANK
    summary = f"{used} of {soft} in use by this process"
    room = f"{summary}, room for about {ranks} ranks"
    higher = "" if hard in (resource.RLIM_INFINITY, soft) else f" (up to {hard})"
    advice = f"Raise it{higher}: ulimit -n 65536 where Jupyter is started."
    if ranks < _FEW_RANKS:
        yield problem("open files", room, advice)
    elif ranks < _MANY_RANKS or soft < _FILES_WANTED:
        yield warning("open files", room, advice)
    else:
        yield ok("open files", summary)


def processes() -> Iterator[Finding]:
    """Compare the limits on processes, the user's and the container's, with what ranks take."""
    name = "process limit"
    limits = [each for each in (_user_tasks(), _container_tasks()) if each is not None]
    if not limits:
        yield ok(name, "none that counts")
        return
    whose, used, limit = min(limits, key=lambda each: each[2] - each[1])
    ranks = max(limit - used - _TASKS_AT_ALL, 0) // _TASKS_PER_RANK
    summary = f"{used} of {limit} processes and threads in use by {whose}"
    room = f"{summary}, room for about {ranks} ranks"
    advice = (
        "Raise it: --pids-limit of the container, pids.max of the cgroup."
        if whose == "the container"
        else "Raise it: ulimit -u where Jupyter is started."
    )
    if ranks < _FEW_RANKS:
        yield problem(name, room, advice)
    elif ranks < _MANY_RANKS:
        yield warning(name, room, advice)
    else:
        yield ok(name, summary)


def _user_tasks() -> tuple[str, int, int] | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The system does not hold root to this limit.
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return None
    used = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == os.getuid():
            used += process.info["num_threads"] or 1
    return "this user", used, soft


def _container_tasks() -> tuple[str, int, int] | None:
    tightest: tuple[str, int, int] | None = None
    for directory in cgroups("pids"):
        limit, used = _number(directory / "pids.max"), _number(directory / "pids.current")
        if (
            limit is not None
            and used is not None
            and (tightest is None or limit - used < tightest[2] - tightest[1])
        ):
            tightest = "the container", used, limit
    return tightest


def memory() -> Iterator[Finding]:
    """Say how much memory there is, for the machine and within the container's limit."""
    machine = psutil.virtual_memory()
    free = int(machine.available)
    summary = f"{size(free)} available of {size(machine.total)}"
    advice = "Free some: a rank that gets none is killed, and takes the run with it."
    container = container_memory()
    if container is not None:
        limit, left = container
        summary += f"; the container may use {size(limit)}, of which {size(left)} are left"
        if left < free:
            free = left
            advice = "Raise the container's limit (--memory), or free some: who exceeds it is killed."
    if free < _MEMORY_NEEDED:
        yield problem("memory", summary, advice)
    elif free < _MEMORY_WANTED:
        yield warning("memory", summary, advice)
    else:
        yield ok("memory", summary)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        yield warning(
            "address space",
            f"limited to {size(address_space)} for each process",
            "CUDA reserves far more than it uses, and fails under it. ulimit -v unlimited lifts it.",
        )


def container_memory() -> tuple[int, int] | None:
    """Return the limit of the tightest cgroup around this process, and what is left of it, in bytes."""
    tightest: tuple[int, int] | None = None
    for directory in cgroups("memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(directory / limit_file), _number(directory / usage_file)
            if limit is None or used is None:
                continue
            # Pages of files that nobody uses count as used, and go when others need the memory.
            left = min(max(limit - used + _reclaimable(directory), 0), limit)
            if tightest is None or left < tightest[1]:
                tightest = limit, left
    return tightest


def _reclaimable(directory: Path) -> int:
    counted: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            counted[key] = int(value)
    return counted.get("total_inactive_file", counted.get("inactive_file", 0))


def cgroups(
    controller: str, *, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[Path]:
    """Yield the directories that limit this process: its own cgroup's and all above, of both versions.

    A container often sees its own cgroup at the top of the file system, under a path that only the host
    knows: directories that are not there are passed over.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root
        elif controller in controllers.split(","):
            top = root / controller
        else:
            continue
        below = Path(path.lstrip("/"))
        for part in (below, *below.parents):
            if (top / part).is_dir():
                yield top / part


def _number(path: Path) -> int | None:
    """Return the number in a file, None for no file, no number (`max`) and what is no limit."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number < _NO_LIMIT else None


def threads() -> Iterator[Finding]:
    """Say how many threads each rank computes with."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    value = os.environ.get("OMP_NUM_THREADS")
    if value is None:
        yield ok(
            "CPU threads",
            f"OMP_NUM_THREADS is not set: each rank computes on 1 of {cpus} CPUs, as under torchrun",
        )
        return
    summary = f"OMP_NUM_THREADS={value}, and {cpus} CPUs for all ranks together"
    if value.isdecimal() and int(value) > 1 and int(value) * _FEW_RANKS > cpus:
        yield warning(
            "CPU threads",
            summary,
            f"Even {_FEW_RANKS} ranks have more threads than there are CPUs, and slow each other down. "
            "Unset it, or set it to CPUs divided by ranks, before the kernel starts.",
        )
    else:
        yield ok("CPU threads", summary)
