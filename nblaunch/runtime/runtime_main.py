"""The runtime's process, from its fork to its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from nblaunch._keeper import RUNTIME_LOG
from nblaunch.host.forkserver import Server, server_of_fork

if TYPE_CHECKING:
    from nblaunch._registry import Registration
    from nblaunch.host.hub import Hub
    from nblaunch.runtime.requests import RequestHandler

# As mallopt takes them (malloc.h); without this the limit follows the largest block that was freed.
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 1 << 17
_M_ARENA_MAX, _ARENAS = -8, 2
# How often the entry in the registry is looked at.
_KEEP_SECONDS = 60.0
_LOG_BYTES = 1 << 18


def live(link_fd: int, requests_fd: int, orders_fd: int, root: str, keeper: int) -> NoReturn:
    """Be the runtime: called in a fork of the fork server, which has torch, and no thread.

    Signals are as the keeper has set them (SIGINT, SIGTERM and SIGHUP are ignored), and so is the limit on
    descriptors. The collector does not run yet.
    """
    code = 1
    try:
        server = server_of_fork(requests_fd, orders_fd, root, keeper)
        os.chdir(os.sep)
        os.umask(0o077)
        _print_to(Path(root) / RUNTIME_LOG)
        faulthandler.enable()
        from nblaunch.group import group  # noqa: F401 - while the fork server loads what ranks need

        gc.freeze()
        gc.enable()
        _keep_little_memory()
        serve(socket.socket(fileno=link_fd), Path(root), server)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing else would report it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _keep_little_memory() -> None:
    """Have the C library give large blocks back once they are freed; else it soon keeps those up to 32 MB.

    And have threads share arenas: each one of its own keeps what its thread has freed.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        mallopt(_M_ARENA_MAX, _ARENAS)


def _print_to(log: Path) -> None:
    fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    for each in (1, 2):
        os.dup2(fd, each)
    os.close(fd)
    logging.getLogger("nblaunch").addHandler(_ShortLog())


class _ShortLog(logging.StreamHandler[TextIO]):
    """Keeps the end of the file on standard error: one who is refused may come again for days."""

    left_out = 0
    _notice = b""

    def flush(self) -> None:
        """Leave out the older half of a file that is too long, and say how much that was."""
        super().flush()
        fd = sys.stderr.fileno()
        size = os.fstat(fd).st_size
        if size <= _LOG_BYTES:
            return
        kept = os.pread(fd, _LOG_BYTES // 2, size - _LOG_BYTES // 2).partition(b"\n")[2]
        self.left_out += size - len(kept) - len(self._notice)
        self._notice = b"(%d bytes before this were left out)\n" % self.left_out
        os.ftruncate(fd, 0)
        os.write(fd, self._notice + kept)


def serve(link: socket.socket, root: Path, server: Server) -> None:
    """Serve the owner, at the other end of `link`, and all further clients, until one stops the runtime."""
    from nblaunch._registry import Registration
    from nblaunch.group.local_runtime import LocalRuntime
    from nblaunch.protocol.client import PROTOCOL
    from nblaunch.runtime.connections import Connections
    from nblaunch.runtime.requests import RequestHandler

    local = LocalRuntime(server)
    hub = local.hub
    token = secrets.token_hex(16)
    registration = Registration(root, token, PROTOCOL, server.named)
    requests = RequestHandler(local, token, registration)

    def begin() -> None:
        requests.connections = Connections(hub, token, requests)
        requests.listen()
        requests.owner = requests.connections.adopt(link)

    hub.when_broken = requests.changed.set
    hub.run(begin)
    _until_stopped(hub, requests, registration)
    registration.remove()
    local.close()


def _until_stopped(hub: Hub, requests: RequestHandler, registration: Registration) -> None:
    """Wait until a client stops the runtime, or until it was unused for long enough.

    Raises what has ended the hub: no client is served any more, so the process must end, at once.
    """
    while not requests.stopping:
        if hub.error is not None:
            raise hub.error
        left = requests.linger_left()
        if left is not None and left <= 0:
            # On the hub's thread no client can come in between.
            hub.run(requests.end_if_unused)
            if requests.unused:
                requests.close()
                return
            continue
        requests.changed.wait(_KEEP_SECONDS if left is None else min(left, _KEEP_SECONDS))
        requests.changed.clear()
        registration.keep()
        if not requests.stopping:
            hub.call(requests.listen_if_gone)
