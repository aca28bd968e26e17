"""Nothing is taken from a session by anybody but its user: not by looks, late jobs, limits or cleaners."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import poked
import pytest
from lanes import slow

import nblaunch
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
HASTY = "from nblaunch.runtime import requests; requests._QUERY_SECONDS = requests._QUERY_ENDS_SECONDS = 0.3"
HANDLER = """
import gc, threading
from nblaunch.runtime.requests import RequestHandler
(handler,) = [each for each in gc.get_objects() if isinstance(each, RequestHandler)]
"""


@pytest.fixture
def owner(detached_kernels):
    """Give a kernel that has the session, whose runtime a test can reach as `owner.poke`."""
    kernel = detached_kernels()
    poked.of_kernel(kernel)
    kernel.ok(f"{START}\nx = 1")
    root = Path(directory.detached()["train"].root)
    kernel.poke = lambda code: poked.run_in(root, code)
    return kernel


def test_a_look_that_will_not_end_costs_no_variable_and_its_client_is_named(
    owner, detached_kernels, eventually, free
):
    watcher = detached_kernels()
    owner.ok(STUBBORN.format(free=str(free)))
    owner.poke(HASTY)
    watcher.ok("%distributed attach train")
    look = watcher.submit("%distributed inspect stubborn")
    eventually(lambda: "rank 0: running" in owner.ok("%distributed status").result, "it is at work")
    for _ in range(2):
        busy = owner.fails("%%distributed\ntrained").evalue
        assert f"(process {watcher.pid}) looks into its ranks" in busy
    assert Path(f"{free}.stopped").exists()
    free.touch()
    assert "was interrupted" in look.finish().error.evalue
    owner.ok("%%distributed --out res\ntrained")
    assert owner.value("res.values") == [7, 7]


@pytest.mark.slow
def test_a_job_that_waited_while_its_client_lost_the_session_is_refused(
    owner, detached_kernels, eventually, free
):
    watcher, taker = detached_kernels(), detached_kernels()
    owner.ok(STUBBORN.format(free=str(free)))
    watcher.ok("%distributed attach train")
    look = watcher.submit("%distributed inspect stubborn")
    eventually(lambda: "rank 0: running" in owner.ok("%distributed status").result, "it is at work")
    owner.poke(HANDLER)
    late = owner.submit("%%distributed\ntrained = 8")
    eventually(lambda: owner.poke("len(handler._early)") == 1, "it waits")
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


def test_a_request_that_is_refused_for_want_of_a_thread_is_not_carried_out_later(owner, eventually):
    owner.ok("%%distributed\ntrained = 7")
    owner.poke(EXHAUST)
    refused = owner.fails("%distributed restart").evalue
    assert (
        "needs a thread for this, and the system refuses: can't start new thread. Nothing was run." in refused
    )
    owner.poke("threading.Thread.start = start; gate.set()")
    eventually(lambda: owner.poke("handler._pool._work_queue.empty()"), "all that was queued is done")
    owner.ok("%%distributed --out res\ntrained")
    assert owner.value("res.values") == [7, 7]


@pytest.mark.slow
def test_sockets_that_a_cleaner_removed_are_bound_again_without_a_client(owner, detached_kernels, eventually):
    owner.ok("%%distributed\ntrained = 7")
    root = Path(owner.poke("str(local.directory.root())"))
    owner.kill()
    for name in ("client", "notes"):
        (root / name).unlink()
    owner.poke(f"{HANDLER}handler.changed.set()")  # as each minute
    eventually((root / "client").exists, "it is bound again")
    other = detached_kernels()
    other.ok("%distributed attach train")
    other.ok("%%distributed --out res\ntrained")
    assert other.value("res.values") == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", ["platform.python_version = lambda: '3.99.0'", slow("found._release = '9.9.0'")]
)
def test_a_client_of_another_python_or_torch_watches_and_gives_no_job(owner, detached_kernels, other):
    """It is this Python that says it is another one: what is tried is what it may do."""
    owner.ok("%%distributed\ntrained = 7")
    watcher = detached_kernels()
    watcher.ok(OTHER)
    watcher.ok(f"import platform\n{other}")
    watcher.ok("import nblaunch\nsession = nblaunch.Session.attach('train')")
    for code in ("session.run(int)", "session.push({'trained': 8})", "%distributed attach train --take"):
        refused = watcher.fails(code).evalue
        assert "it may watch and stop the session" in refused, code
        assert ("3.99.0" in refused) is ("python" in other)
        assert ("torch 9.9.0" in refused) is ("python" not in other)
    assert "watched" in watcher.value("repr(session)")
    owner.ok("%%distributed --out res\ntrained")
    assert owner.value("res.values") == [7, 7]
    watcher.ok("from nblaunch.client import directory\ndirectory.stop('train')")
    assert directory.detached() == {}


OTHER = """
from nblaunch.client import local as found
found._release = found.release_of_torch()
found.release_of_torch = lambda: found._release
"""
SAVES = """
%%distributed --background --grace 60
import pathlib, time
try:
    pathlib.Path({begun!r}).touch()
    time.sleep(1000)
except KeyboardInterrupt:
    time.sleep(4)
    pathlib.Path({saved!r}).touch()
"""
STOPS = """
from nblaunch.client import directory, local
local._END_SECONDS = directory._STOP_SECONDS = 2
directory.stop("train")
"""


@pytest.mark.slow
def test_stop_waits_as_long_as_the_jobs_grace_says(owner, eventually, tmp_path):
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    owner.ok(SAVES.format(begun=str(begun), saved=str(saved)))
    eventually(begun.exists, "it has begun")
    subprocess.run([sys.executable, "-c", STOPS], check=True)
    assert saved.exists()


WAITING = """
from nblaunch.runtime.connections import ClientConnection
lines = [each for each in gc.get_objects() if isinstance(each, ClientConnection) and not each.closed]
"""


@pytest.mark.slow
def test_what_waits_for_a_client_that_does_not_read_does_not_grow_with_the_cells(owner, detached_kernels):
    watcher = detached_kernels()
    watcher.ok("%distributed attach train")
    owner.ok("%%distributed\nglobals().update({f'variable_{number}': number for number in range(2000)})")
    for number in range(30):
        owner.ok(f"%%distributed\nnew_{number} = {number}")
    owner.poke(HANDLER + WAITING)
    # Of each rank the last message, and those of which the socket has a part already.
    assert owner.poke("max(len(each._outbox) for each in lines)") <= 2 * 2
    watcher.ok("import nblaunch\nsession = nblaunch.Session.attach('train', take=True)")
    assert watcher.value("session.pull('new_29')") == {"new_29": [29, 29]}


@pytest.mark.slow
def test_who_comes_as_the_session_ends_for_want_of_use_is_told_so(detached_kernels, eventually):
    kernel = detached_kernels()
    poked.of_kernel(kernel)
    kernel.ok(f"{START} --linger 1s")
    root = Path(directory.detached()["train"].root)
    poked.run_in(root, HANDLER)
    poked.run_in(
        root, "gate, close = threading.Event(), handler.close\nhandler.close = lambda: (gate.wait(), close())"
    )
    kernel.kill()
    eventually(lambda: poked.run_in(root, "handler.unused"), "it ends")
    other = detached_kernels()
    refused = other.fails("%distributed attach train").evalue
    assert "has just ended: nobody has used it for its --linger time" in refused
    poked.run_in(root, "gate.set()")
    eventually(lambda: not root.exists(), "it is gone")


PLAIN = "import nblaunch, json\nprint(json.dumps(nblaunch.run(lambda: 3, nproc=2).values))\n"
SHADOWED = ("random", "queue", "platform", "uuid", "token", "select")


def test_files_named_as_the_standard_librarys_modules_beside_the_notebook_do_no_harm(tmp_path):
    """Where the notebook itself has loaded the real ones."""
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    program = f"import IPython, ipykernel.kernelapp, sys\nsys.path.insert(0, {str(tmp_path)!r})\n{PLAIN}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "[3, 3]\n"), ran.stderr


def test_it_runs_with_standard_streams_closed(tmp_path):
    (tmp_path / "program.py").write_text(PLAIN.replace("print(", "open('out', 'w').write("))
    command = f"{sys.executable} program.py <&- >&- 2>&-"
    ran = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=False)
    assert ran.returncode == 0
    assert json.loads((tmp_path / "out").read_text()) == [3, 3]


def ones(count):
    """Return so many numbers, which are mapped by those who get them."""
    import numpy as np

    return np.ones(count)


def test_all_who_wait_for_a_job_get_its_values_and_who_comes_later_is_told(free, eventually):
    def waits(path):
        while not path.exists():
            time.sleep(0.01)
        return ones(1_000_000)

    with nblaunch.Session(nproc=2, display=False) as session:
        handle = session.submit(waits, (free,))
        with ThreadPoolExecutor(3) as pool:
            eventually(lambda: session.jobs, "a thread has given the job")
            (job,) = session.jobs
            others = [pool.submit(job.result) for _ in range(3)]
            free.touch()
            results = [handle.result(), *(other.result() for other in others)]
        assert [float(each.values[1].sum()) for each in results] == [1e6] * 4
        late = session.jobs[-1].result()
        assert (late.ok, late.failures) == (True, ())
        assert "it is kept no longer" in " ".join(late.warnings)
        # The job goes with the last of its results, and not with the first.
        del late, results[1:], others
        gc.collect()
        for _ in range(2):
            session.run(int)
        assert session.jobs[0].result().ok


IN_A_SECOND = """
import sys
import nblaunch
from nblaunch import __main__
from nblaunch.client import directory, local
local._WELCOME_SECONDS = local._END_SECONDS = local._DESCRIBE_SECONDS = directory._STOP_SECONDS = 1
"""
STOPPED_KEEPER = IN_A_SECOND + 'sys.exit(__main__.main(["stop", "train"]))'


@pytest.mark.slow
@pytest.mark.usefixtures("owner")
def test_stop_fails_and_says_so_where_processes_are_left():
    entry = directory.detached()["train"]
    for pid in (entry.keeper.pid, entry.runtime.pid):
        os.kill(pid, signal.SIGSTOP)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", STOPPED_KEEPER], capture_output=True, text=True, check=False
        )
    finally:
        for pid in (entry.runtime.pid, entry.keeper.pid):
            os.kill(pid, signal.SIGCONT)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"its keeper (process {entry.keeper.pid}) has not ended within 1 s" in ran.stderr


@pytest.mark.usefixtures("owner")
def test_who_attaches_to_a_runtime_that_does_not_answer_is_told_which_process_that_is():
    runtime = directory.detached()["train"].runtime.pid
    os.kill(runtime, signal.SIGSTOP)
    try:
        attach = [sys.executable, "-c", f"{IN_A_SECOND}nblaunch.Session.attach('train')"]
        ran = subprocess.run(attach, capture_output=True, text=True, check=False, timeout=60)
    finally:
        os.kill(runtime, signal.SIGCONT)
    assert f"The runtime of session 'train' (process {runtime}) was asked for the session" in ran.stderr
    assert f"has not answered within 1 s. If it is stopped: kill -CONT {runtime}." in ran.stderr


KILLED = """
import os, signal
import nblaunch
from nblaunch.client.local import local
nblaunch.run(int, nproc=1)
print(local().runtime.root, flush=True)
if KILLED:
    runtime, keeper = local().runtime.welcome.pid, local().runtime.keeper.pid
    os.kill(keeper, signal.SIGSTOP)  # neither of the two has the time to remove anything
    for pid in (runtime, keeper, os.getpid()):
        os.kill(pid, signal.SIGKILL)
input()
"""


@pytest.mark.parametrize("removes", ["nblaunch.sessions()", slow("nblaunch.run(int, nproc=1)")])
def test_what_a_kernel_left_that_was_killed_with_all_its_processes_is_removed_by_the_next_use(
    eventually, removes
):
    with tempfile.TemporaryDirectory(prefix="t") as base:
        environ = {**os.environ, "TMPDIR": base}

        def started(*, killed: bool) -> tuple[subprocess.Popen[str], Path]:
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED.replace("KILLED", str(killed))],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            return process, Path(process.stdout.readline().strip())

        # In this order: the one that lives would remove what the other has left.
        alive, lives = started(killed=False)
        with alive:
            killed, dead = started(killed=True)
            killed.communicate()
            assert (dead.parent, lives.parent) == (Path(base), Path(base))
            assert dead.exists()

            def next_use():
                subprocess.run([sys.executable, "-c", f"import nblaunch; {removes}"], env=environ, check=True)
                return not dead.exists()

            eventually(next_use, "it is removed, once the last of the ranks is gone", 60)
            assert lives.exists()
            alive.communicate("\n")
        assert list(Path(base).glob("nblaunch-*")) == []


@pytest.mark.parametrize("standby", [slow("0"), "1"], ids=["new ranks", "ranks that wait"])
def test_of_a_run_that_was_interrupted_before_it_began_nothing_is_left(standby, start_kernel, eventually):
    kernel = start_kernel(NBLAUNCH_STANDBY=standby)
    poke = poked.of_kernel(kernel)
    poke("import psutil")
    if standby == "1":
        kernel.ok("%%distributed -n 2\nrank")
        eventually(
            lambda: poke(
                "(lambda seat: seat is not None and seat.group.waiting)(local.standby._standby_group)"
            ),
            "the next ranks are ready",
        )
    poke(
        "from nblaunch.runtime.jobs import RunningJob\n"
        "begin = RunningJob.begin\n"
        "def late(self, *arguments):\n"
        "    self._interrupted = True\n"
        "    begin(self, *arguments)\n"
        "RunningJob.begin = late"
    )
    assert kernel.fails("%%distributed -n 2\nrank").ename == "KeyboardInterrupt"
    poke("RunningJob.begin = begin")
    root = Path(poke("str(local.directory.root())"))
    waiting = 1 if standby == "1" else 0
    eventually(lambda: len(list(root.glob("group-*"))) <= waiting, "the run's directory is gone")
    assert kernel.ok("%%distributed -n 2 --out res\nrank").error is None
    assert kernel.value("res.values") == [0, 1]
