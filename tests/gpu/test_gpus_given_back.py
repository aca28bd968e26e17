"""GPU memory is the ranks': what is idle holds none, what has ended has given it back."""

from __future__ import annotations

import contextlib

import poked
import psutil
import pytest
import torch

from nblaunch.host.usage import GpuMeter, SeenGpus

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
# More than half of a GPU for each rank: the next one does not fit as long as this one is there.
FILL = """
import os, torch
total = torch.cuda.mem_get_info()[1]
most = torch.empty(int(total * 0.55), dtype=torch.uint8, device=device)
(most.numel() > total / 2, os.getpid())
"""


@pytest.fixture(scope="module")
def small(visible):
    """Give the environment of kernels whose GPUs are small if they are simulated: filling them takes time."""
    return {"CUDA_VISIBLE_DEVICES": visible, "FAKE_GPU_MEMORY": str(1 << 30)}


@pytest.fixture(scope="module")
def module_small_kernel(kernels, small):
    with contextlib.closing(kernels(**small)) as kernel:
        yield kernel


@pytest.fixture
def kernel(module_small_kernel):
    yield module_small_kernel
    module_small_kernel.forget()


def filled(kernel, line=""):
    """Fill the GPUs; return the processes that did."""
    kernel.ok(f"%%distributed {line} --out res\n{FILL}")
    values = kernel.value("res.values")
    assert [most for most, _ in values] == [True] * GPUS
    return {pid for _, pid in values}


@pytest.fixture
def standing_by(start_kernel, small, eventually):
    """Give a kernel that makes the next ranks ready, and `idle()`: its processes once these wait."""
    kernel = start_kernel(**small, NBLAUNCH_STANDBY="1")
    poke = poked.of_kernel(kernel)

    def waits():
        return poke("(lambda seat: seat is not None and seat.group.waiting)(local.standby._standby_group)")

    def idle():
        eventually(waits, "the next ranks are ready")
        return {kernel.pid, *(each.pid for each in psutil.Process(kernel.pid).children(recursive=True))}

    return kernel, idle


def initialised(log):
    """Return the processes that initialised CUDA or its driver, as the simulator has noted them."""
    return {int(line.split()[0]) for line in log.read_text().splitlines()}


@pytest.mark.quick
def test_nobody_but_the_ranks_of_a_run_initialises_cuda(standing_by, simulated):
    kernel, idle = standing_by
    first = filled(kernel)
    kernel.ok("%distributed doctor")
    waiting = idle()
    assert len(waiting) >= 4 + GPUS  # kernel, keeper, fork server, runtime, and the next ranks
    there = initialised(simulated / "log")
    assert first <= there
    assert waiting & there == set()
    second = filled(kernel)
    assert second <= waiting
    assert second <= initialised(simulated / "log")


def test_ranks_that_are_ready_and_all_that_is_idle_hold_no_gpu_memory(standing_by, eventually):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    kernel, idle = standing_by
    for rank in filled(kernel):
        eventually(lambda each=rank: not psutil.pid_exists(each), "the rank has ended")
    waiting = idle()
    gpus = GpuMeter(SeenGpus({}))
    held = {pid: gpus.usage(pid, "").memory for pid in waiting}
    gpus.close()
    assert {pid: memory for pid, memory in held.items() if memory} == {}
    filled(kernel)


@pytest.mark.quick
def test_run_after_run_fits_on_a_card_that_each_fills(kernel):
    ranks = [filled(kernel) for _ in range(3)]
    assert len(set().union(*ranks)) == 3 * GPUS


def test_a_run_fits_right_after_a_session_that_filled_the_card(kernel):
    kernel.ok("%distributed start")
    filled(kernel)
    kernel.ok("%distributed stop")
    filled(kernel)


def test_a_run_fits_right_after_one_that_was_killed_with_a_full_card(kernel):
    kernel.fails(f"%%distributed\n{FILL}\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    filled(kernel)


def test_a_restarted_attempt_fits_where_the_lost_one_filled_the_card(kernel):
    lost = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise RuntimeError('lost')"
    kernel.ok(f"%%distributed --max-restarts 1 --out res\n{FILL}\n{lost}\nmost.numel() > total / 2")
    assert kernel.value("res.values") == [True] * GPUS
