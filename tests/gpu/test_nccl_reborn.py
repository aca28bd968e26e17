"""A rank of a session on GPUs that dies is replaced alone: the others keep what they have on theirs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from gpus import BREAK_CONTEXT
from patience import eventually
from torch.distributed import distributed_c10d

import nblaunch
from nblaunch.group import lifecycle, recovery
from nblaunch.rank import in_place

distributed_c10d.BackendConfig(distributed_c10d.Backend("cpu:gloo,cuda:nccl"))  # registers both
IN_PLACE = in_place.can(["gloo", "nccl"], in_place.able(), detail=False)

pytestmark = pytest.mark.gpu(2, shared=True)
three_gpus = pytest.mark.gpu(3)

SETUP = """
import os, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
# Of another number on ranks that were there before it was gone.
former = DDP(torch.nn.Linear(2, 2).to(device), device_ids=[device.index])
del former
net = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 5))
model = DDP(net.to(device), device_ids=[device.index])
another = DDP(torch.nn.Linear(3, 1).to(device), device_ids=[device.index])
opt, step = torch.optim.AdamW(model.parameters(), lr=1e-2), 0
same, own = torch.arange(5000.0, device=device), torch.full((5000,), float(rank), device=device)

class Trainer: pass
trainer, place = Trainer(), device
trainer.device, trainer.model = device, model

def train(steps):
    global step
    for _ in range(steps):
        source = torch.Generator().manual_seed(1000 * step + rank)
        x, y = (torch.randn(16, size, generator=source).to(device) for size in (20, 5))
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        step += 1
    return [each.tolist() for each in model.parameters()]

def reduced(value=1.0, group=None):
    t = torch.full((1,), value, device=device)
    dist.all_reduce(t, group=group)
    return t.item()
"""
NAMES = ["another", "model", "net", "opt", "own", "same", "step", "place", "train", "trainer"]
WHERE = """
(
    same.device == device == next(model.parameters()).device and model.device_ids == [device.index],
    trainer.device == place == device and trainer.model is model,
    all(each["exp_avg"].device == device for each in opt.state.values()),
    torch.cuda.current_device() == device.index,
    bool((same == torch.arange(5000.0, device=device)).all()),
    own.mean().item() if "own" in globals() else None,
    reduced(rank + 1.0),
)
"""
OWN_GROUPS = """
pair = dist.new_group(list(range(world_size)))
mesh = init_device_mesh("cuda", (world_size,))
grouped = DDP(torch.nn.Linear(3, 1).to(device), device_ids=[device.index], process_group=pair)
"""
USED = "another(torch.ones(1, 3, device=device)).sum().backward()"
STUCK = """
kept = torch.full((3,), 7.0, device=device)
if rank == 1:
    while True: time.sleep(0.01)
dist.all_reduce(kept)
torch.cuda.synchronize()
"""


def cell(session: nblaunch.Session, source: str) -> nblaunch.RunResult:
    return session.cell(source, namespace={}, check=False)


def pids(session: nblaunch.Session) -> dict[int, int]:
    eventually(lambda: all(each.state == "idle" for each in session.status().ranks), "the ranks are ready")
    return {each.rank: each.pid for each in session.status().ranks if each.pid is not None}


def wait_for_digests(session: nblaunch.Session, *names: str) -> None:
    """Wait until the ranks, which are idle, have sketched their variables by the pickles."""

    def whole() -> bool:
        assert session._live.open
        known = [dict(zip(each.names, each.digests, strict=False)) for each in session._live._names.values()]
        return all(each.get(name) for each in known for name in names or ("model", "opt", "own", "same"))

    eventually(whole, "the variables are sketched")


def kill_idle(session: nblaunch.Session, rank: int) -> None:
    """Kill an idle rank, and wait until another process has its number."""
    before = session._live.attempt
    os.kill(pids(session)[rank], signal.SIGKILL)
    eventually(lambda: session._live.attempt == before + 1, "the rank has been started again")


def kill_in_all_reduce(session: nblaunch.Session) -> nblaunch.RunResult:
    """Run a cell whose rank 1 is killed once all others wait for it on their GPUs; return the result."""
    pid, others = pids(session)[1], [each for each in pids(session) if each != 1]
    waiting = "rank 0 is in all_reduce" if len(others) == 1 else "ranks 0,2 are in all_reduce"
    seen = []

    def kill() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not seen:
            seen.extend(each for each in session.stacks().findings if each.startswith(waiting))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        result = cell(session, STUCK)
    finally:
        killer.join()
    assert seen, "the others wait for the rank"
    return result


def told(result: nblaunch.RunResult, dead: int) -> str:
    (text,) = [each for each in result.warnings if each.startswith(f"rank {dead} is back: ")]
    return text


def check_whole(session: nblaunch.Session, dead: int) -> None:
    """Check that all have what they had, each on its GPU, but for the dead one's own, and can go on."""
    n = len(session.status().ranks)
    total = sum(range(1, n + 1))
    assert cell(session, WHERE).values == [
        (True, True, True, True, True, None if rank == dead else float(rank), total) for rank in range(n)
    ]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_was_killed_idle_has_on_its_gpu_what_all_had_alike(dead):
    """Of two ranks one is left: what was compared by digests while both were idle is known to be alike."""
    with nblaunch.Session(2, timeout=60) as session:
        session.cell(SETUP, namespace={})
        session.cell("train(3)", namespace={})
        wait_for_digests(session)
        before = pids(session)
        kill_idle(session, dead)
        found = cell(session, f"[each for each in {NAMES} if each in globals()]")
        assert found.values[1 - dead] == NAMES
        assert found.values[dead] == [each for each in NAMES if each != "own"]
        came, _, gone = told(found, dead).partition("; ")
        assert {"model", "opt", "same", "step", "train"} <= set(came.replace(",", "").split())
        assert gone == (
            "own had no copy and is gone (it was not the same on all ranks, as far as is known); "
            "random state of Python, random state of torch, random state of CUDA: anew"
        )
        assert recovery.REFORMED in found.warnings
        assert not any("what revives each" in each for each in found.warnings)
        check_whole(session, dead)
        after = pids(session)
        assert after.pop(1 - dead) == before.pop(1 - dead)
        assert after != before


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=three_gpus)])
def test_a_rank_that_was_killed_while_the_others_were_in_an_all_reduce_comes_back_and_they_stay(n):
    with nblaunch.Session(n, timeout=60) as session:
        session.cell(SETUP, namespace={})
        session.cell("train(3)", namespace={})
        wait_for_digests(session)
        before = pids(session)
        failed = kill_in_all_reduce(session)
        assert (failed.root_cause.rank, failed.root_cause.signal) == (1, "SIGKILL")
        assert lifecycle.STARTED_AGAIN.format(1) in failed.warnings
        assert lifecycle.RESTARTED not in failed.warnings
        found = cell(session, "str(kept.device) if 'kept' in globals() else None")
        assert found.values == [None if rank == 1 else f"cuda:{rank}" for rank in range(n)]
        assert "kept had no copy and is gone (nothing is known of it before the job" in told(found, 1)
        check_whole(session, 1)
        assert {rank: pid for rank, pid in pids(session).items() if rank != 1} == {
            rank: pid for rank, pid in before.items() if rank != 1
        }


@pytest.mark.parametrize("in_collective", [False, True], ids=["idle", "in all_reduce"])
def test_training_with_ddp_on_gpus_goes_on_as_if_nothing_had_happened(in_collective):
    """As where the model is wrapped again at that step: DDP arranges its buckets anew."""
    with nblaunch.Session(2, timeout=60) as session:
        session.cell(SETUP, namespace={})
        session.cell("train(3)", namespace={})
        session.cell("model = DDP(model.module, device_ids=[device.index])", namespace={})
        expected = session.cell("train(4)", namespace={}).values
    with nblaunch.Session(2, timeout=60) as session:
        session.cell(SETUP, namespace={})
        session.cell("train(3)", namespace={})
        wait_for_digests(session)
        if in_collective:
            assert not kill_in_all_reduce(session).ok
        else:
            kill_idle(session, 1)
        assert session.cell("train(4)", namespace={}).values == expected


@three_gpus
def test_models_of_the_default_group_go_on_and_groups_that_the_program_made_are_named_as_gone():
    with nblaunch.Session(3, timeout=60) as session:
        session.cell(SETUP + OWN_GROUPS, namespace={})
        kill_idle(session, 1)
        found = cell(session, "[each for each in ('model', 'pair', 'mesh', 'grouped') if each in globals()]")
        everything = ["model", "pair", "mesh", "grouped"]
        assert found.values == [everything, ["model", "mesh"], everything]
        assert recovery.REFORMED in found.warnings
        (gone,) = [each for each in found.warnings if "what revives each" in each]
        wrapped = "DDP(grouped.module, device_ids=[device.index], process_group=pair)"
        for name, remedy in (
            ("pair", "dist.new_group(ranks=[0, 1, 2])"),
            ("grouped", wrapped),
        ):
            assert f"{name} on ranks 0,2 ({name} = {remedy})" in gone
        assert "model" not in gone.replace("grouped.module", "")
        assert "another" not in gone
        text = told(found, 1)
        assert "pair had no copy and is gone (rank 0: " in text
        assert "it is gone: the default process group was formed anew)" in text
        # Seeded alike, and what a rank draws on its GPU goes on as on the others.
        drawn = cell(session, "torch.rand(2, device=device).tolist()").values
        assert drawn == [drawn[0]] * 3
        refused = cell(session, "grouped(torch.ones(1, 3, device=device)) if rank == 0 else None")
        assert "this model's process group is gone" in refused.root_cause.message
        assert cell(session, "train(2) is not None, reduced()").values == [(True, 3.0)] * 3
        session.cell("pair = dist.new_group(ranks=[0, 1, 2])", namespace={})
        again = "(reduced(group=pair), reduced(2.0, group=mesh.get_group()))"
        assert cell(session, again).values == [(3.0, 6.0)] * 3


def test_a_collective_that_fails_after_a_rank_came_back_is_healed_and_its_models_go_on():
    """In place, models are told apart by numbers, which must be those of the other ranks."""
    with nblaunch.Session(2, timeout=60) as session:
        session.cell(SETUP, namespace={})
        wait_for_digests(session)
        kill_idle(session, 1)
        # One of them has arranged its buckets, and the other has not.
        session.cell(f"for _ in range(3): {USED}", namespace={})
        session.cell("later = DDP(torch.nn.Linear(2, 2).to(device), device_ids=[device.index])", namespace={})
        failed = cell(session, "if rank == 0: raise ValueError('not me')\nreduced()")
        assert failed.root_cause.rank == 0
        assert (recovery.REFORMED_IN_PLACE if IN_PLACE else recovery.REFORMED) in failed.warnings
        if IN_PLACE:
            assert not any("what revives each" in each for each in failed.warnings)
            step = f"{USED}\nlater(torch.ones(1, 2, device=device)).sum().backward()\ntrain(2)"
            values = session.cell(step, namespace={}).values
            assert values[0] == values[1]
        assert cell(session, "reduced(2.0)").values == [4.0, 4.0]


def test_a_rank_whose_gpu_context_breaks_is_started_again_alone():
    """An assertion on the device: CUDA can do nothing more for this process."""
    with nblaunch.Session(2, timeout=60) as session:
        session.cell(SETUP, namespace={})
        session.cell("train(3)", namespace={})
        wait_for_digests(session)
        before = pids(session)
        failed = cell(session, BREAK_CONTEXT + "dist.all_reduce(torch.ones(1, device=device))")
        assert failed.root_cause.rank == 1
        (why,) = [each for each in failed.warnings if "GPU context" in each]
        assert why.startswith("rank 1: the GPU context is unusable: CUDA error: device-side assert")
        assert "model" in told(cell(session, "1"), 1)
        assert pids(session)[0] == before[0]
        check_whole(session, dead=1)


HSDP = """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cuda", (world_size, 1), mesh_dim_names=("replicate", "shard"))

def trained(steps):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).to(device)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2), steps

def go_on(net, opt, steps):
    for number in range(*steps):
        torch.manual_seed(10 * number + rank)
        opt.zero_grad()
        net(torch.randn(8, 4).to(device)).square().mean().backward()
        opt.step()

whole, sharded = trained((0, 5)), trained((0, 2))
go_on(*whole)
go_on(*sharded)
"""


def test_a_model_of_hsdp_goes_on_with_the_shards_of_a_replica():
    with nblaunch.Session(2, timeout=60) as session:
        session.cell(SETUP + HSDP, namespace={})
        wait_for_digests(session, "sharded", "whole")
        kill_idle(session, 1)
        assert "sharded" in told(cell(session, "go_on(*sharded[:2], (2, 5))"), 1)
        local = "[[p.to_local().tolist() for p in each.parameters()] for each in (whole[0], sharded[0])]"
        for undisturbed, went_on in cell(session, local).values:
            assert went_on == undisturbed
