"""`%distributed COMMAND`: scripts, sessions, variables, stacks, the doctor."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nblaunch import _notebook
from nblaunch._errors import NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._results import Handle, Perform, RunResult, held_by, sessions_table
from nblaunch.checks.report import DoctorReport
from nblaunch.client import directory, saves
from nblaunch.client.local import local
from nblaunch.client.run import StoppedWatchingError, run_fresh
from nblaunch.client.scripts import prepare_script
from nblaunch.client.session import LiveSession
from nblaunch.insight.difference import Difference
from nblaunch.magic import auto, completion, export, sessions
from nblaunch.options.command_line import option_completions, options_help, parse_line, split_words
from nblaunch.options.launch import OPTIONS, LaunchOptions, refuse_session_options
from nblaunch.options.table import nearest
from nblaunch.view.display import view_of
from nblaunch.view.summary import events_table

Namespace = dict[str, Any]


# --- what runs a job -----------------------------------------------------------------------------------


def perform_job(
    perform: Perform, options: LaunchOptions, shell: Any, claim: Callable[[], object] = lambda: None
) -> Handle | None:
    """Run a job, hand its result to the notebook, and raise its error last."""
    if options.background:
        handle = Handle(perform, claim=claim)
        if options.out is not None:
            shell.user_ns[options.out] = handle
        return handle
    outcome = perform(None)
    if options.out is not None:
        shell.user_ns[options.out] = outcome.result
    show_result(outcome.result, shell)
    outcome.unwrap()
    return None


def show_result(result: RunResult, shell: Any) -> None:
    """Make a result the notebook's `_`."""
    shell.displayhook.update_user_ns(result)
    # IPython also notes every output among its own variables, where neither `%reset out` nor the limit of its
    # output cache finds it: results would never be freed.
    hidden = shell.user_ns_hidden
    for name in [name for name, value in hidden.items() if isinstance(value, RunResult)]:
        del hidden[name]
    if not result.ok:
        # IPython's `Out` has no value of a cell that raised, and what it has keeps logs on disk.
        number = shell.displayhook.prompt_count
        shell.user_ns["_oh"].pop(number, None)
        shell.user_ns.pop(f"_{number}", None)


def _run(line: str, _: Namespace) -> object:
    # Before the line's own options: of an option given twice the last counts.
    parsed = parse_line(f"--no-init {line}", script=True)
    if parsed.help_wanted:
        print(options_help("%distributed run", script=True))  # noqa: T201 - the user asked for it
        return None
    options = parsed.options
    refuse_session_options(options)
    for option in ("session", "ranks"):
        if getattr(options, option) is not None:
            msg = (
                f"--{option} was given to %distributed run, but a script is __main__ of its own process: "
                "it has fresh ranks, also beside an open session. Leave it out."
            )
            raise OptionError(msg)
    if not parsed.rest:
        msg = (
            "%distributed run needs a script, with options before it and its own arguments behind it. Write "
            "%distributed run train.py."
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    script, *args = parsed.rest
    job = prepare_script(script, args, None, options)
    view = view_of(job.title, job.backend, job.placement.note)
    return perform_job(functools.partial(run_fresh, job, view), options, _notebook.shell())


_MACRO = re.compile(r"\$\{(\w+)\}")


def with_macros_kept(line: str) -> str:
    """Return a line in which IPython's `{name}` leaves torchrun's `${local_rank}` to a script.

    >>> with_macros_kept("run train.py ${local_rank}").format()
    'run train.py ${local_rank}'
    """
    return _MACRO.sub(r"${{\1}}", line) if line.split()[:1] == ["run"] else line


def _script_completions(text_so_far: str) -> list[str]:
    """Return what the last word of `%distributed run ...` can become: an option or its value, else a file."""
    before, _, word = text_so_far.rpartition(" ")
    with contextlib.suppress(OptionError):  # raised for an option whose value is to follow
        parsed = parse_line(" ".join(before.split()[2:]), script=True)
        if parsed.rest or not word.startswith("-"):
            return _files(word)
    return option_completions(text_so_far, script=True, values=completion.choices()) or _files(word)


def _files(word: str) -> list[str]:
    directory, _, start = word.rpartition("/")
    searched = Path(f"{directory}/" if "/" in word else ".").expanduser()
    try:
        found = sorted(each for each in searched.iterdir() if each.name.startswith(start))
    except OSError:
        return []
    before = word[: len(word) - len(start)]
    shown = [each for each in found if start.startswith(".") or not each.name.startswith(".")]
    return [f"{before}{each.name}{os.sep if each.is_dir() else ''}" for each in shown]


# --- the other commands --------------------------------------------------------------------------------


class PlainText(str):
    """Text that a notebook shows as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _start(line: str, _: Namespace) -> str:
    session = sessions.start(parse_line(line).options)
    given = sessions.flag_of(session.name)
    warning = f"\nnote: {session.placement.warning}" if session.placement.warning else ""
    loaded = "".join(f"\n{text}" for text in session.taken_notes()) if session.options.restore else ""
    outlives = f". It outlives this kernel: %distributed attach {session.name}" if session.detached else ""
    return (
        f"session {session.name!r}: {session.world_size} ranks ({session.placement.backend}) keep their "
        f"variables; %%distributed{given} cells run on them until %distributed stop{given}"
        f"{outlives}{warning}{loaded}"
    )


def _sessions(line: str, _: Namespace) -> str:
    if split_words(line):
        msg = f"'%distributed sessions {line}': sessions takes nothing after it. Write %distributed sessions."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    return sessions_table(directory.sessions()) or "no session is open; %distributed start -n 2 opens one"


_TAKE = "--take"


def _attach(line: str, _: Namespace) -> str | None:
    words = split_words(line)
    names = [word for word in words if word != _TAKE]
    if len(names) > 1 or any(name.startswith("-") for name in names):
        msg = f"'%distributed attach {line}': attach takes the name of a session, and {_TAKE}."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    session = sessions.attach(names[0] if names else None, take=_TAKE in words)
    given = sessions.flag_of(session.name)
    other = session.held_by
    # Not returned: `_` is to be the result of the job.
    print(  # noqa: T201 - above the panel
        f"attached to session {session.name!r}: {session.world_size} ranks ({session.placement.backend}); "
        f"%%distributed{given} cells run on them"
        if other is None
        else f"watching: {held_by(session.name, other)}"
    )
    try:
        outcome = session.follow(functools.partial(view_of, watched=True))
    except StoppedWatchingError as stopped:
        return f"{stopped} (%distributed interrupt{given} stops it)" if session.owns else str(stopped)
    if outcome is not None:
        show_result(outcome.result, _notebook.shell())
        outcome.unwrap()
    return None


_STRICT = "--strict"


def _save(line: str, _: Namespace) -> str:
    """Save a session's variables to a directory."""
    words = split_words(line)
    others = shlex.join(word for word in words if word != _STRICT)
    names, options = _names_in(others, "save", needed=False)
    usual = LaunchOptions.from_keywords()  # with what `PET_` variables say, which is for fresh ranks
    for each in OPTIONS:
        value, own = getattr(options, each.name), each.name in ("session", "background")
        if not own and value not in (each.default, getattr(usual, each.name)):
            msg = f"{each.flags[0]} is not for %distributed save, which saves all ranks. Leave it out."
            raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    if len(names) != 1:
        msg = f"'%distributed save {line}': save takes one directory. Write %distributed save NAME."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    session = sessions.named(options.session)
    found = saves.save(session, names[0], background=options.background, strict=_STRICT in words)
    more = "\n  it is being written, while cells go on" if options.background else ""
    shown = str(found).replace(found.path, names[0], 1)
    return f"{shown}{more}\n%distributed start --from {names[0]} goes on from here"


def _session_name(line: str, command: str) -> str | None:
    parsed = parse_line(line, positional=True)
    if parsed.rest:
        msg = f"%distributed {command} takes only --session NAME. Leave {parsed.rest[0]!r} out."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    return parsed.options.session


def _session(line: str, command: str) -> LiveSession:
    return sessions.named(_session_name(line, command))


def _restart(line: str, _: Namespace) -> str:
    session = _session(line, "restart")
    session.restart()
    return f"session {session.name!r}: {session.world_size} new ranks, without variables"


def _status(line: str, _: Namespace) -> str:
    wanted = _session_name(line, "status")
    if wanted is None and not sessions.opened():
        return "no session is open; %distributed start -n 2 opens one"
    shown = [sessions.named(wanted)] if wanted is not None else list(sessions.opened().values())
    return "\n".join(str(session.status()) for session in shown)


def _names_in(line: str, command: str, *, needed: bool = True) -> tuple[list[str], LaunchOptions]:
    """Return the names on a line, and its options, which may come before or after them."""
    words = split_words(line)
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    parsed = parse_line(shlex.join(words[len(names) :]), positional=True)
    names += parsed.rest
    if needed and not names:
        msg = f"%distributed {command}: there is no name. Name the variables: %distributed {command} x y."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    return names, parsed.options


def _interrupt(line: str, _: Namespace) -> str:
    session = _session(line, "interrupt")
    running = any(job.ended is None for job in session.jobs)
    session.interrupt()
    return f"session {session.name!r}: {'the running job is interrupted' if running else 'no job runs'}"


def _push(line: str, namespace: Namespace) -> str | None:
    names, options = _names_in(line, "push")
    for name in names:
        if name not in namespace:
            guess = nearest(name, namespace)
            what_to_do = f" Did you mean {guess!r}?" if guess else ""
            msg = f"push: there is no variable {name!r} in the notebook.{what_to_do}"
            raise NblaunchError(msg, kind=FailureKind.NO_SUCH_VARIABLE)
    pushed = {name: namespace[name] for name in names}
    notices = sessions.named(options.session).push(pushed, ranks=options.ranks)
    return "\n".join(f"note: {text}" for text in notices) or None


_NCCL, _ON = "--nccl", "--on"
_ONE_RANK = re.compile(r"(?:^|\s)--rank(?:\s+|=)(\S+)")


def _pull(line: str, namespace: Namespace) -> None:
    """Assign a list of all ranks' values, with `--rank 0` the value of that rank."""
    one = _ONE_RANK.search(line)
    names, options = _names_in(_ONE_RANK.sub(" ", line), "pull")
    session = sessions.named(options.session)
    if one is None:
        namespace.update(session.pull(*names, ranks=options.ranks))
        return
    if not one[1].isdigit() or options.ranks is not None:
        msg = (
            f"'%distributed pull {line.strip()}': --rank takes the number of one rank, without --ranks. "
            "Write --rank 0, or --ranks 0,2 for a list."
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    found = session.pull(*names, ranks=[int(one[1])])
    namespace.update({name: values[0] for name, values in found.items()})


_ENV = "--env"


def _diff(line: str, _: Namespace) -> Difference:
    words = split_words(line)
    env = _ENV in words
    others = " ".join(word for word in words if word != _ENV)
    names, options = _names_in(others, "diff", needed=not env)
    return sessions.named(options.session).diff(*names, env=env, ranks=options.ranks)


def _inspect(line: str, _: Namespace) -> str:
    names, options = _names_in(line, "inspect")
    rank = (options.ranks or (0,))[0]
    return sessions.named(options.session).inspect(names[0], rank=rank)


def _debug(line: str, _: Namespace) -> None:
    words = split_words(line)
    rank = int(words.pop(0)) if words and words[0].isdigit() else None
    _session(" ".join(words), "debug").debug(rank)


def _doctor(line: str, _: Namespace) -> DoctorReport:
    words = split_words(line)
    # Imported here: the checks load modules of the runtime, which the kernel does not need for cells.
    if any(each.startswith(_ON) for each in words):
        from nblaunch.checks.nodes import check_nodes

        return check_nodes(parse_line(line).options)
    if set(words) - {_NCCL}:
        asked = f"%distributed doctor {line}"
        msg = (
            f"{asked!r}: doctor takes only {_NCCL}, or {_ON} with a run's options for nodes. Write "
            "%distributed doctor."
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    from nblaunch.checks.doctor import doctor

    return doctor(nccl=_NCCL in words)


def _events(line: str, _: Namespace) -> str:
    if split_words(line):
        msg = (
            f"'%distributed events {line}': events takes nothing after it, and shows those of the last run. "
            "For another one, look at result.events."
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    log = local().last_events
    return "no run has ended yet" if log is None else events_table(log.all())


COMMANDS: dict[str, Callable[[str, Namespace], object]] = {
    "start": _start,
    "stop": lambda line, _: sessions.stop(_session(line, "stop")),
    "restart": _restart,
    "status": _status,
    "sessions": _sessions,
    "attach": _attach,
    "save": _save,
    "push": _push,
    "pull": _pull,
    "diff": _diff,
    "inspect": _inspect,
    "debug": _debug,
    "stacks": lambda line, _: _session(line, "stacks").stacks(),
    "interrupt": _interrupt,
    "events": _events,
    "auto": lambda line, _: auto.switch(line),
    "run": _run,
    "export": export.export_cells,
    "doctor": _doctor,
}
"""Each command's function, which returns what the line shows."""


def command_completions(text_so_far: str) -> list[str]:
    """Return what the last word of `%distributed ...` can become: a command, then options or session names.

    >>> command_completions("%distributed sto")
    ['stop']
    """
    before, _, word = text_so_far.rpartition(" ")
    match before.split()[1:]:
        case []:
            possible: Iterable[str] = COMMANDS
        case ["run", *_]:
            return _script_completions(text_so_far)
        case [*_, "--session"]:
            possible = sessions.opened()
        case ["attach"]:
            possible = (*directory.detached(), _TAKE)
        case ["pull" | "inspect" | "diff", *_] as words if not word.startswith("-"):
            possible = completion.names_on_ranks(words)
            if words[0] == "diff":
                possible = (*possible, _ENV)
        case ["push", *_] if not word.startswith("-"):
            possible = completion.names_here()
        case ["save", *_] if not word.startswith("-"):
            possible = _files(word)
        case ["doctor", *_]:
            possible = (_NCCL, _ON)
        case ["export", *_]:
            possible = export.FLAGS
        case _:
            return option_completions(text_so_far, values=completion.choices())
    return [each for each in possible if each.startswith(word)]


def command(line: str, namespace: Namespace) -> object:
    """Run the command of a line `%distributed ...`; raises `OptionError` for an unknown one."""
    words = split_words(line)
    chosen = COMMANDS.get(words[0]) if words else None
    if chosen is not None:
        shown = chosen(line.strip()[len(words[0]) :].strip(), namespace)
        return PlainText(shown) if isinstance(shown, str) else shown
    asked = f"%distributed {line}".strip()
    guess = nearest(words[0], COMMANDS) if words else None
    what_to_do = (
        f"There are: {', '.join(COMMANDS)}. To run a cell on ranks, begin it with %%distributed."
        if guess is None
        else f"Did you mean %distributed {guess}?"
    )
    wrong = "there is no such command" if words else "it needs a command"
    msg = f"{asked!r}: {wrong}. {what_to_do}"
    raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
