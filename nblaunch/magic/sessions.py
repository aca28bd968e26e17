"""The sessions of a notebook, by name; and which of them a cell runs in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from nblaunch._errors import NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch.client import directory, saves
from nblaunch.client.session import LiveSession, attach_session
from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.view.display import view_of

DEFAULT = "default"
_OF_NODES = ("nnodes", "nproc_per_node")

_sessions: dict[str, LiveSession] = {}
_lost: dict[str, str] = {}
"""Sessions whose ranks ended by themselves, with what to say of it, until the user is told once."""


def opened() -> dict[str, LiveSession]:
    for name in [name for name, session in _sessions.items() if not session.open]:
        _lost[name] = _end_of(_sessions.pop(name))
    return _sessions


def _end_of(session: LiveSession) -> str:
    why = f": {session.why_ended.rstrip('.')}" if session.why_ended else ", and could not be replaced"
    saved = f" --from {session.options.restore}" if session.options.restore else ""
    return (
        f"the ranks of session {session.name!r} have ended{why}. Start it again "
        f"(%distributed start{saved}{flag_of(session.name)}), or run the cell again for fresh ranks."
    )


def start(options: LaunchOptions) -> LiveSession:
    """Start a session under the name that the options give. Raises `OptionError` if that name is taken."""
    name = options.session or DEFAULT
    if name in opened():
        msg = (
            f"session {name!r}: there is one already, with {_sessions[name].world_size} ranks. Stop it first "
            f"(%distributed stop{flag_of(name)}), or give another name (--session NAME)."
        )
        raise OptionError(msg, kind=FailureKind.SESSION_NAME)
    for option in OPTIONS:
        of_a_cell = option.scope == "notebook" and option.name != "session"
        if of_a_cell and getattr(options, option.name) != option.default:
            msg = f"{option.flags[0]} is for a cell, not for %distributed start. Leave it out here."
            raise OptionError(msg)
    _lost.pop(name, None)
    session = saves.start(options, name=name, watch=view_of)
    _sessions[name] = session
    return session


def attach(name: str | None, *, take: bool) -> LiveSession:
    """Attach to a detached session, under its name, unless this notebook has or watches it already."""
    entry = directory.find(name)
    known = opened().get(entry.name)
    if known is not None and known.detached and (known.owns or (known.held_by and not take)):
        return known
    if known is not None and not known.detached:
        msg = f"session {entry.name!r}: this notebook has another one of that name. Stop it first."
        raise OptionError(msg, kind=FailureKind.SESSION_NAME)
    session = attach_session(entry, take=take, watch=view_of)
    _sessions[entry.name] = session
    return session


def tell_of_detached() -> None:
    """Print in one line which detached sessions there are, if there are any."""
    with contextlib.suppress(NblaunchError, OSError):
        for name, entry in directory.detached().items():
            since = time.strftime("%b %d %H:%M", time.localtime(entry.started))
            print(  # noqa: T201 - the user would not look for it
                f"detached session {name!r} has been running since {since}: %distributed attach {name}"
            )


def session_for(options: LaunchOptions) -> LiveSession | None:
    """Return the session that a line asks for, None for fresh ranks; raises `NblaunchError`."""
    sessions = opened()
    if options.fresh:
        if options.session is not None:
            msg = "--fresh and --session: a cell runs on one or the other. Give one of them."
            raise OptionError(msg)
        return None
    if options.session is not None:
        return named(options.session)
    if _lost and not sessions:
        # Once: a cell that was meant for ranks with variables must not run on fresh ones unasked.
        raise NblaunchError(_lost.popitem()[1], kind=FailureKind.SESSION_ENDED)
    if DEFAULT in sessions:
        return sessions[DEFAULT]
    return named(None) if sessions else None


def on_its_nodes(options: LaunchOptions) -> LaunchOptions:
    """Return the options of a cell on fresh ranks beside a session: on its nodes, unless they name others."""
    sessions = opened()
    beside = sessions.get(DEFAULT) or next(iter(sessions.values()), None)
    if not options.fresh or options.on is not None or beside is None or beside.options.on is None:
        return options
    wanted = {
        each.name: getattr(beside.options, each.name)
        for each in OPTIONS
        if (each.scope == "engine" or each.name in _OF_NODES) and getattr(options, each.name) == each.default
    }
    return replace(options, **wanted)


def named(name: str | None) -> LiveSession:
    """Return an open session, the default or the only one for None. Raises `NblaunchError` if none fits."""
    sessions = opened()
    wanted = name or DEFAULT
    return directory.one_of(
        sessions,
        None if name is None and len(sessions) == 1 else wanted,
        asked=f"session {wanted!r}",
        none=f"no session is open. Start one: %distributed start -n 2{flag_of(wanted)}",
        some=("the open ones are", "Say which with --session NAME."),
    )


def check_cell_options(session: LiveSession, options: LaunchOptions) -> None:
    """Raise `OptionError` for an option of the group that differs from the session's own."""
    for option in OPTIONS:
        value, own = getattr(options, option.name), getattr(session.options, option.name)
        if value in (option.default, own) or option.per_cell:
            continue
        # A value from a `PET_` variable is meant for fresh ranks; the line does not have it.
        if value == getattr(LaunchOptions.from_keywords(), option.name):
            continue
        if option.name == "nproc_per_node" and value == session.world_size:
            continue
        flag = option.flags[0]
        has = session.world_size if option.name == "nproc_per_node" else own
        msg = (
            f"{flag} {value} was asked for, but session {session.name!r} was started with {has}. Leave "
            f"{flag} out, or run the cell beside the session with --fresh."
        )
        raise OptionError(msg)


def stop(session: LiveSession) -> str:
    """End a session; return what the line shows."""
    _sessions.pop(session.name, None)
    # `close` only detaches a watcher; `stop` must really end the session.
    elsewhere = session.detached and not session.owns
    session.close()
    if elsewhere and session.name in directory.detached():
        directory.stop(session.name)
    return f"session {session.name!r} has ended"


def note_cell(bound: Callable[[], frozenset[str]]) -> None:
    """After a cell, note which variables it has bound, and drop what is known of objects that are gone."""
    names = bound() if _sessions else frozenset[str]()
    for session in _sessions.values():
        session.note_cell(names)


def flag_of(name: str) -> str:
    """Return the option that selects this session on a line."""
    return "" if name == DEFAULT else f" --session {name}"
