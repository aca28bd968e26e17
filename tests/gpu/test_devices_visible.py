"""Which GPUs ranks get: variables set late, in a kernel that has used CUDA; several ranks on one GPU."""

from __future__ import annotations

import os

import pytest
import torch

import nblaunch
from nblaunch._devices import nccl_version

GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(GPUS))
NAMES = VISIBLE.split(",")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices are here, and this needs two"),
]


def uuid(place: int) -> str:
    """Return the UUID of a GPU that this process sees, without CUDA."""
    if not NAMES[place].isdecimal():
        return NAMES[place]
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(int(NAMES[place]))
        return str(nvml.nvmlDeviceGetUUID(handle))
    finally:
        nvml.nvmlShutdown()


SEEN = """
%%distributed {options} --out res
import os
(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), str(device))
"""


@pytest.fixture(scope="module")
def used_kernel(kernels):
    """Start a kernel that has initialised CUDA and counted its GPUs: what is set now is too late for both."""
    kernel = kernels(CUDA_VISIBLE_DEVICES=VISIBLE, NBLAUNCH_DISPLAY="text")
    kernel.ok("import os, torch\nmine = torch.ones(1, device='cuda')")
    assert kernel.value("torch.cuda.device_count()") == GPUS
    yield kernel
    kernel.close()


@pytest.fixture
def late_kernel(used_kernel):
    """Give that kernel, and take back what a test has chosen there."""
    used_kernel.ok("import os, torch")
    yield used_kernel
    used_kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {VISIBLE!r}")
    used_kernel.forget()


@pytest.mark.parametrize("place", [0, 1])
def test_one_gpu_chosen_now_is_one_rank(late_kernel, place):
    late_kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {NAMES[place]!r}")
    late_kernel.ok(SEEN.format(options=""))
    assert late_kernel.value("res.values") == [[NAMES[place], 1, "cuda:0"]]


def test_a_gpu_chosen_by_its_uuid_is_one_rank(late_kernel):
    late_kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {uuid(1)!r}")
    late_kernel.ok(SEEN.format(options=""))
    assert late_kernel.value("res.values") == [[uuid(1), 1, "cuda:0"]]


def test_another_order_is_as_many_ranks(late_kernel):
    turned = ",".join(reversed(NAMES))
    late_kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {turned!r}")
    late_kernel.ok(SEEN.format(options=""))
    expected = [[turned, GPUS, f"cuda:{place}"] for place in range(GPUS)]
    assert late_kernel.value("res.values") == expected


def test_all_gpus_hidden_now_is_the_cpu(late_kernel):
    late_kernel.ok("os.environ['CUDA_VISIBLE_DEVICES'] = ''")
    late_kernel.ok(SEEN.format(options=""))
    assert late_kernel.value("res.values") == [["", 0, "cpu"]] * 2


def test_with_env_as_well(late_kernel):
    late_kernel.ok(SEEN.format(options=f"--env CUDA_VISIBLE_DEVICES={NAMES[1]}"))
    assert late_kernel.value("res.values") == [[NAMES[1], 1, "cuda:0"]]


def test_more_ranks_than_gpus_say_that_they_are_on_the_cpu():
    result = nblaunch.run(torch.cuda.is_initialized, nproc=GPUS + 1)
    assert result.values == [False] * (GPUS + 1)
    [warning] = result.warnings
    assert f"{GPUS + 1} ranks were asked for and {GPUS} GPUs are visible: all ranks are on the CPU" in warning
    with nblaunch.Session(nproc=GPUS + 1) as session:
        assert any("all ranks are on the CPU" in each for each in session.cell("rank").warnings)
        assert session.cell("rank").warnings == ()


def test_the_notebook_says_that_there_are_too_few_gpus(late_kernel):
    ran = late_kernel.ok(f"%%distributed -n {GPUS + 1}\nrank")
    assert "note: " in ran.text
    assert "all ranks are on the CPU" in ran.text
    started = late_kernel.ok(f"%distributed start -n {GPUS + 1}")
    assert "all ranks are on the CPU" in f"{started.text}{started.result}"
    late_kernel.ok("%distributed stop")


def total_on_gpu(value):
    import torch.distributed as dist

    total = torch.full((1,), float(value), device="cuda")
    dist.all_reduce(total)
    return total.item(), str(total.device)


def test_ranks_share_a_gpu_with_gloo_where_it_is_named_for_cuda():
    environ = {"CUDA_VISIBLE_DEVICES": NAMES[1]}
    result = nblaunch.run(total_on_gpu, (2,), nproc=2, backend="cpu:gloo,cuda:gloo", env=environ)
    assert result.values == [(4.0, "cuda:0")] * 2
    assert result.devices == {0: "cuda:0", 1: "cuda:0"}


@pytest.mark.skipif(torch.cuda.is_available() and nccl_version() < (2, 30), reason="needs NCCL 2.30")
def test_ranks_share_a_gpu_where_nccl_is_told_so():
    environ = {"CUDA_VISIBLE_DEVICES": NAMES[1], "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    result = nblaunch.run(total_on_gpu, (2,), nproc=2, env=environ)
    assert result.values == [(4.0, "cuda:0")] * 2
    assert result.backend == "cpu:gloo,cuda:nccl"


def test_virtual_local_ranks_share_a_gpu_as_well():
    environ = {"CUDA_VISIBLE_DEVICES": NAMES[1]}
    result = nblaunch.run(
        total_on_gpu, (2,), nproc=2, backend="cpu:gloo,cuda:gloo", env=environ, virtual_local_rank=True
    )
    assert result.values == [(4.0, "cuda:0")] * 2
