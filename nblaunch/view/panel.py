"""The live panel: one anywidget for all ranks, one message a tick.

Imported only to show a panel, so that ipywidgets and anywidget are not loaded before.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from nblaunch.view.panel_ranks import Delta, Drawing

# Seconds after which a page that does not answer is sent everything again: what came while it was loading the
# panel's script is lost.
_AGAIN_AFTER = (0.5, 1.5, 4.0)
_HERE = Path(__file__).parent


class Panel(anywidget.AnyWidget):
    """Shows a drawing. Only `delta` is sent while the run lasts: what has changed.

    `whole` is everything. It is computed when a page asks for it: at the beginning, when the page is loaded
    again, and when it has missed something.
    """

    _esm = (_HERE / "panel.js").read_text(encoding="utf-8")
    _css = (_HERE / "panel.css").read_text(encoding="utf-8")

    name: traitlets.Unicode[str, str | bytes] = traitlets.Unicode().tag(sync=True)
    whole: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    delta: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    def __init__(self, drawing: Drawing, clock: Callable[[], float] = time.monotonic) -> None:
        """Show this drawing; `clock` is the one that times it."""
        self._drawing = drawing
        self._clock = clock
        self._reachable = threading.Event()
        self._stop = threading.Event()
        self._again = threading.Event()
        self._opened = clock()
        self._repeats = list(_AGAIN_AFTER)
        super().__init__(name=uuid.uuid4().hex)
        self._answer_while_busy()
        self.on_msg(self._take)

    @property
    def reachable(self) -> bool:
        """Whether the page's messages arrive while the kernel is busy."""
        return self._reachable.is_set()

    def stop_wanted(self) -> bool:
        """Return whether Stop was pressed since the last call."""
        wanted = self._stop.is_set()
        self._stop.clear()
        return wanted

    def show(self, delta: Delta) -> None:
        """Show what has changed, with one message."""
        self.delta = dict(delta)

    def repeat(self) -> None:
        """Send everything again, if the page has missed something, or may have."""
        due = bool(self._repeats) and self._clock() - self._opened >= self._repeats[0]
        if due:
            self._repeats.pop(0)
        if self._again.is_set() or (due and not self.reachable):
            self._again.clear()
            self.send_state("whole")

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """Return what a page receives; ipywidgets may call this on another thread than the one that draws."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "whole" in state:
            state["whole"] = self._drawing.whole(self._clock())
        return state

    def close(self) -> None:
        """Close the panel and the layout that ipywidgets made with it, so that no comm stays open."""
        layout = self.layout
        if self.comm is not None:
            # Programs that run notebooks save the last state they received, of closed widgets too.
            self._send({"method": "update", "state": {"whole": {}, "delta": {}}, "buffer_paths": []})
        super().close()
        if layout is not None:
            layout.close()

    def _take(self, _widget: object, content: object, _buffers: object) -> None:
        """Take a message of the page, on a thread of ipykernel's; it only sets flags.

        A page whose "hello" arrives while the run lasts can also stop it. Where ipykernel delivers it only
        after the cell has ended (ipykernel 6, some front ends), it has no effect.
        """
        if content == "hello":
            # The page has missed what was sent before its script was loaded.
            self._again.set()
            self._reachable.set()
        elif content == "again":
            self._again.set()
        elif content == "stop":
            self._stop.set()

    def _answer_while_busy(self) -> None:
        """Let ipykernel 7.4 take the page's messages on the thread it has for them.

        It delivers them to the thread that has last sent to the page: the one that is busy with the run.
        Older releases do not, and newer ones may rename this attribute: then there is no Stop button.
        """
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, default: default  # noqa: SLF001 - see above
