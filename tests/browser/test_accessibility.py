"""axe-core finds nothing serious in the panel: live and static, in a light and in a dark theme."""

from __future__ import annotations

import pytest

from .front import DARK, LIGHT, expect

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


themes = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])


@themes
def test_nothing_serious_is_wrong_with_what_stays(front, axe, theme):
    front.theme(theme)
    shown = front.run(ENDS_BADLY)
    expect(shown).to_contain_text("ValueError: no")
    assert axe(shown.locator(".jp-RenderedHTMLCommon").first) == []


@themes
@pytest.mark.parametrize("ranks", [2, 10])
def test_nothing_serious_is_wrong_with_the_live_panel(front, axe, gate, theme, ranks):
    front.theme(theme)
    front.start(waiting(ranks, gate.wait()))
    expect(front.output).to_contain_text("from 1")
    front.screenshot(f"{ranks}-{theme.split()[-1].lower()}")
    assert axe(front.panel) == []
    gate.open()
    front.finished()
