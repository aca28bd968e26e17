"""What the README claims, sentence by sentence, and the test or the benchmark that shows it.

A sentence is removed from the README with its row, and a new one needs a row. Of a figure the row names the
benchmark that prints it, and `COMPARED` has what it printed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

CLAIMS = {
    "CLAIMS": (),
}
"""Each sentence, list item or row of a table, and where it is shown: a test, or a file that is run."""


def prose(text: str) -> str:
    """Return a README without its code, pictures, comments, headings and list of links."""
    text = text.partition("\n## Read on\n")[0]
    for left_out in (r"^```.*?^```$", r"<picture>.*?</picture>", r"<!--.*?-->", r"^#.*?$", r"^\|[-|:]+\|$"):
        text = re.sub(left_out, "", text, flags=re.MULTILINE | re.DOTALL)
    return text


def sentences(text: str) -> list[str]:
    """Return what a text says: sentences, and whole rows of tables.

    >>> sentences("One. `two` is\\nlonger: it goes on.\\n\\n| a | b |\\n| 1. | 2 |")
    ['One.', '`two` is longer: it goes on.', '| a | b |', '| 1. | 2 |']
    """
    said = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\|)|\n(?=\* )", prose(text)):
        line = " ".join(paragraph.split())
        said += [line] if line.startswith("|") else re.split(r"(?<=[.:])\s+(?=[A-Z`%])", line)
    return [each.removeprefix("* ") for each in said if each]


def is_there(place: str) -> bool:
    """Return whether a place (`tests/unit/test_x.py::test_y`, or a file) exists."""
    path, _, test = place.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text()) if test else ast.Module([], [])
    return not test or test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_sentence_of_the_readme_is_a_claim_with_its_evidence_and_the_other_way_round():
    said = sentences(README.read_text())
    assert [each for each in said if each not in CLAIMS] == [], "without evidence"
    assert [each for each in CLAIMS if each not in said] == [], "no longer said"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: " ".join(re.findall(r"\w+", claim)[:6]))
def test_what_shows_a_claim_is_there(claim):
    assert CLAIMS[claim]
    assert [place for place in CLAIMS[claim] if not is_there(place)] == []
