"""Properties that hold for anything ranks may print: the line model, the live terminal, costs."""

from __future__ import annotations

import html
import itertools
import json
import re

import pyte
from hypothesis import assume, example, given
from hypothesis import strategies as st
from shown_runs import run_of

from nblaunch._budget import clipped, cost_of_text
from nblaunch.protocol import messages
from nblaunch.protocol.reports import format_ranks
from nblaunch.protocol.state import advance
from nblaunch.protocol.transcript import Transcript, printed
from nblaunch.view.output import items_of, last_line
from nblaunch.view.screen import Line, Screen, colored, plain
from nblaunch.view.summary import Header
from nblaunch.view.terminal_view import Held, LiveLines

HEADER = Header("cell", "gloo")

# --- the line model --------------------------------------------------------------------------------

COLUMNS, ROWS = 200, 100
DRAWN = ["a", "bc", "100%|####|", "é", " "]
MOVES = ["\r", "\b", "\t", "\x1b[A", "\x1b[2A", "\x1b[B", "\x1b[C", "\x1b[3D", "\x1b[7G", "\x1b[E", "\x1b[2F"]
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
@example(["bc", "\n", "bc", "\r", "\x1b[A", "\x1b[K", "a"])
def test_lines_are_those_that_a_terminal_shows(program):
    # A terminal lets a program go down to where nothing has been written; with us there is no such place.
    text = "\n" * 10 + "\x1b[10A" + "".join(program)
    assume(text.count("\n") < ROWS)
    assert as_we_draw(text) == as_a_terminal_draws(text)


@given(PROGRAMS, PROGRAMS)
def test_what_one_stream_draws_never_changes_a_line_of_the_other(out, err):
    both, alone = Screen(), {stream: Screen() for stream in messages.Stream}
    for stream, program in (
        (messages.Stream.STDOUT, out),
        (messages.Stream.STDERR, err),
        (messages.Stream.STDOUT, err),
    ):
        both.write(stream, "".join(program))
        alone[stream].write(stream, "".join(program))
    for stream in messages.Stream:
        mine = [line for line in both.lines() if line.stream is stream]
        assert mine == alone[stream].lines()


@given(st.text(max_size=300))
def test_colours_never_change_the_text(text):
    assert "\n".join(line.text for line in colored(text)) == plain(text).removesuffix("\n") or "\n" in text
    for line in colored(text):
        assert "".join(part for _, part in line.runs) == line.text
        styles = [style for style, _ in line.runs]
        assert all(before != after for before, after in itertools.pairwise(styles))


@given(st.lists(st.tuples(st.sampled_from(messages.Stream), st.text(max_size=60)), max_size=8))
def test_the_last_line_is_the_last_that_is_drawn(pieces):
    transcript = Transcript()
    for stream, text in pieces:
        transcript = printed(transcript, stream, text)
    lines = [item.text.strip() for item in items_of(transcript) if isinstance(item, Line)]
    assert last_line(transcript) == next(filter(None, reversed(lines)), "")


# --- ranks ---------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranks_are_named_so_that_they_can_be_read_back(ranks):
    named = format_ranks(ranks).removeprefix("ranks ").removeprefix("rank ")
    found = set()
    for part in named.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == ranks


# --- the live terminal -----------------------------------------------------------------------------


@given(st.lists(st.text(alphabet="ab\r\b\n", max_size=12), max_size=12))
def test_what_is_printed_live_and_then_is_all_that_was_written(pieces):
    held, shown = Held(), []
    for piece in pieces:
        finished = held.take(piece)
        if finished is not None:
            shown += finished.split("\n")
    assert "\n".join([*shown, held.text]).rstrip() == plain("".join(pieces)).rstrip()


@given(st.integers(1, 6), st.lists(st.integers(0, 99), min_size=2, max_size=30), st.data())
def test_bars_that_are_drawn_again_and_again_are_printed_as_they_are_in_the_end(bars, percents, data):
    """As rich draws several bars: up to the first of them, each erased and drawn anew."""
    text = ""
    for number, percent in enumerate([*percents, 100]):
        up = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (bars - 1) if number else ""
        text += up + "\n".join(f"bar {bar} {percent}%" for bar in range(bars))
    text += "\ndone\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    # A program's writes arrive whole: nothing is cut within a control sequence.
    cuts = [cut for cut in cuts if "\x1b" not in text[max(cut - 3, 0) : cut]]
    held, shown = Held(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        finished = held.take(text[start:end])
        shown += [] if finished is None else finished.split("\n")
    shown += held.text.split("\n")
    lines = [line.rstrip() for line in shown if line.strip()]
    for bar in range(bars):
        assert [line for line in lines if line.startswith(f"bar {bar} ")][-1] == f"bar {bar} 100%"
    assert lines[-1] == "done"
    if not cuts:
        assert len(lines) == bars + 1


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=30)), max_size=15))
def test_a_rank_cannot_move_the_terminals_cursor_whatever_it_prints(pieces):
    live, state = LiveLines(), run_of(3)
    lines: list[str] = []
    for rank, text in pieces:
        state = advance(state, messages.Printed(rank=rank, stream=messages.Stream.STDERR, text=text))
        lines += live.take(state)
        lines.append(live.unfinished)
        assert "\n" not in live.unfinished
    lines += live.rest()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "\n".join(lines))


# --- what text costs --------------------------------------------------------------------------------


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=300))
def test_what_text_costs_is_never_less_than_what_it_takes_in_a_notebook(text):
    shown = plain(text)
    taken = len(json.dumps(html.escape(shown), ensure_ascii=False).encode()) - 2
    assert taken <= cost_of_text(shown)


@given(st.text(max_size=500), st.integers(10, 300))
def test_clipped_text_is_the_beginning_and_no_longer_than_allowed(text, limit):
    short = clipped(text, limit)
    assert short == text or text.startswith(short.removesuffix(" …").removesuffix("…"))
    assert cost_of_text(short) <= limit + len(" …".encode())
