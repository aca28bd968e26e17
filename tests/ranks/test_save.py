"""A session that is saved, and one that begins with what was saved."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from patience import eventually
from test_reborn import NORMALIZED
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import STEPS

import nblaunch
from nblaunch.capture import saved

pytestmark = pytest.mark.timeout(300)

SETUP = """
import os, random, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
opt = torch.optim.AdamW(model.parameters(), lr=0.1)
ddp = DDP(torch.nn.Linear(2, 2))
batch = torch.randn(4, 3)
big = torch.arange(5000.0)
view = big[10:20]
first = second = [1]
mine = rank * 10
pair = dist.new_group([0, 1])

def step():
    opt.zero_grad()
    loss = model(batch).square().sum()
    loss.backward()
    opt.step()
    return loss.item(), mine

class Holder:
    def __init__(self): self.held = first
    def get(self): return self.held, mine

holder = Holder()
step(), step()
random.seed(3 + rank)
torch.manual_seed(5 + rank)
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
os.environ["A_MODE"], os.environ["A_TOKEN"] = "fast", "hidden"
"""
GOES_ON = """
with torch.enable_grad():
    steps = [step() for _ in range(3)]
    ddp(torch.ones(2, 2, dtype=torch.float32) + rank).sum().backward()
second.append(2)
view[0] = -1
t = torch.ones(1) * rank
dist.all_reduce(t, group=pair)
(
    steps, random.random(), torch.rand(2).tolist(), ddp.module.weight.grad.tolist(), holder.get(),
    big[10].item(),
    opt.param_groups[0]["params"][0] is model.weight, type(holder) is Holder, t.item(),
    torch.get_default_dtype() is torch.float64, torch.is_grad_enabled(), os.environ["A_MODE"],
)
"""
TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def made_in_parallel():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    mesh = init_device_mesh(device.type, (world_size,))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)

def made_in_both():
    torch.manual_seed(3)
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    model = parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)

def step_in_both(model, opt, number):
    torch.manual_seed(100 * number)
    opt.zero_grad()
    model(torch.randn(16, 8).to(device)).square().mean().backward()
    opt.step()

def whole(model, opt):
    found = [*model.parameters()]
    found += [value for each in found for _, value in sorted(opt.state[each].items())]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).tolist() for each in found]
"""


@pytest.mark.quick
def test_what_was_saved_goes_on_in_another_session_as_it_would_have(tmp_path):
    with nblaunch.Session(nproc=2, display=False, env={"A_KEY": "of --env"}) as session:
        session.cell(SETUP, namespace={})
        session.cell("with torch.enable_grad(): loss = model(batch).sum()", namespace={})
        report = session.save(tmp_path / "save")
        expected = list(session.cell(GOES_ON, namespace={}).values)
    kinds = {each.name: each.kind for each in report.variables}
    assert {"working directory", "sys.path"}.isdisjoint(kinds), "another machine has others"
    assert (kinds["model"], kinds["opt"], kinds["ddp"], kinds["mine"]) == ("equal", "equal", "equal", "own")
    assert (report.whole, report.without_graph) == (True, ("loss",))
    with nblaunch.Session(restore=str(tmp_path / "save"), display=False) as session:
        found = session.cell(GOES_ON, namespace={})
        source = session.cell("import inspect; inspect.getsource(step)", namespace={}).values[0]
    assert list(found.values) == expected
    assert "has run the code that is pickled there" in found.warnings[0]
    assert source.startswith("def step():")
    content = b"".join(each.read_bytes() for each in (tmp_path / "save").rglob("*") if each.is_file())
    assert b"fast" in content
    assert b"hidden" not in content
    assert b"of --env" not in content


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Give the save of a session of two ranks, in which some variables cannot be saved."""
    path = tmp_path_factory.mktemp("saves") / "save"
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(SETUP, namespace={})
        session.cell(
            "import socket; made = (n for n in [1]); kept = [first, {'s': socket.socket()}]", namespace={}
        )
        session.save(path)
    return path


def test_what_cannot_be_saved_is_left_out_and_named_and_strict_refuses_it(save, tmp_path):
    left_out = saved.open_saved(str(save)).left_out
    assert set(left_out) == {"made", "kept"}
    assert "kept[1]['s'], socket.socket" in left_out["kept"]
    with nblaunch.Session(restore=str(save), display=False) as session:
        warnings = session.cell("first", namespace={}).warnings
        assert "kept could not be saved (rank 0: kept[1]['s'], socket.socket" in warnings[0]
        session.cell("made = (n for n in [1])", namespace={})
        with pytest.raises(nblaunch.NblaunchError, match="made cannot be saved: rank 0: generator"):
            session.save(tmp_path / "strict", strict=True)
        assert session.cell("first[0]", namespace={}).values == [1, 1]
    assert not (tmp_path / "strict").exists()


def test_a_ranks_own_memory_of_which_a_part_is_equal_comes_back_as_its_own(tmp_path):
    own = """
import numpy as np, torch
whole = np.zeros(10_000)
whole[5_000:] = rank
part = torch.from_numpy(whole[:1_000])
"""
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(own, namespace={})
        session.save(tmp_path / "save")
    with nblaunch.Session(restore=str(tmp_path / "save"), display=False) as session:
        assert session.cell("part[0] = 5; whole[-1], whole[0]", namespace={}).values == [(0, 5), (1, 5)]


def test_a_ddp_model_with_buffers_of_each_rank_comes_back_on_any_number_of_ranks(tmp_path):
    """On as many ranks each has its own; on others that of rank 0, as DDP itself would give them."""
    path = tmp_path / "save"
    with nblaunch.Session(nproc=2, display=False) as session:
        before = list(session.cell(NORMALIZED, namespace={}).values)
        session.cell("mine = [rank]", namespace={})
        report = session.save(path)
        expected = list(session.cell("train(3)\nstate()", namespace={}).values)
    assert {each.name: each.kind for each in report.variables}["model"] == "own"
    with nblaunch.Session(nproc=2, display=False, restore=path) as session:
        assert list(session.cell("state()", namespace={}).values) == before
        assert list(session.cell("train(3)\nstate()", namespace={}).values) == expected
    with pytest.raises(nblaunch.NblaunchError, match=r"have all of it: mine is each rank's own\. Start"):
        nblaunch.Session(nproc=3, display=False, restore=path)
    with nblaunch.Session(nproc=3, display=False, restore=path, drop="mine") as session:
        found = session.cell("net is model.module, state()", namespace={})
        assert list(found.values) == [(True, before[0])] * 3
        values = session.cell("train(3)\nstate()[:2]", namespace={}).values
        assert values[0] == values[1] == values[2]
        assert not any(session.cell("'mine' in globals()", namespace={}).values)


def test_what_changes_gradients_and_cannot_come_back_is_named(tmp_path):
    hooked = """
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp.register_comm_hook(None, allreduce_hook)
"""
    sharded = """
model = fully_shard(torch.nn.Linear(2, 2))
model.set_requires_gradient_sync(False)
model(torch.ones(1, 2)).sum().backward()
"""
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(hooked, namespace={})
        assert "a communication hook" in session.save(tmp_path / "save").left_out["ddp"]
        session.cell(sharded, namespace={})
        with pytest.raises(nblaunch.NblaunchError, match="whose reduce_grads was set"):
            session.save(tmp_path / "save")
    assert saved.open_saved(str(tmp_path / "save")).left_out.keys() == {"ddp"}


@pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"),
    reason="before torch 2.15 all parameters have one precision",
)
def test_a_precision_for_each_parameter_cannot_come_back_and_is_named(tmp_path):
    precise = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
policy = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, param_dtype_override_fn=lambda each: each.dtype if each.dim() == 1 else None
)
model = fully_shard(torch.nn.Linear(2, 2), mp_policy=policy)
"""
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(precise, namespace={})
        with pytest.raises(nblaunch.NblaunchError, match="param_dtype_override_fn"):
            session.save(tmp_path / "save")


def test_an_environment_variable_of_the_command_line_counts_more_than_a_saved_one(save):
    with nblaunch.Session(restore=str(save), env={"A_MODE": "slow"}, display=False) as session:
        assert session.cell("os.environ['A_MODE']", namespace={}).values == ["slow", "slow"]


def test_another_number_of_ranks_is_refused_by_name_unless_these_are_dropped(save):
    with pytest.raises(nblaunch.NblaunchError, match=r"mine is each rank's own.*--drop mine"):
        nblaunch.Session(nproc=3, restore=str(save), display=False)
    with nblaunch.Session(nproc=3, restore=str(save), display=False, drop=["all"]) as session:
        found = session.cell(
            "'mine' in globals(), first, torch.get_default_dtype() is torch.float64", namespace={}
        )
        assert list(found.values) == [(False, [1], True)] * 3
        assert "left out: mine" in found.warnings[0]


def test_the_notebook_replaces_its_own_functions_after_a_load_and_no_variable_of_the_ranks(tmp_path):
    notebook = {"__name__": "__main__", "data": [1]}
    exec("def f(): return data, 1", notebook)  # noqa: S102 - as a notebook does
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell("data.append(2); f()", namespace=notebook)
        session.save(tmp_path / "save")
    later = {"__name__": "__main__", "data": [3]}
    exec("def f(): return data, 2", later)  # noqa: S102 - see above
    with nblaunch.Session(restore=str(tmp_path / "save"), display=False) as session:
        assert session.cell("f()", namespace={"__name__": "__main__"}).values[0] == ([1, 2], 1)
        found = session.cell("f(), data", namespace=later)
        assert found.values[0] == (([1, 2], 2), [1, 2])
        assert any(
            "data was assigned again in the notebook, but ranks 0-1" in each for each in found.warnings
        )


@pytest.mark.timeout(600)
def test_sharded_models_and_their_optimizers_come_back_on_any_number_of_ranks(tmp_path):
    look = "whole(model, opt), whole(split, other), whole(both, third)"
    steps = "step(model, opt, n); step(split, other, n); step_in_both(both, third, n)"
    go_on = f"for n in (3, 4): {steps}\n{look}"
    with nblaunch.Session(nproc=4, display=False) as session:
        session.cell(STEPS + TENSOR_PARALLEL, namespace={})
        session.cell(
            "model, opt = made('fsdp'); split, other = made_in_parallel(); both, third = made_in_both()\n"
            f"for n in range(3): {steps}",
            namespace={},
        )
        report = session.save(tmp_path / "4")
        before = session.cell(look, namespace={}).values[0]
        after = session.cell(go_on, namespace={}).values[0]
    kinds = {each.name: each.kind for each in report.variables}
    assert {kinds[name] for name in ("model", "opt", "split", "other", "both", "third")} == {"sharded"}
    with nblaunch.Session(nproc=2, restore=str(tmp_path / "4"), display=False) as session:
        assert session.cell(look, namespace={}).values[0] == before
        session.save(tmp_path / "2")
        session.cell(go_on, namespace={})
    with nblaunch.Session(nproc=4, restore=str(tmp_path / "2"), display=False) as session:
        assert session.cell(look, namespace={}).values[0] == before
        assert session.cell(go_on, namespace={}).values[0] == after


def test_cells_go_on_while_a_save_is_written_and_it_has_what_was_there_before_them(tmp_path):
    slowly = (
        "import os; write = os.pwrite\ndef pwrite(*a): time.sleep(0.2); return write(*a)\nos.pwrite = pwrite"
    )
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(f"import time, torch; a = torch.zeros(10_000_000) + rank\n{slowly}", namespace={})
        report = session.save(tmp_path / "save", background=True)
        assert not report.whole
        session.cell("a += 1; b = a[0].item()", namespace={})
        assert not report.whole
        with pytest.raises(nblaunch.NblaunchError, match="still being written"):
            session.save(tmp_path / "other")
        eventually(lambda: report.whole, "it is written", 60)
    with nblaunch.Session(restore=str(tmp_path / "save"), display=False) as session:
        assert session.cell("a[0].item(), 'b' in globals()", namespace={}).values == [
            (0.0, False),
            (1.0, False),
        ]


def test_a_save_that_is_killed_leaves_the_one_before_it(tmp_path):
    with nblaunch.Session(nproc=2, display=False) as session:
        pids = list(session.cell("import os, time, torch; a = 1; os.getpid()", namespace={}).values)
        session.save(tmp_path / "save")
        stuck = "write = os.pwrite\nos.pwrite = lambda *a: time.sleep(600) or write(*a)"
        session.cell(f"a = 2\n{stuck}", namespace={})
        session.save(tmp_path / "save", background=True)
        assert list(tmp_path.glob("save.partial-*"))
        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: session.status().attempt > 0, "the ranks are new ones", 60)
    with nblaunch.Session(restore=str(tmp_path / "save"), display=False) as session:
        assert session.cell("a", namespace={}).values == [1, 1]
        session.save(tmp_path / "save")
    assert [each.name for each in tmp_path.iterdir()] == ["save"]


def test_what_cannot_be_loaded_is_named_and_all_else_is_there(tmp_path):
    (tmp_path / "mod").mkdir()
    (tmp_path / "mod" / "gone.py").write_text("class Thing:\n    pass\n")
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(f"import sys; sys.path.insert(0, {str(tmp_path / 'mod')!r})", namespace={})
        session.cell(
            "import gone, torch; a = torch.ones(3); b = [gone.Thing(), a]; c = [a, b]; d = {'a': a}",
            namespace={},
        )
        session.save(tmp_path / "save")
    (tmp_path / "mod" / "gone.py").unlink()
    sys.path_importer_cache.clear()
    with nblaunch.Session(restore=str(tmp_path / "save"), display=False) as session:
        found = session.cell(
            "d['a'] is a, [n for n in ('b', 'c', 'gone', 'torch') if n in globals()]", namespace={}
        )
        assert list(found.values) == [(True, ["torch"])] * 2
        assert "b could not be loaded (rank 0: No module named 'gone')" in found.warnings[0]


def test_the_magic_saves_and_starts(kernel, tmp_path):
    kernel.ok("%distributed start -n 2")
    kernel.ok("%%distributed\nx = [rank]; y = 5")
    kernel.ok(f"said = %distributed save {tmp_path}/save")
    assert kernel.value("'torch' in __import__('sys').modules") is False
    assert "equal: y" in kernel.value("str(said)")
    kernel.ok("%distributed stop")
    kernel.ok(f"said = %distributed start --from {tmp_path}/save")
    assert "has run the code that is pickled there" in kernel.value("str(said)")
    kernel.ok("%%distributed --out res\nx, y")
    assert kernel.value("res.values") == [[[0], 5], [[1], 5]]
    kernel.ok("%distributed stop")


def test_a_manifest_is_for_people_too(save):
    manifest = json.loads((save / "manifest.json").read_text())
    assert (manifest["format"], manifest["world_size"]) == (1, 2)
    assert {each["name"]: each["type"] for each in manifest["variables"]}["opt"] == "torch.optim.adamw.AdamW"
    assert manifest["environment"] == ["A_MODE"]
    assert [each["title"] for each in manifest["jobs"]] == ["cell", "cell"]


def test_a_session_saves_by_itself_after_cells_that_succeed_and_begins_with_that_the_next_time(tmp_path):
    save = tmp_path / "save"
    with nblaunch.Session(nproc=2, restore=save, save_every=0.001, display=False) as session:
        assert "save is not there yet" in session.cell("a = rank", namespace={}).warnings[0]
        eventually(save.exists, "it has saved", 60)
        session.cell("a = 'in the middle'; 1 / 0", namespace={}, check=False)
        session.restart()
        session.cell("b = 1", namespace={})
        assert "ranks were replaced" in session.cell("b", namespace={}).warnings[0]
        assert session.cell("b", namespace={}).warnings == ()
    with nblaunch.Session(restore=save, save_every=3600.0, display=False) as session:
        assert session.cell("a, 'b' in globals()", namespace={}).values == [(0, False), (1, False)]


def test_a_session_that_cannot_save_by_itself_says_so_once_and_its_cells_go_on(tmp_path):
    (tmp_path / "file").touch()
    with nblaunch.Session(
        nproc=2, restore=tmp_path / "file" / "save", save_every=0.001, display=False
    ) as session:
        told = [session.cell("rank", namespace={}) for _ in range(3)]
    assert [list(each.values) for each in told] == [[0, 1]] * 3
    assert "is not saved to" in told[1].warnings[0]
    assert "File exists" in told[1].warnings[0]
    assert told[2].warnings == ()
    with pytest.raises(nblaunch.NblaunchError, match="save_every needs a directory"):
        nblaunch.Session(nproc=2, save_every=60, display=False)
