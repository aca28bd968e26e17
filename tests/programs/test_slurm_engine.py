"""Slurm makes people wait, and takes back what it gave: what is said of it, and how soon. A real cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster
import pytest
from lanes import slow

from nblaunch._errors import OptionError
from nblaunch.nodes import slurm
from nblaunch.nodes.asking import Asking
from nblaunch.nodes.engine import (
    NodeProgram,
    NodeRequest,
    ProgramStatus,
    refuse_contradictions,
    requested_nodes,
)
from nblaunch.nodes.slurm import SlurmEngine
from nblaunch.options.command_line import parse_line
from nblaunch.protocol.messages import EngineState, EngineStatus
from nblaunch.protocol.reports import awaited_nodes

SLEEP = "import time; time.sleep(1000)"
SOON, NAMED, WITHDRAWN = 2.0, 5.0, 0.5
"""Seconds: until the reason for the wait is known, until an end is, and until a request is withdrawn."""


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Iterator[cluster.SlurmCluster]:
    with cluster.slurm(tmp_path_factory.mktemp("cluster") / "slurm") as hosts:
        yield hosts


@pytest.fixture
def hosts(started) -> cluster.SlurmCluster:
    """Give the cluster, on which nothing runs."""
    cluster.eventually(started.all_idle, "the jobs of other tests are gone")
    return started


class Request:
    """A request for nodes that run a program, by default `sleep`."""

    def __init__(
        self, hosts: cluster.SlurmCluster, *, source: str = SLEEP, request: NodeRequest | None = None, **given
    ) -> None:
        fields = {"least": 2, "most": 2, "nproc": 1, "name": f"nblaunch-{os.urandom(4).hex()}", "cwd": "/"}
        environ = {**os.environ, **hosts.environ}
        self.request = request or NodeRequest(
            **{**fields, "environ": environ, "python": sys.executable, **given}
        )
        SlurmEngine.check(self.request)
        self.said: list[EngineStatus] = []
        self.ended: list[str] = []
        program = NodeProgram(("-c", source), b"key\n")
        self.began = time.monotonic()
        self.asking = Asking(SlurmEngine, self.request, lambda: program, self.said.append, self.ended.append)
        self.asking.start()

    def until(self, condition: Callable[[EngineStatus], object], what: str, seconds: float) -> float:
        """Wait for a word of Slurm's; return the seconds since the request."""
        cluster.eventually(
            lambda: any(condition(said) for said in self.said), f"{what}: {self.said}", seconds
        )
        return time.monotonic() - self.began

    def statuses(self) -> tuple[ProgramStatus, ...]:
        """Return what has become of the programs."""
        assert self.asking._allocation is not None
        return self.asking._allocation.statuses()

    def run(self) -> None:
        self.until(lambda said: said.state is EngineState.STARTING, "the nodes are granted", 10)
        for place in range(self.request.most):
            self.asking.joined(place)
        self.until(lambda said: said.state is EngineState.RUNNING, "the nodes run", 10)


@pytest.fixture
def request_nodes(hosts) -> Iterator[Callable[..., Request]]:
    """Give `request_nodes(...)`, withdrawn at the end; no job is left."""
    made: list[Request] = []

    def make(**given) -> Request:
        made.append(Request(hosts, **given))
        return made[-1]

    yield make
    for each in made:
        each.asking.stop()
    ours = {each.request.name for each in made}
    cluster.eventually(lambda: not ours & set(hosts.run("squeue", "-h", "-o", "%j").split()), "none is left")


@pytest.fixture
def full_cluster(hosts) -> Iterator[str]:
    """Have somebody else's job on all hosts, for two minutes."""
    number = hosts.hold("-N2", "--exclusive", "-t", "2", "-J", "others")
    yield number
    hosts.run("scancel", number)


def test_the_reason_for_the_wait_is_known_soon_and_a_request_is_withdrawn_at_once(
    hosts, full_cluster, request_nodes
):
    waiting = request_nodes(words=("-t", "1"))
    waiting.until(lambda said: said.reason == "Resources", "the reason", SOON)
    said = waiting.said[-1]
    assert awaited_nodes(said).startswith(f"waiting for slurm: job {said.id} PENDING (Resources), priority ")
    waiting.until(lambda said: said.starts is not None, "when it will start", 10)
    (starts,) = {said.starts for said in waiting.said if said.starts is not None}
    assert 0 < starts - time.time() < 130, "when the others' time is over"
    began = time.monotonic()
    waiting.asking.stop()
    assert time.monotonic() - began <= WITHDRAWN
    assert hosts.jobs() == [f"{full_cluster} RUNNING"]
    assert waiting.ended == []


def test_the_time_that_is_left_follows_slurm(hosts, request_nodes):
    held = request_nodes(words=("-t", "5"))
    held.run()
    said = held.said[-1]
    assert (said.hosts, said.words, said.place) == (("alpha", "beta"), "RUNNING", "")
    assert 240 < said.ends - time.time() <= 300
    hosts.run("scontrol", "update", f"JobId={said.id}", "TimeLimit=9")
    held.until(lambda new: new.ends is not None and new.ends > said.ends + 200, "it has more time", 10)


def test_a_job_that_is_cancelled_from_outside_is_named(hosts, request_nodes):
    held = request_nodes()
    held.run()
    number = held.said[-1].id
    hosts.run("scancel", number)
    cluster.eventually(lambda: held.ended, "it is said that the job has ended", NAMED)
    assert held.ended == [f"slurm job {number} has ended: CANCELLED"]


def test_what_slurm_refuses_is_said_in_its_words(request_nodes):
    refused = request_nodes(words=("-p", "nowhere"))
    cluster.eventually(lambda: refused.ended, "it is refused", NAMED)
    (why,) = refused.ended
    assert why.startswith("slurm gives no nodes: ")
    assert "Invalid partition name specified" in why


@pytest.fixture
def with_squeue(hosts, tmp_path):
    """Return an environment in which squeue does first what a line of shell says."""

    def environ(first: str) -> dict[str, str]:
        real, played = cluster.program("squeue", "slurm-client"), tmp_path / "squeue"
        played.write_text(f'#!/bin/sh\n{first}\nexec {real} "$@"\n')
        played.chmod(0o755)
        return {**os.environ, **hosts.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return environ


@pytest.mark.parametrize(
    ("played", "words"),
    [slow(("exec sleep 100", "does not answer")), ("exit 0", "does not list it")],
    ids=["a controller that does not answer", "a site's squeue that answers from a cache"],
)
def test_where_squeue_does_not_tell_of_the_job_the_nodes_say_whether_they_are_there(
    with_squeue, request_nodes, monkeypatch, played, words
):
    environ = with_squeue(f'test -e "$0.down" && {played}')
    held = request_nodes(environ=environ)
    held.run()
    monkeypatch.setattr(slurm, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(slurm, "_MISSING_SECONDS", 60.0)
    down = Path(environ["PATH"].partition(":")[0], "squeue.down")
    down.touch()
    held.asking.poll_soon()
    held.until(lambda said: words in said.reason, "squeue does not tell of it", 10)
    down.unlink()
    held.asking.poll_soon()
    held.until(lambda said: said is held.said[-1] and said.reason == "", "squeue tells of it", 10)
    assert held.ended == []


@pytest.mark.slow
def test_nodes_are_got_from_a_cluster_whose_squeue_takes_seconds(with_squeue, request_nodes):
    held = request_nodes(environ=with_squeue("sleep 1.2"))
    held.run()
    began = time.monotonic()
    held.asking.poll_soon()
    held.asking.stop()
    assert time.monotonic() - began <= WITHDRAWN, "although squeue is at work"
    assert held.ended == []


def test_a_request_that_waits_longer_than_it_may_is_withdrawn_and_says_what_it_waited_for(
    hosts, full_cluster, request_nodes
):
    waiting = request_nodes(longest_wait=2.0, words=("-t", "1"))
    waiting.until(lambda said: said.state is EngineState.WAITING, "it waits", SOON)
    number = waiting.said[-1].id
    cluster.eventually(lambda: waiting.ended, "it is given up", 10)
    (why,) = waiting.ended
    said = rf"the nodes were not granted within 2 s \(--queue-timeout\).*job {number} PENDING \(Resources\)"
    assert re.match(said, why), why
    cluster.eventually(lambda: hosts.jobs() == [f"{full_cluster} RUNNING"], "it is withdrawn", WITHDRAWN)


@pytest.mark.slow
def test_nodes_that_have_been_granted_are_kept_however_long_they_may_wait_in_a_queue(request_nodes):
    held = request_nodes(longest_wait=0.5)
    held.run()
    held.asking.poll_soon()
    held.until(lambda _: time.monotonic() > held.began + 1, "its longest wait is over", 10)
    assert (held.ended, held.said[-1].state) == ([], EngineState.RUNNING)


# --- what ends one node ends no other ------------------------------------------------------------------

ONE_ENDS = """
import os, pathlib, time
if os.environ["SLURM_NODEID"] == "0":
    time.sleep(4)  # twice the site's WaitTime
    pathlib.Path({file!r}).touch()
    time.sleep(1000)
raise SystemExit(3)
"""


def test_a_node_that_ends_leaves_the_others_at_a_site_with_a_wait_time(hosts, request_nodes, tmp_path):
    assert "WaitTime=2" in hosts.conf.read_text()
    file = tmp_path / "lives"
    held = request_nodes(least=1, source=ONE_ENDS.format(file=str(file)))
    held.run()
    cluster.eventually(lambda: [each.running for each in held.statuses()] == [True, False], "one has ended")
    cluster.eventually(file.exists, "the other one lives on")
    assert held.ended == []


@pytest.fixture
def broken_host(hosts) -> Iterator[Callable[[], None]]:
    """Give what has Slurm take the host beta for broken."""
    yield lambda: hosts.run("scontrol", "update", "NodeName=beta", "State=DOWN", "Reason=tests")
    hosts.run("scontrol", "update", "NodeName=beta", "State=IDLE")


def test_a_host_that_fails_leaves_the_others_the_job_where_they_are_enough(hosts, request_nodes, broken_host):
    held = request_nodes(least=1)
    held.run()
    number = held.said[-1].id
    broken_host()
    cluster.eventually(
        lambda: [each.running for each in held.statuses()] == [True, False], "its node has ended"
    )
    assert hosts.jobs() == [f"{number} RUNNING"]
    assert held.ended == []


# --- inside of a job -----------------------------------------------------------------------------------


@pytest.fixture
def batch(hosts, tmp_path) -> Iterator[Callable[..., str]]:
    """Give `batch(*words, script=...)`, which submits a job and returns its number."""
    submitted: list[str] = []

    def submit(*words: str, script: str = "sleep 1000") -> str:
        path = tmp_path / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        number: str = hosts.run("sbatch", "--parsable", "-o", "/dev/null", *words, str(path)).strip()
        submitted.append(number)
        cluster.eventually(lambda: f"{number} RUNNING" in hosts.jobs(by="%A"), "the job runs")
        return number

    yield submit
    hosts.run("scancel", *submitted)


def inside(hosts: cluster.SlurmCluster, number: str, nodes: int, **more: str) -> dict[str, str]:
    of_job = {"SLURM_JOB_ID": number, "SLURM_JOB_NUM_NODES": str(nodes)}
    return {**os.environ, **hosts.environ, **of_job, **more}


@pytest.mark.slow
def test_a_task_of_an_array_has_a_state_of_its_own(hosts, batch, request_nodes):
    """The last one has the array's number, under which squeue lists all of them."""
    array = batch("--array=0-2", "-n1", script="test $SLURM_ARRAY_TASK_ID = 2 || exit 0; sleep 1000")
    states = "squeue", "-h", "-t", "all", "-j", array, "-o", "%T"
    cluster.eventually(
        lambda: sorted(hosts.run(*states).split()) == ["COMPLETED", "COMPLETED", "RUNNING"], "one runs"
    )
    held = request_nodes(environ=inside(hosts, array, 1), least=1, most=1)
    held.run()
    assert held.ended == []


@pytest.mark.slow
def test_a_heterogeneous_job_gives_the_nodes_of_its_first_component(hosts, batch, request_nodes):
    script = "#SBATCH -N1 -n1 -w alpha\n#SBATCH hetjob\n#SBATCH -N1 -n1 -w beta\nsleep 1000"
    number = batch(script=script)
    held = request_nodes(environ=inside(hosts, number, 1, SLURM_HET_SIZE="2"), least=1, most=1)
    held.run()
    assert held.said[-1].hosts == ("alpha",)
    assert [each.running for each in held.statuses()] == [True]


def of(line: str, environ: dict[str, str]) -> NodeRequest:
    options = parse_line(line).options
    refuse_contradictions(options, environ)
    return requested_nodes(options, environ, "/")


def test_the_host_of_a_notebook_inside_an_allocation_is_one_node_with_here(hosts, batch, request_nodes):
    environ = inside(hosts, batch("-N2"), 2, SLURMD_NODENAME="alpha")
    held = request_nodes(request=of("-n 1 --on slurm --here", environ))
    held.run()
    assert held.said[-1].hosts == ("beta",)


def test_a_notebook_inside_a_job_of_one_node_asks_for_more(hosts, batch, request_nodes):
    number = batch("-N1", "-n1")
    environ = inside(hosts, number, 1, SLURMD_NODENAME="alpha")
    with pytest.raises(OptionError, match="a new job, for example --slurm"):
        of("-n 1 --on slurm --nnodes 2", environ)
    held = request_nodes(request=of("-n 1 --on slurm --nnodes 2 --slurm '-t 1'", environ))
    held.run()
    assert held.said[-1].hosts == ("alpha", "beta")
    held.asking.stop()
    cluster.eventually(lambda: hosts.jobs() == [f"{number} RUNNING"], "its own job is left alone")


HOLD = """
import sys
from nblaunch.nodes.engine import NodeRequest
from nblaunch.nodes.slurm import SlurmEngine
request = NodeRequest(**{request!r})
local.server.at_end(SlurmEngine.at_end(request))
allocation = SlurmEngine.ask(request)
"""


@pytest.mark.parametrize("killed", ["os.getpid()", slow("os.getppid()")], ids=["runtime", "keeper"])
def test_a_runtime_or_a_keeper_that_is_killed_withdraws_what_waits(hosts, full_cluster, poke, killed):
    """No process of ours is a job that waits: who kills salloc leaves it in the queue.

    A keeper that is killed takes the runtime along.
    """
    environ = {**os.environ, **hosts.environ}
    request = {
        "least": 1,
        "most": 1,
        "nproc": 1,
        "name": "nblaunch-waits",
        "cwd": "/",
        "python": sys.executable,
    }
    poke(HOLD.format(request={**request, "environ": environ}))
    cluster.eventually(lambda: poke("allocation.status().state.value") == "WAITING", "it waits")
    began = time.monotonic()
    with contextlib.suppress(json.JSONDecodeError, OSError):
        poke(f"import os; os.kill({killed}, 9)")
    cluster.eventually(lambda: hosts.jobs() == [f"{full_cluster} RUNNING"], "it is withdrawn", 3)
    print(f"withdrawn {time.monotonic() - began:.2f} s after the kill of {killed}")
