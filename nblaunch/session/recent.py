"""The events of the run before, for whoever asks what torchelastic did."""

from __future__ import annotations

from nblaunch._events import EventLog

_last: EventLog | None = None


def remember(log: EventLog) -> None:
    """Take note of the events of a run that has ended."""
    global _last
    _last = log


def events() -> EventLog | None:
    """Return those of the last run, None before the first."""
    return _last
