"""The ranks of a group that are on nodes, on the hub's thread.

A node sends its ranks' messages, and the new bytes of their log files. The runtime writes these bytes to
files here, so code that reads logs or takes values treats all ranks alike.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from nblaunch.diagnose.failures import NODE_LOST, value_lost
from nblaunch.group.group import WorkerGroup
from nblaunch.group.lifecycle import NodeLeaving
from nblaunch.host import wire
from nblaunch.host.link import IncomingTransfer, payload_of, with_payload
from nblaunch.host.settings import Worker
from nblaunch.protocol import messages

# A rank has two log files.
_OPEN_FILES, _MADE_AT_ONCE = 256, 128


@dataclass(slots=True)
class NodeMember:
    """A node of a group."""

    name: str
    identity: bytes
    """Of its connection."""
    arriving: wire.Arriving
    incoming: IncomingTransfer
    address: str = ""
    """The address at which other nodes reach it; "" if the runtime is on the same machine."""
    ranks: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)


class _LogFiles:
    """The log files of remote ranks; only recently used ones are open, since there may be thousands."""

    def __init__(self) -> None:
        self._directories: dict[int, str] = {}
        self._open: dict[str, BinaryIO] = {}

    def add(self, rank: int, directory: Path) -> tuple[str, ...]:
        """Add a rank's directory; return the paths of its files.

        The files of the first ranks are made at once, as torchrun does. Making thousands may take a minute,
        so the others are made when their rank prints.
        """
        self._directories[rank] = str(directory)
        if len(self._directories) <= _MADE_AT_ONCE:
            for stream in messages.Stream:
                self.opened(rank, stream)
        return tuple(self._path(rank, stream) for stream in messages.Stream)

    def _path(self, rank: int, stream: messages.Stream) -> str:
        return f"{self._directories[rank]}/{stream}.log"

    def opened(self, rank: int, stream: messages.Stream) -> BinaryIO:
        """Return a file to which bytes are appended."""
        path = self._path(rank, stream)
        file = self._open.pop(path, None)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "ab", buffering=0)  # noqa: SIM115, PTH123 - closed by `close`, or above
        self._open[path] = file
        return file

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Keep these ranks under new numbers, and forget all others."""
        self._directories = {
            numbers[rank]: each for rank, each in self._directories.items() if rank in numbers
        }
        kept = {self._path(rank, stream) for rank in self._directories for stream in messages.Stream}
        for path in self._open.keys() - kept:
            self._open.pop(path).close()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._directories, self._open = {}, {}


class RemoteRanks:
    """The ranks of a group's nodes in the present attempt: where each is, its log files and its values."""

    def __init__(self, events: WorkerGroup) -> None:
        """Report to `events`."""
        self._events = events
        self._route: dict[int, NodeMember] = {}
        self._files = _LogFiles()
        self._unwritten: Counter[int] = Counter()
        """How many printed bytes of each rank were dropped because this disk is full."""

    def node_of(self, rank: int) -> NodeMember | None:
        return self._route.get(rank)

    def begin_attempt(self, nodes: Iterable[NodeMember]) -> None:
        self.close()
        for node in nodes:
            node.ranks, node.exited = set(), set()

    def renumber(self, nodes: Iterable[NodeMember], numbers: Mapping[int, int]) -> None:
        """Keep these ranks of these nodes under new numbers, and forget all others."""
        for node in nodes:
            node.ranks = {numbers[rank] for rank in node.ranks if rank in numbers}
            node.exited = {numbers[rank] for rank in node.exited if rank in numbers}
        self._files.renumber(numbers)
        self._route = {numbers[rank]: node for rank, node in self._route.items() if rank in numbers}
        self._unwritten = Counter(
            {numbers[rank]: size for rank, size in self._unwritten.items() if rank in numbers}
        )

    def close(self) -> None:
        self._files.close()
        self._route = {}
        self._unwritten.clear()

    def started(self, node: NodeMember, records: Iterable[Worker], logs: Path) -> None:
        """Report the start of a node's ranks, whose log files are to be below `logs`."""
        workers = []
        for record in records:
            if self._route.setdefault(record.rank, node) is not node:
                continue
            node.ranks.add(record.rank)
            stdout, stderr = self._files.add(record.rank, logs / f"{node.name}-{record.rank}")
            workers.append(msgspec.structs.replace(record, stdout=stdout, stderr=stderr))
        number, size = self._events.attempt, self._events.state.world_size
        self._events.attempt_started(number, size, tuple(workers), remote=True)

    def wrote(self, node: NodeMember, message: wire.Wrote, data: memoryview) -> None:
        """Write the next bytes of a log file; drop and count those that a full disk refuses."""
        rank = message.rank
        if rank not in node.ranks:
            return
        self._events.logs.wrote(rank)
        try:
            file = self._files.opened(rank, message.stream)
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._unwritten[rank] += len(data)
            self._events.receive(messages.Unwritten(rank=rank, size=self._unwritten[rank]))

    def sent(self, node: NodeMember, data: bytes) -> None:
        message = messages.decode_from_rank(data, f"a rank of {node.name}")
        if self._route.get(message.rank) is not node:
            return
        if not isinstance(message, messages.Returned | messages.Profiled):
            self._events.receive(message, data)
            return
        ticket = payload_of(message)
        try:
            payload = node.incoming.claim(ticket)
        except Exception as error:  # noqa: BLE001 - no room, or not what was announced: the rank has no value
            if isinstance(message, messages.Profiled):
                return
            failure = value_lost(error, time.time())
            self._events.receive(messages.Raised(rank=message.rank, failure=failure, offsets=message.offsets))
            return
        try:
            if payload == ticket:
                self._events.receive(message, data)
            else:
                self._events.receive(with_payload(message, payload))
        finally:
            node.incoming.drop(ticket)

    def gone(self, node: NodeMember, message: wire.Gone) -> None:
        rank = message.exited.rank
        if rank in node.ranks:
            node.exited.add(rank)
            self._events.rank_gone(msgspec.structs.replace(message.exited, time=time.time()))

    def lost(self, node: NodeMember, why: str, *, asked: bool, enough: bool) -> None:
        """Report the loss of a node, and of its ranks that have not exited."""
        if node.ranks:
            self._events.feed(NodeLeaving(node.name, asked, enough, frozenset(node.ranks), node.address))
        goes_on = bool(node.ranks) and self._events.life.changing
        for rank in sorted(node.ranks - node.exited):
            reason = f"{NODE_LOST}: {node.name} {why}"
            exited = messages.Exited(
                rank=rank, exitcode=-9, time=time.time(), expected=goes_on, reason=reason
            )
            self._events.rank_gone(exited)
        node.incoming.close()


def for_another_machine(message: messages.ToRank) -> messages.ToRank:
    """Return a message without this machine's environment: it may hold secrets, and nodes have their own."""
    if not isinstance(message, messages.Prepare):
        return message
    return msgspec.structs.replace(message, environ=(), cwd=b"", path=(), umask=None, limits=())
