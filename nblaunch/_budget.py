"""Text cut to a size, which is counted in characters (`len`), or in what text costs in a saved notebook."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable

# In HTML and then in JSON. A notebook holds text as a list of lines, each indented and quoted: a line end
# takes 13 bytes more than itself.
_COSTS = (("&", 4), ("<", 3), (">", 3), ("'", 5), ('"', 5), ("\\", 1), ("\n", 13))
_COSTLY = re.compile(r"""[^ !#-%(-;=?-\[\]-~]""")
_MAXIMUM_COST = 14
_NOTE, _BRIEF_NOTE = 32, 3

Cost = Callable[[str], int]


def cost_of_text(text: str) -> int:
    """Return how many bytes `text` takes in a saved notebook, escaped for HTML and then for JSON."""
    if not _COSTLY.search(text):
        return len(text)
    # Counting is three times as fast as escaping, and this runs for every line of every rank.
    more = sum(extra * text.count(character) for character, extra in _COSTS)
    return len(text.encode("utf-8", "replace")) + more


def cost_of_html(content: str) -> int:
    """Return how many bytes HTML takes in a saved notebook: in JSON, quotes and line ends cost more."""
    return len(content.encode("utf-8", "replace")) + content.count('"') + 13 * content.count("\n")


def shortened(text: str, limit: int, cost: Cost = cost_of_text) -> str:
    """Return `text`, its middle left out where it takes more than `limit`.

    Its end is kept as well as its beginning: a traceback has the cause there, and paths differ there.

    >>> shortened("ha" * 100, 132)[40:90]
    'hahahahaha … 100 characters left out … hahahahahah'
    >>> shortened("ha" * 100, 23)
    'hahahahaha … hahahahaha'
    """
    if _fits(text, limit, cost):
        return text
    note = _NOTE if limit > 4 * _NOTE else _BRIEF_NOTE
    room = max(limit - note, limit // 2)
    start = _fitting(text, room - room // 2, cost)
    length = _fitting(text[start:][::-1], room // 2, cost)
    left_out = f" {len(text) - start - length} characters left out …" if note == _NOTE else ""
    return f"{text[:start]} …{left_out} {text[len(text) - length :]}"


def clipped(text: str, limit: int, cost: Cost = cost_of_text) -> str:
    """Return the beginning of `text`, as much of it as `limit` allows."""
    return text if _fits(text, limit, cost) else f"{text[: _fitting(text, limit, cost)].rstrip()} …"


def _fits(text: str, limit: int, cost: Cost) -> bool:
    return len(text) * _MAXIMUM_COST <= limit or cost(text) <= limit


def _fitting(text: str, limit: int, cost: Cost) -> int:
    """Return how many characters from the start of `text` cost no more than `limit`."""
    ends = range(min(len(text), limit) + 1)
    return max(bisect_right(ends, limit, key=lambda end: cost(text[:end])) - 1, 0)


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
