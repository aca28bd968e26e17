"""`%distributed COMMAND`: scripts, sessions, variables, stacks, the doctor."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from nblaunch._errors import NblaunchError, OptionError
from nblaunch.checks.doctor import doctor
from nblaunch.group import runtime
from nblaunch.group.session import debug, inspect
from nblaunch.magic import auto, export, scripts, sessions
from nblaunch.options.launch import LaunchOptions
from nblaunch.options.line import option_completions, parse_line, split_words
from nblaunch.options.table import nearest
from nblaunch.protocol.reports import HangReport
from nblaunch.view.summary import events_table

Namespace = dict[str, Any]


class PlainText(str):
    """Text that a notebook shows as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the text itself."""
        return str(self)


def _start(line: str, _: Namespace) -> object:
    options = parse_line(line).options
    session = sessions.start(options)
    given = f" --session {session.name}" if session.name != sessions.DEFAULT else ""
    warning = f"\nnote: {session.placement.warning}" if session.placement.warning else ""
    return PlainText(
        f"session {session.name!r}: {session.world_size} ranks ({session.placement.backend}) keep their "
        f"variables; %%distributed{given} cells run on them until %distributed stop{given}{warning}"
    )


def _only_session(line: str, command: str) -> LaunchOptions:
    parsed = parse_line(line, positional=True)
    if parsed.rest:
        msg = (
            f"%distributed {command} was given {parsed.rest[0]!r}, but it takes only --session NAME. "
            "Leave it out."
        )
        raise OptionError(msg)
    return parsed.options


def _stop(line: str, _: Namespace) -> object:
    return PlainText(sessions.stop(_only_session(line, "stop").session))


def _restart(line: str, _: Namespace) -> object:
    session = sessions.named(_only_session(line, "restart").session)
    session.restart()
    return PlainText(f"session {session.name!r}: {session.world_size} new ranks, without variables")


def _status(line: str, _: Namespace) -> object:
    wanted = _only_session(line, "status").session
    if wanted is None and not sessions.opened():
        return PlainText("no session is open; %distributed start -n 2 opens one")
    shown = [sessions.named(wanted)] if wanted is not None else list(sessions.opened().values())
    return PlainText("\n".join(str(session.status()) for session in shown))


def _interrupt(line: str, _: Namespace) -> object:
    sessions.named(_only_session(line, "interrupt").session).interrupt()
    return None


def _stacks(line: str, _: Namespace) -> HangReport:
    return sessions.named(_only_session(line, "stacks").session).stacks()


def _names_in(line: str, command: str) -> tuple[tuple[str, ...], LaunchOptions]:
    """Return the names on a line, and its options, which may come before or after them."""
    words = split_words(line)
    names: list[str] = []
    while words and not words[0].startswith("-"):
        names.append(words.pop(0))
    parsed = parse_line(" ".join(words), positional=True)
    names += parsed.rest
    if not names:
        msg = f"%distributed {command} was given no name. Name the variables: %distributed {command} x y"
        raise OptionError(msg)
    return tuple(names), parsed.options


def _push(line: str, namespace: Namespace) -> object:
    names, options = _names_in(line, "push")
    for name in names:
        if name not in namespace:
            guess = nearest(name, namespace)
            msg = f"push: there is no variable {name!r} in the notebook." + (
                f" Did you mean {guess!r}?" if guess else ""
            )
            raise NblaunchError(msg)
    sessions.named(options.session).push({name: namespace[name] for name in names}, ranks=options.ranks)
    return None


_NCCL = "--nccl"
_ONE_RANK = re.compile(r"(?:^|\s)--rank(?:\s+|=)(\S+)")


def _pull(line: str, namespace: Namespace) -> object:
    """Assign a list of all ranks' values, with `--rank 0` the value of that rank."""
    one = _ONE_RANK.search(line)
    names, options = _names_in(_ONE_RANK.sub(" ", line), "pull")
    session = sessions.named(options.session)
    if one is None:
        namespace.update(session.pull(*names, ranks=options.ranks))
        return None
    if not one[1].isdigit() or options.ranks is not None:
        msg = (
            f"'%distributed pull {line.strip()}' was asked for, but --rank takes the number of one rank, and "
            "no --ranks beside it. Write --rank 0, or --ranks 0,2 for a list."
        )
        raise OptionError(msg)
    found = session.pull(*names, ranks=[int(one[1])])
    namespace.update({name: values[0] for name, values in found.items()})
    return None


def _inspect(line: str, _: Namespace) -> object:
    names, options = _names_in(line, "inspect")
    return PlainText(inspect(sessions.named(options.session), names[0], rank=(options.ranks or (0,))[0]))


def _debug(line: str, _: Namespace) -> object:
    words = split_words(line)
    number = words.pop(0) if words and words[0].isdigit() else None
    session = sessions.named(_only_session(" ".join(words), "debug").session)
    debug(session, session.failed_last if number is None else int(number))
    return None


def _doctor(line: str, _: Namespace) -> object:
    words = split_words(line)
    if set(words) - {_NCCL}:
        msg = (
            f"'%distributed doctor {line}' was asked for, but doctor takes nothing after it but {_NCCL}. "
            "Write %distributed doctor."
        )
        raise OptionError(msg)
    return doctor(nccl=_NCCL in words)


def _events(line: str, _: Namespace) -> object:
    if split_words(line):
        msg = (
            f"'%distributed events {line}' was asked for, but events takes nothing after it: it shows "
            "those of the last run. Of any other result, look at result.events."
        )
        raise OptionError(msg)
    log = runtime.local().last_events
    return PlainText("no run has ended yet" if log is None else events_table(log.all()))


def _auto(line: str, _: Namespace) -> object:
    return PlainText(auto.switch(line))


def _export(line: str, namespace: Namespace) -> object:
    return PlainText(export.command(line, namespace))


COMMANDS: dict[str, Callable[[str, Namespace], object]] = {
    "start": _start,
    "stop": _stop,
    "restart": _restart,
    "status": _status,
    "push": _push,
    "pull": _pull,
    "inspect": _inspect,
    "debug": _debug,
    "stacks": _stacks,
    "interrupt": _interrupt,
    "events": _events,
    "auto": _auto,
    "run": scripts.run,
    "export": _export,
    "doctor": _doctor,
}
"""What `%distributed` can be followed by; a call returns what the line shows."""


def command_completions(text_so_far: str) -> list[str]:
    """Return what the last word of `%distributed ...` can become: a command, then options or session names.

    >>> command_completions("%distributed sto")
    ['stop']
    """
    before, _, word = text_so_far.rpartition(" ")
    if len(before.split()) <= 1:
        return [name for name in COMMANDS if name.startswith(word)]
    if before.split()[1] == "run":
        return scripts.completions(text_so_far)
    if before.split()[-1] == "--session":
        return [name for name in sessions.opened() if name.startswith(word)]
    if before.split()[1] == "doctor":
        return [flag for flag in (_NCCL,) if flag.startswith(word)]
    if before.split()[1] == "export":
        return [flag for flag in export.FLAGS if flag.startswith(word)]
    return option_completions(f"%%distributed {word}")


def command(line: str, namespace: Namespace) -> object:
    """Carry out the command of a line `%distributed ...`; raises `OptionError` for one there is not."""
    words = split_words(line)
    chosen = COMMANDS.get(words[0]) if words else None
    if chosen is not None:
        return chosen(line.strip()[len(words[0]) :].strip(), namespace)
    asked = f"%distributed {line}".strip()
    guess = nearest(words[0], COMMANDS) if words else None
    what_to_do = (
        f"There are: {', '.join(COMMANDS)}. To run a cell on ranks, begin it with %%distributed."
        if guess is None
        else f"Did you mean %distributed {guess}?"
    )
    wrong = "there is no such command" if words else "it needs a command"
    msg = f"{asked!r} was asked for, but {wrong}. {what_to_do}"
    raise OptionError(msg)
