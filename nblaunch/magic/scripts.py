"""`%distributed run [options] train.py --lr 1e-3`: a script on fresh ranks, as torchrun runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from pathlib import Path
from typing import Any

from nblaunch import _notebook
from nblaunch._errors import OptionError
from nblaunch._results import RunResult
from nblaunch.group import launcher
from nblaunch.group import scripts as session_scripts
from nblaunch.group.background import Handle
from nblaunch.group.launcher import Outcome
from nblaunch.nodes.members import connect_peers
from nblaunch.options.launch import LaunchOptions
from nblaunch.options.line import option_completions, options_help, parse_line
from nblaunch.view.display import watcher

_MACRO = re.compile(r"\$\{(\w+)\}")


def run(line: str, namespace: dict[str, Any]) -> object:
    """Run the script of a line `[options] script [arguments]`; its result is `_` and `--out`."""
    # Before what the line says: of an option given twice the last counts.
    parsed = parse_line(f"--no-init {line}", script=True)
    if parsed.help_wanted:
        print(options_help("%distributed run", script=True))  # noqa: T201 - the user asked for it
        return None
    options = parsed.options
    _check(options)
    if not parsed.rest:
        msg = (
            "%distributed run was given no script. Write %distributed run train.py, "
            "with options before the script and its own arguments behind it."
        )
        raise OptionError(msg)
    script, *args = parsed.rest
    launch = session_scripts.launch(script, args, None, options)
    watch = watcher(launch.title, launch.backend, launch.placement.note)

    def perform(cancelled: threading.Event | None) -> Outcome:
        return launcher.run_fresh(dataclasses.replace(launch, cancelled=cancelled), watch, connect_peers)

    if options.background:
        handle = Handle(perform)
        if options.out is not None:
            namespace[options.out] = handle
        return handle
    finished = perform(None)
    if finished.result is not None:
        hand_over(finished.result, options, _notebook.shell())
    if finished.error is not None:
        raise finished.error
    return None


def _check(options: LaunchOptions) -> None:
    for option in ("session", "ranks"):
        if getattr(options, option) is not None:
            msg = (
                f"--{option} was given to %distributed run, but a script is __main__ of its own process: "
                "it has fresh ranks, also beside an open session. Leave it out."
            )
            raise OptionError(msg)


def hand_over(result: RunResult, options: LaunchOptions, shell: Any) -> None:
    """Make the result `_` and the variable of `--out`, whether the run succeeded or not."""
    if options.out is not None:
        shell.user_ns[options.out] = result
    shell.displayhook.update_user_ns(result)
    # IPython also notes every output among its own variables, where neither `%reset out` nor the limit of its
    # output cache finds it: results would never be let go.
    hidden = shell.user_ns_hidden
    for name in [name for name, value in hidden.items() if isinstance(value, RunResult)]:
        del hidden[name]


def with_macros_kept(line: str) -> str:
    """Return a line in which IPython's `{name}` leaves torchrun's `${local_rank}` to a script.

    >>> with_macros_kept("run train.py ${local_rank}").format()
    'run train.py ${local_rank}'
    """
    return _MACRO.sub(r"${{\1}}", line) if line.split()[:1] == ["run"] else line


def completions(text_so_far: str) -> list[str]:
    """Return what the last word of `%distributed run ...` can become: an option or its value, else a file."""
    before, _, word = text_so_far.rpartition(" ")
    with contextlib.suppress(OptionError):  # raised for an option whose value is to follow
        parsed = parse_line(" ".join(before.split()[2:]), script=True)
        if parsed.rest or not word.startswith("-"):
            return _files(word)
    return option_completions(text_so_far, script=True) or _files(word)


def _files(word: str) -> list[str]:
    """Return the files and directories whose path begins with `word`."""
    directory, _, start = word.rpartition("/")
    there = Path(f"{directory}/" if "/" in word else ".").expanduser()
    try:
        found = sorted(each for each in there.iterdir() if each.name.startswith(start))
    except OSError:
        return []
    before = word[: len(word) - len(start)]
    shown = [each for each in found if start.startswith(".") or not each.name.startswith(".")]
    return [f"{before}{each.name}{os.sep if each.is_dir() else ''}" for each in shown]
