"""Command lines: that of a magic, from its text to options; that of torchrun, from options to its text.

IPython fills in values (`-n $ranks`, `-n {len(parts)}`) before it calls a magic.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch.options.kinds import brief
from nblaunch.options.launch import OPTIONS, LaunchOptions, with_variables
from nblaunch.options.table import Option, foreign_meaning, nearest, plain_help, short_help, unknown

HELP_FLAGS = ("-h", "--help")

_UNKNOWN = "--?"
"""Collects unknown options, so that the first mistake on a line is the one that is named."""
_TEXT = "\0"
"""Before a word that argparse must not take for an option; no shell's word has it."""
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""Words that argparse reads as a value."""
_ATTACHED = re.compile(r"(-[A-Za-z]+)(\d+)")
_MAGIC = re.compile(r"\s*%%?\w+\s")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """The parsed line of a magic."""

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
    given, rest = parser.take_apart(words)
    for spelling, text in given:
        if spelling in HELP_FLAGS:
            return ParsedLine(LaunchOptions(), help_wanted=True)
        if text is None:
            raise parser.without_value(spelling, words)
        if spelling == _UNKNOWN:
            raise parser.unknown(text, words)
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
        raise OptionError(message, kind=FailureKind.UNKNOWN_OPTION) from None
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
        self.add_argument(*self.flags, *HELP_FLAGS, _UNKNOWN, dest="given", action=_Collect, nargs="?")
        self.add_argument("rest", nargs=argparse.REMAINDER)

    def error(self, message: str) -> NoReturn:
        raise OptionError(message, kind=FailureKind.UNKNOWN_OPTION)

    def take_apart(self, words: Sequence[str]) -> tuple[list[tuple[str, str | None]], Sequence[str]]:
        """Return the options as they are spelled, each with its text, and the rest."""
        pairs = itertools.pairwise(["", *words])
        marked = [
            f"{_TEXT}{word}" if self._takes(before, word) else self._marked(word) for before, word in pairs
        ]
        found = self.parse_args(marked, argparse.Namespace(given=[]))
        # Before Python 3.13 argparse drops a `--` even where it is the value: `--role=--`.
        given = [
            (
                spelling,
                "--" if text is None and f"{spelling}=--" in words else text and text.removeprefix(_TEXT),
            )
            for spelling, text in found.given
        ]
        rest = words[len(words) - len(found.rest) :]
        if rest and _NEGATIVE_NUMBER.fullmatch(rest[0]):
            given.append((_UNKNOWN, rest[0]))
        return given, rest[1:] if rest[:1] == ["--"] else rest

    def _takes(self, before: str, word: str) -> bool:
        """Whether a word with a dash is the value of the option before it: `--slurm "-p gpu"`."""
        option = self.flags.get(before)
        dashed = option is not None and option.kind.dashed and word.startswith("-")
        return dashed and word.partition("=")[0] not in {*self.flags, *HELP_FLAGS, "--"}

    def _marked(self, word: str) -> str:
        """Return a word as argparse is to read it, which goes by its looks."""
        if word in self.switches:
            return f"{word}=true"  # or argparse would take the script of `--standalone train.py` for a value
        if not word.startswith("-") or word in ("-", "--") or _NEGATIVE_NUMBER.fullmatch(word):
            return word
        short, attached = self.flags.get(word[:2]), word[2:]
        # `-np 4` is mpirun's; read as -n with the value "p" it would be hard to understand.
        if short is not None and (not attached[:1].isalpha() or attached in short.kind.words):
            return word
        return word if word.partition("=")[0] in self.flags else f"{_UNKNOWN}={word}"

    def without_value(self, spelling: str, words: Sequence[str]) -> OptionError:
        takes = self.flags[spelling].kind
        after = (following for word, following in itertools.pairwise([*words, ""]) if word == spelling)
        option = next((each for each in after if each.startswith("-")), None)
        found = "the line ends there" if option is None else f"{brief(option)} follows"
        return OptionError(
            f"{spelling} was asked for, but it needs a value and {found}. Write {spelling} {takes.metavar}: "
            f"{takes.takes}; a value that begins with - is written {spelling}=-value."
        )

    def unknown(self, word: str, words: Sequence[str]) -> OptionError:
        spelling, equals, value = word.partition("=")
        options = list(dict.fromkeys(self.flags.values()))
        if not equals:
            after = (following for each, following in itertools.pairwise([*words, ""]) if each == word)
            value = next(after, "")
        given = value if value and not value.startswith("-") else None
        foreign = foreign_meaning(spelling, given, options)
        attached = _ATTACHED.fullmatch(spelling)
        if not foreign and attached is not None:  # mpirun's -np4
            foreign = foreign_meaning(attached[1], attached[2], options)
        return unknown(spelling, self._meanings(spelling), [each.flags[0] for each in options], foreign)

    def out_of_place(self, word: str) -> OptionError:
        meanings = self._meanings(word)
        guess = nearest(f"--{word.partition('=')[0]}", meanings)
        what_to_do = "Leave it out, or write the option that it is the value of before it."
        if word.isdecimal() and "-n" in self.flags:
            what_to_do = f"Did you mean -n {word}?"
        elif guess is not None:
            what_to_do = f"Did you mean {meanings[guess]}?"
        return OptionError(
            f"{brief(word)} was given, but only options can stand here. {what_to_do}",
            kind=FailureKind.UNKNOWN_OPTION,
        )

    def _meanings(self, word: str) -> Mapping[str, str]:
        """Map the spellings that `word` may be a slip of to the right one; a keyword stands for its flag."""
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


def options_on_a_screen(prog: str) -> str:
    return (
        f"{prog} [options]\n\nRuns the cell on N torch ranks: those of the open session, else fresh ones.\n\n"
        f"{short_help(_options(script=False))}\n\n{prog} --help explains all of them."
    )


def option_completions(
    text_so_far: str, *, script: bool = False, values: Mapping[str, Iterable[str]] | None = None
) -> list[str]:
    """Return what the last word of a line can become: options, or the choices of the one before it.

    The text ends at the cursor, with or without `%%distributed`. After `--backend=` the choices come alone,
    because IPython replaces only what follows the `=`. With `script` there are also the options of a script.
    `values` has more choices, of options by name: what only the caller knows, such as the open sessions.

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
    if before and not (equals and word.startswith("-")):
        spelling, equals, value = before[-1], "", word
    options = _options(script=script)
    option = next((each for each in options if spelling in each.spellings), None)
    if option is not None and not option.kind.switch:
        return _choices_from(value, [*option.kind.words, *(values or {}).get(option.name, ())])
    return [] if equals else _options_from(word, options)


def _choices_from(value: str, choices: Iterable[str]) -> list[str]:
    """Return what the end of `value` can become: IPython replaces what follows the last `=` or comma.

    >>> _choices_from("ssh=a,", ["slurm", "ssh=", "ssh=a", "ssh=b"])
    ['b']
    """
    stem = value[: value.find("=") + 1]
    *others, begun = value[len(stem) :].split(",")
    found = [each[len(stem) :] for each in dict.fromkeys(choices) if each.startswith(stem + begun)]
    return [each for each in found if each and each not in others]


def _options_from(word: str, options: Iterable[Option]) -> list[str]:
    """Return the options that begin with `word`; those with underscores only once one was typed."""
    if not word:
        return [option.flags[0] for option in options]
    flags = [flag for option in options for flag in (option.spellings if "_" in word else option.flags)]
    return [flag for flag in (*flags, *HELP_FLAGS) if flag.startswith(word)]


def torchrun_command(options: LaunchOptions, script: str, nproc: int | str | None = None) -> str:
    """Return the torchrun command that starts `script` as `%%distributed` started a cell.

    `nproc` is how many ranks there were, where the options leave it open. Options that torchrun does not have
    stand in comment lines above it. A variable that looks like a secret is written as the shell's own:
    `HF_TOKEN="$HF_TOKEN"`.

    >>> print(torchrun_command(LaunchOptions(nproc_per_node=2, max_restarts=3, timeout=60), "train.py"))
    # torchrun has no --timeout (60.0)
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py
    """
    values = {each.name: getattr(options, each.name) for each in OPTIONS}
    chosen = [each for each in OPTIONS if values[each.name] not in (each.default, each.torchrun_default)]
    missing = [
        f"# torchrun has no {each.flags[0]} ({', '.join(each.kind.texts(values[each.name]))})"
        for each in chosen
        if each.torchrun == "comment"
    ]
    words = [
        f'{name}="${name}"' if _SECRET.search(name) else f"{name}={shlex.quote(text)}"
        for name, text in options.env.items()
    ]
    nodes = _nodes_placed(options)
    joined = nodes > 1 or any(each.scope == "rendezvous" for each in chosen)
    alone = options.standalone and not joined
    if joined and options.on is not None:
        missing.append(
            "# on each of the nodes, with one of them as their rendezvous: --rdzv-endpoint HOST:PORT"
        )
    # Of nodes that an engine places it is not known how many ranks each has.
    nproc = nproc if options.on is None else None
    known = options.nproc_per_node if options.nproc_per_node != "auto" else nproc or "auto"
    words += ["torchrun", *["--standalone"] * alone, "--nproc-per-node", str(known)]
    words += ["--nnodes", str(nodes)] if nodes > 1 else []
    for each in OPTIONS:
        value, flag = values[each.name], each.flags[0]
        joined_elsewhere = each.name == "rdzv_backend" and not alone and value != "static"
        if each.torchrun not in ("variable", "flag") or each.name in ("nproc_per_node", "standalone"):
            continue
        if each.kind.switch and each in chosen:
            words.append(flag)
        elif each in chosen or joined_elsewhere:
            for text in each.kind.texts(value):
                quoted = shlex.quote(text)
                words += [f"{flag}={quoted}"] if text.startswith("-") else [flag, quoted]
    return "\n".join([*missing, " ".join([*words, shlex.quote(script)])])


def _nodes_placed(options: LaunchOptions) -> int:
    """Return how many nodes an engine places where `--nnodes` does not say it, else 0."""
    if options.on is None or options.nodes != (1, 1):
        return 0
    name, _, hosts = options.on.partition("=")
    return (len(hosts.split(",")) if name == "ssh" else 1) + options.here
