"""torchelastic's own events of a run: typed, with the JSON as torch writes it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Event:
    """One event as torchelastic records it, such as `torchelastic.worker.status.SUCCEEDED`.

    `source` is `AGENT` or `WORKER`; `timestamp` is when it was recorded, in seconds since the epoch (torch
    leaves its own at 0); `metadata` says which rank, which role, which error; `json` is the text that
    torch's event handlers receive.
    """

    name: str
    source: str
    timestamp: float
    metadata: Mapping[str, Any]
    json: str

    @classmethod
    def parse(cls, text: str, timestamp: float) -> Event:
        """Return the event that torch has written as `text`.

        >>> Event.parse('{"name": "n", "source": "AGENT", "timestamp": 0, "metadata": {}}', 1.5).source
        'AGENT'
        """
        known = json.loads(text)
        return cls(known["name"], known["source"], timestamp, known["metadata"], text)

    @property
    def rank(self) -> int | None:
        """The rank that it is about, None for the group."""
        number: int | None = self.metadata.get("global_rank")
        return number


class EventLog:
    """The events of one worker group; any thread may add to it, and read it."""

    def __init__(self, events: tuple[Event, ...] = (), *, complete: bool = False) -> None:
        """Begin with `events`; a `complete` log gets no others."""
        self._events = list(events)
        self._complete = threading.Event()
        if complete:
            self._complete.set()

    def add(self, event: Event) -> None:
        """Take an event."""
        self._events.append(event)

    def close(self) -> None:
        """Take note that there will be no others."""
        self._complete.set()

    def so_far(self) -> tuple[Event, ...]:
        """Return what there is."""
        return tuple(self._events)

    def all(self) -> tuple[Event, ...]:
        """Return everything: a run's values are here before its ranks have ended, which takes a moment."""
        self._complete.wait(_END_SECONDS)
        return self.so_far()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the events."""
        return _complete_log, (self.all(),)


def _complete_log(events: tuple[Event, ...]) -> EventLog:
    return EventLog(events, complete=True)
