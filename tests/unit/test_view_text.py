"""The text form of a run is the same for the same run, in rank order, equal ranks folded."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from shown_runs import err, out, returned, run_of

from nblaunch._budget import cost_of_text, fair_limit, shortened
from nblaunch.protocol import messages as wire
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.screen import BOLD, ITALIC, PLAIN, UNDERLINE, Screen, colored, plain
from nblaunch.view.summary import Header, traceback_text
from nblaunch.view.terminal_view import LiveLines
from nblaunch.view.text import render_ending, render_text

HEADER = Header("cell", "gloo", node="some-host", log_dir="/logs", magic="%%distributed -n 2")
BOOM = wire.FailureRecord(
    type="builtins.ValueError",
    message="boom",
    traceback="Traceback (most recent call last):\nValueError: boom\n",
    frames=(wire.FrameRecord("Cell In[3]", 4, "<module>", "raise ValueError('boom')"),),
    time=5.0,
)


def closed_by_peer(port, time=5.1):
    message = f"[/x/gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:{port}"
    return wire.FailureRecord(type="builtins.RuntimeError", message=message, time=time)


def text_of(world_size, *messages, **options):
    return render_text(run_of(world_size, *messages, **options), HEADER)


def shown(rank, **data):
    kinds = {"png": "image/png", "plain": "text/plain"}
    return wire.Displayed(rank=rank, data={kinds[name]: content for name, content in data.items()})


RUNNING = "ranks 0-1: RUNNING"
AGAIN = wire.AttemptStarted(number=1, world_size=1, time=7.0, reason="failure")
FIRST, SECOND = (
    wire.FailureRecord(type=type_, message=message, time=time)
    for type_, message, time in (("ValueError", "first", 5.0), ("KeyError", "'second'", 6.0))
)
TEXTS = {
    "lines are grouped by rank, whatever the order of arrival": (
        (out(1, "b\n"), out(0, "a\n"), out(1, "d\n"), out(0, "c\n")),
        ["[rank 0] a", "[rank 0] c", "[rank 1] b", "[rank 1] d", RUNNING],
    ),
    "ranks with equal output are folded": (
        (out(0, "epoch 1\nepoch 2\n"), out(1, "epoch 1\nepoch 2\n")),
        ["[ranks 0-1] epoch 1", "[ranks 0-1] epoch 2", RUNNING],
    ),
    "so are bars that end alike, although they were drawn differently": (
        (err(0, "\r 10%\r100%\n"), err(1, "\r 33%\r 66%\r100%\n")),
        ["[ranks 0-1] 100%", RUNNING],
    ),
    "equal values are folded": ((returned(0, "3.0"), returned(1, "3.0")), ["ranks 0-1: 3.0"]),
    "and others are not": ((returned(0, "3.0"), returned(1, "4.0")), ["rank 0: 3.0", "rank 1: 4.0"]),
    "values of several lines keep their columns": (
        (returned(0, "[[1., 2.],\n [3., 4.]]"),),
        ["rank 0: [[1., 2.],", "         [3., 4.]]", "rank 1: RUNNING"],
    ),
    "output comes before values, and values before failures": (
        (wire.Raised(rank=1, failure=BOOM), returned(0, "3.0"), out(0, "hello\n")),
        ["[rank 0] hello", "rank 0: 3.0", "root cause: rank 1: ValueError: boom (cell line 4)"],
    ),
    "causes of different kinds come in the order of time": (
        (wire.Raised(rank=0, failure=SECOND), wire.Raised(rank=1, failure=FIRST)),
        ["root cause: rank 1: ValueError: first", "also failed: rank 0: KeyError: 'second'"],
    ),
    "a lost rank is named": (
        (returned(1), wire.RunEnded(time=9.0, stopped=False)),
        ["rank 0: LOST: exited without a result or an error"],
    ),
    "ranks that were interrupted are named": ((wire.RunEnded(time=9.0),), ["ranks 0-1: STOPPED"]),
    "an earlier attempt is told with its cause": (
        (wire.Raised(rank=0, failure=BOOM), AGAIN, returned(0, "1")),
        ["attempt 0: restarted: rank 0: ValueError: boom (cell line 4)", "rank 0: 1"],
    ),
    "a run with nothing to say says how it ended": (
        (returned(0), returned(1)),
        ["cell · 2 ranks · gloo: SUCCEEDED"],
    ),
    "displays are there as their plain text, in their place": (
        (out(0, "before\n"), shown(0, png="aGk=", plain="<Figure>"), out(0, "after\n")),
        ["[rank 0] before", "[rank 0] <Figure>", "[rank 0] after", RUNNING],
    ),
    "a display without text is named by its type": (
        (shown(0, png="aGk="),),
        ["[rank 0] <image/png>", RUNNING],
    ),
    "a progress bar is one line, its last state": (
        (err(0, "".join(f"\r{done:3}%|{'#' * (done // 10):10}|" for done in range(101)) + "\n"),),
        ["[rank 0] 100%|##########|", RUNNING],
    ),
    "also when stdout prints meanwhile": (
        (err(0, "\r 10%"), out(0, "step 1\n"), err(0, "\r 20%"), out(0, "step 2\n")),
        ["[rank 0]  20%", "[rank 0] step 1", "[rank 0] step 2", RUNNING],
    ),
    "what is cleared is gone": (
        (out(0, "old\n"), wire.Cleared(rank=0, wait=True), out(0, "new\n")),
        ["[rank 0] new", RUNNING],
    ),
    "colours are stripped": (
        (out(0, "\x1b[1;31mred\x1b[0m and \x1b]0;title\x07plain\n"),),
        ["[rank 0] red and plain", RUNNING],
    ),
}


@pytest.mark.parametrize(("messages", "lines"), TEXTS.values(), ids=TEXTS)
def test_a_run_of_two_ranks_is_this_text(messages, lines):
    assert text_of(2, *messages).splitlines() == lines


def test_a_long_label_stands_on_a_line_of_its_own():
    values = [returned(rank, "a\nb" if rank % 2 else "c\nd") for rank in range(40)]
    text = text_of(40, *values)
    assert ",38:\n    c\n    d\nranks 1,3," in text


def test_long_values_are_folded_only_where_they_are_equal_to_the_last_character():
    middle = "x" * 90_000
    text = text_of(2, returned(0, f"a{middle}1{middle}b"), returned(1, f"a{middle}2{middle}b"))
    assert "rank 0: a" in text
    assert "rank 1: a" in text


def test_a_failure_is_told_root_cause_first_then_consequences_then_who_was_stopped():
    text = text_of(
        4,
        wire.Raised(rank=0, failure=closed_by_peer(40287, time=4.9)),
        wire.Raised(rank=2, failure=BOOM),
        wire.Exited(rank=1, exitcode=-15, time=6.0, expected=True),
        wire.Exited(rank=3, exitcode=-15, time=6.0, expected=True),
    )
    without_port = "[/x/gloo/pair.cc:538] Connection closed by peer [127.0.0.1]"
    assert text.splitlines() == [
        "root cause: rank 2: ValueError: boom (cell line 4)",
        f"rank 0: consequence of rank 2: RuntimeError: {without_port}",
        "ranks 1,3: STOPPED, because of rank 2",
    ]


def test_a_mistake_that_fails_every_rank_alike_is_one_cause_whichever_was_first():
    def told(times):
        failures = [wire.FailureRecord(type="ValueError", message="boom", time=time) for time in times]
        raised = [wire.Raised(rank=rank, failure=failure) for rank, failure in enumerate(failures)]
        return text_of(4, *raised, wire.RunEnded(time=9.0))

    assert told([5.0, 6.0, 7.0]) == told([7.0, 5.0, 6.0])
    assert told([5.0, 6.0, 7.0]).splitlines() == [
        "root cause: ranks 0-2: ValueError: boom",
        "rank 3: STOPPED, because of ranks 0-2",
    ]


def test_a_long_reason_is_cut_once_in_its_middle_and_counted_right():
    boom = wire.FailureRecord(type="ValueError", message="x" * 1_800, time=5.0)
    line = text_of(1, wire.Raised(rank=0, failure=boom))
    (left_out,) = re.findall(r"… (\d+) characters left out …", line)
    assert line.count("x") + int(left_out) == 1_800


def test_equal_consequences_are_one_line_although_their_ports_differ():
    failures = [wire.Raised(rank=rank, failure=closed_by_peer(40_000 + rank)) for rank in range(1, 8)]
    text = text_of(8, wire.Raised(rank=0, failure=BOOM), *failures)
    assert "ranks 1-7: consequence of rank 0: RuntimeError:" in text
    assert len(text.splitlines()) == 2


def test_a_bad_exit_after_the_value_is_a_warning():
    text = text_of(1, returned(0, "1"), wire.Exited(rank=0, exitcode=-11, time=3.0))
    assert text.splitlines()[1].startswith("warning: rank 0 was killed by SIGSEGV")


def test_a_run_on_some_of_the_ranks_names_them():
    assert text_of(8, returned(1), returned(3), ranks=(1, 3)).startswith("cell · ranks 1,3 of 8 · gloo")


def test_a_file_is_named_without_its_directory():
    frames = (wire.FrameRecord("/home/somebody/project/train.py", 3, "f", ""),)
    failure = wire.FailureRecord(type="m.E", message="no", frames=frames)
    assert text_of(1, wire.Raised(rank=0, failure=failure)).endswith("m.E: no (train.py, line 3)")


def test_tracebacks_do_not_say_where_python_is_installed():
    text = (
        '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py", line 1\n'
        '  File "/tmp/ipykernel_4242/123.py", line 2\n'
    )
    assert traceback_text(wire.FailureRecord(type="E", message="", traceback=text)) == (
        '  File "…/site-packages/torch/nn/module.py", line 1\n  File "…/ipykernel", line 2'
    )


def test_200_000_lines_are_shown_by_their_beginning_and_end_and_counted_right():
    lines = "".join(f"line {number}\n" for number in range(200_000))
    shown = text_of(1, out(0, lines)).splitlines()
    assert shown[0] == "[rank 0] line 0"
    assert "[rank 0] line 199999" in shown[-2:]
    (left_out,) = [line for line in shown if "left out" in line]
    assert "see result.ranks[0].stdout" in left_out
    count = int("".join(re.findall(r"(\d+) lines left out", left_out)))
    assert count + sum(line.startswith("[rank 0] line ") for line in shown) == 200_000


def test_one_endless_line_says_how_many_characters_are_missing():
    assert "characters left out" in text_of(1, out(0, "x" * 300_000)).splitlines()[0]


def test_a_bar_that_drew_itself_a_million_times_is_still_one_line():
    bar = "".join(f"\r{done:6}/100000 [{'#' * (done % 30):30}]" for done in range(20_000))
    assert text_of(1, err(0, bar + "\n")).splitlines()[0].startswith("[rank 0]  19999/100000")


def test_what_lies_between_beginning_and_end_is_counted_around_displays_and_streams_too():
    lines = [
        message for number in range(4_000) for message in (out(0, f"{number:030}\n"), err(0, "-" * 30 + "\n"))
    ]
    figure = wire.Displayed(rank=0, data={"text/plain": "figure"})
    shown = text_of(1, figure, *lines, figure).splitlines()
    (left_out,) = [line for line in shown if "left out" in line]
    count = int("".join(re.findall(r"(\d+) lines left out", left_out)))
    assert shown[0] == "[rank 0] figure"
    assert shown[-2] == "[rank 0] figure"
    assert count + len(shown) - 4 in (8_000, 8_001)


def test_displays_that_are_left_out_are_counted():
    displays = [wire.Displayed(rank=0, data={"text/plain": f"{number}"}) for number in range(500)]
    shown = text_of(1, *displays).splitlines()
    (left_out,) = [line for line in shown if "left out" in line]
    count = int("".join(re.findall(r"(\d+) displays left out, see result.ranks\[0\].displays", left_out)))
    assert count + len(shown) - 2 == 500


def test_what_only_stderr_said_is_looked_up_there():
    text = text_of(1, err(0, "warning\n" * 50_000))
    assert "see result.ranks[0].stderr" in text


@given(st.text(max_size=400))
def test_any_text_at_all_can_be_drawn_and_leaves_no_control_characters(text):
    drawn = plain(text)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", drawn)
    assert plain(drawn) == drawn


@given(st.lists(st.text(alphabet="ab\r\n\b\x1b[0123;mKABCDGJ", max_size=40), max_size=8))
def test_text_drawn_in_pieces_that_cut_no_sequence_is_drawn_as_in_one(pieces):
    pieces = [piece.rstrip("\x1b[0123;") for piece in pieces]
    screen = Screen()
    for piece in pieces:
        screen.write(wire.Stream.STDOUT, piece)
    assert [line.text for line in screen.lines()] == [line.text for line in colored("".join(pieces))]


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"]), max_size=200))
def test_text_without_control_characters_is_drawn_as_it_is(text):
    assert plain(text) == text


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("abc\rX", "Xbc"),
        ("abc\b\bX", "aXc"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("abc\r\x1b[Kx", "x"),
        ("\x1b[31mred\r\x1b[0m\x1b[Kplain", "plain"),
        ("one\ntwo\n\x1b[2A\x1b[2Knew\n\n", "new\ntwo\n"),
        ("bar 1\nbar 2\x1b[A\rBAR", "BAR 1\nbar 2"),
        ("a\tb", "a       b"),
        ("\x1b[2Jkept", "kept"),
        ("one\ntwo\r\x1b[A\x1b[Jx", "x\n"),
        ("abc\x1b[1Kd", "   d"),
        ("abc\x1b[2K", ""),
        ("abc\x1b[2DX\x1b[9Gfar", "aXc     far"),
        ("one\ntwo\x1b[Fup\x1b[Edown", "upe\ndown"),
        ("ab\x1b[31mred\x1b[0m\x1b[2CX", "abred  X"),
        ("\x1b[31mabc\x1b[0m\x1b[2DX", "aXc"),
        ("\ud800\x07\x1b(B", "\ufffd"),
        ("\x1b[99999999999Cfar", " far"),
    ],
)
def test_control_sequences_do_what_a_terminal_does(written, shown):
    assert plain(written) == shown


@pytest.mark.parametrize(
    ("sequence", "style"),
    [
        ("1;31", 1 | BOLD),
        ("94", 4),
        ("38;5;28;01", 2 | BOLD),
        ("38;5;241", PLAIN),
        ("38;2;250;20;20", 1),
        ("48;5;1;3", ITALIC),
        ("31;39;4", UNDERLINE),
        ("31;1;0", PLAIN),
    ],
)
def test_colours_become_one_of_six_that_can_be_read_on_any_page(sequence, style):
    assert colored(f"\x1b[{sequence}mx")[0].runs == ((style, "x"),)


@given(st.lists(st.integers(0, 10_000), max_size=50), st.integers(0, 100_000))
def test_a_fair_share_never_takes_more_than_there_is(costs, budget):
    limit = fair_limit(costs, budget)
    assert sum(min(cost, limit) for cost in costs) <= budget


@given(st.text(max_size=3000), st.integers(60, 2000))
def test_shortened_text_is_within_its_limit_and_keeps_both_ends(text, limit):
    short = shortened(text, limit)
    if cost_of_text(text) <= limit:
        assert short == text
    else:
        assert cost_of_text(short) <= limit + 60
        assert ("characters left out" if limit > 128 else "…") in short


def test_shortened_text_keeps_as_much_of_its_end_as_of_its_beginning():
    start, *_, end = shortened("a" * 500 + "b" * 500, 200).split(" ")
    assert set(start + end) == {"a", "b"}
    assert abs(len(start) - len(end)) <= 1


def test_256_ranks_that_print_all_they_can_make_a_text_of_bounded_size():
    messages = [out(rank, f"rank {rank} «é\"&<'» line\n" * 5_000) for rank in range(256)]
    values = [returned(rank, f"'{rank}" + "é&" * 2_000) for rank in range(256)]
    assert len(text_of(256, *messages, *values).encode()) < 300_000


def test_a_terminal_gets_each_line_once_with_its_rank_as_it_comes():
    live = LiveLines()
    state = run_of(2, out(0, "one\ntw"), err(1, "warn\n"))
    assert list(live.take(state)) == ["[rank 0] one", "[rank 1] warn"]
    assert list(live.take(state)) == []
    state = advance(advance(state, out(0, "o\n")), wire.Displayed(rank=1, data={"text/plain": "figure"}))
    assert list(live.take(state)) == ["[rank 0] two", "[rank 1] figure"]
    state = advance(state, out(1, "unfinished"))
    assert list(live.take(state)) == []
    assert list(live.rest()) == ["[rank 1] unfinished"]


def test_a_terminal_is_told_of_a_restart_and_of_what_came_too_fast():
    live = LiveLines()
    state = run_of(1, out(0, "x" * 99 + "\n"))
    list(live.take(state))
    state = advance(state, out(0, ("y" * 99 + "\n") * 2_000))
    first = next(iter(live.take(state)))
    assert "characters left out" in first
    state = advance(state, wire.Raised(rank=0, failure=BOOM))
    state = advance(state, wire.AttemptStarted(number=1, world_size=1, time=7.0, reason="failure"))
    state = advance(state, out(0, "again\n"))
    assert list(live.take(state)) == [
        "attempt 0: restarted: rank 0: ValueError: boom (cell line 4)",
        "[rank 0] again",
    ]


@examples(50)
@given(st.lists(st.sampled_from(["a\n", "bc", "\n", "\x1b[31mred\x1b[0m\n", "d\re\n"]), max_size=30))
def test_a_terminal_shows_in_the_end_what_the_text_form_shows(pieces):
    live, state = LiveLines(), run_of(1)
    shown: list[str] = []
    for piece in pieces:
        state = advance(state, out(0, piece))
        shown += live.take(state)
    shown += live.rest()
    ending = render_ending(state, HEADER)
    text = render_text(state, HEADER)
    blank = "[rank 0]"
    assert "\n".join([*shown, ending]).replace(f"{blank}\n", "") == text.replace(f"{blank}\n", "")


def test_phases_before_the_job_are_told_by_their_state():
    state = RunState.fresh(2)
    state = advance(state, wire.AttemptStarted(number=0, world_size=2, time=0.0))
    state = advance(state, wire.Entered(rank=0, phase=wire.Phase.CONNECT))
    assert render_text(state, HEADER) == "ranks 0-1: STARTING"
