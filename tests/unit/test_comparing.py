"""The comparison of ranks by digests finds what a naive comparison of all contents finds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from test_diff_contents import compared, holding_of

from nblaunch.insight.comparing import compare, element_path, size_of, spread_of
from nblaunch.insight.difference import Compared, Difference

LEAVES = st.one_of(st.integers(-2, 2), st.sampled_from(["a", "b", None, True, 0.5]))
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abcd"), inner, max_size=4)
    ),
    max_leaves=20,
)


def typed(obj):
    """Return an object whose `==` also tells 1, 1.0 and True apart."""
    match obj:
        case list():
            return [typed(each) for each in obj]
        case dict():
            return {key: typed(each) for key, each in obj.items()}
    return type(obj).__name__, obj


@examples(80)
@given(st.lists(OBJECTS, min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=2, max_size=6))
def test_ranks_are_equal_exactly_if_their_objects_are(kinds, chosen):
    objects = [kinds[each % len(kinds)] for each in chosen]
    found = compared(*objects)
    assert found.equal == all(typed(each) == typed(objects[0]) for each in objects)
    if found:
        row = found.first
        members = sorted(rank for group in row.groups for rank in group)
        assert members == list(range(len(objects)))
        assert len(row.groups) > 1
        for group in row.groups:
            for rank in range(len(objects)):
                # Ranks with the same object are never told apart.
                if typed(objects[rank]) == typed(objects[group[0]]):
                    assert rank in group


@examples(15)
@given(st.integers(1, 300_000), st.data())
def test_of_a_tensor_the_first_element_and_the_largest_difference_are_found(length, data):
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4, unique=True))
    sizes = [data.draw(st.sampled_from([0.25, 1.0, -3.0])) for _ in places]
    one = torch.zeros(length)
    two = one.clone()
    for place, size in zip(places, sizes, strict=True):
        two[place] = size
    row = compared(one, two, one).first
    apart = (two - one).abs()
    assert row.path == f"x[{min(places)}]"
    assert row.groups == ((0, 2), (1,))
    assert (row.differing, row.largest, row.exact) == (len(places), apart.max().item(), True)
    assert row.largest_at == f"x[{int(apart.argmax())}]"


@pytest.mark.full
def test_of_ten_thousand_tensors_and_64_ranks_less_than_a_megabyte_moves():
    models = [{f"layers.{number}.weight": [number] for number in range(10_000)} for _ in range(3)]
    models[1]["layers.777.weight"] = [-1]
    models[2]["layers.9999.weight"] = [-1]
    # One list for all ranks that have the same.
    holdings = {kind: holding_of(models[kind]) for kind in range(3)}
    kinds = [0] * 60 + [1] * 3 + [2]
    rounds = compare(range(64), ("model",))
    asked, moved, row = next(rounds), 0, None
    try:
        while True:
            asked_of = {kinds[rank] for rank in asked.ranks}
            known = {kind: holdings[kind].answer(asked.ask) for kind in asked_of}
            moved += sum(size_of(known[kinds[rank]]) for rank in asked.ranks)
            asked = rounds.send({rank: known[kinds[rank]] for rank in asked.ranks})
    except StopIteration as end:
        row = end.value.first
    assert row.path == "model['layers.777.weight'][0]"
    assert row.groups == (tuple(kind for kind in range(64) if kinds[kind] != 1), (60, 61, 62))
    assert moved < 1_000_000


@pytest.mark.full
def test_64_ranks_that_all_differ_move_less_than_a_megabyte():
    tensors = [torch.full((100_000,), float(rank)) for rank in range(64)]
    found = compared(*tensors)
    assert found.first.groups == tuple((rank,) for rank in range(64))
    assert found.moved < 1_000_000


@pytest.mark.parametrize(
    ("values", "apart"),
    [((1, 4, 2), 3.0), ((1 + 1j, 1 - 1j), 2.0), ((math.inf, 1.0), math.inf), ((math.inf, math.inf), 0.0)],
)
def test_the_spread_of_numbers(values, apart):
    assert spread_of(values) == apart


def test_an_element_has_a_place_in_each_dimension():
    assert element_path("w", (2, 3, 4), 23) == "w[1, 2, 3]"


FOUND = Difference(
    (0, 1, 2, 3),
    (
        Compared("step"),
        Compared(
            "model",
            "model.fc.weight[17, 4]",
            "values differ",
            ((0, 1, 3), (2,)),
            ("0.125", "<b>$x$</b>"),
            4096,
            1,
            0.25,
            "model.fc.weight[17, 4]",
        ),
    ),
)


def test_a_report_is_text():
    assert str(FOUND).splitlines() == [
        "step: equal on ranks 0-3",
        "model: model.fc.weight[17, 4]: values differ. ranks 0-1,3 agree; rank 2 differs",
        "    largest difference: 0.25 at model.fc.weight[17, 4]",
        "    elements that differ: 1 of 4096",
        "    ranks 0-1,3: 0.125",
        "    rank 2: <b>$x$</b>",
    ]
    assert FOUND
    assert FOUND.first is FOUND["model"]
    with pytest.raises(KeyError):
        FOUND["other"]


def test_what_ranks_say_is_escaped_in_the_html():
    shown = FOUND._repr_html_()
    assert "<b>" not in shown
    assert "&lt;b&gt;$x$&lt;/b&gt;" in shown
    assert "<script" not in shown
    assert "style=" in shown
