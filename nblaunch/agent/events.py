"""torchelastic's events of one run, taken where torch hands them to a logger, and passed on to the user's.

torch's private name: `torch.distributed.elastic.events._events_loggers`, in which this run's stream stands
beside torch's loggers, under a name of its own; `torch.distributed.elastic.events.handlers._log_handlers`,
for what an error says.
"""

from __future__ import annotations

import logging
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.events import handlers

from nblaunch._errors import OptionError
from nblaunch._events import Event

_log = logging.getLogger("nblaunch")
NOWHERE = "null"


def check_handler(name: str) -> None:
    """Raise `OptionError` for a handler that torchelastic does not know."""
    try:
        handlers.get_logging_handler(name)
    except KeyError:
        known = ", ".join(sorted(_known_handlers()))
        msg = (
            f"event_log_handler={name!r} was asked for, but torchelastic has no such handler; there are: "
            f"{known}. Register yours in torch.distributed.elastic.events.handlers, or give one of these."
        )
        raise OptionError(msg) from None


def _known_handlers() -> Any:
    return handlers._log_handlers  # noqa: SLF001 - see above


class EventStream:
    """Stands in for the logger that torchelastic gives the events of one run to.

    A logger would be one for all runs, and could be silenced (`logging.disable`, `LOGLEVEL`).
    """

    def __init__(self, handler: str, tell: Callable[[Event], None]) -> None:
        """Begin under `name`, to be the `event_log_handler` of this run; `handler` is the user's."""
        # Not the run's id, which the user may have chosen, for two runs at a time.
        self.name = f"nblaunch-{uuid.uuid4().hex}"
        self._handler = handler
        self._tell = tell

    def __enter__(self) -> None:
        """Stand in torch's list while the block lasts."""
        _loggers()[self.name] = self

    def __exit__(self, *error: object) -> None:
        """Leave torch's list."""
        _loggers().pop(self.name, None)

    def info(self, text: str) -> None:
        """Take an event; called by torch, on any of the agent's threads."""
        self._tell(Event.parse(text, time.time()))
        if self._handler == NOWHERE:
            return
        try:
            events.record(events.Event.deserialize(text), self._handler)
        except Exception:  # noqa: BLE001 - logged
            # It is the user's own code, and the run must not end because of it.
            _log.error("the event handler %r failed:\n%s", self._handler, traceback.format_exc())


def _loggers() -> dict[str, Any]:
    loggers: dict[str, Any] = vars(events)["_events_loggers"]
    return loggers
