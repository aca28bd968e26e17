"""After a mistake in a session on gloo with torch 2.14 or later, models and groups made before it go on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

import nblaunch
from nblaunch.group.lifecycle import REFORMED_IN_PLACE
from nblaunch.rank import in_place

pytestmark = pytest.mark.skipif(
    not in_place.torch_can(), reason="torch before 2.14 forms no group again in place"
)

SETUP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if failing == "backward" and rank == 1: raise ValueError("a mistake")
        return grad

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        x = self.second(self.first(x).relu())
        if failing == "forward" and rank == 1: raise ValueError("a mistake")
        return self.third(Fail.apply(x))

def made(kind):
    torch.manual_seed(7)
    model = Layers()
    if kind == "ddp":
        model = DDP(model, bucket_cap_mb=1e-6)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for each in (model.first, model.second, model.third, model):
            fully_shard(each, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)

def step(model, opt, number):
    torch.manual_seed(100 * number + rank)
    opt.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    if failing == "between" and rank == 1: raise ValueError("a mistake")
    loss.backward()
    opt.step()

def held(model):
    local = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    return [each.detach().clone() for each in local]

def reduced(group=None):
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    return t.item()

failing = ""
"""


@pytest.fixture(scope="module")
def session() -> Iterator[nblaunch.Session]:
    with nblaunch.Session(2, grace=0.5) as session:
        session.cell(SETUP, namespace={})
        yield session


def cell(session: nblaunch.Session, source: str) -> nblaunch.RunResult:
    return session.cell(textwrap.dedent(source), namespace={}, check=False)


@pytest.mark.parametrize("failing", ["forward", "between", "backward"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_model_trains_on_as_if_a_mistake_within_a_step_had_not_been(session, kind, failing):
    run = cell(
        session,
        f"""
        undisturbed, other = made({kind!r})
        model, opt = made({kind!r})
        for number in range(6): step(undisturbed, other, number)
        for number in range(3): step(model, opt, number)
        """,
    )
    assert run.ok, run.failures
    broken = cell(session, f"failing = {failing!r}; step(model, opt, 3)")
    assert broken.root_cause.message == "a mistake"
    assert broken.warnings == (REFORMED_IN_PLACE,)
    finished = cell(
        session,
        """
        failing = ""
        for number in range(3, 6): step(model, opt, number)
        all(map(torch.equal, held(model), held(undisturbed)))
        """,
    )
    assert finished.values == [True, True], finished.failures


def test_groups_and_meshes_of_the_program_go_on(session):
    cell(
        session,
        """
        world, group = dist.group.WORLD, dist.new_group([1, 0])
        alone = [dist.new_group([each]) for each in (0, 1)]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        """,
    )
    broken = cell(session, "if rank == 1: raise ValueError('a mistake')\nreduced(group)")
    assert broken.warnings == (REFORMED_IN_PLACE,)
    after = cell(
        session,
        "(world is dist.group.WORLD, reduced(), reduced(group), reduced(alone[rank]),"
        " reduced(mesh.get_group()), reduced(dist.new_group([0, 1])))",
    )
    assert after.values == [(True, 2.0, 2.0, 1.0, 2.0, 2.0)] * 2, after.failures


def test_an_unmatched_collective_leaves_nothing_to_the_next_one(session):
    assert cell(session, "if rank == 0: dist.all_reduce(torch.ones(1) * 100)\nelse: 1 / 0").warnings
    after = cell(session, "reduced(), reduced()")
    assert after.values == [(2.0, 2.0)] * 2, after.failures
    assert cell(session, "reduced()\n1 / 0").warnings == (), "the group is sound and is not formed again"
