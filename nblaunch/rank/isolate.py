"""A rank as a process: set apart from the server that it was forked from, and the reaper of its orphans.

Standard library only: `isolate` runs first, before the rank can leave anything behind.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import forkserver, process, resource_tracker
from typing import Any

from nblaunch._process_tree import become_subreaper, children, die_with_parent

# `multiprocessing` adds `/listener-` and eight letters; macOS takes 104 bytes in all.
_LONGEST_SOCKET_DIRECTORY = 84
REAP_SECONDS = 0.25
_UNREAD_SECONDS = 0.15
_TEMPLATES = "torch.distributed.nn.jit.instantiator"

_started: set[int] = set()
_STARTERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("fork", "forkpty", "posix_spawn", "posix_spawnp")),
    (subprocess, ("_fork_exec",)),
    (_posixsubprocess, ("fork_exec",)),
)

server_pid = 0
"""The fork server's process id, which it sets before it forks."""


def isolate() -> None:
    # SIGKILL in place of the SIGINT that torch.multiprocessing asks for, which a rank may ignore.
    die_with_parent(server_pid)
    become_subreaper()
    # A session of its own: the stop button's SIGINT reaches this rank only through the hub.
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _forget_inherited_servers()
    reseed()


def keep_files_in(directory: str) -> None:
    """Have the sockets of `multiprocessing` and torch's templates in `directory`, which goes with the run.

    Otherwise they are in the temporary directory, and stay there when a rank is killed that has workers of a
    DataLoader, for example.
    """
    sys.meta_path.insert(0, _InDirectory(directory))
    if len(os.fsencode(directory)) <= _LONGEST_SOCKET_DIRECTORY:
        process.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]  # noqa: SLF001


class _InDirectory(MetaPathFinder):
    """Has torch 2.8, as it imports DDP, make its directory of templates in `directory`.

    It removes the directory at exit only, which a killed rank does not reach. Later versions make none.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _TEMPLATES else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(self._load, loader.exec_module)
        return spec

    def _load(self, load: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
        chosen, tempfile.tempdir = tempfile.tempdir, self.directory
        try:
            load(module)
        finally:
            tempfile.tempdir = chosen


def _forget_inherited_servers() -> None:
    """Let the user's own `forkserver` context start a server of this rank, not use ours."""
    inherited: Any = vars(forkserver)["_forkserver"]  # no public name reaches the inherited state
    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    for fd in (inherited._forkserver_alive_fd, tracker._fd):  # noqa: SLF001
        if fd is not None:
            os.close(fd)
    vars(inherited).update(
        _forkserver_address=None, _forkserver_alive_fd=None, _forkserver_pid=None, _inherited_fds=None
    )
    vars(inherited)["_preload_modules"] = ["__main__"]
    vars(tracker).update(_fd=None, _pid=None)


own_seed: int | None = None
"""The seed of torch's random numbers that this process began with."""


def reseed() -> None:
    """Give this process a random state of its own: each fork starts with the server's."""
    global own_seed
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        # Of the CPU's generator only: torch.seed() would queue a call for CUDA's first use.
        own_seed = torch.default_generator.seed()


# Orphans. A rank is the subreaper of all processes below it: if they became the keeper's children, the end of
# any other run would kill them. So the rank has to read their exit status, or each stays as a zombie
# (`!cmd &` leaves one each time).
#
# A child that the rank itself has started is left alone: its exit status can be read once only, and the code
# that started it is going to. The functions by which Python starts processes note which these are. A child
# that a C library starts and waits for is a zombie for a moment only, which the delay spares.


def note_own_children() -> None:
    for module, names in _STARTERS:
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
        self._due = 0.0
        self._seen: dict[int, float] = {}
        """Process id -> when it was first found to have ended."""
        self.has_nothing_to_do = True
        """No orphan can appear until the rank starts a process."""

    def reap(self, *, now: bool = False, working: bool = True) -> None:
        """Reap the orphans that ended a while ago, if it is time to look, or `now`.

        Whoever is not `working` starts no process.
        """
        clock = time.monotonic()
        if not now and clock < self._due:
            return
        self._due = clock + REAP_SECONDS
        before = set(_started)
        present = children() or set()
        self.has_nothing_to_do = not present and not working
        _started.difference_update(before - present)
        self._seen = {pid: self._seen.get(pid, clock) for pid in present - _started if _has_ended(pid)}
        for pid, seen in self._seen.items():
            if clock - seen >= _UNREAD_SECONDS:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
