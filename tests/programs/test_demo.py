"""`python -m nblaunch demo` trains on two ranks, and says so when the result is not right."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import nblaunch
from nblaunch import _demo
from nblaunch.__main__ import main

GOOD = _demo.TrainedRank(device="cpu", samples=719, steps=460, loss=0.1, accuracy=0.97, checksum="abc")


@pytest.fixture
def reports(monkeypatch):
    """Give `reports(*each)`: what the ranks say, in place of a training."""

    def say(*each: _demo.TrainedRank) -> None:
        monkeypatch.setattr(nblaunch, "run", lambda *_, **__: SimpleNamespace(values=list(each)))

    return say


def test_the_demo_shows_a_row_per_rank_and_reaches_95_percent_with_equal_parameters(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # torch's optimizers make this directory, in the temporary directory unless told otherwise.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "nblaunch", "demo"], check=False, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" +\d", line)]
    assert [row[:3] for row in rows] == [["0", "cpu", "719"], ["1", "cpu", "719"]]
    assert rows[0][-1] == rows[1][-1]
    (accuracy,) = re.findall(r"^Test accuracy ([\d.]+),", done.stdout, flags=re.MULTILINE)
    assert float(accuracy) >= 0.95


@pytest.mark.quick
def test_different_parameters_are_a_failure(reports, capsys):
    reports(GOOD, dataclasses.replace(GOOD, checksum="abd"))
    assert main(["demo"]) == 1
    assert "different parameters" in capsys.readouterr().err


@pytest.mark.quick
def test_an_accuracy_below_95_percent_is_a_failure(reports, capsys):
    reports(dataclasses.replace(GOOD, accuracy=0.9), dataclasses.replace(GOOD, accuracy=0.9))
    assert main(["demo"]) == 1
    assert "0.9000 is below 0.95" in capsys.readouterr().err


@pytest.mark.quick
def test_without_scikit_learn_the_demo_names_the_extra(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else found(name))
    assert main(["demo"]) == 1
    assert "pip install 'nblaunch[demo]'" in capsys.readouterr().err


@pytest.mark.quick
def test_a_failed_run_is_told_in_one_message(monkeypatch, capsys):
    def fail(*_args: object, **_keywords: object) -> None:
        raise nblaunch.LaunchError("the ranks could not be started")

    monkeypatch.setattr(nblaunch, "run", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "nblaunch demo: the ranks could not be started\n"
