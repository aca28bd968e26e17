"""Wakes a thread that waits for descriptors, from another thread."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """A descriptor that ends the wait of the thread that polls it; `wake` is for any thread, at any time."""

    def __init__(self) -> None:
        self._polled, self._written = socket.socketpair()
        for end in (self._polled, self._written):
            end.settimeout(0)

    def fileno(self) -> int:
        """Return the descriptor to poll: it is readable once `wake` was called."""
        return self._polled.fileno()

    def wake(self) -> None:
        """End the present wait, or the next one; does nothing once this is closed."""
        with contextlib.suppress(OSError):  # closed, or woken so often that the buffer is full
            self._written.send(b"\0")

    def clear(self) -> None:
        """Forget earlier calls of `wake`; only on the thread that waits."""
        with contextlib.suppress(OSError):  # nothing is left to read
            while self._polled.recv(4096):
                pass

    def close(self) -> None:
        self._polled.close()
        self._written.close()
