"""README and pages promise only what is so. Run this file to write the tables of options anew."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from nblaunch.magic.commands import COMMANDS
from nblaunch.options.launch import OPTIONS
from nblaunch.options.table import Option, grouped

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = ROOT / "notebooks" / "docs"
FOR_CONTRIBUTORS = {"code-map", "testing", "maintaining"}
"""Pages that CONTRIBUTING.md leads to, and the README does not."""
OPTIONS_PAGE = PAGES / "options.md"
BEGIN, END = "<!-- options:begin -->", "<!-- options:end -->"
MOST_LINES = 110
FIRST_LINES = 60
MOST_PICTURE_BYTES = 300_000
MOVED = (
    "Options",
    "Limits",
    "Sessions",
    "Several machines",
    "If you know torchrun",
    "How it works",
    "Leaving",
)
"""What stands in the documentation, so that the README stays short."""
INTERNAL = {"NBLAUNCH_NODE_AT_END", "NBLAUNCH_NODE_HERE", "NBLAUNCH_NODE_PLACE"}
"""Variables by which nblaunch tells its own processes something."""


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language, without their fences, in order."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL)


def with_tables(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = [f"## {title}\n\n{markdown_table(rows).strip()}\n" for title, rows in grouped(OPTIONS).items()]
    return f"{before}{BEGIN}\n{chr(10).join(tables)}{END}{after}"


def markdown_table(options: Iterable[Option]) -> str:
    """Return a table: one row for each option."""
    rows = ["| Option | Meaning | Default | Keyword, variable |", "|---|---|---|---|"]
    for each in options:
        keywords = [f"{keyword}=" for keyword in each.keywords] if each.scope != "notebook" else []
        variables = [each.variable] if each.variable else []
        flags, default, python = map(_as_code, (each.flags, [each.shown_default], keywords + variables))
        cells = [flags, each.help, default, python]
        rows.append(" | ".join(["", *(cell.replace("|", "\\|") for cell in cells), ""]).strip())
    return "\n".join(rows)


def _as_code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def prose(text: str) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def links(text: str) -> list[str]:
    """Return the targets of a text's links and pictures that are files."""
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", prose(text))
    return [target for pair in found for target in pair if target and not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the addresses of a page's headings, as MyST and repository pages make them, and its own."""
    text = prose(page.read_text())
    given = set(re.findall(r"^\(([\w-]+)\)=$", text, flags=re.MULTILINE))
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return given | {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.fixture
def first_lines() -> str:
    return "\n".join(README.read_text().splitlines()[:FIRST_LINES])


@pytest.mark.parametrize(("name", "end"), [("demo", "-m nblaunch demo"), ("test", "/pytest")])
def test_the_first_60_lines_hold_the_two_commands_one_line_each(first_lines, name, end):
    """`.ci/run` runs the line after the same marker, so what is checked there is what is written."""
    (command,) = re.findall(rf"^<!-- ci: {name} -->\n```sh\n(.*)\n```$", first_lines, flags=re.MULTILINE)
    assert command.startswith("python3 -m venv .venv && ")
    assert "-c tests/constraints.txt" in command
    assert command.endswith(end)


def test_the_first_60_lines_hold_a_cell_and_its_output(first_lines):
    _, cell = blocks(first_lines, "python")
    assert cell.startswith("%%distributed")
    assert len(blocks(first_lines, "text")) == 1


def test_the_readme_shows_the_live_panel_in_light_and_in_dark():
    """`notebooks/docs/testing.md` says how to renew the pictures, which `tests/browser` makes."""
    (picture,) = re.findall(r"(?s)<picture>.*?</picture>", README.read_text())
    (dark,) = re.findall(r'<source media="\(prefers-color-scheme: dark\)" srcset="(.*?)">', picture)
    ((told, light),) = re.findall(r'<img alt="(.*?)" src="(.*?)">', picture)
    assert len(told.split()) > 10, "for a reader who does not see it"
    assert light != dark
    for path in (light, dark):
        shown = (ROOT / path).read_bytes()
        assert shown.startswith(b"\x89PNG")
        assert len(shown) < MOST_PICTURE_BYTES


def test_the_readme_is_a_screen_and_a_half_and_leaves_the_rest_to_the_documentation():
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert re.findall(rf"^#+ (?:{'|'.join(MOVED)}).*$", text, flags=re.MULTILINE) == []


def test_the_limits_say_what_ends_a_detached_session_beside_its_user():
    limits = (PAGES / "limits.md").read_text()
    (of_sessions,) = re.findall(r"(?ms)^\* A detached session ends .*?(?=^\* )", limits)
    for word in ("control group", "batch job", "container", "JupyterHub", "%distributed doctor"):
        assert word in of_sessions


def test_the_tables_of_options_are_those_in_the_code():
    text = OPTIONS_PAGE.read_text()
    assert text == with_tables(text), "run: python tests/unit/test_readme.py"


def test_the_table_names_every_option():
    table = markdown_table(OPTIONS).splitlines()
    assert len(table) == len(OPTIONS) + 2
    assert {line.count("|") for line in table} == {5}
    for option, line in zip(OPTIONS, table[2:], strict=True):
        assert option.help in line
        assert f"`{option.flags[0]}`" in line
        assert option.variable is None or f"`{option.variable}`" in line


def test_the_page_of_options_has_every_variable_that_is_read():
    read = {
        each
        for path in (ROOT / "nblaunch").rglob("*.py")
        for each in re.findall(r"\"(NBLAUNCH_[A-Z_]+)\"", path.read_text())
    }
    _, _, section = OPTIONS_PAGE.read_text().partition("## Environment variables")
    assert set(re.findall(r"`(NBLAUNCH_[A-Z_]+)`", section)) == read - INTERNAL


def test_the_page_of_options_has_every_command():
    _, _, section = OPTIONS_PAGE.read_text().partition("## Commands")
    rows = re.findall(r"^\| (`[a-z`, ]+`) \|", section.partition("In a shell")[0], flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(COMMANDS)


@pytest.mark.parametrize(
    "page", [README, CONTRIBUTING, *sorted(PAGES.glob("*.md"))], ids=lambda path: path.stem
)
def test_every_relative_link_leads_to_a_file_and_a_heading_that_are_there(page):
    for target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_contributing_is_a_screen_and_a_half_and_leaves_the_rest_to_pages_of_the_site():
    assert len(CONTRIBUTING.read_text().splitlines()) < 80


def test_the_readme_or_contributing_leads_to_every_page():
    found = {(ROOT / each).resolve() for each in links(README.read_text())}
    contributing = {(ROOT / each).resolve() for each in links(CONTRIBUTING.read_text())}
    assert {PAGES / f"{name}.md" for name in FOR_CONTRIBUTORS} <= contributing
    # What the site takes from the repository's top has its link there.
    pages = {
        path
        for path in PAGES.glob("*.md")
        if path.stem not in FOR_CONTRIBUTORS | {"contributing", "changelog"}
    }
    assert pages | {CONTRIBUTING, ROOT / "CHANGELOG.md", ROOT / "LICENSE"} <= found


@pytest.mark.parametrize(
    "page", [README, CONTRIBUTING, *sorted(PAGES.glob("*.md"))], ids=lambda path: path.stem
)
def test_every_file_that_is_named_is_there(page):
    named = re.findall(r"`((?:notebooks|tests|binder)/[\w./-]+|[A-Z]+(?:\.md)?)`", page.read_text())
    files = [name for name in named if "/" in name or name.endswith(".md") or name == "LICENSE"]
    assert [name for name in files if not (ROOT / name).exists()] == []


if __name__ == "__main__":
    OPTIONS_PAGE.write_text(with_tables(OPTIONS_PAGE.read_text()))
