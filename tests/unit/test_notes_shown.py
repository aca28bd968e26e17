"""What is told of ranks beside their state: that they finish, are waited for, or lost their nodes."""

from __future__ import annotations

import io

import pytest
from shown_runs import parts_of, returned, run_of

from nblaunch.diagnose import hang
from nblaunch.protocol import messages as wire
from nblaunch.protocol.state import RunState, advance, decode_state
from nblaunch.view.html import render_html
from nblaunch.view.panel_parts import Drawing, RankNotes
from nblaunch.view.summary import AGAIN, Header
from nblaunch.view.terminal_view import LiveLines, Terminal
from nblaunch.view.text import render_text

HEADER = Header("cell", "gloo")
SAVES, EXITS = (wire.Finishing(rank=1, what=what) for what in ("thread save", "exit functions"))
BOOM = wire.Raised(
    rank=1, failure=wire.FailureRecord(type="builtins.ValueError", message="boom", exitcode=1, time=2.0)
)
SAID = "interrupted 3 s ago, still at cell line 2: torch.linalg.svd(a)"
WAITED, LATER = (wire.Waiting(ranks={1: said}) for said in (SAID, SAID.replace("3 s", "4 s")))
WHY = "slurm job 7 is near its time limit"


def status_of(*messages):
    return Terminal(io.StringIO(), clock=lambda: 0.0)._status(run_of(2, *messages))


@pytest.mark.parametrize(
    ("histories", "marks"),
    [
        ([(SAVES,), (SAVES, EXITS)], ["is finishing: thread save", "is finishing: exit functions"]),
        ([(SAVES,), (SAVES, returned(1))], ["is finishing: thread save", None]),
        (
            [(BOOM, SAVES), (BOOM, wire.Exited(rank=1, exitcode=1, time=3.0))],
            ["is finishing: thread save", None],
        ),
        ([(WAITED,), (LATER,)], [f"{SAID}; {AGAIN}", f"{SAID.replace('3 s', '4 s')}; {AGAIN}"]),
        ([(WAITED,), (WAITED, wire.Waiting(ranks={}))], [f"{SAID}; {AGAIN}", None]),
    ],
    ids=["finishes", "finished", "failed", "waited for", "no longer"],
)
def test_the_panel_marks_the_rank_and_no_other_as_long_as_it_is_so(histories, marks):
    notes = RankNotes()
    for messages, mark in zip(histories, marks, strict=True):
        assert 1 in notes.update(run_of(2, *messages), 0.0)
        assert notes.marks == ({} if mark is None else {1: mark})


def test_a_terminals_status_says_it_and_a_wait_has_a_line_of_its_own_once():
    assert status_of(SAVES) == "[nblaunch] 2 running, rank 1 is finishing: thread save, 0 s"
    assert list(LiveLines().take(run_of(2, SAVES))) == []
    assert status_of(WAITED) == f"[nblaunch] 2 running, rank 1 {SAID}, 0 s"
    lines = LiveLines()
    assert list(lines.take(run_of(2, WAITED))) == [f"[rank 1] {SAID}", f"[nblaunch] {AGAIN}"]
    assert list(lines.take(run_of(2, LATER))) == []
    assert list(LiveLines().take(run_of(2, WAITED, returned(1)))) == [], "it has ended"


def test_what_stays_in_the_notebook_does_not_depend_on_it():
    ended = (returned(0), returned(1))
    assert render_text(run_of(2, SAVES, *ended), HEADER) == render_text(run_of(2, *ended), HEADER)


def test_a_report_says_what_each_rank_finishes_and_where_it_runs_the_users_code():
    library = wire.FrameRecord("/usr/lib/python3.11/threading.py", 9, "join", "self._wait()")
    own = wire.FrameRecord("Cell In[1]", 3, "bye", "time.sleep(9)")
    frames = {0: (library,), 1: (library, own), 2: (library,)}
    answers = {rank: wire.Where(rank=rank, frames=found) for rank, found in frames.items()}
    report = hang.report(answers, finishing={0: "thread save", 1: "exit functions"})
    assert [each.headline for each in report.groups] == [
        "finishing: thread save",
        "finishing: exit functions, at cell line 3 in bye: time.sleep(9)",
        "in join",
    ]


# --- nodes that were taken back: the run has not failed -----------------------------------------------------


@pytest.fixture
def preempted():
    """Give the state of a run of which rank 0 had its value."""
    ended = wire.Exited(rank=1, exitcode=1, time=3.0, expected=True)
    return run_of(2, returned(0, "7"), wire.RunPreempted(why=WHY), ended)


def test_a_run_whose_nodes_were_taken_back_is_shown_as_that_in_all_views(preempted):
    assert render_text(preempted, HEADER).splitlines() == [
        "rank 0: 7",
        "rank 1: STOPPED",
        f"warning: preempted: {WHY}",
    ]
    page, parts = render_html(preempted, HEADER), parts_of(preempted)
    assert "PREEMPTED" in page
    assert ">▣</span>PREEMPTED</span>" in parts["head"]
    for shown in (page, parts["failure"]):
        assert f"preempted: {WHY}" in shown
        assert "Root cause" not in shown
    assert decode_state(wire.encode(preempted)).summary == preempted.summary, "in another process, too"


def test_a_live_panel_says_at_once_that_the_nodes_are_taken_back():
    """The ranks may save for two minutes."""
    drawing, running = Drawing(HEADER, 0.0), RunState.fresh(2)
    drawing.changes(running, 0.5)
    news = drawing.changes(advance(running, wire.RunPreempted(why=WHY)), 1.0)
    assert news is not None
    assert f"warning: preempted: {WHY}" in str(news["parts"]["failure"])
    assert "INIT</span>" in drawing.whole(1.0)["parts"]["head"]
