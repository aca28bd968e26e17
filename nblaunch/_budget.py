"""What text costs in a saved notebook, and text cut to a cost."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable

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
