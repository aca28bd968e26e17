"""Follow one cell through its processes, by time stamps, and draw it as a page.

    python tests/benchmarks/cell_timeline.py [--fresh] [--ranks N] [--repeats N] [CHECKOUT] > cell.html

The cell is one of a session; with `--fresh` it runs on fresh ranks, 3 s apart: a standby group is there.

The functions of `STEPS` are wrapped as their modules are loaded, in the kernel, in the runtime and on the
ranks, and note when each call began and ended, by the one monotonic clock of the machine; that costs about a
microsecond a call. A row of the page is a thread. Of all repeats the cell is drawn that took the median time.
"""

from __future__ import annotations

import argparse
import html
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[2]
WIDTH, BAR = 1500, 18
PACE_SECONDS = 3.0
"""Between two cells on fresh ranks: how fast a user goes on."""
CELL = """%%distributed {options}
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
t.item()"""
STEPS = {
    "nblaunch.magic.magics": [
        "DistributedMagics._run_cell",
        "DistributedMagics._names_in",
        "parse_line",
        "_after_cell",
    ],
    "nblaunch.client.preparation": ["fresh_job"],
    "nblaunch.client.session": ["LiveSession.prepare_cell", "LiveSession._run"],
    "nblaunch.client.run": ["run_fresh", "_submit", "_collect", "JobWait.wait", "JobWait._take"],
    "nblaunch.client.line": ["ClientLine._send", "ClientLine._read"],
    "nblaunch.view.display": ["WidgetView.close", "html_and_text", "_display"],
    "nblaunch.runtime.connections": ["ClientConnection._read", "_Outbox.flush"],
    "nblaunch.runtime.requests": ["RequestHandler._wait_for"],
    "nblaunch.runtime.worker_groups": ["FreshRanks.take", "FreshRanks.used"],
    "nblaunch.host.hub": ["Hub.send", "Hub._receive", "Hub._run_calls", "Hub._tick"],
    "nblaunch.group.lifecycle": ["step"],
    "nblaunch.group.standby": ["Standby._prepare"],
    "nblaunch.runtime.jobs": ["RunningJob._conclude"],
    "nblaunch.rank.control": ["Link._receive", "Link.send"],
    "nblaunch.rank.main": [
        "Rank._prepare",
        "Rank._work",
        "Rank._begin",
        "Rank._do",
        "Rank._returned",
        "Rank._report_names",
        "Rank._leave",
    ],
    "nblaunch.rank.process_group": ["form", "leave"],
    "nblaunch.rank.shell": ["RankShell.transform_cell", "RankShell.transform_ast", "RankShell.run_code"],
}
"""By module, the functions whose calls are noted."""

NOTING = """
import functools, importlib.abc, importlib.machinery, os, sys, threading, time

steps, found = {steps!r}, {found!r}

def noted(function, name):
    @functools.wraps(function)
    def call(*args, **keywords):
        began = time.perf_counter_ns()
        try:
            return function(*args, **keywords)
        finally:
            ended = time.perf_counter_ns()
            line = f"{{began}} {{ended}} {{os.getpid()}} {{threading.get_native_id()}} {{name}}\\n"
            os.write(out(), line.encode())
    return call

@functools.cache
def out():
    return os.open(found, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in steps:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            for name in steps[fullname]:
                *owner, attribute = name.split(".")
                where = vars(module)[owner[0]] if owner else module
                setattr(where, attribute, noted(getattr(where, attribute), name))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


class Call(NamedTuple):
    """A call of a step, in nanoseconds."""

    began: int
    ended: int
    pid: int
    thread: int
    name: str


def run(
    directory: Path, checkout: Path, ranks: int, repeats: int, *, fresh: bool
) -> tuple[list[tuple[int, int]], int]:
    """Run the cell in a kernel; return when each repeat was sent and was idle, and the kernel's pid."""
    manager = KernelManager(ip="127.0.0.1")
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=command, display_name="timeline", language="python")
    path = f"{directory}{os.pathsep}{checkout}"
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "TMPDIR": str(directory),
        "NBLAUNCH_STANDBY": "1" if fresh else "0",
    }
    begin = [] if fresh else [f"%distributed start -n {ranks}"]
    cell = CELL.format(options=f"-n {ranks}" if fresh else "")
    manager.start_kernel(env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        for line in ("%load_ext nblaunch", *begin, cell, cell, cell):
            client.execute_interactive(line, output_hook=lambda _: None, timeout=60)
        times = []
        for _ in range(repeats):
            time.sleep(PACE_SECONDS if fresh else 0)
            began = time.perf_counter_ns()
            client.execute_interactive(cell, output_hook=lambda _: None, timeout=60)
            times.append((began, time.perf_counter_ns()))
        return times, manager.provisioner.pid
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()


def page(calls: list[Call], began: int, ended: int, kernel: int) -> str:
    """Return the page: a row of bars for each thread, a bar for each call, inner calls below outer ones."""
    processes = {kernel: "kernel"}
    for call in calls:
        if call.name.startswith("Rank"):
            processes.setdefault(call.pid, "rank")
    rows: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in sorted(calls):
        rows[call.pid, call.thread].append(call)
    scale, top, parts = WIDTH / (ended - began), 44, []
    for (pid, thread), row in sorted(rows.items(), key=lambda each: each[1][0].began):
        parts.append(_text(0, top - 4, f"{processes.get(pid, 'runtime')} {pid}, thread {thread}"))
        unfinished: list[int] = []
        deepest = 0
        for call in row:
            unfinished = [until for until in unfinished if until > call.began]
            parts.append(_bar(call, began, scale, top + BAR * len(unfinished)))
            deepest = max(deepest, len(unfinished))
            unfinished.append(call.ended)
        top += BAR * (deepest + 1) + 26
    for at in range(0, ended - began, 1_000_000):
        x = at * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{top}" stroke="#ccc"/>')
        parts.append(_text(x, 12, f"{at / 1e6:g} ms"))
    size = f'width="{WIDTH + 20}" height="{top}" font-family="sans-serif" font-size="10"'
    return f"<!doctype html><title>One cell</title><svg {size}>{''.join(parts)}</svg>"


def _bar(call: Call, began: int, scale: float, y: int) -> str:
    left, wide = (call.began - began) * scale, max((call.ended - call.began) * scale, 1)
    short = call.name.rpartition(".")[2]
    label = _text(left + 2, y + 12, short) if wide > 6 * len(short) else ""
    times = f"at {(call.began - began) / 1e3:.0f} us, for {(call.ended - call.began) / 1e3:.0f} us"
    color = f"hsl({zlib.crc32(call.name.encode()) % 360} 60% 75%)"
    return (
        f"<g><title>{html.escape(call.name)}: {times}</title>"
        f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{BAR - 2}" fill="{color}"/>{label}</g>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def main() -> None:
    """Run, choose the median, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="on fresh ranks, at a user's pace")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found = directory / "found"
        (directory / "sitecustomize.py").write_text(NOTING.format(steps=STEPS, found=str(found)))
        checkout = parsed.checkout.resolve()
        times, kernel = run(directory, checkout, parsed.ranks, parsed.repeats, fresh=parsed.fresh)
        noted = [line.split(maxsplit=4) for line in found.read_text().splitlines()]
    median = statistics.median_low(ended - began for began, ended in times)
    began, ended = next(each for each in times if each[1] - each[0] == median)
    calls = [
        Call(int(since), int(until), int(pid), int(thread), name)
        for since, until, pid, thread, name in noted
        if began <= int(since) <= ended
    ]
    print(page(calls, began, ended, kernel))
    print(f"the median of {len(times)} cells took {median / 1e6:.2f} ms", file=sys.stderr)


if __name__ == "__main__":
    main()
