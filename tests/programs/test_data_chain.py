"""Payloads go from node to node: each link carries them once, and who has not the key changes nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hosts import Hosts, hosts
from lanes import sampled
from patience import eventually

from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.capture import shared_memory
from nblaunch.host import link
from nblaunch.host.hub import Hub
from nblaunch.host.link import PIECE_BYTES, DataSocket, IncomingTransfer, branches
from nblaunch.host.wire import Arriving, Inventory, Leaving, Piece, Ping, encode
from nblaunch.protocol.messages import Payload

KEY = secrets.token_hex(32).encode()
GROUP = "aa"
MB = 1 << 20


class Station:
    """What a node has of payloads; without an address, the runtime: a hub, a socket, and what has come."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name = name
        self.directory = RuntimeDirectory()
        self.hub = Hub(self.directory)
        self.incoming = IncomingTransfer(self.directory.root())
        self.pieces: list[Piece] = []
        self.lost: list[tuple[str, int]] = []
        self.data = DataSocket(
            self.hub,
            KEY,
            host=address,
            received=self._received,
            lost=lambda group, number: self.lost.append((group, number)),
        )
        self.place = name, self.data.address
        self.gone = False

    def _received(self, piece: Piece, data: memoryview) -> None:
        self.pieces.append(piece)
        self.incoming.receive(piece, data)

    def send(self, payload: Payload, *to: Station) -> Payload:
        tickets: list[Payload] = []
        places = [each.place for each in to]
        self.hub.run(lambda: tickets.append(self.data.send(GROUP, payload, places)))
        return tickets[0]

    def whole(self, ticket: Payload) -> threading.Event:
        """Return what is set once all of a payload is here."""
        whole = threading.Event()
        self.hub.call(lambda: self.incoming.when_whole(ticket, whole.set))
        return whole

    def content(self, ticket: Payload) -> bytes:
        return bytes(shared_memory.joined(self.incoming.claim(ticket), private=True))

    def children(self) -> int:
        return len(self.data._children)

    def vanish(self) -> None:
        """End its connections, as a process does that is killed."""
        self.gone = True
        self.hub.run(self.data.close)

    def close(self) -> None:
        if not self.gone:
            self.vanish()
        self.hub.run(self.incoming.close)
        self.hub.close()
        self.directory.remove()


@pytest.fixture(name="stations")
def stations_fixture() -> Iterator[list[Station]]:
    made: list[Station] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture(name="runtime")
def runtime_fixture(stations):
    stations.append(Station(""))
    return stations[0]


def on_this_machine(stations: list[Station], count: int) -> list[Station]:
    new = [Station(f"h{number}", "127.0.0.1") for number in range(count)]
    stations.extend(new)
    return new


def on_hosts(stations: list[Station], made: Hosts) -> list[Station]:
    new = [made.inside(each.name, functools.partial(Station, each.name, each.address)) for each in made]
    stations.extend(new)
    return new


@contextlib.contextmanager
def payload_of(size: int) -> Iterator[Payload]:
    """Make a payload; no two of its pieces are alike."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    block = os.urandom(PIECE_BYTES - 8)
    for offset in range(0, size, PIECE_BYTES):
        os.pwrite(fd, (offset.to_bytes(8) + block)[: size - offset], offset)
    try:
        yield Payload(sizes=(size,), pid=os.getpid(), fd=fd)
    finally:
        os.close(fd)


def content_of(payload: Payload) -> bytes:
    return bytes(shared_memory.joined(payload, private=True))


def sent_bytes(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


# --- what arrives ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", sampled([3, 9]))
@pytest.mark.quick
def test_each_node_gets_a_payload_once(runtime, stations, count):
    nodes = on_this_machine(stations, count)
    with payload_of(3 * MB + 17) as payload:
        ticket = runtime.send(payload, *nodes)
        for each in nodes:
            assert each.whole(ticket).wait(20), each.name
            assert each.content(ticket) == content_of(payload)
            assert [piece.offset for piece in each.pieces] == [0, MB, 2 * MB, 3 * MB]
    sending = {each.name: each.children() for each in (runtime, *nodes)}
    assert sum(sending.values()) == count
    assert max(sending.values()) == (1 if count <= 8 else 2)


def test_only_the_nodes_that_need_a_payload_get_it(runtime, stations):
    first, between, last = on_this_machine(stations, 3)
    with payload_of(3 * MB) as payload:
        assert last.whole(runtime.send(payload, first, last)).wait(10)
        assert last.whole(runtime.send(payload, last)).wait(10)
    assert (len(first.pieces), len(between.pieces), len(last.pieces)) == (3, 0, 6)


def test_payloads_come_one_after_the_other(runtime, stations):
    nodes = on_this_machine(stations, 2)
    with payload_of(2 * MB + 1) as one, payload_of(30 * MB) as other:
        tickets = [(runtime.send(each, *nodes), each) for each in (one, other, one)]
        for ticket, payload in tickets:
            for each in nodes:
                assert each.whole(ticket).wait(10)
                assert each.content(ticket) == content_of(payload)


def test_a_small_payload_travels_inside_its_message(runtime, stations):
    (node,) = on_this_machine(stations, 1)
    small = Payload(sizes=(64 * 1024,), inline=bytes(64 * 1024))
    larger = Payload(sizes=(64 * 1024 + 1,), inline=os.urandom(64 * 1024 + 1))
    assert runtime.send(small, node) is small
    assert node.whole(small).wait(5)
    ticket = runtime.send(larger, node)
    assert ticket.inline is None
    assert node.whole(ticket).wait(5)
    assert node.content(ticket) == larger.inline


def test_a_payload_is_sent_though_its_sender_lets_go_of_it(runtime, stations):
    nodes = on_this_machine(stations, 2)
    with payload_of(20 * MB) as payload:
        expected = content_of(payload)
        ticket = runtime.send(payload, *nodes)
    assert nodes[1].whole(ticket).wait(10)
    assert nodes[1].content(ticket) == expected


def test_a_node_that_has_no_room_says_so_where_the_payload_is_claimed(runtime, stations, monkeypatch):
    first, last = on_this_machine(stations, 2)

    def no_room(total, directory):
        raise shared_memory.NoRoomError(f"{total} bytes, {directory}")

    with payload_of(3 * MB) as payload, monkeypatch.context() as patch:
        patch.setattr(shared_memory, "Incoming", no_room)
        ticket = runtime.send(payload, first, last)
        assert first.whole(ticket).wait(5)
        assert last.whole(ticket).wait(5)
    with pytest.raises(shared_memory.NoRoomError):
        last.incoming.claim(ticket)


# --- what goes wrong ---------------------------------------------------------------------------------


def stuck(go_on: threading.Event) -> None:
    go_on.wait(20)


def test_a_node_that_does_not_read_holds_up_its_payload_and_no_memory_grows(runtime, stations):
    first, second, third = on_this_machine(stations, 3)
    go_on = threading.Event()
    second.hub.call(lambda: stuck(go_on))
    with payload_of(100 * MB) as payload:
        ticket = runtime.send(payload, first, second, third)
        eventually(lambda: len(first.pieces) >= 16, "the first node has what the second one's window takes")
        time.sleep(0.3)
        assert len(first.pieces) <= 2 * 16
        go_on.set()
        assert third.whole(ticket).wait(20)
        assert third.content(ticket) == content_of(payload)


def test_a_node_that_is_lost_midway_is_named_by_the_payload_and_those_before_it_have_all(runtime, stations):
    with hosts(3, rate="200mbit") as made, payload_of(48 * MB) as payload:
        first, second, third = nodes = on_hosts(stations, made)
        ticket = runtime.send(payload, *nodes)
        ended = third.whole(ticket)
        eventually(lambda: len(third.pieces) > 5, "pieces come to the last node")
        second.vanish()
        eventually(lambda: first.lost, "the node before it reports the payload", 5)
        assert first.lost == [(GROUP, 1)]
        assert first.whole(ticket).wait(20)
        assert first.content(ticket) == content_of(payload)
        assert not ended.is_set()
        assert runtime.lost == []
        # The next one has another way.
        again = runtime.send(payload, first, third)
        assert third.whole(again).wait(20)
        assert third.content(again) == content_of(payload)


def test_a_payload_for_a_node_that_is_gone_is_lost(runtime, stations):
    first, last = on_this_machine(stations, 2)
    last.vanish()
    with payload_of(3 * MB) as payload:
        ticket = runtime.send(payload, first, last)
        assert first.whole(ticket).wait(5)
        eventually(lambda: first.lost == [(GROUP, 1)], "the payload is reported as lost", 5)
        first.vanish()
        runtime.send(payload, first)
        eventually(lambda: (GROUP, 2) in runtime.lost, "the payload is reported as lost", 5)


def test_a_payload_that_is_dropped_stops_and_leaves_no_memory(runtime, stations):
    with hosts(2, rate="200mbit") as made, payload_of(100 * MB) as payload:
        nodes = on_hosts(stations, made)
        ticket = runtime.send(payload, *nodes)
        whole = [each.whole(ticket) for each in nodes]
        eventually(lambda: len(nodes[1].pieces) > 3, "pieces come")
        runtime.hub.run(lambda: runtime.data.drop(GROUP))
        for each in nodes:
            each.hub.run(functools.partial(each.incoming.drop, ticket))
        # What comes after the others has come behind all of them.
        with payload_of(MB) as small:
            behind = runtime.send(small, *nodes)
            assert all(each.whole(behind).wait(20) for each in nodes)
        assert max(len(each.pieces) for each in nodes) < 60
        assert not any(each.is_set() for each in whole)
        assert [len(each.incoming._incoming) for each in nodes] == [1, 1]
        assert [each.data._flows for each in nodes] == [{}, {}]
        nodes[1].vanish()
        eventually(lambda: nodes[0].children() == 0, "the end of the connection is seen")
        assert (runtime.lost, nodes[0].lost) == ([], [])


# --- strangers ---------------------------------------------------------------------------------------


def knock(address: str, message: bytes, **keys: bytes) -> bool:
    """Send a piece from a peer that has these keys; return whether there was an answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    for name, value in keys.items():
        setattr(peer, name, value)
    peer.connect(address)
    peer.send_multipart([message, b"x"])
    answered = peer.poll(300) != 0
    context.destroy(linger=0)
    return answered


class Harm:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["TMPDIR"]) / "harm"),)


def test_strangers_on_the_port_for_data_change_nothing(runtime, stations):
    (node,) = on_this_machine(stations, 1)
    host, port = node.data.address.removeprefix("tcp://").rsplit(":", 1)
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", pickle.dumps(Harm()), os.urandom(4096)):
        with socket.create_connection((host, int(port)), timeout=5) as raw, contextlib.suppress(OSError):
            raw.sendall(data)
            raw.settimeout(0.2)
            raw.recv(1000)
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as unused:
        server = link.encrypted(unused, KEY, "sender")
    with zmq.Context() as context, context.socket(zmq.DEALER) as unused:
        control = link.encrypted(unused, KEY, "node")
    piece = encode(Piece(number=1, offset=0, total=1, group=GROUP))
    keys = {"curve_publickey": public, "curve_secretkey": secret}
    for message in (piece, pickle.dumps(Harm())):
        assert not knock(node.data.address, message)
        # Knows the node's public key, and has a secret key of its own; knows that of the control connection.
        assert not knock(node.data.address, message, **keys, curve_serverkey=server)
        assert not knock(node.data.address, message, **keys, curve_serverkey=control)
    assert node.pieces == []
    assert not (Path(os.environ["TMPDIR"]) / "harm").exists()
    with payload_of(2 * MB) as payload:
        assert node.whole(runtime.send(payload, node)).wait(10)


def test_what_is_no_piece_is_ignored_also_from_who_has_the_key(runtime, stations):
    (node,) = on_this_machine(stations, 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    link.encrypted(peer, KEY, "sender")
    peer.connect(node.data.address)
    for frames in ([b""], [pickle.dumps(Harm()), b"x"], [encode(Leaving())], [b"\x80" * 100] * 3):
        peer.send_multipart(frames)
    piece = Piece(number=7, offset=MB, total=2 * MB, group=GROUP)
    peer.send_multipart([encode(piece), b"x"])  # its first piece never came
    assert peer.poll(5000), "a piece that nobody needs is answered, so that others may come"
    context.destroy(linger=0)
    assert node.pieces == []
    with payload_of(2 * MB) as payload:
        assert node.whole(runtime.send(payload, node)).wait(10)


# --- how fast ----------------------------------------------------------------------------------------


@pytest.fixture(name="shaped", scope="module")
def shaped_fixture():
    with hosts(4, rate="1gbit") as made:
        yield made


def seconds_to(runtime: Station, payload: Payload, nodes: list[Station]) -> float:
    """Send a payload, and return how long it takes until all have it."""
    started = time.monotonic()
    ticket = runtime.send(payload, *nodes)
    for whole in [each.whole(ticket) for each in nodes]:
        assert whole.wait(60)
    taken = time.monotonic() - started
    for each in nodes:
        each.hub.run(functools.partial(each.incoming.drop, ticket))
    return taken


def test_each_link_carries_a_payload_once(shaped, stations, runtime):
    nodes = on_hosts(stations, shaped)
    links = [shaped.bridge, *(each.outside for each in shaped)]
    before = [sent_bytes(each) for each in links]
    with payload_of(64 * MB) as payload:
        seconds_to(runtime, payload, nodes)
    sent = [sent_bytes(each) - there for each, there in zip(links, before, strict=True)]
    # What the bridge's ends of the links send is what the hosts get.
    assert max(sent) < 1.1 * 64 * MB


@pytest.mark.slow
def test_four_hosts_have_a_payload_in_hardly_more_than_the_time_of_one(shaped, stations, runtime):
    """A star would take four times as long."""
    nodes = on_hosts(stations, shaped)
    with payload_of(256 * MB) as payload:
        one = min(seconds_to(runtime, payload, nodes[:1]) for _ in range(3))
        four = min(seconds_to(runtime, payload, nodes) for _ in range(3))
    print(f"256 MB: one host {one:.2f} s, four hosts {four:.2f} s, {four / one:.2f} times that")
    assert four <= 1.4 * one


def test_an_order_overtakes_a_payload(shaped, stations, runtime):
    """As an interrupt does: it goes over the control connection of each node."""
    nodes = on_hosts(stations, shaped)
    arrived: dict[bytes, float] = {}
    peers: dict[str, bytes] = {}
    control = link.Listener(
        runtime.hub, shaped.address, KEY, lambda node, *_: peers.update(hA=node), lambda _: None
    )
    context: zmq.Context[zmq.Socket[bytes]] = shaped.inside("hA", zmq.Context)
    try:
        end = shaped.inside("hA", lambda: connected(context, control.address))
        eventually(lambda: peers, "the node has reported")
        with payload_of(256 * MB) as payload:
            ticket = runtime.send(payload, *nodes)
            whole = nodes[0].whole(ticket)
            eventually(lambda: len(nodes[3].pieces) > 20, "the payload is on its way")
            for number in range(5):
                sent = time.monotonic()
                runtime.hub.run(lambda: control.send(peers["hA"], Ping()) and None)
                assert end.poll(5000)
                end.recv_multipart()
                arrived[b"%d" % number] = time.monotonic() - sent
            assert not whole.is_set()
            runtime.hub.run(lambda: runtime.data.drop(GROUP))
        assert max(arrived.values()) <= 0.2
    finally:
        context.destroy(linger=0)
        runtime.hub.run(control.close)


def test_the_end_of_a_node_that_was_refused_after_it_had_joined_is_told(runtime):
    lost: list[bytes] = []
    control = link.Listener(
        runtime.hub, "127.0.0.1", KEY, lambda node, *_: control.welcome(node), lost.append
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        end = connected(context, control.address)
        eventually(lambda: control._known, "it has joined")
        (node,) = control._known
        end.send(b"no message")
        assert end.poll(5000), "it is told why"
        end.close(linger=0)
        eventually(lambda: lost == [node], "its end is told")
    finally:
        context.destroy(linger=0)
        runtime.hub.run(control.close)


def connected(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    end = context.socket(zmq.DEALER)
    link.encrypted(end, KEY, "node")
    end.connect(address)
    its = Inventory(python="", torch="", nblaunch="", boot="", backend="", device_type="")
    end.send(encode(Arriving(name="hA", nproc=1, address="", data="", inventory=its)))
    return end


# --- branches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 17, 1024])
def test_each_node_has_one_parent_and_none_has_more_than_two_children(count):
    places = [(f"h{number}", "") for number in range(count)]
    reached, depth = [], 0
    level = [tuple(places)]
    while any(level):
        depth += 1
        further = [branch for behind in level for branch in branches(behind)]
        assert all(len(branches(behind)) <= 2 for behind in level)
        reached += [place for place, _ in further]
        level = [behind for _, behind in further]
    assert sorted(reached) == sorted(places)
    assert depth <= 16
