"""How a keeper is started, by the process that it keeps a runtime for, and ended by any."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._inherited import is_standard_library
from nblaunch._process_tree import start_ticks, this_python

FORK_SERVER_LOG = "forkserver.log"
"""What the keeper and the fork server print, in the private directory."""
RUNTIME_LOG = "runtime.log"
"""What the runtime prints."""

_LAST = 4000
_CALLS_CUDA = "KINETO_USE_DAEMON"
"""Has torch initialise CUDA when it is imported, which no fork survives."""


def start(link_fd: int, owner: int, root: Path, live: str) -> subprocess.Popen[bytes]:
    # Beside the notebook may be a `random.py`, where it has loaded the real one itself. Ranks get its path.
    path = sorted(absolute_path(), key=lambda entry: not is_standard_library(entry))
    code = (
        f"import sys; sys.path[:] = {path!r}; from nblaunch.host.keeper import keep_runtime; "
        f"keep_runtime{(link_fd, owner, os.fspath(root), live)!r}"
    )
    with (root / FORK_SERVER_LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
            [*this_python(), "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
            pass_fds=[link_fd],
            # The stop button's SIGINT goes to the kernel's process group: we are not in it.
            start_new_session=True,
        )


def stop(pid: int, started: int) -> bool:
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


def environment() -> dict[str, str]:
    """Return the environment under which a fork server started now loads torch."""
    # torchrun's rule for more than one rank on a machine: one thread each where no number is set.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    environ.pop(_CALLS_CUDA, None)
    return environ


def absolute_path() -> list[str]:
    """Return this process's `sys.path` as it is to be in another one."""
    here = directory_or_root()
    return [os.path.normpath(Path(here, entry)) for entry in sys.path]


def directory_or_root() -> str:
    """Return the working directory, or the root directory where it has been removed: others refuse that."""
    try:
        return str(Path.cwd())
    except OSError:
        return os.sep


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
        raise LaunchError(msg, phase="fork server", kind=FailureKind.PROCESS_LIMIT) from error


class Boot:
    """A runtime that has been started: its keeper, which is a child of this process, and its logs.

    Its process calls the function named `live` ("module:name"). It answers on the other end of `link`, or
    that ends. It ends with process `owner`, this one; 0: with no other process. Raises `LaunchError` if the
    system refuses.
    """

    def __init__(self, root: Path, link: socket.socket, live: str, *, owner: int) -> None:
        import fcntl  # only here: this module can be imported on Windows

        with starting(), contextlib.ExitStack() as opened:
            # Opened now: the keeper removes them with the private directory.
            self._logs = [
                opened.enter_context((root / name).open("a+b")) for name in (FORK_SERVER_LOG, RUNTIME_LOG)
            ]
            # Where this process has closed its standard streams, the link may have taken the place of one.
            fd = fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, 3)
            opened.callback(os.close, fd)
            self.keeper = start(fd, owner, root, live)
            os.close(fd)
            opened.pop_all()

    def last_words(self) -> str:
        """Return what the fork server, before it had forked the runtime, and the runtime printed last."""
        return last_words(self._logs)

    def close(self) -> None:
        for log in self._logs:
            log.close()


def last_words(logs: Iterable[BinaryIO]) -> str:
    """Return the end of what was printed to these files, which may be closed by now."""
    text = ""
    for log in logs:
        with contextlib.suppress(ValueError, OSError):
            size = os.fstat(log.fileno()).st_size
            text += os.pread(log.fileno(), _LAST, max(size - _LAST, 0)).decode(errors="replace")
    return f"Its last words:\n{text[-_LAST:]}" if text else "It printed nothing."
