"""One run: its options become settings, its job is placed, sent and waited for, its result is collected."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nblaunch import _devices, _notebook
from nblaunch._errors import LaunchError, OptionError, RunFailedError
from nblaunch._results import EventLog, RunResult
from nblaunch.capture import shared_memory
from nblaunch.capture.capture import Captured
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
from nblaunch.elastic.settings import AgentSettings, ProcessSettings, RendezvousConfig
from nblaunch.group import inherited
from nblaunch.group.group import ConnectPeers, WorkerGroup
from nblaunch.group.job import Job, OutputFilter
from nblaunch.group.lifecycle import Noted, Observed
from nblaunch.group.result import LogDirectory, collect, error_of
from nblaunch.group.runtime import LocalRuntime, local
from nblaunch.group.standby import StandbyGroup
from nblaunch.group.usage import Seen, measuring
from nblaunch.group.wait import Ending, Watcher
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
from nblaunch.protocol.state import RunState

# Options that torchelastic itself carries out: what they become, and what is wrong with them.


_SWITCHED_ON = "1"


def process_settings(options: LaunchOptions, environ: Mapping[str, str]) -> ProcessSettings:
    """Return what the agent is to know; `environ` is that of the ranks."""
    method = options.start_method
    built = torch.backends.cuda.is_built()
    if (
        method == "forkserver"
        and built
        and inherited.needs_new_python(environ, local().server.loaded_under())
    ):
        method = "spawn"
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
            f"virtual_local_rank was asked for with {placement.nproc} ranks, which gives each rank one GPU "
            f"of its own, but {variable}={chosen!r} names {len(named)}. Lower nproc, or leave it out."
        )
        raise OptionError(msg)


# One run from its options to its result: place, capture, start, wait, collect.


@dataclass(frozen=True, slots=True)
class RankPayload:
    """What ranks that stay are sent with a job; ranks that know the same get the same."""

    ranks: frozenset[int]
    captured: Captured
    objects: Objects | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A job with everything that is decided before a process starts."""

    job: CellJob | FunctionJob | ScriptJob | PushJob | PullJob
    captured: Captured
    options: LaunchOptions
    placement: Placement
    environ: dict[str, str]
    title: str
    cancelled: threading.Event | None = None
    """Whoever sets it interrupts the run, from any thread."""
    internal: bool = False
    """Whether its result is seen by nobody."""
    rank_payloads: tuple[RankPayload, ...] = ()
    """In place of `captured`, where ranks are sent different things."""
    arrived: Callable[[], None] = lambda: None
    """Called once all parcels are where they belong."""
    notices: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Return the backend of the ranks' default process group, nothing where none is formed."""
        return self.placement.backend if self.options.init_process_group else ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, and what is to be raised once the result is where the user can reach it."""

    result: RunResult | None
    error: BaseException | None


def refuse_inside_rank() -> None:
    """Raise `LaunchError` in a process that is itself a rank."""
    rank = _notebook.inside_rank()
    if rank is not None:
        msg = (
            f"A run was asked for inside rank {rank} of a run, but a rank cannot start ranks of its own. "
            "Call it in the notebook, outside the distributed cell."
        )
        raise LaunchError(msg, phase=Phase.FORK.value)


def place_launch(options: LaunchOptions) -> tuple[Placement, dict[str, str]]:
    """Decide ranks, devices and backend; return them and the ranks' environment."""
    refuse_inside_rank()
    if sys.platform == "win32":
        msg = "Ranks were asked for on Windows, but torchelastic's start needs POSIX. Use WSL2."
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


def run_fresh(launch: Launch, watcher: Watcher, connect_peers: ConnectPeers) -> Outcome:
    """Run a job on fresh ranks to its end, whatever that is; every failure is in the outcome."""
    runtime = local()
    runtime.server.ensure_running()
    wait_for_gpus(launch.placement)
    if launch.placement.warning:
        launch = replace(launch, notices=(*launch.notices, launch.placement.warning))
    options = launch.options
    settings = settings_of(options, launch.placement)
    # Binding to a GPU's CPUs asks the device, which ranks that nobody may ever want must leave alone.
    ahead = options.log_dir is None and options.numa_binding is None and settings.rdzv is None
    shape = replace(settings, grace=0.0) if ahead else None
    script = isinstance(launch.job, ScriptJob)
    prepare = prepare_of(options, launch.placement, launch.environ, script=script)
    standby_group = runtime.standby.take(shape)
    try:
        if standby_group is not None:
            standby_group.group.adopt(settings)
        else:
            descriptors.make_room(settings.nproc)
            standby_group = new_group(runtime, settings, connect_peers, options.log_dir)
        warn_of_unheeded(standby_group.group, launch.environ)
        runtime.will_leave(standby_group.group)
        return run_job(standby_group.group, launch, prepare, watcher, private=standby_group.private)
    finally:
        runtime.standby.used(shape, functools.partial(_ahead, runtime, connect_peers))


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
) -> StandbyGroup:
    """Make a group, which is not started yet; its logs lie below `log_dir`, or are its own.

    Raises `OptionError` if that directory cannot be made.
    """
    settings = _with_logs(settings, log_dir or runtime.directory.make("logs-"))
    private = None if log_dir else LogDirectory(settings.log_dir, runtime.remove)
    group = WorkerGroup(runtime.hub, runtime.server, settings, connect_peers, keep=keep)
    runtime.keep(group)
    return StandbyGroup(group, private)


def _ahead(runtime: LocalRuntime, connect_peers: ConnectPeers, shape: AgentSettings) -> StandbyGroup:
    """Start a group before it is asked for."""
    descriptors.make_room(shape.nproc)
    runtime.server.ensure_running()
    standby_group = new_group(runtime, shape, connect_peers)
    standby_group.group.start()
    return standby_group


def run_job(  # noqa: PLR0913 - a job, where it runs, and who looks on
    group: WorkerGroup,
    launch: Launch,
    prepare: Prepare,
    watcher: Watcher,
    *,
    private: object,
    ranks: tuple[int, ...] | None = None,
) -> Outcome:
    """Give a group a job, wait for its end, and collect what came of it; `ranks` are those that take part."""
    with ExitStack() as sent:
        state = RunState.fresh(group.state.world_size, ranks, time=time.time())
        output = OutputFilter.of(launch.options)
        job = Job(_dispatches(launch, sent), state, internal=launch.internal, output=output)
        job.whole = launch.arrived
        for text in launch.notices:
            job.notice(text)
        ending = Ending(group, job, prepare, launch.options, watcher, launch.cancelled)
        shown = job.state
        try:
            seen = Seen.by(prepare, alone=group.settings.processes.virtual_local_rank)
            with measuring(
                lambda: job.state,
                lambda usages: group.post(Observed(usages)),
                wanted=watcher.shows_usage,
                seen=seen,
            ):
                error = ending.wait()
            local().wait_if_ending()
            try:
                result = _collect(group, job, launch, private)
            except KeyboardInterrupt as interrupt:
                # All values are here: whoever stops the notebook now still gets them.
                result, error = _collect(group, job, launch, private), interrupt
            shown = result.state
        finally:
            try:
                ending.ensure()
                group.close()
                job.values = {}
            finally:
                watcher.close(shown if shown.finished else job.state)
    error = error or error_of(job, result, launch.options)
    if isinstance(error, RunFailedError):
        error.result, error.root_cause = result, error.root_cause or result.root_cause
    return Outcome(result, error)


def wait_for_gpus(placement: Placement) -> None:
    """Wait until the ranks of earlier runs are gone, where they hold memory that this one may need."""
    local().wait_until_left(lambda _: placement.device_type != "cpu")


def _leaves(group: WorkerGroup, rdzv: RendezvousConfig) -> bool:
    """Whether a group that has done its job still holds the place where others are to meet."""
    held = group.settings.rdzv
    done = group.job is None or group.job.ended.is_set()
    return done and held is not None and held.port == rdzv.port


def _collect(group: WorkerGroup, job: Job, launch: Launch, private: object) -> RunResult:
    events = EventLog(group.events.so_far(), complete=True) if group.keep else group.events
    if not launch.internal:
        local().last_events = events
    return collect(
        job,
        backend=launch.placement.backend,
        title=launch.title,
        log_dir=_own_directory(job, group.settings),
        events=events,
        keep=private,
    )


def settings_of(options: LaunchOptions, placement: Placement) -> AgentSettings:
    """Return what the agent needs to know, but for what each group has for itself."""
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
    )


def _with_logs(settings: AgentSettings, log_dir: str | Path) -> AgentSettings:
    """Return the settings with an id and a log directory, which is made."""
    directory = Path(log_dir).absolute()
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
    script: bool = False,
) -> Prepare:
    """Return what makes processes the ranks of this notebook, as it is now.

    A `script` finds what it finds under torchrun: its own directory in place of an interactive session's,
    and, unless it is to have a process group, devices that nobody has touched.
    """
    untouched = script and not options.init_process_group and placement.device_type != "cpu"
    # torchrun leaves this in its environment, so its workers have it; here no handler is ever installed.
    environ = {**environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle}
    return Prepare(
        environ=inherited.encoded(environ),
        cwd=inherited.working_directory(),
        path=tuple(os.fsencode(os.path.abspath(entry)) for entry in sys.path if entry or not script),  # noqa: PTH100 - not resolve(), which follows links
        argv=tuple(os.fsencode(each) for each in sys.argv[:1]) or (b"",),
        umask=inherited.umask(),
        limits=inherited.limits(placement.nproc),
        backend=placement.backend if options.init_process_group else None,
        device_type="" if untouched else placement.device_type,
        accelerators=placement.accelerators,
        timeout=timeout,
    )


def _dispatches(launch: Launch, sent: ExitStack) -> Mapping[int | None, Dispatch]:
    """Write payloads, which `sent` frees; return what each rank is sent, under None for all others."""
    dispatches: dict[int | None, Dispatch] = {}
    written: list[tuple[Packed, Outgoing]] = []
    for rank_payload in launch.rank_payloads or (RankPayload(frozenset(), launch.captured),):
        captured = rank_payload.captured
        outgoing = next((there for packed, there in written if packed.is_same(captured.packed)), None)
        if outgoing is None:
            outgoing = sent.enter_context(shared_memory.put(captured.packed, local().directory.root))
            written.append((captured.packed, outgoing))
        dispatch = Dispatch(
            job=launch.job,
            payload=outgoing.payload,
            objects=rank_payload.objects,
            imports=captured.imports,
            internal=launch.internal,
            sources={name: (_notebook.title_of(name), source) for name, source in captured.sources.items()},
        )
        dispatches |= dict.fromkeys([None, *rank_payload.ranks], dispatch)
    return dispatches


def _own_directory(job: Job, settings: AgentSettings) -> Path | None:
    """Return this run's directory: below it are attempts, below those ranks, below those files."""
    if settings.processes.logs_specs is not None:
        return settings.log_dir  # what is where below it only the user's class knows
    for ranks in job.logs.values():
        for each in ranks.values():
            return Path(each.worker.stdout).parents[2]
    return None
