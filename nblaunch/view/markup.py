"""The small pieces of the static HTML: escaped text, colours, states.

Styles are inline and do without: a renderer that drops them (GitHub) still shows words and structure.
Each coloured thing is also a word or a sign.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from nblaunch._protocol import Stream
from nblaunch._state import State
from nblaunch.view.terminal import PLAIN, Line, Style

# Between a white and a black page in luminance: a contrast of 4.3 on both. Mixing in the colour of the
# text around takes it above 4.5 where the browser can; a sanitiser keeps the first of the two.
RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = "#dc403b", "#238b45", "#a1700d", "#2079de", "#b451bd", "#108693"
_COLORS = ("", RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN)

ICONS = {
    State.INIT: "○",
    State.STARTING: "◌",
    State.RUNNING: "►",
    State.SUCCEEDED: "✓",
    State.FAILED: "✗",
    State.STOPPED: "■",
    State.LOST: "?",
}
STATE_COLORS = {
    State.INIT: YELLOW,
    State.STARTING: CYAN,
    State.RUNNING: BLUE,
    State.SUCCEEDED: GREEN,
    State.FAILED: RED,
    State.STOPPED: YELLOW,
    State.LOST: MAGENTA,
}

MONOSPACE = "font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace)"
_PRE = f"margin:2px 0;padding:0;background:none;white-space:pre-wrap;overflow-wrap:anywhere;{MONOSPACE}"
_CODE = f"padding:0;background:none;white-space:pre-wrap;overflow-wrap:anywhere;{MONOSPACE}"
_STDERR = f"background:rgba(220,64,59,.12);border-left:3px solid {RED};padding-left:4px"


def escaped(text: str) -> str:
    """Return `text` so that a browser shows it and nothing else, in an element or in an attribute."""
    return html.escape(text, quote=True)


def color(value: str) -> str:
    """Return the style declarations of a text colour."""
    return f"color:{value};color:color-mix(in srgb,{value} 75%,currentcolor)"


def pre(content: str) -> str:
    """Return a block of preformatted text; `content` is HTML."""
    return f'<pre style="{_PRE}">{content}</pre>'


def code(text: str, *, styled: bool = True) -> str:
    """Return text a rank is the author of: notebooks typeset `$...$` elsewhere, but not in here."""
    style = f' style="{_CODE}"' if styled else ""
    return f"<code{style}>{escaped(text)}</code>" if text else ""


def state(word: State) -> str:
    """Return a state as a sign and a word."""
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


def lines(shown: Iterable[tuple[str, Line]]) -> str:
    """Return lines with their colours, each after a prefix that is HTML, for use in a `pre`."""
    return "\n".join(before + _line(line) for before, line in shown)


def _line(line: Line) -> str:
    content = "".join(_run(style, text) for style, text in line.runs)
    if line.stream is Stream.STDERR and content:
        return f'<span title="stderr" style="{_STDERR}">{content}</span>'
    return content


def _run(style: Style, text: str) -> str:
    if style == PLAIN:
        return escaped(text)
    declarations = [color(_COLORS[style.color])] if style.color else []
    declarations += ["font-weight:bold"] * style.bold
    declarations += ["font-style:italic"] * style.italic
    declarations += ["text-decoration:underline"] * style.underline
    return f'<span style="{";".join(declarations)}">{escaped(text)}</span>'
