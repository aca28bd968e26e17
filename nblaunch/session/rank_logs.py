"""The log files of a group's ranks, attempt by attempt: what is new in them, and which part is the job's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nblaunch._protocol import (
    Asked,
    Cleared,
    Displayed,
    FromRank,
    Offsets,
    Printed,
    Raised,
    Returned,
    Started,
    Switched,
)
from nblaunch._state import RankState
from nblaunch.agent.contract import Worker
from nblaunch.agent.logs import LogTail


@dataclass(frozen=True, slots=True)
class Logs:
    """Where one rank of one attempt wrote, and from where to where its job did."""

    worker: Worker
    started: Offsets = field(default_factory=Offsets)
    ended: Offsets | None = None


class RankLogs:
    """Used on the hub's thread only."""

    def __init__(self) -> None:
        """Begin without any."""
        self.attempts: dict[int, dict[int, Logs]] = {}
        self._present: dict[int, Logs] = {}
        self._tails: dict[int, LogTail] = {}

    def known(self, ranks: int) -> bool:
        """Whether the files of the present attempt's `ranks` are known."""
        return len(self._tails) >= ranks

    def begin_job(self, attempt: int) -> dict[int, dict[int, Logs]]:
        """Return where the output of a job that begins now will be noted, attempt by attempt."""
        self._present = {rank: Logs(logs.worker) for rank, logs in self._present.items()}
        self.attempts = {attempt: self._present} if self._present else {}
        return self.attempts

    def begin(self, attempt: int, workers: tuple[Worker, ...]) -> None:
        """Take note of an attempt's processes and their files."""
        self.close()
        self._present = self.attempts[attempt] = {worker.rank: Logs(worker) for worker in workers}
        self._tails = {worker.rank: LogTail(worker.rank, worker.stdout, worker.stderr) for worker in workers}

    def extend(self, workers: tuple[Worker, ...]) -> None:
        """Take note of more processes of the same attempt: another node's."""
        for worker in workers:
            self._present[worker.rank] = Logs(worker)
            self._tails[worker.rank] = LogTail(worker.rank, worker.stdout, worker.stderr)

    def stderr_of(self, rank: int) -> str:
        """Return the path of what a rank prints to stderr; empty if it is not known here."""
        known = self._present.get(rank)
        return known.worker.stderr if known is not None else ""

    def close(self) -> None:
        """Close the files of the present attempt."""
        for tail in self._tails.values():
            tail.close()
        self._tails, self._present = {}, {}

    def before(self, message: FromRank) -> Iterator[Printed]:
        """Yield what the rank had printed when it sent `message`; note where its job begins and ends."""
        tail, known = self._tails.get(message.rank), self._present.get(message.rank)
        if tail is None or known is None:
            return
        match message:
            case Started(offsets=offsets):
                # What a rank prints before its job (gloo's greeting) is not the job's output.
                tail.skip_to(offsets)
                self._present[message.rank] = Logs(known.worker, offsets, known.ended)
            case Switched(moments=moments):
                for offsets in moments:
                    yield from tail.up_to(offsets)
            case Displayed(offsets=offsets) | Cleared(offsets=offsets) | Asked(offsets=offsets):
                yield from tail.up_to(offsets)
            case Returned(offsets=offsets) | Raised(offsets=offsets):
                self._present[message.rank] = Logs(known.worker, known.started, offsets)
                yield from tail.up_to(offsets)
            case _:
                pass

    def news(self, ranks: Mapping[int, RankState]) -> Iterator[Printed]:
        """Yield what ranks whose job has begun have printed since."""
        for rank, tail in self._tails.items():
            if rank in ranks and ranks[rank].started is not None:
                yield from tail.poll()

    def rest(self, rank: int) -> Iterator[Printed]:
        """Yield all that a rank that is gone has printed."""
        tail = self._tails.get(rank)
        if tail is not None:
            yield from tail.rest()

    def rest_of_all(self) -> Iterator[Printed]:
        """Yield all that has been printed."""
        for rank in self._tails:
            yield from self.rest(rank)
