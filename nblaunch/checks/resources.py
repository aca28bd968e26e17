"""The doctor's checks of what the system allows: files, processes, memory, threads, temporary directory."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from nblaunch import _cgroups
from nblaunch._errors import LaunchError
from nblaunch._runtime_dir import PREFIX
from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.report import Finding, by_room, ok, problem, warning
from nblaunch.client.local import local
from nblaunch.host import descriptors
from nblaunch.protocol.reports import size

cgroups = _cgroups.directories

_GIB = 1 << 30
_MIB = 1 << 20
# Measured with torch 2.13: the threads of a rank.
_TASKS_AT_ALL = 20
_TASKS_PER_RANK = 10
_FEW_RANKS = 2
_MANY_RANKS = 32
_FILES_WANTED = 1024
_MEMORY_NEEDED, _MEMORY_WANTED = 256 * _MIB, 1 * _GIB
_SHARED = "/dev/shm"  # noqa: S108 - looked at, not written to
_CONTAINER_DEFAULT = 64 * _MIB
_SHARED_NEEDED, _SHARED_WANTED = 4 * _MIB, 512 * _MIB
_DISK_NEEDED, _DISK_WANTED = 32 * _MIB, 1024 * _MIB
_SHOWN = 3
_YOUNG_SECONDS = 60.0
"""A kernel that starts makes its directory a moment before the processes by which it is known."""


def open_files() -> Iterator[Finding]:
    # The soft one does not matter: the runtime and the ranks raise theirs.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    ranks = descriptors.room(hard)
    summary = f"up to {hard} for each process"
    wanted = _MANY_RANKS if hard >= _FILES_WANTED else ranks + 1
    advice = "Raise it: ulimit -n 65536 where Jupyter is started."
    yield _room_for("open files", ranks, wanted, summary, advice)


def processes() -> Iterator[Finding]:
    name = "process limit"
    container = _cgroups.tightest_tasks(cgroups("pids"))
    limits = [] if container is None else [("the container", *container)]
    if (user := _user_tasks()) is not None:
        limits.append(user)
    if not limits:
        yield ok(name, "none that counts")
        return
    whose, used, limit = min(limits, key=lambda each: each[2] - each[1])
    ranks = max(limit - used - _TASKS_AT_ALL, 0) // _TASKS_PER_RANK
    summary = f"{used} of {limit} processes and threads in use by {whose}"
    how = "--pids-limit of the container, pids.max of the cgroup."
    if whose == "this user":
        how = "ulimit -u where Jupyter is started."
    yield _room_for(name, ranks, _MANY_RANKS, summary, f"Raise it: {how}")


def _room_for(name: str, ranks: int, wanted: int, summary: str, advice: str) -> Finding:
    if ranks < wanted:
        summary += f", room for about {ranks} ranks"
    return by_room(name, ranks, summary, advice, needed=_FEW_RANKS, wanted=wanted)


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


def memory() -> Iterator[Finding]:
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
    yield by_room("memory", free, summary, advice, needed=_MEMORY_NEEDED, wanted=_MEMORY_WANTED)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        summary = f"limited to {size(address_space)} for each process"
        advice = "CUDA reserves far more than it uses, and fails under it. ulimit -v unlimited lifts it."
        yield warning("address space", summary, advice)


def container_memory() -> tuple[int, int] | None:
    """Return the limit of the tightest cgroup around this process, and what is left of it, in bytes."""
    return _cgroups.tightest_memory(cgroups("memory"))


def threads() -> Iterator[Finding]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    value = os.environ.get("OMP_NUM_THREADS")
    if value is None:
        yield ok(
            "CPU threads",
            f"OMP_NUM_THREADS is not set: each rank computes on 1 of {cpus} CPUs, as under torchrun",
        )
        return
    summary = f"OMP_NUM_THREADS={value}, and {cpus} CPUs for all ranks together"
    if not value.isdecimal() or int(value) <= 1 or int(value) * _FEW_RANKS <= cpus:
        yield ok("CPU threads", summary)
        return
    yield warning(
        "CPU threads",
        summary,
        f"Even {_FEW_RANKS} ranks have more threads than there are CPUs, and slow each other down. "
        "Unset it, or set it to CPUs divided by ranks, before the kernel starts.",
    )


def shared_memory() -> Iterator[Finding]:
    """Report whether NCCL and DataLoader workers have room; payloads of nblaunch need none of it."""
    try:
        state = os.statvfs(_SHARED)
    except OSError as error:
        if sys.platform == "linux":
            yield problem(_SHARED, f"not there: {error}", f"Mount a tmpfs on {_SHARED}.")
        return
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    summary = f"{size(free)} free of {size(total)}"
    advice = "NCCL and the workers of a DataLoader share memory there and die of SIGBUS when it is full. "
    if total <= _CONTAINER_DEFAULT:
        advice += "Start the container with --shm-size=8g, or with --ipc=host."
    else:
        advice += "Remove what dead processes have left in it."
    yield by_room(_SHARED, free, summary, advice, needed=_SHARED_NEEDED, wanted=_SHARED_WANTED)


def temporary_directory(own: DoctorRuntime) -> Iterator[Finding]:
    """Make what a run makes there: a private directory, a file, a unix socket."""
    name = "temp dir"
    try:
        root = own.directory.root()
    except (LaunchError, OSError) as error:
        yield problem(name, str(error), "Set TMPDIR to a short path that you may write to.")
        return
    try:
        _try_out(root)
    except OSError as error:
        yield problem(
            name,
            f"{root} cannot hold a file and a unix socket: {error}",
            "Set TMPDIR to a directory on a local disk with room in it.",
        )
        return
    free = shutil.disk_usage(root).free
    summary = f"{root.parent}, {size(free)} free"
    wanted = os.environ.get("TMPDIR") or tempfile.gettempdir()
    if free >= _DISK_WANTED and not _same_file(Path(wanted), root.parent):
        yield warning(
            name,
            f"{summary}, in place of TMPDIR={wanted}",
            "TMPDIR is too long for a unix socket, cannot be written to, or was set after the first use. "
            "Set it to a short path before the kernel starts, or leave it.",
        )
    else:
        advice = "What ranks print is kept there. Make room, or set TMPDIR elsewhere."
        yield by_room(name, free, summary, advice, needed=_DISK_NEEDED, wanted=_DISK_WANTED)


def _try_out(root: Path) -> None:
    with (
        tempfile.NamedTemporaryFile(dir=root, prefix="doctor-") as file,
        socket.socket(socket.AF_UNIX) as made,
    ):
        file.write(bytes(64 * 1024))
        file.flush()
        # Network and overlay file systems may refuse sockets that the length of a path allows.
        path = root / f"doctor-{os.getpid()}"
        made.bind(os.fspath(path))
        path.unlink()


def _same_file(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return False


def leftovers(own: DoctorRuntime) -> Iterator[Finding]:
    """Report runtime directories whose kernel was killed together with all processes below it."""
    mine = [each for each in (local().directory.made, own.directory.made) if each is not None]
    bases = {Path(tempfile.gettempdir()), *(each.parent for each in mine)}
    found = [each for base in sorted(bases) for each in sorted(base.glob(f"{PREFIX}*"))]
    candidates = [each for each in found if each not in mine and _old(each)]
    in_use = _paths_in_use() if candidates else ""
    dead = [str(each) for each in candidates if str(each) not in in_use]
    if not dead:
        yield ok("leftovers", "no directory of a dead kernel")
        return
    shown = " ".join(dead[:_SHOWN]) + (" ..." if len(dead) > _SHOWN else "")
    summary = f"{len(dead)} director{'y' if len(dead) == 1 else 'ies'} of dead kernels: {shown}"
    advice = "Remove them, unless another machine or container shares this directory and uses them."
    yield warning("leftovers", summary, advice)


def _old(path: Path) -> bool:
    """Return whether a directory is private, of this user, and older than a start takes."""
    with contextlib.suppress(OSError):
        state = path.lstat()
        private = stat.S_ISDIR(state.st_mode) and stat.S_IMODE(state.st_mode) == stat.S_IRWXU
        return private and state.st_uid == os.getuid() and time.time() - state.st_mtime > _YOUNG_SECONDS
    return False


def _paths_in_use() -> str:
    """Return where sockets are bound and what processes were called with, as keepers are with their path."""
    texts = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    with contextlib.suppress(OSError):
        texts.append(Path("/proc/net/unix").read_text(errors="replace"))
    return "\n".join(texts)
