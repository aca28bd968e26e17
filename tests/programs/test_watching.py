"""Several clients of one session: one gives jobs, the others watch, and disturb it in nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import poked
import pytest
from patience import waiting

from nblaunch.client import directory

pytestmark = pytest.mark.timeout(300)

START = "%distributed start -n 2 --detach --session train"
STOPPED = "stopped watching; the job goes on"


def session():
    """Return what is listed of the session."""
    (found,) = directory.sessions()
    return found


@pytest.fixture
def owner(detached_kernels):
    """Give a kernel that has the session; its ranks have x, which is 7."""
    kernel = detached_kernels()
    kernel.ok(f"{START}\nx = 1")
    kernel.ok("%%distributed\nx = 7")
    return kernel


# --- what those that watch have ----------------------------------------------------------------------


def test_who_watches_has_the_job_live_its_result_and_a_look_at_the_ranks(
    owner, detached_kernels, eventually, free
):
    cell = owner.submit(waiting(free, "--session train"))
    eventually(lambda: session().running, "the job runs")
    watcher = detached_kernels(NBLAUNCH_DISPLAY="widget")
    watching = watcher.submit("%distributed attach train")
    assert watching.shown().error is None
    watcher.interrupt()
    ran = watching.finish()
    assert (ran.error, ran.result) == (None, STOPPED)
    assert "has begun" in ran.text
    assert (session().running, session().client) == ("cell", owner.pid)

    watcher.ok("import nblaunch\nsession = nblaunch.Session.attach('train')")
    assert watcher.value("[[each.title, each.state] for each in session.jobs]") == [
        ["cell", "SUCCEEDED"],
        ["cell", "RUNNING"],
    ]
    assert watcher.value("[each.state for each in session.status().ranks]") == ["running"] * 2
    assert "pathlib" in watcher.value("str(session.stacks())") or "sleep" in watcher.value(
        "str(session.stacks())"
    )
    watching = watcher.submit("%distributed attach train")
    watching.shown()
    free.touch()
    ran = watching.finish()
    assert "[ranks 0-1] has begun" in ran.text
    assert "ranks 0-1: 'freed'" in ran.text
    assert watcher.value("_.values") == ["freed", "freed"]
    assert cell.finish().error is None
    assert "7" in watcher.ok("%distributed inspect x").result
    owner.ok("%%distributed --out res\nx")
    assert owner.value("res.values") == [7, 7]


GIVING = (
    "%%distributed\nx = 8",
    "%distributed push x",
    "%distributed pull x",
    "%distributed restart",
    "%distributed interrupt",
    "%distributed debug",
    "session.run(int)",
    "session.submit(int)",
    "session.cell('x = 8')",
)


@pytest.mark.slow
def test_who_watches_and_gives_a_job_is_told_who_has_the_session(owner, detached_kernels):
    watcher = detached_kernels()
    watcher.ok("import nblaunch\nsession = nblaunch.Session.attach('train')\nx = 9")
    watcher.ok("%distributed attach train")
    for code in GIVING:
        refused = watcher.fails(code)
        assert refused.ename == "NblaunchError", code
        assert f"takes jobs from the notebook's kernel (pid {owner.pid} on " in refused.evalue, code
        assert "Take it over with %distributed attach train --take." in refused.evalue, code
    assert watcher.value("repr(session)") == "<Session 'train': 2 ranks, gloo, watched>"
    # It ends its own watching, and nothing else.
    watcher.ok("session.close()")
    owner.ok("%%distributed --out res\nx")
    assert owner.value("res.values") == [7, 7]


FAST = """
import nblaunch, os
session = nblaunch.Session.attach("train")
print(session.jobs[-1].result().ok)
try:
    session.run(int)
except nblaunch.NblaunchError as error:
    print(error)
with session:
    pass
"""


@pytest.mark.slow
def test_a_script_watches_too_and_its_end_ends_nothing(owner):
    ran = subprocess.run([sys.executable, "-c", FAST], capture_output=True, text=True, check=True)
    ok, refused = ran.stdout.splitlines()
    assert ok == "True"
    assert f"(pid {owner.pid} on " in refused
    assert refused.endswith("Take it over with nblaunch.Session.attach('train', take=True).")
    owner.ok("%%distributed --out res\nx")
    assert owner.value("res.values") == [7, 7]


# --- who has it next ---------------------------------------------------------------------------------


UNAWARE = "nblaunch.client.session.LiveSession._take_events = lambda _: None"


@pytest.mark.slow
def test_who_does_not_know_yet_that_it_has_lost_the_session_is_refused(owner, detached_kernels):
    owner.ok(f"import nblaunch\nsession = nblaunch.Session.attach('train')\n{UNAWARE}")
    taker = detached_kernels()
    taker.ok("%distributed attach train --take")
    for code in ("session.run(int)", "session.restart()", "session.interrupt()"):
        assert f"(pid {taker.pid} on " in owner.fails(code).evalue
    taker.ok("%%distributed --out res\nx")
    assert taker.value("res.values") == [7, 7]


@pytest.mark.slow
def test_the_first_that_gives_a_job_once_nobody_has_the_session_has_it(detached_kernels, eventually):
    """Those that watch keep it from ending, as every client does."""
    owner, first, second = detached_kernels(), detached_kernels(), detached_kernels()
    owner.ok(f"{START} --linger 1s")
    owner.ok("%%distributed\nx = 7")
    for each in (first, second):
        each.ok("import nblaunch\nsession = nblaunch.Session.attach('train')")
    owner.kill()
    eventually(lambda: session().client is None, "nobody has it")
    time.sleep(1.5)
    assert session().linger_left is None
    assert first.value("session.run(int).values") == [0, 0]
    assert session().client == first.pid
    assert f"(pid {first.pid} on " in second.fails("session.run(int)").evalue
    # As that of one that never gave a job, its end is not that of the session.
    second.ok("session.close()")
    assert first.value("session.pull('x')") == {"x": [7, 7]}


SLOW = """
%%distributed
import time
class Slow:
    seconds = [1000]
    def __repr__(self):
        time.sleep(self.seconds.pop() if self.seconds else 0)
        return "slow"
slow = Slow()
"""


@pytest.mark.slow
def test_a_look_of_one_that_watches_holds_no_job_up_for_long(owner, detached_kernels, eventually):
    watcher = detached_kernels()
    owner.ok(SLOW)
    watcher.ok("%distributed attach train")
    look = watcher.submit("%distributed inspect slow")
    eventually(lambda: "rank 0: running" in owner.ok("%distributed status").result, "it is at work")
    ran = owner.run("%%distributed --out res\nx")
    assert ran.error is None
    assert ran.seconds < 10, ran.seconds
    assert owner.value("res.values") == [7, 7]
    assert look.finish().error is not None


DROPS = """
%%distributed --session train
import threading, weakref
kept = box.pop()
ref = weakref.ref(kept)
del box
threading.Timer(0.3, lambda: globals().pop("kept")).start()
"""


@pytest.mark.slow
def test_a_look_of_one_that_watches_leaves_what_the_ranks_know_as_it_is(owner, detached_kernels, eventually):
    """An object that the next job refers to stays until that has found it, also if its variable is gone."""
    watcher = detached_kernels()
    watcher.ok("%distributed attach train")
    owner.ok("class Thing:\n    pass\nthing = Thing()\nbox, holder = [thing], [thing]")
    owner.ok("%distributed push box")
    owner.ok(DROPS)
    eventually(lambda: watcher.run("%distributed inspect kept").error, "the variable is gone")
    owner.ok("%%distributed --session train --ranks 0 --out res\nholder[0] is ref()")
    assert owner.value("res.values") == [True]


NO_ROOM = """
import gc, nblaunch.runtime.archive as archive
for each in [each for each in gc.get_objects() if isinstance(each, archive.Archive)]:
    each._bounds = archive.Bounds(values=1)
"""


@pytest.mark.slow
def test_values_that_one_that_watches_has_got_are_there_for_the_giver(detached_kernels, eventually, free):
    """Where older values are dropped for newer ones, its own wait until the owner has mapped them."""
    owner, watcher = detached_kernels(), detached_kernels()
    poked.of_kernel(owner)
    owner.ok(START)
    poked.run_in(Path(directory.detached()["train"].root), NO_ROOM)
    watcher.ok("import nblaunch\nsession = nblaunch.Session.attach('train')")
    cell = owner.submit(
        waiting(free, "--session train").replace('"freed"', "__import__('numpy').arange(1_000_000)")
    )
    eventually(lambda: session().running, "the job runs")
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        free.touch()
        assert watcher.value("[int(each[-1]) for each in session.jobs[-1].result().values]") == [999_999] * 2
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    assert cell.finish().error is None
    assert owner.value("[int(each[-1]) for each in _.values]") == [999_999] * 2


# --- questions ---------------------------------------------------------------------------------------

ASKS = """
%%distributed --session train --out res
import pathlib, time
while not pathlib.Path(FILE).exists():
    time.sleep(0.01)
input("name? ") if rank == 1 else None
"""


NOTES_QUESTIONS = "import builtins\nasked = []\nbuiltins.input = lambda prompt: str(asked.append(prompt))"


def asked(kernel, text: str) -> str:
    """Wait until a kernel asks, answer `text`, and return the prompt."""
    prompt = kernel.client.get_stdin_msg(timeout=60)["content"]["prompt"]
    kernel.client.input(text)
    return str(prompt)


@pytest.mark.slow
def test_a_question_is_listed_and_asked_where_the_jobs_are_given(owner, detached_kernels, eventually, free):
    free.touch()
    owner.client.execute(ASKS.replace("FILE", repr(str(free))), allow_stdin=True)
    eventually(lambda: session().asking == (1,), "the rank asks")
    watcher = detached_kernels(NBLAUNCH_DISPLAY="widget")
    watching = watcher.submit(f"{NOTES_QUESTIONS}\n%distributed attach train")
    assert watching.shown().error is None
    watcher.interrupt()
    assert watching.finish().result == STOPPED
    assert watcher.value("asked") == []
    listed = [watcher.ok("%distributed sessions").result, str(session())]
    ran = subprocess.run(
        [sys.executable, "-m", "nblaunch", "sessions"], capture_output=True, text=True, check=True
    )
    for each in (*listed, ran.stdout):
        assert "s, rank 1 asks for input" in each
    assert "rank 1: running, cpu" in watcher.ok("%distributed status").result
    assert "asks 'name? '" in watcher.ok("%distributed status").result
    assert asked(owner, "ann") == "[rank 1] name? "
    watcher.ok("import nblaunch\nsession = nblaunch.Session.attach('train')")
    assert watcher.value("session.jobs[-1].result().values") == [None, "ann"]
    assert session().asking == ()


@pytest.mark.slow
def test_a_question_that_is_open_while_nobody_is_attached_waits_for_who_attaches(
    owner, detached_kernels, eventually, free
):
    owner.submit(ASKS.replace("FILE", repr(str(free))))
    eventually(lambda: session().running, "the job runs")
    owner.kill()
    eventually(lambda: session().client is None, "nobody has it")
    free.touch()
    eventually(lambda: session().asking == (1,), "the rank asks")
    comes = detached_kernels()
    comes.client.execute("%distributed attach train", allow_stdin=True)
    assert asked(comes, "ann") == "[rank 1] name? "
    assert comes.value("_.values") == [None, "ann"]


# --- what ranks have of clients that give nothing any more ---------------------------------------------

KNOWN = """
%%distributed --session train --out known
import gc
from nblaunch.capture.identity import ObjectTable
sum(len(each._entries) for each in gc.get_objects() if isinstance(each, ObjectTable))
"""
MANY = 1000


def known_by(kernel) -> int:
    """Return how many objects of the notebook's each rank knows."""
    kernel.ok(KNOWN)
    first, second = kernel.value("known.values")
    assert first == second
    return int(first)


@pytest.mark.slow
def test_ranks_forget_the_objects_of_a_client_that_was_taken_over(owner, detached_kernels):
    owner.ok(f"many = [[each] for each in range({MANY})]\nlast = many[-1]")
    owner.ok("%distributed push many last")
    assert known_by(owner) > MANY
    taker = detached_kernels()
    taker.ok("%distributed attach train --take")
    assert known_by(taker) < 10
    # The variables are the ranks' own now, and one object is one object.
    taker.ok("few = [1, 2]")
    looked = "%%distributed --session train --out res\nlen(many), last, last is many[-1]"
    taker.ok(looked.replace("len", "many[-1].append(few)\nlen", 1))
    assert taker.value("res.values") == [[MANY, [MANY - 1, [1, 2]], True]] * 2

    owner.ok("%distributed attach train --take")
    assert known_by(owner) < 10
    owner.ok(looked)
    assert owner.value("res.values") == [[MANY, [MANY - 1, [1, 2]], True]] * 2
    # What it sends again is the notebook's, and what it changes follows.
    owner.ok("%distributed push many last")
    owner.ok("both = [last, many]")
    owner.ok(
        "%%distributed --session train --out res\nlast, both[0] is last, both[1] is many, many[-1] is last"
    )
    assert owner.value("res.values") == [[[MANY - 1], True, True, True]] * 2
    assert known_by(owner) > MANY


@pytest.mark.slow
def test_ranks_forget_the_objects_of_a_client_that_is_gone(owner, detached_kernels, eventually):
    owner.ok(f"many = [[each] for each in range({MANY})]\n%distributed push many")
    assert known_by(owner) > MANY
    watcher = detached_kernels()
    watcher.ok("%distributed attach train")
    owner.kill()
    eventually(lambda: session().client is None, "nobody has it")
    assert known_by(watcher) < 10
    watcher.ok("%%distributed --out res\nlen(many)")
    assert watcher.value("res.values") == [MANY, MANY]


def test_two_objects_of_one_process_share_what_the_ranks_know(detached_kernels):
    kernel = detached_kernels()
    kernel.ok("import nblaunch\none = nblaunch.Session(nproc=2, name='train', detach=True)")
    kernel.ok("two = nblaunch.Session.attach()\nthing = [1]\none.push({'thing': thing})\ntwo.push({'x': 5})")
    kernel.ok(
        "value = one.cell('[thing is each for each in (thing, holder[0])]', namespace={'holder': [thing]})"
    )
    assert kernel.value("value.values") == [[True, True]] * 2
