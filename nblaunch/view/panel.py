"""All that a live panel shows, kept up to date; pure data, no widget."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import anywidget
import traitlets

from nblaunch.protocol.state import RunState
from nblaunch.view.panel_output import Feed, News
from nblaunch.view.panel_ranks import RankNews, Report, Reporter, Row, Rows, Value
from nblaunch.view.summary import Header


class Delta(TypedDict):
    """One tick; None where nothing has changed. `stop` says whether the page can stop the run."""

    sequence: int
    stop: bool
    ranks: RankNews | None
    report: Report | None
    output: News | None


class Whole(TypedDict):
    """Everything, for a page that begins anew; `age` is the run's, in seconds."""

    sequence: int
    stop: bool
    age: float
    header: dict[str, str]
    rows: dict[str, Row]
    values: dict[str, Value]
    report: Report | None
    output: News


class Drawing:
    """Folds the states of a run into deltas, and can tell the whole at any time, from any thread."""

    def __init__(self, header: Header, opened: float) -> None:
        """Begin a run that was opened at `opened`, on the clock that `now` is of later."""
        self._opened = opened
        self._now = opened
        self._rows = Rows(header)
        self._feed = Feed()
        self._reporter = Reporter()
        self._report: Report | None = None
        self._sequence = 0
        self._stop = False
        # A page that is loaded again asks for the whole while the run's own thread draws.
        self._lock = threading.Lock()

    def changes(self, state: RunState, now: float, *, stop: bool = False) -> Delta | None:
        """Return what has changed since this was asked last, or None."""
        with self._lock:
            self._now = now
            ranks = self._rows.news(state, now)
            report = self._reporter.news(state)
            output = self._feed.news(state, now)
            if ranks is None and report is None and output is None and stop == self._stop:
                return None
            self._sequence += 1
            self._stop = stop
            self._report = self._report if report is None else report
            return Delta(sequence=self._sequence, stop=stop, ranks=ranks, report=report, output=output)

    def whole(self, now: float | None = None) -> Whole:
        """Return everything."""
        with self._lock:
            return Whole(
                sequence=self._sequence,
                stop=self._stop,
                age=(self._now if now is None else now) - self._opened,
                header=self._rows.header,
                rows=self._rows.rows,
                values=self._rows.values,
                report=self._report,
                output=self._feed.whole(),
            )


# --- The live panel: one anywidget for all ranks, one message a tick.
#
# Imported only when a panel is to be shown: ipywidgets and anywidget are not loaded before.


# When a page that cannot be heard is told everything once more: what came while it was loading the panel's
# script is lost to it.
_AGAIN_AFTER = (0.5, 1.5, 4.0)
_HERE = Path(__file__).parent


class Panel(anywidget.AnyWidget):
    """Shows a drawing. Only `delta` is sent while the run lasts: what has changed.

    `whole` is all there is to see. It is put together when a page asks for it: at the beginning, when the
    page is loaded again, and when it has missed something.
    """

    _esm = (_HERE / "panel.js").read_text(encoding="utf-8")
    _css = (_HERE / "panel.css").read_text(encoding="utf-8")

    name: traitlets.Unicode[str, str | bytes] = traitlets.Unicode().tag(sync=True)
    whole: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    delta: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    def __init__(self, drawing: Drawing, clock: Callable[[], float] = time.monotonic) -> None:
        """Show this drawing; `clock` is the one it is drawn by."""
        self._drawing = drawing
        self._clock = clock
        self._heard = threading.Event()
        self._stop = threading.Event()
        self._again = threading.Event()
        self._opened = clock()
        self._repeats = list(_AGAIN_AFTER)
        super().__init__(name=uuid.uuid4().hex)
        self._answer_while_busy()
        self.on_msg(self._take)

    @property
    def heard(self) -> bool:
        """Whether the page can be heard while the kernel is busy."""
        return self._heard.is_set()

    def stop_wanted(self) -> bool:
        """Return whether Stop was pressed since this was asked last."""
        wanted = self._stop.is_set()
        self._stop.clear()
        return wanted

    def show(self, delta: Delta) -> None:
        """Show what has changed, with one message."""
        self.delta = dict(delta)

    def repeat(self) -> None:
        """Show everything once more, if the page has missed something, or may have."""
        due = bool(self._repeats) and self._clock() - self._opened >= self._repeats[0]
        if due:
            self._repeats.pop(0)
        if self._again.is_set() or (due and not self.heard):
            self._again.clear()
            self.send_state("whole")

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """Return what a page is told; ipywidgets calls this, maybe on another thread than draws."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "whole" in state:
            state["whole"] = self._drawing.whole(self._clock())
        return state

    def close(self) -> None:
        """Close the panel and what ipywidgets made along with it, so that no comm stays open."""
        layout = self.layout
        if self.comm is not None:
            # Programs that run notebooks save the last state they have heard of, of closed widgets too.
            self._send({"method": "update", "state": {"whole": {}, "delta": {}}, "buffer_paths": []})
        super().close()
        if layout is not None:
            layout.close()

    def _take(self, _widget: object, content: object, _buffers: object) -> None:
        """Take a message of the page; runs on a thread of ipykernel's own, so it only leaves word.

        A page that says hello while the run lasts can also stop it. Where ipykernel hears it only after the
        cell has ended (ipykernel 6, some front ends), nobody looks any more.
        """
        if content == "hello":
            # What was told before the page's script was there, it has not heard.
            self._again.set()
            self._heard.set()
        elif content == "again":
            self._again.set()
        elif content == "stop":
            self._stop.set()

    def _answer_while_busy(self) -> None:
        """Let ipykernel 7.4 take the page's messages on the thread it has for them.

        It hands them to whoever has spoken to the page last: the thread that is busy with the run. Older
        ones do not, and newer ones may have another name for it: then there is no Stop button.
        """
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, default: default  # noqa: SLF001 - see above
