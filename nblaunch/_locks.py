"""Locks on files, which a process holds as long as it lives.

A lock is seen by all containers of a machine, and goes with its process, also if that is killed. The keeper
holds one on a file in its private directory, the runtime of a session one on its entry (`_registry`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_LOCK = "keeper"
_MOST_BYTES = 100


def lock(fd: int) -> bool:
    """Lock a file, if nobody else has and the file system has locks; return whether that was possible."""
    import fcntl  # only here: this module can be imported on Windows

    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def boot_id() -> str:
    """Return what names this machine since it was started; "" where the system has no such name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def hold(root: str) -> tuple[int, ...]:
    """Lock a directory; return the descriptor that holds the lock.

    The file has its name only once it is locked. Where that cannot be (no locks, a full disk) there is no
    such file, and nobody takes the directory for dead.
    """
    new, here = Path(root, f"{_LOCK}-{secrets.token_hex(4)}"), boot_id()
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return ()
    with contextlib.suppress(OSError):
        if here and lock(fd):
            os.write(fd, here.encode())
            new.rename(Path(root, _LOCK))
            return (fd,)
    with contextlib.suppress(OSError):  # a cleaner has removed the directory
        new.unlink()
    return (fd,)


def is_dead(root: str) -> bool:
    """Return whether the keeper of a directory has ended on this machine, and all that it kept with it."""
    try:
        fd = os.open(Path(root, _LOCK), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Another machine may share the directory, and not its locks.
        return os.read(fd, _MOST_BYTES).decode() == boot_id() and lock(fd)
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)
