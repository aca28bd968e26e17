"""The Tab key offers what this notebook knows: sessions, hosts of an allocation, variables."""

from __future__ import annotations

import types

import pytest

from nblaunch import _notebook
from nblaunch.magic import completion, sessions
from nblaunch.magic.commands import command_completions
from nblaunch.options.command_line import option_completions


@pytest.fixture
def opened(monkeypatch):
    """Give the notebook two sessions, whose ranks have variables."""
    known = {
        name: types.SimpleNamespace(open=True, names=lambda names=names: names)
        for name, names in (("default", ("model", "loss")), ("train", ("model2",)))
    }
    monkeypatch.setattr(sessions, "_sessions", known)
    return known


@pytest.fixture
def allocation(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-03]")


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("%%distributed --session ", ["default", "train"]),
        ("%%distributed -n 2 --session=t", ["train"]),
        (
            "%%distributed --on ",
            ["process", "join", "ssh=", "slurm", "ray", "ssh=gpu01", "ssh=gpu02", "ssh=gpu03"],
        ),
        ("%%distributed --on ssh=", ["gpu01", "gpu02", "gpu03"]),
        ("%%distributed --on ssh=gpu01,", ["gpu02", "gpu03"]),
        ("%%distributed --on=ssh=gpu03,gpu0", ["gpu01", "gpu02"]),
    ],
)
@pytest.mark.usefixtures("opened", "allocation")
def test_values_that_the_notebook_knows_are_offered(text, offered):
    found = option_completions(text, values=completion.choices())
    assert sorted(found) == sorted(offered)


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("%distributed pull ", ["model", "loss"]),
        ("%distributed pull loss mo", ["model"]),
        ("%distributed pull --session train ", ["model2"]),
        ("%distributed inspect l", ["loss"]),
        ("%distributed push le", ["learning_rate"]),
        ("%distributed pull --se", ["--session"]),
        ("%distributed start --session de", ["default"]),
        ("%distributed start -n 2 --backend g", ["gloo"]),
        ("%distributed start --on ssh=gpu02,gpu01,", ["gpu03"]),
        ("%distributed run --on ssh=gpu01,gpu02,", ["gpu03"]),
    ],
)
@pytest.mark.usefixtures("opened", "allocation")
def test_commands_offer_variables_and_values(monkeypatch, text, offered):
    monkeypatch.setattr(_notebook, "namespace", lambda: {"learning_rate": 1, "In": [], "_hidden": 2})
    assert command_completions(text) == offered


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("", []),
        ("one", ["one"]),
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("a[08-10]-ib", ["a08-ib", "a09-ib", "a10-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[x-y]", []),
    ],
)
def test_the_hosts_of_a_slurm_allocation(listed, hosts):
    assert completion.allocated_hosts({"SLURM_JOB_NODELIST": listed}) == hosts


def test_an_endless_list_of_hosts_is_cut():
    hosts = completion.allocated_hosts({"SLURM_JOB_NODELIST": "n[1-999999999]" + "[1-999999999]" * 3})
    assert len(hosts) <= 4096


def test_the_hosts_of_other_schedulers(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    assert completion.allocated_hosts({"PBS_NODEFILE": str(tmp_path / "nodes")}) == ["a", "b"]
    assert completion.allocated_hosts({"PBS_NODEFILE": str(tmp_path / "gone")}) == []
    assert completion.allocated_hosts({"LSB_HOSTS": "a a b"}) == ["a", "b"]
