"""What the value of an option may be: one `Kind` for each sort of value.

A kind does not know the name of its option. It raises `ValueError`: without a message where the value
is simply not what it takes, with one ("what is true. What to do.") where there is more to say.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from numbers import Integral, Real
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 1e9
"""Longer waits overflow timers of the operating system; no limit at all is said by leaving the option out."""

_SHOWN_CHARACTERS = 120
_MOST_RANKS = 100_000
_MOST_NODES = 100_000
_LAST_PORT = 65_535
_BOTH_STREAMS = 3
_TRUE_WORDS = ("1", "true", "yes", "on")
_FALSE_WORDS = ("0", "false", "no", "off")
_NAME = r"[a-z][a-z0-9_]*"
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"
_HOST_AND_PORT = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>\d{{1,5}}))?")
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]+")
_STREAMS = re.compile(r"[0-3]|\d{1,6}:[0-3](,\d{1,6}:[0-3])*")
_BACKEND = re.compile(rf"{_NAME}|{_NAME}:{_NAME}(?:,{_NAME}:{_NAME})*")
_AGENT_VARIABLE = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE"
    r"|ROLE_RANK|ROLE_WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_(?!(?:ENABLE_FILE_TIMER|TIMER_FILE)\Z).*",
    re.DOTALL,
)
"""What torchelastic sets in each rank (`LocalElasticAgent._start_workers`); two variables it only reads."""


class Variables(Mapping[str, str]):
    """Environment variables by name; cannot be changed, can be pickled and hashed.

    `repr` leaves the values out: they are often keys and tokens, and a notebook is saved and shared.

    >>> Variables({"HF_TOKEN": "secret"})
    {'HF_TOKEN': '…'}
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        """Keep a copy of `values`."""
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> str:
        """Return the value of one variable."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Go through the names, in the order given."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of variables."""
        return len(self._values)

    def __hash__(self) -> int:
        """Agree with `==`, which ignores the order."""
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        """Show the names only."""
        return repr(dict.fromkeys(self._values, "…"))


def brief(value: object) -> str:
    """Return the `repr` of a value, cut to one short line; never raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  a user's repr, or an int too long to print, must not hide our message
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of value."""

    takes: str
    """Completes the sentence "this option takes ..."."""
    metavar: str
    """Stands for the value in the help text."""
    check: Callable[[object], object]
    """Returns the value in its final form, unchanged when it already has it; raises `ValueError`."""
    parse: Callable[[str], object] = str
    """Turns text into what `check` judges; text that means nothing is returned as it is."""
    texts: Callable[[Any], tuple[str, ...]] = lambda value: (str(value),)
    """Turns a value into texts for `parse`, one for each time the option must be written."""
    shown: Callable[[object], str] = brief
    """Shows a value, or a text, in an error message."""
    words: tuple[str, ...] = ()
    """Values to offer where one is typed; not always all there are."""
    switch: bool = False
    """The option is written without a value."""
    join: Callable[[Any, Any], object] | None = None
    """Adds the value of an option that is given again; None where it replaces the one before."""


def whole_number(least: int, most: int, *words: str, metavar: str = "N") -> Kind:
    """Take an int between two limits, or one of `words`."""

    def check(value: object) -> int | str:
        if isinstance(value, str) and value in words:
            return str(value)
        number = _whole(value)
        if number is None or not least <= number <= most:
            raise ValueError
        return number

    takes = f"a whole number from {least} to {most}"
    if words:
        takes = f"{', '.join([takes, *words[:-1]])} or {words[-1]}"
    return Kind(takes, metavar, check, _read_by(int), words=words)


def seconds(*, or_zero: bool = False) -> Kind:
    """Take a finite number of seconds above 0, or 0 as well; the value is a float."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError  # noqa: TRY004  every refusal is a ValueError, so that OptionError is one
        try:
            number = float(value)
        except OverflowError:
            raise ValueError from None
        if 0 < number <= LONGEST_SECONDS or (number == 0 and or_zero):
            return abs(number)
        raise ValueError

    lower = "from 0" if or_zero else "above 0"
    return Kind(
        f"a number of seconds {lower} (at most {LONGEST_SECONDS:.0f})", "SECONDS", check, _read_by(float)
    )


def switch(*, given: bool) -> Kind:
    """Take a bool; the option written without a value means `given`."""

    def check(value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    def parse(text: str) -> object:
        word = text.strip().lower()
        if word in _TRUE_WORDS:
            return given
        return not given if word in _FALSE_WORDS else text

    def texts(value: object) -> tuple[str, ...]:
        return ("true" if value is given else "false",)

    return Kind("True or False (as text: true, false, 1 or 0)", "", check, parse, texts, switch=True)


def _text(takes: str, metavar: str, accepts: Callable[[str], bool], words: tuple[str, ...] = ()) -> Kind:
    """Take the texts that `accepts` returns True for; it may also raise `ValueError`, with what to do."""

    def check(value: object) -> str:
        if isinstance(value, str) and accepts(value):
            return str(value)
        raise ValueError

    return Kind(takes, metavar, check, words=words)


def choice(*words: str) -> Kind:
    """Take one of some words."""
    return _text(f"{', '.join(words[:-1])} or {words[-1]}", "NAME", words.__contains__, words)


def one_line() -> Kind:
    """Take text that is not empty and has no control characters."""
    return _text(
        "text on one line that is not empty", "NAME", lambda value: value.isprintable() and value != ""
    )


def python_name() -> Kind:
    """Take a name that a Python program can assign to."""
    return _text("a Python name, as in results", "VARIABLE", _is_name)


def backend_name() -> Kind:
    """Take auto, a torch backend's name, or one for each device as `init_process_group` does."""
    words = ("auto", "gloo", "nccl")

    def check(value: object) -> str:
        if not isinstance(value, str) or not _BACKEND.fullmatch(value.lower()):
            raise ValueError
        devices = [part.partition(":")[0] for part in value.lower().split(",")]
        if len(devices) != len(set(devices)):
            message = "it names a device twice. Give one backend for each device."
            raise ValueError(message)
        return value.lower()

    takes = f"{', '.join(words)}, another backend of torch, or one for each device as in cpu:gloo,cuda:nccl"
    return Kind(takes, "NAME", check, words=words)


def node_range() -> Kind:
    """Take a number of nodes, or the least and the most as `1:2`; the value is a str."""

    def check(value: object) -> str:
        number = _whole(value)
        if number is not None and number <= _MOST_NODES:
            value = str(number)
        if not isinstance(value, str) or not re.fullmatch(r"\d{1,6}(:\d{1,6})?", value):
            raise ValueError
        least, most = node_limits(value)
        if not 0 < least <= most <= _MOST_NODES:
            raise ValueError
        return str(least) if least == most else f"{least}:{most}"

    return Kind("a number of nodes, or the least and the most as in 1:2", "N", check)


def node_limits(value: str) -> tuple[int, int]:
    """Return the least and the most nodes that `1:2` or `2` means."""
    least, _, most = value.partition(":")
    return int(least), int(most or least)


def endpoint(*, port: bool) -> Kind:
    """Take the name or address of a host, with `port` also `host:port` (an IPv6 address in brackets)."""

    def accepts(value: str) -> bool:
        if value == "" or (not port and _BARE_IPV6.fullmatch(value)):
            return port or value != ""
        found = _HOST_AND_PORT.fullmatch(value)
        if found is None or (found["port"] is not None and not port):
            return False
        return int(found["port"] or 0) <= _LAST_PORT

    if port:
        return _text("host or host:port (an IPv6 address in brackets)", "HOST:PORT", accepts)
    return _text("the name or the address of a host", "HOST", accepts)


def pairs() -> Kind:
    """Take `key=value,key2=value2`; the value is that text."""

    def accepts(value: str) -> bool:
        keys = [part.partition("=") for part in value.split(",")] if value else []
        return value.isprintable() and all(key.strip() and text.strip() for key, _, text in keys)

    return _text("settings as in join_timeout=60,read_timeout=60", "KEY=VALUE,...", accepts)


def signal_names() -> Kind:
    """Take names of signals, separated by commas; the value is that text."""

    def accepts(value: str) -> bool:
        wrong = [name for name in value.split(",") if name not in signal.Signals.__members__]
        if wrong and value:
            message = f"there is no signal {brief(wrong[0])} here. Write names as in SIGTERM,SIGINT."
            raise ValueError(message)
        return value != ""

    return _text("names of signals as in SIGTERM,SIGINT", "NAMES", accepts)


def streams() -> Kind:
    """Take torchrun's number of streams (0 none, 1 stdout, 2 stderr, 3 both), or one for some local ranks."""

    def check(value: object) -> str:
        number = _whole(value)
        if number is not None and number <= _BOTH_STREAMS:
            value = str(number)
        if not isinstance(value, str) or not _STREAMS.fullmatch(value):
            raise ValueError
        ranks = [part.partition(":")[0] for part in value.split(",")] if ":" in value else []
        if len(ranks) != len(set(ranks)):
            message = "it names a local rank twice. Give each local rank once."
            raise ValueError(message)
        return value

    takes = "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one for some local ranks as in 0:3,1:1"
    return Kind(takes, "STREAMS", check)


def streams_of(value: str, local_rank: int) -> int:
    """Return which streams of a local rank are meant: 0 none, 1 stdout, 2 stderr, 3 both."""
    if ":" not in value:
        return int(value)
    by_rank = dict(part.split(":") for part in value.split(","))
    return int(by_rank.get(str(local_rank), 0))


def rank_list() -> Kind:
    """Take the numbers of some ranks, on a line as `0,2-5`; the value is a tuple, in order, each once."""

    def check(value: object) -> tuple[int, ...]:
        numbers = {_whole(each) for each in _several(value)}
        ranks = tuple(sorted(each for each in numbers if each is not None and each >= 0))
        if not 0 < len(ranks) == len(numbers) <= _MOST_RANKS:
            raise ValueError
        return ranks

    def parse(text: str) -> object:
        if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
            return text
        ends = [part.partition("-") for part in text.split(",")]
        spans = [range(int(first), int(last or first) + 1) for first, _, last in ends]
        if not all(spans) or sum(map(len, spans)) > _MOST_RANKS:
            return text
        return [rank for span in spans for rank in span]

    return Kind("numbers of ranks (on a line as in 0,2-5)", "RANKS", check, parse, _with_commas)


def texts() -> Kind:
    """Take some texts, on a line separated by commas; the value is a tuple."""

    def check(value: object) -> tuple[str, ...]:
        words = _several(value)
        if all(isinstance(word, str) and word and word.isprintable() and "," not in word for word in words):
            return words
        raise ValueError

    def parse(text: str) -> object:
        return text.split(",") if text else ()

    takes = "texts without commas (on a line as in error,warning)"
    return Kind(takes, "TEXT,...", check, parse, _with_commas)


def python_names() -> Kind:
    """Take names that a Python program can have, as one text separated by commas or several; a tuple."""

    def check(value: object) -> tuple[str, ...]:
        names = _several(value.split(",") if isinstance(value, str) else value)
        if all(isinstance(name, str) and _is_name(name) for name in names):
            return tuple(dict.fromkeys(names))
        raise ValueError

    def join(before: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(before + more))

    takes = "Python names (on a line as in model,losses)"
    return Kind(takes, "NAME,...", check, texts=_with_commas, join=join)


def directory() -> Kind:
    """Take a path that is a directory or can become one; `~` is the home directory, as in a shell."""

    def check(value: object) -> str:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str) or not path or not _reaches_the_system(path):
            raise ValueError
        try:
            path = _with_home(path)
            there = _nearest_existing(Path(path))
            usable = there.is_dir()
        except OSError as error:
            message = f"this path cannot be used ({error.strerror}). Give a directory that you can write to."
            raise ValueError(message) from None
        if not usable:
            message = f"{brief(str(there))} is there and is no directory. Give a directory, or a free path."
            raise ValueError(message)
        return path

    return Kind("the path of a directory", "PATH", check)


def script_path() -> Kind:
    """Take the path that a script can be written to; `~` is the home directory, as in a shell."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not value.isprintable() or not _reaches_the_system(value):
            raise ValueError
        if Path(value).suffix != ".py":
            raise ValueError
        return _with_home(value)

    return Kind("the path of a file whose name ends in .py", "FILE", check)


def variables() -> Kind:
    """Take a mapping of names to texts; on a line one `KEY=VALUE` each time."""

    def check(value: object) -> Variables:
        if not isinstance(value, Mapping):
            raise ValueError  # noqa: TRY004  every refusal is a ValueError, so that OptionError is one
        for name, text in value.items():
            _check_variable(name, text)
        return value if isinstance(value, Variables) else Variables(value)

    def parse(text: str) -> object:
        name, equals, value = text.partition("=")
        return {name: value} if equals else text

    def texts(value: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(f"{name}={text}" for name, text in value.items())

    def shown(value: object) -> str:
        if isinstance(value, Mapping):
            return brief(dict.fromkeys(value, "…"))
        if not isinstance(value, str):
            return f"<{type(value).__name__}>"
        name, equals, _ = value.partition("=")
        return brief(f"{name}=…" if equals else value)

    def join(before: Variables, more: Variables) -> Variables:
        return Variables({**before, **more})

    takes = "a mapping of names to texts (on a line: KEY=VALUE, once for each)"
    return Kind(takes, "KEY=VALUE", check, parse, texts, shown, join=join)


def _read_by(convert: Callable[[str], object]) -> Callable[[str], object]:
    """Return what parses a text with `convert`, and returns a text that means nothing as it is."""

    def parse(text: str) -> object:
        try:
            return convert(text)
        except ValueError:
            return text

    return parse


def _with_commas(values: Iterable[object]) -> tuple[str, ...]:
    return (",".join(map(str, values)),)


def _several(value: object) -> tuple[Any, ...]:
    """Return what some values hold. Raises `ValueError` for a text, which is one value."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError  # noqa: TRY004  every refusal is a ValueError, so that OptionError is one
    return tuple(value)


def _whole(value: object) -> int | None:
    """Return a whole number as an int, else None. Python counts True as one; here nproc=True is a slip."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not iskeyword(text)


def _with_home(path: str) -> str:
    """Return a path whose `~` is the home directory."""
    try:
        # Only ~ changes the text, so that checking it again leaves it alone ("./~" stays itself).
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        message = "there is no such user whose home ~ could be. Write the path out."
        raise ValueError(message) from None


def _nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest one above it that exists; raises `OSError`."""
    while True:
        try:
            path.lstat()  # `exists` hides a name that is too long, from Python 3.14 on
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        else:
            return path


def _check_variable(name: object, text: object) -> None:
    """Raise `ValueError` where a rank cannot be given this variable."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\s=\0]+", name) or not _reaches_the_system(name):
        message = f"{brief(name)} cannot name a variable. Give a name that is not empty and has no spaces."
        raise ValueError(message)
    if _AGENT_VARIABLE.fullmatch(name):
        message = (
            f"torchelastic itself sets {brief(name)} in every rank, each its own value, and the ranks would "
            "no longer find each other. Leave it out; the code of a rank reads it from os.environ."
        )
        raise ValueError(message)
    if not isinstance(text, str) or not _reaches_the_system(text):
        message = (
            f"an environment holds text only and the value of {brief(name)} is {_what(text)}. "
            "Give a str without null characters."
        )
        raise ValueError(message)


def _reaches_the_system(text: str) -> bool:
    """Say whether the operating system can be given this text."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _what(text: object) -> str:
    return "a str that it cannot hold" if isinstance(text, str) else f"of type {type(text).__name__}"
