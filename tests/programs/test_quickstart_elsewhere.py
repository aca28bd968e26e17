"""The quickstart where nblaunch is not installed, as on Colab and Kaggle: its first cell installs it.

Colab itself is not here, but the packages are: those of a kernel in its runtime of January 2026
(github.com/googlecolab/backend-info, commit bd8aaa4, pip-freeze.txt). Its Python is 3.12, and this one any.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from environments import make_environment

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
CELLS = [
    "".join(each["source"])
    for each in json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    if each["cell_type"] == "code"
]
PLACES = {
    "new": ("ipykernel", "ipywidgets"),
    "colab": (
        *("ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==7.7.1", "jupyter_client==7.4.9"),
        *("psutil==5.9.5", "pyzmq==26.2.1", "tornado==6.5.1", "traitlets==5.7.1"),
    ),
}
"""What is installed before, beside torch, scikit-learn and matplotlib."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Make a repository of these sources, which git takes for the one that the notebook names."""
    directory = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "nblaunch", directory / "nblaunch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, directory)
    user = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    for command in (["init", "-q"], ["add", "."], [*user, "commit", "-q", "-m", "The sources"]):
        subprocess.run(["git", *command], cwd=directory, check=True)
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{directory}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }


@pytest.fixture
def start(request, repository, kernels, tmp_path, monkeypatch):
    """Give `start()`: a kernel of an environment without nblaunch."""

    class Bare(kernels):  # type: ignore[misc, valid-type]  # a fixture gives the class
        def ok(self, code, timeout=60):
            return super().ok("" if code == "%load_ext nblaunch" else code, timeout)

    python = make_environment(
        tmp_path / "environment", ["pip", *PLACES[request.param]], linked=["scikit-learn", "matplotlib"]
    )
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)
    started = []

    def begin():
        for each in started[-1:]:
            each.close()
        started.append(Bare(PYTHONPATH="", **repository))
        return started[-1]

    yield begin
    started[-1].close()


def say_hello(kernel):
    """Run the cells that follow the first."""
    load, hello = CELLS[1:3]
    assert kernel.run(load).error is None
    assert "hello from rank 1 of 2" in kernel.ok(hello).text


@pytest.mark.slow
@pytest.mark.parametrize("start", ["new"], indirect=True)
def test_the_first_cell_installs_nblaunch_and_the_notebook_goes_on(start):
    kernel = start()
    assert kernel.value("__import__('importlib.util').util.find_spec('nblaunch')") is None
    kernel.ok(CELLS[0], timeout=250)
    say_hello(kernel)
    assert kernel.ok(CELLS[0]).text == "", "a second time there is nothing to do"


@pytest.mark.slow
@pytest.mark.parametrize("start", ["colab"], indirect=True)
def test_where_ipython_is_too_old_the_first_cell_asks_for_a_restart_and_then_does_nothing(start):
    error = start().fails(CELLS[0], timeout=250)
    assert "Restart the session" in error.evalue
    kernel = start()
    assert kernel.ok(CELLS[0]).text == ""
    say_hello(kernel)
