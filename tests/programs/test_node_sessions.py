"""Runs and sessions over nodes that an engine has placed: node programs, as processes of this machine."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lanes import slow
from patience import PATIENCE, eventually
from training import BEGUN, FINISHED, STEPS

import nblaunch
from nblaunch import LaunchError, NblaunchError, RunFailedError
from nblaunch.client.local import local

pytestmark = pytest.mark.timeout(300)

ON: dict[str, Any] = {"nproc": 1, "nnodes": 2, "on": "process"}
HOSTS = [f"{platform.node()}-{number}" for number in (1, 2)]
SUM = """
import os, torch, torch.distributed as dist
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
int(total)
"""
PIDS = "import os; os.getpid()"
NAMED_SECONDS = 5.0
"""Within which a node that was killed must be named."""


# Nodes have a path of their own, on which they find this module.
HERE = Path(__file__).parent
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


class Nodes:
    """A session on two nodes, and their processes."""

    def __init__(self, **options: Any) -> None:
        self.session = nblaunch.Session(**{**ON, **options})

    def cell(self, source: str, **more: Any) -> nblaunch.RunResult:
        return self.session.cell(source, namespace={}, **more)

    def pids(self) -> list[int]:
        """Return the process ids of the ranks."""
        return list(self.cell(PIDS).values)

    def programs(self) -> list[psutil.Process]:
        """Return the node programs, in the order of ranks."""
        return [node_of(pid) for pid in self.pids()]


def node_of(pid: int) -> psutil.Process:
    """Return the node program that has started this rank."""
    above = psutil.Process(pid).parents()
    (found,) = [each for each in above if "join" in each.cmdline()]
    return found


@pytest.fixture(scope="module")
def shared() -> Iterator[Nodes]:
    """Give a session that the tests of this module share."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Nodes(timeout=60, grace=1)
    yield made
    made.session.close()


@pytest.fixture
def start() -> Iterator[Any]:
    """Give `start(**options)`: sessions of the test's own."""
    started: list[Nodes] = []

    def begin(**options: Any) -> Nodes:
        started.append(Nodes(**{"timeout": 60, "grace": 1, **options}))
        return started[-1]

    yield begin
    for each in started:
        each.session.close()


# --- failures -----------------------------------------------------------------------------------------


def fails_on_one():
    from torch import distributed

    if distributed.get_rank() == 1:
        msg = "the second"
        raise ValueError(msg)
    distributed.barrier()


def test_a_failure_on_another_node_is_the_root_cause_and_names_the_node(shared):
    with pytest.raises(RunFailedError, match="the second") as caught:
        shared.session.run(fails_on_one)
    root = caught.value.root_cause
    assert root is not None
    assert (root.rank, root.type, root.node) == (1, "builtins.ValueError", HOSTS[1])
    assert f"rank 1 on {HOSTS[1]} failed: ValueError: the second" in str(caught.value)
    assert caught.value.result is not None
    assert f"root cause: rank 1 on {HOSTS[1]}: " in repr(caught.value.result)
    assert caught.value.result.ranks[1].node == HOSTS[1]


# --- a session ----------------------------------------------------------------------------------------


def test_a_session_on_two_nodes_keeps_its_variables(shared):
    result = shared.cell(f"{SUM.strip()} * 100")
    assert list(result.values) == [300, 300]
    assert [each.node for each in result.ranks] == HOSTS
    assert list(shared.cell("int(total) + dist.get_rank()").values) == [3, 4]
    status = shared.session.status()
    assert (status.world_size, status.backend) == (2, "gloo")
    assert [each.state for each in status.ranks] == ["idle", "idle"]


@pytest.mark.slow
def test_what_ranks_of_nodes_use_is_measured_there(shared):
    status = shared.session.status()
    assert all((each.memory or 0) > 1_000_000 for each in status.ranks)
    assert all(each.cpu is not None for each in status.ranks)
    assert [each.node for each in status.ranks] == HOSTS
    assert f"rank 1 on {HOSTS[1]}: idle, cpu, " in str(status)
    (known,) = [each for each in nblaunch.sessions() if each.hosts == tuple(HOSTS)]
    assert (known.memory or 0) > 2_000_000
    assert f"2 ranks (gloo), cpu, {(known.memory or 0) / 1e6:.0f} MB, process on {','.join(HOSTS)}" in str(
        known
    )


def test_a_rank_does_not_have_its_nodes_place(shared):
    """The nodes that it starts have others."""
    result = shared.cell("import os\n[name for name in os.environ if name.startswith('NBLAUNCH_NODE_')]")
    assert list(result.values) == [[], []]


def test_large_variables_are_pushed_to_all_nodes_and_pulled(shared):
    big = torch.arange(16_000_000, dtype=torch.float32)
    shared.session.push({"big": big})
    assert list(shared.cell("import os\nfloat(big.sum()) + int(os.environ['RANK'])").values) == [
        float(big.sum()) + rank for rank in range(2)
    ]
    shared.cell("mine = big * (1 + int(os.environ['RANK']))")
    pulled = shared.session.pull("mine")["mine"]
    assert torch.equal(pulled[1], big * 2)
    shared.cell("del big, mine")


def test_a_cell_runs_on_the_ranks_of_one_node(shared):
    result = shared.cell("import os\nonly = os.getpid()", ranks=[1])
    assert [each.node for each in result.ranks] == [HOSTS[1]]
    with pytest.raises(NblaunchError, match="'only'"):
        shared.session.pull("only", ranks=[0])


def test_a_rank_of_another_node_asks_the_user(shared, monkeypatch):
    asked = []

    def answer(prompt):
        asked.append(prompt)
        return "Ada"

    monkeypatch.setattr("builtins.input", answer)
    result = shared.cell("import os\ninput('name? ') if int(os.environ['RANK']) == 1 else None")
    assert list(result.values) == [None, "Ada"]
    assert asked == ["[rank 1] name? "]


def sleeps(seconds):
    import time

    time.sleep(seconds)


def test_an_interrupt_reaches_all_nodes_and_costs_no_variable(shared):
    shared.cell("kept = 'here'")
    handle = shared.session.submit(sleeps, (60,))
    eventually(lambda: running(shared), "the ranks are at work")
    began = time.monotonic()
    shared.session.interrupt()
    with pytest.raises(KeyboardInterrupt):
        handle.result(PATIENCE)
    assert time.monotonic() - began < NAMED_SECONDS
    assert list(shared.cell("kept").values) == ["here", "here"]
    assert list(shared.cell(SUM).values) == [3, 3]


def running(nodes: Nodes) -> bool:
    return {each.state for each in nodes.session.status().ranks} == {"running"}


def waits_for_nobody():
    import torch
    from torch import distributed

    if distributed.get_rank() == 0:
        distributed.all_reduce(torch.ones(1))


def test_a_rank_that_is_stuck_in_a_collective_is_freed(shared):
    shared.cell("kept = 'still'")
    handle = shared.session.submit(waits_for_nobody)
    eventually(lambda: "all_reduce" in str(shared.session.stacks()), "rank 0 waits")
    shared.session.interrupt()
    with pytest.raises((KeyboardInterrupt, RunFailedError)):
        handle.result(PATIENCE)
    assert list(shared.cell("kept").values) == ["still", "still"]
    assert list(shared.cell(SUM).values) == [3, 3]


def holds_the_interpreter(rank):
    import os

    # Some seconds; a call that waits would be ended by the signal that asks for the stack.
    if os.environ["RANK"] == rank:
        sum(range(2 * 10**8))


@pytest.mark.slow
def test_the_stack_of_a_rank_that_holds_its_interpreter_comes_from_its_node(shared):
    handle = shared.session.submit(holds_the_interpreter, ("1",))
    eventually(lambda: 1 in shared.session.stacks().silent, "rank 1 does not answer")
    report = shared.session.stacks()
    assert list(report.silent) == [1]
    assert "in holds_the_interpreter" in report.silent[1]
    assert f"[rank 1 on {HOSTS[1]}] gave no answer" in str(report)
    assert handle.result(PATIENCE * 3).values == [None, None]


@pytest.mark.slow
def test_a_rank_of_a_node_that_is_stopped_is_named_as_such(shared):
    pid = shared.pids()[1]
    handle = shared.session.submit(sleeps, (4,))
    eventually(lambda: running(shared), "the ranks are at work")
    os.kill(pid, signal.SIGSTOP)
    try:
        report = shared.session.stacks()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "SIGSTOP" in report.silent[1]
    assert "in sleeps" in str(report), "rank 0 answers"
    handle.result(PATIENCE)


VARIABLES = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(300, 300))
big = torch.arange(3_000_000)
step, alias, mine, node = 3, big, rank * 10, int(os.environ["GROUP_RANK"])
total = torch.ones(1)
"""
HAVE = """
names = ["model", "big", "step", "alias", "mine", "node"]
sorted(name for name in names if name in globals())
"""
GOES_ON = """
total = torch.ones(1)
dist.all_reduce(total)
model.zero_grad()
model(torch.full((2, 300), float(rank))).sum().backward()
print(f"out of {rank}")
total.item(), step, alias is big, int(big.sum()), rank == dist.get_rank(), model.module.weight.grad.tolist()
"""
DIES = "step = 4\nif rank == {}: os.kill(os.getpid(), 9)\n{}"


def others(nodes: Nodes, *dead: int) -> dict[int, int]:
    """Return the processes of the other ranks, once all are ready; asks no rank."""

    def ready() -> bool:
        return all(each.state == "idle" and each.pid for each in nodes.session.status().ranks)

    eventually(ready, "all ranks are ready", PATIENCE * 3)
    return {each.rank: each.pid or 0 for each in nodes.session.status().ranks if each.rank not in dead}


def sketched(nodes: Nodes, *names: str) -> bool:
    assert nodes.session._live.open
    known = [
        dict(zip(each.names, each.digests, strict=False)) for each in nodes.session._live._names.values()
    ]
    return all(each.get(name) for each in known for name in names)


def check_reborn(nodes: Nodes, dead: int, before: dict[int, int], step: int) -> None:
    """Check that this rank alone is another process, and has what all had alike, and nothing else."""
    kept = next(iter(before))
    have = nodes.cell(HAVE)
    assert set(have.values[kept]) - set(have.values[dead]) == {"mine", "node"}
    (told,) = [each for each in have.warnings if each.startswith(f"rank {dead} is back: ")]
    assert "alias, big, model, step" in told
    assert "mine, node had no copy and are gone (it was not the same on all ranks" in told
    assert others(nodes, dead) == before
    result = nodes.cell(GOES_ON)
    assert [each.stdout for each in result.ranks] == [f"out of {rank}\n" for rank in range(len(before) + 1)]
    assert result.values == [result.values[kept]] * (len(before) + 1)
    size = len(before) + 1
    assert result.values[0][:5] == (size, step, True, 3_000_000 * 2_999_999 // 2, True)
    assert result.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "dead"), [(2, 3), (1, 1), (2, 0)], ids=["peer", "alone", "first"])
def test_a_rank_that_is_killed_is_started_again_alone_on_its_node_with_what_all_had_alike(start, nproc, dead):
    nodes = start(nproc=nproc, grace=10)
    nodes.cell(VARIABLES)
    eventually(lambda: sketched(nodes, "model", "big"), "the variables are compared")
    before, programs = others(nodes, dead), nodes.programs()
    pid = nodes.session.status().ranks[dead].pid
    assert pid is not None
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: nodes.session._live.attempt == 1, "the rank has been started again")
    check_reborn(nodes, dead, before, 3)
    print(f"killed -> in use again {time.monotonic() - began:.2f} s")
    assert nodes.programs() == programs


@pytest.mark.parametrize(
    "doing",
    ["dist.all_reduce(total)", slow("import time; time.sleep(60)")],
    ids=["in a collective", "in Python"],
)
def test_a_job_ends_with_a_rank_that_dies_on_a_node_and_the_others_keep_their_variables(start, doing):
    nodes = start(nproc=2, grace=10)
    nodes.cell(VARIABLES)
    before = others(nodes, 3)
    with pytest.raises(RunFailedError) as caught:
        nodes.cell(DIES.format(3, doing))
    root = caught.value.root_cause
    assert root is not None
    assert (root.rank, root.signal, root.node) == (3, "SIGKILL", HOSTS[1])
    assert "rank 3 is started again; the other ranks keep their variables" in caught.value.result.warnings
    check_reborn(nodes, 3, before, 4)


@pytest.mark.slow
def test_ranks_of_several_nodes_die_one_after_the_other_and_all_at_once(start):
    nodes = start(nproc=2, grace=10)
    nodes.cell("import os\nkept = [1, 2]")
    before = others(nodes, 1, 2)
    for pid in set(others(nodes).values()) - set(before.values()):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: nodes.session._live.attempt > 0, "ranks have been started again")
    assert list(nodes.cell("kept").values) == [[1, 2]] * 4
    assert others(nodes, 1, 2) == before
    # Under other numbers, and beside a node that is lost.
    for pid in others(nodes).values():
        os.kill(pid, signal.SIGKILL)
    result = nodes.cell("'kept' in globals()", check=False)
    assert set(result.values) == {False} or not result.ok
    assert list(nodes.cell(SUM).values) == [10] * 4


def test_all_ranks_are_started_anew_when_all_are_killed_and_the_nodes_stay(start):
    shared = start()
    pids, nodes = shared.pids(), shared.programs()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: shared.session._live.attempt > 0, "other ranks are started")
    result = shared.cell(SUM)
    assert list(result.values) == [3, 3]
    assert any("started anew" in warning for warning in result.warnings)
    pids = check_replaced(shared, pids, nodes)
    shared.cell("kept = 1")
    shared.session.restart()
    check_replaced(shared, pids, nodes)
    with pytest.raises(NblaunchError, match="'kept'"):
        shared.session.pull("kept")


def check_replaced(nodes: Nodes, pids: list[int], programs: list[psutil.Process]) -> list[int]:
    """Return the ranks, which are others than these; their nodes are the same."""
    now = nodes.pids()
    assert set(now).isdisjoint(pids)
    assert nodes.programs() == programs
    return now


@pytest.mark.slow
def test_a_cell_on_two_nodes_takes_at_most_twice_as_long_as_on_one_machine(shared):
    on_nodes = fastest(shared.session)
    with nblaunch.Session(2, timeout=60) as here:
        at_once = fastest(here)
    print(f"all_reduce cell: {on_nodes * 1000:.1f} ms on two nodes, {at_once * 1000:.1f} ms on one machine")
    assert on_nodes < 2 * at_once


def fastest(session: nblaunch.Session) -> float:
    session.cell(SUM, namespace={})
    times = []
    for _ in range(20):
        began = time.perf_counter()
        session.cell("dist.all_reduce(total)", namespace={})
        times.append(time.perf_counter() - began)
    return min(times)


# --- nodes that are lost --------------------------------------------------------------------------------


def notes_its_pid(directory):
    import os
    import time
    from pathlib import Path

    rank = os.environ["RANK"]
    noted = Path(directory, rank)
    again = noted.exists()
    noted.write_text(str(os.getpid()))
    time.sleep(0 if again else 60)
    return rank


@pytest.mark.slow_at("1")
@pytest.mark.parametrize("restarts", [slow(0), 1])
def test_a_node_that_is_killed_is_named_by_a_run_or_replaced(tmp_path, restarts):
    def kill() -> None:
        noted = tmp_path / "1"
        eventually(lambda: noted.exists() and noted.read_text(), "the rank has begun", PATIENCE * 3)
        node_of(int(noted.read_text())).kill()
        killed.append(time.monotonic())

    killed: list[float] = []
    killer = threading.Thread(target=kill)
    killer.start()
    run = functools.partial(
        nblaunch.run, notes_its_pid, (str(tmp_path),), **ON, max_restarts=restarts, timeout=60, grace=1
    )
    if restarts:
        result = run()
        assert list(result.values) == ["0", "1"]
        assert HOSTS[1] in result.attempts[0].failures[0].reason
    else:
        with pytest.raises(RunFailedError, match=f"was lost with its node: {HOSTS[1]}"):
            run()
        assert time.monotonic() - killed[0] < NAMED_SECONDS
    killer.join()


@pytest.mark.slow
def test_a_node_that_is_killed_ends_a_session_by_name(start):
    nodes = start()
    program = nodes.programs()[1]
    handle = nodes.session.submit(sleeps, (60,))
    eventually(lambda: running(nodes), "the ranks are at work")
    began = time.monotonic()
    program.kill()
    with pytest.raises(NblaunchError, match=HOSTS[1]):
        handle.result(PATIENCE)
    assert time.monotonic() - began < NAMED_SECONDS
    eventually(lambda: not nodes.session._live.open, "the session has ended")
    with pytest.raises(LaunchError):
        nodes.cell("1")


@pytest.mark.slow_at("0")
@pytest.mark.parametrize("lost", [0, slow(1)])
def test_a_session_that_may_have_one_node_keeps_its_variables_without_the_other(start, lost):
    nodes = start(nnodes="1:2")
    config = {"lr": 1.0}
    nodes.session.cell("import os\nmine = ('kept', os.getpid())\nsame = config", namespace={"config": config})
    pids, programs = nodes.pids(), nodes.programs()
    began = time.monotonic()
    programs[lost].kill()
    eventually(lambda: nodes.session._live.world_size == 1, "one rank is left")
    named = time.monotonic() - began
    result = nodes.cell(SUM)
    print(f"node killed -> named {named:.2f} s, -> values {time.monotonic() - began:.2f} s")
    assert list(result.values) == [1]
    assert any(f"node {HOSTS[lost]} was lost" in warning for warning in result.warnings)
    assert any("variables kept: rank 0" in warning for warning in result.warnings)
    assert nodes.session.status().world_size == 1
    places = nodes.cell(
        "[os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'GROUP_RANK')], rank, world_size"
    )
    assert list(places.values) == [(["0", "1", "0"], 0, 1)]
    assert [each.node for each in places.ranks] == [HOSTS[1 - lost]]
    # The very process, and one object is one object still.
    assert list(nodes.cell("mine").values) == [("kept", pids[1 - lost])]
    assert list(nodes.session.cell("same is config", namespace={"config": config}).values) == [True]
    assert not nodes.cell("print('out')").warnings
    assert nodes.programs() == [programs[1 - lost]]
    nodes.session.restart()
    with pytest.raises(NblaunchError, match="'mine'"):
        nodes.session.pull("mine")


def prints_and_waits(kept, seconds):
    import os
    import time

    import torch
    from torch import distributed

    rank = distributed.get_rank()
    print(f"out of {rank}")
    if rank < kept:
        return rank * 10
    if seconds:
        time.sleep(seconds)
    distributed.all_reduce(torch.ones(1))
    return os.getpid()


@pytest.mark.slow
def test_a_rank_that_goes_on_under_another_number_is_found_by_its_node(start):
    nodes = start(nnodes="1:2")
    nodes.programs()[0].kill()
    eventually(lambda: nodes.session._live.world_size == 1, "one rank is left")
    handle = nodes.session.submit(holds_the_interpreter, ("0",))
    where = "in holds_the_interpreter"
    eventually(lambda: where in nodes.session.stacks().silent.get(0, ""), "its node finds out where it is")
    assert handle.result(PATIENCE * 3).values == [None]


@pytest.mark.slow
def test_nodes_that_are_lost_together_leave_the_others_with_their_variables(start):
    nodes = start(nnodes="1:3")
    nodes.cell("import os\nmine = os.getpid()")
    pids, programs = nodes.pids(), nodes.programs()
    for each in programs[:2]:
        each.kill()
    eventually(lambda: nodes.session._live.world_size == 1, "one rank is left")
    assert list(nodes.cell("mine").values) == pids[2:]
    assert list(nodes.cell(SUM).values) == [1]


def others_wait(nodes: Nodes) -> bool:
    return [each.state for each in nodes.session.status().ranks] == ["idle", "running", "running", "running"]


@pytest.mark.parametrize("seconds", [0, slow(60)], ids=["in a collective", "in Python"])
def test_a_job_fails_with_a_lost_node_and_keeps_what_the_other_ranks_have(start, seconds):
    nodes = start(nnodes="1:2", nproc=2)
    nodes.cell(
        "import os, torch.distributed as dist\nmine = os.getpid()\n"
        "mesh, group = dist.init_device_mesh('cpu', (2, 2)), dist.new_group([0, 3])"
    )
    pids, program = nodes.pids(), nodes.programs()[3]
    handle = nodes.session.submit(prints_and_waits, (1, 60 if seconds else 0))
    doing = "sleep" if seconds else "all_reduce"
    eventually(
        lambda: str(nodes.session.stacks()).count(doing) and others_wait(nodes), "the ranks are at work"
    )
    began = time.monotonic()
    program.kill()
    with pytest.raises(RunFailedError, match=f"was lost with its node: {HOSTS[1]}") as caught:
        handle.result(PATIENCE)
    assert time.monotonic() - began < NAMED_SECONDS
    print(f"node killed -> job ended {time.monotonic() - began:.2f} s")
    result = caught.value.result
    assert result is not None
    assert {each.rank for each in result.failures} == {2, 3}
    assert [each.state for each in result.ranks] == ["SUCCEEDED", "STOPPED", "FAILED", "FAILED"]
    assert result.ranks[0].value == 0
    assert [each.stdout for each in result.ranks][:2] == ["out of 0\n", "out of 1\n"]
    after = nodes.cell("mine")
    print(f"node killed -> next values {time.monotonic() - began:.2f} s")
    assert list(after.values) == pids[:2]
    assert any("the group has 2 ranks now" in warning for warning in after.warnings)
    anew = "(make it of the ranks that are there now)"
    assert any(warning.endswith(f"mesh {anew}, group on rank 0 {anew}") for warning in after.warnings)
    assert list(nodes.cell(SUM).values) == [3, 3]
    assert [each.stdout for each in nodes.cell("print('once')").ranks] == ["once\n"] * 2


@pytest.mark.slow
def test_a_node_comes_in_place_of_one_while_the_others_go_on(start):
    nodes = start(nnodes="1:2", max_restarts=1)
    nodes.cell("import os\nmine = os.getpid()")
    pids, programs = nodes.pids(), nodes.programs()
    programs[0].kill()
    eventually(lambda: nodes.session._live.attempt == 1, "one rank is left")
    assert list(nodes.cell("mine").values) == pids[1:]
    eventually(lambda: nodes.session._live.world_size == 2, "another node is here", PATIENCE * 3)
    result = nodes.cell("globals().get('mine')")
    assert list(result.values) == [pids[1], None]
    assert any("; new: rank 1" in warning for warning in result.warnings)
    alone = "rank 1 has joined: no variable from rank 0; mine did not come (one rank alone has it"
    assert any(warning.startswith(alone) for warning in result.warnings)
    assert list(nodes.cell(SUM).values) == [3, 3]


@pytest.mark.slow
def test_the_ranks_of_a_node_that_comes_get_what_all_others_have_alike(start):
    nodes = start(nnodes="1:2", nproc=2, max_restarts=1, grace=10)
    nodes.cell(VARIABLES)
    before, programs = others(nodes, 2, 3), nodes.programs()
    programs[3].kill()
    eventually(lambda: nodes.session._live.attempt == 1, "two ranks are left")
    nodes.cell(
        "later, again, model = [1, rank], [2], DDP(model.module)\nmodel(torch.zeros(1, 300)).sum().backward()"
    )
    eventually(lambda: nodes.session._live.world_size == 4, "another node is here", PATIENCE * 3)
    have = nodes.cell(HAVE.replace("names = [", "names = ['later', 'again', "))
    missing = set(have.values[0]) - set(have.values[2])
    assert (missing, have.values[2]) == ({"later", "mine", "node"}, have.values[3])
    (told,) = [each for each in have.warnings if each.startswith("ranks 2-3 have joined: ")]
    assert told.startswith(
        "ranks 2-3 have joined: again, alias, big, model, step, total from rank 0; later, mine, node did"
    )
    assert others(nodes, 2, 3) == before
    result = nodes.cell(GOES_ON)
    assert result.values == [result.values[0]] * 4
    assert result.values[0][:2] == (4, 3)
    # Both kinds at once, and numbers that change.
    pid = others(nodes)[1]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: nodes.session._live.attempt == 3, "the rank has been started again")
    nodes.programs()[3].kill()
    eventually(lambda: nodes.session._live.world_size == 2, "two ranks are left")
    assert list(nodes.cell("step, 'mine' in globals()").values) == [(3, True), (3, False)]


@pytest.mark.slow
def test_a_model_that_a_lost_node_cut_off_within_a_step_comes_to_the_next_one_and_trains_on(start, tmp_path):
    """The ranks that are left have gradients of their own: that step was not summed."""
    waits = tmp_path / "waits"
    nodes = start(nnodes="1:2", nproc=2, max_restarts=1, grace=10)
    nodes.cell(f"{STEPS}\n{BEGUN.format(repr('ddp'))}")
    program = nodes.programs()[3]
    source = f"""
import pathlib, time
def fail():
    pathlib.Path({str(waits)!r}).touch()
    time.sleep(1000)
failing = "backward" if rank == 3 else ""
step(model, opt, 3)
"""
    cell = threading.Thread(target=nodes.cell, args=(source,), kwargs={"check": False})
    cell.start()
    eventually(waits.exists, "a rank is within its backward", PATIENCE * 3)
    program.kill()
    cell.join()
    eventually(
        lambda: nodes.session._live.attempt > 1 and nodes.session._live.world_size == 4,
        "another node is here",
        PATIENCE * 3,
    )
    finished = nodes.cell(FINISHED)
    assert finished.values == [True] * 4, finished.warnings
    (told,) = [each for each in finished.warnings if each.startswith("ranks 2-3 have joined: ")]
    assert "without gradients, which differed" in told


@pytest.mark.slow_at("1")
@pytest.mark.parametrize("restarts", [slow(0), 1])
def test_a_node_that_is_lost_while_ranks_start_is_replaced_or_named(start, restarts):
    nodes = start(max_restarts=restarts)
    pids, (first, second) = nodes.pids(), nodes.programs()
    begins = psutil.Process(pids[1]).parent()
    assert begins is not None
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: {each.pid for each in begins.children()} - {pids[1]}, "another rank is started")
    (other,) = {each.pid for each in begins.children()} - {pids[1]}
    os.kill(other, signal.SIGSTOP)  # the ranks form no group
    eventually(lambda: nodes.session.status().ranks[1].pid == other, "the session knows of the rank")
    second.kill()
    if not restarts:
        eventually(lambda: not nodes.session._live.open, "the session has ended")
        with pytest.raises(LaunchError, match=HOSTS[1]):
            nodes.cell("1")
        return
    eventually(lambda: nodes.session._live.attempt == 2, "the nodes have met again", PATIENCE * 3)
    assert list(nodes.cell(SUM).values) == [3, 3]
    there = nodes.programs()
    assert first in there
    assert second not in there


# --- in a notebook ------------------------------------------------------------------------------------


def test_a_notebooks_cells_run_on_the_nodes_of_its_session(start_kernel):
    kernel = start_kernel(CUDA_VISIBLE_DEVICES="")
    shown = kernel.ok("%distributed start -n 1 --nnodes 2 --on process --grace 1", timeout=PATIENCE * 9)
    assert "2 ranks (gloo)" in (shown.result or "")
    kernel.ok("%%distributed --out res\nimport os\nmine = int(os.environ['RANK'])\nmine")
    assert kernel.value("res.values") == [0, 1]
    assert kernel.value("[each.node for each in res.ranks]") == HOSTS
    kernel.ok("%%distributed --fresh --out res\n'mine' in globals()")
    took = []
    for number in range(2):
        began = time.monotonic()
        kernel.ok(f"%%distributed --fresh --out res\n('edited', {number}, 'mine' in globals())")
        took.append(time.monotonic() - began)
    print(f"a fresh cell on the session's nodes: {', '.join(f'{each:.2f}' for each in took)} s")
    assert kernel.value("res.values") == [["edited", 1, False]] * 2
    assert kernel.value("[each.node for each in res.ranks]") == HOSTS
    kernel.ok("%%distributed --out res\nmine")
    assert kernel.value("res.values") == [0, 1]
    kernel.ok("%distributed stop")


@pytest.mark.slow
def test_a_session_on_nodes_outlives_its_kernel(detached_kernels):
    first = detached_kernels(CUDA_VISIBLE_DEVICES="")
    first.ok("%distributed start -n 1 --nnodes 2 --on process --detach --session far", timeout=PATIENCE * 9)
    first.ok("%%distributed --session far\nimport os\nmine = os.environ['RANK']")
    first.kill()
    second = detached_kernels(CUDA_VISIBLE_DEVICES="")
    attached = second.ok("%distributed attach far")
    assert "2 ranks (gloo)" in attached.stdout
    second.ok("%%distributed --session far --out res\nmine")
    assert second.value("res.values") == ["0", "1"]
    second.ok("%distributed stop --session far")


# --- nodes that are awaited ----------------------------------------------------------------------------


def test_an_interrupt_withdraws_what_is_awaited(kernel):
    pending = kernel.submit("%%distributed -n 1 --nnodes 2 --on join\n1")
    ran = until(pending, "python -m nblaunch join")
    began = time.monotonic()
    kernel.interrupt()
    assert pending.finish(PATIENCE) is ran
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    assert "waiting for join" in ran.error.evalue
    assert time.monotonic() - began < 2


def until(pending: Any, text: str) -> Any:
    """Wait until a cell that goes on has printed a text; return what has come of it."""
    for kind, content in pending._messages(PATIENCE):
        pending._take(kind, content)
        if text in pending._ran.stdout:
            break
    return pending._ran


def test_a_node_that_comes_late_joins_and_the_ranks_that_are_there_keep_their_variables(start_kernel):
    kernel = start_kernel(CUDA_VISIBLE_DEVICES="")
    pending = kernel.submit("%distributed start -n 1 --nnodes 1:2 --on join --local-addr 127.0.0.1 --grace 1")
    printed = until(pending, "python -m nblaunch join").stdout
    found = re.search(r"(\w+)=(\S+) python (-m nblaunch join .*)", printed)
    assert found is not None
    name, file, words = found.groups()
    programs = []

    def join() -> None:
        programs.append(
            subprocess.Popen([sys.executable, *shlex.split(words)], env={**os.environ, name: file})
        )

    join()
    try:
        assert pending.finish(PATIENCE * 3).error is None
        kernel.ok("table = {'rate': 1}")
        kernel.ok("%%distributed --out res\nimport os\nmine, rate = os.getpid(), table['rate']\nmine")
        (pid,) = kernel.value("res.values")
        kernel.ok("table['rate'] = 2")
        began = time.monotonic()
        join()
        both = "%%distributed --out res\nglobals().get('mine')"
        eventually(
            lambda: kernel.ok(both) and len(kernel.value("res.values")) == 2,
            "the other is here",
            PATIENCE * 3,
        )
        print(f"late node -> in the session {time.monotonic() - began:.2f} s")
        assert kernel.value("res.values") == [pid, None]
        kernel.ok(f"%%distributed --out res\n{SUM}")
        assert kernel.value("res.values") == [3, 3]
        kernel.ok("%%distributed --out res\ntable['rate']")
        assert kernel.value("res.values") == [1, 2]
        (notice,) = kernel.value("res.warnings")
        assert notice.startswith("table differs between ranks")
        assert "rank 0 an older value, rank 1 the notebook's" in notice
        kernel.ok("%distributed push table")
        kernel.ok("%%distributed --out res\ntable['rate']")
        assert (kernel.value("res.values"), kernel.value("res.warnings")) == ([2, 2], [])
        kernel.ok("%distributed stop", timeout=PATIENCE * 3)
        assert [each.wait(PATIENCE) for each in programs] == [0, 0]
    finally:
        for each in programs:
            each.kill()
            each.wait()


def test_what_an_engine_cannot_do_is_refused_before_a_process_starts():
    with pytest.raises(nblaunch.OptionError, match="64 nodes were asked for on this machine"):
        nblaunch.run(print, nproc=1, nnodes=64, on="process")
    assert local().runtime.alive
