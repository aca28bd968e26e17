"""One run from its options to its result: place, capture, start, wait, collect."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nblaunch import _join_key
from nblaunch._errors import LaunchError, NblaunchError, OptionError, RunFailedError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import CellJob, Dispatch, FunctionJob, Phase, Prepare, PullJob, PushJob
from nblaunch._reports import format_ranks
from nblaunch._results import RankFailure, RunResult
from nblaunch._state import RunState, State
from nblaunch.agent import devices, forkserver, meetings, runtime
from nblaunch.agent.contract import AgentSettings, Meeting
from nblaunch.agent.devices import Placement
from nblaunch.job import shared
from nblaunch.job.capture import Captured
from nblaunch.session import hub, notebook, outcome
from nblaunch.session.ending import Ending, Watcher
from nblaunch.session.group import WorkerGroup
from nblaunch.session.job import Job
from nblaunch.session.standby import Seat, Standby
from nblaunch.session.usage import measuring

_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A job with everything that is decided before a process starts."""

    job: CellJob | FunctionJob | PushJob | PullJob
    captured: Captured
    options: LaunchOptions
    placement: Placement
    environ: dict[str, str]
    title: str
    cancelled: threading.Event | None = None
    """Whoever sets it interrupts the run, from any thread."""
    aside: bool = False
    """Whether its result is seen by nobody."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, and what is to be raised once the result is where the user can reach it."""

    result: RunResult | None
    error: BaseException | None


def refuse_inside_rank() -> None:
    """Raise `LaunchError` in a process that is itself a rank."""
    rank = notebook.inside_rank()
    if rank is not None:
        msg = (
            f"A run was asked for inside rank {rank} of a run, but a rank cannot start ranks of its own. "
            "Call it in the notebook, outside the distributed cell."
        )
        raise LaunchError(msg, phase=Phase.FORK.value)


def place(options: LaunchOptions) -> tuple[Placement, dict[str, str]]:
    """Decide ranks, devices and backend; return them and the ranks' environment."""
    refuse_inside_rank()
    if sys.platform == "win32":
        msg = "Ranks were asked for on Windows, but torchelastic's start needs POSIX. Use WSL2."
        raise LaunchError(msg, phase=Phase.FORK.value)
    environ = {**os.environ, **options.env}
    meeting = meetings.meeting_of(options)
    if meeting is not None:
        _wait_for_groups(lambda group: _leaves(group, meeting))
        meetings.refuse_taken(meeting)
        environ |= meetings.network_variables(meeting, environ.__contains__)
    return devices.place(options.nproc_per_node, options.backend, environ), environ


def perform(launch: Launch, watcher: Watcher) -> Outcome:
    """Run a job on fresh ranks to its end, whatever that is; every failure is in the outcome."""
    forkserver.server.ensure_running()
    wait_for_gpus(launch.placement)
    options = launch.options
    settings = settings_of(options, launch.placement)
    settings = with_key(settings)
    plain = options.log_dir is None and settings.meeting is None
    shape = replace(settings, grace=0.0) if plain else None
    prepare = prepare_of(options, launch.placement, launch.environ)
    seat = standby.take(shape)
    try:
        if seat is not None:
            seat.group.adopt(settings)
        else:
            seat = _seat(with_logs(settings, options), private=options.log_dir is None)
        _leaving.append(weakref.ref(seat.group))
        if settings.meeting is not None:
            keep(seat.group)  # its agent waits for other nodes at the end
        return conduct(seat.group, launch, prepare, watcher, private=seat.private)
    finally:
        standby.used(shape)


def _seat(settings: AgentSettings, *, private: bool) -> Seat:
    """Make a group; it is not started yet."""
    kept = outcome.LogDirectory(settings.log_dir) if private else None
    return Seat(WorkerGroup(hub.get(), settings), kept)


def _ahead(shape: AgentSettings) -> Seat:
    """Start a group before it is asked for."""
    forkserver.server.ensure_running()
    seat = _seat(with_logs(shape), private=True)
    keep(seat.group)
    seat.group.start()
    return seat


standby = Standby(_ahead)
"""This kernel's group that is ready before it is asked for."""


def conduct(  # noqa: PLR0913 - a job, where it runs, and who looks on
    group: WorkerGroup,
    launch: Launch,
    prepare: Prepare,
    watcher: Watcher,
    *,
    private: object,
    ranks: tuple[int, ...] | None = None,
) -> Outcome:
    """Give a group a job, wait for its end, and collect what came of it; `ranks` are those that take part."""
    with shared.put(launch.captured.packed, runtime.root) as outgoing:
        state = RunState.fresh(group.state.world_size, ranks, time=time.time())
        job = Job(_dispatch(launch, outgoing.payload), state, aside=launch.aside)
        ending = Ending(group, job, prepare, launch.options, watcher, launch.cancelled)
        shown = job.state
        try:
            with measuring(lambda: job.state, group.measured, wanted=watcher.shows_usage):
                error = ending.wait()
            try:
                result = _collect(job, launch, private)
            except KeyboardInterrupt as interrupt:
                # All values are here: whoever stops the notebook now still gets them.
                result, error = _collect(job, launch, private), interrupt
            shown = result.state
        finally:
            try:
                ending.ensure()
                group.close()
                job.values = {}
            finally:
                watcher.close(shown if shown.finished else job.state)
    error = error or _error(job, result, launch.options)
    if isinstance(error, RunFailedError):
        error.result, error.root_cause = result, error.root_cause or result.root_cause
    return Outcome(result, error)


_kept: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
_keeper_pid = 0


def keep(group: WorkerGroup) -> None:
    """Remember a group that outlives its runs: it must go before the fork server does."""
    global _keeper_pid
    if _keeper_pid != os.getpid():
        # A fork of the kernel: the groups so far are its parent's.
        _kept.clear()
        _keeper_pid = os.getpid()
    _kept.add(group)


_leaving: list[weakref.ref[WorkerGroup]] = []


def wait_for_gpus(placement: Placement) -> None:
    """Wait until the ranks of earlier runs are gone, where they hold memory that this one may need."""
    _wait_for_groups(lambda _: placement.device_type != "cpu")


def _wait_for_groups(wanted: Callable[[WorkerGroup], bool]) -> None:
    _leaving[:] = [each for each in _leaving if (group := each()) is not None and not group.closed.is_set()]
    for each in _leaving:
        group = each()
        if group is not None and wanted(group):
            group.closed.wait(_END_SECONDS)


def _leaves(group: WorkerGroup, meeting: Meeting) -> bool:
    """Whether a group that has done its job still holds the place where others are to meet."""
    held = group.settings.meeting
    done = group.job is None or group.job.ended.is_set()
    return done and held is not None and held.port == meeting.port


def with_key(settings: AgentSettings) -> AgentSettings:
    """Give the nodes of a run the key by which they know each other; say how to join if nobody has it yet."""
    meeting = settings.meeting
    if meeting is None:
        return settings
    key, made = _join_key.read_or_make(os.environ, runtime.root)
    if made and meeting.most > 1:
        static = " --rdzv-backend static --node-rank 1" if meeting.backend == "static" else ""
        print(  # noqa: T201 - nobody else can say it, and the run waits
            f"To join from another terminal, or from a machine to which you copy the key file:\n"
            f"{_join_key.KEY_FILE}={made} python -m nblaunch join --rdzv-endpoint "
            f"{meeting.host}:{meeting.port} "
            f"--rdzv-id {settings.run_id}{static} -n {settings.nproc}",
            flush=True,
        )
    return replace(settings, meeting=replace(meeting, key=key))


def _collect(job: Job, launch: Launch, private: object) -> RunResult:
    return outcome.collect(
        job,
        backend=launch.placement.backend,
        title=launch.title,
        log_dir=_own_directory(job),
        keep=private,
    )


def settings_of(options: LaunchOptions, placement: Placement) -> AgentSettings:
    """Return what the agent needs to know, but for what each group has for itself."""
    meeting = meetings.meeting_of(options)
    if meeting is not None:
        meeting = replace(meeting, ranks_backend=placement.backend)
    return AgentSettings(
        nproc=placement.nproc,
        role=options.role,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        grace=options.grace,
        shutdown_timeout=options.shutdown_timeout,
        run_id=(options.rdzv_id or uuid.uuid4().hex[:12]) if meeting is not None else "",
        log_dir=Path(),
        meeting=meeting,
    )


def with_logs(settings: AgentSettings, options: LaunchOptions | None = None) -> AgentSettings:
    """Return the settings with an id, and a log directory of its own or the one that the options ask for.

    Raises `OptionError` if that cannot be made.
    """
    wanted = options.log_dir if options is not None else None
    directory = Path(wanted).absolute() if wanted else runtime.make_directory("logs-")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = (
            f"log_dir={str(directory)!r} was asked for, but it cannot be made: {error.strerror}. "
            "Give a directory that you can write to."
        )
        raise OptionError(msg) from error
    return replace(settings, run_id=settings.run_id or uuid.uuid4().hex[:12], log_dir=directory)


def prepare_of(
    options: LaunchOptions,
    placement: Placement,
    environ: Mapping[str, str],
    *,
    timeout: float | None = None,
) -> Prepare:
    """Return what makes processes the ranks of this notebook, as it is now."""
    return Prepare(
        environ=tuple(os.fsencode(f"{name}={value}") for name, value in _join_key.without(environ).items()),
        cwd=str(Path.cwd()),
        path=tuple(os.path.abspath(entry) for entry in sys.path),  # noqa: PTH100 - resolve() follows links
        argv=tuple(sys.argv[:1]) or ("",),
        backend=placement.backend if options.init_process_group else None,
        device_type=placement.device_type,
        accelerators=placement.accelerators,
        timeout=timeout,
    )


def _dispatch(launch: Launch, payload: object) -> Dispatch:
    sources = {
        filename: (notebook.title_of(filename), source)
        for filename, source in launch.captured.sources.items()
    }
    return Dispatch(
        job=launch.job,
        payload=payload,  # type: ignore[arg-type]
        imports=launch.captured.imports,
        sources=sources,
    )


def _own_directory(job: Job) -> Path | None:
    """Return this run's directory: below it are attempts, below those ranks, below those files."""
    for ranks in job.logs.values():
        for logs in ranks.values():
            return Path(logs.worker.stdout).parents[2]
    return None


def _error(job: Job, result: RunResult, options: LaunchOptions) -> BaseException | None:
    """Return the error that a run which was not cut short ends with, if it failed."""
    if job.launch_failure is not None:
        phase, message = job.launch_failure
        return LaunchError(message, phase=phase)
    if job.error is not None:
        if isinstance(job.error, NblaunchError):
            return job.error
        phase = _phase_of(job.error, job.state)
        error: BaseException = LaunchError(
            f"phase '{phase}' broke: {type(job.error).__name__}: {job.error}", phase=phase
        )
        error.__cause__ = job.error
        return error
    root = result.root_cause
    if root is None:
        if result.ok:
            return None
        return KeyboardInterrupt("the run was interrupted") if job.interrupted else _unfinished(result)
    if root.phase in (Phase.FORK, Phase.CONNECT, Phase.PROCESS_GROUP):
        error = LaunchError(
            f"the ranks could not be started: phase '{root.phase}' failed on rank {root.rank}: {root.reason}"
            + (f"\n{root.last_output}" if root.last_output else ""),
            phase=root.phase.value,
        )
    else:
        error = RunFailedError(describe(result, root, options), result=result, root_cause=root)
    error.__cause__ = root.exception
    return error


def _unfinished(result: RunResult) -> RunFailedError:
    """Say that ranks have no value although none failed: a peer's process ended after its value came."""
    ranks = [each.rank for each in result.ranks if each.state is not State.SUCCEEDED]
    warnings = "".join(f"\n{warning}" for warning in result.warnings)
    msg = (
        f"{format_ranks(ranks)} of {result.world_size} did not finish: the group ended before that{warnings}"
    )
    return RunFailedError(msg, result=result)


def _phase_of(error: BaseException, state: RunState) -> str:
    """Return the phase in which the agent itself broke."""
    if type(error).__name__.startswith("Rendezvous"):
        return "rendezvous"
    phases = list(Phase)
    return max((rank.phase for rank in state.ranks.values()), key=phases.index, default=Phase.FORK).value


def describe(result: RunResult, root: RankFailure, options: LaunchOptions) -> str:
    """Say which rank failed, how, where, and what became of the others; no times, no pids."""
    # A mistake in the code fails every rank alike; who is first by the clock differs from run to run.
    causes = [failure for failure in result.failures if failure.consequence_of is None]
    alike = [failure.rank for failure in causes if failure.reason == root.reason]
    lines = [f"{format_ranks(alike)} of {result.world_size} failed: {root.reason}"]
    if root.frame is not None and root.frame.source:
        lines[0] += f"\n    {root.frame.source}"
    failed_too = [failure.rank for failure in causes if failure.rank not in alike]
    if failed_too:
        lines.append(f"{format_ranks(failed_too)} failed too")
    ended = [failure.rank for failure in result.failures if failure.consequence_of is not None]
    ended += [each.rank for each in result.ranks if each.state is State.STOPPED]
    if ended:
        lines.append(f"{format_ranks(ended)} ended because of that")
    if options.max_restarts:
        lines.append(f"in attempt {len(result.attempts)} of {options.max_restarts + 1}")
    if root.type == "ProcessExited" and root.last_output:
        lines.append(f"last output of rank {root.rank}:\n{root.last_output}")
    return "\n".join(lines)


def close() -> None:
    """End the fork server and the hub and remove the runtime directory; the next run starts anew."""
    standby.close()
    ours = _keeper_pid == os.getpid()
    groups = [group for group in _kept if ours and not group.closed.is_set()]
    for group in groups:
        # Before the fork server: an agent whose ranks are lost would start others.
        group.stop()
    for group in groups:
        group.closed.wait(_END_SECONDS)
    # While the keeper lives: whoever kills this process from here on leaves nothing that it would not remove.
    runtime.remove_root()
    forkserver.server.stop()
    hub.close()
    runtime.remove_root()


atexit.register(close)
