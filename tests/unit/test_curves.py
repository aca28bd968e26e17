"""Curves over the steps: a band over the ranks, who is apart, and the same drawing for the same run."""

from __future__ import annotations

import json
import math
import random
import re
from xml.etree import ElementTree as ET

import pytest
from logged_points import batch, folded

from nblaunch.insight.charts import charts
from nblaunch.insight.curves import MOST_CURVES, Curves, curve_lines
from nblaunch.protocol.messages import AttemptStarted, encode
from nblaunch.protocol.state import RunState, advance, decode_state
from nblaunch.view.html import render_html
from nblaunch.view.panel_parts import CURVE_WAYS, Drawing
from nblaunch.view.summary import Header
from nblaunch.view.text import render_text

HEADER = Header("cell", "gloo")
NAN = math.nan


def run_of(ranks, steps, value, *, name="loss", seed=0):
    """Return the state of a run whose ranks were heard in some order."""
    batches = [
        batch(rank, *((name, step, value(rank, step)) for step in range(first, min(first + 20, steps))))
        for first in range(0, steps, 20)
        for rank in random.Random(seed + first).sample(range(ranks), ranks)
    ]
    return folded(*batches, world=ranks)


def decay(rank, step):
    return 2 * math.exp(-step / 50) + 0.1 + 0.01 * math.sin(7 * rank + step)


def test_a_band_has_the_least_the_mean_and_the_greatest_of_the_ranks():
    state = run_of(4, 3, lambda rank, step: rank + 10.0 * step)
    (curve,) = Curves.of(state.metrics).shown()
    assert [tuple(each) for each in curve.cells()] == [
        (0, 1, 0.0, 1.5, 3.0),
        (1, 1, 10.0, 11.5, 13.0),
        (2, 1, 20.0, 21.5, 23.0),
    ]


def test_a_long_run_is_drawn_with_few_points_and_no_extreme_is_lost():
    state = run_of(2, 5000, lambda rank, step: 99.0 if (rank, step) == (1, 3210) else 1.0)
    (curve,) = Curves.of(state.metrics).shown()
    assert len(curve.sums) <= 256
    assert [each.greatest for each in curve.cells() if each.step <= 3210 < each.step + each.steps] == [99.0]
    assert sum(sums[0] for sums in curve.sums.values()) == 10_000


def test_a_fold_in_parts_is_the_fold_of_the_whole():
    states = [RunState.fresh(4)]
    for each in run_of(4, 900, decay).metrics.since(0):
        states.append(advance(states[-1], each))
    parts = Curves()
    for state in states[::7]:
        parts.update(state.metrics)
    # A client that could not keep up goes on from a snapshot.
    parts.update(decode_state(encode(states[-1])).metrics)
    assert curve_lines(parts) == curve_lines(Curves.of(states[-1].metrics))
    assert charts(parts, 10**6) == charts(Curves.of(states[-1].metrics), 10**6)


def test_a_run_that_starts_again_replaces_what_it_does_again():
    first = [batch(rank, *(("loss", step, 5.0) for step in range(10))) for rank in range(2)]
    again = AttemptStarted(number=1, world_size=2, time=1.0, reason="failure")
    second = [batch(rank, *(("loss", step, 1.0) for step in range(6, 8))) for rank in range(2)]
    state = folded(*first, again, *second, world=2)
    (curve,) = Curves.of(state.metrics).shown()
    assert [(each.step, each.mean) for each in curve.cells()] == [(n, 5.0) for n in range(6)] + [
        (6, 1.0),
        (7, 1.0),
    ]
    assert curve.lasts == {0: 1.0, 1: 1.0}


def test_an_attempt_that_logs_nothing_costs_no_values_of_the_next_one():
    attempts = [AttemptStarted(number=number, world_size=2, time=1.0, reason="failure") for number in (1, 2)]
    last = [batch(rank, ("loss", 0, 3.0 + rank), ("loss", 1, 1.0)) for rank in range(2)]
    state = folded(batch(0, ("loss", 0, 9.0)), *attempts, *last, world=2)
    assert curve_lines(Curves.of(state.metrics)) == ["loss  3.5 -> 1 (mean of 2 ranks)"]


def test_a_rank_that_logs_no_more_is_named_beside_the_mean():
    early = batch(2, *(("loss", step, 9.0) for step in range(4)))
    late = [batch(rank, *(("loss", step, 9.0 - step) for step in range(10))) for rank in range(2)]
    assert curve_lines(Curves.of(folded(early, *late).metrics)) == [
        "loss  9 -> 3 (mean of 3 ranks; 0 .. 9; rank 2 is steps behind)"
    ]


def test_all_ranks_that_are_not_finite_first_are_named_whoever_was_heard_first():
    batches = [
        batch(rank, ("loss", 0, 1.0), ("loss", 1, value)) for rank, value in enumerate((2.0, NAN, NAN))
    ]
    said = ["loss  1 -> 2 (mean of 1 of 3 ranks; nan on ranks 1-2 at step 1)"]
    assert [curve_lines(Curves.of(folded(*each).metrics)) for each in (batches, batches[::-1])] == [said] * 2


@pytest.mark.parametrize(
    ("ranks", "value", "apart"),
    [
        (8, lambda rank, step: decay(rank, step) + (rank == 3), [3]),
        (8, lambda rank, _: 0.1 * (1.02 if rank == 5 else 1), [5]),
        (8, lambda rank, _: 0.1 * (1.002 if rank == 5 else 1), []),
        (8, lambda rank, step: math.nan if rank == 6 and step > 50 else decay(rank, step), [6]),
        (8, lambda rank, step: decay(rank, step) + (rank == 3 and step == 99), []),
        (8, lambda rank, step: decay(rank, step) + (rank == 3 and step < 96), []),
        (2, lambda rank, _: float(rank), []),
        (64, lambda rank, step: random.Random(rank * 1000 + step).gauss(1, 0.1), []),
        (3, lambda _, __: math.nan, []),
    ],
    ids=[
        *("shifted", "two-percent", "a-little", "nan", "one-spike"),
        *("came-back", "two-ranks", "noise", "all-nan"),
    ],
)
def test_a_rank_is_apart_where_it_stays_far_from_the_others(ranks, value, apart):
    (curve,) = Curves.of(run_of(ranks, 100, value).metrics).shown()
    assert list(curve.apart()) == apart


def test_the_text_has_a_line_for_each_name():
    state = run_of(8, 100, lambda rank, step: 0.91 if rank == 3 and step > 50 else 2.31 - 0.0189 * step)
    state = advance(state, batch(0, ("val/acc", 50, math.nan)))
    assert render_text(state, HEADER).split("\n")[:2] == [
        "loss     2.31 -> 0.4978 (mean of 8 ranks; 0.4389 .. 0.91; rank 3 apart: 0.91)",
        "val/acc  nan (rank 0; nan on rank 0 at step 50)",
    ]


def test_text_and_html_do_not_depend_on_the_order_in_which_ranks_were_heard():
    one, other = (run_of(8, 700, decay, seed=seed) for seed in (1, 2))
    assert one.metrics != other.metrics
    assert render_html(one, HEADER) == render_html(other, HEADER)
    assert render_text(one, HEADER) == render_text(other, HEADER)


def test_the_order_of_the_curves_does_not_depend_on_who_was_heard_first():
    one, other = batch(0, ("b", 0, 1.0), ("late", 5, 1.0)), batch(1, ("a", 0, 2.0))
    states = [folded(one, other, world=2), folded(other, one, world=2)]
    assert [[curve.name for curve in Curves.of(each.metrics).shown()] for each in states] == [
        ["a", "b", "late"]
    ] * 2
    assert render_html(states[0], HEADER) == render_html(states[1], HEADER)


def test_the_saved_drawing_has_no_script_is_whole_and_escapes_names():
    name = "<script>alert('&')</script>"
    page = render_html(run_of(4, 30, decay, name=name), HEADER)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for drawing in re.findall(r"<svg.*?</svg>", page):
        ET.fromstring(drawing)  # noqa: S314 - our own
        assert "nan" not in "".join(re.findall(r' d="[^"]*"', drawing))
    assert page.count("<svg") == 2  # the band, and a line for each rank


@pytest.mark.full
def test_a_run_of_64_ranks_and_many_names_is_saved_with_less_than_200_kb():
    values = [
        [(f"name {number}", step, decay(rank, step)) for step in range(0, 3000, 25) for number in range(30)]
        for rank in range(64)
    ]
    state = folded(*(batch(rank, *points) for rank, points in enumerate(values)), world=64)
    bundle = [render_html(state, HEADER), render_text(state, HEADER)]
    assert len(json.dumps(bundle)) < 200_000
    assert bundle[0].count("<svg") >= MOST_CURVES
    assert "6 more names in result.metrics" in bundle[1]


def test_a_run_that_logs_nothing_shows_no_curves():
    assert "<svg" not in render_html(folded(), HEADER)
    assert "Curves" not in render_html(folded(), HEADER)


@pytest.mark.parametrize("value", [0.0, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan])
def test_any_number_can_be_drawn(value):
    state = run_of(3, 5, lambda rank, step: value if rank else decay(rank, step))
    assert "<svg" in render_html(state, HEADER)
    assert render_html(run_of(3, 1, lambda _, __: value), HEADER)


def test_steps_may_be_any():
    steps = [-(2**63), -5, 0, 10**15, 2**63 - 1]
    state = folded(*(batch(rank, *(("loss", step, 1.0) for step in steps)) for rank in range(3)))
    assert "<svg" in render_html(state, HEADER)


# What the panel gets.


def replayed(drawing, state, *, per_second, seconds):
    """Draw the batches of a state as they come; return what the page was sent, and the curves that it has."""
    sent, parts, growing, batches = [], {}, RunState.fresh(len(state.ranks)), list(state.metrics.since(0))
    for tick in range(int(seconds * 10)):
        for each in batches[int(tick * per_second / 10) : int((tick + 1) * per_second / 10)]:
            growing = advance(growing, each)
        delta = drawing.changes(growing, tick / 10)
        if delta is not None:
            sent.append(delta)
            parts |= delta["parts"]
    return sent, {key: part for key, part in parts.items() if re.match(r"c\d", key)}


@pytest.mark.parametrize("by_rank", [False, True])
def test_the_page_has_after_all_deltas_what_it_gets_as_a_whole(by_rank):
    state = run_of(12, 800, lambda rank, step: decay(rank, step) + (rank == 3 and step > 200))
    drawing = Drawing(HEADER, 0.0)
    drawing.draw_each_rank(wanted=by_rank)
    sent, known = replayed(drawing, state, per_second=100, seconds=11)
    assert len(sent) > 5
    whole = drawing.whole(11.0)["parts"]
    assert known == {key: whole[key] for key in known}
    assert known.keys() == {f"c0{way}" for way in (CURVE_WAYS if by_rank else CURVE_WAYS[:2])}
    assert lines_in(known["c0"]) == 2, "the mean, and rank 3, which is apart"
    assert not by_rank or lines_in(known["c0.each"]) == 12
    assert "rank 3" in whole["words"]


def lines_in(drawing):
    return drawing.count('fill="none"')


def test_a_line_for_each_rank_is_sent_when_it_is_asked_for():
    state = run_of(12, 40, decay)
    drawing = Drawing(HEADER, 0.0)
    first = drawing.changes(state, 0)
    assert first is not None
    assert "c0.each" not in first["parts"]
    drawing.draw_each_rank(wanted=True)
    asked = drawing.changes(state, 2)
    assert asked is not None
    assert lines_in(asked["parts"]["c0.each"]) == 12


def test_a_logarithmic_scale_is_there_for_the_reader_who_wants_it():
    drawing = Drawing(HEADER, 0.0)
    drawing.changes(run_of(2, 40, decay), 0)
    parts = drawing.whole(0)["parts"]
    assert ">log<" in parts["c0.log"]
    assert ">log<" not in parts["c0"]


def test_the_page_gets_no_more_than_50_kb_a_second():
    state = run_of(64, 2000, decay)
    drawing = Drawing(HEADER, 0.0)
    drawing.draw_each_rank(wanted=True)
    sent, _ = replayed(drawing, state, per_second=320, seconds=20)
    assert sum(len(json.dumps(delta)) for delta in sent) / 20 < 50_000


def test_a_run_without_points_has_no_curves_in_the_panel():
    drawing = Drawing(HEADER, 0.0)
    drawing.changes(RunState.fresh(2), 0)
    assert "curves" not in drawing.whole(0)["parts"]
