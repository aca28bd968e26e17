"""Are the ranks equal: `session.diff`, `%distributed diff` and `nblaunch.diff` on real ranks."""

from __future__ import annotations

import re

import pytest

import nblaunch
from nblaunch import NblaunchError, OptionError

pytestmark = pytest.mark.quick

RANKS = 4

SETUP = """
import torch, nblaunch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))
x = {"a": [1, 2, 3], "b": (1.0, "text")}
if rank == 3:
    with torch.no_grad():
        model[2].weight[4, 17] += 0.25
    only = x["a"][1] = 9
"""


@pytest.fixture(scope="module")
def session():
    """Open a session of four ranks, of which the last one differs."""
    with nblaunch.Session(RANKS) as opened:
        opened.cell(SETUP, namespace={})
        yield opened


def test_the_first_element_that_differs_is_named_with_the_ranks_that_agree(session):
    row = session.diff("model").first
    assert row.path == "model.2.weight[4, 17]"
    assert row.groups == ((0, 1, 2), (3,))
    assert (row.largest, row.largest_at) == (pytest.approx(0.25), "model.2.weight[4, 17]")
    assert (row.differing, row.elements, row.exact) == (1, 100, True)


def test_several_names_have_a_row_each_and_a_report_is_true_if_ranks_differ(session):
    found = session.diff("model.0", "x", "only")
    assert found
    assert not found.equal
    assert [row.equal for row in found] == [True, False, False]
    assert str(found).splitlines()[:2] == [
        "model.0: equal on ranks 0-3",
        "x: x['a'][1]: values differ. ranks 0-2 agree; rank 3 differs",
    ]
    assert found["only"].what == "only on rank 3"
    assert found.moved < 100_000
    assert not session.diff("model", ranks=[0, 2])


def test_a_name_that_no_rank_has_is_an_error_with_the_nearest_one(session):
    with pytest.raises(NblaunchError, match=r"'modle' is not defined \(ranks 0-3\)\. Did you mean 'model'\?"):
        session.diff("modle")
    with pytest.raises(NblaunchError, match=r"model has no attribute 'trainin'.*'train"):
        session.diff("model.trainin")
    with pytest.raises(OptionError, match="there is no name"):
        session.diff()
    with pytest.raises(OptionError, match="is not the name of a variable"):
        session.diff("model[0]")


def test_every_rank_gets_the_same_report_from_a_cell(session):
    told = session.cell(
        "found = nblaunch.diff(model, 'model'); str(found), found.first.path, bool(nblaunch.diff(1))",
        namespace={},
    ).values
    assert set(told) == {(str(session.diff("model")), "model.2.weight[4, 17]", False)}


def test_a_part_of_the_ranks_compares_over_its_group(session):
    session.cell("import torch.distributed as dist; pair = dist.new_group([1, 3])", namespace={})
    told = session.cell(
        "str(nblaunch.diff(model, 'm', group=pair)) if rank in (1, 3) else None", namespace={}
    ).values
    assert told[1] == told[3]
    assert told[1].startswith("m: m.2.weight[4, 17]: values differ. ranks 1,3 differ")


@pytest.mark.full
def test_variables_are_compared_without_a_process_group_and_a_cell_says_what_it_needs():
    with nblaunch.Session(2, init_process_group=False) as session:
        session.cell("import nblaunch; y = [1, rank]", namespace={})
        assert session.diff("y").first.path == "y[1]"
        with pytest.raises(nblaunch.RunFailedError, match=r"nblaunch\.diff needs a process group"):
            session.cell("nblaunch.diff(y)", namespace={})
    with pytest.raises(NblaunchError, match="not a rank"):
        nblaunch.diff(1)


def test_a_comparison_changes_nothing_and_lets_go_of_what_it_read(session):
    session.cell("import gc, weakref\nbig = torch.ones(10_000)\nseen = weakref.ref(big)", namespace={})
    assert session.diff("big").equal
    assert session.cell("del big; gc.collect(); seen() is None", namespace={}).values == [True] * RANKS


@pytest.mark.full
def test_a_session_at_work_refuses_a_comparison(session):
    handle = session.submit(wait_for_interrupt)
    try:
        with pytest.raises(NblaunchError, match="takes one job at a time"):
            session.diff("model")
    finally:
        handle.cancel()
        with pytest.raises(KeyboardInterrupt):
            handle.result(30)


def wait_for_interrupt():
    import time

    while True:
        time.sleep(0.01)


def test_what_a_rank_cannot_compare_is_an_error_of_all_ranks(session):
    """A rank that raised alone would leave the others waiting."""
    with pytest.raises(nblaunch.RunFailedError, match="rank 2"):
        session.cell(
            "import nblaunch.probes.diff as inside\n"
            "if rank == 2:\n"
            "    real = inside.Holding.answer\n"
            "    inside.Holding.answer = lambda self, ask: 1 / 0\n"
            "try:\n"
            "    nblaunch.diff(x)\n"
            "finally:\n"
            "    if rank == 2:\n"
            "        inside.Holding.answer = real\n",
            namespace={},
        )
    assert session.diff("x").first.path == "x['a'][1]"


SHARDED = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
whole = torch.arange(16.0).reshape(4, 4)
t = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
"""


@pytest.mark.full
def test_shards_are_compared_by_the_ranks_that_hold_the_same_one(session):
    session.cell(SHARDED, namespace={})
    assert session.diff("t").equal
    session.cell("if rank == 3:\n    t.to_local()[1, 2] += 5", namespace={})
    row = session.diff("t").first
    assert row.groups == ((1,), (3,))
    assert row.path == "t (local shard)[1, 2]"
    assert row.largest == 5
    session.cell("t = distribute_tensor(whole, mesh, [Replicate(), Shard(int(rank == 0))])", namespace={})
    assert session.diff("t").first.what == "types, shapes or dtypes differ"


@pytest.mark.full
def test_parameters_of_fsdp2_are_shards_and_those_of_ddp_are_replicas(session):
    session.cell(
        SHARDED + "from torch.distributed.fsdp import fully_shard\n"
        "torch.manual_seed(1)\n"
        "sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))\n"
        "fully_shard(sharded, mesh=init_device_mesh('cpu', (4,)))\n"
        "wrapped = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))\n",
        namespace={},
    )
    assert session.diff("sharded", "wrapped").equal
    session.cell("if rank == 1: wrapped.module.bias.data[2] = 7", namespace={})
    assert session.diff("sharded", "wrapped").first.path == "wrapped.module.bias[2]"


@pytest.mark.slow
def test_optimizers_and_schedulers_are_compared_by_their_state(session):
    session.cell(
        "net = nn.Linear(3, 3)\n"
        "torch.nn.init.ones_(net.weight), torch.nn.init.ones_(net.bias)\n"
        "optimizer = torch.optim.Adam(net.parameters())\n"
        "net(torch.ones(1, 3) * (1 + (rank == 2))).sum().backward(); optimizer.step()",
        namespace={},
    )
    assert session.diff("optimizer").first.path.startswith("optimizer.state_dict()['state'][0]['exp_avg'][")


@pytest.mark.full
def test_the_magic_shows_and_returns_the_report(kernel):
    kernel.ok("%distributed start -n 2")
    kernel.ok("%%distributed\nz = [0, rank * 2]; w = 1")
    kernel.ok("found = get_ipython().run_line_magic('distributed', 'diff z w')")
    assert kernel.value("str(found)").splitlines()[0] == "z: z[1]: values differ. ranks 0-1 differ"
    assert kernel.value("found['w'].equal")
    assert re.search("<table", kernel.value("found._repr_html_()"))
    kernel.ok("from nblaunch.magic.commands import command_completions")
    assert set(kernel.value("command_completions('%distributed diff ')")) >= {"z", "w", "--env"}
    assert kernel.value("command_completions('%distributed di')") == ["diff"]
    kernel.ok("%distributed stop")
