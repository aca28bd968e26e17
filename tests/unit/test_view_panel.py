"""What the live panel is sent: lines, displays, rows and reports, and no more than a page can take."""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_runs import returned, run_of
from test_view_html import HOSTILE
from test_view_html import Page as Html

from nblaunch.diagnose.hang import report as hang_report
from nblaunch.protocol import messages as wire
from nblaunch.protocol.reports import LocatedAll, format_ranks
from nblaunch.protocol.state import RunState, advance
from nblaunch.view import html as html_view
from nblaunch.view import panel_parts
from nblaunch.view.output import items_of
from nblaunch.view.panel_output import WAITING, Feed, RankNews
from nblaunch.view.panel_parts import BEHIND, SILENT, UNFINISHED, Drawing, Stragglers, groups_of, usage_of
from nblaunch.view.screen import WIDEST, Line
from nblaunch.view.summary import Header

HEADER = Header("cell", "gloo", node="host")
CLOSED = wire.FailureRecord(type="RuntimeError", message="Connection closed by peer", time=4.0)
BOOM = wire.FailureRecord(type="E", message="boom", time=5.0)
FIGURE = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}


class Page:
    """What a page that got every message knows of one rank: pieces by number."""

    def __init__(self):
        self.pieces = {}
        self.base = 0
        self.sent = 0

    def take(self, news, rank=0):
        self.sent += len(json.dumps(pieces_of(news), ensure_ascii=False).encode())
        lines = news.get(rank, RankNews())
        if lines.clear is not None:
            self.pieces, self.base = {}, lines.clear
        self.pieces.update(lines.sent)
        return self

    @property
    def texts(self):
        return [text_of(piece) for _, piece in sorted(self.pieces.items())]

    @property
    def left_out(self):
        """Return how many lines are missing between those that are there."""
        numbers = sorted(self.pieces)
        return [after - before - 1 for before, after in zip([self.base - 1, *numbers], numbers, strict=False)]


def pieces_of(news):
    """Return what is sent: of all ranks together each piece once."""
    return list(dict.fromkeys(piece for each in news.values() for _, piece in each.sent))


def text_of(piece):
    tag = re.match("<(img|iframe)", piece)
    return f"<{tag[1]}>" if tag else html.unescape(re.sub("<[^>]*>", "", piece))


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
    return wire.Printed(rank=rank, stream=wire.Stream.STDOUT, text=text)


def err(text, rank=0):
    return wire.Printed(rank=rank, stream=wire.Stream.STDERR, text=text)


def figure(rank=0, data=None, **more):
    return wire.Displayed(rank=rank, data=data or FIGURE, **more)


# --- lines -------------------------------------------------------------------------------------------------

CHARACTERS = st.sampled_from(
    ["a", "bc ", "\n", "\r", "\b", "\t", "é", "\x1b[A", "\x1b[31m", "\x1b[0m", "\x1b[K"]
)
WRITES = st.lists(
    st.tuples(st.sampled_from(list(wire.Stream)), st.lists(CHARACTERS, max_size=12).map("".join)), max_size=15
)


@given(WRITES)
def test_a_page_shows_what_a_terminal_shows_however_the_text_comes(writes):
    ticker = Ticker()
    for stream, text in writes:
        ticker.tick(wire.Printed(rank=0, stream=stream, text=text))
    expected = [item for item in items_of(ticker.state.ranks[0].transcript) if isinstance(item, Line)]
    shown = [ticker.page.pieces[number] for number in sorted(ticker.page.pieces)]
    while shown and not text_of(shown[-1]).strip():
        shown.pop()
    assert [text_of(piece) for piece in shown] == [line.text for line in expected]
    marked = ['title="stderr"' in piece for piece in shown]
    assert marked == [line.stream is wire.Stream.STDERR and line.text != "" for line in expected]


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


def test_lines_have_their_colours_and_those_of_stderr_a_mark():
    news = Ticker().tick(out("plain\n\x1b[1;31mred\x1b[0m\n"), err("<error>\n"))
    plain, red, error = pieces_of(news)
    assert plain == "plain"
    assert re.fullmatch('<span style="color:#.*"><b>red</b></span>', red)
    assert error == '<em title="stderr">&lt;error&gt;</em>'


def test_what_many_ranks_print_is_sent_once():
    ticker = Ticker(8)
    news = ticker.tick(*(out("the same\nand more\n", rank) for rank in range(8)))
    assert all(lines.sent == [(0, "the same"), (1, "and more")] for lines in news.values())
    assert ticker.feed.news(ticker.state, ticker.now) == {}, "there was room for all of it"


def test_a_progress_bar_is_one_line_and_only_it_is_sent():
    ticker = Ticker()
    ticker.tick(out("before\n"), err("\r 0%|     |"), out("after\n"))
    for step in range(50):
        news = ticker.tick(err(f"\r{step:2}%|###  |"))
        assert [text_of(piece) for piece in pieces_of(news)] == [f"{step:2}%|###  |"]
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
    assert pieces_of(news) == ["bar 1  "]
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
    assert ticker.page.sent / 2.0 < 80_000, "with what is sent at once after a pause"
    for _ in range(60):
        ticker.tick()
    assert ticker.page.pieces[8000 - 1] == "0 19 399", "each has its turn"


def test_a_quiet_rank_is_heard_beside_one_that_never_pauses():
    ticker = Ticker(2)
    quiet = "".join(f"quiet {number}\n" for number in range(20))
    ticker.tick(out("loud\n" * 50_000, rank=1), out(quiet, rank=0))
    assert ticker.page.texts == quiet.splitlines()


# --- displays, clear_output, attempts ----------------------------------------------------------------------


def test_displays_come_in_order_with_the_text():
    ticker = Ticker()
    ticker.tick(out("before\nhalf"), figure(), out("after\n"))
    assert ticker.page.texts == ["before", "half", "<img>", "after"]


IMAGE = '<img src="data:image/{};base64,{}" alt="{}"{} style="max-width:100%">'
SVG = "<svg><script>1</script></svg>"


@pytest.mark.parametrize(
    ("data", "piece"),
    [
        (
            {"text/html": "<b onclick='x'>", "text/plain": "x"},
            (
                '<iframe class="nblaunch-frame" sandbox="allow-same-origin" '
                'title="HTML that a rank displayed" data-html="&lt;b onclick=&#x27;x&#x27;&gt;"></iframe>'
            ),
        ),
        (FIGURE, IMAGE.format("png", "iVBORw0KGgo=", "&lt;Figure&gt;", "")),
        (
            {"image/svg+xml": SVG},
            IMAGE.format("svg+xml", b64encode(SVG.encode()).decode(), "&lt;image/svg+xml&gt;", ""),
        ),
        ({"text/latex": "$x^2$", "text/plain": "<Latex>"}, "$x^2$"),
        ({"text/plain": "\x1b[31m<b>\x1b[0m"}, "&lt;b&gt;"),
        ({"image/png": "<script>", "text/plain": "no image"}, "no image"),
        ({"application/x": {"a": 1}}, "&lt;application/x&gt;"),
        (
            {"image/png": "A" * 4_000_000, "text/plain": "<Figure>"},
            "&lt;Figure&gt;\n… image/png is too large to be shown before the end of the run …",
        ),
    ],
)
def test_a_display_is_sent_in_its_richest_form_and_as_no_markup_of_the_page(data, piece):
    assert pieces_of(Ticker().tick(figure(data=data))) == [piece]


def test_the_size_that_a_figure_asks_for_is_kept():
    size = {"image/png": {"width": 120, "height": "80"}}
    news = Ticker().tick(figure(metadata=size))
    assert pieces_of(news) == [IMAGE.format("png", "iVBORw0KGgo=", "&lt;Figure&gt;", ' width="120"')]


def test_an_update_changes_the_display_where_it_is():
    ticker = Ticker()
    known = {"display_id": "a"}
    ticker.tick(figure(data={"text/plain": "one"}, transient=known), out("after\n"))
    ticker.tick(figure(data={"text/plain": "two"}, transient=known, update=True))
    assert [ticker.page.pieces[number] for number in (0, 1)] == ["two", "after"]


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
    assert "base64,0099" in ticker.page.pieces[0], "the last one is shown"


def test_a_display_that_has_to_wait_keeps_its_place():
    ticker = Ticker()
    large = {"image/png": "A" * 400_000}
    ticker.tick(figure(data=large), figure(data={"image/png": "B" * 400_000}), out("after\n"))
    assert ticker.page.pieces[1] == WAITING
    assert ticker.page.texts == ["<img>", "… a display that is on its way …", "after"]
    for _ in range(20):
        ticker.tick()
    assert ticker.page.texts == ["<img>", "<img>", "after"]


def test_clear_output_clears_the_page_too():
    ticker = Ticker()
    ticker.tick(out("one\ntwo\n"), figure())
    ticker.tick(wire.Cleared(rank=0), out("three\n"))
    assert ticker.page.texts == ["three"]
    assert ticker.page.left_out == [0]
    ticker.tick(wire.Cleared(rank=0, wait=True))
    assert ticker.page.texts == ["three"]
    ticker.tick(out("four\n"))
    assert ticker.page.texts == ["four"]
    ticker.tick(wire.Cleared(rank=0))
    assert ticker.page.texts == [], "also where nothing follows"


def test_a_clear_after_more_than_is_shown_counts_what_follows():
    ticker = Ticker()
    ticker.tick(out("a\n" * 100_000), wire.Cleared(rank=0), out("".join(f"{n}\n" for n in range(9_000))))
    assert ticker.page.texts[-1] == "8999"
    assert sum(ticker.page.left_out) + len(ticker.page.pieces) == 9_000


def test_a_new_attempt_begins_anew():
    ticker = Ticker(2)
    ticker.tick(out("one\n"))
    news = ticker.tick(wire.AttemptStarted(number=1, world_size=2, time=1.0))
    assert not news
    news = ticker.tick(out("two\n"))
    assert news[0].sent == [(0, "two")]


# --- the parts of the panel ---------------------------------------------------------------------------------


class Shown:
    """A drawing, and the parts that a page has; a tenth of a second a tick."""

    def __init__(self, state, header=HEADER):
        self.drawing, self.state, self.now = Drawing(header, 0.0), state, 0.0
        self.parts = {}
        self.sent = {}
        self.tick()

    def tick(self, *messages):
        for message in messages:
            self.state = advance(self.state, message)
        self.now += 0.1
        delta = self.drawing.changes(self.state, self.now)
        self.sent = {} if delta is None else delta["parts"]
        self.parts = {key: part for key, part in {**self.parts, **self.sent}.items() if part is not None}
        return self.sent


def test_parts_tell_what_changed_and_nothing_else():
    shown = Shown(run_of(3))
    assert {"head", "ranks", "r0", "r1", "r2"} <= shown.parts.keys()
    assert shown.tick() == {}
    assert shown.tick(out("more\n", 1)) == {}, "output comes by itself"
    usage = wire.Usage(cpu_percent=99.7, memory=1 << 20, gpu_percent=5)
    assert shown.tick(wire.Measured(usages={1: usage})) == {"u1": "CPU 100 % · 1 MiB · GPU 5 %"}
    shown.tick(returned(2, "7"))
    assert {"head", "r2"} <= shown.sent.keys()
    assert "r0" not in shown.sent


def test_a_rank_that_has_ended_shows_its_peak_in_place_of_what_it_used():
    shown = Shown(run_of(2))
    shown.tick(wire.Measured(usages={0: wire.Usage(cpu_percent=5.0, memory=1, gpu_memory=2)}))
    assert "CPU 5 %" in shown.parts["u0"]
    ended = msgspec.structs.replace(returned(0, "a"), peak_gpu_memory=3 << 30)
    shown.tick(
        ended, wire.Raised(rank=1, failure=wire.FailureRecord(type="E", message=""), peak_gpu_memory=5 << 20)
    )
    assert (shown.parts["u0"], shown.parts["u1"]) == ("GPU peak 3.0 GiB", "GPU peak 5 MiB")


def test_equal_values_are_sent_once_and_html_in_a_frame():
    rich = "<b onclick='x()'>a</b>"
    shown = Shown(run_of(3, returned(0, "a", rich), returned(1, "a", rich), returned(2, "b\nb")))
    assert shown.parts["values"].count("data-key") == 1
    assert "Value of ranks 0-1" in shown.parts["values"]
    assert "Value of rank 2" in shown.parts["values"]
    assert shown.parts["v0"].startswith('<iframe class="nblaunch-frame" sandbox="allow-same-origin"')
    assert "onclick" not in shown.parts["values"]


def test_values_of_many_ranks_have_a_limit():
    values = (returned(rank, f"{rank}" * 3_000, f"{rank}" * 10_000) for rank in range(256))
    shown = Shown(run_of(256, *values))
    assert len(json.dumps(shown.parts)) < 700_000


def test_a_failure_that_follows_from_another_says_so():
    shown = Shown(run_of(2, wire.Raised(rank=0, failure=CLOSED)))
    assert ">RuntimeError: Connection closed by peer<" in shown.parts["r0"]
    shown.tick(wire.Raised(rank=1, failure=BOOM))
    assert ">consequence of rank 1: RuntimeError" in shown.parts["r0"]


def test_a_restart_with_fewer_ranks_removes_their_parts():
    shown = Shown(run_of(3))
    shown.tick(wire.AttemptStarted(number=1, world_size=2, time=9.0))
    assert shown.sent["r2"] is None
    assert " · 1 restart" in shown.parts["head"]
    assert {"r0", "r1"} <= shown.parts.keys()
    assert 'data-ranks="0,1"' in shown.parts["ranks"]


def test_the_failure_has_the_root_cause_first_with_its_traceback_in_colours():
    boom = msgspec.structs.replace(BOOM, traceback="plain")
    shown = Shown(run_of(3, wire.Raised(rank=0, failure=CLOSED), wire.Raised(rank=1, failure=boom)))
    told = shown.parts["failure"]
    assert told.index("Root cause: rank 1:") < told.index(">E: boom<") < told.index(">plain<")
    assert "1 consequence of it" in told
    assert "rank 0: consequence of rank 1: RuntimeError: Connection closed by peer" in told
    assert shown.tick() == {}
    shown.tick(wire.Colored(rank=1, text="\x1b[31mE\x1b[0m: boom"))
    assert ">E</span>: boom" in shown.sent["failure"]


def test_an_attempt_before_is_drawn_once_whatever_comes_afterwards(monkeypatch):
    draw = Mock(wraps=html_view.attempt_before)
    monkeypatch.setattr(html_view, "attempt_before", draw)
    shown = Shown(
        run_of(
            2,
            out("line\n"),
            wire.Raised(rank=1, failure=BOOM),
        )
    )
    for number in (1, 2):
        shown.tick(wire.AttemptStarted(number=number, world_size=2, time=9.0 * number))
        for text in ("one", "two", "three"):
            shown.tick(wire.Noticed(text=f"{text} {number}"))
        assert draw.call_count == number
    assert shown.parts["attempts"].count("restarted") == 2


def test_attempts_are_told_as_in_the_saved_notebook_and_where_the_ranks_hang():
    shown = Shown(run_of(2, out("first\nlast\n"), wire.Raised(rank=1, failure=BOOM)))
    assert "attempts" not in shown.parts
    shown.tick(wire.AttemptStarted(number=1, world_size=2, time=9.0))
    attempts = shown.parts["attempts"]
    for told in ("attempt 0: restarted: rank 1: E: boom after ", ">first\nlast<", "Root cause"):
        assert told in attempts
    assert shown.tick() == {}
    frame = wire.FrameRecord("Cell In[3]", 9, "<module>", "wait()")
    report = hang_report({rank: wire.Where(rank=rank, frames=(frame,)) for rank in range(2)})
    shown.tick(LocatedAll(report=report))
    assert shown.parts["attempts"] == attempts
    assert "[ranks 0-1] at cell line 9: wait()" in shown.parts["hang"]


def test_a_drawing_counts_its_deltas_and_is_silent_when_nothing_changed():
    drawing = Drawing(HEADER, 10.0)
    state = run_of(2)
    assert some(drawing.changes(state, 11.0))["sequence"] == 1
    assert drawing.changes(state, 11.1) is None
    assert some(drawing.changes(advance(state, out("a\n")), 11.2))["sequence"] == 2
    whole = drawing.whole(11.2)
    assert whole["sequence"] == 2
    assert whole["age"] == pytest.approx(1.2)
    assert whole["log"]["rows"] == [[1, "0", "a", None]]


def test_256_ranks_that_print_and_are_measured_take_32_kb_a_second_in_ten_updates():
    shown, sizes, updates, seconds = Shown(run_of(256)), [0], 0, 11
    for tick in range(10 * seconds):
        messages = [
            out(f"step {tick}: rank {rank} has loss {1 / (rank + tick + 1):.4f}\n" * 9, rank)
            for rank in range(256)
        ]
        usages = {rank: wire.Usage(cpu_percent=tick % 100, memory=tick * rank << 20) for rank in range(256)}
        for message in (*messages, *([wire.Measured(usages=usages)] if tick % 10 == 0 else [])):
            shown.state = advance(shown.state, message)
        shown.now += 0.1
        delta = shown.drawing.changes(shown.state, shown.now)
        updates += delta is not None
        sizes.append(len(json.dumps(delta, ensure_ascii=False)))
    assert updates == 10 * seconds
    assert sum(sizes[50:]) / (seconds - 5) < 32_000


@given(st.lists(st.sampled_from(HOSTILE), min_size=5, max_size=5))
def test_nothing_that_a_rank_says_becomes_markup(texts):
    printed, message, value, host, title = texts
    failure = wire.FailureRecord(type=message, message=message, traceback=printed, colored=printed, time=3.0)
    state = run_of(
        2, out(printed), err(message, 1), returned(0, value, value), figure(data={"text/html": printed})
    )
    state = advance(
        advance(state, wire.Raised(rank=1, failure=failure)),
        wire.AttemptStarted(number=1, world_size=9, time=9.0),
    )
    places = {rank: wire.RankPlace(0, f"{host}{rank}", value, rank, wire.Phase.JOB) for rank in range(9)}
    state = advance(state, wire.JobAssigned(ranks=places, attempt=1))
    for rank in range(9):
        state = advance(advance(state, wire.Started(rank=rank, time=9.0)), out(printed, rank))
    state = advance(advance(state, wire.Raised(rank=3, failure=failure)), returned(4, value, ""))
    drawing = Drawing(Header(title, message, node=host, magic=printed), 0.0)
    drawing.changes(state, 0.0)
    whole = drawing.whole(0.0)
    rows = [str(row[2]) for row in whole["log"]["rows"]]
    for content in (*whole["parts"].values(), *rows):
        page = Html(content)
        assert not {"script", "img", "b", "template"} & set(page.tags)
        assert not any(name.startswith("on") for _, attributes in page.attributes for name in attributes)
        assert page.sound


# --- many ranks -------------------------------------------------------------------------------------------


def rows_of(state, now=0.0):
    """Return the ranks of each row of the table, with their state, as a page is told."""
    ranks = panel_parts.RankNotes()
    ranks.update(state, now)
    return [
        (format_ranks([each.rank for each in known]), known[0].state) for known in groups_of(ranks).values()
    ]


def test_ranks_that_are_alike_are_one_row_and_what_differs_comes_first():
    failed = (wire.Raised(rank=5, failure=BOOM), *(wire.Raised(rank=rank, failure=CLOSED) for rank in (1, 2)))
    assert rows_of(run_of(8)) == [("ranks 0-7", "RUNNING")]
    assert rows_of(run_of(8, returned(3))) == [("ranks 0-2,4-7", "RUNNING"), ("rank 3", "SUCCEEDED")]
    assert rows_of(run_of(8, *failed)) == [
        ("rank 5", "FAILED"),
        ("ranks 1-2", "FAILED"),
        ("ranks 0,3-4,6-7", "RUNNING"),
    ]
    late = wire.Finishing(rank=9, what="exit 1"), wire.Finishing(rank=10, what="exit 2")
    assert rows_of(run_of(1024, *late)) == [("ranks 0-8,11-1023", "RUNNING"), ("ranks 9-10", "RUNNING")]


@given(st.lists(st.sampled_from("rfse"), min_size=1, max_size=70))
def test_whatever_states_ranks_are_in_each_stands_in_exactly_one_row(states):
    made = {"f": wire.Raised, "s": returned, "e": None}
    messages = [
        returned(rank)
        if each == "s"
        else wire.Raised(rank=rank, failure=wire.FailureRecord(type="E", message=each * (rank % 3)))
        for rank, each in enumerate(states)
        if made.get(each)
    ]
    ranks = panel_parts.RankNotes()
    ranks.update(run_of(len(states), *messages), 0.0)
    found = [[each.rank for each in known] for known in groups_of(ranks).values()]
    assert sorted(rank for row in found for rank in row) == list(range(len(states)))
    assert all(row == sorted(row) for row in found)


def test_what_ranks_use_is_a_range():
    usages = {rank: wire.Usage(cpu_percent=80 + rank, memory=(231 + rank) << 20) for rank in range(8)}
    state = run_of(8, wire.Measured(usages=usages))
    assert usage_of(list(state.ranks.values())) == "CPU 80-87 % · 231-238 MiB"
    assert usage_of([state.ranks[0]]) == "CPU 80 % · 231 MiB"
    assert usage_of([run_of(1).ranks[0]]) == ""


def test_a_screen_reader_hears_ranks_as_words():
    table = Shown(run_of(9, returned(3))).parts
    assert 'aria-label="ranks 0 to 2, 4 to 8: running"' in "".join(table.values())
    assert 'aria-label="rank 3: succeeded"' in "".join(table.values())
    odd = Shown(run_of(200, *(returned(rank) for rank in range(0, 200, 2)))).parts
    assert 'aria-label="100 ranks: succeeded"' in "".join(odd.values())
    assert ">100 ranks (0,2,4,6,8,10,12,14,16,18,20,…)</button>" in "".join(odd.values())


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
        return wire.Reached(rank=rank, collectives=collectives)

    looked, state = Stragglers(), run_of(3, began(0, 7), began(1, 7), began(2, 6))
    assert looked.marks(state, 0.0) == {}
    state = advance(advance(state, began(0, 9)), began(1, 9))
    assert looked.marks(state, panel_parts.BEHIND_SECONDS) == {2: f"3 collectives {BEHIND}"}
    state = advance(state, began(2, 8))
    assert looked.marks(state, 3.0) == {}, "it moves"
    assert looked.marks(state, 3.0 + panel_parts.BEHIND_SECONDS) == {2: f"1 collective {BEHIND}"}
    assert looked.marks(advance(state, began(2, 9)), 20.0) == {}


def test_without_collectives_nobody_is_behind():
    looked = Stragglers()
    assert looked.marks(run_of(2), 0.0) == looked.marks(run_of(2), 9.0) == {}


def test_the_last_to_finish_are_marked_after_a_while():
    looked, state = Stragglers(), run_of(4, returned(0), returned(1))
    assert looked.marks(state, 0.0) == {}
    state = advance(state, returned(2))
    assert looked.marks(state, 10.0) == {}
    assert looked.marks(state, 10.0 + panel_parts.FINISHED_SECONDS) == {3: UNFINISHED}
    assert looked.marks(advance(state, returned(3)), 20.0) == {}
