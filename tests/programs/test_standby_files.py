"""A standby group that is ended while it starts leaves no file, neither ours nor torch's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SOURCE = """
import json, os, sys, time
import nblaunch

def one():
    return 1

values = []
for step in range(16):
    # Each shape drops the group of the other one, at another moment of its start.
    values += nblaunch.run(one, nproc=1 + step % 2).values
    time.sleep(0.22 + 0.015 * step)
print(json.dumps(values), flush=True)
"""


def test_groups_that_are_dropped_while_they_start_leave_no_file(script, tmp_path):
    temporary = tmp_path / "t"
    temporary.mkdir()
    ended = script(SOURCE, env={"NBLAUNCH_STANDBY": "1", "TMPDIR": str(temporary)})
    assert ended.returncode == 0, ended
    assert json.loads(ended.stdout) == [1] * 24
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_that_end_right_after_a_cell_leave_no_file(start_kernel, tmp_path, eventually):
    """The next group begins to start a quarter of a second after the cell."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    for number in range(10):
        kernel = start_kernel(NBLAUNCH_STANDBY="1", TMPDIR=str(temporary))
        kernel.ok("%%distributed -n 2\n1")
        kernel.ok(f"import time; time.sleep({0.2 + 0.05 * number})")
        if number % 2:
            kernel.kill()
        else:
            kernel.manager.shutdown_kernel()
        kernel.all_gone("the kernel has ended")
        eventually(lambda: not list(Path(temporary).glob("nblaunch-*")), "the runtime directory is gone")
        assert [path.name for path in temporary.iterdir() if path.name.startswith("pytorch-")] == []
