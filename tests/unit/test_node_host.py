"""A node ends with its connection, whatever the last orders that it has read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from nblaunch.host.node_main import CutOffError, NodeHost
from nblaunch.options.launch import LaunchOptions


class _CutOffNode(NodeHost):
    """A node whose connection has ended, and whose last order cannot be carried out."""

    def _connect(self) -> zmq.Socket[bytes]:
        self.far, events = (self._context.socket(zmq.PAIR) for _ in range(2))
        self.far.bind("inproc://events")
        events.connect("inproc://events")
        self.far.send_multipart([b"\0" * 6, b""])  # an event of the monitor
        return events

    def _arrive(self, events: zmq.Socket[bytes], signals: Any) -> None:
        """Be let in."""

    def _receive(self) -> None:
        self.far.close(0)
        msg = "no space left"
        raise OSError(msg)


@pytest.fixture
def runtime(tmp_path: Path) -> Any:
    def run(work: Callable[[], None], seconds: float) -> None:  # noqa: ARG001 - as called
        work()

    def ignore(*_: object) -> None:
        """Do nothing."""

    hub = SimpleNamespace(usable=True, run=run, call=lambda work: work(), watch=ignore, after_turn=[])
    server = SimpleNamespace(ensure_running=ignore)
    directory = SimpleNamespace(make=lambda name: tmp_path / name)
    return SimpleNamespace(hub=hub, server=server, directory=directory, close=ignore)


def test_a_node_that_is_cut_off_gives_its_allocation_back_though_its_last_order_fails(runtime: Any) -> None:
    """`join` ends the engine's job of a node that was cut off, and of no other."""
    node = _CutOffNode(runtime, "127.0.0.1:1", b"k" * 32, LaunchOptions())
    with pytest.raises(CutOffError, match="the notebook is gone"):
        node.serve([])
