"""Each job of real ranks, followed from its listeners: both folds end in the same state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nblaunch
from nblaunch.group.group import WorkerGroup
from nblaunch.group.job import Job
from nblaunch.protocol.messages import Prepare, encode
from nblaunch.protocol.state import (
    Message,
    RunState,
    advance,
    decode_folded,
    decode_state,
)


class Followed:
    """A job's second fold."""

    def __init__(self, group: WorkerGroup, job: Job) -> None:
        self.group, self.job = group, job
        self.state = decode_state(encode(job.state))
        self.messages: list[Message] = []
        self.threads: set[str] = set()
        self.frames: list[bytes] = []
        self.ends: list[tuple[bool, RunState]] = []
        job.listeners.append(self.follow)
        self.finish, job.finish = job.finish, self.finished  # type: ignore[assignment,method-assign]

    def finished(self, *arguments: Any) -> None:
        self.finish(*arguments)
        self.ends.append((self.job.ended.is_set(), self.state))

    def follow(self, _: Message, raw: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        self.frames.append(raw)
        self.messages.append(decode_folded(raw))
        self.state = advance(self.state, self.messages[-1])

    def kinds(self) -> list[str]:
        return sorted({type(each).__name__ for each in self.messages})

    def check(self) -> None:
        assert self.state == self.job.state
        assert self.ends == [(True, self.job.state)]
        assert self.threads == {"nblaunch-hub"}
        assert not [each for each in self.frames if self.group.token.encode() in each]


followed: list[Followed] = []
sent: list[bytes] = []
"""All jobs, and all that ranks have sent, in the runtime, which imports this file."""


def follow() -> None:
    """Follow every job from the moment in which it is given to its group."""
    begin, receive = WorkerGroup.begin, WorkerGroup.receive

    def begin_followed(group: WorkerGroup, job: Job | None, prepare: Prepare) -> None:
        if job is not None:
            followed.append(Followed(group, job))
        begin(group, job, prepare)

    def receive_noted(group, message, data=None):
        sent.append(data)
        receive(group, message, data)

    WorkerGroup.begin = begin_followed  # type: ignore[assignment,method-assign]
    WorkerGroup.receive = receive_noted  # type: ignore[method-assign]


def same() -> list[str]:
    """Return the messages that were published as the ranks have sent them."""
    (job,) = followed
    published = {id(each) for each in job.frames}
    return [type(decode_folded(each)).__name__ for each in sent if id(each) in published]


@pytest.fixture
def look(poke) -> Iterator[Callable[[str], Any]]:
    """Follow the jobs of the runtime; give what runs code there, where these are `followed`."""
    poke("from test_followed import *")
    poke("follow()")
    yield poke
    poke("for each in followed:\n    each.check()\n")


CELL = """
import sys
from IPython.display import display
print("out", rank, "\\udcff")
print("err", file=sys.stderr)
display({"image/png": "aGk=", "text/plain": "figure"}, raw=True)
{"value": rank}
"""


def test_a_fresh_run_is_followed_from_its_first_fork(look):
    assert nblaunch.run(lambda: (print("here"), 7)[1], nproc=2).values == [7, 7]
    assert look("len(followed)") == 1
    assert {"JobAssigned", "Hello", "Printed", "Returned"} <= set(look("followed[0].kinds()"))
    assert look("followed[0].state.summary.name") == "SUCCEEDED"


def test_the_jobs_of_a_session_are_followed_with_output_failures_and_deaths(look, place):
    with place(2, grace=1) as session:
        session.cell(CELL)
        assert {"Displayed", "Printed", "Returned"} <= set(look("followed[-1].kinds()"))
        assert "Hello" not in look("followed[-1].kinds()"), "its ranks were there before it"
        assert session.cell("1 / rank", check=False).failures[0].rank == 0
        assert "Raised" in look("followed[-1].kinds()")
        with pytest.raises(nblaunch.RunFailedError):
            session.cell("import os; os.kill(os.getpid(), 9)")
        assert session.cell("rank").values == [0, 1]


def test_a_job_that_is_interrupted_is_followed_with_where_its_ranks_were(look, place):
    with place(2, grace=1, timeout=2) as session:
        with pytest.raises(nblaunch.RunTimeoutError):
            session.cell("import time; time.sleep(60)")
        assert "LocatedAll" in look("followed[-1].kinds()")
        assert look("followed[-1].state.hang is not None")


def test_a_message_that_was_not_changed_on_the_way_is_published_as_its_rank_has_sent_it(look):
    nblaunch.run(print, ("here",), nproc=2)
    unchanged = look("same()")
    assert unchanged.count("Returned") == 2
    assert "Hello" not in unchanged
