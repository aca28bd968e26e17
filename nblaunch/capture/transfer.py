"""Payloads on their way to another machine, in pieces: mapped on this one, written to memory on the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nblaunch.capture import shared_memory
from nblaunch.protocol.messages import Payload

_PREFIX = "parcel:"


class OutgoingTransfer:
    """Numbers the payloads that leave this process, and cuts them into pieces."""

    def __init__(self, piece_bytes: int) -> None:
        self._step = piece_bytes
        self._count = 0

    def pieces(self, payload: Payload) -> tuple[Payload, Iterator[tuple[int, int, int, memoryview]]]:
        """Return a ticket to send in place of a payload, and its pieces: number, offset, total, bytes.

        A small payload is its own ticket. Raises `OSError` if the sender does not hold it any more.
        """
        if payload.inline is not None:
            return payload, iter(())
        whole = shared_memory.joined(payload, private=True)
        self._count += 1
        ticket = Payload(sizes=payload.sizes, path=f"{_PREFIX}{self._count}")
        return ticket, self._cut(self._count, whole)

    def _cut(self, number: int, whole: memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
        for offset in range(0, whole.nbytes, self._step):
            yield number, offset, whole.nbytes, whole[offset : offset + self._step]


class Arrival:
    """Puts the payloads of one sender together again."""

    def __init__(self, directory: Path) -> None:
        """Payloads for which memory has no room are written to `directory`."""
        self._directory = directory
        self._here: dict[int, shared_memory.Incoming] = {}
        self._errors: dict[int, Exception] = {}

    def take(self, number: int, offset: int, total: int, data: memoryview) -> None:
        """Take one piece; `claim` raises the error if this fails."""
        if number in self._errors:
            return
        try:
            if number not in self._here:
                self._here[number] = shared_memory.Incoming(total, self._directory)
            self._here[number].write(data, offset)
        except (OSError, MemoryError) as error:
            self._errors[number] = error

    def claim(self, payload: Payload) -> Payload:
        """Return the payload for a process of this machine. Raises the error of a piece that failed."""
        if payload.inline is not None:
            return Payload(sizes=payload.sizes, inline=payload.inline)
        if not payload.path.startswith(_PREFIX):
            msg = "a payload came without its bytes"
            raise OSError(msg)
        number = int(payload.path.removeprefix(_PREFIX))
        if number in self._errors:
            raise self._errors.pop(number)
        return self._here[number].payload(payload.sizes)

    def drop(self, payload: Payload) -> None:
        """Free a payload that a process has taken over."""
        if payload.path.startswith(_PREFIX):
            incoming = self._here.pop(int(payload.path.removeprefix(_PREFIX)), None)
            if incoming is not None:
                incoming.close()

    def close(self) -> None:
        """Free all."""
        for incoming in self._here.values():
            incoming.close()
        self._here = {}
