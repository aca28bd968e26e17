"""What stands in for torchelastic's own ways of returning values and ending ranks: the hub does both."""

from __future__ import annotations


class Released:
    """Stands in for the `Event` by which torchelastic lets finished ranks end.

    Ranks end when the hub tells them to, so nobody waits here; and no semaphore file is made.
    """

    def set(self) -> None:
        """Do nothing."""

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002 - the signature of Event
        """Return at once."""
        return True


class ReturnSlot:
    """Stands in for the queue by which torchelastic receives a value: ours go through the hub.

    It is full once the hub has released the rank. A rank that ends before that has ended without a
    word (`os._exit(0)`), for which torchelastic would wait for ever.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.released = False

    def put(self, value: object) -> None:
        """Do nothing: runs in the rank, whose value has been sent."""

    def empty(self) -> bool:
        """Return whether the rank is still wanted."""
        return not self.released

    def get(self) -> None:
        """Return the value torchelastic is to see."""
