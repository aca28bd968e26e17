"""One run from its options to its result: place, capture, start, wait, collect."""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nblaunch._errors import LaunchError, NblaunchError, OptionError, RunFailedError, RunTimeoutError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import CellJob, Dispatch, FunctionJob, Phase, Prepare
from nblaunch._reports import format_ranks
from nblaunch._results import RankFailure, RunResult
from nblaunch._state import RunState, State
from nblaunch.agent import devices, forkserver, runtime
from nblaunch.agent.devices import Placement
from nblaunch.agent.elastic import AgentSettings
from nblaunch.job import shared
from nblaunch.job.capture import Captured
from nblaunch.session import hub, notebook, outcome
from nblaunch.session.group import WorkerGroup
from nblaunch.session.hang_watch import HangWatch
from nblaunch.session.usage import measuring

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


@dataclass(frozen=True, slots=True)
class Launch:
    """A job with everything that is decided before a process starts."""

    job: CellJob | FunctionJob
    captured: Captured
    options: LaunchOptions
    placement: Placement
    environ: dict[str, str]
    title: str


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
    return devices.place(options.nproc_per_node, options.backend, environ), environ


def perform(launch: Launch, watcher: Watcher) -> Outcome:
    """Run a job to its end, whatever that is; every failure is in the outcome."""
    forkserver.server.ensure_running()
    settings = _settings(launch)
    private = None if launch.options.log_dir else outcome.LogDirectory(settings.log_dir)
    with shared.put(launch.captured.packed, runtime.root) as outgoing:
        group = WorkerGroup(hub.get(), settings, _prepare(launch), _dispatch(launch, outgoing.payload))
        ending = _Ending(group, launch.options, watcher)
        state = group.state
        try:
            with measuring(lambda: group.state, group.measured, wanted=watcher.shows_usage):
                error = ending.wait()
            try:
                result = _collect(group, launch, private)
            except KeyboardInterrupt as interrupt:
                # All values are here: whoever stops the notebook now still gets them.
                result, error = _collect(group, launch, private), interrupt
            state = result.state
        finally:
            try:
                ending.ensure()
                group.close()
            finally:
                watcher.close(state if state.finished else group.state)
    error = error or _error(group, result, launch.options)
    if isinstance(error, RunFailedError):
        error.result, error.root_cause = result, error.root_cause or result.root_cause
    return Outcome(result, error)


def _collect(group: WorkerGroup, launch: Launch, private: object) -> RunResult:
    return outcome.collect(
        group,
        backend=launch.placement.backend,
        title=launch.title,
        log_dir=_own_directory(group),
        keep=private,
    )


class _Ending:
    """Waits for a group's end, and sees to it that there is one."""

    def __init__(self, group: WorkerGroup, options: LaunchOptions, watcher: Watcher) -> None:
        self._group = group
        self._options = options
        self._watcher = watcher
        self._hang_watch = HangWatch(options.hang_after, group.where)

    def wait(self) -> BaseException | None:
        """Wait until all is over; return what ended it early: an interrupt or the timeout."""
        deadline = None if self._options.timeout is None else time.monotonic() + self._options.timeout
        try:
            self._watcher.open(self._group.state)
            self._group.start()
            while not self._group.ended.wait(_DRAW_SECONDS):
                self._watcher.draw(self._group.state)
                hanging = self._hang_watch.look(self._group.state)
                if hanging is not None:
                    self._group.looked_at(hanging)
                    self._group.notice(f"nothing heard for {self._options.hang_after:g} s\n{hanging}")
                if deadline is not None and time.monotonic() > deadline:
                    return self._timed_out()
        except KeyboardInterrupt as interrupt:
            return self._interrupted(interrupt)
        return None

    def _timed_out(self) -> BaseException:
        report = self._group.where()
        self._group.looked_at(report)
        where = report.summary or _where(self._group.state)
        self._group.stop()
        self.ensure()
        return RunTimeoutError(
            f"the run was given {self._options.timeout:g} s and did not end in that time: {where}"
            + "".join(f"\n{finding}" for finding in report.findings),
            hang_report=report,
        )

    def _interrupted(self, interrupt: KeyboardInterrupt) -> BaseException:
        """Give the ranks the grace period to end by themselves; a second interrupt skips it."""
        where = _where(self._group.state)
        try:
            report = self._group.where(_ASK_SECONDS)
            self._group.looked_at(report)
            where = report.summary or where
            self._group.interrupt()
            if not self._drawing(self._options.grace):
                self._group.hurry()
            self._drawing(_END_SECONDS)
        except KeyboardInterrupt:
            self._group.hurry()
            self.ensure()
        message = f"the run was interrupted: {where}"
        interrupt.args = (message,)
        # IPython's own protocol; the frames of our waiting are no news.
        interrupt._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
        return interrupt.with_traceback(None)

    def ensure(self) -> None:
        """End the group if it has not ended."""
        if not self._group.ended.is_set():
            self._group.stop()
            self._drawing(self._options.grace + _END_SECONDS)

    def _drawing(self, seconds: float) -> bool:
        """Wait for the end, at most `seconds`, and show what happens meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._group.ended.wait(min(left, _DRAW_SECONDS)):
                return True
            self._watcher.draw(self._group.state)
        return self._group.ended.is_set()


def _where(state: RunState) -> str:
    """Say in one line where the ranks are."""
    groups: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        word = f"phase '{rank.phase}'" if rank.state in (State.INIT, State.STARTING) else rank.state.value
        groups.setdefault(word, []).append(rank.rank)
    return ", ".join(f"{format_ranks(ranks)} {word}" for word, ranks in groups.items())


def _settings(launch: Launch) -> AgentSettings:
    options = launch.options
    directory = Path(options.log_dir).absolute() if options.log_dir else runtime.make_directory("logs-")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = (
            f"log_dir={str(directory)!r} was asked for, but it cannot be made: {error.strerror}. "
            "Give a directory that you can write to."
        )
        raise OptionError(msg) from error
    return AgentSettings(
        nproc=launch.placement.nproc,
        role=options.role,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        grace=options.grace,
        shutdown_timeout=options.shutdown_timeout,
        run_id=uuid.uuid4().hex[:12],
        log_dir=directory,
    )


def _prepare(launch: Launch) -> Prepare:
    backend = launch.placement.backend if launch.options.init_process_group else None
    return Prepare(
        environ=tuple(os.fsencode(f"{name}={value}") for name, value in launch.environ.items()),
        cwd=str(Path.cwd()),
        path=tuple(os.path.abspath(entry) for entry in sys.path),  # noqa: PTH100 - resolve() follows links
        argv=tuple(sys.argv[:1]) or ("",),
        backend=backend,
        device_type=launch.placement.device_type,
        accelerators=launch.placement.accelerators,
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


def _own_directory(group: WorkerGroup) -> Path | None:
    """Return this run's directory: below it are attempts, below those ranks, below those files."""
    for ranks in group.logs.attempts.values():
        for logs in ranks.values():
            return Path(logs.worker.stdout).parents[2]
    return None


def _error(group: WorkerGroup, result: RunResult, options: LaunchOptions) -> BaseException | None:
    """Return the error that a run which was not cut short ends with, if it failed."""
    if group.launch_failure is not None:
        phase, message = group.launch_failure
        return LaunchError(message, phase=phase)
    if group.error is not None:
        if isinstance(group.error, NblaunchError):
            return group.error
        phase = _phase_of(group.error, group.state)
        error: BaseException = LaunchError(
            f"phase '{phase}' broke: {type(group.error).__name__}: {group.error}", phase=phase
        )
        error.__cause__ = group.error
        return error
    root = result.root_cause
    if root is None:
        return None if result.ok else _unfinished(result)
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
    forkserver.server.stop()
    hub.close()
    runtime.remove_root()


atexit.register(close)
