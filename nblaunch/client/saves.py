"""Saves of a session, and sessions that begin with one."""

from __future__ import annotations

import contextlib
import secrets
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nblaunch._errors import NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._results import Outcome
from nblaunch.capture import pickling, saved
from nblaunch.capture.saved import SavedSession
from nblaunch.client.session import LiveSession, silent, start_session
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.state import View


def save(session: LiveSession, path: str, *, background: bool = False, strict: bool = False) -> SavedSession:
    """Save the variables of a session's ranks. Raises `NblaunchError` if that fails."""
    found = _save(session, absolute(path), background=background, strict=strict)
    assert found is not None  # noqa: S101 - only one that is made by itself is left out
    return found


def _save(session: LiveSession, directory: str, **how: bool) -> SavedSession | None:
    jobs = [
        {"title": each.title, "state": each.state, "started": each.started, "ended": each.ended}
        for each in session.jobs
    ]
    outcome = session.ask_all("save", "save", directory, secrets.token_hex(8), jobs, **how)
    found: SavedSession | None = _values(outcome, f"save to {directory}")[0]
    return found


def absolute(path: str) -> str:
    """Return the directory that a user means: ranks have directories of their own."""
    return str(Path(path).expanduser().absolute())


def start(
    options: LaunchOptions, *, name: str = "default", watch: Callable[[str, str], View] = silent
) -> LiveSession:
    """Start a session, with the variables of a save if the options name one; it may save by itself.

    It has as many ranks as those that have saved, unless others are asked for. Raises `NblaunchError` for a
    directory that is no save, that is not the user's own, or of which these ranks cannot have all.
    """
    if options.restore is None:
        if options.save_every is not None:
            msg = (
                "save_every needs a directory to save to, which may be there or not: --from NAME (restore=)."
            )
            raise OptionError(msg)
        return start_session(options, name=name, watch=watch)
    directory = absolute(options.restore)
    begins = options.save_every is not None and not saved.exists(directory)
    found = None if begins else saved.open_saved(directory)
    if begins and Path(directory).parent.exists():
        saved.refuse_open_parent(directory)
    if found and options.nproc_per_node == "auto" and options.on is None and options.nnodes == "1":
        options = replace(options, nproc_per_node=found.world_size)
    session = start_session(options, name=name, watch=watch)
    try:
        nothing = f"{options.restore} is not there yet: nothing is loaded"
        session.note(_restore(session, found) if found else nothing)
        if options.save_every is not None:
            session.after_job = _RegularSaves(session, directory, options.save_every)
    except BaseException:
        session.close()
        raise
    return session


class _RegularSaves:
    """Saves a session after a cell, when its time has come; a failure is told once."""

    def __init__(self, session: LiveSession, directory: str, seconds: float) -> None:
        self._session = weakref.ref(session)
        self._directory, self._seconds = directory, seconds
        self._last, self._times_lost = time.monotonic(), session.times_lost
        self._told = ""
        self._save_if_preempted(session)

    def _save_if_preempted(self, session: LiveSession) -> None:
        """Have ranks save before their nodes are taken back: those of another attempt do not know of it."""
        found = session.ask_all("save", "save_if_preempted", self._directory)
        _values(found, "save before preemption")
        self._attempt = session.attempt

    def __call__(self) -> None:
        session = self._session()
        if session is None:
            return
        why, replaced = "", session.times_lost != self._times_lost
        if session.attempt != self._attempt and not replaced:
            with contextlib.suppress(NblaunchError):  # the next cell has begun, or the ranks have died
                self._save_if_preempted(session)
        if time.monotonic() < self._last + self._seconds:
            return
        try:
            if replaced:
                why = "ranks were replaced, and have lost variables that are in it"
            elif _save(session, self._directory, background=True, by_itself=True) is not None:
                self._last = time.monotonic()
        except NblaunchError as error:
            if error.kind == FailureKind.SESSION_BUSY:  # the next cell has begun
                return
            why, self._last = str(error), time.monotonic()
        # The ranks say it in words of their own, each time those of another one.
        kind = "replaced" if replaced else "failed" if why else ""
        if kind not in {"", self._told}:
            session.note(f"the session is not saved to {self._directory} by itself: {why}")
        self._told = kind


def _restore(session: LiveSession, found: SavedSession) -> str:
    """Load a save into a new session; return what to say of it."""
    drop, token = saved.fit(found, session.world_size, session.options.drop), secrets.token_hex(8)
    known = pickling.known_class_names()
    env = frozenset(session.options.env)
    outcome = session.ask_all("restore", "restore", found.path, token, drop, known, env)
    names, lost = _values(outcome, f"load of {found.path}")[0]
    session.take_restored(names)
    when = time.strftime("%b %d %H:%M", time.localtime(found.created))
    loaded = (
        f"loaded from {session.options.restore} ({when}, {found.world_size} ranks), which has run the code "
        "that is pickled there. The ranks' own variables count: %distributed push NAME sends the notebook's."
    )
    lines = [loaded]
    lines += [f"left out: {saved.listed(drop)}"] if drop else []
    lines += [f"{name} could not be saved ({why})" for name, why in found.left_out.items()]
    # How a model is wrapped is lost with the model.
    shown = {name: why for name, why in lost.items() if name.isidentifier()} or ({} if drop else lost)
    lines += [f"{name} could not be loaded ({why})" for name, why in shown.items()]
    return "\n".join(lines)


def _values(outcome: Outcome, what: str) -> list[Any]:
    root = outcome.result.root_cause
    if root is not None:
        msg = f"{what}: {root.message}"
        raise NblaunchError(msg) from None
    return list(outcome.unwrap().values)
