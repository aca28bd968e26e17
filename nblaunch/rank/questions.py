"""`input()`, `getpass()` and debuggers in a rank: the notebook's own user answers.

The main thread waits here while the control thread goes on; an interrupt ends the wait.
"""

from __future__ import annotations

import builtins
import getpass
import os
import pdb  # noqa: T100 - it is what users of breakpoint() ask for
import queue
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from nblaunch._protocol import Answer, Asked, FromRank
from nblaunch.rank import streams

_NOT_THE_USERS = ("IPython.*", "nblaunch.*")


class Questions:
    """Asks one question after the other; `answers` is filled by the control thread."""

    def __init__(self, rank: int, send: Callable[[FromRank], None]) -> None:
        """Ask through `send`."""
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._rank = rank
        self._send = send
        self._number = 0

    def install(self) -> None:
        """Take the place of the functions that read from a terminal, which a rank has not."""
        builtins.input = self.input
        getpass.getpass = self.getpass
        sys.breakpointhook = breakpoint_hook

    def input(self, prompt: object = "", /) -> str:
        """Return a line that the user types in the notebook.

        Raises `EOFError` where nobody can be asked.
        """
        return self._ask(str(prompt), password=False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: object) -> str:
        """Return a line that is not shown while it is typed."""
        del stream
        return self._ask(prompt, password=True)

    def _ask(self, prompt: str, *, password: bool) -> str:
        self._number += 1
        self._send(
            Asked(
                rank=self._rank,
                number=self._number,
                prompt=prompt.encode("utf-8", "replace").decode(),
                password=password,
                offsets=streams.offsets(),
            )
        )
        while True:
            answer = self.answers.get()
            if answer.number == self._number:
                break  # others are to questions whose asking was interrupted
        if answer.error:
            raise EOFError(answer.error)
        return answer.text


def breakpoint_hook(*arguments: Any, **keywords: Any) -> Any:
    """Start the debugger that `breakpoint()` asks for, at the line that asks."""
    if os.environ.get("PYTHONBREAKPOINT", "pdb.set_trace") not in ("", "pdb.set_trace"):
        return sys.__breakpointhook__(*arguments, **keywords)  # noqa: T100 - as Python itself does
    _debugger().set_trace(sys._getframe(1))  # noqa: SLF001 - as pdb itself does
    return None


def post_mortem(trace: TracebackType) -> None:
    """Look at the frames of an exception, in the process that raised it."""
    debugger = _debugger()
    debugger.reset()
    debugger.interaction(None, trace)


def _debugger() -> pdb.Pdb:
    # Without a handler of its own for SIGINT: an interrupt ends the run, it asks no more questions.
    return pdb.Pdb(nosigint=True, skip=_NOT_THE_USERS)
