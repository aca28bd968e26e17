"""Sketches tell values apart that a rank which comes back must not get for its own."""

from __future__ import annotations

import functools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nblaunch.protocol.variables import is_whole
from nblaunch.rank import revival
from nblaunch.rank.sketches import Sketches, sketch


def parameter(gradient: float | None) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = None if gradient is None else torch.full((2,), gradient)
    return made


ONE = [1]
DIFFERENT = {
    "digits": ([1, 23], [12, 3]),
    "texts": (["a", "sb"], ["as", "b"]),
    "nested lists": ([[1], 2], [[1, 2]]),
    "kinds": (1, True),
    "gradients": (parameter(1.0), parameter(2.0)),
    "a gradient": (parameter(1.0), parameter(None)),
    "an object twice": ([ONE, ONE], [ONE, [1]]),
    "classes": (dict, OrderedDict),
    "imaginary parts": (torch.ones(2) + 1j, torch.ones(2) + 2j),
    "a type that NumPy lacks": (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
    "no dimension": (torch.tensor(1).to(torch.int8), torch.tensor(2).to(torch.int8)),
    "one element of many": (torch.zeros(5000), torch.zeros(5000).index_fill(0, torch.tensor([0]), 1.0)),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_values_that_differ_have_sketches_that_differ(pair):
    first, second = map(sketch, pair)
    assert first != second


@pytest.mark.parametrize(
    "value", [OrderedDict, functools.wraps, torch.nn.Linear, [parameter(1.0)], {"a": [1]}]
)
def test_what_is_imported_or_small_is_known_at_once(value):
    assert is_whole(sketch(value))


@pytest.mark.parametrize("at", [1, 3, None])
def test_an_order_ends_the_comparison_of_a_large_value(at):
    """It comes before a piece is read; nothing is known of the value then, and it is compared later."""
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return bool(len(asked) == at)

    def pickler(file: Any, *, buffers: list[memoryview], check: Callable[[], None]) -> pickle.Pickler:  # noqa: ARG001
        return pickle.Pickler(file, 5, buffer_callback=lambda each: buffers.append(each.raw()))

    variables = {"large": np.zeros(5_000_000)}
    sketches = Sketches(pickler, stop)
    sketches.begin(variables, 0.0)
    assert sketches.go_on(variables) == (at is None)
    _, digests = sketches.of(("large",))
    assert (digests == ()) == (at is not None)
    assert len(asked) == (at or 10)
    assert sketches.waits == (at is not None)
    assert at is None or (sketches.go_on(variables) and is_whole(*sketches.of(("large",))[1]))


def test_an_order_ends_the_pickling_of_many_objects(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 5

    sketches = Sketches(revival.pickler, stop)
    variables = {"model": torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(50)))}
    sketches.begin(variables, 0.0)
    assert not sketches.go_on(variables)
    assert sketches.of(("model",))[1] == ()
    assert len(asked) == 5


def test_code_of_the_notebook_is_not_known_by_its_name():
    namespace = {"__name__": "__main__"}
    exec("def step(): return 1\nclass Model: pass", namespace)  # noqa: S102 - as a cell does
    assert not is_whole(sketch(namespace["step"]))
    assert not is_whole(sketch(namespace["Model"]))
