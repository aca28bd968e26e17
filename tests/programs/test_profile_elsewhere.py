"""A profile of ranks on several nodes: clocks are measured over the network, and traces come along."""

from __future__ import annotations

import gzip
import json

import pytest

import nblaunch

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

CELL = """
import torch, torch.distributed as dist, nblaunch
gradients = torch.ones(300_000)
for _ in range(400):
    nblaunch.step()
    (gradients * 2).sum()
    dist.all_reduce(gradients)
"""


def test_ranks_on_two_nodes_have_one_profile():
    result = nblaunch.run(
        _train,
        nproc=1,
        nnodes=2,
        on="process",
        profile=True,
        profile_steps="2:5",
        env={"OMP_NUM_THREADS": "1"},
    )
    profile = result.profile
    assert (profile.ranks, profile.missing, profile.steps) == ((0, 1), (), (2, 3, 4, 5))
    errors = [error for error in profile.clock_error.values() if error is not None]
    assert len(errors) == 2
    assert profile.clock_check.violation <= sum(errors)
    assert profile.clock_check.collectives == 4
    events = json.loads(gzip.decompress(profile.path.read_bytes()))["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert sorted(name.partition(" (")[0] for name in names) == ["rank 0", "rank 1"]


@pytest.mark.slow
def test_a_trace_that_is_too_large_for_a_message_comes_in_pieces():
    with nblaunch.Session(1, nnodes=2, on="process", profile=True) as session:
        profile = session.cell(CELL, namespace={}).profile
    events = json.loads(gzip.decompress(profile.path.read_bytes()))["traceEvents"]
    assert {each["pid"] for each in events} == {0, 1}
    assert len(profile.steps) == 400


def _train():
    import torch
    import torch.distributed as dist

    gradients = torch.ones(20_000)
    for _ in range(8):
        nblaunch.step()
        (gradients * 2).sum()
        dist.all_reduce(gradients)
