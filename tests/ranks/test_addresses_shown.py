"""A failure of ours shows the address of the page about it once; the saved HTML has it as a link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "notebooks/docs/failures.md").read_text()

# By the name of its section: the cell, and which error it raises.
CELLS = {
    "cannot-be-sent": (
        "CaptureError",
        """
        import threading
        class Part: pass
        model = Part()
        model.trainer = Part()
        model.trainer._lock = threading.Lock()
        get_ipython().run_cell_magic("distributed", "-n 2", "model.trainer")
        """,
    ),
    "unknown-option": ("OptionError", "%%distributed -n 2 --timout 5\n1"),
    "killed": (
        "RunFailedError",
        """
        %%distributed -n 2
        import os, signal, torch.distributed as dist
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        """,
    ),
    "hang": (
        "RunTimeoutError",
        """
        %%distributed -n 2 --timeout 3
        import torch.distributed as dist
        if rank == 0:
            dist.barrier()
        else:
            import time; time.sleep(60)
        """,
    ),
    "exited": (
        "RunFailedError",
        """
        %%distributed -n 2
        import os
        if rank == 1:
            os._exit(3)
        """,
    ),
    "desync": (
        "RunFailedError",
        """
        %%distributed -n 2 --watch desync
        import torch, torch.distributed as dist
        t = torch.ones(4 if rank == 0 else 5)
        dist.all_reduce(t)
        """,
    ),
}
QUICK = ("cannot-be-sent", "killed")
"""These take no second together on warm ranks."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CELLS]
)
def test_a_cell_shows_the_address_once_links_to_it_and_says_the_words_of_the_page(kernel, name):
    ename, code = CELLS[name]
    ran = kernel.run(code)
    address = f"https://nblaunch.github.io/e/{name}"
    assert ran.error is not None
    assert ran.error.ename == ename
    assert address not in ran.error.evalue, "the text of the error is for programs"
    assert ran.error.traceback.rstrip().endswith(f"\nMore: {address}")
    html = "".join(each.get("text/html", "") for each in ran.displays)
    texts = [ran.error.traceback, ran.stdout, ran.stderr]
    texts += [each.get("text/plain", "") for each in ran.displays] + [re.sub(r"<[^>]*>", "", html)]
    assert "".join(texts).count("nblaunch.github.io") == 1
    assert html.count(f'<a href="{address}" ') == bool(html)
    # What the page has pasted is what is shown, but for what the system counts.
    # Which of two ranks is the first to find a difference, the clock decides.
    first = re.sub(r"\(.*?\)", "", ran.error.evalue.splitlines()[0]).rpartition(" failed: ")[2]
    assert first in re.sub(r"\(.*?\)", "", PAGE)


def test_an_exception_of_the_cell_needs_no_address(kernel):
    ran = kernel.run("%%distributed -n 2\nraise ValueError('mine')")
    assert ran.error is not None
    shown = [ran.error.traceback, ran.stdout, *(str(each) for each in ran.displays)]
    assert "nblaunch.github.io" not in "".join(shown)


def test_without_check_the_report_has_the_address(kernel):
    code = "%%distributed -n 2 --out res\nimport os\nif rank == 1:\n    os.kill(os.getpid(), 9)"
    kernel.fails(code)
    told = kernel.value("[res.report().to_dict()['help'], res.report().to_markdown()]")
    assert told[0] == "https://nblaunch.github.io/e/killed"
    assert "- more: <https://nblaunch.github.io/e/killed>" in told[1]
    assert kernel.value("res.root_cause.kind") == "killed"
