"""Waiting for processes to end, or for somebody on another thread to say that there is something to do."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from multiprocessing import connection


class Waker:
    """A bell: `ring` from any thread ends a `wait`, also one that has not begun yet."""

    def __init__(self) -> None:
        """Make the bell."""
        self._hears, self._rings = socket.socketpair()
        for end in (self._hears, self._rings):
            end.settimeout(0)

    def ring(self) -> None:
        """End the wait; does nothing once the bell is closed."""
        with contextlib.suppress(OSError):  # closed; or rung so often already that no more fits
            self._rings.send(b"\0")

    def wait(self, sentinels: Iterable[int], seconds: float) -> None:
        """Wait until a process behind `sentinels` has ended, or the bell rings; at most `seconds`."""
        with contextlib.suppress(OSError):  # nothing left to hear, or a process whose end was read meanwhile
            connection.wait([*sentinels, self._hears], timeout=max(seconds, 0.0))
            while self._hears.recv(4096):
                pass

    def close(self) -> None:
        """Let go of both ends."""
        self._hears.close()
        self._rings.close()
