"""The small pieces of the static HTML: escaped text, colours, states, rows of a table.

Styles are inline and do without: a renderer that drops them (GitHub) still shows words and structure.
Each coloured thing is also a word or a sign.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from nblaunch.protocol.state import State

# Between a white and a black page in luminance: a contrast of 4.3 on both. Mixing in the colour of the
# text around takes it above 4.5 where the browser can; a sanitiser keeps the first of the two.
RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = "#dc403b", "#238b45", "#a1700d", "#2079de", "#b451bd", "#108693"

ICONS = {
    State.INIT: "○",
    State.STARTING: "◌",
    State.RUNNING: "►",
    State.SUCCEEDED: "✓",
    State.FAILED: "✗",
    State.STOPPED: "■",
    State.PREEMPTED: "▣",
    State.LOST: "?",
}
STATE_COLORS = {
    State.INIT: YELLOW,
    State.STARTING: CYAN,
    State.RUNNING: BLUE,
    State.SUCCEEDED: GREEN,
    State.FAILED: RED,
    State.STOPPED: YELLOW,
    State.PREEMPTED: YELLOW,
    State.LOST: MAGENTA,
}

MONOSPACE = "font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace)"
_WRAPPED = "white-space:pre-wrap;overflow-wrap:anywhere"
# JupyterLab breaks lines of `pre` within words.
_PRE = f"margin:2px 0;padding:0;background:none;{_WRAPPED};word-break:normal;{MONOSPACE}"
_CODE = f"padding:0;background:none;{_WRAPPED};{MONOSPACE}"


def escaped(text: str) -> str:
    """Return `text` so that a browser shows it and nothing else, in an element or in an attribute."""
    return html.escape(text, quote=True)


def color(value: str) -> str:
    return f"color:{value};color:color-mix(in srgb,{value} 75%,currentcolor)"


def pre(content: str) -> str:
    return f'<pre style="{_PRE}">{content}</pre>'


def code(text: str, *, styled: bool = True) -> str:
    """Return text a rank is the author of: notebooks typeset `$...$` elsewhere, but not in here."""
    style = f' style="{_CODE}"' if styled else ""
    return f"<code{style}>{escaped(text)}</code>" if text else ""


def state(word: State) -> str:
    return f'<span style="{color(STATE_COLORS[word])}">{ICONS[word]}</span> {word}'


def details(summary: str, content: str, *, opened: bool) -> str:
    """Return a part that can be folded; both arguments are HTML."""
    attribute = " open" if opened else ""
    return (
        f'<details{attribute} style="margin:4px 0"><summary style="cursor:pointer">{summary}</summary>'
        f'<div style="padding-left:1em">{content}</div></details>'
    )


def prefix(ranks: str) -> str:
    """Return `[ranks 0-7] `, which stands before what these ranks wrote where others wrote in between."""
    return f'<span style="opacity:.8">[{ranks}]</span> '


TABLE = "border-collapse:collapse;margin:4px 0;font-size:inherit"


def row(tag: str, cells: Iterable[tuple[str, str]]) -> str:
    """Return a row of `td` or `th`; of each cell there is the style, and what it contains as HTML."""
    return "<tr>" + "".join(f'<{tag} style="{style}">{cell}</{tag}>' for style, cell in cells) + "</tr>"
