"""One job, from its options to its outcome: place, prepare, run, wait, collect."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nblaunch import _devices, _notebook
from nblaunch._errors import LaunchError, OptionError, RunFailedError
from nblaunch._results import EventLog, Outcome, RunResult
from nblaunch.capture import pickling, shared_memory
from nblaunch.capture.capture import Captured, capture_call
from nblaunch.capture.pickling import Packed
from nblaunch.capture.shared_memory import Outgoing
from nblaunch.elastic import descriptors, hooks, rendezvous
from nblaunch.elastic.placement import (
    Placement,
    check_backend,
    check_numa_binding,
    check_start_method,
    place_ranks,
    visible_gpus,
)
from nblaunch.elastic.settings import AgentSettings, Caller, ProcessSettings, RendezvousConfig
from nblaunch.group import inherited
from nblaunch.group.group import ConnectPeers, WorkerGroup
from nblaunch.group.job import Job, OutputFilter
from nblaunch.group.lifecycle import Noted, Observed
from nblaunch.group.result import LogDirectory, collect, error_of
from nblaunch.group.runtime import LocalRuntime, local
from nblaunch.group.standby import GroupAndLogs
from nblaunch.group.usage import SeenGpus, measuring
from nblaunch.group.wait import Waiter
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import (
    CellJob,
    Dispatch,
    FunctionJob,
    Objects,
    Phase,
    Prepare,
    PullJob,
    PushJob,
    ScriptJob,
)
from nblaunch.protocol.state import RunState, View

# Options that torchelastic itself carries out.

STANDBY_SWITCH = "NBLAUNCH_STANDBY"
"""`0` turns it off; `1` turns it on outside notebooks too, where programs seldom run the same job again."""
_SWITCHED_ON = "1"


def process_settings(options: LaunchOptions, environ: Mapping[str, str]) -> ProcessSettings:
    """Return how the agent is to start processes; `environ` is that of the ranks."""
    method = options.start_method
    if method == "forkserver" and torch.backends.cuda.is_built():
        under = local().server.loaded_under()
        method = "spawn" if inherited.needs_new_python(environ, under) else method
    return ProcessSettings(
        logs_specs=options.logs_specs,
        duplicate_stdout_filters=options.duplicate_stdout_filters,
        duplicate_stderr_filters=options.duplicate_stderr_filters,
        event_log_handler=options.event_log_handler,
        numa_binding=options.numa_binding,
        start_method=method,
        virtual_local_rank=options.virtual_local_rank,
        watchdog=environ.get(hooks.SWITCH) == _SWITCHED_ON,
        timer_file=environ.get(hooks.FILE),
        environ=inherited.encoded(environ) if method == "spawn" else (),
    )


def check_process_options(options: LaunchOptions, placement: Placement, environ: Mapping[str, str]) -> None:
    """Raise `OptionError` for what cannot be carried out here; no process has started yet."""
    if options.init_process_group:
        check_backend(placement.backend, environ)
    check_start_method(options.start_method)
    hooks.check_handler(options.event_log_handler)
    hooks.find_logs_specs(options.logs_specs)
    hooks.check_line_filters((*options.duplicate_stdout_filters, *options.duplicate_stderr_filters))
    if options.numa_binding is not None:
        check_numa_binding(
            options.numa_binding,
            visible_gpus(environ),
            placement.nproc,
            virtual_local_rank=options.virtual_local_rank,
        )
    if options.virtual_local_rank and not placement.accelerators:
        _check_enough_devices(environ, placement)


def _check_enough_devices(environ: Mapping[str, str], placement: Placement) -> None:
    hip = torch.version.hip is not None
    chosen = _devices.choice_of(environ, hip=hip) or ""
    named = [part for part in chosen.split(",") if part.strip()]
    if named and len(named) < placement.nproc:
        variable = next(name for name in (_devices.HIP, *_devices.VARIABLES) if environ.get(name) == chosen)
        msg = (
            f"virtual_local_rank with {placement.nproc} ranks gives each one a GPU of its own, but "
            f"{variable}={chosen!r} names {len(named)}. Lower nproc, or leave it out."
        )
        raise OptionError(msg)


# Place and prepare: what is decided before a process starts.


@dataclass(frozen=True, slots=True)
class RankPayload:
    """What `ranks` are sent with a job, and all others that have no payload of their own."""

    captured: Captured
    ranks: frozenset[int] = frozenset()
    objects: Objects | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A job with everything that is decided before a process starts."""

    job: CellJob | FunctionJob | ScriptJob | PushJob | PullJob
    options: LaunchOptions
    placement: Placement
    environ: dict[str, str]
    title: str
    payloads: tuple[RankPayload, ...] = ()
    """One for all ranks, or one for each group of ranks that know the same; without any, nothing is sent."""
    internal: bool = False
    """Whether its result is never shown."""
    arrived: Callable[[], None] = lambda: None
    """Called once the payloads have arrived on all ranks."""
    notices: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Return the backend of the ranks' default process group, "" where none is formed."""
        return self.placement.backend if self.options.init_process_group else ""


def refuse_inside_rank() -> None:
    """Raise `LaunchError` in a process that is itself a rank."""
    rank = _notebook.inside_rank()
    if rank is not None:
        msg = (
            f"a run was started inside rank {rank} of a run, but a rank cannot start ranks of its own. Start "
            "it in the notebook, outside the distributed cell."
        )
        raise LaunchError(msg, phase=Phase.FORK.value)


def place_launch(options: LaunchOptions) -> tuple[Placement, dict[str, str]]:
    """Decide ranks, devices and backend; return them and the ranks' environment."""
    refuse_inside_rank()
    if sys.platform == "win32":
        msg = "torchelastic starts ranks on POSIX systems only, and this is Windows. Use WSL2."
        raise LaunchError(msg, phase=Phase.FORK.value)
    inherited.working_directory()
    environ = {**os.environ, **options.env}
    rdzv = rendezvous.config_of(options)
    if rdzv is not None:
        local().wait_until_left(lambda group: _leaves(group, rdzv))
        rendezvous.refuse_taken(rdzv)
        environ |= rendezvous.network_variables(rdzv, environ)
    placement = place_ranks(
        options.nproc_per_node, options.backend, environ, virtual_local_rank=options.virtual_local_rank
    )
    check_process_options(options, placement, environ)
    return placement, environ


def function_job(fn: object) -> FunctionJob:
    """Return the job that calls `fn`. Raises `OptionError` if it is not callable."""
    if not callable(fn):
        msg = f"run(): {fn!r:.200} is not callable. Pass a function or a script."
        raise OptionError(msg)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return FunctionJob(name=name.replace("<locals>.", ""))


def prepare_call(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: LaunchOptions
) -> Launch:
    """Place and capture a call of `fn` on fresh ranks."""
    job = function_job(fn)
    placement, environ = place_launch(options)
    captured = capture_call(fn, tuple(args), dict(kwargs or {}), _notebook.namespace())
    return Launch(job, options, placement, environ, job.name, (RankPayload(captured),))


# Run, wait and collect.


def run_fresh(
    launch: Launch,
    view: View,
    connect_peers: ConnectPeers,
    cancelled: threading.Event | None = None,
) -> Outcome:
    """Run a job on fresh ranks; setting `cancelled` interrupts it, from any thread."""
    runtime = local()
    runtime.server.ensure_running()
    wait_for_gpus(launch.placement)
    if launch.placement.warning:
        launch = replace(launch, notices=(*launch.notices, launch.placement.warning))
    options = launch.options
    settings = settings_of(options, launch.placement)
    # Binding to a GPU's CPUs asks the device, which ranks that may never be used must leave alone.
    ahead = options.log_dir is None and options.numa_binding is None and settings.rdzv is None
    shape = replace(settings, grace=0.0) if ahead else None
    script = isinstance(launch.job, ScriptJob)
    prepare = inherited.prepare_of(options, launch.placement, launch.environ, script=script)
    standby_group = runtime.standby.take(shape)
    try:
        if standby_group is not None:
            standby_group.group.adopt(settings)
        else:
            descriptors.make_room(settings.nproc)
            standby_group = new_group(runtime, settings, connect_peers, options.log_dir)
        warn_of_unheeded(standby_group.group, launch.environ)
        runtime.will_leave(standby_group.group)
        return run_job(standby_group, launch, prepare, view, cancelled)
    finally:
        make = functools.partial(_ahead, runtime, connect_peers)
        runtime.standby.used(shape if standby_wanted() else None, make)


def standby_wanted() -> bool:
    """Whether this process prepares groups ahead at all."""
    switch = os.environ.get(STANDBY_SWITCH, "").strip().lower()
    if switch in ("0", "false", "off", "no"):
        return False
    return bool(switch) or getattr(_notebook.shell(), "kernel", None) is not None


def warn_of_unheeded(group: WorkerGroup, environ: Mapping[str, str]) -> None:
    """Have the next job warn of variables that ranks forked from the server cannot heed."""
    if group.settings.processes.start_method == "forkserver":
        warning = inherited.unheeded(environ, local().server.environ)
        if warning:
            group.post(Noted(warning))


def new_group(
    runtime: LocalRuntime,
    settings: AgentSettings,
    connect_peers: ConnectPeers,
    log_dir: str | None = None,
    *,
    keep: bool = False,
) -> GroupAndLogs:
    """Make a group, which is not started yet; its logs lie below `log_dir`, or are its own.

    Raises `OptionError` if that directory cannot be made.
    """
    settings = _with_logs(settings, log_dir or runtime.directory.make("logs-"))
    directory = None if log_dir else LogDirectory(settings.log_dir, runtime.remove)
    group = WorkerGroup(runtime.hub, runtime.server, settings, connect_peers, keep=keep)
    runtime.keep(group)
    return GroupAndLogs(group, directory)


def _ahead(runtime: LocalRuntime, connect_peers: ConnectPeers, shape: AgentSettings) -> GroupAndLogs:
    """Start a standby group."""
    descriptors.make_room(shape.nproc)
    runtime.server.ensure_running()
    standby_group = new_group(runtime, shape, connect_peers)
    standby_group.group.start()
    return standby_group


def run_job(  # noqa: PLR0913 - a job, where it runs, what shows it and what can end it
    made: GroupAndLogs,
    launch: Launch,
    prepare: Prepare,
    view: View,
    cancelled: threading.Event | None = None,
    *,
    ranks: tuple[int, ...] | None = None,
) -> Outcome:
    """Run a job on a worker group, or on `ranks` of it; every failure is in the outcome."""
    group = made.group
    with ExitStack() as sent:
        state = RunState.fresh(group.state.world_size, ranks, time=time.time())
        output = OutputFilter.of(launch.options)
        job = Job(_dispatches(launch, sent), state, internal=launch.internal, output=output)
        job.whole = launch.arrived
        for text in launch.notices:
            job.notice(text)
        waiter = Waiter(group, job, prepare, launch.options, view, cancelled)
        shown = job.state
        try:
            seen = SeenGpus.by(prepare, alone=group.settings.processes.virtual_local_rank)
            with measuring(
                lambda: job.state,
                lambda usages: group.post(Observed(usages)),
                wanted=view.shows_usage,
                seen=seen,
            ):
                error = waiter.wait()
            local().wait_if_ending()
            try:
                result = _collect(job, launch, made)
            except KeyboardInterrupt as interrupt:
                # All values are here: a user who stops the notebook now still gets them.
                result, error = _collect(job, launch, made), interrupt
            shown = result.state
        finally:
            try:
                waiter.ensure_ended()
                group.close()
                job.values = {}
            finally:
                view.close(shown if shown.finished else job.state)
    error = error or error_of(job, result, launch.options)
    if isinstance(error, RunFailedError):
        error.result, error.root_cause = result, error.root_cause or result.root_cause
    return Outcome(result, error)


def wait_for_gpus(placement: Placement) -> None:
    """Wait until the ranks of earlier runs have exited, where they hold memory that these may need."""
    local().wait_until_left(lambda _: placement.device_type != "cpu")


def _leaves(group: WorkerGroup, rdzv: RendezvousConfig) -> bool:
    """Whether a group that has done its job still holds the port of this rendezvous."""
    held = group.settings.rdzv
    done = group.job is None or group.job.ended.is_set()
    return done and held is not None and held.port == rdzv.port


def _collect(job: Job, launch: Launch, made: GroupAndLogs) -> RunResult:
    group = made.group
    events = EventLog(group.events.so_far(), complete=True) if group.keep else group.events
    if not launch.internal:
        local().last_events = events
    return collect(
        job,
        backend=launch.placement.backend,
        title=launch.title,
        log_dir=_own_directory(job, group.settings),
        events=events,
        keep=made.logs,
    )


def settings_of(options: LaunchOptions, placement: Placement) -> AgentSettings:
    """Return the agent's settings, but for what each group has for itself."""
    rdzv = rendezvous.config_of(options)
    if rdzv is not None:
        rdzv = replace(rdzv, ranks_backend=placement.backend)
    return AgentSettings(
        nproc=placement.nproc,
        role=options.role,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        grace=options.grace,
        shutdown_timeout=options.shutdown_timeout,
        run_id=(options.rdzv_id or uuid.uuid4().hex[:12]) if rdzv is not None else "",
        log_dir=Path(),
        processes=process_settings(options, {**os.environ, **options.env}),
        rdzv=rdzv,
        caller=Caller(
            os.getpid(), "the calling process" if _notebook.shell() is None else "the notebook's kernel"
        ),
    )


def _with_logs(settings: AgentSettings, log_dir: str | Path) -> AgentSettings:
    """Return the settings with an id and a log directory, which is made."""
    directory = Path(log_dir).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = (
            f"log_dir={str(directory)!r} cannot be made: {error.strerror}. Give a directory that you can "
            "write to."
        )
        raise OptionError(msg) from error
    return replace(settings, run_id=settings.run_id or uuid.uuid4().hex[:12], log_dir=directory)


def _dispatches(launch: Launch, sent: ExitStack) -> Mapping[int | None, Dispatch]:
    """Write payloads, which `sent` frees; return what each rank is sent, under None for all others."""
    dispatches: dict[int | None, Dispatch] = {}
    written: list[tuple[Packed, Outgoing]] = []
    for each in launch.payloads or (RankPayload(Captured(pickling.dumps(()), (), {})),):
        captured = each.captured
        outgoing = next((there for packed, there in written if packed.is_same(captured.packed)), None)
        if outgoing is None:
            outgoing = sent.enter_context(shared_memory.put(captured.packed, local().directory.root))
            written.append((captured.packed, outgoing))
        dispatch = Dispatch(
            job=launch.job,
            payload=outgoing.payload,
            objects=each.objects,
            imports=captured.imports,
            internal=launch.internal,
            sources={name: (_notebook.title_of(name), source) for name, source in captured.sources.items()},
        )
        dispatches |= dict.fromkeys([None, *each.ranks], dispatch)
    return dispatches


def _own_directory(job: Job, settings: AgentSettings) -> Path | None:
    """Return this run's directory: below it are attempts, below those ranks, below those files."""
    if settings.processes.logs_specs is not None:
        return settings.log_dir  # what is where below it only the user's class knows
    for ranks in job.logs.values():
        for each in ranks.values():
            return Path(each.worker.stdout).parents[2]
    return None
