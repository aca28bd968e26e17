"""GPU memory of ranks: a failed cell gives it back, and who holds how much is said."""

from __future__ import annotations

import os
import re

import pytest
import torch

import nblaunch

GPUS = torch.cuda.device_count()
GIB = 1 << 30
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(GPUS))
SMALL = {"FAKE_GPU_MEMORY": str(GIB)}
"""What simulated GPUs are to have: they are filled for real. A real GPU has what it has."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason=f"torch {torch.__version__} sees no CUDA device here"),
]

FILL = """
import torch

def train(part):
    free, total = torch.cuda.mem_get_info()
    activations = torch.empty(int(free * part), dtype=torch.uint8, device="cuda")
    del free
    return torch.empty(total, dtype=torch.uint8, device="cuda")
"""
"""Holds a part of what is free, and asks for more than the whole GPU has."""


@pytest.fixture(scope="module")
def session():
    """Give a session with a rank for each GPU, and `train` on them."""
    with nblaunch.Session(nproc=GPUS, env=SMALL) as opened:
        opened.cell("import sys; print(); print(file=sys.stderr)")  # opens the files that it keeps open
        opened.cell(FILL, namespace={})
        yield opened


def held(session, failed):
    """Return the bytes that torch has allocated on each rank, and those that the failed one has reserved."""
    allocated = session.cell("torch.cuda.memory_allocated()", namespace={}).values
    reserved = session.cell("torch.cuda.memory_reserved()", namespace={}).values
    return allocated, reserved[failed.root_cause.rank]


# --- what a failed cell held ----------------------------------------------------------------------------


def test_the_memory_of_a_cell_that_ran_out_of_it_is_free_for_the_next_one(session):
    failed = session.cell("train(0.6)", check=False, namespace={})
    assert failed.root_cause.type == "torch.OutOfMemoryError"
    assert held(session, failed) == ([0] * GPUS, 0)
    again = session.cell(
        "room, _ = torch.cuda.mem_get_info()\nlarge = torch.empty(int(room * 0.6), device='cuda', "
        "dtype=torch.uint8)\ndel large",
        namespace={},
        check=False,
    )
    assert again.ok, again


def test_memory_held_by_the_chain_of_exceptions_is_free_as_well(session):
    failed = session.cell(
        "try:\n    train(0.3)\nexcept torch.OutOfMemoryError as error:\n"
        "    raise ValueError('batch too large') from error",
        check=False,
        namespace={},
    )
    assert failed.root_cause.type == "builtins.ValueError"
    assert held(session, failed) == ([0] * GPUS, 0)


def test_the_memory_of_a_cell_that_failed_otherwise_is_free_for_the_next_one(session):
    failed = session.cell(
        "def step():\n    batch = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\n"
        "    raise ValueError('no')\nstep()",
        check=False,
        namespace={},
    )
    assert failed.root_cause.message == "no"
    assert held(session, failed)[0] == [0] * GPUS


def test_variables_of_the_session_outlive_a_failure(session):
    session.cell("kept = torch.full((1000,), 3.0, device='cuda')", namespace={})
    session.cell("train(0.3)", check=False, namespace={})
    assert session.cell("kept.sum().item()", namespace={}).values == [3000.0] * GPUS
    session.cell("del kept", namespace={})


# --- what is said of a shortage -------------------------------------------------------------------------


def test_a_shortage_names_the_rank_what_was_asked_what_is_free_who_holds_what_and_the_line(session):
    failed = session.cell(
        "part = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\n"
        f"if rank == {GPUS - 1}:\n"
        "    torch.empty(1 << 50, dtype=torch.uint8, device='cuda')",
        check=False,
        namespace={},
    )
    why = failed.root_cause
    session.cell("del part", namespace={})
    assert why.rank == GPUS - 1
    last = GPUS - 1
    assert why.message.startswith(
        f"CUDA out of memory. Tried to allocate 1048576.0 GiB on cuda:{last} of rank {last}, where "
    )
    assert re.search(r"where [\d.]+ [MG]iB of [\d.]+ GiB are free\.", why.message)
    holds = re.search(r"ank \d+ .*\(torch: 64 MiB allocated, (\d+) MiB reserved\)", why.message)
    holds = holds or re.search(r"in rank \d+ \(64 MiB allocated, (\d+) MiB reserved\)", why.message)
    assert holds, why.message
    assert "\n" not in why.message
    assert "line 3" in why.where
    assert why.reason.endswith(f"({why.where})")
    assert "torch.OutOfMemoryError" in why.reason
    assert isinstance(why.exception, torch.OutOfMemoryError), "the program's own exception is torch's"


def test_what_the_kernel_itself_holds_is_named_with_what_to_do_about_it(start_kernel):
    kernel = start_kernel(CUDA_VISIBLE_DEVICES=VISIBLE, NBLAUNCH_DISPLAY="text")
    kernel.ok("import torch\ntotal = torch.cuda.mem_get_info()[1]")
    kernel.ok("mine = torch.empty(total // 16, dtype=torch.uint8, device='cuda')")
    ran = kernel.run(
        "%%distributed -n 1 --backend nccl\ntorch.empty(1 << 50, dtype=torch.uint8, device='cuda')",
        timeout=120,
    )
    assert ran.error.ename == "RunFailedError"
    assert "the notebook's kernel" in ran.error.evalue
    assert "then call torch.cuda.empty_cache()." in ran.error.evalue
    assert "the notebook's kernel" in ran.text


def test_the_ranks_of_other_runs_are_named(session):
    def ask():
        import torch

        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    session.cell("torch.zeros(1, device='cuda')", namespace={})
    failed = nblaunch.run(ask, nproc=1, backend="nccl", env=SMALL, check=False)
    said = failed.root_cause.message
    assert "ranks of other runs" in said or "CUDA itself and other processes" in said, said


def test_the_value_of_a_cell_is_let_go_of_before_the_next_one(session):
    session.cell("torch.zeros(1 << 20, dtype=torch.uint8, device='cuda')", namespace={})
    assert session.cell("torch.cuda.memory_allocated()", namespace={}).values == [0] * GPUS


# --- a look at the frames, before the next cell ---------------------------------------------------------


def test_the_frames_of_a_failure_can_be_looked_at_until_the_next_cell(start_kernel):
    kernel = start_kernel(CUDA_VISIBLE_DEVICES=VISIBLE, NBLAUNCH_DISPLAY="text", **SMALL)
    kernel.ok("%distributed start -n 1 --backend nccl", timeout=120)
    kernel.fails(
        "%%distributed\nimport torch\ndef train():\n"
        "    batch = torch.ones(1 << 20, dtype=torch.uint8, device='cuda')\n"
        "    return batch.no_such_method()\ntrain()"
    )
    typed, said = ["p tuple(batch.shape)", "q"], []
    kernel.client.execute_interactive(
        "%distributed debug",
        stdin_hook=lambda _: kernel.client.input(typed.pop(0)),
        output_hook=lambda message: said.append(message["content"].get("text", "")),
        timeout=60,
    )
    assert typed == []
    assert "(1048576,)" in "".join(said)
    kernel.ok("%%distributed --out held\ntorch.cuda.memory_allocated()")
    assert kernel.value("held.values") == [0]
    assert "no job has failed on this rank" in kernel.fails("%distributed debug 0").evalue
    kernel.ok("%distributed stop")


# --- the peak -------------------------------------------------------------------------------------------


def test_the_peak_of_each_job_is_in_the_result(session):
    high = session.cell(
        "large = torch.empty((rank + 1) * (64 << 20), dtype=torch.uint8, device='cuda')\ndel large",
        namespace={},
    )
    assert [each.peak_gpu_memory for each in high.ranks] == [(rank + 1) * (64 << 20) for rank in range(GPUS)]
    told = session.cell("torch.cuda.max_memory_allocated()", namespace={})
    assert told.values == [each.peak_gpu_memory for each in told.ranks]
    low = session.cell(
        "small = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\ndel small", namespace={}
    )
    assert [each.peak_gpu_memory for each in low.ranks] == [1 << 20] * GPUS


def test_the_peak_of_a_rank_that_failed_is_there_too(session):
    failed = session.cell(
        "def step():\n    batch = torch.empty(3 << 20, dtype=torch.uint8, device='cuda')\n"
        "    raise ValueError('no')\nstep()",
        check=False,
        namespace={},
    )
    root = failed.root_cause.rank
    assert failed.ranks[root].peak_gpu_memory == 3 << 20


def test_a_rank_that_leaves_cuda_alone_has_no_peak():
    assert [each.peak_gpu_memory for each in nblaunch.run(int, nproc=1, backend="gloo").ranks] == [None]


# --- what each rank used, and what held it --------------------------------------------------------------


def test_what_each_rank_has_now_and_had_at_most_is_in_the_result(session):
    used = session.cell(
        "kept = torch.empty(2 << 20, dtype=torch.uint8, device='cuda')\n"
        "large = torch.empty((rank + 1) * (64 << 20), dtype=torch.uint8, device='cuda')\ndel large",
        namespace={},
    )
    for each in used.ranks:
        assert each.memory.device_now == 2 << 20
        assert each.memory.device_peak == ((each.rank + 1) * 64 + 2) << 20
        assert each.memory.device_peak == each.peak_gpu_memory
        assert each.memory.host_peak >= each.memory.host_now > 0
    session.cell("del kept", namespace={})


def test_a_shortage_lists_the_largest_tensors_of_that_gpu_by_variable_and_line(session):
    failed = session.cell(
        "elsewhere = torch.empty(128 << 20, dtype=torch.uint8)\n"
        "weights = torch.empty(96 << 20, dtype=torch.uint8, device='cuda')\n"
        "layers = [torch.empty(16 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]\n"
        "train(0.3)",
        check=False,
        namespace={},
    )
    session.cell("del elsewhere, weights, layers", namespace={})
    root = failed.root_cause
    assert root.type == "torch.OutOfMemoryError"
    named = {each.name: each for each in root.memory}
    assert set(named) == {"activations", "weights", "layers"}
    assert named["activations"].where.endswith("in train") or "line " in named["activations"].where
    assert (named["weights"].size, named["weights"].what) == (
        96 << 20,
        f"uint8[{96 << 20}]",
    )
    assert (named["layers"].count, named["layers"].size) == (4, 64 << 20)
    text = str(failed.report())
    assert "activations" in text


def test_a_shortage_names_the_line_that_made_a_tensor_where_torch_records_it(session):
    recording = "torch.cuda.memory._record_memory_history('all', context='alloc', stacks='python')\n"
    failed = session.cell(
        recording + "def make():\n"
        "    return [torch.empty(8 << 20, dtype=torch.uint8, device='cuda') for _ in range(3)]\n"
        "made = make()\ntrain(0.3)",
        check=False,
        namespace={},
    )
    session.cell("torch.cuda.memory._record_memory_history(None)\ndel made", namespace={})
    by_line = {each.made: each for each in failed.root_cause.memory}
    made = next(each for line, each in by_line.items() if "line 3" in line)
    assert (made.count, made.size, made.name) == (3, 24 << 20, "made")
