"""The static HTML of a run needs no script and no style sheet, and nothing a rank prints is markup."""

from __future__ import annotations

import base64
import html
import json
import re
from html.parser import HTMLParser

import msgspec
import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import sampled
from shown_runs import out, parts_of, returned, run_of

from nblaunch._help import FailureKind
from nblaunch._pytest import _TOOK
from nblaunch.diagnose.hang import report
from nblaunch.insight.markup import ICONS, STATE_COLORS
from nblaunch.protocol import messages as wire
from nblaunch.protocol.reports import LocatedAll
from nblaunch.protocol.state import State, advance
from nblaunch.view.html import render_html
from nblaunch.view.mime import balanced
from nblaunch.view.summary import Header
from nblaunch.view.text import render_text

HEADER = Header("cell", "gloo")
OUR_TAGS = {"div", "strong", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"} | {
    "pre",
    "code",
    "em",
    "img",
    "wbr",
}
EMPTY = {"img", "br", "hr", "wbr"}
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"0" * 60).decode()
LIMIT = 1_000_000


class Page(HTMLParser):
    """Reads HTML as a browser does, and notes whether each element is closed where it was opened."""

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.opened: list[str] = []
        self.sound = True
        self.feed(markup)
        self.close()
        self.sound = self.sound and not self.opened

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.opened.append(tag)

    def handle_endtag(self, tag):
        self.sound = self.sound and bool(self.opened) and self.opened.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def shown(rank, **data):
    kinds = {"png": "image/png", "svg": "image/svg+xml", "html": "text/html", "latex": "text/latex"}
    kinds |= {"plain": "text/plain", "markdown": "text/markdown"}
    return wire.Displayed(rank=rank, data={kinds[name]: content for name, content in data.items()})


def html_of(world_size, *messages):
    return render_html(run_of(world_size, *messages), HEADER)


def page_of(world_size, *messages):
    page = Page(html_of(world_size, *messages))
    assert page.sound
    return page


def words(page):
    return re.sub(r"\s+", " ", " ".join(page.text))


def in_order(text, parts):
    return re.search(".*".join(map(re.escape, parts)), text) is not None


HOSTILE = [
    *("<script>alert(1)</script>", "</pre>", "</div></details></table>", "<img src=x onerror=alert(1)>"),
    *('" onmouseover="alert(1)', "'><b>", "<!--", "]]>", "&lt;script&gt;", "</template></div>"),
    *("\x1b[31m<i>", "\x1b]0;</code>\x07", "<\x00script>", "<\x1b[0mscript>", "\n", "\r"),
]
hostile = st.one_of(st.text(max_size=120), st.lists(st.sampled_from(HOSTILE), max_size=8).map("".join))


@given(hostile, hostile, hostile)
def test_nothing_that_a_rank_says_becomes_markup(printed, message, value):
    failure = wire.FailureRecord(
        type=message[:40],
        message=message,
        traceback=f"{printed}\n{message}",
        frames=(wire.FrameRecord(value[:60], 1, message, ""),),
        time=3.0,
    )
    state = run_of(
        4,
        wire.Noticed(text=message),
        out(0, printed),
        out(1, printed, wire.Stream.STDERR),
        wire.Entered(rank=0, phase=wire.Phase.JOB, device=value[:20]),
        returned(0, value),
        wire.Raised(rank=1, failure=failure),
        wire.Displayed(rank=2, data={"text/plain": printed, "text/markdown": message}),
        wire.Displayed(rank=2, data={"text/latex": value, "text/plain": printed}),
        wire.Displayed(rank=2, data={"image/png": message, "text/plain": value}),
        wire.Displayed(rank=2, data={"image/png": PIXEL, "text/plain": value}),
        wire.Displayed(rank=2, data={"image/svg+xml": value}),
        wire.Displayed(rank=2, data={printed or "x": 1}),
        wire.Exited(rank=2, exitcode=1, time=4.0, reason=message),
    )
    header = Header(message[:50], value[:20], node=printed)
    page = Page(render_html(state, header))
    assert page.sound
    text = render_text(state, header)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text), "nor moves a cursor"
    assert set(page.tags) <= OUR_TAGS | {"a"}
    addresses = {values["href"] for _, values in page.attributes if "href" in values}
    assert addresses <= {kind.address for kind in FailureKind}
    allowed = {"style", "open", "title", "src", "alt", "href"}
    assert {name for _, attributes in page.attributes for name in attributes} <= allowed
    assert {values["title"] for _, values in page.attributes if "title" in values} <= {"stderr"}
    sources = [values["src"] for _, values in page.attributes if "src" in values]
    assert all(re.fullmatch(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]*", str(source)) for source in sources)


def test_there_is_no_script_no_style_sheet_no_svg_no_aria_and_no_data_attribute():
    failure = wire.FailureRecord(type="E", message="m", traceback="t", time=1.0)
    markup = html_of(
        3,
        out(0, "\x1b[31mred\x1b[0m\n"),
        shown(1, png=PIXEL),
        wire.Raised(rank=2, failure=failure),
        returned(0, "1"),
    )
    assert not re.search(r"<script|<style|<svg|<link|<iframe|class=|id=| aria-| data-|on[a-z]+=", markup)


def test_every_rank_has_a_row_with_its_device_state_last_line_and_value():
    page = page_of(
        2,
        wire.Entered(rank=0, phase=wire.Phase.JOB, device="cuda:0"),
        out(0, "first\nlast of 0\n"),
        returned(0, "3.0"),
        out(1, "last of 1\n"),
    )
    assert page.tags.count("tr") == 3
    assert "0 cuda:0 ✓ SUCCEEDED last of 0 3.0" in words(page)
    assert "1 ► RUNNING last of 1" in words(page)


@pytest.mark.parametrize(
    ("value", "drawn"),
    [
        ("0.30000000000000004", "0.3"),
        ("{'loss': 2.302585092994046, 'steps': 3}", "{'loss': 2.302585, 'steps': 3}"),
        ("[-1.2345678901234e-12, (0.12345678901,)]", "[-1.234568e-12, (0.1234568,)]"),
        (
            "P(x=np.float64(0.12345678901), z=(1.5+2.12345678901j))",
            "P(x=np.float64(0.1234568), z=(1.5+2.123457j))",
        ),
        # Text has all of its digits, and so has everything that only looks like a number.
        *[
            (text, text)
            for text in ("['0.12345678901', \"it's 0.12345678901\"]", "10.0.12345678901.3, 1:02.12345678901")
        ],
    ],
)
def test_a_number_has_seven_digits_in_the_table_within_containers_too(value, drawn):
    state = run_of(1, returned(0, value))
    assert (
        words(Page(render_html(state, HEADER)))
        == f"✓ SUCCEEDED · cell · 1 rank · gloo rank state value 0 ✓ SUCCEEDED {drawn}"
    )
    assert f"→ {drawn}" in html.unescape(parts_of(state)["r0"])
    assert render_text(state, HEADER) == f"rank 0: {value}"


def test_a_value_that_is_long_only_by_its_digits_stands_in_the_table_alone():
    numbers = [each / 7 for each in range(1, 7)]
    page = page_of(1, returned(0, repr(numbers)))
    assert "0.1428571, 0.2857143" in words(page)
    assert "Value of rank 0" not in words(page)


def test_the_peak_of_gpu_memory_has_a_column_where_there_is_one():
    returned_peak = msgspec.structs.replace(returned(0, "3.0"), peak_gpu_memory=3 << 29)
    page = page_of(2, returned_peak, returned(1, "3.0"))
    assert "rank state GPU peak value" in words(page)
    assert "0 ✓ SUCCEEDED 1.5 GiB 3.0 1 ✓ SUCCEEDED 3.0" in words(page)
    assert "GPU peak" not in words(page_of(1, returned(0, "3.0")))


def test_every_state_is_a_word_and_a_sign_not_only_a_colour():
    assert len({*ICONS.values()}) == len(State)
    assert set(STATE_COLORS) == set(State)


def test_a_root_cause_comes_first_with_its_traceback_and_consequences_are_folded_beneath():
    cause = wire.FailureRecord(type="ValueError", message="boom", traceback="Traceback:\n  line 4", time=5.0)
    closed = wire.FailureRecord(
        type="RuntimeError", message="Connection closed by peer [127.0.0.1]:40287", time=4.0
    )
    text = words(
        page_of(
            3,
            wire.Raised(rank=0, failure=closed),
            wire.Raised(rank=1, failure=cause),
            wire.RunEnded(time=6.0),
        )
    )
    order = [
        "✗ FAILED · cell · 3 ranks · gloo",
        "Root cause: rank 1: ValueError: boom",
        "Traceback Traceback: line 4",
        "1 consequence of it",
        "rank 0: consequence of rank 1: RuntimeError: Connection closed by peer [127.0.0.1]",
        "rank 2: STOPPED, because of rank 1",
    ]
    assert in_order(text, order)


def test_a_root_cause_of_ours_links_to_the_page_about_it_and_the_users_own_error_to_none():
    killed = wire.FailureRecord(type="ProcessExited", message="was killed by SIGKILL", exitcode=-9)
    page = page_of(2, wire.Raised(rank=1, failure=killed))
    assert [values for tag, values in page.attributes if tag == "a"] == [
        {"href": "https://nblaunch.github.io/e/killed", "style": "text-decoration:underline"}
    ]
    assert "was killed by SIGKILL · what to do" in words(page)
    assert "nblaunch.github.io" not in words(page) + render_text(
        run_of(2, wire.Raised(rank=1, failure=killed)), HEADER
    )
    own = wire.FailureRecord(type="builtins.ValueError", message="boom")
    assert "a" not in page_of(2, wire.Raised(rank=1, failure=own)).tags


def test_each_consequence_opens_to_its_traceback_and_equal_ones_are_one():
    closed = wire.FailureRecord(
        type="RuntimeError",
        message="Connection closed by peer [127.0.0.1]:40287",
        traceback="Traceback:\n  peer [127.0.0.1]:40287 went away",
        time=4.0,
    )
    boom = wire.FailureRecord(type="ValueError", message="boom", time=5.0)
    others = [wire.Raised(rank=rank, failure=closed) for rank in (0, 2, 3)]
    markup = html_of(4, *others, wire.Raised(rank=1, failure=boom))
    text = words(page_of(4, *others, wire.Raised(rank=1, failure=boom)))
    said = "ranks 0,2-3: consequence of rank 1: RuntimeError: Connection closed by peer [127.0.0.1]"
    assert f"3 consequences of it {said} Traceback: peer [127.0.0.1] went away" in text
    assert markup.count("went away") == 1
    # Ports differ from run to run, and are no part of what is saved.
    assert "40287" not in markup


def test_an_earlier_attempt_has_its_own_failure_and_output():
    boom = wire.FailureRecord(type="ValueError", message="boom", traceback="Traceback:\n  line 4", time=5.0)
    page = page_of(
        2,
        out(0, "from the first attempt\n"),
        wire.Raised(rank=1, failure=boom),
        wire.Exited(rank=0, exitcode=-15, time=6.0, expected=True),
        wire.AttemptStarted(number=1, world_size=2, time=7.0, reason="failure"),
        out(0, "from the second\n"),
        returned(0, "7"),
        returned(1, "7"),
    )
    text = words(page)
    order = [
        "✓ SUCCEEDED · cell · 2 ranks · gloo",
        "attempt 0: restarted: rank 1: ValueError: boom",
        "Root cause: rank 1: ValueError: boom Traceback Traceback: line 4",
        "rank 0: ended because of that",
        "Output of rank 0 (1 line) from the first attempt",
        "from the second",
    ]
    assert in_order(text, order)


def hanging():
    frames = (
        wire.FrameRecord("Cell In[3]", 9, "<module>", "dist.all_reduce(t)"),
        wire.FrameRecord("/opt/lib/python3.11/site-packages/torch/c10d.py", 7, "all_reduce", "work.wait()"),
    )
    collective = wire.Collective(group="default_pg", sequence=2, operation="all_reduce")
    answers = {rank: wire.Where(rank=rank, frames=frames, collectives=(collective,)) for rank in range(3)}
    return report(answers, silent={3: "<script>alert(1)</script>"}, finished=[4])


def test_where_the_ranks_were_is_a_line_for_each_stack_that_opens_to_it():
    state = advance(run_of(5), LocatedAll(report=hanging()))
    text = words(Page(render_html(state, HEADER)))
    assert (
        "Where the ranks were [ranks 0-2] in all_reduce, cell line 9: dist.all_reduce(t) "
        "Cell, line 9, in <module> dist.all_reduce(t) "
        "site-packages/torch/c10d.py, line 7, in all_reduce work.wait() "
        "[rank 3] gave no answer <script>alert(1)</script> [rank 4] had finished how to read this"
    ) in text
    assert render_text(state, HEADER).splitlines()[-3:] == [
        "[ranks 0-2] in all_reduce, cell line 9: dist.all_reduce(t)",
        "[rank 3] gave no answer",
        "[rank 4] had finished",
    ]


def test_a_report_of_many_different_stacks_stays_small():
    frames = [
        tuple(wire.FrameRecord(f"/file{rank}.py", line, "x" * 500, "y" * 500) for line in range(50))
        for rank in range(256)
    ]
    answers = {rank: wire.Where(rank=rank, frames=frames[rank]) for rank in range(256)}
    state = advance(run_of(256), LocatedAll(report=report(answers)))
    assert len(render_html(state, HEADER)) < 200_000
    assert "240 more in result.hang_report" in render_html(state, HEADER)


SVG = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
DISPLAYS = {
    "an image, named by its text": (
        shown(0, png=PIXEL + "\n", plain="<Figure size 1x1>"),
        {"src": f"data:image/png;base64,{PIXEL}", "alt": "<Figure size 1x1>"},
    ),
    "an image of the size that it asks for": (
        wire.Displayed(
            rank=0, data={"image/png": PIXEL}, metadata={"image/png": {"width": 320, "height": True}}
        ),
        {"width": "320"},
    ),
    "an SVG, as an image in which no script runs": (
        shown(0, svg=SVG),
        {"src": f"data:image/svg+xml;base64,{base64.b64encode(SVG.encode()).decode()}"},
    ),
}


@pytest.mark.parametrize(("display", "wanted"), DISPLAYS.values(), ids=DISPLAYS)
def test_an_image_that_a_rank_displayed_is_embedded(display, wanted):
    page = page_of(1, display)
    (image,) = [values for tag, values in page.attributes if tag == "img"]
    assert wanted.items() <= image.items()
    assert "height" not in image
    assert "script" not in page.tags


@pytest.mark.parametrize("seconds", [0.0, 4.23, 59.9, 125.4, 3725.0])
def test_how_long_a_run_took_is_what_nbval_does_not_compare(seconds):
    state = run_of(2, out(0, "1 s</div>"))
    page = render_html(state, HEADER, took=seconds)
    assert page != render_html(state, HEADER)
    assert re.sub(_TOOK, "", page) == render_html(state, HEADER)


def test_html_that_a_rank_displayed_is_drawn_as_html():
    assert "ul" in page_of(1, shown(0, html="<ul><li>one</li></ul>", plain="one")).tags


def test_a_data_frame_is_shown_as_its_table():
    page = page_of(1, returned(0, "   a\n0  1", "<table><tr><td>1</td></tr></table>"))
    assert page.tags.count("table") == 2
    assert "Value of rank 0" in words(page)


def test_latex_is_left_to_the_notebook_and_printed_dollars_are_not():
    markup = html_of(1, shown(0, latex="$x^2 < 1$"), out(0, "costs $5 and $6\n"))
    assert "<div>$x^2 &lt; 1$</div>" in markup
    for printed in re.finditer(r"costs \$5", markup):
        assert re.search(r"<(pre|code) style=\"[^\"]*\">$", markup[: printed.start()])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("</div></details><b>x", "<b>x</b>"),
        ("<p>a<br/>b</p>", "<p>a<br>b</p>"),
        ("<!-- never closed <b>x", ""),
        ("<div/>x", "<div></div>x"),
        ("<a title='\"'>&amp; &lt; &#60;</a>", '<a title="&quot;">&amp; &lt; &#60;</a>'),
        ("<script>if (1 < 2) x()</script>", "<script>if (1 < 2) x()</script>"),
        ("<ul><li>a<li>b</ul>c", "<ul><li>a<li>b</li></li></ul>c"),
        ("a < b", "a &lt; b"),
    ],
)
def test_displayed_html_closes_what_it_opens_and_nothing_else(given, kept):
    assert balanced(given).startswith(kept)
    assert Page(f"<section>{balanced(given)}</section>").sound


@given(
    st.lists(
        st.sampled_from(
            ["<div>", "</div>", "<b", ">", "<table><tr>", "</td>", "<!--", "-->", "'", '"', "x", "&"]
        ),
        max_size=15,
    ).map("".join)
)
def test_no_displayed_html_ends_the_panel_around_it(given):
    page = Page(f"<section>{balanced(given)}</section>")
    assert page.sound
    assert page.opened == []


def test_pids_times_hosts_and_paths_of_the_machine_are_in_neither_form():
    def forms(pid, time, node):
        hello = wire.Hello(rank=0, token="", attempt=0, local_rank=0, world_size=2, node=node, pid=pid)
        failure = wire.FailureRecord(type="m.E", message="no", time=time)
        state = run_of(
            2,
            hello,
            wire.Started(rank=0, time=time),
            out(0, "hello\n"),
            returned(0, "1"),
            wire.Raised(rank=1, failure=failure),
        )
        header = Header("cell", "gloo", node=node, log_dir=f"/logs/{node}")
        return render_html(state, header), render_text(state, header)

    assert forms(1234, 10.0, "host-a") == forms(98765, 77.0, "host-b")


def saved_size(state):
    """Return the bytes that this run takes in a notebook file."""
    notebook = nbformat.v4.new_notebook()
    cell = nbformat.v4.new_code_cell("x")
    data = {"text/html": render_html(state, HEADER), "text/plain": render_text(state, HEADER)}
    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
    notebook.cells.append(cell)
    return len(nbformat.writes(notebook).encode())


@pytest.mark.parametrize("ranks", sampled([64, 256, 2]))
@pytest.mark.parametrize(
    "line",
    sampled(
        ["\x1b[31mr\x1b[32mg\x1b[0m" * 9 + "\n", "<&>'\"\\\n", "loss 0.5\n", "\n", "é\U0001f600" * 20 + "\n"],
        2,
    ),
    ids=["colours", "markup", "plain", "blank", "emoji"],
)
def test_a_saved_notebook_stays_below_1_mb_whatever_the_ranks_print(ranks, line):
    text = line * (120_000 // len(line))
    value = line * (8_000 // len(line))
    failure = wire.FailureRecord(type="E", message=line * 500, traceback=text[:60_000], time=3.0)
    messages = [out(rank, f"{rank}{text}", list(wire.Stream)[rank % 2]) for rank in range(ranks)]
    values = [returned(rank, f"{rank}{value}", f"<b>{rank}</b>" * 200) for rank in range(0, ranks, 2)]
    failures = [wire.Raised(rank=rank, failure=failure) for rank in range(1, ranks, 2)]
    assert saved_size(run_of(ranks, *messages, *values, *failures)) < LIMIT


def test_a_saved_notebook_stays_below_1_mb_whatever_the_ranks_display():
    figures = [
        shown(
            rank,
            png=base64.b64encode(bytes([rank]) * 30_000).decode(),
            plain=f"figure {number} of {rank}",
        )
        for rank in range(8)
        for number in range(5)
    ]
    rows = "<tr><td>1</td></tr>\n" * 9_000
    tables = [shown(rank, html=f"<table>{rows}</table>", plain="table") for rank in range(8)]
    many = [shown(9, html=f"<b>{number}</b>", plain="x" * 3_000) for number in range(300)]
    state = run_of(10, *figures, *tables, *many)
    assert saved_size(state) < LIMIT
    page = Page(render_html(state, HEADER))
    assert page.tags.count("img") >= 8
    for rank in range(8):
        assert f"figure 0 of {rank}" in [values.get("alt") for _, values in page.attributes]
    assert "image/png left out, see result.ranks[7].displays[1]" in words(page)


def test_a_figure_of_one_of_64_ranks_is_not_crowded_out_by_what_the_others_print():
    printed = [out(rank, f"{rank} line\n" * 10_000) for rank in range(64)]
    figure = shown(5, png=base64.b64encode(b"x" * 120_000).decode())
    markup = html_of(64, *printed, figure)
    assert "<img " in markup
    assert markup.index("<img ") < markup.index("Output of 63 ranks")
    assert "<details open" in markup[: markup.index("<img ")]


def test_it_can_be_sent_as_json_even_where_a_rank_wrote_half_a_character():
    markup = html_of(1, out(0, "half \ud83d of it\n"), returned(0, "\udcff"))
    assert "half \ufffd of it" in json.loads(json.dumps(markup, ensure_ascii=False).encode())
