"""The live panel: one anywidget for all ranks, one message a tick.

Imported only to show a panel, so that ipywidgets and anywidget are not loaded before.

A page that is loaded while a cell runs asks the kernel's main shell for the widgets of the notebook, and the
answer waits for the end of the cell. It cannot ask a subshell: it opens none before the main shell has
answered that the kernel has subshells. So the panel does not wait to be asked. ipykernel notices that a page
has connected, and the panel is opened once more, as if it were new: what the kernel sends reaches every page
at any time. This takes no message out of ipykernel's queue and answers none in its place.

At the end such a page gets what the display update gives to the one that ran the cell. A page that is opened
later finds the panel among the kernel's widgets, without a comm, with the result in it.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from nblaunch import _notebook
from nblaunch.view.html import STDERR
from nblaunch.view.panel_parts import Delta, Drawing

# Seconds after which a page that does not answer, or has just come, is sent everything again: what came while
# it was loading the panel's script is lost.
_AGAIN_AFTER = (0.5, 1.5, 4.0)
_HERE = Path(__file__).parent
_ENDED_KEPT = 8
"""Panels of ended runs: a notebook that was saved during one of these runs may be opened again."""


class _Arrivals:
    """Counts the pages that connect to the kernel while cells run."""

    def __init__(self) -> None:
        self.count = 0
        self._listens = False

    def listen(self) -> None:
        """Count from now on. ipykernel 6 does not notice pages: then none is counted.

        ipykernel 7 welcomes each subscription to its iopub socket; a page makes one when it connects.
        """
        kernel = getattr(_notebook.shell(), "kernel", None)
        thread = getattr(kernel, "iopub_thread", None)
        welcome = getattr(thread, "_send_welcome_message", None)
        if self._listens or thread is None or welcome is None:
            return
        self._listens = True

        def count(subscription: str) -> None:
            welcome(subscription)
            self.count += 1

        thread._send_welcome_message = count  # noqa: SLF001 - checked above
        # Otherwise zmq reports only the first page of all.
        thread.schedule(lambda: setattr(thread.socket, "xpub_verbose", True))


_arrivals = _Arrivals()
_ended: deque[Panel] = deque()


def _packed(name: str) -> str:
    """Return a file without indentation and comments: a saved notebook has it for each of its panels."""
    lines = [line.strip() for line in (_HERE / name).read_text(encoding="utf-8").splitlines()]
    comment = re.compile(r"//|/\*.*\*/$")
    return "\n".join(line for line in lines if line and not comment.match(line))


class Panel(anywidget.AnyWidget):
    """Shows a drawing. Only `delta` is sent while the run lasts: what has changed.

    `whole` is everything. It is computed when a page asks for it or has come: at the beginning, when the page
    is loaded again, and when it has missed something. `final` is what stays in the notebook after the end.
    """

    _esm = _packed("panel.js")
    _css = f"{_packed('panel.css')}\n.nblaunch-panel em[title=stderr] {{ {STDERR} }}"

    comm: Any  # ipywidgets has no types
    name: traitlets.Unicode[str, str | bytes] = traitlets.Unicode().tag(sync=True)
    whole: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    delta: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    final: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    def __init__(self, drawing: Drawing, clock: Callable[[], float] = time.monotonic) -> None:
        self._drawing: Drawing | None = drawing
        self._clock = clock
        self._stop = threading.Event()
        self._again = threading.Event()
        self._opened = clock()
        self._repeats = list(_AGAIN_AFTER)
        self._heard: list[str] = []
        self._subshell: str | None = None
        self.bundle: Mapping[str, object] = {}
        """What takes the panel's place at the end, once that is known."""
        _arrivals.listen()
        self._known_arrivals = self._first_arrivals = _arrivals.count
        name = uuid.uuid4().hex
        super().__init__(name=name, model_id=name)
        self._answer_while_busy()
        self.on_msg(self._take)

    @property
    def reachable(self) -> bool:
        """Whether the page's messages arrive while the kernel is busy."""
        return bool(self._heard)

    def stop_wanted(self) -> bool:
        wanted = self._stop.is_set()
        self._stop.clear()
        return wanted

    def show(self, delta: Delta) -> None:
        self.delta = dict(delta)

    def repeat(self) -> None:
        """Send everything again, if a page has come or has missed something, or may have."""
        if self._known_arrivals != _arrivals.count:
            self._known_arrivals = _arrivals.count
            self._opened, self._repeats = self._clock(), [0.0, *_AGAIN_AFTER]
        due = bool(self._repeats) and self._clock() - self._opened >= self._repeats[0]
        if due:
            self._repeats.pop(0)
        if due and self._visited:
            for panel in (*_ended, self):
                panel.announce()
        if self._again.is_set() or (due and not self.reachable and not self._visited):
            self._again.clear()
            self.send_state("whole")

    @property
    def _visited(self) -> bool:
        """Whether a page has come that does not know where the result goes."""
        return self._known_arrivals != self._first_arrivals

    def announce(self) -> None:
        """Open the panel in pages that have come since it was opened; in the others nothing changes."""
        if self.comm is None:  # closed by ipywidgets' own `close_all`
            return
        # Not `comm.open`: the kernel is to know no comm of a panel that has ended.
        self.comm.publish_msg(
            "comm_open",
            data={"state": self.get_state(), "buffer_paths": []},
            metadata={"version": ipywidgets.__protocol_version__},
            target_name=self.comm.target_name,
            target_module=None,
        )

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """Return the state for a page; ipywidgets may call this on another thread than the drawing one."""
        if key is None and self.comm is not None:
            # A page that comes later has not got the layout, and needs none.
            key = [each for each in self.keys if each != "layout"]
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "whole" in state and (drawing := self._drawing) is not None:
            state["whole"] = {**drawing.whole(self._clock()), "heard": [*self._heard]}
        if "final" in state:
            state["final"] = dict(self.bundle)
        return state

    def close(self) -> None:
        """Close the panel and the layout that ipywidgets made with it, so that no comm stays open."""
        comm = self.comm
        if comm is None or self in _ended:
            super().close()
            return
        # Programs that run notebooks save the last state they received, of closed widgets too.
        state: dict[str, object] = {"whole": {}, "delta": {}}
        if self._visited:
            state["final"] = self.bundle
        self._send({"method": "update", "state": state, "buffer_paths": []})
        super().close()
        self.layout.close()
        if self.bundle:
            self._drawing, self.delta = None, {}
            _ended.append(self)
            # ipywidgets sends a page that asks every widget that has one, also where it is closed.
            self.comm = comm
            if len(_ended) > _ENDED_KEPT:
                _ended[0].close()
                _ended.popleft()

    def _take(self, _widget: object, content: object, _buffers: object) -> None:
        """Take a message of a page, on a thread of ipykernel's; it only notes what it is.

        A page whose "hello" arrives while the run lasts can also stop it. Where ipykernel delivers it only
        after the cell has ended (ipykernel 6, some front ends), it has no effect.
        """
        word, _, page = str(content).partition(" ")
        if word == "hello":
            # The page has missed what was sent before its script was loaded.
            self._heard.append(page)
            kernel = getattr(self.comm, "kernel", None)
            parent = kernel.get_parent() if kernel is not None else {}
            self._subshell = parent.get("header", {}).get("subshell_id") or self._subshell
            self._again.set()
        elif word == "again":
            self._again.set()
        elif word == "stop":
            self._stop.set()
        elif word == "lines" and self._drawing is not None:
            self._drawing.draw_each_rank(wanted=page == "on")

    def _answer_while_busy(self) -> None:
        """Let ipykernel 7.4 take the page's messages on the thread it has for them.

        It delivers them to the thread that has last sent to the page: the one that is busy with the run.
        Older releases do not, and newer ones may rename this attribute: then there is no Stop button.
        A page that was loaded during the run has no such thread: that of another page takes its messages.
        """
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, own: own or self._subshell  # noqa: SLF001 - see above
