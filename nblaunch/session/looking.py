"""Looking into a rank of a session between its cells: help, completion, the last exception's frames."""

from __future__ import annotations

import contextlib
import queue
import re
import threading

from nblaunch._errors import NblaunchError
from nblaunch.rank import introspection
from nblaunch.session.session import LiveSession

_ANSWER_SECONDS = 0.5
_COMPLETE_SECONDS = 2.0
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*$")


def inspect(session: LiveSession, name: str, *, rank: int = 0) -> str:
    """Return what `name?` shows on a rank. Raises `NblaunchError` if there is nothing of that name."""
    finished = session.aside("inspect", introspection.describe, name, rank=rank)
    if finished.error is not None or finished.result is None:
        raise finished.error or NblaunchError("inspect ended without an answer")
    text: str = finished.result[rank]
    if not text:
        msg = f"inspect: name {name!r} is not defined on rank {rank}."
        raise NblaunchError(msg)
    return text


def complete(session: LiveSession, code: str, position: int) -> tuple[int, list[str]]:
    """Return how many characters before `position` rank 0 would replace, and by what.

    Where rank 0 cannot say in time, because it works, is stopped or is stuck, these are the names that it
    had after its last job.
    """
    if not session.open:
        return 0, []
    if session.busy or 0 in session.group.where(_ANSWER_SECONDS).silent:
        return _known(session, code, position)
    answers: queue.SimpleQueue[tuple[int, list[str]] | None] = queue.SimpleQueue()

    def ask() -> None:
        answer = None
        with contextlib.suppress(NblaunchError):  # a job has begun meanwhile
            finished = session.aside("complete", introspection.complete, code, position, brief=True)
            if finished.error is None and finished.result is not None:
                answer = finished.result[0]
        answers.put(answer)

    # On a thread of its own: a `__dir__` of the user's may take any time, and the notebook does not wait.
    threading.Thread(target=ask, name="nblaunch-complete", daemon=True).start()
    try:
        return answers.get(timeout=_COMPLETE_SECONDS) or (0, [])
    except queue.Empty:
        return _known(session, code, position)


def _known(session: LiveSession, code: str, position: int) -> tuple[int, list[str]]:
    begun = _NAME.search(code[:position])
    if begun is None:
        return 0, []
    return len(begun[0]), [name for name in session.names() if name.startswith(begun[0])]


def debug(session: LiveSession, rank: int) -> None:
    """Look at the frames of the last exception of a rank, in that rank; the user types in the notebook."""
    finished = session.aside("debug", introspection.debug, rank=rank)
    root = finished.result.root_cause if finished.result is not None else None
    if root is not None and root.type == "builtins.LookupError":
        msg = (
            f"debug was asked for, but {root.message}: rank {rank}. Name another rank (%distributed debug 1)."
        )
        raise NblaunchError(msg)
    if finished.error is not None:
        raise finished.error
