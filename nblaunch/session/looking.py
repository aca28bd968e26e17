"""Looking into a rank of a session between its cells: help, completion, the last exception's frames."""

from __future__ import annotations

from nblaunch._errors import NblaunchError
from nblaunch.rank import introspection
from nblaunch.session.session import LiveSession


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
    """Return how many characters before `position` rank 0 would replace, and by what."""
    if session.busy or not session.open:
        return 0, []
    finished = session.aside("complete", introspection.complete, code, position)
    if finished.error is not None or finished.result is None:
        return 0, []
    found: tuple[int, list[str]] = finished.result[0]
    return found


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
