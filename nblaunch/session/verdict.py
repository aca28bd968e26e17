"""What a run that has ended is told to have died of: the error that it raises."""

from __future__ import annotations

from nblaunch._errors import LaunchError, NblaunchError, RunFailedError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import Phase
from nblaunch._reports import format_ranks
from nblaunch._results import RankFailure, RunResult
from nblaunch._state import RunState, State
from nblaunch.session.job import Job


def verdict(job: Job, result: RunResult, options: LaunchOptions) -> BaseException | None:
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
