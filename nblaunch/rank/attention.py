"""Noticing, from another thread, that the main thread has come back from C code to Python.

A signal handler of Python runs only between two bytecodes of the main thread, and it may be anybody's:
Python's own, asyncio's, the program's. So nothing here depends on the handler. CPython is asked to call a C
function at the next such moment (`Py_AddPendingCall`, which it does after the handlers of pending signals),
and that function posts a semaphore. No Python code runs in the main thread, so there is none in which a
KeyboardInterrupt could be lost.

A signal that arrives right before a blocking call is noted by Python, but does not end that call, which
began after it: `time.sleep(1000)` sleeps on. So the main thread is poked: another signal, whose handler does
nothing, ends the call, and Python then runs the handlers of all signals that it has noted.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from typing import Any

# `sem_t` is 32 bytes or fewer on every Linux.
_SEMAPHORE_BYTES = 64
_POKE_SIGNAL = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else None
_FIRST_POKE_SECONDS, _POKE_SECONDS = 0.1, 1.0


class MainThread:
    """The main thread of this process, as a control thread sees it."""

    def __init__(self) -> None:
        """Make the semaphore; where there is none, the main thread is always taken to have come back."""
        self._poke_at, self._pause = 0.0, _FIRST_POKE_SECONDS
        if _POKE_SIGNAL is not None:
            signal.signal(_POKE_SIGNAL, _do_nothing)
        self._library: Any = None
        if sys.platform == "linux":
            self._library = ctypes.CDLL(None)
            self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
            self._library.sem_init(self._semaphore, 0, 0)
            self._post = ctypes.cast(self._library.sem_post, ctypes.c_void_p)

    def expect(self) -> bool:
        """Have `came_back` become true once the main thread runs Python code; return whether it can."""
        if self._library is None:
            return False
        self._poke_at, self._pause = time.monotonic() + _FIRST_POKE_SECONDS, _FIRST_POKE_SECONDS
        # -1 where too many calls are pending already.
        return bool(ctypes.pythonapi.Py_AddPendingCall(self._post, self._semaphore) == 0)

    def came_back(self) -> bool:
        """Return whether the main thread has run Python code since it was last expected; true once."""
        came = False
        while self._library.sem_trywait(self._semaphore) == 0:
            came = True
        if not came and _POKE_SIGNAL is not None and time.monotonic() >= self._poke_at:
            self._pause = min(2 * self._pause, _POKE_SECONDS)
            self._poke_at = time.monotonic() + self._pause
            signal.pthread_kill(threading.main_thread().ident or 0, _POKE_SIGNAL)
        return came


def _do_nothing(*_: object) -> None:
    """Handle the signal that pokes: only that it has come matters."""
