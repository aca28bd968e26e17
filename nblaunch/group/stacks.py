"""Asking all ranks where they are, and which connections lead from one to another."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from nblaunch._frames import readable_main_stack
from nblaunch.diagnose import hang
from nblaunch.protocol.messages import DUMP_SIGNAL, Phase, Where, dump_path
from nblaunch.protocol.reports import HangReport
from nblaunch.protocol.state import RunState, State

_DUMP_SECONDS = 0.5


class StackRequest:
    """One round of answers; made on any thread, answered on the hub's."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Expect an answer from each of `ranks`."""
        self.missing = set(ranks)
        self.answers: dict[int, Where] = {}
        self.complete = threading.Event()
        if not self.missing:
            self.complete.set()

    def answer(self, where: Where) -> None:
        """Take one rank's answer."""
        self.answers[where.rank] = where
        self.missing.discard(where.rank)
        if not self.missing:
            self.complete.set()

    def report(self, state: RunState, directory: str, titles: Mapping[str, str]) -> HangReport:
        """Return the report; asks faulthandler about ranks that did not answer.

        `titles` maps file names of cells to what the reader calls them.
        """
        # An answer may still arrive while this looks; a rank is in the report once.
        answers = dict(self.answers)
        silent, finished, elsewhere = {}, [], {}
        for known in state.ranks.values():
            answer = answers.get(known.rank)
            if known.state is State.SUCCEEDED:
                finished.append(known.rank)
                answers.pop(known.rank, None)
            elif known.state.final:
                continue
            elif answer is None and known.node and known.pid is not None:
                silent[known.rank] = _silent(known.pid, known.rank, directory, titles)
            elif answer is None or not answer.frames:
                idle = known.phase is Phase.READY
                elsewhere[known.rank] = "idle" if idle else f"in phase '{known.phase}'"
        return hang.report(answers, silent=silent, finished=finished, elsewhere=elsewhere)


def _silent(pid: int, rank: int, directory: str, titles: Mapping[str, str]) -> str:
    with contextlib.suppress(psutil.Error):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return "its process is stopped (SIGSTOP); kill -CONT would let it go on"
    return readable_main_stack(_dumped(pid, rank, directory), titles)


def _dumped(pid: int, rank: int, directory: str) -> str:
    """Have faulthandler write a rank's stacks, which needs no answer of its interpreter."""
    path = dump_path(directory, rank)
    before = _size(path)
    with contextlib.suppress(OSError):
        os.kill(pid, DUMP_SIGNAL)
        _wait_until(lambda: _size(path) > before, _DUMP_SECONDS)
        return path.read_text(errors="replace")[before:]
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    waiter = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            waiter.wait(0.02)  # the rest of the same dump
            return
        waiter.wait(0.01)


def between_ranks(answers: Mapping[int, Where]) -> dict[int, tuple[int, ...]]:
    """Return each rank's descriptors of connections whose other end is another rank's.

    A connection that two ranks both list is theirs; the store's, the hub's and the user's own are not.
    """
    ends = {
        (connection.local, connection.remote): (rank, connection)
        for rank, where in answers.items()
        for connection in where.connections
    }
    found: dict[int, list[int]] = {}
    for (local, remote), (rank, connection) in ends.items():
        other = ends.get((remote, local))
        if other is not None and other[0] != rank:
            found.setdefault(rank, []).append(connection.fd)
    return {rank: tuple(fds) for rank, fds in found.items()}
