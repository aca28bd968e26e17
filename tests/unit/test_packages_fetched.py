"""What becomes of programs that lack packages: `Asking` against an engine that a test plays."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from patience import eventually

from nblaunch._errors import LaunchError
from nblaunch.nodes.asking import Asking
from nblaunch.nodes.bootstrap import LACKING
from nblaunch.nodes.engine import NodeProgram, NodeRequest, ProgramStatus
from nblaunch.protocol.messages import EngineState, EngineStatus

HOSTS = ("hA", "hB")


class Lacking:
    """Two hosts: the program on the second always lacks packages."""

    name: ClassVar[str] = "played"
    reports: ClassVar[bool] = False
    released = True

    def __init__(self) -> None:
        self.starts, self.cancelled = 0, False

    def ask(self, request: NodeRequest) -> Lacking:  # noqa: ARG002 - as every engine has it
        return self

    def status(self) -> EngineStatus:
        return EngineStatus(engine="played", id="7", state=EngineState.GRANTED, hosts=HOSTS, words="RUNNING")

    def start(self, program: NodeProgram) -> str:  # noqa: ARG002 - nothing runs
        self.starts += 1
        return ""

    def statuses(self) -> tuple[ProgramStatus, ...]:
        if not self.starts:
            return ()
        return ProgramStatus("hA", 0, running=True), ProgramStatus(
            "hB", 1, running=False, exitcode=LACKING, words="no"
        )

    def cancel(self) -> None:
        self.cancelled = True


def _begin(
    engine: Any, least: int, fetch: Callable[[], bool]
) -> tuple[Asking, list[EngineStatus], list[str]]:
    said: list[EngineStatus] = []
    ended: list[str] = []
    request = NodeRequest(
        least=least, most=2, nproc=1, name="nblaunch-1", environ={}, cwd="/", python="python"
    )
    asking = Asking(engine, request, lambda: NodeProgram((), b""), said.append, ended.append, fetch=fetch)
    asking.joined(0)
    asking.start()
    return asking, said, ended


def _cannot() -> bool:
    msg = "no wheel of torch"
    raise LaunchError(msg, phase="engine")


def _full() -> bool:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("fetch", "why"), [(_cannot, "no wheel of torch"), (_full, "No space left")])
def test_a_session_with_enough_nodes_outlives_a_fetch_that_fails(fetch, why):
    engine = Lacking()
    asking, said, ended = _begin(engine, 1, fetch)
    eventually(lambda: any("the node on hB ended" in each.reason for each in said), "it is told", 10)
    assert not ended
    assert not engine.cancelled
    asking.stop()

    engine = Lacking()
    asking, _, ended = _begin(engine, 2, fetch)
    eventually(lambda: ended, "too few nodes are left", 10)
    assert why in ended[0]
    asking.stop()


def test_a_program_that_lacks_packages_although_it_was_brought_them_is_not_started_for_ever():
    engine = Lacking()
    asking, _, ended = _begin(engine, 2, lambda: True)
    eventually(lambda: ended, "it has ended", 10)
    assert "the node on hB ended before it joined" in ended[0]
    assert engine.starts == 2
    asking.stop()
