"""Many ranks on many hosts are a few lines: hosts that are alike together, the ones that differ by name."""

from __future__ import annotations

import io
import time

import msgspec
import pytest
from shown_runs import parts_of

from nblaunch._results import SessionInfo, SessionStatus, sessions_table
from nblaunch.diagnose import hang
from nblaunch.protocol import messages as wire
from nblaunch.protocol.client import RankStatus
from nblaunch.protocol.reports import HangReport, LocatedAll, by_host
from nblaunch.protocol.state import RunState, advance, decode_state
from nblaunch.view.html import render_html
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header, hang_lines, headline
from nblaunch.view.terminal_view import Terminal
from nblaunch.view.text import render_text

HEADER = Header("cell", "gloo", node="notebook-host")
FAILED = wire.FailureRecord(type="builtins.ValueError", message="boom", time=2.0)
WAITING = wire.EngineStatus(engine="slurm", state=wire.EngineState.WAITING, id="3", joined=1, wanted=2)


def on_hosts(ranks: int, each: int = 8, *, started: bool = True) -> RunState:
    """Return the state of ranks at work, so many on each host."""
    places = {
        rank: wire.RankPlace(rank % each, f"h{rank // each:03}", "cpu", rank + 1, wire.Phase.JOB)
        for rank in range(ranks)
    }
    state = advance(RunState.fresh(ranks), wire.JobAssigned(ranks=places, attempt=0))
    for rank in range(ranks) if started else ():
        state = advance(state, wire.Started(rank=rank, time=1.0))
    return state


def ended(state: RunState, failed: tuple[int, ...] = (), text: str = "") -> RunState:
    """Return the state once all ranks have ended; those that `failed` with an error."""
    for rank in state.ranks:
        if rank in failed:
            state = advance(state, wire.Raised(rank=rank, failure=FAILED))
        else:
            state = advance(state, wire.Returned(rank=rank, value=wire.Payload(()), time=2.0, text=text))
    return state


# --- the fold ------------------------------------------------------------------------------------------


def words(ranks: int, **others: str) -> tuple[dict[int, str], dict[int, str]]:
    found = {rank: others.get(f"r{rank}", "RUNNING") for rank in range(ranks)}
    return found, {rank: f"h{rank // 8}" for rank in range(ranks)}


def test_hosts_that_are_alike_are_one_line():
    assert by_host(*words(512)) == ["64 hosts x 8 ranks: RUNNING"]


def test_the_ones_that_differ_are_named_and_the_rarest_comes_first():
    found, hosts = words(512, r139="FAILED", **{f"r{rank}": "STARTING" for rank in range(200, 208)})
    assert by_host(found, hosts) == [
        "62 hosts x 8 ranks: RUNNING",
        "h17: rank 139 FAILED, ranks 136-138,140-143 RUNNING",
        "h25: ranks 200-207 STARTING",
    ]
    assert by_host(found, hosts, named=False) == [
        "62 hosts x 8 ranks: RUNNING",
        "1 host x 8 ranks: 1 FAILED, 7 RUNNING",
        "1 host x 8 ranks: STARTING",
    ]


def test_ranks_without_a_host_are_named_by_themselves():
    found, hosts = words(16, r15="INIT")
    del hosts[15]
    assert by_host(found, hosts) == ["h0: ranks 0-7 RUNNING", "h1: ranks 8-14 RUNNING", "rank 15 INIT"]
    assert by_host(found, {}) == ["rank 15 INIT, ranks 0-14 RUNNING"]
    assert by_host({}, {}) == []


def test_however_the_hosts_differ_there_are_a_few_lines():
    found = {rank: str(rank // 8) for rank in range(512)}
    lines = by_host(found, words(512)[1])
    assert len(lines) == 13
    assert lines[-1] == "… 52 more kinds of hosts …"


# --- what is saved ----------------------------------------------------------------------------------------


def test_a_run_that_went_well_names_no_host_in_what_is_saved():
    state = ended(on_hosts(512), text="7")
    text, page = render_text(state, HEADER), render_html(state, HEADER)
    for shown in (text, page):
        assert "64 hosts x 8 ranks: SUCCEEDED" in shown
        assert "h000" not in shown
    uneven = ended(on_hosts(20), text="7")
    assert "2 hosts x 8 ranks: SUCCEEDED" in render_text(uneven, HEADER)
    assert "h002" not in render_text(uneven, HEADER)


def test_a_failure_on_one_of_64_hosts_is_named_in_text_and_html():
    state = ended(on_hosts(512), failed=(139,), text="7")
    text, page = render_text(state, HEADER), render_html(state, HEADER)
    for shown in (text, page):
        assert "63 hosts x 8 ranks: SUCCEEDED" in shown
        assert "h017: rank 139 FAILED, ranks 136-138,140-143 SUCCEEDED" in shown
    assert "root cause: rank 139 on h017: ValueError: boom" in text


def test_the_table_of_a_run_that_failed_has_the_host_of_the_rank_that_did():
    page = render_html(ended(on_hosts(4, 2), failed=(3,)), HEADER)
    assert page.count("h001") == 2, "the root cause, and its row in the table"
    assert ">on h001: root cause<" in page
    assert "h000" not in page
    assert "h00" not in render_html(ended(on_hosts(4, 2)), HEADER)


def test_few_ranks_are_listed_and_not_folded():
    assert "hosts x" not in render_text(ended(on_hosts(16)), HEADER)
    assert "hosts x" not in render_html(ended(on_hosts(16)), HEADER)


def test_8192_ranks_leave_room_in_the_notebook_and_are_drawn_in_a_moment():
    state = ended(on_hosts(8192), failed=(5000,), text="7")
    began = time.process_time()
    page, text = render_html(state, HEADER), render_text(state, HEADER)
    assert time.process_time() - began < 5
    assert len(page) + len(text) < 20_000
    assert ">0-4999,5001-8191<" in page
    assert "1023 hosts x 8 ranks: SUCCEEDED" in page
    assert page.count("<tr>") == 3, "a head, those that have ended well, and the one that has not"


# --- what is live --------------------------------------------------------------------------------------


def status_of(state: RunState) -> str:
    return Terminal(io.StringIO(), clock=lambda: 0.0)._status(state)


def test_a_terminals_status_folds_hosts():
    assert status_of(on_hosts(512)) == "[nblaunch] 64 hosts x 8 ranks: running, 0 s"
    state = advance(on_hosts(512), wire.Raised(rank=139, failure=FAILED))
    assert "h017: rank 139 failed" in status_of(state)
    assert status_of(on_hosts(16)) == "[nblaunch] 16 running, 0 s"


def test_the_panel_has_the_fold_in_its_head_and_sends_it_only_when_it_changes():
    drawing = Drawing(HEADER, 0.0)
    state = on_hosts(512)
    delta = drawing.changes(state, 0.0)
    assert delta is not None
    assert '<div class="nblaunch-hosts"><div>64 hosts x 8 ranks: RUNNING</div></div>' in str(
        delta["parts"]["head"]
    )
    assert drawing.changes(state, 0.1) is None
    delta = drawing.changes(advance(state, wire.Raised(rank=139, failure=FAILED)), 0.2)
    assert delta is not None
    assert "</div><div>h017: rank 139 FAILED" in str(delta["parts"]["head"])
    assert [key for key in delta["parts"] if key[0] in "rh" and key[1:].isdigit()] == ["r139", "h17"]


def test_an_earlier_attempt_in_the_panel_names_hosts():
    state = advance(on_hosts(4, 2), wire.Raised(rank=3, failure=FAILED))
    state = advance(state, wire.AttemptStarted(number=1, world_size=4, time=3.0, reason="failure"))
    assert "Root cause: rank 3 on h001:</strong>" in parts_of(state)["attempts"]


# --- nodes that are awaited, and what becomes known with them ---------------------------------------------


def test_while_nodes_are_awaited_no_rank_is_promised():
    state = advance(RunState.fresh(2), WAITING)
    head = parts_of(state)["head"]
    assert ">WAITING</span>" in head
    assert "nblaunch-waits" in head
    assert ">cell</span>" in head, "neither their number nor their backend is known"


def test_the_backend_in_the_head_is_that_of_the_nodes_once_they_have_met():
    state = advance(RunState.fresh(2), msgspec.structs.replace(WAITING, state=wire.EngineState.RUNNING))
    assert headline(state, "cell", "gloo") == "cell"
    started = wire.AttemptStarted(number=0, world_size=16, time=1.0, backend="cpu:gloo,cuda:nccl")
    state = advance(state, started)
    assert headline(state, "cell", "gloo") == "cell · 16 ranks · cpu:gloo,cuda:nccl"
    assert decode_state(wire.encode(state)) == state
    again = advance(state, wire.AttemptStarted(number=1, world_size=8, time=1.0))
    assert headline(again, "cell", "gloo") == "cell · 8 ranks · cpu:gloo,cuda:nccl"


def test_a_run_on_this_machine_has_the_backend_that_it_was_placed_with():
    state = advance(RunState.fresh(2), wire.AttemptStarted(number=0, world_size=2, time=1.0))
    assert headline(state, "cell", "nccl") == "cell · 2 ranks · nccl"


# --- sessions --------------------------------------------------------------------------------------------


def ranks_of(count: int) -> tuple[RankStatus, ...]:
    return tuple(
        RankStatus(rank, "idle", rank, "cpu", 10_000_000, node=f"h{rank // 8:03}", cpu=2.0)
        for rank in range(count)
    )


def test_a_sessions_status_has_host_memory_and_cpu_of_each_rank():
    lines = str(SessionStatus("train", 16, "gloo", 0, ranks_of(16))).split("\n")
    assert lines[1] == "  rank 0 on h000: idle, cpu, 10 MB, CPU 2 %"
    assert lines[16] == "  rank 15 on h001: idle, cpu, 10 MB, CPU 2 %"


def test_the_status_of_many_ranks_is_folded_by_host():
    ranks = list(ranks_of(1024))
    assert str(SessionStatus("train", 1024, "gloo", 0, tuple(ranks))).split("\n") == [
        "session 'train': 1024 ranks, gloo",
        "  128 hosts x 8 ranks: idle",
        "  together: 10.2 GB of memory, 10 MB at most, CPU 2048 %",
    ]
    ranks[139] = RankStatus(139, "running", 1, "cpu", None, "asks 'name? '", node="h017")
    shown = str(SessionStatus("train", 1024, "gloo", 0, tuple(ranks)))
    assert "h017: rank 139 running, asks 'name? ', ranks 136-138,140-143 idle" in shown


def test_the_table_of_sessions_counts_hosts_and_names_few_devices():
    info = SessionInfo(
        name="train",
        detached=True,
        started=1.7e9,
        kernel=7,
        pid=8,
        world_size=128,
        backend="nccl",
        ranks=tuple(
            RankStatus(rank, "idle", rank, f"cuda:{rank % 16}", None, node=f"h{rank // 16}")
            for rank in range(128)
        ),
    )
    line = sessions_table([info])
    assert "128 ranks (nccl) on 8 hosts, cuda:0, " in line
    assert "cuda:7, 8 more devices" in line
    assert "cuda:8" not in line


# --- ranks that do not answer ------------------------------------------------------------------------------


def silent_report(silent: dict[int, str]) -> HangReport:
    return hang.report({}, silent=silent, hosts={rank: f"h{rank // 8}" for rank in range(64)})


def test_silent_ranks_with_one_stack_are_one_entry_with_their_hosts():
    same = '  File "/x/train.py", line 3, in step'
    report = silent_report({0: same, 9: same, 10: "  other"})
    assert str(report).split("\n") == [
        "[rank 0 on h0, rank 9 on h1] gave no answer (C code holds their interpreters, or they are stopped)",
        f"    {same}",
        "[rank 10 on h1] gave no answer (C code holds its interpreter, or it is stopped)",
        "      other",
    ]
    state = advance(on_hosts(64), LocatedAll(report=report))
    assert hang_lines(state) == [
        "[rank 0 on h0, rank 9 on h1] gave no answer",
        "[rank 10 on h1] gave no answer",
    ]


@pytest.mark.parametrize("count", [1024])
def test_a_thousand_silent_ranks_are_a_short_report(count):
    report = hang.report(
        {},
        silent=dict.fromkeys(range(count), "  same"),
        hosts={rank: f"h{rank // 8}" for rank in range(count)},
    )
    assert str(report).startswith("[ranks 0-1023 on 128 hosts] gave no answer")
    assert len(str(report)) < 200
