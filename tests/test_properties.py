"""Properties that hold for anything ranks may print: the line model, folding, escaping, the live terminal."""

from __future__ import annotations

import pyte
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nblaunch._protocol import (
    Stream,
)
from nblaunch._transcript import Transcript, printed
from nblaunch.view.header import Header
from nblaunch.view.output import last_line, read
from nblaunch.view.terminal import Line, Screen, colored, plain

HEADER = Header("cell", "gloo")

# --- the line model --------------------------------------------------------------------------------

COLUMNS, ROWS = 200, 100
DRAWN = ["a", "bc", "100%|####|", "é", " "]
MOVES = ["\r", "\b", "\x1b[A", "\x1b[2A", "\x1b[B", "\x1b[C", "\x1b[3D", "\x1b[7G", "\x1b[E", "\x1b[2F"]
ERASURES = ["\x1b[K", "\x1b[0K", "\x1b[1K", "\x1b[2K", "\x1b[J"]
COLOURS = ["\x1b[31m", "\x1b[1;4m", "\x1b[0m", "\x1b[m"]
PROGRAMS = st.lists(st.sampled_from(["\n", *DRAWN, *MOVES, *ERASURES, *COLOURS]), max_size=40)


def as_a_terminal_draws(text):
    """Return the lines that a terminal emulator shows, without blank ends."""
    screen = pyte.Screen(COLUMNS, ROWS)
    screen.set_mode(pyte.modes.LNM)  # what a tty makes of a line end
    pyte.Stream(screen).feed(text)
    return "\n".join(line.rstrip() for line in screen.display).rstrip("\n")


def as_we_draw(text):
    return "\n".join(line.rstrip() for line in plain(text).split("\n")).rstrip("\n")


@given(PROGRAMS)
@settings(max_examples=500, deadline=None)
@example(["bc", "\n", "bc", "\r", "\x1b[A", "\x1b[K", "a"])
def test_lines_are_those_that_a_terminal_shows(program):
    # A terminal lets a program go down to where nothing has been written; with us there is no such place.
    text = "\n" * 10 + "\x1b[10A" + "".join(program)
    assume(text.count("\n") < ROWS)
    assert as_we_draw(text) == as_a_terminal_draws(text)


@given(PROGRAMS, PROGRAMS)
@settings(max_examples=200, deadline=None)
def test_what_one_stream_draws_never_changes_a_line_of_the_other(out, err):
    both, alone = Screen(), {stream: Screen() for stream in Stream}
    for stream, program in ((Stream.STDOUT, out), (Stream.STDERR, err), (Stream.STDOUT, err)):
        both.write(stream, "".join(program))
        alone[stream].write(stream, "".join(program))
    for stream in Stream:
        mine = [line for line in both.lines() if line.stream is stream]
        assert mine == alone[stream].lines()


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_colours_never_change_the_text(text):
    assert "\n".join(line.text for line in colored(text)) == plain(text).removesuffix("\n") or "\n" in text
    for line in colored(text):
        assert "".join(part for _, part in line.runs) == line.text
        styles = [style for style, _ in line.runs]
        assert all(before != after for before, after in zip(styles, styles[1:], strict=False))


@given(st.lists(st.tuples(st.sampled_from(Stream), st.text(max_size=60)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_last_line_is_the_last_that_is_drawn(pieces):
    transcript = Transcript()
    for stream, text in pieces:
        transcript = printed(transcript, stream, text)
    lines = [item.text.strip() for item in read(transcript) if isinstance(item, Line)]
    assert last_line(transcript) == next(filter(None, reversed(lines)), "")
