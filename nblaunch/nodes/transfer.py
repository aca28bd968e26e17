"""Payloads between machines, in pieces: mapped by the sender, written to memory by the receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from nblaunch.capture import shared_memory
from nblaunch.nodes.messages import Piece
from nblaunch.protocol.messages import Payload, Profiled, Returned

PIECE_BYTES = 1024 * 1024
"""A later message on the same connection waits for at most one piece, and so does the next node."""
_PREFIX = "parcel:"


def payload_of(message: Returned | Profiled) -> Payload:
    """Return what a rank has sent beside its message."""
    return message.value if isinstance(message, Returned) else message.data


def with_payload(message: Returned | Profiled, payload: Payload) -> Returned | Profiled:
    """Return a rank's message with its payload in another place."""
    if isinstance(message, Returned):
        return msgspec.structs.replace(message, value=payload)
    return msgspec.structs.replace(message, data=payload)


class OutgoingTransfer:
    """Numbers the payloads that leave this process, and cuts them into pieces."""

    def __init__(self) -> None:
        self._count = 0

    def pieces(self, payload: Payload) -> tuple[Payload, Iterator[tuple[Piece, memoryview]]]:
        """Return a ticket to send in place of a payload, and its pieces, each with its bytes.

        A small payload is its own ticket. Raises `OSError` if the process that held it is gone.
        """
        if payload.inline is not None:
            return payload, iter(())
        whole = shared_memory.joined(payload, private=True)
        self._count += 1
        return ticket_of(self._count, payload), cut(self._count, whole)


def ticket_of(number: int, payload: Payload) -> Payload:
    """Return the ticket that replaces a payload in messages; the payload travels under this number."""
    return Payload(sizes=payload.sizes, path=f"{_PREFIX}{number}")


def cut(
    number: int, whole: memoryview, *, group: str = "", to: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[Piece, memoryview]]:
    """Yield the pieces of a payload, each with its bytes; the first has the nodes `to` which it goes on."""
    for offset in range(0, whole.nbytes, PIECE_BYTES):
        further = () if offset else to
        piece = Piece(number=number, offset=offset, total=whole.nbytes, group=group, to=further)
        yield piece, whole[offset : offset + PIECE_BYTES]


class IncomingTransfer:
    """Reassembles the payloads of one sender."""

    def __init__(self, directory: Path) -> None:
        """Payloads that do not fit into memory are written to `directory`."""
        self._directory = directory
        self._incoming: dict[int, shared_memory.Incoming] = {}
        self._errors: dict[int, Exception] = {}
        self._missing: dict[int, int] = {}
        """How many bytes of each payload are missing."""
        self._waiting: dict[int, Callable[[], None]] = {}
        self._dropped: set[int] = set()
        """Payloads that failed, or were dropped before they were whole: their later pieces are ignored."""

    def receive(self, piece: Piece, data: memoryview) -> None:
        """Write a piece; if that fails, `claim` raises the error."""
        number = piece.number
        if number in self._errors or number in self._dropped:
            return
        try:
            if number not in self._incoming:
                self._incoming[number] = shared_memory.Incoming(piece.total, self._directory)
                self._missing[number] = piece.total
            self._incoming[number].write(data, piece.offset)
            self._missing[number] -= data.nbytes
        except (OSError, MemoryError) as error:
            self._errors[number] = error
        if self._settled(number) and (act := self._waiting.pop(number, None)):
            act()

    def _settled(self, number: int) -> bool:
        return number in self._errors or self._missing.get(number, 1) <= 0

    def when_whole(self, ticket: Payload, act: Callable[[], None]) -> None:
        """Call `act` once the payload can be claimed, at once if it can be now; never, if it is dropped."""
        if not ticket.path.startswith(_PREFIX) or self._settled(number_of(ticket)):
            act()
        else:
            self._waiting[number_of(ticket)] = act

    def claim(self, ticket: Payload) -> Payload:
        """Return the payload for a process of this machine. Raises the error of a piece that failed."""
        if ticket.inline is not None:
            return Payload(sizes=ticket.sizes, inline=ticket.inline)
        if not ticket.path.startswith(_PREFIX):
            msg = "a payload came without its bytes"
            raise OSError(msg)
        number = number_of(ticket)
        if number in self._errors:
            raise self._errors[number]
        return self._incoming[number].payload(ticket.sizes)

    def drop(self, ticket: Payload) -> None:
        """Free a payload; a process that has mapped it keeps it."""
        if not ticket.path.startswith(_PREFIX):
            return
        number = number_of(ticket)
        if self._errors.pop(number, None) or not self._settled(number):
            self._dropped.add(number)
        self._waiting.pop(number, None)
        self._missing.pop(number, None)
        if found := self._incoming.pop(number, None):
            found.close()

    def close(self) -> None:
        """Free all."""
        for incoming in self._incoming.values():
            incoming.close()
        self._incoming, self._waiting = {}, {}


def number_of(ticket: Payload) -> int:
    """Return the number under which the payload of a ticket travels."""
    return int(ticket.path.removeprefix(_PREFIX))
