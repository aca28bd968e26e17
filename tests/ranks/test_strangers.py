"""Strangers at the socket of a run do it no harm."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket as socket_of_os
from pathlib import Path

import pytest
import zmq

import nblaunch
from nblaunch.client.local import local

pytestmark = pytest.mark.quick


def boom(path: str) -> None:
    Path(path).touch()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return boom, (str(self.path),)


@pytest.mark.full
def test_a_run_is_unharmed_by_strangers_at_its_socket(tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "went-off"))

    def harass(root: str, group_like: list[str]) -> int:
        context = zmq.Context()
        address = f"ipc://{root}/hub"
        for identity in ("stranger", *group_like):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity.encode())
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(address)
            for frames in ([b"garbage"], [bomb], [b""], [b"a", b"b", b"c"], [b"\x91" * 100_000]):
                socket.send_multipart(frames)
        context.destroy(linger=1000)
        # And where clients connect: whole frames, half ones, and none.
        for data in (b"garbage", bomb, b"", b"\x91" * 100_000):
            with socket_of_os.socket(socket_of_os.AF_UNIX) as client, contextlib.suppress(OSError):
                client.connect(f"{root}/client")
                client.sendall(data)
            datagram = socket_of_os.SOCK_DGRAM
            with socket_of_os.socket(socket_of_os.AF_UNIX, datagram) as note, contextlib.suppress(OSError):
                note.sendto(data[:1000], f"{root}/notes")
        return os.getpid()

    result = nblaunch.run(harass, (str(local().runtime.root), ["a/0/0", "a/0/1"]), nproc=2)
    assert [type(value) for value in result] == [int, int]
    assert nblaunch.run(lambda: "still there", nproc=2).values == ["still there"] * 2
    assert list(tmp_path.iterdir()) == []
