"""How a job ends that does not end by itself: by an interrupt or its timeout; and what is seen of a hang."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

from nblaunch.group.group import WorkerGroup
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import Observed, RestartAsked, Trigger
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import EarlyEnd
from nblaunch.protocol.messages import Collective, Noticed
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import RankState, RunState

# `--hang-after`: notice ranks that are silent inside one collective, without stopping the run.

_Operation = tuple[tuple[str, str, tuple[int, ...]], int]
"""Key and sequence number of a collective."""
_Pending = tuple[_Operation, ...]
"""The collectives that a rank has begun and not ended."""


class HangWatch:
    """Says when to ask where the ranks are, after a silence, and which answers show another hang.

    It reads no clock (`now` is monotonic) and asks nobody.

    A rank with no message and no output does not hang for that (it may compute); one that is still in the
    collective in which it was `seconds` ago does.
    """

    def __init__(self, seconds: float | None) -> None:
        """With `seconds` None nothing is watched."""
        self._seconds = seconds
        self._state: RunState | None = None
        self._silent_since = 0.0
        self._before: Mapping[int, _Pending] = {}
        self._reported: set[_Operation] = set()

    def due(self, state: RunState, now: float) -> bool:
        """Return whether the run has been silent for so long that its ranks are to be asked."""
        if self._seconds is None:
            return False
        if self._state is None or not silent_between(self._state, state):
            self._state, self._silent_since, self._before = state, now, {}
            return False
        return now - self._silent_since >= (self._seconds if self._before else self._seconds / 2)

    def hangs(self, report: HangReport, now: float) -> bool:
        """Return whether the run hangs where it did not hang before; `now` is when the ranks were asked."""
        here = {rank: pending for rank, known in report.collectives.items() if (pending := _pending(known))}
        still = (pending for rank, pending in here.items() if self._before.get(rank) == pending)
        stuck = {operation for pending in still for operation in pending}
        first_look, self._before = not self._before, here
        if first_look:
            return False
        self._silent_since = now
        # Fewer than before are no other hang: to nccl2 (torch 2.15) what has ended is open for a second.
        if stuck <= self._reported:
            return False
        self._reported |= stuck
        return True


def _pending(collectives: tuple[Collective, ...]) -> _Pending:
    return tuple((known.key, known.sequence) for known in collectives if not known.completed)


def silent_between(before: RunState, after: RunState) -> bool:
    """Return whether no output or message of a rank arrived between two states of a run.

    Usage samples and an engine's reports do not count.
    """
    return before is after or (
        before.ranks.keys() == after.ranks.keys()
        and _same(before, after, but=("ranks", "engine"))
        and all(_same(before.ranks[rank], known, but=("usage",)) for rank, known in after.ranks.items())
    )


def _same(before: RunState | RankState, after: RunState | RankState, but: tuple[str, ...]) -> bool:
    # By identity: a fold keeps what a message has not changed, and comparing output would take long.
    names = (each for each in before.__struct_fields__ if each not in but)
    return before is after or all(getattr(before, name) is getattr(after, name) for name in names)


# Interrupted ranks that are still at work: shown with where they are, and for how long.

# All but ranks in C code answer an interrupt sooner than this.
_FIRST_SECONDS = 0.6
_ASK_SECONDS = 0.3
_BETWEEN_SECONDS = 1.0
STOPPED = "its process is stopped"


class LateRanks:
    """Shows about once a second which interrupted ranks are still at work."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._look_at = 0.0
        self._shown: dict[int, str] = {}
        self.stopped: dict[int, float] = {}
        """The ranks whose process is stopped (SIGSTOP), and how many seconds ago each was interrupted."""

    def look(self) -> None:
        """Ask where the late ranks are, unless that was done a moment ago."""
        now = time.monotonic()
        late = {rank: since for rank, since in self._group.waited_for.items() if now - since > _FIRST_SECONDS}
        if now < self._look_at or not (late or self._shown):
            return
        places = _places(self._group.where(_ASK_SECONDS)) if late else {}
        # faulthandler takes its time for each rank that holds its interpreter.
        self._look_at = time.monotonic() + max(_BETWEEN_SECONDS, 2 * (time.monotonic() - now))
        self._shown = {
            rank: f"interrupted {now - since:.0f} s ago, {places.get(rank, 'still at work')}"
            for rank, since in late.items()
        }
        self.stopped = {rank: now - since for rank, since in late.items() if STOPPED in places.get(rank, "")}
        self._group.waits_for(self._shown)

    def imports(self) -> bool:
        """Return whether all late ranks are inside imports."""
        groups = self._group.where(_ASK_SECONDS).groups
        importing = {rank for group in groups if group.importing for rank in group.ranks}
        late = set(self._group.waited_for)
        return bool(late) and late <= importing


def _places(report: HangReport) -> dict[int, str]:
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


# The end.

_LOOK_SECONDS = 0.1
# An agent that cannot be moved (uninterruptible ranks) must not hold the job longer.
_END_SECONDS = 30.0


class Ending:
    """Watches a job that takes a while on a thread of its own, and makes sure that it ends.

    It interrupts the job where a client asks for that, ends it after its timeout, and reports a hang.
    """

    def __init__(self, group: WorkerGroup, job: Job, options: LaunchOptions) -> None:
        """Prepare; `run` is for a thread."""
        self._group = group
        self._job = job
        self._options = options
        self._hang_watch = HangWatch(options.hang_after)
        self._late = LateRanks(group)
        self._woken = threading.Event()
        self._interrupts = 0
        job.when_ended.append(self._woken.set)

    def interrupt(self) -> None:
        """Interrupt the job; the second time its ranks are ended. From any thread."""
        self._interrupts += 1
        self._woken.set()

    def run(self, began: float) -> EarlyEnd | None:
        """Wait until the job has ended; return what ended it early. `began` is monotonic."""
        deadline = math.inf if self._options.timeout is None else began + self._options.timeout
        before = began
        while not self._ended_in(min(_LOOK_SECONDS, deadline - before)):
            now = time.monotonic()
            if self._interrupts:
                return self._interrupted()
            if self._job.questions or self._awaits_nodes:
                # The time that the user takes to type, or a request waits in a queue, counts for no limit.
                deadline += now - before
                self._hang_watch = HangWatch(self._options.hang_after)
            if now > deadline:
                return self._timed_out()
            self._late.look()
            self._look_for_hang()
            before = now
        return None

    @property
    def _awaits_nodes(self) -> bool:
        state = self._job.state
        return state.engine is not None and state.engine.state.early and not state.begun

    def _look_for_hang(self) -> None:
        now = time.monotonic()
        if not self._hang_watch.due(self._job.state, now):
            return
        hanging = self._group.where()
        if self._hang_watch.hangs(hanging, now):
            self._group.looked_at(hanging)
            text = f"nothing heard for {self._options.hang_after:g} s\n{hanging}"
            self._group.post(Observed(Noticed(text=text)))

    def _ended_in(self, seconds: float) -> bool:
        """Wait until the job has ended or is interrupted, at most `seconds`; return whether it has ended."""
        self._woken.wait(max(seconds, 0.0))
        if self._job.ended.is_set():
            return True
        self._woken.clear()
        return self._job.ended.is_set()

    def _timed_out(self) -> EarlyEnd:
        report = self._group.where()
        self._group.looked_at(report)
        where = report.summary or self._job.state.where
        self._end()
        message = f"the run was given {self._options.timeout:g} s and did not end in that time: {where}"
        return EarlyEnd(timeout=True, message="\n".join((message, *report.findings)))

    def _interrupted(self) -> EarlyEnd:
        """Give the ranks the time to end by themselves; a second interrupt ends them.

        Fresh ranks have the grace period. Those of a session hold variables: a rank in C code is waited for,
        and one that is importing, which the second interrupt only breaks off.
        """
        where, lost = self._job.state.where, ""
        findings: tuple[str, ...] = ()
        noticed = len(self._job.state.notices)
        if not self._awaits_nodes:
            report = self._group.where(_ASK_SECONDS)
            self._group.looked_at(report)
            where, findings = report.summary or where, report.findings
        self._group.interrupt(self._job)
        if self._group.keep:
            self._until_ranks_end(interrupts=1)
            if not self._job.ended.is_set() and self._late.imports():
                self._group.post(Trigger.INTERRUPT_IMPORTS)
                self._until_ranks_end(interrupts=2)
        elif not self._ended_by(self._options.grace, interrupts=1) and self._interrupts == 1:
            self._group.post(Trigger.INTERRUPT_AGAIN)
            self._ended_by(_END_SECONDS, interrupts=1)
        if not self._job.ended.is_set():
            self._group.post(Trigger.INTERRUPT_AGAIN)
            if self._group.keep:
                ranks = format_ranks(self._group.state.ranks)
                lost = f"; it was interrupted again, so {ranks} were replaced and their variables are lost"
            self._ended_by(self._options.grace + _END_SECONDS)
        message = f"the run was interrupted: {where}{lost}"
        return EarlyEnd(timeout=False, message="\n".join((message, *findings)), notices_from=noticed)

    def _end(self) -> None:
        """End the job after its timeout; where a rank's process is stopped, all are replaced."""
        if self._group.keep:
            self._group.interrupt(self._job)
            self._until_ranks_end(interrupts=self._interrupts, unattended=True)
            if self._job.ended.is_set():
                return
            self._group.post(Trigger.INTERRUPT_AGAIN)
        else:
            self._group.stop()
        self._ended_by(self._options.grace + _END_SECONDS)

    def _until_ranks_end(self, *, interrupts: int, unattended: bool = False) -> None:
        """Wait for a session's ranks, as long as their C code takes, and show which these are.

        Returns early at another interrupt than the first `interrupts`.
        """
        while not self._ended_in(_LOOK_SECONDS) and self._interrupts <= interrupts:
            self._late.look()
            stopped = [rank for rank, seconds in self._late.stopped.items() if seconds > self._options.grace]
            if unattended and stopped:
                # There may be nobody to continue it, and it is not in the middle of anything.
                reason = f"{format_ranks(stopped)} could not be interrupted: stopped by SIGSTOP"
                self._group.post(RestartAsked(reason))
                unattended = False

    def _ended_by(self, seconds: float, interrupts: float = math.inf) -> bool:
        """Wait at most `seconds`, or for another interrupt; return whether the job has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self._interrupts <= interrupts:
            if self._ended_in(left):
                return True
        return self._job.ended.is_set()
