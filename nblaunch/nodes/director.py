"""Decides which nodes take part, and when: the attempts of a group with agents on nodes; one pure machine.

    stage        entered when                    next, and why
    -----------  ------------------------------  ----------------------------------------------------------
    WAITING      there are too few nodes         RENDEZVOUS: enough checked nodes wait for a rendezvous
                                                 ENDING: no node replaces one that was lost
    RENDEZVOUS   an attempt begins               RUNNING: all have started their ranks
                                                 RESTARTING: a node is lost
    RUNNING      the ranks have started          RESTARTING: all persistent ranks have ended that were not
                                                 released, or too few nodes are left; an order to restart, or
                                                 for another rendezvous
                                                 RUNNING: an order to regroup; the next attempt has the ranks
                                                 of this one, others in place of those that have ended, and
                                                 those of new nodes
                                                 LEAVING: an order to release the ranks
    RESTARTING   the ranks are being ended       WAITING: all agents wait for a rendezvous
                                                 ENDING: no restart is left
    LEAVING      the ranks are released          ENDING: all have ended; after a failure as RESTARTING
    ENDING       the group is being ended        ENDED: all nodes have ended, or their time is over
    ENDED        no node has ranks of the group  -

A lost node costs a restart, as a failed rank does, and the next attempt needs a replacement unless enough
nodes are left. In a fresh group the lifecycle decides what ends after a failure, and orders it. In a kept
group it decides when the remaining ranks go on without the lost ones.

So the ranks of a session keep their variables when nodes are lost, or come late, or ranks die: the next
attempt has the same processes with new numbers. The lifecycle has them end their job, and orders
`REGROUP_NODES`. Each old node then gets `AdoptRanks`, with which it replaces ranks that have ended, and each
new one `CompleteRendezvous`. A relay sends its ranks `Adopt` and keeps
their logs; a rank sends `Hello` with its new number, and all ranks form their process group as after a failed
job (`Recover`). Agents do not notice; the client gets `RanksRenumbered`. Output and exits of ranks that were
in flight count for the new attempt.

`step` reads no clock (`now` is monotonic) and does nothing itself: `fleet` feeds it and performs its actions.
An order for another attempt than the current one does nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from nblaunch.group.lifecycle import ReleaseWorkers, Trigger
from nblaunch.group.machine import Machine, Order
from nblaunch.host import wire
from nblaunch.protocol.messages import Noticed

# Peers in a collective with a failed rank raise now. This lets them report it before they are ended.
_LAST_WORDS_SECONDS = 0.1
# Nodes lost for one reason are detected one after the other.
_TOGETHER_SECONDS = 0.05
# How long a node may take to end a group, in addition to the grace period.
_END_SECONDS = 5.0
# How long nodes wait for further ones once there are enough.
_LAST_CALL_SECONDS = 5.0
_NEVER = float("inf")


class DirectorStage(enum.StrEnum):
    """The stage of a group; the module's docstring has the table."""

    WAITING = "WAITING"
    RENDEZVOUS = "RENDEZVOUS"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    LEAVING = "LEAVING"
    ENDING = "ENDING"
    ENDED = "ENDED"


_WITH_RANKS = (DirectorStage.RENDEZVOUS, DirectorStage.RUNNING)


class DirectedNode(msgspec.Struct, frozen=True):
    """A node, as its group sees it."""

    nproc: int
    place: int
    came: int
    """Its position in the order of arrival."""
    waits: bool = False
    """Whether its agent waits for a rendezvous."""
    attempt: int = -1
    """The last attempt that it took part in."""
    base: int = 0
    """Its first rank in that attempt."""
    started: bool = False
    """Whether it has started its ranks of that attempt."""
    ended: bool = False
    """Whether its ranks and its agent of this group have ended."""
    dead: frozenset[int] = frozenset()
    """The ranks of that attempt that have ended, by their places on it."""
    leaves: bool = False
    """Whether the engine may have ended these with the node: none is started in their place."""

    @property
    def alive(self) -> bool:
        """Whether one of its ranks has not ended."""
        return len(self.dead) < self.nproc

    @property
    def order(self) -> tuple[float, int]:
        """The sort key for ranks: the engine's place, then the order of arrival."""
        return (self.place if self.place >= 0 else _NEVER, self.came)


_COUNTED = ("waits", "started", "ended", "alive")
_PARTS = 64


class NodeTable(Mapping[str, DirectedNode]):
    """Nodes by name, in the order of arrival. It never changes: a changed copy shares most of its parts.

    Each of N nodes causes some events. So that these cost no N steps each, a step copies one part, and how
    many nodes of each attempt wait, have started or have ended is counted as they change.
    """

    __slots__ = ("_counts", "_parts")

    def __init__(self) -> None:
        self._parts: tuple[dict[str, DirectedNode], ...] = ({},) * _PARTS
        self._counts: dict[tuple[str, int], int] = {}

    def changed(self, changes: Mapping[str, DirectedNode | None]) -> NodeTable:
        """Return a table with these nodes in place of those before; None removes one."""
        parts, counts, copied = list(self._parts), dict(self._counts), set[int]()
        for name, node in changes.items():
            at = hash(name) % _PARTS
            if at not in copied:
                copied.add(at)
                parts[at] = dict(parts[at])
            for each, change in ((parts[at].pop(name, None), -1), (node, 1)):
                if each is None:
                    continue
                for what in ("nodes", *(flag for flag in _COUNTED if getattr(each, flag))):
                    key = what, each.attempt
                    counts[key] = counts.get(key, 0) + change
            if node is not None:
                parts[at][name] = node
        table = NodeTable()
        table._parts, table._counts = tuple(parts), {key: count for key, count in counts.items() if count}
        return table

    def count(self, what: str, attempt: int | None = None) -> int:
        """Return how many there are: `nodes`, or those with a flag (`waits`); of one attempt, or of all."""
        if attempt is not None:
            return self._counts.get((what, attempt), 0)
        return sum(count for (each, _), count in self._counts.items() if each == what)

    def __getitem__(self, name: str) -> DirectedNode:
        """Return a node."""
        return self._parts[hash(name) % _PARTS][name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        nodes = [item for part in self._parts for item in part.items()]
        return (name for name, _ in sorted(nodes, key=lambda item: item[1].came))

    def __len__(self) -> int:
        """Return how many nodes there are."""
        return self.count("nodes")


class DirectorState(msgspec.Struct, frozen=True):
    """The nodes of a group, and its attempts."""

    least: int
    most: int
    restarts_left: int
    persistent: bool
    group: str = ""
    store: tuple[str, int] = ("", 0)
    """The address of the ranks' store."""
    replacements_left: int = 0
    """How many lost nodes may still be replaced."""
    patient: bool = False
    """Whether users start the nodes: before the first attempt there is no time limit for them."""
    join_timeout: float = 600.0
    grace: float = 0.0
    stage: DirectorStage = DirectorStage.WAITING
    attempt: int = -1
    reason: str = "started"
    """Why the next attempt begins."""
    nodes: NodeTable = NodeTable()
    came: int = 0
    """How many nodes have arrived, ever."""
    expected: int = 0
    """How many nodes the engine has granted."""
    asked: int = 0
    """How many replacements for lost nodes were requested and have not arrived."""
    lost: str = ""
    """Which node was lost last, and how."""
    due: float = _NEVER
    """When `Trigger.TICK` is needed (monotonic)."""
    regroups: bool = False
    """Whether the ranks regroup at `due`, instead of being replaced."""
    released: bool | None = None
    """Whether the ranks of this attempt were released as succeeded; None if they were not released."""
    others: frozenset[int] = frozenset()
    """Ranks that are stopped at the release."""
    error: str = ""

    @property
    def taking_part(self) -> dict[str, DirectedNode]:
        attempt = self.attempt
        return {name: node for name, node in self.nodes.items() if node.attempt == attempt >= 0}


# Events


class NodeCame(msgspec.Struct, frozen=True):
    """A node has been admitted and checked; with `nproc` ranks, at `place`."""

    node: str
    nproc: int
    place: int


class NodesExpected(msgspec.Struct, frozen=True):
    """The engine has granted so many nodes."""

    count: int


class NodeLost(msgspec.Struct, frozen=True):
    """A node is lost, or leaves; `why` follows its name, after "was lost: it" where it did not ask to."""

    node: str
    why: str
    asked: bool = False


AboutRanks: TypeAlias = wire.AwaitingRendezvous | wire.Workers | wire.Gone | wire.NodeEnded


class NodeReported(msgspec.Struct, frozen=True):
    """A message of a node about its agent and its ranks of this group."""

    node: str
    message: AboutRanks


class Ordered(msgspec.Struct, frozen=True):
    """The lifecycle has decided what the ranks of an attempt do."""

    attempt: int
    order: Order | ReleaseWorkers


class EngineEnded(msgspec.Struct, frozen=True):
    """The engine takes the nodes back, or cannot place them."""

    why: str


_OfNodes: TypeAlias = NodeCame | NodeLost | NodeReported
DirectorEvent: TypeAlias = _OfNodes | NodesExpected | Ordered | EngineEnded | Trigger


# Actions


class BeginAttempt(msgspec.Struct, frozen=True):
    """Begin an attempt; the group learns of it before any node does. `nodes` are in the order of ranks.

    `kept` maps the numbers of ranks that go on to those in the attempt before; all others are new. Those that
    take the place of ranks that have ended are in `replaced`, with the numbers of these.
    """

    number: int
    world_size: int
    reason: str
    nodes: tuple[str, ...]
    kept: Mapping[int, int] | None = None
    replaced: Mapping[int, int] = {}


class AllStarted(msgspec.Struct, frozen=True):
    """All ranks of an attempt have been started."""

    number: int
    world_size: int


class NodeOrder(msgspec.Struct, frozen=True):
    """Send a message to a node."""

    node: str
    message: wire.ToNode


class AskForNodes(msgspec.Struct, frozen=True):
    """Ask the engine for more nodes."""

    count: int


class DropNode(msgspec.Struct, frozen=True):
    """Drop a node, and treat it as lost."""

    node: str
    why: str


class EndAgent(msgspec.Struct, frozen=True):
    """Report the end of all agents; `error` says why, "" if they were released or stopped."""

    error: str = ""


DirectorAction: TypeAlias = (
    BeginAttempt | AllStarted | NodeOrder | AskForNodes | DropNode | EndAgent | Noticed | Trigger
)
"""A notice and `Trigger.NODE_ARRIVED` are for the lifecycle: it decides when a new node joins persistent
ranks."""


def step(
    state: DirectorState, event: DirectorEvent, now: float
) -> tuple[DirectorState, tuple[DirectorAction, ...]]:
    """Return the state after an event, and the actions that follow; `now` is monotonic."""
    machine = _Director(state, now)
    if state.stage is not DirectorStage.ENDED:
        machine.take(event)
    return machine.state, tuple(machine.actions)


class _Director(Machine[DirectorState, DirectorAction]):
    def take(self, event: DirectorEvent) -> None:
        match event:
            case Ordered():
                self.ordered(event)
            case NodeCame():
                self.came(event)
            case NodesExpected(count):
                self.set(expected=count)
                self.begin_if_enough()
            case EngineEnded(why):
                if not self.state.released:
                    self.end(why)
            case Trigger():
                self.tick()
            case NodeLost(name) | NodeReported(name) if name not in self.state.nodes:
                pass  # the node has been dropped
            case NodeLost(name, why, asked):
                self.lost(name, self.state.nodes[name], why, asked=asked)
            case NodeReported(name, message):
                self.reported(name, self.state.nodes[name], message)

    def reported(self, name: str, node: DirectedNode, message: AboutRanks) -> None:
        match message:
            case wire.AwaitingRendezvous(after=after, error=error):
                if error:
                    self.act(Noticed(text=f"node {name}: {error}"))
                if after == node.attempt:
                    self.set_node(name, waits=True, started=False)
                    self.rendezvous_awaited(name)
            case wire.Workers(attempt=attempt):
                if attempt == node.attempt == self.state.attempt and not node.waits:
                    self.set_node(name, started=True)
                    self.started(name)
            case wire.Gone(exited=exited):
                # In a fresh group the lifecycle releases all ranks.
                if self.state.persistent and node.attempt == self.state.attempt:
                    dead = node.dead | {exited.rank - node.base}
                    self.set_node(name, dead=dead, leaves=node.leaves or exited.expected)
                    if not exited.expected and not self.any_alive():
                        self.restart_soon("failure")
            case wire.NodeEnded(error=error):
                self.set_node(name, ended=True, waits=False, started=False)
                self.has_ended(name, error)

    def set_node(self, name: str, **changes: Any) -> None:
        nodes = self.state.nodes
        self.set(nodes=nodes.changed({name: replace(nodes[name], **changes)}))

    def order(self, node: str, message: wire.ToNode) -> None:
        self.act(NodeOrder(node, message))

    def any_alive(self) -> bool:
        """Whether a rank of this attempt has not ended; the lifecycle then orders to regroup."""
        return self.state.nodes.count("alive", self.state.attempt) > 0

    # --- nodes come, and join a rendezvous -------------------------------------------------------

    def came(self, event: NodeCame) -> None:
        state = self.state
        if state.stage is DirectorStage.ENDING:
            return
        node = DirectedNode(event.nproc, event.place, state.came)
        nodes = state.nodes.changed({event.node: node})
        self.set(nodes=nodes, came=state.came + 1, asked=max(state.asked - 1, 0))

    def rendezvous_awaited(self, name: str) -> None:
        """Handle a node whose agent waits for a rendezvous, with or without an order."""
        state = self.state
        match state.stage:
            case DirectorStage.WAITING:
                self.begin_if_enough()
            case DirectorStage.LEAVING if state.released:
                # All values have arrived: there is nothing left to do for an agent at its next rendezvous.
                self.order(name, wire.EndGroup(group=state.group))
            case DirectorStage.RENDEZVOUS | DirectorStage.RUNNING if (
                state.nodes[name].attempt == state.attempt
            ):
                if state.persistent:
                    self.restart_soon("failure")
                self.go_on_if_all_wait()
            case DirectorStage.RUNNING if state.persistent:
                self.act(Trigger.NODE_ARRIVED)
            case DirectorStage.RESTARTING | DirectorStage.LEAVING:
                self.go_on_if_all_wait()
            case _:
                pass

    def begin_if_enough(self) -> None:
        """Begin an attempt if all expected nodes wait, or if enough nodes have waited long enough."""
        state = self.state
        if state.stage is not DirectorStage.WAITING:
            return
        count = state.nodes.count("waits")
        if count < state.least:
            if not state.asked:
                self.set(due=_NEVER)
            return
        wanted = min(max(state.least, state.expected, len(state.nodes)), state.most)
        if count >= wanted or self.now >= state.due:
            waiting = [(name, node) for name, node in state.nodes.items() if node.waits]
            waiting.sort(key=lambda each: (each[1].order, each[0]))
            self.begin_attempt([name for name, _ in waiting[: state.most]])
        else:
            self.set(due=min(state.due, self.now + _LAST_CALL_SECONDS))

    def begin_attempt(self, names: list[str], *, goes_on: bool = False) -> None:
        """Begin an attempt of these nodes; with `goes_on`, they keep the ranks that they have."""
        state, number = self.state, self.state.attempt + 1
        nodes: dict[str, DirectedNode] = {}
        kept, replaced = dict[int, int](), dict[int, int]()
        world_size = 0
        for name in names:
            node = state.nodes[name]
            goes_on_here = goes_on and node.started
            nodes[name] = replace(
                node,
                attempt=number,
                base=world_size,
                waits=False,
                started=goes_on_here and not node.dead,
                dead=frozenset(),
                leaves=False,
            )
            for place in range(node.nproc if goes_on_here else 0):
                (replaced if place in node.dead else kept)[world_size + place] = node.base + place
            world_size += node.nproc
        self.set(
            nodes=state.nodes.changed(nodes),
            attempt=number,
            stage=DirectorStage.RUNNING if goes_on else DirectorStage.RENDEZVOUS,
            due=_NEVER,
            regroups=False,
            released=None,
            others=frozenset(),
        )
        kept_if_any = kept if goes_on else None
        self.act(BeginAttempt(number, world_size, state.reason, tuple(names), kept_if_any, replaced))
        for node_rank, (name, node) in enumerate(nodes.items()):
            new = tuple(rank for rank in replaced if node.base <= rank < node.base + node.nproc)
            goes_on_here = goes_on and state.nodes[name].started
            self.order(
                name,
                self.attempt_order(node, node_rank, len(nodes), world_size, new if goes_on_here else None),
            )
        if goes_on:
            self.report_if_all_started()

    def attempt_order(
        self,
        node: DirectedNode,
        node_rank: int,
        node_count: int,
        world_size: int,
        replaced: tuple[int, ...] | None,
    ) -> wire.CompleteRendezvous | wire.AdoptRanks:
        """Return the order that begins an attempt on a node; `replaced` is None if it has no ranks."""
        state = self.state
        if replaced is not None:
            return wire.AdoptRanks(
                group=state.group,
                attempt=state.attempt - 1,
                number=state.attempt,
                node_rank=node_rank,
                node_count=node_count,
                base_rank=node.base,
                world_size=world_size,
                replaced=replaced,
            )
        return wire.CompleteRendezvous(
            group=state.group,
            attempt=state.attempt,
            node_rank=node_rank,
            node_count=node_count,
            base_rank=node.base,
            world_size=world_size,
            store=state.store,
        )

    def report_if_all_started(self) -> bool:
        nodes, attempt = self.state.nodes, self.state.attempt
        if nodes.count("started", attempt) < nodes.count("nodes", attempt):
            return False
        world_size = sum(each.nproc for each in self.state.taking_part.values())
        self.act(AllStarted(attempt, world_size))
        return True

    def regroup(self) -> None:
        """Go on with the remaining ranks, with others in place of dead ones, and those of waiting nodes."""
        state = self.state
        taking_part = state.taking_part
        there = sorted((node.base, name) for name, node in taking_part.items() if node.started)
        waiting = sorted((node.order, name) for name, node in state.nodes.items() if node.waits)
        names = [*(name for _, name in there), *(name for _, name in waiting)][: state.most]
        if any(node.waits for node in taking_part.values()):
            self.restart(state.reason)
        elif len(there) < len(taking_part) or any(node.leaves for node in taking_part.values()):
            self.set(due=self.now + _TOGETHER_SECONDS)  # one is still starting ranks, or about to be lost
        elif not there or len(names) < state.least or not self.any_alive():
            self.restart(state.reason)
        else:
            self.begin_attempt(names, goes_on=True)

    def started(self, name: str) -> None:
        """Handle the start of a node's ranks; repeat orders that could not reach them before."""
        state = self.state
        match state.stage:
            case DirectorStage.RENDEZVOUS:
                if self.report_if_all_started():
                    self.set(stage=DirectorStage.RUNNING)
                    if state.persistent and state.nodes.count("waits"):
                        self.act(Trigger.NODE_ARRIVED)
            case DirectorStage.RUNNING:
                self.report_if_all_started()
            case DirectorStage.RESTARTING:
                self.order(name, wire.Restart(group=state.group, attempt=state.attempt))
            case DirectorStage.LEAVING:
                self.order_release(name)
            case _:
                pass

    # --- ranks and nodes end ---------------------------------------------------------------------

    def lost(self, name: str, node: DirectedNode, why: str, *, asked: bool) -> None:
        state = self.state
        rest = state.nodes.changed({name: None})
        how = why if asked else f"was lost: it {why}"
        self.set(nodes=rest, expected=max(state.expected - 1, 0), lost=f"node {name} {how}")
        took_part = node.attempt == state.attempt >= 0
        match state.stage:
            case DirectorStage.WAITING:
                self.replace_lost()
                self.begin_if_enough()
            case DirectorStage.RENDEZVOUS if took_part:
                self.restart("membership")
            case DirectorStage.RUNNING if took_part and state.persistent:
                if len(rest) < state.least:
                    self.restart_soon("failure")
                else:
                    self.ask_for(min(1, state.replacements_left))
                    if not node.started:
                        self.regroup_soon()  # the group has never known the lost ranks
                self.go_on_if_all_wait()
            case DirectorStage.RUNNING | DirectorStage.RESTARTING | DirectorStage.LEAVING:
                self.go_on_if_all_wait()
            case DirectorStage.ENDING:
                self.end_if_all_have()
            case _:
                pass

    def restart_soon(self, reason: str) -> None:
        """Replace persistent ranks, once the peers of an ended one have had time to report their errors."""
        if self.state.stage in _WITH_RANKS and (self.state.regroups or self.state.due == _NEVER):
            self.set(due=self.now + _LAST_WORDS_SECONDS, reason=reason, regroups=False)

    def regroup_soon(self) -> None:
        """Regroup once all lost nodes are likely known, unless the ranks are being replaced."""
        if self.state.stage is DirectorStage.RUNNING and self.state.due == _NEVER:
            self.set(due=self.now + _TOGETHER_SECONDS, reason="membership", regroups=True)

    def restart(self, reason: str) -> None:
        """End the ranks of this attempt, and start new ones."""
        state = self.state
        self.set(stage=DirectorStage.RESTARTING, reason=reason, due=_NEVER, regroups=False)
        for name, node in state.taking_part.items():
            if node.started:
                self.order(name, wire.Restart(group=state.group, attempt=state.attempt))
        self.go_on_if_all_wait()

    def go_on_if_all_wait(self) -> None:
        """Begin again once no node has ranks of this attempt, if restarts are left."""
        state = self.state
        taking_part = state.nodes.count("nodes", state.attempt)
        if state.released:
            if state.nodes.count("ended", state.attempt) == taking_part:
                self.end()
            return
        if state.nodes.count("waits", state.attempt) < taking_part:
            return
        if state.stage is not DirectorStage.RESTARTING:
            self.set(reason="failure")
        if self.state.reason == "failure":
            if not state.restarts_left:
                self.end()
                return
            self.set(restarts_left=state.restarts_left - 1)
        self.set(stage=DirectorStage.WAITING, due=_NEVER)
        self.replace_lost()
        self.begin_if_enough()

    def replace_lost(self) -> None:
        """Ask for replacements of lost nodes; end if no more are allowed."""
        state = self.state
        if len(state.nodes) >= state.least or (state.patient and state.attempt < 0):
            return
        missing = max(state.least - len(state.nodes) - state.asked, 0)
        if missing > state.replacements_left:
            # In a run that ends so, the failures of the lost node's ranks say why.
            self.end("" if state.reason == "failure" and not state.persistent else state.lost)
            return
        self.set(due=self.now + state.join_timeout)
        self.ask_for(missing)

    def ask_for(self, count: int) -> None:
        state = self.state
        if count:
            self.set(replacements_left=state.replacements_left - count, asked=state.asked + count)
            self.act(AskForNodes(count))

    def tick(self) -> None:
        state = self.state
        if self.now < state.due:
            return
        match state.stage:
            case DirectorStage.WAITING:
                if state.nodes.count("waits") < state.least:
                    limit = f"no other node replaced it within {state.join_timeout:g} s"
                    self.end(f"{state.lost}, and {limit}")
                self.begin_if_enough()
            case DirectorStage.RUNNING if state.regroups:
                self.regroup()
            case DirectorStage.RENDEZVOUS | DirectorStage.RUNNING:
                self.restart(state.reason)
            case DirectorStage.ENDING:
                left = [name for name, node in state.nodes.items() if not node.ended]
                self.act(*(DropNode(name, "did not end a group in time") for name in left))
                self.set(nodes=NodeTable())
                self.end_if_all_have()
            case _:
                self.set(due=_NEVER)

    # --- orders, and the end ---------------------------------------------------------------------

    def ordered(self, event: Ordered) -> None:
        state, order = self.state, event.order
        if order is Order.STOP_AGENT:
            self.end()
            return
        early = state.stage in (DirectorStage.WAITING, DirectorStage.RESTARTING)
        if early and isinstance(order, ReleaseWorkers) and order.succeeded:
            self.end()  # no job is left, so no ranks are needed
        if event.attempt != state.attempt or state.stage not in _WITH_RANKS:
            return
        match order:
            case Order.RESTART_AGENT:
                self.restart("failure")
            case Order.REJOIN_NODES:
                self.restart("membership")
            case Order.REGROUP_NODES:
                self.regroup_soon()
            case ReleaseWorkers(succeeded, others):
                self.set(stage=DirectorStage.LEAVING, released=succeeded, others=others, due=_NEVER)
                for name, node in state.taking_part.items():
                    if node.started:
                        self.order_release(name)
                    elif node.waits and succeeded:
                        self.order(name, wire.EndGroup(group=state.group))
                self.go_on_if_all_wait()

    def order_release(self, name: str) -> None:
        state = self.state
        release = wire.Release(
            group=state.group,
            attempt=state.attempt,
            succeeded=bool(state.released),
            others=tuple(sorted(state.others)),
        )
        self.order(name, release)

    def has_ended(self, name: str, error: str) -> None:
        state = self.state
        if state.stage is DirectorStage.ENDING:
            self.end_if_all_have()
        elif state.released:
            self.go_on_if_all_wait()
        elif state.persistent and state.stage is DirectorStage.RUNNING and len(state.nodes) > state.least:
            # One that comes late may not be able to have ranks: the others go on without it.
            self.act(DropNode(name, f"ended its ranks: {error}" if error else "has ended its ranks"))
        else:
            self.end(f"node {name} ended its ranks: {error}" if error else f"node {name} has ended its ranks")

    def end(self, error: str = "") -> None:
        """End the group on all nodes that have it."""
        state = self.state
        if state.stage is DirectorStage.ENDING:
            return
        self.set(stage=DirectorStage.ENDING, due=self.now + state.grace + _END_SECONDS, error=error)
        for name, node in state.nodes.items():
            if not node.ended:
                self.order(name, wire.EndGroup(group=state.group))
        self.end_if_all_have()

    def end_if_all_have(self) -> None:
        if self.state.nodes.count("ended") == len(self.state.nodes):
            self.set(stage=DirectorStage.ENDED, due=_NEVER)
            self.act(EndAgent(self.state.error))
