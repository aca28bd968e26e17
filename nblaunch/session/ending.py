"""Waiting for the end of a job, and seeing to it that there is one: timeout, interrupt, hang."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from nblaunch._errors import RunTimeoutError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import Prepare
from nblaunch._reports import format_ranks
from nblaunch._state import RunState, State
from nblaunch.session.answers import Answers
from nblaunch.session.group import WorkerGroup
from nblaunch.session.hang_watch import HangWatch
from nblaunch.session.job import Job
from nblaunch.session.waiting import Waiting

_DRAW_SECONDS = 0.1
# An agent that cannot be moved (uninterruptible ranks) must not hold the notebook for ever.
_END_SECONDS = 30.0
# Who interrupts does not want to wait for the answer of a rank that has none.
_ASK_SECONDS = 0.3


class Watcher(Protocol):
    """Whoever shows the run; called on the caller's thread only."""

    @property
    def shows_usage(self) -> bool:
        """Whether the ranks are to be measured meanwhile."""

    def open(self, state: RunState) -> None:
        """Begin."""

    def draw(self, state: RunState) -> None:
        """Show what is new."""

    def close(self, state: RunState) -> None:
        """Show the end."""


class SilentWatcher:
    """Shows nothing: the result has it all."""

    shows_usage = False

    def open(self, state: RunState) -> None:
        """Show nothing."""

    def draw(self, state: RunState) -> None:
        """Show nothing."""

    def close(self, state: RunState) -> None:
        """Show nothing."""


class Ending:
    """Waits for a job's end, and sees to it that there is one."""

    def __init__(  # noqa: PLR0913, PLR0917 - a job, where it runs, and who can end it
        self,
        group: WorkerGroup,
        job: Job,
        prepare: Prepare,
        options: LaunchOptions,
        watcher: Watcher,
        cancelled: threading.Event | None,
    ) -> None:
        """`wait` gives `job` to `group`; whoever sets `cancelled` interrupts it."""
        self._cancelled = cancelled
        self._group = group
        self._job = job
        self._prepare = prepare
        self._options = options
        self._watcher = watcher
        self._hang_watch = HangWatch(options.hang_after, group.where)
        self._answers = Answers(job, group.answer)
        self._waiting = Waiting(group)
        self._hurried = False

    def wait(self) -> BaseException | None:
        """Wait until all is over; return what ended it early: an interrupt or the timeout."""
        deadline = None if self._options.timeout is None else time.monotonic() + self._options.timeout
        try:
            self._watcher.open(self._job.state)
            self._group.begin(self._job, self._prepare)
            self._group.start()
            while not self._job.ended.wait(_DRAW_SECONDS):
                self._watcher.draw(self._job.state)
                self._waiting.look()
                asked = time.monotonic()
                if self._answers.give():
                    # Whoever types is not to be hurried by a limit for the ranks.
                    self._hang_watch = HangWatch(self._options.hang_after, self._group.where)
                    deadline = None if deadline is None else deadline + time.monotonic() - asked
                hanging = self._hang_watch.look(self._job.state)
                if hanging is not None:
                    self._group.looked_at(hanging)
                    self._group.notice(f"nothing heard for {self._options.hang_after:g} s\n{hanging}")
                if self._cancelled is not None and self._cancelled.is_set():
                    return self._interrupted(KeyboardInterrupt())
                if deadline is not None and time.monotonic() > deadline:
                    return self._timed_out()
        except KeyboardInterrupt as interrupt:
            return self._interrupted(interrupt)
        return None

    def _timed_out(self) -> BaseException:
        report = self._group.where()
        self._group.looked_at(report)
        where = report.summary or _where(self._job.state)
        self.ensure(unattended=True)
        return RunTimeoutError(
            f"the run was given {self._options.timeout:g} s and did not end in that time: {where}"
            + "".join(f"\n{finding}" for finding in report.findings),
            hang_report=report,
        )

    def _interrupted(self, interrupt: KeyboardInterrupt) -> BaseException:
        """Give the ranks the time to end by themselves; a second interrupt ends them.

        Fresh ranks have the grace period. Those of a session hold variables: a rank in C code is waited for.
        """
        where, lost = _where(self._job.state), ""
        noticed = len(self._job.state.notices)
        try:
            report = self._group.where(_ASK_SECONDS)
            self._group.looked_at(report)
            where = report.summary or where
            self._group.interrupt(self._job)
            if self._group.keep:
                self._until_ranks_end()
            else:
                if not self._drawing(self._options.grace):
                    self._group.hurry()
                self._drawing(_END_SECONDS)
        except KeyboardInterrupt:
            self._hurried = True
            self._group.hurry()
            if self._group.keep:
                ranks = format_ranks(self._group.state.ranks)
                lost = f"; it was interrupted again, so {ranks} were replaced and their variables are lost"
            self._group.give_up(self._job)
            self._drawing(self._options.grace + _END_SECONDS)
        message = f"the run was interrupted: {where}{lost}"
        interrupt.args = (message,)
        # There is no result where this is caught; a notebook shows these beside the output.
        for notice in self._job.state.notices[noticed:]:
            interrupt.add_note(notice)
        # IPython's own protocol; the frames of our waiting are no news.
        interrupt._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
        return interrupt.with_traceback(None)

    def ensure(self, *, unattended: bool = False) -> None:
        """End the job if it has not ended; if `unattended`, also where a rank's process is stopped."""
        if self._job.ended.is_set():
            return
        # An interrupt may have come before the group was given the job, which nobody else would end.
        self._group.give_up(self._job)
        if self._group.keep and not self._hurried:
            self._group.interrupt(self._job)
            self._until_ranks_end(unattended=unattended)
            return
        if not self._group.keep:
            self._group.stop()
        self._drawing(self._options.grace + _END_SECONDS)

    def _until_ranks_end(self, *, unattended: bool = False) -> None:
        """Wait for a session's ranks, as long as their C code takes, and say which these are."""
        if self._cancelled is not None:
            self._cancelled.clear()
        while not self._job.ended.wait(_DRAW_SECONDS):
            self._watcher.draw(self._job.state)
            self._waiting.look()
            if self._cancelled is not None and self._cancelled.is_set():
                raise KeyboardInterrupt
            stopped = [
                rank for rank, seconds in self._waiting.stopped.items() if seconds > self._options.grace
            ]
            if unattended and stopped:
                # Nobody may be there who would let it go on, and it is not in the middle of anything.
                self._group.restart(f"{format_ranks(stopped)} could not be interrupted: stopped by SIGSTOP")
                unattended = False

    def _drawing(self, seconds: float) -> bool:
        """Wait for the end, at most `seconds`, and show what happens meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._job.ended.wait(min(left, _DRAW_SECONDS)):
                return True
            self._watcher.draw(self._job.state)
        return self._job.ended.is_set()


def _where(state: RunState) -> str:
    """Say in one line where the ranks are."""
    groups: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        word = f"phase '{rank.phase}'" if rank.state in (State.INIT, State.STARTING) else rank.state.value
        groups.setdefault(word, []).append(rank.rank)
    return ", ".join(f"{format_ranks(ranks)} {word}" for word, ranks in groups.items())
