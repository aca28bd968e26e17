"""How a run is shown: not at all, as text, as HTML, or as a live panel that ends as HTML.

A view draws the state and decides nothing. It is called on the thread that called `run`.
IPython and ipywidgets are imported only by the views that need them.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from nblaunch import _notebook
from nblaunch._errors import OptionError
from nblaunch._notebook import DISPLAY_MODES, DISPLAY_VARIABLE, TESTED_VARIABLE
from nblaunch._results import nodes_line
from nblaunch.insight.curves import Curves
from nblaunch.insight.markup import escaped
from nblaunch.protocol.messages import EngineStatus
from nblaunch.protocol.state import RunState, View
from nblaunch.view.html import ROOT_STYLE, render_html
from nblaunch.view.output import Folded, folded
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.screen import plain
from nblaunch.view.summary import Header, headline
from nblaunch.view.terminal_view import Terminal
from nblaunch.view.text import render_ending, render_text

if TYPE_CHECKING:
    from nblaunch.view.panel import Panel


PANEL_AFTER_SECONDS = 0.15
"""A shorter run needs no panel, which would make it take half as long again."""
SECONDS_BETWEEN_DRAWS = 0.1
BYTES_PER_SECOND = 500_000
"""jupyter_server drops what a kernel sends above 1 MB a second; the user's own output needs room too."""
_REST = 9
"""How much longer the kernel's thread does without drawing than it draws."""
_LONGEST_REST_SECONDS = 2.0
_STOPS = 2
"""Once to interrupt, once more to skip the grace period."""
_WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"
_UNFINISHED = "Running when this was saved; %distributed attach, or run the cell again."
_FOLLOWS = "its result follows below. If it does not: %distributed attach, or run the cell again."

_LEFT = "Running when watching stopped: the job goes on. %distributed attach shows it again."

_log = logging.getLogger("nblaunch.view")

Bundle = dict[str, object]

_EMPTY: Bundle = {"text/html": "", "text/plain": ""}


class TextView:
    """Prints: in a terminal lines as they come and then the ending, elsewhere all of it at the end.

    Elsewhere a wait for nodes is shown on stderr: it may be long, and is not among the run's output.
    """

    shows_usage = False

    def __init__(self, header: Header) -> None:
        self._header = header
        self._terminal = Terminal(sys.stdout) if sys.stdout.isatty() else None
        self._waited: EngineStatus | None = None

    def open(self, state: RunState) -> None:
        """Print nothing yet."""
        if self._terminal is not None:
            self._terminal.open(_age(state))

    def draw(self, state: RunState) -> None:
        """Print the lines that are new, in a terminal; elsewhere what nodes are waited for."""
        if self._terminal is not None:
            self._terminal.draw(state)
        elif state.engine is not None and state.awaits_nodes:
            # Places in the queue and estimates change all the time.
            news = msgspec.structs.replace(state.engine, place="", starts=None)
            if news != self._waited:
                self._waited = news
                print(plain(nodes_line(state.engine, time.time())), file=sys.stderr, flush=True)  # noqa: T201

    def close(self, state: RunState) -> None:
        if self._terminal is None:
            print(render_text(state, self._header), flush=True)  # noqa: T201 - there is nothing else to show it
        else:
            self._terminal.close(state, render_ending(state, self._header))


class OnceView:
    """Makes one display in the notebook, at the end: the MIME bundle that `render` returns."""

    shows_usage = False

    def __init__(self, header: Header, render: Callable[[RunState, Header], Bundle]) -> None:
        self._header = header
        self._render = render

    def open(self, state: RunState) -> None:
        """Show nothing yet."""

    def draw(self, state: RunState) -> None:
        """Show nothing yet."""

    def close(self, state: RunState) -> None:
        _display(self._render(state, self._header))


class WidgetView:
    """Shows a live panel while a run lasts; at the end static HTML takes its place.

    A short run makes one display, like `OnceView`. What is saved holds no widget.

    A front end that ignores updates of a display would show the first one for ever. Where they may be ignored
    the static HTML is a display of its own, and the panel's becomes empty: the result is there once either
    way.
    """

    shows_usage = True

    def __init__(self, header: Header, clock: Callable[[], float] = time.monotonic) -> None:
        self._header = header
        self._clock = clock
        self._opened = self._drawn = clock()
        self._pause = SECONDS_BETWEEN_DRAWS
        self._drawing = Drawing(header, self._opened)
        self._panel: Panel | None = None
        self._display_id: str | None = None
        self._in_place = True
        self._stops = 0

    def open(self, state: RunState) -> None:
        self._drawn = self._clock()
        self._opened = self._drawn - _age(state)
        self._drawing = Drawing(self._header, self._opened)

    def draw(self, state: RunState) -> None:
        """Show what has changed, at most ten times a second, and less often where there is much to show.

        Raises `KeyboardInterrupt` if the panel's Stop button was pressed: it does what an interrupt does,
        and pressed once more what a second interrupt does.
        """
        now = self._clock()
        if self._panel is None:
            if now - self._opened >= PANEL_AFTER_SECONDS:
                self._drawn = now
                self._open_panel(state, now)
            return
        if now - self._drawn >= self._pause:
            self._drawn, began = now, time.thread_time()
            delta = self._drawing.changes(state, now)
            size = 0
            if delta is not None:
                self._panel.show(delta)
                size = len(msgspec.json.encode(delta))
            spent = time.thread_time() - began
            rest = min(_REST * spent, _LONGEST_REST_SECONDS)
            self._pause = max(SECONDS_BETWEEN_DRAWS, size / BYTES_PER_SECOND, rest)
            self._panel.repeat()
        if self._panel.stop_wanted() and self._stops < _STOPS:
            self._stops += 1
            raise KeyboardInterrupt

    def close(self, state: RunState) -> None:
        try:
            took = self._clock() - self._opened
            bundle = html_and_text(state, self._header, curves=self._drawing.curves(state), took=took)
            if self._display_id is not None:
                from IPython.display import update_display

                shown = bundle if self._in_place else _EMPTY
                update_display(shown, raw=True, display_id=self._display_id)
            if self._display_id is None or not self._in_place:
                _display(bundle)
            if self._panel is not None:
                self._panel.bundle = bundle
        finally:
            if self._panel is not None:
                self._panel.close()

    def _open_panel(self, state: RunState, now: float) -> None:
        from nblaunch.view.panel import Panel

        self._drawing.changes(state, now)
        self._panel = Panel(self._drawing, self._clock)
        # The HTML and the text are for front ends without widgets, and for a notebook that is saved now; the
        # output follows at the end.
        widget = {"version_major": 2, "version_minor": 0, "model_id": self._panel.model_id}
        nodes = "" if state.engine is None else f"{plain(nodes_line(state.engine, time.time()))}. "
        # A display that a job in the background makes at its end could land below another cell.
        background = threading.current_thread() is not threading.main_thread()
        self._in_place = background or _notebook.takes_updates()
        if self._in_place:
            forms = html_and_text(state, self._header, outputs=(), note=nodes + _UNFINISHED)
        else:
            what = headline(state, self._header.title, self._header.backend)
            line = f"{what}: {nodes}running; {_FOLLOWS}"
            forms = {"text/html": f'<p style="{ROOT_STYLE}">{escaped(line)}</p>', "text/plain": line}
        placeholder = {_WIDGET_TYPE: widget, **forms}
        display_id = uuid.uuid4().hex
        _display(placeholder, display_id=display_id)
        self._display_id = display_id


class GuardedView:
    """A view that cannot fail the run: a front end that went away is no reason to lose a result.

    After a failure nothing more is drawn, but the end is still tried once.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self._broken = False

    @property
    def shows_usage(self) -> bool:
        return self.view.shows_usage

    def open(self, state: RunState) -> None:
        self._attempt(self.view.open, state)

    def draw(self, state: RunState) -> None:
        if not self._broken:
            self._attempt(self.view.draw, state)

    def close(self, state: RunState) -> None:
        self._attempt(self.view.close, state)

    def _attempt(self, step: Callable[[RunState], None], state: RunState) -> None:
        try:
            step(state)
        except Exception:  # noqa: BLE001 - whatever a front end raises, the run goes on
            self._broken = True
            _log.debug("%s failed; nothing more is drawn", step.__qualname__, exc_info=True)


def choose_view(header: Header) -> View:
    """Return the view that fits where this process runs, or the one that `NBLAUNCH_DISPLAY` names.

    That is `auto`, `widget`, `html` or `text`. `auto` is the panel in a kernel that has comms, HTML in any
    other kernel, text elsewhere. Outside a kernel nothing can show HTML, so every mode is text there. In a
    kernel that pytest has started `auto` is HTML too: nbval does not see updates of a display.

    Raises `OptionError` for any other mode.
    """
    wanted = os.environ.get(DISPLAY_VARIABLE) or "auto"
    if wanted not in DISPLAY_MODES:
        modes = f"{', '.join(DISPLAY_MODES[:-1])} or {DISPLAY_MODES[-1]}"
        msg = (
            f"{DISPLAY_VARIABLE}={wanted!r}: a run is shown as {modes}. Correct the environment variable, or "
            "unset it."
        )
        raise OptionError(msg)
    kernel = getattr(_notebook.shell(), "kernel", None)
    if kernel is None:
        return GuardedView(TextView(header))
    if wanted == "text":
        return GuardedView(OnceView(header, lambda state, header: {"text/plain": render_text(state, header)}))
    tested = wanted == "auto" and bool(os.environ.get(TESTED_VARIABLE))
    if wanted == "html" or tested or getattr(kernel, "comm_manager", None) is None:
        return GuardedView(OnceView(header, html_and_text))
    return GuardedView(WidgetView(header))


def html_and_text(  # noqa: PLR0913 - what is drawn, and what the caller knows of it
    state: RunState,
    header: Header,
    *,
    outputs: Sequence[Folded] | None = None,
    note: str | None = None,
    curves: Curves | None = None,
    took: float | None = None,
) -> Bundle:
    """Return a run as a notebook shows it, with its text form for front ends without HTML.

    `note` stands below it. `took` is how long it took in seconds; where outputs are compared it is left out.
    """
    if note is None:
        note = "" if state.finished else _LEFT
    outputs = folded(state) if outputs is None else outputs
    curves = Curves.of(state.metrics) if curves is None else curves
    below = f'<p style="{ROOT_STYLE}">{escaped(note)}</p>' if note else ""
    return {
        "text/html": render_html(state, header, outputs=outputs, curves=curves, took=took) + below,
        "text/plain": "\n".join(
            filter(None, (render_text(state, header, outputs=outputs, curves=curves), note))
        ),
    }


def _age(state: RunState) -> float:
    return max(time.time() - state.began, 0.0) if state.begun else 0.0


def _display(bundle: Bundle, display_id: str | None = None) -> None:
    from IPython.display import display

    display(bundle, raw=True, display_id=display_id)


def view_of(title: str, backend: str, note: str = "", *, watched: bool = False) -> View:
    """Return the view that shows a run of `title` on `backend` here; raises `OptionError`.

    `note` is why it runs on these devices; a run that is only `watched` goes on when the user stops that.
    """
    return choose_view(Header(title, backend, node=platform.node(), note=note, watched=watched))
