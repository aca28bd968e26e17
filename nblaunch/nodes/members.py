"""The nodes that have joined a group, and their ranks: the group's `Peers`, all on the hub's thread.

A node sends its ranks' messages, and the new bytes of their log files. The bytes are written to files here,
so what reads logs or takes values treats all ranks alike.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from nblaunch.diagnose.failures import value_lost
from nblaunch.elastic.settings import AgentSettings, RendezvousConfig, Worker
from nblaunch.group.group import Peers
from nblaunch.group.hub import Hub
from nblaunch.nodes import key
from nblaunch.nodes import messages as wire
from nblaunch.nodes.listener import Listener
from nblaunch.nodes.transfer import IncomingTransfer, OutgoingTransfer
from nblaunch.protocol.messages import (
    Dispatch,
    Exited,
    FromRank,
    Prepare,
    Raised,
    Returned,
    Stream,
    ToRank,
    Unwritten,
    decode_from_rank,
    encode,
)


class NodeEvents(Protocol):
    """What nodes report; the worker group implements it."""

    attempt: int
    log_directory: Path
    """For the logs of this attempt."""

    def receive(self, message: FromRank, data: bytes | None = None) -> None:
        """Handle a rank's message; `data` is what the rank has sent."""

    def node_started(self, workers: tuple[Worker, ...]) -> None:
        """Handle the start of a node's processes."""

    def rank_gone(self, exited: Exited) -> None:
        """Handle the exit of a process."""

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        """Handle the exit of those of these ranks that were still at work."""

    def node_leaves(self, name: str, *, asked: bool, enough: bool) -> bool:
        """Handle a node that asks to leave, or is lost; return whether the group goes on without it.

        `enough` says whether the nodes that stay are as many as the run needs.
        """


def connect_peers(  # noqa: PLR0913 - a group, and what the caller has for it
    hub: Hub,
    settings: AgentSettings,
    events: NodeEvents,
    directory: Path,
    *,
    environ: Mapping[str, str],
    root: Callable[[], Path],
    remark: Callable[[str], None],
) -> tuple[AgentSettings, Nodes | None]:
    """Return the settings with the run's key and, if other nodes may join, open a listener for them.

    `environ` has the caller's key, or names its file. A new one is made below `root()`, and `remark` is
    called with the command that joins. Raises `OptionError` for a key that cannot be used, and `LaunchError`
    if the listener has no address of this machine.
    """
    if settings.rdzv is None:
        return settings, None
    secret, file = key.read_or_make_key(environ, root)
    rdzv = replace(settings.rdzv, key=secret)
    if rdzv.most == 1:
        return replace(settings, rdzv=rdzv), None
    if file:
        remark(key.join_command(settings, rdzv, file))
    nodes = Nodes(hub, settings, rdzv, events, directory)
    return replace(settings, rdzv=replace(rdzv, listener=nodes.listener.address)), nodes


@dataclass(slots=True)
class Node:
    """One node that has joined."""

    name: str
    incoming: IncomingTransfer
    ranks: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)
    sent: tuple[Dispatch, Dispatch] | None = None
    """The last dispatch to this node, and its form with a ticket for the payload."""


class Nodes(Peers):
    """The nodes of one group."""

    def __init__(
        self, hub: Hub, settings: AgentSettings, rdzv: RendezvousConfig, events: NodeEvents, directory: Path
    ) -> None:
        """Open the listener; payloads that do not fit into memory are written to `directory`."""
        self._settings, self._rdzv, self._events, self._directory = settings, rdzv, events, directory
        self.listener = Listener(hub, rdzv.local_addr, rdzv.key, self._receive, self._lost)
        self._nodes: dict[bytes, Node] = {}
        self._route: dict[int, bytes] = {}
        self._outgoing = OutgoingTransfer()
        self._files: dict[tuple[int, Stream], BinaryIO] = {}
        self._unwritten: Counter[int] = Counter()
        """How many bytes that a rank has printed a full disk has not taken here."""

    # --- to nodes: what the group asks of its peers --------------------------------------------------

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before."""
        self._close_files()
        self._route = {}
        for node in self._nodes.values():
            node.ranks, node.exited, node.sent = set(), set(), None

    def tick(self, now: float) -> None:
        """Detect nodes that are gone."""
        self.listener.tick(now)

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        """Release the ranks, and stop the `others`."""
        attempt = self._events.attempt
        self._send_all(wire.Release(attempt=attempt, succeeded=succeeded, others=tuple(sorted(others))))

    def rejoin(self) -> None:
        """Have all nodes re-run the rendezvous."""
        self._send_all(wire.Rejoin(attempt=self._events.attempt))

    def skip_grace(self) -> None:
        """Skip what is left of the grace period."""
        self._send_all(wire.SkipGrace())

    def close(self, *, succeeded: bool) -> None:
        """End all nodes: the run is over."""
        self._send_all(wire.Finish(succeeded))
        self.listener.close()
        self._close_files()
        for node in self._nodes.values():
            node.incoming.close()
        self._nodes, self._route = {}, {}

    def _send_all(self, message: wire.ToNode) -> None:
        for identity in self._nodes:
            self.listener.send(identity, message)

    def send(self, rank: int, message: ToRank) -> bool:
        """Send to a rank on a node; return whether this one is."""
        identity = self._route.get(rank)
        if identity is None:
            return False
        match message:
            case Prepare():
                # The node has an environment of its own, and this one may hold secrets.
                message = msgspec.structs.replace(
                    message, environ=(), cwd=b"", path=(), umask=None, limits=()
                )
            case Dispatch():
                message = self._with_ticket(identity, message)
            case _:
                pass
        for_rank = wire.ForRank(attempt=self._events.attempt, rank=rank, data=encode(message))
        self.listener.send(identity, for_rank)
        return True

    def _with_ticket(self, identity: bytes, dispatch: Dispatch) -> Dispatch:
        """Send a job's payload, once to each node; return the job with a ticket in its place."""
        node = self._nodes[identity]
        if node.sent is None or node.sent[0] is not dispatch:
            ticket, pieces = self._outgoing.pieces(dispatch.payload)
            for piece, data in pieces:
                self.listener.send(identity, piece, data)
            node.sent = dispatch, msgspec.structs.replace(dispatch, payload=ticket)
        return node.sent[1]

    # --- from nodes ----------------------------------------------------------------------------------

    def _receive(self, identity: bytes, message: wire.FromNode, data: memoryview) -> None:
        if isinstance(message, wire.Joining):
            self._join(identity, message)
            return
        node = self._nodes.get(identity)
        if node is None:
            return
        match message:
            case wire.Piece():
                node.incoming.receive(message, data)
            case wire.Leaving():
                self._leave(identity, "was told to leave", asked=True)
            case wire.NodeEnded(error=error):
                self._leave(identity, f"ended: {error}" if error else "has ended")
            case wire.OthersStopped():
                self._events.ranks_stopped(node.ranks)
            case _ if message.attempt != self._events.attempt:
                pass  # of an attempt that has been given up
            case wire.Workers(workers=workers):
                self._started(identity, node, workers)
            case wire.RankMessage(data=encoded):
                self._rank_sent(identity, node, encoded)
            case wire.Wrote(rank=rank, stream=stream) if rank in node.ranks:
                self._wrote(rank, self._files[rank, stream], data)
            case wire.Gone() if message.rank in node.ranks:
                node.exited.add(message.rank)
                exited = Exited(
                    rank=message.rank,
                    exitcode=message.exitcode,
                    time=time.time(),
                    expected=message.expected,
                    reason=message.reason,
                    details=message.details,
                )
                self._events.rank_gone(exited)

    def _wrote(self, rank: int, file: BinaryIO, data: memoryview) -> None:
        """Write what a rank has printed; what a full disk does not take is dropped and counted, as there."""
        try:
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._unwritten[rank] += len(data)
            self._events.receive(Unwritten(rank=rank, size=self._unwritten[rank]))

    def _join(self, identity: bytes, joining: wire.Joining) -> None:
        rdzv, settings = self._rdzv, self._settings
        if identity in self._nodes:
            return
        if 1 + len(self._nodes) >= rdzv.most:
            why = f"the run has all {rdzv.most} nodes that it takes. Start it with more: --nnodes."
            self.listener.refuse(identity, f"{joining.name}: {why}")
            return
        self._nodes[identity] = Node(joining.name, IncomingTransfer(self._directory))
        self.listener.welcome(identity)
        welcome = wire.Welcome(
            least=rdzv.least,
            most=rdzv.most,
            backend=rdzv.ranks_backend,
            env=rdzv.env,
            grace=settings.grace,
            shutdown_timeout=settings.shutdown_timeout,
            monitor_interval=settings.monitor_interval,
        )
        self.listener.send(identity, welcome)

    def _started(self, identity: bytes, node: Node, records: tuple[wire.WorkerRecord, ...]) -> None:
        workers = []
        for record in records:
            if self._route.setdefault(record.rank, identity) != identity:
                continue
            node.ranks.add(record.rank)
            directory = self._events.log_directory / f"{node.name}-{record.rank}"
            directory.mkdir(parents=True, exist_ok=True)
            paths = {stream: directory / f"{stream}.log" for stream in Stream}
            for stream, path in paths.items():
                self._files[record.rank, stream] = path.open("wb", buffering=0)
            workers.append(Worker(record.rank, record.local_rank, record.pid, *map(str, paths.values())))
        self._events.node_started(tuple(workers))

    def _rank_sent(self, identity: bytes, node: Node, data: bytes) -> None:
        message = decode_from_rank(data, f"a rank of {node.name}")
        if self._route.get(message.rank) != identity:
            return
        if not isinstance(message, Returned):
            self._events.receive(message, data)
            return
        try:
            value = node.incoming.claim(message.value)
        except Exception as error:  # noqa: BLE001 - no room, or not what was announced: the rank has no value
            failure = value_lost(error, time.time())
            self._events.receive(Raised(rank=message.rank, failure=failure, offsets=message.offsets))
            return
        try:
            self._events.receive(msgspec.structs.replace(message, value=value))
        finally:
            node.incoming.drop(message.value)

    def _lost(self, identity: bytes) -> None:
        if identity in self._nodes:
            self._leave(identity, "is gone (killed, or out of reach)")

    def _leave(self, identity: bytes, why: str, *, asked: bool = False) -> None:
        """Go on without a node, or end its ranks as lost."""
        node, rdzv = self._nodes.pop(identity), self._rdzv
        enough = 1 + len(self._nodes) >= rdzv.least < rdzv.most
        goes_on = bool(node.ranks) and self._events.node_leaves(node.name, asked=asked, enough=enough)
        if asked:
            self.listener.send(identity, wire.Finish(succeeded=False))
        for rank in sorted(node.ranks - node.exited):
            reason = f"was lost with its node: {node.name} {why}"
            exited = Exited(rank=rank, exitcode=-9, time=time.time(), expected=goes_on, reason=reason)
            self._events.rank_gone(exited)
        node.incoming.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files, self._unwritten = {}, Counter()
