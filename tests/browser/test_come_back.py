"""The page is loaded again, or opened twice, while a cell runs: the panel is there, and then the result."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import nbformat
import pytest
from patience import eventually

from .front import DARK, Front, Locator, expect
from .test_live_panel import cell

SOON = 2_000
"""Milliseconds after the notebook is on the page within which a panel that was live is live again."""
WIDGET = "application/vnd.jupyter.widget-view+json"

notices_pages = pytest.mark.skipif(
    int(version("ipykernel").split(".")[0]) < 7, reason="ipykernel 6 does not notice that a page has come"
)


@pytest.fixture
def gate(front, gate, server, eventually):
    """Give the gates; at the test's end the page has run a cell: it cannot know of one that ran before."""
    yield gate
    front.screenshot("end")
    gate.open_all()
    eventually(lambda: is_idle(server, path_of(front)), "the kernel is idle", 60)
    front.has_kernel()  # a page that was loaded again may not have found it yet
    front.run("'the next test has this page'")
    front.problems[:] = [each for each in front.problems if not is_of_the_front_end(each)]


def is_of_the_front_end(problem: str) -> bool:
    """Return whether Notebook 7 complains about itself, as it does whenever it is loaded."""
    return "reading 'schema'" in problem or "Command 'filebrowser:open-path' not registered" in problem


def is_idle(server, path: str) -> bool:
    """Return whether nothing runs in the kernel of a notebook."""
    states = {each["path"]: each["kernel"]["execution_state"] for each in server.ask("api/sessions")}
    return bool(states[path] == "idle")


def path_of(front: Front) -> str:
    return f"{front.name}.ipynb"


SCRIPT = "<script>document.title = 'printed'</script>"


def steps(gate, *gates: str) -> str:
    """Return a cell that prints a line before and after each gate."""
    lines = [f"print({SCRIPT!r})", "print('step 0 of', rank)"]
    for number, name in enumerate(gates, start=1):
        lines += [gate.wait(name), f"print('step {number} of', rank)"]
    return cell(2, "\n".join([*lines, "rank * 10"]))


def start_and_save(front: Front, *cells: str) -> None:
    front.start(*cells)
    expect(front.output).to_contain_text("step 0 of 1")
    front.screenshot("before")
    modified = front.save()
    deadline = time.monotonic() + 30
    while WIDGET not in modified.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def load_again(front: Front) -> None:
    """Load the page again, and wait until it shows the notebook."""
    front.page.reload(wait_until="commit")
    shown_again(front)


def shown_again(front: Front) -> None:
    front.page.locator(".jp-Notebook .jp-OutputArea-output").first.wait_for(timeout=120_000)


@contextmanager
def second_tab(front: Front, server) -> Iterator[Front]:
    """Open the notebook of a page in another one."""
    page = front.page.context.new_page()
    other = Front(front.name, page, server, front._screenshots)
    other.test = f"{front.test}-second"
    try:
        other.open(path_of(front))
        shown_again(other)
        yield other
        assert [each for each in other.problems if not is_of_the_front_end(each)] == []
    finally:
        page.close()


def expect_the_result(shown: Locator) -> None:
    expect(shown).to_contain_text("SUCCEEDED")
    expect(shown).to_contain_text("step 2 of 1")
    expect(shown).to_contain_text(SCRIPT)
    assert shown.page.title() != "printed"
    expect(shown.locator(".nblaunch-panel")).to_have_count(0)
    expect(shown.get_by_role("table")).to_contain_text("10")


def outputs_in(path) -> list[set[str]]:
    return [set(each.data) for each in nbformat.read(path, as_version=4).cells[0].outputs]


@pytest.mark.slow_at("notebook7")
@notices_pages
def test_a_page_that_is_loaded_again_is_live_and_then_has_the_result(front, gate):
    start_and_save(front, steps(gate, "first", "second"))
    load_again(front)
    expect(front.output).to_contain_text("step 0 of 1", timeout=SOON)
    expect(front.panel.locator(".nblaunch-head")).to_contain_text("RUNNING")
    front.screenshot("again")
    gate.open("first")
    expect(front.output).to_contain_text("step 1 of 0", timeout=SOON)
    expect(front.output).to_contain_text("step 1 of 1", timeout=SOON)
    expect(front.output.get_by_text("step 1 of 1")).to_have_count(1)
    gate.open("second")
    expect_the_result(front.outputs.last)
    assert outputs_in(front.save()) == [{"text/html", "text/plain"}]


@pytest.mark.slow
@pytest.mark.once
@notices_pages
def test_a_second_tab_is_live_too_and_both_have_the_result(front, gate, server):
    start_and_save(front, steps(gate, "first", "second"))
    with second_tab(front, server) as other:
        for each in (other, front):
            expect(each.output).to_contain_text("step 0 of 1", timeout=SOON)
        gate.open("first")
        for each in (other, front):
            expect(each.output).to_contain_text("step 1 of 1", timeout=SOON)
            expect(each.panel).to_have_count(1)
        gate.open("second")
        for each in (other, front):
            expect_the_result(each.outputs.last)
        other.screenshot("end")


@pytest.mark.slow
@pytest.mark.once
@notices_pages
def test_a_page_that_is_opened_after_the_end_has_the_result(front, gate, server, eventually):
    start_and_save(front, steps(gate, "first", "second"))
    front.page.goto("about:blank")
    gate.open_all()
    eventually(lambda: is_idle(server, path_of(front)), "the kernel is idle", 60)
    front.open(path_of(front))
    shown_again(front)
    expect_the_result(front.outputs.last)
    assert outputs_in(front.save()) == [{"text/html", "text/plain"}]


@pytest.mark.slow
@pytest.mark.once
@notices_pages
def test_the_result_of_a_run_before_the_present_one_is_there_too(front, gate):
    start_and_save(front, steps(gate, "first", "second"), cell(2, f"print('later')\n{gate.wait()}"))
    gate.open("first")
    gate.open("second")
    expect(front.output).to_contain_text("later")
    load_again(front)
    expect_the_result(front.outputs.first)


@pytest.mark.slow
@pytest.mark.once
@notices_pages
def test_a_page_that_is_loaded_again_can_stop_the_run_or_says_how(front, gate):
    stop = front.panel.get_by_role("button", name="Stop", exact=True)
    start_and_save(front, steps(gate, "first", "second"))
    if tuple(map(int, version("ipykernel").split(".")[:2])) >= (7, 4):
        expect(stop).to_be_visible()
        load_again(front)
        stop.click()
    else:
        load_again(front)
        expect(front.panel.get_by_text("interrupt the kernel to stop")).to_be_visible()
        front.interrupt()
    expect(front.outputs.last).to_contain_text("STOPPED")


@pytest.mark.once
def test_what_is_saved_during_a_run_says_so(front, gate):
    start_and_save(front, steps(gate, "first", "second"))
    path = front.save()
    (output,) = nbformat.read(path, as_version=4).cells[0].outputs
    for kind in ("text/html", "text/plain"):
        assert "Running when this was saved" in output.data[kind]


# --- a detached session --------------------------------------------------------------------------------

START = "%distributed start -n 2 --detach --session train"
ATTACH = "%distributed attach train"
LINES = 60
IDLE = "import nblaunch, time\nwhile any(each.running for each in nblaunch.sessions()):\n    time.sleep(0.01)"


def long_cell(gate, *gates: str) -> str:
    """Return a cell that prints numbered lines for some seconds, shows a figure, and waits at gates."""
    body = f"""
    %%distributed --session train
    import matplotlib.pyplot as plt

    for number in range({LINES}):
        print(f"line {{number}} of {{rank}}", flush=True)
        time.sleep(0.05)
    if rank == 0:
        plt.plot([1, 3, 2])
        plt.show()
    weights = [rank] * 3
    """
    lines = textwrap.dedent(body).strip().splitlines()
    for name in gates:
        lines += [gate.wait(name), f"print('past {name}', rank)"]
    return "\n".join([*lines, "rank * 10"])


@pytest.fixture
def detached(front, gate):
    """Give the gates; at the test's end there is no session, and the page's kernel has the magics."""
    yield gate
    gate.open_all()
    subprocess.run(
        [sys.executable, "-m", "nblaunch", "stop", "train"], check=False, capture_output=True, timeout=60
    )
    if front.is_running():  # of a test that failed
        front.interrupt()
        front.finished()
    front.run("%load_ext nblaunch", gate.waiting)


def numbers_in(text: str, rank: int) -> list[int]:
    return [int(each) for each in re.findall(rf"line (\d+) of {rank}(?!\d)", text)]


def restarted_in_mid_cell(front: Front, gate) -> None:
    """Start a detached session and a cell in it; restart the kernel while the cell prints."""
    front.run(START)
    front.add(long_cell(gate, "first", "second"))
    expect(front.output).to_contain_text("line 5 of 0")
    front.restart_kernel()


def attach(front: Front) -> Locator:
    """Attach in the new kernel, in a new cell; return its output, which has the panel."""
    told = front.add("%load_ext nblaunch")
    expect(told).to_have_text(re.compile(r"^detached session 'train' .*: %distributed attach train\s*$"))
    shown = front.add(ATTACH)
    # On a busy machine one of them may be some lines behind.
    for rank in (0, 1):
        expect(shown.get_by_role("log", name="Output")).to_contain_text(f"line {LINES - 1} of {rank}")
    return shown


@pytest.mark.once
def test_the_kernel_is_restarted_in_mid_cell_and_a_new_one_has_all_of_it(front, detached):
    restarted_in_mid_cell(front, detached)
    shown = attach(front)
    for rank in (0, 1):
        assert numbers_in(front.output.text_content() or "", rank) == list(range(LINES))
    expect(front.panel.locator("img")).to_have_count(1)
    # It is measured, and as old as the job.
    card = front.panel.get_by_role("article", name="Rank 0", exact=True)
    expect(card).to_contain_text(re.compile(r"CPU \d+ % · \d+ MiB"))
    expect(front.panel.locator(".nblaunch-elapsed")).not_to_have_text(re.compile("0:0[012]"))
    front.panel.scroll_into_view_if_needed()
    front.screenshot("attached")
    detached.open("first")
    expect(front.output).to_contain_text("past first 1")
    detached.open("second")
    front.finished()
    shown.get_by_role("table").scroll_into_view_if_needed()
    front.screenshot("over")
    expect(shown).to_contain_text("SUCCEEDED")
    for rank in (0, 1):
        assert numbers_in(shown.text_content() or "", rank) == list(range(LINES))
    expect(shown.locator("img")).to_have_count(1)
    result = front.add("_.state, _.values", "%distributed pull weights --session train\nweights")
    front.finished()
    expect(front.outputs.nth(-2)).to_contain_text("[0, 10]")
    expect(result).to_contain_text("[[0, 0, 0], [1, 1, 1]]")
    ended = front.add("%distributed stop --session train", "%distributed sessions")
    front.finished()
    expect(ended).not_to_contain_text("train")


@pytest.mark.slow
@pytest.mark.once
def test_the_cell_of_a_kernel_that_was_restarted_keeps_what_it_had(front, detached):
    restarted_in_mid_cell(front, detached)
    cell_of_before = front.outputs.nth(1)
    for _ in range(2):
        expect(cell_of_before).to_contain_text("%distributed attach")
        assert numbers_in(cell_of_before.text_content() or "", 0)[:6] == list(range(6))
        expect(front.panel).to_have_count(0)
        expect(front.page.get_by_text("Error displaying widget")).to_have_count(0)
        front.screenshot("left")
        front.save()
        load_again(front)


@pytest.mark.slow
@pytest.mark.once
def test_the_stop_button_of_the_notebook_stops_watching_and_the_job_goes_on(front, detached):
    restarted_in_mid_cell(front, detached)
    shown = attach(front)
    if tuple(map(int, version("ipykernel").split(".")[:2])) >= (7, 4):
        expect(front.panel.get_by_role("button", name="Stop watching", exact=True)).to_be_visible()
    front.interrupt()
    front.finished()
    expect(shown).to_contain_text("Running when watching stopped: the job goes on")
    expect(shown).to_contain_text("%distributed interrupt --session train stops it")
    expect(shown).to_contain_text(f"line {LINES - 1} of 1")
    listed = front.add("%distributed sessions")
    front.finished()
    front.screenshot("watching-stopped")
    expect(listed).to_contain_text("runs cell")
    front.theme(DARK)
    front.screenshot("dark")
    again = front.add(ATTACH)
    expect(front.output).to_contain_text("line 0 of 0")
    front.panel.scroll_into_view_if_needed()
    # A figure among what was printed has no height until it is loaded.
    left = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
    eventually(lambda: front.panel.locator("img").evaluate("(img) => img.naturalHeight"), "it is loaded")
    eventually(lambda: front.output.evaluate(left) < 30, "the end of the output is shown")
    front.screenshot("attached-dark")
    detached.open("first")
    expect(front.output).to_contain_text("past first 1")
    front.interrupt()
    front.finished()
    expect(again).to_contain_text("%distributed interrupt --session train stops it")
    front.add("%distributed interrupt --session train", IDLE)
    front.finished()
    listed = front.add("%distributed sessions")
    expect(listed).to_contain_text("idle")
