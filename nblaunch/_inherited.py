"""What ranks inherit from a process besides variables: directory, umask, limits, environment.

The process is the one that they run for: a kernel, a script, or a node that joins.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from nblaunch._errors import LaunchError, OptionError
from nblaunch._help import FailureKind

JOIN_KEY = "NBLAUNCH_JOIN_KEY"
"""A variable that may hold the key of a rendezvous; ranks do not get it."""
ResourceLimits = tuple[tuple[str, int, int], ...]
_DESCRIPTORS = "RLIMIT_NOFILE"
RANK_AT_ALL = 64
RANK_PER_PEER = 2


def working_directory() -> bytes:
    """Return the directory in which ranks begin. Raises `LaunchError` if it has been removed."""
    try:
        return os.fsencode(Path.cwd())
    except OSError as error:
        there = ""
        with contextlib.suppress(OSError):
            there = f" ({Path('/proc/self/cwd').readlink()})"
        msg = (
            f"Ranks begin in the working directory of this process, which is gone{there}: {error.strerror}. "
            "Change to one that exists: os.chdir(...)."
        )
        raise LaunchError(msg, phase="fork", kind=FailureKind.WORKING_DIRECTORY) from error


def search_path(entries: Iterable[str]) -> tuple[bytes, ...]:
    """Return these entries of `sys.path` as they are sent: absolute, since the directory is not shared."""
    return tuple(os.fsencode(os.path.abspath(entry)) for entry in entries)  # noqa: PTH100 - not resolve(), which follows links


def is_standard_library(entry: str) -> bool:
    """Return whether an entry of `sys.path` is the standard library's."""
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return entry in library | {f"{each}/lib-dynload" for each in library} or entry.endswith(f"/{zipped}")


def umask() -> int | None:
    """Return this process's umask, None where it cannot be read without changing it for other threads."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return None


def limits() -> ResourceLimits:
    names = sorted(each for each in dir(resource) if each.startswith("RLIMIT_"))
    return tuple((name, *resource.getrlimit(getattr(resource, name))) for name in names)


def with_descriptors(limits: ResourceLimits, nproc: int) -> ResourceLimits:
    """Return limits with enough descriptors for a rank of `nproc` on this machine."""
    return tuple(
        (name, _soft_limit_of_rank(nproc, soft, hard) if name == _DESCRIPTORS else soft, hard)
        for name, soft, hard in limits
    )


def _soft_limit_of_rank(nproc: int, soft: int, hard: int) -> int:
    """Return the soft limit of a rank with `nproc` on this machine: the notebook's, if that suffices."""
    wanted = needed_by_rank(nproc)
    if allows(soft, wanted):
        return soft
    return wanted if allows(hard, wanted) else hard


def needed_by_rank(nproc: int) -> int:
    """Return how many descriptors a rank needs, of `nproc` on this machine."""
    return RANK_AT_ALL + RANK_PER_PEER * nproc


def check_descriptors(nproc: int, limits: ResourceLimits) -> None:
    """Raise `LaunchError` if `nproc` ranks with these limits would run out of descriptors."""
    needed = needed_by_rank(nproc)
    for name, _, hard in limits:
        if name == _DESCRIPTORS and not allows(hard, needed):
            raise too_few_descriptors(nproc, f"each of which needs about {needed} of its own", hard)


def too_few_descriptors(nproc: int, what: str, hard: int, phase: str = "fork") -> LaunchError:
    msg = (
        f"{nproc} ranks were to be started, {what}, but the limit on open files (descriptors) is {hard}. "
        "Use fewer ranks, close files, or raise the hard limit: ulimit -n 65536 where Jupyter is started."
    )
    return LaunchError(msg, phase=phase, kind=FailureKind.OPEN_FILES)


def allows(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def encoded(environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return an environment as it is sent to ranks: without the join key."""
    return tuple(os.fsencode(f"{name}={value}") for name, value in environ.items() if name != JOIN_KEY)


def decoded(environ: Iterable[bytes]) -> dict[str, str]:
    """Return an environment that was sent.

    >>> decoded(encoded({"A": "b=c", "NBLAUNCH_JOIN_KEY": "secret"}))
    {'A': 'b=c'}
    """
    pairs = (os.fsdecode(each).partition("=") for each in environ)
    return {name: value for name, _, value in pairs}


def check_start_method(method: str) -> None:
    """Raise `OptionError` for a start method that does not work from this process."""
    if method != "fork":
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        why = "CUDA is initialised in this process, and a process forked from it cannot use CUDA"
    else:
        why = (
            f"this process has {threading.active_count()} threads, and one forked from it has only one of "
            "them, with the locks that the others held at that moment: sooner or later a rank waits forever"
        )
    msg = (
        f"start_method='fork' was asked for, but {why}. Use forkserver, the default: it forks as fast, "
        "from a process with torch loaded that has one thread and never touches CUDA."
    )
    raise OptionError(msg, kind=FailureKind.START_METHOD)
