"""A session on two nodes with GPUs: each node has its own, and NCCL joins them."""

from __future__ import annotations

import contextlib
import platform

import psutil
import pytest
import torch

import nblaunch

PART = torch.cuda.device_count() // 2
MACHINE = platform.node()

pytestmark = pytest.mark.gpu

REDUCE = """
total = torch.full((2,), rank + 1.0, device=device)
dist.all_reduce(total)
(total.tolist(), str(total.device))
"""


@pytest.fixture(scope="module")
def kernel(kernels, visible):
    """Start a kernel that has a tensor on its GPU, and a session on two nodes."""
    with contextlib.closing(kernels(CUDA_VISIBLE_DEVICES=visible)) as started:
        started.ok("import torch; mine = torch.arange(4.0, device='cuda')")
        started.ok("%distributed start -n 1 --nnodes 2 --on process", timeout=120)
        started.ok("%%distributed\nimport os, torch, torch.distributed as dist")
        yield started


def values(kernel, body):
    """Run a cell on the ranks; return its values."""
    kernel.ok(f"%%distributed --out res\n{body}")
    return kernel.value("res.values")


@pytest.mark.gpu(2)
def test_each_node_has_an_equal_part_of_the_gpus_and_its_rank_the_first(kernel, visible):
    seen = values(kernel, "(str(device), torch.cuda.device_count(), os.environ['CUDA_VISIBLE_DEVICES'])")
    gpus = visible.split(",")
    assert seen == [["cuda:0", PART, ",".join(gpus[place * PART : (place + 1) * PART])] for place in range(2)]


@pytest.mark.gpu(2)
def test_the_gpus_that_the_options_choose_are_divided(visible):
    chosen = visible.split(",")[1::-1]
    env = {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
    with nblaunch.Session(nproc=1, nnodes=2, on="process", env=env) as session:
        body = "import os; (str(device), os.environ['CUDA_VISIBLE_DEVICES'])"
        assert session.cell(body, namespace={}).values == [("cuda:0", gpu) for gpu in chosen]


@pytest.mark.gpu(2, shared=True)
def test_all_reduce_crosses_the_nodes_over_nccl(kernel):
    assert values(kernel, REDUCE) == [[[3.0, 3.0], "cuda:0"]] * 2
    assert kernel.value("res.backend") == "cpu:gloo,cuda:nccl"


@pytest.mark.gpu(2, shared=True)
def test_push_and_pull_move_a_tensor_between_the_notebooks_gpu_and_those_of_the_nodes(kernel):
    kernel.ok("%distributed push mine")
    assert values(kernel, "there = mine.to(device) + rank\nstr(mine.device)") == ["cuda:0"] * 2
    kernel.ok("%distributed pull there")
    assert kernel.value("[each.tolist() for each in there]") == [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]
    assert kernel.value("{str(each.device) for each in there}") == "{'cpu'}"


@pytest.mark.gpu(2, shared=True)
def test_a_rank_that_waits_for_the_failed_one_of_another_node_is_freed_and_computes_rightly(kernel):
    values(kernel, "kept = torch.full((1,), 7.0 + rank, device=device)")
    failed = kernel.fails("%%distributed\nif rank == 1: raise ValueError('not me')\n" + REDUCE)
    assert "not me" in failed.evalue
    assert values(kernel, REDUCE) == [[[3.0, 3.0], "cuda:0"]] * 2
    assert values(kernel, "kept.item()") == [7.0, 8.0]


@pytest.mark.gpu(2, shared=True)
def test_a_lost_node_leaves_the_other_ones_tensors_on_its_gpu():
    with nblaunch.Session(nproc=1, nnodes="1:2", on="process") as session:
        body = "import torch, torch.distributed as dist\nkept = torch.full((1,), 7.0 + rank, device=device)"
        session.cell(body, namespace={})
        parents = psutil.Process(session.status().ranks[1].pid).parents()
        next(each for each in parents if "--key-stdin" in each.cmdline()).kill()
        lost = session.cell(REDUCE, namespace={}, check=False)
        assert "was lost with its node" in lost.root_cause.reason
        assert session.cell(REDUCE, namespace={}).values == [([1.0, 1.0], "cuda:0")]
        assert session.cell("kept.item()", namespace={}).values == [7.0]


def test_two_nodes_that_share_a_gpu_are_refused_by_name_for_nccl(visible):
    env = {"CUDA_VISIBLE_DEVICES": visible.split(",")[0], "NCCL_MULTI_RANK_GPU_ENABLE": "0"}
    with pytest.raises(nblaunch.LaunchError, match=f"{MACHINE}-1 and {MACHINE}-2 are on one machine"):
        nblaunch.Session(nproc=1, nnodes=2, on="process", env=env, backend="nccl")
