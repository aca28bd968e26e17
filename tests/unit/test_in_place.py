"""Which groups are formed again in place: by torch and backends, and by what the ranks tell each other."""

from __future__ import annotations

import pytest

from nblaunch.rank import in_place

DEFAULT, PAIR = ([0, 1, 2], "address"), ([0, 2], "address")
BOTH = {"0": DEFAULT, "1": PAIR}


@pytest.mark.parametrize(
    ("torch", "backend", "detail", "can"),
    [
        (True, "gloo", False, True),
        (True, "cpu:gloo", False, True),
        (True, "cpu:gloo,cuda:gloo", False, True),
        (False, "gloo", False, False),
        (True, "gloo", True, False),
        (True, "cpu:gloo,cuda:nccl", False, False),
        (True, "nccl", False, False),
        (True, "nccl2", False, False),
        (True, "xccl", False, False),
        (True, "mpi", False, False),
        (True, "one_of_the_users", False, False),
    ],
)
def test_a_group_is_made_for_it_where_torch_can_and_gloo_is_alone(torch, backend, detail, can):
    assert in_place.can(backend, detail=detail, torch=torch) is can


@pytest.mark.parametrize(
    ("told", "can"),
    [
        ([{"0": DEFAULT}] * 3, True),
        ([BOTH, {"0": DEFAULT}, BOTH], True),
        ([BOTH, {"0": DEFAULT}, {"0": DEFAULT}], False),
        ([{"0": DEFAULT}, {"0": DEFAULT}, {}], False),
        ([{}, {}, {}], False),
        ([{"0": DEFAULT}] * 2, False),
        ([BOTH, {"0": DEFAULT}, {"0": DEFAULT, "1": ([2, 0], "address")}], False),
    ],
    ids=[
        "the default group",
        "a group of two ranks",
        "a rank interrupted within new_group",
        "a rank that joins",
        "no groups",
        "a rank that has gone",
        "another order of ranks",
    ],
)
def test_groups_go_on_where_each_is_there_on_all_of_its_ranks(told, can):
    assert in_place.all_can(told) is can
