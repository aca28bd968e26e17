"""Elastic restarts: the group starts again, the program resumes from its checkpoint, nothing is forgotten."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from chaos import must_work, usual
from lanes import sampled
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import nblaunch

SIZES = pytest.mark.parametrize("nproc", sampled([2, 4]))
EPOCHS = 6


# --- the program that every elastic tutorial has ---------------------------------------------------


def load_checkpoint(path, model, optimizer):
    """Return the epoch to begin with."""
    if not path.exists():
        return 0
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"] + 1


def save_checkpoint(path, model, optimizer, epoch):
    if distributed.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    distributed.barrier()


class Momentum:
    """A small optimizer: torch's own ones import a compiler first, in each rank of each attempt."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.velocity = [torch.zeros_like(each) for each in self.parameters]

    def zero_grad(self):
        for each in self.parameters:
            each.grad = None

    def step(self):
        with torch.no_grad():
            for parameter, velocity in zip(self.parameters, self.velocity, strict=True):
                velocity.mul_(0.9).add_(parameter.grad)
                parameter.sub_(velocity, alpha=0.001)

    def state_dict(self):
        return {"velocity": self.velocity}

    def load_state_dict(self, state):
        self.velocity = state["velocity"]


def average_gradients(model):
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()


def train(directory, faults, *, with_ddp):
    """Train; `faults` maps (attempt, epoch, rank) to what happens there."""
    rank, attempt = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters()) if with_ddp else Momentum(model.parameters())
    path = Path(directory) / "checkpoint.pt"
    first = load_checkpoint(path, model, optimizer)
    parallel = DistributedDataParallel(model) if with_ddp else model
    for epoch in range(first, EPOCHS):
        print("attempt", attempt, "epoch", epoch)
        data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * epoch + rank))
        for step in range(4):
            loss = (parallel(data) - data.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if not with_ddp:
                average_gradients(model)
            optimizer.step()
            if step == 2 and (attempt, epoch, rank) in faults:
                faults[attempt, epoch, rank]()
        save_checkpoint(path, model, optimizer, epoch)
    return {
        "attempt": attempt,
        "allowed": os.environ["TORCHELASTIC_MAX_RESTARTS"],
        "first": first,
        "parameters": model.state_dict(),
    }


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ConnectionAbortedError("the data went away")


@pytest.mark.slow_at("4")
# DDP puts gradients into one buffer in the order of their first use: of more than two ranks the sums are then
# rounded otherwise after a restart, in this program as in any.
@pytest.mark.parametrize(("nproc", "with_ddp"), sampled([(2, True), (4, False)]), ids=["2, DDP", "4"])
def test_a_training_that_loses_ranks_ends_with_the_parameters_of_one_that_does_not(nproc, with_ddp, tmp_path):
    for name in ("smooth", "bumpy", "logs"):
        (tmp_path / name).mkdir()
    last = nproc - 1
    common = {
        "nproc": nproc,
        "kwargs": {"with_ddp": with_ddp},
        "env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
    }
    smooth = nblaunch.run(train, args=(tmp_path / "smooth", {}), **common)
    bumpy = nblaunch.run(
        train,
        args=(tmp_path / "bumpy", {(0, 2, last): die, (1, 4, 0): fail}),
        max_restarts=2,
        log_dir=str(tmp_path / "logs"),
        **common,
    )
    assert bumpy.ok
    assert [value["first"] for value in smooth.values] == [0] * nproc
    for value in bumpy.values:
        assert (value["attempt"], value["allowed"], value["first"]) == (2, "2", 4)
        for name, expected in smooth[0]["parameters"].items():
            assert torch.equal(value["parameters"][name], expected)

    # Every attempt is there, with what went wrong in it.
    assert [each.number for each in bumpy.attempts] == [0, 1, 2]
    assert [each.reason for each in bumpy.attempts] == ["started", "failure", "failure"]
    assert [each.world_size for each in bumpy.attempts] == [nproc] * 3
    killed, raised, fine = (each.failures for each in bumpy.attempts)
    assert (killed[0].rank, killed[0].signal, killed[0].consequence_of) == (last, "SIGKILL", None)
    assert killed[0].last_output == "attempt 0 epoch 0\nattempt 0 epoch 1\nattempt 0 epoch 2"
    assert (raised[0].rank, raised[0].type) == (0, "builtins.ConnectionAbortedError")
    assert raised[0].message == "the data went away"
    assert isinstance(raised[0].exception, ConnectionAbortedError)
    assert {each.consequence_of for each in killed[1:]} <= {last}
    assert {each.consequence_of for each in raised[1:]} <= {0}
    assert fine == bumpy.failures == ()
    assert bumpy.root_cause is None

    for number, epochs in ((0, "012"), (1, "234"), (2, "45")):
        printed = "".join(f"attempt {number} epoch {epoch}\n" for epoch in epochs)
        ranks = bumpy.attempts[number].ranks
        assert [(each.attempt, each.stdout) for each in ranks] == [(number, printed)] * nproc
        assert all((each.started or 0.0) < (each.ended or 0.0) for each in ranks)

    # In order of time.
    times = [time for each in bumpy.attempts for time in (each.started, each.ended) if time is not None]
    assert len(times) == 6
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))
    for attempt in bumpy.attempts:
        assert attempt.ended is not None
        for each in attempt.failures:
            assert attempt.started <= each.time <= attempt.ended

    # Output, values and state are those of the last attempt; the logs keep the others'.
    assert [each.attempt for each in bumpy.ranks] == [2] * nproc
    assert {each.state for each in bumpy.ranks} == {"SUCCEEDED"}
    assert [each.stdout for each in bumpy.ranks] == ["attempt 2 epoch 4\nattempt 2 epoch 5\n"] * nproc
    assert bumpy.log_dir is not None
    for number, epochs in ((0, "012"), (1, "234"), (2, "45")):
        printed = "".join(f"attempt {number} epoch {epoch}\n" for epoch in epochs)
        for rank in range(nproc):
            path = bumpy.log_dir / f"attempt_{number}" / str(rank) / "stdout.log"
            assert path.read_text().endswith(printed)
    must_work(nproc)


# --- from one attempt to the next ------------------------------------------------------------------


def test_what_a_lost_attempt_has_started_is_gone_when_the_next_begins(tmp_path):
    flag = tmp_path / "child"

    def job():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                flag.write_text(str(child.pid))
                die()
            distributed.barrier()
        return psutil.pid_exists(int(flag.read_text()))

    assert nblaunch.run(job, nproc=2, max_restarts=1).values == [False, False]


def test_a_rank_that_resists_is_gone_before_the_next_attempt_begins(tmp_path):
    grace = 0.5

    def job():
        flag = tmp_path / "pid"
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                flag.write_text(str(os.getpid()))
            distributed.barrier()
            if os.environ["RANK"] == "0":
                fail()
            while True:
                signal.pause()
        return psutil.pid_exists(int(flag.read_text()))

    result = nblaunch.run(job, nproc=2, max_restarts=1, grace=grace)
    assert result.values == [False, False]
    first, second = result.attempts
    assert second.started - first.failures[0].time >= grace


def test_each_attempt_has_a_process_group_that_works():
    def job():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        total = torch.ones(1)
        distributed.all_reduce(total)
        # A group of the program's own leaves keys of its own in the store.
        distributed.all_reduce(total, group=distributed.new_group(list(range(4))))
        if attempt < 3 and distributed.get_rank() == attempt:
            die()
        distributed.barrier()
        return total.item()

    result = nblaunch.run(job, nproc=4, max_restarts=3)
    assert result.values == [16.0] * 4
    assert [each.failures[0].rank for each in result.attempts[:3]] == [0, 1, 2]


@SIZES
def test_when_no_restart_is_left_the_error_is_that_of_the_last_attempt(nproc):
    def job():
        if os.environ["RANK"] == "1":
            raise ValueError(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        distributed.barrier()

    with pytest.raises(nblaunch.RunFailedError, match="ValueError: attempt 2") as caught:
        nblaunch.run(job, nproc=nproc, max_restarts=2)
    assert "in attempt 3 of 3" in str(caught.value)
    result = caught.value.result
    assert result is not None
    assert [each.failures[0].message for each in result.attempts] == ["attempt 0", "attempt 1", "attempt 2"]
    assert result.failures == result.attempts[-1].failures
    must_work(nproc)


def test_a_timeout_is_for_all_attempts_together():
    usual(2)

    def job():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            fail()
        signal.pause()

    with pytest.raises(nblaunch.RunTimeoutError) as caught:
        nblaunch.run(job, nproc=2, max_restarts=5, timeout=1 + 3 * usual(2), grace=0.5)
    assert caught.value.result is not None
    assert [len(each.failures) > 0 for each in caught.value.result.attempts] == [True, False]
