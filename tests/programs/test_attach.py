"""Coming back: a kernel dies at any moment of a cell, and another one has all that the cell brings."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import waiting

import nblaunch
from nblaunch.client import directory

pytestmark = pytest.mark.timeout(300)

SEED = 20261122
CELL_SECONDS = 1.9
"""A little more than the cell of the kills takes: some come when its result has just arrived."""


WORK = """
%%distributed
import os, time
import numpy
from IPython.display import Image, display
rank = int(os.environ["RANK"])
for part in range(10):
    for line in range(part * 1000, (part + 1) * 1000):
        print(f"line {line} of rank {rank}")
    if part % 2 == 0:
        display(Image(data=b"\\x89PNG\\r\\n\\x1a\\n" + bytes([rank, part]) * 50, format="png"))
    time.sleep(0.15)
kept = {"rank": rank, "round": ROUND}
numpy.arange(8_000_000) * (rank + 1) + ROUND
"""

LOOK = """
import base64, time
import nblaunch, numpy
began = time.monotonic()
session = nblaunch.Session.attach("train")
seconds = time.monotonic() - began
result = session.jobs[-1].result()
PNG = b"\\x89PNG\\r\\n\\x1a\\n"
found = []
for each in result.ranks:
    wanted = [f"line {line} of rank {each.rank}" for line in range(10_000)]
    lines = each.stdout.splitlines()
    text, shown = each.stdout, result.state.ranks[each.rank].transcript
    head, tail = ("".join(getattr(part, "text", "") for part in parts) for parts in (shown.head, shown.tail))
    pictures = [base64.b64decode(shown.data["image/png"]) for shown in each.displays]
    drawn = [PNG + bytes([each.rank, part]) * 50 for part in range(0, 10, 2)]
    value = numpy.arange(8_000_000) * (each.rank + 1) + ROUND
    found.append({
        "missing lines": len(set(wanted) - set(lines)),
        "in order": lines == wanted,
        "missing figures": len(set(drawn) - set(pictures)),
        "figures in order": pictures == drawn,
        "in the panel": text.startswith(head) and text.endswith(tail),
        "neither twice nor missing there": len(head) + shown.omitted + len(tail) == len(text),
        "figures there": len(shown.displays) + shown.omitted_displays,
        "megabytes": each.value.nbytes // 1_000_000,
        "equal": bool(numpy.array_equal(each.value, value)),
    })
kept = session.pull("kept")["kept"]
del result, each, value, shown
"""

WHOLE = {
    "missing lines": 0,
    "in order": True,
    "missing figures": 0,
    "figures in order": True,
    "in the panel": True,
    "neither twice nor missing there": True,
    "figures there": 5,
    "megabytes": 64,
    "equal": True,
}


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(1, SEED), *(pytest.param(10, SEED + part, marks=pytest.mark.slow) for part in range(1, 11))],
)
def test_nothing_is_missing_after_a_kernel_was_killed_at_any_moment_of_a_cell(
    detached_kernels, eventually, tmp_path, kills, seed
):
    """Each kernel attaches to what the one before it has left, and is killed in its own cell."""
    moments = random.Random(seed)
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    seconds = []
    for number in range(kills):
        kernel.submit(WORK.replace("ROUND", str(number)))
        # Killed before it has given the job, the kernel has left none.
        eventually(lambda: running("train"), "the job is there")
        followed = tmp_path / f"followed-{number}"
        with followed.open("w") as file:
            follower = subprocess.Popen([*LOGS, "-f"], stdout=file, stderr=subprocess.STDOUT)
        moment = moments.uniform(0, CELL_SECONDS)
        time.sleep(moment)
        kernel.kill()
        kernel = detached_kernels()
        kernel.ok(LOOK.replace("ROUND", str(number)))
        story = f"kill {number} of seed {seed}, {moment:.3f} s after the job was there"
        assert kernel.value("found") == [WHOLE] * 2, story
        assert follower.wait(60) == 0, story
        # The panel's notice, for those who come after the first one.
        noticed = NOTICED if number else ""
        assert by_rank(followed.read_text().removeprefix(noticed)) == PRINTED, story
        read = subprocess.run(LOGS, capture_output=True, text=True, check=True)
        assert (by_rank(read.stdout), read.stderr) == (PRINTED, noticed), story
        assert kernel.value("kept") == [{"rank": rank, "round": number} for rank in range(2)], story
        assert kernel.value("[each.state for each in session.jobs]") == ["SUCCEEDED"] * min(number + 1, 50)
        kernel.ok("%distributed attach")
        seconds.append(kernel.value("seconds"))
    median = statistics.median(seconds)
    print(f"attached within {median:.3f} s (median of {kills}, seed {seed})")
    kernel.ok("%distributed stop")
    assert directory.sessions() == ()


LOGS = [sys.executable, "-m", "nblaunch", "logs", "train"]
NOTICED = (
    "attached to session 'train': the ranks' own variables count. "
    "%distributed push NAME sends the notebook's.\n"
)
PRINTED = {f"[rank {rank}]": [f"line {line} of rank {rank}" for line in range(10_000)] for rank in range(2)}


def by_rank(printed: str) -> dict[str, list[str]]:
    """Return the lines of each rank in order, those of its five figures apart."""
    lines: dict[str, list[str]] = {}
    figures: dict[str, int] = {}
    for line in printed.splitlines():
        rank, text = line[: len("[rank 0]")], line[len("[rank 0] ") :]
        if text.startswith("<"):
            figures[rank] = figures.get(rank, 0) + 1
        else:
            lines.setdefault(rank, []).append(text)
    assert figures == dict.fromkeys(lines, 5)
    return dict(sorted(lines.items()))


def running(name: str) -> str:
    """Return the title of the job that a session runs."""
    return next((each.running for each in directory.sessions() if each.name == name), "")


@pytest.mark.slow
def test_who_has_lost_a_session_may_give_jobs_again_once_nobody_has_it(detached_kernels, eventually):
    """What it knew of the ranks is not so any more: what the other one has changed counts."""
    first, second = detached_kernels(), detached_kernels()
    first.ok("scale, pile = 10, []\n%distributed start -n 1 --detach --session train")
    first.ok("%%distributed --session train\nkept = scale, pile")
    second.ok("%distributed attach train --take")
    second.ok("%%distributed --session train\nscale = 20")
    assert "%distributed attach train" in first.fails("%%distributed --session train\nscale").evalue
    second.kill()
    eventually(lambda: directory.sessions()[0].client is None, "nobody has it")
    shown = first.ok("%%distributed --session train --out found\nscale").text
    assert "attached to session 'train': the ranks' own variables count" in shown
    assert first.run("found.values").result == "[20]"
    assert directory.sessions()[0].client == first.pid
    # The ranks have forgotten which object is which.
    first.ok("holder = [pile]")
    first.ok("%%distributed --session train --out found\nholder, holder[0] is pile")
    assert first.run("found.values").result == "[([[]], False)]"


# --- two clients at once ---------------------------------------------------------------------------


def test_a_second_notebook_is_told_who_has_the_session_and_takes_it_over(detached_kernels):
    one = detached_kernels(JPY_SESSION_NAME="/home/ann/one.ipynb")
    two = detached_kernels()
    one.ok("%distributed start -n 2 --detach --session train\nx = 1")
    one.ok("%%distributed\nx = 7")

    told = two.ok("%distributed attach train").stdout
    held = two.fails("%%distributed\nx").evalue
    assert f"session 'train' takes jobs from the notebook's kernel (pid {one.pid} on " in held
    assert "notebook /home/ann/one.ipynb) since " in held
    assert held.endswith("Take it over with %distributed attach train --take.")
    assert told == f"watching: {held}\n"
    assert two.fails("import nblaunch\nnblaunch.Session.attach().run(int)").evalue == held

    two.ok("%distributed attach train --take")
    two.ok("%%distributed --out res\nx = x + 1\nx")
    assert two.value("res.values") == [8, 8]
    for code in ("%%distributed\nx", "%distributed push x"):
        assert f"the notebook's kernel (pid {two.pid} on " in one.fails(f"{code}").evalue

    # Back again; what the other one has changed counts.
    one.ok("%distributed attach --take")
    one.ok("%%distributed --out res\nx")
    assert one.value("res.values") == [8, 8]
    assert f"(pid {one.pid} on " in two.fails("%%distributed\nx").evalue
    two.ok("session = nblaunch.Session.attach(take=True)")
    assert two.value("session.run(int).values") == [0, 0]
    two.ok("session.close()")
    assert "the ranks of session 'train' have ended" in one.fails("%%distributed\nx").evalue


@pytest.mark.slow
def test_a_cell_whose_session_was_taken_over_is_only_watched(detached_kernels, eventually, free):
    one, two = detached_kernels(), detached_kernels()
    one.ok("%distributed start -n 2 --detach --session train")
    cells = [one.submit(waiting(free))]
    eventually(lambda: running("train"), "the job runs")
    cells.append(two.submit("%distributed attach train --take"))
    eventually(lambda: directory.sessions()[0].client == two.pid, "the second one has it")
    one.interrupt()
    shown = cells[0].finish()
    assert shown.error.ename == nblaunch.StoppedWatchingError.__name__
    assert shown.error.traceback == STOPPED.partition(" (")[0]
    assert running("train")
    free.touch()
    ran = cells[1].finish()
    assert "[ranks 0-1] has begun" in ran.text
    assert "ranks 0-1: 'freed'" in ran.text
    assert f"(pid {two.pid} on " in one.fails("%%distributed\nx").evalue


@pytest.mark.slow
def test_who_has_attached_is_told_when_the_runtime_dies(detached_kernels, eventually, free):
    one = detached_kernels()
    one.ok("%distributed start -n 1 --detach --session train")
    one.kill()
    two = detached_kernels()
    two.ok("%distributed attach train")
    cell = two.submit(waiting(free))
    eventually(lambda: running("train"), "the job runs")
    struck = time.monotonic()
    os.kill(directory.sessions()[0].pid, signal.SIGKILL)
    error = cell.finish().error
    assert time.monotonic() - struck < 1
    assert error.ename == "LaunchError"
    assert "session 'train'" in error.evalue
    assert "has ended, and all ranks with it. Start another session (%distributed start)." in error.evalue
    assert error.evalue.endswith("It printed nothing.")
    eventually(lambda: not directory.sessions(), "nothing is listed")


# --- watching --------------------------------------------------------------------------------------

STOPPED = "stopped watching; the job goes on (%distributed interrupt stops it)"


def test_the_stop_button_stops_watching_and_interrupt_stops_the_job(detached_kernels, eventually, free):
    one = detached_kernels()
    one.ok("%distributed start -n 2 --detach")
    one.submit(waiting(free))
    eventually(lambda: running("default"), "the job runs")
    one.kill()
    two = detached_kernels(NBLAUNCH_DISPLAY="widget")
    for _ in range(2):
        watching = two.submit("%distributed attach")
        assert watching.shown().error is None
        two.interrupt()
        ran = watching.finish()
        assert (ran.error, ran.result) == (None, STOPPED)
        assert "has begun" in ran.text
        assert running("default")
    said = "session 'default': the running job is interrupted"
    assert two.run("%distributed interrupt").result == said
    eventually(lambda: not running("default"), "the job has ended")
    two.ok("import nblaunch\nsession = nblaunch.Session.attach()")
    assert two.value("[[each.title, each.state] for each in session.jobs]") == [["cell", "STOPPED"]]
    assert "interrupted" in two.fails("session.jobs[-1].result()").evalue


# --- what has ended --------------------------------------------------------------------------------


@pytest.fixture
def left(detached_kernels, eventually):
    """Give `left(*cells)`: a kernel that finds what one has left that was killed in the last of its cells."""

    def leave(*cells: str, **environment: str):
        one = detached_kernels()
        one.ok("%distributed start -n 2 --detach")
        for number, cell in enumerate(cells):
            one.run(cell) if number < len(cells) - 1 else one.submit(cell)
        eventually(lambda: running("default"), "the last job runs")
        one.kill()
        two = detached_kernels(**environment)
        two.ok("import nblaunch\nsession = nblaunch.Session.attach()")
        return two

    return leave


def test_jobs_are_listed_with_their_titles_and_states(left, free):
    two = left("%%distributed\n1 + 1", "%%distributed\n1 / 0", waiting(free))
    listed = "[[each.title, each.state, each.ended is None] for each in session.jobs]"
    assert two.value(listed) == [
        ["cell", "SUCCEEDED", False],
        ["cell", "FAILED", False],
        ["cell", "RUNNING", True],
    ]
    free.touch()
    assert two.value("session.jobs[-1].result().values") == ["freed", "freed"]
    assert two.value("session.jobs[0].result().values") == [2, 2]
    assert two.value("[each.state for each in session.jobs]") == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert "ZeroDivisionError" in two.fails("session.jobs[1].result()").evalue
    assert two.value("len(session.jobs[1].result(check=False).failures)") == 2


PAGE = (Path(__file__).parents[2] / "notebooks" / "docs" / "sessions.md").read_text()
TRAIN = """
import pathlib, time
def train(epoch):
    while epoch >= 4 and not pathlib.Path(FILE).exists():
        time.sleep(0.01)
    return 8 / (epoch + 1)
"""


def same_form(text: str) -> str:
    """Return a text without what differs from run to run: numbers, dates, blanks."""
    text = re.sub(r"\n+", "\n", text)
    text = re.sub(r"since \w{3} \d\d \d\d:\d\d", "since DATE", text)
    return re.sub(r" {2,}", "  ", re.sub(r"\d+\.\d+|\d+(?= MB| s\b)", "N", text)).strip()


def test_what_the_page_shows_of_coming_back_is_what_is_shown(detached_kernels, eventually, free):
    section = PAGE.partition("## Come back later\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```(\w+)\n(.*?)\n```$", section, flags=re.MULTILINE | re.DOTALL)
    start, cell, back, later = [text for language, text in found if language == "python"]
    in_shell, shown = [text for language, text in found if language == "text"]
    one = detached_kernels(JPY_SESSION_NAME="/home/ann/train.ipynb")
    one.ok(TRAIN.replace("FILE", repr(str(free))))
    one.ok(start)
    one.submit(cell)
    eventually(lambda: running("train"), "the job runs")
    command, line = in_shell.splitlines()
    words = [sys.executable, *command.removeprefix("$ python ").split()]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert same_form(listed) == same_form(line)
    one.kill()
    two = detached_kernels(NBLAUNCH_DISPLAY="widget")
    # Its magics are there already; this is what the first line does.
    load = "nblaunch.load_ipython_extension(get_ipython())"
    attached = two.submit(f"import nblaunch\n{back.replace('%load_ext nblaunch', load)}")
    attached.shown()
    free.touch()
    assert same_form(attached.finish().text) == same_form(shown)
    assert two.value("_.values") == [1.0, 1.0]
    *_, values, pull = later.splitlines()
    two.ok(later)
    assert two.run(values).result == "[1.0, 1.0]"
    assert re.sub(r"\d\.\d+", "1.0", values.partition("  # ")[2]) == "[1.0, 1.0]"
    assert two.run(f"{pull}['losses'][0] == [8 / epoch for epoch in range(1, 9)]").result == "True"


# --- forks of the user's program -------------------------------------------------------------------

FORKS = """
import multiprocessing, os, warnings
import nblaunch
warnings.simplefilter("ignore", DeprecationWarning)
session = nblaunch.Session.attach()
def in_a_fork(action):
    child = os.fork()
    if child == 0:
        code = 2
        try:
            action()
            code = 0
        except nblaunch.NblaunchError as error:
            code = 1 if ", a fork of process " in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
refused = [
    in_a_fork(action)
    for action in (
        lambda: session.run(int),
        lambda: session.submit(int).result(),
        lambda: session.push({"x": 6}),
        lambda: session.pull("x"),
        lambda: session.jobs,
        lambda: session.jobs[-1].result(),
        session.restart,
    )
]
harmless = [
    in_a_fork(action) for action in (session.close, session.interrupt, session.status, lambda: repr(session))
]
with multiprocessing.get_context("fork").Pool(2) as pool:
    squares = pool.map(abs, range(-2, 0))
values = session.pull("x")["x"]
"""


@pytest.mark.slow
def test_a_fork_of_the_notebook_does_no_harm_to_what_it_is_attached_to(left):
    two = left("%%distributed\nx = 5", "%%distributed\nimport time\ntime.sleep(2)\nx")
    two.ok("session.jobs[-1].result()\ndel session")
    two.ok(FORKS)
    assert two.value("[refused, harmless, squares]") == [[1] * 7, [0] * 4, [2, 1]]
    assert two.value("values") == [5, 5]
    assert two.value("[each.state for each in session.jobs]") == ["SUCCEEDED"] * 2


@pytest.mark.slow
def test_a_fork_that_outlives_the_notebook_does_not_keep_the_session_for_it(left, eventually, free):
    two = left(waiting(free))
    two.ok(
        """
        import os, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        while child == 0:
            time.sleep(1)
        """
    )
    child = two.value("child")
    try:
        two.kill()
        eventually(lambda: directory.sessions()[0].client is None, "nobody has the session")
    finally:
        os.kill(child, signal.SIGKILL)


LINES = 300
PRINTS = """
import time, torch
k = NUMBER
for line in range(300):
    print("line", line)
    if line % 60 == 0:
        time.sleep(0.02)
torch.full((200_000,), float(k))
"""
TAKER = """
import json, sys, time
import nblaunch
for line in sys.stdin:
    time.sleep(float(line))
    session = nblaunch.Session.attach("train", take=True)
    job = session.jobs[-1].result(check=False)
    found = {
        "ok": job.ok,
        "values": [float(each[-1]) for each in job.values if each is not None],
        "lines": [len(each.stdout.splitlines()) for each in job.ranks],
        "kept": session.cell("k", namespace={}).values,
    }
    print(json.dumps(found), flush=True)
    del job
"""
OWNER = """
import json, random, subprocess, sys
import nblaunch
PRINTS, TAKER, moments, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chosen = random.Random(seed)
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
taker = subprocess.Popen([sys.executable, "-c", TAKER], **pipes, text=True)
session = nblaunch.Session(2, name="train", detach=True, display=False)
session.cell(PRINTS.replace("NUMBER", "-1"), namespace={})
rounds = []
for number in range(moments):
    moment = chosen.uniform(0, 0.4)
    print(moment, file=taker.stdin, flush=True)
    own = {}
    try:
        job = session.cell(PRINTS.replace("NUMBER", str(number)), namespace={})
        own["values"] = [float(each[-1]) for each in job.values]
        own["lines"] = [len(each.stdout.splitlines()) for each in job.ranks]
        del job
    except nblaunch.NblaunchError as error:
        own["error"] = str(error)
    rounds.append((moment, own, json.loads(taker.stdout.readline())))
    session = nblaunch.Session.attach("train", take=True)
taker.communicate()
session.close()
print(json.dumps(rounds))
"""


@pytest.mark.parametrize(
    ("moments", "seed"), [(2, SEED), pytest.param(100, SEED + 1, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("detached_kernels")
def test_both_have_the_whole_result_where_one_takes_the_session_at_any_moment_of_the_others_job(
    moments, seed
):
    """Each round the one gives a job while the other takes the session; then the first takes it back."""
    program = [sys.executable, "-c", OWNER, PRINTS, TAKER, str(moments), str(seed)]
    ran = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    before = 0
    for number, (moment, own, taken) in enumerate(json.loads(ran.stdout)):
        story = f"round {number} of seed {seed}, taken after {moment:.3f} s: {own}, {taken}"
        # Who takes the session before the job has begun has the one before, and the job is refused.
        last = number - (taken["kept"] != [number] * 2)
        before += last != number
        if "error" in own:
            assert " gives the session's jobs" in own["error"], story
        else:
            assert own == {"values": [number] * 2, "lines": [LINES] * 2}, story
        assert taken["kept"] == [last] * 2, story
        assert taken["ok"], story
        assert taken["lines"] == [LINES] * 2, story
        assert taken["values"] in ([number] * 2, [number - 1] * 2), story
    print(f"{moments} moments, {before} of them before the job had begun")


IDLE = """
import json, statistics, sys
import nblaunch, psutil
from nblaunch.client import directory
cells = int(sys.argv[1])
session = nblaunch.Session(1, name="train", detach=True, display=False)
session.cell("globals().update({f'variable_{number}': number for number in range(400)})", namespace={})
runtime = psutil.Process(directory.find("train").runtime.pid)
idle = nblaunch.Session.attach("train")
used = []
for number in range(cells):
    session.cell(f"new_{number % 50} = {number}", namespace={})
    if number >= cells // 3:
        used.append(runtime.memory_info().rss / 1e6)
part = len(used) // 4
told = statistics.median(used[:part]), statistics.median(used[-part:])
same = idle.pull("new_0") == session.pull("new_0")
session.close()
print(json.dumps([*told, same]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("cells", [2880])
@pytest.mark.usefixtures("detached_kernels")
def test_an_attached_client_that_reads_nothing_costs_the_runtime_no_memory_in_a_day_of_cells(cells):
    """2,880 are a cell each half minute of a day; each binds a name, of which every client is told."""
    program = [sys.executable, "-c", IDLE, str(cells)]
    ran = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    before, after, same = json.loads(ran.stdout)
    print(f"{cells} cells: the runtime has {before:.1f} MB, then {after:.1f} MB")
    assert same
    assert after - before < 2
