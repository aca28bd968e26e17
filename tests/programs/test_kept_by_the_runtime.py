"""Nothing is taken from a session by anybody but its user: not by looks, late jobs, limits or cleaners."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import poked
import pytest

from nblaunch.client import directory

pytestmark = pytest.mark.timeout(300)

START = "%distributed start -n 2 --detach --session train"
STUBBORN = """
%%distributed
import pathlib, time
class Stubborn:
    def __repr__(self):
        while not pathlib.Path({free!r}).exists():
            try:
                time.sleep(0.05)
            except KeyboardInterrupt:
                pathlib.Path({free!r} + ".stopped").touch()
        return "stubborn"
trained, stubborn = 7, Stubborn()
"""
HASTY = "from nblaunch.runtime import requests; requests._LOOK_SECONDS = requests._LOOK_ENDS_SECONDS = 0.3"
HANDLER = """
import gc, threading
from nblaunch.runtime.requests import RequestHandler
(handler,) = [each for each in gc.get_objects() if isinstance(each, RequestHandler)]
"""


@pytest.fixture
def giver(detached_kernels):
    """Give a kernel that has the session, whose runtime a test can reach as `giver.poke`."""
    kernel = detached_kernels()
    poked.of_kernel(kernel)
    kernel.ok(f"{START}\nx = 1")
    root = Path(directory.detached()["train"].root)
    kernel.poke = lambda code: poked.run_in(root, code)
    return kernel


def test_a_look_that_will_not_end_costs_no_variable_and_its_client_is_named(
    giver, detached_kernels, eventually, free
):
    watcher = detached_kernels()
    giver.ok(STUBBORN.format(free=str(free)))
    giver.poke(HASTY)
    watcher.ok("%distributed attach train")
    look = watcher.submit("%distributed inspect stubborn")
    eventually(lambda: "rank 0: running" in giver.ok("%distributed status").result, "it is at work")
    for _ in range(2):
        busy = giver.fails("%%distributed\ntrained").evalue
        assert f"(process {watcher.pid}) looks into its ranks" in busy
    assert Path(f"{free}.stopped").exists()
    free.touch()
    assert "was interrupted" in look.finish().error.evalue
    giver.ok("%%distributed --out res\ntrained")
    assert giver.value("res.values") == [7, 7]


@pytest.mark.slow
def test_a_job_that_waited_while_its_client_lost_the_session_is_refused(
    giver, detached_kernels, eventually, free
):
    watcher, taker = detached_kernels(), detached_kernels()
    giver.ok(STUBBORN.format(free=str(free)))
    watcher.ok("%distributed attach train")
    look = watcher.submit("%distributed inspect stubborn")
    eventually(lambda: "rank 0: running" in giver.ok("%distributed status").result, "it is at work")
    giver.poke(HANDLER)
    late = giver.submit("%%distributed\ntrained = 8")
    eventually(lambda: giver.poke("len(handler._early)") == 1, "it waits")
    taker.ok("%distributed attach train --take")
    free.touch()
    assert f"(pid {taker.pid} on " in late.finish().error.evalue
    look.finish()
    taker.ok("%%distributed --out res\ntrained")
    assert taker.value("res.values") == [7, 7]


EXHAUST = f"""
{HANDLER}
gate, start = threading.Event(), threading.Thread.start
def refuse(thread):
    raise RuntimeError("can't start new thread")
handler._pool.submit(int).result()
at_work = [handler._pool.submit(gate.wait) for _ in handler._pool._threads]
threading.Thread.start = refuse
"""


def test_a_request_that_is_refused_for_want_of_a_thread_is_not_carried_out_later(giver, eventually):
    giver.ok("%%distributed\ntrained = 7")
    giver.poke(EXHAUST)
    refused = giver.fails("%distributed restart").evalue
    assert (
        "needs a thread for this, and the system refuses: can't start new thread. Nothing was run." in refused
    )
    giver.poke("threading.Thread.start = start; gate.set()")
    eventually(lambda: giver.poke("handler._pool._work_queue.empty()"), "all that was queued is done")
    giver.ok("%%distributed --out res\ntrained")
    assert giver.value("res.values") == [7, 7]


@pytest.mark.slow
def test_sockets_that_a_cleaner_removed_are_bound_again_without_a_client(giver, detached_kernels, eventually):
    giver.ok("%%distributed\ntrained = 7")
    root = Path(giver.poke("str(local.directory.root())"))
    giver.kill()
    for name in ("client", "notes"):
        (root / name).unlink()
    giver.poke(f"{HANDLER}handler.changed.set()")  # as each minute
    eventually((root / "client").exists, "it is bound again")
    other = detached_kernels()
    other.ok("%distributed attach train")
    other.ok("%%distributed --out res\ntrained")
    assert other.value("res.values") == [7, 7]


PLAIN = "import nblaunch, json\nprint(json.dumps(nblaunch.run(lambda: 3, nproc=2).values))\n"
SHADOWED = ("random", "queue", "platform", "uuid", "token", "select")


def test_files_named_as_the_standard_librarys_modules_beside_the_notebook_do_no_harm(tmp_path):
    """Where the notebook itself has loaded the real ones."""
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    program = f"import IPython, ipykernel.kernelapp, sys\nsys.path.insert(0, {str(tmp_path)!r})\n{PLAIN}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "[3, 3]\n"), ran.stderr


@pytest.mark.parametrize("streams", ["<&- 2>&-", "<&- >&- 2>&-"])
def test_it_runs_with_standard_streams_closed(tmp_path, streams):
    (tmp_path / "program.py").write_text(PLAIN.replace("print(", "open('out', 'w').write("))
    command = f"{sys.executable} program.py {streams}"
    ran = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=False)
    assert ran.returncode == 0
    assert json.loads((tmp_path / "out").read_text()) == [3, 3]
