"""Equal lines of several ranks among others, as a reader sees them; and a frame that shows another page."""

from __future__ import annotations

import re

import pytest
from lanes import sampled

from .front import DARK, LIGHT, expect

pytestmark = pytest.mark.once

EPOCHS = """
for epoch in range({epochs}):
    print(f"epoch {{epoch}}")
    print(f"loss {{rank}}.{{epoch}}")
print("\\x1b[32mdone\\x1b[0m")
"""


@pytest.mark.parametrize("theme", sampled([LIGHT, DARK], ci=1))
def test_lines_of_all_ranks_stand_between_those_of_single_ranks(front, gate, theme):
    front.theme(theme)
    front.start(f"%%distributed -n 4\n{EPOCHS.format(epochs=3)}\n{gate.wait()}")
    expect(front.output).to_contain_text(re.compile(r"\[ranks 0-3\]\s*done"))
    # Which single rank comes last is a matter of arrival until the run is over.
    expect(front.output).to_contain_text(re.compile(r"\[rank \d\]\s*loss \d.0\s*\[ranks 0-3\]\s*epoch 1"))
    front.screenshot(f"live {theme}")
    gate.open()
    front.finished()
    kept = front.outputs.last
    expect(kept.get_by_text("Output of ranks 0-3 (16 lines)")).to_be_visible()
    expect(kept).to_contain_text(re.compile(r"\[rank 3\] loss 3.0\s*\[ranks 0-3\] epoch 1"))
    front.screenshot(f"kept {theme}")


@pytest.mark.slow
def test_64_ranks_that_share_lines_are_one_part(front):
    kept = front.run(f"%%distributed -n 64\n{EPOCHS.format(epochs=4)}")
    kept.get_by_text("Output of ranks 0-63 (261 lines)").click()
    expect(kept).to_contain_text(re.compile(r"\[rank 63\] loss 63.0\s*\[ranks 0-63\] epoch 1"))


def test_html_that_is_displayed_anew_is_shown_although_the_reader_followed_a_link(front, gate):
    body = f"""
from IPython.display import HTML, display
shown = display(HTML("<a href='http://127.0.0.1:9/'>a link</a>"), display_id=True)
{gate.wait("second")}
shown.update(HTML("<b>second</b>"))
{gate.wait()}
"""
    front.start(f"%%distributed -n 1\n{body}")
    frame = front.output.locator("iframe")
    frame.content_frame.get_by_text("a link").click()
    front.page.wait_for_function(
        "() => [...document.querySelectorAll('.nblaunch-frame')].at(-1)?.contentDocument === null"
    )
    gate.open("second")
    expect(frame.content_frame.locator("b")).to_have_text("second")
