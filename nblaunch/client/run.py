"""One job, from its capture to its outcome: submit, wait (draw, ask the user, interrupt), collect."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
import threading
import time
from contextlib import ExitStack

from nblaunch import _notebook
from nblaunch._errors import LaunchError, NblaunchError, RunFailedError, RunPreemptedError, RunTimeoutError
from nblaunch._help import FailureKind
from nblaunch._inherited import JOIN_KEY
from nblaunch._results import Outcome, RunResult
from nblaunch.client.facts import JobReporter
from nblaunch.client.line import deferring_interrupts, noting_interrupts
from nblaunch.client.local import local
from nblaunch.client.preparation import (
    ClientJob,
    KeptJob,
    RemoteEvents,
    code_of,
    dispatches,
    with_whole_paths,
)
from nblaunch.client.result import collect, error_of
from nblaunch.protocol import client as wire
from nblaunch.protocol.messages import Answer, Asked, RunEnded, encode
from nblaunch.protocol.state import RankState, RunState, View, decode_folded, decode_state
from nblaunch.protocol.transcript import Text

_DRAW_SECONDS = 0.1
# Between an interrupt of a kernel and the request to end it; that of a detached session's job waits as long.
_END_SECONDS = 0.5
_MOST_INTERRUPTS = 2
_UNWATCH_SECONDS = 2.0
_CONSOLE = "console"


class StoppedWatchingError(Exception):
    """The user has stopped watching a job, which goes on."""

    def __init__(self) -> None:
        super().__init__("stopped watching; the job goes on")

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook; IPython's own protocol."""
        return [str(self)]


class SilentView:
    """Shows nothing."""

    shows_usage = False

    def open(self, state: RunState) -> None:
        """Show nothing."""

    def draw(self, state: RunState) -> None:
        """Show nothing."""

    def close(self, state: RunState) -> None:
        """Show nothing."""


# Questions of ranks (`input`, `getpass`, a debugger), one after the other in the notebook's own input field.

_DEBUGGERS = ("(Pdb)", "ipdb>")
_FIRST_LINES = 6
_MOST_LINES = 60


class Prompts:
    """Asks the user what a job's ranks ask, and sends the answers."""

    def __init__(self, job: ClientJob) -> None:
        self._job = job
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
        self._job.line.send(wire.Reply(job=self._job.number, rank=asked.rank, answer=answer))
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


class JobWait:
    """Follows a job until it has ended, on the thread that is to show it.

    Stopping the notebook interrupts the job, and goes on following it; the second time its ranks are ended.
    """

    def __init__(self, job: ClientJob, view: View, cancelled: threading.Event | None = None) -> None:
        """Prepare the wait; setting `cancelled` interrupts the job, from any thread.

        While the job is only watched, an interrupt ends the wait alone.
        """
        self.interrupt: KeyboardInterrupt | None = None
        """The first interrupt."""
        self._job = job
        self._view = view
        self._cancelled = cancelled or threading.Event()
        self._raised = False
        """Whether an interrupt was raised on this thread since the last one that came here."""
        self._prompts = Prompts(job)
        self._interrupts = 0
        self._sent = 0
        self._draw_at = time.monotonic() + _DRAW_SECONDS

    def wait(self) -> None:
        """Return once the job has ended.

        Raises `LaunchError` if the runtime has, or at a third interrupt; `StoppedWatchingError` if the user
        only watched.
        """
        with noting_interrupts(self._note_raised):
            while not self._job.ended:
                try:
                    self.send_interrupts()
                    self._follow()
                except KeyboardInterrupt as interrupt:
                    self._raised = False
                    if self._job.watching():
                        raise StoppedWatchingError from interrupt
                    self.interrupted(interrupt)

    def _note_raised(self) -> None:
        # A signal handler must take no lock: the code that it interrupts may hold that.
        self._raised = True

    def interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Note that the user has stopped the notebook; raises `LaunchError` the third time."""
        self.interrupt = self.interrupt or interrupt
        self._interrupts += 1
        if self._interrupts > _MOST_INTERRUPTS:
            # Those that were noted and not sent yet: once it answers again, the job is to end.
            for _ in range(_MOST_INTERRUPTS - self._sent):
                self._job.line.send(wire.InterruptJob(job=self._job.number))
            msg = (
                "The run was interrupted three times, and has not ended: its ranks or the runtime do not "
                "answer. They are left as they are; restart the kernel to end them."
            )
            raise LaunchError(msg, phase="job", kind=FailureKind.HANG) from interrupt

    def send_interrupts(self) -> None:
        # A front end that restarts or ends a kernel interrupts it just before: that is not meant for the job.
        if self._interrupts > self._sent == 0 and self._job.private and _notebook.ends_within(_END_SECONDS):
            raise StoppedWatchingError
        while self._sent < self._interrupts:
            self._job.line.send(wire.InterruptJob(job=self._job.number))
            self._sent += 1

    def _follow(self) -> None:
        while not self._job.ended:
            self._take_all()
            self._draw()
            if self.interrupt is None:
                self._prompts.ask()
            if self._cancelled.is_set() or self._raised:
                self._cancelled.clear()
                raise KeyboardInterrupt

    def _take_all(self) -> None:
        """Fold all that is here; where nothing is, wait until the next drawing is due."""
        while not self._job.ended and self._job.line.poll(max(self._draw_at - time.monotonic(), 0.0)):
            # A message that was read and not folded would be lost.
            with deferring_interrupts():
                for _ in range(max(self._job.line.kept, 1)):
                    self._take()
            if time.monotonic() >= self._draw_at:
                return

    def _take(self) -> None:
        frame = self._job.line.next(0.0)
        if frame is None:
            return
        _, number, content = frame
        if not isinstance(content, bytes):
            self._job.take(content)
            self._job.others(content)
        elif number == self._job.number:
            self._job.fold(decode_folded(content))

    def _draw(self) -> None:
        if time.monotonic() >= self._draw_at and not self._job.ended:
            self._view.draw(self._job.state)
            self._draw_at = time.monotonic() + _DRAW_SECONDS


# From the capture to the outcome.


def run_fresh(job: ClientJob, view: View, cancelled: threading.Event | None = None) -> Outcome:
    """Run a job on fresh ranks; setting `cancelled` interrupts it, from any thread."""
    job.notices = (*job.notices, *job.ranks.notices)
    job.options = with_whole_paths(job.options, "log_dir", "metrics_file")
    with job.ranks.runtime.line() as job.line:
        return run_job(job, view, cancelled)


def run_job(job: ClientJob, view: View, cancelled: threading.Event | None = None) -> Outcome:
    """Submit a job and wait for its end; every failure of the job is in the outcome."""
    job.begin()
    wait = JobWait(job, view, cancelled)
    try:
        _submit(job, wait, usage=view.shows_usage or job.private)
        return _follow_to_end(job, view, wait)
    except (NblaunchError, StaleError, StoppedWatchingError):
        raise
    except BaseException:
        _ensure_ended(job)
        raise


def watch_job(job: ClientJob, snapshot: wire.JobSnapshot, view: View) -> Outcome:
    """Show a job that goes on, or has ended, until its end. Raises `StoppedWatchingError` if interrupted."""
    job.number, job.state = snapshot.job.number, decode_state(snapshot.state)
    job.ended, job.end = snapshot.end is not None, snapshot.end or job.end
    job.questions.extend(snapshot.questions)
    job.watching = lambda: True
    return _follow_to_end(job, view, JobWait(job, view))


def _follow_to_end(job: ClientJob, view: View, wait: JobWait) -> Outcome:
    kept = KeptJob(job.ranks, job.number)
    shown = job.state
    try:
        view.open(job.state)
        error: BaseException | None = None
        try:
            wait.wait()
        except NblaunchError as gone:
            error = gone
        local().wait_if_ending()
        try:
            result = _collect(job, kept)
        except KeyboardInterrupt as late:
            # All values are here: a user who stops the notebook now still gets them.
            result = _collect(job, kept)
            wait.interrupt = late
        shown = result.state
        kept.note_output(shown)
        error = error or _interruption(job, wait.interrupt)
    except StoppedWatchingError:
        # What comes before the answer is not of the next one that watches this job.
        with contextlib.suppress(LaunchError, TimeoutError):
            job.line.ask(wire.UnwatchJob(job=job.number), _UNWATCH_SECONDS)
        raise
    finally:
        view.close(shown if shown.finished else job.state)
    error = error or error_of(job, result)
    if isinstance(error, RunFailedError):
        error.result, error.root_cause = result, error.root_cause or result.root_cause
    elif isinstance(error, RunPreemptedError):
        error.result = result
    return Outcome(result, error)


class StaleError(Exception):
    """The session's ranks were replaced after the job was captured."""


def _submit(job: ClientJob, wait: JobWait, *, usage: bool) -> None:
    """Submit the job; an interrupt that comes meanwhile is sent to it.

    Once the runtime has answered it holds what the job brings.
    """
    with ExitStack() as sent:
        code = code_of(job)
        order = wire.JobOrder(
            number=job.number,
            dispatches=dispatches(job, sent, lambda: job.ranks.runtime.root, code),
            state=encode(job.state),
            title=job.title,
            options=job.options,
            internal=job.internal,
            usage=usage,
            query=job.query,
            code=code,
        )
        request = wire.SubmitJob(session=job.ranks.key, order=order, attempt=job.attempt)
        while True:
            try:
                if job.request is None:
                    # It waits until the runtime has read: what was submitted must be known.
                    with deferring_interrupts():
                        job.request = job.line.begin(request)
                if isinstance(job.line.answer_to(job.request), wire.Stale):
                    raise StaleError
            except KeyboardInterrupt as stop:
                if job.request is None:
                    raise
                wait.interrupted(stop)
                wait.send_interrupts()
            else:
                return


def _interruption(job: ClientJob, interrupt: KeyboardInterrupt | None) -> BaseException | None:
    early = job.end.early
    if early is not None and early.timeout:
        return RunTimeoutError(early.message, hang_report=job.state.hang)
    if early is None and interrupt is None:
        return None
    interrupt = interrupt or KeyboardInterrupt()
    message = f"the run was interrupted: {job.state.where}" if early is None else early.message
    interrupt.args = (message,)
    # There is no result where this is caught; a notebook shows these beside the output.
    for notice in job.state.notices[early.notices_from :] if early is not None else ():
        interrupt.add_note(notice)
    # IPython's own protocol: the frames of this wait are of no use to the reader.
    interrupt._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
    return interrupt.with_traceback(None)


def _ensure_ended(job: ClientJob) -> None:
    """End a job that was submitted: an interrupt, or an error of ours, has come between two steps."""
    if job.ended or job.request is None or job.line.closed:
        return
    job.line.send(wire.InterruptJob(job=job.number))
    try:
        refused = isinstance(job.line.answer_to(job.request), wire.Stale)
    except NblaunchError:
        refused = True
    if not refused:
        wait = JobWait(job, SilentView())
        wait.interrupt = KeyboardInterrupt()  # the user is asked nothing more
        wait.wait()


def _collect(job: ClientJob, kept: KeptJob) -> RunResult:
    if not job.ended:
        # The runtime has ended, and all ranks with it.
        job.fold(RunEnded(time=time.time(), stopped=False))
    events = RemoteEvents(job.ranks.runtime, job.number)
    if not job.internal:
        local().last_events = events
        if job.options.event_log_handler == _CONSOLE:
            # torch's own handler prints where the agent is: in the runtime, whose log nobody reads.
            sys.stderr.write("".join(f"{event.json}\n" for event in events.all()))
    result = collect(job, events, kept, JobReporter(job.options, os.environ.get(JOIN_KEY, ""), job.end))
    if job.options.log_dir and result.profile is not None and result.profile.ranks:
        _ = result.profile.path  # where the user keeps the logs
    sent = [each for rank in job.state.ranks.values() for each in (rank.value, rank.profile)]
    if job.ended and any(each is not None and each.inline is None for each in sent):
        job.line.send(wire.Taken(job=job.number))
    return result
