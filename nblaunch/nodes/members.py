"""The nodes of a group and their ranks, on the hub's thread; nodes that have joined are the group's `Peers`.

A node sends its ranks' messages, and the new bytes of their log files. The runtime writes these bytes to
files here, so code that reads logs or takes values treats all ranks alike.
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

from nblaunch.diagnose.failures import NODE_LOST, value_lost
from nblaunch.elastic.settings import AgentSettings, RendezvousConfig, Worker
from nblaunch.group.group import Connected, Peers
from nblaunch.group.hub import Hub
from nblaunch.nodes import key
from nblaunch.nodes import messages as wire
from nblaunch.nodes.listener import Listener
from nblaunch.nodes.transfer import IncomingTransfer, OutgoingTransfer, payload_of, with_payload
from nblaunch.protocol.messages import (
    Dispatch,
    EngineSaid,
    Exited,
    FromRank,
    Prepare,
    Profiled,
    Raised,
    Returned,
    Stream,
    ToRank,
    Unwritten,
    Usage,
    decode_from_rank,
    encode,
)

# A rank has two log files.
_OPEN_FILES, _MADE_AT_ONCE = 256, 128


class NodeEvents(Protocol):
    """What nodes report; the worker group implements it."""

    group: str
    """Its name."""
    keep: bool
    """Whether its ranks outlive a job."""
    attempt: int
    log_directory: Path
    """For the logs of this attempt."""

    @property
    def saving(self) -> bool:
        """Whether ranks save because their nodes are taken back."""

    def receive(self, message: FromRank, data: bytes | None = None) -> None:
        """Handle a rank's message; `data` is what the rank has sent."""

    def wrote(self, rank: int) -> None:
        """Handle the growth of a rank's log files."""

    def node_started(self, workers: tuple[Worker, ...]) -> None:
        """Handle the start of a node's processes."""

    def rank_gone(self, exited: Exited) -> None:
        """Handle the exit of a process."""

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        """Handle the exit of those of these ranks that were still at work."""

    def node_leaves(
        self, name: str, *, asked: bool, enough: bool, ranks: frozenset[int], address: str
    ) -> bool:
        """Handle a node that asks to leave, or is lost; return whether the other nodes meet again.

        `enough` says whether the run can go on with the remaining nodes. `address` is the node's, "" if the
        runtime is on the same machine.
        """

    # Only for a group on nodes that an engine places:

    def said(self, message: EngineSaid) -> None:
        """Handle an engine's report about the nodes."""

    def placed(self, backend: str, device_type: str) -> None:
        """Handle the backend and devices of the next attempt's nodes; precedes `attempt_starting`."""

    def node_waits(self) -> None:
        """Handle a node that came while other nodes have ranks."""

    def attempt_starting(
        self, number: int, world_size: int, reason: str, kept: Mapping[int, int] | None = None
    ) -> None:
        """Handle the start of an attempt, before any node learns of it.

        `kept` maps the numbers of ranks that go on to their former ones; all others are new.
        """

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        """Handle the start of the last processes; `node_started` has reported all `workers`."""

    def agent_ended(self, error: BaseException | None) -> None:
        """Handle the end of all agents; `error` says why, unless they were released or stopped."""

    def preempted(self, why: str, seconds: float | None) -> None:
        """Handle nodes that will be taken back in `seconds`; None if they already were."""

    def measured(self, usages: Mapping[int, Usage]) -> None:
        """Handle a measurement of a node's ranks."""

    def dumped(self, rank: int, text: str) -> None:
        """Handle the stack that a node dumped for a rank that does not answer."""

    def noted(self, text: str) -> None:
        """Show a text with the next result."""


def connect_peers(  # noqa: PLR0913 - a group, and what the caller has for it
    hub: Hub,
    settings: AgentSettings,
    events: NodeEvents,
    directory: Path,
    *,
    environ: Mapping[str, str],
    root: Callable[[], Path],
    remark: Callable[[str], None],
) -> Connected:
    """Return the settings with the run's key and, if other nodes may join, open a listener for them.

    `environ` has the caller's key, or names its file. A new one is made below `root()`, and `remark` is
    called with the command that joins. Raises `OptionError` for a key that cannot be used, and `LaunchError`
    if the listener has no address of this machine.
    """
    if settings.rdzv is None:
        return Connected(settings)
    secret, file = key.read_or_make_key(environ, root)
    rdzv = replace(settings.rdzv, key=secret)
    if rdzv.most == 1:
        return Connected(replace(settings, rdzv=rdzv))
    if file:
        remark(key.join_command(settings, rdzv, file))
    nodes = Nodes(hub, settings, rdzv, events, directory)
    return Connected(replace(settings, rdzv=replace(rdzv, listener=nodes.listener.address)), nodes)


@dataclass(slots=True)
class NodeMember:
    """A node of a group."""

    name: str
    identity: bytes
    """Of its connection."""
    incoming: IncomingTransfer
    address: str = ""
    """The address at which other nodes reach it; "" if the runtime is on the same machine."""
    ranks: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)
    sent: tuple[Dispatch, Dispatch] | None = None
    """The last dispatch to this node, and its form with a ticket for the payload."""


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
            for stream in Stream:
                self.of(rank, stream)
        return tuple(self._path(rank, stream) for stream in Stream)

    def _path(self, rank: int, stream: Stream) -> str:
        return f"{self._directories[rank]}/{stream}.log"

    def of(self, rank: int, stream: Stream) -> BinaryIO:
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
        kept = {self._path(rank, stream) for rank in self._directories for stream in Stream}
        for path in self._open.keys() - kept:
            self._open.pop(path).close()

    def close(self) -> None:
        """Close and forget all files."""
        for file in self._open.values():
            file.close()
        self._directories, self._open = {}, {}


class RemoteRanks:
    """The ranks of a group's nodes in the present attempt: where each is, its log files and its values."""

    def __init__(self, events: NodeEvents) -> None:
        """Report to `events`."""
        self._events = events
        self._route: dict[int, NodeMember] = {}
        self._files = _LogFiles()
        self._unwritten: Counter[int] = Counter()
        """How many printed bytes of each rank were dropped because this disk is full."""
        self.workers: list[Worker] = []
        """Those that have been reported."""

    def node_of(self, rank: int) -> NodeMember | None:
        """Return the node that has this rank."""
        return self._route.get(rank)

    def by_node(self, ranks: Iterable[int]) -> dict[str, tuple[NodeMember, tuple[int, ...]]]:
        """Return the nodes that have these ranks, by name, and which of them each has."""
        found: dict[str, tuple[NodeMember, tuple[int, ...]]] = {}
        for rank in sorted(ranks):
            node = self._route.get(rank)
            if node is not None:
                found[node.name] = node, (*found.get(node.name, (node, ()))[1], rank)
        return found

    def begin_attempt(self, nodes: Iterable[NodeMember]) -> None:
        """Begin an attempt on these nodes; forget the ranks of the previous one."""
        self.close()
        for node in nodes:
            node.ranks, node.exited, node.sent = set(), set(), None

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
        self.workers = [
            msgspec.structs.replace(worker, rank=numbers[worker.rank])
            for worker in self.workers
            if worker.rank in numbers
        ]

    def close(self) -> None:
        """Close the files, and forget all ranks."""
        self._files.close()
        self._route, self.workers = {}, []
        self._unwritten.clear()

    def started(self, node: NodeMember, records: Iterable[Worker]) -> None:
        """Report the start of a node's ranks."""
        workers = []
        for record in records:
            if self._route.setdefault(record.rank, node) is not node:
                continue
            node.ranks.add(record.rank)
            stdout, stderr = self._files.add(
                record.rank, self._events.log_directory / f"{node.name}-{record.rank}"
            )
            workers.append(msgspec.structs.replace(record, stdout=stdout, stderr=stderr))
        self.workers += workers
        self._events.node_started(tuple(workers))

    def wrote(self, node: NodeMember, message: wire.Wrote, data: memoryview) -> None:
        """Write the next bytes of a log file; drop and count those that a full disk refuses."""
        rank = message.rank
        if rank not in node.ranks:
            return
        self._events.wrote(rank)
        try:
            file = self._files.of(rank, message.stream)
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._unwritten[rank] += len(data)
            self._events.receive(Unwritten(rank=rank, size=self._unwritten[rank]))

    def sent(self, node: NodeMember, data: bytes) -> None:
        """Report a message of a rank."""
        message = decode_from_rank(data, f"a rank of {node.name}")
        if self._route.get(message.rank) is not node:
            return
        if not isinstance(message, Returned | Profiled):
            self._events.receive(message, data)
            return
        ticket = payload_of(message)
        try:
            payload = node.incoming.claim(ticket)
        except Exception as error:  # noqa: BLE001 - no room, or not what was announced: the rank has no value
            if isinstance(message, Profiled):
                return
            failure = value_lost(error, time.time())
            self._events.receive(Raised(rank=message.rank, failure=failure, offsets=message.offsets))
            return
        try:
            if payload == ticket:
                self._events.receive(message, data)
            else:
                self._events.receive(with_payload(message, payload))
        finally:
            node.incoming.drop(ticket)

    def gone(self, node: NodeMember, message: wire.Gone) -> None:
        """Report the exit of a rank."""
        if message.rank not in node.ranks:
            return
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

    def lost(self, node: NodeMember, why: str, *, asked: bool, enough: bool) -> None:
        """Report the loss of a node, and of its ranks that have not exited."""
        goes_on = bool(node.ranks) and self._events.node_leaves(
            node.name, asked=asked, enough=enough, ranks=frozenset(node.ranks), address=node.address
        )
        for rank in sorted(node.ranks - node.exited):
            reason = f"{NODE_LOST}: {node.name} {why}"
            exited = Exited(rank=rank, exitcode=-9, time=time.time(), expected=goes_on, reason=reason)
            self._events.rank_gone(exited)
        node.incoming.close()


def for_another_machine(message: ToRank) -> ToRank:
    """Return a message without this machine's environment: it may hold secrets, and nodes have their own."""
    if not isinstance(message, Prepare):
        return message
    return msgspec.structs.replace(message, environ=(), cwd=b"", path=(), umask=None, limits=())


class Nodes(Peers):
    """The nodes of one group that have joined it."""

    def __init__(
        self, hub: Hub, settings: AgentSettings, rdzv: RendezvousConfig, events: NodeEvents, directory: Path
    ) -> None:
        """Open the listener; payloads that do not fit into memory are written to `directory`."""
        self._settings, self._rdzv, self._events, self._directory = settings, rdzv, events, directory
        self.listener = Listener(hub, rdzv.local_addr, rdzv.key, self._receive, self._lost, ports=rdzv.ports)
        self._nodes: dict[bytes, NodeMember] = {}
        self._ranks = RemoteRanks(events)
        self._outgoing = OutgoingTransfer()

    # --- to nodes: what the group asks of its peers --------------------------------------------------

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before."""
        self._ranks.begin_attempt(self._nodes.values())

    def measure(self, *, wanted: bool) -> None:
        """Do nothing: ranks of nodes that have joined are not measured."""

    def dump_stacks(self, ranks: frozenset[int]) -> None:
        """Have the nodes dump the stacks of these ranks, which do not answer."""
        for node, theirs in self._ranks.by_node(ranks).values():
            self.listener.send(node.identity, wire.DumpStacks(group="", ranks=theirs))

    def tick(self, now: float) -> None:
        """Do nothing: the listener detects nodes that are gone."""

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
        self._ranks.close()
        for node in self._nodes.values():
            node.incoming.close()
        self._nodes = {}

    def _send_all(self, message: wire.ToNode) -> None:
        for identity in self._nodes:
            self.listener.send(identity, message)

    def send(self, rank: int, message: ToRank) -> bool:
        """Send to a rank on a node; return whether this one is."""
        node = self._ranks.node_of(rank)
        if node is None:
            return False
        message = for_another_machine(message)
        if isinstance(message, Dispatch):
            message = self._with_ticket(node, message)
        for_rank = wire.ForRank(attempt=self._events.attempt, rank=rank, data=encode(message))
        self.listener.send(node.identity, for_rank)
        return True

    def _with_ticket(self, node: NodeMember, dispatch: Dispatch) -> Dispatch:
        """Send a job's payload, once to each node; return the job with a ticket in its place."""
        if node.sent is None or node.sent[0] is not dispatch:
            ticket, pieces = self._outgoing.pieces(dispatch.payload)
            for piece, data in pieces:
                self.listener.send(node.identity, piece, data)
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
            case wire.Dumped(rank=rank, text=text) if rank in node.ranks:
                self._events.dumped(rank, text)
            case wire.Workers() | wire.RankMessage() | wire.Wrote() | wire.Gone() if (
                message.attempt == self._events.attempt
            ):
                self._of_attempt(node, message, data)
            case _:
                pass  # of an attempt that has been given up

    def _of_attempt(
        self,
        node: NodeMember,
        message: wire.Workers | wire.RankMessage | wire.Wrote | wire.Gone,
        data: memoryview,
    ) -> None:
        match message:
            case wire.Workers(workers=workers):
                self._ranks.started(node, workers)
            case wire.RankMessage(data=encoded):
                self._ranks.sent(node, encoded)
            case wire.Wrote():
                self._ranks.wrote(node, message, data)
            case wire.Gone():
                self._ranks.gone(node, message)

    def _join(self, identity: bytes, joining: wire.Joining) -> None:
        rdzv, settings = self._rdzv, self._settings
        if identity in self._nodes:
            return
        if 1 + len(self._nodes) >= rdzv.most:
            why = f"the run has all {rdzv.most} nodes that it takes. Start it with more: --nnodes."
            self.listener.refuse(identity, f"{joining.name}: {why}")
            return
        self._nodes[identity] = NodeMember(joining.name, identity, IncomingTransfer(self._directory))
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

    def _lost(self, identity: bytes) -> None:
        if identity in self._nodes:
            self._leave(identity, "is gone (killed, or out of reach)")

    def _leave(self, identity: bytes, why: str, *, asked: bool = False) -> None:
        """Go on without a node, or end its ranks as lost."""
        node, rdzv = self._nodes.pop(identity), self._rdzv
        if asked:
            self.listener.send(identity, wire.Finish(succeeded=False))
        enough = 1 + len(self._nodes) >= rdzv.least < rdzv.most
        self._ranks.lost(node, why, asked=asked, enough=enough)
