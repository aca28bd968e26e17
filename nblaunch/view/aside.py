"""Standard streams for which a status line steps aside: what the program's threads print stays whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO


class Aside:
    """A stream that has `before()` called ahead of each write; in all else it is the stream itself."""

    def __init__(self, stream: TextIO, before: Callable[[], None]) -> None:
        """Stand in for `stream`."""
        self._stream = stream
        self._before = before

    def write(self, text: str) -> int:
        """Write `text` where nothing is in its way."""
        self._before()
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write `lines` where nothing is in their way."""
        self._before()
        self._stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        """Return what the stream has."""
        return getattr(self._stream, name)


class StepAside:
    """Puts such streams in the place of `sys.stdout` and `sys.stderr`, where these are terminals."""

    def __init__(self, before: Callable[[], None]) -> None:
        """Have `before()` called, on any thread, ahead of all that is printed."""
        self._replaced: dict[str, tuple[object, TextIO]] = {}
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced[name] = (Aside(stream, before), stream)
                setattr(sys, name, self._replaced[name][0])

    def end(self) -> None:
        """Put the streams back, unless somebody has put others there."""
        for name, (aside, stream) in self._replaced.items():
            if getattr(sys, name) is aside:
                setattr(sys, name, stream)
        self._replaced = {}
