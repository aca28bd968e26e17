"""What a notebook asks of a rank between its cells: help on an object, and how a name could go on."""

from __future__ import annotations

from typing import Any

from nblaunch.rank import questions, shell

_MOST = 500

last_error: BaseException | None = None
"""What the last job that failed here raised."""


def let_go_on_gpu() -> None:
    """Forget the last exception where its frames may hold GPU memory, which the next job needs.

    On a rank without CUDA it stays until another takes its place, as in IPython.
    """
    from nblaunch.rank import memory  # with torch, and the notebook imports this module

    global last_error
    if last_error is None or not memory.on_gpu():
        return
    error, last_error = last_error, None
    shell.prepare().forget_error()
    memory.let_go(error)


def debug() -> None:
    """Look at the frames of the last exception, as `%debug` does. Raises `LookupError` if there was none."""
    if last_error is None or last_error.__traceback__ is None:
        msg = "no job has failed on this rank since it was started"
        raise LookupError(msg)
    questions.post_mortem(last_error.__traceback__)


def describe(name: str) -> str:
    """Return what `name?` shows here; empty if there is nothing of that name."""
    running: Any = shell.prepare()
    found = running.object_inspect(name)
    return str(running.object_inspect_text(name)) if found["found"] else ""


def complete(code: str, position: int) -> tuple[int, list[str]]:
    """Return how many characters before `position` are to be replaced, and the texts that could be there."""
    completer: Any = shell.prepare().Completer
    from IPython.core.completer import provisionalcompleter

    with provisionalcompleter():
        found = list(completer.completions(code, position))[:_MOST]
    if not found:
        return 0, []
    start = found[0].start
    return position - start, [each.text for each in found if each.start == start]
