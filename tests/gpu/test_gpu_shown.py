"""What the doctor, the panel and its measurements say on a machine with GPUs."""

from __future__ import annotations

import shutil

import psutil
import pytest
import torch

from nblaunch.host.usage import GpuMeter, Meter, SeenGpus

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
MEBIBYTE = 1 << 20


def whole(ran):
    """Return all that a cell shows, as text or as HTML."""
    return "\n".join([ran.text, ran.result or "", *(each.get("text/html", "") for each in ran.displays)])


@pytest.fixture
def kernel(gpu_kernel):
    return gpu_kernel


@pytest.mark.quick
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi")
def test_the_doctor_names_each_gpu_and_its_memory_and_leaves_cuda_alone(kernel):
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    said = whole(kernel.ok("%distributed doctor"))
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        (line,) = [each for each in said.splitlines() if f"GPU {index} " in f"{each} "]
        assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)) in line
        assert "free of" in line
        assert "nothing held by this kernel" in line
    pynvml.nvmlShutdown()
    assert kernel.value("torch.cuda.is_initialized()") is False


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi")
def test_the_doctor_says_what_the_kernel_itself_holds(kernels, visible):
    kernel = kernels(CUDA_VISIBLE_DEVICES=visible, FAKE_GPU_MEMORY=str(1 << 30))
    try:
        kernel.ok("import torch; mine = torch.empty(int(torch.cuda.mem_get_info()[1] * 0.1), device='cuda')")
        said = whole(kernel.ok("%distributed doctor"))
    finally:
        kernel.close()
    assert "torch.cuda.empty_cache()" in said
    assert said.count("held by this kernel") - said.count("nothing held by this kernel") == 1


def test_the_panel_shows_the_gpu_of_each_rank_live_and_saved(kernel):
    ran = kernel.ok("%%distributed\nprint('on', device)")
    for kind in ("text/html", "text/plain"):
        shown = "".join(each.get(kind, "") for each in ran.displays)
        assert [index for index in range(GPUS) if f"cuda:{index}" not in shown] == []


@pytest.mark.usefixtures("simulated")
def test_what_each_rank_uses_of_its_gpu_is_measured(gpu_session):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    gpu_session.cell("held = torch.empty((rank + 1) << 28, dtype=torch.uint8, device=device)", namespace={})
    meter = Meter()
    for rank in gpu_session.status().ranks:
        used = meter.gpus.usage(rank.pid, rank.device)
        assert used.memory >= (rank.rank + 1) * 256 * MEBIBYTE
        # Each simulated GPU has a figure of its own.
        assert used.percent == (int(rank.device.rpartition(":")[2]) + 1) * 10
    meter.gpus.close()
    gpu_session.cell("del held; torch.cuda.empty_cache()", namespace={})
    assert torch.cuda.is_initialized() is False


def test_where_the_driver_does_not_know_a_process_the_whole_gpu_is_measured(gpu_session, visible):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    gpu_session.cell("torch.ones(1, device=device)", namespace={})
    gpus = GpuMeter(SeenGpus({"CUDA_VISIBLE_DEVICES": visible}))
    unknown = psutil.Process().pid
    measured = [gpus.usage(unknown, f"cuda:{index}").memory for index in range(GPUS)]
    gpus.close()
    assert [memory for memory in measured if not memory] == []
