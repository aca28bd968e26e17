"""A worker group all of whose ranks are on nodes: its agent is its peers', and it has no process here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import NoServer

from nblaunch._errors import LaunchError
from nblaunch.group.ending import Ending
from nblaunch.group.group import WorkerGroup
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import JobState, PrepareChanged, Trigger
from nblaunch.group.local_runtime import LocalRuntime
from nblaunch.host.rank_host import GroupHost
from nblaunch.host.settings import AgentSettings, Worker
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol.state import RunState, State
from nblaunch.runtime.worker_groups import HeldNodes

PREPARE = messages.Prepare(environ=(), cwd=b"/", path=(), backend="gloo")
NOTHING = messages.Payload((0,), inline=b"")
SECONDS = 5


class ScriptedNodes(GroupHost):
    """Two nodes, which are a group's host, and do what a test orders."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.sent: list[tuple[int, messages.ToRank]] = []

    def start(self) -> None:
        self.done.append("start")

    def restart(self) -> None:
        self.done.append("restart")

    def rejoin(self) -> None:
        self.done.append("rejoin")

    def regroup(self) -> None:
        self.done.append("regroup")

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        self.done.append(("release", succeeded, others))

    def skip_grace(self) -> None:
        self.done.append("skip_grace")

    def measure(self, *, wanted: bool) -> None:
        self.done.append(("measure", wanted))

    def read_stacks(self, ranks: frozenset[int]) -> None:
        self.done.append(("read_stacks", ranks))
        for rank in ranks:
            self.group.stacks_read({rank: f"  stack of {rank}"})

    def begin_attempt(self) -> None:
        self.done.append("begin_attempt")

    def close(self, *, succeeded: bool) -> None:
        self.done.append(("close", succeeded))

    def stop(self) -> None:
        self.done.append("stop")
        self.group.agent_ended(None)

    def send(self, rank: int, message: messages.ToRank) -> bool:
        self.sent.append((rank, message))
        return True

    def connect(self, group: WorkerGroup, directory: Path) -> tuple[GroupHost]:
        self.group, self.directory = group, directory
        return (self,)

    # --- what nodes do; on the hub's thread --------------------------------------------------------

    def begin(self, number: int, size: int, reason: str = "started", backend: str = "gloo") -> None:
        self.group.feed(PrepareChanged(backend, "cuda" if "nccl" in backend else "cpu"))
        self.group.attempt_starting(number, size, reason, backend=backend)

    def fork(self, number: int, size: int) -> None:
        for rank in range(size):
            directory = self.directory / f"attempt_{number}" / f"h{rank}-{rank}"
            directory.mkdir(parents=True)
            paths = [directory / f"{stream}.log" for stream in ("stdout", "stderr")]
            for path in paths:
                path.write_text(f"of {number}, {rank}\n")
            workers = (Worker(rank, 0, os.getpid(), *map(str, paths)),)
            self.group.attempt_started(number, size, workers, remote=True)
        self.group.attempt_started(number, size, ())

    def ready(self, number: int, size: int) -> None:
        for rank in range(size):
            hello = messages.Hello(
                rank=rank,
                token="",
                attempt=number,
                local_rank=0,
                world_size=size,
                node=f"h{rank}",
                pid=os.getpid(),
            )
            self.group.receive(hello)
            self.group.receive(messages.Entered(rank=rank, phase=messages.Phase.READY))

    def all(self, number: int, size: int, **more: Any) -> None:
        self.begin(number, size, **more)
        self.fork(number, size)
        self.ready(number, size)


@pytest.fixture
def local():
    runtime = LocalRuntime(NoServer())
    yield runtime
    runtime.close()


class Scene:
    """A group on scripted nodes, that thinks of two ranks at first; its job, and what became of both."""

    def __init__(self, local: LocalRuntime, logs: Path, *, keep: bool = False) -> None:
        self.nodes = ScriptedNodes()
        settings = AgentSettings(
            nproc=2,
            options=LaunchOptions(max_restarts=0, monitor_interval=0.02, grace=1.0, shutdown_timeout=5),
            run_id="run",
            log_dir=logs,
        )
        self.hub = local.hub
        self.group = WorkerGroup(local, settings, self.nodes.connect, keep=keep)
        local.keep(self.group)
        self.closed = threading.Event()
        self.group.when_closed = self.closed.set

    def submit(self, ending: Ending | None = None) -> Job:
        dispatches: dict[int | None, messages.Dispatch] = {
            None: messages.Dispatch(job=messages.FunctionJob(name="f"), payload=NOTHING)
        }
        job = Job(dispatches, JobState(RunState.fresh(2), ending=ending or Ending()))
        self.hub.run(lambda: self.group.begin(job, PREPARE))
        self.group.start()
        return job

    def run(self, act: Callable[[], None]) -> None:
        self.hub.run(act, SECONDS)

    def values(self, size: int) -> None:
        ended = messages.Offsets(stdout=7, stderr=7)
        for rank in range(size):
            self.group.receive(messages.Started(rank=rank, time=1.0))
            self.group.receive(messages.Returned(rank=rank, value=NOTHING, time=2.0, offsets=ended))

    def sent(self, kind: type[messages.ToRank]) -> list[int]:
        return [rank for rank, message in self.nodes.sent if isinstance(message, kind)]


def test_ranks_of_nodes_alone_are_a_group_whose_size_is_known_late(local, tmp_path):
    scene = Scene(local, tmp_path)
    nodes, group = scene.nodes, scene.group
    job = scene.submit()
    assert nodes.done == ["start"]
    waiting = messages.EngineStatus(engine="slurm", state=messages.EngineState.WAITING, wanted=2)
    scene.run(lambda: group.feed(waiting))
    assert job.state.engine == waiting
    assert "slurm" in job.state.where
    scene.run(lambda: nodes.begin(0, 4, backend="cpu:gloo,cuda:nccl"))
    assert (group.state.world_size, job.state.world_size, group.backend) == (4, 4, "cpu:gloo,cuda:nccl")
    assert job.state.backend == "cpu:gloo,cuda:nccl", (
        "known to those who show the job, before any rank exists"
    )
    scene.run(lambda: nodes.fork(0, 4))
    scene.run(lambda: nodes.ready(0, 4))
    assert scene.sent(messages.Prepare) == scene.sent(messages.Dispatch) == [0, 1, 2, 3]
    attempt = nodes.directory / "attempt_0"
    assert own_files(job, 0) == [attempt / f"h{rank}-{rank}" / "stdout.log" for rank in range(4)]
    scene.run(lambda: scene.values(4))
    assert job.ended.wait(SECONDS)
    assert all(rank.state is State.SUCCEEDED for rank in job.state.ranks.values())
    assert [entry.text for entry in job.state.ranks[3].transcript.entries] == ["of 0, 3"] * 2
    assert nodes.done == ["start", "begin_attempt", ("release", True, frozenset())]
    assert sorted(scene.sent(messages.Leave)) == [0, 1, 2, 3]
    group.agent_ended(None)
    assert scene.closed.wait(SECONDS)
    assert nodes.done[-1] == ("close", True)


def own_files(job: Job, attempt: int) -> list[Path]:
    return [Path(each.stdout) for _, each in sorted(job.logs[attempt].items())]


def test_the_wait_for_nodes_has_no_limit_and_that_for_ranks_begins_with_the_last_node(local, tmp_path):
    scene = Scene(local, tmp_path)
    scene.submit()
    scene.run(lambda: scene.nodes.begin(0, 2))
    life = scene.group.life
    assert life.limited is None
    scene.run(lambda: scene.nodes.fork(0, 2))
    assert scene.group.life.limited is messages.Phase.CONNECT


def test_the_wait_for_nodes_counts_towards_no_timeout(local, tmp_path):
    scene = Scene(local, tmp_path)
    job = scene.submit(Ending.begin(LaunchOptions(timeout=0.3, grace=1.0), time.monotonic()))
    waiting = messages.EngineStatus(engine="slurm", state=messages.EngineState.WAITING, wanted=2)
    scene.run(lambda: scene.group.feed(waiting))
    assert not job.ended.wait(0.6)
    began = time.monotonic()
    scene.run(lambda: scene.nodes.begin(0, 2))
    assert job.ended.wait(SECONDS)
    assert time.monotonic() - began > 0.15
    assert job.known.ending.early is not None
    assert job.known.ending.early.timeout
    assert scene.closed.wait(SECONDS)


@pytest.mark.parametrize("keep", [False, True])
def test_an_interrupt_finds_a_job_whose_nodes_are_awaited(local, tmp_path, keep):
    scene = Scene(local, tmp_path, keep=keep)
    job = scene.submit()
    scene.group.interrupt(job)
    assert job.ended.wait(SECONDS)
    if keep:
        # The client closes a session that it could not start.
        assert "stop" not in scene.nodes.done
        scene.group.post(Trigger.DISMISS)
        scene.run(lambda: None)
        assert scene.nodes.done[-1] == ("release", True, frozenset())
        scene.group.stop()
    assert scene.closed.wait(SECONDS)
    assert scene.nodes.done[-2:] == ["stop", ("close", False)]


def test_a_session_whose_node_is_lost_goes_on_with_other_ranks(local, tmp_path):
    scene = Scene(local, tmp_path, keep=True)
    nodes, group = scene.nodes, scene.group
    scene.submit()
    scene.run(lambda: nodes.all(0, 4))
    reason = "was lost with its node: hB is gone"
    scene.run(
        lambda: group.rank_gone(messages.Exited(rank=3, exitcode=-9, time=1.0, expected=False, reason=reason))
    )
    scene.run(lambda: group.post(Trigger.DRAINED))
    scene.run(lambda: nodes.all(1, 2, reason="membership"))
    assert (group.attempt, group.state.world_size, group.life.all_ready) == (1, 2, True)
    assert own_logs(nodes.directory / "attempt_1") == ["h0-0", "h1-1"]
    group.stop()
    assert scene.closed.wait(SECONDS)


def own_logs(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def test_nothing_of_this_machine_is_asked_about_ranks_of_others(local, tmp_path):
    """Their process ids belong to other processes here: to this one, in this test."""
    scene = Scene(local, tmp_path, keep=True)
    nodes, group = scene.nodes, scene.group
    scene.submit()
    scene.run(lambda: nodes.all(0, 2))
    report = group.where(0.01)
    assert scene.sent(messages.ReportWhere) == [0, 1]
    assert ("read_stacks", frozenset({0, 1})) in nodes.done
    assert report.silent == {0: "  stack of 0", 1: "  stack of 1"}
    assert "[rank 1 on h1] gave no answer" in str(report)
    assert group.memory(0.05) == {0: None, 1: None}
    scene.run(lambda: None)
    assert nodes.done[-2:] == [("measure", True), ("measure", False)]
    group.stop()


def test_nodes_measure_their_ranks_as_long_as_somebody_wants_to_know(local, tmp_path):
    scene = Scene(local, tmp_path, keep=True)
    nodes, group = scene.nodes, scene.group
    job = scene.submit()
    scene.run(lambda: nodes.all(0, 2))
    nodes.done.clear()
    used = {rank: messages.Usage(cpu_percent=50.0, memory=rank + 1) for rank in range(2)}
    answers = threading.Timer(0.05, lambda: scene.run(lambda: group.measured(used)))
    scene.run(lambda: group.measure(wanted=True))
    answers.start()
    assert group.memory(SECONDS) == {0: 1, 1: 2}
    assert job.state.ranks[1].usage == used[1]
    scene.run(lambda: None)
    assert nodes.done == [("measure", True)]
    scene.run(lambda: group.measure(wanted=False))
    assert nodes.done == [("measure", True), ("measure", False)]
    answers.join()
    group.stop()


# --- nodes that several groups use ------------------------------------------------------------------


class Ends:
    """A fleet, and a fork server, of which only the end of nodes matters."""

    def __init__(self) -> None:
        self.ended = self.swept = 0

    def close(self) -> None:
        self.ended += 1

    def sweep(self) -> None:
        self.swept += 1


OPTIONS = LaunchOptions(nproc_per_node=1, nnodes="2", on="process")


def test_nodes_end_with_the_last_group_that_uses_them(tmp_path):
    fleet: Any = Ends()
    directory = tmp_path / "nodes"
    directory.mkdir()
    held = HeldNodes(fleet, directory, OPTIONS, fleet)
    session, cell = held.use(), held.use()
    session()
    session()
    assert fleet.ended == 0
    assert directory.is_dir()
    cell()
    assert fleet.ended == fleet.swept == 1
    assert not directory.exists()
    assert not held.fit(OPTIONS)
    with pytest.raises(LaunchError, match="given its nodes back"):
        held.use()


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"timeout": 5.0}, True),
        ({"max_restarts": 2}, True),
        ({"nnodes": "2:2"}, True),
        ({"nnodes": "3"}, False),
        ({"nproc_per_node": 2}, False),
        ({"on": "slurm"}, False),
        ({"on": "slurm", "slurm": "-p gpu"}, False),
        ({"here": True}, False),
    ],
)
def test_a_run_on_fresh_ranks_uses_nodes_that_it_would_ask_for(tmp_path, options, same):
    fleet: Any = Ends()
    held = HeldNodes(fleet, tmp_path, OPTIONS, fleet)
    wanted = {"nproc_per_node": 1, "nnodes": "2", "on": "process", **options}
    assert held.fit(LaunchOptions(**wanted)) is same
