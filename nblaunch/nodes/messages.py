"""The messages between the runtime and a node that has joined, over TCP.

Each message is one MessagePack frame; `Wrote` and `Piece` have a second one with raw bytes. Messages from and
to ranks are carried as they are, encoded by `nblaunch.protocol.messages`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from nblaunch.protocol.messages import PROTOCOL_VERSION, ProtocolError, Stream


class WorkerRecord(msgspec.Struct, frozen=True):
    """A rank's process on a node."""

    rank: int
    local_rank: int
    pid: int


# From a node


class Joining(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of a node, before it joins the rendezvous."""

    name: str
    nproc: int
    version: int = PROTOCOL_VERSION
    python: str = ""
    torch: str = ""


class Workers(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Its ranks have been started."""

    attempt: int
    workers: tuple[WorkerRecord, ...]


class RankMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A message of one of its ranks."""

    attempt: int
    data: bytes


class Wrote(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The next bytes of a rank's log file."""

    attempt: int
    rank: int
    stream: Stream


class Piece(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The bytes of payload `number` from `offset` on; the payload has `total`."""

    number: int
    offset: int
    total: int


class Gone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One of its processes has ended."""

    attempt: int
    rank: int
    exitcode: int
    expected: bool
    reason: str = ""
    details: str = ""


class OthersStopped(msgspec.Struct, frozen=True, tag=True):
    """Its ranks that were still at work have exited."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The node asks the run to go on without it, and waits for its release."""


class NodeEnded(msgspec.Struct, frozen=True, tag=True):
    """Its ranks have exited, and it is about to; `error` is the reason, if the runtime does not know it."""

    error: str = ""


# To a node


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Accept the node, with the run's settings."""

    least: int
    most: int
    backend: str
    env: tuple[tuple[str, str], ...]
    grace: float
    shutdown_timeout: int
    monitor_interval: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reject the node."""

    why: str


class ForRank(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A message for one of its ranks."""

    attempt: int
    rank: int
    data: bytes


class Release(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Release the ranks, and stop the `others`."""

    attempt: int
    succeeded: bool
    others: tuple[int, ...]


class Rejoin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Re-run the rendezvous: the membership changes."""

    attempt: int


class SkipGrace(msgspec.Struct, frozen=True, tag=True):
    """Skip what is left of the grace period."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The run is over: end all ranks, and exit."""

    succeeded: bool


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Liveness probe; only its delivery matters."""


FromNode = Joining | Workers | RankMessage | Wrote | Piece | Gone | OthersStopped | Leaving | NodeEnded
ToNode = Welcome | Refused | ForRank | Piece | Release | Rejoin | SkipGrace | Finish | Ping

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)


def encode(message: FromNode | ToNode) -> bytes:
    """Return `message` as MessagePack."""
    return _encoder.encode(message)


def decode_from_node(data: bytes) -> FromNode:
    """Return the message in `data`; raise `ProtocolError` if there is none."""
    return _decoded(_from_node, data, "a node")


def decode_to_node(data: bytes) -> ToNode:
    """Return the message in `data`; raise `ProtocolError` if there is none."""
    return _decoded(_to_node, data, "the notebook")


def _decoded(decoder: msgspec.msgpack.Decoder[M], data: bytes, sender: str) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{len(data)} bytes from {sender} are no message of nblaunch's protocol: {error}"
        raise ProtocolError(msg) from error
