"""`@pytest.mark.distributed`: pytest as a user starts it, on files of a user's."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

HEAD = """\
import os, sys, threading, time
import pytest
import torch
import torch.distributed as dist

distributed = pytest.mark.distributed
"""
WITHOUT_TORCH = """\
import sys

def test_loads_nothing():
    ours = {name for name in sys.modules if name.partition(".")[0] == "nblaunch"}
    assert ours == {"nblaunch", "nblaunch._pytest", "nblaunch._version"}
"""
QUICK = """\
class Scale:
    def __init__(self, by):
        self.by = by

@pytest.fixture
def scale():
    return Scale(10)

@distributed(nproc=2)
def test_adds_up(scale, tmp_path):
    total = torch.ones(1) * scale.by
    dist.all_reduce(total)
    assert isinstance(scale, Scale)
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    assert total.item() == 20

@distributed(nproc=2)
def test_fails_on_one_rank():
    print("from all")
    print("from", dist.get_rank())
    got = {"loss": [1, 2, 3], "rank": dist.get_rank()}
    assert got == {"loss": [1, 2, 3], "rank": 0}

def test_after_the_first_failure(): pass
"""
OUTCOMES = """\
def test_without_the_mark():
    assert not dist.is_initialized()

@distributed(nproc=2)
def test_first():
    sys.first = os.getpid()

@distributed(nproc=2)
def test_has_the_same_ranks():
    assert sys.first == os.getpid()

@distributed(nproc=2)
@pytest.mark.parametrize("number", [1, pytest.param(2, id="two")])
def test_parameter(number):
    assert number < 2

@distributed(nproc=2)
def test_skips_on_one_rank():
    if dist.get_rank() == 1:
        pytest.skip("no such device")
    dist.barrier()

@distributed(nproc=2)
def test_fails_though_the_other_rank_skips():
    if dist.get_rank() == 0:
        pytest.skip("not here")
    assert dist.get_rank() == 7

@distributed(nproc=2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_is_expected_to_raise():
    1 / 0

@distributed(nproc=2)
@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail_and_passes():
    pass

@distributed(nproc=2)
def test_calls_xfail():
    pytest.xfail("known")

@distributed(nproc=2)
def test_exits():
    sys.exit(0)

class Odd(Exception):
    def __init__(self):
        super().__init__("cannot be sent")
        self.held = threading.Lock()

@distributed(nproc=2)
def test_raises_what_cannot_be_sent():
    raise Odd

@pytest.fixture(scope="module")
def shared():
    return []

@distributed(nproc=2)
def test_changes_its_copy(shared):
    shared.append(1)
    assert shared == [1]

@distributed(nproc=2)
def test_has_a_copy_of_its_own(shared):
    assert shared == []

class TestOfAClass:
    @pytest.fixture(autouse=True)
    def sets(self):
        self.number = 3

    @distributed(nproc=2)
    def test_method(self, monkeypatch):
        monkeypatch.setenv("CHANGED_HERE", "1")
        assert self.number == 3

@distributed(nproc=2)
def test_patches_are_undone():
    assert "CHANGED_HERE" not in os.environ

@distributed(nproc=3)
def test_has_three():
    assert dist.get_world_size() == 3

@distributed(nproc=2, timeout=2)
def test_hangs():
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        while True:
            time.sleep(0.1)

@distributed(nproc=2)
def test_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

@distributed(nproc=2)
def test_after_a_death():
    open(f"rank-{os.getpid()}", "w").close()
    dist.barrier()
"""
LATER = """\
import pathlib, psutil

def test_the_ranks_of_the_module_before_are_gone():
    pids = [int(path.name.partition("-")[2]) for path in pathlib.Path.cwd().glob("rank-*")]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
"""
WRONG = """\
import unittest

@pytest.fixture
def held():
    return {"lock": threading.Lock()}

@distributed(nproc=2)
def test_fixture(held): pass

@distributed(nproc=2)
def test_capsys(capsys): pass

@distributed(nproc=0)
def test_zero(): pass

@distributed(nprocs=2)
def test_misspelled(): pass

@distributed(2, 3)
def test_two_numbers(): pass

@distributed(nproc=2, out="x")
def test_of_a_magic(): pass

@distributed(nproc=2, detach=True)
def test_detached(): pass

@distributed(nproc=2)
async def test_async(): pass

class TestUnit(unittest.TestCase):
    @distributed(nproc=2)
    def test_of_unittest(self): pass
"""


@dataclass
class Report:
    """What a pytest has said: its output, and each test's outcome with its message."""

    output: str
    outcomes: dict[str, tuple[str, str]]


def run_pytest(
    where: Path, source: str, *arguments: str, command: Sequence[str] = (sys.executable, "-m", "pytest")
) -> Report:
    """Run pytest as a user's shell does: with nothing of these tests in the environment."""
    (where / "test_it.py").write_text(source)
    foreign = ("PYTEST_", "NBLAUNCH_DISPLAY", "COVERAGE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    options = ("-p", "no:cacheprovider", "--junitxml=it.xml", "-ra")
    done = subprocess.run(
        [*command, *options, "test_it.py", *arguments],
        cwd=where,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "NBLAUNCH_STANDBY": "0", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    output = done.stdout + done.stderr
    assert (where / "it.xml").is_file(), output
    outcomes = {}
    for case in ET.parse(where / "it.xml").iter("testcase"):  # noqa: S314 - pytest has just written it
        inner = next(iter(case), None)
        kind, message = ("passed", "") if inner is None else (inner.tag, inner.get("message", ""))
        outcomes[case.get("name", "")] = (kind, message)
    return Report(output, outcomes)


def test_a_test_runs_on_ranks_and_fails_with_pytests_own_explanation(tmp_path):
    report = run_pytest(tmp_path, HEAD + QUICK, "-x", "--pdb")
    assert report.outcomes["test_adds_up"] == ("passed", ""), report.output
    assert set(report.outcomes) == {"test_adds_up", "test_fails_on_one_rank"}
    kind, message = report.outcomes["test_fails_on_one_rank"]
    assert kind == "failure"
    assert message.startswith("[rank 1] AssertionError: assert {'loss': [1, 2, 3], 'rank': 1} ==")
    assert ">       assert got ==" in report.output
    assert "E         {'rank': 1} != {'rank': 0}" in report.output
    assert "This is rank 1 of 2." in report.output
    assert "[ranks 0-1] from all\n[rank 0] from 0\n[rank 1] from 1" in report.output
    assert "/nblaunch/" not in report.output
    assert "--pdb cannot enter a rank" in report.output
    assert "(Pdb)" not in report.output


def test_it_is_an_entry_point_of_pytest():
    (found,) = [each for each in importlib.metadata.entry_points(group="pytest11") if each.name == "nblaunch"]
    assert found.value == "nblaunch._pytest"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("outcomes")
    (directory / "test_later.py").write_text(LATER)
    return run_pytest(directory, HEAD + OUTCOMES + WRONG, "test_later.py")


OF_RANKS = [
    ("test_without_the_mark", "passed", ""),
    ("test_has_the_same_ranks", "passed", ""),
    ("test_parameter[1]", "passed", ""),
    ("test_parameter[two]", "failure", "[ranks 0-1] assert 2 < 2"),
    ("test_skips_on_one_rank", "skipped", "[rank 1] no such device"),
    ("test_fails_though_the_other_rank_skips", "failure", "[rank 1] assert 1 == 7"),
    ("test_is_expected_to_raise", "skipped", ""),
    ("test_is_expected_to_fail_and_passes", "failure", "[XPASS(strict)]"),
    ("test_calls_xfail", "skipped", "[ranks 0-1] known"),
    ("test_exits", "failure", "[ranks 0-1] SystemExit: 0"),
    ("test_raises_what_cannot_be_sent", "failure", "[ranks 0-1] test_it.Odd: cannot be sent"),
    ("test_changes_its_copy", "passed", ""),
    ("test_has_a_copy_of_its_own", "passed", ""),
    ("test_method", "passed", ""),
    ("test_patches_are_undone", "passed", ""),
    ("test_has_three", "passed", ""),
    ("test_hangs", "failure", "RunTimeoutError: the run was given 2 s"),
    ("test_dies", "failure", "[rank 1] was killed by SIGKILL"),
    ("test_after_a_death", "passed", ""),
    ("test_the_ranks_of_the_module_before_are_gone", "passed", ""),
]
OF_WRONG_USE = [
    (
        "test_fixture",
        "failure",
        "fixture or parameter 'held' cannot be sent to ranks. held['lock']: cannot",
    ),
    ("test_capsys", "error", "the fixture 'capsys' is of pytest's own process"),
    ("test_zero", "error", "nproc=0 was asked for, but it takes a whole number"),
    ("test_misspelled", "error", "Did you mean nproc=?"),
    ("test_two_numbers", "error", "it takes one number of ranks"),
    ("test_of_a_magic", "error", "only a magic has this option"),
    ("test_detached", "error", "the ranks of tests end with their module"),
    ("test_async", "error", "cannot run an async test"),
    ("test_of_unittest", "error", "cannot run a method of unittest.TestCase"),
]


@pytest.mark.parametrize("cases", [OF_RANKS, OF_WRONG_USE], ids=["ranks", "wrong use"])
def test_an_outcome_of_ranks_is_one_outcome_of_pytest_and_wrong_use_is_named(outcomes, cases):
    for name, kind, message in cases:
        found, text = outcomes.outcomes[name]
        assert (found, message in text) == (kind, True), f"{name}\n{outcomes.output}"
    assert "which rank 1 has not started" in outcomes.output, "a hang is a report"
    assert "[rank 1] at " in outcomes.output


@pytest.mark.slow
def test_a_worker_of_xdist_reports_as_pytest_does(tmp_path):
    report = run_pytest(tmp_path, HEAD + QUICK, "-n", "1", "--tb=short")
    assert report.outcomes["test_adds_up"][0] == "passed", report.output
    assert "assert {'loss': [1, 2, 3], 'rank': 1} ==" in report.outcomes["test_fails_on_one_rank"][1]
    assert report.outcomes["test_after_the_first_failure"][0] == "passed"
    assert "[ranks 0-1] from all" in report.output


IN_FOLDERS = """\
import pytest

class OwnError(Exception):
    pass

@pytest.mark.distributed(nproc=2)
@pytest.mark.parametrize("kind", [OwnError, OwnError()])
def test_classes_of_the_file_are_the_same_there(kind, of_conftest):
    assert kind is OwnError or isinstance(kind, OwnError)
    assert of_conftest.number == 5

@pytest.mark.distributed(nproc=2)
@pytest.mark.xfail(raises=OwnError, strict=True)
def test_exceptions_of_the_file_are_the_same_here():
    raise OwnError("its own")
"""
CONFTEST = """\
import pytest

class Number:
    number = 5

@pytest.fixture
def of_conftest():
    return Number()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--import-mode=importlib",), ("--assert=plain",)], ids=str)
def test_files_are_found_however_pytest_imports_them(tmp_path, options):
    folder = tmp_path / "tests" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "conftest.py").write_text(CONFTEST)
    (folder / "test_inner.py").write_text(IN_FOLDERS)
    report = run_pytest(
        tmp_path, "", "tests", *options, command=(str(Path(sys.executable).with_name("pytest")),)
    )
    kinds = [kind for kind, _ in report.outcomes.values()]
    assert sorted(kinds) == ["passed", "passed", "skipped"], report.output


def test_without_a_mark_pytest_loads_three_small_modules(tmp_path):
    report = run_pytest(tmp_path, WITHOUT_TORCH)
    assert report.outcomes == {"test_loads_nothing": ("passed", "")}, report.output
