"""How many ranks a run gets, on which devices and with which backend; no GPU is needed to decide it."""

from __future__ import annotations

import os

import pytest
import torch

from nblaunch import OptionError
from nblaunch.agent import devices
from nblaunch.agent.devices import place, visible_gpus


@pytest.fixture
def gpus(monkeypatch):
    """Give `gpus(number)`: from then on so many are visible."""

    def set_number(number):
        monkeypatch.setattr(devices, "visible_gpus", lambda _environ: number)

    return set_number


def chosen(nproc, backend="auto"):
    placement = place(nproc, backend, {})
    return placement.nproc, placement.backend, placement.device_type, placement.accelerators


def test_without_gpus_auto_is_two_ranks_on_the_cpu_with_a_note(gpus):
    gpus(0)
    assert chosen("auto") == (2, "gloo", "cpu", 0)
    assert "no GPU is visible: 2 ranks on the CPU" in place("auto", "auto", {}).note


def test_with_gpus_auto_is_one_rank_for_each(gpus):
    for number in (1, 2, 8):
        gpus(number)
        nproc, backend, kind, accelerators = chosen("auto")
        assert (nproc, kind, accelerators) == (number, "cuda", number)
        assert "nccl" in backend
        assert place("auto", "auto", {}).note == ""


def test_a_given_number_is_taken_and_uses_gpus_where_there_are_enough(gpus):
    gpus(4)
    for nproc, kind in ((1, "cuda"), (3, "cuda"), (4, "cuda"), (5, "cpu"), (64, "cpu")):
        placement = place(nproc, "auto", {})
        assert (placement.nproc, placement.device_type, "nccl" in placement.backend) == (
            nproc,
            kind,
            kind == "cuda",
        )


def test_on_gpus_collectives_on_cpu_tensors_have_a_backend_too(gpus):
    gpus(2)
    assert place(2, "auto", {}).backend == "cpu:gloo,cuda:nccl"


def test_a_given_backend_is_taken_as_it_is(gpus):
    gpus(2)
    assert chosen(2, "gloo") == (2, "gloo", "cpu", 0)
    assert chosen(8, "gloo") == (8, "gloo", "cpu", 0)
    assert chosen(2, "nccl") == (2, "nccl", "cuda", 2)
    assert chosen(2, "cpu:gloo,cuda:nccl") == (2, "cpu:gloo,cuda:nccl", "cuda", 2)
    assert chosen(1, "nccl") == (1, "nccl", "cuda", 2)


def test_cpu_means_a_rank_for_each_cpu_and_no_gpu(gpus):
    gpus(2)
    assert chosen("cpu") == (os.cpu_count(), "gloo", "cpu", 0)


def test_gpu_means_a_rank_for_each_gpu(gpus):
    gpus(3)
    nproc, backend, kind, accelerators = chosen("gpu")
    assert (nproc, kind, accelerators) == (3, "cuda", 3)
    assert "nccl" in backend


def test_gpu_without_one_is_refused_and_says_what_to_do(gpus):
    gpus(0)
    with pytest.raises(OptionError, match=r"nproc='gpu' .* no GPU is visible here\. Use nproc=2"):
        place("gpu", "auto", {})


@pytest.mark.parametrize(
    ("visible", "are"), [(0, "only 0 GPUs are"), (1, "only 1 GPU is"), (2, "only 2 GPUs are")]
)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_more_nccl_ranks_than_gpus_are_refused_with_the_ways_out(gpus, visible, are, backend):
    gpus(visible)
    with pytest.raises(OptionError) as caught:
        place(4, backend, {})
    message = str(caught.value)
    assert "4 ranks with backend nccl" in message
    assert are in message
    assert "backend='gloo'" in message
    assert (f"Lower nproc to {visible}" if visible else "Lower nproc,") in message


def test_the_count_follows_what_the_ranks_will_see(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = [
        visible_gpus(environ)
        for environ in (
            {},
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            {"CUDA_VISIBLE_DEVICES": "3"},
            {"CUDA_VISIBLE_DEVICES": ""},
            {"CUDA_VISIBLE_DEVICES": "-1"},
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
        )
    ]
    assert seen == [4, 2, 1, 0, 0, 4]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == 4
