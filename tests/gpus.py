"""Fixtures of the tests on GPUs, which run on real ones and on simulated ones (tests/simulated_gpu).

`tests/conftest.py` takes them in: a `conftest.py` in tests/gpu would hide that one from imports.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from nblaunch._devices import nccl_version

SIMULATED = "FAKE_GPUS" in os.environ
if SIMULATED and "PYTEST_XDIST_WORKER" in os.environ:
    # Each of pytest's processes has simulated GPUs of its own: what one fills is not full for the other.
    _own = Path(os.environ["FAKE_DIR"], os.environ["PYTEST_XDIST_WORKER"])
    _own.mkdir(exist_ok=True)
    os.environ["FAKE_DIR"] = str(_own)


def skip_without_gpus(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are: `pytest.mark.gpu` needs one, `pytest.mark.gpu(4)` four.

    For `pytest.mark.gpu(2, shared=True)` one GPU will do where NCCL lets two ranks share it.
    """
    marks = list(item.iter_markers("gpu"))
    if not marks:
        return
    import torch

    found = torch.cuda.device_count()
    if not found:
        pytest.skip(f"torch {torch.__version__} sees no CUDA device here")
    for mark in marks:
        needed = next(iter(mark.args), 1)
        if needed > found * (2 if mark.kwargs.get("shared") and two_ranks_share_a_gpu() else 1):
            pytest.skip(f"needs {needed} GPUs, and torch sees {found} here")


def two_ranks_share_a_gpu() -> bool:
    """Whether NCCL can put two ranks on a GPU, and is told so for all tests."""
    import torch  # noqa: F401 - it loads NCCL

    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0" and nccl_version() >= (2, 30)


def devices_of_ranks() -> list[str]:
    """Return the device of each rank of a session on all GPUs: a GPU each, or two on the only one."""
    import torch

    found = torch.cuda.device_count()
    number = 2 if found == 1 and two_ranks_share_a_gpu() else found
    return [f"cuda:{rank % found}" for rank in range(number)]


@pytest.fixture(scope="session")
def visible():
    """Give the CUDA_VISIBLE_DEVICES with which a kernel sees the GPUs: other tests' kernels see none."""
    import torch

    every = ",".join(str(index) for index in range(torch.cuda.device_count()))
    return os.environ.get("CUDA_VISIBLE_DEVICES") or every


@pytest.fixture
def simulated():
    """Skip on real GPUs what asks the simulator."""
    if not SIMULATED:
        pytest.skip("needs what only simulated GPUs tell (tests/simulated_gpu)")
    return Path(os.environ["FAKE_DIR"])


@pytest.fixture(scope="session")
def shared_gpu_kernel(kernels, visible):
    """Start the kernel that sees the GPUs and leaves CUDA alone; all tests of this process share it."""
    with contextlib.closing(kernels(CUDA_VISIBLE_DEVICES=visible, NBLAUNCH_DISPLAY="html")) as started:
        yield started


@pytest.fixture
def gpu_kernel(shared_gpu_kernel):
    """Give that kernel without variables, but for `os` and `torch`."""
    shared_gpu_kernel.ok("import os, torch")
    yield shared_gpu_kernel
    shared_gpu_kernel.forget()


@pytest.fixture(scope="module")
def gpu_session():
    """Open a session with these devices, which the tests of one module share."""
    from older_torch import SPLITTABLE

    import nblaunch

    with nblaunch.Session(len(devices_of_ranks()), backend=SPLITTABLE, name="gpus") as session:
        session.cell("import sys, torch, torch.distributed as dist; print(); print(file=sys.stderr)")
        yield session


BREAK_CONTEXT = """
import ctypes
if rank == 1:
    if os.environ.get("FAKE_GPUS"):
        ctypes.CDLL("libcudart.so." + torch.version.cuda.partition(".")[0]).fakecuda_poison()
    else:
        torch.zeros(2, device=device)[torch.tensor([5], device=device)]
    torch.cuda.synchronize()
"""
"""An assertion on the device of rank 1: CUDA can do nothing more for that process."""
