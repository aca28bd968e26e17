"""One row of the option table: its columns, how a value is judged, how it is documented."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from nblaunch._errors import OptionError
from nblaunch.options.kinds import Kind, brief

Scope = Literal["notebook", "cell", "session", "group", "node", "rendezvous", "engine", "script"]
"""What an option belongs to.

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
"""What torchrun has of an option.

* variable: a flag, and a `PET_` variable, which is read here as well.
* flag: a flag alone.
* comment: nothing. A comment above the equivalent torchrun command names it.
* omitted: nothing that is missed. The script or the environment has it, or it is of the notebook alone.
"""

_COMPARED_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Everything nblaunch knows about one option."""

    name: str
    """torchrun's name with underscores: the field of `LaunchOptions`, and the keyword."""
    default: object
    kind: Kind
    help: str
    """One line, for the README, `%%distributed?` and the docs."""
    scope: Scope
    torchrun: Torchrun
    torchrun_default: object
    """torchrun's own default; a test compares it with torchrun."""
    flag: str = ""
    """The spelling on a line, where it is not the name's."""
    more_flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Keywords besides the name."""

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
        """Every keyword, the name first."""
        return (self.name, *self.aliases)

    @property
    def variable(self) -> str | None:
        """The `PET_` variable that gives the value where nothing explicit does."""
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
        if value is None and self.default is None:
            return None
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


def unknown(word: str, meanings: Mapping[str, str], options: Iterable[str]) -> OptionError:
    """Return the error for a word that is no option, with the nearest that is.

    `meanings` maps all that the word may be a slip of to the right spelling; `options` are those to list
    where nothing is near.
    """
    guess = nearest(word, meanings)
    what_to_do = f"There are: {', '.join(options)}." if guess is None else f"Did you mean {meanings[guess]}?"
    return OptionError(f"{_as_typed(brief(word))} was asked for, but there is no such option. {what_to_do}")


def markdown_table(options: Iterable[Option]) -> str:
    """Return the table of the README: one row for each option."""
    rows = ["| Option | Keyword | Variable | Default | Meaning |", "|---|---|---|---|---|"]
    for each in options:
        keywords = [f"{keyword}=" for keyword in each.keywords] if each.scope != "notebook" else []
        variables = [each.variable] if each.variable else []
        cells = [*map(_as_code, (each.flags, keywords, variables, [each.shown_default])), each.help]
        rows.append(" | ".join(["", *(cell.replace("|", "\\|") for cell in cells), ""]).strip())
    return "\n".join(rows)


def plain_help(options: Iterable[Option]) -> str:
    """Return one paragraph for each option, as `torchrun --help` does."""
    paragraphs = []
    for each in options:
        spelled = f"  {', '.join(each.flags)} {each.kind.metavar}".rstrip()
        variable = f" Variable: {each.variable}." if each.variable else ""
        paragraphs.append(f"{spelled}\n      {each.help} Default: {each.shown_default}.{variable}")
    return "\n".join(paragraphs)


def _as_code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _as_typed(shown: str) -> str:
    """Drop the quotes of a `repr` where a line needs none."""
    return shown if " " in shown or "\\" in shown else shown.strip("'") or shown
