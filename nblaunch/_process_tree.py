"""Linux's rules for a process tree: die with the parent, adopt orphans. Standard library only.

The keeper and the ranks follow them, and neither imports the other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_START_FIELD = 22 - 3  # of those after the name, which begin with the third
_LINUX = sys.platform.startswith("linux")


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends (Linux); end now if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Have orphans below this process become its children (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int] | None:
    """Return the children of the main thread, where the system puts orphans; None if it has no list."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as listing:  # noqa: PTH123 - four times a second
            return {int(pid) for pid in listing.read().split()}
    except OSError:
        return None


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since the machine did; 0 if it is gone, or nobody knows.

    With its number it names a process for good: the number alone is used again.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 - as above
            # The second field is the program's name, in brackets, and may hold any character.
            return int(stat.read().rpartition(b")")[2].split()[_START_FIELD])
    except OSError:
        return 0


def this_python() -> list[str]:
    """Return the command that starts this Python again with its flags, as `multiprocessing` does."""
    from multiprocessing import spawn, util  # only here: the keeper is small

    flags: list[str] = vars(util)["_args_from_interpreter_flags"]()  # the stubs leave it out
    return [os.fsdecode(spawn.get_executable() or sys.executable), *flags]
