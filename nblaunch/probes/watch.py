"""`--watch nan,desync`: what is installed for the time of one job, and removed with it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import optimizer as optimizers

from nblaunch._errors import DesyncError, NonFiniteError
from nblaunch.probes import steps
from nblaunch.probes.collectives import Call, Listening
from nblaunch.probes.desync import Desync, RowsOfRanks
from nblaunch.probes.nonfinite import NonFinite
from nblaunch.probes.sites import Sites

_FOUND = (NonFiniteError, DesyncError)

Elsewhere = tuple[Callable[[], dist.Store], Callable[[tuple[int, ...]], None]]
"""Connects to the store that ranks of all machines share; ends a collective by its connections."""


class OptimizerSteps:
    """Counts the steps of each optimizer: where `nblaunch.step` is not called, these are the steps."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._most = 0
        self._hook = optimizers.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        taken = self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        self._most = max(self._most, taken)

    def number(self) -> int:
        """Return the step that this rank is in, counted from 0."""
        step = steps.current()
        return self._most if step is None else step

    def known(self) -> int | None:
        """Return the same; None if nothing says that there are steps."""
        return self.number() if self._most or steps.current() is not None else None

    def end(self) -> None:
        self._hook.remove()


class Watch:
    """Watches one job on this rank."""

    def __init__(
        self, wanted: tuple[str, ...], titles: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        """`tell` sends a notice that does not end the run."""
        self._wanted = {what: manner for what, _, manner in (each.partition(":") for each in wanted)}
        self._tell = tell
        self._sites = Sites(titles)
        self._steps = OptimizerSteps()
        self._nan: NonFinite | None = None
        self._desync: Desync | None = None
        self._listening = Listening(lambda call: self._guarded(lambda: self._check(call)))
        self._broken = False

    def begin(self, job: str, directory: Path, attempt: int, elsewhere: Elsewhere | None = None) -> None:
        """Install what is wanted; what cannot be is a notice."""
        if "desync" in self._wanted:
            self._installed("desync", lambda: self._begin_desync(job, directory, attempt))
            if elsewhere is not None and self._desync is not None:
                self._desync.check_elsewhere(*elsewhere)
        if "nan" in self._wanted:
            self._nan = NonFinite(self._sites, self._steps.number, self._teller("nan"), self._guarded)
            self._installed("nan", self._nan.begin)
        self._installed("collectives", self._listening.begin)

    @property
    def found(self) -> DesyncError | None:
        """What has ended the collective in which the main thread was."""
        return self._desync.found if self._desync is not None and self._wanted["desync"] == "" else None

    def finish(self) -> None:
        """Take in what is still open: the job has ended by itself."""
        if self._nan is not None:
            self._guarded(self._nan.finish)

    def end(self) -> None:
        self._listening.end()
        self._steps.end()
        if self._nan is not None:
            self._nan.end()
        if self._desync is not None:
            self._desync.close()

    def _begin_desync(self, job: str, directory: Path, attempt: int) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        table = RowsOfRanks(directory / f"collectives-{attempt}-{world_size}", world_size, rank)
        self._desync = Desync(
            table, rank, job, sites=self._sites, step=self._steps.known, warn=self._teller("desync")
        )

    def _teller(self, what: str) -> Callable[[str], None] | None:
        return self._tell if self._wanted[what] == "warn" else None

    def _installed(self, what: str, install: Callable[[], None]) -> None:
        try:
            install()
        except Exception as error:  # noqa: BLE001 - another torch, a full disk: the job must not fail for it
            self._tell(f"--watch: {what} cannot be watched here: {type(error).__name__}: {error}")

    def _check(self, call: Call) -> None:
        # What is sent first: if it is not finite, this rank does not come to the collective.
        if self._nan is not None:
            self._nan(call)
        if self._desync is not None:
            self._desync(call)

    def _guarded(self, check: Callable[[], None]) -> None:
        """Run a check; one that fails for a reason of its own ends the watch, and not the job."""
        if self._broken:
            return
        try:
            check()
        except _FOUND:
            raise
        except Exception as error:  # noqa: BLE001 - whatever torch raises
            self._broken = True
            self._tell(f"--watch has ended early: {type(error).__name__}: {error}")


@contextlib.contextmanager
def watching(  # noqa: PLR0913 - what it watches, and where
    wanted: tuple[str, ...],
    *,
    job: str,
    directory: Path,
    attempt: int,
    titles: Mapping[str, str],
    tell: Callable[[str], None],
    elsewhere: Elsewhere | None = None,
) -> Iterator[None]:
    """Watch what runs within the block.

    `job` is the same on all ranks, and in no other job. `directory` is the worker group's own on this
    machine, `titles` maps file names of cells to what the reader calls them. `tell` sends a notice.
    `elsewhere` is given if there are other machines.
    """
    watch = Watch(wanted, titles, tell)
    try:
        watch.begin(job, directory, attempt, elsewhere)
        try:
            yield
        except Exception as error:
            if watch.found is not None and error is not watch.found:
                # Not "from" the error: that blames a peer, and this is the reason.
                raise watch.found.with_traceback(error.__traceback__) from None
            raise
        watch.finish()
    finally:
        watch.end()
