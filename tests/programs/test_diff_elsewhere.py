"""Ranks on two nodes are compared; another process lists an object in the same way."""

from __future__ import annotations

import subprocess
import sys

import nblaunch


def test_ranks_on_two_nodes_are_compared_by_both_doors():
    with nblaunch.Session(nproc=1, nnodes=2, on="process") as session:
        session.cell("import torch, nblaunch\nw = torch.zeros(5, 5); w[2, 3] = rank", namespace={})
        found = session.diff("w")
        assert found.first.path == "w[2, 3]"
        assert found.first.largest == 1
        told = session.cell("str(nblaunch.diff(w, 'w'))", namespace={}).values
        assert list(told) == [str(found)] * 2


def test_another_process_lists_the_same():
    """The order of sets and the addresses of objects differ from process to process."""
    program = (
        "import torch; from nblaunch.probes.contents import Contents; torch.manual_seed(0); "
        "x = {'s': set('abcdef'), 'm': torch.nn.Linear(3, 3), 'f': frozenset({1, 'b'}), "
        "'g': (lambda v: v in {'a', 'b', 'c'}), 'o': object()}; "
        "print(Contents('x', x, {}).outline().domains[()][1].hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
