"""What a profile costs and how good its clocks are; each function returns figures by name.

python tests/benchmarks/insight_profile.py
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nblaunch
from nblaunch.insight import timeline
from nblaunch.insight.profile import CollectiveCall, Profile, RankProfile
from nblaunch.insight.trace import TracePart

_MS = 1_000_000
_STEPS = 25


Turn = tuple[float, float, float, float]
"""Of a turn: the median of a step without and with a profile, and its CPU time without and with one."""


def _alternating(milliseconds: float, rounds: int) -> list[Turn]:
    """Take turns with and without a profile, in one process group; all in seconds."""
    import torch

    from nblaunch.probes.profiling import Profiling
    from nblaunch.protocol.messages import Insight

    layers = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: int) -> float:
        began = time.perf_counter()
        nblaunch.step()
        optimizer.zero_grad()
        model(torch.ones(batch, 128)).sum().backward()
        optimizer.step()
        return time.perf_counter() - began

    def turn(batch: int) -> tuple[float, float]:
        torch.distributed.barrier()
        cpu = time.process_time()
        taken = statistics.median(step(batch) for _ in range(_STEPS))
        return taken, (time.process_time() - cpu) / _STEPS

    batch, slowest = 64, torch.zeros(1)
    while float(slowest) < milliseconds / 1e3:
        batch *= 2
        slowest = torch.tensor([min(step(batch) for _ in range(8))])
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    found = []
    for _ in range(rounds):
        off = turn(batch)
        with tempfile.TemporaryDirectory() as directory:
            insight = Insight(profile=True)
            with Profiling(0, insight, lambda *_: [], Path(directory), lambda *_: None):
                on = turn(batch)
        found.append((off[0], on[0], off[1], on[1]))
    return found


def overhead(rounds: int = 9) -> dict[str, float]:
    """Return how much longer steps of 20 ms take with a profile, in one run: the median of many turns.

    The CPU time says the same where other programs use the machine.
    """
    (turns, _) = nblaunch.run(_alternating, (20.0, rounds), nproc=2, env={"OMP_NUM_THREADS": "1"}).values
    return {
        "step without a profile, ms": statistics.median(each[0] for each in turns) * 1e3,
        "overhead of the profile, %": (statistics.median(each[1] / each[0] for each in turns) - 1) * 100,
        "overhead in CPU time, %": (statistics.median(each[3] / each[2] for each in turns) - 1) * 100,
    }


def clocks(ranks: int = 8) -> dict[str, float]:
    """Return how wrong the clocks of ranks on this host may be, in microseconds."""
    with nblaunch.Session(ranks, profile=True) as session:
        session.run(_collectives, (5,))
        profile = session.run(_collectives, (50,)).profile
    return {
        "clock error, µs": max(profile.clock_error.values()) * 1e6,
        "violation, µs": profile.clock_check.violation * 1e6,
    }


def _collectives(steps: int) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(steps):
        nblaunch.step()
        dist.all_reduce(torch.ones(10))


def summary(
    ranks: int = 8, steps: int = 200, collectives: int = 10, operators: int = 100
) -> dict[str, float]:
    """Return how long it takes to summarise and draw a profile of so many ranks and steps."""
    found = {rank: _recorded(rank, steps, collectives, operators) for rank in range(ranks)}
    traces = {rank: TracePart(bytes(8_000_000), 1, 0) for rank in range(ranks)}
    began = time.perf_counter()
    profile = Profile(found, traces)
    timeline.render(profile)
    _ = profile.path
    return {f"{ranks} ranks, {steps} steps: seconds": time.perf_counter() - began}


def _recorded(rank: int, steps: int, collectives: int, operators: int) -> RankProfile:
    calls, compute, marks, now = [], [], [], 0
    for step in range(steps):
        begin = now
        for number in range(collectives):
            for _ in range(operators // collectives):
                compute.append((now, now + _MS // 10))
                now += _MS // 8
            entry = now + rank * 1000
            sequence = step * collectives + number + 1
            calls.append(
                CollectiveCall("default_pg", sequence, "all_reduce", 1 << 20, entry, entry, now + _MS)
            )
            now += _MS
        marks.append((step, begin, now))
    return RankProfile(
        rank=rank, ended=now, steps=tuple(marks), compute=tuple(compute), calls=tuple(calls), clock_error=1e-5
    )


FIGURES: tuple[Callable[[], dict[str, float]], ...] = (clocks, overhead, summary)

if __name__ == "__main__":
    print(json.dumps({name: value for each in FIGURES for name, value in each().items()}, indent=1))
