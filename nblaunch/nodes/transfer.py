"""Payloads between machines, in pieces: mapped by the sender, written to memory by the receiver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nblaunch.capture import shared_memory
from nblaunch.nodes.messages import Piece
from nblaunch.protocol.messages import Payload

PIECE_BYTES = 8 * 1024 * 1024
"""An interrupt waits for no more than one piece."""
_PREFIX = "parcel:"


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
        ticket = Payload(sizes=payload.sizes, path=f"{_PREFIX}{self._count}")
        return ticket, _cut(self._count, whole)


def _cut(number: int, whole: memoryview) -> Iterator[tuple[Piece, memoryview]]:
    for offset in range(0, whole.nbytes, PIECE_BYTES):
        piece = Piece(number=number, offset=offset, total=whole.nbytes)
        yield piece, whole[offset : offset + PIECE_BYTES]


class IncomingTransfer:
    """Reassembles the payloads of one sender."""

    def __init__(self, directory: Path) -> None:
        """Payloads that do not fit into memory are written to `directory`."""
        self._directory = directory
        self._incoming: dict[int, shared_memory.Incoming] = {}
        self._errors: dict[int, Exception] = {}

    def receive(self, piece: Piece, data: memoryview) -> None:
        """Write a piece; if that fails, `claim` raises the error."""
        if piece.number in self._errors:
            return
        try:
            if piece.number not in self._incoming:
                self._incoming[piece.number] = shared_memory.Incoming(piece.total, self._directory)
            self._incoming[piece.number].write(data, piece.offset)
        except (OSError, MemoryError) as error:
            self._errors[piece.number] = error

    def claim(self, ticket: Payload) -> Payload:
        """Return the payload for a process of this machine. Raises the error of a piece that failed."""
        if ticket.inline is not None:
            return Payload(sizes=ticket.sizes, inline=ticket.inline)
        if not ticket.path.startswith(_PREFIX):
            msg = "a payload came without its bytes"
            raise OSError(msg)
        number = _number_of(ticket)
        if number in self._errors:
            raise self._errors.pop(number)
        return self._incoming[number].payload(ticket.sizes)

    def drop(self, ticket: Payload) -> None:
        """Free a payload; a process that has mapped it keeps it."""
        if ticket.path.startswith(_PREFIX) and (found := self._incoming.pop(_number_of(ticket), None)):
            found.close()

    def close(self) -> None:
        """Free all."""
        for incoming in self._incoming.values():
            incoming.close()
        self._incoming = {}


def _number_of(ticket: Payload) -> int:
    return int(ticket.path.removeprefix(_PREFIX))
