"""What curves cost: 64 ranks that log 100 points a second each, for as long as it is asked for.

    python tests/benchmarks/insight_curves.py [--seconds 60] [--ranks 64] [--real 4]

The 64 ranks' messages are made as ranks make them, four a second of each, and go through the real decoder,
the real fold, the real panel's feed and the real drawings, on one core; their clock is made up, so that a
minute is measured in a few seconds. `--real` ranks log at the same rate for real: no point may be missing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator

import nblaunch
from nblaunch.insight.curves import Curves
from nblaunch.protocol.messages import Logged, encode
from nblaunch.protocol.metrics import packed, table
from nblaunch.protocol.state import RunState, advance, decode_folded
from nblaunch.view.display import html_and_text
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header

NAMES = ("loss", "lr", "grad_norm", "tokens/s", "val/accuracy")
BATCHES_PER_SECOND, DRAWS_PER_SECOND = 4, 10
POINTS_PER_SECOND = 100


def messages(ranks: int, seconds: int) -> Iterator[list[bytes]]:
    """Yield what the ranks send in each quarter of a second: 5 names, 20 steps a second."""
    per_batch = POINTS_PER_SECOND // len(NAMES) // BATCHES_PER_SECOND
    for number in range(seconds * BATCHES_PER_SECOND):
        sent = []
        for rank in range(ranks):
            steps = range(number * per_batch, (number + 1) * per_batch)
            points = [
                (
                    name,
                    step,
                    1000.0 + step / 20,
                    math.exp(-step / 500) + 0.01 * math.sin(7 * rank + step + name),
                )
                for step in steps
                for name in range(len(NAMES))
            ]
            which, at, times, values = zip(*points, strict=True)
            columns = packed("H", which), packed("q", at), packed("d", times), packed("d", values)
            sent.append(encode(_logged(rank, columns)))
        yield sent


def _logged(rank: int, columns: tuple[bytes, bytes, bytes, bytes]) -> Logged:
    which, steps, times, values = columns
    return Logged(rank=rank, names=NAMES, which=which, steps=steps, times=times, values=values)


def simulated(ranks: int, seconds: int, *, by_rank: bool) -> None:
    """Measure the client of so many ranks: the fold, the panel, the end."""
    state, drawing = RunState.fresh(ranks), Drawing(Header("cell", "gloo"), 0.0)
    drawing.draw_each_rank(wanted=by_rank)
    spent, sent, now, points = 0.0, 0, 0.0, 0
    for batch in messages(ranks, seconds):
        began = time.thread_time()
        for raw in batch:
            state = advance(state, decode_folded(raw))
        for _ in range(DRAWS_PER_SECOND // BATCHES_PER_SECOND):
            now += 1 / BATCHES_PER_SECOND / (DRAWS_PER_SECOND // BATCHES_PER_SECOND)
            delta = drawing.changes(state, now)
            if delta is not None:
                sent += len(json.dumps(delta))
        spent += time.thread_time() - began
        points += len(batch) * POINTS_PER_SECOND // BATCHES_PER_SECOND
    what = "a line per rank" if by_rank else "a band"
    line(f"{ranks} ranks, {what}: share of a core in the client, %", 100 * spent / seconds)
    line(f"{ranks} ranks, {what}: kB/s to the browser", sent / seconds / 1000)
    line(f"{ranks} ranks, {what}: points missing of {points}", points - len(table(state.metrics)))
    began = time.thread_time()
    bundle = html_and_text(state, Header("cell", "gloo"), curves=drawing.curves(state))
    line(f"{ranks} ranks, {what}: drawn at the end, s", time.thread_time() - began)
    line(f"{ranks} ranks, {what}: saved, kB", len(json.dumps(bundle)) / 1000)
    began = time.thread_time()
    Curves.of(state.metrics)
    line("fold of a point, us", (time.thread_time() - began) / points * 1e6)


def log_at_a_rate(seconds: float) -> tuple[int, float]:
    """Log 100 points a second; return how many, and what a call took at the median, in microseconds."""
    taken, count, began = [], 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        started = time.perf_counter()
        nblaunch.log(step=count, **{name.replace("/", "_"): float(count) for name in NAMES})
        taken.append(time.perf_counter() - started)
        count += 1
        time.sleep(max(began + count * len(NAMES) / POINTS_PER_SECOND - time.perf_counter(), 0))
    return count * len(NAMES), sorted(taken)[len(taken) // 2] * 1e6


def real(ranks: int, seconds: float) -> None:
    """Have real ranks log, and count what arrives."""
    result = nblaunch.run(log_at_a_rate, (seconds,), nproc=ranks, display=False)
    logged = sum(count for count, _ in result.values)
    line(f"{ranks} real ranks: points missing of {logged}", logged - len(result.metrics))
    line(f"{ranks} real ranks: a call with 5 numbers, us", max(taken for _, taken in result.values))


def line(what: str, value: float) -> None:
    """Print one figure."""
    print(f"  {what:<62} {value:10.3f}", flush=True)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--real", type=int, default=4)
    given = parser.parse_args()
    for by_rank in (False, True):
        simulated(given.ranks, given.seconds, by_rank=by_rank)
    real(given.real, min(given.seconds, 10))


if __name__ == "__main__":
    main()
