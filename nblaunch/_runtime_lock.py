"""Whether a private directory is in use: its keeper holds a lock on a file in it as long as it lives.

A lock is seen by all containers of a machine, and goes with its process, also if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

LOCK = "keeper"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOST_BYTES = 100


def hold(root: str) -> tuple[int, ...]:
    """Lock a directory; return the descriptor that holds the lock.

    The file has its name only once it is locked. Where that cannot be (no locks, a full disk) there is no
    such file, and nobody takes the directory for dead.
    """
    import fcntl  # only here: this module can be imported on Windows

    new = Path(root, f"{LOCK}-{secrets.token_hex(4)}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return ()
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, _boot_id())
        new.rename(Path(root, LOCK))
    except OSError:
        with contextlib.suppress(OSError):  # a cleaner has removed the directory
            new.unlink()
    return (fd,)


def is_dead(root: str) -> bool:
    """Return whether the keeper of a directory has ended on this machine, and all that it kept with it."""
    import fcntl

    try:
        fd = os.open(Path(root, LOCK), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Another machine may share the directory, and not its locks.
        if os.read(fd, _MOST_BYTES) != _boot_id():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _boot_id() -> bytes:
    """Return what names this machine since it was started."""
    return _BOOT_ID.read_bytes()
