"""The fork server of what is tested without a process: any order to it fails the test."""

from __future__ import annotations

import socket

import pytest

from nblaunch._keeper import environment
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.elastic.forkserver import Server


class NoServer(Server):
    """A fork server that starts nothing."""

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
