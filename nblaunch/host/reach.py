"""Checks which machines reach each other: each pair that must communicate tries, before torch waits for it.

    runtime (`ReachCheck`)                  each node
      OpenProbe                      ───>     listens at a port that the system chooses (`Probe`)
                                     <───   ProbeOpen
      Try: whom it must reach        ───>     connects to all at once (`try_all`)
                                     <───   Reachable
      `explain`: who does not reach whom, and the likely cause

A node must reach the ranks' store, and on other nodes the socket for data and arbitrary ports, which gloo and
NCCL use. A probe is such a port: a plain TCP socket, open for a few seconds. It only answers a nonce with a
code made with the run's key. This detects another machine with the same private address.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from nblaunch.host import wire
from nblaunch.host.hub import Hub
from nblaunch.host.key import curve_secret
from nblaunch.host.rendezvous import first_free

_OPEN_SECONDS = 10.0
_TRY_SECONDS = 2.0
_POLL_SECONDS = 0.1
_CODE_BYTES = 32
_BACKLOG = 1024
_ALL_PAIRS = 16
# A bound on descriptors: the process may have few.
_AT_ONCE = 256
_LINES = 10
_STRANGER = "stranger"
_HERE = "the notebook's machine"
_WORDS = {
    "ECONNREFUSED": "refused",
    "ECONNRESET": "the connection was cut",
    "EHOSTUNREACH": "no route to the host",
    "ENETUNREACH": "no route to its network",
    "ETIMEDOUT": "no answer",
    _STRANGER: "another machine answers",
}
_NO_ROUTE = {"EHOSTUNREACH", "ENETUNREACH"}
_OPEN = "Let all TCP between the nodes through."


# --- a socket that others try to reach -----------------------------------------------------------------


class Probe:
    """A socket that others try to reach; a thread of its own serves it for a few seconds, and closes it."""

    def __init__(self, address: str, key: bytes, ports: range = range(1)) -> None:
        """Listen at a free one of the ports of `address`.

        Raises `OSError` if this machine does not have the address, and `LaunchError` if no port is free.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = first_free(
            ports,
            address,
            lambda port: socket.create_server((address, port), family=family, backlog=_BACKLOG),
        )
        self._socket.setblocking(False)  # noqa: FBT003 - as it is named
        self.port = int(self._socket.getsockname()[1])
        self._key, self._over = key, threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nblaunch-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        until = time.monotonic() + _OPEN_SECONDS
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
            opened.enter_context(self._socket)
            selector.register(self._socket, selectors.EVENT_READ)
            while time.monotonic() < until and not self._over.is_set():
                for ready, _ in selector.select(_POLL_SECONDS):
                    if ready.fileobj is self._socket:
                        with contextlib.suppress(OSError):
                            caller = opened.enter_context(self._socket.accept()[0])
                            caller.setblocking(False)  # noqa: FBT003 - as it is named
                            selector.register(caller, selectors.EVENT_READ)
                    else:
                        assert isinstance(ready.fileobj, socket.socket)  # noqa: S101 - no others are there
                        selector.unregister(ready.fileobj)
                        self._answer(ready.fileobj)

    def _answer(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            nonce = caller.recv(_CODE_BYTES)
            if len(nonce) == _CODE_BYTES:
                caller.send(_code(self._key, nonce))


def _code(key: bytes, nonce: bytes) -> bytes:
    # With a derived key: a peer that chooses the nonce learns nothing about the run's key.
    return hmac.digest(curve_secret(key, "probe"), nonce, "sha256")


def interfaces() -> tuple[str, ...]:
    """Return this machine's interfaces, each with an address: `eth0 10.0.0.2`."""
    return tuple(
        f"{name} {each.address}"
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
        and not (found := ipaddress.ip_address(each.address.partition("%")[0])).is_loopback
        and not found.is_link_local
    )


# --- trying --------------------------------------------------------------------------------------------


def try_all(targets: Sequence[wire.ReachTarget], address: str, key: bytes) -> tuple[wire.ReachResult, ...]:
    """Connect to all targets from `address` ("": any), many at a time, for at most 2 s."""
    results: list[wire.ReachResult] = []
    for start in range(0, len(targets), _AT_ONCE):
        attempts = [_Trial(target, address, key) for target in targets[start : start + _AT_ONCE]]
        _finish(attempts)
        results.extend(each.result() for each in attempts)
    return tuple(results)


def _finish(attempts: Sequence[_Trial]) -> None:
    until = time.monotonic() + _TRY_SECONDS
    with selectors.DefaultSelector() as selector:
        for each in attempts:
            if each.error is None:
                selector.register(each.socket, selectors.EVENT_WRITE, each)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                each = ready.data
                each.go_on()
                if each.error is not None:
                    selector.unregister(each.socket)
                elif each.nonce:
                    selector.modify(each.socket, selectors.EVENT_READ, each)


class _Trial:
    """One connection; `error` is None until it is known, and empty if the place has been reached."""

    def __init__(self, target: wire.ReachTarget, address: str, key: bytes) -> None:
        self._target, self._key = target, key
        self.nonce = b""
        """The challenge that was sent."""
        self.error: str | None = None
        family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)  # noqa: FBT003 - as it is named
        try:
            if address:
                self.socket.bind((address, 0))
            number = self.socket.connect_ex((target.address, target.port))
        except OSError as error:
            number = error.errno or errno.EINVAL
        if number not in (0, errno.EINPROGRESS):
            self.error = _name_of(number)

    def go_on(self) -> None:
        try:
            if self.nonce:
                code = self.socket.recv(_CODE_BYTES)
                proven = hmac.compare_digest(code, _code(self._key, self.nonce))
                self.error = "" if proven else _STRANGER
            elif number := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.error = _name_of(number)
            elif self._target.what == "probe":
                self.nonce = secrets.token_bytes(_CODE_BYTES)
                self.socket.send(self.nonce)
            else:
                self.error = ""
        except OSError as error:
            self.error = _name_of(error.errno or errno.EINVAL)

    def result(self) -> wire.ReachResult:
        self.socket.close()
        if self.error is None:
            self.error = _STRANGER if self.nonce else _name_of(errno.ETIMEDOUT)
        return wire.ReachResult(self._target, self.error)


def _name_of(number: int) -> str:
    return errno.errorcode.get(number, str(number))


# --- who tries whom ------------------------------------------------------------------------------------


def targets_of(
    store: wire.ReachTarget, nodes: Mapping[str, tuple[wire.ReachTarget, wire.ReachTarget]]
) -> dict[str, tuple[wire.ReachTarget, ...]]:
    """Return what each node tries, and "", the notebook's machine; `nodes` have a data socket and a probe.

    All pairs of up to 16 nodes, both ways; of more, those at distances of 1, 2, 4 ...
    """
    names = list(nodes)
    tried = {"": tuple(data for data, _ in nodes.values())}
    for number, name in enumerate(names):
        others = (names[(number + step) % len(names)] for step in _steps(len(names)))
        tried[name] = (store, *(place for other in others for place in nodes[other]))
    return tried


def _steps(count: int) -> list[int]:
    if count <= _ALL_PAIRS:
        return list(range(1, count))
    powers = [1 << bit for bit in range((count - 1).bit_length())]
    return sorted({step % count for power in powers for step in (power, -power)} - {0})


class ReachCheck:
    """Asks each node to connect to the peers it needs; on the hub's thread.

    The caller passes on the nodes' answers, and reports nodes that are lost meanwhile.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the two ends, and the way between them
        self,
        hub: Hub,
        key: bytes,
        store: wire.ReachTarget,
        nodes: Mapping[str, tuple[str, str]],
        send: Callable[[str, wire.ToNode], object],
        done: Callable[[str], None],
    ) -> None:
        """Begin; `nodes` have an address and a ZMQ address for data, by name.

        `send` sends to a node. `done` is called once with what `explain` returns.
        """
        self._hub, self._key, self._store, self._nodes = hub, key, store, dict(nodes)
        self._send, self._done = send, done
        self._opened: dict[str, wire.ProbeOpen] = {}
        self._results: dict[str, Sequence[wire.ReachResult]] = {}
        self._trying: frozenset[str] = frozenset()
        self._over = False
        for name in self._nodes:
            send(name, wire.OpenProbe())

    def take(self, node: str, message: wire.ProbeOpen | wire.Reachable) -> None:
        if isinstance(message, wire.ProbeOpen):
            self._opened[node] = message
        else:
            self._results[node] = message.results
        self._go_on()

    def lost(self, node: str) -> None:
        self._nodes.pop(node, None)
        self._trying -= {node}
        self._go_on()

    def _go_on(self) -> None:
        if not self._trying:
            if self._nodes and self._opened.keys() >= self._nodes.keys():
                self._try()
        elif self._results.keys() >= self._trying and not self._over:
            self._over = True
            left = {"", *self._nodes}
            known = {
                name: [each for each in found if each.target.node in left]
                for name, found in self._results.items()
                if name in left
            }
            have = {name: each.interfaces for name, each in self._opened.items()}
            self._done(explain(known, {"": interfaces(), **have}))

    def _try(self) -> None:
        places = {}
        for name, (address, data) in self._nodes.items():
            port = int(data.rpartition(":")[2])
            places[name] = (
                wire.ReachTarget(name, "data", address, port),
                wire.ReachTarget(name, "probe", address, self._opened[name].port),
            )
        targets = targets_of(self._store, places)
        self._trying = frozenset(targets)
        for name in self._nodes:
            self._send(name, wire.Try(targets=targets[name]))
        self._hub.run_aside(
            "nblaunch-reach",
            lambda: try_all(targets[""], self._store.address, self._key),
            lambda results: self.take("", wire.Reachable(results=results)),
        )


# --- what it means -------------------------------------------------------------------------------------


def explain(
    results: Mapping[str, Sequence[wire.ReachResult]], interfaces: Mapping[str, Sequence[str]]
) -> str:
    """Return which machines do not reach which, at which address and port, and the likely cause; "" if none.

    `interfaces` are those that each machine has, with their addresses.
    """
    pairs: dict[tuple[str, str], list[wire.ReachResult]] = {}
    for name, found in results.items():
        for each in found:
            pairs.setdefault((name, each.target.node), []).append(each)
    # A node with a loopback address reaches no other machine: report only that.
    looped = {
        each.target.node
        for found in results.values()
        for each in found
        if each.error and _is_loopback(each.target.address)
    }
    lines: list[str] = []
    missed: dict[str, list[str]] = {}
    for (source, target), found in pairs.items():
        if source in looped and target not in looped:
            continue
        gap = _Gap(source, target, found, pairs.get((target, source), ()), interfaces)
        if gap.mutual and source < target:
            lines.append(gap.between())
        elif gap.failed and not gap.mutual:
            # One line for all that do not reach a place for the same reason.
            missed.setdefault(gap.words(), []).append(_machine(source))
    for words, names in missed.items():
        who = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        lines.append(f"{who} {'does' if len(names) == 1 else 'do'} not reach {words}")
    more = len(lines) - _LINES
    lines[_LINES:] = [f"... and {more} more like these."] if more > 0 else []
    return "\n".join(line[0].upper() + line[1:] if line.startswith(_HERE) else line for line in lines)


@dataclass(frozen=True, slots=True)
class _Gap:
    """A failed trial of one machine to reach another, and the other's trial of the reverse direction."""

    source: str
    target: str
    found: Sequence[wire.ReachResult]
    back: Sequence[wire.ReachResult]
    """Empty if the other one has not tried."""
    interfaces: Mapping[str, Sequence[str]]

    @property
    def failed(self) -> list[wire.ReachResult]:
        return [each for each in self.found if each.error]

    @property
    def mutual(self) -> bool:
        """Whether neither gets an answer from the other."""
        return bool(self.back) and all(each.error == "ETIMEDOUT" for each in (*self.found, *self.back))

    def between(self) -> str:
        ends = f"{self.back[0].target.address}, {self.found[0].target.address}"
        both = f"{_machine(self.source)} and {_machine(self.target)}"
        return f"{both} do not reach each other ({ends}): no answer. {self._silence()}"

    def words(self) -> str:
        first = self.failed[0]
        ports = " and ".join(str(each.target.port) for each in self.failed)
        plural = "s" if len(self.failed) > 1 else ""
        how = _WORDS.get(first.error, first.error)
        return (
            f"{_machine(self.target)} at {first.target.address}, port{plural} {ports}: {how}. {self._cause()}"
        )

    def _cause(self) -> str:
        first, errors = self.failed[0], {each.error for each in self.failed}
        target = _machine(self.target)
        if _is_loopback(first.target.address):
            return (
                "That is each machine's own address: correct the line of that name in /etc/hosts of "
                f"{target}, or give another address with --local-addr."
            )
        if _STRANGER in errors:
            return "Two machines have this address: give one that no other machine has with --local-addr."
        if errors & _NO_ROUTE:
            return f"Give an address of a common network with --local-addr: {self._have()}."
        if len(self.failed) < len(self.found):
            return f"A firewall lets other ports through, and ranks use any. {_OPEN}"
        if first.target.what == "listener" and errors == {"ECONNREFUSED"}:
            return "Nothing listens there: the run is over, or a firewall rejects it."
        if "ETIMEDOUT" not in errors:
            return f"A firewall of {target} rejects it. {_OPEN}"
        if self.back and not any(each.error for each in self.back):
            return f"{target} does reach {_machine(self.source)}, so a firewall of {target} drops it. {_OPEN}"
        return self._silence()

    def _silence(self) -> str:
        return (
            f"They are in different networks, or a firewall drops all between them: {self._have()}. Give an "
            "address of a network that both are in with --local-addr, or let all TCP between them through."
        )

    def _have(self) -> str:
        return "; ".join(
            f"{_machine(each)} has {', '.join(self.interfaces.get(each, ())) or 'no known address'}"
            for each in (self.source, self.target)
        )


def _machine(node: str) -> str:
    return node or _HERE


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
