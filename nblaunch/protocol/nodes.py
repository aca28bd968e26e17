"""What the notebook and a node that has joined say to each other, over TCP.

Each message is one MessagePack frame, and for `Wrote` and `Piece` a second one with raw bytes. What ranks say
and are told goes along as it is, encoded by `nblaunch.protocol.messages`.
"""

from __future__ import annotations

import msgspec

from nblaunch.protocol.messages import PROTOCOL_VERSION, ProtocolError, Stream

PIECE_BYTES = 8 * 1024 * 1024
"""Payloads travel in pieces of this size, so that an interrupt waits for no more than one of them."""


class WorkerRecord(msgspec.Struct, frozen=True):
    """A rank's process on a node."""

    rank: int
    local_rank: int
    pid: int


# --- from a node -----------------------------------------------------------------------------------


class Joining(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first word of a node: it is there, and has not joined the rendezvous yet."""

    name: str
    nproc: int
    version: int = PROTOCOL_VERSION
    python: str = ""
    torch: str = ""


class Workers(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Its ranks have been started."""

    attempt: int
    workers: tuple[WorkerRecord, ...]


class Said(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One of its ranks said something."""

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
    """Those of its ranks that were still at work are gone."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """It was told to end by somebody there, and waits for leave."""


class NodeEnded(msgspec.Struct, frozen=True, tag=True):
    """Its ranks are gone, and so will it be; `error` is why, if that is not for a reason known here."""

    error: str = ""


# --- to a node -------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Come in: what the run asks of its nodes."""

    least: int
    most: int
    backend: str
    env: tuple[tuple[str, str], ...]
    grace: float
    shutdown_timeout: int
    monitor_interval: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Stay out."""

    why: str


class ForRank(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pass this on to a rank."""

    attempt: int
    rank: int
    data: bytes


class Release(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Let the ranks end, and stop the `others`."""

    attempt: int
    succeeded: bool
    others: tuple[int, ...]


class Rejoin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Meet the others anew."""

    attempt: int


class SkipGrace(msgspec.Struct, frozen=True, tag=True):
    """Skip what is left of the grace period."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The run is over: end the ranks that are there, and go."""

    succeeded: bool


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Nothing: whether it can be sent is the answer."""


FromNode = Joining | Workers | Said | Wrote | Piece | Gone | OthersStopped | Leaving | NodeEnded
ToNode = Welcome | Refused | ForRank | Piece | Release | Rejoin | SkipGrace | Finish | Ping

_encoder = msgspec.msgpack.Encoder()
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)


def encode(message: FromNode | ToNode) -> bytes:
    """Return `message` as MessagePack."""
    return _encoder.encode(message)


def decode_from_node(data: bytes) -> FromNode:
    """Return the message in `data`; raise `ProtocolError` if there is none."""
    try:
        return _from_node.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{len(data)} bytes from a node are no message of nblaunch's protocol: {error}"
        raise ProtocolError(msg) from error


def decode_to_node(data: bytes) -> ToNode:
    """Return the message in `data`; raise `ProtocolError` if there is none."""
    try:
        return _to_node.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{len(data)} bytes from the notebook are no message of nblaunch's protocol: {error}"
        raise ProtocolError(msg) from error
