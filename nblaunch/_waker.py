"""What one thread wakes another one with that waits for descriptors."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Ends the wait of a thread that polls it: `wake` from any thread, also before the wait has begun."""

    def __init__(self) -> None:
        """Make both ends."""
        self._polled, self._written = socket.socketpair()
        for end in (self._polled, self._written):
            end.settimeout(0)

    def fileno(self) -> int:
        """Return the descriptor to poll: it is readable once `wake` was called."""
        return self._polled.fileno()

    def wake(self) -> None:
        """End the wait; does nothing once this is closed."""
        with contextlib.suppress(OSError):  # closed; or woken so often already that no more fits
            self._written.send(b"\0")

    def clear(self) -> None:
        """Make the next wait last, unless `wake` is called again; only on the thread that waits."""
        with contextlib.suppress(OSError):  # nothing is left to read
            while self._polled.recv(4096):
                pass

    def close(self) -> None:
        """Let go of both ends."""
        self._polled.close()
        self._written.close()
