"""The live panel: one anywidget for all ranks, one message a tick.

Imported only when a panel is to be shown: ipywidgets and anywidget are not loaded before.
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
