"""What a view says about a run as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nblaunch._results import Event, RankFailure
from nblaunch.diagnose.failures import Explained, explain
from nblaunch.protocol.messages import FailureRecord, FrameRecord
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import AttemptState, RankState, RunState, State, signal_name
from nblaunch.view.markup import shortened
from nblaunch.view.output import by_rank
from nblaunch.view.screen import plain


@dataclass(frozen=True, slots=True)
class Header:
    """What runs, and where: `cell` on `gloo`.

    `node`, `log_dir`, `magic` (the magic's own line) and `note` (why it runs on these devices) are shown only
    while the run is live: they differ from machine to machine, and what is saved must not.
    """

    title: str
    backend: str = ""
    node: str = ""
    log_dir: str | None = None
    magic: str = ""
    note: str = ""


# --- How a run ended, in lines that text, HTML and panel share; nothing here differs from run to run.


REASON_COST = 1_500
_READ_CHARACTERS = 8_000
_ATTEMPTS_SHOWN = 10
_HANG_LINES = 40
# Where a peer's socket was differs in every run, and says nothing to the reader.
_PORT = re.compile(r"((?:\d{1,3}(?:\.\d{1,3}){3}|::1|localhost)\]?):\d{2,5}\b")
_PLACES = re.compile(r"(?:/[^\s\"':,]+)+/(?=(?:site-packages|dist-packages|ipykernel_\d+|python3\.\d+)/)")
# A number counts executions: another one each time the notebook is run.
_CELL_NUMBER = re.compile(r"Cell In\[\d+\]")
AGAIN = "a second interrupt ends all ranks, and their variables are lost"
"""What ends ranks that are waited for."""
_KERNEL_FILE = re.compile(r"ipykernel_\d+/\d+\.py")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why these ranks failed, all of them for the same reason; `failure` is that of the first of them."""

    ranks: tuple[int, ...]
    why: str
    failure: FailureRecord


def failures(ranks: Iterable[RankState]) -> tuple[Explained, ...]:
    """Return why ranks failed: causes first, then their consequences."""
    return explain({rank.rank: rank.failure for rank in ranks if rank.failure is not None})


def reason(explained: Explained, limit: int = REASON_COST) -> str:
    """Return a failure in one line; of a consequence without the port of the peer that went away."""
    failure = explained.failure
    known = RankFailure(
        rank=explained.rank,
        exception=None,
        type=failure.type,
        message=plain(failure.message.lstrip().partition("\n")[0][:_READ_CHARACTERS]),
        traceback="",
        frames=failure.frames,
        exitcode=failure.exitcode,
        signal=signal_name(failure.exitcode),
        time=failure.time,
        phase=failure.phase,
    )
    line = known.reason
    if known.frame is not None:
        line = line.replace(f"({known.frame.filename}, ", f"({short_path(known.frame.filename)}, ")
    if explained.consequence_of is not None:
        line = _PORT.sub(r"\1", line)
    return shortened(plain(line), limit)


def reason_limit(explained: Sequence[Explained]) -> int:
    """Return how many bytes each reason may take, so that 256 of them still make one readable page."""
    return REASON_COST * 20 // max(len(explained), 20)


def short_path(path: str) -> str:
    """Return a file's name without its folder, and `Cell In[3]` as it is."""
    return path.rpartition("/")[2] if path.startswith("/") else path


def traceback_text(failure: FailureRecord) -> str:
    """Return a traceback without what differs by machine or run: where Python is installed, ports."""
    text = _PORT.sub(r"\1", _PLACES.sub("…/", failure.traceback.rstrip("\n")))
    return _CELL_NUMBER.sub("Cell", _KERNEL_FILE.sub("ipykernel", text))


def causes(explained: Iterable[Explained]) -> list[Cause]:
    """Return the failures that explain the others, the root cause first; equal ones are one.

    A mistake in a cell fails every rank in the same way. Which rank is first by the clock differs from
    run to run then, so all of them are named.
    """
    groups: dict[str, list[Explained]] = {}
    for each in explained:
        if each.consequence_of is None:
            groups.setdefault(reason(each), []).append(each)
    return [
        Cause(tuple(sorted(each.rank for each in group)), why, min(group, key=lambda each: each.rank).failure)
        for why, group in groups.items()
    ]


def blame(explained: Sequence[Explained]) -> str:
    """Return who is to blame for the consequences: `rank 1`, or nothing where nothing failed."""
    found = causes(explained)
    return format_ranks(found[0].ranks) if found else ""


def failure_of_each(explained: Sequence[Explained]) -> dict[int, str]:
    """Return each failed rank's failure in one line, its cause named where it is a consequence."""
    cause = blame(explained)
    return {
        each.rank: reason(each) if each.consequence_of is None else f"consequence of {cause}: {reason(each)}"
        for each in explained
    }


def consequences(explained: Sequence[Explained], limit: int = REASON_COST) -> list[Cause]:
    """Return what became of other ranks because of the root cause, in the order of ranks, equal ones once."""
    groups: dict[str, list[Explained]] = {}
    for each in explained:
        if each.consequence_of is not None:
            groups.setdefault(reason(each, limit), []).append(each)
    cause = blame(explained) if groups else ""
    found = [
        Cause(
            tuple(sorted(each.rank for each in group)),
            f"consequence of {cause}: {why}",
            min(group, key=lambda each: each.rank).failure,
        )
        for why, group in groups.items()
    ]
    return sorted(found, key=lambda each: each.ranks)


def consequence_lines(explained: Sequence[Explained], limit: int = REASON_COST) -> list[str]:
    """Return `rank 0: consequence of rank 1: ...` for each consequence, equal ones folded."""
    return [f"{format_ranks(each.ranks)}: {each.why}" for each in consequences(explained, limit)]


def others_lines(state: RunState) -> list[str]:
    """Return a line for all stopped ranks, one for all lost ones, one for each state that is not final."""
    cause = blame(failures(state.ranks.values()))
    why = f", because of {cause}" if cause else ""

    def describe(rank: RankState) -> str:
        match rank.state:
            case State.SUCCEEDED | State.FAILED:
                return ""
            case State.STOPPED:
                return f"STOPPED{why}"
            case State.LOST:
                return "LOST: ended without a value and without a word"
            case _:
                return str(rank.state)

    return [f"{format_ranks(ranks)}: {what}" for ranks, what in by_rank(state, describe)]


def attempt_line(attempt: AttemptState) -> str:
    """Return why an attempt was followed by another: `attempt 0: restarted: rank 1: ...`."""
    found = causes(failures(attempt.ranks.values()))
    why = f"{format_ranks(found[0].ranks)}: {found[0].why}" if found else "the worker group changed"
    return f"attempt {attempt.number}: restarted: {why}"


def earlier_attempts(state: RunState) -> tuple[list[AttemptState], str]:
    """Return the latest attempts before this one, and a line about those that are left out."""
    shown = list(state.earlier[-_ATTEMPTS_SHOWN:])
    left_out = len(state.earlier) - len(shown)
    return shown, f"… {left_out} attempts left out …" if left_out else ""


def attempt_lines(state: RunState) -> list[str]:
    """Return a line for each attempt before this one, the latest ten of them."""
    shown, left_out = earlier_attempts(state)
    lines = [attempt_line(attempt) for attempt in shown]
    return [left_out, *lines] if left_out else lines


@dataclass(frozen=True, slots=True)
class Place:
    """Where these ranks were; `stack` is text, empty where it is not known."""

    ranks: tuple[int, ...]
    line: str
    stack: str = ""


def places(report: HangReport) -> list[Place]:
    """Return where the ranks were, ranks with one and the same stack together."""
    found = [
        Place(
            group.ranks, f"[{format_ranks(group.ranks)}] {_own_words(group.headline)}", _stack(group.frames)
        )
        for group in report.groups
    ]
    found += [
        Place((rank,), f"[rank {rank}] gave no answer", _own_words(plain(stack)))
        for rank, stack in report.silent.items()
    ]
    if report.finished:
        found.append(Place(report.finished, f"[{format_ranks(report.finished)}] had finished"))
    return sorted(found, key=lambda each: each.ranks)


def hang_lines(state: RunState) -> list[str]:
    """Return where the ranks were, if they were asked, in a few lines: the stacks are in the report."""
    if state.hang is None:
        return []
    found = [*state.hang.findings, *(place.line for place in places(state.hang))]
    shown = [shortened(plain(line), REASON_COST) for line in found[:_HANG_LINES]]
    if len(found) > len(shown):
        shown.append(f"… {len(found) - len(shown)} more in result.hang_report …")
    return shown


def _stack(frames: Iterable[FrameRecord]) -> str:
    lines = []
    for frame in frames:
        lines.append(f"{frame.filename}, line {frame.line}, in {frame.function}")
        lines += [f"    {frame.source}"] if frame.source else []
    return _own_words(plain("\n".join(lines)))


def _own_words(text: str) -> str:
    """Leave out what differs from one machine to the next, and from run to run."""
    return _CELL_NUMBER.sub("Cell", _PLACES.sub("", plain(text)))


def waits(state: RunState) -> dict[int, str]:
    """Return what each rank that is waited for does, and since when it has been interrupted."""
    if state.doing:
        return dict.fromkeys(sorted(state.ranks), state.doing)
    return {
        rank: shortened(plain(known.waiting), REASON_COST)
        for rank, known in sorted(state.ranks.items())
        if known.waiting and not known.state.final
    }


def warning_lines(state: RunState) -> list[str]:
    """Return what went wrong without failing the run."""
    warnings = [plain(warning) for warning in state.warnings]
    limit = REASON_COST * 10 // max(len(warnings), 10)
    # A notice of several lines is a hang report, which has a place of its own.
    notes = [plain(notice) for notice in state.notices if "\n" not in notice]
    return [
        *(f"note: {shortened(note, limit)}" for note in notes),
        *(f"warning: {shortened(warning, limit)}" for warning in warnings),
    ]


def headline(state: RunState, title: str, backend: str) -> str:
    """Return what ran where: `cell · 8 ranks · gloo`.

    >>> headline(RunState.fresh(2), "cell", "gloo")
    'cell · 2 ranks · gloo'
    """
    count = len(state.ranks)
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    if count != state.world_size:
        ranks = f"{format_ranks(state.ranks)} of {state.world_size}" if count else ranks
    return " · ".join(part for part in (shortened(plain(title), 300), ranks, backend) if part)


# --- torchelastic's events as a table.


_HEADER = ("seconds", "source", "rank", "event", "")


def events_table(events: Sequence[Event]) -> str:
    """Return one line for each event, with its time since the first one.

    >>> print(events_table([Event("watchdog started", "AGENT", 5.0, {}, "")]))
    seconds  source  rank  event
      0.000  AGENT         watchdog started
    """
    start = min((event.timestamp for event in events), default=0.0)
    rows = [_HEADER, *(_row(event, start) for event in events)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return "\n".join(_line(row, widths) for row in rows)


def _row(event: Event, start: float) -> tuple[str, ...]:
    rank = "" if event.rank is None else str(event.rank)
    return f"{event.timestamp - start:.3f}", event.source, rank, event.name, _note(event)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    time, source, rank, name, note = row
    cells = (
        time.rjust(widths[0]),
        source.ljust(widths[1]),
        rank.rjust(widths[2]),
        name.ljust(widths[3]),
        note,
    )
    return "  ".join(cells).rstrip()


def _note(event: Event) -> str:
    """Return what else there is to know: how long it took, which scope, which exit code."""
    duration = event.metadata.get("duration_ms")
    if duration is not None:
        return f"took {duration:.1f} ms"
    details: dict[str, Any] = json.loads(event.metadata.get("metadata") or "{}")
    if "scope_id" in details:
        return f"scope {details['scope_id']!r} of process {details['worker_pid']}"
    exitcode = (details.get("exit_code") or [None])[0]
    return "" if exitcode is None else f"exit code {exitcode}"
