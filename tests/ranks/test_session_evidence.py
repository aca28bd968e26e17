"""After each job a session's group is fit for the next one, or it is formed again: evidence before health."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
import torch
from training import BEGUN, FINISHED, STEPS

import nblaunch
from nblaunch.group import recovery
from nblaunch.rank import in_place

REFORMED = recovery.REFORMED_IN_PLACE if in_place.torch_can() else recovery.REFORMED

since_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 of older versions")
SETUP = """
import torch, torch.distributed as dist
keep = 123

def reduced(group=None):
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    return t.item()

class Silent(dist.ProcessGroup):
    "Does what gloo does; no recorder knows it, and it does not count."
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.does = dist.ProcessGroupGloo(store, rank, size, timeout)
    def getBackendName(self): return "silent"
    def allreduce(self, tensors, options): return self.does.allreduce(tensors, options)
    def barrier(self, opts): return self.does.barrier(opts)

dist.Backend.register_backend("silent", Silent, devices=["cpu"])
dist.Backend.register_backend(
    "renamed", lambda *given: dist.ProcessGroupGloo(*given), devices=["cpu"]
)
print(); import sys; print(file=sys.stderr); reduced()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[nblaunch.Session]:
    with nblaunch.Session(2, grace=1, timeout=60) as session:
        session.cell(SETUP, namespace={})
        yield session


@pytest.fixture
def session(shared: nblaunch.Session) -> Iterator[nblaunch.Session]:
    """Give two ranks that are the same processes after the test, and compute rightly."""
    before = {each.pid for each in shared.status().ranks}
    yield shared
    assert cell(shared, "(reduced(), keep)").values == [(2.0, 123)] * 2
    assert {each.pid for each in shared.status().ranks} == before


def cell(session: nblaunch.Session, source: str, ranks: list[int] | None = None) -> nblaunch.RunResult:
    return session.cell(textwrap.dedent(source), namespace={}, check=False, ranks=ranks)


@pytest.mark.parametrize(
    ("source", "ranks"),
    [
        pytest.param("for _ in range(2 - rank): work = dist.all_reduce(torch.ones(1), async_op=True)", None),
        pytest.param(
            "work = dist.all_reduce(torch.full((1,), 100.), async_op=True)", [0], marks=pytest.mark.full
        ),
    ],
    ids=["uneven-loop", "subset"],
)
def test_after_a_job_that_succeeded_with_unlike_collectives_the_group_is_formed_again(session, source, ranks):
    result = cell(session, source, ranks)
    assert result.ok
    mismatch, reformed = result.warnings
    assert mismatch.startswith("collectives do not match: in the default group (gloo) rank 0 at #")
    assert reformed == REFORMED


def test_sends_and_receives_of_a_pipeline_are_no_mismatch(session):
    """gloo counts them; its recorder does not."""
    result = cell(
        session,
        """
        t = torch.ones(1)
        if rank == 0: dist.send(t, 1); dist.send(t, 1)
        else: works = [dist.irecv(t, 0) for _ in range(2)]; [each.wait() for each in works]
        if rank == 0: works = [dist.isend(t, 1), dist.irecv(t, 1)]
        else: dist.recv(t, 0); dist.send(t, 0); dist.monitored_barrier()
        if rank == 0: [each.wait() for each in works]; dist.monitored_barrier()
        """,
    )
    assert (result.ok, result.warnings) == (True, ())


def test_a_send_that_a_failed_rank_did_not_receive_gives_no_wrong_number_later(session):
    failed = cell(
        session,
        "if rank == 1: raise ValueError('before it received')\nwork = dist.isend(torch.full((1,), 77.), 1)",
    )
    assert REFORMED in failed.warnings
    received = cell(
        session, "t = torch.full((1,), 5.)\ndist.send(t, 1) if rank == 0 else dist.recv(t, 0)\nt.item()"
    )
    assert received.values == [5.0, 5.0]


def test_what_a_registered_backend_of_no_recorder_has_done_is_not_taken_for_sound(session):
    cell(session, "dist.destroy_process_group(); dist.init_process_group('silent')")
    used = cell(session, "reduced()")
    assert (used.values, used.warnings) == ([2.0, 2.0], ()), "what succeeds costs nothing"
    assert cell(session, "reduced(); raise ValueError('on all ranks')").warnings == (recovery.REFORMED,)
    assert cell(session, "dist.get_backend(), reduced()").values == [("silent", 2.0)] * 2
    cell(session, "dist.destroy_process_group(); dist.init_process_group('gloo')")


def test_a_registered_backend_that_is_gloo_by_its_own_word_is_read_there(session):
    cell(session, "dist.destroy_process_group(); dist.init_process_group('renamed')")
    assert cell(session, "reduced(); raise ValueError('on all ranks')").warnings == ()
    cell(session, "dist.destroy_process_group(); dist.init_process_group('gloo')")


def test_without_a_record_of_collectives_a_mistake_costs_the_group():
    with nblaunch.Session(2, timeout=60, env={"TORCH_FR_BUFFER_SIZE": "0"}) as session:
        cell(session, SETUP)
        assert cell(session, "reduced()").warnings == ()
        assert cell(session, "reduced(); raise ValueError('on all ranks')").warnings == (REFORMED,)
        assert cell(session, "reduced()").values == [2.0, 2.0]


TRAINING = """
import torch
class Optimizer(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for number, each in enumerate(each for group in self.param_groups for each in group["params"]):
            if within == (self.number, number): raise ValueError("within")
            each -= each.grad
        self.number += 1

def trained(stop=None, steps=3, summed=True):
    global model, opt
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    opt = Optimizer(model.parameters(), lr=1.0)
    opt.number = 0
    for step in range(steps):
        opt.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        for each in model.parameters() if summed else (): dist.all_reduce(each.grad)
        if step == stop: raise ValueError("before the step")
        opt.step()

within = None
"""
AGAIN = """
for _ in range(2):
    try:
        opt.step()
        break
    except ValueError:
        within = None
1 / 0
"""
STEP = "the ranks stopped within a step of model, opt: it is {}. Parameters may differ between ranks: "


@pytest.mark.parametrize(
    ("source", "done"),
    [
        ("trained(1 if rank == 1 else None)", "done on rank 0, not done on rank 1"),
        ("trained(0 if rank == 0 else None)", "not done on rank 0, done on rank 1"),
        ("trained(0 if rank else None, steps=1)", "done on rank 0, not done on rank 1"),
        ("within = (1, 1) if rank == 1 else None; trained()", "done on rank 0, done in part on rank 1"),
        ("within = (2, 1); trained()", "done in part on ranks 0-1"),
        ("trained(); 1 // rank", ""),
        ("trained(1)", ""),
        ("within = (0, 0)\ntry: trained()\nexcept ValueError: within = None\ntrained(1)", ""),
        ("trained(0 if rank else None, summed=False)", ""),
        ("trained(summed=False)\nif rank: within = (3, 0)\n" + AGAIN, ""),
    ],
    ids=[
        "later",
        "first",
        "one returns",
        "within",
        "all within",
        "after",
        "same step",
        "again",
        "each by itself",
        "one again",
    ],
)
def test_ranks_that_stop_within_a_step_of_an_optimizer_say_so(session, source, done):
    """They have other parameters then, and a model that goes on trains on with these."""
    cell(session, TRAINING)
    result = cell(session, source)
    assert result.failures
    told = [each for each in result.warnings if "within a step" in each]
    assert [each.partition("load a")[0] for each in told] == ([STEP.format(done)] if done else [])
    for later in ("1 / 0", "within = None; trained()"):
        again = cell(session, later)
        assert not [each for each in again.warnings if "within a step" in each], "of an earlier cell"


SCHEDULED = """
from torch.optim.lr_scheduler import ExponentialLR
student = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(student.parameters(), lr=1.0)
rate = ExponentialLR(sgd, 0.5)
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("sgd.step()\nif rank == 0: rate.step()\nreduced(); raise ValueError('a mistake')", True),
        ("sgd.step(); rate.step(); raise ValueError('a mistake')", False),
        ("sgd.param_groups[0]['lr'] = 1.0 + rank; sgd.step(); raise ValueError('a mistake')", False),
    ],
    ids=["one rank", "all ranks", "rates of each rank"],
)
def test_ranks_that_stop_between_an_optimizer_and_its_scheduler_say_so(session, source, told):
    """All have taken the step, and later ones would be of other sizes."""
    cell(session, SCHEDULED)
    result = cell(session, source)
    said = "the ranks stopped between a step of student, sgd and that of its scheduler: its learning rate is "
    rates = "0.5 on rank 0, 1 on rank 1"
    assert [each.partition(". ")[0] for each in result.warnings] == ([said + rates] if told else [])


CLOSED = """
net = torch.nn.Linear(2, 1)
def closed(kind, stop=None, **options):
    opt, evaluations = kind(net.parameters(), lr=0.1, **options), 0
    def closure():
        nonlocal evaluations
        opt.zero_grad()
        loss = net(torch.ones(1, 2)).square().sum()
        loss.backward()
        if rank and evaluations == stop: raise ValueError("within the closure")
        for each in net.parameters(): dist.all_reduce(each.grad)
        evaluations += 1
        return loss
    opt.step(closure)
    if stop is None: raise ValueError("after the step")
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("closed(torch.optim.LBFGS, 0)", False),
        ("closed(torch.optim.SGD, 0)", False),
        ("closed(torch.optim.LBFGS, 2, max_iter=5)", True),
        ("closed(torch.optim.LBFGS, max_iter=2)", False),
    ],
    ids=["first", "of another optimizer", "later", "after"],
)
def test_a_closure_that_fails_before_anything_has_changed_is_no_step(session, source, told):
    cell(session, CLOSED)
    result = cell(session, source)
    assert "closure" in result.root_cause.message or "after" in result.root_cause.message
    assert any("within a step" in each for each in result.warnings) == told, result.warnings


FITTING = """
net = torch.nn.Linear(2, 1)
def fitted(stop=None, after=None, steps=1):
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    for step in range(steps):
        net(torch.ones(1, 2)).sum().backward()
        for each in net.parameters(): dist.all_reduce(each.grad)
        if step == stop: raise ValueError("before the step")
        opt.step()
    if after: raise ValueError("after all steps")

def both(stop):
    first, second = (torch.optim.SGD(each, lr=1.0) for each in ([net.weight], [net.bias]))
    for step in range(3):
        net(torch.ones(1, 2)).sum().backward()
        for each in net.parameters(): dist.all_reduce(each.grad)
        if step == stop: raise ValueError("before both")
        first.step()
        reduced()
        second.step()
"""


@pytest.mark.parametrize(
    ("source", "done"),
    [
        ("fitted(2 if rank else None, steps=3)", "done on rank 0, not done on rank 1"),
        (
            "[fitted() for _ in range(70)]; fitted(1 if rank else None, steps=2)",
            "done on rank 0, not done on rank 1",
        ),
        ("fitted(after=rank)", ""),
        ("both(2 if rank else None)", "done on rank 0, not done on rank 1"),
        ("[fitted() for _ in range(70 + rank)]; 1 / 0", ""),
    ],
    ids=["last", "many", "after", "the first of two", "other numbers"],
)
def test_an_optimizer_counts_also_where_its_function_has_returned(session, source, done):
    """Its local variables are gone on that rank, and there on one that failed."""
    cell(session, TRAINING + FITTING)
    result = cell(session, source)
    assert result.failures
    told = [each for each in result.warnings if "within a step" in each]
    assert [done in each for each in told] == ([True] if done else []), told


@pytest.mark.parametrize("failing", ["forward", "between", "backward"])
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=since_2_13)])
def test_a_model_trains_on_as_if_a_mistake_within_a_step_had_not_been(session, kind, failing):
    cell(session, STEPS)
    run = cell(session, BEGUN.format(repr(kind)))
    assert run.ok, run.failures
    broken = cell(session, f"failing = {failing!r}; step(model, opt, 3)")
    assert broken.root_cause.message == "a mistake"
    assert broken.warnings == (REFORMED,)
    finished = cell(session, FINISHED)
    assert finished.values == [True, True], finished.failures


@pytest.mark.parametrize(
    ("made", "failing"),
    [
        ("'ddp'", "backward"),
        ("'ddp', find_unused_parameters=True", "between"),
        ("'ddp', static_graph=True", "backward"),
        pytest.param("'fsdp'", "backward", marks=since_2_13),
    ],
)
def test_a_model_trains_on_as_if_a_mistake_of_all_ranks_within_a_step_had_not_been(session, made, failing):
    """The ranks have called the same collectives, and may have left gradients that are not summed."""
    cell(session, STEPS)
    cell(session, BEGUN.format(made))
    broken = cell(session, f"failing, alike = {failing!r}, True; step(model, opt, 3)")
    assert [each.message for each in broken.failures] == ["a mistake"] * 2
    assert set(broken.warnings) <= {REFORMED}
    later = cell(session, "if rank: raise ValueError('later, and on one rank')")
    assert (later.ok, later.warnings) == (False, ()), "nothing of the model is left by then"
    finished = cell(session, FINISHED)
    assert finished.values == [True, True], finished.failures


def test_a_mistake_ends_the_cell_though_a_thread_is_within_a_backward(session, tmp_path):
    """It waits for the other rank, with the lock of the model."""
    waits = tmp_path / "waits"
    cell(session, STEPS)
    cell(session, BEGUN.format(repr("ddp")))
    broken = cell(
        session,
        f"""
        import pathlib, sys, threading, time
        waits = pathlib.Path({str(waits)!r})
        if rank == 0:
            threading.excepthook = lambda _: None
            apart = threading.Thread(target=step, args=(model, opt, 3))
            apart.start()
            task, asleep = pathlib.Path(f"/proc/self/task/{{apart.native_id}}/stat"), 0
            while asleep < 20:
                within = sys._current_frames()[apart.ident].f_code.co_name == "_engine_run_backward"
                sleeps = task.read_text().rpartition(")")[2].split()[0] == "S"
                asleep = asleep + 1 if within and sleeps else 0
                time.sleep(0.01)
            waits.touch()
            raise ValueError("a mistake")
        while not waits.exists():
            time.sleep(0.01)
        """,
    )
    assert [each.message for each in broken.failures] == ["a mistake"]
    finished = cell(session, FINISHED)
    assert finished.values == [True, True], finished.failures


@pytest.mark.parametrize("alike", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=since_2_13)])
def test_after_a_mistake_a_step_that_has_begun_before_it_sums_gradients_or_fails(session, kind, alike):
    """Its forward and its backward are in two cells. No rank goes on with gradients of its own."""
    cell(session, STEPS)
    cell(session, BEGUN.format(repr(kind)))
    cell(session, "torch.manual_seed(300 + rank); opt.zero_grad()")
    cell(session, "loss = model(torch.randn(16, 8)).square().mean()")
    for _ in range(2):
        broken = cell(session, f"if {alike} or rank == 1: raise ValueError('a mistake')\nreduced()")
        assert broken.warnings == (() if alike else (REFORMED,))
    went_on = cell(session, "loss.backward(); opt.step()")
    assert went_on.ok == (alike or kind == "fsdp" or in_place.torch_can())
    later = FINISHED.replace("range(3, 6)", "range(4, 6)") if went_on.ok else FINISHED
    finished = cell(session, later)
    assert finished.values == [True, True], finished.failures


@pytest.mark.skipif(torch.__version__ < "2.9", reason="the kernel leaves a directory of torch")
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=since_2_13)])
def test_a_model_trains_on_as_if_an_interrupt_within_a_collective_had_not_been(
    kernel, tmp_path, eventually, kind
):
    """Rank 0 waits for the gradients of rank 1, which does not come to them; the class is the notebook's."""
    waits = tmp_path / "waits"
    kernel.ok("%distributed start -n 2 --grace 2")
    kernel.ok(STEPS)
    kernel.ok(f"%%distributed\n{BEGUN.format(repr(kind))}")
    mistaken = kernel.submit("%%distributed\nfailing, alike = 'backward', True; step(model, opt, 3)").finish()
    assert REFORMED in mistaken.text + mistaken.error.evalue + mistaken.error.traceback
    pending = kernel.submit(
        f"""
        %%distributed
        import pathlib, time
        def fail():
            pathlib.Path({str(waits)!r}).touch()
            time.sleep(1000)
        failing, alike = "backward", False
        step(model, opt, 3)
        """
    )
    eventually(waits.exists, "rank 1 is within its backward", 60)
    kernel.interrupt()
    interrupted = pending.finish()
    assert interrupted.error.ename == "KeyboardInterrupt"
    assert REFORMED in interrupted.text + interrupted.error.evalue + interrupted.error.traceback
    assert "ranks 0-1: True" in kernel.ok(f"%%distributed\n{FINISHED}").text
    kernel.ok("%distributed stop")
