"""Starting a runtime, what its logs hold when it is gone, and ending one that does not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from nblaunch import _keeper
from nblaunch._errors import LaunchError
from nblaunch._process_tree import start_ticks

LIVE = "nblaunch.runtime.main:live"
"""What the runtime's process calls, by name: a client does not import it."""
_LAST = 4000


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Raise `LaunchError` where the system refuses what it takes to start a runtime."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        why = f"{errno.errorcode.get(number, number)}, {os.strerror(number).lower()}"
        msg = (
            f"nblaunch's runtime was to be started, and the system refused: {why}. Raise the limits "
            "on processes (ulimit -u, pids.max of the container), open files (ulimit -n) or memory."
        )
        raise LaunchError(msg, phase="fork server") from error


class Boot:
    """A runtime that has been started: its keeper, which is a child of this process, and its logs.

    It answers on the other end of `link`, or that ends. It ends with process `owner`, this one; 0: with no
    other process. Raises `LaunchError` if the system refuses.
    """

    def __init__(self, root: Path, link: socket.socket, *, owner: int) -> None:
        with starting(), contextlib.ExitStack() as opened:
            # Opened now: the keeper removes them with the private directory.
            self._logs = [
                opened.enter_context((root / name).open("a+b"))
                for name in (_keeper.FORK_SERVER_LOG, _keeper.RUNTIME_LOG)
            ]
            self.keeper = _keeper.start(
                "keep_runtime",
                (link.fileno(), owner, os.fspath(root), LIVE),
                root=root,
                environ=_keeper.environment(),
                fds=[link.fileno()],
            )
            opened.pop_all()

    def last_words(self) -> str:
        """Return what the fork server, before it had forked the runtime, and the runtime printed last."""
        return last_words(self._logs)

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs:
            log.close()


def last_words(logs: Iterable[BinaryIO]) -> str:
    """Return the end of what was printed to these files, which may be closed by now."""
    text = ""
    for log in logs:
        with contextlib.suppress(ValueError, OSError):
            size = os.fstat(log.fileno()).st_size
            text += os.pread(log.fileno(), _LAST, max(size - _LAST, 0)).decode(errors="replace")
    return f"Its last words:\n{text[-_LAST:] or '(none)'}"


def stop_keeper(pid: int, started: int) -> bool:
    """Have a keeper end all that it keeps; return whether it was there.

    `started` is its `start_ticks`: a process that has the same number since gets no signal.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # a Python built on old headers, some sandboxes
        if start_ticks(pid) != started:
            return False
        os.kill(pid, signal.SIGUSR1)
        return True
    try:
        if start_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(process, signal.SIGUSR1)
    except ProcessLookupError:
        return False
    else:
        return True
    finally:
        os.close(process)
