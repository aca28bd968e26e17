"""GPU memory of ranks: a failed cell gives it back, and who holds how much is said."""

from __future__ import annotations

import pytest
import torch

import nblaunch

GPUS = torch.cuda.device_count()
GIB = 1 << 30
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


def held(session):
    """Return how many bytes torch holds in each rank: allocated, and reserved from the driver."""
    return session.cell("(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())", namespace={}).values


# --- what a failed cell held ----------------------------------------------------------------------------


def test_the_memory_of_a_cell_that_ran_out_of_it_is_free_for_the_next_one(session):
    failed = session.cell("train(0.6)", check=False, namespace={})
    assert failed.root_cause.type == "torch.OutOfMemoryError"
    assert held(session) == [(0, 0)] * GPUS
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
    assert held(session) == [(0, 0)] * GPUS


def test_the_memory_of_a_cell_that_failed_otherwise_is_free_for_the_next_one(session):
    failed = session.cell(
        "def step():\n    batch = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\n"
        "    raise ValueError('no')\nstep()",
        check=False,
        namespace={},
    )
    assert failed.root_cause.message == "no"
    assert [allocated for allocated, _ in held(session)] == [0] * GPUS


def test_variables_of_the_session_outlive_a_failure(session):
    session.cell("kept = torch.full((1000,), 3.0, device='cuda')", namespace={})
    session.cell("train(0.3)", check=False, namespace={})
    assert session.cell("kept.sum().item()", namespace={}).values == [3000.0] * GPUS
    session.cell("del kept", namespace={})
