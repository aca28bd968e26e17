"""Variables that are read when Python or a library is loaded: heeded by a new Python, named for a fork."""

from __future__ import annotations

import os

import pytest

import nblaunch

CHANGED = {"PYTHONHASHSEED": "0", "PYTORCH_JIT": "0", "OMP_NUM_THREADS": "2"}


def look():
    import sys

    import torch

    return [bool(torch.jit._state._enabled), sys.flags.hash_randomization, os.environ["PYTHONHASHSEED"]]


def openblas_threads():
    import ctypes
    from pathlib import Path

    import numpy as np

    np.ones((2, 2)) @ np.ones((2, 2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = []
    for path in {line.split()[-1] for line in maps if "openblas" in line}:
        library = ctypes.CDLL(path)
        names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads")
        found += [getattr(library, name)() for name in names if hasattr(library, name)]
    return found


def test_forks_name_what_they_cannot_heed():
    result = nblaunch.run(look, nproc=2, env=CHANGED)
    (warning,) = result.warnings
    before, _, named = warning.partition(".")[0].partition("no effect in the ranks: ")
    # Another test may have started the fork server, with another PYTHONPATH.
    assert {*named.split(", ")} - {"PYTHONPATH"} == {"PYTHONHASHSEED", "PYTORCH_JIT"}, before
    assert "--start-method spawn" in warning
    # What they can heed is not named, and the variables are there for what the ranks start.
    assert [each[2] for each in result] == ["0", "0"]


def test_a_change_in_the_notebook_is_named_like_one_of_the_option(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    assert "LD_LIBRARY_PATH" in nblaunch.run(look, nproc=1, env={"PYTHONHASHSEED": "0"}).warnings[0]


def test_a_session_names_it_once_with_its_first_cell(place):
    with place(2, env=CHANGED) as session:
        first, second = (session.cell("1", namespace={}) for _ in range(2))
        values = session.run(look).values
    if place.nodes == 1:
        assert "PYTORCH_JIT" in first.warnings[0]
    else:
        # A node of this machine is a new Python, which has read the variables.
        assert (values, first.warnings) == ([[False, 0, "0"]] * 2, ())
    assert second.warnings == ()


@pytest.mark.slow
def test_a_new_python_heeds_it_all():
    result = nblaunch.run(look, nproc=2, env=CHANGED, start_method="spawn")
    assert result.values == [[False, 0, "0"]] * 2
    assert result.warnings == ()


@pytest.mark.parametrize(("nproc", "env", "threads"), [(2, {"OMP_NUM_THREADS": "3"}, 3), (2, {}, 1)])
def test_openblas_follows_omp_num_threads_in_forks_too(nproc, env, threads):
    for found in nblaunch.run(openblas_threads, nproc=nproc, env=env):
        if not found:
            pytest.skip("this NumPy has another BLAS")
        assert set(found) == {threads}
