"""The wait for nodes, and then the nodes and the time left, are in the panel's head while a cell blocks."""

from __future__ import annotations

import pytest

from .front import expect

pytestmark = pytest.mark.once

# There is no cluster here: what the engine says is made up, the view and the page are real.
SHOWN = """
import threading, time
from nblaunch.protocol.messages import EngineStatus, EngineState, Hello, Payload, Returned
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.display import choose_view
from nblaunch.view.summary import Header

WAITING = EngineStatus(
    engine="slurm", state=EngineState.WAITING, id="3", words="PENDING", reason="Resources",
    place="priority 7", starts=time.time() + 3600, joined=1, wanted=2,
)
view = choose_view(Header("cell", "gloo", node="notebook-host"))

def shown(state, gate):
    waiting = threading.Thread(target=wait_for, args=(gate,))
    waiting.start()
    while waiting.is_alive():
        view.draw(state)
        time.sleep(0.02)

def placed(state, seconds):
    said = EngineStatus(
        engine="slurm", state=EngineState.RUNNING, id="3", hosts=("hA", "hB"), ends=time.time() + seconds + 1
    )
    for rank, host in enumerate(said.hosts):
        hello = Hello(rank=rank, token="", attempt=0, local_rank=0, world_size=2, node=host, pid=rank + 1)
        state = advance(state, hello)
    return advance(state, said)
"""
RUN = """
state = advance(RunState.fresh(2), WAITING)
view.open(state)
shown(state, {waits})
state = placed(state, 1620)
shown(state, {runs})
state = placed(state, 300)
shown(state, {ends})
for rank in range(2):
    state = advance(state, Returned(rank=rank, value=Payload(()), time=2.0, text="7"))
view.close(state)
"""


def test_the_head_shows_the_wait_the_nodes_and_the_last_minutes(front, gate):
    names = ("waits", "runs", "ends")
    for name in names:
        gate.wait(name)
    front.run(SHOWN)
    front.start(RUN.format_map({name: repr(name) for name in names}))
    line = front.panel.locator(".nblaunch-nodes")
    expect(line).to_contain_text("waiting for slurm: job 3 PENDING (Resources), priority 7, start about")
    expect(line).to_contain_text("1 of 2 nodes here")
    expect(front.panel).not_to_contain_text("notebook-host")
    front.screenshot("waits")
    gate.open("waits")
    expect(line).to_have_text("slurm job 3 on hA,hB, 27 min left")
    for rank, host in enumerate(("hA", "hB")):
        expect(front.panel.get_by_role("article", name=f"Rank {rank}", exact=True)).to_contain_text(host)
    calm = line.evaluate("(element) => getComputedStyle(element).color")
    gate.open("runs")
    expect(line).to_have_text("⚠ slurm job 3 on hA,hB, 5 min left")
    assert line.evaluate("(element) => getComputedStyle(element).color") != calm
    front.screenshot("ends")
    gate.open("ends")
    front.finished()
    expect(front.outputs.last).to_contain_text("SUCCEEDED")
    expect(front.outputs.last).not_to_contain_text("slurm")
