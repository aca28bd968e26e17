"""The small pieces of the static HTML: escaped text, colours, states; what text costs in a notebook.

Styles are inline and do without: a renderer that drops them (GitHub) still shows words and structure.
Each coloured thing is also a word or a sign.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections.abc import Iterable

from nblaunch.protocol.messages import Stream
from nblaunch.protocol.state import State
from nblaunch.view.screen import BOLD, COLOR, ITALIC, PLAIN, UNDERLINE, Line

# Between a white and a black page in luminance: a contrast of 4.3 on both. Mixing in the colour of the
# text around takes it above 4.5 where the browser can; a sanitiser keeps the first of the two.
RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = "#dc403b", "#238b45", "#a1700d", "#2079de", "#b451bd", "#108693"
_TAGS = {BOLD: "b", ITALIC: "i", UNDERLINE: "ins"}
_COLORS = ("", RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN)

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
_STDERR = f"font-style:normal;background:rgba(220,64,59,.12);border-left:3px solid {RED};padding-left:4px"


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
        # Where styles are dropped it is slanted.
        return f'<em title="stderr" style="{_STDERR}">{content}</em>'
    return content


def _run(style: int, text: str) -> str:
    if style == PLAIN:
        return escaped(text)
    content = escaped(text)
    for flag, tag in _TAGS.items():
        content = f"<{tag}>{content}</{tag}>" if style & flag else content
    return f'<span style="{color(_COLORS[style & COLOR])}">{content}</span>' if style & COLOR else content


# What text costs in a saved notebook, and text cut to a cost.


# In HTML and then in JSON. A notebook holds text as a list of lines, each indented and quoted: a line end
# takes 13 bytes more than itself.
_COSTS = (("&", 4), ("<", 3), (">", 3), ("'", 5), ('"', 5), ("\\", 1), ("\n", 13))
_COSTLY = re.compile(r"""[^ !#-%(-;=?-\[\]-~]""")
_MAXIMUM_COST = 14


def cost_of_text(text: str) -> int:
    """Return how many bytes `text` takes in a saved notebook, escaped for HTML and then for JSON."""
    if not _COSTLY.search(text):
        return len(text)
    # Counting is three times as fast as escaping, and this runs for every line of every rank.
    more = sum(extra * text.count(character) for character, extra in _COSTS)
    return len(text.encode("utf-8", "replace")) + more


def shortened(text: str, limit: int) -> str:
    """Return `text`, its middle left out where it takes more than `limit` bytes in a saved notebook.

    >>> shortened("ha" * 100, 20)
    'hahahahahahah … 181 characters left out … hahaha'
    """
    if _fits(text, limit):
        return text
    start = _fitting(text, limit * 2 // 3)
    length = _fitting(text[start:][::-1], limit // 3)
    left_out = len(text) - start - length
    return f"{text[:start]} … {left_out} characters left out … {text[len(text) - length :]}"


def clipped(text: str, limit: int) -> str:
    """Return the beginning of `text`, as many bytes of it as `limit` allows in a saved notebook."""
    return text if _fits(text, limit) else f"{text[: _fitting(text, limit)].rstrip()} …"


def _fits(text: str, limit: int) -> bool:
    return len(text) * _MAXIMUM_COST <= limit or cost_of_text(text) <= limit


def _fitting(text: str, limit: int) -> int:
    """Return how many characters from the start of `text` cost no more than `limit`."""
    ends = range(min(len(text), limit) + 1)
    return max(bisect_right(ends, limit, key=lambda end: cost_of_text(text[:end])) - 1, 0)


def fair_limit(costs: Iterable[int], budget: int) -> int:
    """Return the limit for each with which all together stay within `budget`.

    >>> fair_limit([10, 100, 100], 110)
    50
    """
    waiting = sorted(costs)
    while waiting:
        share = budget // len(waiting)
        if waiting[0] > share:
            return share
        budget -= waiting.pop(0)
    return budget
