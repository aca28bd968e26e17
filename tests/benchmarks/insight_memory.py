"""What is found: a peak of memory, a planted cause in a report, a planted sleep in a profile.

Each function returns figures by name.
"""

from __future__ import annotations

import os
import time

import nblaunch

MB = 1 << 20
TOKEN = 4
"""Characters."""


def peak(size: int = 200) -> dict[str, float]:
    """Have a rank take so many MB for a moment; return how far its peak is above what it has at the end."""
    used = nblaunch.run(_take, (size * MB,), nproc=2).ranks[1].memory
    assert used is not None
    assert used.host_peak is not None
    assert used.host_now is not None
    return {f"rank 1 took {size} MB for a moment: peak less now, MB": (used.host_peak - used.host_now) / MB}


def _take(size: int) -> None:
    if os.environ["RANK"] == "1":
        taken = bytearray(size)
        taken[::4096] = b"x" * len(taken[::4096])
        time.sleep(1)  # longer than between two looks at it


def report(ranks: int = 8, lines: int = 10_000) -> dict[str, float]:
    """Have one rank of a talkative run fail; return how large the report is, and how long it takes."""
    result = nblaunch.run(_talk, (ranks - 1, lines), nproc=ranks, check=False)
    began = time.perf_counter()
    made = result.report()
    documents = made.to_json(), made.to_markdown()
    seconds = time.perf_counter() - began
    assert all("planted" in each for each in documents)
    name = f"report of {ranks} ranks x {lines} lines"
    return {f"{name}, tokens": max(map(len, documents)) / TOKEN, f"{name}, s": seconds}


def _talk(odd: int, lines: int) -> None:
    rank = int(os.environ["RANK"])
    for number in range(lines):
        print(f"rank {rank} says {number} " + "and more " * 9)
    if rank == odd:
        msg = "planted"
        raise ValueError(msg)


def planted(ranks: int = 8, steps: int = 30) -> dict[str, float]:
    """Have one rank sleep 5 ms in each step; return in how many steps the profile does not name it."""
    odd = ranks - 3 if ranks > 3 else 1
    profile = nblaunch.run(_sleep, (odd, steps), nproc=ranks, profile=True).profile
    assert profile is not None
    named = [each for each in profile.straggler.values() if each.rank == odd]
    return {f"5 ms on one of {ranks} ranks: steps of {steps} that do not name it": steps - len(named)}


def _sleep(odd: int, steps: int) -> None:
    import torch
    from torch import distributed

    total = torch.ones(1000)
    for _ in range(steps):
        nblaunch.step()
        torch.ones(100, 100) @ torch.ones(100, 100)
        if int(os.environ["RANK"]) == odd:
            time.sleep(0.005)
        distributed.all_reduce(total)
