"""Ranks that send at the same moment do not all count on the same free memory."""

from __future__ import annotations

import os

import pytest

from nblaunch.capture import shared_memory
from nblaunch.capture.pickling import Packed

TOTAL = 4_000_000


@pytest.fixture
def memory(monkeypatch):
    """Have `_free_memory` answer 10 MB, less what memory files of this process have been given."""
    real, given = os.posix_fallocate, []

    def fallocate(fd, offset, length):
        real(fd, offset, length)
        given.append(length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr(shared_memory, "_free_memory", lambda: 10_000_000 - sum(given))
    return given


def packed():
    return Packed(memoryview(bytes(TOTAL)), ())


def test_what_is_enough_for_all_ranks_is_taken_without_a_lock(memory, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with shared_memory.put(packed(), lambda: tmp_path) as sent:
        assert sent.payload.fd >= 0
    assert memory == []
    assert list(tmp_path.iterdir()) == []


def test_where_it_is_not_enough_for_all_each_takes_its_share_before_the_next_looks(
    memory, monkeypatch, tmp_path
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    sent = [shared_memory.put(packed(), lambda: tmp_path) for _ in range(4)]
    try:
        assert [each.payload.path == "" for each in sent] == [True, True, False, False]
        assert memory[:2] == [TOTAL, TOTAL]
        for each in sent:
            assert shared_memory.get(each.payload, private=True)[0].nbytes == TOTAL
    finally:
        for each in sent:
            each.close()
