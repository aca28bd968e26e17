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
from nblaunch.protocol.state import RunState, State, hosts_of

_DUMP_SECONDS = 0.5
_SETTLED_SECONDS, _SETTLED_LATE_SECONDS = 0.2, 1.2
_SETTLED_SOON = {"gloo", "store", "nccl"}
_STOPPED = "its process is stopped (SIGSTOP); kill -CONT would let it go on"
_NODE_SILENT = "  its node has not answered either"
# NCCL's watchdog writes some 10 KB when it ends a process.
_STDERR_BYTES = 200_000


class StackRequest:
    """One round of answers; made on any thread, answered on the hub's."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.asked = frozenset(ranks)
        self.missing = set(self.asked)
        self.answers: dict[int, Where] = {}
        self.complete = threading.Event()
        self.dumps: dict[int, str] = {}
        """For ranks on other machines that gave no answer: the stacks that their nodes dumped."""
        self.all_dumped = threading.Event()
        self._undumped: set[int] = set()
        if not self.missing:
            self.complete.set()

    def answer(self, where: Where) -> None:
        """Take one rank's answer."""
        self.answers[where.rank] = where
        self.missing.discard(where.rank)
        if not self.missing:
            self.complete.set()

    def expect_dumps(self, ranks: Iterable[int]) -> None:
        """Wait for the stacks that the nodes of these ranks dump."""
        self._undumped = set(ranks)
        self.dumps = dict.fromkeys(self._undumped, _NODE_SILENT)
        if not self._undumped:
            self.all_dumped.set()

    def dumped(self, rank: int, text: str) -> None:
        """Take the stack of a rank from its node."""
        if rank in self._undumped:
            self.dumps[rank] = text
            self._undumped.discard(rank)
            if not self._undumped:
                self.all_dumped.set()

    def settled_after(self, ranks: Iterable[int]) -> float:
        """Return after how many seconds it is known that an operation of these ranks has ended, if it has."""
        backends = {each.backend for rank in ranks for each in self.answers[rank].waits}
        # NCCL's watchdog looks ten times a second, that of ProcessGroupNCCL2 (torch 2.15) once.
        return _SETTLED_SECONDS if backends <= _SETTLED_SOON else _SETTLED_LATE_SECONDS

    def keep_same_waits(self, later: StackRequest) -> None:
        """Forget what ranks waited in that were asked again, and no longer wait there."""
        for rank in self.answers.keys() & later.asked:
            again = later.answers.get(rank)
            if again is None or again.waits != self.answers[rank].waits:
                self.answers[rank] = msgspec.structs.replace(self.answers[rank], waits=())

    def report(self, state: RunState, directory: str, titles: Mapping[str, str]) -> HangReport:
        """Return the report; for ranks that did not answer, with what faulthandler writes.

        `titles` maps the file names of cells to the names that the user knows.
        """
        # An answer may still arrive while this looks; a rank is in the report once.
        answers, dumps = dict(self.answers), dict(self.dumps)
        silent, finished, elsewhere, here = {}, [], {}, {}
        for known in state.ranks.values():
            answer = answers.get(known.rank)
            if known.state is State.SUCCEEDED:
                finished.append(known.rank)
                answers.pop(known.rank, None)
            elif known.state.final and not known.finishing:
                continue
            elif answer is None and known.rank in dumps:
                silent[known.rank] = dumps[known.rank]
            elif answer is None and known.node and known.pid is not None:
                here[known.rank] = known.pid
            elif answer is None or not answer.frames:
                idle = known.phase is Phase.READY
                elsewhere[known.rank] = (
                    f"finishing: {known.finishing}"
                    if known.finishing
                    else "idle"
                    if idle
                    else f"in phase '{known.phase}'"
                )
        silent |= stacks_of_silent(here, directory, titles)
        return hang.report(
            answers,
            silent=dict(sorted(silent.items())),
            finished=finished,
            finishing={rank: known.finishing for rank, known in state.ranks.items() if known.finishing},
            elsewhere=elsewhere,
            hosts=hosts_of(state.ranks),
        )


def stacks_of_silent(pids: Mapping[int, int], directory: str, titles: Mapping[str, str]) -> dict[int, str]:
    """Return the stacks of ranks of this machine that do not answer; blocks for half a second at most.

    `pids` are their processes, which dump to files in `directory`. `titles` is as in `StackRequest.report`.
    """
    stopped = {rank: _STOPPED for rank, pid in pids.items() if _is_stopped(pid)}
    dumps = _dumped({rank: pid for rank, pid in pids.items() if rank not in stopped}, directory)
    return {**stopped, **{rank: readable_main_stack(dump, titles) for rank, dump in dumps.items()}}


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _dumped(pids: Mapping[int, int], directory: str) -> dict[int, str]:
    """Have faulthandler dump the ranks' stacks, which needs no lock of their interpreters."""
    paths = {rank: dump_path(directory, rank) for rank in pids}
    before: dict[int, int] = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError):
            # No file means no handler: the signal would end the process.
            size = paths[rank].stat().st_size
            os.kill(pid, DUMP_SIGNAL)
            before[rank] = size
    deadline = time.monotonic() + _DUMP_SECONDS
    while any(_size(paths[rank]) == size for rank, size in before.items()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.02 if before else 0)  # for the rest of these dumps
    return {rank: read_text(str(paths[rank]), before[rank]) if rank in before else "" for rank in pids}


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return -1


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
