"""The listener: the socket to which nodes on other machines connect; all other ZMQ sockets are unix sockets.

ZMQ over TCP with CURVE: both sides prove that they have the join key before a message is decoded, and all is
encrypted. ZMQ itself refuses a peer without the key; the first refusal is logged.
"""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import monitor, z85

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch.elastic.rendezvous import first_free
from nblaunch.group.hub import Hub
from nblaunch.nodes.key import curve_secret
from nblaunch.nodes.messages import (
    Arriving,
    FromNode,
    Ping,
    Refused,
    ToNode,
    decode_from_node,
    encode,
)
from nblaunch.protocol.messages import PROTOCOL_VERSION, ProtocolError

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


_OTHER_SIDE = {"notebook": "node", "node": "notebook", "taker": "giver", "giver": "taker"}
_SERVERS = {"notebook", "taker"}
# The sides that decide how long a silence may be.
_LIMITING = {"notebook", "giver"}
LONGEST_SILENCE_SECONDS = 3600.0
"""For the other sides: these get the limit with each heartbeat."""


def encrypted(socket: zmq.Socket[bytes], key: bytes, side: str, silence: float = SILENCE_SECONDS) -> bytes:
    """Give a socket the keys of one `side`; return the other side's public key.

    `notebook` listens for `node`; for payloads, `taker` listens for `giver`. The connection ends after
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


def admitting(context: zmq.Context[zmq.Socket[bytes]], theirs: bytes) -> ThreadAuthenticator:
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
        receive: Callable[[bytes, FromNode, memoryview], None],
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
        self._authenticator = admitting(self._context, encrypted(self._socket, key, "notebook", silence))
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

    def send(self, node: bytes, message: ToNode, data: memoryview | None = None) -> bool:
        """Send to a node; return whether it is connected."""
        frames: list[bytes | memoryview] = [node, encode(message), *([] if data is None else [data])]
        try:
            # Copied: without a copy pyzmq would start a thread, which lives as long as the notebook.
            self._socket.send_multipart(frames)
        except zmq.ZMQError:
            return False
        return True

    def welcome(self, node: bytes) -> None:
        """Accept messages of this node."""
        self._known.add(node)

    def refuse(self, node: bytes, why: str) -> None:
        """Refuse a node that has the key: send it the reason, and ignore it from now on."""
        self.send(node, Refused(why))
        if node not in self._known:  # the end of a known one is reported, as that of any other
            self._connections.pop(node, None)
        if node not in self._refused:
            self._refused.add(node)
            _log.warning("refused: %s", why)

    def drop(self, node: bytes) -> None:
        """Ignore a node from now on."""
        self._known.discard(node)
        self._connections.pop(node, None)
        self._refused.add(node)

    def close(self) -> None:
        """Close the sockets; ZMQ sends what is left."""
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
            message = decode_from_node(frames[0].bytes if frames else b"")
        except ProtocolError as error:
            self.refuse(node, str(error))
            return
        begins = isinstance(message, Arriving)
        if isinstance(message, Arriving) and message.version != PROTOCOL_VERSION:
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
                if not self.send(node, Ping()):
                    # A node that reconnected under this id would have missed messages.
                    self.drop(node)
                    self._lost(node)
        return max(self._next_probe - time.monotonic(), 0.0)
