"""The benchmarks run, and what they promise holds (the second, which takes a minute, with `-m slow`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "benchmarks" / "bench_launch.py"
PANEL = Path(__file__).parents[1] / "benchmarks" / "bench_panel.py"
NODES = Path(__file__).parents[1] / "benchmarks" / "bench_nodes.py"
SESSION = Path(__file__).parents[1] / "benchmarks" / "bench_session.py"


def ratios(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(LAUNCH), *arguments], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "nblaunch.run, the first time" in done.stdout
    found = re.findall(r"^  (\w+ / \w+) +([\d.]+)$", done.stdout, flags=re.MULTILINE)
    return {name: float(ratio) for name, ratio in found}


@pytest.mark.slow
def test_the_launch_benchmark_prints_its_ratios():
    found = ratios("--repeats", "1")
    assert found.keys() == {"nblaunch / fork", "spawn / nblaunch"}
    assert all(ratio > 0 for ratio in found.values())


@pytest.mark.slow
def test_fresh_ranks_cost_little_more_than_a_fork_and_far_less_than_spawn():
    found = ratios("--repeats", "7")
    assert found["nblaunch / fork"] <= 2.5
    assert found["spawn / nblaunch"] >= 8


def panel_costs(*arguments: str) -> dict[str, tuple[float, float, float]]:
    """Return for each scene the share of a core in percent, messages and kB, both a second."""
    done = subprocess.run(
        [sys.executable, str(PANEL), *arguments], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^  (\d.+?) +([\d.]+)% +([\d.]+) +([\d.]+)$", done.stdout, flags=re.MULTILINE)
    return {name: (float(share), float(messages), float(size)) for name, share, messages, size in found}


def test_the_panel_benchmark_prints_what_drawing_costs():
    found = panel_costs("--seconds", "0.3", "--lines", "100")
    assert {"8 ranks", "64 ranks", "256 ranks"} <= found.keys()


@pytest.mark.slow
def test_drawing_takes_little_of_the_kernel_and_far_less_than_the_server_lets_through():
    found = panel_costs()
    assert found["8 ranks"][0] < 5
    assert found["64 ranks"][0] < 20
    assert all(messages < 15 for _, messages, _ in found.values())
    # jupyter_server drops what comes above 1 MB a second.
    assert all(size < (600 if name != "256 ranks" else 1000) for name, (_, _, size) in found.items())


def session_figures(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(SESSION), *arguments], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^  (\S.*?)  +([\d.]+)$", done.stdout, flags=re.MULTILINE)
    return {name: float(figure) for name, figure in found}


@pytest.mark.slow
def test_the_session_benchmark_prints_its_figures():
    figures = session_figures("--parts", "calls", "--repeats", "1")
    assert figures.keys() == {"Session.run, 2 ranks, ms", "Session.run, 8 ranks, ms"}
    assert all(figure > 0 for figure in figures.values())


@pytest.mark.slow
def test_ranks_that_stay_cost_what_is_promised():
    figures = session_figures("--parts", "cells,data,attach,memory")
    assert figures["session cell, 2 ranks / plain cell"] <= 2.5
    assert figures["session cell, 8 ranks / plain cell"] <= 6
    assert figures["memory copy of 256 MB / push of it to 8 ranks"] >= 0.5
    assert figures["2 memory copies of 256 MB / pull from 2 ranks"] >= 0.5
    assert figures["attach from another Python / start of the session"] <= 0.3
    assert figures["private MB of an idle rank, the largest of 8"] < 15
    assert figures["8 idle ranks / 8 spawned ranks"] < 0.2


@pytest.mark.slow
def test_what_a_rank_costs_does_not_depend_on_how_many_there_are():
    figures = session_figures("--parts", "many")
    assert len(figures) == 6
    # Linear is 1; a step, or a square, would be 2.
    assert all(figure < 2 for figure in figures.values()), figures


def node_figures(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(NODES), *arguments], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^  (\S.*?)  +([\d.]+)$", done.stdout, flags=re.MULTILINE)
    return {name: float(figure) for name, figure in found}


def test_what_a_node_costs_the_runtime_does_not_depend_on_how_many_there_are():
    figures = node_figures("--nodes", "16,64", "--ranks", "8", "--repeats", "5")
    for who in ("runtime", "client"):
        few, many = (figures[f"{nodes} nodes x 8: cell, CPU ms of the {who}"] for nodes in (16, 64))
        # The system counts in steps of 10 ms. Four times as much is linear; a square would be sixteen.
        assert many + 10 < 8 * (few + 10)
    few, many = (figures[f"{nodes} nodes x 8: descriptors of the runtime"] for nodes in (16, 64))
    # The connection of each, and nothing for the files of its ranks.
    assert many - few < 3 * 48
    few, many = (figures[f"{nodes} nodes x 8: MB of the runtime"] for nodes in (16, 64))
    assert many - few < 48


@pytest.mark.slow
def test_thousands_of_ranks_answer_a_cell_within_a_second():
    figures = node_figures("--nodes", "1024", "--ranks", "8", "--repeats", "9")
    assert figures["1024 nodes x 8: cell, ms"] <= 1000
    assert figures["1024 nodes x 8: MB of the runtime"] <= 300
