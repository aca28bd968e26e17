"""A cell in the background goes on while the kernel's main thread holds the GIL in C code."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nblaunch import sessions

HELD_SECONDS = 5

BACKGROUND = """
%%distributed -n 2 --background --out handle
import os, pathlib, time
rank = os.environ["RANK"]
pathlib.Path(FILE + "began-" + rank).write_text(str(time.time()))
while not pathlib.Path(FILE + "held").exists():
    time.sleep(0.01)
for line in range(100):
    print("line", line, "x" * 50_000)
    time.sleep(0.01)
pathlib.Path(FILE + "ended-" + rank).write_text(str(time.time()))
line
"""

HOLD = """
import ctypes, pathlib, time
while len(list(pathlib.Path(FILE).parent.glob("at-began-*"))) < 2:
    time.sleep(0.01)
began = time.time()
pathlib.Path(FILE + "held").touch()
ctypes.PyDLL(None).sleep(5)
ended = time.time()
"""


def running_of(kernel) -> list[str]:
    return [each.running for each in sessions() if each.kernel == kernel.pid]


@pytest.mark.slow_at("fresh")
@pytest.mark.parametrize("session", [False, True], ids=["fresh", "session"])
def test_a_cell_in_the_background_ends_while_the_kernel_holds_the_gil(
    start_kernel, tmp_path, eventually, session
):
    """The kernel reads nothing meanwhile: neither the ranks nor the runtime wait for that."""
    kernel = start_kernel()
    file = str(tmp_path / "at-")
    if session:
        kernel.ok("%distributed start -n 2")
    kernel.ok(BACKGROUND.replace("FILE", repr(file)).replace(" -n 2" if session else "\0", ""))
    holding = kernel.submit(HOLD.replace("FILE", repr(file)))
    eventually(lambda: len(list(tmp_path.glob("at-ended-*"))) == 2, "the ranks have come to their end")
    if session:
        eventually(lambda: running_of(kernel) == [""], "the runtime has ended the job, and others read that")
    over = time.time()
    assert holding.finish().error is None
    began, ended = kernel.value("[began, ended]")
    assert over < ended
    for rank in range(2):
        at = float(Path(f"{file}ended-{rank}").read_text())
        assert began < at < ended - 1
    assert ended - began >= HELD_SECONDS
    assert kernel.value("handle.result().values") == [99, 99]
    # More than the kernel's socket takes while nobody reads.
    printed = "[f'line {line} ' + 'x' * 50_000 for line in range(100)]"
    same = f"[each.stdout.splitlines() == {printed} for each in handle.result().ranks]"
    assert kernel.value(same) == [True, True]
