"""What is on a GPU of the notebook arrives on the rank's own, and is never in host memory twice."""

from __future__ import annotations

import os

import pytest
import torch

GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(GPUS))
DEVICES = [f"cuda:{index}" for index in range(GPUS)]
MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices are here, and this needs two"),
]

PEAK = """
def peak():
    # What this process has had of its own at most, in MiB; files in memory are the system's.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024

def forget_peak():
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    return peak()
"""


@pytest.fixture(scope="module")
def shared_kernel(kernels):
    """Start a kernel that has initialised CUDA."""
    kernel = kernels(CUDA_VISIBLE_DEVICES=VISIBLE, NBLAUNCH_DISPLAY="text")
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(shared_kernel):
    """Give that kernel, without variables."""
    shared_kernel.ok("import torch, dataclasses\ntorch.ones(1, device='cuda')")
    yield shared_kernel
    shared_kernel.forget()


HOLDER = """
@dataclasses.dataclass
class Config:
    device: torch.device
    weights: torch.Tensor

config = Config(torch.device("cuda:0"), torch.ones(2000, device="cuda:0"))
bare, current, host = torch.device("cuda", 1), torch.device("cuda"), torch.device("cpu")

def on_default(where=torch.device("cuda:0")):
    return str(torch.ones(1, device=where).device)
"""


def test_a_captured_device_is_the_ranks_own_as_tensors_are(kernel):
    kernel.ok(HOLDER)
    kernel.ok(
        f"""
        %%distributed -n {GPUS} --out res
        same = (config.weights.to(config.device) is config.weights)
        there = str(torch.ones(1, device=current).device)
        (str(config.device), same, str(bare), there, str(host), on_default())
        """,
        timeout=120,
    )
    expected = [[name, True, name, name, "cpu", name] for name in DEVICES]
    assert kernel.value("res.values") == expected
    assert kernel.value("[str(config.device), str(bare)]") == ["cuda:0", "cuda:1"]


def test_on_the_cpu_a_captured_device_is_the_cpu(kernel):
    kernel.ok(HOLDER)
    kernel.ok("%%distributed -n 2 --backend gloo --out res\n(str(config.device), str(bare), str(current))")
    assert kernel.value("res.values") == [["cpu", "cpu", "cpu"]] * 2


def test_a_device_that_comes_back_says_where_the_rank_was(kernel):
    kernel.ok("%%distributed --out res\ntorch.device('cuda', torch.cuda.current_device())", timeout=120)
    assert kernel.value("[str(each) for each in res]") == DEVICES


def test_in_a_session_captured_tensors_of_one_gpu_are_one_object_on_each_rank(kernel):
    kernel.ok(HOLDER)
    kernel.ok("%distributed start -n 2", timeout=120)
    try:
        kernel.ok("views = [config.weights, config.weights[:10]]")
        kernel.ok("%%distributed --out res\nviews[1].fill_(5)\nstr(config.device), views[0].sum().item()")
        assert kernel.value("res.values") == [[name, 2040.0] for name in DEVICES[:2]]
        kernel.ok("%%distributed --out res\nconfig.weights is views[0]")
        assert kernel.value("res.values") == [True, True]
    finally:
        kernel.ok("%distributed stop")


def test_data_on_a_gpu_goes_to_ranks_without_a_copy_in_host_memory(kernel):
    kernel.ok(PEAK)
    kernel.ok(f"big = torch.arange({256 * MIB} // 8, device='cuda')")
    kernel.ok("%%distributed -n 1 --out res\nint(big[-1])", timeout=120)  # warm
    before = kernel.value("forget_peak()")
    kernel.ok("%%distributed -n 1 --out res\n(int(big[-1]), int(big[12345]))", timeout=120)
    grown = kernel.value("peak()") - before
    assert kernel.value("res[0]") == [256 * MIB // 8 - 1, 12345]
    assert grown < 150  # of 256 MiB


def test_a_value_on_a_gpu_comes_home_without_a_copy_in_the_ranks_host_memory(kernel):
    kernel.ok("%distributed start -n 1", timeout=120)
    try:
        kernel.ok("%%distributed\n" + PEAK, timeout=120)
        make = f"big = torch.arange({256 * MIB} // 8, device=device)"
        kernel.ok("%%distributed --out before\nimport torch\n" + make + "\nforget_peak()", timeout=120)
        kernel.ok("%%distributed --out res\n[big]", timeout=120)
        kernel.ok("%%distributed --out after\npeak()")
        assert kernel.value("[res[0][0].device.type, int(res[0][0][12345])]") == ["cpu", 12345]
        assert kernel.value("after[0] - before[0]") < 150
    finally:
        kernel.ok("%distributed stop")


def test_a_view_of_a_big_tensor_sends_what_it_shows(kernel):
    kernel.ok("from nblaunch.capture import pickling\nbig = torch.arange(10_000_000, device='cuda')")
    assert kernel.value("pickling.dumps([big[5:10], big[3:7]], trim=True).size") < 5000
    kernel.ok("parts = [big[5000:5010], big[5003:5007]]")
    kernel.ok(
        """
        %%distributed -n 1 --out res
        parts[0].fill_(-1)
        (parts[1].tolist(), parts[0].untyped_storage().nbytes() < 5000, parts[1].device == device)
        """,
        timeout=120,
    )
    assert kernel.value("res[0]") == [[-1] * 4, True, True]
