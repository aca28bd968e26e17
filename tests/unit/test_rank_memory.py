"""What a failed job holds is let go of, and what CUDA's allocator says of a shortage is read."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from nblaunch._resident import Resident
from nblaunch.rank import memory, shell

GIB = 1 << 30
MIB = 1 << 20

TORCH_2_13 = (
    "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 1 has a total capacity of 4.00 GiB of which "
    "724.00 MiB is free. Process 4711 has 512.00 MiB memory in use. Including non-PyTorch memory, this "
    "process has 3.29 GiB memory in use. 3.50 GiB allowed; Of the allocated memory 2.50 GiB is allocated by "
    "PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated ..."
)
TORCH_2_8 = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 39.56 GiB of which 2.00 "
    "GiB is free. Of the allocated memory 36.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in "
    "private pools (e.g., CUDA Graphs), and 0 bytes is reserved by PyTorch but unallocated. If reserved ..."
)


class Large:
    """Stands for a tensor: it can be referred to weakly."""


def failing(made, wrap=None):
    """Raise in a function with a local variable, and return the exception; `made` gets a weak reference."""

    def train():
        batch = Large()
        made.append(weakref.ref(batch))
        raise ValueError

    try:
        try:
            train()
        except ValueError as error:
            if wrap is None:
                raise
            raise wrap("wrapped") from error
    except Exception as error:  # noqa: BLE001 - whatever `wrap` is
        return error


def test_where_a_peak_cannot_be_set_back_that_of_an_earlier_job_is_no_jobs_own(monkeypatch):
    peak = 900
    monkeypatch.setattr(memory, "set_back_peak", lambda: False)
    monkeypatch.setattr(memory, "resident_of", lambda: Resident(now=500, private=400, peak=peak))
    monkeypatch.setattr(memory, "own_memory_here", lambda: 300)
    meter = memory.HostMeter()
    meter.begin()
    assert meter.measure() == (300, 300)
    peak = 950
    assert meter.measure() == (300, 300 + 950 - 500)


@pytest.mark.parametrize("wrap", [None, RuntimeError], ids=["raised", "wrapped"])
def test_what_the_frames_of_an_exception_hold_is_free_at_once(wrap):
    made = []
    gc.disable()
    try:
        error = failing(made, wrap)
        dict(error.__traceback__.tb_frame.f_locals)
        inner = error.__cause__ or error
        trace = inner.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        dict(trace.tb_frame.f_locals)  # as whoever tells the failure does
        assert made[0]() is not None
        memory.free_frames(error)
        assert made[0]() is None
        assert sys._getframe().f_locals["made"] is made, "frames that run are left alone"
    finally:
        gc.enable()


def test_on_a_rank_without_cuda_the_last_exception_stays_until_there_is_another(monkeypatch):
    monkeypatch.setattr(shell, "last_error", ValueError("mine"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    shell.free_gpu_memory()
    assert str(shell.last_error) == "mine"


@pytest.fixture
def on_gpu(monkeypatch):
    """Let this process pass for one that has initialised CUDA."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu{index}")
    )


@pytest.mark.usefixtures("on_gpu")
def test_a_shortage_is_read_from_what_the_allocator_says():
    found = memory.shortage(torch.OutOfMemoryError(TORCH_2_13))
    assert (found.device, found.uuid) == ("cuda:1", "gpu1")
    assert (found.asked, found.free, found.total) == (GIB, 724 * MIB, 4 * GIB)
    assert (found.allocated, found.reserved, found.limit) == (2560 * MIB, 3 * GIB, 3584 * MIB)
    assert found.own == pytest.approx(3.29 * GIB, rel=1e-6)
    assert found.others == {4711: 512 * MIB}


@pytest.mark.usefixtures("on_gpu")
def test_in_a_container_the_driver_names_no_processes():
    found = memory.shortage(torch.OutOfMemoryError(TORCH_2_8))
    assert (found.asked, found.free) == (20 * GIB, 2 * GIB)
    assert (found.allocated, found.reserved) == (36 * GIB, 36 * GIB)
    assert (found.own, found.others, found.limit) == (None, {}, None)


def test_other_errors_and_the_programs_own_are_no_shortage(monkeypatch):
    assert memory.shortage(torch.OutOfMemoryError(TORCH_2_13)) is None, "no CUDA here"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert memory.shortage(torch.OutOfMemoryError("mine")) is None
    assert memory.shortage(ValueError(TORCH_2_13)) is None


def test_a_rank_without_cuda_has_no_peak():
    assert memory.peak() is None


@pytest.mark.usefixtures("on_gpu")
def test_an_allocator_without_statistics_costs_the_peak_and_nothing_else(monkeypatch):
    """As `torch.cuda.memory.CUDAPluggableAllocator`, which raises where it is asked."""

    def refuse(_):
        message = "CUDAPluggableAllocator does not yet support getDeviceStats"
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("reset_peak_memory_stats", "memory_stats_as_nested_dict", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    memory.reset_peak()
    assert memory.peak() is None
    without = TORCH_2_13.replace("is allocated by PyTorch", "")
    assert memory.shortage(torch.OutOfMemoryError(without)) is None
