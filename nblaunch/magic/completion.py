"""Completion of the options on the line of a magic.

Values in the line (`-n $ranks`, `-n {len(parts)}`) are nothing of ours: IPython fills them in before it
calls a magic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from nblaunch.group.session import complete
from nblaunch.magic import auto, sessions
from nblaunch.options.launch import OPTIONS, parse_line
from nblaunch.options.line import HELP_FLAGS
from nblaunch.options.table import Option

_MAGIC = re.compile(r"\s*%%?\w+\s")
_OF_SCRIPT = [option for option in OPTIONS if {"magic", "script"} & set(option.doors)]
_OPTIONS = [option for option in _OF_SCRIPT if "magic" in option.doors]


def option_completions(text_so_far: str, *, script: bool = False) -> list[str]:
    """Return what the last word of a line can become: options, or the choices of the one before it.

    The text ends at the cursor, with or without `%%distributed`. After `--backend=` the choices come alone,
    because IPython replaces only what follows the `=`. With `script` there are also the options of a script.

    >>> option_completions("%%distributed -n 2 --ti")
    ['--timeout']
    >>> option_completions("--backend n")
    ['nccl']
    """
    if "\n" in text_so_far:
        return []
    *before, word = re.split(r"\s+", _MAGIC.sub("", text_so_far, count=1))
    if any(each.startswith("#") for each in (*before, word)):
        return []
    spelling, equals, value = word.partition("=")
    if not equals and before:
        spelling, value = before[-1], word
    options = _OF_SCRIPT if script else _OPTIONS
    option = next((each for each in options if spelling in each.spellings), None)
    if option is not None and not option.kind.switch:
        return [choice for choice in option.kind.words if choice.startswith(value)]
    return [] if equals else _options_from(word, options)


def _options_from(word: str, options: Iterable[Option]) -> list[str]:
    """Return the options that begin with `word`; those with underscores only once one was typed."""
    if not word:
        return [option.flags[0] for option in options]
    flags = [flag for option in options for flag in (option.spellings if "_" in word else option.flags)]
    return [flag for flag in (*flags, *HELP_FLAGS) if flag.startswith(word)]


# --- Completion in the body of a `%%distributed` cell: names and attributes that live on rank 0.


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
