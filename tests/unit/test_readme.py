"""The README promises only what is so. Run this file to write its options table anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nblaunch.options.launch import OPTIONS
from nblaunch.options.table import markdown_table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- options:begin -->", "<!-- options:end -->"
FIRST_LINES = 40
MOST_PICTURE_BYTES = 300_000


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language, without their fences, in order."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL)


def with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown_table(OPTIONS).strip()}\n{END}{after}"


@pytest.fixture
def first_lines() -> str:
    return "\n".join(README.read_text().splitlines()[:FIRST_LINES])


@pytest.mark.parametrize(("name", "end"), [("demo", "-m nblaunch demo"), ("test", "/pytest")])
def test_the_first_40_lines_hold_the_two_commands_one_line_each(first_lines, name, end):
    """`.ci/run` runs the line after the same marker, so what is checked there is what is written."""
    (command,) = re.findall(rf"^<!-- ci: {name} -->\n```sh\n(.*)\n```$", first_lines, flags=re.MULTILINE)
    assert command.startswith("python3 -m venv .venv && ")
    assert "-c tests/constraints.txt" in command
    assert command.endswith(end)


def test_the_first_40_lines_hold_a_cell_and_its_output(first_lines):
    _, cell = blocks(first_lines, "python")
    assert cell.startswith("%%distributed")
    assert len(blocks(first_lines, "text")) == 1


def test_the_first_40_lines_show_the_live_panel(first_lines):
    """CONTRIBUTING.md says how to renew the picture, which `tests/browser` makes."""
    ((told, path),) = re.findall(r"^!\[(.*)\]\((.*)\)$", first_lines, flags=re.MULTILINE)
    assert len(told.split()) > 10, "for a reader who does not see it"
    picture = (ROOT / path).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < MOST_PICTURE_BYTES


def test_the_limits_say_what_ends_a_detached_session_beside_its_user():
    limits = README.read_text().partition("## Limits\n")[2].partition("\n## ")[0]
    (of_sessions,) = re.findall(r"(?ms)^\* A detached session ends .*?(?=^\* )", limits)
    for word in ("control group", "batch job", "container", "JupyterHub", "%distributed doctor"):
        assert word in of_sessions


def test_the_options_table_is_the_one_in_the_code():
    text = README.read_text()
    assert text == with_table(text), "run: python tests/unit/test_readme.py"


def test_every_file_that_the_readme_names_is_there():
    named = re.findall(r"`((?:notebooks|tests|binder)/[\w./-]+|[A-Z]+(?:\.md)?)`", README.read_text())
    files = [name for name in named if "/" in name or name.endswith(".md") or name == "LICENSE"]
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
