"""The functions of `nblaunch.on_preempt`, which this rank calls before its node is taken back.

Slurm and others send SIGTERM to all processes of a node, which would end a rank before it has saved. So a
rank with such functions delays its end, and ends by the signal only if no order to save comes with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, FunctionType

_ORDER_SECONDS = 3.0  # from the node to the notebook, and back; on a machine that is busy
# An older order was for another signal.
_STALE_SECONDS = 10.0

_functions: list[Callable[[float], object]] = []
_owner = 0
"""The process that registered the functions: its children inherit its handler."""
_ordered = _saved = -_STALE_SECONDS
"""When an order to save came last, and when one was last carried out (monotonic)."""
cut_off = False
"""Whether the functions that are called now are called within a job, which does not go on."""


def add(function: Callable[[float], object]) -> None:
    """Add a function; one that is defined again replaces the former one."""
    for place, known in enumerate(_functions):
        if known == function or _defined_again(known, function):
            _functions[place] = function
            return
    _functions.append(function)
    _outlive_signal()


def _defined_again(known: object, function: object) -> bool:
    """Whether the same `def` at module level made both."""
    if not (isinstance(known, FunctionType) and isinstance(function, FunctionType)):
        return False
    named = function.__qualname__.isidentifier()  # no lambda, and none of a closure, which may be many
    return named and (known.__module__, known.__qualname__) == (function.__module__, function.__qualname__)


def forget(function: Callable[[float], object]) -> None:
    _functions[:] = [
        known for known in _functions if not (known == function or _defined_again(known, function))
    ]


def ordered() -> None:
    global _ordered
    _ordered = time.monotonic()


def saved() -> None:
    """Note that the order has been carried out: from now on the signal ends the rank at once."""
    global _saved
    _saved = time.monotonic()


def call_all(until: float, *, in_job: bool = False) -> tuple[str, ...]:
    """Call all functions, each with the seconds until then (monotonic); return why some have failed."""
    global cut_off
    failed = []
    cut_off = in_job
    for function in tuple(_functions):
        try:
            function(max(until - time.monotonic(), 0.0))
        except BaseException as error:  # noqa: BLE001 - one that fails keeps no other from saving
            traceback.print_exc()
            name = getattr(function, "__qualname__", repr(function))
            failed.append(f"{name} raised {type(error).__name__}: {error}"[:1000])
    return tuple(failed)


def _outlive_signal() -> None:
    global _owner
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _owner = os.getpid()
        signal.signal(signal.SIGTERM, _terminated)
        _watch_signals()


def _watch_signals() -> None:
    """Have a thread act on SIGTERM, too: the main thread runs no handler while it is in a collective."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:  # an event loop's
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
        return

    def forked() -> None:
        """Leave the pipe to the rank: a signal of this child is none of its parent's."""
        other = signal.set_wakeup_fd(-1)
        if other not in (writing, -1):
            signal.set_wakeup_fd(other)

    os.register_at_fork(after_in_child=forked)
    threading.Thread(target=_read_signals, args=[reading], name="nblaunch-sigterm", daemon=True).start()


def _read_signals(reading: int) -> None:
    while numbers := os.read(reading, 64):
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _terminated:
            _terminated(signal.SIGTERM, None)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    if os.getpid() != _owner or time.monotonic() < _saved + _STALE_SECONDS:
        _end()
    elif time.monotonic() > _ordered + _STALE_SECONDS:
        timer = threading.Timer(_ORDER_SECONDS, _end_without_order)
        timer.daemon = True
        timer.start()


def _end_without_order() -> None:
    if time.monotonic() > _ordered + _STALE_SECONDS:
        _end()


def _end() -> None:
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
