"""A large payload is mapped: no descriptor is held, and the memory goes with the last view of it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from nblaunch.capture import pickling, shared_memory
from nblaunch.protocol.messages import Payload

SIZE = 9 * 1024 * 1024


@pytest.fixture
def outgoing(tmp_path):
    with shared_memory.put(pickling.dumps(np.arange(SIZE // 8)), lambda: tmp_path) as kept:
        yield kept


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:nblaunch")


def test_a_payload_is_whole_where_the_system_writes_less_than_it_is_given(tmp_path, monkeypatch):
    """Linux writes at most 2 GiB with one call."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:1_000_000], offset))
    sent = np.arange(SIZE // 8)
    with shared_memory.put(pickling.dumps(sent), lambda: tmp_path) as kept:
        _, data = shared_memory.get(kept.payload, private=True)
        assert np.array_equal(np.frombuffer(data, dtype="i8"), sent)


def test_mapped_values_hold_no_descriptor(outgoing):
    before = descriptors()
    kept = [
        shared_memory.get(outgoing.payload, private=private) for private in (True, False) for _ in range(10)
    ]
    assert descriptors() == before
    assert [int(np.frombuffer(each[1], dtype="i8")[-1]) for each in kept] == [SIZE // 8 - 1] * 20


def test_the_memory_lives_as_long_as_a_view_of_it(outgoing):
    before = mappings()
    stream, buffer = shared_memory.get(outgoing.payload, private=False)
    part = pickling.loads(stream, [buffer])[5:9]
    del stream, buffer
    gc.collect()
    assert mappings() == before + 1
    assert part.tolist() == [5, 6, 7, 8]
    del part
    gc.collect()
    assert mappings() == before


def test_a_private_mapping_is_a_copy_and_a_shared_one_is_not(outgoing):
    first, second, copy = (
        shared_memory.get(outgoing.payload, private=private)[1] for private in (False, False, True)
    )
    first[0] = 200
    assert second[0] == 200
    copy[1] = 100
    assert first[1] != 100


def test_a_mapping_that_cannot_be_made_is_an_error(tmp_path):
    path = tmp_path / "payload"
    with path.open("wb") as file:
        file.truncate(2 * SIZE)
    sizes = (1 << 62,)
    with pytest.raises(OSError, match="announced"):
        shared_memory.get(Payload(sizes=sizes, path=str(path)), private=True)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="could not be mapped"):
            shared_memory._mapped(fd, SIZE, private=False)
    finally:
        os.close(fd)
