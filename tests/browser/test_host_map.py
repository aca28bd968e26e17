"""Many ranks on many hosts are a map: a row for each host, a cell for each rank, and a page that answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lanes import sampled

import nblaunch.view
from nblaunch.protocol.state import advance
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header

from .front import DARK, LIGHT, Front, Locator, expect

pytestmark = pytest.mark.once

VIEW = Path(nblaunch.view.__file__).parent
# There is no cluster here: the ranks are made up, the view and the page are real.
MADE_UP = r"""
import threading, time
from nblaunch.protocol.messages import (
    EngineStatus, EngineState, FailureRecord, FrameRecord, JobAssigned, Measured, Payload, Phase, Printed,
    Raised, RankPlace, Returned, Started, Stream, Usage,
)
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.display import choose_view
from nblaunch.view.summary import Header

def on_hosts(ranks, each=8, name="gpu-node-{:03}", started=True):
    places = {
        rank: RankPlace(rank % each, name.format(rank // each), f"cuda:{rank % each}", 4000 + rank, Phase.JOB)
        for rank in range(ranks)
    }
    state = advance(RunState.fresh(ranks, time=time.time()), JobAssigned(ranks=places, attempt=0))
    usages = {rank: Usage(97.0, 5 << 30, 71 << 30, 98) for rank in range(ranks)}
    for rank in range(ranks if started else 0):
        state = advance(state, Started(rank=rank, time=1.0))
    return advance(state, Measured(usages=usages)) if started else state

def says(state, rank, text):
    return advance(state, Printed(rank=rank, stream=Stream.STDOUT, text=text + "\n"))

def fails(state, rank, text="CUDA error: an illegal memory access was encountered"):
    frames = (FrameRecord("Cell In[3]", 4, "step", "loss.backward()"),)
    traceback = f"Traceback (most recent call last):\n  Cell In[3], line 4, in step\nRuntimeError: {text}"
    failure = FailureRecord(
        type="builtins.RuntimeError", message=text, traceback=traceback, frames=frames, time=2.0
    )
    return advance(state, Raised(rank=rank, failure=failure))

def ends(state):
    for rank, known in state.ranks.items():
        if not known.state.final:
            state = advance(state, Returned(rank=rank, value=Payload(()), time=2.0, text="7"))
    return state

class Shown:
    def __init__(self, state, **header):
        self.view = choose_view(Header("cell", "cpu:gloo,cuda:nccl", **header))
        self.view.open(state)

    def until(self, gate, state):
        waiting = threading.Thread(target=wait_for, args=(gate,))
        waiting.start()
        while waiting.is_alive():
            self.view.draw(state)
            time.sleep(0.02)

    def close(self, state):
        self.view.close(ends(state))
"""

TWO_HOSTS = """
state = on_hosts(16, name="gpu-node-{:03}.cluster.example.org")
for rank in range(16):
    state = says(state, rank, f"step 1: loss {rank}")
shown = Shown(state)
shown.until("first", state)
state = fails(state, 11)
shown.until("end", state)
shown.close(state)
"""


def cell(front: Front, rank: int) -> Locator:
    return front.panel.get_by_role("gridcell", name=re.compile(rf"^Rank {rank} "))


def the_map(front: Front) -> Locator:
    return front.panel.get_by_role("grid", name="Ranks by host")


def begin(front: Front, gate, code: str, *gates: str) -> None:
    for name in gates:
        gate.wait(name)
    front.run(MADE_UP)
    front.start(code)
    expect(the_map(front)).to_be_visible()


def test_a_map_has_a_row_for_each_host_and_a_cell_for_each_rank(front, gate):
    begin(front, gate, TWO_HOSTS, "first", "end")
    rows = the_map(front).get_by_role("row")
    expect(rows).to_have_count(2)
    expect(rows.nth(1).get_by_role("rowheader")).to_have_text("gpu-node-001")
    expect(rows.nth(1).get_by_role("gridcell")).to_have_count(8)
    expect(front.panel.locator(".nblaunch-hosts")).to_have_text("2 hosts x 8 ranks: RUNNING")
    expect(cell(front, 11)).to_have_attribute(
        "aria-label", "Rank 11 on gpu-node-001.cluster.example.org, RUNNING"
    )
    expect(cell(front, 11)).to_have_text("► 11")
    front.screenshot("running")
    gate.open("first")
    expect(cell(front, 11)).to_have_attribute("aria-label", re.compile("FAILED$"))
    expect(front.panel.locator(".nblaunch-hosts")).to_contain_text("rank 11 FAILED, ranks 8-10,12-15 RUNNING")
    card = front.panel.get_by_role("article", name="Rank 11", exact=True)
    expect(card).to_contain_text("illegal memory")
    expect(card).to_contain_text("gpu-node-001 · cuda:3 · pid 4011")
    expect(card.get_by_title("gpu-node-001.cluster.example.org · cuda:3 · pid 4011")).to_be_visible()
    expect(front.panel.locator(".nblaunch-failure")).to_contain_text("rank 11 on gpu-node-001")
    cell(front, 3).hover()
    expect(front.panel.locator(".nblaunch-about")).to_have_text(
        re.compile("^Rank 3 on gpu-node-000.*RUNNING$")
    )
    cell(front, 3).click()
    expect(cell(front, 3)).to_have_attribute("aria-selected", "true")
    expect(front.panel.get_by_role("article", name="Rank 3", exact=True)).to_contain_text("loss 3")
    expect(front.output).to_contain_text("loss 3")
    expect(front.output).not_to_contain_text("loss 4")
    expect(front.panel.get_by_label("Show output of")).to_have_value("3")
    cell(front, 3).click()
    expect(front.output).to_contain_text("loss 4")
    gate.open()
    front.finished()
    expect(front.outputs.last).to_contain_text("rank 11 on gpu-node-001")


BELOW = """() => {
  const [one, other] = document.querySelectorAll(".nblaunch-host");
  return one.offsetTop < other.offsetTop;
}"""


def test_the_map_can_be_used_with_the_keyboard_alone(front, gate):
    begin(front, gate, TWO_HOSTS, "first", "end")
    front.command("notebook:enter-command-mode")
    cell(front, 0).focus()
    keys = front.page.keyboard
    about = front.panel.locator(".nblaunch-about")
    for key, rank in (("ArrowRight", 1), ("ArrowRight", 2), ("End", 15), ("Home", 0), ("ArrowRight", 1)):
        keys.press(key)
        expect(about).to_contain_text(f"Rank {rank} on")
    keys.press("Enter")
    expect(front.panel.get_by_role("article", name="Rank 1", exact=True)).to_contain_text("loss 1")
    expect(front.output).not_to_contain_text("loss 2")
    keys.press(" ")
    expect(front.output).to_contain_text("loss 2")
    tabbed = front.panel.locator("[role=gridcell][tabindex='0']")
    expect(tabbed).to_have_count(1)
    front.page.set_viewport_size({"width": 460, "height": 1000})
    try:
        front.page.wait_for_function(BELOW)
        keys.press("ArrowDown")
        expect(about).to_contain_text("Rank 9 on")
        keys.press("ArrowUp")
        expect(about).to_contain_text("Rank 1 on")
    finally:
        front.page.set_viewport_size({"width": 1200, "height": 1000})


@pytest.mark.parametrize("theme", sampled([LIGHT, DARK], ci=1), ids=["light", "dark"])
def test_nothing_serious_is_wrong_with_the_map(front, axe, gate, theme):
    states = """
state = on_hosts(64, 8)
from nblaunch.protocol.messages import Exited
for rank in range(8, 16):
    state = advance(state, Returned(rank=rank, value=Payload(()), time=2.0, text="7"))
state = fails(state, 17)
for rank in range(24, 32):
    state = advance(state, Exited(rank=rank, exitcode=-15, expected=True, time=2.0))
shown = Shown(state)
shown.until("end", state)
shown.close(state)
"""
    front.theme(theme)
    begin(front, gate, states, "end")
    expect(cell(front, 17)).to_be_visible()
    front.screenshot(theme.split()[-1].lower())
    assert axe(front.panel) == []


MANY = """
state = on_hosts(1024)
state = says(state, 1021, "the last words")
shown = Shown(state)
shown.until("first", state)
state = fails(state, 1021)
shown.until("end", state)
shown.close(state)
"""


@pytest.mark.slow
def test_1024_ranks_are_seen_at_once_and_the_one_that_failed_stands_out(front, gate):
    begin(front, gate, MANY, "first", "end")
    cells = front.panel.locator(".nblaunch-cell")
    expect(cells).to_have_count(1024)
    hosts = front.panel.locator(".nblaunch-hosts")
    expect(hosts).to_have_text("128 hosts x 8 ranks: RUNNING")
    front.screenshot("running")
    gate.open("first")
    expect(hosts).to_contain_text("gpu-node-127: rank 1021 FAILED, ranks 1016-1020,1022-1023 RUNNING")
    expect(front.panel.get_by_role("article")).to_contain_text("the last words")
    front.screenshot("failed")
    names = the_map(front).get_by_role("rowheader")
    expect(names.nth(127)).to_have_text("127")
    expect(names.nth(127)).to_have_attribute("title", "gpu-node-127")
    expect(front.panel).to_contain_text("hosts gpu-node-…")
    grid = front.panel.locator(".nblaunch-map")
    assert grid.evaluate("(map) => map.scrollHeight <= map.clientHeight + 1"), "no rank is out of sight"
    assert front.panel.evaluate("(panel) => panel.scrollWidth <= panel.clientWidth")
    select = front.panel.get_by_label("Show output of")
    assert select.locator("option").count() == 1, "a list of 1,024 is made when it is opened"
    select.focus()
    select.select_option("1021")
    expect(front.output).to_contain_text("the last words")
    gate.open()
    front.finished()
    expect(front.outputs.last).to_contain_text("127 hosts x 8 ranks: SUCCEEDED")
    expect(front.outputs.last).to_contain_text("Root cause: rank 1021 on gpu-node-127")
    expect(front.outputs.last.get_by_role("row", name="0-1020,1022-1023")).to_be_visible()
    front.outputs.last.scroll_into_view_if_needed()
    front.screenshot("saved")


# The script alone, with made-up messages: what the page itself takes to draw them, with the layout.
TIMES = """async ([script, css, whole, deltas]) => {
  document.head.append(Object.assign(document.createElement("style"), { textContent: css }));
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const { default: widget } = await import(url);
  const data = { name: "measured", delta: {}, whole };
  const listeners = {};
  const model = { get: (name) => data[name], on: (name, f) => { listeners[name] = f; }, off() {}, send() {} };
  const el = document.body.appendChild(document.createElement("div"));
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const timed = async (act) => {
    await frame();
    const began = performance.now();
    act();
    el.offsetHeight;
    return Math.round((performance.now() - began) * 10) / 10;
  };
  widget.initialize({ model });
  const figures = { first: await timed(() => widget.render({ model, el })) };
  // A delta is drawn with the next frame; here at once.
  let drawn;
  globalThis.requestAnimationFrame = (f) => { drawn = f; return 1; };
  for (const [name, delta] of Object.entries(deltas)) {
    data.delta = delta;
    await new Promise((done) => setTimeout(done, 400));
    listeners["change:delta"]();
    for (let waits = 0; !drawn && waits < 200; waits += 1) await new Promise((done) => setTimeout(done, 10));
    const begun = performance.now();
    drawn();
    drawn = undefined;
    el.offsetHeight;
    figures[name] = Math.round((performance.now() - begun) * 10) / 10;
  }
  figures.cells = document.querySelectorAll(".nblaunch-cell.nblaunch-SUCCEEDED").length;
  return figures;
}"""


def drawings(ranks: int) -> tuple[object, dict[str, object]]:
    """Return all that a page is sent of so many ranks, and what it is sent as they change."""
    made: dict[str, Any] = {}
    exec(MADE_UP, made)  # noqa: S102 - the code that the notebooks here run
    state = made["on_hosts"](ranks)
    drawing = Drawing(Header("cell"), 0.0)
    now = 0.0
    deltas: dict[str, Any] = {}

    def told(state):
        nonlocal now
        parts: dict[str, Any] = {}
        for _ in range(1000):  # within the budget of bytes it takes a while
            now += 100.0
            delta = drawing.changes(state, now)
            if delta is None:
                break
            parts |= delta["parts"]
        return parts

    told(state)
    whole = drawing.whole(0.0)
    failed = made["fails"](state, ranks - 3)
    usages = {rank: made["Usage"](50.0, 1 << 30, None, None) for rank in range(ranks)}
    measured = advance(failed, made["Measured"](usages=usages))
    steps = {"one": failed, "usage": measured, "all": made["ends"](measured)}
    for number, (name, each) in enumerate(steps.items(), whole["sequence"] + 1):
        deltas[name] = {"sequence": number, "parts": told(each), "log": None}
    return whole, deltas


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "one", "every"), [(1024, 100, 400), (8192, 300, 1500)])
def test_an_update_of_thousands_of_ranks_takes_a_moment(front, ranks, one, every):
    """Milliseconds, with room for a machine that is busy: alone it takes a third of them."""
    page = front.page.context.new_page()
    try:
        script = (VIEW / "panel.js").read_text(encoding="utf-8")
        css = (VIEW / "panel.css").read_text(encoding="utf-8")
        figures = page.evaluate(TIMES, [script, css, *drawings(ranks)])
    finally:
        page.close()
    print(
        f"{ranks} ranks: first drawing {figures['first']} ms; one rank {figures['one']} ms, usage of all "
        f"{figures['usage']} ms, states of all {figures['all']} ms"
    )
    assert figures["cells"] == ranks - 1, "one has failed"
    assert figures["one"] < one
    assert figures["all"] < every


WAIT = """
said = EngineStatus(
    engine="slurm", state=EngineState.WAITING, id="1729", words="PENDING", reason="Resources",
    place="priority 4294901757", starts=time.time() + 3600, joined=1, wanted=2,
)
state = advance(RunState.fresh(2), said)
shown = Shown(state)
shown.until("end", state)
shown.close(state)
"""


TABLE = """
from nblaunch.protocol.messages import Displayed
rows = "".join(f"<tr><td>{number}</td></tr>" for number in range(16))
state = on_hosts(2, 1)
for number in range(40):
    state = says(state, 0, f"line {number}")
state = advance(state, Displayed(rank=0, data={"text/html": f"<table>{rows}</table>"}))
shown = Shown(state)
shown.until("end", state)
shown.close(state)
"""
BELOW_THE_END = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"


def test_a_table_at_the_end_of_the_output_is_in_sight_though_it_is_loaded_later_and_nothing_follows(
    front, gate, eventually
):
    gate.wait("end")
    front.run(MADE_UP)
    front.start(TABLE)
    frame = front.panel.locator("iframe")
    eventually(lambda: frame.evaluate("(frame) => frame.offsetHeight > 200"), "it is loaded")
    eventually(lambda: front.output.evaluate(BELOW_THE_END) < 2, "the end is shown", 5)
    front.screenshot()


@pytest.mark.parametrize("theme", sampled([LIGHT, DARK], ci=1), ids=["light", "dark"])
def test_while_nodes_are_awaited_no_rank_is_shown(front, gate, theme):
    front.theme(theme)
    gate.wait("end")
    front.run(MADE_UP)
    front.start(WAIT)
    expect(front.panel).to_contain_text("waiting for slurm: job 1729 PENDING (Resources)")
    expect(front.panel).to_contain_text("The ranks are shown here once their nodes have come.")
    expect(front.panel.get_by_role("article")).to_have_count(0)
    expect(front.output).not_to_be_visible()
    front.screenshot(f"{theme.split()[-1].lower()}")
