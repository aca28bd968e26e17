"""torchelastic's restarts and the allocator's settings on GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()


@pytest.fixture
def kernel(gpu_kernel):
    return gpu_kernel


@pytest.mark.quick
def test_each_attempt_has_gpus_and_an_nccl_group_that_work(kernel):
    kernel.ok(
        """
        %%distributed --max-restarts 2 --out res
        import os
        import torch.distributed as dist
        total = torch.full((2,), rank + 1.0, device=device)
        dist.all_reduce(total)
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
            dist.barrier()
            raise RuntimeError("this attempt is lost")
        (total.tolist(), str(device))
        """
    )
    total = GPUS * (GPUS + 1) / 2
    assert kernel.value("res.values") == [[[total] * 2, f"cuda:{index}"] for index in range(GPUS)]
    assert kernel.value("len(res.attempts)") == 3


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl-legacy", "nccl2"])
def test_a_form_of_nccl_that_torch_has_not_loaded_yet_has_each_rank_on_its_gpu(kernel, backend):
    if not dist.is_backend_available(backend.rpartition(":")[2]):
        pytest.skip(f"this torch has no {backend}")
    kernel.ok(
        f"""
        %%distributed --backend {backend} --out res
        import torch.distributed as dist
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        (total.item(), str(device), total.get_device(), dist.get_backend())
        """
    )
    expected = [[float(GPUS), f"cuda:{index}", index, backend] for index in range(GPUS)]
    assert kernel.value("res.values") == expected


def test_a_rank_that_is_killed_in_a_collective_is_replaced_with_its_gpu(kernel):
    kernel.ok(
        """
        %%distributed --max-restarts 1 --out res
        import os, signal
        import torch.distributed as dist
        total = torch.ones(1, device=device)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        total.item()
        """
    )
    assert kernel.value("res.values") == [float(GPUS)] * GPUS


SETTINGS = "torch.cuda.memory._snapshot()['allocator_settings']"


@pytest.mark.parametrize("late", [True, False], ids=["late", "env"])
@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ("expandable_segments:True", "expandable_segments", True),
        ("max_split_size_mb:64", "max_split_size", 64 << 20),
    ],
)
def test_settings_of_the_allocator_reach_the_ranks(kernel, settings, name, value, late):
    option = f"--env PYTORCH_CUDA_ALLOC_CONF={settings}"
    if late:
        kernel.ok(f"os.environ['PYTORCH_CUDA_ALLOC_CONF'] = {settings!r}")
        option = ""
    kernel.ok(f"%%distributed {option} --out res\ntorch.cuda.set_device(device)\n{SETTINGS}[{name!r}]")
    assert kernel.value("res.values") == [value] * GPUS
    kernel.ok("os.environ.pop('PYTORCH_CUDA_ALLOC_CONF', None)")
