"""The profile of a run as it stays in the notebook: a table of steps and a timeline."""

from __future__ import annotations

import pytest

from .front import expect

pytestmark = pytest.mark.once

CELL = """
%%distributed -n 4 --profile
import time, torch, torch.distributed as dist, nblaunch
weights, gradients = torch.ones(256, 256), torch.ones(200_000)
for _ in range(6):
    nblaunch.step()
    for _ in range(20):
        weights @ weights
    if rank == 2:
        time.sleep(0.02)
    dist.all_reduce(gradients)
"""


def test_the_timeline_names_who_is_late_and_has_a_strip_for_each_rank(front, looks_well):
    shown = front.run(CELL)
    expect(shown).to_contain_text("Profile: 4 ranks, 6 steps")
    drawing = shown.get_by_role("img", name="Timeline of steps")
    expect(drawing).to_be_visible()
    for rank in range(4):
        expect(drawing.get_by_text(f"rank {rank}", exact=True)).to_be_visible()
    for kind in ("compute", "communication", "waiting", "idle"):
        expect(drawing.get_by_text(kind, exact=True)).to_be_visible()
    table = shown.get_by_role("table").last
    expect(table.get_by_role("columnheader", name="straggler")).to_be_visible()
    expect(table).to_contain_text("rank 2")
    expect(table).to_contain_text("late at all_reduce")
    assert shown.locator("script").count() == 0
    looks_well(shown.locator(".jp-RenderedHTMLCommon").first, "profile")
