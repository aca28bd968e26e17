"""A fleet against nodes that a test plays, on real sockets: who is let in, who meets, who is lost."""

from __future__ import annotations

import math
import platform
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import msgspec
import pytest
import torch
import zmq

from nblaunch._errors import LaunchError, OptionError, RunFailedError, RunPreemptedError
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.capture import pickling, shared_memory
from nblaunch.capture.own_modules import digest_of
from nblaunch.group.lifecycle import GroupEvent, NodeLeaving, Preemption, PrepareChanged, Trigger
from nblaunch.host import wire
from nblaunch.host.hub import Hub
from nblaunch.host.join import HERE_PLACE, place_of
from nblaunch.host.link import encrypted
from nblaunch.host.reach import Probe, try_all
from nblaunch.host.settings import AgentSettings, Worker
from nblaunch.nodes import fleet as fleet_module
from nblaunch.nodes.engine import Allocation, Engine, NodeProgram, NodeRequest, ProgramStatus, own_address
from nblaunch.nodes.fleet import FleetGroup, FleetSettings, NodeFleet
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol.state import RunState

if TYPE_CHECKING:
    from nblaunch.group.group import WorkerGroup

SECONDS = 20
GONE = "is gone (killed, or out of reach)"
HAS = wire.Inventory(
    python=platform.python_version(),
    torch=str(torch.__version__),
    nblaunch="",
    boot="b",
    backend="gloo",
    device_type="cpu",
)
ON_GPUS = msgspec.structs.replace(HAS, backend="cpu:gloo,cuda:nccl", device_type="cuda")
PREPARE = messages.Prepare(environ=(b"SECRET=1",), cwd=b"/here", path=())

M = TypeVar("M")


def wait_until(met: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := met()):
        assert time.monotonic() < deadline, what or "it did not come about"
        time.sleep(0.005)
    return found


class Events:
    """What a group is told, on the hub's thread; it says no more than the group has to."""

    def __init__(self, group: str = "g", *, keep: bool = False) -> None:
        self.group, self.keep, self.attempt = group, keep, 0
        self.kept: Mapping[int, int] | None = None
        self.ranks: set[int] = set()
        self.backend = ""
        self.life = SimpleNamespace(changing=False, saving=False)
        self.logs = SimpleNamespace(wrote=lambda _rank: None)
        self.state = RunState.fresh(0)
        self.told: list[tuple[Any, ...]] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.peers: FleetGroup
        self.settings: AgentSettings

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [each[1:] for each in self.told if each[0] == kind]

    def receive(self, message: messages.FromRank, data: bytes | None = None) -> None:
        self.told.append(("message", message, data))

    def rank_gone(self, exited: messages.Exited) -> None:
        self.told.append(("gone", exited.rank, exited.exitcode, exited.reason))

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        self.told.append(("stopped", sorted(ranks)))

    def feed(self, event: GroupEvent) -> None:
        match event:
            case NodeLeaving(name, asked, enough, ranks, address):
                self.told.append(("leaves", name, asked, enough))
                assert ranks
                assert not address, "it is the runtime's own"
                if enough and self.keep:
                    self.peers.regroup()
                elif enough:
                    self.peers.rejoin()
                self.life.changing = enough and not self.keep
            case Trigger.NODE_ARRIVED:
                self.told.append(("waits",))
                self.peers.regroup()
            case messages.EngineStatus(state=state, joined=joined, wanted=wanted):
                self.told.append(("said", state, joined, wanted))
            case PrepareChanged(backend, device_type):
                self.told.append(("placed", backend, device_type))
            case Preemption(why, seconds):
                self.told.append(("preempted", why, seconds))
            case messages.Noticed(text=text):
                self.told.append(("noted", text))
            case _:
                raise AssertionError(event)

    def attempt_starting(  # noqa: PLR0913 - as called
        self,
        number: int,
        world_size: int,
        reason: str,
        *,
        backend: str = "",  # noqa: ARG002 - as called
        kept: Mapping[int, int] | None = None,
        replaced: Mapping[int, int] | None = None,
    ) -> None:
        if kept is None:
            self.peers.begin_attempt()
        self.attempt = number
        self.told.append(("attempt", number, world_size, reason))
        self.kept, self.replaced, self.ranks = kept, replaced, set(kept or ())

    def attempt_started(
        self, number: int, world_size: int, workers: tuple[Worker, ...], *, remote: bool = False
    ) -> None:
        if remote:
            self.ranks |= {each.rank for each in workers}
            self.told.append(("workers", [each.rank for each in workers]))
        else:
            assert not workers, "they have been told"
            self.told.append(("started", number, world_size, sorted(self.ranks)))

    def agent_ended(self, error: BaseException | None) -> None:
        self.error = error
        self.peers.close(succeeded=error is None)
        self.ended.set()

    def measured(self, usages: Mapping[int, messages.Usage]) -> None:
        self.told.append(("measured", dict(usages)))

    def stacks_read(self, stacks: Mapping[int, str]) -> None:
        self.told.append(("stacks", stacks))


class Hosts(Allocation):
    """Hosts that are granted at once; what is to run on them, the test plays."""

    released = True

    def __init__(self, request: NodeRequest) -> None:
        self.request = request
        self.programs: list[NodeProgram] = []
        self.state = messages.EngineState.GRANTED
        self.cancelled = threading.Event()
        self.lost: set[int] = set()
        """The places whose programs have ended."""

    def status(self) -> messages.EngineStatus:
        hosts = tuple(f"h{letter}" for letter in "ABCDEFGH"[: self.request.most])
        words = "CANCELLED" if self.state is messages.EngineState.ENDED else ""
        return messages.EngineStatus(engine="played", state=self.state, id="7", words=words, hosts=hosts)

    def start(self, program: NodeProgram) -> str:
        self.programs.append(program)
        self.lost = set()
        return ""

    def statuses(self) -> tuple[ProgramStatus, ...]:
        places = range(self.request.most if self.programs else 0)
        return tuple(ProgramStatus("h", place, place not in self.lost) for place in places)

    def cancel(self) -> None:
        self.cancelled.set()


class Played(Engine):
    """An engine that starts nothing."""

    name: ClassVar[str] = "played"
    asked: ClassVar[list[Hosts]] = []

    @staticmethod
    def check(request: NodeRequest) -> None: ...

    @staticmethod
    def address(request: NodeRequest) -> str:  # noqa: ARG004 - as every engine has it
        return "127.0.0.1"

    @staticmethod
    def at_end(request: NodeRequest) -> tuple[str, ...]:
        return ("give-back", request.name)

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        Played.asked.append(Hosts(request))
        return Played.asked[-1]


class PlayedHere(Played):
    """What places the node of this machine."""

    asked: ClassVar[list[Hosts]] = []

    @staticmethod
    def at_end(request: NodeRequest) -> tuple[str, ...]:  # noqa: ARG004 - as every engine has it
        return ()

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        PlayedHere.asked.append(Hosts(request))
        return PlayedHere.asked[-1]


class Node:
    """A node program, by hand."""

    def __init__(self, endpoint: str, key: bytes) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        encrypted(self.socket, key, "node")
        self.socket.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.connect(f"tcp://{endpoint}")
        self.got: list[Any] = []
        self.parts: dict[int, bytes] = {}
        self.name = ""
        self.ranks: list[int] = []
        self.tries: Callable[[], None]
        """What it does when the others are to be tried."""
        self.answering: threading.Thread

    def send(self, message: wire.FromNode, data: bytes | None = None) -> None:
        self.socket.send_multipart([wire.encode(message), *([] if data is None else [data])])

    def wait_for(self, kind: type[M], seconds: float = SECONDS, **fields: Any) -> M:
        deadline = time.monotonic() + seconds
        while True:
            for each in self.got:
                if isinstance(each, kind) and all(getattr(each, name) == fields[name] for name in fields):
                    self.got.remove(each)
                    return each
            left = max(deadline - time.monotonic(), 0)
            assert self.socket.poll(round(left * 1000)), f"no {kind.__name__} among {self.got}"
            first, *rest = self.socket.recv_multipart()
            message = wire.decode_to_node(first)
            if isinstance(message, wire.Piece):
                self.parts[message.number] = self.parts.get(message.number, b"") + rest[0]
            self.got.append(message)

    def ask(self, name: str, place: int = -1, **changed: Any) -> None:
        plain = wire.Arriving(name=name, nproc=2, address="127.0.0.1", data="", inventory=HAS, place=place)
        self.send(msgspec.structs.replace(plain, **changed))

    def await_rendezvous(self, after: int = -1, group: str = "g") -> None:
        self.send(wire.AwaitingRendezvous(group=group, after=after))

    def start_ranks(self, group: str = "g", attempt: int = 0) -> wire.CompleteRendezvous:
        """Do what it is told at a rendezvous."""
        meet = self.wait_for(wire.CompleteRendezvous, group=group, attempt=attempt)
        records = tuple(Worker(meet.base_rank + local, local, 1000 + local) for local in range(2))
        self.send(wire.Workers(group=group, attempt=attempt, workers=records))
        self.ranks = [each.rank for each in records]
        return meet

    def greet(self, rank: int, size: int = 4, *, group: str = "g", attempt: int = 0) -> messages.Hello:
        """Let a rank say hello."""
        hello = messages.Hello(
            rank=rank, token="", attempt=attempt, local_rank=0, world_size=size, node=self.name, pid=1
        )
        self.say(hello, group=group, attempt=attempt)
        return hello

    def say(self, *said: messages.FromRank, group: str = "g", attempt: int = 0) -> None:
        data = tuple(messages.encode(each) for each in said)
        self.send(wire.RankMessages(group=group, attempt=attempt, data=data))

    def wrote(self, rank: int, data: bytes, *, attempt: int = 0) -> None:
        self.send(wire.Wrote(group="g", attempt=attempt, rank=rank, stream=messages.Stream.STDOUT), data)

    def lost(self, rank: int, exitcode: int, *, attempt: int = 0) -> None:
        exited = messages.Exited(rank=rank, exitcode=exitcode, time=0.0)
        self.send(wire.Gone(group="g", attempt=attempt, exited=exited))

    def end(self, group: str = "g", error: str = "") -> None:
        self.send(wire.NodeEnded(group=group, error=error))

    def die(self) -> None:
        self.context.destroy(linger=0)


class Fleets:
    """Makes fleets and nodes, and ends them."""

    def __init__(self, hub: Hub, directory: Path) -> None:
        self.hub, self.directory = hub, directory
        self.made: list[NodeFleet] = []
        self.nodes: list[Node] = []
        self.at_end: list[tuple[str, ...]] = []
        self.notices: list[str] = []

    def fleet(self, least: int = 2, most: int | None = None, **options: Any) -> NodeFleet:
        most = most or least
        request = NodeRequest(
            least=least, most=most, nproc=2, name="nblaunch-1", environ={}, cwd="/", python="python"
        )
        fleet = NodeFleet(
            self.hub,
            Played,
            request,
            directory=self.directory,
            notify=self.notices.append,
            at_end=self.registered,
            conf=FleetSettings(least=least, most=most, options=LaunchOptions(nproc_per_node=2, **options)),
        )
        self.made.append(fleet)
        return fleet

    def registered(self, command: tuple[str, ...]) -> Callable[[], None]:
        self.at_end.append(command)
        return lambda: self.at_end.remove(command)

    def group(self, fleet: NodeFleet, name: str = "g", *, keep: bool = False, **changed: Any) -> Events:
        """Connect a group, and start it."""
        events = Events(name, keep=keep)
        settings = AgentSettings(
            nproc=2,
            options=replace(fleet.conf.options, monitor_interval=0.02, grace=0.5, shutdown_timeout=5),
            run_id="r",
            log_dir=self.directory,
        )
        events.settings = replace(settings, options=replace(settings.options, **changed))
        peers = fleet.connect(cast("WorkerGroup", events), self.directory)
        assert isinstance(peers, FleetGroup)
        events.peers = peers
        peers.start()
        return events

    def program(self) -> tuple[str, bytes]:
        """Return where a node connects, and its key: not in what the engine starts."""
        program = wait_until(lambda: Played.asked and Played.asked[-1].programs)[-1]
        assert program.arguments[:3] == ("-m", "nblaunch", "join")
        key = program.stdin.strip()
        assert key.decode() not in " ".join(program.arguments)
        return program.arguments[3], key

    def node(self, *, key: bytes | None = None) -> Node:
        endpoint, right = self.program()
        self.nodes.append(Node(endpoint, right if key is None else key))
        return self.nodes[-1]

    def come(self, name: str, place: int = -1, *, group: str = "g", **changed: Any) -> Node:
        """Let a node come, which serves a group at once."""
        node = self.node()
        node.ask(name, place, **changed)
        node.name = node.wait_for(wire.Admitted).name
        node.wait_for(wire.OpenGroup, group=group)
        node.await_rendezvous(group=group)
        return node

    def run_two(self, events: Events) -> tuple[Node, Node]:
        """Have two nodes run a group."""
        nodes = self.come("hA", 0), self.come("hB", 1)
        for each in nodes:
            each.start_ranks()
        wait_until(lambda: events.of("started"))
        return nodes


@pytest.fixture
def fleets(tmp_path) -> Iterator[Fleets]:
    directory = RuntimeDirectory()
    hub = Hub(directory)
    made = Fleets(hub, tmp_path)
    Played.asked.clear()
    PlayedHere.asked.clear()
    yield made
    for node in made.nodes:
        node.die()
    for fleet in made.made:
        fleet.close()
    hub.close()
    directory.remove()


# --- one group, from its start to its end ------------------------------------------------------------


def test_nodes_meet_in_the_order_of_their_places_and_the_group_knows_all_of_it(fleets):
    fleet = fleets.fleet()
    events = fleets.group(fleet)
    second, first = fleets.come("hB", 1), fleets.come("hA", 0)
    meets = [each.start_ranks() for each in (first, second)]
    assert [(each.node_rank, each.base_rank, each.world_size) for each in meets] == [(0, 0, 4), (1, 2, 4)]
    wait_until(lambda: events.of("started"))
    assert events.of("attempt") == [(0, 4, "started")]
    assert sorted(events.of("workers")) == [([0, 1],), ([2, 3],)]
    assert events.of("started") == [(0, 4, [0, 1, 2, 3])]
    assert events.of("placed") == [("gloo", "cpu")]
    assert events.of("said")[-1][1:] == (2, 2)
    (told,) = {each.store for each in meets}
    store = torch.distributed.TCPStore(told[0], told[1], is_master=False)
    store.set("reached", "1")


def test_one_frame_carries_what_several_ranks_get_and_nothing_of_this_machine(fleets):
    events = fleets.group(fleets.fleet())
    nodes = fleets.run_two(events)
    peers = events.peers

    def send() -> None:
        assert [peers.send(rank, PREPARE) for rank in range(5)] == [True] * 4 + [False]
        peers.release(succeeded=True, others=frozenset())
        for rank in range(4):
            peers.send(rank, messages.Leave())
            peers.send(rank, messages.Proceed())

    fleets.hub.run(send)
    for node in nodes:
        frames = [node.wait_for(wire.ForRanks) for _ in range(5)]
        assert frames[0].ranks == tuple(node.ranks)
        assert messages.decode_to_rank(frames[0].data, "test") == msgspec.structs.replace(
            PREPARE, environ=(), cwd=b""
        )
        kinds: list[type[messages.ToRank]] = [
            type(messages.decode_to_rank(each.data, "test")) for each in frames[1:]
        ]
        assert kinds == [messages.Leave, messages.Proceed, messages.Leave, messages.Proceed]
        assert node.wait_for(wire.Release).succeeded


def test_what_ranks_send_and_print_and_return_comes_home(fleets):
    events = fleets.group(fleets.fleet())
    node, _ = fleets.run_two(events)
    node.wrote(0, b"from afar\n")
    hello = node.greet(0)
    node.send(wire.Piece(group="g", number=1, offset=0, total=5), b"whole")
    node.say(messages.Returned(rank=0, value=messages.Payload(sizes=(5,), path="parcel:1"), time=1.0))
    node.send(wire.RanksMeasured(group="g", attempt=0, usages={0: messages.Usage(cpu_percent=1.0, memory=2)}))
    wait_until(lambda: events.of("measured"))
    first, second = (message for message, _ in events.of("message"))
    assert first == hello
    assert isinstance(second, messages.Returned)
    assert second.value.pid
    assert (events.peers.log_directory / "hA-0" / "stdout.log").read_bytes() == b"from afar\n"


def test_a_payload_goes_to_each_node_once(fleets):
    events = fleets.group(fleets.fleet())
    nodes = fleets.run_two(events)
    with shared_memory.put(pickling.dumps(b"x" * 300_000), lambda: fleets.directory) as held:
        job = messages.Dispatch(job=messages.CellJob("1", "c", "Cell"), payload=held.payload)
        fleets.hub.run(lambda: [events.peers.send(rank, job) for rank in range(4)] and None)
        for node in nodes:
            order = node.wait_for(wire.ForRanks)
            ticket = messages.decode_to_rank(order.data, "test").payload
            assert order.ranks == tuple(node.ranks)
            assert len(node.parts[int(ticket.path.rpartition(":")[2])]) > 300_000


def test_a_group_ends_with_its_nodes_and_its_fleet_gives_all_back(fleets):
    fleet = fleets.fleet()
    events = fleets.group(fleet)
    nodes = fleets.run_two(events)
    assert fleets.at_end == [("give-back", "nblaunch-1")]
    events.peers.release(succeeded=True, others=frozenset())
    for node in nodes:
        node.wait_for(wire.Release)
        node.end()
    assert events.ended.wait(SECONDS)
    assert events.error is None
    closing = threading.Thread(target=fleet.close)
    closing.start()
    for node in nodes:
        assert node.wait_for(wire.Finish).succeeded
        assert not Played.asked[0].cancelled.is_set(), "the nodes end before the engine ends them"
    for node in nodes:
        node.die()
    closing.join(SECONDS)
    assert Played.asked[0].cancelled.is_set()
    assert fleets.at_end == []
    with pytest.raises(LaunchError, match="given back"):
        fleets.group(fleet)


def test_a_stop_while_nodes_are_awaited_ends_the_group_at_once(fleets):
    fleet = fleets.fleet()
    events = fleets.group(fleet)
    fleets.program()
    began = time.monotonic()
    events.peers.stop()
    assert events.ended.wait(1)
    fleet.close()
    assert Played.asked[0].cancelled.is_set()
    assert time.monotonic() - began < 1.5


def test_what_the_engine_has_not_back_is_left_to_the_command_for_the_end(fleets):
    fleet = fleets.fleet()
    fleets.group(fleet)
    fleets.program()
    Played.asked[0].released = False
    fleet.close()
    assert fleets.at_end == [("give-back", "nblaunch-1")]


def test_nothing_is_asked_for_that_would_not_be_given_back(fleets, monkeypatch):
    def registered(command: tuple[str, ...]) -> Callable[[], None]:
        msg = f"the keeper does not answer: {command[0]}"
        raise TimeoutError(msg)

    monkeypatch.setattr(fleets, "registered", registered)
    events = fleets.group(fleets.fleet())
    assert events.ended.wait(SECONDS)
    assert "the keeper does not answer: give-back" in str(events.error)
    assert Played.asked == []


def test_a_stop_before_the_start_asks_for_nothing(fleets):
    fleet = fleets.fleet()
    events = Events()
    events.settings = AgentSettings(2, LaunchOptions(), "r", fleets.directory)
    peers = fleet.connect(events, fleets.directory)
    assert isinstance(peers, FleetGroup)
    events.peers = peers
    events.peers.stop()
    assert events.ended.wait(SECONDS)
    events.peers.start()
    assert Played.asked == []


# --- who is let in -----------------------------------------------------------------------------------


def test_a_node_with_another_key_disturbs_nobody(fleets, caplog):
    events = fleets.group(fleets.fleet())
    stranger = fleets.node(key=b"k" * 64)
    stranger.ask("stranger")
    fleets.run_two(events)
    assert not stranger.socket.poll(0)
    assert "has not this run's join key" in caplog.text


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 3}, "hX has another version of nblaunch"),
        ({"inventory": msgspec.structs.replace(HAS, torch="1.0.0")}, "1.0.0: hX."),
        ({"inventory": msgspec.structs.replace(HAS, python="3.8.1")}, "3.8: hX."),
        ({"address": "10.0.0.7"}, "hX reaches the notebook from 10.0.0.7"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_by_name_and_the_others_go_on(fleets, changed, why):
    events = fleets.group(fleets.fleet())
    node = fleets.node()
    node.ask("hX", **changed)
    assert why in node.wait_for(wire.Refused).why
    fleets.run_two(events)


def test_one_node_too_many_is_refused(fleets):
    events = fleets.group(fleets.fleet())
    fleets.run_two(events)
    node = fleets.node()
    node.ask("hC")
    assert "hC: the run has all 2 nodes that it takes" in node.wait_for(wire.Refused).why


def test_what_differs_and_does_not_matter_is_noted_once(fleets):
    events = fleets.group(fleets.fleet())
    for name, glibc in (("hA", "2.31"), ("hB", "2.36")):
        fleets.come(name, inventory=msgspec.structs.replace(HAS, glibc=glibc))
    wait_until(lambda: events.of("attempt"))
    assert [text for (text,) in events.of("noted") if "glibc" in text] == ["glibc 2.31: hA; 2.36: hB."]


def test_what_the_engine_warns_of_is_noted_once(fleets, monkeypatch):
    status = Hosts.status
    monkeypatch.setattr(
        Hosts, "status", lambda hosts: msgspec.structs.replace(status(hosts), warning="open to all")
    )
    events = fleets.group(fleets.fleet())
    fleets.run_two(events)
    assert [text for (text,) in events.of("noted")] == ["open to all"]


def test_nodes_of_the_same_name_are_told_apart(fleets):
    fleets.group(fleets.fleet())
    assert [fleets.come("vm/1").name, fleets.come("vm/1").name] == ["vm_1", "vm_1-2"]


@pytest.mark.parametrize(
    ("backend", "inventories", "placed", "noted"),
    [
        ("auto", (ON_GPUS, ON_GPUS), ("cpu:gloo,cuda:nccl", "cuda"), 0),
        ("auto", (ON_GPUS, HAS), ("gloo", "cpu"), 1),
        ("gloo", (ON_GPUS, ON_GPUS), ("gloo", "cuda"), 0),
        # Nodes with more ranks than GPUs report the CPU: they do not know that these may share.
        ("cpu:gloo,cuda:gloo", (HAS, HAS), ("cpu:gloo,cuda:gloo", "cuda"), 0),
    ],
)
def test_ranks_use_what_all_nodes_have(fleets, backend, inventories, placed, noted):
    events = fleets.group(fleets.fleet(backend=backend))
    for name, inventory in zip(("hA", "hB"), inventories, strict=True):
        fleets.come(name, inventory=inventory)
    wait_until(lambda: events.of("attempt"))
    assert events.of("placed") == [placed]
    notes = [text for (text,) in events.of("noted") if "GPU for each rank" in text]
    assert notes == ["hB has no GPU for each rank: all ranks are on the CPU"] * noted


SHARED = "hA and hB are on one machine and share its GPU 0"


def come_on_one_gpu(fleets, *boots):
    for name, boot in zip(("hA", "hB"), boots, strict=True):
        fleets.come(name, inventory=msgspec.structs.replace(ON_GPUS, boot=boot, own_gpus=("0",)))


@pytest.mark.parametrize(
    ("backend", "boots", "placed", "noted"),
    [
        ("auto", ("m", "m"), ("gloo", "cpu"), [f"{SHARED}: all ranks are on the CPU"]),
        ("auto", ("m", "n"), ("cpu:gloo,cuda:nccl", "cuda"), []),
        ("cpu:gloo,cuda:gloo", ("m", "m"), ("cpu:gloo,cuda:gloo", "cuda"), []),
    ],
)
def test_nodes_that_share_a_gpu_do_without_nccl(fleets, backend, boots, placed, noted):
    events = fleets.group(fleets.fleet(backend=backend))
    come_on_one_gpu(fleets, *boots)
    wait_until(lambda: events.of("attempt"))
    assert events.of("placed") == [placed]
    assert [text for (text,) in events.of("noted")] == noted


def test_nodes_that_share_a_gpu_are_refused_by_name_for_nccl(fleets):
    events = fleets.group(fleets.fleet(backend="nccl"))
    come_on_one_gpu(fleets, "m", "m")
    wait_until(events.ended.is_set)
    assert isinstance(events.error, LaunchError)
    assert str(events.error).startswith(f"{SHARED}, and NCCL takes one rank for each GPU. Give each node")
    assert events.of("attempt") == []


def test_the_node_of_this_machine_has_the_first_ranks(fleets, monkeypatch):
    monkeypatch.setattr(fleet_module, "ProcessEngine", PlayedHere)
    fleets.group(fleets.fleet(here=True))
    # Another one of this machine, as `ssh=localhost` has it, may be first.
    there = fleets.come("hA", 0)
    here = fleets.come("here", HERE_PLACE)
    (asked,) = PlayedHere.asked
    assert (asked.request.python, place_of(asked.request.environ)) == (sys.executable, HERE_PLACE)
    assert [each.start_ranks().node_rank for each in (there, here)] == [1, 0]


def test_a_node_that_takes_itself_for_that_of_this_machine_is_one_like_others(fleets):
    events = fleets.group(fleets.fleet())
    nodes = fleets.come("hA", HERE_PLACE), fleets.come("hB", 1)
    assert sorted(each.start_ranks().node_rank for each in nodes) == [0, 1]
    wait_until(lambda: events.of("started"))


def test_a_fleet_listens_at_the_address_of_a_name_and_never_at_all_of_them(fleets):
    fleets.group(fleets.fleet(local_addr="localhost"))
    assert fleets.program()[0].rpartition(":")[0] in ("127.0.0.1", "[::1]")
    with pytest.raises(OptionError, match="every address of this machine"):
        fleets.group(fleets.fleet(local_addr="0.0.0.0"))  # noqa: S104 - what is refused


def test_modules_that_do_not_reach_a_node_are_sent_another_way_and_no_group_ends(fleets, tmp_path):
    fleet = fleets.fleet(1)
    events = fleets.group(fleet)
    content = b"#" * 100_000
    (tmp_path / "big.py").write_bytes(content)
    file = messages.CodeFile(root=0, path="big.py", digest=digest_of(content), size=len(content))
    code = messages.CodeTree("7", (bytes(tmp_path),))
    fleet.code.learn(messages.CodeManifest(code.tree, code.roots, (file,)))
    node = fleets.come("hA", 0, data="tcp://127.0.0.1:1")  # where nobody listens
    identity = node.socket.getsockopt(zmq.IDENTITY)
    fleets.hub.run(lambda: fleet.code.ask(identity, code))

    def asked() -> Any:
        node.wait_for(wire.HaveCode)
        node.send(wire.CodeLacking(tree=code.tree, digests=(file.digest,)))
        return node.wait_for(wire.CodeFiles)

    assert asked().number not in node.parts
    announced = asked()
    assert msgspec.msgpack.decode(node.parts[announced.number], type=dict[bytes, bytes]) == {
        file.digest: content
    }
    assert events.peers.due == math.inf, "the group does not end"


def test_a_connection_for_data_may_be_silent_for_as_long_as_the_other_one(fleets):
    fleet, found = fleets.fleet(node_timeout=40.0), []
    fleets.group(fleet)

    def look() -> None:
        assert fleet._data is not None
        sender = fleet._data._child(("hA", "tcp://127.0.0.1:1")).socket
        found.extend(sender.getsockopt(each) for each in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL))

    fleets.hub.run(look)
    assert found == [40_000, 40_000]


@pytest.fixture
def reached(fleets, monkeypatch) -> Iterator[Callable[..., Node]]:
    """Give nodes at an address that is no loopback one, which are tried and try."""
    address = own_address(())
    if address.startswith("127."):
        pytest.skip("this machine has no address but its loopback one")
    monkeypatch.setattr(Played, "address", staticmethod(lambda _: address))
    data = Probe(address, b"")
    probes = [data]

    def come(name: str, error: str = "") -> Node:
        node: Node = fleets.node()
        node.ask(name, address=address, data=f"tcp://{address}:{data.port}")
        node.name = node.wait_for(wire.Admitted).name

        def answer() -> None:
            node.wait_for(wire.OpenProbe)
            probe = Probe(address, fleets.program()[1])
            probes.append(probe)  # open until the others have tried it, too
            node.send(wire.ProbeOpen(port=probe.port))
            tried = node.wait_for(wire.Try)
            results = try_all(tried.targets, address, fleets.program()[1])
            if error:
                results = tuple(msgspec.structs.replace(each, error=error) for each in results)
            node.send(wire.Reachable(results=results))

        node.tries = answer
        node.answering = threading.Thread(target=answer)
        node.answering.start()
        return node

    yield come
    for each in probes:
        each.close()


def test_nodes_serve_a_group_once_all_reach_one_another(fleets, reached):
    fleets.group(fleets.fleet())
    nodes = [reached("hA"), reached("hB")]
    for each in nodes:
        each.answering.join(SECONDS)
        assert each.wait_for(wire.OpenGroup).group == "g"


def test_who_does_not_reach_whom_is_the_reason_for_the_end(fleets, reached):
    events = fleets.group(fleets.fleet())
    nodes = [reached("hA"), reached("hB", "ECONNREFUSED")]
    for each in nodes:
        each.answering.join(SECONDS)
    assert events.ended.wait(SECONDS)
    assert isinstance(events.error, LaunchError)
    assert "hB does not reach" in str(events.error)
    assert not [each for each in nodes[0].got if isinstance(each, wire.OpenGroup)]


def test_a_node_that_comes_late_and_reaches_nobody_is_sent_away_and_the_others_go_on(fleets, reached):
    fleet = fleets.fleet(1, 2)
    events = fleets.group(fleet)
    first = reached("hA")
    first.answering.join(SECONDS)
    first.wait_for(wire.OpenGroup)
    first.await_rendezvous()
    first.start_ranks()
    wait_until(lambda: events.of("started"))
    first.answering = threading.Thread(target=first.tries)
    first.answering.start()
    second = reached("hB", "ECONNREFUSED")
    second.answering.join(SECONDS)
    second.wait_for(wire.Finish)
    first.answering.join(SECONDS)
    assert "hB does not reach" in wait_until(lambda: fleets.notices)[0]
    assert not events.ended.is_set()
    assert not [each for each in second.got if isinstance(each, wire.OpenGroup)]


# --- restarts, losses --------------------------------------------------------------------------------


def test_of_a_connection_that_ends_its_own_node_is_asked_and_no_other(fleets):
    """A stranger who comes and goes would have all of 4,096 nodes asked for a second."""
    events = fleets.group(fleets.fleet(1, 2), keep=True)
    first, second = fleets.run_two(events)
    host, _, port = fleets.program()[0].rpartition(":")
    for _ in range(3):
        socket.create_connection((host, int(port))).close()
    second.die()
    wait_until(lambda: events.of("leaves"), "the end of its connection came after those of the strangers")
    first.wait_for(wire.AdoptRanks)
    assert [each for each in first.got if isinstance(each, wire.Ping)] == []


def test_a_kept_rank_that_dies_is_replaced_on_its_node_and_has_a_log_of_its_own(fleets):
    events = fleets.group(fleets.fleet(), keep=True)
    nodes = fleets.run_two(events)
    nodes[0].wrote(1, b"before")
    nodes[0].lost(1, -9)
    wait_until(lambda: events.of("gone"))
    events.peers.regroup()
    assert nodes[0].wait_for(wire.AdoptRanks).replaced == (1,)
    assert nodes[1].wait_for(wire.AdoptRanks).replaced == ()
    assert (events.kept, events.replaced) == ({0: 0, 2: 2, 3: 3}, {1: 1})
    assert len(events.of("started")) == 1
    nodes[0].send(wire.Workers(group="g", attempt=1, workers=(Worker(1, 1, 5),)))
    wait_until(lambda: len(events.of("started")) == 2)
    nodes[0].wrote(1, b"after", attempt=1)
    log = events.peers.log_directory / "hA-1" / "stdout.log"
    wait_until(lambda: log.exists() and log.read_bytes() == b"after")


def test_a_node_that_is_lost_is_named_by_its_ranks_and_a_kept_group_without_another_one_ends(fleets):
    events = fleets.group(fleets.fleet(), keep=True)
    nodes = fleets.run_two(events)
    nodes[1].die()
    began = time.monotonic()
    wait_until(lambda: events.of("gone"))
    assert time.monotonic() - began < 5
    assert events.of("leaves") == [("hB", False, False)]
    reason = f"was lost with its node: hB {GONE}"
    assert events.of("gone") == [(2, -9, reason), (3, -9, reason)]
    nodes[0].wait_for(wire.Restart)
    nodes[0].await_rendezvous(after=0)
    nodes[0].wait_for(wire.EndGroup)
    nodes[0].end()
    assert events.ended.wait(SECONDS)
    assert isinstance(events.error, RunFailedError)
    assert str(events.error) == f"node hB was lost: it {GONE}"


def test_another_node_comes_in_the_place_of_one_that_was_lost(fleets):
    events = fleets.group(fleets.fleet(), keep=True, max_restarts=1)
    nodes = fleets.run_two(events)
    nodes[0].die()
    Played.asked[0].lost = {0}
    nodes[1].wait_for(wire.Restart)
    nodes[1].await_rendezvous(after=0)
    wait_until(lambda: len(Played.asked[0].programs) == 2, "no other program was started")
    assert "hA was lost" in wait_until(lambda: fleets.notices)[0]
    other = fleets.come("hC", 0)
    for node in (other, nodes[1]):
        node.start_ranks(attempt=1)
    wait_until(lambda: len(events.of("started")) == 2)
    assert sorted(events.of("workers")[2:]) == [([0, 1],), ([2, 3],)]


def test_kept_ranks_go_on_under_other_numbers_and_lose_nothing_that_they_have_printed(fleets):
    events = fleets.group(fleets.fleet(1, 2), keep=True)
    first, second = fleets.run_two(events)
    logs = events.peers.log_directory
    second.wrote(2, b"before, ")
    first.die()
    order = second.wait_for(wire.AdoptRanks)
    assert (order.attempt, order.number, order.base_rank, order.world_size) == (0, 1, 0, 2)
    assert events.of("attempt")[-1] == (1, 2, "membership")
    assert events.kept == {0: 2, 1: 3}
    # What was on its way is still theirs; messages of ranks are of the attempt that is over.
    second.wrote(2, b"between, ")
    second.greet(2)
    second.wrote(0, b"after", attempt=1)
    second.greet(0, 2, attempt=1)
    wait_until(lambda: events.of("message"))
    assert [message.attempt for message, _ in events.of("message")] == [1]
    assert (logs / "hB-2" / "stdout.log").read_text() == "before, between, after"
    events.peers.send(1, messages.Proceed())
    fleets.hub.run(events.peers.turn)
    assert second.wait_for(wire.ForRanks).ranks == (1,)
    second.lost(3, 1)
    wait_until(lambda: events.of("gone")[-1][0] == 1)
    second.lost(0, 1, attempt=1)
    assert second.wait_for(wire.Restart).attempt == 1
    second.await_rendezvous(after=0)
    assert second.start_ranks(attempt=2).base_rank == 0


def test_nodes_of_an_endpoint_end_their_ranks_as_soon_as_the_notebook_does(fleets):
    """Else these would see the notebook's go, and seem to have failed."""
    fleet = fleets.fleet()
    fleet.conf = replace(fleet.conf, directed=False)
    events = Events()
    events.settings = AgentSettings(2, LaunchOptions(), "r", fleets.directory)
    joined = fleet.connect(cast("WorkerGroup", events), fleets.directory)
    node = Node(fleet.endpoint.removeprefix("tcp://"), fleet._key)
    fleets.nodes.append(node)
    node.ask("hA")
    node.wait_for(wire.OpenGroup)
    joined.stop()
    assert node.wait_for(wire.EndGroup).group == "g"


def test_a_node_that_is_about_to_be_ended_has_all_ranks_save(fleets):
    events = fleets.group(fleets.fleet(), keep=True)
    nodes = fleets.run_two(events)
    nodes[1].send(wire.NodeEnding(seconds=30, words="got SIGUSR1"))
    assert wait_until(lambda: events.of("preempted")) == [("node hB got SIGUSR1 (played job 7)", 30)]
    nodes[1].send(wire.NodeEnding(seconds=30, words="got SIGTERM", leaves=True))
    nodes[1].send(wire.Leaving())
    nodes[1].wait_for(wire.Finish)
    nodes[0].wait_for(wire.Restart)
    nodes[0].await_rendezvous(after=0)
    nodes[0].wait_for(wire.EndGroup)
    nodes[0].end()
    assert events.ended.wait(SECONDS)
    assert isinstance(events.error, RunPreemptedError)
    assert str(events.error) == "node hB left (played job 7)"


def test_of_a_range_a_node_that_is_about_to_be_ended_is_let_go(fleets):
    events = fleets.group(fleets.fleet(1, 2))
    nodes = fleets.run_two(events)
    nodes[1].send(wire.NodeEnding(seconds=30, words="got SIGTERM", leaves=True))
    nodes[1].wait_for(wire.Finish)
    assert events.of("preempted") == []


def test_the_end_of_the_nodes_waits_for_ranks_that_save(fleets):
    events = fleets.group(fleets.fleet())
    nodes = fleets.run_two(events)
    events.life.saving = True
    Played.asked[0].state = messages.EngineState.ENDED
    nodes[0].send(wire.NodeEnding(seconds=30, words="got SIGTERM", leaves=True))
    wait_until(lambda: ("said", messages.EngineState.ENDED, 2, 2) in events.told, "the engine has said it")
    assert not [each for each in nodes[0].got if isinstance(each, wire.EndGroup)]
    events.life.saving = False
    nodes[1].send(wire.NodeEnding(seconds=30, words="got SIGUSR1"))  # any turn of the hub
    for node in nodes:
        node.wait_for(wire.EndGroup)
        node.end()
    assert events.ended.wait(SECONDS)
    assert str(events.error) == "played job 7 has ended: CANCELLED"


def test_a_node_that_does_not_end_a_group_is_given_up(fleets):
    events = fleets.group(fleets.fleet())
    nodes = fleets.run_two(events)
    events.peers.stop()
    nodes[0].wait_for(wire.EndGroup)
    nodes[0].end()
    assert events.ended.wait(SECONDS)
    assert not [each for each in nodes[0].got if isinstance(each, wire.Finish)]
    nodes[1].wait_for(wire.Finish)


# --- several groups ----------------------------------------------------------------------------------


def test_two_groups_use_the_same_nodes_and_know_nothing_of_each_other(fleets):
    fleet = fleets.fleet()
    first = fleets.group(fleet, keep=True)
    nodes = fleets.run_two(first)
    second = fleets.group(fleet, "h")
    for node in nodes:
        assert node.wait_for(wire.OpenGroup).group == "h"
        node.await_rendezvous(group="h")
    for node in nodes:
        node.start_ranks("h")
    wait_until(lambda: second.of("started"))
    assert len(Played.asked) == 1
    nodes[0].greet(1, group="h")
    wait_until(lambda: second.of("message"))
    assert first.of("message") == []
    second.peers.stop()
    for node in nodes:
        assert node.wait_for(wire.EndGroup).group == "h"
        node.end("h")
    assert second.ended.wait(SECONDS)
    assert not first.ended.is_set()
    nodes[1].die()
    wait_until(lambda: first.of("gone"))
    assert second.of("gone") == []
