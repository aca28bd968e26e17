"""The standby group: ranks forked and connected before a run needs them, with nothing of the user's in them.

After a run on fresh ranks in a notebook, a thread prepares a group of the same shape while nothing runs; the
next run of that shape takes it. Only then do its ranks get the notebook's environment, directory and path,
and touch a device; of the rest they have done by then what every job does for the first time. The group is
dropped when it is not used for a while, when the shape changes, and where memory is short.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from nblaunch.group.group import WorkerGroup
from nblaunch.group.lifecycle import Trigger
from nblaunch.host.settings import AgentSettings

STANDBY_SECONDS = 600.0
IDLE_SECONDS = 0.25
"""How long nothing must have run: a user who runs one cell after the other is not slowed down."""
_POLL_SECONDS = 10.0
_LEAST_FREE = 0.1
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class GroupAndLogs:
    """A worker group, and its private log directory, if it has one."""

    group: WorkerGroup
    logs: Path | None


class Standby:
    """Keeps at most one group; all methods may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle_since = 0.0
        self._used = 0.0
        self._standby_group: GroupAndLogs | None = None
        self._make: Callable[[AgentSettings], GroupAndLogs] | None = None
        self._shape: AgentSettings | None = None
        self._thread: threading.Thread | None = None
        self._running = 0

    def take(self, shape: AgentSettings | None) -> GroupAndLogs | None:
        """Hand over the group of this shape, if it is ready; nothing fits None.

        The caller must call `used` once the run is over.
        """
        with self._lock:
            self._running += 1
            standby_group, self._standby_group = self._standby_group, None
            fits = shape is not None and self._shape == shape
        if standby_group is None or (fits and standby_group.group.waiting):
            return standby_group
        self._drop(standby_group)
        return None

    def used(self, shape: AgentSettings | None, make: Callable[[AgentSettings], GroupAndLogs]) -> None:
        """Record that a run on fresh ranks is over; `make(shape)` will start the next group; None: none."""
        with self._lock:
            self._running = max(self._running - 1, 0)
            self._idle_since = self._used = time.monotonic()
            self._shape, self._make = shape, make
            if self._shape is None:
                return
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="nblaunch-standby", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the group, and prepare none until the next run is over."""
        with self._lock:
            standby_group, self._standby_group, self._shape = self._standby_group, None, None
            thread = self._thread
            self._changed.notify_all()
        if standby_group is not None:
            _stop(standby_group)
        if thread is not None:
            # It may be preparing one at this moment, in a directory that is about to be removed.
            thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._shape is None:
                    self._thread = None
                    return
                busy = self._running > 0
                now = time.monotonic()
                idle = now - self._idle_since
                if busy or (self._standby_group is None and idle < IDLE_SECONDS):
                    self._changed.wait(_POLL_SECONDS if busy else IDLE_SECONDS - idle)
                    continue
                if now - self._used > STANDBY_SECONDS or _memory_is_short():
                    standby_group, self._standby_group, self._shape = self._standby_group, None, None
                elif self._standby_group is not None:
                    self._changed.wait(_POLL_SECONDS)
                    continue
                else:
                    standby_group = None
                shape, make = self._shape, self._make
            if standby_group is not None:
                self._drop(standby_group)
            elif shape is not None and make is not None:
                self._prepare(shape, make)

    @staticmethod
    def _drop(standby_group: GroupAndLogs) -> None:
        standby_group.group.remove_when_closed(standby_group.logs)
        if standby_group.group.waiting:
            standby_group.group.post(Trigger.DISMISS)
        else:
            standby_group.group.stop()

    def _prepare(self, shape: AgentSettings, make: Callable[[AgentSettings], GroupAndLogs]) -> None:
        standby_group = None
        try:
            standby_group = make(shape)
        except Exception:  # noqa: BLE001 - the next run makes its own group, and raises what is wrong
            with self._lock:
                self._shape = None
            return
        with self._lock:
            if self._shape == shape and self._running == 0:
                self._standby_group, standby_group = standby_group, None
        if standby_group is not None:
            _stop(standby_group)


def _stop(standby_group: GroupAndLogs) -> None:
    standby_group.group.remove_when_closed(standby_group.logs)
    standby_group.group.stop()
    standby_group.group.closed.wait(_CLOSE_SECONDS)


def _memory_is_short() -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available < _LEAST_FREE * memory.total)
