"""While an ending job waits for ranks in C code, every view says which these are, and what ends them."""

from __future__ import annotations

import io

from nblaunch.protocol.messages import Payload, Returned, Started, Waiting
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.panel_parts import RankNotes
from nblaunch.view.terminal_view import LiveLines, Terminal

SAID = "interrupted 3 s ago, still at cell line 2: torch.linalg.svd(a)"
AGAIN = "a second interrupt ends all ranks, and their variables are lost"


def waiting(said: str = SAID) -> RunState:
    """Return the state of two ranks at work, the second of which is waited for."""
    state = RunState.fresh(2)
    for rank in (0, 1):
        state = advance(state, Started(rank=rank, time=1.0))
    return advance(state, Waiting(ranks={1: said}))


def test_the_panel_marks_the_rank():
    ranks = RankNotes()
    ranks.update(waiting(), 0.0)
    assert ranks.marks == {1: f"{SAID}; {AGAIN}"}
    assert ranks.update(advance(waiting(), Waiting(ranks={})), 1.0) == {1}
    assert ranks.marks == {}


def test_the_time_goes_on_in_the_panel():
    ranks = RankNotes()
    ranks.update(waiting(), 0.0)
    assert 1 in ranks.update(waiting(SAID.replace("3 s", "4 s")), 1.0)
    assert ranks.marks[1].startswith("interrupted 4 s ago")


def test_a_terminal_says_it_once_in_a_line_of_its_own():
    lines = LiveLines()
    assert list(lines.take(waiting())) == [f"[rank 1] {SAID}", f"[nblaunch] {AGAIN}"]
    assert list(lines.take(waiting(SAID.replace("3 s", "4 s")))) == []


def test_a_terminals_status_says_how_long():
    terminal = Terminal(io.StringIO(), clock=lambda: 0.0)
    assert terminal._status(waiting()) == f"[nblaunch] 2 running, rank 1 {SAID}, 0 s"


def test_a_rank_that_has_ended_is_waited_for_no_more():
    ended = advance(waiting(), Returned(rank=1, value=Payload(()), time=2.0))
    assert list(LiveLines().take(ended)) == []
