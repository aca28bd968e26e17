"""The benchmarks run, and what they promise holds (the second, which takes a minute, with `-m slow`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent / "benchmarks" / "bench_launch.py"


def ratios(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(LAUNCH), *arguments], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "nblaunch.run, the first time" in done.stdout
    found = re.findall(r"^  (\w+ / \w+) +([\d.]+)$", done.stdout, flags=re.MULTILINE)
    return {name: float(ratio) for name, ratio in found}


def test_the_launch_benchmark_prints_its_ratios():
    found = ratios("--repeats", "1")
    assert found.keys() == {"nblaunch / fork", "spawn / nblaunch"}
    assert all(ratio > 0 for ratio in found.values())


@pytest.mark.slow
def test_fresh_ranks_cost_little_more_than_a_fork_and_far_less_than_spawn():
    found = ratios("--repeats", "7")
    assert found["nblaunch / fork"] <= 2.5
    assert found["spawn / nblaunch"] >= 8
