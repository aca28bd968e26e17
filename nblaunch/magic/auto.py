"""`%distributed auto on`: every cell runs on the ranks of the open session, until `off`.

An input transformer puts `%%distributed` above each cell that is not a magic itself. Cells that begin
with `%%local`, and lines of magics alone, stay in the notebook.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

from nblaunch import _notebook
from nblaunch._errors import NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch.magic import sessions

_STAYS = re.compile(r"\s*(%|!|\?)")
_LOCAL = re.compile(r"%%local\s*$")


class _AutoState:
    """The cell that runs, as IPython's events report it, and whether it got the magic."""

    suspended = False
    inserted = False
    running = False
    """Whether a cell runs: what is transformed then is part of it, as the statement of `%timeit`."""
    users = False
    """Whether the user runs it; front ends run code of their own, to list variables for example."""
    silent = False
    on_ranks = False
    """Whether the cell that runs, or ran last, is one that got the magic."""


_state = _AutoState()


def on() -> bool:
    running = _notebook.shell()
    return running is not None and transform in running.input_transformers_cleanup


def take_inserted() -> bool:
    """Return, once, whether `transform` put the magic above the cell that runs."""
    inserted, _state.inserted = _state.inserted, False
    _state.on_ranks = inserted
    return inserted


def ran_on_ranks() -> bool:
    """Return whether the cell that has just ended got the magic, and nothing of it ran in the notebook."""
    return _state.on_ranks


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Leave source alone that is transformed only to be read."""
    before, _state.suspended = _state.suspended, True
    try:
        yield
    finally:
        _state.suspended = before


def transform(lines: list[str]) -> list[str]:
    _state.inserted = _state.inserted and _state.suspended
    first = next((line for line in lines if line.strip()), "")
    if not first or _state.suspended or _state.running or not sessions.opened() or _is_in_the_background():
        return lines
    if _STAYS.match(first) or all(not line.strip() or _STAYS.match(line) for line in lines):
        return lines
    _state.inserted = True
    return ["%%distributed\n", *lines]


def _is_in_the_background() -> bool:
    """Whether a front end runs this silently or outside the history; a terminal has `_on_run_cell`."""
    kernel = getattr(_notebook.shell(), "kernel", None)
    parent: Any = getattr(kernel, "get_parent", dict)() or {}
    asked = parent.get("content", {})
    return bool(asked.get("silent")) or asked.get("store_history") is False


def without_local(lines: list[str]) -> list[str]:
    """Remove `%%local`, which means nothing in the notebook, where the cell then runs."""
    if not lines or not _LOCAL.match(lines[0]):
        return lines
    rest = list(itertools.dropwhile(lambda line: not line.strip(), lines[1:]))
    # An empty line keeps the numbers of those below; a magic must be the first line.
    return rest if rest and rest[0].startswith("%%") else ["\n", *lines[1:]]


def install(shell: Any) -> None:
    """Register `%%local`, and callbacks for the cells that a shell runs."""
    transformers: list[object] = shell.input_transformers_cleanup
    if without_local not in transformers:
        transformers.append(without_local)
        shell.events.register("pre_execute", _on_begin)
        shell.events.register("pre_run_cell", _on_run_cell)
        shell.events.register("post_execute", _on_end)


def _on_begin() -> None:
    # What is silent triggers no `pre_run_cell`, which comes after this.
    _state.running, _state.users, _state.silent, _state.on_ranks = True, False, True, False


def _on_run_cell(info: Any) -> None:
    _state.users, _state.silent = bool(info.store_history), bool(info.silent)


def is_the_users() -> bool:
    """Whether the user runs this cell, not a front end or an extension."""
    return _state.users


def run_here(shell: Any, cell: str) -> None:
    """Run code in the notebook that should not have got the magic, as silently as it was meant to run."""
    with suspended():
        shell.run_cell(cell, silent=_state.silent).raise_error()


def _on_end() -> None:
    _state.running = False


def switch(line: str) -> str:
    running = _notebook.shell()
    word = line.strip()
    if running is None or word not in ("on", "off"):
        msg = f"'%distributed auto {word}': auto takes on or off. Write %distributed auto on."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    transformers: list[object] = running.input_transformers_cleanup
    if word == "off":
        if transform in transformers:
            transformers.remove(transform)
        _show_in_prompt(running, None)
        return "cells run in the notebook again"
    if not sessions.opened():
        msg = "%distributed auto on: cells run in a session, and none is open. Run %distributed start."
        raise NblaunchError(msg, kind=FailureKind.NO_SESSION)
    if transform not in transformers:
        transformers.insert(transformers.index(without_local), transform)
    session = sessions.named(None)
    _show_in_prompt(running, f"[{session.world_size} ranks] ")
    return (
        f"every cell runs on the {session.world_size} ranks of session {session.name!r} until "
        "%distributed auto off; magics, and cells that begin with %%local, stay in the notebook"
    )


def _show_in_prompt(running: Any, text: str | None) -> None:
    """Put `text` before the prompts of a terminal, or remove it; a notebook has no such prompts."""
    prompts = getattr(running, "prompts", None)
    if prompts is None:
        return
    plain = getattr(prompts, "without_ranks", None) or prompts
    if text is None:
        running.prompts = plain
        return
    shown = text

    class WithRanks(type(plain)):  # type: ignore[misc] # whichever prompts the user has
        without_ranks = plain

        def in_prompt_tokens(self) -> list[tuple[Any, str]]:
            tokens: list[tuple[Any, str]] = super().in_prompt_tokens()
            return [(tokens[0][0], shown), *tokens]

    running.prompts = WithRanks(running)
