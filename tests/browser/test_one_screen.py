"""However many ranks there are, what is alike stands once: the result and the panel fit one screen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from .front import DARK, Front, Locator, expect
from .test_host_map import MADE_UP

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

pytestmark = pytest.mark.once

SCREEN: ViewportSize = {"width": 1000, "height": 800}
USUAL: ViewportSize = {"width": 1200, "height": 1000}
NARROW = {"width": 400, "height": 800}
# There is no machine for so many here: the ranks are made up, the view and the page are real.
RANKS = """
def ran(ranks, failed=None):
    state = on_hosts(ranks, ranks, name="box", started=False)
    for rank in range(ranks):
        state = advance(state, Started(rank=rank, time=1.0))
    for rank in range(ranks):
        state = says(state, rank, "epoch 3: loss 0.125")
    usages = {rank: Usage(88.0 + rank % 9, 231 + rank % 10 << 20, None, None) for rank in range(ranks)}
    state = advance(state, Measured(usages=usages))
    return state if failed is None else fails(state, failed)

def saved(state):
    from nblaunch.view.display import html_and_text, _display
    _display(html_and_text(ends(state), Header("cell", "gloo")))
"""
LIVE = """
state = ran({ranks})
shown = Shown(state)
shown.until("first", state)
state = fails(state, 37)
shown.until("end", state)
shown.close(state)
"""


def height(part: Locator) -> float:
    box = part.bounding_box()
    assert box is not None
    return float(box["height"])


@pytest.fixture
def screen(front: Front):
    """Give a page whose outputs are as wide as its window of 1,000 by 800."""
    front.page.set_viewport_size(SCREEN)
    if front.name == "lab":
        front.command("application:toggle-left-area")
    front.run(MADE_UP, RANKS)
    yield front
    if front.name == "lab":
        front.command("application:toggle-left-area")
    front.page.set_viewport_size(USUAL)


def test_the_result_of_64_and_of_1024_equal_ranks_is_one_screen(screen):
    for ranks in (64, 1024):
        shown = screen.run(f"saved(ran({ranks}))")
        row = shown.get_by_role("row", name=re.compile(f"^0-{ranks - 1} "))
        expect(row).to_contain_text("✓ SUCCEEDED")
        expect(row).to_contain_text("7")
        screen.screenshot(str(ranks))
        assert height(shown) <= SCREEN["height"]
        failed = screen.run(f"saved(ran({ranks}, failed=37))")
        top = failed.bounding_box()
        for part in (
            failed.get_by_text("Root cause: rank 37:"),
            failed.get_by_role("row", name="37", exact=False),
        ):
            box = part.first.bounding_box()
            assert box["y"] + box["height"] - top["y"] <= SCREEN["height"]
        screen.screenshot(f"{ranks}-failed")


def test_64_ranks_live_are_one_screen_and_rows_unfold_with_the_keyboard_alone(screen, axe, gate):
    gate.wait("first")
    gate.wait("end")
    screen.start(LIVE.format(ranks=64))
    expect(screen.panel.get_by_role("row", name="ranks 0 to 63: running", exact=True)).to_be_visible()
    together = screen.panel.get_by_role("button", name="0-63", exact=True)
    expect(screen.panel.get_by_role("table")).to_contain_text(re.compile(r"CPU 88-96 % · 231-240 MiB"))
    assert height(screen.panel) <= SCREEN["height"]
    screen.command("notebook:enter-command-mode")
    together.focus()
    expect(together).to_have_attribute("aria-expanded", "false")
    screen.page.keyboard.press("Enter")
    expect(together).to_have_attribute("aria-expanded", "true")
    each = screen.panel.get_by_role("list", name=re.compile("^Each of ranks 0 to")).get_by_role("listitem")
    expect(each).to_have_count(64)
    expect(each.nth(5)).to_contain_text("rank 5 · ")
    gate.open("first")
    expect(screen.panel.get_by_role("row", name="rank 37: failed", exact=True)).to_be_visible()
    # The group has gone on: open, with the focus, and without the rank that has left it.
    expect(screen.panel.get_by_role("row", name="ranks 0 to 36, 38 to 63: running")).to_be_visible()
    expect(screen.panel.get_by_role("button", name="0-36,38-63")).to_be_focused()
    expect(each).to_have_count(63)
    screen.theme(DARK)
    screen.screenshot("dark")
    assert axe(screen.panel) == []
    screen.page.keyboard.press(" ")
    expect(each).to_have_count(0)
    screen.page.set_viewport_size(NARROW)
    screen.screenshot("narrow")
    assert screen.panel.evaluate("(panel) => panel.scrollWidth <= panel.clientWidth")


def test_1024_ranks_live_are_one_screen_and_the_one_that_failed_is_on_it(screen, gate):
    gate.wait("first")
    gate.wait("end")
    screen.start(LIVE.format(ranks=1024))
    expect(screen.panel.get_by_role("row", name="ranks 0 to 1023: running")).to_be_visible()
    assert height(screen.panel) <= SCREEN["height"]
    gate.open("first")
    alone = screen.panel.get_by_role("row", name="rank 37: failed")
    expect(alone).to_be_visible()
    top, row = screen.panel.bounding_box(), alone.bounding_box()
    assert row["y"] + row["height"] - top["y"] <= SCREEN["height"]
    screen.screenshot("failed")
