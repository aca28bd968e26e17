"""How values look: large tensors and arrays in one line, everything else as it always does."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import PlainTextFormatter
from lanes import examples

from nblaunch.rank.values import LARGE, summarised

NAN, INFINITE = float("nan"), float("inf")
N = 2 * LARGE


def shown(value, formatter=None):
    """Return what a rank says of a value."""
    formatter = formatter or PlainTextFormatter()
    with summarised(formatter.type_printers):
        return formatter(value)


def usual(value):
    return PlainTextFormatter()(value)


SQUARES = torch.arange(float(N)).square()

DENSE = {
    "float32": (SQUARES, "min=0, max=3.996e+06, mean=1.332e+06"),
    "bfloat16": (torch.linspace(-4, 4, N, dtype=torch.bfloat16), "min=-4, max=4, mean=0"),
    "float16": (torch.full((N,), 0.5, dtype=torch.float16), "min=0.5, max=0.5, mean=0.5"),
    "float64": (torch.full((N,), 1e300, dtype=torch.float64), "min=1e+300, max=1e+300, mean=1e+300"),
    "float8_e4m3fn": (torch.ones(N).to(torch.float8_e4m3fn), "min=1, max=1, mean=1"),
    "int64": (torch.arange(N) + 2**60, f"min={2**60}, max={2**60 + N - 1}, mean=1.153e+18"),
    "uint8": (torch.full((N,), 200, dtype=torch.uint8), "min=200, max=200, mean=200"),
    "uint16": (torch.arange(N).to(torch.uint16), "min=0, max=1999, mean=999.5"),
    "bool": (torch.arange(N) % 4 == 0, "min=0, max=1, mean=0.25"),
}


@pytest.mark.parametrize(("name", "expected"), [(name, text) for name, (_, text) in DENSE.items()])
def test_a_large_tensor_is_its_shape_type_device_and_statistics(name, expected):
    tensor = DENSE[name][0]
    assert shown(tensor) == f"tensor(shape=(2000,), dtype={name}, device=cpu, {expected})"


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, NAN] * LARGE), "min=1, max=1, mean=1, finite=1000 of 2000"),
        (torch.tensor([1.0, -INFINITE, INFINITE, 3.0] * LARGE), "min=1, max=3, mean=2, finite=2000 of 4000"),
        (torch.full((N,), NAN), "finite=0 of 2000"),
        (torch.full((N,), 1e308, dtype=torch.float64), "min=1e+308, max=1e+308"),
        (torch.tensor([1e20, -1e20, 1.0, -1.0] * LARGE), "min=-1e+20, max=1e+20, mean=0"),
        (torch.zeros(N) * -1, "min=0, max=0, mean=0"),
    ],
)
def test_what_is_not_finite_is_counted_and_left_out(tensor, expected):
    assert shown(tensor).endswith(f"device=cpu, {expected})")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: torch.ones(LARGE),
        lambda: torch.tensor(1.5),
        lambda: torch.empty(0, 5000),
        lambda: torch.empty(5000, device="meta"),
        lambda: torch.eye(2000).to_sparse(),
        lambda: torch.nn.Linear(3, 3),
        lambda: np.ones(LARGE),
        lambda: np.array(["a"] * N),
        lambda: np.array([None] * N),
        lambda: np.zeros(N, dtype=[("x", "f4")]),
        lambda: np.ma.masked_array(np.ones(N)),
        lambda: {"rank": 0, "loss": [1.5, None]},
    ],
)
def test_everything_else_looks_as_it_always_does(make):
    value = make()
    assert shown(value) == usual(value)


def test_complex_numbers_have_no_statistics():
    assert shown(torch.ones(N, dtype=torch.complex64)) == "tensor(shape=(2000,), dtype=complex64, device=cpu)"
    assert shown(np.ones(N, dtype=complex)) == "array(shape=(2000,), dtype=complex128)"


def test_a_subclass_speaks_for_itself():
    """Statistics of a DTensor would be a collective, which other ranks do not take part in."""

    class Distributed(torch.Tensor):
        def __repr__(self, *, tensor_contents=None):
            return "mine"

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.sum, torch.Tensor.aminmax, torch.Tensor.permute):
                pytest.fail("a collective")
            return super().__torch_function__(func, types, args, kwargs)

    assert shown(torch.ones(N).as_subclass(Distributed)) == "mine"


def test_tensors_within_a_value_are_summarised_where_they_stand():
    layer = torch.nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.fill_(2)
    text = shown({"weight": layer.weight, "steps": [1, (torch.ones(2, 2), np.arange(N))]})
    summary = "Parameter(shape=(64, 64), dtype=float32, device=cpu, requires_grad=True, min=2, max=2, mean=2)"
    assert summary in text
    assert "array(shape=(2000,), dtype=int64, min=0, max=1999, mean=999.5)" in text
    # As IPython indents it: the second line of the tensor stands below its first.
    first, second = re.findall(r"^.*\[1., 1.\].*$", text, re.MULTILINE)
    assert first.index("[1., 1.]") == second.index("[1., 1.]")


def test_what_the_user_registered_is_respected_and_nothing_stays():
    formatter = PlainTextFormatter()
    before = dict(formatter.type_printers)
    assert "shape=" in shown(SQUARES, formatter)
    assert formatter.type_printers == before
    formatter.for_type(torch.Tensor, lambda *arguments: arguments[1].text("my own"))
    assert shown([SQUARES], formatter) == "[my own]"


def test_a_view_of_memory_in_another_order_has_the_same_statistics():
    whole = torch.arange(300_000.0).reshape(3, 1000, 100)
    views = [whole, whole.permute(2, 0, 1), whole.flip(1), whole.unsqueeze(0).expand(2, 3, 1000, 100)]
    texts = [shown(view).partition("min=")[2] for view in views]
    assert texts == ["0, max=3e+05, mean=1.5e+05)"] * 4
    turned = whole.numpy()[::-1].T
    assert shown(turned).partition("min=")[2] == texts[0]


def test_more_elements_than_can_be_read_in_a_moment_have_no_statistics():
    endless = torch.ones(1).expand(10**12)
    assert shown(endless) == "tensor(shape=(1000000000000,), dtype=float32, device=cpu)"
    frozen = np.broadcast_to(np.float32(1), (10**6, 10**6))
    assert shown(frozen) == "array(shape=(1000000, 1000000), dtype=float32)"
    # The budget is that of the whole value.
    half = torch.ones(1).expand((1 << 25) + 1)
    assert shown([half, half]).count("mean=") == 1


ANY_NUMBERS = st.one_of(st.floats(-1e300, 1e300), st.sampled_from([NAN, INFINITE, -INFINITE]))


@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy])
@given(
    seeds=st.lists(ANY_NUMBERS, min_size=6, max_size=6),
    kind=st.sampled_from("efdbhilBH?"),
    axes=st.permutations(range(3)),
)
@examples(60)
def test_statistics_are_those_of_the_finite_elements_whatever_they_are(of, seeds, kind, axes):
    with np.errstate(all="ignore"):
        numbers = np.tile(seeds, 2 * LARGE).astype(kind).reshape(6, 20, 100).transpose(axes)
    text = shown(of(numbers))
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    found = dict(re.findall(r"(min|max|mean|finite)=([^ ,)]+)", text))
    assert int(found.get("finite", numbers.size)) == finite.size
    if finite.size:
        assert float(found["min"]) == pytest.approx(finite.min(), rel=1e-3)
        assert float(found["max"]) == pytest.approx(finite.max(), rel=1e-3)
        if "mean" in found:
            scale = np.abs(finite).max()
            assert float(found["mean"]) == pytest.approx(finite.mean(), rel=1e-3, abs=2e-9 * scale)
