"""Several hosts on this machine: network namespaces on one bridge, with names and mounts of their own.

This machine is on the bridge, too, as the notebook's. The names of all that is made, and the subnet, are of
this process alone, so tests beside this one have hosts of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from lanes import left_out
from patience import eventually

T = TypeVar("T")

NAMESPACES = Path("/run/netns")
_NET = ipaddress.ip_network("10.64.0.0/10")
_CLONE_NEWNET = 0x40000000
_counts = itertools.count()


def need_hosts(*programs: str) -> None:
    """Give up where there can be no hosts, or they lack one of these programs."""
    missing = [each for each in ("ip", "tc", "nsenter", "unshare", *programs) if shutil.which(each) is None]
    if missing:
        left_out(f"hosts need {', '.join(missing)}, not installed here (iproute2, util-linux, iptables)")
    if os.geteuid() != 0:
        left_out("only root can make network namespaces")
    probe = f"nbp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True, text=True)
    if made.returncode:
        left_out(f"this container may have no network namespaces: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", probe], check=True)


@contextlib.contextmanager
def hosts(count: int, *, rate: str = "") -> Iterator[Hosts]:
    """Have `count` hosts, hA, hB ..., each link of `rate` (`1gbit`; else as fast as it is)."""
    need_hosts()
    made = Hosts(count)
    try:
        made.up()
        if rate:
            made.shape(rate)
        yield made
    finally:
        left = made.down()
    if left:
        pytest.fail("these were alive on their hosts at the end:\n  " + "\n  ".join(left), pytrace=False)


@dataclass
class Host:
    """One of them."""

    name: str
    address: str
    namespace: str
    link: str
    """Its interface; the bridge's end of it is `outside`."""
    outside: str
    mounts: list[tuple[Path, Path]] = field(default_factory=list)


class Hosts:
    """Hosts on one bridge; `[name]` is one of them."""

    def __init__(self, count: int) -> None:
        unique = f"nb{os.getpid()}{chr(ord('a') + next(_counts) % 26)}"
        self.bridge = unique
        self.subnet = self._free_subnet()
        self.address = str(self.subnet[1])
        """This machine's."""
        self.directory = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._hosts = {
            f"h{chr(ord('A') + number)}": Host(
                f"h{chr(ord('A') + number)}",
                str(self.subnet[number + 2]),
                f"{unique}-h{chr(ord('A') + number)}",
                f"{unique}e{number}",
                f"{unique}v{number}",
            )
            for number in range(count)
        }

    @staticmethod
    def _free_subnet() -> ipaddress.IPv4Network:
        taken = subprocess.run(["ip", "-4", "-o", "addr"], check=True, capture_output=True, text=True).stdout
        for number in range(os.getpid(), os.getpid() + 100):
            subnet = ipaddress.IPv4Network((int(_NET[0]) + (number % 2**14) * 256, 24))
            if f"inet {subnet[1]}/" not in taken:
                return subnet
        pytest.fail("no free subnet of 10.64.0.0/10")

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def up(self) -> None:
        """Make them."""
        bridge = self.bridge
        lines = [f"link add {bridge} type bridge", f"addr add {self.address}/24 dev {bridge}"]
        lines.append(f"link set {bridge} up")
        for each in self:
            lines.append(f"netns add {each.namespace}")
            lines.append(f"link add {each.outside} type veth peer name {each.link} netns {each.namespace}")
            lines.append(f"link set {each.outside} master {bridge} up")
        _batch(["ip"], lines)
        for each in self:
            inside = [f"addr add {each.address}/24 dev {each.link}", f"link set {each.link} up"]
            _batch(["ip", "-n", each.namespace], [*inside, "link set lo up"])

    def shape(self, rate: str) -> None:
        """Limit all links, this machine's too, to `rate` in each direction."""
        limit = f"root tbf rate {rate} burst 1mb latency 50ms"
        outside = [self.bridge, *(each.outside for each in self)]
        _batch(["tc"], [f"qdisc add dev {each} {limit}" for each in outside])
        for each in self:
            _batch(["tc", "-n", each.namespace], [f"qdisc add dev {each.link} {limit}"])

    def bind(self, host: str, path: Path | str, instead: Path | str) -> None:
        """Have programs that a host starts from now on find `instead` at `path`, a file or directory."""
        self[host].mounts.append((Path(instead), Path(path)))

    def private(self, host: str, path: Path | str) -> Path:
        """Have a host's programs find a directory of their own at `path`; return where it is outside."""
        made = self.directory / host / str(path).strip("/").replace("/", "_")
        made.mkdir(parents=True)
        self.bind(host, path, made)
        return made

    def command(self, host: str, argv: Sequence[str | Path]) -> list[str]:
        """Return the command that runs `argv` on a host: with its network, name and mounts."""
        each = self[host]
        steps = [f"hostname {each.name}"]
        steps += [f"mount --bind {shlex.quote(str(a))} {shlex.quote(str(b))}" for a, b in each.mounts]
        return [
            *("nsenter", f"--net={NAMESPACES / each.namespace}", "unshare", "--uts", "--mount"),
            *("sh", "-c", " && ".join([*steps, 'exec "$@"']), each.name, *map(str, argv)),
        ]

    def start(self, host: str, argv: Sequence[str | Path], **popen: Any) -> subprocess.Popen[Any]:
        """Start a program on a host; the arguments are those of `Popen`."""
        return subprocess.Popen(self.command(host, argv), **popen)

    def run(
        self, host: str, argv: Sequence[str | Path], *, check: bool = True, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host, and return its output."""
        return subprocess.run(
            self.command(host, argv), check=check, capture_output=True, text=True, timeout=seconds
        )

    def python(self) -> Path:
        """Return a Python that runs on the host of its place: what `--on process` starts is then on hosts."""
        script = self.directory / "python"
        cases = [
            f'{place}) exec {shlex.join(self.command(each.name, [sys.executable]))} "$@" ;;'
            for place, each in enumerate(self)
        ]
        script.write_text("\n".join(["#!/bin/sh", "case $NBLAUNCH_NODE_PLACE in", *cases, "esac"]))
        script.chmod(0o700)
        return script

    def inside(self, host: str, call: Callable[[], T]) -> T:
        """Return what `call` returns, on a thread that is in the network of a host.

        Sockets that it makes belong there, and so do threads that it starts.
        """
        found: list[T] = []
        raised: list[BaseException] = []

        def enter() -> None:
            try:
                enter_network(NAMESPACES / self[host].namespace)
                found.append(call())
            except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
                raised.append(error)

        thread = threading.Thread(target=enter, name=f"on {host}")
        thread.start()
        thread.join()
        if raised:
            raise raised[0]
        return found[0]

    def processes(self, host: str) -> list[int]:
        """Return the processes on a host; this one is none of them."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self[host].namespace], check=False, capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid()]

    def down(self) -> list[str]:
        """Remove them; return what had been left running on them, one line each."""
        with contextlib.suppress(pytest.fail.Exception):
            # What has been ended may take a moment to be gone.
            eventually(lambda: not any(self.processes(each.name) for each in self), "empty hosts", 2.0)
        left = [f"{each.name}: {_ended(pid)}" for each in self for pid in self.processes(each.name)]
        for each in self:
            subprocess.run(["ip", "netns", "del", each.namespace], check=False, capture_output=True)
        # A namespace lives on with the sockets in it: its links must not.
        for link in (*(each.outside for each in self), self.bridge):
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
        shutil.rmtree(self.directory)
        return left


def enter_network(namespace: Path) -> None:
    """Move this thread into a network namespace."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(fd)


def _batch(command: Sequence[str], lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*command, "-batch", "-"],
        check=False,
        input="\n".join(lines),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stderr.strip()}\n{lines}", pytrace=False)


def _ended(pid: int) -> str:
    """End a process by force; return its command line."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        os.kill(pid, signal.SIGKILL)
        return f"{pid} {line[:200]}"
    return f"{pid} (gone)"
