"""What a rank does first, before it can leave anything behind; standard library only."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from multiprocessing import forkserver, process, resource_tracker
from typing import Any

from nblaunch._process_tree import become_subreaper, die_with_parent

# `multiprocessing` adds `/listener-` and eight letters; macOS takes 104 bytes in all.
_LONGEST_SOCKET_DIRECTORY = 84


server_pid = 0
"""The fork server's process id, which it sets before it forks."""


def isolate() -> None:
    """Make this fork of the server a process of its own."""
    # SIGKILL in place of the SIGINT that torch.multiprocessing asks for: SIGINT is no guarantee.
    die_with_parent(server_pid)
    become_subreaper()
    # A session of its own: the stop button's SIGINT reaches this rank only through us.
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _forget_inherited_servers()
    _reseed()


def keep_sockets_in(directory: str) -> None:
    """Have `multiprocessing` make its sockets in `directory`, which is removed with the run.

    They would lie in the temporary directory, and stay there when a rank is killed that has, say, the
    workers of a DataLoader.
    """
    if len(os.fsencode(directory)) <= _LONGEST_SOCKET_DIRECTORY:
        process.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]  # noqa: SLF001


def _forget_inherited_servers() -> None:
    """Let the user's own `forkserver` context start a server of this rank's, not use ours."""
    inherited: Any = vars(forkserver)["_forkserver"]  # no public name reaches the inherited state
    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    for fd in (inherited._forkserver_alive_fd, tracker._fd):  # noqa: SLF001
        if fd is not None:
            os.close(fd)
    for name, value in (
        ("_forkserver_address", None),
        ("_forkserver_alive_fd", None),
        ("_forkserver_pid", None),
        ("_inherited_fds", None),
        ("_preload_modules", ["__main__"]),
    ):
        setattr(inherited, name, value)
    tracker._fd = None  # noqa: SLF001
    tracker._pid = None  # noqa: SLF001


def _reseed() -> None:
    """Forks start with the server's random state, the same in every rank; fresh processes do not."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        # Of the CPU's generator only: torch.seed() would queue a call for CUDA's first use.
        torch.default_generator.seed()
