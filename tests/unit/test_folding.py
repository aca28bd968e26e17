"""Equal lines of several ranks stand once, in an order that keeps each rank's own."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lanes import examples
from shown_runs import err, out, run_of

from nblaunch.insight import folding
from nblaunch.insight.folding import merged
from nblaunch.protocol.messages import Displayed, Stream
from nblaunch.protocol.state import RunState
from nblaunch.view.display import html_and_text
from nblaunch.view.html import HTML_BUDGET, render_html
from nblaunch.view.output import folded, items_of
from nblaunch.view.summary import Header
from nblaunch.view.text import TEXT_BUDGET, render_text

HEADER = Header("cell", "gloo")


def saved(state: RunState) -> tuple[str, str]:
    """Return the HTML and the text that a notebook saves."""
    bundle = html_and_text(state, HEADER)
    return str(bundle["text/html"]), str(bundle["text/plain"])


def figure(rank, png="aGk="):
    return Displayed(rank=rank, data={"image/png": png, "text/plain": "<Figure>"})


def lines_of(world_size, *messages):
    """Return the lines of output in the text form, without the line that says how the run ended."""
    text = render_text(run_of(world_size, *messages), HEADER)
    return [line for line in text.splitlines() if line.startswith("[")]


FOLDS = {
    "a line of all ranks stands between lines of single ranks": (
        [out(rank, f"epoch 1\nloss {rank}\nepoch 2\nloss {rank + 2}\n") for rank in range(2)],
        "0-1 epoch 1|0 loss 0|1 loss 1|0-1 epoch 2|0 loss 2|1 loss 3",
    ),
    "only the line that one rank has more is single": (
        [out(rank, "a\n" + "only here\n" * (rank == 1) + "b\nc\n") for rank in range(2)],
        "0-1 a|1 only here|0-1 b|0-1 c",
    ),
    "ranks that share only a blank line stay one after the other": (
        [out(rank, f"first {rank}\n\nsecond {rank}\n") for rank in range(2)],
        "0 first 0|0|0 second 0|1 first 1|1|1 second 1",
    ),
    "a blank line among equal lines is equal too": (
        [out(rank, f"title\n\nbody\n{rank}\n") for rank in range(2)],
        "0-1 title|0-1|0-1 body|0 0|1 1",
    ),
    "stderr is not folded with stdout": (
        [out(0, "a\nb\n"), out(1, "a\n"), err(1, "b\n")],
        "0-1 a|0 b|1 b",
    ),
    "bars that end differently are a line each": (
        [
            *(out(rank, "begin\n") for rank in range(2)),
            *(err(rank, f"\r 10%\r100% {rank} it/s\n") for rank in range(2)),
            *(out(rank, "end") for rank in range(2)),
        ],
        "0-1 begin|0 100% 0 it/s|1 100% 1 it/s|0-1 end",
    ),
}


@pytest.mark.parametrize(("messages", "lines"), FOLDS.values(), ids=FOLDS)
def test_of_two_ranks_these_lines_are_shown(messages, lines):
    assert [re.sub(r"\[ranks? (.*?)\]", r"\1", line) for line in lines_of(2, *messages)] == lines.split("|")


def test_repeated_lines_are_matched_beside_lines_that_are_there_once():
    """The lower rank has one `s` more in the first epoch; counting from the start would shift all others."""
    printed = [
        out(0, "s\n" * 3 + "e1\n" + "s\n" * 3 + "e2\n"),
        out(1, "s\n" * 2 + "e1\n" + "s\n" * 3 + "e2\n"),
    ]
    assert sorted(lines_of(2, *printed)) == sorted(
        ["[ranks 0-1] s"] * 5 + ["[ranks 0-1] e1", "[ranks 0-1] e2", "[rank 0] s"]
    )


def test_displays_keep_their_places_and_are_folded_where_they_are_equal():
    said = [(out(rank, f"before\n{rank}\n"), figure(rank), out(rank, "after\n")) for rank in range(2)]
    assert lines_of(2, *itertools.chain(*said)) == [
        "[ranks 0-1] before",
        "[rank 0] 0",
        "[rank 1] 1",
        "[ranks 0-1] <Figure>",
        "[ranks 0-1] after",
    ]
    markup = render_html(run_of(2, *itertools.chain(*said)), HEADER)
    assert markup.count("<img ") == 1
    assert "Output of ranks 0-1 (4 lines, 1 display)" in markup


def test_the_html_has_each_line_with_its_ranks_in_one_part():
    markup = render_html(run_of(3, *(out(rank, f"<b>\n{rank}\n") for rank in range(3))), HEADER)
    assert "Output of ranks 0-2 (4 lines)" in markup
    assert "[ranks 0-2]</span> &lt;b&gt;" in markup
    assert "[rank 2]</span> 2" in markup


def test_in_html_many_lines_of_one_rank_are_a_part_that_can_be_opened():
    many = "".join(f"line {number}\n" for number in range(100))
    markup = render_html(run_of(2, out(0, f"begin\n{many}end\n"), out(1, "begin\nend\n")), HEADER)
    assert "Output of ranks 0-1 (102 lines)" in markup
    assert "Output of rank 0 (100 lines)" in markup


# --- for all that ranks may write --------------------------------------------------------------------

WORLD = 4
SAID = st.lists(
    st.tuples(
        st.integers(0, WORLD - 1),
        st.sampled_from(Stream),
        st.sampled_from(["a\n", "b\n", "c\n", "a", "\r", "b\ra\n", "\x1b[31ma\x1b[0m\n", "\n", "figure"]),
    ),
    max_size=40,
)


def messages_of(said):
    return [figure(rank) if text == "figure" else out(rank, text, stream) for rank, stream, text in said]


@given(SAID)
@examples(200)
def test_each_ranks_own_output_is_in_the_fold_in_its_order(said):
    state = run_of(WORLD, *messages_of(said))
    outputs = folded(state)
    for rank, known in state.ranks.items():
        own = [row.item for output in outputs for row in output.rows if rank in row.ranks]
        assert tuple(own) == items_of(known.transcript)
    assert [output.ranks for output in outputs] == sorted(output.ranks for output in outputs)
    folded_ranks = sorted(rank for output in outputs for rank in output.ranks)
    assert folded_ranks == [rank for rank, known in state.ranks.items() if items_of(known.transcript)]


@given(SAID, st.randoms())
@examples(100)
def test_the_text_does_not_depend_on_which_rank_was_heard_first(said, random):
    order = [rank for rank, _, _ in said]
    random.shuffle(order)
    queues = {rank: [each for each in said if each[0] == rank] for rank in range(WORLD)}
    shuffled = [queues[rank].pop(0) for rank in order]
    states = run_of(WORLD, *messages_of(said)), run_of(WORLD, *messages_of(shuffled))
    assert saved(states[0]) == saved(states[1])


@given(st.lists(st.sampled_from(["a\n", "b\n", "\n"]), min_size=1, max_size=20))
def test_equal_outputs_are_one_block(texts):
    state = run_of(3, *(out(rank, "".join(texts)) for rank in range(3)))
    outputs = folded(state)
    assert all(row.ranks == (0, 1, 2) for output in outputs for row in output.rows)
    assert len(outputs) <= 1


COLUMNS = st.lists(st.lists(st.integers(0, 6), max_size=25), min_size=1, max_size=7)


@given(COLUMNS, st.sets(st.integers(0, 6), max_size=2))
@examples(300)
@example([[0, 1], [1, 0], [0, 1]], set())
def test_a_merge_holds_each_column_once_and_in_order(columns, weak):
    found = merged(columns, weak)
    for number, column in enumerate(columns):
        parts = [rows for rows in found if any(number in members for _, members in rows)]
        assert len(parts) == (1 if column else 0)
        assert [key for rows in parts for key, members in rows if number in members] == column
    for rows, others in itertools.combinations(found, 2):
        assert {key for key, _ in rows} & {key for key, _ in others} <= weak


@given(st.lists(st.integers(0, 3), max_size=30), st.data())
def test_a_column_that_lacks_some_of_another_shares_all_that_it_has(column, data):
    own = [(key, number) for number, key in enumerate(column)]
    kept = [each for each in own if data.draw(st.booleans())]
    shared = sum(len(members) == 2 for rows in merged([own, kept]) for _, members in rows)
    assert shared == len(kept)


# --- bounds ------------------------------------------------------------------------------------------


def test_64_ranks_with_10000_lines_each_are_folded_in_a_moment():
    def said(rank):
        return "".join(f"epoch {number}\nloss {rank}.{number}\n" for number in range(5_000))

    state, outputs = run_of(64, *(out(rank, said(rank)) for rank in range(64))), []

    def seconds():
        begun = time.process_time()
        outputs[:] = folded(state)
        return time.process_time() - begun

    # Beside other processes the same work takes up to twice as much time of a processor.
    assert any(seconds() < 1 for _ in range(3))
    markup, text = saved(state)
    assert len(markup) < HTML_BUDGET
    assert len(text) < TEXT_BUDGET
    assert len(outputs) == 1
    assert text.startswith("[ranks 0-63] epoch 0\n[rank 0] loss 0.0\n[rank 1] loss 1.0\n")
    # The last epoch is there too, and what is missing between is counted for each rank.
    assert "\n[ranks 0-63] epoch 4999\n" in text
    assert "\n[rank 7] … " in text


def test_nearly_every_line_of_other_ranks_still_fits():
    """Each number is printed by those ranks whose bit it has: thousands of different sets of ranks."""
    texts = ["".join(f"{number}\n" for number in range(4_096) if number >> rank & 1) for rank in range(12)]
    markup, text = saved(run_of(12, *(out(rank, each) for rank, each in enumerate(texts))))
    assert len(markup) < HTML_BUDGET
    assert 10_000 < len(text) < TEXT_BUDGET


def test_above_a_bound_every_rank_has_its_own_part(monkeypatch):
    monkeypatch.setattr(folding, "MOST_ITEMS", 3)
    assert lines_of(2, out(0, "a\nb\n"), out(1, "a\nc\n")) == [
        "[rank 0] a",
        "[rank 0] b",
        "[rank 1] a",
        "[rank 1] c",
    ]


@pytest.mark.parametrize("shown", [render_text, render_html])
def test_what_does_not_fit_is_cut_where_it_was_printed(shown):
    """One rank's flood leaves the lines that all have, and those of the others, alone."""
    flood = "".join(f"flood {number} {'x' * 60}\n" for number in range(3_000))
    said = [out(rank, f"begin\nown {rank}\n") for rank in range(4)]
    text = shown(run_of(4, *said, out(2, flood), *(out(rank, "end\n") for rank in range(4))), HEADER)
    assert "left out, see result.ranks[2].stdout" in text
    for wanted in ("begin", "own 3", "flood 0", "flood 2999", "end"):
        assert wanted in text
