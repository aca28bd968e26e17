"""The cell of the README shows what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]


README = ROOT / "README.md"


FIRST_LINES = 60


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language, without their fences, in order."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def first_lines() -> str:
    return "\n".join(README.read_text().splitlines()[:FIRST_LINES])


@pytest.mark.oldest
def test_the_cell_shows_the_output_that_is_written_below_it(first_lines, kernel):
    setup, cell = blocks(first_lines, "python")
    kernel.ok(setup)
    assert kernel.ok(cell).text.strip() == blocks(first_lines, "text")[0]
    assert f"`{kernel.value('res.values')}`" in README.read_text()
