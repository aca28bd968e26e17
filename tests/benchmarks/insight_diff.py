"""What it costs to compare ranks: passes over memory, and bytes that move."""

from __future__ import annotations

import time
from typing import Any

import nblaunch

_SETUP = """
import torch, time
torch.manual_seed(0)
big = torch.rand({elements})
if rank == {odd}:
    big[{place}] += 0.5
"""

_COUNT = """
import nblaunch.probes.blocks as blocks
read = 0
if not hasattr(blocks, "real_hashes"):
    blocks.real_hashes, blocks.real_bytes = blocks.piece_hashes, blocks.HashedTensor._bytes
def counted_hashes(data):
    global read
    read += data.numel()
    return blocks.real_hashes(data)
def counted_bytes(self, start, count):
    global read
    found = blocks.real_bytes(self, start, count)
    read += found.numel()
    return found
blocks.piece_hashes, blocks.HashedTensor._bytes = counted_hashes, counted_bytes
"""

_SUM = """
begun = time.perf_counter()
big.sum()
time.perf_counter() - begun
"""

_HASH = """
from nblaunch.probes.blocks import hashed
begun = time.perf_counter()
hashed(big)
time.perf_counter() - begun
"""


def one_element_of_a_large_tensor(
    elements: int = 100_000_000, ranks: int = 8, odd: int = 3
) -> dict[str, Any]:
    """Compare a float32 tensor of which one rank has another element; count what is read and what moves."""
    place = elements * 7 // 9
    with nblaunch.Session(ranks) as session:
        session.cell(_SETUP.format(elements=elements, odd=odd, place=place), namespace={})
        session.cell(_COUNT, namespace={})
        begun = time.perf_counter()
        found = session.diff("big")
        seconds = time.perf_counter() - begun
        row = found.first
        assert row is not None
        assert row.path == f"big[{place}]", row
        assert (odd,) in row.groups
        read = session.pull("read")["read"]
        one_sum = max(session.cell(_SUM, namespace={}).values)
        one_hash = max(session.cell(_HASH, namespace={}).values)
    return {
        "elements": elements,
        "ranks": ranks,
        "passes over memory, by bytes, of the rank that read most": max(read) / (4 * elements),
        "bytes moved": found.moved,
        "seconds": seconds,
        "time of the comparison / time of a sum of the tensor on all ranks": seconds / one_sum,
        "time of the comparison / time of hashing the tensor on all ranks": seconds / one_hash,
    }


def many_tensors(tensors: int = 10_000, ranks: int = 8) -> dict[str, Any]:
    """Compare a model of many tensors, of which one differs on one rank."""
    with nblaunch.Session(ranks) as session:
        session.cell(
            "import torch\ntorch.manual_seed(0)\n"
            f"model = {{f'layers.{{n}}': torch.rand(100) for n in range({tensors})}}\n"
            "if rank == 1: model['layers.77'][3] = 5",
            namespace={},
        )
        begun = time.perf_counter()
        found = session.diff("model")
        seconds = time.perf_counter() - begun
        row = found.first
        assert row is not None
        assert row.path == "model['layers.77'][3]", row
        begun = time.perf_counter()
        session.run(int)
        empty = time.perf_counter() - begun
    return {
        "tensors": tensors,
        "bytes moved": found.moved,
        "seconds": seconds,
        "jobs' worth": seconds / empty,
    }


if __name__ == "__main__":
    import sys

    size = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000_000
    for figures in (one_element_of_a_large_tensor(size), many_tensors()):
        for name, value in figures.items():
            print(f"{name}: {value}")
