"""When it is said that the time limit of nodes is near: `Asking` against an engine that a test plays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
from msgspec.structs import replace
from patience import eventually
from test_fleet import Hosts, Played

from nblaunch.nodes import asking
from nblaunch.nodes.asking import Asking
from nblaunch.nodes.engine import NodeProgram, NodeRequest
from nblaunch.protocol.messages import EngineState, EngineStatus

REQUEST = NodeRequest(least=1, most=1, nproc=1, name="nblaunch-limit", environ={}, cwd="/", python="python")
NEAR = "played job 7 is near its time limit"


class Limited(Hosts):  # type: ignore[misc]  # a class of another test
    """A host that is there for some time."""

    def __init__(self, left: float | None) -> None:
        super().__init__(REQUEST)
        self.asked = 0
        ends = None if left is None else time.time() + left
        self.said = EngineStatus(
            engine="played", id="7", state=EngineState.GRANTED, hosts=("hA",), ends=ends, words="RUNNING"
        )

    def status(self) -> EngineStatus:
        self.asked += 1
        return self.said


class Plays(Played):  # type: ignore[misc]  # a class of another test
    """Grants one such host."""

    granted: ClassVar[list[Limited]] = []

    @staticmethod
    def ask(request: NodeRequest) -> Hosts:  # noqa: ARG004 - as every engine has it
        return Plays.granted[-1]


@pytest.fixture
def limits() -> Iterator[Callable[[float | None], tuple[Limited, list[tuple[str, float]], Asking]]]:
    made: list[Asking] = []

    def begin(left: float | None) -> tuple[Limited, list[tuple[str, float]], Asking]:
        said: list[tuple[str, float]] = []
        Plays.granted.append(Limited(left))
        made.append(
            Asking(
                Plays,
                REQUEST,
                lambda: NodeProgram((), b""),
                lambda _: None,
                lambda _: None,
                limit=lambda why, seconds: said.append((why, seconds)),
            )
        )
        made[-1].start()
        return Plays.granted[-1], said, made[-1]

    yield begin
    for each in made:
        each.stop()


def test_it_is_said_once_and_again_after_the_limit_has_been_moved(limits):
    host, said, there = limits(600)
    eventually(lambda: host.asked, "the engine is asked")
    host.said = replace(host.said, ends=time.time() + 100)
    there.poll_soon()
    eventually(lambda: said, "the limit is near")
    ((why, seconds),) = said
    assert (why, 99 < seconds <= 100) == (NEAR, True), "at once, where less is left than two minutes"
    there.poll_soon()
    host.said = replace(host.said, ends=time.time() + 900)
    there.poll_soon()
    eventually(lambda: len(said) > 1, "it is no longer")
    assert said[1][0] == ""
    host.said = replace(host.said, ends=time.time() + 119)
    there.poll_soon()
    eventually(lambda: len(said) > 2, "it is near again")
    assert said[2][0] == NEAR
    assert len(said) == 3


def test_of_a_short_time_it_is_said_in_the_middle(limits):
    """A run in an allocation of a minute would otherwise end before it has begun."""
    began = time.monotonic()
    _, said, _ = limits(2.0)
    eventually(lambda: said, "the limit is near", 3)
    assert 0.7 < time.monotonic() - began < 1.8
    assert 0.2 < said[0][1] <= 1.0


def test_nodes_without_a_limit_have_none_that_is_near(limits):
    host, said, there = limits(None)
    before = 0
    for _ in range(3):
        eventually(lambda before=before: host.asked > before, "the engine is asked")
        before = host.asked
        there.poll_soon()
    assert said == []


@pytest.mark.parametrize(("left", "step"), [(None, 15), (3600, 15), (610, 5), (60, 5)])
def test_an_engine_that_holds_the_nodes_is_seldom_asked(left, step):
    """It is asked more often before the time that is left is shown as short."""
    held = Limited(left).said
    assert asking._step(held, 1000) == step
