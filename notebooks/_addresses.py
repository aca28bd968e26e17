"""A page at the address of each kind of failure, which leads to the section about it: an extension of Sphinx.

Errors show `https://nblaunch.github.io/e/killed` (`nblaunch/_help.py`), and saved notebooks keep that. The
sections are found by their names, so they may move to other pages. The pages hold no script.
"""

from __future__ import annotations

import html
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from nblaunch._help import DIRECTORY, FailureKind

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={target}">
<link rel="canonical" href="{target}">
<title>{title} - nblaunch</title>
</head>
<body>
<p>{title}: <a href="{target}">what it means, and what to do</a></p>
</body>
</html>
"""


def page(title: str, target: str) -> str:
    """Return a page that leads to `target`, a relative address, also where refreshing is turned off."""
    return _PAGE.format(title=html.escape(title), target=html.escape(target))


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Write a page for each kind below the built site; raises `ExtensionError` for one without a section."""
    if error is not None or app.builder.format != "html":
        return
    labels = app.env.get_domain("std").labels  # type: ignore[attr-defined]  # of Sphinx's standard domain
    for kind in FailureKind:
        if kind.value not in labels:
            msg = f"no section of the documentation has the name {kind.value!r}, which errors lead to"
            raise ExtensionError(msg)
        document, anchor, title = labels[kind.value]
        target = f"../../{app.builder.get_target_uri(document)}#{anchor}"
        directory = Path(app.outdir, DIRECTORY, kind.value)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "index.html").write_text(page(title, target), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
