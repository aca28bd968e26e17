"""A client that is stopped by a signal, or that does not read: the ranks do not wait for it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

MOST_GROWTH = 40e6
LEAST_PRINTED = 80e6
"""Bytes; the ranks print more than the runtime grows: what waits for one client is 8 MiB at most."""

FLOOD = """
%%distributed -n 2 --out res
import os, pathlib, time
rank = os.environ["RANK"]
text = "x" * 600
count = 0
slowest = 0.0
while not os.path.exists(FILE + "end"):
    before = time.monotonic()
    for _ in range(100):
        print(f"{count} {text}")
        count += 1
    slowest = max(slowest, time.monotonic() - before)
    pathlib.Path(FILE + rank + ".new").write_text(str(count))
    os.replace(FILE + rank + ".new", FILE + rank)
    if count > 350_000:
        time.sleep(0.5)  # a private log keeps 256 MB of a stream
count, slowest
"""


def runtime_of(kernel) -> psutil.Process:
    (keeper,) = psutil.Process(kernel.pid).children()
    (runtime,) = (each for each in keeper.children() if not each.children())
    return runtime


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_ranks_do_not_wait_for_a_client_that_is_stopped_and_it_misses_nothing(
    start_kernel, eventually, tmp_path, seconds
):
    kernel = start_kernel()
    kernel.ok("%distributed start -n 2")
    runtime = runtime_of(kernel)
    file = str(tmp_path / "count-")
    cell = kernel.submit(FLOOD.replace(" -n 2", "").replace("FILE", repr(file)))
    counts = [Path(f"{file}{rank}") for rank in range(2)]
    eventually(lambda: all(each.exists() for each in counts), "both ranks print")
    os.kill(kernel.pid, signal.SIGSTOP)
    try:
        time.sleep(1)
        before, lines = runtime.memory_info().rss, [int(each.read_text()) for each in counts]
        most = printed = 0
        began = time.monotonic()
        while time.monotonic() < began + seconds or 600 * printed < LEAST_PRINTED:
            assert time.monotonic() < began + seconds + 60, f"only {printed} lines were printed"
            most = max(most, runtime.memory_info().rss)
            time.sleep(0.1)
            printed = sum(int(each.read_text()) for each in counts) - sum(lines)
    finally:
        Path(f"{file}end").touch()
        os.kill(kernel.pid, signal.SIGCONT)
    print(f"the runtime grew by {(most - before) / 1e6:.0f} MB, while {printed} lines were printed")
    assert most - before < MOST_GROWTH
    ran = cell.finish(seconds + 60)
    assert ran.error is None
    found = kernel.value("[[*each.value, each.stdout.count(chr(10))] for each in res.ranks]")
    for count, slowest, lines in found:
        assert lines == count
        assert slowest < 2
    # What it folds is whole too: it was sent the present state instead of what it had missed.
    written = kernel.value("[each.transcript.written for each in res.state.ranks.values()]")
    assert written == kernel.value("[len(each.stdout) for each in res.ranks]")
    assert kernel.value(
        "[[line.partition(' ')[0] for line in each.stdout.splitlines()] "
        "== [str(count) for count in range(each.value[0])] for each in res.ranks]"
    ) == [True, True]
