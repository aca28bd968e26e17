"""After a process group was formed again, models go on; what cannot says so, and says what revives it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from training import UNORDERED

import nblaunch
from nblaunch.group.recovery import REFORMED
from nblaunch.rank import in_place

pytestmark = pytest.mark.skipif(in_place.torch_can(), reason="groups are formed again in place: nothing dies")

DEAD = "made for a process group that is gone, with what revives each: "
SETUP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh

def made(**options):
    torch.manual_seed(rank)
    model = DDP(torch.nn.Linear(4, 1), **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def mean(_, bucket):
    work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])

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
LAYERS = """
class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if failing == "backward" and rank == 1: raise ValueError("in backward")
        return grad

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    def forward(self, x):
        if failing == "forward" and rank == 1: raise ValueError("in forward")
        return self.second(Fail.apply(self.first(x)))

def layers():
    torch.manual_seed(rank)
    model = DDP(Layers(), bucket_cap_mb=1e-6)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

failing = ""
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


SPREAD = """
from torch.distributed.optim import ZeroRedundancyOptimizer
def spread():
    model, _ = made()
    return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
"""


@pytest.mark.parametrize("make", ["made", "spread"])
def test_a_ddp_model_goes_on_to_the_bit(session, make):
    cell(session, SPREAD)
    undisturbed = cell(session, f"model, opt = {make}(); [step(model, opt) for _ in range(6)]").values[0]
    cell(session, f"model, opt = {make}(); losses = [step(model, opt) for _ in range(2)]")
    for done in (4, 6):
        assert broken(session) == (REFORMED,)
        result = cell(session, "losses += [step(model, opt) for _ in range(2)]; losses")
        assert result.values == [undisturbed[:done]] * 2, result.failures


def test_a_ddp_model_to_which_no_variable_leads_goes_on(session):
    cell(session, "class Trainer: pass\ntrainer = Trainer(); trainer.engine = Trainer()")
    cell(session, "trainer.engine.model, opt = made(); train = lambda: step(trainer.engine.model, opt)")
    undisturbed = cell(session, "model, opt = made(); [step(model, opt) for _ in range(4)]").values
    cell(session, "trainer.engine.model, opt = made(); losses = [train() for _ in range(2)]")
    assert broken(session) == (REFORMED,)
    assert cell(session, "losses + [train() for _ in range(2)]").values == undisturbed
    cell(session, "del trainer, train")


def test_ddp_models_go_on_where_one_has_another_place_in_a_list_of_another_rank(session):
    """With the buckets of another model its ranks would sum gradients of different parameters."""
    cell(session, UNORDERED)
    cell(
        session,
        """
        models = [DDP(Unordered())]
        models += [copy.deepcopy(models[0])] if rank == 0 else []
        models.append(DDP(Unordered()))
        """,
    )
    before = cell(session, "[gradients(models[-1]) for _ in range(3)]").values
    assert broken(session) == (REFORMED,)
    assert cell(session, "[gradients(models[-1]) for _ in range(3)]").values == before
    cell(session, "del models")


def test_a_ddp_model_of_a_group_that_is_gone_is_named_with_the_line_that_revives_it(session):
    cell(session, "group = dist.new_group([0, 1]); model, opt = made(process_group=group); step(model, opt)")
    remedy = "model = DDP(model.module, process_group=group)"
    named = f"{DEAD}group (group = dist.new_group(ranks=[0, 1])), model ({remedy})"
    assert broken(session) == (REFORMED, named)
    for _ in range(2):
        result = cell(session, "step(model, opt)")
        assert f"To revive it: {remedy}" in result.root_cause.message
        assert len([each for each in result.failures if each.consequence_of is None]) == 2
        assert result.warnings == (), "the group is sound and is not formed again"
    result = cell(session, f"group = dist.new_group([0, 1]); {remedy}; step(model, opt), step(model, opt)")
    assert result.ok, result.failures
    assert result.values[0] == result.values[1]
    assert broken(session)[1:] == (named,)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_ddp_model_can_be_revived_after_a_failure_within_a_step(session, where):
    """Also while the traceback of the failure refers to the old one, whose hooks are on the parameters."""
    cell(session, LAYERS)
    cell(session, "model, opt = layers(); model.register_comm_hook(None, mean); step(model, opt)")
    result = cell(session, f"failing = '{where}'; step(model, opt)")
    assert result.root_cause.message == f"in {where}"
    remedy = "model = DDP(model.module); model.register_comm_hook(None, mean)"
    assert result.warnings == (REFORMED, f"{DEAD}model ({remedy})")
    result = cell(session, f"failing = ''; {remedy}; [step(model, opt) for _ in range(3)]")
    assert result.ok, result.failures
    assert result.values[0] == result.values[1]


def test_what_is_gone_within_other_objects_is_named_as_the_program_writes_it(session):
    cell(
        session,
        """
        class Config: group = dist.new_group(ranks=[0, 1])
        class Trainer: pass
        job, models = Trainer(), {"a": made()[0]}
        job.model = DDP(torch.nn.Linear(2, 2), static_graph=True, process_group=Config.group)
        models["b"], net = made(process_group=Config.group)[0], torch.nn.Sequential(made()[0])
        net[0].register_comm_hook(None, mean)
        """,
    )
    reformed, dead = broken(session)
    assert reformed == REFORMED
    named = [
        "Config.group (Config.group = dist.new_group(ranks=[0, 1]))",
        "net[0] (net[0] = DDP(net[0].module); net[0].register_comm_hook(None, mean))",
        "job.model (job.model = DDP(job.model.module, static_graph=True, process_group=Config.group))",
        "models['b'] (models['b'] = DDP(models['b'].module, process_group=Config.group))",
    ]
    assert dead.startswith(DEAD)
    assert [line for line in named if line not in dead] == []
    assert "models['a']" not in dead
    # What the notice says is what revives it.
    remedies = [line.partition(" (")[2][:-1] for line in named]
    for model, x in (("job.model", 2), ("models['a']", 4), ("models['b']", 4), ("net", 4)):
        remedies.append(f"{model}(torch.ones(2, {x})).sum().backward()")
    result = cell(session, "\n".join([*remedies, "reduced(Config.group)"]))
    assert result.values == [2.0] * 2, result.failures
    cell(session, "del net, Config, Trainer, job, models")


def test_a_mesh_goes_on_and_a_group_that_is_gone_is_not_mistaken_for_a_later_one(session):
    made = 'init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dist.new_group([0, 1])'
    cell(session, f"mesh, group = {made}")
    remedies = "group (group = dist.new_group(ranks=[0, 1]))"
    assert broken(session) == (REFORMED, f"{DEAD}{remedies}")
    cell(session, "another = [dist.new_group([rank]) for rank in (0, 1)]")
    result = cell(session, "reduced(mesh.get_group()), reduced(mesh['dp'].get_group())")
    assert result.values == [(2.0, 2.0)] * 2, result.failures
    result = cell(session, "reduced(group)")
    assert remedies in result.warnings[-1], (result.warnings, result.failures)
    assert result.warnings[0].startswith(DEAD), "nothing was formed again"
    result = cell(session, "1 / 0")
    assert result.warnings == (), "that has nothing to do with groups"


SHARDED = """
from torch.distributed.fsdp import fully_shard

def sharded(mesh=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    mesh = mesh or init_device_mesh("cpu", (world_size,))
    for part in (*model, model): fully_shard(part, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 of older versions")
@pytest.mark.parametrize("where", ["accumulated", "within a backward"])
@pytest.mark.parametrize("policy", ["", "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"])
def test_a_model_of_fsdp2_drops_gradients_that_were_not_reduced_yet(session, where, policy):
    """Left in the whole parameters, they would be added to those of the next step.

    With a dtype of its own for the sum, FSDP2 keeps them in another place.
    """
    cell(session, LAYERS + SHARDED)
    cell(
        session,
        f"""
        from torch.distributed.fsdp import MixedPrecisionPolicy
        def whole():
            torch.manual_seed(0)
            model, policy = Layers(), MixedPrecisionPolicy({policy})
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)
        def accumulating_step(model, opt, stop=False):
            opt.zero_grad()
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                model(torch.ones(8, 4) * (rank + part + 1)).square().mean().backward()
                if stop and rank == 1: raise ValueError("a mistake")
            opt.step()
            return [each.full_tensor().sum().item() for each in model.parameters()]
        """,
    )
    undisturbed = cell(
        session, "model, opt = whole(); [accumulating_step(model, opt) for _ in range(5)]"
    ).values
    cell(session, "model, opt = whole(); losses = [accumulating_step(model, opt) for _ in range(2)]")
    source = "accumulating_step(model, opt, stop=True)"
    if where == "within a backward":
        source = "failing = 'backward'; accumulating_step(model, opt)"
    result = cell(session, source)
    assert (result.failures[0].rank, result.warnings) == (1, (REFORMED,))
    result = cell(session, "failing = ''; losses + [accumulating_step(model, opt) for _ in range(3)]")
    assert result.values == undisturbed, result.failures


def test_a_model_of_fsdp2_on_a_mesh_that_not_all_ranks_have_is_named_and_refuses(session):
    cell(
        session,
        f"""{SHARDED}
from torch.distributed.device_mesh import DeviceMesh
own = dist.new_group([rank], use_local_synchronization=True)
model, opt = sharded(DeviceMesh.from_group(own, "cpu"))
""",
    )
    _, dead = broken(session)
    assert "model (FSDP: build it and its optimizer again, from a checkpoint)" in dead
    result = cell(session, "model(torch.ones(2, 4))")
    assert "this model's process group is gone" in result.root_cause.message
    assert result.warnings == ()


@pytest.mark.parametrize(
    "where", ["sharded.renew_meshes", "in_place.agree_on_buckets", "in_place.begin_again"]
)
def test_a_rank_on_which_models_cannot_go_on_costs_all_ranks_these_and_nothing_else(session, where):
    """A model that goes on there alone, or everywhere but there, would wait for the others."""
    cell(session, "model, opt = made(); step(model, opt); kept = 5")
    cell(
        session,
        f"""
        from nblaunch.rank import in_place, sharded
        whole = {where}
        def fail(*_, **__): raise RuntimeError("no memory")
        if rank == 1: {where} = fail
        """,
    )
    told = broken(session)
    assert cell(session, f"{where} = whole").ok
    assert REFORMED in told
    assert f"{DEAD}model (model = DDP(model.module))" in told
    why = "rank 1: models and meshes cannot go on with the new process group: RuntimeError: no memory"
    assert [each for each in told if "cannot go on" in each] == [why]
    result = cell(session, "model = DDP(model.module); kept, step(model, opt)[0]")
    assert result.ok, result.failures
    assert result.values[0] == result.values[1]


def test_a_mistake_between_two_steps_leaves_a_ddp_model_alive(session):
    cell(session, "model, opt = made()")
    result = cell(session, "step(model, opt)\nraise ValueError('between two steps')")
    assert (result.root_cause.message, result.warnings) == ("between two steps", ())
    assert cell(session, "step(model, opt)").ok
