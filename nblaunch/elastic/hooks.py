"""What torchelastic offers beside the ranks themselves: events, and expiration timers.

An event is taken where torch hands it to a logger, and passed on to the user's handler.

torch's private names: `torch.distributed.elastic.events._events_loggers`, in which this run's stream stands
beside torch's loggers, under a name of its own; `torch.distributed.elastic.events.handlers._log_handlers`,
for the text of an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.timer import FileTimerServer
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

from nblaunch._errors import OptionError
from nblaunch._results import Event

_log = logging.getLogger("nblaunch")
NOWHERE = "null"


def check_handler(name: str) -> None:
    """Raise `OptionError` for a handler that torchelastic does not know."""
    try:
        handlers.get_logging_handler(name)
    except KeyError:
        registered: Any = handlers._log_handlers  # noqa: SLF001 - see above
        known = ", ".join(sorted(registered))
        msg = (
            f"event_log_handler={name!r} was asked for, but torchelastic has no such handler; there are: "
            f"{known}. Register yours in torch.distributed.elastic.events.handlers, or give one of these."
        )
        raise OptionError(msg) from None


class EventStream:
    """Takes the place of the logger to which torchelastic gives the events of one run.

    `name` is the run's `event_log_handler`, `handler` the user's own. A logger would be shared by all runs,
    and could be silenced (`logging.disable`, `LOGLEVEL`).
    """

    def __init__(self, handler: str, record: Callable[[Event], None]) -> None:
        # Not the run's id, which the user may have chosen, for two runs at a time.
        self.name = f"nblaunch-{uuid.uuid4().hex}"
        self._handler = handler
        self._record = record

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Receive the events while the block lasts."""
        loggers: dict[str, Any] = vars(events)["_events_loggers"]
        loggers[self.name] = self
        try:
            yield
        finally:
            del loggers[self.name]

    def info(self, text: str) -> None:
        """Take an event; called by torch, on any of the agent's threads."""
        self._record(Event.parse(text, time.time()))
        if self._handler == NOWHERE:
            return
        try:
            events.record(events.Event.deserialize(text), self._handler)
        except Exception:  # noqa: BLE001 - logged
            # This is the user's own code, and must not end the run.
            _log.error("the event handler %r failed:\n%s", self._handler, traceback.format_exc())


# torch's file-based expiration timers, run so that they can end a rank and no other process.
#
# torchelastic's `FileTimerServer` sends the signal to its own process as well, to have the agent's supervisor
# start it again; here that process is the notebook. torch's private names: `FileTimerServer._reap_worker`,
# `._watchdog_loop`, `._stop_signaled`, `._file_path`, `._watchdog_thread`.


SWITCH = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"
_LOOK_SECONDS = 0.1
_NOTHING = b'{"pid": 0, "scope_id": "", "expiration_time": -1, "signal": 0}\n'


class Watchdog(FileTimerServer):
    """A `FileTimerServer` that signals only processes that `is_rank` knows, and keeps why."""

    def __init__(
        self,
        path: str,
        run_id: str,
        thread_name: str,
        is_rank: Callable[[int], bool],
        log_event: Callable[[str, FileTimerRequest | None], None],
    ) -> None:
        """Make the pipe at `path`; `start` begins to read it."""
        self.reasons: dict[int, str] = {}
        """Process id -> why it was killed."""
        self._is_rank = is_rank
        self._thread_name = thread_name
        self._forward = log_event
        super().__init__(path, run_id, max_interval=_LOOK_SECONDS, daemon=True, log_event=self._note)

    def _note(self, name: str, request: FileTimerRequest | None) -> None:
        if name == "timer expired" and request is not None and request.signal > 0:
            # Before the signal, whose effect the agent may see at once.
            self.reasons[request.worker_pid] = _why(request)
        self._forward(name, request)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        # torch also names this very process, after a rank; and any process that can write to the pipe could
        # name any other.
        return self._is_rank(worker_pid) and bool(super()._reap_worker(worker_pid, signal))

    def _watchdog_loop(self) -> None:
        # The notebook does not show torchelastic's log records of threads with this name.
        threading.current_thread().name = self._thread_name
        super()._watchdog_loop()

    def stop(self) -> None:
        """End the thread, which waits for the pipe to be opened if no rank has ever done so."""
        self._stop_signaled = True
        with contextlib.suppress(OSError):
            pipe = os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK)
            try:
                os.write(pipe, _NOTHING)
                if self._watchdog_thread is not None:
                    self._watchdog_thread.join(_LOOK_SECONDS * 10)
            finally:
                os.close(pipe)
        super().stop()
        # The server is in a cycle with itself, and refers to the agent: free that without the collector.
        self._is_rank, self._forward = lambda _: False, lambda *_: None


def _why(request: FileTimerRequest) -> str:
    deadline = datetime.fromtimestamp(request.expiration_time).astimezone()
    return (
        f"was killed by {signal.Signals(request.signal).name}: scope {request.scope_id!r} was not left by "
        f"its deadline, {deadline:%H:%M:%S} (torch.distributed.elastic.timer.expires)"
    )
