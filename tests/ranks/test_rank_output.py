"""What ranks print is complete and in order: threads, programs that they start, and between two cells."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

import nblaunch


def printed(fn, nproc=1):
    """Return what rank 0 wrote to stdout, and what a view shows of both streams."""
    result = nblaunch.run(fn, nproc=nproc, display=False)
    assert result.state is not None
    shown = "".join(getattr(each, "text", "") for each in result.state.ranks[0].transcript.entries)
    return result.ranks[0].stdout, shown


# --- threads -----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_lines_of_several_threads_do_not_run_together():
    def work():
        import threading

        from nblaunch.rank import stdio

        stdio._HELD_SECONDS = 60  # a busy machine may stop a thread within a line

        def talk(number):
            for line in range(300):
                print("thread", number, "line", line)

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        talk(4)
        for each in threads:
            each.join()

    lines = printed(work)[0].splitlines()
    assert [line for line in lines if not re.fullmatch(r"thread \d line \d+", line)] == []
    for number in range(5):
        own = [line for line in lines if line.startswith(f"thread {number}")]
        assert own == [f"thread {number} line {line}" for line in range(300)]


def test_what_a_thread_has_not_ended_with_a_line_end_is_there_too():
    def work():
        import sys
        import threading

        def begin():
            print("begun", end="")

        def bar():
            print("\r 50%", end="", file=sys.stderr, flush=True)

        for target in (begin, bar):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    stdout, shown = printed(work)
    assert stdout == "begun"
    assert "50%" in shown


def test_a_line_that_is_begun_alone_is_in_the_file_before_it_ends():
    """Nobody else writes: then what was printed is there even after SIGKILL."""

    def work():
        import os
        import signal

        print("begun, ", end="")
        print("going on", end="")
        os.kill(os.getpid(), signal.SIGKILL)

    result = nblaunch.run(work, nproc=1, display=False, check=False)
    assert result.ranks[0].stdout == "begun, going on"


# --- programs ----------------------------------------------------------------------------------------


def test_a_program_that_opens_dev_stdout_does_not_empty_the_log():
    def work():
        import os
        import subprocess
        import sys

        print("before")
        subprocess.run("echo shell > /dev/stdout; echo again > /dev/stdout", shell=True, check=True)  # noqa: S602
        print("between")
        code = os.system("echo tee | tee /dev/stderr > /dev/null; echo system > /dev/stdout; exit 3")
        print("after", os.waitstatus_to_exitcode(code))
        sys.stdout.flush()

    stdout, shown = printed(work)
    assert stdout.split() == ["before", "shell", "again", "between", "system", "after", "3"]
    assert sorted(shown.split()) == sorted([*stdout.split(), "tee"])


def test_a_program_that_writes_much_and_binary_loses_nothing():
    def work():
        import subprocess
        import sys

        # Flushed: Python writes bytes before a text that it still holds.
        text = "print(*['x' * 99] * 20_000, sep='\\n', flush=True)"
        code = f"import sys; {text}; sys.stdout.buffer.write(b'\\xff\\n')"
        subprocess.run([sys.executable, "-c", code], check=True)
        print("after")

    lines = printed(work)[0].splitlines()
    assert lines[:-2] == ["x" * 99] * 20_000
    assert lines[-2:] == ["\ufffd", "after"]


def test_a_forked_process_of_a_rank_prints_and_starts_programs():
    def work():
        import os
        import subprocess
        import sys

        print("parent")
        subprocess.run(["echo", "program of the parent"], check=True)
        child = os.fork()
        if not child:
            print("child")
            subprocess.run(["echo", "program of the child"], check=True)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print("end")

    assert printed(work)[0].splitlines() == [
        "parent",
        "program of the parent",
        "child",
        "program of the child",
        "end",
    ]


# --- between two cells -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(place):
    with place(2, display=False) as opened:
        # Both log files are open from now on.
        opened.cell("import sys; print(); print(file=sys.stderr)", namespace={})
        yield opened


@pytest.mark.quick
def test_what_a_thread_prints_between_two_cells_is_in_the_next_result(session, eventually, tmp_path):
    started = """
import sys, threading, time
from pathlib import Path
def late():
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    print("late word")
    print("late error", file=sys.stderr)
    Path(folder, f"gone-{rank}").touch()
threading.Thread(target=late).start()
"""
    first = session.cell(started, namespace={"folder": str(tmp_path)})
    (tmp_path / "go").touch()
    eventually(lambda: len(list(tmp_path.glob("gone-*"))) == 2, "both threads have printed")
    # What the user does not see as a run does not take it.
    session.push({"other": 1})
    session._live.complete("oth", 3)
    eventually(lambda: not session._live.busy, "no rank is at work on that any more")
    second = session.cell("print('second')", namespace={})
    assert first.ranks[0].stdout == ""
    assert second.ranks[1].stdout == "late word\nsecond\n"
    assert second.ranks[1].stderr == "late error\n"
    (warning,) = second.warnings
    assert warning.startswith("threads of an earlier cell printed before this one began")
    assert session.cell("print('third')", namespace={}).ranks[0].stdout == "third\n"


# --- completion --------------------------------------------------------------------------------------


def test_completion_does_not_wait_for_a_rank_that_cannot_answer(session):
    session.cell("stopped_name = 1", namespace={})
    assert session._live.complete("stopped_na", 10) == (10, ["stopped_name"])
    pid = session.status().ranks[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert session._live.complete("x = stopped_na", 14) == (10, ["stopped_name"])
        assert session._live.complete("stopped_name.re", 15) == (0, [])
        assert time.monotonic() - begun < 3
    finally:
        os.kill(pid, signal.SIGCONT)
    assert session.cell("stopped_name", namespace={}).values == [1, 1]


def test_completion_does_not_wait_for_what_takes_long_and_the_next_cell_does(session):
    slow = """
import time
class Slow:
    def __dir__(self):
        time.sleep(3)
        return []
slow_thing = Slow()
"""
    session.cell(slow, namespace={})
    begun = time.monotonic()
    assert session._live.complete("slow_thing.", 11) == (0, [])
    assert time.monotonic() - begun < 2.9
    assert session._live.busy
    assert session.cell("rank", namespace={}).values == [0, 1]
