"""A deadlock over two groups is named as a circle, in lines of the cell, wherever a hang is looked at."""

from __future__ import annotations

import pytest
from lanes import sampled

TWO_ORDERS = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
replicate, shard = mesh.get_group("replicate"), mesh.get_group("shard")
one = torch.ones(1)
if rank in (0, 3):
    dist.all_reduce(one, group=shard)
    dist.all_reduce(one, group=replicate)
else:
    dist.all_reduce(one, group=replicate)
    dist.all_reduce(one, group=shard)
"""
NAMED = (
    "deadlock: ranks 0,3 are in all_reduce #1 of mesh_shard and wait for ranks 1-2; "
    "these are in all_reduce #1 of mesh_replicate and wait for ranks 0,3. "
    "Two groups are used in another order: rank 0 at cell line 9; rank 1 at cell line 12."
)
PING_PONG = """
import torch, torch.distributed as dist
one, me, other = torch.ones(1), rank, 1 - rank
while me < 2:
    for sender in (0, 1):
        dist.send(one, other) if me == sender else dist.recv(one, other)
"""
AROUND = """
import torch, torch.distributed as dist
sent, received = torch.ones(SIZE), torch.empty(SIZE)
while True:
    request = dist.isend(sent, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    request.wait()
"""
FEWER = """
import torch, torch.distributed as dist
dist.barrier()
if rank != 1:
    dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="module")
def kernel(module_kernel):
    """Give a kernel with a session of four ranks, which have made such groups before: the first take long."""
    module_kernel.ok("%distributed start -n 4")
    module_kernel.ok(f"%%distributed{TWO_ORDERS.partition('if rank')[0]}dist.barrier()")
    return module_kernel


@pytest.fixture
def stacks(kernel):
    """Give a function that returns what `%distributed stacks` shows."""
    return lambda: str(kernel.ok("%distributed stacks").result)


def test_hang_after_and_a_timeout_name_the_circle_by_groups_and_lines_of_the_cell(kernel):
    ran = kernel.run(f"%%distributed --hang-after 2 --timeout 6 --out res{TWO_ORDERS}")
    assert ran.error.ename == "RunTimeoutError"
    assert NAMED in ran.error.evalue
    assert NAMED in ran.error.traceback
    assert NAMED in ran.text, "what is saved in the notebook"
    assert kernel.value("res.hang_report.findings[0]") == NAMED
    assert kernel.value("res.hang_report.deadlocks") == [[0, 1, 2, 3]]
    assert kernel.value("res.warnings[0].splitlines()[:2]") == ["nothing heard for 2 s", NAMED]


def test_stacks_and_an_interrupt_name_the_circle(kernel, stacks, eventually):
    kernel.ok(f"%%distributed --background --out handle{TWO_ORDERS}")
    eventually(lambda: stacks().startswith(NAMED), "the ranks wait for each other")
    kernel.ok("handle.cancel()")
    error = kernel.fails("handle.result()")
    assert error.ename == "KeyboardInterrupt"
    assert error.evalue.splitlines()[1:] == [NAMED]


def test_ranks_that_send_to_and_fro_are_no_circle_whenever_they_are_looked_at(kernel, stacks, eventually):
    """No two of them are looked at in the same moment: each may be seen waiting for the other."""
    kernel.ok(f"%%distributed --background --out handle{PING_PONG}")
    eventually(lambda: "finished" in stacks() and "recv" in stacks(), "two ranks are at work")
    looks: list[str] = []

    def seen_in_the_middle() -> bool:
        looks.append(stacks())
        return len(looks) >= 10 and any("waits for rank" in look for look in looks)

    eventually(seen_in_the_middle, "one waits for the other")
    assert not [look for look in looks if "deadlock" in look]
    kernel.ok("handle.cancel()")
    kernel.fails("handle.result()")


@pytest.mark.parametrize("size", sampled([1_000, 1_000_000]))
def test_ranks_that_send_around_are_no_circle_though_all_receive_from_each_other(
    kernel, stacks, eventually, size
):
    """gloo's flight recorder has no `isend`: a receive that lasts for long looks as if nobody had sent."""
    kernel.ok(f"%%distributed --background --out handle{AROUND.replace('SIZE', str(size))}")
    eventually(lambda: "in recv" in stacks(), "data goes around")
    assert not [look for look in (stacks() for _ in range(10)) if "deadlock" in look]
    kernel.ok("handle.cancel()")
    kernel.fails("handle.result()")


def test_a_rank_with_fewer_batches_is_no_circle_and_is_named(kernel):
    error = kernel.fails(f"%%distributed --timeout 5{FEWER}")
    (finding,) = (
        line for line in error.evalue.splitlines() if line.startswith("ranks 0,2-3 are in all_reduce #")
    )
    assert finding.endswith("; rank 1 had finished")
    assert "deadlock" not in error.evalue
