"""`--watch` on GPUs: nobody waits for the device, and the step in which a NaN arose is still named."""

from __future__ import annotations

import pytest

import nblaunch
from nblaunch import DesyncError, NonFiniteError, RunFailedError

pytestmark = pytest.mark.gpu(2, shared=True)


@pytest.fixture(scope="module")
def session():
    with nblaunch.Session(2, watch="nan,desync") as opened:
        opened.cell("import torch, torch.distributed as dist", namespace={})
        yield opened


def test_a_loss_that_is_nan_on_a_gpu_is_named_with_its_step(session):
    source = """
weight = torch.nn.Parameter(torch.ones(4, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)
for number in range(6):
    optimizer.zero_grad()
    loss = weight.sum() * (float("nan") if number == 3 and rank == 1 else 1.0)
    loss.backward()
    optimizer.step()
"""
    with pytest.raises(RunFailedError) as caught:
        session.cell(source, namespace={})
    cause = caught.value.root_cause
    assert (cause.rank, type(cause.exception)) == (1, NonFiniteError)
    assert cause.exception.step == 3
    assert "the loss is NaN" in str(cause.exception)


def test_collectives_that_differ_on_gpus_are_stopped(session):
    with pytest.raises(RunFailedError) as caught:
        session.cell("dist.all_reduce(torch.ones(4 + rank, device=device))", namespace={})
    assert isinstance(caught.value.root_cause.exception, DesyncError)
    sums = session.cell("t = torch.ones(1, device=device); dist.all_reduce(t); t.item()", namespace={})
    assert sums.values == [2.0, 2.0]
