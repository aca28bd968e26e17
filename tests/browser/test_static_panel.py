"""What stays when a run has ended: static HTML, also in a notebook that is opened without a kernel."""

from __future__ import annotations

import nbformat
import pytest

from .front import DARK, expect

EVERYTHING = r"""
%%distributed -n 2
import sys
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import HTML, Math, display
from tqdm import tqdm

for _ in tqdm(range(20), desc="bar"):
    pass
print("both say this")
print(f"\x1b[32mgreen from {rank}\x1b[0m")
print("a warning", file=sys.stderr)
print("<script>document.title = 'broken'</script>")
if rank == 1:
    figure, axis = plt.subplots(figsize=(3, 2))
    axis.plot([1, 3, 2])
    display(figure)
    plt.close(figure)
    display(HTML("<b>bold</b>"), Math(r"\frac{a}{b}"))
pd.DataFrame({"step": [1, 2], "loss": [0.5, 0.25]})
"""
FAILS = """
%%distributed -n 3
import torch.distributed as dist
names = {3: "three"}
if rank == 1:
    print("this is a", names[7])
dist.barrier()
"""


@pytest.mark.once
def test_a_run_with_everything_is_shown_when_it_has_ended(front):
    shown = front.run(EVERYTHING)
    expect(shown).to_contain_text("SUCCEEDED")
    expect(shown).to_contain_text("green from 1")
    expect(shown.locator("img")).to_have_count(1)
    expect(shown.get_by_role("table").last).to_contain_text("0.25")
    expect(shown).to_contain_text("<script>document.title = 'broken'</script>")
    assert "broken" not in front.page.title()


@pytest.mark.once
def test_a_failure_names_its_rank_its_line_and_who_was_stopped(front):
    shown = front.run(FAILS)
    html = shown.locator(".jp-RenderedHTMLCommon").first
    expect(html).to_contain_text("FAILED")
    expect(html).to_contain_text("KeyError: 7")
    expect(html).to_contain_text('print("this is a", names[7])')
    expect(html).to_contain_text("STOPPED")
    # What the notebook itself shows of the error that the cell raised.
    expect(shown.locator(".jp-RenderedText").last).to_contain_text("RunFailedError")


@pytest.mark.slow
@pytest.mark.once
def test_the_end_is_readable_in_a_dark_theme(front):
    front.theme(DARK)
    shown = front.run(EVERYTHING)
    expect(shown).to_contain_text("green from 1")


@pytest.mark.slow_at("notebook7")
def test_a_saved_notebook_of_somebody_else_shows_its_runs_without_a_kernel(front):
    front.run(EVERYTHING)
    path = front.save()
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    assert [set(each.data) for each in notebook.cells[0].outputs] == [{"text/html", "text/plain"}]
    notebook.metadata = {"kernelspec": {"name": "elsewhere", "display_name": "Elsewhere"}}
    # A server trusts what it has signed, and that is the content: this is not it any more.
    notebook.cells[0].outputs[0].metadata["from"] = "elsewhere"
    copy = path.with_name(f"copy-{front.name}.ipynb")
    nbformat.write(notebook, copy)
    with front.reopened(copy.name, "reopened") as shown:
        expect(shown).to_contain_text("SUCCEEDED")
        expect(shown).to_contain_text("green from 1")
        expect(shown).to_contain_text("a warning")
        expect(shown.locator("img")).to_have_count(1)
        expect(shown.get_by_role("table").last).to_contain_text("0.25")
        expect(shown).to_contain_text("<script>document.title = 'broken'</script>")
        expect(shown.locator("details")).not_to_have_count(0)
