"""Processes that are gone: why, and when all that they had to say has arrived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from nblaunch._cgroups import oom_kills
from nblaunch._protocol import Exited
from nblaunch.agent.logs import read_end, read_text
from nblaunch.diagnose.exits import explain_exit
from nblaunch.rank.inspection import fatal_path
from nblaunch.session.job import Job

# A rank's last words may still lie in the socket when its process is gone.
_LAST_WORDS_SECONDS = 0.05
# NCCL's watchdog writes some 10 KB when it ends a process.
_STDERR_BYTES = 200_000


class Departures:
    """The exits of one attempt's ranks; used on the hub's thread only."""

    def __init__(self, directory: Path) -> None:
        """Nobody has gone; dying ranks write their stacks to `directory`."""
        self.ranks: set[int] = set()
        """Who has gone."""
        self._directory = directory
        self._waiting: dict[int, tuple[float, Exited]] = {}
        self._oom_before = oom_kills()

    @property
    def waiting(self) -> bool:
        """Whether last words are being waited for."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Begin another attempt."""
        self.ranks, self._waiting = set(), {}

    def note(self, exited: Exited, now: float) -> None:
        """Take note of a process that is gone."""
        self.ranks.add(exited.rank)
        self._waiting[exited.rank] = (now + _LAST_WORDS_SECONDS, exited)

    def due(self, job: Job | None, now: float) -> Iterator[Exited]:
        """Yield exits of ranks that have no more to say, or have had the time to."""
        for rank, (when, exited) in list(self._waiting.items()):
            if job is not None and not job.has_outcome(rank) and now < when:
                continue
            del self._waiting[rank]
            yield exited

    def explained(self, exited: Exited, titles: Mapping[str, str], stderr: str = "") -> Exited:
        """Return the exit with its reason, and with the stacks that the rank has written.

        `stderr` is the path of what it has printed there.
        """
        if exited.expected or exited.reason:
            return exited
        dump = read_text(str(fatal_path(str(self._directory), exited.rank)))
        said = read_end(stderr, _STDERR_BYTES) if stderr else ""
        why = explain_exit(exited.exitcode, dump, titles, oom_before=self._oom_before, stderr=said)
        return msgspec.structs.replace(exited, reason=why.reason, details=why.details)
