"""What the tests of failures share: jobs in which some ranks come to grief, and how long that may take."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest

import nblaunch
from nblaunch import RankFailure, RunFailedError, RunResult

_MARGIN = 1.0
MOST_TOKENS = 4_000


def wait_for_the_others():
    """Sit in a collective until every rank has come."""
    import torch
    from torch import distributed

    total = torch.ones(1)
    distributed.all_reduce(total)
    return total.item()


def on_ranks(
    ranks: Collection[int], action: Callable[[], Any], rest: Callable[[], Any] = wait_for_the_others
) -> Callable[[], Any]:
    """Return a job: all ranks meet, then `ranks` do `action`, and the others `rest`."""

    def job() -> Any:
        from torch import distributed

        rank = int(os.environ["RANK"])
        print(f"rank {rank} goes on")
        distributed.barrier()
        return action() if rank in ranks else rest()

    return job


@dataclass(frozen=True)
class Failed:
    """A failed run: its error, its result, and how long it took."""

    error: RunFailedError
    result: RunResult
    seconds: float

    @property
    def root(self) -> RankFailure:
        """The root cause, the same wherever one looks for it."""
        root: RankFailure | None = self.error.root_cause
        assert root is not None
        assert root is self.result.root_cause
        return root

    def others_are_explained(self) -> None:
        """Check that every rank but the cause was stopped, or failed as a consequence and says so."""
        for each in self.result.ranks:
            if each.rank == self.root.rank:
                continue
            assert each.state in ("STOPPED", "FAILED")
            assert (each.failure is None) is (each.state == "STOPPED")
            assert each.failure is None or each.failure.consequence_of == self.root.rank
        causes = [each.rank for each in self.result.failures if each.consequence_of is None]
        assert causes == [self.root.rank]
        assert self.result.failures[0] is self.root


def failing(job: Callable[[], Any], nproc: int, **options: Any) -> Failed:
    """Run a job that must fail."""
    usual(nproc)  # so that the fork server is there, and does not count
    started = time.monotonic()
    with pytest.raises(nblaunch.RunFailedError) as caught:
        nblaunch.run(job, nproc=nproc, **options)
    seconds = time.monotonic() - started
    assert caught.value.result is not None
    failed = Failed(caught.value, caught.value.result, seconds)
    if failed.result.root_cause is not None:
        reported(failed.root, failed.result)
    return failed


def reported(root: RankFailure, result: RunResult) -> None:
    """Check that the report names the rank, the line where there is one, and the cause, in 4,000 tokens."""
    report = result.report()
    told = json.loads(str(report))["root_cause"]
    assert told["rank"] == root.rank
    # What a text ends with: the middle of a long one is left out.
    assert told["reason"][-60:] == root.reason[-60:]
    assert (told.get("exitcode"), told.get("signal")) == (root.exitcode, root.signal)
    line = None if root.frame is None else root.frame.line
    assert told.get("line") == line
    text = report.to_markdown()
    assert f"rank {root.rank}" in text or f"ranks {root.rank}" in text or "ranks 0-" in text
    assert line is None or f"line {line}" in text
    assert max(len(str(report)), len(text)) // 4 <= MOST_TOKENS


def must_work(nproc: int) -> None:
    """Check that a run works, as it must after whatever happened before."""
    result = nblaunch.run(wait_for_the_others, nproc=nproc)
    assert result.values == [nproc] * nproc


_usual: dict[int, float] = {}


def usual(nproc: int) -> float:
    """Return the seconds that a run without a failure takes in this process, on this machine, now."""
    if nproc not in _usual:
        must_work(nproc)
        times = []
        for _ in range(3):
            started = time.monotonic()
            must_work(nproc)
            times.append(time.monotonic() - started)
        _usual[nproc] = statistics.median(times)
    return _usual[nproc]


def soon(seconds: float, nproc: int, waited: float = 0.0) -> bool:
    """Return whether a run took no longer than one may that waits `waited` seconds by its nature, then fails.

    Several times what a run without a failure takes, measured once more where the machine may have become
    busier since. What must never be paid is the grace period, or a timeout of torch's.
    """
    if seconds >= waited + _MARGIN + 6 * usual(nproc):
        del _usual[nproc]
    return seconds < waited + _MARGIN + 6 * usual(nproc)
