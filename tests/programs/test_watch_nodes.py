"""`--watch` where ranks are on several nodes."""

from __future__ import annotations

import nblaunch
from nblaunch import DesyncError


def differs() -> None:
    import torch
    import torch.distributed as dist

    seen = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(seen)
    if dist.get_rank() == 1:
        dist.broadcast(seen, 0)
        dist.all_reduce(seen)
    else:
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)


def test_collectives_that_differ_between_two_nodes_stop_the_run_with_both_stacks():
    result = nblaunch.run(differs, nproc=1, nnodes=2, on="process", watch="desync", check=False, timeout=120)
    cause = result.root_cause
    assert cause is not None
    assert isinstance(cause.exception, DesyncError)
    assert cause.exception.collectives == {
        0: "all_reduce(max) of float32 [4]",
        1: "broadcast from rank 0 of float32 [4]",
    }
    assert [each.endswith("in differs") for each in cause.exception.stacks.values()] == [True, True]
    assert "contextlib" not in cause.traceback
