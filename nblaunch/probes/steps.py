"""The training step that this rank is in: `nblaunch.step()` counts, and others listen.

A step ends where the next one begins, and the last one with its job.
"""

from __future__ import annotations

from collections.abc import Callable

StepListener = Callable[[int | None], None]

_listeners: list[StepListener] = []
_current: int | None = None


def begin(number: int | None = None) -> int:
    """Begin the next step, or step `number`; return its number, counted from 0 in each job."""
    global _current
    _current = (0 if _current is None else _current + 1) if number is None else number
    for listener in tuple(_listeners):
        listener(_current)
    return _current


def current() -> int | None:
    """Return the step that this rank is in; None before the first one."""
    return _current


def end_job() -> None:
    """End the last step: the job is over."""
    global _current
    if _current is not None:
        _current = None
        for listener in tuple(_listeners):
            listener(None)


def listen(listener: StepListener) -> None:
    """Call `listener` with the number of each step as it begins, and with None as the last one ends."""
    _listeners.append(listener)


def forget(listener: StepListener) -> None:
    _listeners.remove(listener)
