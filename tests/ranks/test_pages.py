"""The examples of the documentation run, and show what is written below them.

What runs has `<!-- runs -->` above it. A page is run from top to end in one kernel, as a reader would. Each
line that stands below a cell has to be shown, in this order; a page may leave lines out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lanes import sampled

PAGES = Path(__file__).parents[2] / "notebooks" / "docs"
EXAMPLE = re.compile(
    r"^<!-- runs -->\n```python\n(?P<cell>.*?)\n```\n(?:```text\n(?P<shown>.*?)\n```$)?",
    flags=re.MULTILINE | re.DOTALL,
)


def shown_by(kernel, cell: str) -> str:
    ran = kernel.run(cell)
    ends = [ran.text, str(ran.result or ""), ran.error.traceback if ran.error else ""]
    return "\n".join(ends)


def in_this_order(lines: list[str], text: str) -> list[str]:
    """Return the lines that `text` does not show, after those before them."""
    missing = []
    for line in lines:
        _, found, rest = text.partition(line)
        if found:
            text = rest
        else:
            missing.append(line)
    return missing


@pytest.mark.quick
@pytest.mark.parametrize("page", sampled(["start", "cells", "sessions", "machines"], 0))
def test_the_examples_of_a_page_show_what_is_written_below_them(kernel, page):
    examples = list(EXAMPLE.finditer((PAGES / f"{page}.md").read_text()))
    assert len(examples) > 1
    for example in examples:
        shown = shown_by(kernel, example["cell"])
        if example["shown"] is None:
            assert "Traceback (most recent" not in shown
        else:
            assert in_this_order(example["shown"].splitlines(), shown) == [], shown
    kernel.run("%distributed stop")
