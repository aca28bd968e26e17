"""Whatever happens to a job of a session: it ends, it says why, and the session goes on.

A Python error, a deadlock or an interrupt costs no variable; the death of a rank costs all of them, and the
result says so. The ways to come to grief are those of `test_chaos.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import on_ranks, soon, usual, wait_for_the_others
from lanes import sampled
from sources import INTERRUPTER, must_not_grow, said_by
from test_chaos import DEATHS, fail, grow_a_tree

import nblaunch
from nblaunch.capture.names import cell_names
from nblaunch.group import lifecycle, recovery
from nblaunch.rank import in_place

GONE = lifecycle.RESTARTED
REFORMED = recovery.REFORMED_IN_PLACE if in_place.torch_can() else recovery.REFORMED
SETTLED = 1.0
"""Seconds that freeing stuck ranks, and forming their group again, may take on an idle machine."""

MODEL = """
import torch, torch.distributed as dist
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
trained = [0.0]
"""


def opened(place: Any, nproc: int, **options: Any) -> nblaunch.Session:
    """Open a session whose ranks hold something to lose."""
    session: nblaunch.Session = place(nproc, **options)
    session.cell("import sys; print(); print(file=sys.stderr)")  # it keeps these files open
    session.cell(MODEL)
    return session


@pytest.fixture(scope="module", params=sampled([2, 4], ci=1), ids=["2 ranks", "4 ranks"])
def session(request, place):
    """Give one session to all tests that cost no rank."""
    usual(2)
    with opened(place, request.param) as made:
        yield made


@pytest.fixture
def open_session(place):
    """Give `open_session(nproc, **options)`: sessions of the test's own."""
    made: list[nblaunch.Session] = []

    def make(nproc: int, **options: Any) -> nblaunch.Session:
        made.append(opened(place, nproc, **options))
        return made[-1]

    usual(2)
    yield make
    for each in made:
        each.close()


def size(session: nblaunch.Session) -> int:
    return session.status().world_size


def nothing_is_lost(session: nblaunch.Session) -> None:
    """Check that parameters are still there, that a collective is right, and that no rank was replaced."""
    n = size(session)
    result = session.cell(
        "t = torch.tensor([rank]); dist.all_reduce(t); t.item(), model.weight.shape, trained"
    )
    assert [value[0] for value in result.values] == [sum(range(n))] * n
    assert {tuple(value[1]) for value in result.values} == {(2, 4)}
    assert all(value[2] for value in result.values)
    assert result.warnings == ()
    assert session.status().attempt == 0


def works_with_empty_ranks(session: nblaunch.Session) -> None:
    n = size(session)
    result = session.cell(
        "import torch, torch.distributed as dist\n"
        "t = torch.tensor([rank]); dist.all_reduce(t); t.item(), 'model' in globals(), print('out')"
    )
    assert result.values == [(sum(range(n)), False, None)] * n
    assert [each.stdout for each in result.ranks] == ["out\n"] * n
    assert (result.ok, result.warnings, len(result.attempts)) == (True, (), 1)


def works_without(session: nblaunch.Session, dead: int) -> None:
    """Check that a rank that has died is back, and that the others have lost nothing."""
    n = size(session)
    result = session.cell(
        "import torch, torch.distributed as dist\n"
        "t = torch.tensor([rank]); dist.all_reduce(t); t.item(), 'model' in globals(), print('out')"
    )
    assert [total for total, *_ in result.values] == [sum(range(n))] * n
    assert all(has for rank, (_, has, _) in enumerate(result.values) if rank != dead)
    assert [each.stdout for each in result.ranks] == ["out\n"] * n
    assert any(each.startswith(f"rank {dead} is back: ") for each in result.warnings), result.warnings
    assert session.run(int).warnings == ()


def failing(session: nblaunch.Session, job: Any, **keywords: Any) -> nblaunch.RunFailedError:
    """Run a function, or a cell, that must fail, soon."""
    started = time.monotonic()
    run = session.cell if isinstance(job, str) else session.run
    with pytest.raises(nblaunch.RunFailedError) as caught:
        run(job, **keywords)
    assert soon(time.monotonic() - started, 2, SETTLED)
    assert caught.value.result is not None
    return caught.value


# --- a Python error --------------------------------------------------------------------------------


@pytest.mark.quick
def test_an_error_on_all_ranks_costs_nothing_and_no_group_is_formed_again(session, place):
    for _ in range(3):
        error = failing(session, "1 / 0")
        n = size(session)
        of = f" of {n}" if place.nodes == 1 else ""
        assert str(error).startswith(f"{place.named(*range(n), of=n)}{of} failed: ZeroDivisionError")
        assert error.result.warnings == ()
        assert [each.exitcode for each in error.result.ranks] == [1] * size(session)
    nothing_is_lost(session)


def test_an_error_on_one_rank_while_no_other_waits_costs_nothing(session):
    error = failing(session, "half = 'done'\nif rank == 1: raise LookupError('nothing there')\n'a value'")
    assert (error.root_cause.rank, error.root_cause.message) == (1, "nothing there")
    assert error.result.values[0] == "a value"
    assert set(session.pull("half")["half"]) == {"done"}, "what was bound before it is kept"
    assert error.result.warnings == ()
    nothing_is_lost(session)


def test_one_rank_raises_while_the_others_sit_in_all_reduce(session):
    rank = size(session) - 1
    error = failing(session, on_ranks({rank}, fail))
    assert (error.root_cause.rank, error.root_cause.reason.partition(" (")[0]) == (
        rank,
        "LookupError: nothing there",
    )
    others = [each for each in error.result.ranks if each.rank != rank]
    assert {str(each.state) for each in others} <= {"STOPPED", "FAILED"}
    assert {each.failure.consequence_of for each in others if each.failure} <= {rank}
    assert error.result.warnings == (REFORMED,)
    nothing_is_lost(session)


def test_sys_exit_in_a_session_is_a_failure_and_no_end(session):
    error = failing(session, on_ranks({1}, lambda: sys.exit(3)))
    assert (error.root_cause.rank, error.root_cause.type) == (1, "builtins.SystemExit")
    assert error.root_cause.exitcode == 3
    nothing_is_lost(session)


def test_sys_exit_without_a_code_ends_the_job_of_a_rank_well(session):
    assert session.run(on_ranks({1}, sys.exit, lambda: "kept")).values[:2] == ["kept", None]
    assert set(session.cell("exit()").values) == {None}
    nothing_is_lost(session)


def test_a_rank_that_eats_all_its_memory_keeps_its_variables(session):
    source = """
    import psutil, resource
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        eaten = bytearray(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    """
    error = failing(session, textwrap.dedent(source), ranks=[1])
    assert error.root_cause.type == "builtins.MemoryError"
    nothing_is_lost(session)


# --- collectives that never end --------------------------------------------------------------------


def failing_cell(
    session: nblaunch.Session, source: str, options: nblaunch.LaunchOptions
) -> nblaunch.RunFailedError:
    """Run a cell with options of its own, as the magic does."""
    from nblaunch.protocol.messages import CellJob

    job = CellJob(source, "<session cell>", "session cell", first_line=1)
    finished = session._live.prepare_cell(job, cell_names(source), {}, options=options)(None)
    assert isinstance(finished.error, nblaunch.RunFailedError)
    return finished.error


def test_two_ranks_that_wait_for_each_other_are_freed_by_the_timeout(session, place):
    source = "if rank < 2:\n    dist.recv(torch.ones(1), src=1 - rank)"
    error = failing_cell(session, source, nblaunch.LaunchOptions(timeout=1))
    assert isinstance(error, nblaunch.RunTimeoutError)
    assert f"[{place.named(0, 1, of=size(session))}] in recv, session cell, line 2" in str(error)
    assert error.result.warnings[-1] == REFORMED
    nothing_is_lost(session)


def test_a_collective_that_only_some_ranks_were_asked_for_is_freed(session):
    """The others are idle, and would never come."""
    options = nblaunch.LaunchOptions(timeout=1)
    source = "dist.all_reduce(torch.ones(1))"
    from nblaunch.protocol.messages import CellJob

    job = CellJob(source, "<session cell>", "session cell", first_line=1)
    finished = session._live.prepare_cell(job, cell_names(source), {}, ranks=[1], options=options)(None)
    assert isinstance(finished.error, nblaunch.RunTimeoutError)
    assert finished.result is not None
    assert finished.result.warnings[-1] == REFORMED
    nothing_is_lost(session)


@pytest.mark.skipif(in_place.torch_can(), reason="it goes on: tests/ranks/test_session_in_place.py")
def test_a_group_of_the_users_own_is_gone_only_when_it_is_said_to_be(session):
    session.cell("mine = dist.new_group([0, 1])")
    use = "t = torch.ones(1)\nif rank < 2: dist.all_reduce(t, group=mine)\nt.item()"
    assert session.cell(use).values[:2] == [2.0, 2.0]
    assert failing(session, "1 / 0").result.warnings == ()
    assert session.cell(use).values[:2] == [2.0, 2.0]
    reformed, gone = failing(session, on_ranks({0}, fail)).result.warnings
    assert reformed == REFORMED
    where = "" if size(session) == 2 else " on ranks 0-1"
    assert gone.endswith(f": mine{where} (mine = dist.new_group(ranks=[0, 1]))")
    assert failing(session, use).result.warnings == (gone,)
    session.cell("mine = dist.new_group([0, 1])")
    assert session.cell(use).values[:2] == [2.0, 2.0]
    session.cell("del mine")
    nothing_is_lost(session)


def test_a_group_that_the_user_has_made_anew_is_formed_again_too(session):
    session.cell("dist.destroy_process_group(); dist.init_process_group('gloo')")
    assert failing(session, on_ranks({0}, fail)).result.warnings == (REFORMED,)
    nothing_is_lost(session)


@pytest.mark.slow_at("2 ranks-machine-10")
@pytest.mark.parametrize("times", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_many_heals_in_a_row(session, times):
    session.cell("trained = [0]")
    for number in range(times):
        error = failing(
            session, f"trained[0] = {number}\nif rank: raise ValueError({number})\ndist.barrier()"
        )
        assert error.result.warnings == (REFORMED,)
        assert session.cell("dist.all_reduce(torch.ones(1)); trained").values == [[number]] * size(session)
    nothing_is_lost(session)


# --- interrupts ------------------------------------------------------------------------------------

TRAIN = """
import pathlib
step = 0
while True:
    model.zero_grad()
    model(torch.ones(8, 4) * rank).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.01 * parameter.grad
    step += 1
    trained = [step]
    if step == 5:
        (pathlib.Path(flags) / str(rank)).touch()
"""


def interrupted(session: nblaunch.Session, source: str, flags: Path, eventually: Any) -> KeyboardInterrupt:
    """Interrupt a cell, as the stop button does, once all its ranks are at work."""
    main = threading.main_thread().ident or 0

    def stop() -> None:
        eventually(lambda: len(list(flags.iterdir())) == size(session), "all ranks are at work", 30)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        session.cell(source, namespace={"flags": str(flags)})
    thread.join()
    return caught.value


def test_an_interrupt_in_a_training_loop_keeps_the_model(session, tmp_path, eventually):
    error = interrupted(session, TRAIN, tmp_path, eventually)
    assert "the run was interrupted: " in str(error)
    steps = session.pull("step")["step"]
    assert min(steps) >= 5
    assert max(steps) - min(steps) <= 1
    weights = session.pull("model")["model"]
    assert len(weights) == size(session)
    nothing_is_lost(session)


@pytest.mark.parametrize(
    "body",
    ["dist.barrier() if rank else time.sleep(1000)", "dist.recv(torch.ones(1), src=1 - rank % 2)"],
    ids=["barrier", "recv"],
)
def test_an_interrupt_wherever_ranks_are_costs_nothing(session, tmp_path, eventually, body):
    source = f"import pathlib, time\n(pathlib.Path(flags) / str(rank)).touch()\n{body}"
    interrupted(session, source, tmp_path, eventually)
    nothing_is_lost(session)


@pytest.mark.parametrize(
    "number", [0, *[pytest.param(each, marks=pytest.mark.slow) for each in range(1, 20)]]
)
def test_an_interrupt_at_a_random_time(session, number):
    """Also before the job has begun, and after it has ended: nothing is lost, and the session is not busy."""
    moment = random.Random(number).uniform(0, 0.15)
    timer = threading.Timer(moment, session.interrupt)
    timer.start()
    try:
        for _ in range(100):
            session.cell("trained = [1]; dist.barrier(); import time; time.sleep(0.001)")
    except KeyboardInterrupt:
        pass
    timer.join()
    nothing_is_lost(session)


EVERY_LINE = (
    INTERRUPTER
    + """
def run(interrupt=None):
    return traced(lambda: session.cell("kept").values, interrupt)

session = nblaunch.Session(**json.loads(sys.argv[5]), grace=2)
session.cell("kept = [rank]")
run()
file = sys.argv[4]
counted = Interrupt(-1, file)
run(counted)
assert counted.lines, "no such file, or it does nothing here"
lines = range(1, counted.lines + 1)
for at in sorted(random.Random(int(sys.argv[1])).sample(lines, min(int(sys.argv[2]), len(lines)))):
    interrupt = Interrupt(at, file)
    started = time.monotonic()
    try:
        run(interrupt)
    except KeyboardInterrupt:
        pass
    assert time.monotonic() - started < 3 + float(sys.argv[3]), ("took long", interrupt.where)
    assert run() == [[0], [1]], interrupt.where
    assert session.status().attempt == 0, interrupt.where
session.close()
print("done")
"""
)


@pytest.mark.parametrize(
    ("seed", "lines", "file"),
    [
        (0, 10, "/nblaunch/client/session.py"),
        pytest.param(1, 150, "/nblaunch/", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_an_interrupt_before_any_line_of_ours(seed, lines, file, tmp_path, place):
    """In the notebook's own process, wherever its main thread may be."""
    options = json.dumps(place.options(2))
    assert said_by(EVERY_LINE, tmp_path, seed, lines, 5, file, options) == "done\n"


def test_an_interrupt_of_idle_ranks_does_nothing(session):
    session.interrupt()
    nothing_is_lost(session)


# --- ranks that die --------------------------------------------------------------------------------


@pytest.mark.parametrize("death", ["os._exit(0)", "SIGKILL"])
def test_a_rank_that_dies_while_the_others_sit_in_all_reduce(open_session, death):
    action, exitcode, name, reason, _ = DEATHS[death]
    session = open_session(2)
    error = failing(session, on_ranks({1}, action))
    root = error.root_cause
    assert (root.rank, root.exitcode, root.signal) == (1, exitcode, name)
    assert root.reason.startswith(reason)
    assert root.last_output.endswith("rank 1 goes on")
    assert error.result.warnings == (lifecycle.STARTED_AGAIN.format(1),)
    works_without(session, 1)


def test_a_job_for_some_ranks_right_after_a_death_is_for_those_alone(open_session):
    """It is given while the new ranks are still being started."""
    session = open_session(2)
    failing(session, on_ranks({0}, lambda: os._exit(3)))
    result = session.cell("print('here'); rank", ranks=[1])
    assert (result.values, result.ranks.keys(), len(result.attempts)) == ([1], (1,), 1)
    assert result.ranks[1].stdout == "here\n"
    assert session.cell("rank").values == [0, 1]


@pytest.mark.parametrize("between", ["nothing", "push"])
def test_a_death_between_two_jobs_is_told_with_the_next(open_session, eventually, between):
    """That is, with the next whose result somebody sees."""
    session = open_session(2)
    os.kill(session.run(os.getpid)[1], signal.SIGKILL)
    eventually(lambda: session.status().attempt == 1, "the agent has noticed")
    if between == "push":
        session.push({"pushed": 1})
    result = session.cell("rank")
    assert result.values == [0, 1]
    assert any(each.startswith("rank 1 was killed by SIGKILL") for each in result.warnings)
    assert result.warnings[0].startswith("rank 1 is back: ")
    assert GONE not in result.warnings


def until_there(file: Path) -> str:
    while not file.exists():
        time.sleep(0.01)
    return "there"


@pytest.mark.quick
def test_an_idle_rank_that_dies_leaves_the_job_of_the_others_alone(open_session, eventually, tmp_path):
    session, file = open_session(2), tmp_path / "goes on"
    idle = session.run(os.getpid)[1]
    handle = session.submit(until_there, (file,), ranks=[0])
    eventually(lambda: session.status().ranks[0].state == "running", "rank 0 is at work")
    os.kill(idle, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(idle), "rank 1 has gone")
    file.touch()
    assert handle.result(30).values == ["there"]
    works_without(session, 1)


def test_a_stopped_rank_is_replaced_after_the_timeout(open_session):
    session = open_session(2, timeout=1, grace=0.5)
    with pytest.raises(nblaunch.RunTimeoutError, match=r"\[rank 1( on \S+)?\]"):
        session.run(on_ranks({1}, lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    works_with_empty_ranks(session)


def test_the_processes_of_a_rank_go_with_the_session(open_session, eventually):
    session = open_session(2)
    pids = [int(word) for word in session.run(lambda: grow_a_tree(8) and None).ranks[1].stdout.split()]
    assert all(map(psutil.pid_exists, pids))
    assert session.run(lambda: 1).ok, "they stay as long as the rank does"
    session.close()
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "the processes of a rank have gone with it")


# --- parts of nblaunch that break ------------------------------------------------------------------


@pytest.mark.slow_at("agent")
@pytest.mark.parametrize(
    ("blow", "said"),
    [
        (
            "from nblaunch.host.agent import RankAgent\nRankAgent._monitor_workers = lambda *_: 1 / 0",
            "phase 'job' broke: ZeroDivisionError",
        ),
        ("local.hub.call(local.hub._socket.close)", "nblaunch's runtime has ended, and all ranks with it"),
    ],
    ids=["agent", "hub"],
)
def test_a_session_that_cannot_go_on_says_so_and_the_next_one_works(poke, blow, said):
    session = nblaunch.Session(2)
    handle = session.submit(time.sleep, (1000,))
    poke(f"whole = __import__('nblaunch.host.agent', fromlist=['x']).RankAgent._monitor_workers\n{blow}")
    with pytest.raises(nblaunch.LaunchError, match=said):
        handle.result(30)
    with pytest.raises(nblaunch.LaunchError, match="session 'default' has ended"):
        session.cell("1")
    if "Agent" in blow:
        poke("RankAgent._monitor_workers = whole")
    with nblaunch.Session(2) as another:
        assert another.run(int).values == [0, 0]
    session.close()


@pytest.mark.slow
def test_a_group_that_cannot_be_formed_again_is_replaced(poke, open_session):
    session = open_session(2, grace=0.2)
    # As if a rank never came back.
    poke("from nblaunch.group.recovery import Recovery\nwhole = Recovery.recovered")
    poke("Recovery.recovered = lambda recovery, _: (recovery, None)\n")
    result = session.run(on_ranks({1}, fail), check=False)
    poke("Recovery.recovered = whole")
    assert result.warnings[0] == "ranks did not come back within the grace period"
    assert result.warnings[-1] == GONE
    works_with_empty_ranks(session)


# --- nothing grows ---------------------------------------------------------------------------------

GROWTH = """
    import gc, json, os, sys, threading, time
    from pathlib import Path
    import psutil
    import torch
    import nblaunch

    def job(number):
        print("some words of output", number)
        return torch.ones(300_000)

    session = nblaunch.Session(**json.loads(sys.argv[4]))
    pids = session.run(os.getpid).values
    there = {"data": torch.ones(300_000), "number": 0}

    def cells(times):
        for number in range(times):
            there["number"] = number
            kind = number % 10
            if kind == 0:
                result = session.cell("raise ValueError(number)", namespace=there, check=False)
                assert not result.ok
            elif kind == 2:
                session.push({"pushed": torch.ones(300_000) * number})
            elif kind == 3:
                session.pull("pushed")
            elif kind == 4:
                session.run(job, (number,), ranks=[number // 10 % 2])
            elif kind == 5:
                session.run(job, (number,))
            elif kind == 6:
                session.submit(job, (number,)).result(30)
            elif kind == 7:
                session.cell("from IPython.display import display; display(data.sum())", namespace=there)
            else:
                result = session.cell("x = number + rank; print(x); data * 2", namespace=there)
                assert [each.stdout for each in result.ranks] == [f"{number}\\n", f"{number + 1}\\n"]

    def processes():
        return {str(each): psutil.Process(pid) for each, pid in enumerate([os.getpid(), *pids])}

    def counted():
        found = {name: [each.num_threads(), each.num_fds()] for name, each in processes().items()}
        return {**found, "/dev/shm": len(list(Path("/dev/shm").iterdir()))}

    def memory():
        return {name: each.memory_full_info().uss for name, each in processes().items()}

    warm_up, times, windows = map(int, sys.argv[1:4])
    cells(warm_up)
    gc.collect()
    before, used = counted(), [memory()]
    for _ in range(windows):
        cells(times)
        gc.collect()
        used.append(memory())
    deadline = time.monotonic() + 10
    while counted() != before and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    after = counted()
    session.close()
    print(json.dumps([before, after, used]))
"""


@pytest.mark.slow
def test_heals_let_nothing_grow_in_the_ranks(session):
    def heal(times: int) -> list[tuple[int, int]]:
        for _ in range(times):
            failing(session, "if rank: raise ValueError\ndist.barrier()")
        return [(each.num_threads(), each.num_fds()) for each in map(psutil.Process, session.run(os.getpid))]

    before = heal(3)
    assert heal(6) == before


@pytest.mark.parametrize(
    ("warm_up", "times", "windows"),
    [pytest.param(100, 250, 4, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=["1100 cells"],
)
def test_cells_in_one_session_let_nothing_grow(warm_up, times, windows, tmp_path, place):
    options = json.dumps(place.options(2))
    before, after, used = json.loads(said_by(GROWTH, tmp_path, warm_up, times, windows, options))
    assert after == before
    must_not_grow(used)


def test_what_the_others_do_meanwhile_is_a_collective(session):
    """The jobs of these tests are what they say they are."""
    assert session.run(wait_for_the_others).values == [float(size(session))] * size(session)
