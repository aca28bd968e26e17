"""The wheel and the sdist: what is in them, what an index says to them, the wheel in an empty environment."""

from __future__ import annotations

import configparser
import email
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from environments import make_environment

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


# --- the wheel in an environment of its own ---------------------------------------------------------


ASKED = """
import json, sys, nblaunch
from importlib import metadata, util
front = [name for name in ("jupyterlab", "notebook", "pytest") if util.find_spec(name)]
print(json.dumps([nblaunch.__file__, front, {name: metadata.version(name) for name in sys.argv[1:]}]))
"""


VERSIONS = {"lowest": "constraints-oldest.txt", "highest": "constraints.txt"}


@pytest.fixture(scope="module", params=["lowest", pytest.param("highest", marks=pytest.mark.slow)])
def clean(request, built, tmp_path_factory):
    """Make an environment with the wheel and what it needs, all as old or as new as is allowed."""
    directory = tmp_path_factory.mktemp("clean")
    constraints = str(ROOT / "tests" / VERSIONS[request.param])
    make_environment(directory, [str(built[0])], "-c", constraints)
    return directory, constraints


@pytest.fixture(scope="module")
def module_kernel(clean, kernels):
    """Start a kernel in the clean environment, away from the sources."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(clean[0] / "bin" / "python"))
        patched.chdir(clean[0])
        kernel = kernels(PYTHONPATH="")
    yield kernel
    kernel.close()


def test_the_wheel_brings_the_oldest_or_the_newest_of_all_it_needs_and_no_front_end(clean):
    directory, constraints = clean
    lines = [line for line in Path(constraints).read_text().splitlines() if "==" in line]
    pinned = dict(line.split("==") for line in lines)
    names = [each.partition(">=")[0] for each in PROJECT["dependencies"]]
    done = subprocess.run(
        [str(directory / "bin" / "python"), "-c", ASKED, *names],
        cwd=directory,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    file, front_ends, versions = json.loads(done.stdout)
    assert Path(file).is_relative_to(directory)
    assert front_ends == []
    assert {name: text.partition("+")[0] for name, text in versions.items()} == {
        name: pinned[name] for name in names
    }


def test_a_cell_runs_on_ranks_of_the_wheel(kernel, clean):
    kernel.ok(
        """
        %%distributed -n 2 --out res
        import nblaunch, torch, torch.distributed as dist
        total = torch.ones(1) * (rank + 1)
        dist.all_reduce(total)
        print("hello from", rank)
        total.item(), nblaunch.__file__
        """
    )
    assert kernel.value("[value[0] for value in res.values]") == [3.0, 3.0]
    assert Path(kernel.value("res.values[1][1]")).is_relative_to(clean[0])
    assert kernel.value("res.ranks[1].stdout") == "hello from 1\n"


def test_a_failure_there_is_the_one_of_its_rank(kernel):
    error = kernel.fails("%%distributed -n 2\nif rank == 1:\n    {}['lr']")
    assert error.ename == "RunFailedError"
    assert "KeyError: 'lr'" in error.traceback


def test_a_session_there_keeps_its_variables_and_ends(kernel):
    kernel.ok("%distributed start -n 2")
    kernel.ok("%%distributed\nkept = rank * 10")
    kernel.ok("%%distributed --out res\nkept + 1")
    assert kernel.value("res.values") == [1, 11]
    kernel.ok("%distributed stop")
