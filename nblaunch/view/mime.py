"""Rich displays as HTML that stays within its own element: in the saved notebook, and in the live panel."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from html.parser import HTMLParser

from nblaunch._budget import shortened
from nblaunch.insight.markup import escaped
from nblaunch.protocol.transcript import Display
from nblaunch.view.output import display_text, text_of
from nblaunch.view.screen import plain

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_BASE64 = re.compile(r"[A-Za-z0-9+/=]*")
_NEVER_CLOSED = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
)

_LIVE_IMAGE = 1_500_000
_LIVE_HTML = 150_000
_LIVE_TEXT = 20_000


def embedded(display: Display) -> str | None:
    """Return the richest form of a display that static HTML can hold; None if it has only text.

    It is drawn as the notebook itself would draw it, HTML as HTML; an SVG is drawn as an image, in which no
    script runs.
    """
    if markup := text_of(display, "text/html"):
        return f'<div style="overflow-x:auto">{balanced(markup)}</div>'
    if encoded := _encoded(display):
        return image(*encoded, display_text(display), *_size(encoded[0], display))
    if latex := text_of(display, "text/latex"):
        # No <pre>: the notebook typesets it here.
        return f"<div>{escaped(latex)}</div>"
    return None


def live(display: Display) -> str:
    """Return a display as the panel draws it: HTML in a frame, an image, or text.

    What is too large for a panel is shown only at the end of the run.
    """
    text = shortened(plain(text_of(display, "text/latex")) or display_text(display), _LIVE_TEXT)
    if markup := text_of(display, "text/html"):
        if len(markup) <= _LIVE_HTML:
            return frame(markup)
    elif encoded := _encoded(display):
        if len(encoded[1]) <= _LIVE_IMAGE:
            return image(*encoded, text, *_size(encoded[0], display))
    else:
        return escaped(text)
    return escaped(f"{text}\n… {kinds(display)} is too large to be shown before the end of the run …")


def kinds(display: Display) -> str:
    """Return the names of what a display holds, its text aside: `image/png`."""
    return ", ".join(sorted(kind for kind in display.data if kind != "text/plain")) or "text/plain"


def _encoded(display: Display) -> tuple[str, str] | None:
    """Return the type and the base64 text of the image in a display, if there is one."""
    if svg := text_of(display, "image/svg+xml"):
        return "image/svg+xml", base64.b64encode(svg.encode("utf-8", "replace")).decode("ascii")
    for kind in _IMAGES:
        compact = "".join(text_of(display, kind).split())
        if compact and _BASE64.fullmatch(compact):
            return kind, compact
    return None


def _size(kind: str, display: Display) -> tuple[str, str]:
    metadata = display.metadata.get(kind)
    if not isinstance(metadata, Mapping):
        return "", ""
    given = (metadata.get("width"), metadata.get("height"))
    width, height = (str(each) if type(each) is int else "" for each in given)
    return width, height


def image(kind: str, encoded: str, text: str, width: str, height: str) -> str:
    sizes = (("width", width), ("height", height))
    size = "".join(f' {name}="{value}"' for name, value in sizes if value)
    alt = escaped(text[:200])
    return f'<img src="data:{kind};base64,{encoded}" alt="{alt}"{size} style="max-width:100%">'


def frame(markup: str) -> str:
    """Return a frame for HTML that a rank displays; the page fills it, and no script runs in it."""
    return (
        '<iframe class="nblaunch-frame" sandbox="allow-same-origin" title="HTML that a rank displayed" '
        f'data-html="{escaped(markup)}"></iframe>'
    )


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
    """Writes what it reads, without comments and stray end tags.

    `<div/>` becomes two tags: a browser takes it for an element that goes on.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.parts: list[str] = []
        self.opened: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts.append(_start_tag(tag, attrs))
        if tag not in _NEVER_CLOSED:
            self.opened.append(tag)

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
