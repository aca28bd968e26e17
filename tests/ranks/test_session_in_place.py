"""After a mistake in a session on gloo with torch 2.14 or later, models and groups made before it go on."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

import pytest
from training import BEGUN, FINISHED, REFUSED, STEPS, UNORDERED

import nblaunch
from nblaunch.group.recovery import NOT_IN_PLACE, REFORMED, REFORMED_IN_PLACE, UNUSABLE_IN_PLACE
from nblaunch.rank import in_place

pytestmark = pytest.mark.skipif(
    not in_place.torch_can(), reason="torch before 2.14 forms no group again in place"
)

SETUP = f"""
{STEPS}
def reduced(group=None):
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    return t.item()
"""


@pytest.fixture(scope="module")
def session() -> Iterator[nblaunch.Session]:
    with nblaunch.Session(2, grace=0.5) as session:
        session.cell(SETUP, namespace={})
        yield session


def cell(session: nblaunch.Session, source: str) -> nblaunch.RunResult:
    return session.cell(textwrap.dedent(source), namespace={}, check=False)


def test_a_copy_of_a_model_trains_on_too(session):
    """It is made without the constructor."""
    cell(
        session,
        "import copy\nmodel, _ = made('ddp'); model = copy.deepcopy(model); given = model(torch.ones(1, 8))",
    )
    assert cell(
        session, "given.sum().backward()\nif rank == 1: raise ValueError('a mistake')\nreduced()"
    ).warnings
    trained = cell(session, "model.zero_grad(); model(torch.ones(1, 8)).sum().backward()")
    assert trained.ok, trained.failures


def test_gradients_of_earlier_parts_of_a_step_are_gone_on_all_ranks_or_on_none(session):
    """Shards of one model are of the same steps: rank 1 fails before the forward that rank 0 is in."""
    cell(session, "model, opt = made('fsdp'); failing = ''; part = lambda: model(torch.ones(4, 8)).sum()")
    cell(session, "part().backward()")
    broken = cell(session, "if rank == 1: raise ValueError('a mistake')\npart().backward()")
    assert broken.warnings == (REFORMED_IN_PLACE,)
    assert cell(session, "{each.grad is None for each in model.parameters()}").values == [{True}] * 2
    cell(session, "part().backward()")
    broken = cell(session, "if rank == 1: raise ValueError('a mistake')\nreduced()")
    assert cell(session, "{each.grad is None for each in model.parameters()}").values == [{False}] * 2


def test_a_model_that_cannot_forget_its_step_refuses_also_where_no_variable_leads_to_it(session):
    cell(
        session,
        """
        deep = {"a": {"b": {"c": made("fsdp")[0]}}}
        def refuse(): raise RuntimeError("another model has queued its reduction")
        deep["a"]["b"]["c"]._get_fsdp_state()._reset_iter_state = refuse
        """,
    )
    broken = cell(
        session,
        "_ = deep['a']['b']['c'](torch.ones(4, 8))\nif rank == 1: raise ValueError('a mistake')\nreduced()",
    )
    assert broken.warnings[1].startswith(f"{UNUSABLE_IN_PLACE}, with what revives each: a FSDPLayers (")
    refused = cell(session, "deep['a']['b']['c'](torch.ones(4, 8))")
    assert "it cannot go on from there" in refused.root_cause.message
    cell(session, "del deep")


def test_ddp_whose_ranks_have_arranged_buckets_and_have_not_goes_on_with_new_ones(session):
    """Rank 1 fails in the step in which the others arrange theirs; NCCL lets them go on without it."""
    cell(session, "group = dist.new_group([0, 1]); (model, opt), other = made('ddp'), made('ddp')[0].module")
    cell(session, "other = DDP(other, process_group=group)")
    cell(session, "for each in (model, other): each(torch.ones(1, 8)).sum().backward()")
    broken = cell(
        session,
        "model._has_rebuilt_buckets = other._has_rebuilt_buckets = rank == 0\n"
        "if rank == 1: raise ValueError('a mistake')\nreduced()",
    )
    # torch lets only models of the default group begin again.
    assert broken.warnings[0] == REFORMED_IN_PLACE
    assert broken.warnings[1].partition(": ")[2].startswith("other (other = DDP(other.module, process_group=")
    assert "model (" not in broken.warnings[1]
    assert "it cannot go on from there" in cell(session, "other(torch.ones(1, 8))").root_cause.message
    trained = cell(session, "for number in range(3): step(model, opt, number)")
    assert trained.ok, trained.failures
    summed = cell(session, "[each.grad.tolist() for each in model.parameters()]").values
    assert summed[0] == summed[1]
    cell(session, "del model, opt, other, group")


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


TIMED = """
import time
from nblaunch.rank.main import Rank
recover, took = Rank._recover, []
def timed(*order):
    begun = time.perf_counter()
    recover(*order)
    took.append(time.perf_counter() - begun)
Rank._recover = timed
heap = [[[] for _ in range(1_000)] for _ in range(500)]
model, _ = made("ddp")
sharded, _ = made("fsdp")
"""


def test_a_heal_takes_less_than_50_ms_however_many_objects_there_are(session):
    """Counted on the rank that comes last to it: the others wait for that one."""
    assert cell(session, TIMED).ok
    # A rank that is interrupted before its collective has begun leaves nothing to heal.
    failed = (cell(session, "if rank == 1: raise ValueError('a mistake')\nreduced()") for _ in range(50))
    assert len(list(itertools.islice((each for each in failed if each.warnings), 5))) == 5
    took = cell(session, "Rank._recover = recover; del heap; took").values
    assert min(map(min, zip(*took, strict=True))) < 0.05, took


def test_ddp_models_go_on_where_a_rank_has_one_more(session):
    """Ranks know each other's models by the order in which these were made."""
    cell(session, UNORDERED)
    cell(
        session,
        """
        torch.manual_seed(0)
        first = DDP(Unordered())
        average = copy.deepcopy(first) if rank == 0 else None
        model = DDP(Unordered())
        """,
    )
    before = cell(session, "[gradients(model) for _ in range(3)]").values
    assert before[0] == before[1]
    assert cell(session, "if rank == 1: raise ValueError('a mistake')\nreduced()").warnings == (
        REFORMED_IN_PLACE,
    )
    assert cell(session, "[gradients(model) for _ in range(3)]").values == before
    cell(session, "del first, average, model")


def test_where_a_rank_cannot_form_its_groups_again_all_get_new_ones_and_the_reason_is_told():
    with nblaunch.Session(2, grace=0.5) as session:
        cell(session, f"{SETUP}group = dist.new_group([0, 1])\n{REFUSED}")
        broken = cell(session, "if rank == 1: raise ValueError('a mistake')\nreduced()")
        assert broken.warnings[:2] == (f"{NOT_IN_PLACE}rank 1: RuntimeError: no connection", REFORMED)
        assert "group (group = dist.new_group(ranks=[0, 1]))" in broken.warnings[2]
        assert cell(session, "reduced(), reduced(dist.new_group([0, 1]))").values == [(2.0, 2.0)] * 2


@pytest.fixture(scope="module")
def quad() -> Iterator[nblaunch.Session]:
    with nblaunch.Session(4, grace=0.5) as session:
        session.cell(SETUP, namespace={})
        yield session


@pytest.mark.parametrize(
    "made",
    [
        "'ddp'",
        "'ddp', gradient_as_bucket_view=True",
        "'ddp', static_graph=True",
        "'ddp', process_group=mesh.get_group('shard')",
        "'fsdp', mesh=mesh['shard']",
        "'fsdp', mesh=mesh",
    ],
    ids=[
        "ddp",
        "ddp with views",
        "ddp with a static graph",
        "ddp in a part of a mesh",
        "fsdp in a part of a mesh",
        "hsdp",
    ],
)
def test_four_ranks_train_on_in_the_groups_of_a_mesh(quad, made):
    cell(quad, "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))")
    run = cell(quad, BEGUN.format(made))
    assert run.ok, run.failures
    broken = cell(quad, "failing = 'backward'; step(model, opt, 3)")
    assert (broken.root_cause.message, broken.warnings) == ("a mistake", (REFORMED_IN_PLACE,))
    finished = cell(quad, FINISHED)
    assert finished.values == [True] * 4, finished.failures


def test_ranks_that_are_in_no_part_of_a_split_name_later_groups_as_the_others_do(quad):
    made = cell(
        quad,
        """
        part = dist.split_group(split_ranks=[[0, 1]])
        every = dist.new_group([0, 1, 2, 3])
        (reduced(part) if rank < 2 else None, reduced(every))
        """,
    )
    assert made.values == [(2.0, 4.0), (2.0, 4.0), (None, 4.0), (None, 4.0)], made.failures


def test_a_group_of_some_ranks_goes_on_with_its_ranks_in_their_order(quad):
    """Rank 1 is in no such group, and what it has left unmatched is in the default one."""
    cell(quad, "three = dist.new_group([3, 0, 2]); pair = dist.split_group(split_ranks=[[2, 0], [1, 3]])")
    for _ in range(2):
        broken = cell(quad, "if rank == 1: raise ValueError('a mistake')\nreduced()")
        assert broken.warnings == (REFORMED_IN_PLACE,)
        gathered = cell(
            quad,
            """
            ranks = [None] * 2
            dist.all_gather_object(ranks, rank, group=pair)
            reduced(), reduced(three) if rank != 1 else 0.0, reduced(pair), ranks
            """,
        )
        assert gathered.values == [
            (4.0, 0.0 if rank == 1 else 3.0, 2.0, [2, 0] if rank % 2 == 0 else [1, 3]) for rank in range(4)
        ]
