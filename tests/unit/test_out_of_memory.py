"""CUDA out of memory is told in one paragraph: asked, free, and who holds the rest."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nblaunch.diagnose.failures import explain_out_of_memory
from nblaunch.protocol.messages import DeviceMemory, FailureRecord

GIB = 1 << 30
MIB = 1 << 20
KERNEL = "the notebook's kernel"
HOLDERS = {10: KERNEL, 100: "rank 0", 101: "rank 1", 200: "ranks of other runs", 201: "ranks of other runs"}


def told(**changes):
    """Return the message for a shortage on rank 1's GPU."""
    known = {
        "device": "cuda:1",
        "uuid": "u",
        "asked": 20 * GIB,
        "free": 2 * GIB,
        "total": 80 * GIB,
        "allocated": 50 * GIB,
        "reserved": 60 * GIB,
        "own": 61 * GIB,
    }
    memory = DeviceMemory(**{**known, **changes})
    failure = FailureRecord(
        type="torch.OutOfMemoryError", message="CUDA out of memory. Torch's.", memory=memory
    )
    return explain_out_of_memory(failure, 1, HOLDERS, KERNEL).message


def test_it_says_what_was_asked_what_is_free_and_what_the_rank_holds():
    assert told() == (
        "CUDA out of memory. Tried to allocate 20.0 GiB on cuda:1 of rank 1, where 2.0 GiB of 80.0 GiB are "
        "free. Rank 1 holds 61.0 GiB (torch: 50.0 GiB allocated, 60.0 GiB reserved)."
    )


def test_the_others_on_that_gpu_are_named_the_largest_first_and_strangers_last():
    others = {100: 2 * GIB, 10: 3 * GIB, 200: GIB, 201: GIB // 2, 4711: 9 * GIB, 4712: 512 * MIB, 101: 1000}
    assert told(others=others).endswith(
        "reserved), the notebook's kernel 3.0 GiB, rank 0 2.0 GiB, ranks of other runs 1.5 GiB, other "
        "processes 9.5 GiB."
    )


def test_a_limit_is_named_only_where_it_is_why():
    assert "set_per_process_memory_fraction" not in told(limit=81 * GIB)
    assert "are free, and torch may have 70.0 GiB in this rank (set_per" in told(
        limit=70 * GIB, free=30 * GIB
    )


def test_a_kernel_that_holds_much_is_to_free_it():
    assert told(others={10: 9 * GIB}).endswith("then call torch.cuda.empty_cache().")
    assert "empty_cache" not in told(others={10: GIB})


def test_memory_in_pieces_is_named():
    assert told(asked=9 * GIB).endswith("expandable_segments:True joins them.")


def test_where_the_driver_names_no_processes_the_rest_is_told_as_one(monkeypatch):
    """As in a container, where the kernel still knows of itself."""
    assert (
        "Torch holds 60.0 GiB in rank 1 (50.0 GiB allocated, 60.0 GiB reserved); CUDA itself and other "
        "processes hold 18.0 GiB." in told(own=None)
    )
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(uuid="tu"[index]),
        memory_reserved=lambda index: (index + 1) * 4 * GIB,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert "hold 18.0 GiB, 8.0 GiB of it torch in the notebook's kernel. Delete" in told(own=None)


@pytest.mark.parametrize("changes", [{}, {"own": None}, {"limit": GIB}, {"others": {10: 70 * GIB}}])
def test_it_is_one_short_paragraph(changes):
    assert "\n" not in told(**changes)
    assert len(told(**changes)) < 500


def test_other_failures_are_left_as_they_are():
    failure = FailureRecord(type="builtins.ValueError", message="no")
    assert explain_out_of_memory(failure, 1, HOLDERS, KERNEL) is failure
