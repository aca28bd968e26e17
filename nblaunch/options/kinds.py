"""The kinds of option values: one `Kind` for each.

A kind does not know the name of its option. It raises `ValueError`: without a message where the value
is simply not what it takes, with one ("what is true. What to do.") where there is more to explain.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from numbers import Integral, Real
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 1e9
"""Longer waits overflow timers of the operating system; to have no limit, leave the option out."""
LARGEST = 2**31 - 1
LAST_PORT = 65_535

_SHOWN_CHARACTERS = 120
_MOST_RANKS = 100_000
_MOST_NODES = 100_000
_BOTH_STREAMS = 3
_BACKENDS = ("auto", "gloo", "nccl")
_TRUTH = {"1": True, "true": True, "yes": True, "on": True}
_TRUTH |= {"0": False, "false": False, "no": False, "off": False}
_NAME = r"[a-z][a-z0-9_]*"
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"
_ENGINES = ("process", "join", "ssh=", "slurm", "ray")
_SSH_HOST = re.compile(r"(?:\w[\w.-]*@)?(?P<place>[^@]+)")
_STREAMS = re.compile(r"[0-3]|\d{1,6}:[0-3](,\d{1,6}:[0-3])*")
# With a dash: torch 2.15 has nccl-legacy and nccl-lazy.
_OF_TORCH = r"[a-z][a-z0-9_-]*"
_BACKEND = re.compile(rf"{_OF_TORCH}|{_NAME}:{_OF_TORCH}(?:,{_NAME}:{_OF_TORCH})*")
_AGENT_VARIABLE = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE"
    r"|ROLE_RANK|ROLE_WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_(?!(?:ENABLE_FILE_TIMER|TIMER_FILE)\Z).*",
    re.DOTALL,
)
"""Variables of `LocalElasticAgent._start_workers` in each rank; two variables torchelastic only reads."""


class EnvironmentVariables(Mapping[str, str]):
    """Environment variables by name; cannot be changed, can be pickled and hashed.

    `repr` leaves the values out: they are often keys and tokens, and a notebook is saved and shared.

    >>> EnvironmentVariables({"HF_TOKEN": "secret"})
    {'HF_TOKEN': '…'}
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
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
    dashed: bool = False
    """A word behind the option is its value even if it begins with a dash, unless it is an option of ours."""
    default: Callable[[Any], str] = str
    """Shows a default to the reader of a table."""
    join: Callable[[Any, Any], object] | None = None
    """Adds the value of an option that is given again; None where it replaces the one before."""


def _kind(takes: str, metavar: str, **columns: Any) -> Callable[[Callable[[object], object]], Kind]:
    """Make the check of a value a kind."""
    return lambda check: Kind(takes, metavar, check, **columns)


# Numbers and switches


def whole_number(least: int, most: int, *words: str, metavar: str = "N") -> Kind:
    """Take an int between two limits, or one of `words`."""

    def check(value: object) -> int | str:
        return str(value) if isinstance(value, str) and value in words else _whole(value, least, most)

    takes = _alternatives(f"a whole number from {least} to {most}", *words)
    return Kind(takes, metavar, check, _read_by(int), words=words)


def seconds(*, or_zero: bool = False) -> Kind:
    """Take a finite number of seconds above 0, or 0 as well; the value is a float."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError
        try:
            number = float(value)
        except OverflowError:
            raise ValueError from None
        if 0 < number <= LONGEST_SECONDS or (number == 0 and or_zero):
            return abs(number)
        raise ValueError

    lower = "from 0" if or_zero else "above 0"
    takes = f"a number of seconds {lower} (at most {LONGEST_SECONDS:.0f})"
    return Kind(takes, "SECONDS", check, _read_by(float))


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def duration() -> Kind:
    """Take seconds above 0, or a text with a unit: `90s`, `30m`, `8h`, `2d`; the value is a float."""
    number = seconds()

    def check(value: object) -> object:
        found = _DURATION.fullmatch(value.strip().lower()) if isinstance(value, str) else None
        return number.check(float(found[1]) * _UNITS[found[2]] if found is not None else value)

    def shown(value: float | None) -> str:
        if value is None:
            return str(value)
        unit = next((each for each in "dhms" if value % _UNITS[each] == 0), None)
        return str(value) if unit is None else f"{int(value) // _UNITS[unit]}{unit}"

    takes = "a time above 0: seconds, or with a unit as in 90s, 30m, 8h or 2d"
    return Kind(takes, "TIME", check, _read_by(float), lambda value: (shown(value),), default=shown)


def switch(*, given: bool) -> Kind:
    """Take a bool; the option written without a value means `given`."""

    def check(value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    def parse(text: str) -> object:
        truth = _TRUTH.get(text.strip().lower())
        return text if truth is None else truth is given

    def texts(value: object) -> tuple[str, ...]:
        return ("true" if value is given else "false",)

    return Kind("True or False (as text: true, false, 1 or 0)", "", check, parse, texts, switch=True)


def _whole(value: object, least: int, most: int) -> int:
    """Return a whole number as an int. Python counts True as one; here nproc=True is a slip."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError
    return int(value)


def _read_by(convert: Callable[[str], object]) -> Callable[[str], object]:
    def parse(text: str) -> object:
        try:
            return convert(text)
        except ValueError:
            return text

    return parse


def _alternatives(*words: str) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# Texts


def _text(takes: str, metavar: str, **columns: Any) -> Callable[[Callable[[str], object]], Kind]:
    """Make the judgement of a text a kind; it may also raise `ValueError`."""

    def kind(accepts: Callable[[str], object]) -> Kind:
        def check(value: object) -> str:
            if isinstance(value, str) and accepts(value):
                return str(value)
            raise ValueError

        return Kind(takes, metavar, check, **columns)

    return kind


def choice(*words: str) -> Kind:
    return _text(_alternatives(*words), "NAME", words=words)(words.__contains__)


@_text("text on one line that is not empty", "NAME")
def one_line(text: str) -> bool:
    return text.isprintable() and text != ""


@_text("text on one line, maybe with ${hostname} and the like", "TEMPLATE")
def line_prefix(text: str) -> bool:
    """Take a template of `string.Template`, maybe none."""
    return text.isprintable()


@_text("a Python name, as in results", "VARIABLE")
def python_name(text: str) -> bool:
    return text.isidentifier() and not iskeyword(text)


@_text("the name or the address of a host", "HOST")
def host(text: str) -> object:
    """Take a host; an IPv6 address may stand in brackets."""
    return re.fullmatch(rf"{_HOST}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+", text)


@_text("host or host:port (an IPv6 address in brackets)", "HOST:PORT")
def endpoint(text: str) -> bool:
    """Take a host, or a host and its port, or nothing."""
    return text == "" or _is_endpoint(text)


def _is_endpoint(text: str) -> bool:
    found = re.fullmatch(rf"{_HOST}(?::(?P<port>\d{{1,5}}))?", text)
    return found is not None and int(found["port"] or 0) <= LAST_PORT


@_text(
    "process, join, ssh=HOST[:PORT],..., slurm, ray or ray=ray://HOST:PORT",
    "ENGINE",
    words=_ENGINES,
)
def engine(text: str) -> bool:
    """Take the name of an engine, with its argument behind an equals sign."""
    name, equals, argument = text.partition("=")
    if name == "ssh":
        hosts = [_SSH_HOST.fullmatch(each) for each in argument.split(",")]
        if not all(each is not None and _is_endpoint(each["place"]) for each in hosts):
            message = "ssh needs hosts that it can reach. Write ssh=HOST1,HOST2; a host may have its :PORT."
            raise ValueError(message)
        return True
    if name == "ray" and equals:
        head = argument.removeprefix("ray://")
        return head != argument and ":" in head and _is_endpoint(head)
    if name not in _ENGINES:
        near = difflib.get_close_matches(name, [each.strip("=") for each in _ENGINES], n=1)
        message = f"there is no engine of that name. Did you mean {near[0]}?" if near else ""
        raise ValueError(message)
    return not equals


@_text("words in one text, quoted as in a shell", "WORDS", dashed=True)
def shell_words(text: str) -> bool:
    """Take words for another program's command line, maybe none."""
    try:
        shlex.split(text)
    except ValueError as error:
        message = f"it cannot be split into words: {str(error).lower()}. Close each quote."
        raise ValueError(message) from None
    return text.isprintable()


@_text("the path of a program on another machine", "PATH")
def remote_program(text: str) -> bool:
    """Take a path that only another machine can judge."""
    return text.isprintable() and text != "" and not text.startswith("-")


@_text("settings as in join_timeout=60,read_timeout=60", "KEY=VALUE,...")
def settings(text: str) -> bool:
    """Take settings of a rendezvous backend, maybe none."""
    parts = [part.partition("=") for part in text.split(",")] if text else []
    return text.isprintable() and all(key.strip() and value.strip() for key, _, value in parts)


@_text("names of signals as in SIGTERM,SIGINT", "NAMES")
def signal_names(text: str) -> bool:
    """Take names of signals of this system."""
    wrong = [name for name in text.split(",") if name not in signal.Signals.__members__]
    if wrong and text:
        message = f"there is no signal {brief(wrong[0])} here. Write names as in SIGTERM,SIGINT."
        raise ValueError(message)
    return text != ""


@_kind(
    f"{', '.join(_BACKENDS)}, another backend of torch, or one for each device as in cpu:gloo,cuda:nccl",
    "NAME",
    words=_BACKENDS,
)
def backend(value: object) -> str:
    """Take what `init_process_group` takes, and auto."""
    if not isinstance(value, str) or not _BACKEND.fullmatch(value.lower()):
        raise ValueError
    _refuse_twice("device", value.lower())
    return value.lower()


@_kind("a number of nodes, or the least and the most as in 1:2", "N")
def nodes(value: object) -> str:
    if not isinstance(value, str):
        value = str(_whole(value, 1, _MOST_NODES))
    if not re.fullmatch(r"\d{1,6}(:\d{1,6})?", value):
        raise ValueError
    least, most = node_limits(value)
    if not 0 < least <= most <= _MOST_NODES:
        raise ValueError
    return str(least) if least == most else f"{least}:{most}"


def node_limits(value: str) -> tuple[int, int]:
    """Return the least and the most nodes that `1:2` or `2` means."""
    least, _, most = value.partition(":")
    return int(least), int(most or least)


@_kind("0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one for some local ranks as in 0:3,1:1", "STREAMS")
def streams(value: object) -> str:
    """Take torchrun's number of streams, or one for some local ranks; the value is a str."""
    if not isinstance(value, str):
        value = str(_whole(value, 0, _BOTH_STREAMS))
    if not _STREAMS.fullmatch(value):
        raise ValueError
    _refuse_twice("local rank", value)
    return value


def streams_of(value: str, local_rank: int) -> int:
    """Return which streams of a local rank are meant: 0 none, 1 stdout, 2 stderr, 3 both."""
    if ":" not in value:
        return int(value)
    by_rank = dict(part.split(":") for part in value.split(","))
    return int(by_rank.get(str(local_rank), 0))


def _refuse_twice(what: str, value: str) -> None:
    """Raise `ValueError` where `key:value,key:value` has a key twice."""
    keys = [part.partition(":")[0] for part in value.split(",")]
    if len(keys) != len(set(keys)):
        message = f"it names a {what} twice. Give each {what} once."
        raise ValueError(message)


_STEPS = re.compile(r"(\d{1,9}):(\d{1,9})")


@_kind(
    "the first and the last step, counted from 0, as in 3:8",
    "FIRST:LAST",
    texts=lambda value: (f"{value[0]}:{value[1]}",),
)
def steps(value: object) -> tuple[int, int]:
    """Take `3:8` or (3, 8), both included; the value is a tuple."""
    if isinstance(value, str):
        found = _STEPS.fullmatch(value)
        if found is None:
            raise ValueError
        value = int(found[1]), int(found[2])
    ends = _several(value)
    if len(ends) != 2:  # noqa: PLR2004 - the first and the last
        raise ValueError
    first, last = (_whole(each, 0, LARGEST) for each in ends)
    if first > last:
        message = f"step {first} comes after step {last}. Write the first one first: {last}:{first}."
        raise ValueError(message)
    return first, last


@_kind("a port, or the first and the last one, as in 50000-50100", "FIRST-LAST")
def ports(value: object) -> str:
    """Take `50000-50100`, `50000` or 50000; the value is a str."""
    if not isinstance(value, str):
        value = str(_whole(value, 1, LAST_PORT))
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?", value):
        raise ValueError
    found = port_range(value)
    if not found or found[0] == 0 or found[-1] > LAST_PORT:
        raise ValueError
    return value


def port_range(value: str | None) -> range:
    """Return the ports that `50000-50100` means; for None it is port 0, which stands for any.

    >>> port_range("50000-50100")[-1], list(port_range(None))
    (50100, [0])
    """
    first, _, last = (value or "0").partition("-")
    return range(int(first), int(last or first) + 1)


# Several values, kept as a tuple


def _several(value: object) -> tuple[Any, ...]:
    """Return what some values hold. Raises `ValueError` for a text, which is one value."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError
    return tuple(value)


def _with_commas(values: Iterable[object]) -> tuple[str, ...]:
    return (",".join(map(str, values)),)


def _parse_ranks(text: str) -> object:
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        return text
    ends = [part.partition("-") for part in text.split(",")]
    spans = [range(int(first), int(last or first) + 1) for first, _, last in ends]
    if not all(spans) or sum(map(len, spans)) > _MOST_RANKS:
        return text
    return [rank for span in spans for rank in span]


@_kind("numbers of ranks (on a line as in 0,2-5)", "RANKS", parse=_parse_ranks, texts=_with_commas)
def ranks(value: object) -> tuple[int, ...]:
    """Take the numbers of some ranks; the value has them in order, each once."""
    numbers = {_whole(each, 0, LARGEST) for each in _several(value)}
    if not 0 < len(numbers) <= _MOST_RANKS:
        raise ValueError
    return tuple(sorted(numbers))


@_kind(
    "texts without commas (on a line as in error,warning)",
    "TEXT,...",
    parse=lambda text: text.split(",") if text else (),
    texts=_with_commas,
)
def texts(value: object) -> tuple[str, ...]:
    words = _several(value)
    if all(isinstance(word, str) and word and word.isprintable() and "," not in word for word in words):
        return words
    raise ValueError


_WATCHED = ("nan", "desync")


@_kind(
    "nan, desync or both, each with :warn to be told and go on (on a line as in nan,desync:warn)",
    "WHAT,...",
    parse=lambda text: text.split(","),
    texts=_with_commas,
    words=("nan", "desync", "nan,desync", "nan:warn", "desync:warn"),
)
def watched(value: object) -> tuple[str, ...]:
    """Take what to watch, or one text with commas between it; the value has each once, `nan` first.

    >>> watched.check("desync, nan:warn")
    ('nan:warn', 'desync')
    """
    found: dict[str, str] = {}
    for each in _several(value.split(",") if isinstance(value, str) else value):
        if not isinstance(each, str):
            raise ValueError
        what, colon, manner = (part.strip() for part in each.partition(":"))
        if what not in _WATCHED:
            near = difflib.get_close_matches(what, _WATCHED, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            message = f"{brief(what)} is nothing that can be watched.{hint} Write nan, desync or nan,desync."
            raise ValueError(message)
        if colon and manner != "warn":
            message = f"behind {what} comes :warn or nothing, not {brief(manner)}. Write {what}:warn."
            raise ValueError(message)
        if what in found:
            message = f"it names {what} twice. Give each once."
            raise ValueError(message)
        found[what] = f"{what}{colon}{manner}"
    return tuple(found[what] for what in _WATCHED if what in found)


@_kind(
    "Python names (on a line as in model,losses)",
    "NAME,...",
    texts=_with_commas,
    join=lambda before, more: tuple(dict.fromkeys(before + more)),
)
def python_names(value: object) -> tuple[str, ...]:
    """Take some names, or one text with commas between them; the value has each once."""
    names = _several(value.split(",") if isinstance(value, str) else value)
    return tuple(dict.fromkeys(str(python_name.check(name)) for name in names))


# Paths; `~` is the home directory, as in a shell


@_kind("the path of a directory", "PATH")
def directory(value: object) -> str:
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


@_kind("the path of a file", "FILE")
def file_path(value: object) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or not path.isprintable() or not _reaches_the_system(path):
        raise ValueError
    path = _with_home(path)
    if path.endswith("/") or Path(path).is_dir():
        message = f"{brief(path)} is a directory. Give the path of a file."
        raise ValueError(message)
    return path


@_kind("the path of a file whose name ends in .py", "FILE")
def script_path(value: object) -> str:
    """Take the path that a script can be written to."""
    if not isinstance(value, str) or not value.isprintable() or not _reaches_the_system(value):
        raise ValueError
    if Path(value).suffix != ".py":
        raise ValueError
    return _with_home(value)


def _with_home(path: str) -> str:
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


def _reaches_the_system(text: str) -> bool:
    """Return whether the operating system can take this text."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


# Environment variables


def _parse_variable(text: str) -> object:
    name, equals, value = text.partition("=")
    return {name: value} if equals else text


def _without_values(value: object) -> str:
    if isinstance(value, Mapping):
        return brief(dict.fromkeys(value, "…"))
    if not isinstance(value, str):
        return f"<{type(value).__name__}>"
    name, equals, _ = value.partition("=")
    return brief(f"{name}=…" if equals else value)


@_kind(
    "a mapping of names to texts (on a line: KEY=VALUE, once for each)",
    "KEY=VALUE",
    parse=_parse_variable,
    texts=lambda value: tuple(f"{name}={text}" for name, text in value.items()),
    shown=_without_values,
    join=lambda before, more: EnvironmentVariables({**before, **more}),
)
def variables(value: object) -> EnvironmentVariables:
    if not isinstance(value, Mapping):
        raise ValueError
    for name, text in value.items():
        _check_variable(name, text)
    return value if isinstance(value, EnvironmentVariables) else EnvironmentVariables(value)


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
        what = "a str that it cannot hold" if isinstance(text, str) else f"of type {type(text).__name__}"
        message = (
            f"an environment holds text only and the value of {brief(name)} is {what}. "
            "Give a str without null characters."
        )
        raise ValueError(message)
