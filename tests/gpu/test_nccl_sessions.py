"""A session's ranks on GPUs after an NCCL collective went wrong: right numbers, or a word of what is lost."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from gpus import BREAK_CONTEXT
from older_torch import SPLITTABLE
from torch.distributed import distributed_c10d
from training import BEGUN, FINISHED, REFUSED, STEPS

import nblaunch
from nblaunch.group import recovery
from nblaunch.rank import in_place

GPUS = torch.cuda.device_count()
distributed_c10d.BackendConfig(distributed_c10d.Backend("cpu:gloo,cuda:nccl"))  # registers both
IN_PLACE = in_place.can(["gloo", "nccl"], in_place.able(), detail=False)

pytestmark = pytest.mark.gpu(2, shared=True)
four_gpus = pytest.mark.gpu(4)

REFORMED = recovery.REFORMED_IN_PLACE if IN_PLACE else recovery.REFORMED
POST = "dist.all_reduce(torch.ones(1, device=device))"
DEAD = "made for a process group that is gone, with what revives each: "
ANEW = "the ranks were started anew: all of their variables are gone"
SETUP = """
import os, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
keep = 123

def reduced(value=1.0, group=None, on=None):
    t = torch.full((1,), value, device=on or device)
    dist.all_reduce(t, group=group)
    return t.item()

def over(mesh, name):
    return reduced(group=mesh[name].get_group())
"""
WARM = """
import sys
reduced()
model = DDP(torch.nn.Linear(2, 1).to(device), device_ids=[device.index])
model(torch.ones(1, 2, device=device)).sum().backward()
del model
print(); print(file=sys.stderr)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[nblaunch.Session]:
    with nblaunch.Session(2, timeout=60) as session:
        session.cell(SETUP, namespace={})
        # What these make in the process stays: files of torch's, and those that the session keeps open.
        session.cell(WARM, namespace={})
        yield session


@pytest.fixture
def quad() -> Iterator[nblaunch.Session]:
    with nblaunch.Session(4, backend=SPLITTABLE, timeout=60) as session:
        session.cell(SETUP, namespace={})
        yield session


@pytest.fixture
def session(pair: nblaunch.Session) -> Iterator[nblaunch.Session]:
    """Give two ranks that are the same processes after the test, and compute rightly."""
    before = {each.pid for each in pair.status().ranks}
    yield pair
    assert cell(pair, "(reduced(2.0), keep)").values == [(4.0, 123)] * 2
    assert {each.pid for each in pair.status().ranks} == before


def cell(session: nblaunch.Session, source: str) -> nblaunch.RunResult:
    return session.cell(textwrap.dedent(source), namespace={}, check=False)


def seconds(started: float) -> float:
    return time.monotonic() - started


# --- unmatched, stuck, interrupted -----------------------------------------------------------------


def test_a_collective_that_a_failed_rank_never_began_gives_no_wrong_number_later(session):
    failed = cell(
        session,
        """
        kept = torch.full((3,), float(rank), device=device)
        y = torch.full((1,), 100.0, device=device)
        if rank == 1: raise ValueError("before its collective")
        dist.all_reduce(y)
        """,
    )
    assert [each.rank for each in failed.failures if each.consequence_of is None] == [1]
    assert REFORMED in failed.warnings
    assert cell(session, "(reduced(1.0), kept.tolist())").values == [
        (2.0, [float(rank)] * 3) for rank in range(2)
    ]


def test_a_rank_that_waits_on_its_gpu_for_a_failed_one_is_freed(session):
    started = time.monotonic()
    failed = cell(
        session,
        """
        if rank == 1: raise ValueError("not me")
        reduced()
        """,
    )
    assert failed.root_cause.rank == 1
    assert failed.root_cause.message == "not me"
    assert REFORMED in failed.warnings
    assert seconds(started) < 10
    assert cell(session, "reduced(5.0)").values == [10.0, 10.0]


def test_an_interrupt_ends_a_collective_that_a_peer_does_not_come_to(session):
    interrupt_once(lambda: waits(session, 0))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        session.cell("if rank == 0: reduced()\nelse: time.sleep(600)", namespace={})
    assert seconds(started) < 15
    assert REFORMED in caught.value.__notes__


def test_ranks_that_have_done_a_different_number_are_put_right(session):
    """A broadcast ends on its source without the others."""
    failed = cell(
        session,
        """
        t = torch.full((1,), 7.0, device=device)
        if rank == 1: raise ValueError("before the broadcast")
        dist.broadcast(t, 0)
        """,
    )
    assert failed.root_cause.rank == 1
    assert REFORMED in failed.warnings


@pytest.mark.parametrize(
    ("source", "ranks"),
    [
        ("for _ in range(2 - rank): dist.all_reduce(torch.full((1,), 1000.0, device=device))", None),
        ("dist.all_reduce(torch.full((1,), 1000.0, device=device))", [0]),
        (
            (
                "own = dist.new_group([0, 1])\nt = torch.ones(1).to(device)\n"
                "for _ in range(2 - rank): dist.broadcast(t, 0, own)"
            ),
            None,
        ),
    ],
    ids=["uneven-loop", "subset", "group"],
)
def test_after_a_job_that_succeeded_with_unlike_collectives_the_next_one_computes_rightly(
    session, source, ranks
):
    """The next cell's all_reduce would pair with the one that is left over."""
    cell(session, "reduced()")
    uneven = session.cell(source, namespace={}, check=False, ranks=ranks)
    assert uneven.ok
    assert uneven.warnings[0].startswith("collectives do not match: in ")
    assert uneven.warnings[0].partition("rank 0 at")[2]
    assert uneven.warnings[1] == REFORMED
    assert cell(session, "reduced(0.5)").values == [1.0, 1.0]


def test_collectives_under_way_at_the_end_of_a_cell_are_no_mismatch(session):
    """All ranks have called them: they end by themselves."""
    told = cell(
        session,
        """
        torch.cuda._sleep(300_000_000)
        t = torch.ones(1, device=device)
        for _ in range(3): dist.all_reduce(t)
        """,
    )
    assert (told.ok, told.warnings) == (True, ())
    assert cell(session, "t.item()").values == [8.0, 8.0]


def test_the_groups_of_one_default_group_count_apart(session):
    """gloo and NCCL are both in it; an ordinary mistake costs no group then."""
    for _ in range(3):
        reduced = cell(session, "(reduced(on='cpu'), reduced(), reduced(on='cpu'))")
        assert reduced.values == [(2.0, 2.0, 2.0)] * 2
    failed = cell(session, "reduced(); raise ValueError('on all ranks')")
    assert failed.root_cause.message == "on all ranks"
    assert failed.warnings == ()


def test_batches_of_sends_and_receives_are_not_taken_for_open_operations(session):
    """torch's recorder never marks the parts of a batch as ended."""
    failed = cell(
        session,
        """
        mine, theirs = torch.ones(1, device=device), torch.zeros(1, device=device)
        both = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        reduced()
        raise ValueError("on all ranks")
        """,
    )
    assert failed.root_cause.message == "on all ranks"
    assert failed.warnings == ()


def test_after_a_heal_an_ordinary_mistake_costs_no_group(session):
    """What the aborted group had open stays open in torch's recorder."""
    cell(session, "if rank == 1: raise ValueError('x')\ndist.all_reduce(torch.ones(1, device=device))")
    failed = cell(session, "reduced(); reduced(on='cpu'); raise ValueError('on all ranks')")
    assert failed.warnings == ()


@pytest.mark.parametrize("takes", [1, 3])
def test_an_interrupt_in_a_healthy_step_costs_no_group(session, takes):
    cell(session, "group = dist.new_group([0, 1]); reduced(group=group); seen = 0")
    interrupt_once(lambda: cell_is_in(session, "t.item()"))
    with pytest.raises(KeyboardInterrupt) as caught:
        session.cell(step_of(takes), namespace={})
    assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
    assert cell(session, "reduced(group=group)").values == [2.0, 2.0]
    cell(session, "del group")


def step_of(seconds: float) -> str:
    """Return a cell of steps, each of which computes for so long and ends with a collective of a group."""
    return f"""
cycles = int({seconds}e9) if os.environ.get("FAKE_GPUS") else int({seconds} * 1.7e9)
for _ in range(100):
    t = torch.ones(1, device=device)
    torch.cuda._sleep(cycles)
    dist.all_reduce(t, group=group)
    t.item()
"""


def test_an_optimizer_whose_step_was_queued_behind_an_interrupted_collective_is_named(session):
    """A GPU then runs it. It has no kernels here: those of a simulated GPU wait in the call."""
    cell(
        session,
        """
        model = torch.nn.Linear(2, 1).to(device)
        opt, other = (torch.optim.SGD(model.parameters()) for _ in range(2))
        other.step()
        reduced()
        """,
    )
    failed = cell(session, f"if rank == 1: raise ValueError('x')\n{POST}; opt.step()")
    apart = recovery.APART.format("model, opt", "done on rank 0, not done on rank 1")
    assert failed.warnings == (apart, REFORMED, f"{recovery.STEPPED}model on rank 0, opt on rank 0")
    failed = cell(
        session, f"opt.step()\nif rank == 1: raise ValueError('x')\n{POST}; torch.cuda.synchronize()"
    )
    assert failed.warnings == (REFORMED,)
    cell(session, "del model, opt, other")


# --- what is gone is named -------------------------------------------------------------------------


@pytest.mark.skipif(IN_PLACE, reason="groups are formed again in place: nothing dies")
@pytest.mark.parametrize("waits", [False, True], ids=["posted", "stuck"])
def test_variables_that_died_with_the_groups_are_named(session, waits):
    cell(
        session,
        """
        group = dist.new_group([0, 1])
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("data",))
        model = DDP(torch.nn.Linear(2, 1).to(device), device_ids=[device.index])
        own = DDP(torch.nn.Linear(2, 1).to(device), device_ids=[device.index], process_group=group)
        sharded = fully_shard(torch.nn.Linear(2, 2).to(device))
        sharded(torch.ones(1, 2, device=device))
        reduced(group=group) + over(mesh, "data")
        """,
    )
    end = "; torch.cuda.synchronize()" if waits else ""
    failed = cell(
        session, f"if rank == 1: raise ValueError('x')\ndist.all_reduce(torch.ones(1, device=device)){end}"
    )
    remedy = "own = DDP(own.module, device_ids=[device.index], process_group=group)"
    said = next(each for each in failed.warnings if each.startswith(DEAD))
    assert f"own ({remedy})" in said
    assert "group (group = dist.new_group(ranks=[0, 1]))" in said
    assert not [each for each in (" mesh (", " model (", " sharded (") if each in said]
    used = cell(session, "own(torch.ones(1, 2, device=device))")
    assert f"To revive it: {remedy}" in used.root_cause.message
    revived = cell(
        session,
        f"""
        group = dist.new_group(ranks=[0, 1])
        {remedy}
        x = torch.ones(1, 2, device=device)
        for each in (model, own, sharded): each(x).sum().backward()
        (reduced(group=group), over(mesh, "data"))
        """,
    )
    assert revived.values == [(2.0, 2.0)] * 2, revived.failures
    cell(session, "del group, mesh, model, own, sharded")


needs_in_place = pytest.mark.skipif(
    not IN_PLACE, reason="NCCL forms no group again in place before torch 2.15"
)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 of older versions")
@pytest.mark.parametrize("failing", ["forward", "between", "backward"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_model_trains_on_as_if_a_mistake_within_a_step_had_not_been(session, kind, failing):
    cell(session, STEPS)
    run = cell(session, BEGUN.format(repr(kind)))
    assert run.ok, run.failures
    broken = cell(session, f"failing = {failing!r}; step(model, opt, 3); torch.cuda.synchronize()")
    assert (broken.root_cause.message, broken.warnings) == ("a mistake", (REFORMED,))
    finished = cell(session, FINISHED)
    assert finished.values == [True, True], finished.failures


@needs_in_place
def test_groups_and_meshes_of_the_program_go_on(session):
    """Also those that torch would split from the default one, which NCCL cannot form again."""
    cell(
        session,
        """
        world, group, split = dist.group.WORLD, dist.new_group([1, 0]), dist.split_group(split_ranks=[[0, 1]])
        alone = dist.new_group([rank], use_local_synchronization=True)
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("data",))
        """,
    )
    for _ in range(2):
        failed = cell(session, f"if rank == 1: raise ValueError('x')\n{POST}; torch.cuda.synchronize()")
        assert failed.warnings == (REFORMED,)
        after = cell(
            session,
            "(world is dist.group.WORLD, [reduced(group=each) for each in (None, group, split, alone)],"
            " reduced(on='cpu'), reduced(group=group, on='cpu'), over(mesh, 'data'))",
        )
        assert after.values == [(True, [2.0, 2.0, 2.0, 1.0], 2.0, 2.0, 2.0)] * 2, after.failures
    cell(session, "del group, split, alone, mesh")


@needs_in_place
@pytest.mark.parametrize("end", ["", "; torch.cuda.synchronize()"], ids=["posted", "stuck"])
def test_where_a_rank_cannot_form_its_groups_again_all_get_new_ones_and_the_reason_is_told(end):
    with nblaunch.Session(2, timeout=60) as session:
        cell(session, f"{SETUP}reduced(); group = dist.new_group([0, 1])\n{REFUSED}")
        failed = cell(session, f"if rank == 1: raise ValueError('x')\n{POST}{end}")
        told = f"{recovery.NOT_IN_PLACE}rank 1: RuntimeError: no connection"
        assert failed.warnings[:2] == (told, recovery.REFORMED)
        after = cell(session, "reduced(), reduced(on='cpu'), reduced(group=dist.new_group([0, 1])), keep")
        assert after.values == [(2.0, 2.0, 2.0, 123)] * 2
        assert [each.stdout + each.stderr for each in (*failed.ranks, *after.ranks)] == [""] * 4


@four_gpus
def test_meshes_splits_and_new_groups_can_be_made_after_a_heal(quad):
    for _ in range(2):
        failed = cell(
            quad,
            "if rank == 1: raise ValueError('x')\ndist.all_reduce(torch.ones(1, device=device))",
        )
        assert REFORMED in failed.warnings
        assert cell(quad, "(reduced(), keep)").values == [(4.0, 123)] * 4
        made = cell(
            quad,
            """
            mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "model"))
            split = dist.split_group(split_ranks=[[0, 1], [2, 3]])
            pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
            sums = [reduced(float(rank), group) for group in (split, pairs[rank % 2])]
            (*sums, over(mesh, "data"), over(mesh, "model"))
            """,
        )
        assert made.values == [(1.0, 2.0, 2, 2), (1.0, 4.0, 2, 2), (5.0, 2.0, 2, 2), (5.0, 4.0, 2, 2)]


@four_gpus
def test_a_collective_of_a_part_of_the_ranks_is_compared_among_these_alone(quad):
    cell(quad, "mesh = init_device_mesh('cuda', (2, 2), mesh_dim_names=('data', 'model'))")
    failed = cell(
        quad,
        """
        for _ in range(1 + rank // 2):
            over(mesh, "model")
        reduced()  # a rank that is still forming its first group would be stopped because of the others
        raise ValueError("on all ranks")
        """,
    )
    assert failed.warnings == ()


def own_group_and_a_mesh() -> float:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device)
    world_size = dist.get_world_size()
    shape = (2, world_size // 2)
    mesh = init_device_mesh("cuda", shape)
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=mesh.get_group(0))
    return one.item()


@pytest.mark.gpu(2)
def test_a_program_that_brings_its_own_group_can_split_it():
    assert nblaunch.run(own_group_and_a_mesh, nproc=GPUS // 2 * 2).values == [2.0] * (GPUS // 2 * 2)


def test_a_programs_own_group_in_a_session_waits_as_long_as_the_sessions_own(session):
    told = cell(
        session,
        """
        def seconds():
            return dist.group.WORLD._get_backend(device).options._timeout.total_seconds()
        before = seconds()
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        (before, seconds())
        """,
    )
    assert told.values == [(86_400.0, 86_400.0)] * 2


# --- where it cannot be healed ---------------------------------------------------------------------


@pytest.mark.skipif(not os.environ.get("FAKE_GPUS"), reason="a real GPU's context breaks in its own time")
def test_a_peer_that_waits_on_its_gpu_for_a_broken_one_is_freed_within_the_grace_period():
    """To its recorder the broken rank has begun the collective, as all others have."""
    with nblaunch.Session(2, timeout=40, grace=5) as session:
        cell(session, SETUP + "reduced()")
        started = time.monotonic()
        failed = cell(session, BREAK_CONTEXT.replace("    torch.cuda.synchronize()", "") + "reduced()")
        assert failed.root_cause.rank == 1
        assert seconds(started) < 10
        assert any("rank 1: the GPU context is unusable" in each for each in failed.warnings)


@pytest.mark.skipif(not os.environ.get("FAKE_GPUS"), reason="only a simulated NCCL can be told to hang")
def test_ranks_whose_abort_does_not_end_are_replaced():
    with nblaunch.Session(2, timeout=60, grace=1) as session:
        cell(session, SETUP + "os.environ['FAKE_NCCL_ABORT_MS'] = '600000'")
        started = time.monotonic()
        failed = cell(
            session, "if rank == 1: raise ValueError('x')\ndist.all_reduce(torch.ones(1, device=device))"
        )
        assert seconds(started) < 40
        assert failed.root_cause.message == "x"
        (why,) = [each for each in failed.warnings if "NCCL did not abort" in each]
        assert "on rank" in why
        assert ANEW in failed.warnings
        assert cell(session, "'ready'").values == ["ready"] * 2


@pytest.mark.skipif(not os.environ.get("FAKE_GPUS"), reason="only a simulated NCCL can be told to be slow")
@pytest.mark.parametrize("waits", [False, True], ids=["posted", "stuck"])
def test_a_heal_that_takes_longer_than_the_grace_period_keeps_the_variables_and_says_what_it_does(waits):
    with nblaunch.Session(2, timeout=60, grace=0.5) as session:
        cell(session, SETUP + "os.environ['FAKE_NCCL_ABORT_MS'] = '2500'")
        said = []
        ended = threading.Event()

        def listen() -> None:
            while not ended.wait(0.05):
                said.append(str(session.status()))

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            end = "; torch.cuda.synchronize()" if waits else ""
            failed = cell(session, f"if rank == 1: raise ValueError('x')\n{POST}{end}")
        finally:
            ended.set()
            listener.join()
        assert REFORMED in failed.warnings
        assert any("re-forming the process group" in each for each in said)
        assert cell(session, "(reduced(), keep)").values == [(2.0, 123)] * 2


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one", "both"])
def test_a_session_with_an_open_operation_ends_within_two_seconds(ranks):
    """A receive that nobody sends for; NCCL's own end would wait for it."""
    with nblaunch.Session(2, timeout=60) as session:
        # The first send each way connects the two, for which NCCL waits.
        cell(session, SETUP + "t = torch.ones(1).to(device)")
        cell(session, "dist.send(t, 1) if rank == 0 else dist.recv(t, 0)")
        cell(session, "dist.send(t, 0) if rank == 1 else dist.recv(t, 1)")
        session.cell(
            "t = torch.ones(1, device=device); work = dist.irecv(t, 1 - rank)", namespace={}, ranks=ranks
        )
        started = time.monotonic()
    assert seconds(started) < 2


# --- helpers ---------------------------------------------------------------------------------------


def waits(session: nblaunch.Session, rank: int) -> bool:
    return any(f"rank {rank} is in all_reduce" in each for each in session.stacks().findings)


def cell_is_in(session: nblaunch.Session, call: str) -> bool:
    report = session.stacks()
    return bool(report.groups) and all(call in group.headline for group in report.groups)


def interrupt_once(condition: Callable[[], bool]) -> None:
    def watch() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not condition():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch).start()
