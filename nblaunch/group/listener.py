"""The listener: where nodes on other machines report. The one socket of ours that is no unix socket.

ZMQ over TCP with CURVE: both sides prove that they have the join key before a byte of what they say is looked
at, and all is encrypted. Whoever has not is turned away by ZMQ itself, which is logged once.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import monitor, z85

from nblaunch import _join_key
from nblaunch._errors import LaunchError
from nblaunch.group.hub import Hub
from nblaunch.group.key import unfit
from nblaunch.protocol.messages import ProtocolError
from nblaunch.protocol.nodes import FromNode, Joining, Ping, Refused, ToNode, decode_from_node, encode

_log = logging.getLogger("nblaunch")
_LISTEN_SECONDS = 0.02
# ZMQ takes a connection that is gone off its list a moment after it says so.
_LOOK_AGAIN_SECONDS = 1.0
_LINGER_MS = 2000
_HEARTBEAT_MS, _SILENCE_MS = 2000, 15_000
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Hear = Callable[[bytes, FromNode, memoryview], None]


class _OneClient:
    """Lets in whoever has the secret key that belongs to this public one."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - as pyzmq calls it
        """Return whether a client may come in; `key` is in the form of `zmq.curve_public`."""
        return hmac.compare_digest(key, self._public)


def encrypted(socket: zmq.Socket[bytes], key: bytes, side: str) -> bytes:
    """Make a socket that of one `side` (`notebook` or `node`); return the other one's public key."""
    other = "node" if side == "notebook" else "notebook"
    secret = z85.encode(_join_key.secret(key, side))
    socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
    theirs = zmq.curve_public(z85.encode(_join_key.secret(key, other)))
    if side == "notebook":
        socket.curve_server = True
    else:
        socket.curve_serverkey = theirs
    for option, value in (
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
        (zmq.LINGER, _LINGER_MS),
        # A machine that is cut off says nothing any more.
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS),
    ):
        socket.setsockopt(option, value)
    return theirs


class Listener:
    """Lets nodes in, and carries what they say; but for `__init__` everything happens on the hub's thread."""

    def __init__(self, hub: Hub, host: str, key: bytes, hear: Hear, lost: Callable[[bytes], None]) -> None:
        """Listen at a free port of `host`; `hear` takes messages, `lost` the name of a node that is gone.

        Raises `LaunchError` if that cannot be.
        """
        self._hub, self._hear, self._lost = hub, hear, lost
        self._context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context, log=_unheard())
        self._guard.start()
        self._socket = self._context.socket(zmq.ROUTER)
        theirs = encrypted(self._socket, key, "notebook")
        self._guard.configure_curve_callback("*", _OneClient(theirs))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.setsockopt(zmq.IPV6, _is_ipv6(host))
            self._socket.bind(f"tcp://{_bracketed(host)}:*")
        except zmq.ZMQError as error:
            self._guard.stop()
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
        self._look_until = 0.0
        hub.call(self._open)

    def _open(self) -> None:
        self._hub.watch(self._socket, self._listen)
        self._hub.watch(self._events, self._look)

    def send(self, node: bytes, message: ToNode, data: memoryview | None = None) -> bool:
        """Send to a node; return whether there is one of that name."""
        frames: list[bytes | memoryview] = [node, encode(message), *([] if data is None else [data])]
        try:
            # Copied: pyzmq would leave a thread of its own in the notebook for as long as that lives.
            self._socket.send_multipart(frames)
        except zmq.ZMQError:
            return False
        return True

    def welcome(self, node: bytes) -> None:
        """Take a node for one of ours."""
        self._known.add(node)

    def refuse(self, node: bytes, why: str) -> None:
        """Turn a node away, which has the key and yet is none of ours."""
        self.send(node, Refused(why))
        if node not in self._refused:
            self._refused.add(node)
            _log.warning("refused: %s", why)

    def tick(self, now: float) -> None:
        """Look whether all nodes are still there, for a moment after one of them went."""
        if now < self._look_until:
            self._probe()

    def close(self) -> None:
        """Send what is left, and listen no more."""
        for socket in (self._socket, self._events):
            self._hub.watch(socket, None)
        self._socket.disable_monitor()
        self._guard.stop()
        # What is still to be sent is sent by ZMQ's own thread, for as long as the linger lasts.
        self._socket.close()
        self._events.close(0)
        self._context.destroy(linger=_LINGER_MS)

    def _listen(self) -> None:
        until = time.monotonic() + _LISTEN_SECONDS
        while self._socket.poll(0) and time.monotonic() < until:
            node, *frames = self._socket.recv_multipart(copy=False)
            self._take(node.bytes, frames)

    def _take(self, node: bytes, frames: list[zmq.Frame]) -> None:
        if node in self._refused:
            return
        try:
            message = decode_from_node(frames[0].bytes if frames else b"")
        except ProtocolError as error:
            self.refuse(node, str(error))
            return
        if isinstance(message, Joining) and (why := unfit(message)):
            self.refuse(node, why)
        elif node in self._known or isinstance(message, Joining):
            self._hear(node, message, frames[1].buffer if len(frames) > 1 else memoryview(b""))
        else:
            self.refuse(node, "a node spoke before it had joined")

    def _look(self) -> None:
        while self._events.poll(0):
            event = monitor.recv_monitor_message(self._events)["event"]
            if event & REFUSALS and b"" not in self._refused:
                self._refused.add(b"")
                _log.warning(
                    "refused: somebody who has not this run's join key came to %s (a node with "
                    "another key, or a "
                    "stranger); the run goes on, and more of these are not told",
                    self.address,
                )
            self._look_until = time.monotonic() + _LOOK_AGAIN_SECONDS
            self._probe()

    def _probe(self) -> None:
        for node in list(self._known):
            if not self.send(node, Ping()):
                self._known.discard(node)
                # Whoever comes back under this name has not been there all the time.
                self._refused.add(node)
                self._lost(node)


def _is_ipv6(host: str) -> int:
    with contextlib.suppress(ValueError):
        return int(ipaddress.ip_address(host).version == 6)  # noqa: PLR2004
    return 0


def _bracketed(host: str) -> str:
    return f"[{host}]" if _is_ipv6(host) else host


def _unheard() -> logging.Logger:
    """Return a logger for pyzmq's own words about each connection: ours are said once."""
    logger = logging.getLogger("nblaunch.gate")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger
