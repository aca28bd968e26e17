"""The listener: the socket to which nodes on other machines connect; all other ZMQ sockets are unix sockets.

ZMQ over TCP with CURVE: both sides prove that they have the join key before a message is decoded, and all is
encrypted. ZMQ itself refuses a peer without the key; the first refusal is logged.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import monitor, z85

from nblaunch._errors import LaunchError
from nblaunch.group.hub import Hub
from nblaunch.nodes.key import curve_secret, refusal_of
from nblaunch.nodes.messages import FromNode, Joining, Ping, Refused, ToNode, decode_from_node, encode
from nblaunch.protocol.messages import ProtocolError

_log = logging.getLogger("nblaunch")
_LISTEN_SECONDS = 0.02
# ZMQ forgets a connection a moment after it has reported its end.
_PROBE_SECONDS = 1.0
_LINGER_MS = 2000
_HEARTBEAT_MS, _SILENCE_MS = 2000, 15_000
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def encrypted(socket: zmq.Socket[bytes], key: bytes, side: str) -> bytes:
    """Give a socket the keys of one `side` (`notebook` or `node`); return the other side's public key."""
    other = "node" if side == "notebook" else "notebook"
    own = z85.encode(curve_secret(key, side))
    socket.curve_secretkey, socket.curve_publickey = own, zmq.curve_public(own)
    theirs = zmq.curve_public(z85.encode(curve_secret(key, other)))
    if side == "notebook":
        socket.curve_server = True
    else:
        socket.curve_serverkey = theirs
    for option, value in (
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
        (zmq.LINGER, _LINGER_MS),
        # No packet reports the end of a machine that is cut off.
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS),
    ):
        socket.setsockopt(option, value)
    return theirs


class Listener:
    """The socket for nodes; all of it but `__init__` runs on the hub's thread."""

    def __init__(
        self,
        hub: Hub,
        host: str,
        key: bytes,
        receive: Callable[[bytes, FromNode, memoryview], None],
        lost: Callable[[bytes], None],
    ) -> None:
        """Listen at a free port of `host`; `receive` takes messages, `lost` the id of a node that is gone.

        Raises `LaunchError` if `host` is no address of this machine.
        """
        self._hub, self._receive, self._lost = hub, receive, lost
        self._context = zmq.Context()
        # pyzmq would log each connection; a refusal is logged once, here.
        silent = logging.Logger("nblaunch.listener", logging.CRITICAL + 1)  # noqa: LOG001 - nobody configures it
        self._authenticator = ThreadAuthenticator(self._context, log=silent)
        self._authenticator.start()
        self._socket = self._context.socket(zmq.ROUTER)
        theirs = encrypted(self._socket, key, "notebook")
        # Only nodes with this run's key have the secret key of `theirs`.
        accept = SimpleNamespace(callback=lambda _domain, key: hmac.compare_digest(key, theirs))
        self._authenticator.configure_curve_callback("*", accept)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.setsockopt(zmq.IPV6, int(":" in host))
            self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            msg = (
                f"other nodes were to report to this machine at {host}, which is none of its addresses: "
                f"{error}. Give one with local_addr (--local-addr)."
            )
            raise LaunchError(msg, phase="rendezvous") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._events: Any = self._socket.get_monitor_socket(REFUSALS | zmq.EVENT_DISCONNECTED)
        self._known: set[bytes] = set()
        self._refused: set[bytes] = set()
        self._probe_until = 0.0
        hub.call(lambda: hub.watch(self._socket, self._receive_all))
        hub.call(lambda: hub.watch(self._events, self._connection_changed))

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
        if node not in self._refused:
            self._refused.add(node)
            _log.warning("refused: %s", why)

    def tick(self, now: float) -> None:
        """Probe all nodes for a moment after a connection has ended."""
        if now < self._probe_until:
            self._probe()

    def close(self) -> None:
        """Close the sockets; ZMQ sends what is left."""
        for socket in (self._socket, self._events):
            self._hub.watch(socket, None)
        self._socket.disable_monitor()
        self._authenticator.stop()
        # ZMQ's own thread sends the rest, while the linger lasts.
        self._socket.close()
        self._events.close(0)
        self._context.destroy(linger=_LINGER_MS)

    def _receive_all(self) -> None:
        until = time.monotonic() + _LISTEN_SECONDS
        while self._socket.poll(0) and time.monotonic() < until:
            node, *frames = self._socket.recv_multipart(copy=False)
            if node.bytes not in self._refused:
                self._dispatch(node.bytes, frames)

    def _dispatch(self, node: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = decode_from_node(frames[0].bytes if frames else b"")
        except ProtocolError as error:
            self.refuse(node, str(error))
            return
        if isinstance(message, Joining) and (why := refusal_of(message)):
            self.refuse(node, why)
        elif node in self._known or isinstance(message, Joining):
            self._receive(node, message, frames[1].buffer if len(frames) > 1 else memoryview(b""))
        else:
            self.refuse(node, "a node spoke before it had joined")

    def _connection_changed(self) -> None:
        while self._events.poll(0):
            event = monitor.recv_monitor_message(self._events)["event"]
            if event & REFUSALS and b"" not in self._refused:
                self._refused.add(b"")
                _log.warning(
                    "refused: somebody who has not this run's join key came to %s (a node with "
                    "another key, or a stranger); the run goes on, and more of these are not told",
                    self.address,
                )
            self._probe_until = time.monotonic() + _PROBE_SECONDS
            self._probe()

    def _probe(self) -> None:
        for node in list(self._known):
            if not self.send(node, Ping()):
                self._known.discard(node)
                # A node that came back under this id would have missed messages.
                self._refused.add(node)
                self._lost(node)
