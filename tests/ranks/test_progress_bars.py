"""A progress bar in a rank is text, and one live line, whichever way it is imported."""

from __future__ import annotations

import re
import time
from importlib.metadata import PackageNotFoundError, version

import pytest

from nblaunch.client.preparation import prepare_call
from nblaunch.client.run import SilentView, run_fresh
from nblaunch.options.launch import LaunchOptions
from nblaunch.view.output import items_of, last_line
from nblaunch.view.screen import Line

pytest.importorskip("tqdm")

try:
    RICH = int(version("rich").partition(".")[0])
except PackageNotFoundError:
    RICH = 0
NEEDS_RICH = pytest.mark.skipif(RICH < 14, reason="rich 14 is the first that can be told to draw")

IMPORTS = ["from tqdm import tqdm", "from tqdm.auto import tqdm", "from tqdm.notebook import tqdm"]
WIDGET = "application/vnd.jupyter.widget-view+json"


class Watching(SilentView):
    """Keeps the last line of each rank, and how many lines there are, at every draw."""

    def __init__(self):
        self.seen = {0: [], 1: []}
        self.final = None

    def draw(self, state):
        for rank, known in state.ranks.items():
            self.seen[rank].append((last_line(known.transcript), lines_of(known)))

    def close(self, state):
        self.final = state


def lines_of(known):
    return [item.text for item in items_of(known.transcript) if isinstance(item, Line)]


def watched(job, *args):
    view = Watching()
    run_fresh(prepare_call(job, args, None, LaunchOptions(nproc_per_node=2)), view).unwrap()
    return view


def with_tqdm(statement):
    names = {}
    exec(statement, names)  # noqa: S102 - one of IMPORTS
    for _ in names["tqdm"](range(25), desc="epoch", mininterval=0.01):
        time.sleep(0.05)


def with_rich():
    from rich.progress import track

    for _ in track(range(25), description="epoch"):
        time.sleep(0.05)


def with_two_rich_bars():
    from rich.progress import Progress

    with Progress() as progress:
        outer, inner = progress.add_task("outer", total=4), progress.add_task("inner", total=5)
        for _ in range(4):
            progress.reset(inner)
            for _ in range(5):
                time.sleep(0.05)
                progress.advance(inner)
            progress.advance(outer)


def is_live(view, rank):
    """Return whether a rank's bar was seen to grow on its one line."""
    drawn = [last for last, lines in view.seen[rank] if lines]
    percents = [int(found[1]) for each in drawn if (found := re.search(r"(\d+)%", each))]
    assert percents == sorted(percents)
    assert max(len(lines) for _, lines in view.seen[rank]) == 1
    return len(set(percents)) > 2


@pytest.mark.parametrize("statement", IMPORTS)
def test_a_tqdm_bar_grows_on_one_line_of_its_rank(statement):
    view = watched(with_tqdm, statement)
    for rank in (0, 1):
        assert is_live(view, rank)
        (line,) = lines_of(view.final.ranks[rank])
        assert line.startswith("epoch: 100%|██████████| 25/25 [")
        assert view.final.ranks[rank].transcript.displays == ()


@NEEDS_RICH
def test_a_rich_bar_grows_on_one_line_of_its_rank():
    view = watched(with_rich)
    for rank in (0, 1):
        assert is_live(view, rank)
        (line,) = lines_of(view.final.ranks[rank])
        assert re.fullmatch(r"epoch ━+ 100% 0:00:0\d", line.strip())


@NEEDS_RICH
def test_two_rich_bars_are_two_lines():
    view = watched(with_two_rich_bars)
    for rank in (0, 1):
        assert max(len(lines) for _, lines in view.seen[rank]) == 2
        outer, inner = lines_of(view.final.ranks[rank])
        assert re.match(r"outer ━+ 100%", outer)
        assert re.match(r"inner ━+ 100%", inner)


@pytest.mark.parametrize("statement", IMPORTS)
def test_a_bar_in_a_cell_makes_no_widget_and_no_warning(kernel, statement):
    """Also where the cell has loaded what makes tqdm believe that it is in a notebook."""
    ran = kernel.ok(
        f"""
        %%distributed -n 2 --out res
        import ipykernel.zmqshell, ipywidgets, os, warnings
        warnings.simplefilter("always")
        {statement}
        for _ in tqdm(range(3), desc="epoch of " + os.environ["RANK"], leave=True):
            pass
        """
    )
    assert kernel.value("[len(rank.displays) for rank in res.ranks]") == [0, 0]
    assert WIDGET not in str(ran.displays)
    lines = ran.displays[0]["text/plain"].splitlines()
    shown = [line.partition("|")[0] for line in lines]
    assert shown == [f"[rank {rank}] epoch of {rank}: 100%" for rank in (0, 1)]
    assert "arning" not in str(ran)


def test_a_bar_that_the_notebook_has_imported_is_text_in_the_ranks_and_a_widget_in_the_notebook(kernel):
    kernel.ok("from tqdm.notebook import tqdm, trange")
    kernel.ok(
        """
        %%distributed -n 2 --out res
        for _ in tqdm(trange(3, display=False), disable=True):
            pass
        """
    )
    assert [each.count("100%|") for each in kernel.value("[rank.stderr for rank in res.ranks]")] == [1, 1]
    ran = kernel.ok("list(tqdm(range(3)));")
    assert WIDGET in ran.displays[0]


def test_a_widget_that_a_rank_displays_is_its_text(kernel):
    kernel.ok(
        """
        %%distributed -n 1 --out res
        import ipywidgets
        display(ipywidgets.IntSlider(value=7))
        """
    )
    (data,) = kernel.value("[each.data for each in res.ranks[0].displays]")
    assert list(data) == ["text/plain"]
    assert data["text/plain"].startswith("IntSlider(value=7")


def test_an_environment_that_says_how_rich_is_to_draw_is_respected(kernel):
    kernel.ok("import os; os.environ['TTY_COMPATIBLE'] = '0'")
    kernel.ok(
        """
        %%distributed -n 1 --out res
        import os
        [os.environ[f"TTY_{name}"] for name in ("COMPATIBLE", "INTERACTIVE")]
        """
    )
    assert kernel.value("res[0]") == ["0", "1"]
    kernel.ok("del os.environ['TTY_COMPATIBLE']")
