"""Runs and sessions on nodes of a real Slurm: two hosts with networks of their own, and their ends.

How soon what has happened is known is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster
import psutil
import pytest
from hosts import Hosts, hosts
from patience import PATIENCE, eventually

import nblaunch
from nblaunch import LaunchError, NblaunchError, RunFailedError, RunPreemptedError
from nblaunch._results import Handle, Outcome, time_is_short

pytestmark = [pytest.mark.timeout(300), pytest.mark.full, pytest.mark.usefixtures("own_runtime")]

SHOWN, NAMED, WITHDRAWN = 2.0, 5.0, 0.5
"""Seconds: until the reason for the wait is shown, until an end is named, until a request is withdrawn."""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def started(two, tmp_path_factory) -> Iterator[cluster.SlurmCluster]:
    there = [
        cluster.Host(each.name, each.address, ("nsenter", f"--net=/run/netns/{each.namespace}"))
        for each in two
    ]
    directory = tmp_path_factory.mktemp("cluster") / "slurm"
    with cluster.slurm(directory, there, controller=two.address) as made:
        yield made


@pytest.fixture
def slurm(started, monkeypatch) -> cluster.SlurmCluster:
    """Give the cluster, on which nothing runs."""
    eventually(started.all_idle, "the jobs of other tests are gone", 30)
    for name, value in started.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent)]))
    return started


def on(two: Hosts, **options: Any) -> dict[str, Any]:
    on_slurm = {"nproc": 1, "nnodes": 2, "on": "slurm", "slurm": "-t 10", "local_addr": two.address}
    return {**on_slurm, "timeout": 100, "grace": 5, **options}


@pytest.fixture
def start(slurm, two) -> Iterator[Callable[..., nblaunch.Session]]:  # noqa: ARG001 - it is there
    """Give `start(**options)`: sessions of the test's own."""
    made: list[nblaunch.Session] = []

    def begin(**options: Any) -> nblaunch.Session:
        made.append(nblaunch.Session(**on(two, **options)))
        return made[-1]

    yield begin
    for each in made:
        each.close()
    made.clear()


def cell(session: nblaunch.Session, source: str) -> list[Any]:
    return list(session.cell(source, namespace={}).values)


def at_work(session: nblaunch.Session, directory: Path, source: str = "time.sleep(90)") -> Handle:
    """Run a cell in the background; return once both ranks are at work."""
    noted = [directory / f"begun-{rank}" for rank in range(2)]
    begins = f"import os, time\nopen(f'{directory}/begun-{{os.environ[\"RANK\"]}}', 'w').close()\n{source}"
    going_on = Handle(lambda _: Outcome(session.cell(begins, namespace={}), None))
    eventually(lambda: all(each.exists() for each in noted), "both ranks are at work", 2 * PATIENCE)
    return going_on


def job_of(session: nblaunch.Session) -> str:
    engine = session.status().engine
    assert engine is not None
    return engine.id


REGISTER = """
import nblaunch, os
@nblaunch.on_preempt
def save(left):
    print("saved", left > 0)
    with open(f"%s/saved-{os.environ['RANK']}", "a") as file:
        file.write(f"{left}\\n")
os.getpid()
"""


def saved(directory: Path) -> list[list[float]]:
    """Return with how much time left each rank has saved."""
    files = [directory / f"saved-{rank}" for rank in range(2)]
    return [[float(line) for line in each.read_text().split()] if each.exists() else [] for each in files]


# --- the time that is left -----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_minutes_before_the_limit_ranks_save_and_the_run_is_preempted(slurm, start, tmp_path):
    session = start()
    cell(session, REGISTER % tmp_path)
    number = job_of(session)
    going_on = at_work(session, tmp_path)
    slurm.run("scontrol", "update", f"JobId={number}", "EndTime=now+126")
    began = time.monotonic()
    eventually(lambda: all(saved(tmp_path)), "both ranks save", 30)
    print(f"120 s before the limit of a job: saved {time.monotonic() - began - 6:.1f} s after that")
    with pytest.raises(RunPreemptedError) as caught:
        going_on.result(PATIENCE)
    assert str(caught.value).startswith(f"the run was preempted: slurm job {number} is near its time limit\n")
    assert caught.value.result is not None
    assert [each.stdout for each in caught.value.result.ranks] == ["saved True\n"] * 2
    assert all(100 < left <= 120 for (left,) in saved(tmp_path))
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    assert cell(session, "os.getpid() > 0") == [True, True], "the session goes on"
    later = time.time() + 1000
    eventually(lambda: session.status().engine.ends > later, "it has more time", 2 * PATIENCE)
    slurm.run("scontrol", "update", f"JobId={number}", "EndTime=now+60")
    eventually(lambda: all(len(each) == 2 for each in saved(tmp_path)), "they save again", 3 * PATIENCE)


@pytest.mark.slow
def test_the_time_that_is_left_is_shown_and_followed(slurm, start):
    session = start()
    number = job_of(session)
    assert re.search(rf"slurm job {number} on hA,hB, (9|10) min left", str(session.status()))
    engine = session.status().engine
    assert engine is not None
    assert time_is_short(engine, time.time() + 1)
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=45")
    began = time.monotonic()
    line = rf"slurm job {number} on hA,hB, 4[45] min left"
    eventually(lambda: re.search(line, str(session.status())), "it has more time", 2 * PATIENCE)
    print(f"a longer time limit is shown after {time.monotonic() - began:.1f} s")
    engine = session.status().engine
    assert engine is not None
    assert not time_is_short(engine, time.time())
    result = session.cell("1", namespace={})
    assert result.state.engine is not None
    assert result.state.engine.ends == engine.ends, "what each cell's header is made of"


@pytest.mark.slow
def test_a_job_that_has_reached_its_limit_ends_the_session_by_name(slurm, start, tmp_path):
    """The signal reaches all processes of the job: ranks that have to save live on for that.

    But for those that have saved in the last 10 s: these end at once.
    """
    session = start()
    cell(session, REGISTER % tmp_path)
    number = job_of(session)
    slurm.run("scontrol", "update", f"JobId={number}", "EndTime=now+18")  # it is noticed within 5 s
    eventually(lambda: all(saved(tmp_path)), "both ranks save", 30)
    cell(session, "1")  # what has run since is saved when Slurm ends the job
    going_on = at_work(session, tmp_path)
    with pytest.raises(RunPreemptedError) as caught:
        going_on.result(60)
    print(f"after the limit: {caught.value}")
    eventually(lambda: not session._live.open, "the session has ended", NAMED)
    assert [len(each) for each in saved(tmp_path)] == [2, 2]
    with pytest.raises(LaunchError, match=f"has ended: slurm job {number} has ended: time limit. Start an"):
        cell(session, "1")


# --- ends that nobody has expected ---------------------------------------------------------------------


def named(
    going_on: Handle, began: float, row: str, match: str, kind: type[Exception] = NblaunchError
) -> None:
    with pytest.raises(kind, match=match) as caught:
        going_on.result(20)
    seconds = time.monotonic() - began
    print(f"{row}: named after {seconds:.2f} s: {str(caught.value).splitlines()[0]}")
    assert seconds <= NAMED


def test_a_job_that_is_cancelled_is_named_and_its_ranks_save(slurm, start, tmp_path):
    session = start()
    cell(session, REGISTER % tmp_path)
    number = job_of(session)
    going_on, began = at_work(session, tmp_path), time.monotonic()
    slurm.run("scancel", number)
    named(going_on, began, "job cancelled from outside", "node h[AB] got SIGTERM", RunPreemptedError)
    eventually(lambda: not session._live.open, "the session has ended", NAMED)
    print(f"the session has ended after {time.monotonic() - began:.2f} s")
    assert [len(each) for each in saved(tmp_path)] == [1, 1]
    with pytest.raises(LaunchError, match=f"slurm job {number} has ended: CANCELLED"):
        cell(session, "1")


def node_programs(two: Hosts, host: str) -> list[psutil.Process]:
    """Return the node programs on a host."""
    found = [psutil.Process(pid) for pid in two.processes(host)]
    return [each for each in found if "join" in each.cmdline()[1:5]]


def of_ours(two: Hosts, host: str) -> list[psutil.Process]:
    """Return what runs on a host and is not Slurm's."""
    found = []
    for pid in two.processes(host):
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return [each for each in found if "slurm" not in each.name()]


@pytest.mark.slow
def test_a_node_program_that_is_killed_is_named(start, two, tmp_path):
    session = start()
    going_on = at_work(session, tmp_path)
    (program,) = node_programs(two, "hB")
    began = time.monotonic()
    program.kill()
    named(going_on, began, "agent killed", "node hB was lost", RunFailedError)
    eventually(lambda: not session._live.open, "the session has ended", NAMED)
    with pytest.raises(LaunchError, match="node hB was lost"):
        cell(session, "1")


@pytest.mark.slow
def test_a_link_that_is_down_is_named_after_the_nodes_timeout(start, two, tmp_path):
    """Slurm itself learns of it much later."""
    session = start(node_timeout=3)
    going_on = at_work(session, tmp_path)
    link = two["hB"].outside
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    began = time.monotonic()
    try:
        named(going_on, began, "link down, --node-timeout 3", "node hB was lost", RunFailedError)
        # What started the node stays: it gives the allocation back once Slurm's controller can be reached.
        eventually(lambda: len(of_ours(two, "hB")) == 1, "hB has ended its node by itself", PATIENCE)
        (waiting,) = of_ours(two, "hB")
        assert "join" in waiting.cmdline()
        print(f"the node that is cut off has ended by itself after {time.monotonic() - began:.1f} s")
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
    eventually(lambda: not of_ours(two, "hB"), "it has ended, too", 3 * PATIENCE)


# --- a notebook that is no more -------------------------------------------------------------------------

HOLDS = """
import json, sys
import nblaunch
session = nblaunch.Session(**json.loads(sys.argv[1]))
print("begun", flush=True)
for line in sys.stdin:
    try:
        print(list(session.cell(line, namespace={}).values), flush=True)
    except nblaunch.NblaunchError as error:
        print(str(error).splitlines()[0], flush=True)
session.close()
"""


def kill_all(program: psutil.Process) -> None:
    """Kill a program and all of its processes, as the system does that ends all of a user's."""
    everything = [program, *program.children(recursive=True)] if program.is_running() else []
    for each in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.suspend()  # none acts on the end of another
    for each in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


@pytest.fixture
def holder(slurm, two) -> Iterator[Callable[..., subprocess.Popen[str]]]:  # noqa: ARG001 - it is there
    """Give `holder(**options)`: a program with a session, which may leave files where it is killed."""
    with (
        tempfile.TemporaryDirectory(prefix="nbh-", dir="/tmp") as temporary,
        contextlib.ExitStack() as ending,
    ):

        def begin(**options: Any) -> subprocess.Popen[str]:
            program = subprocess.Popen(
                [sys.executable, "-c", HOLDS, json.dumps(on(two, **options))],
                env={**os.environ, "TMPDIR": temporary},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ending.callback(program.communicate)
            ending.callback(kill_all, psutil.Process(program.pid))
            return program

        yield begin


def said(program: subprocess.Popen[str], cell: str = "") -> str:
    """Return the next line that the program prints: the values of a cell, if it is given one."""
    assert program.stdin is not None
    assert program.stdout is not None
    if cell:
        print(cell, file=program.stdin, flush=True)
    return program.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.parametrize("nnodes", [pytest.param(2, marks=pytest.mark.slow), "1:2"])
def test_the_nodes_are_given_back_where_all_of_a_users_processes_are_killed_at_once(
    slurm, two, holder, nnodes
):
    program = holder(nnodes=nnodes)
    assert said(program) == "begun"
    assert [each.split()[1] for each in slurm.jobs()] == ["RUNNING"]
    began = time.monotonic()
    kill_all(psutil.Process(program.pid))
    eventually(lambda: not slurm.jobs(), "the job has ended", 3 * PATIENCE)
    print(f"all killed: the nodes were given back after {time.monotonic() - began:.1f} s")
    eventually(lambda: not any(of_ours(two, each.name) for each in two), "nothing is left on the hosts")


@pytest.mark.slow
def test_a_host_that_is_lost_with_all_that_runs_there_leaves_a_session_its_variables(slurm, two, holder):
    """Slurm learns of it after SlurmdTimeout, and would end the job."""
    program = holder(nnodes="1:2")
    assert said(program) == "begun"
    assert said(program, "x = 7; x") == "[7, 7]"
    there = [psutil.Process(pid) for pid in two.processes("hB")]
    (slurmd,) = [each for each in there if each.name() == "slurmd"]
    slurmd.suspend()
    try:
        for each in there:
            if each != slurmd:
                each.kill()
        down = "sinfo", "-h", "-t", "down", "-o", "%n"
        eventually(lambda: slurm.run(*down).split() == ["hB"], "Slurm takes it for lost", 90)
        assert [each.split()[1] for each in slurm.jobs()] == ["RUNNING"]
        assert said(program, "x") == "[7]"
        program.communicate(timeout=30)
    finally:
        slurmd.resume()


@pytest.mark.slow
def test_a_job_that_is_cancelled_is_named_before_slurm_says_so(slurm, holder, tmp_path, monkeypatch):
    """Its nodes end at the latest by SIGKILL; squeue takes longer."""
    squeue, real = tmp_path / "squeue", cluster.program("squeue", "slurm-client")
    squeue.write_text(f'#!/bin/sh\ntest -e {tmp_path}/busy && sleep 20\nexec {real} "$@"\n')
    squeue.chmod(0o755)
    with monkeypatch.context() as site:
        site.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        program = holder(nnodes="1:2")
    assert said(program) == "begun"
    (number,) = [each.split()[0] for each in slurm.jobs()]
    (tmp_path / "busy").touch()
    slurm.run("scancel", number)
    eventually(lambda: not slurm.jobs(), "the job has ended", 3 * PATIENCE)
    end = rf"session 'default' has ended: node h[AB] .*\(slurm job {number}\)"
    assert re.match(end, last := said(program, "1")) or re.match(end, last := said(program, "1")), last


@pytest.mark.slow
def test_a_request_that_waits_is_gone_once_all_of_its_users_processes_are_killed(slurm, holder):
    """Slurm itself gives nothing to a salloc that is no more."""
    others = slurm.hold("-N2", "--exclusive", "-t", "3", "-J", "others")
    program = holder()
    eventually(lambda: any("PENDING" in each for each in slurm.jobs()), "it waits", 3 * PATIENCE)
    kill_all(psutil.Process(program.pid))
    slurm.run("scancel", others)
    eventually(lambda: not slurm.jobs(), "no job is left", 3 * PATIENCE)


# --- a notebook that waits -------------------------------------------------------------------------------


def test_the_reason_is_on_screen_soon_and_an_interrupt_withdraws_the_request(slurm, two, start_kernel):
    others = slurm.hold("-N2", "--exclusive", "-t", "3", "-J", "others")
    kernel = start_kernel(CUDA_VISIBLE_DEVICES="", NBLAUNCH_DISPLAY="widget", **slurm.environ)
    kernel.ok("import nblaunch")
    kernel.ok(
        "%%distributed -n 1\n1", timeout=3 * PATIENCE
    )  # what a first run of a kernel takes is not Slurm's
    line = f"%%distributed -n 1 --nnodes 2 --on slurm --local-addr {two.address}"
    began = time.monotonic()
    pending = kernel.submit(f"{line}\n1")
    words = ""
    for kind, content in pending._messages(PATIENCE):
        pending._take(kind, content)
        words = json.dumps(content, default=str)
        if "(Resources)" in words:
            break
    shown = time.monotonic() - began
    assert re.search(r"waiting for slurm: job \d+ PENDING \(Resources\)", words), words
    interrupted = time.monotonic()
    kernel.interrupt()
    eventually(lambda: slurm.jobs() == [f"{others} RUNNING"], "the request is withdrawn", PATIENCE)
    withdrawn = time.monotonic() - interrupted
    ran = pending.finish(PATIENCE)
    print(f"reason on screen after {shown:.2f} s; withdrawn {withdrawn:.2f} s after the interrupt")
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    assert (shown <= SHOWN, withdrawn <= WITHDRAWN) == (True, True), (shown, withdrawn)
    slurm.run("scancel", others)


# --- a notebook that goes on in the next allocation ------------------------------------------------------

BEGIN = """
%%distributed
if "losses" not in globals():
    import time, torch, nblaunch
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)
    losses = []
    def step():
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        nblaunch.log(step=len(losses), loss=loss)
        losses.append(loss.item())
"""
TRAIN = """
%%distributed --out res
for _ in range(4):
    step()
    time.sleep(0.25)
losses
"""
STEPS = 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_notebook_goes_on_in_the_next_allocation_by_the_same_line_with_its_losses_in_one_piece(
    slurm, two, start_kernel, tmp_path
):
    """The first allocation ends while a cell is at work, the second while the notebook waits."""
    line = (
        f"%distributed start --on slurm -n 2 --slurm '-t 1' --save-every 1s --from {tmp_path}/run "
        f"--metrics-file {tmp_path}/metrics.jsonl --local-addr {two.address}"
    )

    def begin(kernel):
        kernel.ok(f"begun = {line}")
        kernel.ok(BEGIN)
        return kernel.value("str(begun)")

    def train(kernel):
        kernel.ok(TRAIN)
        return kernel.value("res.values")

    def wait_for_the_end(kernel):
        kernel.ok("import nblaunch.magic.sessions as sessions")
        eventually(lambda: not kernel.value("list(sessions.opened())"), "Slurm has ended it", 120)

    kernel = start_kernel(**slurm.environ)
    assert "is not there yet: nothing is loaded" in begin(kernel)
    done = [len(train(kernel)[0]) for _ in range(4)][-1]
    assert kernel.fails(TRAIN.replace("range(4)", "range(1000)"), 120).ename == "RunPreemptedError"
    wait_for_the_end(kernel)
    told = rf"have ended: slurm job \d+ has ended: time limit\. .*%distributed start --from {tmp_path}/run"
    assert re.search(told, kernel.fails(TRAIN).evalue)

    assert "loaded from" in begin(kernel)
    before = [len(each) - STEPS for each in train(kernel)]
    print(f"{done} steps in cells that have ended; the next allocation began after {before[0]}")
    # A save that is due while the last one is being written is left out.
    assert before in ([done] * 2, [done - STEPS] * 2), "no step of the cell that was cut off is saved"
    (number,) = [each.split()[0] for each in slurm.jobs()]
    slurm.run("scontrol", "update", f"JobId={number}", "EndTime=now+18")
    wait_for_the_end(kernel)

    kernel = start_kernel(**slurm.environ)
    begin(kernel)
    found = train(kernel)
    assert [len(each) for each in found] == [before[0] + 2 * STEPS] * 2, "the notebook waited: all is saved"
    with nblaunch.Session(nproc=2, display=False) as session:
        train_all = BEGIN.replace("%%distributed", "") + f"for _ in range({len(found[0])}): step()\nlosses"
        assert found == cell(session, train_all)
    points = [json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    curves = {(each["rank"], each["step"]): each["value"] for each in points}  # a later line counts
    assert [[curves[rank, step] for step in range(len(found[0]))] for rank in range(2)] == found
