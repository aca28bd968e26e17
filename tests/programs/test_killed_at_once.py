"""What is left when all processes of a run are killed at once, as Slurm ends a step."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from patience import eventually

pytestmark = pytest.mark.timeout(180)

RUNS = """
import nblaunch, sys
session = nblaunch.Session(nproc=1, display=False)
print(session.cell("1", namespace={}).values, flush=True)
sys.stdin.read()
session.close()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Make a directory with a short path: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="w-") as made:
        yield Path(made)


def test_directories_of_processes_that_were_all_killed_go_with_the_next_start(temporary):
    environ = {**os.environ, "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}

    def begun() -> subprocess.Popen[bytes]:
        command, pipe = [sys.executable, "-c", RUNS], subprocess.PIPE
        started = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe)
        assert started.stdout is not None
        assert started.stdout.readline() == b"[1]\n"
        return started

    def directories() -> set[Path]:
        return set(temporary.glob("nblaunch-*"))

    first = begun()
    (lives,) = directories()
    second = begun()
    (killed,) = directories() - {lives}
    all_of_it = [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]
    for stop in (psutil.Process.suspend, psutil.Process.kill):
        for each in all_of_it:
            stop(each)
    second.communicate()
    assert directories() == {lives, killed}
    third = begun()
    eventually(lambda: killed not in directories(), "it is removed")
    assert lives in directories()
    for each in (first, third):
        each.communicate()
        assert each.returncode == 0
    assert directories() == set()
