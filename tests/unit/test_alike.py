"""Ranks that are alike share a row, the others have their own, and nothing is lost by it."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.protocol import messages as wire
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.alike import LEAST, beside, finest, in_columns, label, levels_of, named, rows_of, sizes
from nblaunch.view.html import render_html
from nblaunch.view.summary import Header
from nblaunch.view.text import render_text

HEADER = Header("cell", "gloo")
BOOM = wire.FailureRecord(type="builtins.ValueError", message="boom", time=2.0)
CLOSED = wire.FailureRecord(
    type="RuntimeError", message="Connection closed by peer [127.0.0.1]:40287", time=3.0
)
answers = st.dictionaries(st.integers(0, 200), st.integers(0, 4), max_size=60)


def run_of(ranks, *messages, device="cpu"):
    places = {
        rank: wire.RankPlace(rank, "box", device.format(rank), rank + 1, wire.Phase.JOB)
        for rank in range(ranks)
    }
    state = advance(RunState.fresh(ranks), wire.JobAssigned(ranks=places, attempt=0))
    for message in (*(wire.Started(rank=rank, time=1.0) for rank in range(ranks)), *messages):
        state = advance(state, message)
    return state


def returned(rank, text="", peak=None):
    value = wire.Returned(rank=rank, value=wire.Payload(()), time=2.0, text=text)
    return msgspec.structs.replace(value, peak_gpu_memory=peak)


def printed(rank, text):
    return wire.Printed(rank=rank, stream=wire.Stream.STDOUT, text=f"{text}\n")


def rows_in(markup):
    """Return the rows of the first table, each with the words of its cells."""
    table = markup[: markup.index("</table>")].partition("<tbody>")[2]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("</tr>") if row.strip("</tbody>")]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in cells]


def ranks_in(markup):
    return [row[0] for row in rows_in(markup)]


# --- the fold --------------------------------------------------------------------------------------------


@given(answers)
def test_every_rank_stands_in_exactly_one_row_in_order_and_only_equal_ones_together(keys):
    rows = rows_of(keys)
    assert sorted(rank for row in rows for rank in row) == sorted(keys)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    for row in rows:
        assert list(row) == sorted(set(row))
        assert len({keys[rank] for rank in row}) == 1
        assert len(row) == 1 or len(row) >= LEAST
    # Whoever has a row alone has not enough others like it.
    alone = [keys[row[0]] for row in rows if len(row) == 1]
    assert all(list(keys.values()).count(key) < LEAST for key in alone)


@given(answers)
def test_rows_are_as_fine_as_there_is_room_for(keys):
    numbers = {rank: (keys[rank], rank) for rank in keys}
    rows = finest([(numbers, 8), (keys, 8), (dict.fromkeys(keys, 0), 8)])
    assert sorted(rank for row in rows for rank in row) == sorted(keys)
    assert len(rows) <= max(8, LEAST - 1)
    if len(keys) <= 8:
        assert rows == [(rank,) for rank in sorted(keys)]


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=300))
def test_a_label_is_short_and_names_all_ranks_or_says_how_many_there_are(ranks):
    text = label(sorted(ranks))
    assert len(text) <= 44
    if text.endswith(")"):
        assert text.startswith(f"{len(ranks)} ranks (")
    else:
        parts = [[int(each) for each in part.split("-")] for part in text.split(",")]
        assert {rank for part in parts for rank in range(part[0], part[-1] + 1)} == ranks


def test_a_line_of_text_names_its_ranks_where_they_do_not_fill_it():
    assert named((0, 1, 2, 4)) == "ranks 0-2,4"
    assert named(range(1024)) == "ranks 0-1023"
    assert named(range(0, 1024, 2)).startswith("512 ranks (0,2,4,")


@given(st.dictionaries(st.integers(0, 50), st.one_of(st.none(), st.integers(1, 1 << 40)), max_size=30))
def test_figures_of_one_level_differ_by_a_quarter_at_most(figures):
    found = levels_of(figures)
    assert found.keys() == figures.keys()
    for level in set(found.values()):
        known = [figures[rank] or 0 for rank in found if found[rank] == level]
        assert max(known) <= 1.25 * min(known)


@given(st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=40))
def test_columns_hold_every_text_once_in_order(entries):
    lines = in_columns(entries, beside(entries))
    assert [each for line in lines for each in line.split()] == entries
    assert all(len(line) <= 100 for line in lines)


def test_figures_that_differ_are_a_range():
    assert sizes([231 << 20, 240 << 20, None]) == "231-240 MiB"
    assert sizes([None]) == ""


# --- what is saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [3, 8, 64, 1024])
def test_ranks_that_ended_alike_are_one_row(ranks):
    same = [message for rank in range(ranks) for message in (printed(rank, "done"), returned(rank, "30.0"))]
    state = run_of(ranks, *same)
    (row,) = rows_in(render_html(state, HEADER))
    assert (row[0], row[2], row[-1]) == (f"0-{ranks - 1}", "✓ SUCCEEDED", "30.0")
    assert render_text(state, HEADER).splitlines()[-1] == f"ranks 0-{ranks - 1}: 30.0"


def test_two_ranks_that_ended_alike_keep_a_row_each():
    assert ranks_in(render_html(run_of(2, returned(0, "7"), returned(1, "7")), HEADER)) == ["0", "1"]


def test_a_rank_that_differs_has_a_row_of_its_own():
    state = run_of(8, *(returned(rank, "no" if rank == 3 else "yes") for rank in range(8)))
    assert ranks_in(render_html(state, HEADER)) == ["0-2,4-7", "3"]
    state = run_of(8, printed(0, "epoch 3"), *(returned(rank) for rank in range(8)))
    assert ranks_in(render_html(state, HEADER)) == ["0", "1-7"]


def test_what_failed_comes_first_then_what_failed_because_of_it_then_all_else():
    stopped = [
        wire.Exited(rank=rank, exitcode=-15, expected=True, time=4.0) for rank in range(64) if rank % 3
    ]
    closed = [wire.Raised(rank=rank, failure=CLOSED) for rank in range(0, 64, 3)]
    stopped = [each for each in stopped if each.rank != 37]
    state = run_of(64, wire.Raised(rank=37, failure=BOOM), *closed, *stopped, wire.RunEnded(time=5.0))
    rows = rows_in(render_html(state, HEADER))
    assert [row[0].partition(" ranks")[0] for row in rows] == ["37", "22", "41"]
    assert [row[2] for row in rows] == ["✗ FAILED", "✗ FAILED", "■ STOPPED"]
    assert rows[0][-1] == "root cause"


def test_devices_and_peaks_that_differ_are_ranges_and_unfold_to_a_row_for_each_rank():
    values = [returned(rank, "7", peak=(300 + rank) << 20) for rank in range(8)]
    markup = render_html(run_of(8, *values, device="cuda:{}"), HEADER)
    ((ranks, device, _, peak, _),) = rows_in(markup)
    assert (ranks, device, peak) == ("0-7", "cuda:0-7", "300-307\u00a0MiB")
    below = markup[markup.index("<details") :]
    assert "8 ranks: 8 " in below
    assert [f"30{rank}\u00a0MiB" in below for rank in range(8)] == [True] * 8


def test_a_rank_that_used_far_more_memory_than_the_others_has_a_row_of_its_own():
    peaks = [3 << 30 if rank == 5 else (300 + rank) << 20 for rank in range(8)]
    markup = render_html(run_of(8, *(returned(rank, "7", peak) for rank, peak in enumerate(peaks))), HEADER)
    assert [(row[0], row[3]) for row in rows_in(markup)] == [
        ("0-4,6-7", "300-307\u00a0MiB"),
        ("5", "3.0\u00a0GiB"),
    ]


def test_where_ranks_do_not_differ_there_is_nothing_to_unfold():
    state = run_of(64, *(returned(rank, "7") for rank in range(64)))
    assert "<details" not in render_html(state, HEADER)


@pytest.mark.parametrize("ranks", [17, 64, 1024])
def test_values_that_differ_stand_side_by_side_and_all_of_them_are_there(ranks):
    state = run_of(ranks, *(returned(rank, f"{rank / 7:.3f}") for rank in range(ranks)))
    markup = render_html(state, HEADER)
    (row,) = rows_in(markup)
    assert row[-1] == f"{ranks} values, below"
    every = re.findall(r"<span><strong>(\d+)</strong>: <code>([\d.]+)</code></span>", markup)
    assert every == [(str(rank), f"{rank / 7:.3f}") for rank in range(ranks)]
    if ranks > 64:
        assert markup.index("more</summary>") < markup.index("<strong>1023</strong>")


def test_long_values_of_many_ranks_are_folded_away_and_can_be_unfolded():
    tall = {rank: f"tensor([[{rank}.],\n        [1.]])" for rank in range(64)}
    markup = render_html(run_of(64, *(returned(rank, text) for rank, text in tall.items())), HEADER)
    assert "64 values of 64 ranks in full</summary>" in markup
    for text in tall.values():
        assert text in markup


def test_which_of_many_ranks_ended_how_is_there_where_the_row_cannot_name_them():
    values = [returned(rank) for rank in range(0, 1024, 2)]
    ended = [wire.Exited(rank=rank, exitcode=-15, expected=True, time=4.0) for rank in range(1, 1024, 2)]
    markup = render_html(run_of(1024, *values, *ended), HEADER)
    assert all(row[0].startswith("512 ranks (") for row in rows_in(markup))
    assert ",1018,1020,1022<" in markup
    assert ",1019,1021,1023<" in markup


# --- text --------------------------------------------------------------------------------------------------


def test_many_values_are_few_lines_of_text():
    state = run_of(64, *(returned(rank, f"{rank}.0") for rank in range(64)))
    lines = render_text(state, HEADER).splitlines()
    assert len(lines) < 12
    assert re.split("  +", lines[0])[:3] == ["rank 0: 0.0", "rank 1: 1.0", "rank 2: 2.0"]
    assert lines[-1].endswith("rank 63: 63.0")


def test_of_1024_different_values_the_text_shows_the_first_and_says_where_the_others_are():
    state = run_of(1024, *(returned(rank, f"{rank}.0") for rank in range(1024)))
    lines = render_text(state, HEADER).splitlines()
    assert len(lines) == 41
    shown = len(re.findall(r"rank \d+: ", "\n".join(lines[:-1])))
    assert lines[-1] == f"… {1024 - shown} more values, see result.values …"
    tall = run_of(64, *(returned(rank, f"{rank}\n{rank}") for rank in range(64)))
    assert render_text(tall, HEADER).splitlines()[-1] == "… 48 more values, see result.values …"
