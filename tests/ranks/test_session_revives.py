"""After a process group was formed again, what was made for the old one says so, and says what revives it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import nblaunch
from nblaunch.rank import in_place

pytestmark = pytest.mark.skipif(in_place.torch_can(), reason="groups are formed again in place: nothing dies")

REFORMED = (
    "process group re-formed; variables kept; groups you made yourself (new_group, DeviceMesh) are gone"
)
DEAD = "made for a process group that is gone, with what revives each: "
SETUP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh

def made():
    torch.manual_seed(rank)
    model = DDP(torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def step(model, opt):
    opt.zero_grad()
    model(torch.ones(8, 4) * (rank + 1)).square().mean().backward()
    opt.step()
    return [round(each.sum().item(), 6) for each in model.parameters()]

def reduced(group=None):
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    return t.item()
"""
BREAK = "if rank == 1: raise ValueError('a mistake')\ndist.all_reduce(torch.ones(1))"


@pytest.fixture(scope="module")
def shared(place: Any) -> Iterator[nblaunch.Session]:
    with place(2, grace=0.5) as session:
        session.cell(SETUP, namespace={})
        # What these make in the process stays: files of torch's, and those that the session keeps open.
        session.cell("import sys; step(*made()); print(); print(file=sys.stderr)", namespace={})
        yield session


@pytest.fixture
def session(shared: nblaunch.Session) -> Iterator[nblaunch.Session]:
    """Give a session without variables of another test's; no test costs one of its ranks."""
    before = set(shared.status().ranks)
    names = set(shared._live.names())
    yield shared
    extra = sorted(set(shared._live.names()) - names)
    if extra:
        shared.cell(f"del {', '.join(extra)}")
    assert shared.cell("reduced()").values == [2.0, 2.0]
    assert {each.pid for each in shared.status().ranks} == {each.pid for each in before}


def cell(session: nblaunch.Session, source: str) -> nblaunch.RunResult:
    return session.cell(textwrap.dedent(source), namespace={}, check=False)


def broken(session: nblaunch.Session) -> tuple[str, ...]:
    """Have the process group formed again; return what is said."""
    result = cell(session, BREAK)
    assert result.root_cause.message == "a mistake"
    return result.warnings


def test_a_ddp_model_is_named_with_the_line_that_revives_it(session):
    cell(session, "model, opt = made(); step(model, opt)")
    assert broken(session) == (REFORMED, f"{DEAD}model (model = DDP(model.module))")
    for _ in range(2):
        result = cell(session, "step(model, opt)")
        assert "To revive it: model = DDP(model.module)" in result.root_cause.message
        assert len([each for each in result.failures if each.consequence_of is None]) == 2
        assert result.warnings == (), "the group is sound and is not formed again"
    result = cell(session, "model = DDP(model.module); step(model, opt), step(model, opt)")
    assert result.ok, result.failures
    assert result.values[0] == result.values[1]
    assert broken(session)[1:] == (f"{DEAD}model (model = DDP(model.module))",)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_ddp_model_can_be_revived_after_a_failure_within_a_step(session, where):
    """Also while the traceback of the failure refers to the old one, whose hooks are on the parameters."""
    cell(
        session,
        """
        model, opt = made()
        step(model, opt)
        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, grad):
                if failing and rank == 1: raise ValueError("in backward")
                return grad
        class Layers(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
            def forward(self, x):
                if failing == "forward" and rank == 1: raise ValueError("in forward")
                return self.second(Fail.apply(self.first(x)))
        failing = ""
        model = DDP(Layers(), bucket_cap_mb=1e-6)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3): step(model, opt)
        """,
    )
    result = cell(session, f"failing = '{where}'; step(model, opt)")
    assert result.root_cause.message == f"in {where}"
    assert result.warnings == (REFORMED, f"{DEAD}model (model = DDP(model.module))")
    result = cell(session, "failing = ''; model = DDP(model.module); [step(model, opt) for _ in range(3)]")
    assert result.ok, result.failures
    assert result.values[0] == result.values[1]


def test_a_ddp_model_within_other_objects_is_named_as_the_program_writes_it(session):
    cell(session, "net = torch.nn.Sequential(made()[0])\nclass Config: model = made()[0]")
    assert broken(session)[1:] == (
        f"{DEAD}net[0] (net[0] = DDP(net[0].module)), Config.model (Config.model = DDP(Config.model.module))",
    )
    cell(session, "del net, Config")


def test_groups_and_meshes_are_named_where_they_are_kept(session):
    cell(
        session,
        """
        class Trainer: pass
        group = dist.new_group(ranks=[0, 1])
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        trainer, models = Trainer(), {}
        trainer.model, models["b"] = DDP(torch.nn.Linear(2, 2), find_unused_parameters=True), made()[0]
        """,
    )
    reformed, dead = broken(session)
    assert reformed == REFORMED
    named = [
        "group (group = dist.new_group(ranks=[0, 1]))",
        "mesh (mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('dp',)))",
        "trainer.model (trainer.model = DDP(trainer.model.module, find_unused_parameters=True))",
        "models['b'] (models['b'] = DDP(models['b'].module))",
    ]
    assert dead.startswith(DEAD)
    assert [line for line in named if line not in dead] == []
    # What the notice says is what revives it.
    remedies = [line.partition(" (")[2][:-1] for line in named]
    result = cell(
        session,
        "\n".join(remedies)
        + "\ntrainer.model(torch.ones(2, 2)).sum().backward()\nreduced(group), reduced(mesh.get_group())",
    )
    assert result.values == [(2.0, 2.0)] * 2, result.failures


def test_a_group_that_is_gone_is_not_mistaken_for_a_later_one(session):
    cell(session, "mesh = init_device_mesh('cpu', (2,)); group = dist.new_group([0, 1])")
    broken(session)
    cell(session, "another = [dist.new_group([rank]) for rank in (0, 1)]")
    result = cell(session, "reduced(mesh.get_group())")
    assert not result.ok
    remedies = "group (group = dist.new_group(ranks=[0, 1]))"
    assert remedies in result.warnings[-1], (result.warnings, result.failures)
    assert "mesh (mesh = init_device_mesh('cpu', (2,)))" in result.warnings[-1]
    assert result.warnings[0].startswith(DEAD), "nothing was formed again"
    result = cell(session, "reduced(group)")
    assert remedies in result.warnings[-1], (result.warnings, result.failures)
    result = cell(session, "1 / 0")
    assert result.warnings == (), "that has nothing to do with groups"


def test_a_sharded_model_is_named_and_refuses(session):
    cell(
        session,
        """
        from torch.distributed.fsdp import fully_shard
        sharded = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        sharded(torch.ones(2, 4)).sum().backward()
        """,
    )
    _, dead = broken(session)
    assert dead == f"{DEAD}sharded (FSDP: build it and its optimizer again, from a checkpoint)"
    result = cell(session, "sharded(torch.ones(2, 4))")
    assert "this model's process group is gone" in result.root_cause.message
    assert result.warnings == ()


def test_a_mistake_between_two_steps_leaves_a_ddp_model_alive(session):
    cell(session, "model, opt = made()")
    result = cell(session, "step(model, opt)\nraise ValueError('between two steps')")
    assert (result.root_cause.message, result.warnings) == ("between two steps", ())
    assert cell(session, "step(model, opt)").ok
