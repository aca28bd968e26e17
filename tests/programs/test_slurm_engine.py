"""Slurm makes people wait, and takes back what it gave: what is said of it, and how soon. A real cluster."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import cluster
import pytest

from nblaunch.nodes.asking import Asking
from nblaunch.nodes.engine import NodeProgram, Wish
from nblaunch.nodes.slurm import SlurmEngine
from nblaunch.protocol.messages import EngineSaid, EngineState
from nblaunch.protocol.reports import awaited_nodes

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
    """A request for nodes that run `sleep`."""

    def __init__(self, hosts: cluster.SlurmCluster, **given) -> None:
        fields = {"least": 2, "most": 2, "nproc": 1, "name": f"nblaunch-{os.urandom(4).hex()}", "cwd": "/"}
        environ = {**os.environ, **hosts.environ}
        self.wish = Wish(**{**fields, "environ": environ, "python": sys.executable, **given})
        SlurmEngine.check(self.wish)
        self.said: list[EngineSaid] = []
        self.ended: list[str] = []
        sleep = NodeProgram(("-c", "import time; time.sleep(1000)"), b"key\n")
        self.began = time.monotonic()
        self.asking = Asking(SlurmEngine, self.wish, lambda: sleep, self.said.append, self.ended.append)
        self.asking.start()

    def until(self, condition: Callable[[EngineSaid], object], what: str, seconds: float) -> float:
        """Wait for a word of Slurm's; return the seconds since the request."""
        cluster.eventually(
            lambda: any(condition(said) for said in self.said), f"{what}: {self.said}", seconds
        )
        return time.monotonic() - self.began

    def run(self) -> None:
        self.until(lambda said: said.state is EngineState.STARTING, "the nodes are granted", 10)
        for place in range(2):
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
    ours = {each.wish.name for each in made}
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


def test_a_job_that_is_cancelled_while_it_waits_is_named(hosts, full_cluster, request_nodes):
    waiting = request_nodes()
    waiting.until(lambda said: said.state is EngineState.WAITING, "it waits", SOON)
    number = waiting.said[-1].id
    hosts.run("scancel", number)
    cluster.eventually(lambda: waiting.ended, "it is said that the job has ended", NAMED)
    assert waiting.ended == [f"slurm job {number} has ended: CANCELLED"]
    assert number > full_cluster


def test_what_slurm_refuses_is_said_in_its_words(request_nodes):
    refused = request_nodes(words=("-p", "nowhere"))
    cluster.eventually(lambda: refused.ended, "it is refused", NAMED)
    (why,) = refused.ended
    assert why.startswith("slurm gives no nodes: ")
    assert "Invalid partition name specified" in why


def test_a_controller_that_does_not_answer_ends_nothing(hosts, request_nodes, tmp_path):
    """Only the nodes say then whether they are there."""
    slow = tmp_path / "squeue"
    real = cluster.program("squeue", "slurm-client")
    slow.write_text(f'#!/bin/sh\ntest -e {tmp_path}/down && exec sleep 100\nexec {real} "$@"\n')
    slow.chmod(0o755)
    environ = {**os.environ, **hosts.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    held = request_nodes(environ=environ)
    held.run()
    (tmp_path / "down").touch()
    held.asking.look()
    held.until(lambda said: "does not answer" in said.reason, "squeue does not answer", 10)
    (tmp_path / "down").unlink()
    held.asking.look()
    held.until(lambda said: said is held.said[-1] and said.reason == "", "squeue answers", 10)
    assert held.ended == []


HOLD = """
import sys
from nblaunch.nodes.engine import Wish
from nblaunch.nodes.slurm import SlurmEngine
wish = Wish(**{wish!r})
local.server.at_end(SlurmEngine.at_end(wish))
allocation = SlurmEngine.ask(wish)
"""


@pytest.mark.parametrize("killed", ["os.getpid()", "os.getppid()"], ids=["runtime", "keeper"])
def test_a_runtime_or_a_keeper_that_is_killed_withdraws_what_waits(hosts, full_cluster, poke, killed):
    """No process of ours is a job that waits: who kills salloc leaves it in the queue.

    A keeper that is killed takes the runtime along.
    """
    environ = {**os.environ, **hosts.environ}
    wish = {"least": 1, "most": 1, "nproc": 1, "name": "nblaunch-waits", "cwd": "/", "python": sys.executable}
    poke(HOLD.format(wish={**wish, "environ": environ}))
    cluster.eventually(lambda: poke("allocation.status().state.value") == "WAITING", "it waits")
    began = time.monotonic()
    with contextlib.suppress(json.JSONDecodeError, OSError):
        poke(f"import os; os.kill({killed}, 9)")
    cluster.eventually(lambda: hosts.jobs() == [f"{full_cluster} RUNNING"], "it is withdrawn", 3)
    print(f"withdrawn {time.monotonic() - began:.2f} s after the kill of {killed}")
