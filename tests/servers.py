"""Fork servers for groups that a test has in its own process, in place of a runtime's."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from nblaunch._keeper import Boot, environment
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.host.forkserver import Server, server_of_fork


class NoServer(Server):
    """A fork server that starts nothing: any order fails the test."""

    def __init__(self, directory: RuntimeDirectory | None = None) -> None:
        requests, orders = socket.socketpair()
        super().__init__(requests, orders, directory or RuntimeDirectory(), {})
        for each in (requests, orders):
            each.close()

    def _order(self, *order: object) -> int:
        pytest.fail(f"a process was to be started: {order}")

    def loaded_under(self) -> dict[str, str]:
        """Return what it would load torch under, were it started now."""
        return environment()

    def sweep(self) -> None:
        """Nothing was started."""

    def stop(self) -> None:
        """Nothing was started."""


def live(link_fd: int, requests_fd: int, orders_fd: int, root: str, keeper: int) -> None:
    """Be the runtime's process, and give the test what a runtime has, until the test lets the link go."""
    server = server_of_fork(requests_fd, orders_fd, root, keeper)
    link = socket.socket(fileno=link_fd)
    assert server._requests is not None
    socket.send_fds(link, [b"k"], [server._requests.fileno(), server._orders.fileno()])
    link.recv(1)
    os._exit(0)


@contextlib.contextmanager
def kept_server() -> Iterator[Server]:
    """Start a keeper with a fork server, which forks for this process."""
    directory = RuntimeDirectory()
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(Boot(directory.root(), theirs, "servers:live", owner=os.getpid())) as boot:
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 2)
        requests, orders = (socket.socket(fileno=fd) for fd in fds)
        try:
            yield Server(requests, orders, directory, environment())
        finally:
            ours.close()
            boot.keeper.wait()
            for each in (requests, orders):
                each.close()
            directory.remove()
