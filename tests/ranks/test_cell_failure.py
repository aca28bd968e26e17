"""A cell that fails on a rank fails in the notebook: which rank, what, where; and the next cell works."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.oldest

FAILS_ON_RANK_1 = """
%%distributed -n 2 --out res
import torch, torch.distributed as dist
if rank == 1:
    raise ValueError("boom")
dist.all_reduce(torch.ones(1))
"""


def alive(kernel, pids):
    """Return which of these processes are there."""
    return kernel.value(f"[pid for pid in {pids!r} if __import__('psutil').pid_exists(pid)]")


# --- what the reader is told -----------------------------------------------------------------------


def test_the_error_names_the_rank_the_exception_and_the_cells_own_line(kernel):
    error = kernel.fails(FAILS_ON_RANK_1)
    assert error.ename == "RunFailedError"
    first, source, *_ = error.evalue.splitlines()
    assert re.fullmatch(r"rank 1 of 2 failed: ValueError: boom \((Cell In\[\d+\], |cell )line 4\)", first)
    assert source.strip() == 'raise ValueError("boom")'
    assert "/nblaunch/" not in error.traceback, "our frames are no news to the reader"
    assert re.search(r"-+> 4 .*raise ValueError", error.traceback)


def test_the_cause_is_the_remote_exception_itself(kernel):
    kernel.ok("""
    import nblaunch
    class Custom(Exception):
        def __init__(self, code, extra=None):
            super().__init__(code, extra)
            self.code = code
    try:
        get_ipython().run_cell_magic("distributed", "-n 2 --out res", "if rank: raise Custom(7, extra=[1])")
    except nblaunch.RunFailedError as caught:
        error = caught
        cause = caught.__cause__
    """)
    kernel.ok("assert type(cause) is Custom and cause.code == 7 and cause.args == (7, [1])")
    kernel.ok(
        "assert error.root_cause.exception is cause and error.root_cause.rank == 1 and error.result is res"
    )
    kernel.ok("assert isinstance(error, RuntimeError) and isinstance(error, nblaunch.NblaunchError)")


def test_a_failure_in_a_notebook_function_shows_the_line_of_the_cell_that_defines_it(kernel):
    kernel.ok("def helper(x):\n    y = x - 1\n    return 1 / y")
    error = kernel.fails("%%distributed -n 2 --out res\nvalue = rank\nhelper(value + 1)")
    assert error.evalue.startswith("rank 0 of 2 failed: ZeroDivisionError")
    cells = re.findall(r"Cell In\[(\d+)\], line (\d+)", error.traceback)
    (outer, outer_line), (inner, inner_line) = cells[0], cells[-1]
    assert int(inner) == int(outer) - 1
    assert (outer_line, inner_line) == ("3", "3")
    assert "return 1 / y" in error.traceback
    frames = kernel.value("[[each.line, each.function, each.source] for each in res.failures[0].frames]")
    assert frames == [[3, "<module>", "helper(value + 1)"], [3, "helper", "return 1 / y"]]


def test_a_failure_in_a_module_shows_the_way_there(kernel, tmp_path):
    (tmp_path / "breaks.py").write_text("def now(x):\n    raise LookupError(f'broken {x}')\n")
    error = kernel.fails(f"""
    %%distributed -n 2
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import breaks
    breaks.now(rank)
    """)
    assert "LookupError: broken" in error.evalue
    assert re.search(r"Cell In\[\d+\], line 5", error.traceback)
    assert "breaks.py" in error.traceback


@pytest.mark.parametrize(
    ("body", "exitcode", "told"),
    [
        ("import asyncio; raise asyncio.CancelledError", 1, "CancelledError"),
        ("raise BaseExceptionGroup('many', [ValueError('a'), KeyboardInterrupt()])", 1, "many"),
        ("await broken()\nasync def broken(): pass", 1, "broken"),
        ("%not_a_magic_at_all", 1, "not_a_magic_at_all"),
    ],
)
def test_a_rank_that_ends_without_a_value_is_a_failure_whatever_ends_it(kernel, body, exitcode, told):
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    error = kernel.fails(f"%%distributed -n 2 --out res\nif rank == 1:\n{indented}\nrank")
    assert error.ename == "RunFailedError"
    assert "rank 1" in error.evalue.splitlines()[0]
    assert told in error.evalue
    assert kernel.value("[[each.rank, each.exitcode] for each in res.failures]") == [[1, exitcode]]


# --- restarts, time limits, interrupts -------------------------------------------------------------


def test_with_a_restart_the_values_are_those_of_the_last_attempt(kernel):
    kernel.ok("""
    %%distributed -n 2 --out res --max-restarts 1
    import os, torch, torch.distributed as dist
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    total = torch.tensor([rank + 1])
    print("attempt", attempt)
    if attempt == 0 and rank == 1:
        raise ValueError("first time")
    dist.all_reduce(total)
    rank, attempt, total.item()
    """)
    assert kernel.value("[res.ok, res.values]") == [True, [[0, 1, 3], [1, 1, 3]]]
    assert kernel.value("[[each.number, each.reason, each.world_size] for each in res.attempts]") == [
        [0, "started", 2],
        [1, "failure", 2],
    ]
    assert kernel.value("[each.message for each in res.attempts[0].failures if each.rank == 1]") == [
        "first time"
    ]
    assert kernel.value("[each.attempt for each in res.ranks]") == [1, 1]
    assert kernel.value("[each.stdout for each in res.ranks]") == ["attempt 1\n"] * 2


def test_an_interrupt_ends_the_cell_and_the_kernel_goes_on(kernel, tmp_path, eventually):
    pending = kernel.submit(f"""
    %%distributed -n 2 --out res --grace 2
    import pathlib
    print("began")
    pathlib.Path({str(tmp_path)!r}, str(rank)).touch()
    while True: pass
    """)
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks have begun", 30)
    kernel.interrupt()
    ran = pending.finish()
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    assert "/nblaunch/" not in ran.error.traceback
    assert kernel.value("[res.ok, len(res.failures)]") == [False, 0]
    assert set(kernel.value("[str(each.state) for each in res.ranks]")) <= {"STOPPED", "SUCCEEDED"}
    assert kernel.value("[each.stdout for each in res.ranks]") == ["began\n"] * 2
    assert alive(kernel, kernel.value("[each.pid for each in res.ranks]")) == []
    kernel.ok("%%distributed -n 2 --out again\nrank")
    assert kernel.value("again.values") == [0, 1]


def test_a_rank_may_catch_the_interrupt_and_return_what_it_has(kernel, tmp_path, eventually):
    pending = kernel.submit(f"""
    %%distributed -n 2 --out res
    import pathlib, time
    try:
        pathlib.Path({str(tmp_path)!r}, str(rank)).touch()
        time.sleep(600)
    except KeyboardInterrupt:
        saved = f"saved by {{rank}}"
    saved
    """)
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks have begun", 30)
    kernel.interrupt()
    ran = pending.finish()
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    assert kernel.value("res.values") == ["saved by 0", "saved by 1"]


def test_of_cells_that_failed_only_the_last_results_are_kept(kernel):
    for _ in range(8):
        kernel.fails("%%distributed -n 1\n1 / 0")
    assert kernel.value("_.failures[0].type") == "builtins.ZeroDivisionError"
    assert kernel.value("[each for each in Out.values() if type(each).__name__ == 'RunResult']") == []
    kernel.ok("import gc, nblaunch\ngc.collect();")
    # `_`, `__` and `___`; IPython keeps the last exception, whose result is one of them.
    assert kernel.value("sum(isinstance(each, nblaunch.RunResult) for each in gc.get_objects())") <= 3
