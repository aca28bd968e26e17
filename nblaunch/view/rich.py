"""Rich displays as HTML that stays within its own element."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from html.parser import HTMLParser

from nblaunch._transcript import Display
from nblaunch.view.markup import escaped
from nblaunch.view.output import display_text

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_BASE64 = re.compile(r"[A-Za-z0-9+/=]*")
_NEVER_CLOSED = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
)


def embedded(display: Display) -> str | None:
    """Return the richest form of a display that static HTML can hold; None if it has only text.

    What a rank passed to `display` is drawn as the notebook itself would draw it, HTML as HTML; an SVG
    is drawn as an image, in which no script runs.
    """
    markup = display.data.get("text/html")
    if isinstance(markup, str) and markup.strip():
        return f'<div style="overflow-x:auto">{balanced(markup)}</div>'
    svg = display.data.get("image/svg+xml")
    if isinstance(svg, str) and svg.strip():
        encoded = base64.b64encode(svg.encode("utf-8", "replace")).decode("ascii")
        return _image("image/svg+xml", encoded, display)
    for kind in _IMAGES:
        data = display.data.get(kind)
        if isinstance(data, str) and data:
            compact = "".join(data.split())
            if _BASE64.fullmatch(compact):
                return _image(kind, compact, display)
    latex = display.data.get("text/latex")
    if isinstance(latex, str) and latex.strip():
        # No <pre>: here the notebook is to typeset it.
        return f"<div>{escaped(latex)}</div>"
    return None


def kinds(display: Display) -> str:
    """Return the names of what a display holds, its text aside: `image/png`."""
    return ", ".join(sorted(kind for kind in display.data if kind != "text/plain")) or "text/plain"


def _image(kind: str, encoded: str, display: Display) -> str:
    metadata = display.metadata.get(kind)
    size = ""
    if isinstance(metadata, Mapping):
        size = "".join(
            f' {name}="{metadata[name]}"'
            for name in ("width", "height")
            if isinstance(metadata.get(name), int) and not isinstance(metadata.get(name), bool)
        )
    alt = escaped(display_text(display)[:200])
    return f'<img src="data:{kind};base64,{encoded}" alt="{alt}"{size} style="max-width:100%">'


def balanced(markup: str) -> str:
    """Return HTML whose every element is closed and that closes nothing it did not open.

    A stray `</div>` in one display must not end the panel around it.

    >>> balanced("</div><b>bold")
    '<b>bold</b>'
    """
    parser = _Balancer()
    parser.feed(markup)
    parser.close()
    return "".join([*parser.parts, *(f"</{tag}>" for tag in reversed(parser.opened))])


class _Balancer(HTMLParser):
    """Writes again what it reads, comments and stray end tags left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.parts: list[str] = []
        self.opened: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts.append(_start_tag(tag, attrs))
        if tag not in _NEVER_CLOSED:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Written as two tags: a browser takes `<div/>` for an element that goes on.
        self.parts.append(_start_tag(tag, attrs))
        if tag not in _NEVER_CLOSED:
            self.parts.append(f"</{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.opened:
            while self.opened:
                last = self.opened.pop()
                self.parts.append(f"</{last}>")
                if last == tag:
                    break

    def handle_data(self, data: str) -> None:
        raw = bool(self.opened) and self.opened[-1] in ("script", "style")
        self.parts.append(data if raw else data.replace("<", "&lt;").replace(">", "&gt;"))

    def handle_entityref(self, name: str) -> None:
        self.parts.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.parts.append(f"&#{name};")


def _start_tag(tag: str, attributes: list[tuple[str, str | None]]) -> str:
    written = "".join(
        f" {name}" if value is None else f' {name}="{escaped(value)}"' for name, value in attributes
    )
    return f"<{tag}{written}>"
