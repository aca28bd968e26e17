"""One job, from its capture to its outcome: submit, wait, collect."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from contextlib import ExitStack

from nblaunch._errors import (
    LaunchError,
    NblaunchError,
    RunFailedError,
    RunPreemptedError,
    RunTimeoutError,
)
from nblaunch._results import Outcome, RunResult
from nblaunch.client.facts import reporter_of
from nblaunch.client.jobs import ClientJob, KeptJob, RemoteEvents
from nblaunch.client.launch import code_of, dispatches, with_log_dir, with_metrics_file
from nblaunch.client.line import deferring_interrupts
from nblaunch.client.local import local
from nblaunch.client.result import collect, error_of
from nblaunch.client.wait import JobWait, SilentView, StoppedWatchingError
from nblaunch.protocol.client import GiveJob, InterruptJob, JobOrder, JobSnapshot, Stale, Taken, UnwatchJob
from nblaunch.protocol.messages import RunEnded
from nblaunch.protocol.state import View, decode_state, encode_state

_UNWATCH_SECONDS = 2.0
_CONSOLE = "console"


def run_fresh(job: ClientJob, view: View, cancelled: threading.Event | None = None) -> Outcome:
    """Run a job on fresh ranks; setting `cancelled` interrupts it, from any thread."""
    job.notices = (*job.notices, *job.ranks.notices)
    job.options = with_metrics_file(with_log_dir(job.options))
    with job.ranks.runtime.line() as job.line:
        return run_job(job, view, cancelled)


def run_job(job: ClientJob, view: View, cancelled: threading.Event | None = None) -> Outcome:
    """Submit a job and wait for its end; every failure of the job is in the outcome."""
    job.begin()
    wait = JobWait(job, view, cancelled)
    try:
        _submit(job, wait, usage=view.shows_usage or job.private)
        return _followed(job, view, wait)
    except (NblaunchError, StaleError, StoppedWatchingError):
        raise
    except BaseException:
        _ensure_ended(job)
        raise


def watch_job(job: ClientJob, snapshot: JobSnapshot, view: View) -> Outcome:
    """Show a job that goes on, or has ended, until its end. Raises `StoppedWatchingError` if interrupted."""
    job.number, job.state, job.end = snapshot.job.number, decode_state(snapshot.state), snapshot.end
    job.questions.extend(snapshot.questions)
    job.watching = lambda: True
    return _followed(job, view, JobWait(job, view))


def _followed(job: ClientJob, view: View, wait: JobWait) -> Outcome:
    """Follow a job until it has ended, and return its outcome."""
    kept = KeptJob(job.ranks.runtime, job.number)
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
        error = error or _early(job, wait.interrupt)
    except StoppedWatchingError:
        # What comes before the answer is not of the next one that watches this job.
        with contextlib.suppress(LaunchError, TimeoutError):
            job.line.ask(UnwatchJob(job=job.number), _UNWATCH_SECONDS)
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
    """The session's ranks are others than those that the job was captured for."""


def _submit(job: ClientJob, wait: JobWait, *, usage: bool) -> None:
    """Submit the job; an interrupt that comes meanwhile is sent to it.

    Once the runtime has answered it holds what the job brings.
    """
    with ExitStack() as sent:
        code = code_of(job)
        order = JobOrder(
            number=job.number,
            dispatches=dispatches(job, sent, job.ranks.runtime.spill, code),
            state=encode_state(job.state),
            title=job.title,
            options=job.options,
            internal=job.internal,
            usage=usage,
            look=job.look,
            code=code,
        )
        request = GiveJob(session=job.ranks.key, order=order, attempt=job.attempt)
        while True:
            try:
                if job.request is None:
                    # It waits until the runtime has read: what was submitted must be known.
                    with deferring_interrupts():
                        job.request = job.line.begin(request)
                if isinstance(job.line.answer_to(job.request), Stale):
                    raise StaleError
            except KeyboardInterrupt as stop:
                if job.request is None:
                    raise
                wait.interrupted(stop)
                wait.send_interrupts()
            else:
                return


def _early(job: ClientJob, interrupt: KeyboardInterrupt | None) -> BaseException | None:
    """Return what ended the job early: its timeout or an interrupt."""
    early = None if job.end is None else job.end.early
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
    if job.end is not None or job.request is None or job.line.closed:
        return
    job.line.send(InterruptJob(job=job.number))
    try:
        refused = isinstance(job.line.answer_to(job.request), Stale)
    except NblaunchError:
        refused = True
    if not refused:
        wait = JobWait(job, SilentView())
        wait.interrupt = KeyboardInterrupt()  # the user is asked nothing more
        wait.wait()


def _collect(job: ClientJob, kept: KeptJob) -> RunResult:
    if job.end is None:
        # The runtime has ended, and all ranks with it.
        job.fold(RunEnded(time=time.time(), stopped=False))
    events = RemoteEvents(job.ranks.runtime, job.number)
    if not job.internal:
        local().last_events = events
        if job.options.event_log_handler == _CONSOLE:
            # torch's own handler prints where the agent is: in the runtime, whose log nobody reads.
            sys.stderr.write("".join(f"{event.json}\n" for event in events.all()))
    result = collect(job, events, kept, reporter_of(job))
    if job.options.log_dir and result.profile is not None and result.profile.ranks:
        _ = result.profile.path  # where the user keeps the logs
    sent = [each for rank in job.state.ranks.values() for each in (rank.value, rank.profile)]
    if job.end is not None and any(each is not None and each.inline is None for each in sent):
        job.line.send(Taken(job=job.number))
    return result
