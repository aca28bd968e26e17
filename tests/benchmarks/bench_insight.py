"""What it costs to see inside a run: curves, profiles, comparisons, `--watch`, memory and reports.

    python tests/benchmarks/bench_insight.py [--parts curves,profile,diff,watch,memory] [--small]

Each part is a module beside this one, `insight_<part>.py`, and says how it measures. Percentages and ratios
are to something measured in the same run. `--small` measures little, and figures that mean little, in a
moment. With nothing else running: two cores are enough, `diff` takes 4 GB of memory.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

import insight_curves
import insight_diff
import insight_memory
import insight_profile
import insight_watch


def curves(*, small: bool) -> None:
    """64 ranks that log 100 points a second each: the kernel's client, the browser, the saved notebook."""
    insight_curves.simulated(64, 4 if small else 60, by_rank=False)
    insight_curves.real(2 if small else 4, 1 if small else 10)


def profile(*, small: bool) -> None:
    """Measure clocks, what a profile costs, how soon it is summarised, and what it finds."""
    for figures in insight_profile.FIGURES:
        if not (small and figures is insight_profile.overhead):
            show(figures())
    show(insight_memory.planted(ranks=2 if small else 8, steps=5 if small else 30))


def diff(*, small: bool) -> None:
    """One element of a tensor differs on one rank: passes over memory, bytes that move."""
    show(
        insight_diff.one_element_of_a_large_tensor(
            elements=10**6 if small else 10**8, ranks=2 if small else 8, odd=1 if small else 3
        )
    )
    if not small:
        show(insight_diff.many_tensors())


def watch(*, small: bool) -> None:
    """Measure what each kind costs of a step of DDP."""
    found = insight_watch.percent(turns=3) if small else insight_watch.percent()
    names = {"step": "step of DDP, ms"}
    show({names.get(name, f"--watch {name}, % of a step"): figure for name, figure in found.items()})


def memory(*, small: bool) -> None:
    """Measure whether the peak of a rank is seen, and how long and large a report is."""
    show(insight_memory.peak())
    show(insight_memory.report(ranks=2 if small else 8, lines=100 if small else 10_000))


def show(figures: Mapping[str, float]) -> None:
    """Print figures by name."""
    for name, figure in figures.items():
        print(f"  {name:<68}  {figure:12.3f}", flush=True)


PARTS = {"curves": curves, "profile": profile, "diff": diff, "watch": watch, "memory": memory}


def main() -> None:
    """Print the figures of the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(f"seeing inside a run, {os.cpu_count()} cores")
    for part in options.parts.split(","):
        PARTS[part](small=options.small)


if __name__ == "__main__":
    main()
