"""Between machines: the listener and its encryption, payloads in pieces, and the sockets that carry these.

Nodes connect to the runtime's `Listener`; only it and the sockets for data are no unix sockets. ZMQ over TCP
with CURVE: both sides prove that they have the join key before a message is decoded, and all is encrypted.
ZMQ itself refuses a peer without the key; the first refusal is logged.

A payload is mapped by its sender, travels in pieces, and is written to memory by its receiver. The runtime
sends pieces to the first nodes, which forward them to others.

    runtime                    node                          node
    DEALER ────── Piece ─────> ROUTER   DEALER ── Piece ───> ROUTER
           <── PieceTaken ────                 <─ PieceTaken ──

Pieces never delay a message of the control connection, and each link carries a piece once. The first piece of
a payload names the nodes to which its receiver must forward it (`branches`). So a node needs no state before
a payload comes, and a payload passes only nodes that need it.

A node acknowledges a piece once it has forwarded it. At most `_WINDOW` pieces are in flight on each link, so
the slowest link sets the pace and no queue grows. An empty piece ends a payload that is dropped. A node
without such a socket gets pieces on its control connection.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import monitor, z85

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch.capture import shared_memory
from nblaunch.host import wire
from nblaunch.host.hub import Hub
from nblaunch.host.key import curve_secret
from nblaunch.host.rendezvous import first_free
from nblaunch.protocol.messages import PROTOCOL_VERSION, Payload, Profiled, ProtocolError, Returned

_log = logging.getLogger("nblaunch")
_LISTEN_SECONDS = 0.02
# ZMQ forgets a connection a moment after it has reported its end.
_PROBE_SECONDS, _PROBE_EVERY_SECONDS = 1.0, 0.05
_LINGER_MS = 2000
_HEARTBEAT_SECONDS, SILENCE_SECONDS = 2.0, 15.0
_LONGEST_TTL_MS = 6_553_599
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


_OTHER_SIDE = {"notebook": "node", "node": "notebook", "receiver": "sender", "sender": "receiver"}
_SERVERS = {"notebook", "receiver"}
# The sides that decide how long a silence may be.
_LIMITING = {"notebook", "sender"}
LONGEST_SILENCE_SECONDS = 3600.0
"""For the other sides: these get the limit with each heartbeat."""


def encrypted(socket: zmq.Socket[bytes], key: bytes, side: str, silence: float = SILENCE_SECONDS) -> bytes:
    """Give a socket the keys of one `side`; return the other side's public key.

    `notebook` listens for `node`; for payloads, `receiver` listens for `sender`. The connection ends after
    `silence` seconds without a heartbeat of the other side.
    """
    own = z85.encode(curve_secret(key, side))
    socket.curve_secretkey, socket.curve_publickey = own, zmq.curve_public(own)
    theirs = zmq.curve_public(z85.encode(curve_secret(key, _OTHER_SIDE[side])))
    if side in _SERVERS:
        socket.curve_server = True
    else:
        socket.curve_serverkey = theirs
    if side in _LIMITING:
        # The other side ends the connection after the same silence.
        socket.setsockopt(zmq.HEARTBEAT_TTL, min(int(1000 * silence), _LONGEST_TTL_MS))
    for option, value in (
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
        (zmq.LINGER, _LINGER_MS),
        # No packet reports the end of a machine that is cut off.
        (zmq.HEARTBEAT_IVL, int(1000 * min(_HEARTBEAT_SECONDS, silence / 3))),
        (zmq.HEARTBEAT_TIMEOUT, int(1000 * silence)),
    ):
        socket.setsockopt(option, value)
    return theirs


def admit_peers(context: zmq.Context[zmq.Socket[bytes]], theirs: bytes) -> ThreadAuthenticator:
    """Start the thread that admits only peers with this public key to the servers of a context."""
    # pyzmq would log each connection.
    silent = logging.Logger("nblaunch.listener", logging.CRITICAL + 1)  # noqa: LOG001 - nobody configures it
    authenticator = ThreadAuthenticator(context, log=silent)
    authenticator.start()
    # Only a peer with this run's key has the secret key for `theirs`.
    accept = SimpleNamespace(callback=lambda _domain, key: hmac.compare_digest(key, theirs))
    authenticator.configure_curve_callback("*", accept)
    return authenticator


def listen(socket: zmq.Socket[bytes], host: str, ports: range) -> str:
    """Bind a socket to a free one of these ports of `host`; return its ZMQ address.

    Raises `OSError` if `host` is not an address of this machine, and `LaunchError` if no port is free.
    """
    socket.setsockopt(zmq.IPV6, int(":" in host))

    def bind(port: int) -> str:
        try:
            socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    return first_free(ports, host, bind)


class Listener:
    """The socket for nodes; all of it but `__init__` runs on the hub's thread."""

    def __init__(  # noqa: PLR0913 - where, by which key, for whom
        self,
        hub: Hub,
        host: str,
        key: bytes,
        receive: Callable[[bytes, wire.FromNode, memoryview], None],
        lost: Callable[[bytes], None],
        *,
        silence: float = SILENCE_SECONDS,
        ports: range = range(1),
    ) -> None:
        """Listen at a free one of the ports of `host`.

        `receive` gets messages, `lost` the id of a node that is gone. Raises `LaunchError` if `host` is not
        an address of this machine, or no port is free.
        """
        self._hub, self._receive, self._lost = hub, receive, lost
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._authenticator = admit_peers(self._context, encrypted(self._socket, key, "notebook", silence))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.address = listen(self._socket, host, ports)
        except (OSError, LaunchError) as error:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            if isinstance(error, LaunchError):
                raise
            wrong, option = ("which is none of its addresses", "local_addr (--local-addr)")
            if ports[0]:
                wrong, option = f"port {ports[0]}", "ports (--ports), or local_addr (--local-addr)"
            msg = (
                f"other nodes were to report to this machine at {host}, {wrong}: {error.strerror}. Give "
                f"another one with {option}."
            )
            raise LaunchError(msg, phase="rendezvous", kind=FailureKind.PORT) from error
        self._events: Any = self._socket.get_monitor_socket(REFUSALS | zmq.EVENT_DISCONNECTED)
        self._known: set[bytes] = set()
        self._refused: set[bytes] = set()
        self._connections: dict[bytes, int] = {}
        """By node, the descriptor of the connection that its last message came by."""
        self._ended: dict[int, float] = {}
        """Connections that have just ended, a node's or a stranger's, and when (monotonic)."""
        self._next_probe = 0.0
        hub.call(self._listen)

    def _listen(self) -> None:
        self._hub.watch(self._socket, self._receive_all)
        self._hub.watch(self._events, self._connection_changed)
        self._hub.after_turn.append(self._probe)

    def send(self, node: bytes, message: wire.ToNode, data: memoryview | None = None) -> bool:
        frames: list[bytes | memoryview] = [node, wire.encode(message), *([] if data is None else [data])]
        try:
            # Copied: without a copy pyzmq would start a thread, which lives as long as the notebook.
            self._socket.send_multipart(frames)
        except zmq.ZMQError:
            return False
        return True

    def welcome(self, node: bytes) -> None:
        self._known.add(node)

    def refuse(self, node: bytes, why: str) -> None:
        """Refuse a node that has the key: send it the reason, and ignore it from now on."""
        self.send(node, wire.Refused(why))
        if node not in self._known:  # the end of a known one is reported, as that of any other
            self._connections.pop(node, None)
        if node not in self._refused:
            self._refused.add(node)
            _log.warning("refused: %s", why)

    def drop(self, node: bytes) -> None:
        self._known.discard(node)
        self._connections.pop(node, None)
        self._refused.add(node)

    def close(self) -> None:
        for socket in (self._socket, self._events):
            self._hub.watch(socket, None)
        self._hub.after_turn.remove(self._probe)
        self._socket.disable_monitor()
        self._authenticator.stop()
        # ZMQ's own thread sends the rest, while the linger lasts.
        self._socket.close()
        self._events.close(0)
        self._context.destroy(linger=_LINGER_MS)

    def _receive_all(self) -> None:
        until = time.monotonic() + _LISTEN_SECONDS
        while time.monotonic() < until:
            try:  # half as long as to poll first
                node, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if node.bytes not in self._refused:
                self._connections[node.bytes] = int(node.get(zmq.SRCFD))
                self._dispatch(node.bytes, frames)

    def _dispatch(self, node: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = wire.decode_from_node(frames[0].bytes if frames else b"")
        except ProtocolError as error:
            self.refuse(node, str(error))
            return
        begins = isinstance(message, wire.Arriving)
        if isinstance(message, wire.Arriving) and message.version != PROTOCOL_VERSION:
            self.refuse(
                node, f"{message.name} has another version of nblaunch. Install the notebook's there."
            )
        elif node in self._known or begins:
            self._receive(node, message, frames[1].buffer if len(frames) > 1 else memoryview(b""))
        else:
            self.refuse(node, "a node spoke before it had joined")

    def _connection_changed(self) -> None:
        while self._events.poll(0):
            told = monitor.recv_monitor_message(self._events)
            if told["event"] == zmq.EVENT_DISCONNECTED:
                self._ended[told["value"]] = time.monotonic()
            elif b"" not in self._refused:
                self._refused.add(b"")
                _log.warning(
                    "refused: somebody who has not this run's join key came to %s (a node with "
                    "another key, or a stranger); the run goes on, and more of these are not told",
                    self.address,
                )

    def _probe(self) -> float:
        """Probe the node of a connection for a moment after its end; return when the next probe is due."""
        if not self._ended:
            return math.inf
        now = time.monotonic()
        self._ended = {fd: at for fd, at in self._ended.items() if now < at + _PROBE_SECONDS}
        if now >= self._next_probe:
            self._next_probe = now + _PROBE_EVERY_SECONDS
            for node in [each for each in self._known if self._connections.get(each) in self._ended]:
                if not self.send(node, wire.Ping()):
                    # A node that reconnected under this id would have missed messages.
                    self.drop(node)
                    self._lost(node)
        return max(self._next_probe - time.monotonic(), 0.0)


# Payloads in pieces.

PIECE_BYTES = 1024 * 1024
"""A later message on the same connection waits for at most one piece, and so does the next node."""
_PREFIX = "parcel:"


def payload_of(message: Returned | Profiled) -> Payload:
    return message.value if isinstance(message, Returned) else message.data


def with_payload(message: Returned | Profiled, payload: Payload) -> Returned | Profiled:
    if isinstance(message, Returned):
        return msgspec.structs.replace(message, value=payload)
    return msgspec.structs.replace(message, data=payload)


class OutgoingTransfer:
    """Numbers the payloads that leave this process, and cuts them into pieces."""

    def __init__(self) -> None:
        self._count = 0

    def pieces(self, payload: Payload) -> tuple[Payload, Iterator[tuple[wire.Piece, memoryview]]]:
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
) -> Iterator[tuple[wire.Piece, memoryview]]:
    """Yield the pieces of a payload, each with its bytes; the first has the nodes `to` which it goes on."""
    for offset in range(0, whole.nbytes, PIECE_BYTES):
        further = () if offset else to
        piece = wire.Piece(number=number, offset=offset, total=whole.nbytes, group=group, to=further)
        yield piece, whole[offset : offset + PIECE_BYTES]


class IncomingTransfer:
    """Reassembles the payloads of one sender."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._incoming: dict[int, shared_memory.Incoming] = {}
        self._errors: dict[int, Exception] = {}
        self._missing: dict[int, int] = {}
        """How many bytes of each payload are missing."""
        self._waiting: dict[int, Callable[[], None]] = {}
        self._dropped: set[int] = set()
        """Payloads that failed, or were dropped before they were whole: their later pieces are ignored."""

    def receive(self, piece: wire.Piece, data: memoryview) -> None:
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
        """Return the received payload as a local one. Raises the error of a piece that failed."""
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
        for incoming in self._incoming.values():
            incoming.close()
        self._incoming, self._waiting = {}, {}


def number_of(ticket: Payload) -> int:
    return int(ticket.path.removeprefix(_PREFIX))


# The sockets for payloads.

_CHAIN = 8
_WINDOW = 16
_SMALL = 64 * 1024
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
        received: Callable[[wire.Piece, memoryview], None] = lambda _piece, _data: None,
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
        theirs = encrypted(socket, self._key, "receiver", LONGEST_SILENCE_SECONDS)
        self._authenticator = admit_peers(self._context, theirs)
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
                piece = wire.decode_to_node(frames[0].bytes if frames else b"")
            except ProtocolError:
                continue  # a parent with the key but a defect: the payload will stay incomplete
            if isinstance(piece, wire.Piece) and len(frames) > 1:
                self._take(socket, parent.bytes, piece, frames[1])

    def _take(self, socket: zmq.Socket[bytes], parent: bytes, piece: wire.Piece, data: zmq.Frame) -> None:
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
                taken = wire.PieceTaken(group=piece.group, number=piece.number, offset=piece.offset)
                socket.send_multipart([parent, wire.encode(taken)])

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

    piece: wire.Piece
    data: memoryview | zmq.Frame
    sent: Callable[[], None] = lambda: None


class _Child:
    """The connection to a node to which this process sends."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], key: bytes, address: str, silence: float
    ) -> None:
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        encrypted(self.socket, key, "sender", silence)
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
        self.under_way[key] = (total - 1) // PIECE_BYTES * PIECE_BYTES

    def pump(self) -> bool:
        """Send as many pieces as may be in flight; return False if the node is gone."""
        while self.queue and (self._sent < _WINDOW or self.socket.closed):
            piece, data, sent = self.queue.popleft()
            try:
                if not self.socket.closed:
                    # A received frame is forwarded as it is. Other memory is copied: without a copy pyzmq
                    # would start a thread to release it.
                    frames = [wire.encode(piece), data]
                    self.socket.send_multipart(frames, zmq.NOBLOCK, copy=not isinstance(data, zmq.Frame))
                    self._sent += 1
            except zmq.ZMQError:
                return False
            finally:
                sent()
        return True

    def hear(self) -> None:
        while not self.socket.closed and self.socket.poll(0):
            answer = wire.decode_from_node(self.socket.recv())
            if isinstance(answer, wire.PieceTaken):
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
        nothing = wire.Piece(group=key[0], number=key[1], offset=0, total=0)
        with contextlib.suppress(zmq.ZMQError):  # the node is gone, as its connection will report
            self.socket.send_multipart([wire.encode(nothing), b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the connection; pieces that wait, or are added later, are not sent."""
        self.socket.disable_monitor()
        self.socket.close()
        self.events.close(0)
        self.pump()
