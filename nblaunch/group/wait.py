"""The caller's thread while a job runs: it draws, asks, and ends the job on a timeout or an interrupt."""

from __future__ import annotations

import getpass
import threading
import time
from collections.abc import Callable, Mapping

from nblaunch._errors import RunTimeoutError
from nblaunch.group.group import WorkerGroup
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import Observed, RestartAsked, Trigger
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import Answer, Asked, Collective, Noticed, Prepare
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import RankState, RunState, State, View
from nblaunch.protocol.transcript import Text


class SilentView:
    """Shows nothing."""

    shows_usage = False

    def open(self, state: RunState) -> None:
        """Show nothing."""

    def draw(self, state: RunState) -> None:
        """Show nothing."""

    def close(self, state: RunState) -> None:
        """Show nothing."""


# `--hang-after`: notice ranks that are silent inside one collective, without stopping the run.

_Pending = tuple[tuple[tuple[str, str, tuple[int, ...]], int], ...]
"""The collectives that a rank has begun and not ended: key and sequence number of each."""


class HangWatch:
    """Asks where the ranks are after a silence, and reports each hang once.

    A rank with no message and no output does not hang for that (it may compute); one that is still in the
    collective in which it was `seconds` ago does.
    """

    def __init__(self, seconds: float | None, ask: Callable[[], HangReport]) -> None:
        """With `seconds` None nothing is watched."""
        self._seconds = seconds
        self._ask = ask
        self._state: RunState | None = None
        self._silent_since = time.monotonic()
        self._before: Mapping[int, _Pending] = {}
        self._reported: set[_Pending] = set()

    def look(self, state: RunState) -> HangReport | None:
        """Return a report if the run hangs where it did not hang before."""
        if self._seconds is None:
            return None
        now = time.monotonic()
        if self._state is None or not silent_between(self._state, state):
            self._state, self._silent_since, self._before = state, now, {}
            return None
        if now - self._silent_since < (self._seconds if self._before else self._seconds / 2):
            return None
        report = self._ask()
        here = {rank: pending for rank, known in report.collectives.items() if (pending := _pending(known))}
        stuck = {pending for rank, pending in here.items() if self._before.get(rank) == pending}
        first_look, self._before = not self._before, here
        if first_look:
            return None
        self._silent_since = now
        key = tuple(collective for pending in sorted(stuck) for collective in pending)
        if not stuck or key in self._reported:
            return None
        self._reported.add(key)
        return report


def _pending(collectives: tuple[Collective, ...]) -> _Pending:
    return tuple((known.key, known.sequence) for known in collectives if not known.completed)


def silent_between(before: RunState, after: RunState) -> bool:
    """Return whether no output or message arrived between two states of a run; usage samples do not count."""
    return before is after or (
        before.ranks.keys() == after.ranks.keys()
        and _same(before, after, but="ranks")
        and all(_same(before.ranks[rank], known, but="usage") for rank, known in after.ranks.items())
    )


def _same(before: RunState | RankState, after: RunState | RankState, but: str) -> bool:
    # By identity: a fold keeps what a message has not changed, and comparing output would take long.
    names = (each for each in before.__struct_fields__ if each != but)
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


# Questions of ranks (`input`, `getpass`, a debugger), one after the other in the notebook's own input field.

_DEBUGGERS = ("(Pdb)", "ipdb>")
_FIRST_LINES = 6
_MOST_LINES = 60


class Prompts:
    """Asks the user what a job's ranks ask, and sends the answers."""

    def __init__(self, job: Job, group: WorkerGroup) -> None:
        self._job = job
        self._group = group
        self._shown: dict[int, int] = {}

    def ask(self) -> bool:
        """Put the oldest question to the user; return whether there was one."""
        if not self._job.questions:
            return False
        asked = self._job.questions.popleft()
        try:
            answer = Answer(asked.number, text=self._typed(asked))
        except Exception as error:  # noqa: BLE001 - a front end without an input field, an end of file
            answer = Answer(asked.number, error=f"nobody could be asked: {error}")
        self._group.answer(asked.rank, answer)
        return True

    def _typed(self, asked: Asked) -> str:
        if threading.current_thread() is not threading.main_thread():
            msg = "a run in the background cannot ask; run the cell without --background"
            raise EOFError(msg)
        known = self._job.state.ranks.get(asked.rank)
        if known is not None and asked.prompt.strip().startswith(_DEBUGGERS):
            self._show_news(known)
        prompt = f"[rank {asked.rank}] {asked.prompt}"
        return getpass.getpass(prompt) if asked.password else input(prompt)

    def _show_news(self, known: RankState) -> None:
        """Print what a debugger has printed since the last question: some views show it only at the end."""
        written = known.transcript.written
        before = self._shown.get(known.rank)
        self._shown[known.rank] = written
        text = "".join(entry.text for entry in known.transcript.entries if isinstance(entry, Text))
        lines = (text if before is None else text[max(len(text) - (written - before), 0) :]).splitlines()
        most = _FIRST_LINES if before is None else _MOST_LINES
        for line in lines[-most:]:
            print(f"[rank {known.rank}] {line}")  # noqa: T201 - the user is in a dialogue


# The wait.

_DRAW_SECONDS = 0.1
# An agent that cannot be moved (uninterruptible ranks) must not hold the notebook longer.
_END_SECONDS = 30.0


class Waiter:
    """Gives a job to a group, waits for its end, and makes sure that there is one."""

    def __init__(  # noqa: PLR0913, PLR0917 - a job, where it runs, what shows it and what can end it
        self,
        group: WorkerGroup,
        job: Job,
        prepare: Prepare,
        options: LaunchOptions,
        view: View,
        cancelled: threading.Event | None,
    ) -> None:
        """Prepare the wait; setting `cancelled` interrupts the job."""
        self._cancelled = cancelled or threading.Event()
        self._group = group
        self._job = job
        self._prepare = prepare
        self._options = options
        self._view = view
        self._hang_watch = HangWatch(options.hang_after, group.where)
        self._prompts = Prompts(job, group)
        self._late = LateRanks(group)
        self._grace_skipped = False

    def wait(self) -> BaseException | None:
        """Wait until the job has ended; return what ended it early: an interrupt or the timeout."""
        deadline = None if self._options.timeout is None else time.monotonic() + self._options.timeout
        try:
            self._view.open(self._job.state)
            self._group.begin(self._job, self._prepare)
            self._group.start()
            while not self._job.ended.wait(_DRAW_SECONDS):
                self._draw()
                asked = time.monotonic()
                if self._prompts.ask():
                    # The time that the user takes to type counts towards no limit.
                    self._hang_watch = HangWatch(self._options.hang_after, self._group.where)
                    deadline = None if deadline is None else deadline + time.monotonic() - asked
                hanging = self._hang_watch.look(self._job.state)
                if hanging is not None:
                    self._group.looked_at(hanging)
                    text = f"nothing heard for {self._options.hang_after:g} s\n{hanging}"
                    self._group.post(Observed(Noticed(text=text)))
                if self._cancelled.is_set():
                    return self._interrupted(KeyboardInterrupt())
                if deadline is not None and time.monotonic() > deadline:
                    return self._timed_out()
        except KeyboardInterrupt as interrupt:
            return self._interrupted(interrupt)
        return None

    def _draw(self) -> None:
        self._view.draw(self._job.state)
        self._late.look()

    def _timed_out(self) -> BaseException:
        report = self._group.where()
        self._group.looked_at(report)
        where = report.summary or _where(self._job.state)
        self.ensure_ended(unattended=True)
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
        # IPython's own protocol: the frames of this wait are of no use to the reader.
        interrupt._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
        return interrupt.with_traceback(None)

    def ensure_ended(self, *, unattended: bool = False) -> None:
        """End the job if it has not ended; if `unattended`, also where a rank's process is stopped."""
        if self._job.ended.is_set():
            return
        # An interrupt may have come before the group was given the job: then nothing else would end it.
        self._group.give_up(self._job)
        if self._group.keep and not self._grace_skipped:
            self._group.interrupt(self._job)
            self._until_ranks_end(unattended=unattended)
            return
        if not self._group.keep:
            self._group.stop()
        self._drawing(self._options.grace + _END_SECONDS)

    def _until_ranks_end(self, *, unattended: bool = False) -> None:
        """Wait for a session's ranks, as long as their C code takes, and show which these are."""
        self._cancelled.clear()
        while not self._job.ended.wait(_DRAW_SECONDS):
            self._draw()
            if self._cancelled.is_set():
                raise KeyboardInterrupt
            stopped = [rank for rank, seconds in self._late.stopped.items() if seconds > self._options.grace]
            if unattended and stopped:
                # There may be nobody to continue it, and it is not in the middle of anything.
                reason = f"{format_ranks(stopped)} could not be interrupted: stopped by SIGSTOP"
                self._group.post(RestartAsked(reason))
                unattended = False

    def _drawing(self, seconds: float) -> bool:
        """Draw until the job has ended, at most `seconds`; return whether it has."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._job.ended.wait(min(left, _DRAW_SECONDS)):
                return True
            self._view.draw(self._job.state)
        return self._job.ended.is_set()


def _where(state: RunState) -> str:
    """Return in one line where the ranks are, as far as their messages tell."""
    groups: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        word = f"phase '{rank.phase}'" if rank.state in (State.INIT, State.STARTING) else rank.state.value
        groups.setdefault(word, []).append(rank.rank)
    return ", ".join(f"{format_ranks(ranks)} {word}" for word, ranks in groups.items())
