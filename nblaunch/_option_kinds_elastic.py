"""What the value of an option may be that only torchelastic has: nodes, addresses, streams, signals."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from keyword import iskeyword
from numbers import Integral

from nblaunch._option_kinds import Kind, brief, is_bool

_MOST_NODES = 100_000
_MOST_RANKS = 4096
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"
_HOST_AND_PORT = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>\d{{1,5}}))?")
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]+")
_STREAMS = re.compile(r"[0-3]|\d{1,6}:[0-3](,\d{1,6}:[0-3])*")


def choice(*words: str) -> Kind:
    """Take one of some words."""

    def check(value: object) -> str:
        if isinstance(value, str) and value in words:
            return str(value)
        raise ValueError

    return Kind(f"{', '.join(words[:-1])} or {words[-1]}", "NAME", check, words=words)


def node_range() -> Kind:
    """Take a number of nodes, or the least and the most as `1:2`; the value is a str."""

    def check(value: object) -> str:
        if isinstance(value, Integral) and not is_bool(value):
            value = str(int(value)) if 0 < int(value) <= _MOST_NODES else ""
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

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError  # noqa: TRY004  every refusal is a ValueError, so that OptionError is one
        if port and value == "":
            return ""
        if not port and _BARE_IPV6.fullmatch(value):
            return value
        found = _HOST_AND_PORT.fullmatch(value)
        if found is None or (found["port"] is not None and not port):
            raise ValueError
        if int(found["port"] or 0) > 65_535:  # noqa: PLR2004  the last port there is
            raise ValueError
        return value

    if port:
        return Kind("host or host:port (an IPv6 address in brackets)", "HOST:PORT", check)
    return Kind("the name or the address of a host", "HOST", check)


def pairs() -> Kind:
    """Take `key=value,key2=value2`; the value is that text."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError
        keys = [part.partition("=") for part in value.split(",")] if value else []
        if not all(key.strip() and equals and text.strip() for key, equals, text in keys):
            raise ValueError
        return value

    return Kind("settings as in join_timeout=60,read_timeout=60", "KEY=VALUE,...", check)


def streams() -> Kind:
    """Take torchrun's number of streams (0 none, 1 stdout, 2 stderr, 3 both), or one for some local ranks."""

    def check(value: object) -> str:
        if isinstance(value, Integral) and not is_bool(value):
            value = str(int(value))
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


def texts() -> Kind:
    """Take some texts, on a line separated by commas; the value is a tuple."""

    def check(value: object) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValueError  # noqa: TRY004  every refusal is a ValueError, so that OptionError is one
        words = tuple(value)
        if not all(
            isinstance(word, str) and word and word.isprintable() and "," not in word for word in words
        ):
            raise ValueError
        return words

    def parse(text: str) -> object:
        return text.split(",") if text else ()

    def written(value: object) -> tuple[str, ...]:
        return (",".join(value),) if isinstance(value, tuple) else ()

    return Kind("texts without commas (on a line as in error,warning)", "TEXT,...", check, parse, written)


def python_names() -> Kind:
    """Take names that a Python program can have, as one text separated by commas or several; a tuple."""

    def check(value: object) -> tuple[str, ...]:
        if not isinstance(value, Iterable):
            raise ValueError  # noqa: TRY004  every refusal is a ValueError, so that OptionError is one
        names = value.split(",") if isinstance(value, str) else list(value)
        if not all(isinstance(name, str) and name.isidentifier() and not iskeyword(name) for name in names):
            raise ValueError
        return tuple(dict.fromkeys(names))

    def written(value: object) -> tuple[str, ...]:
        return (",".join(value),) if isinstance(value, tuple) else ()

    return Kind(
        "Python names (on a line as in model,losses)", "NAME,...", check, texts=written, repeatable=True
    )


def signal_names() -> Kind:
    """Take names of signals, separated by commas; the value is that text."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError
        wrong = [name for name in value.split(",") if name not in signal.Signals.__members__]
        if wrong:
            message = f"there is no signal {brief(wrong[0])} here. Write names as in SIGTERM,SIGINT."
            raise ValueError(message)
        return value

    return Kind("names of signals as in SIGTERM,SIGINT", "NAMES", check)
