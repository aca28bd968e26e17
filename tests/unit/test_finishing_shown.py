"""A rank whose job is done and which still works, as a script does at its end, is shown while it does."""

from __future__ import annotations

import io

from nblaunch.diagnose import hang
from nblaunch.protocol.messages import (
    Exited,
    FailureRecord,
    Finishing,
    FrameRecord,
    Payload,
    Raised,
    Returned,
    Started,
    Where,
)
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.panel_parts import RankNotes
from nblaunch.view.summary import Header
from nblaunch.view.terminal_view import LiveLines, Terminal
from nblaunch.view.text import render_text

SAVES = Finishing(rank=1, what="thread save")
RETURNED = Returned(rank=1, value=Payload(()), time=2.0)
BOOM = FailureRecord(type="builtins.ValueError", message="boom", exitcode=1, time=2.0)
HEADER = Header("cell", "gloo")


def after(*messages) -> RunState:
    """Return the state of two ranks at work after these messages."""
    state = RunState.fresh(2)
    for message in (Started(rank=0, time=1.0), Started(rank=1, time=1.0), *messages):
        state = advance(state, message)
    return state


def mark(ranks: RankNotes, state: RunState) -> str | None:
    assert 1 in ranks.update(state, 0.0)
    assert 0 not in ranks.marks
    return ranks.marks.get(1)


def test_the_panel_marks_the_rank_until_it_has_finished():
    rows = RankNotes()
    assert mark(rows, after(SAVES)) == "is finishing: thread save"
    assert (
        mark(rows, after(SAVES, Finishing(rank=1, what="exit functions"))) == "is finishing: exit functions"
    )
    assert mark(rows, after(SAVES, RETURNED)) is None


def test_the_panel_marks_a_rank_that_has_failed_too():
    rows, failed = RankNotes(), Raised(rank=1, failure=BOOM)
    assert mark(rows, after(failed, SAVES)) == "is finishing: thread save"
    assert rows.states[1].state == "FAILED"
    assert mark(rows, after(failed, SAVES, Exited(rank=1, exitcode=1, time=3.0))) is None


def test_a_terminal_says_it_in_its_status_and_in_no_line():
    terminal = Terminal(io.StringIO(), clock=lambda: 0.0)
    assert terminal._status(after(SAVES)) == "[nblaunch] 2 running, rank 1 is finishing: thread save, 0 s"
    assert list(LiveLines().take(after(SAVES))) == []


def test_what_stays_in_the_notebook_does_not_depend_on_it():
    first = Returned(rank=0, value=Payload(()), time=2.0)
    assert render_text(after(first, SAVES, RETURNED), HEADER) == render_text(after(first, RETURNED), HEADER)


def test_a_report_says_what_each_rank_finishes_and_where_it_runs_the_users_code():
    library = FrameRecord("/usr/lib/python3.11/threading.py", 9, "join", "self._wait()")
    own = FrameRecord("Cell In[1]", 3, "bye", "time.sleep(9)")
    answers = {
        0: Where(rank=0, frames=(library,)),
        1: Where(rank=1, frames=(library, own)),
        2: Where(rank=2, frames=(library,)),
    }
    report = hang.report(answers, finishing={0: "thread save", 1: "exit functions"})
    assert [each.headline for each in report.groups] == [
        "finishing: thread save",
        "finishing: exit functions, at cell line 3 in bye: time.sleep(9)",
        "in join",
    ]
