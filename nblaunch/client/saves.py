"""Saves of a session, and sessions that begin with one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nblaunch._errors import NblaunchError
from nblaunch._results import Outcome
from nblaunch.capture import pickling, saved
from nblaunch.capture.saved import SavedSession
from nblaunch.client.session import LiveSession, silent, start_session
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.state import View


def save(session: LiveSession, path: str, *, background: bool = False, strict: bool = False) -> SavedSession:
    """Save the variables of a session's ranks. Raises `NblaunchError` if that fails."""
    jobs = [
        {"title": each.title, "state": each.state, "started": each.started, "ended": each.ended}
        for each in session.jobs
    ]
    directory = absolute(path)
    outcome = session.ask_all(
        "save", "save", directory, secrets.token_hex(8), jobs, background=background, strict=strict
    )
    found = _values(outcome, f"save to {directory}")[0]
    assert isinstance(found, SavedSession)  # noqa: S101 - of the first rank
    return found


def absolute(path: str) -> str:
    """Return the directory that a user means: ranks have directories of their own."""
    return str(Path(path).expanduser().absolute())


def start(
    options: LaunchOptions, *, name: str = "default", watch: Callable[[str, str], View] = silent
) -> LiveSession:
    """Start a session, with the variables of a save if the options name one.

    It has as many ranks as those that have saved, unless others are asked for. Raises `NblaunchError` for a
    directory that is no save, that is not the user's own, or of which these ranks cannot have all.
    """
    if options.restore is None:
        return start_session(options, name=name, watch=watch)
    found = saved.open_saved(absolute(options.restore))
    if options.nproc_per_node == "auto" and options.on is None and options.nnodes == "1":
        options = replace(options, nproc_per_node=found.world_size)
    session = start_session(options, name=name, watch=watch)
    try:
        session.note(_restore(session, found))
    except BaseException:
        session.close()
        raise
    return session


def _restore(session: LiveSession, found: SavedSession) -> str:
    """Load a save into a new session; return what to say of it."""
    drop, token = saved.fit(found, session.world_size, session.options.drop), secrets.token_hex(8)
    known = pickling.known_class_names()
    outcome = session.ask_all("restore", "restore", found.path, token, drop, known, strict=False, query=False)
    names, lost = _values(outcome, f"load of {found.path}")[0]
    session.take_restored(names)
    when = time.strftime("%b %d %H:%M", time.localtime(found.created))
    loaded = (
        f"loaded from {found.path} ({when}, {found.world_size} ranks), which has run the code that is "
        "pickled there. The ranks' own variables count: %distributed push NAME sends the notebook's."
    )
    lines = [loaded]
    lines += [f"left out: {saved.listed(drop)}"] if drop else []
    lines += [f"{name} could not be saved ({why})" for name, why in found.left_out.items()]
    lines += [f"{name} could not be loaded ({why})" for name, why in lost.items()]
    return "\n".join(lines)


def _values(outcome: Outcome, what: str) -> list[Any]:
    root = outcome.result.root_cause
    if root is not None:
        msg = f"{what}: {root.message}"
        raise NblaunchError(msg) from None
    return list(outcome.unwrap().values)
