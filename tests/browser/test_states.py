"""Twelve states of a run, live and saved side by side: what is saved says what the panel said.

The pictures are `state-NAME-light.png` and `state-NAME-dark.png` in `screenshots`: on the left the panel.
"""

from __future__ import annotations

import base64
import re

import pytest

from .conftest import SCREENSHOTS
from .front import DARK, LIGHT, PATIENCE_WITH_PAGES, Locator, expect

pytestmark = pytest.mark.slow

# (options, code before the gate, words that the panel shows by then)
STATES = {
    "silence": ("-n 2", "", "RUNNING"),
    "output": ("-n 4", "print('epoch 3')\nif rank < 2:\n    print(f'loss 0.{31 - 2 * rank}')", "epoch 3"),
    "progress": (
        "-n 2",
        "from tqdm import tqdm\nfor _ in tqdm(range(40 + rank), desc='training', mininterval=0):\n    pass",
        "training: 100%",
    ),
    "displays": (
        "-n 2",
        """
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display
if rank == 1:
    figure, axis = plt.subplots(figsize=(4, 2))
    axis.plot([3, 1, 0.5, 0.3])
    display(figure)
    plt.close(figure)
display(pd.DataFrame({"step": [1, 2], "loss": [0.5, 0.25]}))""",
        "[ranks 0-1]",
    ),
    "stderr": (
        "-n 2",
        """
import sys, warnings
warnings.warn("few samples")
print("no checkpoint yet", file=sys.stderr)
print("out")""",
        "no checkpoint yet",
    ),
    "curves": (
        "-n 4",
        """
import math, nblaunch
for step in range(60):
    loss = 2 * math.exp(-step / 20) + 0.1 + 0.02 * math.sin(step + rank)
    apart = rank == 2 and step >= 40
    nblaunch.log(step=step, loss=loss + 0.8 * apart, lr=1e-3 * (1 - step / 60))""",
        "rank 2 apart",
    ),
    "failure": (
        "-n 3 --grace 20",
        """
import signal
names = {3: "three"}
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: None)
if rank == 1:
    print("this is a", names[7])""",
        "KeyError: 7",
    ),
    "restart": (
        "-n 2 --max-restarts 1",
        """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
    raise ValueError("the first attempt")
print("the second attempt")""",
        "the second attempt",
    ),
    "hang": (
        "-n 2 --hang-after 1",
        "import torch, torch.distributed as dist\nif rank == 0:\n    dist.all_reduce(torch.ones(1))",
        "which rank 1 has not started",
    ),
    "values": ("-n 2", "loss = 0.1 + 0.2 + rank\nprint('done')", "done"),
    "many": ("-n 64 --no-init", "print('hello')\nif rank == 63:\n    print('and from me')", "and from me"),
    "nodes": ("-n 2 --nnodes 2 --on process", "print('on node', rank // 2)", "on node 1"),
}
ENDS = {
    "values": "{'loss': loss, 'rank': rank}",
    "hang": "if rank == 1:\n    dist.all_reduce(torch.ones(1))",
    "silence": "None",
}
PAIR = """
<body style="margin: 0; display: flex; gap: 24px; align-items: flex-start; background: %s">
<img src="data:image/png;base64,%s"><img src="data:image/png;base64,%s"></body>
"""


def words_of(part: Locator) -> set[str]:
    """Return the words in a part of the page, but for numbers that go on: times, shares of a CPU."""
    return set(re.findall(r"[A-Za-z][\w.'%]{2,}", part.inner_text()))


@pytest.fixture
def photographed(front):
    """Give `take(part)`: pictures of a part of the page, by theme."""

    def take(part: Locator) -> dict[str, bytes]:
        pictures = {}
        for name, theme in {"light": LIGHT, "dark": DARK}.items():
            front.theme(theme)
            part.scroll_into_view_if_needed()
            pictures[name] = part.screenshot()
        front.theme()
        return pictures

    return take


def side_by_side(front, name: str, live: dict[str, bytes], saved: dict[str, bytes]) -> None:
    page = front.page.context.new_page()
    for shade, paper in {"light": "#fff", "dark": "#111"}.items():
        pair = (base64.b64encode(each[shade]).decode() for each in (live, saved))
        page.set_viewport_size({"width": 2200, "height": 900})
        page.set_content(PAIR % (paper, *pair))
        page.locator("body").screenshot(path=SCREENSHOTS / f"state-{name}-{shade}.png")
    page.close()


@pytest.mark.slow_at("notebook7")
@pytest.mark.parametrize("name", STATES)
def test_what_is_saved_of_a_state_says_what_the_panel_said(front, gate, photographed, name):
    options, code, seen = STATES[name]
    front.start(f"%%distributed {options}\n{code}\n{gate.wait()}\n{ENDS.get(name, '')}")
    expect(front.panel).to_contain_text(seen, timeout=PATIENCE_WITH_PAGES)
    live, said = photographed(front.panel), words_of(front.output) if name != "silence" else set()
    gate.open()
    front.finished(PATIENCE_WITH_PAGES)
    expect(front.panel).to_have_count(0)
    shown = front.outputs.last.locator(".jp-RenderedHTMLCommon").first
    side_by_side(front, name, live, photographed(shown))
    assert said - words_of(shown) == set()
