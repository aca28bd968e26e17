"""What the live panel is sent: lines, displays, rows and reports, and no more than a page can take."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.diagnose.hang import report as hang_report
from nblaunch.protocol.messages import (
    AttemptStarted,
    Cleared,
    Colored,
    Displayed,
    FailureRecord,
    FrameRecord,
    Measured,
    Payload,
    Printed,
    Raised,
    Reached,
    Returned,
    Started,
    Stream,
    Usage,
    Where,
)
from nblaunch.protocol.reports import LocatedAll
from nblaunch.protocol.state import RunState, advance
from nblaunch.view import panel_output, panel_ranks
from nblaunch.view.output import items_of
from nblaunch.view.panel_output import KEPT, WAITING, Feed
from nblaunch.view.panel_ranks import BEHIND, SILENT, UNFINISHED, Drawing, Reporter, Rows, Stragglers
from nblaunch.view.screen import WIDEST, Line
from nblaunch.view.summary import Header

HEADER = Header("cell", "gloo", node="host")
FIGURE = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}


class Page:
    """What a page that got every message knows of one rank: pieces by number."""

    def __init__(self):
        self.pieces = {}
        self.base = 0
        self.sent = 0

    def take(self, news, rank=0):
        if news is None:
            return self
        self.sent += len(json.dumps(news, ensure_ascii=False).encode())
        lines = news["tails"].get(str(rank))
        if lines is None:
            return self
        if "clear" in lines:
            self.pieces, self.base = {}, lines["clear"]
        sent = lines["sent"]
        for number, place in zip(sent[::2], sent[1::2], strict=True):
            self.pieces[number] = news["pieces"][place]
        return self

    @property
    def texts(self):
        return [text_of(piece) for _, piece in sorted(self.pieces.items())]

    @property
    def left_out(self):
        """Return how many lines are missing between those that are there."""
        numbers = sorted(self.pieces)
        return [after - before - 1 for before, after in zip([self.base - 1, *numbers], numbers, strict=False)]


def text_of(piece):
    if isinstance(piece, str):
        return piece
    if isinstance(piece[0], str):
        return f"<{piece[0]}>"
    return piece[1] if isinstance(piece[1], str) else "".join(text for _, text in piece[1])


def some(news):
    """Return news that must be there."""
    assert news is not None
    return news


class Ticker:
    """A feed, the state that it reads, and the page that it fills; a tenth of a second a tick."""

    def __init__(self, world_size=1):
        self.feed = Feed()
        self.state = RunState.fresh(world_size)
        self.page = Page()
        self.now = 0.0

    def tick(self, *messages, rank=0):
        for message in messages:
            self.state = advance(self.state, message)
        self.now += 0.1
        news = self.feed.news(self.state, self.now)
        self.page.take(news, rank)
        return news


def out(text, rank=0):
    return Printed(rank=rank, stream=Stream.STDOUT, text=text)


def err(text, rank=0):
    return Printed(rank=rank, stream=Stream.STDERR, text=text)


def figure(rank=0, data=None, **more):
    return Displayed(rank=rank, data=data or FIGURE, **more)


def run_of(world_size, *messages):
    state = RunState.fresh(world_size)
    for message in (*(Started(rank=rank, time=1.0) for rank in range(world_size)), *messages):
        state = advance(state, message)
    return state


def returned(rank, text="", html=""):
    return Returned(rank=rank, value=Payload(sizes=()), time=2.0, text=text, html=html)


# --- lines -------------------------------------------------------------------------------------------------

CHARACTERS = st.sampled_from(
    ["a", "bc ", "\n", "\r", "\b", "\t", "é", "\x1b[A", "\x1b[31m", "\x1b[0m", "\x1b[K"]
)
WRITES = st.lists(
    st.tuples(st.sampled_from(list(Stream)), st.lists(CHARACTERS, max_size=12).map("".join)), max_size=15
)


@given(WRITES)
def test_a_page_shows_what_a_terminal_shows_however_the_text_comes(writes):
    ticker = Ticker()
    for stream, text in writes:
        ticker.tick(Printed(rank=0, stream=stream, text=text))
    expected = [item for item in items_of(ticker.state.ranks[0].transcript) if isinstance(item, Line)]
    shown = [ticker.page.pieces[number] for number in sorted(ticker.page.pieces)]
    while shown and not text_of(shown[-1]).strip():
        shown.pop()
    assert [text_of(piece) for piece in shown] == [line.text for line in expected]
    streams = [not isinstance(piece, str) and piece[0] == 1 for piece in shown]
    assert streams == [line.stream is Stream.STDERR for line in expected]


@given(WRITES)
def test_a_page_that_is_loaded_again_knows_what_the_first_one_knew(writes):
    ticker = Ticker()
    for stream, text in writes:
        ticker.tick(Printed(rank=0, stream=stream, text=text))
    assert Page().take(ticker.feed.whole()).pieces == ticker.page.pieces


@given(st.lists(st.integers(0, 3_000), max_size=6))
def test_lines_that_are_left_out_are_counted(bursts):
    ticker, total = Ticker(), 0
    for burst in bursts:
        lines = [f"line {total + number}\n" for number in range(burst)]
        total += burst
        ticker.tick(out("".join(lines)))
    for number, piece in ticker.page.pieces.items():
        assert piece == f"line {number}"
    if total:
        assert max(ticker.page.pieces) == total - 1, "the last line is always there"
        assert sum(ticker.page.left_out) + len(ticker.page.pieces) == total


def test_colours_are_sent_as_small_numbers_and_plain_lines_as_text():
    news = Ticker().tick(out("plain\n\x1b[1;31mred\x1b[0m\n"), err("error\n"))
    assert news["pieces"] == ["plain", (0, ((9, "red"),)), (1, "error")]


def test_what_many_ranks_print_is_sent_once():
    ticker = Ticker(8)
    news = ticker.tick(*(out("the same\nand more\n", rank) for rank in range(8)))
    assert news["pieces"] == ["the same", "and more"]
    assert all(lines["sent"] == [0, 0, 1, 1] for lines in news["tails"].values())


def test_nothing_new_is_no_message():
    ticker = Ticker(2)
    assert ticker.tick(out("a\n")) is not None
    assert ticker.tick() is None


def test_a_progress_bar_is_one_line_and_only_it_is_sent():
    ticker = Ticker()
    ticker.tick(out("before\n"), err("\r 0%|     |"), out("after\n"))
    for step in range(50):
        news = ticker.tick(err(f"\r{step:2}%|###  |"))
        assert [text_of(piece) for piece in news["pieces"]] == [f"{step:2}%|###  |"]
    assert ticker.page.texts == ["before", "49%|###  |", "after"]


def test_a_bar_goes_on_while_the_other_stream_prints_more_than_is_shown():
    ticker = Ticker()
    for step in range(30):
        ticker.tick(err(f"\r{step}%|"), out("".join(f"{step} {line}\n" for line in range(5_000))))
    assert [text for text in ticker.page.texts if text.endswith("%|")][-1] == "29%|"


def test_the_cursor_moves_up_in_later_ticks_too():
    ticker = Ticker()
    ticker.tick(out("bar one\nbar two\n"))
    news = ticker.tick(out("\x1b[2Abar 1  \n"))
    assert news["pieces"] == ["bar 1  "]
    assert ticker.page.texts == ["bar 1  ", "bar two"]


def test_an_endless_line_is_cut_and_costs_no_more_with_time():
    ticker = Ticker()
    for _ in range(100):
        ticker.tick(out("x" * 50_000))
    (text,) = ticker.page.texts
    assert len(text) <= WIDEST + 2
    assert text.endswith("…")
    sent = ticker.page.sent
    ticker.tick(out("x" * 50_000))
    assert ticker.page.sent - sent < 2 * WIDEST


def test_ranks_without_a_pause_send_a_quarter_of_a_megabyte_a_second_at_most():
    ticker = Ticker(64)
    for step in range(20):
        ticker.tick(
            *(out("".join(f"{rank} {step} {line}\n" for line in range(400)), rank) for rank in range(64))
        )
    assert ticker.page.sent / 2.0 < 450_000
    assert ticker.page.pieces[8000 - 1] == "0 19 399"


def test_a_quiet_rank_is_heard_beside_one_that_never_pauses():
    ticker = Ticker(2)
    quiet = "".join(f"quiet {number}\n" for number in range(20))
    ticker.tick(out("loud\n" * 50_000, rank=1), out(quiet, rank=0))
    assert ticker.page.texts == quiet.splitlines()


def test_a_page_gets_no_more_than_it_keeps():
    ticker = Ticker()
    for step in range(200):
        ticker.tick(out("".join(f"{step} {line}\n" for line in range(20))))
    whole = Page().take(ticker.feed.whole())
    assert KEPT <= len(whole.pieces) <= KEPT * 5 // 4
    assert whole.texts[-1] == "199 19"


# --- displays, clear_output, attempts ----------------------------------------------------------------------


def test_displays_come_in_order_with_the_text():
    ticker = Ticker()
    ticker.tick(out("before\nhalf"), figure(), out("after\n"))
    assert ticker.page.texts == ["before", "half", "<image>", "after"]


@pytest.mark.parametrize(
    ("data", "piece"),
    [
        ({"text/html": "<b>x</b>", "text/plain": "x"}, ("html", "<b>x</b>", "x")),
        (FIGURE, ("image", "image/png", "iVBORw0KGgo=", "<Figure>", "", "")),
        ({"text/latex": "$x^2$", "text/plain": "<Latex>"}, ("text", "$x^2$")),
        ({"text/plain": "\x1b[31m<b>\x1b[0m"}, ("text", "<b>")),
        ({"image/png": "<script>", "text/plain": "no image"}, ("text", "no image")),
        ({"application/x": {"a": 1}}, ("text", "<application/x>")),
    ],
)
def test_a_display_is_sent_in_its_richest_form(data, piece):
    assert Ticker().tick(figure(data=data))["pieces"] == [piece]


def test_the_size_that_a_figure_asks_for_is_kept():
    size = {"image/png": {"width": 120, "height": "80"}}
    (piece,) = Ticker().tick(figure(metadata=size))["pieces"]
    assert piece[-2:] == ("120", "")


def test_an_svg_is_an_image():
    (piece,) = Ticker().tick(figure(data={"image/svg+xml": "<svg><script>1</script></svg>"}))["pieces"]
    assert piece[:2] == ("image", "image/svg+xml")


def test_an_update_changes_the_display_where_it_is():
    ticker = Ticker()
    known = {"display_id": "a"}
    ticker.tick(figure(data={"text/plain": "one"}, transient=known), out("after\n"))
    ticker.tick(figure(data={"text/plain": "two"}, transient=known, update=True))
    assert [ticker.page.pieces[number] for number in (0, 1)] == [("text", "two"), "after"]


def test_a_figure_that_changes_all_the_time_stays_far_below_what_the_server_takes():
    ticker = Ticker()
    known = {"display_id": "a"}
    ticker.tick(figure(transient=known))
    for step in range(100):
        data = {"image/png": f"{step:04}" + "A" * 100_000}
        ticker.tick(figure(data=data, transient=known, update=True))
    assert ticker.page.sent / 10 < 450_000
    for _ in range(10):
        ticker.tick()
    assert ticker.page.pieces[0][2].startswith("0099"), "the last one is shown"


def test_a_display_that_has_to_wait_keeps_its_place():
    ticker = Ticker()
    large = {"image/png": "A" * 400_000}
    ticker.tick(figure(data=large), figure(data={"image/png": "B" * 400_000}), out("after\n"))
    assert ticker.page.pieces[1] == WAITING
    assert ticker.page.texts == ["<image>", "<waiting>", "after"]
    for _ in range(20):
        ticker.tick()
    assert ticker.page.texts == ["<image>", "<image>", "after"]


def test_a_display_that_is_too_large_is_named():
    (piece,) = Ticker().tick(figure(data={"image/png": "A" * 4_000_000, "text/plain": "<Figure>"}))["pieces"]
    assert piece == ("text", "<Figure>\n… image/png is too large to be shown before the end of the run …")


def test_clear_output_clears_the_page_too():
    ticker = Ticker()
    ticker.tick(out("one\ntwo\n"), figure())
    ticker.tick(Cleared(rank=0), out("three\n"))
    assert ticker.page.texts == ["three"]
    assert ticker.page.left_out == [0]
    ticker.tick(Cleared(rank=0, wait=True))
    assert ticker.page.texts == ["three"]
    ticker.tick(out("four\n"))
    assert ticker.page.texts == ["four"]


def test_a_clear_without_more_output_is_told():
    ticker = Ticker()
    ticker.tick(out("one\n"))
    ticker.tick(Cleared(rank=0))
    assert ticker.page.texts == []


def test_a_clear_after_more_than_is_shown_counts_what_follows():
    ticker = Ticker()
    ticker.tick(out("a\n" * 100_000), Cleared(rank=0), out("".join(f"{n}\n" for n in range(9_000))))
    assert ticker.page.texts[-1] == "8999"
    assert sum(ticker.page.left_out) + len(ticker.page.pieces) == 9_000


def test_a_new_attempt_begins_anew():
    ticker = Ticker(2)
    ticker.tick(out("one\n"))
    news = ticker.tick(AttemptStarted(number=1, world_size=2, time=1.0))
    assert news is None
    news = ticker.tick(out("two\n"))
    assert news["attempt"] == 1
    assert news["tails"]["0"]["sent"] == [0, 0]


def test_more_ranks_than_a_page_may_be_sent_at_once(monkeypatch):
    monkeypatch.setattr(panel_output, "WHOLE_CHARACTERS", 10_000)
    ticker = Ticker(4)
    for step in range(20):
        ticker.tick(*(out(f"{rank} {step} {'x' * 80}\n", rank) for rank in range(4)))
    whole = Page().take(ticker.feed.whole(), rank=3)
    assert whole.sent < 12_000
    assert whole.texts[-1].startswith("3 19")


# --- rows, values, reports ---------------------------------------------------------------------------------


def test_rows_tell_what_changed_and_nothing_else():
    rows = Rows(HEADER)
    state = run_of(3)
    first = some(rows.news(state, 0.0))
    assert list(first["rows"]) == ["0", "1", "2"]
    assert rows.news(state, 0.1) is None
    state = advance(state, out("more\n", 1))
    assert rows.news(state, 0.2) is None, "output comes by itself"
    state = advance(state, Measured(usages={1: Usage(cpu_percent=99.7, memory=1 << 20, gpu_percent=5)}))
    second = some(rows.news(state, 0.3))
    assert list(second["rows"]) == ["1"]
    assert second["rows"]["1"] | {"cpu": 100, "memory": 1 << 20, "gpu": 5} == second["rows"]["1"]
    assert "gpu_memory" not in second["rows"]["1"]


def test_a_rank_that_has_ended_shows_its_peak_in_place_of_what_it_used():
    state = run_of(2)
    state = advance(state, Measured(usages={0: Usage(cpu_percent=5.0, memory=1, gpu_memory=2)}))
    state = advance(state, msgspec.structs.replace(returned(0, "a"), peak_gpu_memory=3 << 30))
    state = advance(state, Raised(rank=1, failure=FailureRecord(type="E", message=""), peak_gpu_memory=5))
    ended = some(Rows(HEADER).news(state, 0.0))["rows"]
    assert (ended["0"]["gpu_peak"], ended["1"]["gpu_peak"]) == (3 << 30, 5)
    assert "gpu_memory" not in ended["0"]


def test_equal_values_are_sent_once():
    rows = Rows(HEADER)
    state = run_of(3, returned(0, "a", "<b>a</b>"), returned(1, "a", "<b>a</b>"), returned(2, "b"))
    news = some(rows.news(state, 0.0))
    assert [row["value"] for row in news["rows"].values()] == [0, 0, 1]
    assert news["values"] == {"0": {"text": "a", "html": "<b>a</b>"}, "1": {"text": "b", "html": ""}}


def test_values_of_many_ranks_have_a_limit():
    rows = Rows(HEADER)
    state = run_of(256, *(returned(rank, f"{rank}" * 3_000, f"{rank}" * 10_000) for rank in range(256)))
    assert len(json.dumps(rows.news(state, 0.0))) < 700_000


def test_a_failure_that_follows_from_another_says_so():
    rows = Rows(HEADER)
    closed = FailureRecord(type="RuntimeError", message="Connection closed by peer", time=4.0)
    state = run_of(2, Raised(rank=0, failure=closed))
    assert some(rows.news(state, 0.0))["rows"]["0"]["failure"] == "RuntimeError: Connection closed by peer"
    state = advance(state, Raised(rank=1, failure=FailureRecord(type="E", message="boom", time=3.0)))
    news = some(rows.news(state, 0.1))
    assert news["rows"]["0"]["failure"].startswith("consequence of rank 1: RuntimeError")


def test_a_restart_with_fewer_ranks_removes_rows():
    rows = Rows(HEADER)
    state = run_of(3)
    rows.news(state, 0.0)
    news = some(rows.news(advance(state, AttemptStarted(number=1, world_size=2, time=9.0)), 0.1))
    assert news["removed"] == ["2"]
    assert news["header"]["restarts"] == "1 restart"
    assert list(rows.rows) == ["0", "1"]


def test_the_report_has_the_root_cause_first_with_its_traceback_in_colours():
    reporter = Reporter()
    closed = FailureRecord(type="RuntimeError", message="Connection closed by peer", time=4.0)
    boom = FailureRecord(type="E", message="boom", traceback="plain", time=5.0)
    state = run_of(3, Raised(rank=0, failure=closed), Raised(rank=1, failure=boom))
    told = some(reporter.news(state))
    assert [(cause["ranks"], cause["why"]) for cause in told["causes"]] == [("rank 1", "E: boom")]
    assert told["causes"][0]["traceback"] == ["plain"]
    assert told["consequences"] == ["rank 0: consequence of rank 1: RuntimeError: Connection closed by peer"]
    assert told["consequence_count"] == 1
    assert reporter.news(state) is None
    told = some(reporter.news(advance(state, Colored(rank=1, text="\x1b[31mE\x1b[0m: boom"))))
    assert told["causes"][0]["traceback"] == [(0, ((1, "E"), (0, ": boom")))]


def test_the_report_tells_of_attempts_and_of_where_the_ranks_hang():
    reporter = Reporter()
    boom = FailureRecord(type="ValueError", message="boom", time=5.0)
    state = run_of(2, out("first\nlast\n"), Raised(rank=1, failure=boom))
    reporter.news(state)
    state = advance(state, AttemptStarted(number=1, world_size=2, time=9.0))
    (attempt,) = some(reporter.news(state))["attempts"]
    assert attempt["number"] == 0
    assert attempt["title"].startswith("attempt 0: restarted: rank 1: ValueError: boom after ")
    assert attempt["lines"] == ["rank 1: ValueError: boom", "rank 0, last output: last"]
    assert reporter.news(state) is None
    frame = FrameRecord("Cell In[3]", 9, "<module>", "wait()")
    report = hang_report({rank: Where(rank=rank, frames=(frame,)) for rank in range(2)})
    state = advance(state, LocatedAll(report=report))
    told = some(reporter.news(state))
    assert told["attempts"] == [attempt]
    assert told["hang"].startswith("[ranks 0-1] at cell line 9: wait()\n    Cell, line 9")


def test_a_drawing_counts_its_deltas_and_is_silent_when_nothing_changed():
    drawing = Drawing(HEADER, 10.0)
    state = run_of(2)
    assert some(drawing.changes(state, 11.0))["sequence"] == 1
    assert drawing.changes(state, 11.1) is None
    assert some(drawing.changes(advance(state, out("a\n")), 11.2))["sequence"] == 2
    whole = drawing.whole(11.2)
    assert whole["sequence"] == 2
    assert whole["age"] == pytest.approx(1.2)


# --- stragglers --------------------------------------------------------------------------------------------


def steps(ranks, seconds, printing, state=None):
    """Yield the marks of every second, while the ranks in `printing` print."""
    looked, state = Stragglers(), state or run_of(ranks)
    for second in range(seconds):
        for rank in printing:
            state = advance(state, out(f"{second}\n", rank))
        yield looked.marks(state, float(second))


def test_a_rank_that_falls_silent_while_most_others_print_is_marked():
    *_, last = steps(4, 13, [0, 1, 2])
    assert last == {3: SILENT}


@pytest.mark.parametrize(("ranks", "printing"), [(4, []), (4, [0]), (2, [0]), (8, [0, 1, 2, 3])])
def test_where_few_ranks_print_nobody_is_marked(ranks, printing):
    assert not any(steps(ranks, 30, printing))


def test_of_two_ranks_the_one_that_stopped_printing_is_marked():
    *_, last = steps(2, 15, [0], run_of(2, out("once\n", 1)))
    assert last == {1: SILENT}


def test_a_rank_that_the_others_wait_for_in_a_collective_is_marked_after_a_while():
    def began(rank, collectives):
        return Reached(rank=rank, collectives=collectives)

    looked, state = Stragglers(), run_of(3, began(0, 7), began(1, 7), began(2, 6))
    assert looked.marks(state, 0.0) == {}
    state = advance(advance(state, began(0, 9)), began(1, 9))
    assert looked.marks(state, panel_ranks.BEHIND_SECONDS) == {2: f"3 collectives {BEHIND}"}
    state = advance(state, began(2, 8))
    assert looked.marks(state, 3.0) == {}, "it moves"
    assert looked.marks(state, 3.0 + panel_ranks.BEHIND_SECONDS) == {2: f"1 collective {BEHIND}"}
    assert looked.marks(advance(state, began(2, 9)), 20.0) == {}


def test_without_collectives_nobody_is_behind():
    looked = Stragglers()
    assert looked.marks(run_of(2), 0.0) == looked.marks(run_of(2), 9.0) == {}


def test_the_last_to_finish_are_marked_after_a_while():
    looked, state = Stragglers(), run_of(4, returned(0), returned(1))
    assert looked.marks(state, 0.0) == {}
    state = advance(state, returned(2))
    assert looked.marks(state, 10.0) == {}
    assert looked.marks(state, 10.0 + panel_ranks.FINISHED_SECONDS) == {3: UNFINISHED}
    assert looked.marks(advance(state, returned(3)), 20.0) == {}
