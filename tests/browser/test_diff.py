"""`%distributed diff` in the notebook: a table."""

from __future__ import annotations

import pytest

from .front import expect

pytestmark = pytest.mark.once

SETUP = """
%%distributed
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5))
label = f"<script>document.title = 'broken'</script> $x$ {rank == 1}"
if rank == 1:
    model[2].weight.data[4, 17] += 0.25
step = 7
"""


@pytest.fixture(autouse=True)
def session_is_closed(front):
    """Leave the notebook without a session: cells of other files have ranks of their own."""
    yield
    front.run("%distributed stop")


def test_the_ranks_that_differ_are_in_a_table(front, looks_well):
    shown = front.run("%distributed start -n 3", SETUP, "%distributed diff model step label")
    table = shown.get_by_role("table").last
    expect(table).to_contain_text("model.2.weight[4, 17]")
    expect(table).to_contain_text("ranks 0,2 agree; rank 1 differs")
    expect(table).to_contain_text("✓ equal")
    expect(table).to_contain_text("<script>document.title = 'broken'</script> $x$ True")
    assert "broken" not in front.page.title()
    looks_well(shown.locator(".jp-RenderedHTMLCommon").first, "diff")
