"""`nblaunch.log` on real ranks: every number arrives, whatever it is, however the job ends."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest

import nblaunch
from nblaunch import NblaunchError, RunFailedError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def session():
    with nblaunch.Session(2, name="logging") as opened:
        yield opened


def rows(metrics, rank):
    return [(each.step, each.name, each.value) for each in metrics if each.rank == rank]


def test_all_kinds_of_numbers_of_any_rank_are_in_the_result(session):
    def work():
        import numpy as np
        import torch

        rank = torch.distributed.get_rank()
        nblaunch.log(step=7, loss=torch.tensor(1.5 + rank, requires_grad=True), lr=0.25, seen=3, done=True)
        nblaunch.log({"val/loss": np.float32(0.5), "one": torch.ones(1, 1)}, step=np.int64(8))
        nblaunch.log(step=9, a=np.array([2.0]), b=torch.tensor(4, dtype=torch.int8), c=float("nan"))
        nblaunch.log(step=-1, low=-math.inf, half=torch.tensor(0.5, dtype=torch.bfloat16))

    began = time.time()
    metrics = session.run(work).metrics
    for rank in range(2):
        found = rows(metrics, rank)
        assert found[:6] == [
            (7, "loss", 1.5 + rank),
            (7, "lr", 0.25),
            (7, "seen", 3.0),
            (7, "done", 1.0),
            (8, "val/loss", 0.5),
            (8, "one", 1.0),
        ]
        assert found[6:8] == [(9, "a", 2.0), (9, "b", 4.0)]
        assert math.isnan(found[8][2])
        assert found[9:] == [(-1, "low", -math.inf), (-1, "half", 0.5)]
    assert metrics.last["loss"] == {0: 1.5, 1: 2.5}
    assert all(began - 1 <= each.time <= time.time() + 1 for each in metrics)


def test_what_is_no_number_is_refused_by_name_and_nothing_of_the_call_is_logged(session):
    def work():
        import numpy as np
        import torch

        refused = []
        wrong = ["3", b"3", None, 1j, [1.0], {}, torch.zeros(3), np.zeros(2), 10**400, torch.tensor(1j)]
        for value in wrong:
            with pytest.raises(TypeError, match=r"nblaunch\.log got bad=.*no number") as caught:
                nblaunch.log(good=1.0, bad=value)
            refused.append(isinstance(caught.value, NblaunchError))
        for step in (1.5, "3", 2**63, torch.zeros(2)):
            with pytest.raises(TypeError, match=r"nblaunch\.log got step=.*whole number"):
                nblaunch.log(good=1.0, step=step)  # type: ignore[arg-type]  # what is refused
        for name in ("", "x" * 201, 3):
            with pytest.raises(TypeError, match="A name is a text of 1 to 200 characters"):
                nblaunch.log({"good": 1.0, name: 1.0})  # type: ignore[dict-item]  # as above
        with pytest.raises(TypeError, match=r"500 is the most\. Put what changes into the step"):
            nblaunch.log({f"loss {number}": 1.0 for number in range(501)})
        nblaunch.log(last=1.0)
        return all(refused)

    result = session.run(work)
    assert result.values == [True, True]
    assert result.metrics.names == ("last",)


@pytest.mark.full
def test_without_a_step_it_is_the_present_one_or_the_number_of_the_call(session):
    def counted():
        for _ in range(3):
            nblaunch.log(a=0)

    def stepped():
        nblaunch.log(before=0)
        for _ in range(2):
            nblaunch.step()
            nblaunch.log(a=0)
            nblaunch.log(b=0)
        nblaunch.step(10)
        nblaunch.log({"a": 0}, step=3)

    for _ in range(2):  # each job counts anew
        assert [step for step, *_ in rows(session.run(counted).metrics, 1)] == [0, 1, 2]
        assert rows(session.run(stepped).metrics, 0) == [
            (0, "before", 0.0),
            *((step, name, 0.0) for step in range(2) for name in "ab"),
            (3, "a", 0.0),
        ]


@pytest.mark.full
def test_many_points_of_many_threads_all_arrive_in_order(session):
    def work():
        from concurrent.futures import ThreadPoolExecutor

        def many(name):
            for step in range(4000):
                nblaunch.log({name: step}, step=step)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(many, "abcd"))

    metrics = session.run(work).metrics
    assert len(metrics) == 2 * 4 * 4000
    for name in "abcd":
        assert [each.step for each in metrics.of(name, rank=1)] == list(range(4000))


@pytest.mark.full
def test_a_cell_of_a_session_logs(session):
    result = session.cell("import nblaunch\nfor i in range(4):\n    nblaunch.log(step=i, loss=4 - i + rank)")
    assert result.metrics["loss"].last == {"loss": {0: 1.0, 1: 2.0}}


@pytest.mark.full
def test_what_was_logged_before_a_failure_is_there(session):
    def work():
        import torch

        for step in range(100):
            nblaunch.log(step=step, loss=step)
            if step == 50 and torch.distributed.get_rank() == 1:
                raise ValueError

    result = session.run(work, check=False)
    assert not result.ok
    assert [each.step for each in result.metrics.of("loss", rank=1)] == list(range(51))
    assert [each.step for each in result.metrics.of("loss", rank=0)] == list(range(100))


@pytest.mark.full
def test_a_child_process_of_a_rank_is_told_that_it_cannot_log(session):
    def work():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                nblaunch.log(loss=1)
                answer = b"logged"
            except NblaunchError as error:
                answer = str(error).encode()
            os.write(writing, answer)
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(reading, 1000).decode()

    result = session.run(work)
    assert "in a child process of a rank, which cannot send it" in result.values[0]
    assert not result.metrics


def test_outside_of_a_rank_it_says_where_it_belongs():
    with pytest.raises(NblaunchError, match=r"nblaunch\.log was called in a process that is not a rank"):
        nblaunch.log(loss=1)


def train_and_fail_once(folder):
    """Log three steps; rank 0 of the first attempt fails after them."""
    import torch
    from torch import distributed

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(3):
        nblaunch.log(step=step, loss=10 * attempt + step)
    distributed.all_reduce(torch.ones(1))
    if not attempt:
        (folder / f"rank{distributed.get_rank()}").touch()
        raise ValueError
    return attempt


@pytest.mark.full
def test_the_points_of_the_attempts_before_a_restart_stay(tmp_path):
    result = nblaunch.run(train_and_fail_once, (tmp_path,), nproc=2, max_restarts=1)
    assert result.values == [1, 1]
    for rank in range(2):
        assert [each.value for each in result.metrics.of("loss", rank=rank)] == [0, 1, 2, 10, 11, 12]


def log_and_be_killed():
    """Log, see that it has been sent, and end without a word."""
    from nblaunch.probes import rank_metrics

    for step in range(20):
        nblaunch.log(step=step, loss=step)
    while rank_metrics._recorder._points:
        time.sleep(0.01)
    time.sleep(0.05)  # the socket takes it
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_of_a_rank_that_is_killed_all_but_the_last_moment_is_there():
    with pytest.raises(RunFailedError) as caught:
        nblaunch.run(log_and_be_killed, nproc=2)
    assert [each.step for each in caught.value.result.metrics.of("loss", rank=0)] == list(range(20))


def log_rank():
    """Log one number."""
    from torch import distributed

    nblaunch.log(step=1, me=distributed.get_rank())


@pytest.mark.slow
def test_ranks_of_other_nodes_log_too():
    result = nblaunch.run(log_rank, nproc=1, nnodes=2, on="process")
    assert result.metrics.last == {"me": {0: 0.0, 1: 1.0}}


@pytest.mark.full
def test_a_script_logs_too_and_its_text_says_where_each_curve_ended(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import nblaunch\nfor step in range(3):\n    nblaunch.log(step=step, loss=step)\n")
    result = nblaunch.run(str(script), nproc=1)
    assert [each.value for each in result.metrics] == [0.0, 1.0, 2.0]
    assert "loss  0 -> 2 (rank 0)" in str_of(result)


def str_of(result):
    from nblaunch.view.summary import Header
    from nblaunch.view.text import render_text

    return render_text(result.state, Header("run", "gloo"))
