"""What the panel shows, and lets a reader do, while the cell blocks."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from lanes import sampled

from .front import DARK, expect


def cell(ranks: int, body: str) -> str:
    return f"%%distributed -n {ranks}\n{body}"


@pytest.mark.slow_at("notebook7")
def test_output_is_there_while_the_cell_still_blocks(front, gate):
    front.start(cell(2, f"print('one from', rank)\n{gate.wait('first')}\nprint('two')\n{gate.wait()}\nrank"))
    expect(front.output).to_contain_text("one from 0")
    expect(front.output).to_contain_text("one from 1")
    expect(front.output).not_to_contain_text("two")
    assert front.is_running()
    gate.open("first")
    expect(front.output).to_contain_text("two")
    assert front.is_running()
    front.screenshot("running")
    gate.open()
    front.finished()
    expect(front.panel).to_have_count(0)
    expect(front.outputs.last).to_contain_text("SUCCEEDED")


@pytest.mark.once
def test_the_header_says_what_runs_and_each_rank_has_a_card(front, gate):
    front.start(cell(3, f"print('here')\nif rank == 2:\n    {gate.wait()}\nrank * 10"))
    head = front.panel.locator(".nblaunch-head")
    expect(head).to_contain_text("RUNNING")
    expect(head).to_contain_text("3 ranks")
    expect(head).to_contain_text("gloo")
    cards = [front.panel.get_by_role("article", name=f"Rank {rank}", exact=True) for rank in range(3)]
    expect(cards[1]).to_contain_text("SUCCEEDED")
    expect(cards[1]).to_contain_text("10")
    expect(cards[2]).to_contain_text("RUNNING")
    expect(cards[2]).to_contain_text("cpu")
    expect(cards[2]).to_contain_text("here")


@pytest.mark.once
def test_a_rank_that_finishes_after_its_cell_says_with_what(front, gate):
    save = f"def save():\n    print('saving', rank, flush=True)\n    {gate.wait()}\n    print('saved', rank)"
    started = "import threading\nif rank == 0: threading.Thread(target=save, name='save').start()"
    front.start(cell(2, f"{save}\n{started}\nrank"))
    card = front.panel.get_by_role("article", name="Rank 0", exact=True)
    expect(card).to_contain_text("finishing: thread save")
    expect(front.output).to_contain_text("saving 0")
    front.screenshot("finishing")
    gate.open()
    front.finished()
    expect(front.outputs.last).to_contain_text("saved 0")
    expect(front.outputs.last).to_contain_text("SUCCEEDED")


@pytest.mark.once
def test_one_rank_can_be_looked_at_during_the_run(front, gate):
    front.start(cell(3, f"print('only', rank, 'says this')\n{gate.wait()}"))
    expect(front.output).to_contain_text("only 2 says this")
    front.panel.get_by_label("Show output of").select_option("rank 1")
    expect(front.output).to_contain_text("only 1 says this")
    expect(front.output).not_to_contain_text("only 0 says this")
    front.panel.get_by_label("Show output of").select_option("all ranks")
    expect(front.output).to_contain_text("only 0 says this")
    assert front.is_running()


@pytest.mark.once
def test_lines_that_all_ranks_print_are_shown_once(front, gate):
    front.start(cell(8, f"print('the same')\nif rank == 5:\n    print('different')\n{gate.wait()}"))
    expect(front.output).to_contain_text(re.compile(r"\[ranks 0-7\]\s*the same"))
    expect(front.output).to_contain_text(re.compile(r"\[rank 5\]\s*different"))
    expect(front.output.get_by_text("the same")).to_have_count(1)


@pytest.mark.once
def test_output_can_be_filtered_held_and_copied(front, gate):
    body = f"for step in range(100):\n    print('step', step)\n{gate.wait()}"
    front.start(cell(2, body))
    expect(front.output).to_contain_text("step 99")
    front.panel.get_by_label("Filter output").fill("step 7")
    expect(front.output).to_contain_text("step 77")
    expect(front.output).not_to_contain_text("step 66")
    front.panel.get_by_label("Filter output").fill("")
    expect(front.output).to_contain_text("step 66")
    follow = front.panel.get_by_role("button", name="Follow output")
    expect(follow).to_have_attribute("aria-pressed", "true")
    assert front.output.evaluate("(log) => log.scrollHeight - log.scrollTop - log.clientHeight") < 30
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "false")
    front.panel.get_by_role("button", name="Copy output").click()
    assert "step 66" in front.page.evaluate("() => navigator.clipboard.readText()")


SELECTED = "() => getSelection().toString()"
SELECT = """(log) => {
  const walker = document.createTreeWalker(log, NodeFilter.SHOW_TEXT);
  while (walker.nextNode() && !walker.currentNode.data.includes("keep this"));
  getSelection().selectAllChildren(walker.currentNode.parentElement);
}"""


@pytest.mark.once
def test_selection_and_focus_survive_updates(front, gate):
    noise = "for step in range(60):\n    print(step)\n    time.sleep(0.02)"
    body = f"print('keep this')\n{gate.wait('first')}\n{noise}\n{gate.wait('second')}"
    front.start(cell(2, f"{body}\nif rank == 0:\n    {gate.wait()}"))
    expect(front.output).to_contain_text("keep this")
    front.output.evaluate(SELECT)
    selected = front.page.evaluate(SELECTED)
    assert selected.strip() == "keep this"
    gate.open("first")
    expect(front.output).to_contain_text("[ranks 0-1] 59")
    assert front.page.evaluate(SELECTED) == selected
    title = front.panel.get_by_role("button", name="Rank 1", exact=True)
    title.focus()
    gate.open("second")
    expect(front.panel.get_by_role("article", name="Rank 1")).to_contain_text("SUCCEEDED")
    expect(title).to_be_focused()


@pytest.mark.once
@pytest.mark.parametrize("module", sampled(["tqdm.auto", "tqdm"], ci=1))
def test_a_tqdm_bar_is_one_live_line_for_each_rank(front, gate, module):
    body = f"""
from {module} import tqdm
for step in tqdm(range(40), desc=f"bar {{rank}}", mininterval=0):
    if step == 20:
        {gate.wait("half")}
print("done")
{gate.wait()}
"""
    front.start(cell(2, body))
    bars = front.output.get_by_text(re.compile(r"bar \d: +\d+%"))
    expect(front.output).to_contain_text(re.compile(r"bar 1: +50%"))
    expect(bars).to_have_count(2)
    front.screenshot(f"half-{module}")
    gate.open("half")
    expect(front.output).to_contain_text(re.compile(r"bar 1: 100%"))
    expect(bars).to_have_count(2)
    gate.open()
    front.finished()
    expect(front.outputs.last).to_contain_text(re.compile(r"bar 1: 100%"))
    expect(front.outputs.last).not_to_contain_text(re.compile(r"bar 1: +50%"))


@pytest.mark.slow
@pytest.mark.once
def test_a_figure_of_rank_1_is_in_its_card_while_the_cell_blocks(front, gate):
    body = f"""
import matplotlib.pyplot as plt
if rank == 1:
    figure, axis = plt.subplots(figsize=(3, 2))
    axis.plot([1, 3, 2])
    plt.show()
{gate.wait()}
"""
    front.start(cell(2, body))
    image = front.panel.locator("img")
    expect(image).to_have_count(1)
    assert image.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 100
    front.screenshot("live")
    gate.open()
    front.finished()
    expect(front.outputs.last.locator("img")).to_have_count(1)


@pytest.mark.once
def test_displays_are_drawn_live_and_change_in_place_but_run_no_script(front, gate):
    body = f"""
from IPython.display import HTML, clear_output, display
print("will be wiped")
clear_output()
shown = display(HTML("<b>first</b>"), display_id=True)
display(HTML("<i>slanted</i><script>parent.document.title = 'displayed'</script>"))
{gate.wait("second")}
shown.update(HTML("<b>second</b>"))
{gate.wait()}
"""
    front.start(cell(1, body))
    frames = front.output.locator("iframe")
    expect(frames).to_have_count(2)
    expect(frames.nth(0).content_frame.locator("b")).to_have_text("first")
    expect(frames.nth(1).content_frame.locator("i")).to_have_text("slanted")
    gate.open("second")
    expect(frames.nth(0).content_frame.locator("b")).to_have_text("second")
    expect(frames).to_have_count(2)
    expect(front.output).not_to_contain_text("will be wiped")
    assert front.page.title() != "displayed"


@pytest.mark.once
def test_an_earlier_attempt_of_a_run_that_restarts_can_be_unfolded(front, gate):
    body = f"""
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
    raise ValueError("the first attempt")
print("the second attempt")
{gate.wait()}
"""
    front.start(f"%%distributed -n 2 --max-restarts 1\n{body}")
    expect(front.output).to_contain_text("the second attempt")
    summary = front.panel.locator("summary", has_text="attempt 0: restarted: rank 1: ValueError")
    details = summary.locator("..")
    expect(details).not_to_have_attribute("open", "")
    summary.click()
    expect(details).to_contain_text("Root cause: rank 1:")
    front.screenshot("attempts")
    assert front.is_running()


@pytest.mark.slow
@pytest.mark.once
def test_ten_ranks_are_tiles_of_which_one_is_chosen(front, gate):
    front.start(cell(10, f"print('from', rank)\n{gate.wait()}"))
    tiles = front.panel.get_by_role("gridcell", name=re.compile(r"^Rank \d+, RUNNING$"))
    expect(tiles).to_have_count(10)
    front.panel.get_by_role("gridcell", name="Rank 7, RUNNING").click()
    card = front.panel.get_by_role("article", name="Rank 7", exact=True)
    expect(card).to_contain_text("from 7")
    assert front.is_running()


@pytest.mark.once
def test_the_rank_that_another_waits_for_in_a_collective_is_marked(front, gate):
    body = "import torch, torch.distributed as dist\nif rank == 1:\n"
    body += "\n".join(f"    {line}" for line in gate.wait().splitlines())
    front.start(cell(2, f"{body}\ndist.all_reduce(torch.ones(1))"))
    late = front.panel.get_by_role("article", name="Rank 1", exact=True)
    expect(late).to_contain_text("1 collective behind the others", timeout=20_000)
    waiting = front.panel.get_by_role("article", name="Rank 0", exact=True)
    expect(waiting).not_to_contain_text("behind")
    gate.open()
    front.finished()


@pytest.mark.once
def test_a_failure_is_told_at_once_with_its_traceback_and_the_line_of_the_cell(front, gate):
    body = f"if rank == 1:\n    raise ValueError('the first to fail')\n{gate.wait()}"
    front.run(cell(3, body))
    shown = front.outputs.last
    expect(shown).to_contain_text("ValueError: the first to fail")
    expect(shown).to_contain_text("raise ValueError('the first to fail')")
    expect(shown).to_contain_text("STOPPED")


@pytest.mark.once
def test_a_script_that_a_rank_prints_stays_text(front, gate):
    script = "<script>document.title = 'printed'</script><img src=x onerror='document.title=1'>"
    front.start(cell(2, f"print({script!r})\n{gate.wait()}"))
    expect(front.output).to_contain_text(script)
    expect(front.panel.locator("img")).to_have_count(0)
    gate.open()
    front.finished()
    expect(front.outputs.last).to_contain_text(script)
    assert front.page.title() not in ("printed", "1")


@pytest.mark.once
def test_the_panel_is_at_home_in_a_dark_theme(front, gate):
    front.theme(DARK)
    front.start(cell(2, f"import sys\nprint('out')\nprint('err', file=sys.stderr)\n{gate.wait()}"))
    expect(front.output).to_contain_text("err")
    ink, paper = front.output.evaluate(
        """(log) => {
          const style = (element, name) => getComputedStyle(element)[name];
          let behind = log;
          while (style(behind, 'backgroundColor') === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
          const light = (color) => Math.max(...color.match(/[\\d.]+/g).slice(0, 3).map(Number));
          return [light(style(log, 'color')), light(style(behind, 'backgroundColor'))];
        }"""
    )
    assert ink > paper


@pytest.mark.once
def test_the_panel_can_be_used_with_the_keyboard_alone(front, gate):
    front.start(cell(10, f"print('from', rank)\n{gate.wait()}"))
    # The notebook's own shortcuts, which hold where no text is edited, must not take the panel's keys.
    front.command("notebook:enter-command-mode")
    front.panel.get_by_role("gridcell", name="Rank 0, RUNNING").focus()
    for _ in range(3):
        front.page.keyboard.press("ArrowRight")
    front.page.keyboard.press("Enter")
    expect(front.panel.get_by_role("article", name="Rank 3", exact=True)).to_contain_text("from 3")
    reached = []
    while len(reached) < 30 and "Output" not in reached:
        front.page.keyboard.press("Tab")
        name = "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
        reached.append(front.page.evaluate(name))
        if reached[-1] == "Follow output":
            front.page.keyboard.press("Enter")
    assert [name for name in ("Show output of", "Filter output", "Copy output") if name not in reached] == []
    follow = front.panel.get_by_role("button", name="Follow output")
    expect(follow).to_have_attribute("aria-pressed", "false")


def test_a_run_is_stopped_from_the_panel_or_the_panel_says_how(front, gate):
    front.start(cell(2, f"print('here')\n{gate.wait()}"))
    expect(front.output).to_contain_text("here")
    stop = front.panel.get_by_role("button", name="Stop", exact=True)
    hint = front.panel.get_by_text("interrupt the kernel to stop")
    if int(version("ipykernel").split(".")[0]) >= 7:
        expect(stop).to_be_visible()
        stop.click()
    else:
        expect(hint).to_be_visible()
        front.interrupt()
    front.finished()
    expect(front.outputs.last).to_contain_text("STOPPED")


LINES = 200_000
FLOOD = f"""
%%distributed -n 2 --out flood
import sys
sys.stdout.writelines(f"line {{number}} of rank {{rank}}\\n" for number in range({LINES}))
"""


@pytest.mark.slow
@pytest.mark.once
def test_200_000_lines_of_each_rank_cost_neither_the_page_nor_the_result_nor_the_file(front):
    front.page.evaluate(
        """() => {
          window.slowest = 0;
          let last = performance.now();
          window.watching = setInterval(() => {
            window.slowest = Math.max(window.slowest, performance.now() - last);
            last = performance.now();
          }, 20);
        }"""
    )
    front.run(FLOOD, "[len(flood.ranks[rank].stdout.splitlines()) for rank in (0, 1)]")
    slowest = front.page.evaluate("() => { clearInterval(window.watching); return window.slowest; }")
    expect(front.outputs.last).to_contain_text(f"[{LINES}, {LINES}]")
    expect(front.outputs.first).to_contain_text("line 0 of rank 1")
    expect(front.outputs.first).to_contain_text(f"line {LINES - 1} of rank 1")
    assert slowest < 2_000
    assert front.save().stat().st_size < 1_000_000
