"""The doctor on a machine with GPUs: what it says of them is true, and it leaves CUDA alone."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from nblaunch._devices import nccl_version
from nblaunch.checks import gpu as checks
from nblaunch.checks import nccl
from nblaunch.checks.report import Level

GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(GPUS))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason=f"torch {torch.__version__} sees no CUDA device here"),
]


@pytest.fixture(scope="module")
def nvml():
    """Give NVML by another way: its own Python module."""
    module = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    module.nvmlInit()
    yield module
    module.nvmlShutdown()


def only(findings):
    """Return the one finding of a check."""
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("compute_mode", "nvmlDeviceGetComputeMode"),
        ("persistence", "nvmlDeviceGetPersistenceMode"),
        ("pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus"),
        ("rows", "nvmlDeviceGetRemappedRows"),
        ("capability", "nvmlDeviceGetCudaComputeCapability"),
        ("name", "nvmlDeviceGetName"),
        ("uuid", "nvmlDeviceGetUUID"),
    ],
)
def test_what_the_driver_says_of_each_gpu_is_what_its_own_module_reads(nvml, name, function):
    expected = []
    for index in range(nvml.nvmlDeviceGetCount()):
        told = None
        with contextlib.suppress(nvml.NVMLError):  # not supported
            told = getattr(nvml, function)(nvml.nvmlDeviceGetHandleByIndex(index))
        expected.append(list(told) if isinstance(told, tuple) else told)
    said = checks.ask_nvml()
    assert [gpu.get(name) for gpu in said["gpus"]] == expected


def test_torchs_architectures_are_asked_in_another_process(own):
    found = checks.torchs_architectures(own, time.monotonic() + 30)
    ask = "import torch; print(*torch.cuda.get_arch_list())"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert found == told.stdout.split()
    assert found
    assert not torch.cuda.is_initialized()


def test_gpus_that_compute_here_have_no_problem(own):
    found = {each.name: each for each in checks.health(own)}
    assert [each for each in found.values() if each.level is Level.PROBLEM] == []
    if GPUS > 1 and checks.ask_nvml()["pairs"]:
        assert re.fullmatch(
            r"joins \d+ of \d+ pairs of GPUs|none: GPUs talk over PCIe", found["NVLink"].summary
        )


def test_the_gpus_reduce_together_and_say_how_fast(own):
    found = only(nccl.all_reduce(own))
    assert found.level is Level.OK, found
    version = ".".join(map(str, nccl_version()))
    if GPUS == 1:
        assert found.summary == f"1 GPU: NCCL {version} works; there is no other GPU to talk to"
    else:
        assert re.fullmatch(
            rf"{GPUS} GPUs: [\d.]+ GB/s \(bus bandwidth, 64 MiB\) with NCCL {version}; the first one, which "
            r"connects them, took [\d.]+ s",
            found.summary,
        )


@pytest.mark.skipif(GPUS < 2, reason="takes two GPUs")
def test_gpus_that_do_not_come_to_an_end_are_a_problem_in_time(own, monkeypatch):
    """As with a broken link: here they are only given no time."""
    monkeypatch.setattr(nccl, "_SECONDS", 0.5)
    monkeypatch.setattr(nccl, "_AGAIN_SECONDS", 0.5)
    found = only(nccl.all_reduce(own))
    assert found.level is Level.PROBLEM
    assert found.summary.startswith(f"{GPUS} GPUs: no answer within 0.5 s: rank 0 in ")
    assert "NCCL_DEBUG=INFO" in found.advice


@pytest.mark.skipif(GPUS < 2, reason="takes two GPUs")
def test_a_gpu_that_is_not_there_is_named_with_the_error(own, monkeypatch):
    from nblaunch.host import placement

    monkeypatch.setattr(placement, "visible_gpus", lambda _environ, **_: GPUS + 1)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")  # so it is tried once
    found = only(nccl.all_reduce(own))
    assert found.level is Level.PROBLEM
    assert f"rank {GPUS} in initialising CUDA: " in found.summary


def test_from_the_notebook_they_reduce_and_its_cuda_is_left_alone(start_kernel):
    kernel = start_kernel(CUDA_VISIBLE_DEVICES=VISIBLE, NBLAUNCH_DISPLAY="text")
    text = kernel.ok("%distributed doctor --nccl", timeout=120).result
    assert re.search(r"^ok +NCCL all_reduce +\d+ GPUs?: ", text, re.MULTILINE), text
    assert kernel.value("__import__('torch').cuda.is_initialized()") is False


def test_a_gpu_for_one_process_is_a_problem_once_the_kernel_uses_it(start_kernel, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_COMPUTE_MODE", "3")
    if checks.ask_nvml()["gpus"][0].get("compute_mode") != 3:
        pytest.skip("these GPUs cannot be told their compute mode")
    kernel = start_kernel(CUDA_VISIBLE_DEVICES=VISIBLE, NBLAUNCH_DISPLAY="text")
    # With the fork server there: what the doctor measures loads torch, too, and has 4.4 s.
    kernel.ok("import os, torch, nblaunch; nblaunch.run(os.getpid, nproc=1)", timeout=60)
    deadline = time.monotonic() + 60
    while "no answer" in (before := kernel.ok("%distributed doctor").result) and time.monotonic() < deadline:
        pass  # a busy machine: torch takes longer than that to load
    assert re.search(r"^warning +compute mode +GPUs? 0", before, re.MULTILINE), before
    kernel.ok("mine = torch.ones(1, device='cuda')")
    after = kernel.ok("%distributed doctor").result
    assert re.search(
        r"^problem +compute mode +GPUs? 0.*this kernel has initialised CUDA", after, re.MULTILINE
    )


def test_a_gpu_that_this_torch_has_no_code_for_is_a_problem(own, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_CAPABILITY", "35")
    if checks.ask_nvml()["gpus"][0].get("capability") != [3, 5]:
        pytest.skip("these GPUs cannot be told their architecture")
    lacking = [each for each in checks.health(own) if each.name == "architecture"]
    assert len(lacking) == len(checks.ask_nvml()["gpus"])
    assert all(each.level is Level.PROBLEM for each in lacking)
    assert "is sm_35; this torch has code for sm_" in lacking[0].summary
