"""Map a finished run to its result, and to the exception that it raises, if any."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nblaunch._errors import LaunchError, NblaunchError, RunFailedError, RunPreemptedError
from nblaunch._help import FailureKind
from nblaunch._results import (
    Attempt,
    EventLog,
    LogText,
    RankFailure,
    RankResult,
    RankResults,
    RunResult,
    read_text,
)
from nblaunch.capture import pickling, shared_memory
from nblaunch.client.preparation import ClientJob
from nblaunch.diagnose.failures import Explained, blame, kind_of, reason, value_lost
from nblaunch.insight.run_report import Report
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import RankLogFiles
from nblaunch.protocol.messages import Illustrated, Phase, Stream, Unreadable
from nblaunch.protocol.metrics import table
from nblaunch.protocol.reports import format_ranks, held_lines, ranks_on, size
from nblaunch.protocol.state import AttemptState, RankState, RunState, State, advance, hosts_of, signal_name

if TYPE_CHECKING:
    from nblaunch.insight.profile import Profile

_LAST_OUTPUT_LINES = 10
_CPP_FRAME = re.compile(r"frame #\d+: .* in [^ ]+\)$")
_LAST_OUTPUT_BYTES = 64 * 1024
_LONG = 256 * 1024
"""Bytes; a longer output stays in its file and is read at each access."""
_CONTROL = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|.)")


def collect(
    job: ClientJob, events: EventLog, keep: Iterable[str], reporter: Callable[[RunResult], Report]
) -> RunResult:
    """Return the result of a job that has ended; `reporter` makes its report when that is asked for.

    `keep` lasts as long as the result does, and has the warnings since the end of the job.
    """
    values, state = _unpickled(job)
    end, options = job.end, job.options
    log_dir = Path(end.log_dir) if end.log_dir else None
    profiled = (options.profile or options.profile_steps is not None) and not job.internal
    profile, state = _profile(state, log_dir, wanted=profiled)
    *earlier, last = state.attempts
    attempts = [_attempt(job, each, {}, keep) for each in earlier]
    attempts.append(_attempt(job, last, values, keep))
    return RunResult(
        ranks=attempts[-1].ranks,
        world_size=state.world_size,
        backend=end.backend or job.placement.backend,
        failures=attempts[-1].failures,
        attempts=tuple(attempts),
        _warnings=(*state.notices, *dict.fromkeys(state.warnings)),
        title=job.title,
        hang_report=state.hang,
        metrics=table(state.metrics),
        preempted=state.preempted if state.summary is State.PREEMPTED else "",
        _log_dir=log_dir,
        _events=events,
        _late=keep,
        _state=state,
        _keep=keep,
        profile=profile,
        _reporter=reporter,
    )


def _profile(state: RunState, log_dir: Path | None, *, wanted: bool) -> tuple[Profile | None, RunState]:
    if not wanted:
        return None, state
    # Not before: a run without a profile need not load this.
    from nblaunch.insight import timeline
    from nblaunch.insight.profile import Profile, RankProfile
    from nblaunch.insight.trace import TracePart

    ranks, traces = {}, {}
    for rank, known in state.ranks.items():
        if known.profile is None:
            continue
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):  # as if it had sent none
            reduced, trace = shared_memory.get(known.profile, private=True)
            ranks[rank] = msgspec.msgpack.decode(reduced, type=RankProfile)
            traces[rank] = TracePart(bytes(trace), ranks[rank].trace_size, ranks[rank].trace_crc)
    profile = Profile(ranks, traces, set(state.ranks) - set(ranks), log_dir)
    drawn = Illustrated(text=profile.headline, html=timeline.render(profile))
    return profile, advance(state, drawn)


def _unpickled(job: ClientJob) -> tuple[dict[int, Any], RunState]:
    """Return the values, and the state, in which ranks whose value cannot be unpickled have failed."""
    values: dict[int, Any] = {}
    state = job.state
    for rank, known in state.ranks.items():
        if known.value is None:
            continue
        try:
            stream, *buffers = shared_memory.get(known.value, private=job.private)
            values[rank] = pickling.loads(stream, buffers)
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
            message = (
                f"rank {rank} returned a value that the notebook cannot unpickle: {error}. "
                "Is a module that the rank imported missing here?"
            )
            failure = value_lost(error, known.ended or 0.0, message)
            state = advance(state, Unreadable(rank=rank, failure=failure))
    return values, state


def _attempt(job: ClientJob, attempt: AttemptState, values: Mapping[int, Any], keep: object) -> Attempt:
    logs = {each.rank: each for each in job.end.logs.get(attempt.number, ())}
    failures = tuple(
        _failure(each, attempt.ranks[each.rank], logs.get(each.rank), job.options)
        for each in blame(attempt.ranks).failures
    )
    by_rank = {failure.rank: failure for failure in failures}
    return Attempt(
        number=attempt.number,
        world_size=attempt.world_size,
        reason=attempt.reason,
        failures=failures,
        started=attempt.started,
        ended=attempt.ended,
        ranks=RankResults(
            _rank_result(rank, attempt.number, by_rank.get(number), values, logs.get(number), keep)
            for number, rank in attempt.ranks.items()
        ),
    )


def _failure(
    explained: Explained, rank: RankState, logs: RankLogFiles | None, options: LaunchOptions
) -> RankFailure:
    record = explained.failure
    exception = None
    if record.exception is not None:
        try:
            exception = pickling.loads(record.exception)
        except Exception:  # noqa: BLE001 - the record has it in words
            exception = None
    return RankFailure(
        rank=explained.rank,
        exception=exception if isinstance(exception, BaseException) else None,
        type=record.type,
        message=record.message,
        traceback=record.traceback,
        frames=record.frames,
        exitcode=record.exitcode,
        signal=signal_name(record.exitcode),
        time=record.time,
        phase=record.phase,
        consequence_of=explained.consequence_of,
        last_output=_last_output(rank, logs, options),
        shown=record.colored,
        reason=str(reason(record)),
        node=rank.node,
        memory=record.held,
        kind=kind_of(record),
    )


def _last_output(rank: RankState, logs: RankLogFiles | None, options: LaunchOptions) -> str:
    """Return a rank's last lines of output; those of streams that are not shown come last."""
    text = "".join(getattr(entry, "text", "") for entry in rank.transcript.entries)
    for stream in Stream:
        if logs is not None and not options.shows(logs.local_rank, stream):
            path, start, end = place_in_file(logs, stream)
            text = f"{text.rstrip()}\n{read_text(path, max(start, end - _LAST_OUTPUT_BYTES), end)}"
    # torch's watchdog ends a process with a page of these, below its message.
    kept = [line for line in final_lines(text) if line.strip() and not _CPP_FRAME.match(line)]
    return "\n".join(kept[-_LAST_OUTPUT_LINES:])


def final_lines(text: str) -> list[str]:
    """Return the lines of what a rank printed, without control characters.

    A progress bar writes over its line: only its last state counts.
    """
    return [line.rstrip("\r").rpartition("\r")[2] for line in _CONTROL.sub("", text).split("\n")]


def place_in_file(logs: RankLogFiles, stream: Stream) -> tuple[str, int, int]:
    """Return the file of a stream, and from where to where the job wrote it."""
    path, start = getattr(logs, stream.value), getattr(logs.started, stream.value)
    end = getattr(logs.ended, stream.value) if logs.ended else None
    if end is None:
        # No message has marked the end; what comes later is another job's.
        with contextlib.suppress(OSError):
            end = Path(path).stat().st_size
    return path, start, end or 0


def _printed(logs: RankLogFiles | None, stream: Stream, keep: object) -> Any:
    """Return what a rank printed, a long text as `LogText`."""
    if logs is None:
        return ""
    path, start, end = place_in_file(logs, stream)
    return LogText(path, start, end, keep) if end - start > _LONG else read_text(path, start, end)


def _rank_result(  # noqa: PLR0913, PLR0917 - what a rank's result is made of
    rank: RankState,
    attempt: int,
    failure: RankFailure | None,
    values: Mapping[int, Any],
    logs: RankLogFiles | None,
    keep: object,
) -> RankResult:
    return RankResult(
        rank=rank.rank,
        local_rank=rank.local_rank if logs is None else logs.local_rank,
        node=rank.node,
        device=rank.device,
        state=rank.state,
        value=values.get(rank.rank) if failure is None else None,
        failure=failure,
        stdout=_printed(logs, Stream.STDOUT, keep),
        stderr=_printed(logs, Stream.STDERR, keep),
        displays=rank.transcript.displays,
        # Its process may not have ended yet: what it then does wrong is a warning.
        exitcode=0 if rank.exitcode is None and rank.state is State.SUCCEEDED else rank.exitcode,
        attempt=attempt,
        started=rank.started,
        ended=rank.ended,
        pid=rank.pid,
        peak_gpu_memory=rank.peak_gpu_memory,
        memory=rank.used,
    )


# The exception that a finished run raises.


def error_of(job: ClientJob, result: RunResult) -> BaseException | None:
    """Return the error of a job that ended by itself, None if it succeeded."""
    if job.end.launch_failure is not None:
        phase, message = job.end.launch_failure
        return LaunchError(message, phase=phase)
    if result.state.preempted and not result.ok:
        return RunPreemptedError(_preempted(job, result), result=result)
    if (broke := job.error) is not None:
        if isinstance(broke, NblaunchError):
            return broke
        phase = _phase_of(broke, job.state)
        error: BaseException = LaunchError(
            f"phase '{phase}' broke: {type(broke).__name__}: {broke}", phase=phase
        )
        error.__cause__ = broke
        return error
    root = result.root_cause
    if root is None:
        if result.ok:
            return None
        return KeyboardInterrupt("the run was interrupted") if job.end.interrupted else _unfinished(result)
    if root.phase in (Phase.FORK, Phase.CONNECT, Phase.PROCESS_GROUP):
        who = ranks_on([root.rank], hosts_of(result.state.ranks))
        error = LaunchError(
            f"the ranks could not be started: phase '{root.phase}' failed on {who}: {root.reason}"
            + (f"\n{root.last_output}" if root.last_output else ""),
            phase=root.phase.value,
            kind=root.kind,
        )
    else:
        text = describe(result, root, job.options)
        error = RunFailedError(text, result=result, root_cause=root, kind=root.kind)
    error.__cause__ = root.exception
    return error


def _preempted(job: ClientJob, result: RunResult) -> str:
    why = result.state.preempted
    if isinstance(job.error, RunPreemptedError) and str(job.error) != why:
        why = f"{why}; {job.error}"
    ended = format_ranks(each.rank for each in result.ranks if each.state is not State.SUCCEEDED)
    return f"the run was preempted: {why}\n{ended} of {result.world_size} ended because of that"


def _unfinished(result: RunResult) -> RunFailedError:
    """Return the error where no rank failed and some have no value: a peer exited after its value came."""
    ranks = [each.rank for each in result.ranks if each.state is not State.SUCCEEDED]
    warnings = "".join(f"\n{warning}" for warning in result.warnings)
    msg = (
        f"{format_ranks(ranks)} of {result.world_size} did not finish: the group ended before that{warnings}"
    )
    return RunFailedError(msg, result=result, kind=FailureKind.EXITED)


def _phase_of(error: BaseException, state: RunState) -> str:
    if type(error).__name__.startswith("Rendezvous"):
        return "rendezvous"
    phases = list(Phase)
    return max((rank.phase for rank in state.ranks.values()), key=phases.index, default=Phase.FORK).value


def describe(result: RunResult, root: RankFailure, options: LaunchOptions) -> str:
    """Return which rank failed, how, where, and how the others ended; no times, no pids."""
    found = blame(result.state.ranks)
    first, *others = found.causes
    who = first.who if first.hosts else f"{format_ranks(first.ranks)} of {result.world_size}"
    lines = [f"{who} failed: {root.reason}"]
    if root.frame is not None and root.frame.source:
        lines[0] += f"\n    {root.frame.source}"
    if others:
        lines.append(f"{format_ranks(rank for each in others for rank in each.ranks)} failed too")
    if found.ended:
        lines.append(f"{format_ranks(found.ended)} ended because of that")
    if options.max_restarts:
        lines.append(f"in attempt {len(result.attempts)} of {options.max_restarts + 1}")
    if result.state.unwritten:
        lines.append(result.state.unwritten)
    if root.memory:
        lines += [
            f"the most of what rank {root.rank} held:",
            *(f"    {each}" for each in held_lines(root.memory)),
        ]
    if root.signal == "SIGKILL":
        lines += _last_measured(result, root.rank)
    if root.type == "ProcessExited" and root.last_output:
        lines.append(f"last output of rank {root.rank}:\n{root.last_output}")
    return "\n".join(lines)


def _last_measured(result: RunResult, rank: int) -> list[str]:
    used = result.ranks[rank].memory
    if used is None or used.host_now is None:
        return []
    most = f", {size(used.host_peak)} at most" if used.host_peak is not None else ""
    return [f"when rank {rank} was last measured, it used {size(used.host_now)} of memory{most}"]
