"""What memory ranks used is shown live and kept in the result; what held it is listed where it ran out."""

from __future__ import annotations

import html
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.lib.stride_tricks import sliding_window_view
from shown_runs import run_of

from nblaunch._resident import own_memory_here, resident_of, set_back_peak
from nblaunch.probes.held import largest
from nblaunch.protocol import messages as wire
from nblaunch.protocol.reports import held_lines
from nblaunch.protocol.state import advance, decode_state
from nblaunch.rank import memory
from nblaunch.view.html import render_html
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header
from nblaunch.view.text import render_text

USED = wire.MemoryUse(1 << 20, 3 << 20, 5, 7)
HEAD = Header("cell", "gloo")
MIB = 1 << 20


def returned(used):
    state = run_of(2)
    for rank in range(2):
        message = wire.Returned(rank=rank, value=wire.Payload(sizes=()), time=2.0, memory=used)
        state = advance(state, wire.decode_from_rank(wire.encode(message), "a rank"))
    return state


def used_by(drawing, state):
    drawing.changes(state, time.monotonic())
    return drawing.whole(time.monotonic())["parts"]["u0"]


# --- in the state, the panel, the saved notebook ----------------------------------------------------------


def test_the_panel_shows_what_a_rank_has_now_and_had_at_most_and_its_peak_once_it_has_ended():
    drawing = Drawing(HEAD, time.monotonic())
    usage = wire.Usage(cpu_percent=5.0, memory=MIB, memory_peak=9 * MIB)
    state = advance(run_of(2), wire.Measured(usages={0: usage}))
    assert used_by(drawing, state) == "CPU 5 % · 1 MiB · peak 9 MiB"
    assert used_by(drawing, returned(USED)) == "peak 3 MiB"


def test_what_a_rank_used_travels_with_the_state_and_a_dead_rank_has_what_was_measured_last():
    state = decode_state(wire.encode(returned(USED)))
    assert [rank.used for rank in state.ranks.values()] == [USED, USED]
    usage = wire.Usage(cpu_percent=5.0, memory=MIB, memory_peak=9 * MIB, gpu_memory=11)
    dead = decode_state(wire.encode(advance(run_of(2), wire.Measured(usages={1: usage}))))
    assert dead.ranks[1].used == wire.MemoryUse(MIB, 9 * MIB, 11, None)
    assert dead.ranks[0].used is None


def test_what_is_saved_of_a_run_is_the_same_whatever_memory_the_host_had():
    one, other = returned(USED), returned(replace(USED, host_now=99 * MIB, host_peak=999 * MIB))
    assert render_html(one, HEAD) == render_html(other, HEAD)
    assert render_text(one, HEAD) == render_text(other, HEAD)


HELD = wire.HeldMemory(
    size=64 * MIB, what="float32[4]", count=4, name="rows['<b>']", where="cell line 3 in train"
)


def failed(held):
    failure = wire.FailureRecord(type="builtins.MemoryError", message="", traceback="MemoryError", held=held)
    return advance(run_of(2), wire.Raised(rank=0, failure=failure))


def test_what_was_held_is_a_table_in_the_saved_page_and_in_the_panel_and_escaped_there():
    state = failed((HELD, replace(HELD, size=MIB, name="", where="", made="cell line 9", count=1)))
    page = render_html(state, HEAD)
    assert "What it held" in page
    assert "rows[&#x27;&lt;b&gt;&#x27;] (cell line 3 in train)" in page
    assert "<b>" not in page
    drawing = Drawing(HEAD, 0.0)
    drawing.changes(state, 0.0)
    lines = html.unescape(drawing.whole(0.0)["parts"]["failure"])
    assert "64 MiB  4 x float32[4]  rows['<b>']" in lines
    assert "1 MiB  float32[4]      made at cell line 9" in lines
    assert render_text(state, HEAD) == render_text(failed(()), HEAD)


def test_the_lines_of_what_was_held_are_in_columns():
    assert held_lines([HELD, replace(HELD, size=2048 * MIB, count=1, name="", where="")]) == [
        " 64 MiB  4 x float32[4]  rows['<b>'] (cell line 3 in train)",
        "2.0 GiB  float32[4]      in no variable",
    ]


# --- how a rank measures itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("can", [True, False])
def test_a_peak_is_that_of_the_job_also_where_the_system_cannot_set_it_back(monkeypatch, can):
    meter = memory.HostMeter()
    assert set_back_peak()
    large = torch.ones(25_000_000)
    del large
    if not can:
        monkeypatch.setattr(memory, "set_back_peak", lambda: False)
    meter.begin()
    now, peak = meter.measure()
    assert peak is not None
    assert now is not None
    assert peak - now < 50_000_000, "the peak of what was before"
    larger = torch.ones(75_000_000)
    del larger
    now, peak = meter.measure()
    assert now is not None
    assert peak is not None
    assert peak - now > 250_000_000


def test_a_short_job_of_a_large_rank_does_not_walk_its_pages(monkeypatch):
    meter = memory.HostMeter()
    meter.begin()
    meter.measure()
    monkeypatch.setattr(memory, "own_memory_here", lambda: pytest.fail("walked"))
    meter.begin()
    assert meter.measure()[0] is not None


def test_a_process_that_is_gone_or_a_system_that_does_not_tell_has_no_figures():
    assert resident_of(2**22 + 1) is None
    here = resident_of()
    assert here is not None
    own = own_memory_here()
    assert own is not None
    assert 0 < own <= here.now <= here.peak + (4 << 20)


# --- what is found ----------------------------------------------------------------------------------------


def found(**variables):
    return {each.name: each for each in largest([("here", variables)])}


def test_parameters_gradients_and_the_state_of_an_optimizer_are_found_under_their_names():
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1001, bias=False))
    # As one of torch's, which would load torch's compiler.
    optimizer = SimpleNamespace(state={})
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
        optimizer.state[weight] = {
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    rows = found(model=model, optimizer=optimizer)
    assert (rows["model"].count, rows["model"].size) == (2, 2 * 4 * 1000 * 1001)
    assert rows["optimizer"].count == 2


def within_itself():
    nested: list[object] = [torch.zeros(2_000_000)]
    nested.append(nested)
    return nested


def with_a_view():
    base = torch.zeros(10_000_000)
    return {"part": base[:10], "base": base}


@pytest.mark.parametrize(
    ("make", "name", "size"),
    [
        (with_a_view, "part", 40_000_000),
        (lambda: {"windows": sliding_window_view(np.zeros(2_000_000), 3)}, "windows", 16_000_000),
        (lambda: {"nested": within_itself()}, "nested[0]", 8_000_000),
    ],
    ids=["a view and its base, by the first name", "a window onto an array", "a container within itself"],
)
def test_memory_has_one_name_and_counts_once_as_all_that_is_held(make, name, size):
    variables = make()
    rows = found(**variables)
    assert rows[name].size == size
    assert not rows.keys() & {"base"}
    assert largest([("here", variables)], device="cuda:0") == (), "it is on another device"


def test_a_tensor_that_no_variable_leads_to_is_found_too():
    import gc

    hidden = torch.zeros(11_111_111)
    rows = largest([])
    assert any(each.size == 44_444_444 and not each.name for each in rows)
    del hidden
    gc.collect()


def test_ten_rows_at_most_and_none_for_what_is_small():
    rows = largest([("here", {f"x{number}": torch.zeros(1_000_000 + number) for number in range(30)})])
    assert len(rows) == 10
    assert all(each.size >= MIB for each in rows)


@pytest.mark.full
def test_a_fake_tensor_holds_nothing_and_is_not_warned_of(monkeypatch, tmp_path):
    # Importing the compiler sets it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(10_000_000)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert largest([("here", {"fake": fake})], device="cpu") == ()
    assert told == []
