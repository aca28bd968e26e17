"""A session on GPUs: its variables stay on each rank's GPU, what comes back is on the CPU."""

from __future__ import annotations

import pytest
import torch
from gpus import devices_of_ranks

from nblaunch import RunFailedError

pytestmark = [pytest.mark.gpu, pytest.mark.quick]

DEVICES = devices_of_ranks()
RANKS = len(DEVICES)
TOTAL = RANKS * (RANKS + 1) / 2


@pytest.fixture
def session(gpu_session):
    """Give the module's session; afterwards this process must still have left CUDA alone."""
    yield gpu_session
    assert torch.cuda.is_initialized() is False


def values(session, source, **namespace):
    """Run a cell that finds `namespace` in the notebook; return the values of all ranks."""
    return list(session.cell(source, namespace=namespace).values)


def test_variables_stay_on_each_ranks_gpu(session):
    values(session, "kept = torch.full((3,), rank + 1.0, device=device)")
    values(session, "dist.all_reduce(kept)")
    assert values(session, "(kept.tolist(), str(kept.device))") == [([TOTAL] * 3, name) for name in DEVICES]


def test_the_ranks_have_the_devices_that_the_session_names(session):
    assert values(session, "str(device)") == DEVICES
    assert [each.device for each in session.status().ranks] == DEVICES


def test_push_takes_a_tensor_to_the_ranks_and_pull_brings_one_from_the_gpu_to_the_cpu(session):
    session.push({"given": torch.arange(4.0)})
    values(session, "made = given.to(device) * (rank + 1)")
    pulled = session.pull("made")["made"]
    assert [str(each.device) for each in pulled] == ["cpu"] * RANKS
    assert [each.tolist() for each in pulled] == [
        [n * (rank + 1.0) for n in range(4)] for rank in range(RANKS)
    ]


def test_a_model_of_the_notebook_is_trained_over_cells_and_pulled_to_the_cpu(session):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    values(
        session,
        "trained = model.to(device); optimizer = torch.optim.SGD(trained.parameters(), 0.1)",
        model=model,
    )
    step = """
    optimizer.zero_grad()
    trained(torch.ones(2, 4, device=device)).sum().backward()
    for parameter in trained.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    """
    for _ in range(2):
        values(session, step)
    pulled = session.pull("trained")["trained"]
    assert {str(parameter.device) for each in pulled for parameter in each.parameters()} == {"cpu"}
    expected = model.weight - 2 * 0.1 * 2 * RANKS  # each rank's gradient is 2, in each of two steps
    assert all(torch.allclose(each.weight, expected) for each in pulled)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int8", "bool", "complex64"]
)
def test_values_of_each_type_come_back_as_they_were(session, dtype):
    found = values(session, f"torch.tensor([0, 1, 1], device=device).to(torch.{dtype})")
    assert [each.dtype for each in found] == [getattr(torch, dtype)] * RANKS
    assert [
        each.to(torch.float32).tolist() if dtype != "complex64" else each.real.tolist() for each in found
    ] == [[0.0, 1.0, 1.0]] * RANKS


def test_tensors_without_elements_come_back_with_their_shape(session):
    found = values(session, "torch.empty(0, 3, device=device), torch.ones(2, 2, device=device)[:0]")
    assert [[tuple(part.shape) for part in each] for each in found] == [[(0, 3), (0, 2)]] * RANKS
    assert {str(part.device) for each in found for part in each} == {"cpu"}


def test_what_shares_memory_on_the_gpu_shares_it_in_the_notebook(session):
    whole, part = values(session, "whole = torch.zeros(8, device=device); (whole, whole[2:4])")[0]
    part.fill_(5)
    assert whole.tolist() == [0, 0, 5, 5, 0, 0, 0, 0]


def test_an_exception_that_holds_a_tensor_of_a_gpu_is_raised_with_it_on_the_cpu(session):
    with pytest.raises(RunFailedError) as failed:
        values(
            session, "if rank == 0:\n    raise ValueError('this one', torch.full((2,), 3.0, device=device))"
        )
    cause = failed.value.root_cause
    assert cause.rank == 0
    words, tensor = cause.exception.args
    assert (words, tensor.tolist(), str(tensor.device)) == ("this one", [3.0, 3.0], "cpu")
    assert values(session, "rank") == list(range(RANKS))


@pytest.mark.gpu(2, shared=True)
def test_a_group_that_the_program_makes_works_in_later_cells(session):
    values(session, "pair, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(2)]")
    body = """
    total = torch.ones(1, device=device)
    if rank < 2:
        dist.all_reduce(total, group=pair)
        dist.all_reduce(total, group=alone[rank])
    total.item()
    """
    assert values(session, body) == [2.0, 2.0, *[1.0] * (RANKS - 2)]


@pytest.mark.gpu(2, shared=True)
def test_collectives_on_objects_and_point_to_point_work(session):
    body = """
    everyone = [None] * world_size
    dist.all_gather_object(everyone, {"rank": rank, "tensor": torch.full((1,), float(rank))})
    word = ["from rank 0" if rank == 0 else None]
    dist.broadcast_object_list(word)
    dist.barrier()
    got = torch.zeros(1, device=device)
    if rank == 0:
        dist.send(torch.full((1,), 7.0, device=device), dst=1)
    elif rank == 1:
        dist.recv(got, src=0)
    ([each["tensor"].item() for each in everyone], word[0], got.item())
    """
    ranks = [float(rank) for rank in range(RANKS)]
    assert values(session, body) == [
        (ranks, "from rank 0", 7.0 if rank == 1 else 0.0) for rank in range(RANKS)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_reductions_of_each_type_are_right(session, dtype):
    body = f"""
    total, most = (torch.full((3,), rank + 1, device=device, dtype=torch.{dtype}) for _ in range(2))
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    gathered = [torch.zeros_like(total) for _ in range(world_size)]
    dist.all_gather(gathered, torch.full((3,), rank, device=device, dtype=torch.{dtype}))
    (total.tolist(), most.tolist(), [each[0].item() for each in gathered])
    """
    assert values(session, body) == [([TOTAL] * 3, [RANKS] * 3, list(range(RANKS)))] * RANKS


def test_some_ranks_of_the_session_run_a_cell_on_their_gpus(session):
    found = session.cell("str(torch.ones(1, device=device).device)", ranks=[RANKS - 1], namespace={})
    assert list(found.values) == [DEVICES[-1]]
