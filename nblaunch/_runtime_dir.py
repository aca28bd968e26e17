"""The private directory of a process that runs ranks: sockets, logs and spilled payloads lie here alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._locks import is_dead

PREFIX = "nblaunch-"
# sun_path holds 108 bytes with its closing zero on Linux, 104 on macOS; the longest name we add is
# `/hub` and ZMQ needs nothing more. Some room is left for the name that `mkdtemp` makes up.
_LONGEST_SOCKET_DIRECTORY = 80


class RuntimeDirectory:
    """The private directory of one process, made on first use; its methods may be called on any thread."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: the one that another process has made, which this one shares."""
        self._lock = threading.Lock()
        self._root, self._shared = root, root is not None

    def root(self) -> Path:
        """Return its path (mode 0700, whatever the umask).

        It lies below `TMPDIR`, or below another private place where a socket's path would be too long.
        Raises `LaunchError` if no directory can be made.
        """
        with self._lock:
            if self._root is None or not (_is_private(self._root) or _made_again(self._root)):
                if self._shared:
                    msg = f"The private directory {self._root} is gone, and cannot be made again."
                    raise LaunchError(msg, phase="runtime", kind=FailureKind.NOT_WRITABLE)
                self._root = _make()
            return self._root

    @property
    def made(self) -> Path | None:
        return self._root

    def make(self, prefix: str) -> Path:
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


def remove_dead() -> None:
    """Remove what kernels have left that were killed together with all their processes."""
    for base in dict.fromkeys(_candidates()):
        with contextlib.suppress(OSError):
            for found in Path(base).glob(f"{PREFIX}*"):
                if _is_private(found) and is_dead(os.fspath(found)):
                    remove_tree(found)


def _make() -> Path:
    remove_dead()
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


def remove_tree(path: Path) -> None:
    """Remove `path` and all below it, as far as it is still there."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True)
