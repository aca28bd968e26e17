"""One row of the option table: its spellings, how a value is judged, how it is documented."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from nblaunch._errors import OptionError
from nblaunch.options.kinds import Kind, brief

Door = Literal["magic", "run", "script"]
"""Where an option can be given: on the line of a magic, as a keyword of `run()` and `Session`, or, by either,
for a script alone."""

_COMPARED_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Everything nblaunch knows about one option."""

    name: str
    """torchrun's name with underscores: the field of `LaunchOptions`, and the keyword."""
    flags: tuple[str, ...]
    """Spellings on a line, torchrun's first; `spellings` adds those with underscores."""
    kind: Kind
    help: str
    """One line, for the README, `%%distributed?` and the docs."""
    default: object
    variable: str | None
    """The `PET_` variable that gives the value where nothing explicit does."""
    aliases: tuple[str, ...]
    """Keywords besides the name."""
    doors: tuple[Door, ...]

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
    def shown_default(self) -> str:
        """The default as a reader of flags takes it: `--no-init` is off unless it is given."""
        if self.default is True and any(flag.startswith("--no-") for flag in self.flags):
            return "off"
        return "none" if self.default in ("", ()) else str(self.default)

    def read(self, spelling: str, text: str) -> object:
        """Return the value that `text` means; `spelling` is what the user wrote, or the variable."""
        try:
            return self.kind.check(self.kind.parse(text))
        except ValueError as refusal:
            reason = str(refusal) or self._way_out(spelling)
        between = "=" if spelling == self.variable else " "
        message = f"{spelling}{between}{_as_typed(self.kind.shown(text))} was asked for, but {reason}"
        if spelling != self.variable and ("$" in text or "{" in text):
            message += (
                " IPython fills in $name and {expression} only if every name on the line exists and its "
                "quotes come in pairs."
            )
        raise OptionError(message)

    def check(self, keyword: str, value: object) -> object:
        """Return a value given as a keyword in its final form; raises `OptionError`."""
        if value is None and self.default is None:
            return None
        try:
            return self.kind.check(value)
        except ValueError as refusal:
            reason = str(refusal) or self._way_out(keyword)
        message = f"{keyword}={self.kind.shown(value)} was asked for, but {reason}"
        raise OptionError(message)

    def _way_out(self, spelling: str) -> str:
        what_to_do = (
            "Correct the environment variable, or unset it."
            if spelling == self.variable
            else f"Give such a value, or leave it out (the default is {self.default})."
        )
        return f"it takes {self.kind.takes}. {what_to_do}"


def row(  # noqa: PLR0913  one parameter for each column of the table
    kind: Kind,
    meaning: str,
    *more_flags: str,
    flag: str | None = None,
    pet: bool = False,
    aliases: tuple[str, ...] = (),
    doors: tuple[Door, ...] = ("magic", "run"),
) -> Mapping[str, Callable[[str, object], Option]]:
    """Return the metadata of an option's field.

    The name of the field gives the flag (`max_restarts`: `--max-restarts`) unless `flag` does, and with
    `pet` the variable (`PET_MAX_RESTARTS`): torchrun's own rules, so its names cannot be misspelled.
    """

    def named(name: str, default: object) -> Option:
        return Option(
            name=name,
            flags=(flag or f"--{name.replace('_', '-')}", *more_flags),
            kind=kind,
            help=meaning,
            default=default,
            variable=f"PET_{name.upper()}" if pet else None,
            aliases=aliases,
            doors=doors,
        )

    return {"option": named}


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
    for option in options:
        flags = option.flags if option.doors != ("run",) else ()
        keywords = [f"{keyword}=" for keyword in option.keywords] if option.doors != ("magic",) else []
        variables = [option.variable] if option.variable else []
        cells = [*map(_as_code, (flags, keywords, variables, [option.shown_default])), option.help]
        rows.append(" | ".join(["", *(cell.replace("|", "\\|") for cell in cells), ""]).strip())
    return "\n".join(rows)


def plain_help(options: Iterable[Option]) -> str:
    """Return one paragraph for each option, as `torchrun --help` does."""
    paragraphs = []
    for option in options:
        spelled = f"  {', '.join(option.flags)} {option.kind.metavar}".rstrip()
        variable = f" Variable: {option.variable}." if option.variable else ""
        paragraphs.append(f"{spelled}\n      {option.help} Default: {option.shown_default}.{variable}")
    return "\n".join(paragraphs)


def _as_code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _as_typed(shown: str) -> str:
    """Leave the quotes of a `repr` away where nobody would have typed them."""
    return shown if " " in shown or "\\" in shown else shown.strip("'") or shown
