"""How a run stands or ended, in lines that text, HTML and panel share.

None differs from run to run, but that of what failed or hangs on several hosts: it names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nblaunch._budget import shortened
from nblaunch.diagnose.failures import Alike, Blame, Reason, blame, without_ports
from nblaunch.protocol.client import Event
from nblaunch.protocol.messages import FailureRecord, FrameRecord
from nblaunch.protocol.reports import HangReport, by_host, format_ranks, held_lines, plural, ranks_by_answer
from nblaunch.protocol.state import AttemptState, RunState, hosts_of
from nblaunch.view.alike import MOST_ROWS, named
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
    watched: bool = False
    """Whether the run goes on when the user stops: only watching ends."""


# The lines.


RANKS_LISTED = MOST_ROWS
"""Of more ranks, no view has a line for each unless the reader asks for it."""
PART_BUDGET = 60_000
"""Bytes of all values together, and of all earlier attempts."""
REASON_COST = 1_500
TRACEBACK_COST = 20_000
TRACEBACKS = 4
_READ_CHARACTERS = 8_000
ATTEMPTS_SHOWN = 10
_LONGEST_WHO = 200
_HANG_LINES = 40
_PLACES = re.compile(r"(?:/[^\s\"':,]+)+/(?=(?:site-packages|dist-packages|ipykernel_\d+|python3\.\d+)/)")
# The number counts executions: it is another one each time the notebook is run.
_CELL_NUMBER = re.compile(r"Cell In\[\d+\]")
AGAIN = "a second interrupt ends all ranks, and their variables are lost"
"""What ends the ranks that a run waits for."""
_KERNEL_FILE = re.compile(r"ipykernel_\d+/\d+\.py")


def reason_limit(found: Blame) -> int:
    """Return how many bytes each reason may take, so that 256 of them still make one readable page."""
    return REASON_COST * 20 // max(len(found.causes) + len(found.consequences), 20)


def why(alike: Alike, limit: int = REASON_COST) -> str:
    """Return why ranks failed in one line, the reason in at most `limit` bytes."""

    def drawn(reason: Reason) -> str:
        line = str(replace(reason, text=plain(reason.text[:_READ_CHARACTERS])))
        return shortened(plain(line), limit)

    return alike.line(drawn)


def why_each(found: Blame) -> dict[int, str]:
    """Return why each failed rank failed in one line, its cause named where it is a consequence."""
    lines = [(each.ranks, why(each)) for each in (*found.causes, *found.consequences)]
    return {rank: line for ranks, line in lines for rank in ranks}


def consequence_lines(found: Blame, limit: int = REASON_COST) -> list[str]:
    """Return `rank 0: consequence of rank 1: ...` for each consequence, equal ones folded."""
    return [f"{who(each)}: {why(each, limit)}" for each in found.consequences]


def who(alike: Alike) -> str:
    """Return the ranks of a failure with their hosts; of very many that are scattered, how many."""
    return alike.who if len(alike.who) <= _LONGEST_WHO else named(alike.ranks)


def others_lines(state: RunState, found: Blame) -> list[str]:
    """Return a line for all stopped ranks, one for all lost ones, one for each state that is not final."""
    return [f"{named(ranks)}: {what}" for ranks, what in by_rank(state, found.outcome)]


def traceback_text(failure: FailureRecord) -> str:
    text = without_ports(_PLACES.sub("…/", failure.traceback.rstrip("\n")))
    return _CELL_NUMBER.sub("Cell", _KERNEL_FILE.sub("ipykernel", text))


def held_text(failure: FailureRecord) -> str:
    """Return the memory held by a rank that ran out of it, a line for each part; empty for other failures."""
    return _stable(shortened("\n".join(held_lines(failure.held)), TRACEBACK_COST))


def attempt_line(attempt: AttemptState, found: Blame) -> str:
    """Return why an attempt was followed by another: `attempt 0: restarted: rank 1: ...`."""
    cause = f"{found.root}: {why(found.causes[0])}" if found.causes else "the worker group changed"
    return f"attempt {attempt.number}: restarted: {cause}"


def earlier_attempts(state: RunState) -> tuple[list[AttemptState], str]:
    """Return the latest attempts before this one, and a note on omitted ones."""
    shown = list(state.earlier[-ATTEMPTS_SHOWN:])
    left_out = len(state.earlier) - len(shown)
    return shown, f"… {left_out} attempts left out …" if left_out else ""


def attempt_lines(state: RunState) -> list[str]:
    shown, left_out = earlier_attempts(state)
    lines = [attempt_line(attempt, blame(attempt.ranks)) for attempt in shown]
    return [left_out, *lines] if left_out else lines


@dataclass(frozen=True, slots=True)
class Place:
    """Where these ranks were; `stack` is text, empty where it is not known."""

    ranks: tuple[int, ...]
    line: str
    stack: str = ""


def places(report: HangReport) -> list[Place]:
    found = []
    for group in report.groups:
        line = f"{report.named(group.ranks)} {_stable(group.headline)}"
        found.append(Place(group.ranks, line, _stack(group.frames)))
    for stack, ranks in ranks_by_answer(report.silent).items():
        found.append(Place(ranks, f"{report.named(ranks)} gave no answer", _stable(stack)))
    if report.finished:
        found.append(Place(report.finished, f"{report.named(report.finished)} had finished"))
    return sorted(found, key=lambda each: each.ranks)


def hang_lines(state: RunState) -> list[str]:
    """Return where the ranks were, if that is known, in a few lines: the stacks are in the report."""
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
    return _stable("\n".join(lines))


def _stable(text: str) -> str:
    """Return `text` as it is on every machine and in every run."""
    return _CELL_NUMBER.sub("Cell", _PLACES.sub("", plain(text)))


def waits(state: RunState) -> dict[int, str]:
    """Return by rank, of ranks that the run waits for, their activity and the time since the interrupt."""
    if state.doing:
        return dict.fromkeys(sorted(state.ranks), state.doing)
    return {
        rank: shortened(plain(known.waiting), REASON_COST)
        for rank, known in sorted(state.ranks.items())
        if known.waiting and not known.state.final
    }


def finishing(state: RunState) -> dict[int, str]:
    """Return by rank the activity after the end of its job."""
    return {
        rank: f"is finishing: {shortened(plain(known.finishing), REASON_COST)}"
        for rank, known in sorted(state.ranks.items())
        if known.finishing
    }


def warning_lines(state: RunState) -> list[str]:
    """Return notes, and warnings of what went wrong without failing the run."""
    warnings = [plain(warning) for warning in state.warnings]
    limit = REASON_COST * 10 // max(len(warnings), 10)
    # A notice of several lines is a hang report, which is shown elsewhere.
    notes = [plain(notice) for notice in state.notices if "\n" not in notice]
    return [
        *(f"note: {shortened(note, limit)}" for note in notes),
        *(f"warning: {shortened(warning, limit)}" for warning in warnings),
    ]


def host_lines(state: RunState) -> list[str]:
    """Return how many ranks on several hosts are, alike hosts together; few ranks are listed anyway.

    Hosts have their names only where ranks have failed: else they differ from run to run.
    """
    hosts = hosts_of(state.ranks)
    if not hosts or len(state.ranks) <= RANKS_LISTED:
        return []
    return by_host({rank: str(known.state) for rank, known in state.ranks.items()}, hosts, named=state.failed)


def headline(state: RunState, title: str, backend: str) -> str:
    """Return title, ranks and backend: `cell · 8 ranks · gloo`; before the nodes have come, the title alone.

    >>> headline(RunState.fresh(2), "cell", "gloo")
    'cell · 2 ranks · gloo'
    """
    count = len(state.ranks)
    ranks = plural(count, "rank")
    backend = state.backend or backend
    if state.engine is not None and not state.begun and not state.backend:
        ranks = backend = ""
    elif count != state.world_size:
        ranks = f"{format_ranks(state.ranks)} of {state.world_size}" if count else ranks
    return " · ".join(part for part in (shortened(plain(title), 300), ranks, backend) if part)


def elapsed(seconds: float) -> str:
    """Return a time in words: `3 s`, `2 min 05 s`, `1 h 02 min`.

    >>> elapsed(125.4)
    '2 min 05 s'
    """
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def duration(seconds: float) -> str:
    """Return how long a run took: `4.2 s`, `2 min 05 s`.

    >>> duration(4.23)
    '4.2 s'
    """
    return f"{seconds:.1f} s" if seconds < 59.95 else elapsed(seconds)  # noqa: PLR2004 - a minute


# torchelastic's events as a table.


_HEADER = ("seconds", "source", "rank", "event", "")


def events_table(events: Sequence[Event]) -> str:
    """Return one line for each event, with its time since the first one.

    >>> print(events_table([Event("watchdog started", "AGENT", 5.0, {}, "")]))
    seconds  source  rank  event
      0.000  AGENT         watchdog started
    """
    start = min((event.timestamp for event in events), default=0.0)
    rows = [_HEADER, *(_row(event, start) for event in events)]
    a, b, c, d, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        f"{seconds:>{a}}  {source:<{b}}  {rank:>{c}}  {name:<{d}}  {note}".rstrip()
        for seconds, source, rank, name, note in rows
    )


def _row(event: Event, start: float) -> tuple[str, ...]:
    rank = "" if event.rank is None else str(event.rank)
    return f"{event.timestamp - start:.3f}", event.source, rank, event.name, _note(event)


def _note(event: Event) -> str:
    """Return an event's duration, scope or exit code."""
    duration = event.metadata.get("duration_ms")
    if duration is not None:
        return f"took {duration:.1f} ms"
    details: dict[str, Any] = json.loads(event.metadata.get("metadata") or "{}")
    if "scope_id" in details:
        return f"scope {details['scope_id']!r} of process {details['worker_pid']}"
    exitcode = (details.get("exit_code") or [None])[0]
    return "" if exitcode is None else f"exit code {exitcode}"
