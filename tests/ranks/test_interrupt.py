"""The stop button ends a run at any moment of it, soon, with KeyboardInterrupt, and the next run works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from lanes import sampled, slow
from sources import INTERRUPTER, said_by

GRACE = 2.0


# All below the kernel but the keeper, the fork server and the runtime.
RANKS_LEFT = "list(map(str, __import__('psutil').Process().children(recursive=True)))[3:]"


def works_again(kernel):
    kernel.ok("%%distributed -n 2 --out again\nrank + 1")
    assert kernel.value("again.values") == [1, 2]
    # Ranks that have succeeded leave while the notebook goes on.
    deadline = time.monotonic() + 30
    while left := kernel.value(RANKS_LEFT):
        assert time.monotonic() < deadline, left


# --- at any moment ---------------------------------------------------------------------------------


EVERY_LINE = (
    INTERRUPTER
    + """
def run(interrupt=None):
    return traced(lambda: nblaunch.run(job, nproc=2, grace=2).values, interrupt)

def job():
    return 1

def left():
    found = [each.pid for each in psutil.Process().children(recursive=True)][3:]
    found += [each.name for each in threading.enumerate() if each.name.startswith("nblaunch-")]
    return found

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
        assert interrupt.where is None, ("not interrupted", interrupt.where)
    except KeyboardInterrupt:
        pass
    assert time.monotonic() - started < 3 + float(sys.argv[3]), ("took long", interrupt.where)
    deadline = time.monotonic() + 5
    while left():
        assert time.monotonic() < deadline, (left(), interrupt.where)
        time.sleep(0.01)
    assert run() == [1, 1], interrupt.where
print("done")
"""
)


@pytest.mark.parametrize(
    ("seed", "lines", "file"),
    [
        slow((0, 6, "/nblaunch/client/run.py")),
        pytest.param(1, 600, "/nblaunch/", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_an_interrupt_before_any_line_of_ours(seed, lines, file, tmp_path):
    """In the notebook's own process, wherever its main thread may be."""
    assert said_by(EVERY_LINE, tmp_path, seed, lines, 5, file) == "done\n"


# --- in each phase ---------------------------------------------------------------------------------


def interrupted(kernel, cell, reached, eventually, interrupts=1):
    """Interrupt a cell once it has reached what it is to be interrupted in; return what came of it."""
    pending = kernel.submit(cell)
    eventually(reached, "the cell is where it is to be interrupted", 30)
    kernel.interrupt()
    began = time.perf_counter()
    for _ in range(interrupts - 1):
        time.sleep(0.5)
        kernel.interrupt()
    ran = pending.finish()
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    return ran, time.perf_counter() - began


SLOW = """
import pathlib, time

class Slow:
    # Takes for ever to be packed, or to be unpacked, the first time.
    def __init__(self, flag, where):
        self.flag, self.where = flag, where
    def __reduce__(self):
        if self.where == "packed":
            reach(self.flag)
        return unpacked, (self.flag, self.where)

def unpacked(flag, where):
    if where == "unpacked":
        reach(flag)
    return "unpacked"

def reach(flag):
    path = pathlib.Path(flag)
    if not path.exists():
        path.touch()
        time.sleep(1000)
"""


def test_while_values_are_captured(kernel, tmp_path, eventually):
    flag = tmp_path / "flag"
    kernel.ok(f"{SLOW}\nslow = Slow({str(flag)!r}, 'packed')")
    _, seconds = interrupted(kernel, "%%distributed -n 2\nslow", flag.exists, eventually)
    assert seconds < 1 + GRACE
    works_again(kernel)


def test_while_the_fork_server_starts(kernel, eventually):
    """It imports torch: the cell does not wait for the end of that, nor for the grace period."""
    kernel.ok("from nblaunch.client.local import local\nlocal().close()")

    def keeper():
        return psutil.Process(kernel.pid).children()

    ran, seconds = interrupted(kernel, "%%distributed -n 2 --grace 60\nrank", keeper, eventually)
    assert seconds < 30
    assert ran.error.ename == "KeyboardInterrupt"
    works_again(kernel)


STOPS_WHEN_IT_HAS_STARTED = """
import os, signal
from nblaunch import _keeper
start = _keeper.start
def start_and_interrupt(*args, **options):
    _keeper.start = start
    keeper = start(*args, **options)
    os.kill(os.getpid(), signal.SIGINT)
    return keeper
_keeper.start = start_and_interrupt
"""


def test_at_the_moment_in_which_the_runtime_has_been_started(kernel):
    """The next cell uses that runtime: another one would find its sockets taken."""
    kernel.ok("from nblaunch.client.local import local\nlocal().close()" + STOPS_WHEN_IT_HAS_STARTED)
    assert kernel.run("%%distributed -n 2\nrank").error.ename == "KeyboardInterrupt"
    works_again(kernel)


DROPPED = """
import gc, os, signal, sys

def stop(phase, info):
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_follow":
        frame = frame.f_back
    if frame is not None and signal.getsignal(signal.SIGINT).__name__ != "note":  # it is not put off just now
        gc.callbacks.remove(stop)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the handler of SIGINT has not run yet")

gc.callbacks.append(stop)
gc.set_threshold(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["%%distributed -n 2 --grace 2", "%distributed start -n 2"])
def test_where_python_drops_the_exception_of_the_stop_button(start_kernel, first):
    """It drops what is raised within `__del__`, and within callbacks of gc and of weak references."""
    kernel = start_kernel()
    if "start" in first:
        kernel.ok(first)
    kernel.ok(DROPPED)
    header = "%%distributed" if "start" in first else first
    ran = kernel.run(f"{header}\nimport time\nfor step in range(600):\n    print(step)\n    time.sleep(0.1)")
    assert ran.error is not None, ran
    assert ran.error.ename == "KeyboardInterrupt"
    assert "Exception ignored" in ran.stderr


@pytest.mark.parametrize("where", ["packed", "unpacked"])
def test_while_a_value_is_on_its_way(kernel, tmp_path, eventually, where):
    flag = tmp_path / "flag"
    kernel.ok(SLOW)
    cell = f"%%distributed -n 2 --grace 1 --out res\nSlow({str(flag)!r}, {where!r}) if rank else 'quick'"
    _, seconds = interrupted(kernel, cell, flag.exists, eventually)
    assert seconds < 1 + 1 + GRACE
    assert kernel.value("res[0]") == "quick"
    assert kernel.value("str(res.ranks[1].state)") == ("STOPPED" if where == "packed" else "SUCCEEDED")
    works_again(kernel)


@pytest.mark.quick
@pytest.mark.parametrize(
    "body",
    sampled(
        [
            "dist.all_reduce(torch.ones(1)) if rank else time.sleep(1000)",
            "dist.recv(torch.ones(1), src=(rank + 1) % 4)",
        ]
    ),
    ids=["all_reduce", "a circle of recv"],
)
def test_ranks_that_are_stuck_in_a_collective_are_freed_within_the_grace_period(
    kernel, tmp_path, eventually, body
):
    cell = f"""
        %%distributed -n 4 --grace 60 --out res
        import pathlib, time, torch, torch.distributed as dist
        print("here")
        pathlib.Path({str(tmp_path)!r}, str(rank)).touch()
        {body}
        """
    ran, seconds = interrupted(kernel, cell, lambda: len(list(tmp_path.iterdir())) == 4, eventually)
    assert seconds < 30
    assert "rank" in ran.error.evalue
    assert kernel.value("[str(each.state) for each in res.ranks]") == ["STOPPED"] * 4
    assert kernel.value("[each.stdout for each in res.ranks]") == ["here\n"] * 4
    assert kernel.value("res.failures") == []
    works_again(kernel)


RESIST = """
    %%distributed -n 2 --grace {grace} --out res
    import pathlib, signal, time
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pathlib.Path({directory!r}, str(rank)).touch()
    {body}
"""


@pytest.mark.parametrize(
    "body", ["time.sleep(1000)", "sum(range(10**12))"], ids=["ignores signals", "holds the interpreter"]
)
def test_ranks_that_do_not_listen_are_gone_after_the_grace_period(kernel, tmp_path, eventually, body):
    cell = RESIST.format(grace=1, directory=str(tmp_path), body=body)
    _, seconds = interrupted(kernel, cell, lambda: len(list(tmp_path.iterdir())) == 2, eventually)
    # Asked where they are, and read by faulthandler, before the grace period begins.
    assert 1 <= seconds < 1 + 1 + 2 + GRACE
    assert kernel.value("[[str(each.state), each.exitcode] for each in res.ranks]") == [["STOPPED", -9]] * 2
    works_again(kernel)


def test_a_second_interrupt_skips_the_grace_period(kernel, tmp_path, eventually):
    cell = RESIST.format(grace=60, directory=str(tmp_path), body="time.sleep(1000)")
    _, seconds = interrupted(
        kernel, cell, lambda: len(list(tmp_path.iterdir())) == 2, eventually, interrupts=2
    )
    assert seconds < 30
    assert kernel.value("[[str(each.state), each.exitcode] for each in res.ranks]") == [["STOPPED", -9]] * 2
    works_again(kernel)


# --- what is kept, and what is no interrupt --------------------------------------------------------


@pytest.mark.quick
def test_the_result_so_far_is_kept(kernel, tmp_path, eventually):
    at_work, under_way = tmp_path / "at work", tmp_path / "under way"
    cell = f"""
        %%distributed -n 2 --out res
        import pathlib, time
        if rank:
            print("printed before the interrupt"); pathlib.Path({str(at_work)!r}).touch()
            time.sleep(1000)
        class Value:
            def __reduce__(self):  # called when the value leaves
                pathlib.Path({str(under_way)!r}).touch()
                return str, ("the value of rank 0",)
        Value()
        """

    def reached() -> bool:
        # Rank 0 calls its exit functions before it says that it has returned.
        return bool(at_work.exists() and under_way.exists() and time.time() > under_way.stat().st_mtime + 0.3)

    ran, _ = interrupted(kernel, cell, reached, eventually)
    assert kernel.value("res.values") == ["the value of rank 0", None]
    assert kernel.value("res.ranks[1].stdout") == "printed before the interrupt\n"
    assert "[rank 1] at cell line 5: time.sleep(1000)" in ran.error.evalue
    assert "[rank 0] had finished" in ran.error.evalue
    assert kernel.value("[group.ranks for group in res.hang_report.groups]") == [[1]]
    assert kernel.value("res.hang_report.finished") == [0]


def test_a_restart_is_not_begun_after_an_interrupt(kernel, tmp_path, eventually):
    cell = f"""
        %%distributed -n 2 --max-restarts 5 --out res
        import os, pathlib, time
        pathlib.Path({str(tmp_path)!r}, str(rank)).touch()
        time.sleep(1000)
        """
    interrupted(kernel, cell, lambda: len(list(tmp_path.iterdir())) == 2, eventually)
    assert kernel.value("[len(res.attempts), len(res.failures)]") == [1, 0]


def test_control_c_ends_a_script_as_a_keyboard_interrupt_does(tmp_path, eventually):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, time
            import nblaunch

            def job():
                pathlib.Path({str(tmp_path)!r}, "rank-" + os.environ["RANK"]).touch()
                time.sleep(1000)

            nblaunch.run(job, nproc=2)
            """
        )
    )
    # In a session of its own, as in a terminal: Ctrl-C goes to all its processes.
    with subprocess.Popen(
        [sys.executable, str(program)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        eventually(lambda: len(list(tmp_path.glob("rank-*"))) == 2, "the ranks are at work", 30)
        os.killpg(started.pid, signal.SIGINT)
        _, stderr = started.communicate(timeout=30)
    assert started.returncode == -signal.SIGINT
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("KeyboardInterrupt: the run was interrupted: [ranks 0-1] at ")
    assert json.dumps(last).count("time.sleep(1000)") == 1
