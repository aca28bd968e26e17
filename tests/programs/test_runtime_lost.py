"""What a notebook shows when a process behind it is killed or stopped, and how it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

WORDS = "the runtime printed this"
STUCK = """
%%distributed -n 2 {options}
import os, pathlib, time
pathlib.Path({directory!r}, str(os.getpid())).touch()
time.sleep(1000)
"""
RUNS = "import nblaunch\nprint(nblaunch.run(int, nproc=2).values)"
PARTS = """
(lambda runtime: {
    "keeper": runtime.keeper.pid,
    "runtime": runtime.welcome.pid,
    "server": sum(each.pid for each in __import__("psutil").Process(runtime.keeper.pid).children()
        if each.pid != runtime.welcome.pid),
})(__import__("nblaunch").client.local.local().runtime)
"""


class Notebook:
    """A kernel, and what is behind it."""

    def __init__(self, kernel, directory) -> None:
        self.kernel = kernel
        self.directory = directory

    def parts(self):
        """Return the process ids of the keeper, the fork server (0 if there is none) and the runtime."""
        pids: dict[str, int] = self.kernel.value(PARTS.strip().replace("\n", ""))
        return pids

    def behind(self) -> list[int]:
        return [each.pid for each in psutil.Process(self.kernel.pid).children(recursive=True)]

    def stick(self, eventually, options: str = ""):
        """Begin a cell that ends by itself no more, and return it and its ranks."""
        cell = self.kernel.submit(STUCK.format(directory=str(self.directory), options=options))
        eventually(lambda: len(list(self.directory.iterdir())) == 2, "both ranks run", 30)
        ranks = [int(each.name) for each in self.directory.iterdir()]
        for each in self.directory.iterdir():
            each.unlink()
        return cell, ranks


@pytest.fixture
def notebook(kernel, tmp_path):
    """Give the kernel, in which ranks have run."""
    (tmp_path / "at").mkdir()
    kernel.ok(RUNS)
    yield Notebook(kernel, tmp_path / "at")
    kernel.run("%distributed stop")


def ended(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


@pytest.mark.parametrize("part", ["runtime", "keeper"])
def test_a_cell_that_loses_its(part, notebook, eventually):
    """It ends within a second, with the last words; all ranks are gone, and the next cell has others."""
    before = notebook.parts()
    root = notebook.kernel.value("str(__import__('nblaunch').client.local.local().started.root)")
    with Path(root, "runtime.log").open("a") as log:
        log.write(WORDS)
    cell, ranks = notebook.stick(eventually)
    struck = time.monotonic()
    os.kill(before[part], signal.SIGKILL)
    error = cell.finish(10).error
    assert time.monotonic() - struck < 1
    assert (error.ename, error.evalue.split(".")[0]) == (
        "LaunchError",
        "nblaunch's runtime has ended, and all ranks with it",
    )
    assert error.evalue.endswith(WORDS)
    eventually(lambda: all(map(ended, [*ranks, *before.values()])), "all are gone", 2)
    assert notebook.kernel.ok(RUNS).stdout == "[0, 0]\n"
    assert set(notebook.parts().values()).isdisjoint(before.values())
    assert not Path(root).exists()


@pytest.mark.parametrize("part", ["runtime", "server"])
def test_an_idle_session_that_loses_its(part, notebook, eventually):
    notebook.kernel.ok("%distributed start -n 2")
    notebook.kernel.ok("%%distributed\nkept = rank")
    before = notebook.parts()
    ranks = [pid for pid in notebook.behind() if pid not in before.values()]
    assert len(ranks) == 2
    os.kill(before[part], signal.SIGKILL)
    eventually(lambda: all(map(ended, ranks)), "the ranks are gone", 2)
    if part == "server":
        known = {*before.values(), *ranks}
        eventually(lambda: len(set(notebook.behind()) - known) >= 3, "a fork server and two ranks are new")
        assert notebook.parts()["runtime"] == before["runtime"]
    else:
        error = notebook.kernel.fails("%%distributed\nprint(rank)")
        # Whichever the client sees first: the end of the session or that of the connection.
        assert error.evalue.startswith(
            ("the ranks of session 'default' have ended, and could not be", "nblaunch's runtime has ended")
        )
        notebook.kernel.ok("%distributed start -n 2")
    ran = notebook.kernel.ok("%%distributed\nprint('on rank', rank, 'kept' in globals())")
    assert "on rank 0 False" in ran.text


@pytest.mark.slow
def test_a_cell_whose_runtime_is_stopped_is_left_at_the_third_interrupt(notebook, eventually):
    """Once the runtime goes on, it ends the ranks, and serves the next cell."""
    before = notebook.parts()
    cell, ranks = notebook.stick(eventually)
    os.kill(before["runtime"], signal.SIGSTOP)
    try:
        error = interrupted(notebook.kernel, cell)
        assert (error.ename, error.evalue.split(".")[0]) == (
            "LaunchError",
            "The run was interrupted three times, and has not ended: its ranks or the runtime do not answer",
        )
        assert not any(map(ended, ranks))
    finally:
        os.kill(before["runtime"], signal.SIGCONT)
    assert notebook.kernel.ok(RUNS).stdout == "[0, 0]\n"
    eventually(lambda: all(map(ended, ranks)), "the ranks of the interrupted cell are gone")
    assert notebook.parts() == before


def interrupted(kernel, cell):
    """Press the stop button until the cell has ended; return its error."""
    over = threading.Event()

    def press() -> None:
        while not over.wait(0.5):
            os.kill(kernel.pid, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        return cell.finish(20).error
    finally:
        over.set()
        pressing.join()


def test_a_stopped_runtime_keeps_a_session_and_its_variables(notebook):
    notebook.kernel.ok("%distributed start -n 2")
    notebook.kernel.ok("%%distributed\nkept = rank")
    before = notebook.parts()
    os.kill(before["runtime"], signal.SIGSTOP)
    try:
        cell = notebook.kernel.submit("%%distributed\nkept += 1")
        time.sleep(0.5)
    finally:
        os.kill(before["runtime"], signal.SIGCONT)
    assert cell.finish().error is None
    assert "3 and kept" in notebook.kernel.ok("%%distributed\nprint(kept + rank, 'and kept')").text


def test_a_kernel_whose_runtime_is_stopped_ends_and_takes_all_along(start_kernel, tmp_path):
    notebook = Notebook(start_kernel(), tmp_path)
    notebook.kernel.ok(RUNS)
    os.kill(notebook.parts()["runtime"], signal.SIGSTOP)
    notebook.kernel.kill()
    notebook.kernel.all_gone("the kernel was killed")
