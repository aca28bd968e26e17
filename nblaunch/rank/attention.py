"""Noticing, from another thread, that the main thread has come back from C code to Python.

A signal handler of Python runs only between two bytecodes of the main thread, and it may be anybody's:
Python's own, asyncio's, the program's. So nothing here depends on the handler. CPython is asked to call a C
function at the next such moment (`Py_AddPendingCall`, which it does after the handlers of pending signals),
and that function posts a semaphore. No Python code runs in the main thread, so there is none in which a
KeyboardInterrupt could be lost.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# `sem_t` is 32 bytes or fewer on every Linux.
_SEMAPHORE_BYTES = 64


class MainThread:
    """The main thread of this process, as a control thread sees it."""

    def __init__(self) -> None:
        """Make the semaphore; where there is none, the main thread is always taken to have come back."""
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
        # -1 where too many calls are pending already.
        return bool(ctypes.pythonapi.Py_AddPendingCall(self._post, self._semaphore) == 0)

    def came_back(self) -> bool:
        """Return whether the main thread has run Python code since it was last expected; true once."""
        came = False
        while self._library.sem_trywait(self._semaphore) == 0:
            came = True
        return came
