"""What shards over GPUs works in a session's cells: DeviceMesh, DTensor, FSDP2, sharded checkpoints."""

from __future__ import annotations

import pytest
from gpus import devices_of_ranks

pytestmark = pytest.mark.gpu(2, shared=True)

DEVICES = devices_of_ranks()
RANKS = len(DEVICES)


MESHES = """
from torch.distributed.device_mesh import init_device_mesh
line = init_device_mesh("cuda", (world_size,), mesh_dim_names=("all",))
meshes = [line]
if world_size >= 4:
    square = init_device_mesh("cuda", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    meshes += [square]
for mesh in meshes:
    for name in mesh.mesh_dim_names:
        dist.all_reduce(torch.ones(1, device=device), group=mesh.get_group(name))
"""


@pytest.fixture(scope="module")
def session(gpu_session):
    """Give the session with its meshes: the connections of their groups stay as long as it does."""
    gpu_session.cell(MESHES, namespace={})
    return gpu_session


def values(session, source):
    return list(session.cell(source, namespace={}).values)


@pytest.mark.quick
def test_a_device_mesh_reduces_over_its_gpus(session):
    body = """
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=line.get_group("all"))
    (total.item(), line.device_type)
    """
    assert values(session, body) == [(float(RANKS), "cuda")] * RANKS


@pytest.mark.gpu(4)
def test_a_mesh_of_two_dimensions_reduces_over_each(session):
    body = """
    totals = []
    for name in square.mesh_dim_names:
        total = torch.full((1,), float(rank), device=device)
        dist.all_reduce(total, group=square.get_group(name))
        totals.append(total.item())
    totals
    """
    half = RANKS // 2
    rows = [sum(range(row * half, (row + 1) * half)) for row in range(2)]
    expected = [[float(2 * (rank % half) + half), float(rows[rank // half])] for rank in range(half * 2)]
    assert values(session, body)[: half * 2] == expected


def test_a_dtensor_is_sharded_over_the_gpus_and_gathered(session):
    body = """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    sharded = distribute_tensor(torch.arange(2.0 * world_size, device=device), line, [Shard(0)])
    own, whole = (sharded + 1).to_local(), (sharded + 1).redistribute(placements=[Replicate()]).to_local()
    (own.tolist(), str(own.device), whole.tolist())
    """
    whole = [number + 1.0 for number in range(2 * RANKS)]
    expected = [(whole[2 * rank : 2 * rank + 2], DEVICES[rank], whole) for rank in range(RANKS)]
    assert values(session, body) == expected


FSDP = """
from torch import nn
from torch.distributed.fsdp import fully_shard

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

def train(model, where, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch.to(where)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("mesh", ["line", pytest.param("square", marks=pytest.mark.gpu(4))])
def test_fsdp2_trains_shards_as_the_cpu_trains_the_whole(session, mesh):
    values(session, FSDP)
    body = f"""
    model = build().to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh={mesh})
    seeds = [torch.Generator().manual_seed(each) for each in range(world_size)]
    everyones = [torch.rand(2, 8, generator=seed) for seed in seeds]
    train(model, device, [everyones[rank]] * 3)
    alone = build()
    train(alone, "cpu", [torch.cat(everyones)] * 3)
    gathered = [parameter.full_tensor() for parameter in model.parameters()]
    close = [torch.allclose(a.cpu(), b, atol=1e-5) for a, b in zip(gathered, alone.parameters(), strict=True)]
    (type(next(model.parameters())).__name__, str(gathered[0].device), all(close))
    """
    assert values(session, body) == [("DTensor", DEVICES[rank], True) for rank in range(RANKS)]


def test_a_sharded_checkpoint_is_saved_from_gpus_and_loaded_onto_them(session, tmp_path):
    body = f"""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.tensor import Shard, distribute_tensor
    state = {{"sharded": distribute_tensor(torch.arange(2.0 * world_size, device=device), line, [Shard(0)])}}
    checkpoint.save(state, checkpoint_id={str(tmp_path / "saved")!r})
    state["sharded"].to_local().fill_(-1)
    checkpoint.load(state, checkpoint_id={str(tmp_path / "saved")!r})
    local = state["sharded"].to_local()
    (local.tolist(), str(local.device))
    """
    expected = [([2.0 * rank, 2.0 * rank + 1], DEVICES[rank]) for rank in range(RANKS)]
    assert values(session, body) == expected
    assert (tmp_path / "saved" / ".metadata").exists()
