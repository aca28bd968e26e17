"""A rank of a session that dies is replaced alone, and gets from the others what all ranks had alike."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import slow
from patience import eventually
from training import BEGUN, FINISHED, STEPS

import nblaunch
from nblaunch.protocol.variables import UNKNOWN, is_whole

SETUP = """
import os, random, torch, torch.distributed as dist

class Holder:
    def __init__(self, model): self.model = model

torch.manual_seed(0)
random.seed(1)
model = torch.nn.Linear(40, 40)
holder, alias = Holder(model), model
step, config = 3, {"lr": 0.1, "layers": [1, 2]}
model(torch.ones(4, 40)).sum().backward()
mine, is_main = rank * 10, rank == 0
own = torch.full((1000,), float(rank))
part = {"main": rank == 0}
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
"""
IS_THERE = """
names = ["model", "holder", "alias", "step", "config", "mine", "is_main", "own", "part", "Holder"]
sorted(name for name in names if name in globals())
"""
GOES_ON = """
t = torch.ones(1, dtype=torch.float32)
dist.all_reduce(t)
(
    step, config, model.weight.tolist(), model.weight.grad.tolist(), holder.model is model is alias,
    type(holder) is Holder, random.random(), torch.rand(2).tolist(), torch.is_grad_enabled(),
    torch.get_default_dtype() is torch.float64, t.item(), rank == dist.get_rank(),
)
"""
LOST = {"mine", "is_main", "own", "part"}


def kill(session: nblaunch.Session, rank: int) -> None:
    """Kill an idle rank, and wait until another process has its number."""
    before = session._live.attempt
    os.kill(pids(session)[rank], signal.SIGKILL)
    eventually(lambda: session._live.attempt == before + 1, "the rank has been started again")


def wait_for_sketches(session: nblaunch.Session, *names: str) -> None:
    """Wait until the ranks, which are idle, have sketched these variables by their pickles."""

    def whole() -> bool:
        assert session._live.open
        known = [dict(zip(each.names, each.digests, strict=False)) for each in session._live._names.values()]
        return all(is_whole(each.get(name, UNKNOWN)) for each in known for name in names)

    eventually(whole, "the variables are sketched")


def pids(session: nblaunch.Session) -> dict[int, int]:
    eventually(lambda: all(each.state == "idle" for each in session.status().ranks), "the ranks are ready")
    return {each.rank: each.pid for each in session.status().ranks if each.pid is not None}


def others(session: nblaunch.Session, dead: int) -> dict[int, int]:
    return {rank: pid for rank, pid in pids(session).items() if rank != dead}


@pytest.mark.quick
@pytest.mark.parametrize("dead", [0, 2])
def test_the_rank_that_was_killed_has_what_all_had_alike_and_nothing_else(dead):
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell(SETUP, namespace={})
        before = others(session, dead)
        kill(session, dead)
        found = session.cell(IS_THERE, namespace={})
        survivor = 1
        assert set(found.values[survivor]) - set(found.values[dead]) == LOST
        told = next(each for each in found.warnings if each.startswith(f"rank {dead} is back: "))
        came, _, gone = told.partition("; ")
        assert came.endswith(f" from rank {1 if dead == 0 else 0}")
        assert {"model", "step", "config"} <= set(came.replace(",", "").split())
        assert gone.startswith(
            "is_main, mine, own, part had no copy and are gone (it was not the same on all"
        )
        assert others(session, dead) == before
        values = session.cell(GOES_ON, namespace={})
        assert values.values == [values.values[survivor]] * 3
        assert values.values[0][-2:] == (3.0, True)
        assert values.warnings == ()


def test_one_other_rank_is_enough_for_what_was_compared_while_all_were_idle():
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(f"{SETUP}\nlarge = torch.ones(20_000_000, dtype=torch.float32)", namespace={})
        wait_for_sketches(session, "model", "holder", "own", "large")
        kill(session, 1)
        found = session.cell(IS_THERE, namespace={})
        assert "large" in found.warnings[0].partition(" from rank 0")[0]
        assert set(found.values[0]) - set(found.values[1]) == LOST
        assert "random state of Python, random state of torch: anew" in found.warnings[0]
        values = session.cell(GOES_ON, namespace={}).values
        anew = 2
        assert (values[0][:-6], values[0][-6 + anew :]) == (values[1][:-6], values[1][-6 + anew :])
        # Alike as far as a look after the cell can tell.
        session.cell("unseen = torch.zeros(5000)\nunseen[1] = rank", namespace={})
        os.kill(pids(session)[1], signal.SIGKILL)
        eventually(lambda: session._live.attempt == 2, "the rank has been started again")
        found = session.cell("'unseen' in globals()", namespace={})
        assert found.values == [True, False], "whether it was compared by then or not"
        assert "unseen" in found.warnings[0]


# Each rank has other statistics, until DDP takes those of rank 0.
NORMALIZED = """
import os, torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = DDP(net)
opt = torch.optim.AdamW(model.parameters())

def train(step):
    opt.zero_grad()
    batch = torch.arange(16.0).view(4, 4) * (step + rank)
    model(batch).square().sum().backward()
    opt.step()

def state():
    return [each.tolist() for each in model.state_dict().values()]

train(1), train(2)
state()
"""


def test_a_ddp_model_comes_back_whose_buffers_differ_until_it_takes_those_of_rank_0():
    with nblaunch.Session(nproc=3, display=False) as session:
        before = session.cell(NORMALIZED, namespace={}).values
        assert before[0] != before[1]
        wait_for_sketches(session, "model", "net", "opt")
        kill(session, 1)
        found = session.cell("net is model.module, state()", namespace={})
        assert [each for _, each in found.values] == [before[0], before[0], *before[2:]]
        assert all(same for same, _ in found.values)
        assert "gone" not in found.warnings[0]
        after = session.cell("train(3)\nstate()[:4], state()[4]", namespace={}).values
        assert len({str(parameters) for parameters, _ in after}) == 1
        assert len({str(mean) for _, mean in after}) == 3


def test_a_model_of_the_notebooks_own_class_comes_back_with_one_other_rank_left(kernel):
    kernel.ok("%distributed start -n 2")
    kernel.ok("""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    def forward(self, batch):
        return self.norm(self.linear(batch))

def train(model, opt, batch):
    opt.zero_grad()
    model(batch).square().sum().backward()
    opt.step()
""")
    kernel.ok("""%%distributed
torch.manual_seed(0)
model = DDP(Net())
opt = torch.optim.AdamW(model.parameters())
train(model, opt, torch.arange(16.0).view(4, 4) * (1 + rank))
""")
    kernel.ok("""
import os, signal, time
from nblaunch.magic import sessions
live = sessions.named(None)

def known():
    digests = [dict(zip(each.names, each.digests)) for each in live._names.values()] if live.open else []
    return len(digests) == 2 and all(
        each.get(name, 1) % 2 == 0 for each in digests for name in ("model", "opt")
    )

def kill(rank):
    until, before = time.monotonic() + 30, live.attempt
    while not known() and time.monotonic() < until: time.sleep(0.01)
    os.kill(live.status().ranks[rank].pid, signal.SIGKILL)
    while live.attempt == before: time.sleep(0.01)
""")
    # The other one then has what it had got from this one.
    for dead in (1, 0):
        kernel.ok(f"kill({dead})")
        kernel.ok(
            "%%distributed --out res\n(type(model.module) is Net, model.module.norm.running_mean.tolist())"
        )
        (first, mean), second = kernel.value("res.values")
        assert first
        assert second == [first, mean]
        kernel.ok(
            "%%distributed --out res\n"
            "train(model, opt, torch.ones(4, 4) * rank)\nmodel.module.linear.bias.data"
        )
        assert kernel.value("torch.equal(*res.values)")
    kernel.ok("%distributed stop")


def test_hundreds_of_variables_are_compared_while_the_ranks_are_idle():
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(
            "import torch\nfor number in range(240): globals()[f'x{number}'] = torch.zeros(1000)",
            namespace={},
        )
        wait_for_sketches(session, *(f"x{number}" for number in range(240)))


def test_a_model_of_many_parameters_is_compared_with_its_optimizer():
    """To pickle these takes a second of processor time, in which the rank takes orders."""
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(
            "import torch\nmodel = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(600))\n"
            "for each in model.parameters(): each.data.zero_(); each.grad = torch.ones_like(each)\n"
            "opt = torch.optim.AdamW(model.parameters())\nopt.step()",
            namespace={},
        )
        wait_for_sketches(session, "model", "opt")


def test_in_a_cell_that_is_cut_off_what_it_has_bound_is_gone_and_what_was_before_is_there():
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell(SETUP, namespace={})
        with pytest.raises(nblaunch.RunFailedError) as caught:
            session.cell(
                "import math\nstep, new = 4, 'new'\nconfig['lr'] = 0.2\n"
                "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
                namespace={},
            )
        assert (caught.value.root_cause.rank, caught.value.root_cause.signal) == (1, "SIGKILL")
        assert "rank 1 is started again; the other ranks keep their variables" in caught.value.result.warnings
        found = session.cell("step, config['lr'], globals().get('new')", namespace={}, check=False)
        assert found.values == [(4, 0.2, "new"), (4, 0.2, None), (4, 0.2, "new")], found.warnings
        assert session.cell("math.pi > 3", namespace={}).values == [True] * 3
        assert "new had no copy and is gone (nothing is known of it before the job" in found.warnings[0]


def test_what_the_job_had_brought_in_which_the_rank_died_is_named_if_it_is_gone():
    """Also a variable that the others had before, and one that the cell then deletes on some of them."""
    with nblaunch.Session(nproc=3, display=False) as session:
        notebook = {"late": [1], "dropped": [2], "again": [3]}
        session.cell("late", ranks=[0, 2], namespace=notebook)
        session.cell("again", namespace=notebook)
        session.cell("if rank == 1: del again", namespace={})
        found = session.cell(
            "import os\nlate, dropped, again\nif rank == 0: del dropped\n"
            "if rank == 1: os.kill(os.getpid(), 9)",
            namespace=notebook,
            check=False,
        )
        assert found.root_cause.signal == "SIGKILL"
        there = "[name for name in ('again', 'dropped', 'late') if name in globals()]"
        found = session.cell(there, namespace={})
        assert found.values == [["again", "late"], [], ["again", "dropped", "late"]]
        assert any("again, dropped, late had no copy and are gone" in each for each in found.warnings)


def test_ranks_that_have_imported_different_modules_give_what_all_have_imported():
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell("import math\nif rank == 0: import json\nkept = 5", namespace={})
        kill(session, 1)
        found = session.cell("kept, 'math' in globals()", namespace={})
        assert found.values == [(5, True)] * 3


def test_a_rank_goes_where_cells_have_brought_the_others(tmp_path):
    """A directory, and what is imported from another one: before what the ranks began with, or behind it."""
    (tmp_path / "of_a_cell.py").write_text("def function(): pass")
    place = str(tmp_path)
    goes = f"os.chdir({place!r}); sys.path.insert(1, {place!r}); sys.path.append('/b')\nimport of_a_cell"
    with nblaunch.Session(nproc=3, display=False) as session:
        begun = session.cell("import os, sys; sys.path", namespace={}).values[0]
        session.cell(f"{goes}; used = [of_a_cell.function]", namespace={})
        kill(session, 1)
        found = session.cell("os.getcwd(), sys.path, used[0] is of_a_cell.function", namespace={})
        assert found.values[1] == (place, [place, *begun, "/b"], True)
        session.cell(f"os.chdir('/') if rank == 0 else None; sys.path.remove({place!r})", namespace={})
        kill(session, 1)
        found = session.cell("os.getcwd(), sys.path[-1]", namespace={})
        assert found.values == [("/", "/b"), (str(Path.cwd()), "/b"), (place, "/b")]
        assert "working directory: anew" in found.warnings[0]


def trained(session: nblaunch.Session, steps: int, *, dies_at: int | None = None) -> Any:
    return session.cell(f"train({steps}, {dies_at})", namespace={}, check=dies_at is None)


LOOP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 5)))
opt, step = torch.optim.AdamW(model.parameters(), lr=1e-2), 0

def train(steps, dies_at):
    global step
    for _ in range(steps):
        source = torch.Generator().manual_seed(1000 * step + rank)
        x, y = (torch.randn(16, size, generator=source) for size in (20, 5))
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        step += 1
        if step == dies_at and rank == 1: os.kill(os.getpid(), 9)
    return [each.tolist() for each in model.parameters()]
"""


def test_a_training_loop_goes_on_at_its_step_as_if_nothing_had_happened():
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell(LOOP, namespace={})
        expected, later = trained(session, 7).values, trained(session, 2).values
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell(LOOP, namespace={})
        assert not trained(session, 10, dies_at=3).ok
        went_on = session.cell("step", namespace={})
        assert went_on.values == [3, 3, 3]
        assert went_on.warnings[0].startswith("rank 1 is back: model, opt, step, train from rank 0")
        assert "step as the cell that was cut off left" in went_on.warnings[0]
        assert trained(session, 4).values == expected
        joined = "opt.param_groups[0]['params'][0] is next(model.parameters())"
        assert session.cell(joined, namespace={}).values == [True] * 3
        wait_for_sketches(session, "model", "opt", "train")
        kill(session, 0)
        assert trained(session, 2).values == later


TRAINED = """
def fail():
    if rank == 1: os.kill(os.getpid(), 9)

def train(model, opt, *numbers):
    for number in numbers: step(model, opt, number)

failing = ""
model, opt = made("ddp"{options})
train(model, opt, *range(8))
expected = held(model)
model, opt = made("ddp"{options})
second, other = made("ddp"{options})
train(model, opt, *range({begun}))
train(second, other, *range(6))
"""
WENT_ON = """
failing = ""
train(model, opt, *range({begun}, 8))
train(second, other, 6, 7)
[[all(map(test, held(each), expected)) for each in (model, second) for test in (torch.equal, torch.allclose)],
 [each.tolist() for each in held(model)]]
"""


@pytest.fixture
def quad() -> Iterator[nblaunch.Session]:
    """Four ranks: the order in which gloo sums an element depends on where in its bucket it is."""
    with nblaunch.Session(nproc=4, display=False) as session:
        session.cell(f"import os\n{STEPS}", namespace={})
        yield session


def begin(session: nblaunch.Session, begun: int, options: str = "") -> None:
    session.cell(TRAINED.format(options=f", {options}" * bool(options), begun=begun), namespace={})


def went_on(session: nblaunch.Session, begun: int) -> list[bool]:
    """Train on; return whether models are what they had become without a death, or about that."""
    after = session.cell(WENT_ON.format(begun=begun), namespace={})
    assert after.warnings[0].startswith("rank 1 is back: ")
    assert after.values == [after.values[0]] * 4, "all ranks have the same parameters"
    found: list[bool] = after.values[0][0]
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", marks=pytest.mark.quick, id="plain"),
        slow("gradient_as_bucket_view=True"),
        "static_graph=True",
        "find_unused_parameters=True",
    ],
)
def test_training_with_ddp_goes_on_to_the_bit_from_the_step_that_was_cut_off(quad, options):
    """DDP would arrange its buckets anew, in which sums are rounded in other ways."""
    begin(quad, 2, options)
    assert not quad.cell("failing = 'backward'; step(model, opt, 2)", namespace={}, check=False).ok
    assert all(went_on(quad, 2))


@pytest.mark.parametrize("begun", [4, slow(1)])
def test_training_with_ddp_goes_on_from_the_step_before_which_a_rank_died(quad, begun):
    """To the bit once DDP has arranged its buckets; before that, it is as if the model were wrapped again."""
    begin(quad, begun)
    kill(quad, 1)
    equal, *others = went_on(quad, begun)
    assert equal or begun == 1
    assert all(others)


def test_only_a_model_that_was_within_a_step_comes_without_gradients(quad):
    """Without those of others it would differ from them, and be gone with the next rank that dies."""
    begin(quad, 2)
    assert not quad.cell("failing = 'backward'; step(model, opt, 2)", namespace={}, check=False).ok
    graded = "[[each.grad is not None for each in of.parameters()] for of in (second, model)]"
    found = quad.cell(graded, namespace={})
    assert found.values[1] == [[True] * 6, [False] * 6]
    assert "without gradients, which differed" in found.warnings[0]


since_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.8 cannot end a step of FSDP2")
HSDP = """
mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
""" + BEGUN.format('"fsdp", mesh=mesh')
SHARDS = """
from torch.distributed.tensor import DTensor, Replicate, Shard
table = DTensor.from_local(
    torch.arange(3.) + mesh.get_local_rank("shard"), mesh, (Replicate(), Shard(0)), run_check=False
).requires_grad_()
(table * table).sum().backward()
halves = mesh["shard"]
"""


@since_2_13
@pytest.mark.parametrize(
    "dies",
    [
        pytest.param("", id="between steps"),
        pytest.param("failing = 'forward'; step(model, opt, 3)", id="forward"),
        pytest.param("failing = 'backward'; step(model, opt, 3)", id="backward"),
    ],
)
def test_training_with_hsdp_goes_on_to_the_bit_with_the_shards_of_a_replica(quad, dies):
    quad.cell(HSDP + SHARDS, namespace={})
    wait_for_sketches(quad, "model", "opt")
    if dies:
        quad.cell("def fail():\n    if rank == 1: os.kill(os.getpid(), 9)", namespace={})
        assert not quad.cell(dies, namespace={}, check=False).ok
    else:
        kill(quad, 1)
    went_on = quad.cell(FINISHED, namespace={})
    assert "gone (" not in went_on.warnings[0]
    assert went_on.values == [True] * 4
    wait_for_sketches(quad, "model", "table", "halves")
    # The rank that comes back now had given its shards to the first one.
    kill(quad, 3)
    again = """
    t = torch.ones(1)
    dist.all_reduce(t, group=halves.get_group())
    (all(map(torch.equal, held(model), held(undisturbed))), t.item(), halves == mesh["shard"],
     model.first.weight.device_mesh == mesh, table.full_tensor().tolist(), table.grad.to_local().tolist())
    """
    start = [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]
    parts = [2 * each for each in start]
    assert quad.cell(textwrap.dedent(again), namespace={}).values == [
        (True, 2.0, True, True, start, parts[3 * (rank % 2) : 3 * (rank % 2) + 3]) for rank in range(4)
    ]


@since_2_13
def test_what_shows_the_memory_of_shards_or_has_no_replica_is_named_and_nothing_else_is_lost(quad):
    """On the other rank it would have memory of its own, and keep what the model's parameters were."""
    quad.cell(
        HSDP
        + """
from torch.distributed.tensor import DTensor, Replicate, Shard
whole, rows = (Replicate(), Shard(0)), mesh["shard"]
base = DTensor.from_local(torch.arange(8.), mesh, whole, run_check=False)
view, plain = base.view(4, 4), base.to_local()[:2]
state, step_count = model.state_dict(), 3
row = DTensor.from_local(torch.ones(2), rows, [Shard(0)], run_check=False)
turned = DTensor.from_local(torch.ones(2, dtype=torch.complex64).conj(), mesh, whole, run_check=False)
chosen = DTensor.from_local(
    torch.ones(1 + 2 * (rank % 2)), mesh, whole, run_check=False, shape=torch.Size([4]), stride=(1,)
)
""",
        namespace={},
    )
    named = "base", "view", "plain", "state", "row", "chosen"
    wait_for_sketches(quad, "model", "opt", "turned", *{*named} - {"plain"})  # which is small
    kill(quad, 3)
    there = f"[each for each in {[*named, 'model', 'turned', 'step_count']} if each in globals()]"
    found = quad.cell(there, namespace={})
    assert found.values[3] == ["base", "model", "turned", "step_count"]
    told = found.warnings[0]
    assert "plain, view had no copy and are gone (it shows the memory of base)" in told
    assert "state had no copy and is gone (it shows the memory of model)" in told
    assert "chosen, row had no copy and are gone (no other rank has the same shards)" in told
    assert quad.cell(FINISHED, namespace={}).values == [True] * 4


@since_2_13
def test_meshes_and_shards_outlive_two_ranks_that_die_before_the_next_cell(quad):
    quad.cell(HSDP, namespace={})
    wait_for_sketches(quad, "model", "opt", "undisturbed")
    kill(quad, 1)
    kill(quad, 2)
    went_on = quad.cell(FINISHED, namespace={})
    assert went_on.values == [True] * 4, went_on.warnings


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
    def forward(self, batch):
        return self.second(self.first(batch).relu())

def train(model, opt, count):
    for _ in range(count):
        opt.zero_grad()
        model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
        opt.step()
    return [each.full_tensor().tolist() for each in model.parameters()]
"""
SHARDED_NET = """%%distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def made(mesh):
    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model, opt = made(mesh)
other, its_opt = made(mesh)
train(model, opt, 2)
"""


@since_2_13
def test_a_model_of_hsdp_of_the_notebooks_own_class_outlives_ranks_in_a_kernel(kernel):
    kernel.ok("%distributed start -n 4")
    kernel.ok(NET)
    kernel.ok(SHARDED_NET)
    kernel.ok(
        "import os, signal, time\nfrom nblaunch.magic import sessions\nlive = sessions.named(None)\n"
        "def kill(rank):\n    before = live.attempt\n"
        "    os.kill(live.status().ranks[rank].pid, signal.SIGKILL)\n"
        "    while live.attempt == before: time.sleep(0.01)"
    )
    for dead in (2, 1):
        kernel.ok(f"kill({dead})")
        kernel.ok("%%distributed --out res\ntrain(model, opt, 2)\ntype(model).__mro__[2] is Net")
        assert kernel.value("res.values") == [True] * 4
    kernel.ok("%%distributed --out res\ntrain(other, its_opt, 6) == train(model, opt, 0)")
    assert kernel.value("res.values") == [True] * 4
    kernel.ok("%distributed stop")


def test_training_with_ddp_goes_on_where_some_ranks_have_arranged_the_buckets(quad):
    begin(quad, 1)
    dies = "if rank == 1: fail()\nstep(model, opt, 1)"
    assert not quad.cell(dies, namespace={}, check=False).ok
    assert went_on(quad, 1)[1:] == [True, True, True]


def test_an_object_of_the_notebook_that_comes_from_another_rank_is_what_later_cells_lead_to(kernel):
    kernel.ok("%distributed start -n 3")
    kernel.ok("import torch\nnet = torch.nn.Linear(2, 2)\nnet.requires_grad_(False)\nlimit = 1")
    # Keys go far beyond the number of objects.
    kernel.ok("%%distributed\nfiller = [*map(str, range(1000)), []]\nnet.weight.fill_(7.0)\nseen = limit")
    kernel.ok("pair = [net]\ndef sums():\n    return net.weight.sum().item() + limit")
    kernel.ok(
        "import os, signal\nfrom nblaunch.magic import sessions\n"
        "live = sessions.named(None)\nos.kill(live.status().ranks[2].pid, signal.SIGKILL)\n"
        "import time\nwhile live.attempt == 0: time.sleep(0.01)"
    )
    kernel.ok("%%distributed --out res\nsums(), net.weight[0].tolist(), pair[0] is net")
    assert kernel.value("res.values") == [[29.0, [7.0, 7.0], True]] * 3
    # A name that the notebook binds anew is new on all of them.
    kernel.ok("limit = 2")
    kernel.ok("%%distributed --out res\nlimit, sums()")
    assert kernel.value("res.values") == [[2, 30.0]] * 3
    kernel.ok("%distributed stop")


def test_ranks_that_die_one_after_the_other_each_come_back_and_all_at_once_are_started_anew():
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell("kept = 5", namespace={})
        kill(session, 1)
        kill(session, 2)
        assert session.cell("kept", namespace={}).values == [5] * 3
        assert session.status().attempt == 2
        for pid in session.run(os.getpid):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: session._live.attempt > 2, "the ranks have been started anew")
        found = session.cell("'kept' in globals()", namespace={})
        assert found.ok


ATTACHES = """
import nblaunch
session = nblaunch.Session.attach("reborn", take=True)
found = session.cell("kept", namespace={})
assert found.values == [5] * 3, found.values
assert any(each.startswith("rank 1 is back: kept from rank 0") for each in found.warnings), found.warnings
assert session.cell("kept", namespace={}).warnings == ()
session.close()
"""


def test_a_client_that_attaches_later_finds_the_ranks_whole(script):
    first = nblaunch.Session(nproc=3, display=False, detach=True, name="reborn")
    try:
        first.cell("kept = 5", namespace={})
        kill(first, 1)
        program = script(ATTACHES)
        assert program.returncode == 0, program.stderr
    finally:
        first.close()


def test_a_model_whose_shard_was_on_the_rank_is_named():
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell(
            "import torch\nfrom torch.distributed.fsdp import fully_shard\n"
            "model, step = torch.nn.Linear(6, 6), 1\nfully_shard(model)",
            namespace={},
        )
        kill(session, 2)
        found = session.cell("step, 'model' in globals()", namespace={})
        assert found.values == [(1, True), (1, True), (1, False)]
        assert any("model had no copy and is gone" in each for each in found.warnings)
        # No rank would wait for that one.
        used = session.cell("if rank != 2: model(torch.ones(1, 6))", namespace={}, check=False)
        assert [type(each.exception).__name__ for each in used.failures] == ["DeadModelError"] * 2


def test_a_rank_that_has_its_variables_again_keeps_them_when_another_one_dies():
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell("a, b = 1, 2", namespace={})
        kill(session, 1)
        assert session.cell("a, b", namespace={}).values == [(1, 2)] * 3
        session.cell("if rank == 1: a = 5", namespace={})
        kill(session, 2)
        assert session.cell("globals().get('a'), b", namespace={}).values == [(1, 2), (5, 2), (None, 2)]


OF_CLASSES = """
import abc, enum, torch, typing
from dataclasses import dataclass

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return 2 * x
    @staticmethod
    def backward(ctx, grad): return 2 * grad

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
    def forward(self, x): return Double.apply(self.inner(x))

@dataclass
class Config:
    lr: float = 0.1
    names: tuple = ("a", "b")

class Kind(enum.Enum):
    A, B = 1, "b"

class Base(abc.ABC):
    @abc.abstractmethod
    def f(self): ...

class Point(Base):
    __slots__ = ("x", "y")
    def f(self): return self

class Pair(typing.NamedTuple):
    x: int
    y: str = "q"

torch.manual_seed(0)
model, config, kind, pair = Module(), Config(), Kind.A, Pair(1)
equal_ones = [(1, 2), (1.0, 2.0), (True, 2), (0.0,), (-0.0,), "text", "".join(["te", "xt"])]
"""


def test_what_a_rank_has_got_from_another_is_the_same_as_theirs():
    """Of strings and tuples of the classes' own it has others; that one is used twice is no difference."""
    names = "Double", "Module", "Config", "Kind", "Base", "Point", "Pair", "model", "config", "kind", "pair"
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(OF_CLASSES, namespace={})
        for dead in (1, 0):
            wait_for_sketches(session, *names)
            kill(session, dead)
            found = session.cell("repr(equal_ones), model(torch.ones(2)).tolist()", namespace={})
            assert "gone" not in found.warnings[0]
            assert found.values[0] == found.values[1]
            assert found.values[0][0].startswith("[(1, 2), (1.0, 2.0), (True, 2), (0.0,), (-0.0,), 'text'")


def test_a_ddp_model_comes_back_that_one_rank_compared_before_the_group_was_formed_again(tmp_path):
    """The new group's has other buckets; its pickle before and after that tells nothing of the ranks."""
    ends = tmp_path / "ends"
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(f"{STEPS}\n{BEGUN.format(repr('ddp'))}", namespace={})
        source = f"""
import pathlib, time
z = torch.ones(5000)
if rank == 1:
    while not pathlib.Path({str(ends)!r}).exists(): time.sleep(0.01)
    unmatched = dist.all_reduce(torch.ones(1), async_op=True)
"""
        job = threading.Thread(target=session.cell, args=(source,), kwargs={"namespace": {}, "check": False})
        job.start()
        eventually(lambda: is_compared(session, 0, "z"), "the rank that has ended compares its variables")
        ends.touch()
        job.join()
        wait_for_sketches(session, "model", "opt", "undisturbed")
        kill(session, 1)
        finished = session.cell(FINISHED, namespace={})
        assert finished.values == [True, True], finished.warnings


def is_compared(session: nblaunch.Session, rank: int, name: str) -> bool:
    assert session._live.open
    known = session._live._names.get(rank)
    return known is not None and is_whole(
        dict(zip(known.names, known.digests, strict=False)).get(name, UNKNOWN)
    )


def test_a_class_of_autograd_comes_back_whatever_number_torch_has_given_it():
    """It counts the classes of its process: those that a rank had made before it died count no more."""
    with nblaunch.Session(nproc=3, display=False) as session:
        number = f"{OF_CLASSES}\nDouble._backward_cls._autograd_function_id"
        session.cell(number, namespace={})
        for dead, numbers in ((2, 1), (1, 2)):
            assert len({*session.cell(number, namespace={}).values}) == numbers
            kill(session, dead)
            found = session.cell("model(torch.ones(2)).tolist()", namespace={})
            assert found.values == [found.values[0]] * 3, found.warnings


def test_a_session_saves_by_itself_until_a_rank_has_lost_a_variable(tmp_path):
    save = tmp_path / "save"
    with nblaunch.Session(nproc=3, restore=save, save_every=0.001, display=False) as session:
        session.cell("a = 1", namespace={})
        eventually(save.exists, "it has saved")
        kill(session, 1)
        found = session.cell("mine = rank", namespace={})
        assert not any("is not saved" in each for each in found.warnings)
        kill(session, 2)
        assert any("mine had no copy" in each for each in session.cell("a", namespace={}).warnings)
        assert any("is not saved to" in each for each in session.cell("a", namespace={}).warnings)
