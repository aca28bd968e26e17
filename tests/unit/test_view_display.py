"""Where a run is shown: one display in a notebook, a live panel that leaves static HTML, or a terminal."""

from __future__ import annotations

import io
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from shown_runs import out, returned, run_of

from nblaunch import _notebook
from nblaunch._errors import OptionError
from nblaunch.client.run import SilentView
from nblaunch.protocol.messages import Displayed, Started
from nblaunch.protocol.state import RunState, advance
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

HEADER = Header("cell", "gloo")


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


@pytest.mark.parametrize("mode", ["auto", "widget", "html", "text", ""])
def test_without_a_kernel_everything_is_text(monkeypatch, mode):
    monkeypatch.setenv("NBLAUNCH_DISPLAY", mode)
    view = choose_view(HEADER)
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
    monkeypatch.setenv("NBLAUNCH_DISPLAY", mode)
    view = choose_view(HEADER)
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


class FakePanel:
    """Stands for the panel; keeps what it is shown."""

    model_id, reachable = "1", True

    def __init__(self, drawing: Any, _: object) -> None:
        self.drawing, self.shown, self.closed, self.stops = drawing, [], 0, False

    def show(self, delta):
        self.shown.append(delta)

    def repeat(self):
        pass

    def stop_wanted(self):
        return self.stops

    def close(self):
        self.closed += 1


class Opened:
    """A widget view whose panel is open, the time by its clock, and the displays that it has made."""

    def __init__(self, state, panel, monkeypatch):
        module = type(sys)("nblaunch.view.panel")
        vars(module)["Panel"] = panel
        monkeypatch.setitem(sys.modules, "nblaunch.view.panel", module)
        self.displays: list[tuple[str, dict[str, str]]] = []
        for name in ("display", "update_display"):
            monkeypatch.setattr(f"IPython.display.{name}", self._display)
        self.now = 0.0
        self.view = WidgetView(HEADER, clock=lambda: self.now)
        self.view.open(state)

    def _display(self, bundle, *_, display_id, **__):
        self.displays.append((display_id, bundle))

    @property
    def panel(self):
        return self.view._panel

    def draw(self, state, after=display.SECONDS_BETWEEN_DRAWS):
        self.now += after
        self.view.draw(state)


@pytest.fixture
def opened(monkeypatch):
    """Give `opened(state)`: a view of the run, and a panel that stands for the page."""
    return lambda state, panel=FakePanel: Opened(state, panel, monkeypatch)


def test_the_panel_opens_after_150_ms_and_draws_at_most_ten_times_a_second(opened):
    page, state = opened(RunState.fresh(2)), run_of(2)
    page.draw(state, 0.149)
    assert page.displays == []
    page.draw(state, 0.001)
    assert len(page.displays) == 1
    for _ in range(100):
        state = advance(state, out(0, f"{page.now}\n"))
        page.draw(state, 0.01)
    assert 9 <= len(page.panel.shown) <= 10
    assert all({row[1] for row in delta["log"]["rows"]} == {"0"} for delta in page.panel.shown)
    page.draw(state, 1)
    drawn = len(page.panel.shown)
    page.draw(state, 1)
    assert len(page.panel.shown) == drawn, "nothing changed, so nothing is sent"
    page.view.close(state)
    (first, _), (last, bundle) = page.displays
    assert first == last
    assert page.panel.closed == 1
    assert "cell · 2 ranks · gloo · 3.2 s</div>" in bundle["text/html"], "how long it took"
    assert "3.2 s" not in bundle["text/plain"], "what is compared has no times"


def test_the_stop_button_interrupts_and_pressed_again_hurries_and_then_does_nothing(opened):
    page = opened(run_of(1))
    page.draw(run_of(1), 0.2)
    page.panel.stops = True
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            page.draw(run_of(1), 0)
    page.draw(run_of(1), 0)
    page.view.close(run_of(1))


def test_a_run_that_began_before_is_as_old_as_it_is(opened):
    state = advance(RunState.fresh(1, time=time.time() - 65), Started(rank=0, time=1.0))
    page = opened(state)
    page.draw(state)
    assert page.panel.drawing.whole(page.now)["age"] == pytest.approx(65, abs=10)


def test_a_run_that_is_not_watched_to_its_end_says_so():
    for form in html_and_text(run_of(1), HEADER).values():
        assert "Running when watching stopped: the job goes on." in str(form)


def test_the_stop_button_of_a_run_that_is_only_watched_says_so():
    for watched, text in [(False, "Stop"), (True, "Stop watching")]:
        rows = Drawing(Header("cell", "gloo", watched=watched), 0.0)
        rows.changes(run_of(1), 0.0)
        assert f'aria-label="{text}"' in rows.whole(0.0)["parts"]["head"]


class BusyPanel(FakePanel):
    """A panel that costs a lot to draw."""

    def show(self, delta):
        super().show(delta)
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass


def test_what_comes_while_the_panel_rests_is_drawn_after_that_though_nothing_follows(opened):
    state = run_of(2)
    page = opened(state, BusyPanel)
    page.draw(state, display.PANEL_AFTER_SECONDS)

    def lines():
        return [row[2] for delta in page.panel.shown for row in delta["log"]["rows"]]

    for line in ("first", "last"):
        state = advance(state, out(0, f"{line}\n"))
        page.draw(state)
    assert lines() == ["first"], "it rests"
    for _ in range(10):
        page.draw(state)
    assert lines() == ["first", "last"]


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
