"""Processes whose parent has ended become the rank's children, and are reaped here.

A rank is the subreaper of all below it: under the keeper, the end of any other run would kill them. But then
nobody reads their exit status, and each stays as a zombie (`!cmd &` leaves one each time).

A child that the rank itself has started is left alone, since its exit status can be read once only, and
somebody is going to. The functions by which Python starts processes note which these are; one that a C
library starts and waits for is spared by being a zombie for a moment only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.25
_UNREAD_SECONDS = 0.15

_started: set[int] = set()
_STARTERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("fork", "forkpty", "posix_spawn", "posix_spawnp")),
    (subprocess, ("_fork_exec",)),
)


def note_own_children() -> None:
    """Have this process remember which children it has started itself."""
    import _posixsubprocess

    for module, names in (*_STARTERS, (_posixsubprocess, ("fork_exec",))):
        for name in names:
            start = getattr(module, name, None)
            if start is not None:
                setattr(module, name, _noting(start))


def _noting(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def started(*args: Any, **keywords: Any) -> Any:
        result = start(*args, **keywords)
        pid = result[0] if isinstance(result, tuple) else result
        if pid:
            _started.add(pid)
        return result

    return started


class Reaper:
    """Looks for orphans that have ended; used on one thread."""

    def __init__(self) -> None:
        """Look at once."""
        self._due = 0.0
        self._seen: dict[int, float] = {}
        """Process id -> when it had ended at the latest."""

    def look(self, *, now: bool = False) -> None:
        """Reap the orphans that ended a while ago, if it is time to look, or `now`."""
        clock = time.monotonic()
        if not now and clock < self._due:
            return
        self._due = clock + LOOK_SECONDS
        before = set(_started)
        children = _children()
        _started.difference_update(before - children)
        self._seen = {pid: self._seen.get(pid, clock) for pid in children - _started if _has_ended(pid)}
        for pid, seen in self._seen.items():
            if clock - seen >= _UNREAD_SECONDS:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _children() -> set[int]:
    """Return the children of the main thread, which is where the system puts orphans."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as listing:  # noqa: PTH123 - four times a second
            return {int(pid) for pid in listing.read().split()}
    except OSError:
        return set()


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
