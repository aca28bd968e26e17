"""Fresh ranks end as a script ends: Python waits for their threads, and calls their exit functions."""

from __future__ import annotations

import json
import textwrap
import time

import psutil
import pytest

END = """
import atexit, concurrent.futures, os, pathlib, sys, threading, time

def helper():
    return "saved"

def save():
    while {waits}:
        time.sleep(0.01)
    print(helper())

atexit.register(print, "registered first")
atexit.register(print, "registered last")
threading.Thread(target=save).start()
concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 0.01)
print("the last line")
{last}
"""
TEXT = "the last line\nsaved\nregistered last\nregistered first\n"


def end(waits: str, last: str = "") -> str:
    """Return a program whose thread saves once it need not wait any more, after the `last` line."""
    return END.format(waits=waits, last=last)


def shown(pending, *words: str) -> None:
    """Wait until the panel has shown all of this."""
    missing = set(words)
    for kind, content in pending._messages(60):
        pending._take(kind, content)
        missing -= {each for each in missing if kind == "comm_msg" and each in json.dumps(content)}
        if not missing:
            return
    pytest.fail(f"the panel has never shown {sorted(missing)}: {pending.finish()}")


@pytest.fixture(scope="module")
def panel_kernel(module_kernel):
    """Give a kernel that shows the panel, and not only what stays of it."""
    module_kernel.ok("%env NBLAUNCH_DISPLAY=widget")
    return module_kernel


@pytest.fixture
def kernel(panel_kernel):
    """Give the kernel without variables."""
    yield panel_kernel
    panel_kernel.forget()


def test_a_cell_waits_for_its_threads_then_calls_exit_functions_and_both_belong_to_the_run(kernel, free):
    body = end(waits=f"not pathlib.Path({str(free)!r}).exists()", last="rank")
    pending = kernel.submit(f"%%distributed -n 2 --out res\n{body}")
    shown(pending, "is finishing: thread save")
    free.touch()
    assert pending.finish().error is None
    assert kernel.value("res.values") == [0, 1]
    assert kernel.value("[each.stdout for each in res.ranks]") == [TEXT] * 2


def test_a_rank_that_has_failed_ends_as_a_script_does_too_however_long_that_takes(kernel, free):
    waits = f"not pathlib.Path({str(free)!r}).exists()"
    body = end(waits, last="if rank:\n    time.sleep(1000)\n1 / 0")
    pending = kernel.submit(f"%%distributed -n 2 --shutdown-timeout 1 --out res\n{body}")
    shown(pending, "is finishing: thread save", "ZeroDivisionError")
    time.sleep(1.2)  # longer than the agent would have waited
    free.touch()
    error = pending.finish().error
    assert error is not None
    assert error.evalue.startswith("rank 0 of 2 failed: ZeroDivisionError")
    assert kernel.value("[str(each.state) for each in res.ranks]") == ["FAILED", "STOPPED"]
    assert kernel.value("res.ranks[0].stdout") == TEXT


FOREVER = end(waits="True")


def test_an_interrupt_ends_the_wait_for_threads_and_exit_functions_are_called_all_the_same(kernel):
    pending = kernel.submit(f"%%distributed -n 2 --grace 60 --out res\n{FOREVER}")
    shown(pending, "is finishing: thread save")
    kernel.interrupt()
    ran = pending.finish()
    assert ran.seconds < 30
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    assert ran.error.evalue == "the run was interrupted: [ranks 0-1] finishing: thread save"
    assert kernel.value("[str(each.state) for each in res.ranks]") == ["STOPPED"] * 2
    assert kernel.value("[each.stdout for each in res.ranks]") == [TEXT.replace("saved\n", "")] * 2


def test_an_interrupt_ends_a_rank_that_has_failed_and_finishes(kernel):
    pending = kernel.submit(f"%%distributed -n 1 --grace 60 --out res\n{FOREVER}\n1 / 0")
    shown(pending, "is finishing: thread save")
    kernel.interrupt()
    ran = pending.finish()
    assert ran.seconds < 30
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    assert kernel.value("res.root_cause.type") == "builtins.ZeroDivisionError"


def test_exit_functions_that_take_a_while_are_shown(kernel, free):
    cell = f"""
        %%distributed -n 2 --out res
        import atexit, pathlib, time
        def close():
            while not pathlib.Path({str(free)!r}).exists():
                time.sleep(0.01)
            print("closed")
        atexit.register(close)
        exit()
        """
    pending = kernel.submit(cell)
    shown(pending, "is finishing: exit functions")
    free.touch()
    assert pending.finish().error is None
    assert kernel.value("[each.stdout for each in res.ranks]") == ["closed\n"] * 2


def test_a_checkpoint_that_is_saved_in_the_background_is_whole_after_the_cell(kernel, tmp_path):
    kernel.ok(f"""
        %%distributed -n 2
        import torch, torch.distributed.checkpoint as dcp
        weights = {{"w": torch.arange(1_000_000.)}}
        saving = dcp.async_save(weights, checkpoint_id={str(tmp_path / "saved")!r})
        None
        """)
    kernel.ok(f"""
        import torch, torch.distributed.checkpoint as dcp
        loaded = {{"w": torch.zeros(1_000_000)}}
        dcp.load(loaded, checkpoint_id={str(tmp_path / "saved")!r}, no_dist=True)
        """)
    assert kernel.value("loaded['w'].equal(torch.arange(1_000_000.))") is True


def test_the_ranks_of_a_session_wait_for_no_thread_until_they_are_closed(kernel, free, tmp_path):
    kernel.ok("%distributed start -n 2")
    kernel.ok(f"""
        %%distributed
        import pathlib, threading, time
        def save():
            while not pathlib.Path({str(free)!r}).exists():
                time.sleep(0.01)
            time.sleep(0.1)
            pathlib.Path({str(tmp_path)!r}, f"saved {{rank}}").touch()
        thread = threading.Thread(target=save)
        thread.start()
        """)
    kernel.ok("%%distributed --out res\nthread.is_alive()")
    assert kernel.value("res.values") == [True] * 2
    free.touch()
    kernel.ok("%distributed stop")
    assert sorted(each.name for each in tmp_path.glob("saved*")) == ["saved 0", "saved 1"]


def test_a_session_that_is_dropped_ends_although_a_thread_of_its_ranks_never_does(kernel, eventually):
    kernel.ok("import gc, nblaunch\nsession = nblaunch.Session(2, shutdown_timeout=1)")
    pids = kernel.value("""session.cell(
        "import os, threading\\nthreading.Thread(target=threading.Event().wait).start()\\nos.getpid()"
    ).values""")
    kernel.ok("del session\ngc.collect()")
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "the ranks are gone", 30)


# --- the other doors -------------------------------------------------------------------------------


def script(kernel, path, body: str, options: str = "") -> None:
    path.write_text(body)
    kernel.ok(f"import nblaunch\nres = nblaunch.run({str(path)!r}, nproc=2, check=False{options})")


def function(kernel, _, body: str, options: str = "") -> None:
    kernel.ok("def job():\n" + textwrap.indent(body.strip(), "    "))
    kernel.ok(f"import nblaunch\nres = nblaunch.run(job, nproc=2, check=False{options})")


BRIEF = end("time.monotonic() < began + 0.3").replace("def helper", "began = time.monotonic()\ndef helper")
THROUGH = pytest.mark.parametrize("through", [function, pytest.param(script, marks=pytest.mark.full)])


@THROUGH
@pytest.mark.parametrize(
    ("last", "ends"),
    [
        ("", "SUCCEEDED"),
        pytest.param("raise ValueError", "FAILED", marks=pytest.mark.full),
        pytest.param("sys.exit()", "SUCCEEDED", marks=pytest.mark.full),
        pytest.param("sys.exit(3)", "FAILED", marks=pytest.mark.full),
    ],
)
def test_functions_and_scripts_end_in_the_same_way(kernel, tmp_path, through, last, ends):
    through(kernel, tmp_path / "train.py", f"{BRIEF}\n{last}")
    assert kernel.value("[str(each.state) for each in res.ranks]") == [ends] * 2
    assert kernel.value("[each.stdout for each in res.ranks]") == [TEXT] * 2


@THROUGH
def test_the_timeout_covers_the_end_and_its_report_says_what_a_rank_finishes(kernel, tmp_path, through):
    through(kernel, tmp_path / "train.py", FOREVER, ", timeout=2")
    assert kernel.value("res.hang_report.summary") == "[ranks 0-1] finishing: thread save"
    assert kernel.value("[str(each.state) for each in res.ranks]") == ["STOPPED"] * 2
    assert kernel.value("[each.stdout for each in res.ranks]") == ["the last line\n"] * 2
