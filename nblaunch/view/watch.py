"""The view of a run, as the API asks for it."""

from __future__ import annotations

import platform

from nblaunch.view.display import View, choose_view
from nblaunch.view.header import Header


def watcher(title: str, backend: str, note: str = "") -> View:
    """Return the view that shows a run of `title` on `backend` here; raises `OptionError`.

    `note` says why it runs where it does.
    """
    return choose_view(Header(title, backend, node=platform.node(), note=note))
