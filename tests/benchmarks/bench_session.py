"""What ranks that stay cost: a cell, a call, data there and back, coming back, memory, and many of them.

    python tests/benchmarks/bench_session.py [--parts cells,known,calls,data,save,attach,...] [--repeats N]

Every figure is a ratio to something measured in the same run, beside it; but for a call's milliseconds
and a rank's megabytes, which are what is promised.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

import nblaunch

ROOT = Path(__file__).parents[2]
MEGABYTE = 1_000_000
DATA = 64 * 1024 * 1024  # float32: 256 MB
REDUCE = """%%distributed
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
t.item()"""


def reduce() -> float:
    """Sum a one of every rank."""
    import torch
    from torch import distributed

    total = torch.ones(1)
    distributed.all_reduce(total)
    return float(total)


def median(call: Callable[[], object], repeats: int) -> float:
    """Return the median of the seconds that a call takes."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


class Notebook:
    """A kernel, driven as a notebook drives it."""

    def __init__(self, directory: str) -> None:
        """Start it, and load the extension."""
        manager = KernelManager(ip="127.0.0.1")
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        manager._kernel_spec = KernelSpec(argv=command, display_name="bench", language="python")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": directory, "NBLAUNCH_STANDBY": "0"}
        manager.start_kernel(env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._manager, self._client = manager, manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self.run("%load_ext nblaunch")

    def run(self, code: str) -> str:
        """Run a cell, request to idle; return what it printed."""
        printed: list[str] = []
        self._client.execute_interactive(
            code, output_hook=lambda message: printed.append(message["content"].get("text", "")), timeout=60
        )
        return "".join(printed)

    def close(self) -> None:
        """Shut the kernel down."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()


def cells(directory: str, repeats: int) -> None:
    """Compare a cell on ranks that are up with a plain cell: they take turns."""
    for nproc in (2, 8):
        notebook = Notebook(directory)
        try:
            ratio = _cell(notebook, nproc, repeats)
        finally:
            notebook.close()
        line(f"session cell, {nproc} ranks / plain cell", ratio)


def _cell(notebook: Notebook, nproc: int, repeats: int) -> float:
    notebook.run(f"%distributed start -n {nproc}")
    for _ in range(3):
        notebook.run(REDUCE)
    plain, ours = [], []
    for _ in range(repeats):
        plain.append(median(lambda: notebook.run("1 + 1"), 1))
        ours.append(median(lambda: notebook.run(REDUCE), 1))
    return statistics.median(ours) / statistics.median(plain)


KNOWN = """
import time, torch, cloudpickle
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
model = torch.nn.Sequential(*(Block() for _ in range(250)))
words = {f"w{number}": number for number in range(100_000)}
"""
PICKLED = "began = time.perf_counter(); cloudpickle.dumps((model, words)); print(time.perf_counter() - began)"


def known(directory: str, repeats: int) -> None:
    """Time a cell over much that the ranks have, and that is compared with what was sent."""
    notebook = Notebook(directory)
    try:
        notebook.run("%distributed start -n 2")
        notebook.run(KNOWN)
        pickled = min(float(notebook.run(PICKLED)) for _ in range(3))
        notebook.run("%%distributed\nmodel, words; None")
        nothing, much = [], []
        for _ in range(repeats):
            nothing.append(median(lambda: notebook.run("%%distributed\nNone"), 1))
            much.append(median(lambda: notebook.run("%%distributed\nmodel, words; None"), 1))
    finally:
        notebook.close()
    more = statistics.median(much) - statistics.median(nothing)
    line("a cell over 1,000 parameters and 100,000 words, ms", 1000 * more)
    line("pickling them / what that cell costs", pickled / more)


def calls(_: str, repeats: int) -> None:
    """Time `Session.run` without a view."""
    for nproc in (2, 8):
        with nblaunch.Session(nproc=nproc, display=False) as session:
            median(lambda: session.run(reduce), 10)
            line(f"Session.run, {nproc} ranks, ms", 1000 * median(lambda: session.run(reduce), 5 * repeats))


def data(_: str, repeats: int) -> None:
    """Compare data there and back with a copy of it in memory."""
    import torch

    array = torch.ones(DATA)
    copy = median(array.clone, 7)
    with nblaunch.Session(nproc=8, display=False) as session:
        push = median(lambda: session.push({"array": array}), max(repeats // 6, 3))
        session.run(reduce)
    line("memory copy of 256 MB / push of it to 8 ranks", copy / push)
    with nblaunch.Session(nproc=2, display=False) as session:
        session.cell(f"import torch; array = torch.ones({DATA})", namespace={})
        pull = median(lambda: session.pull("array"), max(repeats // 6, 3))
    line("2 memory copies of 256 MB / pull from 2 ranks", 2 * copy / pull)


WRITTEN = """
import os, sys
import numpy
whole = memoryview(numpy.random.default_rng().bytes(1 << 20))
print(flush=True)
sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for _ in range(1 << 10):
    os.write(fd, whole)
os.fsync(fd)
"""
OWN = "import torch; mine = torch.rand(1 << 28, generator=torch.Generator().manual_seed(rank))"


def save(directory: str, _: int) -> None:
    """Compare a save of 1 GB of each of 4 ranks with what 4 processes write, and cells beside it with others.

    A cell reduces among all ranks, and waits for the slowest.
    """
    command = [sys.executable, "-c", WRITTEN]
    writing = [
        subprocess.Popen([*command, f"{directory}/{rank}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in range(4)
    ]
    for each in writing:
        assert each.stdout is not None
        each.stdout.readline()
    began = time.perf_counter()
    for each in writing:
        each.communicate(b"\n")
    written = time.perf_counter() - began
    for rank in range(4):
        Path(f"{directory}/{rank}").unlink()
    with nblaunch.Session(nproc=4, display=False) as session:
        session.cell(OWN, namespace={})
        idle = [median(lambda: session.run(reduce), 1) for _ in range(50)]
        began = time.perf_counter()
        session.save(f"{directory}/save")
        waited = time.perf_counter() - began
        began = time.perf_counter()
        going = session.save(f"{directory}/save", background=True)
        begun = time.perf_counter() - began
        beside = []
        while not going.whole:
            beside.append(median(lambda: session.run(reduce), 1))
        whole = time.perf_counter() - began
    line("4 x 1 GB written by 4 processes / saved", written / waited)
    line("4 x 1 GB written by 4 processes / saved beside cells", written / whole)
    line("until cells go on / saved beside cells", begun / whole)
    line("a cell beside the save / a cell", statistics.median(beside) / statistics.median(idle))
    line("the slowest beside the save / a cell", max(beside) / statistics.median(idle))


START = "session = nblaunch.Session(nproc=2, name='bench', detach=True, linger='1m')"
ATTACH = "session = nblaunch.Session.attach('bench')"
END = "print(time.perf_counter() - began)"


def attach(directory: str, repeats: int) -> None:
    """Compare coming back to a session, each time from another Python, with starting it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": directory, "XDG_RUNTIME_DIR": directory}

    def seconds(statement: str) -> float:
        program = f"import time, nblaunch\nbegan = time.perf_counter()\n{statement}\n{END}"
        command = [sys.executable, "-c", program]
        return float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)

    start = seconds(START)
    try:
        line(
            "attach from another Python / start of the session",
            statistics.median(seconds(ATTACH) for _ in range(max(repeats // 3, 3))) / start,
        )
    finally:
        stop = [sys.executable, "-m", "nblaunch", "stop", "bench"]
        subprocess.run(stop, env=environment, check=True, capture_output=True)


def private(pids: list[int]) -> list[float]:
    """Return the megabytes that belong to each process alone."""
    return [psutil.Process(pid).memory_full_info().uss / MEGABYTE for pid in pids]


def memory(directory: str, _: int) -> None:
    """Compare the memory of 8 idle ranks with that of 8 spawned ones."""
    with nblaunch.Session(nproc=8, display=False) as session:
        mine = private(session.run(os.getpid).values)
    program = Path(directory) / "spawned.py"
    program.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nprint(os.getpid(), flush=True)\nsys.stdin.read()\n"
    )
    store = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "WORLD_SIZE": "8"}
    spawned = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**store, "RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(8)
    ]
    try:
        theirs = private([int(each.stdout.readline()) for each in spawned if each.stdout is not None])
    finally:
        for each in spawned:
            each.communicate()
    line("private MB of an idle rank, the largest of 8", max(mine))
    line("8 idle ranks / 8 spawned ranks", sum(mine) / sum(theirs))


def many(_: str, repeats: int) -> None:
    """Start, dispatch to and close more and more ranks; what each one costs must stay the same."""
    costs = {}
    for nproc in (16, 32, 64):
        started = time.perf_counter()
        session = nblaunch.Session(nproc=nproc, display=False)
        session.run(os.getpid)
        up = time.perf_counter()
        dispatch = median(lambda: session.run(os.getpid), max(repeats // 3, 3))  # noqa: B023 - called here
        closing = time.perf_counter()
        session.close()
        closed = time.perf_counter()
        costs[nproc] = (up - started, dispatch, closed - closing)
    for index, name in enumerate(("start", "dispatch", "close")):
        line(f"{name}, per rank: 32 / 16", costs[32][index] / costs[16][index] / 2)
        line(f"{name}, per rank: 64 / 32", costs[64][index] / costs[32][index] / 2)


def line(name: str, figure: float) -> None:
    """Print one figure."""
    print(f"  {name:50s}{figure:8.2f}", flush=True)


PARTS = {
    "cells": cells,
    "known": known,
    "calls": calls,
    "data": data,
    "save": save,
    "attach": attach,
    "memory": memory,
    "many": many,
}


def main() -> None:
    """Print the figures of the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    print(f"sessions, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as directory:
        for part in options.parts.split(","):
            PARTS[part](directory, options.repeats)


if __name__ == "__main__":
    main()
