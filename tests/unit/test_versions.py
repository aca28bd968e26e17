"""What pyproject.toml declares is what the two constraints files test. Run it to write their table anew."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import nblaunch

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def floors(requirements: list[str]) -> dict[str, str]:
    """Return each requirement's lowest version: `["pyzmq>=25.0"]` gives `{"pyzmq": "25.0"}`."""
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", each) for each in requirements)
    return dict(each.split(">=") for each in requirements)


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "tests" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, without zeros at its end: 8.0 and 8.0.0 are the same."""
    numbers = [int(part) for part in text.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


DEPENDENCIES = floors(PROJECT["dependencies"])
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OURS = [f"nblaunch[{name}]" for name in EXTRAS]
"""Requirements that are an extra of this project's own: `test` brings `integrations`."""
TOOLS = {
    name: floor
    for extra in EXTRAS.values()
    for name, floor in floors([each for each in extra if each not in OURS]).items()
}


def test_the_oldest_lane_installs_the_floors_themselves():
    pinned = pins("constraints-oldest.txt")
    floor = {name: version(text) for name, text in DEPENDENCIES.items() if name != "torch"}
    assert {name: version(pinned[name]) for name in floor} == floor


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_a_constraints_file_pins_all_that_is_declared_above_its_floor(file):
    pinned = pins(file)
    declared = DEPENDENCIES | TOOLS
    assert [name for name in declared if name not in pinned] == []
    assert [name for name, floor in declared.items() if version(pinned[name]) < version(floor)] == []


def test_both_lanes_use_the_same_tools_and_the_same_torch():
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    same = {"torch", *TOOLS}
    assert {name: newest[name] for name in same} == {name: oldest[name] for name in same}


def test_the_package_knows_its_version_also_where_it_is_not_installed():
    assert nblaunch.__version__ == PROJECT["version"]


BEGIN, END = "<!-- versions:begin -->", "<!-- versions:end -->"
MAINTAINING = ROOT / "notebooks" / "docs" / "maintaining.md"


PYTHON = PROJECT["requires-python"].removeprefix(">=")
TRIED = {"Python": ("3.11.7", "3.14.10"), "torch": ("2.8.0", "2.15.0")}
"""The oldest and the newest that tests/torch_versions/lane, or its commands, ran with: in November 2026."""


def versions_table() -> str:
    """Return the table of maintaining.md: what nblaunch needs, and the versions of each that are tested."""
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    allowed = {"Python": PYTHON, **DEPENDENCIES}
    tested = {name: (oldest[name], newest[name]) for name in DEPENDENCIES} | TRIED
    rows = ["| package | allowed from | oldest tested | newest tested |", "|---|---|---|---|"]
    rows += [f"| {name} | {floor} | {' | '.join(tested[name])} |" for name, floor in allowed.items()]
    return "\n".join(rows)


def test_the_floors_of_python_and_torch_have_been_tried_and_ci_is_within():
    allowed = {"Python": PYTHON, "torch": DEPENDENCIES["torch"]}
    for name, (oldest, newest) in TRIED.items():
        assert version(oldest)[:2] == version(allowed[name])
        assert version(newest) >= version(oldest)
    assert version(pins("constraints.txt")["torch"]) <= version(TRIED["torch"][1])


def with_versions(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{versions_table()}\n{END}{rest.partition(END)[2]}"


def test_the_documents_have_the_oldest_and_the_newest_versions_in_one_table():
    text = MAINTAINING.read_text()
    assert with_versions(text) == text, "python tests/unit/test_versions.py"


if __name__ == "__main__":
    MAINTAINING.write_text(with_versions(MAINTAINING.read_text()))
