"""The line of a magic: from the text after `%%distributed` to options, and what can be completed on it.

IPython fills in values (`-n $ranks`, `-n {len(parts)}`) before it calls a magic.
"""

from __future__ import annotations

import argparse
import functools
import io
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nblaunch._errors import OptionError
from nblaunch.options.kinds import brief
from nblaunch.options.launch import OPTIONS, LaunchOptions, with_variables
from nblaunch.options.table import Option, nearest, plain_help, unknown

HELP_FLAGS = ("-h", "--help")

_MAGIC = re.compile(r"\s*%%?\w+\s")


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What the line of a magic asks for."""

    options: LaunchOptions
    rest: tuple[str, ...] = ()
    """The words from the first one on that is no option."""
    help_wanted: bool = False
    """`-h` or `--help` was given; then `options` are the defaults."""


def parse_line(line: str, *, positional: bool = False, script: bool = False) -> ParsedLine:
    """Return what a line such as `-n 2 --timeout 60  # a comment` asks for.

    Words that are no options are allowed with `positional` and with `script` only. The first one ends the
    options, as with torchrun: `-n 2 train.py --lr 0.1` leaves `train.py --lr 0.1`. With `script` there are
    also the options that only a script has. Of an option given twice the last counts; `--env` and `--pull`
    add up. Raises `OptionError` for everything that is wrong with the line; never prints, never exits.

    >>> parse_line("-n 2 --log-dir runs").options.to_line()
    '--nproc-per-node=2 --log-dir=runs'
    """
    parser = _parser(script=script)
    words = split_words(line)
    given, strange, rest = parser.take_apart(words)
    for spelling, text in given:
        if spelling in HELP_FLAGS and text == "true":
            return ParsedLine(LaunchOptions(), help_wanted=True)
        parser.check_spelling(spelling, text, words)
    if strange:
        raise parser.unknown(strange[0])
    if rest and not (positional or script):
        raise parser.out_of_place(rest[0])
    values: dict[str, object] = {}
    for spelling, text in given:
        option = parser.flags[spelling]
        value = option.read(spelling, text or "")
        if option.kind.join is not None and option.name in values:
            value = option.kind.join(values[option.name], value)
        values[option.name] = value
    return ParsedLine(with_variables(values, script=script), tuple(rest))


def split_words(line: str) -> list[str]:
    """Split as a POSIX shell does; a `#` where a word would begin starts a comment.

    >>> split_words("-n 2 --log-dir 'my runs#1'  # a test")
    ['-n', '2', '--log-dir', 'my runs#1']
    """
    stream = io.StringIO(line)
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split = True
    # shlex would let a comment begin inside a word as well, and cut `--log-dir run#1`.
    lexer.commenters = ""
    words: list[str] = []
    try:
        while not line[stream.tell() :].lstrip(lexer.whitespace).startswith("#"):
            word = lexer.get_token()
            if word is None:
                break
            words.append(word)
    except ValueError as error:
        # Without the line itself: it may hold a key that `--env` was given.
        message = (
            f"The options cannot be split into words: {str(error).lower()}. Close each quote; to mean a "
            "quote or a backslash itself, put a backslash before it."
        )
        raise OptionError(message) from None
    return words


class _Collect(argparse.Action):
    """Keeps an option as it is spelled, and its text; what that means is decided once the line is known."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse calls it with all four
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep one option."""
        namespace.given.append((option_string, values))


class _Parser(argparse.ArgumentParser):
    """argparse with our error texts, which name the spelling that was used.

    One action collects all options, each with its text or none (`nargs="?"`): argparse's own error for a
    missing value names every spelling.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        super().__init__("nblaunch", add_help=False, allow_abbrev=False)
        self.flags = {spelling: option for option in options for spelling in option.spellings}
        self.switches = {flag for flag, option in self.flags.items() if option.kind.switch} | {*HELP_FLAGS}
        self.add_argument(*self.flags, *HELP_FLAGS, dest="given", action=_Collect, nargs="?")
        self.add_argument("rest", nargs=argparse.REMAINDER)

    def error(self, message: str) -> NoReturn:
        """Raise in place of printing and exiting."""
        raise OptionError(message)

    def take_apart(
        self, words: Sequence[str]
    ) -> tuple[list[tuple[str, str | None]], list[str], Sequence[str]]:
        """Return the options as they are spelled, each with its text; those that there are not; the rest."""
        # A switch takes a value after `=` only: `--standalone train.py` is a switch and a script.
        marked = [f"{word}=true" if word in self.switches else word for word in words]
        found, strange = self.parse_known_args(marked, argparse.Namespace(given=[]))
        rest = words[len(words) - len(found.rest) :]
        if rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
            strange = [*strange, rest[0]]  # argparse takes `-1` and `-a b` for values
        # Before Python 3.13 argparse drops a `--` even where it is the value: `--role=--`.
        given = [
            (spelling, "--" if text is None and f"{spelling}=--" in words else text)
            for spelling, text in found.given
        ]
        return given, strange, rest[1:] if rest[:1] == ["--"] else rest

    def check_spelling(self, spelling: str, text: str | None, words: Sequence[str]) -> None:
        """Raise `OptionError` for an option that lacks its value, and for `-np 4`."""
        option = self.flags.get(spelling)
        if option is None:
            raise self.unknown(spelling + (text or ""))
        if text is None:
            after = (words[place + 1 : place + 2] for place, word in enumerate(words) if word == spelling)
            following = next((each for each in after if each and each[0].startswith("-")), [])
            found = f"{brief(following[0])} follows" if following else "the line ends there"
            message = (
                f"{spelling} was asked for, but it needs a value and {found}. "
                f"Write {spelling} {option.kind.metavar}: {option.kind.takes}; "
                f"a value that begins with - is written {spelling}=-value."
            )
            raise OptionError(message)
        # `-np 4` is mpirun's; read as -n with the value "p" it would be hard to understand.
        attached = not spelling.startswith("--") and spelling + text in words
        if attached and text[:1].isalpha() and text not in option.kind.words:
            raise self.unknown(spelling + text)

    def unknown(self, word: str) -> OptionError:
        """Return the error for an option that there is not."""
        spelling = word.partition("=")[0]
        flags = dict.fromkeys(each.flags[0] for each in self.flags.values())
        return unknown(spelling, self._meanings(spelling), flags)

    def out_of_place(self, word: str) -> OptionError:
        """Return the error for a word that is no option."""
        meanings = self._meanings(word)
        guess = nearest(f"--{word.partition('=')[0]}", meanings)
        if word.isdecimal() and "-n" in self.flags:
            what_to_do = f"Did you mean -n {word}?"
        elif guess is not None:
            what_to_do = f"Did you mean {meanings[guess]}?"
        else:
            what_to_do = "Leave it out, or write the option that it is the value of before it."
        return OptionError(f"{brief(word)} was given, but only options can stand here. {what_to_do}")

    def _meanings(self, word: str) -> Mapping[str, str]:
        """Map what `word` may be a slip of to the right spelling; a keyword stands for its flag."""
        keywords = {
            f"--{keyword}": each.flags[0] for each in self.flags.values() for keyword in each.keywords
        }
        # Underscores are suggested only to those who write them.
        return keywords | {flag: flag for flag in self.flags if "_" in word or "_" not in flag}


@functools.cache
def _parser(*, script: bool) -> _Parser:
    return _Parser(_options(script=script))


def _options(*, script: bool) -> list[Option]:
    return [option for option in OPTIONS if script or option.scope != "script"]


def options_help(prog: str, *, script: bool = False) -> str:
    """Return the help text of a magic; `prog` is how it is written, such as `%%distributed`."""
    what = "[options] script [arguments]" if script else "[options]"
    return (
        f"{prog} {what}\n\n{plain_help(_options(script=script))}\n  -h, --help\n      Show this text.\n\n"
        "Each option can be written with underscores too: --max_restarts. Of an option given twice the last\n"
        "counts; --env and --pull add up. An option on the line beats its environment variable."
    )


def option_completions(text_so_far: str, *, script: bool = False) -> list[str]:
    """Return what the last word of a line can become: options, or the choices of the one before it.

    The text ends at the cursor, with or without `%%distributed`. After `--backend=` the choices come alone,
    because IPython replaces only what follows the `=`. With `script` there are also the options of a script.

    >>> option_completions("%%distributed -n 2 --ti")
    ['--timeout']
    >>> option_completions("--backend n")
    ['nccl']
    """
    if "\n" in text_so_far:
        return []
    *before, word = re.split(r"\s+", _MAGIC.sub("", text_so_far, count=1))
    if any(each.startswith("#") for each in (*before, word)):
        return []
    spelling, equals, value = word.partition("=")
    if not equals and before:
        spelling, value = before[-1], word
    options = _options(script=script)
    option = next((each for each in options if spelling in each.spellings), None)
    if option is not None and not option.kind.switch:
        return [choice for choice in option.kind.words if choice.startswith(value)]
    return [] if equals else _options_from(word, options)


def _options_from(word: str, options: Iterable[Option]) -> list[str]:
    """Return the options that begin with `word`; those with underscores only once one was typed."""
    if not word:
        return [option.flags[0] for option in options]
    flags = [flag for option in options for flag in (option.spellings if "_" in word else option.flags)]
    return [flag for flag in (*flags, *HELP_FLAGS) if flag.startswith(word)]
