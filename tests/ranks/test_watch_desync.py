"""`--watch desync`: ranks whose collectives differ are stopped before they compute nonsense.

A rank looks before it begins a collective. So the tests let one rank come last: it is the one that sees the
others, and its peers wait where a collective of theirs never ends.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from lanes import sampled
from older_torch import SUM, needs_reductions

import nblaunch
from nblaunch import DesyncError, RunFailedError

SETUP = """
import os, time, torch, torch.distributed as dist

def after(others, directory):
    '''Return once the other ranks have come here, and had the time to begin.'''
    while len(os.listdir(directory)) < others:
        time.sleep(0.005)
    time.sleep(0.2)

def come(directory):
    open(os.path.join(directory, str(dist.get_rank())), "w").close()
"""


@pytest.fixture(scope="module")
def session():
    with nblaunch.Session(3, watch="desync") as opened:
        opened.cell(SETUP, namespace={})
        yield opened


def last(session: nblaunch.Session, directory: Any, others: str, mine: str) -> RunFailedError:
    """Run a cell in which rank 2 comes last, to another collective; return the error."""
    source = f"""
    if rank == 2:
        after(2, {str(directory)!r})
        {mine}
    else:
        come({str(directory)!r})
        {others}
    """
    with pytest.raises(RunFailedError) as caught:
        session.cell(textwrap.dedent(source), namespace={})
    return caught.value


CASES = {
    "kind": ("dist.all_reduce(torch.ones(4))", "dist.broadcast(torch.ones(4), 0)"),
    "size": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(5))"),
    "type": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4, dtype=torch.float64))"),
    "reduction": pytest.param(
        "dist.all_reduce(torch.ones(4))",
        "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)",
        marks=needs_reductions,
    ),
    "root": ("dist.reduce(torch.ones(4), 0)", "dist.reduce(torch.ones(4), 1)"),
    "barrier": ("dist.barrier()", "dist.all_reduce(torch.ones(1))"),
    "gathered size": (
        "dist.all_gather([torch.ones(4)] * 3, torch.ones(4))",
        "dist.all_gather([torch.ones(6)] * 3, torch.ones(6))",
    ),
    "scattered size": (
        "dist.reduce_scatter_tensor(torch.ones(2), torch.ones(6))",
        "dist.reduce_scatter_tensor(torch.ones(4), torch.ones(12))",
    ),
    "begun and not awaited": (
        "work = dist.all_reduce(torch.ones(4), async_op=True); work.wait()",
        "work = dist.all_reduce(torch.ones(3), async_op=True)",
    ),
    "inference mode": (
        "with torch.inference_mode(): dist.all_reduce(torch.ones(4))",
        "with torch.no_grad(): dist.all_reduce(torch.ones(5))",
    ),
}


@pytest.mark.parametrize(("others", "mine"), sampled(CASES.values(), 2))
def test_collectives_that_differ_stop_the_ranks_and_the_session_goes_on(session, tmp_path, others, mine):
    error = last(session, tmp_path, others, mine)
    cause = error.root_cause.exception
    assert (error.root_cause.rank, type(cause)) == (2, DesyncError)
    assert sorted(cause.collectives) == [0, 1, 2]
    assert cause.collectives[0] == cause.collectives[1] != cause.collectives[2] or "inference" in mine
    assert all(failure.rank == 2 or failure.consequence_of == 2 for failure in error.result.failures)
    sums = session.cell("t = torch.ones(1); dist.all_reduce(t); t.item()", namespace={}).values
    assert sums == [3.0, 3.0, 3.0]


@pytest.mark.quick
def test_the_error_names_both_collectives_and_both_stacks(session, tmp_path):
    session.cell("def reduce(t):\n    dist.all_reduce(t)", namespace={})
    error = last(session, tmp_path, "reduce(torch.ones(4))", "dist.broadcast(torch.ones(2, 2), 0)")
    cause = error.root_cause.exception
    assert cause.collectives == {
        0: f"all_reduce{SUM} of float32 [4]",
        1: f"all_reduce{SUM} of float32 [4]",
        2: "broadcast from rank 0 of float32 [2, 2]",
    }
    assert cause.stacks[0].splitlines()[-1].endswith("line 2, in reduce")
    assert cause.stacks[0].splitlines()[-2].endswith("line 6, in <module>")
    assert cause.stacks[2].endswith("line 3, in <module>")
    assert str(cause).startswith(
        f"collective 1 of the default group differs: ranks 0-1 call all_reduce{SUM} of float32 [4], but "
        "rank 2 calls broadcast from rank 0 of float32 [2, 2]\nranks 0-1:\n"
    )
    assert error.root_cause.frames[0].line == 3


def test_a_group_of_some_ranks_is_named(session, tmp_path):
    session.cell("some = dist.new_group([0, 2])", namespace={})
    source = f"""
    if rank == 2:
        after(1, {str(tmp_path)!r})
        dist.all_reduce(torch.ones(7), group=some)
    elif rank == 0:
        come({str(tmp_path)!r})
        dist.all_reduce(torch.ones(8), group=some)
    """
    with pytest.raises(RunFailedError) as caught:
        session.cell(textwrap.dedent(source), namespace={})
    words = str(caught.value.root_cause.exception)
    assert f"of ranks 0,2 differs: rank 0 calls all_reduce{SUM} of float32 [8], but rank 2 calls" in words


ALLOWED = {
    "shapes of one size": "dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(6))",
    "scalars": "dist.all_reduce(torch.tensor(1.0) if rank else torch.ones(1))",
    "objects": """
        gathered = [None] * world_size
        dist.all_gather_object(gathered, "x" * 100 * rank)
        sent = [rank * 100, "a"] if rank == 0 else [None, None]
        dist.broadcast_object_list(sent, 0)
        dist.gather_object(rank, [None] * world_size if rank == 1 else None, 1)
        scattered = [None]
        dist.scatter_object_list(scattered, ["a", "bb", "ccc"] if rank == 0 else None, 0)
    """,
    "lists of the root": """
        parts = [torch.ones(4) for _ in range(world_size)]
        dist.gather(torch.ones(4), parts if rank == 0 else None, 0)
        dist.scatter(torch.ones(4), parts if rank == 0 else None, 0)
    """,
    "parts of any size": """
        sent = torch.ones(sum(range(world_size + 1)))
        splits = [[1, 2, 3], [2, 2, 2], [3, 2, 1]]
        dist.all_to_all_single(
            torch.empty(sum(each[rank] for each in splits)), torch.ones(6),
            [each[rank] for each in splits], splits[rank],
        )
    """,
    "sends and receives": """
        if rank == 0:
            dist.send(torch.ones(3), 1)
        elif rank == 1:
            dist.recv(torch.ones(3), 0)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % 3),
            dist.P2POp(dist.irecv, torch.ones(2), (rank - 1) % 3),
        ])
        [each.wait() for each in works]
    """,
    "groups in turn": """
        odd, even = dist.new_group([0, 1]), dist.new_group([1, 2])
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=odd)
        if rank > 0:
            dist.all_reduce(torch.ones(9), group=even)
        dist.all_reduce(torch.ones(4))
        if rank == 1:
            first = dist.all_reduce(torch.ones(2), group=odd, async_op=True)
            dist.all_reduce(torch.ones(9), group=even)
            first.wait()
        else:
            dist.all_reduce(torch.ones(2 if rank == 0 else 9), group=odd if rank == 0 else even)
    """,
    "modes of autograd": """
        with torch.inference_mode() if rank else torch.no_grad():
            dist.all_reduce(torch.ones(4))
        import torch.distributed._functional_collectives as functional
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
    """,
    "uneven inputs": """
        from torch.distributed.algorithms.join import Join
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        with Join([model]):
            for _ in range(rank + 1):
                model(torch.ones(2, 4)).sum().backward()
    """,
    "sharded": """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        for each in (*model, model):
            fully_shard(each, mesh=init_device_mesh("cpu", (world_size,)))
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
    """,
    "many": "[dist.broadcast(torch.ones(2), 0) for _ in range(400)]",
    "a rank that is done": "dist.all_reduce(torch.ones(2)); None if rank else time.sleep(0.05)",
    "a group made again": """
        import torch.distributed as dist
        for _ in range(2):
            pair = dist.new_group([0, 1], group_desc="pair")
            if rank < 2:
                dist.all_reduce(torch.ones(3), group=pair)
                dist.destroy_process_group(pair)
    """,
}


@pytest.mark.parametrize("source", sampled(ALLOWED.values(), 3), ids=list(ALLOWED))
def test_what_ranks_may_do_differently_is_no_difference(session, source):
    result = session.cell(textwrap.dedent(source), namespace={})
    assert result.warnings == ()
    # And it was looked at: the same ranks are still found out.
    assert session.cell("import sys; 'nblaunch.probes.watch' in sys.modules").values == [True] * 3


@needs_reductions
def test_with_warn_the_run_goes_on_and_says_it_once(tmp_path):
    def train(directory):
        import os
        import time

        import torch
        import torch.distributed as dist

        for number in range(3):
            if dist.get_rank() == 1:
                while not os.path.exists(f"{directory}/{number}"):  # noqa: PTH110
                    time.sleep(0.005)
                time.sleep(0.1)
            else:
                open(f"{directory}/{number}", "w").close()  # noqa: PTH123
            first = dist.get_rank() == 0
            dist.all_reduce(
                torch.ones(2, 2) if first else torch.ones(4),
                op=dist.ReduceOp.SUM if first else dist.ReduceOp.MAX,
            )

    result = nblaunch.run(train, (str(tmp_path),), nproc=2, watch="desync:warn")
    assert result.ok
    (warning,) = result.warnings
    assert warning == (
        "rank 1: collective 1 of the default group differs: rank 0 calls all_reduce(sum) of float32 [2, 2], "
        "but rank 1 calls all_reduce(max) of float32 [4]"
    )


def test_without_the_option_nothing_is_installed():
    with nblaunch.Session(2) as session:
        named = "watch", "collectives", "desync", "nonfinite", "profiling"
        loaded = f"import sys; [name for name in {named} if 'nblaunch.probes.' + name in sys.modules]"
        assert session.cell(loaded).values == [[]] * 2


REMOVED = """
import torch
from torch.optim import optimizer

def installed():
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
    return [*map(len, hooks), torch.autograd.backward.__module__, kernel]

class Then:
    def __reduce__(self):
        return list, (installed(),)  # once the job is done, and its value is sent

[installed(), Then()]
"""


def test_what_was_installed_is_removed_with_the_job():
    with nblaunch.Session(1, watch="nan,desync") as session:
        ((during, afterwards),) = session.cell(REMOVED, namespace={}).values
    # One hook of each is the session's: it counts steps of optimizers.
    assert during == [2, 2, "nblaunch.probes.nonfinite", True]
    assert afterwards == [1, 1, "torch.autograd", False]
