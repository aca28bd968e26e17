"""Frames between the runtime and its clients: a header, then a message as it was encoded. No I/O."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

from nblaunch.protocol.messages import ProtocolError

LIMIT_BEFORE_WELCOME = 1 << 16
"""Bytes of a message from a client that is not authenticated yet."""
LIMIT = 2 << 30
"""Bytes of any other message."""

_HEADER = struct.Struct("<IBQ")


class FrameKind(enum.IntEnum):
    """The meaning of a frame's body and number."""

    STRUCT = 0
    """A request or its answer; the number is the request's."""
    FOLDED = 1
    """A folded message exactly as it was encoded; the number is the job's."""
    EVENT = 2
    """One of `nblaunch.protocol.client.RuntimeEvent`; the number has no meaning."""


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """A message on its way."""

    kind: FrameKind
    number: int
    body: bytes


def header(kind: FrameKind, number: int, length: int) -> bytes:
    """Return the bytes that precede a body of `length` bytes; raise `ProtocolError` if it is too long."""
    if length > LIMIT:
        msg = f"A message of {length} bytes was to be sent, and {LIMIT} bytes is the most"
        raise ProtocolError(msg)
    return _HEADER.pack(length, kind, number)


class Frames:
    """Makes frames of bytes as they arrive.

    Each is yielded once, in order. Between two calls of `feed`, all that are complete are to be taken: then
    no more than one frame of `limit` bytes is kept here.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """The most bytes that a body may have; it may be raised."""
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames that are complete.

        Raises `ProtocolError` at a header that announces more than the limit, or an unknown kind; nothing
        after it can be read.
        """
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if len(self._buffer) < _HEADER.size:
            return None
        length, kind, number = _HEADER.unpack_from(self._buffer)
        if kind not in _KINDS or length > self.limit:
            self._buffer.clear()
            what = f"kind {kind}" if kind not in _KINDS else f"{length} bytes, and {self.limit} are allowed"
            msg = f"A frame was refused: it is of {what}"
            raise ProtocolError(msg)
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            body = bytes(view[_HEADER.size : end])
        # The start of a bytearray is removed without moving the rest.
        del self._buffer[:end]
        return Frame(_KINDS[kind], number, body)
