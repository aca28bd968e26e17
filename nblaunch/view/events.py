"""torchelastic's events as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nblaunch._events import Event

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
