"""The peak of each rank's GPU memory, in the panel as soon as the rank has ended and in what stays."""

from __future__ import annotations

import re

import pytest

from .front import expect

pytestmark = pytest.mark.once

# There is no GPU here: the allocator's numbers are made up, all that follows is real.
ALLOCATED = """
%%distributed -n 3
import torch
torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.reset_peak_memory_stats = lambda _: None
peak = {"all": {"peak": (rank + 1) * 23 * 2**30 // 10}}
torch.cuda.memory_stats_as_nested_dict = lambda _: {"allocated_bytes": peak}
"""


def test_the_peak_is_beside_what_a_rank_uses_and_stays(front, gate, looks_well):
    front.start(f"{ALLOCATED}if rank == 2:\n    {gate.wait()}\nrank * 10")
    cards = [front.panel.get_by_role("article", name=f"Rank {rank}", exact=True) for rank in range(3)]
    expect(cards[0]).to_contain_text("GPU peak 2.3 GiB")
    expect(cards[1]).to_contain_text("GPU peak 4.6 GiB")
    expect(cards[2]).to_contain_text(re.compile(r"CPU \d+ %"))
    expect(cards[2]).not_to_contain_text("GPU peak")
    for card in cards:
        usage = card.locator(".nblaunch-usage")
        assert usage.evaluate("(line) => line.scrollWidth <= line.clientWidth"), "cut off"
    looks_well(front.panel, "running", live=True)
    gate.open()
    front.finished()
    table = front.outputs.last.get_by_role("table").first
    expect(table.get_by_role("columnheader", name="GPU peak")).to_be_visible()
    expect(table.get_by_role("cell", name="6.9 GiB")).to_be_visible()
    front.screenshot("ended")
