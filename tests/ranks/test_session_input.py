"""What a rank asks, the notebook's user answers: `input()`, `getpass()`, `breakpoint()`, post-mortem."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

import pytest

PATIENCE = 60


class Dialogue:
    """Executes cells, and types what is asked for."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.asked: list[tuple[str, bool]] = []
        self.said = ""
        self.error: Any = None

    def run(self, code, *typed, allow_stdin=True):
        """Execute a cell; give one of `typed` for each question; return what was asked."""
        waiting = list(typed)
        self.asked, self.said, self.error = [], "", None

        def heard(message):
            content = message["content"]
            match message["header"]["msg_type"]:
                case "stream":
                    self.said += content["text"]
                case "error":
                    self.error = f"{content['ename']}: {content['evalue']}"

        def answer(message):
            self.asked.append((message["content"]["prompt"], message["content"]["password"]))
            self.kernel.client.input(waiting.pop(0))

        self.kernel.client.execute_interactive(
            code, allow_stdin=allow_stdin, stdin_hook=answer, output_hook=heard, timeout=PATIENCE
        )
        assert waiting == []
        return self.asked


@pytest.fixture
def dialogue(kernel):
    return Dialogue(kernel)


@pytest.fixture
def session(dialogue, place):
    dialogue.run(f"%distributed start {place.line(2)}")
    assert not dialogue.error
    yield dialogue
    dialogue.run("%distributed stop")


def test_each_rank_that_asks_is_answered_and_named(dialogue):
    asked = dialogue.run(
        "%%distributed -n 2 --out res\nimport getpass\nname = input('name? ')\n"
        "name, getpass.getpass() if rank == 1 else None",
        *("first", "second", "secret"),
    )
    assert not dialogue.error
    assert sorted(asked) == [
        ("[rank 0] name? ", False),
        ("[rank 1] Password: ", True),
        ("[rank 1] name? ", False),
    ]
    values = dialogue.kernel.value("[list(each) for each in res.values]")
    assert {values[0][0], values[1][0]} == {"first", "second"}
    assert [value[1] for value in values] == [None, "secret"]


def test_where_nobody_can_be_asked_the_rank_is_told_so(dialogue):
    dialogue.run("%%distributed -n 2\ninput()", allow_stdin=False)
    assert dialogue.error
    assert "EOFError: nobody could be asked" in dialogue.error


def test_the_time_that_the_user_takes_is_not_the_runs(dialogue):
    """The limit is for the ranks; it begins again where it stood."""

    class Slow(list[str]):
        def pop(self, index=-1):
            time.sleep(2.5)  # longer than the limit
            return super().pop(index)

    slow = Slow(["late"])
    dialogue.kernel.client.execute_interactive(
        "%%distributed -n 2 --timeout 2 --out res\ninput() if rank == 1 else None",
        stdin_hook=lambda _: dialogue.kernel.client.input(slow.pop()),
        output_hook=lambda _: None,
        timeout=PATIENCE,
    )
    assert dialogue.kernel.value("res.values") == [None, "late"]


def test_a_breakpoint_stops_in_the_cell_while_the_others_wait(session):
    asked = session.run(
        "%%distributed --out res\nimport torch.distributed as dist\nx = 5\nif rank == 1:\n    breakpoint()\n"
        "    x = 6\ndist.barrier()\nx",
        *("p x", "x = 7", "n", "c"),
    )
    assert not session.error
    assert asked == [("[rank 1] (Pdb) ", False)] * 4
    assert "[rank 1] -> x = 6" in session.said
    assert "[rank 1] 5" in session.said
    assert session.kernel.value("res.values") == [5, 6]


def test_the_frames_of_a_ranks_last_exception_can_be_looked_at_where_they_are(session):
    session.run(
        "%%distributed\nsecret = 40 + rank\ndef divide(by):\n    return secret / by\ndivide(1 - rank)"
    )
    assert session.error
    asked = session.run("%distributed debug", "p secret, by", "up", "p rank", "q")
    assert not session.error
    assert asked == [("[rank 1] (Pdb) ", False)] * 4
    assert "[rank 1] (41, 0)" in session.said
    session.run("%distributed debug 0")
    assert session.error
    assert "no job has failed on this rank" in session.error
    session.run("%%distributed --out res\nsecret")
    assert session.kernel.value("res.values") == [40, 41]


def test_an_interrupt_ends_a_question(session):
    client = session.kernel.client
    message = client.execute("%%distributed --out res\ny = 1\ninput('for ever ')", allow_stdin=True)
    asked = client.get_stdin_msg(timeout=PATIENCE)
    assert asked["content"]["prompt"].endswith("for ever ")
    session.kernel.interrupt()
    deadline = time.monotonic() + PATIENCE
    reply: Any = None
    while reply is None or reply["parent_header"]["msg_id"] != message:
        assert time.monotonic() < deadline
        with contextlib.suppress(queue.Empty):
            reply = client.get_shell_msg(timeout=1)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    session.run("%%distributed --out res\ny")
    assert not session.error
    assert session.kernel.value("res.values") == [1, 1]
