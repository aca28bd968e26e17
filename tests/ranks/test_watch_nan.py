"""`--watch nan`: the first loss, gradient or input of a collective that is not finite is named."""

from __future__ import annotations

import textwrap

import pytest
from lanes import sampled

import nblaunch
from nblaunch import NonFiniteError, RunFailedError

SETUP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

NAN, INF = float("nan"), float("inf")

class Bad(torch.autograd.Function):
    '''Passes on what it gets, and a gradient that is not finite.'''

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = ctx.value
        return gradient, None

class Net(torch.nn.Module):
    def __init__(self, value=NAN):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(4))
        self.bad, self.value = False, value

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.bad and number == 2:
                x = Bad.apply(x, self.value)
        return x

def train(model, inner, steps=5, at=3, who=1, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        inner.bad = number == at and rank == who
        loss = model(torch.ones(2, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def session():
    with nblaunch.Session(2, watch="nan") as opened:
        opened.cell(SETUP, namespace={})
        yield opened


def found(session: nblaunch.Session, source: str) -> tuple[int, str, NonFiniteError, RunFailedError]:
    """Run a cell that is stopped; return the rank of the root cause, the message and the errors."""
    with pytest.raises(RunFailedError) as caught:
        session.cell(textwrap.dedent(source).strip(), namespace={})
    cause = caught.value.root_cause
    assert isinstance(cause.exception, NonFiniteError), cause.traceback
    return cause.rank, str(cause.exception), cause.exception, caught.value


def test_the_gradient_of_ddp_is_named_on_the_rank_that_has_it_before_it_spreads(session):
    source = """
    model = Net()
    ddp = DistributedDataParallel(model)
    train(ddp, model)
    """
    rank, message, error, whole = found(session, source)
    assert (rank, error.step, error.what) == (1, 3, "the gradient of inner.layers.2.weight")
    assert message == (
        "the gradient of inner.layers.2.weight is NaN (4 of 16 elements), as all_reduce is about to send it, "
        "in step 3"
    )
    assert [frame.source for frame in whole.root_cause.frames] == ["train(ddp, model)", "loss.backward()"]
    assert all(failure.rank == 1 or failure.consequence_of == 1 for failure in whole.result.failures)
    # No other rank has taken the step: its gradient was not spread.
    finite = "all(each.isfinite().all().item() for each in model.parameters())"
    assert session.cell(finite, namespace={}).values == [True, True]


@pytest.mark.parametrize(
    ("wrapped", "value", "how"),
    sampled(
        [
            ("DistributedDataParallel(model, gradient_as_bucket_view=True)", "NAN", ", as all_reduce is"),
            ("model", "NAN", " (4 of 16 elements), in step 3"),
            ("DistributedDataParallel(model)", "INF", "is infinite"),
        ]
    ),
)
def test_however_gradients_are_kept_the_parameter_is_named(session, wrapped, value, how):
    source = f"""
    model = Net({value})
    ddp = {wrapped}
    train(ddp, model)
    """
    rank, message, error, _ = found(session, source)
    assert rank == 1
    assert error.what in [f"the gradient of {name}.layers.2.weight" for name in ("inner", "model")]
    assert how in message
    assert error.step == 3


@pytest.mark.quick
def test_a_loss_is_named_by_its_variable_before_the_backward_pass(session):
    source = """
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(4):
        error = model(torch.ones(2, 4)).sum() * (NAN if number == 2 and rank == 0 else 1)
        error.backward()
        optimizer.step()
    """
    rank, message, error, whole = found(session, source)
    assert (rank, message, error.step) == (0, "the loss error is NaN, in step 2", 2)
    assert whole.root_cause.frames[0].line == 5
    # Rank 1 may not have come to its first gradient when it was stopped.
    assert session.cell("model.layers[0].weight.grad.isfinite().all().item()", ranks=[0]).values == [True]


def test_steps_are_those_of_nblaunch_step_where_it_is_called(session):
    source = """
    import nblaunch
    for number in range(10, 14):
        nblaunch.step(number)
        loss = torch.tensor([1.0, NAN if number == 12 and rank == 1 else 2.0], requires_grad=True).sum()
        loss.backward()
    """
    rank, message, error, _ = found(session, source)
    assert (rank, message, error.step) == (1, "the loss is NaN, in step 12", 12)


@pytest.mark.parametrize(
    ("call", "said"),
    sampled(
        [
            ("dist.all_reduce(seen)", "seen, the input of all_reduce, is NaN (1 of 4 elements), in step 0"),
            ("dist.broadcast(seen, 1)", "seen, the input of broadcast, is NaN (1 of 4 elements)"),
            ("dist.all_gather([torch.ones(4)] * 2, seen)", "seen, the input of all_gather, is NaN"),
            (
                "dist.reduce_scatter_tensor(torch.ones(2), seen)",
                "seen, the input of reduce_scatter_tensor, is NaN",
            ),
            ("dist.all_reduce(seen, op=dist.ReduceOp.MAX)", "seen, the input of all_reduce, is NaN"),
            ("with torch.inference_mode(): dist.all_reduce(seen)", "seen, the input of all_reduce, is NaN"),
        ]
    ),
)
def test_what_a_collective_would_send_is_named_on_the_rank_that_would_send_it(session, call, said):
    rank, message, _, whole = found(session, f"seen = torch.ones(4)\nseen[2] = NAN if rank else 1\n{call}")
    assert rank == 1
    assert said in message
    assert whole.root_cause.frames[0].line == 3


ALLOWED = {
    "masks and maxima": """
        mask = torch.full((4, 4), -INF).triu(1)
        dist.broadcast(mask, 0)
        dist.all_gather([torch.ones(4, 4)] * 2, mask)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX)
    """,
    "numbers and objects": """
        dist.all_reduce(torch.ones(3, dtype=torch.int64))
        dist.all_gather_object([None] * 2, NAN)
        dist.barrier()
    """,
    "large numbers": """
        large = torch.full((8,), 3e38)
        dist.all_reduce(large, op=dist.ReduceOp.MAX)
        dist.broadcast(torch.full((8,), 60000.0, dtype=torch.float16), 0)
        weight = torch.nn.Parameter(torch.ones(4))
        weight.grad = torch.full((4,), 1e30)
        torch.optim.SGD([weight], lr=0.0).step()
    """,
    "nothing and little": """
        dist.all_reduce(torch.ones(0))
        torch.ones((), requires_grad=True).backward()
        torch.ones(3, requires_grad=True).backward(torch.ones(3))
        dist.all_reduce(torch.ones(3, dtype=torch.complex64))
    """,
    "a scaler": """
        model = Net(INF)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for number in range(4):
            model.bad = number == 1 and rank == 0
            optimizer.zero_grad()
            scaler.scale(ddp(torch.ones(2, 4)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(each.isfinite().all() for each in model.parameters())
        del scaler
    """,
    "sparse": """
        table = torch.nn.Embedding(8, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(list(table.parameters()))
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    """,
}


@pytest.mark.parametrize("source", sampled(ALLOWED.values(), 2))
def test_what_is_meant_to_be_infinite_is_left_alone(session, source):
    assert session.cell(textwrap.dedent(source), namespace={}).warnings == ()


def test_with_warn_the_run_goes_on_and_each_is_told_once():
    def train():
        import os

        import torch
        import torch.distributed as dist

        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for number in range(4):
            optimizer.zero_grad()
            loss = (weight * (float("nan") if number and dist.get_rank() else 1.0)).sum()
            loss.backward()
            optimizer.step()
        return os.getpid()

    result = nblaunch.run(train, nproc=2, watch="nan:warn")
    assert result.ok
    first, second = result.warnings
    assert first.startswith("rank 1: the loss is NaN, in step 1, ")
    assert second.startswith("rank 1: the gradient of weight is NaN (4 of 4 elements), in step 1, ")
    assert "test_watch_nan.py, line " in first


def test_a_watch_that_fails_does_not_fail_the_job():
    def job():
        import torch

        from nblaunch.probes import nonfinite

        nonfinite._sum = None  # type: ignore[assignment]
        torch.ones((), requires_grad=True).backward()
        torch.ones((), requires_grad=True).backward()
        return "done"

    result = nblaunch.run(job, nproc=1, watch="nan")
    assert result.values == ["done"]
    assert list(result.warnings) == [
        "rank 0: --watch has ended early: TypeError: 'NoneType' object is not callable"
    ]
