"""What the runtime refuses when it places a run: nothing is forked for it."""

from __future__ import annotations

import gc
import threading

import psutil
import pytest

import nblaunch
from nblaunch.client.local import Runtime, local
from nblaunch.protocol.client import DismissSession

pytestmark = pytest.mark.quick


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


def test_an_option_is_refused_before_a_value_that_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(nblaunch.OptionError, match="'tin' was asked for"):
        nblaunch.run(lambda: lock, nproc=2, backend="tin", display=False)


def test_ranks_whose_job_cannot_be_captured_are_forgotten(monkeypatch):
    lock, noted, note = threading.Lock(), [], Runtime.note

    def noting(runtime, each):
        noted.append(each)
        note(runtime, each)

    monkeypatch.setattr(Runtime, "note", noting)
    with pytest.raises(nblaunch.CaptureError, match="lock"):
        nblaunch.run(lambda: lock, nproc=2, display=False)
    gc.collect()
    assert [each for each in noted if isinstance(each, DismissSession)]


def test_a_session_that_needs_gpus_where_there_are_none_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(nblaunch.OptionError, match="gpu"):
        nblaunch.Session("gpu")
