"""The doctor's look at what the system allows: files, processes, memory, threads."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import psutil

from nblaunch import _cgroups
from nblaunch.agent import descriptors
from nblaunch.diagnose.report import Finding, ok, problem, size, warning

cgroups = _cgroups.directories

_GIB = 1 << 30
_MIB = 1 << 20
# Measured with torch 2.13: the threads of a rank.
_TASKS_AT_ALL = 20
_TASKS_PER_RANK = 10
_FEW_RANKS = 2
_MANY_RANKS = 32
_FILES_WANTED = 1024
_MEMORY_WANTED = 1 * _GIB
_MEMORY_NEEDED = 256 * _MIB


def open_files() -> Iterator[Finding]:
    """Compare the limits on open files with what ranks take in this process; a run raises the soft one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    used = descriptors.in_use(soft)
    ranks = descriptors.room(used, hard)
    summary = f"{used} of {hard} in use by this process"
    if soft < hard:
        summary += f" (the limit is {soft} until a run needs more)"
    room = f"{summary}, room for about {ranks} ranks"
    advice = "Raise it: ulimit -n 65536 where Jupyter is started."
    if ranks < _FEW_RANKS:
        yield problem("open files", room, advice)
    elif ranks < _MANY_RANKS or hard < _FILES_WANTED:
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
    tightest = _cgroups.tightest_tasks(cgroups("pids"))
    return None if tightest is None else ("the container", *tightest)


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
    return _cgroups.tightest_memory(cgroups("memory"))


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
