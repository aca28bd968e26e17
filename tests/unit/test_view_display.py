"""Where a run is shown: one display in a notebook, a live panel that leaves static HTML, or a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nblaunch import _notebook
from nblaunch._errors import OptionError
from nblaunch.client.run import SilentView
from nblaunch.protocol.messages import AttemptStarted, Displayed, Payload, Printed, Returned, Started, Stream
from nblaunch.protocol.state import Message, RunState, advance
from nblaunch.view import display
from nblaunch.view.display import (
    GuardedView,
    OnceView,
    TextView,
    WidgetView,
    choose_view,
    html_and_text,
    view_of,
)
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header
from nblaunch.view.text import render_text

WIDGET = "application/vnd.jupyter.widget-view+json"
REPOSITORY = str(Path(__file__).parents[2])

HEADER = Header("cell", "gloo")


def run_of(world_size, *messages: Message):
    """Return the state after every rank has started and these messages have come."""
    state = RunState.fresh(world_size)
    begin = (Started(rank=rank, time=1.0) for rank in range(world_size))
    for message in (AttemptStarted(number=0, world_size=world_size, time=0.0), *begin, *messages):
        state = advance(state, message)
    return state


def out(rank, text):
    return Printed(rank=rank, stream=Stream.STDOUT, text=text)


def returned(rank, text=""):
    return Returned(rank=rank, value=Payload(sizes=()), time=2.0, text=text)


class Terminal(io.StringIO):
    """A standard output that somebody watches."""

    def isatty(self):
        return True


@pytest.mark.parametrize("value", ["fancy", "HTML", "text "])
def test_a_wrong_value_of_the_variable_is_refused_by_its_name(monkeypatch, value):
    monkeypatch.setenv("NBLAUNCH_DISPLAY", value)
    with pytest.raises(OptionError, match=r"NBLAUNCH_DISPLAY='.*auto, widget, html or text.*unset it"):
        choose_view(HEADER)


def test_the_api_gets_its_view_under_a_title_and_a_backend(capsys):
    view = view_of("train", "gloo")
    state = run_of(1, returned(0))
    view.open(state)
    view.close(state)
    assert capsys.readouterr().out == "train · 1 rank · gloo: SUCCEEDED\n"


def test_a_wrong_mode_is_refused():
    with pytest.raises(OptionError, match=r"display='fancy'"):
        choose_view(HEADER, "fancy")


@pytest.mark.parametrize("mode", ["auto", "widget", "html", "text", None, ""])
def test_without_a_kernel_everything_is_text(monkeypatch, mode):
    monkeypatch.setenv("NBLAUNCH_DISPLAY", mode or "")
    view = choose_view(HEADER, mode or None)
    assert isinstance(view, GuardedView)
    assert isinstance(view.view, TextView)


@pytest.mark.parametrize(
    ("mode", "comm_manager", "expected"),
    [
        ("auto", object(), WidgetView),
        ("widget", object(), WidgetView),
        ("auto", None, OnceView),
        ("widget", None, OnceView),
        ("html", object(), OnceView),
        ("text", object(), OnceView),
    ],
)
def test_a_panel_needs_a_kernel_with_comms(monkeypatch, mode, comm_manager, expected):
    class Shell:
        class kernel:  # noqa: N801 - an attribute of the shell
            pass

    Shell.kernel.comm_manager = comm_manager  # type: ignore[attr-defined]
    monkeypatch.setattr(_notebook, "shell", Shell)
    monkeypatch.delenv(_notebook.TESTED_VARIABLE)
    view = choose_view(HEADER, mode)
    assert isinstance(view, GuardedView)
    assert isinstance(view.view, expected)


def test_outside_a_terminal_nothing_is_printed_before_the_end(capsys):
    view = TextView(HEADER)
    state = run_of(2, out(0, "hello\n"))
    view.open(state)
    view.draw(state)
    assert capsys.readouterr().out == ""
    state = advance(advance(state, returned(0, "1")), returned(1, "1"))
    view.close(state)
    assert capsys.readouterr().out == render_text(state, HEADER) + "\n"


def test_in_a_terminal_lines_come_live_and_are_not_repeated(monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    view = TextView(HEADER)
    state = run_of(2)
    view.open(state)
    state = advance(state, out(1, "hello\nunfin"))
    view.draw(state)
    assert terminal.getvalue() == "[rank 1] hello\n"
    for message in (out(0, "there\n"), Displayed(rank=0, data={"text/plain": "fig"}), out(1, "ished")):
        state = advance(state, message)
    state = advance(advance(state, returned(0, "1")), returned(1, "1"))
    view.close(state)
    assert terminal.getvalue().splitlines() == [
        "[rank 1] hello",
        "[rank 0] there",
        "[rank 0] fig",
        "[rank 1] unfinished",
        "ranks 0-1: 1",
    ]


def test_in_a_terminal_a_rank_cannot_move_the_cursor(monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    view = TextView(HEADER)
    view.close(run_of(1, out(0, "\x1b[2J\x1b[31mred\x1b[0m\a\n")))
    assert terminal.getvalue().startswith("[rank 0] red\n")


@pytest.mark.parametrize("step", ["open", "draw", "close"])
def test_a_view_that_breaks_does_not_break_the_run(caplog, step):
    class Broken(SilentView):
        calls = 0

    def broken(_):
        Broken.calls += 1
        message = "the front end went away"
        raise OSError(message)

    view = Broken()
    setattr(view, step, broken)
    guarded, state = GuardedView(view), run_of(1)
    with caplog.at_level(logging.DEBUG, logger="nblaunch.view"):
        guarded.open(state)
        guarded.draw(state)
        guarded.draw(state)
        guarded.close(state)
    assert Broken.calls == 1
    assert "the front end went away" in caplog.text


def test_an_interrupt_while_drawing_is_not_swallowed():
    class Interrupted(SilentView):
        def draw(self, _):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedView(Interrupted()).draw(run_of(1))


def test_a_closed_standard_output_does_not_fail_the_run(monkeypatch):
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", closed)
    view = GuardedView(TextView(HEADER))
    closed.close()
    view.close(run_of(1, returned(0, "1")))


def test_the_panel_opens_after_150_ms_and_draws_at_most_ten_times_a_second(monkeypatch):
    class Panel:
        model_id, reachable = "1", False

        def __init__(self, *_):
            self.shown, self.closed = [], 0

        def show(self, delta):
            self.shown.append(delta)

        def repeat(self):
            pass

        def stop_wanted(self):
            return False

        def close(self):
            self.closed += 1

    module = type(sys)("nblaunch.view.panel")
    vars(module)["Panel"] = Panel
    monkeypatch.setitem(sys.modules, "nblaunch.view.panel", module)
    shown: list[object] = []
    bundles: list[dict[str, str]] = []

    def show(bundle, *_, display_id, **__):
        shown.append(display_id)
        bundles.append(bundle)

    monkeypatch.setattr("IPython.display.display", show)
    monkeypatch.setattr("IPython.display.update_display", show)
    now = [100.0]
    view = WidgetView(HEADER, clock=lambda: now[0])
    view.open(RunState.fresh(2))
    state = run_of(2)
    now[0] += 0.149
    view.draw(state)
    assert shown == []
    now[0] += 0.001
    view.draw(state)
    assert len(shown) == 1
    panel = view._panel
    assert isinstance(panel, Panel)
    for _ in range(100):
        now[0] += 0.01
        state = advance(state, out(0, f"{now[0]}\n"))
        view.draw(state)
    assert 9 <= len(panel.shown) <= 10
    assert all({row[1] for row in delta["log"]["rows"]} == {"0"} for delta in panel.shown)
    now[0] += 1
    view.draw(state)
    drawn = len(panel.shown)
    now[0] += 1
    view.draw(state)
    assert len(panel.shown) == drawn, "nothing changed, so nothing is sent"
    view.close(state)
    assert shown == [shown[0], shown[0]]
    assert panel.closed == 1
    assert "cell · 2 ranks · gloo · 3.2 s</div>" in bundles[-1]["text/html"], "how long it took"
    assert "3.2 s" not in bundles[-1]["text/plain"], "what is compared has no times"


class StoppedPanel:
    """A panel whose reader has pressed Stop again and again."""

    model_id, reachable = "1", True

    def __init__(self, *_):
        pass

    def show(self, _):
        pass

    def repeat(self):
        pass

    def stop_wanted(self):
        return True

    def close(self):
        pass


def test_the_stop_button_interrupts_and_pressed_again_hurries_and_then_does_nothing(monkeypatch):
    module = type(sys)("nblaunch.view.panel")
    vars(module)["Panel"] = StoppedPanel
    monkeypatch.setitem(sys.modules, "nblaunch.view.panel", module)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    monkeypatch.setattr("IPython.display.update_display", lambda *_, **__: None)
    now = [0.0]
    view = WidgetView(HEADER, clock=lambda: now[0])
    state = run_of(1)
    view.open(state)
    now[0] = 0.2
    view.draw(state)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            view.draw(state)
    view.draw(state)
    view.close(state)


def test_a_run_that_began_before_is_as_old_as_it_is(monkeypatch):
    shown: list[Any] = []
    module = type(sys)("nblaunch.view.panel")

    def panel(drawing: Any, _: object) -> StoppedPanel:
        shown.append(drawing)
        return StoppedPanel()

    vars(module)["Panel"] = panel
    monkeypatch.setitem(sys.modules, "nblaunch.view.panel", module)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    view = WidgetView(HEADER, clock=lambda: 1000.0)
    state = advance(RunState.fresh(1, time=time.time() - 65), Started(rank=0, time=1.0))
    view.open(state)
    view.draw(state)
    (drawing,) = shown
    assert drawing.whole(1000.0)["age"] == pytest.approx(65, abs=10)


def test_a_run_that_is_not_watched_to_its_end_says_so():
    for form in html_and_text(run_of(1), HEADER).values():
        assert "Running when watching stopped: the job goes on." in str(form)


def test_the_stop_button_of_a_run_that_is_only_watched_says_so():
    for watched, text in [(False, "Stop"), (True, "Stop watching")]:
        rows = Drawing(Header("cell", "gloo", watched=watched), 0.0)
        rows.changes(run_of(1), 0.0)
        assert f'aria-label="{text}"' in rows.whole(0.0)["parts"]["head"]


class CountingPanel(StoppedPanel):
    """A panel that counts the bytes it is shown."""

    size = 0

    def show(self, delta):
        type(self).size += len(json.dumps(delta))

    def stop_wanted(self):
        return False


@pytest.mark.parametrize(("ranks", "least"), [(2, 8_000), (256, 8_000)])
def test_many_ranks_that_print_much_stay_below_what_the_server_lets_through(monkeypatch, ranks, least):
    module = type(sys)("nblaunch.view.panel")
    vars(module)["Panel"] = CountingPanel
    monkeypatch.setitem(sys.modules, "nblaunch.view.panel", module)
    monkeypatch.setattr(CountingPanel, "size", 0)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    monkeypatch.setattr("IPython.display.update_display", lambda *_, **__: None)
    now, seconds = [0.0], 5
    view = WidgetView(HEADER, clock=lambda: now[0])
    state = run_of(ranks)
    view.open(state)
    for step in range(10 * seconds):
        now[0] += 0.1
        for rank in range(ranks):
            lines = "".join(f"step {step} line {number} of rank {rank}\n" for number in range(20))
            state = advance(state, out(rank, lines))
        view.draw(state)
    view.close(state)
    # What was saved up is sent first, and the last message before it is paid for.
    assert least < CountingPanel.size / seconds < 60_000 < display.BYTES_PER_SECOND


class BusyPanel(StoppedPanel):
    """A panel that costs a lot to draw; it remembers the lines that it was shown."""

    lines: ClassVar[list[str]] = []

    def show(self, delta):
        self.lines.extend(row[2] for row in delta["log"]["rows"])
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    def stop_wanted(self):
        return False


def test_what_comes_while_the_panel_rests_is_drawn_after_that_though_nothing_follows(monkeypatch):
    module = type(sys)("nblaunch.view.panel")
    vars(module)["Panel"] = BusyPanel
    monkeypatch.setitem(sys.modules, "nblaunch.view.panel", module)
    monkeypatch.setattr(BusyPanel, "lines", [])
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    now = [0.0]
    view = WidgetView(HEADER, clock=lambda: now[0])
    state = run_of(2)
    view.open(state)
    now[0] += display.PANEL_AFTER_SECONDS
    view.draw(state)
    for line in ("first", "last"):
        state = advance(state, out(0, f"{line}\n"))
        now[0] += display.SECONDS_BETWEEN_DRAWS
        view.draw(state)
    assert BusyPanel.lines == ["first"], "it rests"
    for _ in range(10):
        now[0] += display.SECONDS_BETWEEN_DRAWS
        view.draw(state)
    assert BusyPanel.lines == ["first", "last"]


@pytest.fixture
def panel(monkeypatch):
    from nblaunch.view.panel import Panel

    now = [0.0]
    made = Panel(Drawing(HEADER, 0.0), lambda: now[0])
    made.now, made.told = now, []
    monkeypatch.setattr(made, "send_state", made.told.append)
    yield made
    made.close()


def test_what_the_page_says_is_kept_until_the_run_asks(panel):
    assert not panel.reachable
    panel._take(panel, "hello", [])
    assert panel.reachable
    assert not panel.stop_wanted()
    panel._take(panel, "stop", [])
    assert panel.stop_wanted()
    assert not panel.stop_wanted()
    panel._take(panel, {"no": "word of ours"}, [])


def test_a_page_that_missed_something_is_told_everything_once_more(panel):
    panel._take(panel, "hello", [])
    panel.now[0] = 10.0
    panel.repeat()
    panel.repeat()
    assert panel.told == ["whole"], "whatever came before its script was there"
    panel._take(panel, "again", [])
    panel.repeat()
    panel.repeat()
    assert panel.told == ["whole"] * 2


def test_a_page_that_cannot_be_heard_is_told_everything_a_few_times(panel):
    for tenth in range(100):
        panel.now[0] = tenth / 10
        panel.repeat()
    assert panel.told == ["whole"] * 3


def test_the_panel_never_makes_markup_of_what_a_rank_said_but_in_a_frame_that_runs_no_script():
    script = (Path(display.__file__).parent / "panel.js").read_text(encoding="utf-8")
    # What comes from Python is escaped there: test_view_panel.test_nothing_that_a_rank_says_becomes_markup.
    assert script.count("srcdoc") == 1
    assert 'setAttribute(frame, "sandbox", "allow-same-origin")' in script
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "://"):
        assert way not in script
