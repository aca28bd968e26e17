"""`--metrics-file`: what the ranks of a job log, as lines of JSON in a file that grows while the job runs.

    {"rank": 0, "step": 3, "time": 1790000000.25, "name": "loss", "value": 0.41}

JSON has no NaN and no infinities: these are the texts "NaN", "Infinity" and "-Infinity", which Python's
`float` and pandas read. The runtime writes the file, so it is complete also where no notebook follows the
job. A thread of its own writes each batch as it comes, since a disk may be slow.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from nblaunch.protocol.messages import Logged
from nblaunch.protocol.metrics import in_json, points_of
from nblaunch.protocol.state import Message


class MetricsFile:
    """The file of one job; used on the hub's thread, which never waits for the disk."""

    def __init__(self, path: str) -> None:
        """Append to the file at `path`, which the client has made."""
        self._path = path
        self._waiting: queue.SimpleQueue[Logged | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._written: Callable[[], None] = lambda: None
        self.problem = ""
        """Why the file does not have all; empty if it has."""

    def take(self, message: Message, _raw: bytes) -> None:
        if isinstance(message, Logged):
            self._waiting.put(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="nblaunch-metrics", daemon=True)
                self._thread.start()

    def close(self, written: Callable[[], None]) -> None:
        """Call `written` once all is written: at once, or on the thread that writes."""
        if self._thread is None:
            written()
            return
        self._written = written
        self._waiting.put(None)

    def _write(self) -> None:
        try:
            with Path(self._path).open("a", encoding="utf-8") as file:
                while (batch := self._waiting.get()) is not None:
                    file.write(_lines(batch))
                    file.flush()
        except OSError as error:
            self.problem = f"metrics_file={self._path!r} is not complete: {error.strerror}"
            while self._waiting.get() is not None:
                pass
        self._written()


def _lines(batch: Logged) -> str:
    points = points_of(batch)
    # A surrogate, which a name may hold, is escaped; each name once.
    names = [json.dumps(name) for name in points.names]
    return "".join(
        f'{{"rank": {points.rank}, "step": {step}, "time": {time!r}, "name": {names[index]}, '
        f'"value": {_number(value)}}}\n'
        for index, step, time, value in zip(
            points.which, points.steps, points.times, points.values, strict=True
        )
    )


def _number(value: float) -> str:
    known = in_json(value)
    return f'"{known}"' if isinstance(known, str) else repr(known)
