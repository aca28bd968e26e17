"""A failure is told, and a value's wait can be interrupted, whatever the GPU is waiting for."""

from __future__ import annotations

import collections
import threading
import time

import pytest
import torch

import nblaunch

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices are here, and this needs two"),
]

TIMEOUT = 30
"""Only a failure that is never told takes so long."""


def stuck_rank_fails_with(make_error):
    """Run two ranks: one stays away from a collective, the other raises what `make_error(tensor)` returns."""

    def job():
        import torch
        import torch.distributed as dist

        tensor = torch.ones(1, device="cuda")
        if dist.get_rank() == 0:
            time.sleep(100)
        dist.all_reduce(tensor)
        raise make_error(tensor)

    began = time.monotonic()
    with pytest.raises(nblaunch.RunFailedError) as caught:
        nblaunch.run(job, nproc=2, timeout=TIMEOUT)
    assert time.monotonic() - began < TIMEOUT
    assert caught.value.root_cause.rank == 1
    return caught.value.root_cause


def test_variables_that_hold_tensors_of_a_stuck_stream_do_not_hide_the_failure():
    def make_error(tensor):
        class Output(collections.OrderedDict[str, torch.Tensor]):
            pass

        class Loss:
            def __init__(self):
                self.value = tensor

            def __repr__(self):
                return f"Loss({self.value.item():.3f})"

        output, loss = Output(logits=tensor), Loss()  # noqa: F841 - shown with the failure
        message = "rank 1's own mistake"
        raise ValueError(message)

    cause = stuck_rank_fails_with(make_error)
    assert (cause.type, cause.message) == ("builtins.ValueError", "rank 1's own mistake")
    assert "shape=(1,)" in cause.frames[-1].variables["output"]
    assert "Loss" in cause.frames[-1].variables["loss"]


def test_an_exception_that_holds_such_a_tensor_is_told_in_words():
    def make_error(tensor):
        return ValueError("bad loss", tensor)

    cause = stuck_rank_fails_with(make_error)
    assert cause.type == "builtins.ValueError"
    assert cause.message == "('bad loss', tensor(shape=(1,), dtype=torch.float32, device='cuda:1'))"
    assert cause.exception is None


def test_an_exception_that_holds_a_tensor_of_a_healthy_gpu_arrives_with_its_numbers():
    def job():
        import torch

        raise ValueError("bad loss", torch.full((1,), 7.0, device="cuda"))

    with pytest.raises(nblaunch.RunFailedError) as caught:
        nblaunch.run(job, nproc=2, timeout=TIMEOUT)
    cause = caught.value.root_cause
    assert "tensor([7.], device='cuda:" in cause.message
    text, tensor = cause.exception.args
    assert (text, tensor.device.type, tensor.tolist()) == ("bad loss", "cpu", [7.0])


def test_a_value_that_waits_for_a_stuck_collective_can_be_interrupted():
    with nblaunch.Session(nproc=2, timeout=TIMEOUT) as session:
        session.cell("import torch, torch.distributed as dist")
        threading.Timer(1.0, session.interrupt).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            session.cell(
                "total = torch.ones(1, device=device)\nif rank == 0: dist.all_reduce(total)\ntotal",
                namespace={},
            )
        assert time.monotonic() - began < TIMEOUT / 2
        after = session.cell(
            "mine = torch.ones(1, device=device)\ndist.all_reduce(mine)\nmine.item()", namespace={}
        )
        assert after.values == [2.0, 2.0]
