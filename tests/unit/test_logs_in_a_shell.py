"""How `python -m nblaunch logs` prints what ranks print."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import RankLogFiles
from nblaunch.protocol.messages import Cleared, Displayed, Noticed, Offsets, Printed, Stream, Unwritten
from nblaunch.protocol.state import RunState, advance
from nblaunch.protocol.transcript import HEAD_CHARACTERS, TAIL_CHARACTERS
from nblaunch.view.shell_logs import _Output


def out(text, rank=0, stream=Stream.STDOUT):
    return Printed(rank=rank, stream=stream, text=text)


@pytest.mark.parametrize(
    ("messages", "stdout", "stderr"),
    [
        ([out("a\n"), out("b\n", 1)], "[rank 0] a\n[rank 1] b\n", ""),
        ([out("o"), out("x\n", 1), out("n\na"), out("b")], "[rank 1] x\n[rank 0] on\n[rank 0] ab\n", ""),
        ([out("o\n"), out("e\n", stream=Stream.STDERR)], "[rank 0] o\n", "[rank 0] e\n"),
        ([out("\r 1%"), out("\r 5%\r"), out("\r99%\r\n"), out("b\n")], "[rank 0] 99%\n[rank 0] b\n", ""),
        ([out("outer 1\ninner 1\r\x1b[A"), out("outer 2\ninner 2\r\x1b[A\n\n")],
         "[rank 0] outer 2\n[rank 0] inner 2\n", ""),
        ([out("\x1b[31mred\x1b[0m\n")], "[rank 0] red\n", ""),
        ([out("\n")], "[rank 0]\n", ""),
        ([Noticed(text="hangs"), Cleared(rank=0)], "", "hangs\n"),
        ([Displayed(rank=1, data={"text/plain": "<Figure>", "image/png": "x"})], "[rank 1] <Figure>\n", ""),
        ([Displayed(rank=1, data={"image/png": "x", "a/b": "y"})], "[rank 1] <a/b, image/png>\n", ""),
        ([Displayed(rank=1, data={"text/plain": ["a\n", "b"]})], "[rank 1] a\n[rank 1] b\n", ""),
    ],
)  # fmt: skip
def test_each_line_has_its_rank_and_its_stream(messages, stdout, stderr, capsys):
    output = _Output(LaunchOptions())
    for message in messages:
        output.take(message)
    output.end()
    assert tuple(capsys.readouterr()) == (stdout, stderr)


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_full_disk_did_not_take_is_named(ended, capsys):
    output, state = _Output(LaunchOptions()), RunState.fresh(3)
    for rank, size in ((2, 7), (0, 5), (2, 1200)):
        message = Unwritten(rank=rank, size=size)
        state = advance(state, message)
        if not ended:
            output.take(message)
    if ended:
        output.catch_up(state, {})
    output.end()
    why = "left out: its log is on a full disk"
    assert tuple(capsys.readouterr()) == ("", f"[rank 0] 5 bytes {why}\n[rank 2] 1,200 bytes {why}\n")


LONG = (HEAD_CHARACTERS + TAIL_CHARACTERS) // 100 + 50
"""So many lines of 100 characters are more than a state has."""


def figure(number):
    return Displayed(rank=0, data={"text/plain": f"figure {number}"})


class Written:
    """A job of rank 0, its state and its log files, as the runtime has them after each message."""

    def __init__(self, directory):
        self.state = RunState.fresh(1)
        self.paths = {stream: directory / stream for stream in Stream}
        for path in self.paths.values():
            path.write_text("of a job before\n")

    def take(self, message):
        if isinstance(message, Printed):
            with self.paths[message.stream].open("a") as file:
                file.write(message.text)
                message = replace(message, end=file.tell())
        self.state = advance(self.state, message)
        return message

    def catch_up(self, output):
        ends = Offsets(*(path.stat().st_size for path in self.paths.values()))
        stdout, stderr = map(str, self.paths.values())
        output.catch_up(self.state, {0: (RankLogFiles(0, 0, stdout, stderr, Offsets(16, 16), ends),)})


def printed_in(text):
    return [line.removeprefix("[rank 0] ") for line in text.splitlines()]


def test_of_a_short_job_text_and_displays_keep_their_order(tmp_path, capsys):
    written, output = Written(tmp_path), _Output(LaunchOptions())
    for message in (out("a\n"), figure(1), out("b\n"), out("e\n", stream=Stream.STDERR)):
        written.take(message)
    written.catch_up(output)
    shown = capsys.readouterr()
    assert (printed_in(shown.out), printed_in(shown.err)) == (["a", "figure 1", "b"], ["e"])


@pytest.mark.parametrize("cleared", [False, True])
def test_of_a_long_job_each_stream_is_whole_and_so_are_its_displays(cleared, tmp_path, capsys):
    """Also what the rank has cleared: a shell has no place to clear."""
    written, output = Written(tmp_path), _Output(LaunchOptions())
    for number in range(3 if cleared else LONG):
        written.take(out(f"{number:099}\n"))
        written.take(out(f"{number}\n", stream=Stream.STDERR))
    if cleared:
        written.take(Cleared(rank=0))
    for message in (figure(1), Noticed(text="a notice"), out("the end, without a line end")):
        written.take(message)
    written.catch_up(output)
    output.end()
    shown = capsys.readouterr()
    numbers = list(range(3 if cleared else LONG))
    lines = [*(f"{number:099}" for number in numbers), "figure 1", "the end, without a line end"]
    assert printed_in(shown.out) == lines
    assert printed_in(shown.err) == ["a notice", *map(str, numbers)]


@pytest.mark.parametrize("lines", [3, LONG])
def test_one_that_was_slow_to_read_misses_nothing_and_prints_nothing_twice(lines, tmp_path, capsys):
    written, output = Written(tmp_path), _Output(LaunchOptions())
    written.take(out("first\n"))
    written.catch_up(output)
    for message in (out("second\n"), figure(1), Noticed(text="read")):
        output.take(written.take(message))
    for number in range(lines):
        written.take(out(f"{number:099}\n"))
    for message in (figure(2), out("half a "), Noticed(text="missed")):
        written.take(message)
    written.catch_up(output)
    output.take(written.take(out("line\n")))
    shown = capsys.readouterr()
    numbers = [f"{number:099}" for number in range(lines)]
    assert printed_in(shown.out) == ["first", "second", "figure 1", *numbers, "figure 2", "half a line"]
    assert printed_in(shown.err) == ["read", "missed"]


def test_what_options_keep_from_the_notebook_is_not_printed_from_the_files_either(tmp_path, capsys):
    written, output = Written(tmp_path), _Output(LaunchOptions(redirects="2"))
    for number in range(LONG):
        written.take(out(f"{number:099}\n"))
    written.take(out("redirected\n", stream=Stream.STDERR))
    written.catch_up(output)
    shown = capsys.readouterr()
    assert (len(shown.out.splitlines()), shown.err) == (LONG, "")


def test_where_the_log_is_gone_the_beginning_and_the_end_are_printed(tmp_path, capsys):
    written, output = Written(tmp_path), _Output(LaunchOptions())
    for number in range(LONG):
        written.take(out(f"{number:099}\n"))
    logs = {0: (RankLogFiles(0, 0, str(tmp_path / "gone"), str(tmp_path / "gone")),)}
    output.catch_up(written.state, logs)
    output.end()
    shown = capsys.readouterr()
    lines = [line for line in printed_in(shown.out) if len(line) == 99]
    assert (int(lines[0]), int(lines[-1])) == (0, LONG - 1)
    transcript = written.state.ranks[0].transcript
    assert shown.err == f"[rank 0] {transcript.omitted_lines} lines left out: its log is gone\n"


def test_an_animation_that_was_read_too_slowly_ends_with_its_last_picture_and_none_comes_twice(
    tmp_path, capsys
):
    written, output = Written(tmp_path), _Output(LaunchOptions())
    written.catch_up(output)
    for message in (figure(1), Cleared(rank=0, wait=True)):
        output.take(written.take(message))
    written.catch_up(output)
    for number in (2, 3):
        written.take(figure(number))
        written.take(Cleared(rank=0, wait=True))
    written.catch_up(output)
    output.take(written.take(figure(4)))
    written.catch_up(output)
    assert printed_in(capsys.readouterr().out) == ["figure 1", "figure 3", "figure 4"]


def test_a_rank_that_has_printed_to_one_stream_alone_may_lack_the_other_file(tmp_path, capsys):
    written, output = Written(tmp_path), _Output(LaunchOptions())
    written.paths[Stream.STDOUT].unlink()
    for number in range(LONG):
        written.take(out(f"{number:099}\n", stream=Stream.STDERR))
    end = written.paths[Stream.STDERR].stat().st_size
    stdout, stderr = map(str, written.paths.values())
    files = RankLogFiles(0, 0, stdout, stderr, Offsets(0, 16), Offsets(0, end))
    for _ in range(2):
        output.catch_up(written.state, {0: (files,)})
    assert printed_in(capsys.readouterr().err) == [f"{number:099}" for number in range(LONG)]
