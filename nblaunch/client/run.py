"""One job, from its launch to its outcome: give, wait, collect."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from nblaunch._errors import (
    LaunchError,
    NblaunchError,
    RunFailedError,
    RunPreemptedError,
    RunTimeoutError,
)
from nblaunch._inherited import JOIN_KEY
from nblaunch._results import Outcome, RunResult
from nblaunch.client.facts import reporter_of
from nblaunch.client.inherited import prepare_of
from nblaunch.client.jobs import JobView, KeptJob, RemoteEvents
from nblaunch.client.launch import (
    Launch,
    code_of,
    dispatches,
    environment_for,
    standby_wanted,
    with_log_dir,
    with_metrics_file,
)
from nblaunch.client.line import ClientLine, deferring_interrupts
from nblaunch.client.local import Runtime, local
from nblaunch.client.result import collect, error_of
from nblaunch.client.wait import JobWait, SilentView, StoppedWatchingError
from nblaunch.options.launch import LaunchOptions
from nblaunch.options.streams import OutputFilter
from nblaunch.protocol.client import (
    Given,
    InterruptJob,
    JobOrder,
    JobSnapshot,
    Request,
    RunFresh,
    Stale,
    Taken,
    UnwatchJob,
)
from nblaunch.protocol.messages import Noticed, RunEnded, ScriptJob
from nblaunch.protocol.state import RunState, View, advance, decode_state, encode_state

_UNWATCH_SECONDS = 2.0
_CONSOLE = "console"


def run_fresh(launch: Launch, view: View, cancelled: threading.Event | None = None) -> Outcome:
    """Run a job on fresh ranks; setting `cancelled` interrupts it, from any thread."""
    notices = (launch.placement.warning, launch.unheeded)
    launch = replace(launch, notices=(*launch.notices, *filter(None, notices)))
    script = isinstance(launch.job, ScriptJob)
    prepare = prepare_of(launch.options, launch.placement, launch.environ, script=script)
    launch = replace(launch, options=with_metrics_file(with_log_dir(launch.options)))
    environment = environment_for(launch.options)
    runtime = local().runtime

    def request(order: JobOrder) -> RunFresh:
        return RunFresh(
            order=order,
            placement=launch.placement,
            prepare=prepare,
            standby=standby_wanted(),
            join_key=launch.environ.get(JOIN_KEY, ""),
            environment=environment,
        )

    with runtime.line() as line:
        return run_job(Giver(runtime, line, request), launch, view, cancelled)


@dataclass(frozen=True, slots=True)
class Giver:
    """How a job is given: on which connection, and by which request."""

    runtime: Runtime
    line: ClientLine
    request: Callable[[JobOrder], Request[Given | Stale]]
    others: Callable[[object], None] = lambda _: None
    """Takes the events that are not the job's."""
    watching: Callable[[], bool] = lambda: False
    """Whether this process only watches what it has given: another client gives the jobs by now."""
    private: bool = False
    """Whether the runtime keeps values for other clients."""


def run_job(
    giver: Giver,
    launch: Launch,
    view: View,
    cancelled: threading.Event | None = None,
    *,
    ranks: tuple[int, ...] | None = None,
) -> Outcome:
    """Give the runtime a job and wait for its end; every failure of the job is in the outcome."""
    state = RunState.fresh(launch.placement.nproc, ranks, time=time.time())
    captured = (text for each in launch.payloads for text in each.captured.notices)
    for text in dict.fromkeys((*launch.notices, *captured)):
        state = advance(state, Noticed(text=text))
    job = JobView(
        giver.runtime.number(),
        state,
        output=OutputFilter.of(launch.options),
        kept=launch.arrived,
        private=giver.private,
    )
    wait = JobWait(giver.line, job, view, cancelled, giver.others, giver.watching)
    about = About(launch.title, launch.options, launch.placement.backend, internal=launch.internal)
    try:
        _give(giver, job, launch, wait, usage=view.shows_usage or giver.private)
        return _followed(giver, job, about, view, wait)
    except (NblaunchError, StaleError, StoppedWatchingError):
        raise
    except BaseException:
        _ensure_ended(giver.line, job)
        raise


@dataclass(frozen=True, slots=True)
class About:
    """What a result says of its job besides its state."""

    title: str
    options: LaunchOptions
    backend: str
    internal: bool = False


def watch_job(giver: Giver, snapshot: JobSnapshot, backend: str, view: View) -> Outcome:
    """Show a job that goes on, or has ended, until its end. Raises `StoppedWatchingError` if interrupted."""
    options = snapshot.options
    state = decode_state(snapshot.state)
    job = JobView(snapshot.job.number, state, output=OutputFilter.of(options), private=giver.private)
    job.questions.extend(snapshot.questions)
    job.end = snapshot.end
    wait = JobWait(giver.line, job, view, None, giver.others, lambda: True)
    return _followed(giver, job, About(snapshot.job.title, options, backend), view, wait)


def _followed(giver: Giver, job: JobView, about: About, view: View, wait: JobWait) -> Outcome:
    """Follow a job until it has ended, and return its outcome."""
    kept = KeptJob(giver.runtime, job.number)
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
            result = _collect(job, about, kept, giver)
        except KeyboardInterrupt as late:
            # All values are here: a user who stops the notebook now still gets them.
            result = _collect(job, about, kept, giver)
            wait.interrupt = late
        shown = result.state
        error = error or _early(job, wait.interrupt)
    except StoppedWatchingError:
        # What comes before the answer is not of the next one that watches this job.
        with contextlib.suppress(LaunchError, TimeoutError):
            giver.line.ask(UnwatchJob(job=job.number), _UNWATCH_SECONDS)
        raise
    finally:
        view.close(shown if shown.finished else job.state)
    error = error or error_of(job, result, about.options)
    if isinstance(error, RunFailedError):
        error.result, error.root_cause = result, error.root_cause or result.root_cause
    elif isinstance(error, RunPreemptedError):
        error.result = result
    return Outcome(result, error)


class StaleError(Exception):
    """The session's ranks are others than those that the job was captured for."""


def _give(giver: Giver, job: JobView, launch: Launch, wait: JobWait, *, usage: bool) -> None:
    """Give the job; an interrupt that comes meanwhile is sent to it.

    Once the runtime has answered it holds what the job brings.
    """
    with ExitStack() as sent:
        code = code_of(launch)
        order = JobOrder(
            number=job.number,
            dispatches=dispatches(launch, sent, giver.runtime.spill, code),
            state=encode_state(job.state),
            title=launch.title,
            options=launch.options,
            internal=launch.internal,
            usage=usage,
            look=launch.look,
            code=code,
        )
        request = giver.request(order)
        while True:
            try:
                if job.request is None:
                    # It waits until the runtime has read: what was given, and what was not, must be known.
                    with deferring_interrupts():
                        job.request = giver.line.begin(request)
                if isinstance(giver.line.answer_to(job.request), Stale):
                    raise StaleError
            except KeyboardInterrupt as stop:
                if job.request is None:
                    raise
                wait.interrupted(stop)
                wait.send_interrupts()
            else:
                return


def _early(job: JobView, interrupt: KeyboardInterrupt | None) -> BaseException | None:
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


def _ensure_ended(line: ClientLine, job: JobView) -> None:
    """End a job that was given: an interrupt, or an error of ours, has come between two steps."""
    if job.end is not None or job.request is None or line.closed:
        return
    line.send(InterruptJob(job=job.number))
    try:
        refused = isinstance(line.answer_to(job.request), Stale)
    except NblaunchError:
        refused = True
    if not refused:
        wait = JobWait(line, job, SilentView(), None)
        wait.interrupt = KeyboardInterrupt()  # the user is asked nothing more
        wait.wait()


def _collect(job: JobView, about: About, kept: KeptJob, giver: Giver) -> RunResult:
    if job.end is None:
        # The runtime has ended, and all ranks with it.
        job.state = advance(job.state, RunEnded(time=time.time(), stopped=False))
    events = RemoteEvents(giver.runtime, job.number)
    if not about.internal:
        local().last_events = events
        if about.options.event_log_handler == _CONSOLE:
            # torch's own handler prints where the agent is: in the runtime, whose log nobody reads.
            sys.stderr.write("".join(f"{event.json}\n" for event in events.all()))
    directory = job.end.log_dir if job.end is not None else ""
    result = collect(
        job,
        backend=(job.end.backend if job.end is not None else "") or about.backend,
        title=about.title,
        log_dir=Path(directory) if directory else None,
        events=events,
        keep=kept,
        profiled=(about.options.profile or about.options.profile_steps is not None) and not about.internal,
        reporter=reporter_of(job, about.options),
    )
    if about.options.log_dir and result.profile is not None and result.profile.ranks:
        _ = result.profile.path  # where the user keeps the logs
    sent = [each for rank in job.state.ranks.values() for each in (rank.value, rank.profile)]
    if job.end is not None and any(each is not None and each.inline is None for each in sent):
        giver.line.send(Taken(job=job.number))
    return result
