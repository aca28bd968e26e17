"""A run whose nodes were taken back is shown as that: in text, HTML and the panel, and it has not failed."""

from __future__ import annotations

import pytest

from nblaunch.protocol.messages import Exited, Hello, Payload, Returned, RunPreempted, Started, encode
from nblaunch.protocol.state import RunState, advance, decode_state
from nblaunch.view.html import render_html
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header
from nblaunch.view.text import render_text

HEADER = Header("cell", "gloo")
WHY = "slurm job 7 is near its time limit"


@pytest.fixture
def preempted() -> RunState:
    """Give the state of a run of which rank 0 had its value."""
    state = RunState.fresh(2)
    for rank in range(2):
        hello = Hello(rank=rank, token="", attempt=0, local_rank=0, world_size=2, node="hA", pid=1)
        state = advance(state, hello)
        state = advance(state, Started(rank=rank, time=1.0))
    state = advance(state, Returned(rank=0, value=Payload((1,), inline=b""), time=2.0, text="7"))
    state = advance(state, RunPreempted(why=WHY))
    return advance(state, Exited(rank=1, exitcode=1, time=3.0, expected=True))


def test_it_is_in_all_views(preempted):
    assert render_text(preempted, HEADER).splitlines() == [
        "rank 0: 7",
        "rank 1: STOPPED",
        f"warning: preempted: {WHY}",
    ]
    html = render_html(preempted, HEADER)
    assert "PREEMPTED" in html
    assert f"preempted: {WHY}" in html
    assert "Root cause" not in html
    drawing = Drawing(HEADER, 0.0)
    drawing.changes(preempted, 1.0)
    parts = drawing.whole(1.0)["parts"]
    assert ">▣</span>PREEMPTED</span>" in parts["head"]
    assert f"warning: preempted: {WHY}" in parts["failure"]
    assert "Root cause" not in parts["failure"]


def test_a_live_panel_says_it_at_once():
    """The ranks may save for two minutes."""
    drawing = Drawing(HEADER, 0.0)
    running = RunState.fresh(2)
    drawing.changes(running, 0.5)
    news = drawing.changes(advance(running, RunPreempted(why=WHY)), 1.0)
    assert news is not None
    assert f"warning: preempted: {WHY}" in str(news["parts"]["failure"])
    assert "INIT</span>" in drawing.whole(1.0)["parts"]["head"]


def test_another_process_sees_the_same(preempted):
    assert decode_state(encode(preempted)).summary == preempted.summary
