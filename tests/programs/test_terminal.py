"""A run in a terminal: lines as they come, a status line below them while it lasts, and then none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pyte
import pytest

STATUS = re.compile(r"^\[nblaunch\] (.*)$", re.MULTILINE)
PATIENCE = 100.0


class Emulator(pyte.HistoryScreen):
    """A terminal that also answers programs which ask where the cursor is."""

    def __init__(self, columns, lines, answer):
        self._answer = answer
        super().__init__(columns, lines, history=10_000)

    def write_process_input(self, data):
        self._answer(data.encode())


class Session:
    """A program in a real pseudo-terminal, its output drawn by a terminal emulator."""

    def __init__(self, command, columns=80, lines=24, **environment):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen = Emulator(columns, lines, self.type)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.seen = []
        """Every status line that was ever to be seen."""
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - so that ^C is a signal
        )  # fmt: skip
        os.close(slave)

    @property
    def text(self):
        """What has scrolled away and what is on the screen, without blank ends."""
        above = [
            "".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top
        ]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display]).rstrip("\n")

    def type(self, data):
        """Do what a keyboard does."""
        os.write(self._master, data)

    def read_until(self, condition, what):
        """Draw what the program writes until `condition()`, or its end where that is None."""
        deadline = time.monotonic() + PATIENCE
        while condition is None or not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {PATIENCE} s: {what}; the screen is\n{self.text}")
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:
                data = b""  # Linux's way to say that nobody has the terminal open any more
            if not data:
                if condition is not None:
                    pytest.fail(f"the program ended before that: {what}; the screen is\n{self.text}")
                break
            self.raw += data
            self._stream.feed(data)
            self.seen += STATUS.findall(self.text)

    def end(self):
        """Wait for the program's end; return its exit code."""
        self.read_until(None, "the program ends")
        return self._process.wait(PATIENCE)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.fixture
def terminal_of(tmp_path):
    """Give `terminal_of(source, columns, lines, **environment)`: a script that runs in a terminal."""
    sessions = []

    def start(source, **options):
        path = tmp_path / "script.py"
        path.write_text("import nblaunch, time\n" + textwrap.dedent(source))
        root = str(Path(__file__).parents[2])
        sessions.append(Session([sys.executable, str(path)], PYTHONPATH=root, **options))
        return sessions[-1]

    yield start
    for each in sessions:
        each.close()


TALK = """
def job(path):
    import os, time, torch.distributed as dist
    for word in ("hello", "good-bye"):
        if dist.get_rank() == 0:
            print(word)
        dist.barrier()
        if dist.get_rank() == 1:
            print(word)
        while not os.path.exists(path):
            time.sleep(0.01)
    return dist.get_rank()
print("before", end="", flush=True)
nblaunch.run(job, (path,), nproc=2, display=True)
print("after")
"""


@pytest.mark.slow_at("30-3")
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (30, 3)])
def test_lines_come_live_above_a_status_line_that_is_gone_in_the_end(terminal_of, tmp_path, columns, lines):
    end = tmp_path / "end"
    session = terminal_of(f"path = {str(end)!r}\n{TALK}", columns=columns, lines=lines)
    session.read_until(lambda: session.text.count("hello") == 2, "both ranks say hello")
    session.read_until(lambda: any(", 1 s" in each for each in session.seen), "a second passes")
    # What the program had begun to write has its place, and the status is one line, below the cursor's.
    *lines_above, cursor, status = session.text.splitlines()
    assert lines_above[0].startswith("before")
    assert sorted(each.removeprefix("before") for each in lines_above) == ["[rank 0] hello", "[rank 1] hello"]
    assert cursor == ""
    assert re.fullmatch(r"\[nblaunch\] 2 running, \d+ s", status)
    end.touch()
    assert session.end() == 0
    assert session.text.splitlines() == [
        "before[rank 0] hello",
        "[rank 1] hello",
        "[rank 0] good-bye",
        "[rank 1] good-bye",
        "rank 0: 0",
        "rank 1: 1",
        "after",
    ]


def test_an_interrupt_leaves_no_status_line(terminal_of, tmp_path):
    session = terminal_of(f"path = {str(tmp_path / 'never')!r}\n{TALK}")
    session.read_until(lambda: session.text.count("hello") == 2, "both ranks say hello")
    session.read_until(lambda: session.seen, "there is a status line")
    session.type(b"\x03")
    assert session.end() != 0
    assert "[nblaunch]" not in session.text
    assert "KeyboardInterrupt" in session.text


@pytest.mark.slow
def test_what_the_program_prints_meanwhile_stands_on_lines_of_its_own(terminal_of, tmp_path):
    """However much of it, and whichever stream it goes to."""
    go, end = tmp_path / "go", tmp_path / "end"
    source = f"""
    import os, sys, threading
    path = {str(end)!r}
    def also():
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        for number in range(100):
            time.sleep(0.02)
            stream = sys.stderr if number % 2 else sys.stdout
            print(f"also {{number}}\\nand {{number}}", file=stream, flush=True)
        open(path, "w").close()
    threading.Thread(target=also).start()
    before = sys.stdout, sys.stderr
    """
    session = terminal_of(textwrap.dedent(source) + TALK + "assert (sys.stdout, sys.stderr) == before")
    session.read_until(lambda: session.seen, "there is a status line")
    go.touch()
    assert session.end() == 0
    lines = [line.removeprefix("before") for line in session.text.splitlines()]
    theirs = [line for line in lines if line.startswith(("also", "and"))]
    assert theirs == [f"{word} {number}" for number in range(100) for word in ("also", "and")]
    assert "[nblaunch]" not in session.text


def test_what_is_no_terminal_gets_no_control_characters(script, tmp_path):
    (tmp_path / "end").touch()
    ran = script(f"import nblaunch\npath = {str(tmp_path / 'end')!r}\n{TALK}", env={"TERM": "xterm"})
    assert ran.returncode == 0
    assert "\x1b" not in ran.stdout + ran.stderr
    assert "[ranks 0-1] good-bye" in ran.stdout
    assert "[nblaunch]" not in ran.stdout


def test_a_cell_in_terminal_ipython_comes_live_and_the_prompt_is_clean_after_it(tmp_path):
    command = [sys.executable, "-m", "IPython", "--no-banner", "--ext=nblaunch", "--no-confirm-exit"]
    root = str(Path(__file__).parents[2])
    session = Session(command, PYTHONPATH=root, columns=100, IPYTHONDIR=str(tmp_path))
    try:
        session.read_until(lambda: "In [1]:" in session.text, "there is a prompt")
        session.type(b"%%distributed -n 2\r")
        session.read_until(lambda: "...:" in session.text, "the cell goes on")
        session.type(b"import time; print('hello'); time.sleep(1.5); rank\x1b\r")  # escape, return: run it
        session.read_until(lambda: "In [2]:" in session.text, "there is the next prompt")
        text = session.text
        assert any("2 running" in each for each in session.seen)
        assert "[nblaunch]" not in text
        cell, _, _ = text.partition("In [2]:")
        *printed, first, second = cell.rstrip().splitlines()[-4:]
        assert (sorted(printed), first, second) == (
            ["[rank 0] hello", "[rank 1] hello"],
            "rank 0: 0",
            "rank 1: 1",
        )
        session.type(b"exit\r")
        assert session.end() == 0
    finally:
        session.close()
