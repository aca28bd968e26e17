"""The caller's wait for the end of a job, and what sees to it that there is one: timeout, interrupt, hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from nblaunch._errors import RunTimeoutError
from nblaunch.group.group import WorkerGroup
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import Observed, RestartAsked, Trigger
from nblaunch.group.prompts import Answers
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import Collective, Noticed, Prepare
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import RankState, RunState, State

# `--hang-after`: notice ranks that are silent inside one collective, without stopping the run.

_Begun = tuple[tuple[tuple[str, str, tuple[int, ...]], int], ...]


class HangWatch:
    """Asks where the ranks are once nothing has been heard for a while, and says what it finds once.

    A rank with no message and no output is not a hang by itself (it may compute); one that is still in the
    collective in which it was `seconds` ago is.
    """

    def __init__(self, seconds: float | None, ask: Callable[[], HangReport]) -> None:
        """Watch for `seconds` of silence; None watches nothing."""
        self._seconds = seconds
        self._ask = ask
        self._state: RunState | None = None
        self._heard = time.monotonic()
        self._before: Mapping[int, _Begun] = {}
        self._told: set[_Begun] = set()

    def look(self, state: RunState) -> HangReport | None:
        """Return a report of a run in this state, if there is anything new to say about it."""
        if self._seconds is None:
            return None
        now = time.monotonic()
        if self._state is None or not silent_between(self._state, state):
            self._state, self._heard, self._before = state, now, {}
            return None
        if now - self._heard < (self._seconds if self._before else self._seconds / 2):
            return None
        report = self._ask()
        here = {rank: begun for rank, known in report.collectives.items() if (begun := _begun(known))}
        stuck = {rank for rank, begun in here.items() if self._before.get(rank) == begun}
        first_look, self._before = not self._before, here
        if first_look:
            return None
        self._heard = now
        waiting = tuple(sorted({begun for rank, begun in here.items() if rank in stuck}))
        key = tuple(pair for begun in waiting for pair in begun)
        if not stuck or key in self._told:
            return None
        self._told.add(key)
        return report


def _begun(collectives: tuple[Collective, ...]) -> _Begun:
    """Return the collectives that a rank has begun and not ended."""
    return tuple((known.key, known.sequence) for known in collectives if not known.completed)


def silent_between(before: RunState, after: RunState) -> bool:
    """Return whether nothing was heard between two states of a run; that ranks were measured says nothing."""
    return before is after or (
        before.ranks.keys() == after.ranks.keys()
        and _same(before, after, but="ranks")
        and all(_same(before.ranks[rank], known, but="usage") for rank, known in after.ranks.items())
    )


def _same(before: RunState | RankState, after: RunState | RankState, but: str) -> bool:
    # By identity: a fold keeps what a message has not changed, and comparing output would take long.
    names = (each for each in before.__struct_fields__ if each != but)
    return before is after or all(getattr(before, name) is getattr(after, name) for name in names)


# Which ranks an ending job waits for, where they are, and for how long; on the caller's thread.


# An interrupt is answered sooner than this by all but ranks in C code.
_FIRST_SECONDS = 0.6
_ASK_SECONDS = 0.3
_BETWEEN_SECONDS = 1.0
STOPPED = "its process is stopped"


class Group(Protocol):
    """What is asked of the ranks."""

    @property
    def waited_for(self) -> Mapping[int, float]:
        """The ranks that have been interrupted and are still at work, and since when (monotonic)."""

    def where(self, seconds: float) -> HangReport:
        """Ask every rank where it is."""

    def waits_for(self, ranks: Mapping[int, str]) -> None:
        """Show for each of these ranks what is said of it."""


class Waiting:
    """Looks at the ranks that are waited for, about once a second."""

    def __init__(self, group: Group) -> None:
        """Begin with nothing said."""
        self._group = group
        self._look_at = 0.0
        self._said: dict[int, str] = {}
        self.stopped: dict[int, float] = {}
        """The ranks whose process is stopped (SIGSTOP), and for how many seconds each has been waited for."""

    def look(self) -> None:
        """Say which ranks are waited for, if any are, and if that was not done a moment ago."""
        now = time.monotonic()
        late = {rank: since for rank, since in self._group.waited_for.items() if now - since > _FIRST_SECONDS}
        if now < self._look_at or not (late or self._said):
            return
        places = places_of(self._group.where(_ASK_SECONDS)) if late else {}
        # faulthandler takes its time for each rank that holds its interpreter.
        self._look_at = time.monotonic() + max(_BETWEEN_SECONDS, 2 * (time.monotonic() - now))
        self._said = {
            rank: f"interrupted {now - since:.0f} s ago, {places.get(rank, 'still at work')}"
            for rank, since in late.items()
        }
        self.stopped = {rank: now - since for rank, since in late.items() if STOPPED in places.get(rank, "")}
        self._group.waits_for(self._said)


def places_of(report: HangReport) -> dict[int, str]:
    """Return where each rank is, in one line."""
    found = {rank: f"still {group.headline}" for group in report.groups for rank in group.ranks}
    for rank, stack in report.silent.items():
        innermost = next((line.strip() for line in reversed(stack.splitlines()) if line.strip()), "")
        if innermost.startswith(STOPPED):
            found[rank] = f"but {innermost}"
        else:
            at = f", at {innermost}" if innermost else ""
            found[rank] = f"still in C code that holds its interpreter{at}"
    return found


# The wait.


_DRAW_SECONDS = 0.1
# An agent that cannot be moved (uninterruptible ranks) must not hold the notebook for ever.
_END_SECONDS = 30.0


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
        self._grace_skipped = False

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
                    text = f"nothing heard for {self._options.hang_after:g} s\n{hanging}"
                    self._group.post(Observed(Noticed(text=text)))
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
                    self._group.post(Trigger.INTERRUPT_AGAIN)
                self._drawing(_END_SECONDS)
        except KeyboardInterrupt:
            self._grace_skipped = True
            self._group.post(Trigger.INTERRUPT_AGAIN)
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
        if self._group.keep and not self._grace_skipped:
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
                reason = f"{format_ranks(stopped)} could not be interrupted: stopped by SIGSTOP"
                self._group.post(RestartAsked(reason))
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
