"""The private directory of a process that runs ranks: sockets, logs and spilled payloads lie here alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind

PREFIX = "nblaunch-"
_LOCK = "keeper.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# sun_path holds 108 bytes with its closing zero on Linux, 104 on macOS; the longest name we add is
# `/hub` and ZMQ needs nothing more. Some room is left for the name that `mkdtemp` makes up.
_LONGEST_SOCKET_DIRECTORY = 80


class RuntimeDirectory:
    """The private directory of one process, made on first use; its methods may be called on any thread."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: the one that another process has made, which this one shares."""
        self._lock = threading.Lock()
        self._root = root

    def root(self) -> Path:
        """Return its path (mode 0700, whatever the umask).

        It lies below `TMPDIR`, or below another private place where a socket's path would be too long.
        Raises `LaunchError` if no directory can be made.
        """
        with self._lock:
            if self._root is None or not (_is_private(self._root) or _made_again(self._root)):
                self._root = _make()
            return self._root

    @property
    def made(self) -> Path | None:
        """Its path, if it has been made."""
        return self._root

    def make(self, prefix: str) -> Path:
        """Make a directory of mode 0700 below it."""
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=self.root()))
        made.chmod(0o700)
        return made

    def remove(self) -> None:
        """Remove it with all that is in it; the next use makes another one."""
        with self._lock:
            if self._root is not None:
                remove_tree(self._root)
            self._root = None


def _is_private(path: Path) -> bool:
    """Whether a directory is there, and nobody else's: after a cleaner, anybody may have made one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _made_again(path: Path) -> bool:
    """Make a directory that a cleaner has removed, under the name that the keeper and the ranks know."""
    try:
        path.mkdir(mode=0o700)
    except OSError:
        return False
    return True


def _make() -> Path:
    tried = []
    for base in _candidates():
        if len(os.fsencode(base)) > _LONGEST_SOCKET_DIRECTORY:
            tried.append(f"{base} (too long for a unix socket)")
            continue
        try:
            base.encode()
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            made.chmod(0o700)
        except UnicodeEncodeError:
            tried.append(f"{base!a} (not UTF-8, as the address of a socket must be)")
        except OSError as error:
            tried.append(f"{base} ({error.strerror})")
        else:
            return made
    msg = (
        f"A private runtime directory was needed, and none could be made: tried {', '.join(tried)}. "
        "Set TMPDIR to a short path that you may write to."
    )
    raise LaunchError(msg, phase="fork server", kind=FailureKind.NOT_WRITABLE)


def _candidates() -> Iterator[str]:
    yield tempfile.gettempdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        yield runtime
    yield from ("/tmp", "/var/tmp")  # noqa: S108 - mkdtemp makes the private directory below them


def hold(root: str) -> None:
    """Hold a lock on a private directory until this process and its forks end, however that happens."""
    with contextlib.suppress(OSError):  # a full disk, or one without locks: nobody takes it for abandoned
        fd, path = tempfile.mkstemp(dir=root)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, _boot())
        # It appears locked: `remove_abandoned` of another process never finds it free.
        Path(path).rename(Path(root, _LOCK))


def remove_abandoned(beside: str) -> None:
    """Remove the private directories beside one that nobody holds: their processes were killed at once.

    One that another machine made may be held there unseen, where temporary files are shared. The lock of
    another user cannot be opened.
    """
    for lock in Path(beside).parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_private(lock.parent) and file.read() == _boot():
                remove_tree(lock.parent)


def _boot() -> bytes:
    """Return what tells this machine, since its start, from others."""
    try:
        return _BOOT_ID.read_bytes()
    except OSError:
        return platform.node().encode()


def remove_tree(path: Path) -> None:
    """Remove `path` and all below it, as far as it is still there."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True)
