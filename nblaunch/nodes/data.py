"""The sockets for payloads: the runtime sends pieces to the first nodes, which forward them to others.

    runtime                    node                          node
    DEALER ────── Piece ─────> ROUTER   DEALER ── Piece ───> ROUTER
           <── PieceTaken ────                 <─ PieceTaken ──

Pieces never delay a message of the control connection, and each link carries a piece once. The first piece of
a payload names the nodes to which its receiver must forward it (`branches`). So a node needs no state before
a payload comes, and a payload passes only nodes that need it.

A node acknowledges a piece once it has forwarded it. At most `_WINDOW` pieces are in flight on each link, so
the slowest link sets the pace and no queue grows. An empty piece ends a payload that is dropped. ZMQ with
CURVE: both sides prove that they have the run's key before anything is decoded.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import zmq

from nblaunch.capture import shared_memory
from nblaunch.group.hub import Hub
from nblaunch.nodes.listener import (
    LONGEST_SILENCE_SECONDS,
    REFUSALS,
    SILENCE_SECONDS,
    admitting,
    encrypted,
    listen,
)
from nblaunch.nodes.messages import Piece, PieceTaken, decode_from_node, decode_to_node, encode
from nblaunch.nodes.transfer import PIECE_BYTES, cut, ticket_of
from nblaunch.protocol.messages import Payload, ProtocolError

_CHAIN = 8
_WINDOW = 16
_SMALL = 64 * 1024
_LISTEN_SECONDS = 0.02
_CONNECT_MS = 5000
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | REFUSALS

NodePlace: TypeAlias = tuple[str, str]
"""A node's name, and the address of its socket for data."""


def branches(nodes: Sequence[NodePlace]) -> tuple[tuple[NodePlace, tuple[NodePlace, ...]], ...]:
    """Return the nodes to send to, each with the nodes to which it forwards.

    Up to eight nodes form a chain; more are split into two halves.

    >>> branches([("hA", ""), ("hB", ""), ("hC", "")])
    ((('hA', ''), (('hB', ''), ('hC', ''))),)
    """
    if len(nodes) <= _CHAIN:
        return ((nodes[0], tuple(nodes[1:])),) if nodes else ()
    middle = len(nodes) // 2
    return (nodes[0], tuple(nodes[1:middle])), (nodes[middle], tuple(nodes[middle + 1 :]))


class DataSocket:
    """Sends payloads to nodes; on a node, also receives and forwards them. All on the hub's thread."""

    def __init__(  # noqa: PLR0913 - where, by which key, for whom
        self,
        hub: Hub,
        key: bytes,
        *,
        host: str = "",
        ports: range = range(1),
        silence: float = SILENCE_SECONDS,
        received: Callable[[Piece, memoryview], None] = lambda _piece, _data: None,
        lost: Callable[[str, int], None] = lambda _group, _number: None,
    ) -> None:
        """Listen at a free one of the ports of `host`, unless that is "" (the runtime).

        `received` gets each piece after it has been forwarded. `lost` gets the group and number of a payload
        whose child is gone before it took the whole payload.
        """
        self._hub, self._key, self._received, self._lost = hub, key, received, lost
        self.silence = silence
        """After how many seconds of silence a child counts as lost."""
        # Two I/O threads: one decrypts while the other encrypts.
        self._context = zmq.Context(2)
        self._socket: zmq.Socket[bytes] | None = None
        self._children: dict[str, _Child] = {}
        """By address."""
        self._flows: dict[tuple[str, int], list[_Child]] = {}
        """The children that get the rest of each payload that is on its way to this node."""
        self._count = 0
        self.address = ""
        """The ZMQ address at which others reach it; "" if it only sends."""
        if host:
            self._listen(host, ports)

    def _listen(self, host: str, ports: range) -> None:
        socket = self._socket = self._context.socket(zmq.ROUTER)
        theirs = encrypted(socket, self._key, "taker", LONGEST_SILENCE_SECONDS)
        self._authenticator = admitting(self._context, theirs)
        self.address = listen(socket, host, ports)
        self._hub.call(lambda: self._hub.watch(socket, lambda: self._receive_all(socket)))

    def send(self, group: str, payload: Payload, nodes: Sequence[NodePlace]) -> Payload:
        """Send a payload to these nodes in pieces; return the ticket that replaces it in messages.

        A small payload is its own ticket. The memory is held until all pieces are sent. Raises `OSError` if
        the process that held the payload is gone.
        """
        if payload.inline is not None and len(payload.inline) <= _SMALL:
            return payload
        whole = shared_memory.joined(payload, private=True)
        self._count += 1
        for place, behind in branches(nodes):
            child = self._child(place)
            child.begin((group, self._count), whole.nbytes)
            for piece, data in cut(self._count, whole, group=group, to=behind):
                child.queue.append(_Parcel(piece, data))
            self._pump(child)
        return ticket_of(self._count, payload)

    def drop(self, group: str) -> None:
        """Drop this group's payloads: send and accept no more pieces, here and on the nodes after this."""
        self._flows = {key: children for key, children in self._flows.items() if key[0] != group}
        for child in self._children.values():
            for key in [each for each in child.under_way if each[0] == group]:
                child.cancel(key)

    def close(self) -> None:
        """Close the sockets; unsent pieces are lost."""
        for child in list(self._children.values()):
            self._part_from(child)
        if self._socket is not None:
            self._hub.watch(self._socket, None)
            self._authenticator.stop()
        self._context.destroy(linger=0)

    # --- from the parent ---------------------------------------------------------------------------

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        until = time.monotonic() + _LISTEN_SECONDS
        while not socket.closed and socket.poll(0) and time.monotonic() < until:
            parent, *frames = socket.recv_multipart(copy=False)
            try:
                piece = decode_to_node(frames[0].bytes if frames else b"")
            except ProtocolError:
                continue  # a parent with the key but a defect: the payload will stay incomplete
            if isinstance(piece, Piece) and len(frames) > 1:
                self._take(socket, parent.bytes, piece, frames[1])

    def _take(self, socket: zmq.Socket[bytes], parent: bytes, piece: Piece, data: zmq.Frame) -> None:
        key = piece.group, piece.number
        if piece.total == 0:
            for child in self._flows.pop(key, ()):
                child.cancel(key)
            return
        further = branches(piece.to)
        if piece.offset == 0:
            self._flows[key] = [self._child(place) for place, _ in further]
            for child in self._flows[key]:
                child.begin(key, piece.total)
        children = self._flows.get(key)
        waiting = len(children or ())

        def sent() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting <= 0 and not socket.closed:
                taken = PieceTaken(group=piece.group, number=piece.number, offset=piece.offset)
                socket.send_multipart([parent, encode(taken)])

        if not children:
            sent()
        for number, child in enumerate(children or ()):
            behind = further[number][1] if further else ()
            child.queue.append(_Parcel(msgspec.structs.replace(piece, to=behind), data, sent))
            self._pump(child)
        if children is not None:  # else the payload was dropped meanwhile
            if piece.offset + len(data) >= piece.total:
                self._flows.pop(key, None)
            self._received(piece, data.buffer)

    # --- to children -------------------------------------------------------------------------------

    def _child(self, place: NodePlace) -> _Child:
        address = place[1]
        if address not in self._children:
            child = self._children[address] = _Child(self._context, self._key, address, self.silence)
            self._hub.watch(child.socket, lambda: self._pump(child))
            self._hub.watch(child.events, lambda: self._lose(child))
        return self._children[address]

    def _pump(self, child: _Child) -> None:
        child.hear()
        if not child.pump():
            self._lose(child)

    def _lose(self, child: _Child) -> None:
        """Go on without a child whose connection has ended."""
        if self._children.get(child.address) is child:
            child.hear()
            self._part_from(child)
            for group, number in child.under_way:
                self._lost(group, number)

    def _part_from(self, child: _Child) -> None:
        del self._children[child.address]
        for socket in (child.socket, child.events):
            self._hub.watch(socket, None)
        child.close()


class _Parcel(NamedTuple):
    """A piece on its way to a child; `sent` is called once it is sent, or will never be."""

    piece: Piece
    data: memoryview | zmq.Frame
    sent: Callable[[], None] = lambda: None


class _Child:
    """The connection to a node to which this process sends."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], key: bytes, address: str, silence: float
    ) -> None:
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        encrypted(self.socket, key, "giver", silence)
        for option, value in (
            (zmq.RECONNECT_IVL, -1),
            (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
        ):
            self.socket.setsockopt(option, value)
        self.events: zmq.Socket[bytes] = self.socket.get_monitor_socket(_ENDS)
        self.queue: deque[_Parcel] = deque()
        self.under_way: dict[tuple[str, int], int] = {}
        """The payloads that it has not acknowledged whole, and the offset of the last piece of each."""
        self._sent = 0
        self.socket.connect(address)

    def begin(self, key: tuple[str, int], total: int) -> None:
        """Expect acknowledgements of a payload."""
        self.under_way[key] = (total - 1) // PIECE_BYTES * PIECE_BYTES

    def pump(self) -> bool:
        """Send as many pieces as may be in flight; return False if the node is gone."""
        while self.queue and (self._sent < _WINDOW or self.socket.closed):
            piece, data, sent = self.queue.popleft()
            try:
                if not self.socket.closed:
                    # A received frame is forwarded as it is. Other memory is copied: without a copy pyzmq
                    # would start a thread to release it.
                    frames = [encode(piece), data]
                    self.socket.send_multipart(frames, zmq.NOBLOCK, copy=not isinstance(data, zmq.Frame))
                    self._sent += 1
            except zmq.ZMQError:
                return False
            finally:
                sent()
        return True

    def hear(self) -> None:
        """Handle its acknowledgements."""
        while not self.socket.closed and self.socket.poll(0):
            answer = decode_from_node(self.socket.recv())
            if isinstance(answer, PieceTaken):
                self._sent -= 1
                key = answer.group, answer.number
                if self.under_way.get(key) == answer.offset:
                    del self.under_way[key]

    def cancel(self, key: tuple[str, int]) -> None:
        """Stop sending a payload, and send an empty piece to say so, which the node does not acknowledge."""
        if self.under_way.pop(key, None) is None or self.socket.closed:
            return
        kept = deque[_Parcel]()
        for parcel in self.queue:
            if (parcel.piece.group, parcel.piece.number) == key:
                parcel.sent()
            else:
                kept.append(parcel)
        self.queue = kept
        nothing = Piece(group=key[0], number=key[1], offset=0, total=0)
        with contextlib.suppress(zmq.ZMQError):  # the node is gone, as its connection will report
            self.socket.send_multipart([encode(nothing), b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the connection; pieces that wait, or are added later, are not sent."""
        self.socket.disable_monitor()
        self.socket.close()
        self.events.close(0)
        self.pump()
