"""The private directory of this kernel: sockets, logs and spilled payloads live here, and only here."""

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

PREFIX = "nblaunch-"
# sun_path holds 108 bytes with its closing zero on Linux, 104 on macOS; the longest name we add is
# `/hub` and ZMQ needs nothing more. Some room is left for the name that `mkdtemp` makes up.
_LONGEST_SOCKET_DIRECTORY = 80

_lock = threading.Lock()
_root: Path | None = None
_owner = 0


def _after_fork() -> None:
    # Another thread of the parent's may have held it: nobody here would ever let it go.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def root() -> Path:
    """Return this process's runtime directory (mode 0700, whatever the umask), made on first use.

    It lies below `TMPDIR`, or below another private place where a socket's path would be too long.
    Raises `LaunchError` if no directory can be made.
    """
    global _root, _owner
    with _lock:
        # A process forked from the kernel must neither share nor remove its parent's directory.
        if _root is None or _owner != os.getpid() or not (_is_private(_root) or _made_again(_root)):
            _root, _owner = _make(), os.getpid()
        return _root


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
        if not _is_text(base):
            tried.append(f"{base!a} (not UTF-8, as the address of a socket must be)")
            continue
        try:
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            made.chmod(0o700)
        except OSError as error:
            tried.append(f"{base} ({error.strerror})")
        else:
            return made
    msg = (
        f"A private runtime directory was needed, and none could be made: tried {', '.join(tried)}. "
        "Set TMPDIR to a short path that you may write to."
    )
    raise LaunchError(msg, phase="fork server")


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _candidates() -> Iterator[str]:
    yield tempfile.gettempdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        yield runtime
    yield from ("/tmp", "/var/tmp")  # noqa: S108 - mkdtemp makes the private directory below them


def make_directory(prefix: str) -> Path:
    """Make a directory of mode 0700 below the runtime directory."""
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=root()))
    made.chmod(0o700)
    return made


def remove_tree(path: Path) -> None:
    """Remove `path` and all below it; whatever is gone already is fine."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True)


def remove_root() -> None:
    """Remove this process's runtime directory (the kernel is ending)."""
    global _root
    with _lock:
        if _root is not None and _owner == os.getpid():
            remove_tree(_root)
        _root = None
