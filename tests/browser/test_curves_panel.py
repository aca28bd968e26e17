"""What ranks log is drawn while the cell blocks: a band over the ranks, who is apart, each rank alone."""

from __future__ import annotations

import re

import pytest

from .front import expect

pytestmark = pytest.mark.once

# Rank 2 of 4 leaves the others at step 40; what is drawn is the same in each run.
TRAINING = """
%%distributed -n 4
import math
import nblaunch
for step in range(60):
    loss = 2 * math.exp(-step / 20) + 0.1 + 0.02 * math.sin(step + rank)
    nblaunch.log(step=step, loss=loss + (0.8 if rank == 2 and step >= 40 else 0), lr=1e-3 * (1 - step / 60))
    if step % 10 == 0:
        nblaunch.log({"val/accuracy": 0.5 + step / 150 + rank / 500}, step=step)
"""


def curves_of(front):
    """Return the charts in the panel, by name."""
    figures = front.panel.get_by_role("figure")
    return {name: figures.filter(has=front.page.get_by_text(name, exact=True)) for name in ("loss", "lr")}


# Of a drawing: the band over the ranks, and lines.
BAND, LINES = "path[fill-opacity]", "path[fill=none]"


def test_curves_are_live_with_a_band_a_log_scale_and_the_rank_that_is_apart(front, gate, looks_well):
    front.start(f"{TRAINING}{gate.wait()}")
    charts = curves_of(front)
    expect(charts["loss"].locator(BAND)).to_have_count(1)
    expect(charts["loss"].locator("svg")).to_contain_text("rank 2")
    words = front.panel.get_by_text(re.compile(r"loss .*mean of 4 ranks.*rank 2 apart: 0\.\d+"))
    expect(words).to_be_visible()
    expect(charts["lr"].locator("svg")).not_to_contain_text("rank 2")
    drawn = front.panel.get_by_role("figure")
    expect(drawn).to_have_text([re.compile(name) for name in ("loss", "lr", "val/accuracy")])
    looks_well(front.panel, "band", live=True)
    labels = charts["loss"].locator("svg").text_content
    linear = labels()
    scale = front.panel.get_by_role("button", name="Log scale")
    scale.focus()
    front.page.keyboard.press("Enter")
    expect(scale).to_have_attribute("aria-pressed", "true")
    assert labels() != linear
    each = front.panel.get_by_role("button", name="One line per rank")
    each.press("Enter")
    expect(charts["loss"].locator(LINES)).to_have_count(4)
    expect(charts["loss"].locator(BAND)).to_have_count(0)
    front.screenshot("ranks")
    assert front.is_running()
    gate.open()
    front.finished()
    expect(front.panel).to_have_count(0)
    drawings = front.outputs.last.get_by_role("img", name=re.compile("^loss: .*rank 2 apart"))
    expect(drawings).to_be_visible()
    looks_well(front.outputs.last.locator(".jp-RenderedHTMLCommon").first, "saved")


def test_a_run_that_logs_nothing_has_no_curves(front, gate):
    front.start(f"%%distributed -n 2\nprint('here')\n{gate.wait()}")
    expect(front.output).to_contain_text("here")
    expect(front.panel.get_by_text("Curves")).to_have_count(0)
    gate.open()
    front.finished()
    expect(front.outputs.last.get_by_text("Curves")).to_have_count(0)


@pytest.mark.slow
def test_many_ranks_send_a_line_each_only_when_it_is_asked_for(front, gate):
    front.start(f"""
        %%distributed -n 10
        import nblaunch
        for step in range(20):
            nblaunch.log(step=step, loss=1 / (step + 1) + rank / 100)
        {gate.wait()}
    """)
    chart = curves_of(front)["loss"]
    expect(chart.locator(LINES)).to_have_count(1)
    front.panel.get_by_role("button", name="One line per rank").click()
    expect(chart.locator(LINES)).to_have_count(10)
    gate.open()
    front.finished()
