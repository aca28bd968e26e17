"""One row of the option table: its columns, how a value is judged, how it is documented."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch.options.kinds import Kind, brief

Scope = Literal["notebook", "cell", "session", "group", "node", "rendezvous", "engine", "script"]
"""The scope of an option.

* notebook: what a magic does with one cell and its result. `run()` and `Session` have no such keyword.
* cell: one run. In a session a cell may have its own value; the session's holds otherwise.
* session: how long a session is kept. A run has none of these.
* group: the worker group, on all nodes alike, as long as it lives.
* node: the processes of one node. `python -m nblaunch join` takes these and those of the rendezvous.
* rendezvous: how the nodes find each other. torchrun's `--standalone` stands for all of their defaults.
* engine: who places the nodes. A node itself has none of these.
* script: how a script is run. A cell or a function has none of these.
"""
Torchrun = Literal["variable", "flag", "comment", "omitted"]
"""How torchrun has an option.

* variable: a flag, and a `PET_` variable, which is read here as well.
* flag: a flag alone.
* comment: nothing. A comment above the equivalent torchrun command names it.
* omitted: nothing that is missed. The script or the environment has it, or it is of the notebook alone.
"""

TITLES: Mapping[Scope, str] = {
    "notebook": "The cell and its result",
    "cell": "Time limits and output",
    "session": "Sessions that stay",
    "group": "The ranks together",
    "node": "Processes and logs",
    "engine": "Who places nodes",
    "rendezvous": "How nodes meet",
    "script": "Scripts",
}
"""The groups of the help, in its order: what is for more people comes first."""

_EVERY_DAY = "Every day"
_COMPARED_CHARACTERS = 64
_SCREEN = 96
"""Characters of a line of the short help."""
_COLUMN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Everything nblaunch knows about one option."""

    name: str
    """torchrun's name with underscores: the field of `LaunchOptions`, and the keyword."""
    default: object
    kind: Kind
    help: str
    """One line, for `%%distributed?` and the documentation."""
    scope: Scope
    torchrun: Torchrun
    torchrun_default: object
    """torchrun's own default; a test compares it with torchrun."""
    flag: str = ""
    """The spelling on a line, where it is not the name's."""
    more_flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Keywords besides the name."""
    of_placed_nodes: bool = False
    """Whether the program that an engine starts on a node takes it: the notebook tells the node the rest."""
    everyday: int = 0
    """The place among those that a user reads first; 0 for all others."""
    foreign: tuple[str, ...] = ()
    """How others spell it: the program, the spelling, and what the value is here, if not `{}`, its own."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The documented spellings on a line, torchrun's first."""
        return (self.flag or f"--{self.name.replace('_', '-')}", *self.more_flags)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling on a line: torchrun takes `--max-restarts` and `--max_restarts`."""
        underscored = (f"--{flag[2:].replace('-', '_')}" for flag in self.flags if flag.startswith("--"))
        return tuple(dict.fromkeys([*self.flags, *underscored]))

    @property
    def keywords(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def variable(self) -> str | None:
        return f"PET_{self.name.upper()}" if self.torchrun == "variable" else None

    @property
    def per_cell(self) -> bool:
        """Whether each cell of a session may have a value of its own."""
        return self.scope in ("notebook", "cell")

    @property
    def shown_default(self) -> str:
        """The default as a reader of flags takes it: `--no-init` is off unless it is given."""
        if self.default is True and any(flag.startswith("--no-") for flag in self.flags):
            return "off"
        return "none" if self.default in ("", ()) else self.kind.default(self.default)

    def read(self, spelling: str, text: str) -> object:
        """Return the value that `text` means; `spelling` is what the user wrote, or the variable."""
        try:
            return self.kind.check(self.kind.parse(text))
        except ValueError as error:
            refusal = error
        between, hint = "=", ""
        if spelling != self.variable:
            between = " "
            if "$" in text or "{" in text:
                hint = (
                    " IPython fills in $name and {expression} only if every name on the line exists and its "
                    "quotes come in pairs."
                )
        asked = f"{spelling}{between}{_as_typed(self.kind.shown(text))}"
        raise OptionError(self._refused(asked, spelling, refusal) + hint)

    def check(self, keyword: str, value: object) -> object:
        """Return a value given as a keyword in its final form; raises `OptionError`."""
        if type(value) is type(self.default) and value == self.default:
            return value
        try:
            return self.kind.check(value)
        except ValueError as error:
            refusal = error
        raise OptionError(self._refused(f"{keyword}={self.kind.shown(value)}", keyword, refusal))

    def _refused(self, asked: str, spelling: str, refusal: ValueError) -> str:
        what_to_do = (
            "Correct the environment variable, or unset it."
            if spelling == self.variable
            else f"Give such a value, or leave it out (the default is {self.default})."
        )
        reason = str(refusal) or f"it takes {self.kind.takes}. {what_to_do}"
        return f"{asked} was asked for, but {reason}"


def foreign_meaning(word: str, value: str | None, options: Iterable[Option]) -> str:
    """Return what another launcher's option is here, as a sentence; empty if none is known to spell it so.

    `value` is the text that follows. A keyword is understood, too.

    >>> from nblaunch.options.launch import OPTIONS
    >>> foreign_meaning("-np", "4", OPTIONS)
    "That is mpirun's; here it is -n 4."
    >>> foreign_meaning("num_processes=", None, OPTIONS)
    "That is accelerate's; here it is nproc=."
    """
    keyword = word.endswith("=")
    asked = word.rstrip("=").replace("-", "_").lstrip("_") if keyword else word.replace("_", "-")
    for each in options:
        for entry in each.foreign:
            program, spelling, form = (*entry.split(" ", 2), "{}")[:3]
            if keyword and spelling.startswith("--") and spelling[2:].replace("-", "_") == asked:
                return f"That is {program}'s; here it is {each.keywords[-1]}=."
            if not keyword and spelling == asked:
                shown = each.kind.metavar if value is None else _as_typed(each.kind.shown(value))
                short = min(each.flags, key=len)
                return f"That is {program}'s; here it is {short} {form.replace('{}', shown)}".rstrip() + "."
    return ""


def option(
    kind: Kind,
    meaning: str,
    *more_flags: str,
    default: object,
    scope: Scope,
    torchrun: Torchrun,
    **columns: Any,
) -> Any:
    """Return a field of `LaunchOptions` with its row of the table.

    The name of the field gives the flag (`max_restarts`: `--max-restarts`) unless `flag` does, and the
    variable (`PET_MAX_RESTARTS`): torchrun's own rules, so its names cannot be misspelled.
    """
    columns = {"torchrun_default": default, "more_flags": more_flags, **columns}
    row = partial(Option, default=default, kind=kind, help=meaning, scope=scope, torchrun=torchrun, **columns)
    return field(default=default, metadata={"row": row})


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `word` most likely stands for, or None where nothing is near.

    >>> nearest("--time-out", ["--timeout", "--role"])
    '--timeout'
    """
    known = list(candidates)
    typed = word[:_COMPARED_CHARACTERS]
    longer = [candidate for candidate in known if candidate.startswith(typed) and typed.strip("-")]
    if longer:
        return min(longer, key=len)
    return next(iter(difflib.get_close_matches(typed, known, n=1)), None)


def unknown(word: str, meanings: Mapping[str, str], options: Iterable[str], foreign: str = "") -> OptionError:
    """Return the error for a word that is no option, with the nearest that is.

    `meanings` maps all that the word may be a slip of to the right spelling; `options` are those to list
    where nothing is near. `foreign` says what it is if another launcher has it.
    """
    guess = nearest(word, meanings)
    what_to_do = f"There are: {', '.join(options)}." if guess is None else f"Did you mean {meanings[guess]}?"
    what_to_do = foreign or what_to_do
    return OptionError(
        f"{_as_typed(brief(word))} was asked for, but there is no such option. {what_to_do}",
        kind=FailureKind.UNKNOWN_OPTION,
    )


def grouped(options: Iterable[Option]) -> dict[str, list[Option]]:
    everything = list(options)
    daily = sorted((each for each in everything if each.everyday), key=lambda each: each.everyday)
    groups = {_EVERY_DAY: daily}
    for scope, title in TITLES.items():
        groups[title] = [each for each in everything if each.scope == scope and not each.everyday]
    return {title: members for title, members in groups.items() if members}


def plain_help(options: Iterable[Option]) -> str:
    """Return one paragraph for each option, as `torchrun --help` does, in groups."""
    paragraphs = []
    for title, members in grouped(options).items():
        paragraphs.append(f"{title}:")
        for each in members:
            spelled = f"  {', '.join(each.flags)} {each.kind.metavar}".rstrip()
            variable = f" Variable: {each.variable}." if each.variable else ""
            paragraphs.append(f"{spelled}\n      {each.help} Default: {each.shown_default}.{variable}")
    return "\n".join(paragraphs)


def short_help(options: Iterable[Option]) -> str:
    """Return what fits a screen: the options of every day with their meaning, the others by name."""
    lines = []
    for title, members in grouped(options).items():
        if title == _EVERY_DAY:
            lines.append(f"{title}:")
            for each in members:
                spelled = f"  {', '.join(sorted(each.flags, key=len)[:2])} {each.kind.metavar}".rstrip()
                wrapped = textwrap.wrap(each.help, _SCREEN - _COLUMN)
                lines.append(f"{spelled:<{_COLUMN}}{wrapped[0]}".rstrip())
                lines += [" " * _COLUMN + line for line in wrapped[1:]]
            continue
        names = " ".join(each.flags[0] for each in members)
        lines += textwrap.wrap(
            f"{title}: {names}",
            _SCREEN,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(lines)


def _as_typed(shown: str) -> str:
    """Drop the quotes of a `repr` where a line needs none."""
    return shown if " " in shown or "\\" in shown else shown.strip("'") or shown
