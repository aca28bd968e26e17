"""The nodes that have joined a group: their ranks are the group's, wherever they are.

A node passes on what its ranks say, and the new bytes of their log files, which are written to files here: so
all that reads logs or takes values knows no difference. Everything here happens on the hub's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from nblaunch.capture.transfer import Arrival, OutgoingTransfer
from nblaunch.diagnose.failures import value_lost
from nblaunch.elastic.settings import AgentSettings, Worker
from nblaunch.group.hub import Hub
from nblaunch.group.listener import Listener
from nblaunch.protocol import nodes as wire
from nblaunch.protocol.messages import (
    Dispatch,
    Exited,
    FromRank,
    Prepare,
    Raised,
    Returned,
    Stream,
    ToRank,
    decode_from_rank,
    encode,
)


class Host(Protocol):
    """The group, as its nodes see it."""

    attempt: int

    def receive(self, message: FromRank) -> None:
        """Take a message of a rank."""

    def node_started(self, workers: tuple[Worker, ...]) -> None:
        """Take note of a node's processes."""

    def rank_gone(self, exited: Exited) -> None:
        """Take note of a process that is gone."""

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        """Take note that none of these is at work any more."""

    def node_leaves(self, name: str, *, asked: bool) -> bool:
        """Take note of a node that goes, or has gone; return whether the group goes on without it."""


@dataclass(slots=True)
class Node:
    """One node that has joined."""

    name: str
    nproc: int
    arrival: Arrival
    ranks: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    sent: tuple[Dispatch, Dispatch] | None = None
    """What was dispatched here last, and as what it was sent."""


class Nodes:
    """The nodes of one group."""

    def __init__(self, hub: Hub, settings: AgentSettings, host: Host, directory: Path) -> None:
        """Open the listener."""
        assert settings.rdzv is not None  # noqa: S101 - a group of one node has none of this
        self._rdzv, self._settings, self._host, self._directory = (
            settings.rdzv,
            settings,
            host,
            directory,
        )
        self.listener = Listener(hub, self._rdzv.local_addr, self._rdzv.key, self._hear, self._lost)
        self._nodes: dict[bytes, Node] = {}
        self._route: dict[int, bytes] = {}
        self._outgoing = OutgoingTransfer(wire.PIECE_BYTES)
        self._files: dict[tuple[int, Stream], BinaryIO] = {}
        self._logs = Path()

    @property
    def count(self) -> int:
        """How many there are, beside the notebook's own."""
        return len(self._nodes)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of this attempt that are elsewhere."""
        return frozenset(self._route)

    def begin(self) -> None:
        """Forget the ranks of the attempt before."""
        self._close_files()
        self._route = {}
        for node in self._nodes.values():
            node.ranks, node.gone, node.sent = set(), set(), None

    def keep_logs_at(self, directory: Path) -> None:
        """Write the log files of this attempt's ranks here."""
        self._logs = directory

    def tick(self, now: float) -> None:
        """Do what is due."""
        self.listener.tick(now)

    def close(self, *, succeeded: bool) -> None:
        """Let all nodes go."""
        self.tell(wire.Finish(succeeded))
        self.listener.close()
        self._close_files()
        for node in self._nodes.values():
            node.arrival.close()
        self._nodes, self._route = {}, {}

    # --- to nodes ------------------------------------------------------------------------------------

    def tell(self, message: wire.ToNode, but: bytes = b"") -> None:
        """Say something to all of them."""
        for name in self._nodes:
            if name != but:
                self.listener.send(name, message)

    def send(self, rank: int, message: ToRank) -> bool:
        """Send to a rank, if it is elsewhere; return whether it is."""
        name = self._route.get(rank)
        if name is None:
            return False
        match message:
            case Prepare():
                # The node has an environment of its own, and this notebook's is no other machine's business.
                message = msgspec.structs.replace(
                    message, environ=(), cwd=b"", path=(), umask=None, limits=()
                )
            case Dispatch():
                message = self._dispatched(name, message)
            case _:
                pass
        self.listener.send(name, wire.ForRank(attempt=self._host.attempt, rank=rank, data=encode(message)))
        return True

    def _dispatched(self, name: bytes, dispatch: Dispatch) -> Dispatch:
        """Send what a job works on, once to each node; return the job as it is sent."""
        node = self._nodes[name]
        if node.sent is None or node.sent[0] is not dispatch:
            ticket, pieces = self._outgoing.pieces(dispatch.payload)
            for number, offset, total, data in pieces:
                self.listener.send(name, wire.Piece(number=number, offset=offset, total=total), data)
            node.sent = dispatch, msgspec.structs.replace(dispatch, payload=ticket)
        return node.sent[1]

    # --- from nodes ----------------------------------------------------------------------------------

    def _hear(self, name: bytes, message: wire.FromNode, data: memoryview) -> None:
        if isinstance(message, wire.Joining):
            self._join(name, message)
            return
        node = self._nodes.get(name)
        if node is None:
            return
        match message:
            case wire.Piece(number=number, offset=offset, total=total):
                node.arrival.take(number, offset, total, data)
            case wire.Leaving():
                self._leave(name, node, "was told to leave", asked=True)
            case wire.NodeEnded(error=error):
                self._leave(name, node, f"ended: {error}" if error else "has ended")
            case wire.OthersStopped():
                self._host.ranks_stopped(node.ranks)
            case _ if message.attempt != self._host.attempt:
                pass  # of an attempt that has been given up
            case wire.Workers(workers=workers):
                self._started(name, node, workers)
            case wire.RankMessage(data=said):
                self._said(name, node, decode_from_rank(said, f"a rank of {node.name}"))
            case wire.Wrote(rank=rank, stream=stream) if rank in node.ranks:
                self._file(rank, stream).write(data)
            case wire.Gone():
                self._gone(node, message)

    def _join(self, name: bytes, joining: wire.Joining) -> None:
        rdzv = self._rdzv
        if name in self._nodes:
            return
        if 1 + len(self._nodes) >= rdzv.most:
            why = f"the run has all {rdzv.most} nodes that it takes. Start it with more: --nnodes."
            self.listener.refuse(name, f"{joining.name}: {why}")
            return
        self._nodes[name] = Node(joining.name, joining.nproc, Arrival(self._directory))
        self.listener.welcome(name)
        self.listener.send(
            name,
            wire.Welcome(
                least=rdzv.least,
                most=rdzv.most,
                backend=rdzv.ranks_backend,
                env=rdzv.env,
                grace=self._settings.grace,
                shutdown_timeout=self._settings.shutdown_timeout,
                monitor_interval=self._settings.monitor_interval,
            ),
        )

    def _started(self, name: bytes, node: Node, records: tuple[wire.WorkerRecord, ...]) -> None:
        workers = []
        for record in records:
            if self._route.setdefault(record.rank, name) != name:
                continue
            node.ranks.add(record.rank)
            directory = self._logs / f"{node.name}-{record.rank}"
            directory.mkdir(parents=True, exist_ok=True)
            paths = [str(directory / f"{stream}.log") for stream in Stream]
            for stream, path in zip(Stream, paths, strict=True):
                self._files[record.rank, stream] = Path(path).open("wb", buffering=0)  # noqa: SIM115
            workers.append(Worker(record.rank, record.local_rank, record.pid, paths[0], paths[1]))
        self._host.node_started(tuple(workers))

    def _said(self, name: bytes, node: Node, message: FromRank) -> None:
        if self._route.get(message.rank) != name:
            return
        if not isinstance(message, Returned):
            self._host.receive(message)
            return
        try:
            value = node.arrival.claim(message.value)
        except Exception as error:  # noqa: BLE001 - no room, or not what was announced: the rank has no value
            failure = value_lost(error, time.time())
            self._host.receive(Raised(rank=message.rank, failure=failure, offsets=message.offsets))
            return
        try:
            self._host.receive(msgspec.structs.replace(message, value=value))
        finally:
            node.arrival.drop(message.value)

    def _file(self, rank: int, stream: Stream) -> BinaryIO:
        return self._files[rank, stream]

    def _gone(self, node: Node, gone: wire.Gone) -> None:
        if gone.rank in node.ranks:
            node.gone.add(gone.rank)
            exited = Exited(
                rank=gone.rank,
                exitcode=gone.exitcode,
                time=time.time(),
                expected=gone.expected,
                reason=gone.reason,
                details=gone.details,
            )
            self._host.rank_gone(exited)

    def _lost(self, name: bytes) -> None:
        node = self._nodes.get(name)
        if node is not None:
            self._leave(name, node, "is gone (killed, or out of reach)")

    def _leave(self, name: bytes, node: Node, why: str, *, asked: bool = False) -> None:
        """Go on without a node, or end its ranks as lost."""
        del self._nodes[name]
        goes_on = bool(node.ranks) and self._host.node_leaves(node.name, asked=asked)
        if asked:
            self.listener.send(name, wire.Finish(succeeded=False))
        for rank in sorted(node.ranks - node.gone):
            reason = f"was lost with its node: {node.name} {why}"
            self._host.rank_gone(
                Exited(rank=rank, exitcode=-9, time=time.time(), expected=goes_on, reason=reason)
            )
        node.arrival.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
