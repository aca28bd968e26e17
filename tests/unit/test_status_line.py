"""The status line of a run in a terminal: one line, whatever the terminal is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios

import pyte
import pytest
from shown_runs import err, returned, run_of

from nblaunch.protocol.messages import AttemptStarted, Exited
from nblaunch.protocol.state import advance
from nblaunch.view.summary import elapsed
from nblaunch.view.terminal_view import Terminal

STATUS = re.compile(r"^\[nblaunch\] (.*)$", re.MULTILINE)


class Screen:
    """A pseudo-terminal with nobody else in it: what is written there, and how that looks."""

    def __init__(self, columns, encoding):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding=encoding)
        self.emulator = pyte.Screen(columns, 24)
        self._feed = pyte.ByteStream(self.emulator)
        self.raw = b""

    @property
    def lines(self):
        """Return the lines that are to be seen now."""
        while select.select([self._master], [], [], 0)[0]:
            data = os.read(self._master, 65536)
            self.raw += data
            self._feed.feed(data)
        return "\n".join(line.rstrip() for line in self.emulator.display).rstrip().split("\n")

    def close(self):
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def screen_of(monkeypatch):
    """Give `screen_of(columns, encoding)`."""
    monkeypatch.setenv("TERM", "xterm")
    made = []

    def make(columns=80, encoding="utf-8"):
        made.append(Screen(columns, encoding))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_status_says_how_many_ranks_are_how_far_since_when_and_in_which_attempt(screen_of):
    screen, seconds = screen_of(), iter([0.0, 75.9, 76.0, 77.0])
    terminal = Terminal(screen.stream, clock=lambda: next(seconds))
    state = advance(run_of(4), returned(1))
    terminal.draw(advance(state, Exited(rank=2, exitcode=-9, time=2.0)))
    assert screen.lines == ["", "[nblaunch] 2 running, 1 succeeded, 1 failed, 1 min 15 s"]
    state = advance(state, AttemptStarted(number=1, world_size=4, time=3.0, reason="failure"))
    terminal.draw(state)
    assert screen.lines[-1] == "[nblaunch] 4 starting, attempt 1, 1 min 16 s"
    terminal.draw(state)
    terminal.close(state, "the end")
    assert screen.lines == ["attempt 0: restarted: the worker group changed", "the end"]


def test_the_status_of_a_run_that_began_before_is_as_old_as_the_run(screen_of):
    screen = screen_of()
    terminal = Terminal(screen.stream, clock=lambda: 5.0)
    terminal.open(65.0)
    terminal.draw(run_of(2))
    assert screen.lines[-1].endswith("1 min 05 s")
    terminal.close(run_of(2), "the end")


@pytest.mark.parametrize("columns", [1, 2, 12, 30, 60])
def test_the_status_is_one_line_however_narrow_the_terminal_is(screen_of, columns):
    screen = screen_of(columns)
    terminal = Terminal(screen.stream, clock=lambda: 0.0)
    state = run_of(2, err(0, "\r世界 50%|█████     |"))
    terminal.draw(state)
    whole = "[nblaunch] 2 running, 0 s | rank 0: 世界 50%|█████     |"
    (blank, *status) = screen.lines
    assert blank == ""
    assert len(status) <= 1
    # A wide character takes two places, the second of which the emulator leaves empty.
    shown = "".join(status).rstrip()
    assert whole.startswith(shown)
    assert shown or columns < 3
    terminal.close(state, "the end")
    assert "nblaunch" not in "".join(screen.lines)


@pytest.mark.parametrize("name", ["dumb", ""])
def test_a_terminal_without_cursor_movements_has_no_status_line(screen_of, monkeypatch, name):
    monkeypatch.setenv("TERM", name)
    screen = screen_of()
    terminal = Terminal(screen.stream)
    terminal.draw(run_of(2, err(0, "hello\n")))
    terminal.close(run_of(2, err(0, "hello\n"), err(0, "more")), "the end")
    assert screen.lines == ["[rank 0] hello", "[rank 0] more", "the end"]
    assert b"\x1b" not in screen.raw


def test_what_a_terminal_has_no_characters_for_is_a_question_mark(screen_of):
    screen = screen_of(encoding="ascii")
    terminal = Terminal(screen.stream)
    terminal.draw(run_of(2, err(0, "caf\u00e9 \u2588\n")))
    assert screen.lines[0] == "[rank 0] caf? ?"


def test_a_status_line_that_was_written_over_is_whole_again_the_next_time(screen_of):
    screen = screen_of()
    terminal = Terminal(screen.stream, clock=lambda: 0.0)
    state = run_of(2, err(0, "hello\n"))
    terminal.draw(state)
    os.write(screen.stream.fileno(), b"past\nus\n")
    terminal.draw(state)
    assert screen.lines[:2] == ["[rank 0] hello", "past"]
    assert screen.lines[-2:] == ["", "[nblaunch] 2 running, 0 s"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.9, "0 s"), (59, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (3720, "1 h 02 min")],
)
def test_elapsed_time_is_told_in_words(seconds, shown):
    assert elapsed(seconds) == shown
