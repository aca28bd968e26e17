"""What other tools make of a run: those that execute notebooks, and those that show saved ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import nh3
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

RUNS = [
    "%load_ext nblaunch",
    # Longer than the time after which a live panel is opened.
    """
%%distributed -n 2
import sys, time
import matplotlib.pyplot as plt
import pandas as pd
time.sleep(0.3)
print("both say this")
print(f"\\x1b[31mred from {rank}\\x1b[0m & <script>alert(1)</script>")
print("a warning", file=sys.stderr)
if rank == 1:
    figure, axis = plt.subplots(figsize=(2, 1))
    axis.plot([1, 3, 2])
    plt.show()
pd.DataFrame({"step": [1, 2], "loss": [0.5, 0.25]})
""",
    """
%%distributed -n 3
import torch.distributed as dist
names = {3: "three"}
if rank == 1:
    print("this is a", names[7])
dist.barrier()
""",
]
SHOWN = [
    "SUCCEEDED",
    "both say this",
    "red from 0 & <script>alert(1)</script>",
    "red from 1 & <script>alert(1)</script>",
    "a warning",
    "0.25",
    "Root cause: rank 1",
    "KeyError: 7",
    'print("this is a", names[7])',
    "STOPPED",
]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

# What GitHub keeps of HTML that is not its own: no style, no script, few attributes. The names are those of
# https://github.com/gjtorikian/html-pipeline/blob/main/lib/html_pipeline/sanitization_filter.rb
GITHUB_TAGS = """
    h1 h2 h3 h4 h5 h6 br b i strong em a pre code img tt div ins del sup sub p picture ol ul table thead tbody
    tfoot blockquote dl dt dd kbd q samp var hr ruby rt rp li tr td th s strike summary details caption figure
    figcaption abbr bdo cite dfn mark small span time wbr
"""
GITHUB_ATTRIBUTES = "align alt border colspan dir height href open rowspan scope src title width"


class Words(HTMLParser):
    """The words that a reader of some HTML sees, and the elements that they stand in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self._hidden = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - see the base
        self.tags.append(tag)
        self._hidden += tag in {"script", "style"}
        if tag in {"div", "pre", "summary", "td", "th", "tr"}:  # each stands apart from what is before it
            self.text += " "

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in {"script", "style"}

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data


def words(html: str) -> str:
    """Return what a reader sees, with every run of white space as one blank."""
    return " ".join(Words(html).text.split())


def notebook_of(*sources: str) -> Any:
    cells = [new_code_cell(source.strip(), id=f"cell-{number}") for number, source in enumerate(sources)]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def run_command(*arguments: str, where: Path, code: int) -> None:
    """Run a Jupyter command of this environment, which is to exit with `code`."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "PYTEST_CURRENT_TEST": ""}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stderr


@pytest.fixture(scope="module")
def executed(kernel_client, tmp_path_factory):  # noqa: ARG001 - before any test looks for leftovers
    """Give the notebook after nbclient has executed it, with the failure of its last cell."""
    notebook = notebook_of(*RUNS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTEST_CURRENT_TEST", "")  # with the panel, as a user's kernel
        where = str(tmp_path_factory.mktemp("nbclient"))
        NotebookClient(
            notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": where}}
        ).execute()
    return notebook


def shown(notebook: Any) -> list[list[dict[str, Any]]]:
    """Return what each run shows by MIME type, but for how long it took."""
    cells = [cell for cell in notebook.cells if "%%distributed" in cell.source]
    return [
        [
            {kind: re.sub(r" · \d+\.\d s(?=</div>)", "", text) for kind, text in each.data.items()}
            for each in cell.outputs
            if "data" in each
        ]
        for cell in cells
    ]


def test_nbclient_gets_one_display_of_html_and_text_for_each_run(executed):
    assert [[set(each) for each in run] for run in shown(executed)] == [[{"text/html", "text/plain"}]] * 2
    assert executed.cells[2].outputs[-1].ename == "RunFailedError"
    both = " ".join(words(run[0]["text/html"]) for run in shown(executed))
    assert [each for each in SHOWN if each not in both] == []


def test_what_is_saved_is_small_and_holds_no_widget_in_its_outputs(executed):
    written = nbformat.writes(executed)
    assert "widget-view" not in written
    # Most of it is the panel's own script, which Jupyter keeps with the state of a widget.
    assert len(written) < 210_000


@pytest.mark.slow_at("jupyter execute")
@pytest.mark.parametrize("tool", ["jupyter execute", "papermill"])
def test_other_tools_save_the_same_as_nbclient(executed, tmp_path, tool):
    nbformat.write(notebook_of(*RUNS), tmp_path / "in.ipynb")
    if tool == "papermill":
        run_command("papermill", "in.ipynb", "out.ipynb", where=tmp_path, code=1)
    else:
        run_command(
            "jupyter", "execute", "--output=out.ipynb", "--allow-errors", "in.ipynb", where=tmp_path, code=0
        )
    saved = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    assert shown(saved) == shown(executed)


def test_nbconvert_makes_a_page_that_reads_without_a_kernel(executed):
    page, _ = HTMLExporter(template_name="lab").from_notebook_node(executed)
    assert [each for each in SHOWN if each not in words(page)] == []
    assert Words("".join(run[0]["text/html"] for run in shown(executed))).tags.count("img") == 1
    assert "<script>alert(1)" not in page


def as_on_github(html: str) -> str:
    """Return what GitHub keeps of some HTML."""
    return nh3.clean(
        html,
        tags=set(GITHUB_TAGS.split()),
        attributes={"*": set(GITHUB_ATTRIBUTES.split())},
        url_schemes={"http", "https", "data"},
    )


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_saved_notebook_loses_nothing_but_drawings_on_github_and_each_has_words_beside_it(path):
    notebook = nbformat.read(path, as_version=4)
    # GitHub shows no notebook whose widgets have an incomplete state.
    assert "widgets" not in notebook.metadata
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    for html in filter(None, (each.get("data", {}).get("text/html") for each in outputs)):
        kept = as_on_github(html)
        drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
        assert words(kept) == words(re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL))
        for label in re.findall(r'aria-label="([^"]+)"', " ".join(drawings)):
            name, _, numbers = unescape(label).partition(": ")
            assert name in words(kept)
            assert numbers in words(kept) or "for each" in numbers


def test_html_that_is_sanitised_as_on_github_still_reads(executed):
    for ((run,),) in zip(shown(executed), strict=True):
        kept = as_on_github(run["text/html"])
        assert "style=" not in kept
        assert ('<em title="stderr">a warning</em>' in kept) == ("a warning" in kept)
        assert words(kept) == words(run["text/html"])
        # pandas puts a style sheet before each of its tables.
        assert Words(kept).tags == [tag for tag in Words(run["text/html"]).tags if tag != "style"]


def test_the_text_form_of_each_run_is_complete(executed):
    text = "\n".join(run[0]["text/plain"] for run in shown(executed))
    assert "[ranks 0-1] both say this" in text
    assert "[rank 1] red from 1 & <script>alert(1)</script>" in text
    assert "KeyError: 7 (cell line 5)" in text
