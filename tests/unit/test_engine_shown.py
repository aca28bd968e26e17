"""What an engine says of its nodes is in every view, and hosts are named where there are several."""

from __future__ import annotations

import html
import io
import json
import re
import time

import msgspec
import pytest
from shown_runs import parts_of

from nblaunch._results import (
    RankFailure,
    RankResults,
    RunResult,
    SessionInfo,
    SessionStatus,
    nodes_line,
    sessions_table,
    time_is_short,
)
from nblaunch.client.result import describe
from nblaunch.diagnose import hang
from nblaunch.diagnose.failures import blame
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages as wire
from nblaunch.protocol.client import RankStatus
from nblaunch.protocol.reports import LocatedAll, ranks_on
from nblaunch.protocol.state import RunState, advance, decode_state, hosts_of
from nblaunch.view import display
from nblaunch.view.display import TextView, html_and_text
from nblaunch.view.html import render_html
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header
from nblaunch.view.terminal_view import Terminal
from nblaunch.view.text import render_text

HEADER = Header("cell", "gloo", node="notebook-host")
NOON = 1_700_000_000.0
WAITING = wire.EngineStatus(
    engine="slurm",
    state=wire.EngineState.WAITING,
    id="3",
    words="PENDING",
    reason="Resources",
    place="priority 4294901757",
    joined=1,
    wanted=2,
)
WAITS = "waiting for slurm: job 3 PENDING (Resources), priority 4294901757, 1 of 2 nodes here"
PLACED = wire.EngineStatus(
    engine="slurm",
    state=wire.EngineState.RUNNING,
    id="3",
    hosts=("hA", "hB"),
    joined=2,
    wanted=2,
    reason="None",
)
HOSTS = ("hA", "hA", "hB", "hB")


def waiting(**changes):
    return advance(RunState.fresh(4), msgspec.structs.replace(WAITING, **changes))


def lasting(seconds: float) -> wire.EngineStatus:
    """Return nodes that stay for so long; a second more, for the time that the test takes."""
    return msgspec.structs.replace(PLACED, ends=time.time() + seconds + 1)


def on_host(state: RunState, rank: int, host: str) -> RunState:
    """Return the state after a rank has connected from a host."""
    hello = wire.Hello(rank=rank, token="", attempt=0, local_rank=0, world_size=4, node=host, pid=rank + 1)
    return advance(state, hello)


def on_two_hosts(*messages):
    """Return the state of four ranks at work, two on each host, after these messages."""
    state = advance(RunState.fresh(4), PLACED)
    for rank, host in enumerate(HOSTS):
        state = on_host(state, rank, host)
        state = advance(state, wire.Started(rank=rank, time=1.0))
    for message in messages:
        state = advance(state, message)
    return state


# --- the line itself ---------------------------------------------------------------------------------


def test_a_wait_has_its_state_reason_place_and_who_is_here():
    assert nodes_line(WAITING, NOON) == WAITS


def test_an_expected_start_is_in_local_time(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    soon = nodes_line(msgspec.structs.replace(WAITING, starts=NOON + 600), NOON)
    assert soon == WAITS.replace(", 1 of", ", start about 22:23, 1 of")
    later = nodes_line(msgspec.structs.replace(WAITING, starts=NOON + 86_400), NOON)
    assert "start about Nov 15 22:13" in later
    past = msgspec.structs.replace(WAITING, starts=NOON - 1)
    assert nodes_line(past, NOON) == WAITS, "what has passed is no estimate"


@pytest.fixture(autouse=True)
def own_time_zone():
    """Put the time zone back."""
    yield
    time.tzset()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "slurm job 3 on hA,hB"),
        ({"ends": NOON + 1620}, "slurm job 3 on hA,hB, 27 min left"),
        ({"ends": NOON + 95}, "slurm job 3 on hA,hB, 95 s left"),
        ({"ends": NOON - 5}, "slurm job 3 on hA,hB, 0 s left"),
        ({"engine": "ssh", "id": ""}, "ssh on hA,hB"),
        ({"engine": "join", "id": "", "hosts": ()}, "join, 2 nodes"),
        ({"hosts": tuple(f"h{number}" for number in range(9))}, "slurm job 3 on h0,h1,h2,h3 and 5 more"),
        ({"state": wire.EngineState.ENDING}, "slurm job 3 on hA,hB, ending"),
        ({"state": wire.EngineState.ENDED, "reason": "cancelled"}, "slurm job 3 has ended (cancelled)"),
    ],
)
def test_nodes_that_are_there_are_named_with_the_time_left(changes, line):
    assert nodes_line(msgspec.structs.replace(PLACED, **changes), NOON) == line


def test_time_is_short_in_the_last_ten_minutes():
    assert time_is_short(msgspec.structs.replace(PLACED, ends=NOON + 599), NOON)
    assert not time_is_short(msgspec.structs.replace(PLACED, ends=NOON + 601), NOON)
    assert not time_is_short(PLACED, NOON), "without a limit"
    assert not time_is_short(msgspec.structs.replace(WAITING, ends=NOON), NOON)


# --- the panel ---------------------------------------------------------------------------------------


def nodes_in(head):
    """Return the class and the text of the line about nodes."""
    found = re.search(r'<div class="(nblaunch-nodes[^"]*)">(.*?)</div>', head)
    assert found is not None
    return found[1], html.unescape(found[2])


def test_the_panel_shows_the_wait_and_then_the_nodes():
    drawing = Drawing(HEADER, 0.0)
    delta = drawing.changes(waiting(), 0.0)
    assert delta is not None
    assert nodes_in(delta["parts"]["head"])[1] == WAITS
    assert drawing.changes(waiting(), 0.1) is None, "nothing has changed"
    delta = drawing.changes(waiting(joined=2), 0.2)
    assert delta is not None
    assert nodes_in(delta["parts"]["head"])[1].endswith("2 of 2 nodes here")
    assert list(delta["parts"]) == ["head"], "no rank has changed"
    drawing.changes(advance(waiting(), lasting(1620)), 0.3)
    whole = json.loads(json.dumps(drawing.whole(0.4)))
    assert nodes_in(whole["parts"]["head"]) == ("nblaunch-nodes", "slurm job 3 on hA,hB, 27 min left")


def test_the_panel_warns_of_the_last_minutes():
    name, line = nodes_in(parts_of(advance(waiting(), lasting(300)))["head"])
    assert line.startswith("⚠")
    assert line.endswith("5 min left")
    assert name == "nblaunch-nodes nblaunch-soon"


def test_the_panel_names_the_notebooks_machine_only_if_no_engine_places_nodes():
    here = parts_of(RunState.fresh(2))["head"]
    assert " · notebook-host<" in here
    assert "nblaunch-nodes" not in here
    assert "notebook-host" not in parts_of(waiting())["head"]


def test_each_rank_in_the_panel_has_its_host_where_there_are_several():
    parts = parts_of(on_two_hosts())
    for rank, host in enumerate(HOSTS):
        assert f'data-host="{host}">{host} · ' in parts[f"r{rank}"]
    alone = parts_of(on_host(RunState.fresh(1), 0, "hA"))
    assert "hA" not in alone["r0"]


def test_a_host_is_sent_when_the_second_one_comes():
    drawing = Drawing(HEADER, 0.0)
    state = on_host(RunState.fresh(2), 0, "hA")
    drawing.changes(state, 0.0)
    delta = drawing.changes(on_host(state, 1, "hB"), 0.1)
    assert delta is not None
    for rank, host in enumerate(("hA", "hB")):
        assert f'data-host="{host}"' in str(delta["parts"][f"r{rank}"])


# --- terminals and text ------------------------------------------------------------------------------


def status_of(state):
    return Terminal(io.StringIO(), clock=lambda: 0.0)._status(state)


def test_a_terminals_status_is_the_wait_and_then_names_the_nodes():
    assert status_of(waiting()) == f"[nblaunch] {WAITS}, 0 s"
    placed = advance(on_two_hosts(), lasting(1620))
    assert status_of(placed) == "[nblaunch] 4 running, slurm job 3 on hA,hB, 27 min left, 0 s"


def test_text_that_is_no_terminal_gets_the_wait_on_stderr_once(capsys):
    view = TextView(HEADER)
    view.open(RunState.fresh(4))
    for state in (RunState.fresh(4), waiting(), waiting(), waiting(place="priority 5"), waiting(joined=2)):
        view.draw(state)
    view.draw(on_two_hosts())
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{WAITS}\n{WAITS.replace('1 of', '2 of')}\n"


def test_a_page_without_widgets_sees_what_is_awaited(monkeypatch):
    shown = []
    monkeypatch.setattr(display, "_display", lambda bundle, **_: shown.append(bundle))
    now = 0.0
    view = display.WidgetView(HEADER, clock=lambda: now)
    view.open(waiting())
    now = 1.0
    view.draw(waiting())
    view._panel.close()
    assert WAITS in shown[0]["text/html"]
    assert WAITS in shown[0]["text/plain"]


def test_what_is_saved_of_a_run_holds_no_engine_and_no_host():
    values = [wire.Returned(rank=rank, value=wire.Payload(()), time=2.0) for rank in range(4)]
    state = advance(on_two_hosts(*values), lasting(300))
    for text in html_and_text(state, HEADER).values():
        assert isinstance(text, str)
        assert "SUCCEEDED" in text
        for word in ("slurm", "hA", "hB", "min left"):
            assert word not in text


def test_the_last_word_of_the_engine_travels_with_the_state():
    assert decode_state(wire.encode(waiting())) == waiting()


# --- sessions ----------------------------------------------------------------------------------------


def session(engine: wire.EngineStatus | None, running: str = "") -> SessionInfo:
    return SessionInfo(
        name="train",
        detached=True,
        started=NOON,
        kernel=7,
        pid=8,
        world_size=4,
        backend="gloo",
        running=running,
        engine=engine,
    )


def test_the_table_of_sessions_has_the_wait_in_the_place_of_idle():
    assert f"  {WAITS}  " in sessions_table([session(WAITING)])
    assert "idle" not in sessions_table([session(WAITING)])


def test_the_table_of_sessions_has_the_nodes_beside_the_ranks():
    line = str(session(lasting(1620), running="cell"))
    assert "4 ranks (gloo), slurm job 3 on hA,hB, 27 min left  runs cell" in line
    assert "4 ranks (gloo)  idle" in str(session(None))


def test_a_sessions_status_has_the_line_below_its_name():
    ranks = (RankStatus(0, "idle", 1, "cpu", None),)
    status = SessionStatus("train", 1, "gloo", 0, ranks, lasting(1620))
    assert str(status).split("\n") == [
        "session 'train': 1 ranks, gloo",
        "  slurm job 3 on hA,hB, 27 min left",
        "  rank 0: idle, cpu",
    ]


# --- hosts of ranks that fail or hang ----------------------------------------------------------------

FAILED = wire.FailureRecord(type="builtins.ValueError", message="boom", time=2.0)


def test_ranks_have_their_hosts_only_where_there_are_several():
    assert hosts_of(on_two_hosts().ranks) == dict(enumerate(HOSTS))
    alone = on_host(RunState.fresh(2), 0, "hA")
    assert hosts_of(alone.ranks) == {}
    assert ranks_on([0, 1], {}) == "ranks 0-1"
    assert ranks_on([3, 0, 1], dict(enumerate(HOSTS))) == "ranks 0-1 on hA, rank 3 on hB"
    assert ranks_on(range(64), {rank: f"h{rank // 8}" for rank in range(64)}) == "ranks 0-63 on 8 hosts"


def test_failures_and_their_consequences_name_the_host_in_every_view():
    closed = wire.FailureRecord(type="builtins.RuntimeError", message="Connection closed by peer", time=1.0)
    state = on_two_hosts(
        wire.Raised(rank=3, failure=FAILED),
        wire.Raised(rank=0, failure=closed),
        wire.Exited(rank=1, exitcode=-15, expected=True, time=3.0),
        wire.Exited(rank=2, exitcode=-15, expected=True, time=3.0),
    )
    assert blame(state.ranks).root == "rank 3 on hB"
    text = render_text(state, HEADER)
    assert "root cause: rank 3 on hB: ValueError: boom" in text
    assert "rank 0 on hA: consequence of rank 3 on hB" in text
    assert "ranks 1-2: STOPPED, because of rank 3 on hB" in text
    assert "Root cause: rank 3 on hB:" in render_html(state, HEADER)
    assert "Root cause: rank 3 on hB:" in parts_of(state)["failure"]


def test_the_error_of_a_run_names_the_host():
    result = RunResult(
        ranks=RankResults(()), world_size=4, _state=on_two_hosts(wire.Raised(rank=3, failure=FAILED))
    )
    root = RankFailure(
        *(3, None, "builtins.ValueError", "boom", "", (), 1, None, 2.0, wire.Phase.JOB),
        reason="ValueError: boom",
    )
    assert describe(result, root, LaunchOptions()) == "rank 3 on hB failed: ValueError: boom"


def test_a_hosts_name_is_no_markup():
    state = RunState.fresh(2)
    for rank, host in enumerate(("<b>", "<i>")):
        state = on_host(state, rank, host)
    page = render_html(advance(state, wire.Raised(rank=1, failure=FAILED)), HEADER)
    assert "rank 1 on &lt;i&gt;" in page
    assert "<i>" not in page


def stuck_report():
    """Return the report of ranks 2 and 3 in a collective that the others have not started."""
    frames = (wire.FrameRecord("Cell In[3]", 4, "<module>", "dist.all_reduce(x)"),)

    def collective(number):
        return wire.Collective(wire.DEFAULT_GROUP, number, "all_reduce", backend="gloo", ranks=(0, 1, 2, 3))

    answers = {
        rank: wire.Where(rank=rank, frames=frames, collectives=(collective(4 if host == "hB" else 3),))
        for rank, host in enumerate(HOSTS)
    }
    return hang.report(answers, finished=(), hosts=hosts_of(on_two_hosts().ranks))


def test_a_hang_report_names_hosts():
    report = stuck_report()
    assert "ranks 2-3 on hB are in all_reduce #4, which ranks 0-1 on hA have not started" in str(report)
    assert "[ranks 0-1 on hA, ranks 2-3 on hB] at cell line 4" in report.summary
    state = advance(on_two_hosts(), LocatedAll(report=report))
    assert decode_state(wire.encode(state)) == state
    for text in (render_text(state, HEADER), render_html(state, HEADER)):
        assert "[ranks 0-1 on hA, ranks 2-3 on hB] at cell line 4" in text


def test_a_hang_report_of_one_host_names_none():
    frames = (wire.FrameRecord("Cell In[3]", 4, "<module>", "dist.all_reduce(x)"),)
    report = hang.report({rank: wire.Where(rank=rank, frames=frames) for rank in (0, 1)})
    assert str(report).startswith("[ranks 0-1] at cell line 4")


def test_a_title_has_no_characters_that_a_terminal_obeys():
    table = sessions_table([session(None, running="f\r\x1b[2J\x1b]0;EVIL\x07")])
    assert all(each.isprintable() for each in table)
    assert "EVIL" in table
