"""What a process that is gone has made, another one holds, without mapping it, for those who will."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from nblaunch.capture import pickling, shared_memory
from nblaunch.protocol.messages import Payload

SIZE = 9 * 1024 * 1024
"""Large enough to be mapped."""

MAKER = """
import sys
from pathlib import Path
from nblaunch.capture import pickling, shared_memory

where, directory, size = sys.argv[1:]
if where == "on disk":
    shared_memory._take_memory = lambda *_: None
value = bytearray(range(256)) * (int(size) // 256)
made = shared_memory.put(pickling.dumps(value), lambda: Path(directory))
sys.stdout.buffer.write(__import__("msgspec").json.encode(made.payload) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
made.close()
"""

READER = """
import sys, zlib
import msgspec
from nblaunch.capture import pickling, shared_memory
from nblaunch.protocol.messages import Payload

payload = msgspec.json.decode(sys.argv[1], type=Payload)
stream, *buffers = shared_memory.get(payload, private=False)
print(zlib.crc32(pickling.loads(stream, buffers)))
"""


class Maker:
    """Another process, which has made a payload and lives until it is left."""

    def __init__(self, where: str, directory: Path, size: int) -> None:
        arguments = [sys.executable, "-c", MAKER, where, str(directory), str(size)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.payload = msgspec.json.decode(self.process.stdout.readline(), type=Payload)

    def leave(self) -> None:
        """Let it free what it has made, and end."""
        self.process.communicate(timeout=30)


@pytest.fixture
def make(tmp_path) -> Iterator[Callable[..., Maker]]:
    made: list[Maker] = []

    def make_one(where: str, size: int = SIZE) -> Maker:
        made.append(Maker(where, tmp_path, size))
        return made[-1]

    yield make_one
    for each in made:
        each.process.kill()
        each.process.communicate()


def unneeded() -> Path:
    raise AssertionError("there is /proc")


def value_of(payload: Payload) -> bytes:
    stream, *buffers = shared_memory.get(payload, private=True)
    return bytes(pickling.loads(stream, buffers))


def whole(size: int = SIZE) -> bytes:
    return bytes(range(256)) * (size // 256)


def opened() -> list[str]:
    """Return the names of payloads' files that this process has open."""
    links = [each.readlink().name for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [name for name in links if name.startswith(("memfd:nblaunch", "payload-"))]


def mapped() -> int:
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:nblaunch") + maps.count("payload-")


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_what_is_held_is_there_after_its_maker(make, tmp_path, where):
    maker = make(where)
    assert bool(maker.payload.path) is (where == "on disk")
    with shared_memory.hold(maker.payload, unneeded) as held:
        maker.leave()
        assert list(tmp_path.iterdir()) == []
        assert (held.payload.pid, held.payload.path) == (os.getpid(), "")
        assert value_of(held.payload) == whole()
        assert value_of(held.payload) == whole(), "to everyone who wants it"


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_a_third_process_maps_what_is_held(make, where):
    maker = make(where)
    with shared_memory.hold(maker.payload, unneeded) as held:
        maker.leave()
        asked = msgspec.json.encode(held.payload).decode()
        read = subprocess.check_output([sys.executable, "-c", READER, asked], text=True)
        assert int(read) == zlib.crc32(whole())


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_nothing_is_mapped_and_closed_means_gone(make, where):
    maker = make(where)
    before = mapped()
    held = shared_memory.hold(maker.payload, unneeded)
    maker.leave()
    assert len(opened()) == 1
    assert mapped() == before
    held.close()
    assert opened() == []
    with pytest.raises(FileNotFoundError):
        shared_memory.get(held.payload, private=True)


def test_what_is_mapped_stays_when_it_is_held_no_longer(make):
    maker = make("in memory")
    with shared_memory.hold(maker.payload, unneeded) as held:
        stream, *buffers = shared_memory.get(held.payload, private=False)
    maker.leave()
    assert bytes(pickling.loads(stream, buffers)) == whole()


def test_a_small_payload_is_held_by_its_message(make):
    maker = make("in memory", 1024)
    with shared_memory.hold(maker.payload, unneeded) as held:
        assert held.payload is maker.payload
        assert opened() == []
        assert value_of(held.payload) == whole(1024)


def test_what_its_maker_no_longer_holds_is_an_error(make):
    maker = make("on disk")
    maker.leave()
    with pytest.raises(FileNotFoundError):
        shared_memory.hold(maker.payload, unneeded)


def test_less_than_was_announced_is_an_error_and_leaves_no_descriptor(tmp_path):
    path = tmp_path / "payload-short"
    path.write_bytes(b"short")
    with pytest.raises(OSError, match="was announced"):
        shared_memory.hold(Payload(sizes=(1000,), path=str(path)), unneeded)
    assert opened() == []


def test_without_proc_a_file_is_linked_until_it_is_closed(make, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_DESCRIPTORS", tmp_path / "no proc")
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    maker = make("on disk")
    held = shared_memory.hold(maker.payload, lambda: kept)
    maker.leave()
    assert opened() == []
    assert [str(each) for each in kept.iterdir()] == [held.payload.path]
    assert value_of(held.payload) == whole()
    held.close()
    assert list(kept.iterdir()) == []


def test_a_number_that_another_file_has_by_now_is_not_taken_for_the_payload(tmp_path):
    """A runtime closes values that it no longer keeps, and the system gives their numbers again."""
    outgoing = shared_memory.put(pickling.dumps(b"x" * 1_000_000), lambda: tmp_path)
    payload = outgoing.payload
    outgoing.close()
    other = os.memfd_create("another")
    try:
        os.dup2(other, payload.fd)
        os.ftruncate(payload.fd, 2_000_000)
        with pytest.raises(FileNotFoundError, match="which its owner has closed since"):
            shared_memory.get(payload, private=True)
        with pytest.raises(FileNotFoundError, match="which its owner has closed since"):
            shared_memory.hold(payload, lambda: tmp_path)
    finally:
        for each in {other, payload.fd}:
            os.close(each)
