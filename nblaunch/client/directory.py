"""The sessions of this user on this machine, those of other kernels too, as the registry has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec.structs import asdict

from nblaunch import _keeper, _registry
from nblaunch._errors import LaunchError, NblaunchError
from nblaunch._help import FailureKind
from nblaunch._registry import FoundRuntime, RuntimeEntry
from nblaunch._results import SessionInfo
from nblaunch._runtime_dir import remove_dead
from nblaunch._version import __version__
from nblaunch.client.local import local
from nblaunch.options.table import nearest
from nblaunch.protocol.client import PROTOCOL, DescribeSessions, SessionRecord

_ANSWER_SECONDS = 2.0
_STOP_SECONDS = 40.0

SessionT = TypeVar("SessionT")


def _described(
    known: Iterable[FoundRuntime],
) -> Iterator[tuple[FoundRuntime, tuple[SessionRecord, ...], str]]:
    """Yield each runtime with its sessions, or with why it has described none."""
    for each in known:
        if each.elsewhere:
            yield each, (), f"on {each.elsewhere}"
            continue
        try:
            with contextlib.closing(local().attached(each.entry)) as runtime:
                yield each, runtime.ask(DescribeSessions(), _ANSWER_SECONDS).sessions, ""
        except (LaunchError, TimeoutError) as error:
            yield each, (), f"does not answer: {error}"


def sessions() -> tuple[SessionInfo, ...]:
    """Return the sessions of this user that are open on this machine, the oldest runtime's first.

    Removes what is left of kernels that are dead.
    """
    remove_dead()
    infos: list[SessionInfo] = []
    for found, described, problem in _described(_registry.read_all()):
        entry = found.entry
        silent = SessionRecord(entry.name, detached=entry.detached, started=entry.started)
        stands = problem and (found.elsewhere or entry.detached)
        infos += [
            SessionInfo(
                **asdict(session),
                kernel=entry.owner.pid,
                notebook=entry.owner.notebook,
                pid=entry.runtime.pid,
                problem=problem,
            )
            for session in ((silent,) if stands else described)
        ]
    return tuple(infos)


def detached() -> dict[str, RuntimeEntry]:
    """Return the detached sessions on this machine, by name; asks no runtime."""
    here = (each.entry for each in _registry.read_all() if each.alive)
    return {entry.name: entry for entry in here if entry.detached}


def one_of(
    known: Mapping[str, SessionT], name: str | None, *, asked: str, none: str, some: tuple[str, str]
) -> SessionT:
    """Return the session of a name, the only one for None. Raises `NblaunchError` if none fits.

    `none` and `some` say what is there instead: the names follow the first text of `some`, then the one that
    was probably meant, or the second text.
    """
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is not None and name in known:
        return known[name]
    why = none
    if known:
        guess = nearest(name, known) if name is not None else None
        names = ", ".join(map(repr, known))
        why = f"{some[0]} {names}. {f'Did you mean {guess!r}?' if guess else some[1]}"
    msg = f"{asked} was asked for, but {why}"
    raise NblaunchError(msg, kind=FailureKind.NO_SESSION)


def find(name: str | None) -> RuntimeEntry:
    """Return a detached session's runtime, the only one for None. Raises `NblaunchError` if none fits."""
    known = detached()
    one = "the one detached session" if known else "a detached session"
    entry = one_of(
        known,
        name,
        asked=one if name is None else f"detached session {name!r}",
        none="there is none on this machine. Start one: %distributed start -n 2 --detach.",
        some=("the detached ones are", "Give one of these names."),
    )
    if entry.protocol != PROTOCOL:
        msg = (
            f"session {entry.name!r} was started by nblaunch {entry.version}, and this is nblaunch "
            f"{__version__}. Use it with that version, or stop it: python -m nblaunch stop "
            f"{entry.name}."
        )
        raise NblaunchError(msg, kind=FailureKind.OTHER_VERSION)
    return entry


def find_open(name: str) -> tuple[RuntimeEntry, SessionRecord]:
    """Return a session: the detached one of this name, or that of the youngest kernel that has one.

    Raises `NblaunchError` if there is none, or if it cannot be asked.
    """
    known = sorted(_registry.read_all(), key=lambda each: (each.entry.detached, each.entry.started))
    elsewhere = ""
    for found, described, problem in _described(reversed(known)):
        for session in described:
            if session.name == name:
                return found.entry, session
        if found.entry.name == name and found.elsewhere:
            elsewhere = found.elsewhere
        elif found.entry.name == name and problem:
            msg = f"session {name!r} {problem}"
            raise NblaunchError(msg, kind=FailureKind.NO_ANSWER)
    where = f"it is open {elsewhere}" if elsewhere else "python -m nblaunch sessions lists those that are"
    msg = f"session {name!r} is not open on this machine; {where}."
    raise NblaunchError(msg, kind=FailureKind.NO_SESSION)


def stop(name: str) -> None:
    """End a detached session, and wait until it is gone."""
    entry = detached().get(name) or find(name)
    with (
        contextlib.suppress(LaunchError, TimeoutError),
        contextlib.closing(local().attached(entry)) as runtime,
    ):
        runtime.stop()
    if entry.keeper.lives:
        # It does not answer, or understands another protocol: its keeper ends all.
        _keeper.stop(entry.keeper.pid, entry.keeper.start)
        entry.wait_until_gone(_STOP_SECONDS)
    if entry.keeper.lives:
        keeper = entry.keeper.pid
        msg = (
            f"session {name!r} was to be stopped, and its keeper (process {keeper}) has not ended within "
            f"{_STOP_SECONDS:g} s. If it is stopped itself: kill -CONT {keeper}, and stop the session again."
        )
        raise LaunchError(msg, phase="runtime", kind=FailureKind.NO_ANSWER)
    _registry.release_name(entry.name, entry)
