"""`nblaunch.log` of a tensor on a GPU does not wait for the GPU, and its number arrives all the same."""

from __future__ import annotations

import os
import time

import pytest

import nblaunch

pytestmark = pytest.mark.gpu


def log_while_the_gpu_is_busy():
    """Log what comes behind a second of work; return how long that took, and whether the GPU was done."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    # Each kernel once: CUDA loads it at its first launch, and may wait for the GPU then.
    warm = torch.full((), 1.5, device=device, requires_grad=True) * 2
    nblaunch.log(warm=warm + 1, half=warm.to(torch.bfloat16))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles
    loss = torch.full((), 1.5, device=device, requires_grad=True) * 2
    began = time.perf_counter()
    for step in range(100):
        nblaunch.log(step=step, loss=loss + step, half=loss.to(torch.bfloat16))
    took = time.perf_counter() - began
    return took, torch.cuda.current_stream().query()


def test_a_tensor_on_a_gpu_is_logged_without_waiting_for_it():
    result = nblaunch.run(log_while_the_gpu_is_busy, nproc=1)
    took, done = result[0]
    # A simulated GPU has nothing to do: only its values can be looked at.
    assert os.environ.get("FAKE_GPUS") or not done, f"it took {took:.3f} s, and waited for the GPU"
    assert [each.value for each in result.metrics["loss"]] == [3.0 + step for step in range(100)]
    assert result.metrics.last["half"] == {0: 3.0}
