"""Strangers: they find the TCP ports on which processes listen, and write there what harms who believes it.

As a program it is a stranger itself, in a process and perhaps a network of its own:
`python strangers.py PATH ADDRESS:PORT ...` writes to these ports, prints those that it has reached, as JSON,
and holds connections open until its standard input ends. Whoever unpickles what it sends makes a directory
at PATH.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq

_LISTENS = "0A"
_SECONDS = 0.5
_HELD = 10
"""How many connections to each port stay open, with nothing said."""


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@dataclass(frozen=True)
class Port:
    """Where a process listens; `network` is the one that it is in."""

    address: str
    number: int
    network: str

    @property
    def open_to_all(self) -> bool:
        """Whether it is bound to every address of its machine."""
        return ipaddress.ip_address(self.address).is_unspecified

    @property
    def here_alone(self) -> bool:
        """Whether only its own machine reaches it."""
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.address}:{self.number}"


def open_ports(pids: Iterable[int]) -> dict[Port, int]:
    """Return the ports on which these processes listen, each with one that does; of any network."""
    found: dict[Port, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            process = Path(f"/proc/{pid}")
            network, inodes = str((process / "ns/net").readlink()), _sockets_of(process)
            for table in ("tcp", "tcp6"):
                for line in (process / "net" / table).read_text().splitlines()[1:]:
                    _, local, _, state, *words = line.split()
                    if state == _LISTENS and words[5] in inodes:
                        found[Port(*_place(local), network)] = pid
    return found


def _sockets_of(process: Path) -> set[str]:
    inodes = set()
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(fd.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def _place(shown: str) -> tuple[str, int]:
    """Return the address and the port that the kernel shows as `0100007F:1F90`."""
    address, _, port = shown.partition(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    packed = b"".join(struct.pack("=I", each) for each in words)
    return str(ipaddress.ip_address(packed)), int(port, 16)


# --- as a program ------------------------------------------------------------------------------------


def texts(bomb: bytes) -> list[bytes]:
    """Return what a stranger writes: pickles in the frames of several protocols, noise, and beginnings."""
    return [
        b"",
        bomb,
        struct.pack("!i", len(bomb)) + bomb,  # multiprocessing.connection
        struct.pack("!Q", len(bomb)) + bomb,
        struct.pack("=Q", len(bomb)) + bomb,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64),  # TLS
        os.urandom(100_000),
        b"\xff" * 64,
        struct.pack("!Q", 1 << 62),
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03",  # half of ZMQ's greeting
        b"\0\xce\xf7\x85\x3c",  # that of torch's store; then SET, of a key that is too long
        b"\0\xce\xf7\x85\x3c\x01" + struct.pack("=Q", 1 << 40),
    ]


def harass(address: str, number: int, bomb: bytes) -> list[socket.socket]:
    """Write to a port; return connections that stay open, the last thing of each in the middle of a frame."""
    held = []
    for text in [*texts(bomb), *[b"\0"] * _HELD]:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, number), timeout=_SECONDS)
            held.append(connection)
            connection.sendall(text)
    for connection in held[: len(texts(bomb)) // 2]:
        connection.close()
    return held


def speak_zmq(ports: Iterable[tuple[str, int]], bomb: bytes) -> list[zmq.Socket[bytes]]:
    """Send messages to ports as ZMQ sockets without a key do, which go on trying."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers = []
    for address, number in ports:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.IPV6, int(":" in address))
        peer.connect(f"tcp://[{address}]:{number}" if ":" in address else f"tcp://{address}:{number}")
        for frames in ([bomb], [b"", bomb], [bomb, b"x"], [b"\x91" * 100_000]):
            peer.send_multipart(frames)
        peers.append(peer)
    return peers


def main(path: str, *places: str) -> None:
    """Be a stranger."""
    bomb = pickle.dumps(Bomb(Path(path)))
    ports = [(host, int(number)) for host, _, number in (each.rpartition(":") for each in places)]
    held = {f"{host}:{number}": harass(host, number, bomb) for host, number in ports}
    peers = speak_zmq(ports, bomb)
    print(json.dumps([place for place, connections in held.items() if connections]), flush=True)
    sys.stdin.read()
    assert not any(each.poll(0) for each in peers), "somebody has answered who has no key"
    os._exit(0)  # in the middle of all that


if __name__ == "__main__":
    main(*sys.argv[1:])
