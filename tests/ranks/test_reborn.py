"""A rank of a session that dies is replaced alone, and gets from the others what all ranks had alike."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from patience import eventually

import nblaunch

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
        return all(each.get(name) for each in known for name in names)

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
        session.cell(SETUP, namespace={})
        wait_for_sketches(session, "model", "holder", "own")
        kill(session, 1)
        found = session.cell(IS_THERE, namespace={})
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
        found = session.cell("step, config['lr'], globals().get('new')", namespace={})
        assert found.values == [(4, 0.2, "new"), (4, 0.2, None), (4, 0.2, "new")]
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


def trained(session: nblaunch.Session, steps: int, *, dies_at: int | None = None) -> Any:
    return session.cell(f"train({steps}, {dies_at})", namespace={}, check=dies_at is None)


TRAINING = """
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


def test_training_with_ddp_goes_on_as_if_nothing_had_happened():
    """As one in which the model is wrapped again at that step: DDP arranges its buckets anew."""
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell(TRAINING, namespace={})
        trained(session, 3)
        session.cell("model = DDP(model.module)", namespace={})
        expected = trained(session, 4).values
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell(TRAINING, namespace={})
        assert not trained(session, 10, dies_at=3).ok
        went_on = session.cell("step", namespace={})
        assert went_on.values == [3, 3, 3]
        assert went_on.warnings[0].startswith("rank 1 is back: model, opt, step, train from rank 0")
        assert "step as the cell that was cut off left" in went_on.warnings[0]
        assert trained(session, 4).values == expected
        joined = "opt.param_groups[0]['params'][0] is next(model.parameters())"
        assert session.cell(joined, namespace={}).values == [True] * 3


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


def test_a_rank_that_has_its_variables_again_keeps_them_when_another_one_dies():
    with nblaunch.Session(nproc=3, display=False) as session:
        session.cell("a, b = 1, 2", namespace={})
        kill(session, 1)
        assert session.cell("a, b", namespace={}).values == [(1, 2)] * 3
        session.cell("if rank == 1: a = 5", namespace={})
        kill(session, 2)
        assert session.cell("globals().get('a'), b", namespace={}).values == [(1, 2), (5, 2), (None, 2)]


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
