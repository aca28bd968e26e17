"""The registry: which runtimes of this user there are, and by which names their sessions are known.

A private directory has one file per runtime, `<keeper's pid>-<its start>.json`, and one symbolic link per
name of a session, `<name>@<host>.lock`, which leads to the file of the runtime that has the name. A runtime
writes its file and takes its names; clients and command lines read. There are two directories, below
`XDG_RUNTIME_DIR` and in the state home. The first that can be used is written, and both are read: a kernel
often has no `XDG_RUNTIME_DIR` where the same user's shell has one.

A file counts as long as its keeper lives, which its pid and its start time together identify. What another
user could have written is refused or passed over.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nblaunch import _locks
from nblaunch._errors import NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._version import __version__

_LINUX = sys.platform.startswith("linux")
_ROOT_PREFIX = "nblaunch-"
_MOST_BYTES = 64 * 1024
_PATIENCE = 2.0
_NO_DIRECTORY = {errno.EACCES, errno.ELOOP, errno.ENOTDIR}
_NAME = re.compile(r"\w[\w.-]{0,39}")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process, which its pid alone does not name: pids are used again.

    `start` is when it began, as the system counts: clock ticks since the machine's start on Linux.
    """

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        start = _start_of(pid)
        if start is None:
            msg = f"no process {pid} runs on this machine"
            raise ProcessLookupError(msg)
        return cls(pid, start)

    @property
    def lives(self) -> bool:
        return _start_of(self.pid) == self.start


class Host(msgspec.Struct, frozen=True):
    """Where pids have a meaning: a machine since its last start, and a pid namespace on it."""

    name: str
    boot_id: str = ""
    pid_namespace: str = ""

    @classmethod
    def here(cls) -> Host:
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = str(Path("/proc/self/ns/pid").readlink())
        return cls(platform.node(), _locks.boot_id(), namespace)


class Owner(msgspec.Struct, frozen=True):
    """The process for which a runtime was started, and the notebook it ran, if that is known."""

    pid: int
    program: str = ""
    notebook: str = ""


class RuntimeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime, as its file describes it; no text of ours shows `token`."""

    name: str
    socket: str
    root: str
    keeper: ProcessIdentity
    runtime: ProcessIdentity
    host: Host
    version: str
    protocol: int
    token: str
    detached: bool
    started: float
    owner: Owner
    held: bool = False
    """Whether its runtime holds a lock on the file as long as it lives."""

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "token")
        return f"{type(self).__name__}({', '.join(shown)})"

    def wait_until_gone(self, seconds: float) -> None:
        """Wait until its keeper has ended, and with it all that it keeps; at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.keeper.lives and time.monotonic() < deadline:
            time.sleep(0.01)

    @property
    def file(self) -> str:
        return f"{self.keeper.pid}-{self.keeper.start}.json"


@dataclass(frozen=True, slots=True)
class FoundRuntime:
    """An entry that counts: its keeper lives, or `elsewhere` names the host that could tell."""

    entry: RuntimeEntry
    elsewhere: str = ""

    @property
    def alive(self) -> bool:
        return not self.elsewhere


@functools.cache
def release_of_torch() -> str:
    """Return the release of the torch that is installed, without its build; empty if there is none."""
    from importlib import metadata  # it takes a while, and most kernels never need it

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("torch").partition("+")[0]
    return ""


# Processes and directories.


def _start_of(pid: int) -> int | None:
    """Return when a process began; None if there is none, or if it has ended and only its parent keeps it."""
    if not _LINUX:
        import psutil  # only here: Linux needs no more than a file

        with contextlib.suppress(psutil.Error):
            found = psutil.Process(pid)
            return int(found.create_time() * 1000) if found.status() != psutil.STATUS_ZOMBIE else None
        return None
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: another user's, hidden
        return None
    # The second field is the program's name, which may hold spaces and parentheses.
    state, *fields = line.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def directories() -> tuple[Path, ...]:
    """Return where entries are: the first is written, all are read; neither need be there yet."""
    found = []
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    # logind removes it when the user's last login session ends.
    # That of another user, whose environment `sudo` has kept, is not for this one's sessions.
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == os.geteuid():
        found.append(runtime / "nblaunch")
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    with contextlib.suppress(RuntimeError):  # nobody knows this user's home
        found.append((state if state.is_absolute() else Path.home() / ".local" / "state") / "nblaunch")
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def _opened(directory: Path, *, make: bool = False) -> Iterator[int]:
    """Give a descriptor of a private directory; raise `OptionError` if others can read or write it.

    What is done through the descriptor is done in the directory that was looked at.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY:
            raise
        raise _refusal(directory, f"cannot be used as a directory ({error.strerror})") from None
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise _refusal(directory, f"belongs to another user (uid {found.st_uid})")
        if found.st_mode & 0o077:
            raise _refusal(directory, f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})")
        yield fd
    finally:
        os.close(fd)


def _refusal(directory: Path, problem: str) -> OptionError:
    msg = (
        f"The list of sessions is kept in {directory}, which {problem}. Remove it, make it a directory of "
        "your own with mode 700, or set XDG_STATE_HOME to another place."
    )
    return OptionError(msg, kind=FailureKind.NOT_WRITABLE)


@contextlib.contextmanager
def _existing() -> Iterator[list[int]]:
    """Give descriptors of the directories that are there."""
    with contextlib.ExitStack() as stack:
        fds = []
        for directory in directories():
            with contextlib.suppress(FileNotFoundError):
                fds.append(stack.enter_context(_opened(directory)))
        yield fds


# Entries.


def write(entry: RuntimeEntry) -> tuple[Path, int]:
    """Write a runtime's entry, or write it again; return its path, and a descriptor that locks the file.

    A lock, where the file system has them, is seen by all containers of this machine, and goes with its
    process, also if that is killed. Raises `OptionError` if no directory can be written, or if one is not
    private.
    """
    tried = []
    for directory in directories():
        try:
            with _opened(directory, make=True) as fd:
                lock = _replace(fd, entry)
        except OSError as error:
            tried.append(f"{directory} ({error.strerror})")
        else:
            return directory / entry.file, lock
    msg = (
        f"A session had to be listed for other notebooks to find it, and no place takes it: tried "
        f"{', '.join(tried) or 'none'}. Set XDG_STATE_HOME to a directory that you may write to."
    )
    raise OptionError(msg, kind=FailureKind.NOT_WRITABLE)


def _replace(fd: int, entry: RuntimeEntry) -> int:
    new = f"{entry.file}.{secrets.token_hex(4)}"
    opened = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=fd)
    try:
        held = _locks.lock(opened)
        with os.fdopen(os.dup(opened), "wb") as file:
            file.write(msgspec.json.encode(msgspec.structs.replace(entry, held=held)))
        os.rename(new, entry.file, src_dir_fd=fd, dst_dir_fd=fd)
    except BaseException:
        os.close(opened)
        os.unlink(new, dir_fd=fd)
        raise
    return opened


def _is_held(fd: int, entry: RuntimeEntry) -> bool:
    """Return whether the runtime of an entry in this directory has its lock; True where nobody can tell."""
    if not entry.held:
        return True
    try:
        opened = os.open(entry.file, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd)
    except OSError:
        return False
    try:
        return not _locks.lock(opened)
    finally:
        os.close(opened)


def read_all() -> list[FoundRuntime]:
    """Return the entries of this user that count, oldest first; remove those of runtimes that have ended.

    Raises `OptionError` if a directory is there that is not private.
    """
    here = Host.here()
    found: dict[tuple[Host, ProcessIdentity], FoundRuntime] = {}
    with _existing() as fds:
        for fd in fds:
            for name in sorted(os.listdir(fd)):  # noqa: PTH208 - a descriptor
                entry = _read(fd, name)
                if entry is None:
                    continue
                if (counts := _found(fd, entry, here)) is not None:
                    found.setdefault((entry.host, entry.keeper), counts)
                else:
                    _remove(fd, entry)
            _free_names(fd, here)
    return sorted(found.values(), key=lambda each: each.entry.started)


def _free_names(fd: int, here: Host) -> None:
    """Remove the names whose runtimes have ended without it: keepers remove files only."""
    for lock in os.listdir(fd):
        if not lock.endswith(f"@{here.name}.lock") or _may_live(fd, _holder(fd, lock)):
            continue
        with contextlib.suppress(OSError), _alone(fd):
            if not _may_live(fd, _holder(fd, lock)):
                os.unlink(lock, dir_fd=fd)


def _may_live(fd: int, file: str) -> bool:
    """Whether a runtime's file is there, or its keeper lives and has not written it yet."""
    with contextlib.suppress(OSError):
        os.stat(file, dir_fd=fd, follow_symlinks=False)
        return True
    return _lives(file)


def _lives(file: str) -> bool:
    """Whether the keeper lives after which a file is named."""
    pid, _, start = file.removesuffix(".json").partition("-")
    return pid.isdecimal() and start.isdecimal() and ProcessIdentity(int(pid), int(start)).lives


def _found(fd: int, entry: RuntimeEntry, here: Host) -> FoundRuntime | None:
    """Return the entry if it counts; None if its runtime has ended.

    A home directory is often shared by machines, and by containers that have one machine's name.
    """
    if entry.host.name != here.name:
        return FoundRuntime(entry, entry.host.name)
    if entry.host.boot_id != here.boot_id:
        return None
    if entry.host.pid_namespace != here.pid_namespace:
        # Also one that was restarted under the same name.
        elsewhere = f"{entry.host.name}, in another container"
        return FoundRuntime(entry, elsewhere) if _is_held(fd, entry) else None
    return FoundRuntime(entry) if entry.keeper.lives else None


def _read(fd: int, name: str) -> RuntimeEntry | None:
    """Return the entry in a file; None if it is not valid, not this user's, or not private."""
    try:
        # Without blocking: it may be a named pipe.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        try:
            known = os.fstat(opened)
            ours = known.st_uid == os.geteuid() and not known.st_mode & 0o077
            if not (ours and stat.S_ISREG(known.st_mode)):
                return None
            entry = msgspec.json.decode(os.read(opened, _MOST_BYTES), type=RuntimeEntry)
        finally:
            os.close(opened)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return entry if entry.file == name else None


def _remove(fd: int, entry: RuntimeEntry) -> None:
    """Remove what a runtime that has ended has left: its root, its names, its entry."""
    root = Path(entry.root)
    with contextlib.suppress(OSError):
        known = root.lstat()
        private = stat.S_ISDIR(known.st_mode) and not known.st_mode & 0o077 and known.st_uid == os.geteuid()
        if private and root.name.startswith(_ROOT_PREFIX):
            shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError), _alone(fd):
        for name in os.listdir(fd):
            if name.endswith(".lock") and _holder(fd, name) == entry.file:
                os.unlink(name, dir_fd=fd)
    with contextlib.suppress(OSError):  # another reader was faster, or the file system is read-only
        os.unlink(entry.file, dir_fd=fd)


# Names of sessions: unique for a user and a host. A link's target, `<pid>-<start>.json`, identifies the
# holder also where its file is gone.


def take_name(name: str, entry: RuntimeEntry) -> None:
    """Give a name to the runtime of `entry`, in all directories; does nothing where it has that name.

    Raises `OptionError` if the name belongs to another runtime that lives, or cannot be a name.
    """
    if not _NAME.fullmatch(name):
        msg = (
            f"{name!r} cannot be the name of a session. A name has 1 to 40 letters, digits, '_', '-' and "
            "'.', and begins with none of the last two."
        )
        raise OptionError(msg, kind=FailureKind.SESSION_NAME)
    try:
        for directory in directories():
            with contextlib.suppress(OSError), _opened(directory, make=True) as fd, _alone(fd):
                _take(fd, name, entry)
    except OptionError:
        release_name(name, entry)
        raise


def _take(fd: int, name: str, entry: RuntimeEntry) -> None:
    lock = _lock_of(name, entry)
    holder = _holder(fd, lock)
    if holder == entry.file:
        return
    if holder:
        _check_has_ended(name, holder)
        os.unlink(lock, dir_fd=fd)
    os.symlink(entry.file, lock, dir_fd=fd)


def _check_has_ended(name: str, file: str) -> None:
    """Raise `OptionError` if the runtime with this file, which has a name, lives."""
    with _existing() as fds:
        read = ((fd, entry) for fd in fds if (entry := _read(fd, file)) is not None)
        fd, entry = next(read, (-1, None))
        if entry is not None and _found(fd, entry, Host.here()) is None:
            return
    if entry is not None:
        notebook = f", notebook {entry.owner.notebook}" if entry.owner.notebook else ""
        who = f"{entry.owner.program} (process {entry.owner.pid}{notebook}, host {entry.host.name})"
    else:
        if not _lives(file):
            return
        who = f"process {file.partition('-')[0]}"
    msg = (
        f"The name {name!r} belongs to a session of {who}. Attach to that session, stop it, or choose "
        "another name."
    )
    raise OptionError(msg, kind=FailureKind.SESSION_NAME)


def release_name(name: str, entry: RuntimeEntry) -> None:
    """Free a name, if the runtime of `entry` has it."""
    with _existing() as fds:
        for fd in fds:
            with contextlib.suppress(OSError), _alone(fd):
                if _holder(fd, _lock_of(name, entry)) == entry.file:
                    os.unlink(_lock_of(name, entry), dir_fd=fd)


def _lock_of(name: str, entry: RuntimeEntry) -> str:
    return f"{name}@{entry.host.name}.lock"


def _holder(fd: int, lock: str) -> str:
    """Return the name of the file to which a name leads; empty if the name is free."""
    with contextlib.suppress(OSError):
        return os.readlink(lock, dir_fd=fd)
    return ""


@contextlib.contextmanager
def _alone(fd: int) -> Iterator[None]:
    """Keep other processes from changing names meanwhile, as far as the file system has locks."""
    import fcntl  # only here: this module can be imported on Windows

    opened = os.open("mutex", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=fd)
    try:
        deadline = time.monotonic() + _PATIENCE  # the holder may have been stopped
        while time.monotonic() < deadline:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.002)
                continue
            except OSError:
                pass
            break
        yield
    finally:
        os.close(opened)


# A runtime's own entry.


class Registration:
    """The entry, and the names of detached sessions; its methods may be called on any thread."""

    def __init__(self, root: Path, token: str, protocol: int, written: Callable[[Path], None]) -> None:
        """Nothing is written before the first session; `written` is called with the path of what is."""
        self._root = root
        self._token = token
        self._protocol = protocol
        self._written = written
        self._lock = threading.Lock()
        self._entry: RuntimeEntry | None = None
        self._path = Path()
        self._held: int | None = None
        """Holds the lock on the file."""

    def add(self, session: str, owner: Owner, *, detached: bool) -> None:
        """List a session. Raises `OptionError` if it is detached and another runtime has its name."""
        with self._lock:
            entry = self._entry or self._make(owner)
            if detached:
                entry = msgspec.structs.replace(entry, name=session, detached=True)
                take_name(session, entry)
            try:
                self._write(entry)
            except OptionError:
                if detached:
                    release_name(session, entry)
                    raise
                return  # its kernel does without
            self._entry = entry

    def _make(self, owner: Owner) -> RuntimeEntry:
        return RuntimeEntry(
            name="",
            socket=str(self._root / "client"),
            root=str(self._root),
            keeper=ProcessIdentity.of(os.getppid()),
            runtime=ProcessIdentity.of(os.getpid()),
            host=Host.here(),
            version=__version__,
            protocol=self._protocol,
            token=self._token,
            detached=False,
            started=time.time(),
            owner=owner,
        )

    def _write(self, entry: RuntimeEntry) -> None:
        before = self._held
        self._path, self._held = write(entry)
        if before is not None:
            os.close(before)
        self._written(self._path)

    def keep(self) -> None:
        """Write the entry again if it has gone: logind removes its directory at the last logout.

        Where that is not possible now (a home that is away, or full) the runtime goes on without.
        """
        with contextlib.suppress(OSError, NblaunchError), self._lock:
            if self._entry is not None and not self._path.exists():
                self._write(self._entry)

    def remove(self) -> None:
        with contextlib.suppress(OSError, NblaunchError), self._lock:
            entry, self._entry = self._entry, None
            if entry is not None:
                if entry.name:
                    release_name(entry.name, entry)
                self._path.unlink(missing_ok=True)
