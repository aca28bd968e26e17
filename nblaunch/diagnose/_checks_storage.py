"""The doctor's look at shared memory and the temporary directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from nblaunch._errors import LaunchError
from nblaunch.agent import runtime
from nblaunch.diagnose.report import Finding, ok, problem, size, warning

_MIB = 1 << 20
_SHARED = "/dev/shm"  # noqa: S108 - looked at, not written to
_CONTAINER_DEFAULT = 64 * _MIB
_SHARED_WANTED = 512 * _MIB
_SHARED_NEEDED = 4 * _MIB
_DISK_WANTED = 1024 * _MIB
_DISK_NEEDED = 32 * _MIB
_SHOWN = 3
_YOUNG_SECONDS = 60.0
"""A kernel that starts makes its directory a moment before the processes by which it is known."""


def shared_memory() -> Iterator[Finding]:
    """Say whether NCCL and DataLoader workers have room; our own payloads need none of it."""
    try:
        state = os.statvfs(_SHARED)
    except OSError as error:
        if sys.platform == "linux":
            yield problem(_SHARED, f"not there: {error}", f"Mount a tmpfs on {_SHARED}.")
        return
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    summary = f"{size(free)} free of {size(total)}"
    used_by = "NCCL and the workers of a DataLoader share memory there and die of SIGBUS when it is full."
    if total <= _CONTAINER_DEFAULT:
        advice = f"{used_by} Start the container with --shm-size=8g, or with --ipc=host."
    else:
        advice = f"{used_by} Remove what dead processes have left in it."
    if free < _SHARED_NEEDED:
        yield problem(_SHARED, summary, advice)
    elif free < _SHARED_WANTED:
        yield warning(_SHARED, summary, advice)
    else:
        yield ok(_SHARED, summary)


def temporary_directory() -> Iterator[Finding]:
    """Make there what a run makes: a private directory, a file, a unix socket."""
    name = "temp dir"
    try:
        root = runtime.root()
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
    if free < _DISK_NEEDED:
        yield problem(name, summary, "What ranks print is kept there. Make room, or set TMPDIR elsewhere.")
    elif free < _DISK_WANTED:
        yield warning(name, summary, "What ranks print is kept there. Make room, or set TMPDIR elsewhere.")
    elif not _same(Path(wanted), root.parent):
        yield warning(
            name,
            f"{summary}, in place of TMPDIR={wanted}",
            "TMPDIR is too long for a unix socket, cannot be written to, or was set after the first use. "
            "Set it to a short path before the kernel starts, or leave it.",
        )
    else:
        yield ok(name, summary)


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


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return False


def leftovers() -> Iterator[Finding]:
    """Name the runtime directories whose kernel, and all below it, was killed at once."""
    bases, own = {Path(tempfile.gettempdir())}, Path()
    with contextlib.suppress(LaunchError, OSError):
        own = runtime.root()
        bases.add(own.parent)
    found = [each for base in sorted(bases) for each in sorted(base.glob(f"{runtime.PREFIX}*"))]
    candidates = [each for each in found if each != own and _old(each)]
    in_use = _paths_in_use() if candidates else ""
    dead = [str(each) for each in candidates if str(each) not in in_use]
    if not dead:
        yield ok("leftovers", "no directory of a dead kernel")
        return
    shown = " ".join(dead[:_SHOWN]) + (" ..." if len(dead) > _SHOWN else "")
    yield warning(
        "leftovers",
        f"{len(dead)} director{'y' if len(dead) == 1 else 'ies'} of dead kernels: {shown}",
        "Remove them, unless another machine or container shares this directory and uses them.",
    )


def _old(path: Path) -> bool:
    """Whether a directory is one of ours, of this user, and older than a start takes."""
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
