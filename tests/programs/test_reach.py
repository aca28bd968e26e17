"""Who does not reach whom is found out and named, with the likely cause; on real hosts with real faults."""

from __future__ import annotations

import functools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hosts import Hosts, hosts, need_hosts
from patience import eventually

from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.host.hub import Hub
from nblaunch.host.reach import Probe, ReachCheck, explain, interfaces, targets_of, try_all
from nblaunch.host.wire import OpenProbe, ProbeOpen, Reachable, ReachResult, ReachTarget, ToNode, Try

KEY = secrets.token_hex(32).encode()


What = Literal["listener", "store", "data", "probe"]


def target(node: str, what: What, port: int, address: str = "") -> ReachTarget:
    return ReachTarget(
        node, what, address or {"hA": "10.0.0.2", "hB": "10.0.0.3", "": "10.0.0.1"}[node], port
    )


def tried(node: str, errors: Mapping[What, str], address: str = "") -> list[ReachResult]:
    """Return what somebody has found out about a node: the error, by what was tried."""
    ports: dict[What, int] = {"data": 4000, "probe": 5000, "store": 6000, "listener": 7000}
    return [ReachResult(target(node, what, ports[what], address), error) for what, error in errors.items()]


GOOD: dict[What, str] = {"data": "", "probe": ""}
SILENT: dict[What, str] = {"data": "ETIMEDOUT", "probe": "ETIMEDOUT"}
STORE: dict[What, str] = {"store": ""}
HAVE = {"": ["eth0 10.0.0.1"], "hA": ["eth0 10.0.0.2", "ib0 10.9.0.2"], "hB": ["eth0 10.0.0.3"]}


def pair(
    forth: Mapping[What, str], back: Mapping[What, str], address: str = ""
) -> dict[str, list[ReachResult]]:
    return {"hA": tried("hB", forth, address), "hB": tried("hA", back)}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("results", "said", "words"),
    [
        (pair(GOOD, GOOD), 0, []),
        (
            pair(SILENT, GOOD),
            1,
            [
                "hA does not reach hB at 10.0.0.3, ports 4000 and 5000: no answer.",
                "hB does reach hA, so a firewall of hB drops it",
            ],
        ),
        (
            pair(SILENT, SILENT),
            1,
            [
                "hA and hB do not reach each other (10.0.0.2, 10.0.0.3): no answer",
                "different networks",
                "hA has eth0 10.0.0.2, ib0 10.9.0.2; hB has eth0 10.0.0.3",
                "--local-addr",
            ],
        ),
        (
            pair({"data": "", "probe": "ECONNREFUSED"}, GOOD),
            1,
            ["hA does not reach hB at 10.0.0.3, port 5000: refused", "lets other ports through", "all TCP"],
        ),
        (pair({"data": "", "probe": "ETIMEDOUT"}, GOOD), 1, ["port 5000: no answer", "lets other ports"]),
        (pair({"data": "ECONNREFUSED", "probe": "ECONNREFUSED"}, GOOD), 1, ["A firewall of hB rejects"]),
        (
            pair({"data": "EHOSTUNREACH", "probe": "EHOSTUNREACH"}, GOOD),
            1,
            ["no route to the host", "hA has eth0 10.0.0.2, ib0 10.9.0.2; hB has eth0 10.0.0.3"],
        ),
        (
            pair({"data": "ECONNREFUSED", "probe": "ECONNREFUSED"}, GOOD, "127.0.1.1"),
            1,
            ["hA does not reach hB at 127.0.1.1", "/etc/hosts of hB", "--local-addr"],
        ),
        (pair({"data": "", "probe": "stranger"}, GOOD), 1, ["another machine answers", "Two machines have"]),
        (
            {"hA": tried("", {"listener": "ECONNREFUSED"})},
            1,
            [
                "hA does not reach the notebook's machine at 10.0.0.1, port 7000: refused",
                "Nothing listens there",
            ],
        ),
        (
            {"hA": tried("", {"store": "ETIMEDOUT"}), "hB": tried("", STORE), "": tried("hA", {"data": ""})},
            1,
            ["the notebook's machine does reach hA, so a firewall of the notebook's machine drops it"],
        ),
        (
            {"": tried("hA", {"data": "ETIMEDOUT"})},
            1,
            ["The notebook's machine does not reach hA at 10.0.0.2"],
        ),
        (
            {
                "hA": tried("hB", {"data": "", "probe": "ETIMEDOUT"}),
                "hC": tried("hB", {"data": "", "probe": "ETIMEDOUT"}),
                "hD": tried("hB", {"data": "", "probe": "ETIMEDOUT"}),
            },
            1,
            ["hA, hC and hD do not reach hB"],
        ),
        ({f"h{n}": tried("hB", {"probe": str(n)}) for n in range(30)}, 11, ["... and 20 more like these."]),
    ],
)
def test_the_cause_is_named(results, said, words):
    text = explain(results, HAVE)
    assert len(text.splitlines()) == said, text
    for each in words:
        assert each in text


@pytest.mark.parametrize(("count", "of_each"), [(1, 0), (2, 1), (16, 15), (17, 8), (1024, 19)])
def test_each_node_tries_enough_others(count, of_each):
    nodes = {
        f"h{n}": (
            ReachTarget(f"h{n}", "data", "10.0.0.2", n + 1),
            ReachTarget(f"h{n}", "probe", "10.0.0.2", n + 1),
        )
        for n in range(count)
    }
    store = target("", "store", 6000)
    tried = targets_of(store, nodes)
    assert tried.keys() == {"", *nodes}
    assert [each.what for each in tried[""]] == ["data"] * count
    pairs = set()
    for name in nodes:
        assert tried[name][0] is store
        assert len(tried[name]) == 1 + 2 * of_each
        assert {each.what for each in tried[name][1:]} <= {"data", "probe"}
        pairs |= {(name, each.node) for each in tried[name][1:]}
    assert all(pair[::-1] in pairs and pair[0] != pair[1] for pair in pairs)


@contextmanager
def probe(
    address: str, key: bytes = KEY, on: Callable[[Callable[[], Probe]], Probe] = lambda make: make()
) -> Iterator[Probe]:
    made = on(lambda: Probe(address, key))
    try:
        yield made
    finally:
        made.close()


def errors_of(results: tuple[ReachResult, ...]) -> list[str]:
    return [each.error for each in results]


@pytest.mark.quick
def test_a_probe_answers_who_has_the_key_and_nothing_else():
    with (
        probe("127.0.0.1") as ours,
        probe("127.0.0.1", b"x" * 64) as theirs,
        socket.create_server(("127.0.0.1", 0)) as mute,
    ):
        targets = [
            ReachTarget("hA", "probe", "127.0.0.1", ours.port),
            ReachTarget("hB", "probe", "127.0.0.1", theirs.port),
            ReachTarget("hB", "data", "127.0.0.1", mute.getsockname()[1]),
        ]
        started = time.monotonic()
        assert errors_of(try_all(targets, "127.0.0.1", KEY)) == ["", "stranger", ""]
        assert time.monotonic() - started < 0.5
        for stray in (b"GET / HTTP/1.0\r\n\r\n", b"", b"x"):
            with socket.create_connection(("127.0.0.1", ours.port), 5) as raw:
                raw.sendall(stray)
                raw.shutdown(socket.SHUT_WR)
                assert raw.recv(1000) == b""
        assert errors_of(try_all(targets[:1], "", KEY)) == [""]
    assert errors_of(try_all(targets[:1], "", KEY)) == ["ECONNREFUSED"]


def test_what_takes_a_connection_and_says_nothing_is_a_stranger():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        there = ReachTarget("hA", "probe", "127.0.0.1", mute.getsockname()[1])
        started = time.monotonic()
        assert errors_of(try_all([there], "", KEY)) == ["stranger"]
        assert time.monotonic() - started < 3


def test_many_try_at_once():
    with probe("127.0.0.1") as ours:
        there = [ReachTarget("hA", "probe", "127.0.0.1", ours.port)] * 400
        assert set(errors_of(try_all(there, "127.0.0.1", KEY))) == {""}


# --- on hosts ----------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """What a runtime and its node programs do, but for the connection between them."""

    hosts: Hosts
    hub: Hub
    data: dict[str, socket.socket] = field(default_factory=dict)
    probes: dict[str, Probe] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    """Of sockets for data; any, unless one is given."""
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for each in self.hosts:
            self.addresses.setdefault(each.name, each.address)
        self.store = socket.create_server((self.hosts.address, 0))

    def check(self) -> str:
        """Return what is wrong."""
        for each in self.hosts:
            place = self.addresses[each.name], self.ports.get(each.name, 0)
            self.data[each.name] = self.hosts.inside(
                each.name, functools.partial(socket.create_server, place)
            )
        nodes = {
            name: (self.addresses[name], f"tcp://{self.addresses[name]}:{data.getsockname()[1]}")
            for name, data in self.data.items()
        }
        store = ReachTarget("", "store", self.hosts.address, self.store.getsockname()[1])
        started = time.monotonic()

        def begin() -> None:
            self.reach = ReachCheck(self.hub, KEY, store, nodes, self._send, self.texts.append)

        self.hub.run(begin)
        eventually(lambda: self.texts, "the check is over")
        self.seconds = time.monotonic() - started
        return self.texts.pop()

    def _send(self, node: str, message: ToNode) -> None:
        threading.Thread(target=self._obey, args=(node, message)).start()

    def _obey(self, node: str, message: ToNode) -> None:
        """Answer as a node does."""
        address = self.addresses[node]
        match message:
            case OpenProbe():
                answer: ProbeOpen | Reachable
                made = self.probes[node] = self.hosts.inside(node, lambda: Probe(address, KEY))
                answer = ProbeOpen(port=made.port, interfaces=self.hosts.inside(node, interfaces))
            case Try(targets=targets):
                answer = Reachable(results=self.hosts.inside(node, lambda: try_all(targets, address, KEY)))
            case _:
                raise AssertionError(message)
        self.hub.call(lambda: self.reach.take(node, answer))

    def close(self) -> None:
        closing: list[socket.socket | Probe] = [self.store, *self.data.values(), *self.probes.values()]
        for each in closing:
            each.close()


@pytest.fixture(name="hub")
def hub_fixture() -> Iterator[Hub]:
    directory = RuntimeDirectory()
    hub = Hub(directory)
    yield hub
    hub.close()
    directory.remove()


@pytest.fixture(name="two")
def two_fixture(hub) -> Iterator[Fleet]:
    with hosts(2) as made:
        fleet = Fleet(made, hub)
        yield fleet
        fleet.close()


def test_two_hosts_that_reach_each_other_are_checked_in_a_moment(two):
    assert two.check() == ""
    print(f"two hosts: {two.seconds * 1000:.0f} ms")
    assert two.seconds < 1


def test_a_firewall_that_drops_what_comes_in_is_named(two):
    need_hosts("iptables")
    a, b = two.hosts["hA"].address, two.hosts["hB"].address
    two.hosts.run("hB", ["iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-s", a, "-j", "DROP"])
    text = two.check()
    assert f"hA does not reach hB at {b}, ports " in text
    assert "no answer. hB does reach hA, so a firewall of hB drops it." in text
    assert len(text.splitlines()) == 1
    assert two.seconds < 4


def test_a_firewall_that_lets_some_ports_through_is_named(two):
    need_hosts("iptables")
    two.ports["hB"] = 40123
    reject = ["-j", "REJECT", "--reject-with", "tcp-reset"]
    two.hosts.run("hB", ["iptables", "-A", "INPUT", "-p", "tcp", "--dport", "40123", "-j", "ACCEPT"])
    two.hosts.run("hB", ["iptables", "-A", "INPUT", "-p", "tcp", "--syn", *reject])
    text = two.check()
    assert "hA does not reach hB" in text
    assert "refused. A firewall lets other ports through, and ranks use any." in text
    assert len(text.splitlines()) == 1


def test_a_host_without_a_route_is_named(two):
    b = two.hosts["hB"].address
    two.hosts.run("hA", ["ip", "route", "add", "unreachable", b])
    text = two.check()
    assert f"hA does not reach hB at {b}" in text
    assert "no route to the host" in text


def test_two_that_do_not_see_each_other_are_named_with_their_interfaces(two):
    """As with a wrong neighbour: what one sends goes elsewhere, so nothing of either is answered."""
    a, b = two.hosts["hA"], two.hosts["hB"]
    two.hosts.run("hA", ["ip", "neigh", "replace", b.address, "lladdr", "02:00:00:00:00:99", "dev", a.link])
    text = two.check()
    assert f"hA and hB do not reach each other ({a.address}, {b.address}): no answer." in text
    assert f"hA has {a.link} {a.address}; hB has {b.link} {b.address}" in text
    assert "--local-addr" in text


def test_an_address_of_127_is_named_with_etc_hosts(two):
    two.addresses["hB"] = "127.0.1.1"
    text = two.check()
    assert "hA and" not in text
    assert "do not reach hB at 127.0.1.1" in text or "does not reach hB at 127.0.1.1" in text
    assert "/etc/hosts of hB" in text


def test_another_machine_with_the_same_address_is_found_out(two):
    """What hA sends there reaches a machine that has a probe, too: that of another run."""
    need_hosts("iptables")
    address = two.hosts["hB"].address
    with probe(two.hosts["hA"].address, b"x" * 64, lambda make: two.hosts.inside("hA", make)) as other:
        there = f"{two.hosts['hA'].address}:{other.port}"
        rule = ["OUTPUT", "-p", "tcp", "-d", address, "-j", "DNAT", "--to-destination", there]
        two.hosts.run("hA", ["iptables", "-t", "nat", "-A", *rule])
        text = two.check()
    assert f"hA does not reach hB at {address}" in text
    assert "another machine answers. Two machines have this address" in text


def test_a_node_that_is_lost_meanwhile_is_left_out(hub):
    sent: list[tuple[str, ToNode]] = []
    texts: list[str] = []

    def send(name: str, message: ToNode) -> None:
        sent.append((name, message))

    with socket.create_server(("127.0.0.1", 0)) as data:
        store = ReachTarget("", "store", "127.0.0.1", 1)
        places = {name: ("127.0.0.1", f"tcp://127.0.0.1:{data.getsockname()[1]}") for name in ("hA", "hB")}
        reach = ReachCheck(hub, KEY, store, places, send, texts.append)
        assert sent == [("hA", OpenProbe()), ("hB", OpenProbe())]
        sent.clear()
        hub.run(lambda: reach.take("hA", ProbeOpen(port=5)))
        hub.run(lambda: reach.take("hB", ProbeOpen(port=6)))
        assert [(name, type(message)) for name, message in sent] == [("hA", Try), ("hB", Try)]
        lost = ReachTarget("hB", "probe", "127.0.0.1", 6)
        hub.run(lambda: reach.take("hA", Reachable(results=(ReachResult(lost, "ECONNREFUSED"),))))
        hub.run(lambda: reach.lost("hB"))
        eventually(lambda: texts == [""], "those that are left reach each other")
