"""The messages between the runtime and a node, over TCP.

Each message is one MessagePack frame; `Wrote` and `Piece` have a second one with raw bytes. Messages from and
to ranks are carried as they are, encoded by `nblaunch.protocol.messages`.

A node sends `Arriving`, gets `Admitted`, and then an `OpenGroup` for each group that it is to serve, which
the later messages name. For nodes that an engine placed each attempt begins with `CompleteRendezvous`; those
of an endpoint join torch's rendezvous. The sockets for data carry `Piece` from a parent and `PieceTaken` from
a child.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from nblaunch.host.settings import ProcessSettings, Worker
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import (
    PROTOCOL_VERSION,
    Adopt,
    CodeManifest,
    Exited,
    ProtocolError,
    Stream,
    Usage,
)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """A node's versions, each empty if the node lacks the component, and its devices.

    `boot` is the same for two nodes of one machine. `backend` and `device_type` are those that its ranks
    would have alone, `own_gpus` the GPUs of its ranks that NCCL gives to no other rank.
    """

    python: str
    torch: str
    nblaunch: str
    boot: str
    backend: str
    device_type: str
    nccl: str = ""
    cuda: str = ""
    driver: str = ""
    glibc: str = ""
    gpus: tuple[str, ...] = ()
    own_gpus: tuple[str, ...] = ()


class ReachTarget(msgspec.Struct, frozen=True):
    """A socket of `node` that another node must reach; "" stands for the notebook's machine.

    A `probe` proves that it has the run's key; the other sockets only have to accept the connection.
    """

    node: str
    what: Literal["listener", "store", "data", "probe"]
    address: str
    port: int


class ReachResult(msgspec.Struct, frozen=True):
    """Whether the sender reached a target: `error` is empty, the name of an errno, or `stranger`.

    `stranger` means that another machine answered, which does not have the key.
    """

    target: ReachTarget
    error: str = ""


class OfGroup(msgspec.Struct, frozen=True, kw_only=True):
    """About one group: its name at the runtime."""

    group: str


class OfAttempt(OfGroup, frozen=True, kw_only=True):
    """About the ranks of one attempt of a group; dropped once that attempt is abandoned."""

    attempt: int


# From a node


class Workers(OfAttempt, frozen=True, tag=True, kw_only=True):
    """Its ranks have been started."""

    workers: tuple[Worker, ...]


class Wrote(OfAttempt, frozen=True, tag=True, kw_only=True):
    """The next bytes of a rank's log file."""

    rank: int
    stream: Stream


class Piece(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The bytes of payload `number` from `offset` on; the payload has `total`.

    In the first piece, `to` holds the nodes to which its receiver forwards: names and data addresses.
    """

    number: int
    offset: int
    total: int
    group: str = ""
    to: tuple[tuple[str, str], ...] = ()


class Gone(OfAttempt, frozen=True, tag=True, kw_only=True):
    """One of its processes has ended, at a time by the node's clock."""

    exited: Exited


class OthersStopped(OfGroup, frozen=True, tag=True):
    """Its ranks that were still at work have exited."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The node asks the run to go on without it, and waits for its release."""


class NodeEnded(OfGroup, frozen=True, tag=True, kw_only=True):
    """Its ranks and agent of a group have ended; `error` is the reason, if the runtime does not know it."""

    error: str = ""


class Arriving(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Its first message.

    `place` orders the nodes: the engine's number of the node, -1 if it has none, -2 for the node of the
    notebook's machine. `address` is the node's own end of this connection, at which other nodes reach it,
    `data` the ZMQ address of its socket for data.
    """

    name: str
    nproc: int
    address: str
    data: str
    inventory: Inventory
    place: int = -1
    version: int = PROTOCOL_VERSION


class AwaitingRendezvous(OfGroup, frozen=True, tag=True, kw_only=True):
    """Its agent waits for the next rendezvous; `after` is the previous attempt, -1 if there was none."""

    after: int = -1
    error: str = ""


class RankMessages(OfAttempt, frozen=True, tag=True, kw_only=True):
    """Messages of its ranks, in the order in which they were sent."""

    data: tuple[bytes, ...]


class RanksMeasured(OfAttempt, frozen=True, tag=True, kw_only=True):
    """A measurement of its ranks, by rank."""

    usages: dict[int, Usage]


class NodeEnding(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine is about to end this node, in `seconds` unless it reports another time; `words` say why.

    With `leaves` the node asks to leave once its ranks have saved.
    """

    seconds: float = 0.0
    words: str = ""
    leaves: bool = False


class Dumped(OfGroup, frozen=True, tag=True, kw_only=True):
    """The stack, written by faulthandler, of a rank that does not answer; or that its process is stopped."""

    rank: int
    text: str


class ProbeOpen(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """It listens at this port of its address for a few seconds, so that others can try to reach it.

    `interfaces` are its network interfaces with their addresses: `eth0 10.0.0.2`.
    """

    port: int
    interfaces: tuple[str, ...] = ()


class Reachable(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The results of its trials."""

    results: tuple[ReachResult, ...]


class PieceLost(OfGroup, frozen=True, tag=True, kw_only=True):
    """A node to which it forwards pieces of this payload is gone."""

    number: int


class PieceTaken(OfGroup, frozen=True, tag=True, kw_only=True):
    """Acknowledges the piece at `offset`: more pieces may be sent."""

    number: int
    offset: int


class CodeLacking(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The digests of the files that it lacks for this tree; if there are none, it has the tree."""

    tree: str
    digests: tuple[bytes, ...] = ()


# To a node


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reject the node."""

    why: str


class Release(OfAttempt, frozen=True, tag=True, kw_only=True):
    """Release the ranks, and stop the `others`."""

    succeeded: bool
    others: tuple[int, ...]


class SkipGrace(OfGroup, frozen=True, tag=True):
    """Skip what is left of the grace period."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The run is over: end all ranks, and exit."""

    succeeded: bool


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Liveness probe; only its delivery matters."""


class Admitted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Accept the node, under a name that no other has.

    Either side takes the other for lost after `silence` seconds without a sign of it. `now` is the notebook's
    clock, to which the node shifts the times in its messages, assuming half the round-trip time.
    """

    name: str
    silence: float
    now: float


class OpenGroup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Prepare a group and its agent; answered by `AwaitingRendezvous` if the runtime decides each rendezvous.

    `nodes` are the least and the most, for torch's rendezvous, in which a node of an endpoint takes part;
    such a node has `processes` and options of a node of its own.
    `backend` is the one asked for; `Prepare` carries the final one, once all nodes are known. `env` are
    variables for the ranks. `cwd` is the notebook's directory, used if it exists. `processes` lack `environ`:
    a node's ranks have the node's environment.
    """

    group: str
    keep: bool
    options: LaunchOptions
    backend: str
    env: tuple[tuple[str, str], ...]
    processes: ProcessSettings
    cwd: bytes
    nodes: tuple[int, int] = (1, 1)


class CompleteRendezvous(OfAttempt, frozen=True, tag=True, kw_only=True):
    """Complete the rendezvous: all nodes of this attempt are there.

    The node's first rank is `base_rank`. `store` is the address of the ranks' store, on the notebook's
    machine.
    """

    node_rank: int
    node_count: int
    base_rank: int
    world_size: int
    store: tuple[str, int]


class ForRanks(OfAttempt, frozen=True, tag=True, kw_only=True):
    """A message for some of its ranks."""

    ranks: tuple[int, ...]
    data: bytes


class Restart(OfAttempt, frozen=True, tag=True, kw_only=True):
    """End the ranks of this attempt, and wait for the next rendezvous."""


class EndGroup(OfGroup, frozen=True, tag=True):
    """End the group: its ranks and its agent; answered by `NodeEnded`."""


class OpenProbe(msgspec.Struct, frozen=True, tag=True):
    """Listen at a free port for a few seconds; answered by `ProbeOpen`."""


class Try(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Try to reach these targets; answered by `Reachable`."""

    targets: tuple[ReachTarget, ...]


class MeasureRanks(OfGroup, frozen=True, tag=True, kw_only=True):
    """Start or stop measuring the ranks; answered by `RanksMeasured` at intervals."""

    wanted: bool


class DumpStacks(OfGroup, frozen=True, tag=True, kw_only=True):
    """Dump the stacks of these ranks, which do not answer; answered by a `Dumped` for each."""

    ranks: tuple[int, ...]


class HaveCode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make this tree of the notebook's own modules; answered by `CodeLacking`."""

    manifest: CodeManifest


class CodeFiles(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The files that were lacking, by digest, as MessagePack: payload `number` of group "".

    With number 0 they are in this message's second frame.
    """

    tree: str
    number: int


class AdoptRanks(OfAttempt, frozen=True, tag=True, kw_only=True):
    """The ranks of `attempt` go on in attempt `number` with new numbers, which begin at `base_rank`.

    Others are started in place of those that have ended, with the numbers `replaced`; answered by `Workers`.
    """

    number: int
    node_rank: int
    node_count: int
    base_rank: int
    world_size: int
    replaced: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> Adopt:
        """Return what one of these ranks is from now on, by its new number."""
        return Adopt(
            attempt=self.number,
            rank=rank,
            world_size=self.world_size,
            group_rank=self.node_rank,
            group_world_size=self.node_count,
        )


_OfRanks = Workers | RankMessages | Wrote | Gone | RanksMeasured
_FromGroup = _OfRanks | OthersStopped | Dumped | Piece | PieceLost | AwaitingRendezvous | NodeEnded
FromNode = Arriving | _FromGroup | Leaving | NodeEnding | PieceTaken | ProbeOpen | Reachable | CodeLacking
_ToRanks = ForRanks | Release | Restart | AdoptRanks | SkipGrace | MeasureRanks | DumpStacks
_ToGroup = _ToRanks | Piece | OpenGroup | CompleteRendezvous | EndGroup
ToNode = Admitted | Refused | Finish | Ping | _ToGroup | OpenProbe | Try | HaveCode | CodeFiles

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder(enc_hook=dict)  # for the variables of `LaunchOptions`
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)


def encode(message: FromNode | ToNode) -> bytes:
    return _encoder.encode(message)


def decode_from_node(data: bytes) -> FromNode:
    """Return the message in `data`; raise `ProtocolError` if there is none."""
    return _decoded(_from_node, data, "a node")


def decode_to_node(data: bytes) -> ToNode:
    return _decoded(_to_node, data, "the notebook")


def _decoded(decoder: msgspec.msgpack.Decoder[M], data: bytes, sender: str) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{len(data)} bytes from {sender} are no message of nblaunch's protocol: {error}"
        raise ProtocolError(msg) from error
