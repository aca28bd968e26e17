"""The stacks of ranks: on request, and when they die."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import psutil

from nblaunch._cgroups import oom_kills
from nblaunch._results import read_text
from nblaunch.diagnose import hang
from nblaunch.diagnose.failures import explain_exit
from nblaunch.elastic.logs import read_end
from nblaunch.protocol.messages import DUMP_SIGNAL, Exited, Phase, Where, dump_path, fatal_path
from nblaunch.protocol.reports import HangReport, readable_main_stack
from nblaunch.protocol.state import RunState, State

_DUMP_SECONDS = 0.5
# NCCL's watchdog writes some 10 KB when it ends a process.
_STDERR_BYTES = 200_000


class StackRequest:
    """One round of answers; made on any thread, answered on the hub's."""

    def __init__(self, ranks: Iterable[int]) -> None:
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
        """Return the report; for ranks that did not answer, with what faulthandler writes.

        `titles` maps the file names of cells to the names that the user knows.
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
    """Have faulthandler write a rank's stacks, for which its interpreter is not needed."""
    path = dump_path(directory, rank)
    with contextlib.suppress(OSError):
        before, deadline = path.stat().st_size, time.monotonic() + _DUMP_SECONDS
        os.kill(pid, DUMP_SIGNAL)
        while path.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)  # the rest of the same dump
        return path.read_text(errors="replace")[before:]
    return ""


class ExitReasons:
    """Why processes of a group have exited, according to the files that they leave."""

    def __init__(self, directory: Path) -> None:
        """`directory` is where faulthandler writes when a rank dies of a signal."""
        self._directory = directory
        self._oom_before = oom_kills()

    def explained(self, exited: Exited, titles: Mapping[str, str], stderr: str = "") -> Exited:
        """Return the exit with its reason, and with the stacks that the rank has written.

        `stderr` is the path of its standard error.
        """
        if exited.expected or exited.reason:
            return exited
        dump = read_text(str(fatal_path(str(self._directory), exited.rank)))
        printed = read_end(stderr, _STDERR_BYTES) if stderr else ""
        why = explain_exit(exited.exitcode, dump, titles, oom_before=self._oom_before, stderr=printed)
        return msgspec.structs.replace(exited, reason=why.reason, details=why.details)
