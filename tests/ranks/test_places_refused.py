"""What the runtime refuses when it places a run: nothing is forked for it."""

from __future__ import annotations

import psutil
import pytest

import nblaunch
from nblaunch.client.local import local


@pytest.fixture(autouse=True)
def nothing_is_forked():
    """Compare the processes below the keeper: the fork server and the runtime."""
    runtime = local().runtime
    assert runtime.welcome.pid  # both have been forked
    parts = psutil.Process(runtime.keeper.pid).children(recursive=True)
    yield
    assert local().runtime is runtime
    assert psutil.Process(runtime.keeper.pid).children(recursive=True) == parts


@pytest.mark.parametrize("name", ["tin", "cpu:gloo,cuda:tin", "cpu:tin"])
@pytest.mark.parametrize("start", [nblaunch.Session, lambda **options: nblaunch.run(int, **options)])
def test_an_unknown_backend_is_refused_before_a_process_starts(name, start):
    with pytest.raises(nblaunch.OptionError, match=r"'tin' was asked for, but torch has gloo, .*here"):
        start(nproc=2, backend=name, display=False)


def test_the_nearest_name_is_offered():
    with pytest.raises(nblaunch.OptionError, match=r"Did you mean 'gloo'"):
        nblaunch.run(int, nproc=2, backend="glooo", display=False)


def test_a_session_that_needs_gpus_where_there_are_none_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(nblaunch.OptionError, match="gpu"):
        nblaunch.Session("gpu")
