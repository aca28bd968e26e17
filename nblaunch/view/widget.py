"""The live panel: one anywidget for all ranks, one message a tick.

Imported only when a panel is to be shown: ipywidgets and anywidget are not loaded before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from nblaunch.view.rows import Delta

_HERE = Path(__file__).parent


class Panel(anywidget.AnyWidget):
    """A row per rank. `header` and `rows` are all there is to see; `delta` is what came last.

    Only `delta` is sent while the run lasts: 256 whole rows ten times a second are no small thing. The
    page adds it to its own `rows`; here `rows` is kept up to date without being sent, for a page that
    asks for the whole state.
    """

    _esm = (_HERE / "panel.js").read_text(encoding="utf-8")
    _css = (_HERE / "panel.css").read_text(encoding="utf-8")

    header: traitlets.Dict[str, str] = traitlets.Dict().tag(sync=True)
    notes: traitlets.List[Any] = traitlets.List().tag(sync=True)
    rows: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    delta: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    def show(self, delta: Delta) -> None:
        """Show what has changed, with one message."""
        for rank in delta["removed"]:
            self.rows.pop(rank, None)
        self.rows.update(delta["rows"])
        self.header.update(delta["header"])
        if delta["notes"] is not None:
            self.notes[:] = delta["notes"]
        self.delta = dict(delta)

    def close(self) -> None:
        """Close the panel and what ipywidgets made along with it, so that no comm stays open."""
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()
