"""Fresh ranks, an all_reduce, and their values back: nblaunch beside torch's own ways, in one run.

    python tests/benchmarks/bench_launch.py [-n 2] [--repeats 10]

Each way has a process of its own, as a notebook has its kernel. They take turns, so that a busy machine
slows all of them alike. What counts is the ratio of two lines of the same run, never the seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable

WAYS = {
    "nblaunch": "nblaunch.run",
    "fork": "elastic_launch, fork of the kernel",
    "spawn": "elastic_launch, spawn",
}


def reduce() -> float:
    """Sum 1, 2, ... over all ranks; makes a process group where there is none."""
    import torch
    from torch import distributed

    own = not distributed.is_initialized()
    if own:
        distributed.init_process_group("gloo")
    total = torch.ones(1) * (distributed.get_rank() + 1)
    distributed.all_reduce(total)
    if own:
        distributed.destroy_process_group()
    return float(total)


def with_nblaunch(nproc: int) -> list[float]:
    """Run on fresh ranks of nblaunch."""
    import nblaunch

    values: list[float] = nblaunch.run(reduce, nproc=nproc, backend="gloo").values
    return values


def with_torch(nproc: int, start_method: str) -> list[float]:
    """Run under torchelastic's own launcher."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method=start_method,
    )
    values: dict[int, float] = elastic_launch(config, reduce)()
    return [values[rank] for rank in range(nproc)]


def work(way: str, nproc: int) -> None:
    """Launch once for each line on standard input, and answer with the seconds it took."""
    run: Callable[[int], list[float]] = (
        with_nblaunch if way == "nblaunch" else lambda nproc: with_torch(nproc, way)
    )
    import torch.distributed.launcher.api  # noqa: F401 - what a notebook has imported is not measured

    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        values = run(nproc)
        seconds = time.perf_counter() - started
        if values != [nproc * (nproc + 1) / 2] * nproc:
            message = f"{way} returned {values}"
            raise RuntimeError(message)
        print(json.dumps(seconds), flush=True)


class Worker:
    """The process of one way."""

    def __init__(self, way: str, nproc: int, directory: str) -> None:
        """Start it, and wait until it has imported torch."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", way, "-n", str(nproc)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": directory, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self._answer()

    def launch(self) -> float:
        """Launch once and return the seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            try:
                return str(json.loads(line))
            except json.JSONDecodeError:
                continue  # whatever a library prints
        message = f"the benchmark's process ended with exit code {self._process.wait()}"
        raise RuntimeError(message)

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate()


def measure(nproc: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of nblaunch's first launch, and each way's median."""
    # torchelastic leaves its logs in the temporary directory.
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as started:
        workers = {}
        for way in WAYS:
            workers[way] = Worker(way, nproc, directory)
            started.callback(workers[way].close)
        # It starts the fork server, which later launches find.
        first = workers["nblaunch"].launch()
        rounds = [{way: worker.launch() for way, worker in workers.items()} for _ in range(repeats)]
    return first, {way: statistics.median(each[way] for each in rounds) for way in WAYS}


def main() -> None:
    """Print the seconds and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--nproc", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.nproc)
        return
    first, seconds = measure(options.nproc, options.repeats)
    print(f"fresh ranks, n = {options.nproc}, median of {options.repeats}: seconds")
    print(f"  {'nblaunch.run, the first time':40s}{first:8.3f}")
    for way, label in WAYS.items():
        print(f"  {label:40s}{seconds[way]:8.3f}")
    print("ratios")
    print(f"  {'nblaunch / fork':40s}{seconds['nblaunch'] / seconds['fork']:8.2f}")
    print(f"  {'spawn / nblaunch':40s}{seconds['spawn'] / seconds['nblaunch']:8.2f}")


if __name__ == "__main__":
    main()
