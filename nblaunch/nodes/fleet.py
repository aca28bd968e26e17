"""The nodes of a session, or of a run: an allocation, their connections, and the groups that they serve.

To a group, its nodes are a host. If an engine places them, all agents of the group are there; the director
decides which nodes meet, and when. Where nodes join a run at an endpoint, the group has a host of this
machine beside them, whose agent takes part in torch's rendezvous. The hub's thread does everything, except
`connect`, `close` and the orders that any thread may give to a `GroupHost`.

    connect    opens the listener, and the group's store
    start      of the first group: asks the engine, whose node programs connect
    Arriving   refused, or Admitted; after the checks every group sends OpenGroup, and AwaitingRendezvous
               comes back
    close      the groups end, Finish ends the nodes, and the engine gets its hosts back

The docstring of `director` describes how a session's ranks keep their variables when nodes are lost, or come
late.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
import re
import secrets
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from nblaunch._devices import VARIABLES
from nblaunch._errors import LaunchError, NblaunchError, RunFailedError, RunPreemptedError
from nblaunch._help import FailureKind
from nblaunch._version import __version__
from nblaunch.group.group import WorkerGroup
from nblaunch.group.lifecycle import Preemption, PrepareChanged, ReleaseWorkers, Trigger
from nblaunch.group.machine import Order
from nblaunch.host import wire
from nblaunch.host.code import JobCode
from nblaunch.host.hub import Hub
from nblaunch.host.join import HERE, HERE_PLACE
from nblaunch.host.link import DataSocket, IncomingTransfer, Listener, OutgoingTransfer, cut, number_of
from nblaunch.host.rank_host import GroupHost, RankHost
from nblaunch.host.reach import ReachCheck
from nblaunch.host.rendezvous import host_store, join_seconds
from nblaunch.host.settings import AgentSettings
from nblaunch.nodes import director
from nblaunch.nodes.asking import Asking
from nblaunch.nodes.director import DirectorAction, DirectorEvent, DirectorStage, DirectorState
from nblaunch.nodes.engine import Engine, NodeProgram, NodeRequest, address_of
from nblaunch.nodes.members import NodeMember, RemoteRanks, for_another_machine
from nblaunch.nodes.process import ProcessEngine
from nblaunch.nodes.sync_env import Wheels, made_before
from nblaunch.nodes.versions import compare, shared_gpu
from nblaunch.options.kinds import port_range
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol.client import NodeEnvironment

_log = logging.getLogger("nblaunch")
_UNLIMITED = 2**31 - 1
# A node's neighbour may detect its end first.
_LOST_SECONDS = 1.0
# How long the end of a fleet may take: the groups in addition to their grace period, then the programs.
_GROUPS_SECONDS, _NODES_SECONDS, _SOCKETS_SECONDS = 5.0, 2.0, 1.0
# The reach check takes 2 s, unless a node is too busy to answer.
_CHECK_SECONDS = 15.0
# The key by which NCCL's watchdog marks a timed-out collective in a store, without a group's prefix.
_NCCL_TIMED_OUT = "exception_dump"
_LOOPBACK = ("127.", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The options of a fleet; `least` and `most` include this machine, if it has ranks of the run."""

    least: int
    most: int
    options: LaunchOptions
    directed: bool = True
    """Whether the fleet decides who takes part; else torch's rendezvous, at an endpoint."""
    environment: NodeEnvironment | None = None
    """The environment that nodes make before they begin, except this machine's; None: they use their own."""

    @property
    def own(self) -> int:
        """How many nodes have no connection: this process, where torch's rendezvous decides."""
        return 0 if self.directed else 1


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A connected node program."""

    name: str
    identity: bytes
    place: int
    """Its place among all nodes; -1 if the engine numbers none."""
    here: bool
    arriving: wire.Arriving


class NodeFleet:
    """Nodes that an engine has placed, and their groups."""

    def __init__(  # noqa: PLR0913 - what is asked for, and what of the runtime it uses
        self,
        hub: Hub,
        engine: type[Engine],
        request: NodeRequest,
        *,
        directory: Path,
        notify: Callable[[str], None],
        at_end: Callable[[tuple[str, ...]], Callable[[], None]],
        conf: FleetSettings,
        key: bytes = b"",
    ) -> None:
        """Prepare a fleet; the engine is not asked yet.

        `directory` is private, for files. `notify` shows the user a text. `at_end` registers a command with
        the keeper, and returns a function that revokes it. `key` is the user's, else the fleet makes one.
        """
        self.hub, self.conf, self.directory = hub, conf, directory
        asked = messages.EngineState.ASKED
        self.engine_status = messages.EngineStatus(engine=engine.name, state=asked, wanted=conf.least)
        self.engine, self.request = engine, request
        self._notify, self._at_end = notify, at_end
        self._key = key or secrets.token_hex(32).encode()
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._data: DataSocket | None = None
        self._address, self._closed = "", False
        self._wheels = Wheels(conf.environment, request, directory) if conf.environment is not None else None
        self._askings: list[Asking] = []
        """The request to the engine, and that for this machine's own node."""
        self._take_back: list[Callable[[], None]] = []
        # On the hub's thread.
        self._engines = self.engine_status
        """The engine's last report, without the number of connected nodes."""
        self._groups: dict[str, NodeGroup] = {}
        self._nodes: dict[bytes, FleetNode] = {}
        self.code = JobCode(self.send, self._send_payload, functools.partial(hub.run_aside, "nblaunch-code"))
        self._last_payload = 0  # the (negative) number of the last payload on a control connection
        self._without_data: set[bytes] = set()
        """Nodes to which the data connection has broken: they get modules on their control connections."""
        self._names: set[str] = set()
        self._fitting: set[wire.Inventory] = set()
        """The inventories of accepted nodes: a node with the same one is accepted, too."""
        self._checked: set[str] = set()
        """The names of the nodes that groups may use."""
        self._check: ReachCheck | None = None
        self._checking, self._check_until = set[str](), math.inf
        self._warned: list[str] = []
        """What the user was warned of: differences between nodes, and the engine's own warning."""
        self._lost_places: list[tuple[int, bool]] = []
        self._ended = ""
        """Why no more nodes come."""
        self._near_limit = ""
        """Which time limit of the nodes is near; "" if none is."""
        self.signalled = self.signalled_node = ""
        """Which node got a signal that announces its end, in words; "" if none did. And its name."""
        self._leaving: dict[bytes, str] = {}  # what nodes reported of the signal by which they will leave
        self._succeeded, self._empty = True, threading.Event()
        """Set while no node is connected."""
        self._empty.set()

    # --- on any thread -----------------------------------------------------------------------------

    def connect(self, events: WorkerGroup, directory: Path) -> NodeGroup:
        """Return a group's side of these nodes. The first group that starts asks the engine.

        Raises `LaunchError` if this machine has no such address, or if the nodes have been given back, and
        `OptionError` for a wildcard.
        """
        with self._lock:
            if self._closed:
                msg = "the nodes of this session have been given back. Start another one."
                raise LaunchError(msg, phase=messages.Phase.ENGINE.value, kind=FailureKind.SESSION_ENDED)
            self._listener = self._listener or self._listen()
        if self.conf.directed:
            return FleetGroup(self, events, directory, self._address)
        joined = NodeGroup(self, events, directory, self._address)
        self.hub.call(lambda: self._add(joined))
        return joined

    @property
    def endpoint(self) -> str:
        """Where nodes connect, once there is a group."""
        assert self._listener is not None  # noqa: S101 - as above
        return self._listener.address

    def _listen(self) -> Listener:
        hub = self.hub
        given = self.conf.options.local_addr
        self._address = address_of(given) if given else self.engine.address(self.request)
        listener = Listener(
            hub,
            self._address,
            self._key,
            self._receive,
            self._lost,
            silence=self.conf.options.node_timeout,
            ports=port_range(self.conf.options.ports),
        )
        if self.conf.directed:
            self._data = DataSocket(
                hub,
                self._key,
                silence=self.conf.options.node_timeout,
                # Later: it may be lost before `send` has returned its number.
                lost=lambda group, number: hub.call(lambda: self._payload_lost(group, number)),
            )
        hub.call(lambda: hub.after_turn.append(self._turn))
        return listener

    def begin(self, group: NodeGroup) -> None:
        """Have the nodes serve a group; for the first group, ask the engine for them."""
        self.hub.run(lambda: self._add(group), 0)
        with self._lock:
            if self._askings or self._closed:
                return
            self._askings.append(self._asking(self.engine, self.request))
            if self.conf.options.here:
                environ = {**self.request.environ, HERE: "1"}
                own = replace(self.request, least=1, most=1, argument="", words=(), environ=environ)
                own = replace(own, python=sys.executable)
                self._askings.append(self._asking(ProcessEngine, own))
            askings = tuple(self._askings)
        for each in askings:
            each.start()

    def _asking(self, engine: type[Engine], request: NodeRequest) -> Asking:
        shown = engine is self.engine and request is self.request

        def prepare() -> None:
            if command := engine.at_end(request):
                self._take_back.append(self._at_end(command))

        def tell(status: messages.EngineStatus) -> None:
            if shown:  # this machine's own node needs no report
                self.hub.call(lambda: self._engine_reported(status))

        def ended(why: str) -> None:
            self.hub.call(lambda: self._engine_ended(why))

        def limit(why: str, seconds: float) -> None:
            self.hub.call(lambda: self._limit_is_near(why, seconds))

        program = functools.partial(self._program, here=not shown)
        fetch = self._wheels.fetch if shown and self._wheels is not None else None
        notify = self._notify
        return Asking(
            engine, request, program, tell, ended, prepare=prepare, fetch=fetch, limit=limit, notify=notify
        )

    def _program(self, *, here: bool) -> NodeProgram:
        endpoint = self.endpoint.removeprefix("tcp://")
        options = self.conf.options
        ports = () if options.ports is None else ("--ports", options.ports)
        words = ("-m", "nblaunch", "join", endpoint, "-n", str(options.nproc_per_node), *ports, "--key-stdin")
        program = NodeProgram(words, self._key + b"\n")
        environment = self.conf.environment
        if here or environment is None or self._wheels is None:
            return program
        return made_before(program, environment, self._wheels.files())

    def close(self) -> None:
        """End the nodes, and give the allocation back; from any thread, within the grace period and 5 s."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            askings, take_back, listener = self._askings, self._take_back, self._listener
        with contextlib.suppress(LaunchError):  # the hub has ended, and with it all groups
            groups: list[FleetGroup] = []
            self.hub.run(lambda: groups.extend(self._directed), _SOCKETS_SECONDS)
            deadline = time.monotonic() + _GROUPS_SECONDS + max((each.grace for each in groups), default=0.0)
            for group in groups:
                group.stop()
            for group in groups:
                group.join(max(deadline - time.monotonic(), 0.0))
            # After the nodes ended by themselves: the engine kills programs, which then clean up nothing.
            self.hub.run(self._finish, _SOCKETS_SECONDS)
            self._empty.wait(_NODES_SECONDS)
        for asking in askings:
            asking.stop()
        if self._wheels is not None:
            self._wheels.end()
        # The commands for the end are harmless where nothing is left. Else, they may be the last resort.
        if all(asking.released for asking in askings):
            for each in take_back:
                each()
        if listener is not None:
            with contextlib.suppress(LaunchError):
                self.hub.run(self._close_sockets, _SOCKETS_SECONDS)

    # --- on the hub's thread: groups -----------------------------------------------------------------

    @property
    def _directed(self) -> list[FleetGroup]:
        return [group for group in self._groups.values() if isinstance(group, FleetGroup)]

    def _add(self, group: NodeGroup) -> None:
        self._groups[group.name] = group
        if self._askings:
            group.events.feed(self.engine_status)
        if self._ended:
            group.feed(director.EngineEnded(self._ended))
        group.feed(director.NodesExpected(self._expected))
        for node in self._nodes.values():
            if node.name in self._checked:
                group.add(node)
        self._check_reach()

    def remove(self, group: NodeGroup, *, succeeded: bool) -> None:
        """Forget a group that has ended, and end the nodes of an endpoint with their only one."""
        self._groups.pop(group.name, None)
        self._succeeded = self._succeeded and succeeded
        if not self.conf.directed:
            self._closed = True
            self._finish()
            self._close_sockets()

    def enough(self, count: int) -> bool:
        """Whether a run can go on with so many connected nodes, after one was lost."""
        return self.conf.least <= count + self.conf.own and self.conf.least < self.conf.most

    def send(self, identity: bytes, message: wire.ToNode, data: memoryview | None = None) -> None:
        if self._listener is not None:
            self._listener.send(identity, message, data)

    def data_to(self, nodes: Iterable[NodeMember]) -> tuple[DataSocket, tuple[tuple[str, str], ...]] | None:
        """Return the socket for data and these nodes' names and data addresses; None if one has none."""
        places = tuple((node.name, node.arriving.data) for node in nodes)
        if self._data is None or not all(address for _, address in places):
            return None
        return self._data, places

    def _send_payload(self, identity: bytes, content: bytes) -> int:
        """Send content to one node, as a payload of no group; return its number."""
        assert self._data is not None  # noqa: S101 - it is there before any node
        if identity in self._without_data:
            self._last_payload -= 1
            for piece, part in cut(self._last_payload, memoryview(content)):
                self.send(identity, piece, part)
            return self._last_payload
        node = self._nodes[identity]
        payload = messages.Payload(sizes=(len(content),), inline=content)
        return number_of(self._data.send("", payload, ((node.name, node.arriving.data),)))

    def drop_data(self, group: str) -> None:
        if self._data is not None:
            self._data.drop(group)

    def _payload_lost(self, group: str, number: int) -> None:
        if group in self._groups:
            self._groups[group].payload_lost("the notebook's machine")
        elif not group and (identity := self.code.lost(number)) is not None:
            self._without_data.add(identity)

    def ask_again(self) -> None:
        """Have replacements for lost node programs started, if the engine can."""
        places, self._lost_places = self._lost_places, []
        for place, here in places:
            if place >= 0 and self._askings:
                self._askings[1 if here else 0].again(place)

    def drop(self, name: str, why: str) -> None:
        for identity, node in list(self._nodes.items()):
            if node.name == name and self._listener is not None:
                self._listener.send(identity, wire.Finish(succeeded=False))
                self._listener.drop(identity)
                self.forget(identity, why)

    def _turn(self) -> float:
        """Send what is queued, and do what is due; return in how many seconds something is due next."""
        for group in list(self._groups.values()):
            try:
                if self._ended and not group.events.life.saving:
                    group.feed(director.EngineEnded(self._ended))
                group.turn()
            except Exception as error:  # noqa: BLE001 - it ends one group, and no other
                group.fail(error)
        if time.monotonic() > self._check_until:
            self._reached("")
        due = min((group.due for group in self._groups.values()), default=math.inf)
        return max(min(due, self._check_until) - time.monotonic(), 0.0)

    def _finish(self) -> None:
        for identity in self._nodes:
            self.send(identity, wire.Finish(succeeded=self._succeeded))

    def _close_sockets(self) -> None:
        self.hub.after_turn.remove(self._turn)
        if self._data is not None:
            self._data.close()
        if self._listener is not None:
            self._listener.close()
        for identity in self._nodes:
            self.code.forget(identity)
        self._nodes = {}

    # --- on the hub's thread: the engine -------------------------------------------------------------

    @property
    def _expected(self) -> int:
        """How many nodes the engine has granted."""
        return len(self.engine_status.hosts) + self.conf.options.here if self.engine_status.hosts else 0

    def _engine_reported(self, status: messages.EngineStatus) -> None:
        """Publish the engine's report, with the number of connected nodes; at an endpoint there is none."""
        if not self._askings:
            return
        self._warn(each for each in filter(None, [status.warning]) if each not in self._warned)
        self._engines, expected = status, self._expected
        joined, wanted = len(self._nodes), self.conf.least
        state = (
            messages.EngineState.STARTING
            if status.state is messages.EngineState.RUNNING and joined < wanted
            else status.state
        )
        status = msgspec.structs.replace(status, state=state, joined=joined, wanted=wanted)
        if status == self.engine_status:
            return
        self.engine_status = status
        for group in list(self._groups.values()):
            group.events.feed(status)
            if self._expected != expected:
                group.feed(director.NodesExpected(self._expected))

    def _engine_ended(self, why: str) -> None:
        self._ended = why
        for group in list(self._groups.values()):
            if not group.events.life.saving:
                group.feed(director.EngineEnded(why))

    # --- on the hub's thread: nodes that are taken back --------------------------------------------

    @property
    def preempted(self) -> bool:
        """Whether the engine has taken the nodes back before the run ended, or is about to."""
        return self._engines.preempted or bool(self._near_limit or self.signalled)

    @property
    def _of_job(self) -> str:
        """The engine's job in brackets, for an end of which the engine itself may tell too late."""
        return f" ({self.engine_status.engine} job {self.engine_status.id})" if self.engine_status.id else ""

    def _limit_is_near(self, why: str, seconds: float) -> None:
        """Have all ranks save; `why` is "" if the time limit was extended."""
        self._near_limit = why
        if why and not (self._ended or self._closed):
            self._preempt(why, seconds)

    def _noticed(self, node: FleetNode, notice: wire.NodeEnding) -> None:
        """Have all ranks save before the engine ends a node, unless the others can go on without it."""
        enough = self.conf.least < self.conf.most and len(self._nodes) > self.conf.least
        if self._askings:
            self._askings[0].poll_soon()  # the engine may know the reason and the time
        if notice.leaves and (self._ended or self._closed or not self._groups or enough):
            self._leave(node.identity)
            return
        words = f"{notice.words}{self._of_job}"
        why = f"node {node.name} {words}"
        if notice.leaves:
            self._leaving[node.identity] = words
        if notice.leaves and not self.signalled:
            self.signalled, self.signalled_node = why, node.name
        left = (
            math.inf if self.engine_status.ends is None else max(self.engine_status.ends - time.time(), 0.0)
        )
        self._preempt(why, min(notice.seconds, left))

    def _preempt(self, why: str, seconds: float) -> None:
        for group in list(self._groups.values()):
            group.events.feed(Preemption(why, seconds))

    def _leave(self, identity: bytes) -> None:
        self.send(identity, wire.Finish(succeeded=False))
        self.forget(identity, f"left{self._of_job}", asked=True)

    # --- on the hub's thread: nodes ------------------------------------------------------------------

    def _receive(self, identity: bytes, message: wire.FromNode, data: memoryview) -> None:
        if isinstance(message, wire.Arriving):
            self._arrive(identity, message)
            return
        node = self._nodes.get(identity)
        if node is None:
            return
        group = self._groups.get(getattr(message, "group", ""))
        if group is not None:
            group.receive(node, message, data)
            return
        match message:
            case wire.ProbeOpen() | wire.Reachable() if self._check is not None:
                self._check.take(node.name, message)
            case wire.Leaving():
                self._leave(identity)
            case wire.NodeEnding():
                self._noticed(node, message)
            case wire.CodeLacking():
                self.code.answer(identity, message)
            case _:
                pass  # the group has ended

    def _arrive(self, identity: bytes, arriving: wire.Arriving) -> None:
        assert self._listener is not None  # noqa: S101 - it has received this
        if identity in self._nodes:
            return
        why = self._refusal_of(arriving)
        if why:
            self._listener.refuse(identity, why)
            return
        here = self.conf.options.here and arriving.place == HERE_PLACE
        if arriving.place == HERE_PLACE:
            arriving = msgspec.structs.replace(arriving, place=0 if here else -1)
        place = arriving.place
        if self.conf.options.here and place >= 0:
            place = 0 if here else place + 1
        hosts = () if here else self.engine_status.hosts
        # The engine's name for the host: two nodes of one machine have the same name of their own.
        called = hosts[arriving.place] if 0 <= arriving.place < len(hosts) else arriving.name
        node = FleetNode(self._unique_name(called), identity, place, here, arriving)
        self._names.add(node.name)
        self._nodes[identity] = node
        self._empty.clear()
        self._listener.welcome(identity)
        silence = self.conf.options.node_timeout
        self.send(identity, wire.Admitted(name=node.name, silence=silence, now=time.time()))
        if self._askings:
            self._askings[1 if here else 0].joined(arriving.place)
        self._engine_reported(self._engines)
        self._check_reach()

    def _refusal_of(self, arriving: wire.Arriving) -> str:
        """Return why a node is refused although it has the key; "" if it is admitted."""
        name, most = arriving.name, self.conf.most
        if self._closed:
            return f"{name}: the run is over"
        if len(self._nodes) + self.conf.own >= most:
            return f"{name}: the run has all {most} nodes that it takes. Start it with more: --nnodes."
        loopback = arriving.address.startswith(_LOOPBACK)
        if loopback != self._address.startswith(_LOOPBACK):  # else nodes could not reach each other
            wrong = name if loopback else "the notebook's machine"
            return (
                f"{name} reaches the notebook from {arriving.address}, and the notebook is at "
                f"{self._address}: no other machine reaches a loopback address. Correct /etc/hosts of "
                f"{wrong}, or give local_addr (--local-addr)."
            )
        has = msgspec.structs.replace(arriving.inventory, boot="", own_gpus=())
        if has in self._fitting:
            return ""
        inventories = {node.name: node.arriving.inventory for node in self._nodes.values()}
        everybody = {**inventories, self._unique_name(name): arriving.inventory}
        found = compare(_own_inventory(), everybody, self.conf.options.backend)
        if not found.refused:
            self._fitting.add(has)
            self._warn(each for each in found.warned if each not in self._warned)
        return found.refusal

    def _warn(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._warned.append(text)
            for group in self._groups.values():
                group.events.feed(messages.Noticed(text=text))

    # Before ranks connect, the fleet finds machines that cannot reach each other, and names them.

    def _check_reach(self) -> None:
        """Once enough nodes are connected, have them try to reach each other; then let groups use them."""
        fresh = [node for node in self._nodes.values() if node.name not in self._checked]
        group = next(iter(self._groups.values()), None)
        if self._check is not None or group is None or not fresh:
            return
        places = {node.name: (node.arriving.address, node.arriving.data) for node in self._nodes.values()}
        self._checking = set(places)
        alone = (
            not self.conf.directed
            or self._address.startswith(_LOOPBACK)
            or not all(data for _, data in places.values())
        )
        if alone:
            self._reached("")
        elif len(places) >= self.conf.least:
            self._check_until = time.monotonic() + _CHECK_SECONDS
            store = wire.ReachTarget("", "store", *self._directed[0].store)
            identities = {node.name: node.identity for node in self._nodes.values()}
            self._check = ReachCheck(
                self.hub,
                self._key,
                store,
                places,
                lambda name, message: self.send(identities[name], message),
                self._reached,
            )

    def _reached(self, why_not: str) -> None:
        self._check, self._check_until = None, math.inf
        if why_not and self._checking & self._checked:
            # Nodes that already serve groups go on without the new ones.
            for name in self._checking - self._checked:
                self._notify(f"node {name} was refused: {why_not}")
                self.drop(name, "does not reach the others, or they do not reach it")
        elif why_not:
            self._engine_ended(why_not)
            return
        fresh = self._checking - self._checked
        self._checked |= fresh
        for node in [each for each in self._nodes.values() if each.name in fresh]:
            for group in list(self._groups.values()):
                group.add(node)
        self._check_reach()  # more nodes may have come meanwhile

    def _unique_name(self, name: str) -> str:
        """Return a name that is valid in a path and that no other node has had."""
        plain = re.sub(r"[^\w.-]", "_", name) or "node"
        found, number = plain, 1
        while found in self._names:
            number += 1
            found = f"{plain}-{number}"
        return found

    def _lost(self, identity: bytes) -> None:
        noticed = self._leaving.get(identity)
        self.forget(identity, f"{noticed}, and is gone" if noticed else "is gone (killed, or out of reach)")

    def forget(self, identity: bytes, why: str, *, asked: bool = False) -> None:
        """Go on without a node."""
        node = self._nodes.pop(identity, None)
        if node is None:
            return
        self._fitting.clear()
        if not self._nodes:
            self._empty.set()
        self._lost_places.append((node.arriving.place, node.here))
        self.code.forget(identity)
        self._without_data.discard(identity)
        self._leaving.pop(identity, None)
        if self._check is not None:
            self._check.lost(node.name)
        for group in list(self._groups.values()):
            group.lose(node, why, asked=asked)
        self._engine_reported(self._engines)

    def variables(self, env: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Return the variables that nodes set for their ranks.

        Nodes of this machine have the caller's environment, but each has a part of the GPUs chosen there.
        """
        if self.engine is not ProcessEngine:
            return env
        there = self.request.environ
        return tuple(
            (name, value) for name, value in env if name not in VARIABLES or there.get(name) != value
        )

    def notify_lost(self, count: int, why: str) -> None:
        """Show the user that replacements for lost nodes are awaited."""
        nodes = "another node is" if count == 1 else f"{count} other nodes are"
        seconds = join_seconds(self.conf.options)
        self._notify(f"{why}; {nodes} awaited for {seconds:g} s (--rdzv-conf join_timeout)")


def _own_inventory() -> wire.Inventory:
    """Return what nodes must share with this machine, which may have no rank."""
    return wire.Inventory(
        python=platform.python_version(),
        torch=str(torch.__version__),
        nblaunch=__version__,
        boot="",
        backend="",
        device_type="",
    )


class NodeGroup(GroupHost):
    """A group's side of a fleet. At an endpoint, torch's rendezvous decides who takes part.

    There the group's first agent is on this machine, and nodes follow it.
    """

    own: RankHost
    """This machine's, at an endpoint."""

    def __init__(self, fleet: NodeFleet, events: WorkerGroup, directory: Path, address: str) -> None:
        """Prepare; payloads that do not fit into memory are written to `directory`.

        This machine is at `address`.
        """
        self.name, self.events = events.group, events
        self._fleet, self._settings, self._directory = fleet, events.settings, directory
        self._address = address
        # The backend as asked for: a cell on fresh ranks may have another one than its session.
        self._backend = events.settings.options.backend
        self._members: dict[str, NodeMember] = {}
        self._order: tuple[str, ...] = ()
        """The nodes of this attempt, in the order of their ranks, where the fleet decides it."""
        self._ranks = RemoteRanks(events)
        self._outgoing = OutgoingTransfer()
        self._held: dict[str, tuple[messages.ToRank, list[int]]] = {}
        """By node, the message to send with the next turn, and the ranks that get it."""

    @property
    def grace(self) -> float:
        """How long its ranks have after an interrupt, in seconds."""
        return self._settings.options.grace

    @property
    def log_directory(self) -> Path:
        """Where this machine keeps the logs of the present attempt."""
        return self.own.log_directory

    def stop(self) -> None:
        # As this machine's own host: ranks that only lost their peers would seem to have failed.
        self._fleet.hub.run(lambda: self._send_all(wire.EndGroup(group=self.name)), 0)

    # --- orders, on the hub's thread --------------------------------------------------------------

    def begin_attempt(self) -> None:
        self._held = {}
        self._fleet.drop_data(self.name)
        self._ranks.begin_attempt(self._members.values())

    def send(self, rank: int, message: messages.ToRank) -> bool:
        node = self._ranks.node_of(rank)
        if node is None:
            return False
        if isinstance(message, messages.Interrupt):
            # It ends the job that waits for a payload, and must not delay the next job's payload.
            self._fleet.drop_data(self.name)
        held = self._held.get(node.name)
        if held is not None and (held[0] is message or held[0] == message):
            held[1].append(rank)
            return True
        if held is not None:
            self.flush()
        self._held[node.name] = (message, [rank])
        return True

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        attempt, ranks = self.events.attempt, tuple(sorted(others))
        self._send_all(wire.Release(group=self.name, attempt=attempt, succeeded=succeeded, others=ranks))

    def follow(self) -> None:
        self._send_all(wire.Restart(group=self.name, attempt=self.events.attempt))

    def skip_grace(self) -> None:
        """Skip the rest of the grace period; on any thread."""
        self._fleet.hub.run(lambda: self._send_all(wire.SkipGrace(group=self.name)), 0)

    def measure(self, *, wanted: bool) -> None:
        self._send_all(wire.MeasureRanks(group=self.name, wanted=wanted))

    def read_stacks(self, ranks: frozenset[int]) -> None:
        """Have the nodes dump the stacks of these ranks, which do not answer."""
        for member in self._members.values():
            if theirs := tuple(sorted(member.ranks & ranks)):
                self._send_to(member.name, wire.DumpStacks(group=self.name, ranks=theirs))

    def close(self, *, succeeded: bool) -> None:
        """Forget all state: the group has ended, and with it the nodes of an endpoint."""
        self._fleet.drop_data(self.name)
        self._fleet.remove(self, succeeded=succeeded or self.events.keep)
        self._ranks.close()
        for member in self._members.values():
            member.incoming.close()
        self._members, self._held = {}, {}

    def _send_all(self, message: wire.ToNode) -> None:
        for name in list(self._members):
            self._send_to(name, message)

    def _send_to(self, name: str, message: wire.ToNode) -> None:
        self.flush()
        if name in self._members:
            self._fleet.send(self._members[name].identity, message)

    def flush(self) -> None:
        held, self._held = self._held, {}
        tickets: list[tuple[messages.Payload, messages.Payload]] = []
        shared: dict[int, bytes] = {}
        for name, (message, ranks) in held.items():
            member = self._members.get(name)
            if member is None:
                continue
            if isinstance(message, messages.Dispatch) and message.code is not None:
                self._fleet.code.ask(member.identity, message.code)
            data = shared.get(id(message))
            if data is None:
                plain, parcel = for_another_machine(message), False
                if isinstance(plain, messages.Dispatch):
                    plain = self._with_ticket(member, plain, held, tickets)
                    # A payload for one node alone has a ticket of its own.
                    parcel = not any(plain.payload is ticket for _, ticket in tickets)
                data = messages.encode(plain)
                if not parcel:
                    shared[id(message)] = data
            for_ranks = wire.ForRanks(
                group=self.name, attempt=self.events.attempt, ranks=tuple(ranks), data=data
            )
            self._fleet.send(member.identity, for_ranks)

    def _with_ticket(
        self,
        member: NodeMember,
        dispatch: messages.Dispatch,
        held: Mapping[str, tuple[messages.ToRank, list[int]]],
        tickets: list[tuple[messages.Payload, messages.Payload]],
    ) -> messages.Dispatch:
        """Send a job's payload to all nodes that get it now; return the job with a ticket in its place."""
        ticket = next((ticket for payload, ticket in tickets if payload is dispatch.payload), None)
        if ticket is not None:
            return msgspec.structs.replace(dispatch, payload=ticket)
        names = [
            name
            for name in self._order or self._members
            if name in held
            and name in self._members
            and isinstance(other := held[name][0], messages.Dispatch)
            and other.payload is dispatch.payload
        ]
        data = self._fleet.data_to(self._members[name] for name in names)
        if data is not None:
            socket, places = data
            ticket = socket.send(self.name, dispatch.payload, places)
            tickets.append((dispatch.payload, ticket))
        else:
            ticket, pieces = self._outgoing.pieces(dispatch.payload)
            if ticket is dispatch.payload:
                tickets.append((dispatch.payload, ticket))
            for piece, part in pieces:
                self._fleet.send(member.identity, msgspec.structs.replace(piece, group=self.name), part)
        return msgspec.structs.replace(dispatch, payload=ticket)

    @property
    def due(self) -> float:
        return math.inf

    def turn(self) -> None:
        self.flush()

    def feed(self, event: DirectorEvent) -> None:
        """Do nothing: nobody here directs these nodes."""

    def fail(self, error: Exception) -> None:
        """End the group with this error."""
        self.events.lost(error)

    def payload_lost(self, sender: str) -> None:
        """Do nothing: each payload comes by the node's own connection."""

    # --- nodes: on the hub's thread ------------------------------------------------------------------

    def add(self, node: FleetNode) -> None:
        settings, conf = self._settings, self._fleet.conf
        self._members[node.name] = NodeMember(
            node.name,
            node.identity,
            node.arriving,
            IncomingTransfer(self._directory),
            "" if node.arriving.address == self._address else node.arriving.address,
        )
        opened = wire.OpenGroup(
            group=self.name,
            keep=self.events.keep,
            options=replace(settings.options, env={}),
            backend=self._backend,
            env=self._fleet.variables(tuple(settings.options.env.items())),
            processes=replace(settings.processes, environ=()),
            cwd=os.fsencode(self._fleet.request.cwd),
            nodes=(conf.least, conf.most),
        )
        self._fleet.send(node.identity, opened)

    def lose(self, node: FleetNode, why: str, *, asked: bool) -> None:
        member = self._members.pop(node.name, None)
        if member is None:
            return
        self._held.pop(node.name, None)
        self._ranks.lost(member, why, asked=asked, enough=self._fleet.enough(len(self._members)))

    def receive(self, node: FleetNode, message: wire.FromNode, data: memoryview) -> None:
        member = self._members.get(node.name)
        if member is None:
            return
        match message:
            case wire.Piece():
                member.incoming.receive(message, data)
            case wire.OthersStopped():
                self.events.ranks_stopped(member.ranks)
            case wire.NodeEnded():
                self._node_ended(node, message)
            case wire.Dumped(rank=rank, text=text) if rank in member.ranks:
                self.events.stacks_read({rank: text})
            case _ if isinstance(message, wire.OfAttempt) and message.attempt == self.events.attempt:
                self.take_attempt_message(member, message, data)
            case _:
                pass  # the attempt has been abandoned

    def note(self, text: str) -> None:
        """Show a text with the next result."""
        self.events.feed(messages.Noticed(text=text))

    def _node_ended(self, node: FleetNode, ended: wire.NodeEnded) -> None:
        error = ended.error
        member = self._members.get(node.name)
        if error and member is not None and not member.ranks:
            # No rank is lost with it, of which the loss would tell.
            self.note(f"node {node.name} cannot take part: {error}")
        self._fleet.forget(node.identity, f"ended: {error}" if error else "has ended")

    def take_attempt_message(
        self,
        member: NodeMember,
        message: wire.OfAttempt,
        data: memoryview,
    ) -> None:
        match message:
            case wire.Workers(workers=workers):
                self._ranks.started(member, workers, self.log_directory)
            case wire.RankMessages(data=encoded):
                for each in encoded:
                    self._ranks.sent(member, each)
            case wire.Wrote():
                self._ranks.wrote(member, message, data)
            case wire.Gone():
                self._ranks.gone(member, message)
            case wire.RanksMeasured(usages=usages):
                self.events.measured(usages)


class FleetGroup(NodeGroup):
    """A group's side of a fleet whose rendezvous the director decides; all of its agents are on nodes."""

    def __init__(self, fleet: NodeFleet, events: WorkerGroup, directory: Path, address: str) -> None:
        """Prepare; payloads that do not fit into memory are written to `directory`.

        The ranks' store is at `address`.
        """
        super().__init__(fleet, events, directory, address)
        settings = events.settings
        store = host_store(address, port_range(fleet.conf.options.ports))
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        # torchelastic's layout: attempts below it, ranks below those.
        self._logs = Path(tempfile.mkdtemp(prefix=f"{settings.run_id}_", dir=settings.log_dir))
        self._attempt_logs = self._logs
        self._store: dist.TCPStore | None = store
        conf, kept = fleet.conf, events.keep
        self._state = DirectorState(
            least=conf.least,
            most=conf.most,
            # A persistent group's ranks may be replaced any number of times, but its nodes may not.
            restarts_left=_UNLIMITED if kept else settings.options.max_restarts,
            replacements_left=settings.options.max_restarts,
            persistent=kept,
            group=self.name,
            store=(address, store.port),
            patient=fleet.engine.name == "join",
            join_timeout=join_seconds(conf.options),
            grace=settings.options.grace,
        )
        self._waiting: deque[DirectorEvent] = deque()
        self._feeding = False
        self._lost_payload = math.inf, ""
        """When the group ends because a payload has not arrived, and which machine sent it."""
        self._node_lost = -math.inf
        """When a node was lost (monotonic)."""
        self._renumbered: dict[int, dict[int, int]] = {}
        """For each earlier attempt with ranks that went on: their current numbers by their former ones."""
        self._error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def log_directory(self) -> Path:
        """Where this machine keeps the logs of the present attempt."""
        return self._attempt_logs

    # --- orders, on any thread ---------------------------------------------------------------------

    def start(self) -> None:
        if self._ended.is_set():
            return  # it was stopped before it started
        try:
            self._fleet.begin(self)
        except NblaunchError as error:
            self.fail(error)

    def stop(self) -> None:
        self._ordered(Order.STOP_AGENT)

    def restart(self) -> None:
        self._ordered(Order.RESTART_AGENT)

    def rejoin(self) -> None:
        self._ordered(Order.REJOIN_NODES)

    def regroup(self) -> None:
        self._ordered(Order.REGROUP_NODES)

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        self._ordered(ReleaseWorkers(succeeded, others))

    def adopt(self, settings: AgentSettings) -> None:
        def change() -> None:
            self._settings = replace(self._settings, options=settings.options)
            self._state = msgspec.structs.replace(self._state, grace=self.grace)

        self._fleet.hub.run(change, 0)

    def all_alive(self) -> bool:
        members = list(self._members.values())
        return self._state.stage is DirectorStage.RUNNING and not any(each.exited for each in members)

    def join(self, timeout: float) -> None:
        self._ended.wait(timeout)

    def _ordered(self, order: Order | ReleaseWorkers) -> None:
        # On the hub's thread at once: later messages to ranks must not overtake the order.
        self._fleet.hub.run(lambda: self.feed(director.Ordered(self.events.attempt, order)), 0)

    def fail(self, error: BaseException) -> None:
        """End the group with this error."""

        def end() -> None:
            self._error = self._error or error
            self.feed(director.Ordered(self.events.attempt, Order.STOP_AGENT))

        self._fleet.hub.run(end, 0)

    # --- orders, on the hub's thread -----------------------------------------------------------------

    def begin_attempt(self) -> None:
        super().begin_attempt()
        self._renumbered = {}

    def send(self, rank: int, message: messages.ToRank) -> bool:
        if isinstance(message, messages.Interrupt):
            self._lost_payload = math.inf, ""
        return super().send(rank, message)

    def flush(self) -> None:
        if any(isinstance(message, messages.Recover) for message, _ in self._held.values()):
            self._forget_timeout()
        super().flush()

    def close(self, *, succeeded: bool) -> None:
        super().close(succeeded=succeeded)
        self._store = None

    def _forget_timeout(self) -> None:
        """Remove the marks of NCCL's watchdogs: those of the next attempt would take them for theirs."""
        if self._store is not None:
            self._store.delete_key(_NCCL_TIMED_OUT)

    # --- the director: on the hub's thread -----------------------------------------------------------

    @property
    def store(self) -> tuple[str, int]:
        return self._state.store

    @property
    def due(self) -> float:
        return min(self._state.due, self._lost_payload[0])

    def turn(self) -> None:
        self.flush()
        if time.monotonic() >= self._state.due:
            self.feed(Trigger.TICK)
        if time.monotonic() >= self._lost_payload[0]:
            msg = (
                f"the job's data did not arrive: a data connection from {self._lost_payload[1]} ended, "
                "although its node is still connected. Check the network with %distributed doctor --on."
            )
            self._lost_payload = math.inf, ""
            self.fail(RunFailedError(msg, kind=FailureKind.CONNECTION_LOST))

    def payload_lost(self, sender: str) -> None:
        """End the group soon, unless it turns out that a node was lost with the payload on its way."""
        if time.monotonic() < self._node_lost + _LOST_SECONDS:
            return  # a node was lost, and its neighbour reports it now
        self._lost_payload = min(self._lost_payload, (time.monotonic() + _LOST_SECONDS, sender))

    def feed(self, event: DirectorEvent) -> None:
        """Feed the director, and perform its actions; events that these cause are fed after them."""
        self._waiting.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._waiting:
                now = time.monotonic()
                self._state, actions = director.step(self._state, self._waiting.popleft(), now)
                try:
                    for action in actions:
                        self._perform(action)
                except Exception as error:  # noqa: BLE001 - the group ends of it, and says why
                    _log.debug("a group on nodes could not do a step", exc_info=True)
                    self._error = self._error or error
                    self._waiting.append(director.Ordered(self.events.attempt, Order.STOP_AGENT))
        finally:
            self._feeding = False

    def _perform(self, action: DirectorAction) -> None:
        match action:
            case director.BeginAttempt():
                self._begin(action)
            case director.AllStarted(number, world_size):
                self.events.attempt_started(number, world_size, ())
            case director.NodeOrder(node, message):
                self._send_to(node, message)
            case director.AskForNodes(count):
                self._fleet.ask_again()
                if self._state.stage is DirectorStage.WAITING:
                    self._fleet.notify_lost(count, self._state.lost)
            case director.DropNode(node, why):
                self._fleet.drop(node, why)
            case messages.Noticed() | Trigger():
                self.events.feed(action)
            case director.EndAgent(error):
                self._end(error)

    def _begin(self, attempt: director.BeginAttempt) -> None:
        """Have the group begin an attempt, with a backend that all of its nodes have."""
        self._order, self._attempt_logs = attempt.nodes, self._logs / f"attempt_{attempt.number}"
        if self._fleet.signalled_node not in attempt.nodes:
            self._fleet.signalled = ""  # that node has gone; what ends from now on was not signalled
        if attempt.kept is None:
            self.events.feed(PrepareChanged(*self._placement()))
        else:
            self._renumber(attempt.kept)
        # Only now is the backend known, unless ranks go on.
        backend = self.events.backend
        self.events.attempt_starting(
            attempt.number,
            attempt.world_size,
            attempt.reason,
            backend=backend,
            kept=attempt.kept,
            replaced=attempt.replaced,
        )
        self._forget_timeout()

    def _renumber(self, kept: Mapping[int, int]) -> None:
        """Go on with these ranks under new numbers; messages under former numbers may still arrive."""
        self.flush()
        numbers = {before: rank for rank, before in kept.items()}
        self._ranks.renumber(self._members.values(), numbers)
        self._renumbered = {
            attempt: {then: numbers[rank] for then, rank in ranks.items() if rank in numbers}
            for attempt, ranks in {**self._renumbered, self.events.attempt: {r: r for r in numbers}}.items()
        }

    def _placement(self) -> tuple[str, str]:
        """Return the backend and the device type of the ranks.

        Raises `LaunchError` if NCCL was asked for, and two of the nodes have the same GPU.
        """
        # One that was dropped a moment ago has a message of its own on its way to the director.
        there = [self._members[name] for name in self._order if name in self._members]
        inventories = {each.name: each.arriving.inventory for each in there}
        found = {(each.backend, each.device_type) for each in inventories.values()}
        shared = shared_gpu(inventories)
        if self._backend != "auto":
            return self._backend, self._device(shared, {device for _, device in found})
        if shared:
            self.note(f"{shared}: all ranks are on the CPU")
            return "gloo", "cpu"
        if len(found) == 1:
            return found.pop()
        if without := [name for name, each in inventories.items() if each.device_type == "cpu"]:
            self.note(f"{', '.join(without)} has no GPU for each rank: all ranks are on the CPU")
        return "gloo", "cpu"

    def _device(self, shared: str, devices: set[str]) -> str:
        """Return the device type for the given backend, which each node has accepted."""
        if shared and "nccl" in self._backend:
            msg = (
                f"{shared}, and NCCL takes one rank for each GPU. "
                "Give each node GPUs of its own (CUDA_VISIBLE_DEVICES), or pass backend='gloo'."
            )
            raise LaunchError(msg, phase=messages.Phase.ENGINE.value, kind=FailureKind.TOO_FEW_GPUS)
        # Nodes whose ranks share GPUs only if the backend says so have reported the CPU.
        named = {part.partition(":")[0] for part in self._backend.split(",") if ":" in part} - {"cpu"}
        kinds = named or devices
        return kinds.pop() if len(kinds) == 1 else "cpu"

    def _end(self, error: str) -> None:
        if error and self._error is None:
            began = self._state.attempt >= 0
            if not began:
                self._error = LaunchError(error, phase=messages.Phase.ENGINE.value)
            elif self._fleet.preempted:
                self._error = RunPreemptedError(error)
            else:
                self._error = RunFailedError(error, kind=FailureKind.NODE_LOST)
        self._ended.set()
        self.events.agent_ended(self._error)

    # --- nodes: on the hub's thread ------------------------------------------------------------------

    def add(self, node: FleetNode) -> None:
        if self._state.stage not in (DirectorStage.ENDING, DirectorStage.ENDED):
            self.feed(director.NodeCame(node.name, node.arriving.nproc, node.place))
            super().add(node)

    def lose(self, node: FleetNode, why: str, *, asked: bool) -> None:
        if node.name not in self._members:
            return
        self._lost_payload, self._node_lost = (math.inf, ""), time.monotonic()
        # Before the director, which may begin the next attempt: these exits belong to the current one.
        super().lose(node, why, asked=asked)
        self.feed(director.NodeLost(node.name, why, asked))

    def receive(self, node: FleetNode, message: wire.FromNode, data: memoryview) -> None:
        match message:
            case wire.AwaitingRendezvous(after=after) if node.name in self._members:
                if after in self._renumbered:
                    message = msgspec.structs.replace(message, after=self.events.attempt)
                self.feed(director.NodeReported(node.name, message))
            case wire.PieceLost():
                self.payload_lost(node.name)
            case wire.Wrote(attempt=attempt, rank=rank) if rank in self._renumbered.get(attempt, ()):
                now = {"attempt": self.events.attempt, "rank": self._renumbered[attempt][rank]}
                super().receive(node, msgspec.structs.replace(message, **now), data)
            case wire.Gone(attempt=attempt, exited=exited) if exited.rank in self._renumbered.get(
                attempt, ()
            ):
                exited = msgspec.structs.replace(exited, rank=self._renumbered[attempt][exited.rank])
                gone = wire.Gone(group=self.name, attempt=self.events.attempt, exited=exited)
                super().receive(node, gone, data)
            case _:
                super().receive(node, message, data)

    def _node_ended(self, node: FleetNode, ended: wire.NodeEnded) -> None:
        self.feed(director.NodeReported(node.name, ended))

    def take_attempt_message(
        self,
        member: NodeMember,
        message: wire.OfAttempt,
        data: memoryview,
    ) -> None:
        super().take_attempt_message(member, message, data)
        match message:
            case wire.Gone(exited=exited) if self._fleet.signalled:
                # The engine may end the node's ranks with it: do not start new ones there.
                exited = msgspec.structs.replace(exited, expected=True)
                message = msgspec.structs.replace(message, exited=exited)
                self.feed(director.NodeReported(member.name, message))
            case wire.Workers() | wire.Gone():
                self.feed(director.NodeReported(member.name, message))
            case _:
                pass
