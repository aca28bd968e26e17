"""Buttons and links lead to the repository that pyproject.toml names. Run it to print the buttons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from test_versions import PROJECT, ROOT

REPOSITORY: str = PROJECT["urls"]["Repository"]
SLUG = REPOSITORY.removeprefix("https://github.com/")
QUICKSTART = "notebooks/quickstart.ipynb"
FILE = f"{REPOSITORY}/blob/main/{QUICKSTART}"
BUTTONS = {
    "Binder": f"https://mybinder.org/v2/gh/{SLUG}/main?urlpath={quote(f'lab/tree/{QUICKSTART}', safe='')}",
    "Colab": f"https://colab.research.google.com/github/{SLUG}/blob/main/{QUICKSTART}",
    "Kaggle": f"https://kaggle.com/kernels/welcome?src={FILE}",
}
PLACES = (r"github\.com/", r"mybinder\.org/v2/gh/", r"colab\.research\.google\.com/github/")
OURS = re.compile(rf"(?:{'|'.join(PLACES)})([\w-]+/nblaunch)\b")
"""Whatever links to a repository of this name, whoever is said to have it."""
TEXT = {".md", ".toml", ".yml", ".cff", ".ipynb", ".py", ".txt", ""}


def buttons() -> str:
    """Return the line of buttons as Markdown, without pictures."""
    return " · ".join(f"[Open in {name}]({address})" for name, address in BUTTONS.items())


def texts() -> dict[Path, str]:
    """Return the files of the repository that people or other programs read, by path."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    below = [
        path for name in (".github", "binder", "notebooks", "nblaunch") for path in (ROOT / name).rglob("*")
    ]
    files = [path for path in (*top, *below) if path.is_file() and path.suffix in TEXT]
    return {path: path.read_text() for path in files}


def test_every_link_to_the_repository_is_to_the_one_that_the_project_names():
    found = {path: set(OURS.findall(text)) for path, text in texts().items()}
    named = {path.relative_to(ROOT).as_posix() for path, slugs in found.items() if slugs}
    assert {QUICKSTART, "pyproject.toml"} <= named
    assert {path: slugs for path, slugs in found.items() if slugs - {SLUG}} == {}


def test_the_buttons_lead_to_a_notebook_that_is_there():
    assert (ROOT / QUICKSTART).is_file()
    assert all(QUICKSTART in address or quote(QUICKSTART, safe="") in address for address in BUTTONS.values())


def test_the_buttons_of_the_readme_are_these():
    shown = re.findall(r"\[Open in (\w+)\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    if not shown:
        pytest.skip("the README has no buttons")
    assert dict(shown) == BUTTONS


def test_the_quickstart_installs_what_it_imports_and_is_not_part_of_nblaunch():
    cells = [
        each for each in json.loads((ROOT / QUICKSTART).read_text())["cells"] if each["cell_type"] == "code"
    ]
    first, *rest = ["".join(each["source"]) for each in cells]
    assert f"git+{REPOSITORY}" in first
    imported = set(re.findall(r"^(?:import|from) (\w+)", "\n".join(rest), flags=re.MULTILINE))
    installed = set(re.findall(r'^    "(\w+)":', first, flags=re.MULTILINE))
    brought = {"torch", "dataclasses"}
    assert installed == imported - brought


if __name__ == "__main__":
    print(buttons())
