"""The notebooks are saved as a reader should find them; that they still run so is checked by nbval."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    """Give each saved notebook."""
    return nbformat.read(request.param, as_version=4)


def test_a_saved_notebook_was_run_once_from_top_to_bottom(notebook):
    """nbval lets a cell without saved output pass, whatever it shows now."""
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_a_saved_notebook_shows_its_runs_without_a_kernel(notebook):
    runs = [cell for cell in notebook.cells if cell.source.startswith("%%distributed")]
    runs = [cell for cell in runs if "--background" not in cell.source]  # shown where it is waited for
    assert runs
    for cell in runs:
        (shown,) = [each for each in cell.outputs if each.output_type == "display_data"]
        assert set(shown.data) == {"text/html", "text/plain"}


def test_a_saved_notebook_holds_nothing_of_the_machine_it_was_run_on(notebook):
    outputs = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert re.findall(r"/(?:home|root|tmp|Users)/[^\s\"]*|site-packages", outputs) == []


def test_a_saved_notebooks_text_has_lines_and_no_escapes_of_them(notebook):
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert [text for text in texts if "\\n" in text] == []
