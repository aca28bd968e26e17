"""What `--watch` costs of a DDP step of about 20 ms: percent of a step, both arms in one run.

Some steps with and some without the watch take turns on the same ranks, so what else the machine does meets
both alike. The first steps of a turn do not count: they fill caches that a job fills once. `percent` returns
percent by name: of `nan`, `desync` and both.
"""

from __future__ import annotations

import sys
from typing import Any

import nblaunch

TURNS = 20
STEPS, WARMING = 20, 5
"""Of a turn; the first ones do not count."""
BATCH = 256
LAYERS, WIDTH = 4, 512
AT_MOST = 3.0
"""Percent of a step of 20 ms that the default, both together, may cost."""


def _steps(kinds: tuple[tuple[str, ...], ...], turns: int, batch: int) -> dict[str, float]:
    """On a rank: return the lower quartile of the steps of each kind, in ms; of plain ones as `plain`."""
    import contextlib
    import pathlib
    import statistics
    import tempfile
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from nblaunch.probes.watch import Watch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        parts += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*parts))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(batch, WIDTH)
    names: list[str | None] = [None]
    if dist.get_rank() == 0:
        names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, 0)
    directory = pathlib.Path(str(names[0]))

    def step() -> float:
        dist.barrier()
        begun = time.perf_counter()
        loss = model(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return 1000 * (time.perf_counter() - begun)

    arms: tuple[tuple[str, ...], ...] = ((), *kinds)
    taken: dict[tuple[str, ...], list[float]] = {arm: [] for arm in arms}
    for number in range(turns * len(arms)):
        arm = arms[number % len(arms)]
        watch = Watch(arm, {}, print) if arm else None
        with contextlib.ExitStack() as stack:
            if watch is not None:
                watch.begin(str(number), directory, 0)
                stack.callback(watch.end)
            taken[arm] += [step() for _ in range(STEPS)][WARMING:]
    # The lower quartile: what else the machine does makes steps longer, and never shorter.
    return {",".join(arm) or "plain": statistics.quantiles(each)[0] for arm, each in taken.items()}


def percent(
    *kinds: tuple[str, ...], turns: int = TURNS, batch: int = BATCH, nproc: int = 2
) -> dict[str, float]:
    """Return what each kind costs, in percent of a plain step, of the slowest rank; `step` is that in ms."""
    options: dict[str, Any] = {"env": {"OMP_NUM_THREADS": "1"}, "nproc": nproc}
    found = nblaunch.run(
        _steps, (kinds or (("nan",), ("desync",), ("nan", "desync")), turns, batch), **options
    )
    plain = max(each["plain"] for each in found.values)
    names = [name for name in found.values[0] if name != "plain"]
    costs = {name: max(each[name] / each["plain"] - 1 for each in found.values) * 100 for name in names}
    return {"step": plain, **costs}


if __name__ == "__main__":
    for name, value in percent(turns=int(sys.argv[1]) if len(sys.argv) > 1 else TURNS).items():
        print(f"{name:12s} {value:8.2f} {'ms' if name == 'step' else '%'}")
