"""What sessions over nodes cost: a cell, fresh ranks, an edited module, a rank that dies, data to hosts.

    python tests/benchmarks/bench_hosts.py [--parts cells,fresh,module,killed,push] [--repeats 30]

Nodes are processes of this machine; for `push` they are on hosts in network namespaces, whose links carry
1 Gbit/s, which only root can make. Every figure is a ratio to something measured in the same run, beside it;
but for the seconds that are promised as such.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nblaunch

TESTS = Path(__file__).parents[1]
DATA = 64 * 1024 * 1024  # float32: 256 MB
REDUCE = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


def reduce() -> float:
    """Sum a one of every rank."""
    import torch
    from torch import distributed

    total = torch.ones(1)
    distributed.all_reduce(total)
    return float(total)


def nodes(count: int, **options: Any) -> dict[str, Any]:
    """Return the options of a session with a rank on each of so many nodes."""
    return {"nproc": 1, "nnodes": count, "on": "process", "grace": 1, **options}


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def turns(repeats: int, *calls: Callable[[], object]) -> list[float]:
    """Return the median of the seconds that each call takes: they take turns."""
    taken = [[seconds(call) for call in calls] for _ in range(repeats)]
    return [statistics.median(each) for each in zip(*taken, strict=True)]


def cells(_: str, repeats: int) -> None:
    """Compare a session's cell on nodes with one on as many ranks of one machine."""
    for count in (2, 4):
        with contextlib.ExitStack() as ending:
            opened = [
                ending.enter_context(nblaunch.Session(**options, name=name, display=False))
                for name, options in (("here", {"nproc": count}), ("nodes", nodes(count)))
            ]
            here, there = (lambda each=each: each.cell(REDUCE, namespace={}) for each in opened)
            turns(5, here, there)
            one, several = turns(repeats, here, there)
        line(f"session cell, {count} nodes / {count} ranks of one machine", several / one)


def fresh(_: str, repeats: int) -> None:
    """Compare fresh ranks on the nodes of a session with fresh ranks of one machine."""
    with nblaunch.Session(**nodes(2), display=False) as session:
        session.run(reduce)

        def there() -> None:
            nblaunch.run(reduce, **nodes(2), display=False)

        there()
        one, several = turns(
            max(repeats // 3, 3), lambda: nblaunch.run(reduce, nproc=2, display=False), there
        )
    line("fresh cell, a session's 2 nodes / one machine", several / one)
    line("fresh cell on a session's 2 nodes, s", several)


def module(directory: str, repeats: int) -> None:
    """Edit a module of the notebook's, which the nodes do not see, and use it on fresh ranks there."""
    project = Path(directory, "project")
    project.mkdir()
    edited = project / "edited.py"
    edited.write_text("VALUE = -1\n")
    python = Path(directory, "python")
    python.write_text(
        "#!/bin/sh\n"
        f"exec unshare --mount sh -c 'mount -t tmpfs none {project} && cd / && exec \"$@\"' "
        f'sh {sys.executable} "$@"\n'
    )
    python.chmod(0o700)
    sys.path.insert(0, str(project))
    sys.dont_write_bytecode = True
    options = nodes(2, node_python=str(python))
    with nblaunch.Session(**options, display=False):
        taken = []
        for number in range(max(repeats // 6, 3)):
            edited.write_text(f"VALUE = {number}\n")
            started = time.perf_counter()
            result = nblaunch.run(value_of_module, **options, display=False)
            taken.append(time.perf_counter() - started)
            assert result.values == [number] * 2
        plain, unchanged = turns(3, lambda: None, lambda: nblaunch.run(reduce, **options, display=False))
    line("edited module and run / run, on 2 nodes", statistics.median(taken) / (unchanged - plain))
    line("edited module, run on fresh ranks of 2 nodes, s", statistics.median(taken))


def value_of_module() -> int:
    """Return what the module has."""
    import edited

    return int(edited.VALUE)


def killed(_: str, repeats: int) -> None:
    """Kill a rank of a session on nodes, and time the next cell that has its value."""
    with nblaunch.Session(**nodes(2), display=False) as session:
        taken = []
        for _number in range(max(repeats // 6, 3)):
            os.kill(session.run(os.getpid).values[1], 9)
            started = time.perf_counter()
            while True:  # until the death is seen, a cell may fail of it
                result = session.run(reduce, check=False)
                if result.ok:
                    break
            taken.append(time.perf_counter() - started)
    line("rank killed, until the next cell has its values, s", statistics.median(taken))


def push(_: str, repeats: int) -> None:
    """Compare 256 MB to four hosts with 256 MB to one: a star would take four times as long."""
    sys.path.insert(0, str(TESTS))
    import torch
    from hosts import hosts

    array = torch.rand(DATA)
    with hosts(4, rate="1gbit") as made:
        python = str(made.python())
        taken = {}
        for count in (1, 4):
            with nblaunch.Session(
                **nodes(count, node_python=python, local_addr=made.address), display=False
            ) as session:
                times = []
                for _number in range(max(repeats // 6, 3)):
                    times.append(seconds(lambda: session.push({"array": array})))
                    session.cell("del array", namespace={})
                taken[count] = min(times)
    line("256 MB to 4 hosts / to one, at 1 Gbit/s", taken[4] / taken[1])


def line(name: str, figure: float) -> None:
    """Print one figure."""
    print(f"  {name:52s}{figure:8.2f}", flush=True)


PARTS = {"cells": cells, "fresh": fresh, "module": module, "killed": killed, "push": push}


def main() -> None:
    """Print the figures of the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(f"sessions over nodes, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as directory:
        for part in options.parts.split(","):
            PARTS[part](directory, options.repeats)


if __name__ == "__main__":
    main()
