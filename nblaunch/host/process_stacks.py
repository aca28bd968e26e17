"""The stacks of ranks that do not answer, or have died, read from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from nblaunch._cgroups import oom_kills
from nblaunch._results import read_text
from nblaunch.diagnose.failures import explain_exit
from nblaunch.host.logs import read_end
from nblaunch.protocol.messages import DUMP_SIGNAL, Exited, dump_path, fatal_path
from nblaunch.protocol.reports import readable_main_stack

_DUMP_SECONDS = 0.5
_STOPPED = "its process is stopped (SIGSTOP); kill -CONT would let it go on"
# NCCL's watchdog writes some 10 KB when it ends a process.
_STDERR_BYTES = 200_000


def stacks_of_silent(pids: Mapping[int, int], directory: str, titles: Mapping[str, str]) -> dict[int, str]:
    """Return the stacks of ranks of this machine that do not answer; blocks for half a second at most.

    `pids` are their processes, which dump to files in `directory`. `titles`
    maps the file names of cells to the names that the user knows.
    """
    stopped = {rank: _STOPPED for rank, pid in pids.items() if _is_stopped(pid)}
    dumps = _dumped({rank: pid for rank, pid in pids.items() if rank not in stopped}, directory)
    return {**stopped, **{rank: readable_main_stack(dump, titles) for rank, dump in dumps.items()}}


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _dumped(pids: Mapping[int, int], directory: str) -> dict[int, str]:
    """Have faulthandler dump the ranks' main stacks, which needs no lock of their interpreters."""
    paths = {rank: dump_path(directory, rank) for rank in pids}
    before: dict[int, int] = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError):
            # No file means no handler: the signal would end the process.
            size = paths[rank].stat().st_size
            signal_main_thread(pid, DUMP_SIGNAL)
            before[rank] = size
    deadline = time.monotonic() + _DUMP_SECONDS
    while any(_size(paths[rank]) == size for rank, size in before.items()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.02 if before else 0)  # for the rest of these dumps
    return {rank: read_text(str(paths[rank]), before[rank]) if rank in before else "" for rank in pids}


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, and to no other. Raises `OSError` if that is gone."""
    try:
        tgkill = ctypes.CDLL(None, use_errno=True).tgkill
    except AttributeError:  # another C library than glibc: there the system chooses, mostly this thread
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), "tgkill")


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return -1


class ExitReasons:
    """Why processes of a group have exited, according to the files that they leave."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._oom_before = oom_kills()

    def explained(self, exited: Exited, titles: Mapping[str, str], stderr: str = "") -> Exited:
        """Return the exit with its reason, and with the stacks that the rank has written.

        `stderr` is the path of its standard error.
        """
        if exited.expected or exited.reason:
            return exited
        dump = read_text(str(fatal_path(str(self._directory), exited.rank)))
        printed = read_end(stderr, _STDERR_BYTES) if stderr and exited.exitcode == -signal.SIGABRT else ""
        why = explain_exit(exited.exitcode, dump, titles, oom_before=self._oom_before, stderr=printed)
        return msgspec.structs.replace(exited, reason=why.reason, details=why.details)
