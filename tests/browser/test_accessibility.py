"""axe-core finds nothing serious in the panel, live and static: in both themes, narrow, zoomed to 200 %."""

from __future__ import annotations

import pytest

from .front import expect

pytestmark = pytest.mark.once

COLOURS = r"""
import sys
for number, name in enumerate(["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"]):
    print(f"\x1b[3{number}m{name} \x1b[9{number}mbright \x1b[4{number}mbehind\x1b[0m")
print(f"from {rank}", file=sys.stderr)
"""
ENDS_BADLY = f"""
%%distributed -n 3
{COLOURS}
import torch.distributed as dist
if rank == 1:
    raise ValueError("no")
dist.barrier()
"""


def waiting(ranks: int, wait: str) -> str:
    return f"%%distributed -n {ranks}\n{COLOURS}\nif rank:\n    {wait}\n"


def test_nothing_serious_is_wrong_with_what_stays(front, looks_well):
    shown = front.run(ENDS_BADLY)
    expect(shown).to_contain_text("ValueError: no")
    looks_well(shown.locator(".jp-RenderedHTMLCommon").first, "failure")


HELD = """
%%distributed -n 2
import numpy
rows = [numpy.ones((500, 500)) for _ in range(4)]
if rank == 1:
    raise MemoryError("no room for the fifth")
"""


@pytest.mark.slow
def test_nothing_serious_is_wrong_with_what_held_the_memory(front, looks_well):
    shown = front.run(HELD)
    expect(shown).to_contain_text("the most of what rank 1 held")
    looks_well(shown.locator(".jp-RenderedHTMLCommon").first, "memory")


@pytest.mark.slow_at("lab-2", "2")
@pytest.mark.parametrize("ranks", [2, 10])
def test_nothing_serious_is_wrong_with_the_live_panel(front, looks_well, gate, ranks):
    front.start(waiting(ranks, gate.wait()))
    expect(front.output).to_contain_text("from 1")
    looks_well(front.panel, str(ranks), live=True)
    gate.open()
    front.finished()
