"""From the text after `%%distributed` to the options it names; their values are judged elsewhere.

Written by hand because `argparse` prints, exits, and cannot say which spelling was used.
"""

from __future__ import annotations

import io
import re
import shlex
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nblaunch._errors import OptionError
from nblaunch.options.kinds import brief
from nblaunch.options.table import Option, nearest, unknown

HELP_FLAGS = ("-h", "--help")

_NEGATIVE_NUMBER = re.compile(r"-\.?[0-9]")


@dataclass(frozen=True, slots=True)
class Given:
    """An option as it stands on the line, such as `--time_out 3`."""

    option: Option
    spelling: str
    text: str
    """The value; "true" where a switch stands without one."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a line holds."""

    given: tuple[Given, ...]
    rest: tuple[str, ...] = ()
    help_wanted: bool = False

    def values(self) -> dict[str, object]:
        """Return each option's value by name, the last one given; raises `OptionError`."""
        values: dict[str, object] = {}
        for given in self.given:
            name, value = given.option.name, given.option.read(given.spelling, given.text)
            before = values.get(name)
            if given.option.kind.repeatable and isinstance(before, Mapping) and isinstance(value, Mapping):
                value = {**before, **value}
            elif given.option.kind.repeatable and isinstance(before, tuple) and isinstance(value, tuple):
                value = tuple(dict.fromkeys(before + value))
            values[name] = value
        return values


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


def scan(line: str, options: Iterable[Option], *, positional: bool) -> Scanned:
    """Return the options on a line in the order given, and with `positional` what follows them.

    As with torchrun the first word that is no option ends the options, so that
    `-n 2 train.py --lr 0.1` leaves `train.py --lr 0.1`.
    """
    flags = {spelling: option for option in options for spelling in option.spellings}
    words = deque(split_words(line))
    given: list[Given] = []
    while words:
        word = words.popleft()
        if word in HELP_FLAGS:
            return Scanned(tuple(given), help_wanted=True)
        if not word.startswith("-") or word in ("-", "--"):
            rest = tuple(words) if word == "--" else (word, *words)
            if rest and not positional:
                raise _out_of_place(rest[0], flags)
            return Scanned(tuple(given), rest)
        spelling, text = _spelling_and_text(word, flags)
        if spelling not in flags:
            raise unknown(
                spelling, _meanings(flags, spelling), dict.fromkeys(each.flags[0] for each in flags.values())
            )
        option = flags[spelling]
        if text is None:
            text = "true" if option.kind.switch else _value_after(spelling, option, words)
        given.append(Given(option, spelling, text))
    return Scanned(tuple(given))


def _spelling_and_text(word: str, flags: Mapping[str, Option]) -> tuple[str, str | None]:
    """Take `--opt`, `--opt=value`, `-o` and `-ovalue` apart."""
    if word in flags:
        return word, None
    spelling, equals, text = word.partition("=")
    if equals:
        return spelling, text
    short, attached = word[:2], word[2:]
    # `-np 4` is mpirun's; read as -n with the value "p" it would be hard to understand.
    if short in flags and (not attached[:1].isalpha() or attached in flags[short].kind.words):
        return short, attached
    return word, None


def _value_after(spelling: str, option: Option, words: deque[str]) -> str:
    if not words or (words[0].startswith("-") and not _NEGATIVE_NUMBER.match(words[0])):
        found = f"{brief(words[0])} follows" if words else "the line ends there"
        message = (
            f"{spelling} was asked for, but it needs a value and {found}. "
            f"Write {spelling} {option.kind.metavar}: {option.kind.takes}; "
            f"a value that begins with - is written {spelling}=-value."
        )
        raise OptionError(message)
    return words.popleft()


def _out_of_place(word: str, flags: Mapping[str, Option]) -> OptionError:
    meanings = _meanings(flags, word)
    guess = nearest(f"--{word.partition('=')[0]}", meanings)
    if word.isdecimal() and "-n" in flags:
        what_to_do = f"Did you mean -n {word}?"
    elif guess is not None:
        what_to_do = f"Did you mean {meanings[guess]}?"
    else:
        what_to_do = "Leave it out, or write the option that it is the value of before it."
    return OptionError(f"{brief(word)} was given, but only options can stand here. {what_to_do}")


def _meanings(flags: Mapping[str, Option], word: str) -> dict[str, str]:
    """Map what `word` may be a slip of to the right spelling: flags to themselves, keywords to their flag."""
    keywords = {f"--{keyword}": option.flags[0] for option in flags.values() for keyword in option.keywords}
    # Underscores are suggested only to those who write them.
    return keywords | {spelling: spelling for spelling in flags if "_" in word or "_" not in spelling}
