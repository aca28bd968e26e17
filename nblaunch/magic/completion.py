"""Completion in the body of a `%%distributed` cell: names and attributes that live on rank 0."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from nblaunch.group.session import complete
from nblaunch.magic import auto, sessions
from nblaunch.options.line import parse_line

_MAGIC = re.compile(r"\s*%%distributed\b([^\n]*)\n")


def make_matcher() -> Any:
    """Return a matcher for IPython's completer."""

    def session_matcher(context: CompletionContext) -> SimpleMatcherResult:
        try:
            return _completed(context)
        except Exception:  # noqa: BLE001 - a line that is not finished is none: nothing is offered then
            return SimpleMatcherResult(completions=[])

    return context_matcher()(session_matcher)


def _completed(context: CompletionContext) -> SimpleMatcherResult:
    body = _MAGIC.match(context.full_text)
    if body is None and not auto.on():
        return SimpleMatcherResult(completions=[])
    session = sessions.chosen(parse_line(body[1] if body is not None else "").options)
    skipped = body.end() if body is not None else 0
    if session is None:
        return SimpleMatcherResult(completions=[])
    lines = context.full_text.split("\n")
    position = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
    length, texts = complete(session, context.full_text[skipped:], position - skipped)
    # IPython replaces its own token; ours may begin elsewhere.
    before = context.token[: max(len(context.token) - length, 0)]
    return SimpleMatcherResult(completions=[SimpleCompletion(before + text) for text in texts])
