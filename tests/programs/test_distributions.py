"""The wheel and the sdist: what is in them, and what an index would say to them."""

from __future__ import annotations

import configparser
import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build_command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    build_command("hatchling", "build", "-d", str(directory))
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    return wheel, sdist


def sources() -> set[str]:
    """Return the files of the package, as they are in the sources."""
    files = (ROOT / "nblaunch").rglob("*")
    return {
        str(each.relative_to(ROOT)) for each in files if each.is_file() and "__pycache__" not in each.parts
    }


def test_the_wheel_is_the_package_alone_with_the_panels_files_and_the_types(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        about = next(name for name in names if name.endswith("METADATA")).rpartition("/")[0]
        metadata = email.message_from_bytes(wheel.read(f"{about}/METADATA"))
        entries = configparser.ConfigParser()
        entries.read_string(wheel.read(f"{about}/entry_points.txt").decode())
    assert {name for name in names if not name.startswith(about)} == sources()
    assert {"nblaunch/py.typed", "nblaunch/view/panel.js", "nblaunch/view/panel.css"} <= names
    assert f"{about}/licenses/LICENSE" in names
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert dict(entries["pytest11"]) == {"nblaunch": "nblaunch._pytest"}


def test_the_sdist_has_what_the_tests_need_and_nothing_that_was_made(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert sources() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py"} <= names
    of_the_site = {
        "notebooks/conf.py",
        "notebooks/index.md",
        "notebooks/docs/api.md",
        "notebooks/docs/site.css",
    }
    assert {
        *of_the_site,
        "notebooks/docs/pictures/cell.svg",
        "notebooks/quickstart.ipynb",
        "CONTRIBUTING.md",
    } <= names
    made = ("__pycache__", ".venv", "node_modules", "screenshots", ".pyc")
    assert [name for name in names if any(each in name for each in made)] == []


def test_an_index_would_take_both(built):
    assert build_command("twine", "--no-color", "check", "--strict", *map(str, built)).count("PASSED") == len(
        built
    )
