"""How `python -m nblaunch logs` prints what ranks print."""

from __future__ import annotations

import pytest

from nblaunch._journal import Dropped
from nblaunch.client.shell import _Output
from nblaunch.protocol.messages import Cleared, Displayed, Noticed, Printed, Stream, Unwritten
from nblaunch.protocol.state import RunState, advance
from nblaunch.protocol.transcript import HEAD_CHARACTERS, TAIL_CHARACTERS


def out(text, rank=0, stream=Stream.STDOUT):
    return Printed(rank=rank, stream=stream, text=text)


@pytest.mark.parametrize(
    ("messages", "stdout", "stderr"),
    [
        ([out("a\n"), out("b\n", 1)], "[rank 0] a\n[rank 1] b\n", ""),
        ([out("o"), out("x\n", 1), out("n\na"), out("b")], "[rank 1] x\n[rank 0] on\n[rank 0] ab\n", ""),
        ([out("o\n"), out("e\n", stream=Stream.STDERR)], "[rank 0] o\n", "[rank 0] e\n"),
        ([out("\r 1%"), out("\r 5%\r"), out("\r99%\r\n"), out("b\n")], "[rank 0] 99%\n[rank 0] b\n", ""),
        ([out("\n")], "[rank 0]\n", ""),
        ([Noticed(text="hangs"), Cleared(rank=0)], "", "hangs\n"),
        ([Displayed(rank=1, data={"text/plain": "<Figure>", "image/png": "x"})], "[rank 1] <Figure>\n", ""),
        ([Displayed(rank=1, data={"image/png": "x", "a/b": "y"})], "[rank 1] <image/png, a/b>\n", ""),
        ([Displayed(rank=1, data={"text/plain": ["a\n", "b"]})], "[rank 1] a\n[rank 1] b\n", ""),
    ],
)  # fmt: skip
def test_each_line_has_its_rank_and_its_stream(messages, stdout, stderr, capsys):
    output = _Output()
    for message in messages:
        output.take(message)
    output.end()
    assert tuple(capsys.readouterr()) == (stdout, stderr)


def test_what_was_dropped_is_named(capsys):
    _Output().name_dropped(
        [
            Dropped(0, characters=40, lines=3, displays=1, why="disk full"),
            Dropped(1, characters=5, why="disk full"),
            Dropped(2, why="only cleared"),
        ]
    )
    assert capsys.readouterr().err == (
        "[rank 0] 3 lines and 1 display left out: disk full\n[rank 1] 1 line left out: disk full\n"
    )


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_full_disk_did_not_take_is_named(ended, capsys):
    output, state = _Output(), RunState.fresh(3)
    for rank, size in ((2, 7), (0, 5), (2, 1200)):
        message = Unwritten(rank=rank, size=size)
        state = advance(state, message)
        if not ended:
            output.take(message)
    if ended:
        output.take_state(state)
    output.end()
    why = "left out: its log is on a full disk"
    assert tuple(capsys.readouterr()) == ("", f"[rank 0] 5 bytes {why}\n[rank 2] 1,200 bytes {why}\n")


def test_of_a_state_the_beginning_and_the_end_are_printed(capsys):
    count = (HEAD_CHARACTERS + TAIL_CHARACTERS) // 100 + 50
    state = RunState.fresh(1)
    for number in range(count):
        state = advance(state, out(f"{number:099}\n"))
    output = _Output()
    output.take_state(advance(state, Noticed(text="a notice")))
    output.end()
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if len(line) == len("[rank 0] ") + 99]
    assert int(lines[0].removeprefix("[rank 0] ")) == 0
    assert int(lines[-1].removeprefix("[rank 0] ")) == count - 1
    transcript = state.ranks[0].transcript
    why = "only the first and the last output is kept of older jobs"
    assert shown.err == f"a notice\n[rank 0] {transcript.omitted_lines} lines left out: {why}\n"
