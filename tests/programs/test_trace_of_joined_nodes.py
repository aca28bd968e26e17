"""What a worker group is told of nodes that have joined: its golden traces, without what chance decides.

The traces were recorded when joined nodes had a protocol of their own (at 374d864).
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from servers import kept_server

from nblaunch._inherited import JOIN_KEY
from nblaunch.capture import pickling, shared_memory
from nblaunch.client.preparation import prepare_of
from nblaunch.group import lifecycle
from nblaunch.group.group import WorkerGroup
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import JobState, Trigger
from nblaunch.group.local_runtime import LocalRuntime
from nblaunch.group.machine import Order
from nblaunch.host.rendezvous import host_store
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import Caller, Placement
from nblaunch.protocol.messages import CellJob, Dispatch, Exited
from nblaunch.protocol.state import RunState
from nblaunch.runtime import worker_groups
from nblaunch.runtime.place import PlacedRanks

ROOT = Path(__file__).parents[2]
SECONDS = 60
_UNTRACED = (Order.KEEP_PAYLOAD, Order.CLOSE_GROUP)
KEY = secrets.token_hex(32)
# A rank leaves a mark once it is at work, and returns once there is one for all.
CELL = """
import pathlib, time
pathlib.Path(f"at-{world_size}-{rank}").touch()
while not pathlib.Path("enough").exists():
    time.sleep(0.02)
world_size
"""


class Scene:
    """A run of one local rank and nodes that join, and all that its group is told and orders."""

    def __init__(self, directory: Path, nnodes: str, max_restarts: int = 0) -> None:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{trial.getsockname()[1]}"
        self.directory, self.trace = directory, list[str]()
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.used = contextlib.ExitStack()
        self.local = LocalRuntime(self.used.enter_context(kept_server()))
        options = LaunchOptions(
            nproc_per_node=1,
            nnodes=nnodes,
            rdzv_endpoint=self.endpoint,
            rdzv_id="traced",
            rdzv_conf="last_call_timeout=1",
            max_restarts=max_restarts,
            grace=1.0,
        )
        prepare = msgspec.structs.replace(prepare_of(options), backend="gloo")
        there = PlacedRanks(Placement(1, "gloo", "cpu", 0), prepare)
        settings = worker_groups.settings_of(options, there, Caller(), self.local)
        hosts = worker_groups._hosts(self.local, there, KEY, lambda _: None)
        self.group: WorkerGroup = worker_groups.new_group(self.local, settings, hosts).group
        self._follow(self.group)
        with shared_memory.put(pickling.dumps({}), Path) as sent:
            cell = CellJob(CELL, "cell-1", "Cell In[1]", keeps_value=True)
            self.job = Job({None: Dispatch(job=cell, payload=sent.payload)}, JobState(RunState.fresh(1)))
        self.local.hub.run(lambda: self.group.begin(self.job, prepare))
        self.group.start()

    def _follow(self, group: WorkerGroup) -> None:
        feed, perform = group.feed, group._perform

        def fed(event: Any, now: float | None = None) -> None:
            if told := _told(event):
                self.trace.append(told)
            feed(event, now)

        def performed(action: Any, job: Job | None) -> None:
            if isinstance(action, lifecycle.ReleaseWorkers):
                self.trace.append(f"release {action.succeeded} {len(action.others)}")
            elif isinstance(action, Order) and action not in _UNTRACED:
                self.trace.append(f"order {action.name}")
            perform(action, job)

        group.feed, group._perform = fed, performed  # type: ignore[method-assign]

    def join(self) -> subprocess.Popen[bytes]:
        words = ["--rdzv-endpoint", self.endpoint, "--rdzv-id", "traced", "-n", "1"]
        node = subprocess.Popen(
            [sys.executable, "-m", "nblaunch", "join", *words],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), JOIN_KEY: KEY, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.nodes.append(node)
        return node

    def at_work(self, world_size: int) -> None:
        """Wait until a world of this size is at work, and forget its marks."""
        marks = [self.directory / f"at-{world_size}-{rank}" for rank in range(world_size)]
        wait_until(lambda: all(mark.exists() for mark in marks))
        for mark in marks:
            mark.unlink()

    def finish(self) -> list[str]:
        assert self.group.closed.wait(SECONDS)
        return self.trace

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
            node.wait()
        self.group.stop()
        self.group.closed.wait(SECONDS)
        self.group.close()
        del self.group  # it and the followers of its events refer to each other
        gc.collect()
        self.local.close()
        self.used.close()


def _told(event: Any) -> str:
    match event:
        case lifecycle.AttemptStarting(message=message):
            return f"attempt {message.number} of {message.world_size}: {message.reason}"
        case lifecycle.WorkersForked(ranks=ranks, remote=remote) if ranks:
            return f"forked {'there' if remote else 'here'}"
        case Exited() as exited:
            lost = " with its node" if "lost with its node" in exited.reason else ""
            return f"exited{lost}, {'' if exited.expected else 'not '}expected"
        case lifecycle.NodeLeaving(asked=asked, enough=enough, ranks=ranks):
            return f"leaves asked={asked} enough={enough} with {len(ranks)}"
        case Trigger.MEMBERSHIP_CHANGING | Trigger.AGENT_ENDED:
            return str(event.name)
        case _:
            return ""


def wait_until(met: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """Have torch open the pipe that it keeps from the first store of a process on."""
    host_store("127.0.0.1", range(1))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    monkeypatch.chdir(tmp_path)
    made: list[Scene] = []

    def make(*arguments: Any) -> Scene:
        made.append(Scene(tmp_path, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_group_without_its_node_ends_as_one_whose_rank_has_failed(scene):
    run = scene("2")
    node = run.join()
    run.at_work(2)
    node.kill()
    assert run.finish() == LOST


def test_nodes_that_come_and_go_change_the_membership_and_nothing_else(scene, tmp_path):
    run = scene("1:2")
    run.at_work(1)
    first = run.join()
    run.at_work(2)
    first.kill()
    run.at_work(1)
    second = run.join()
    run.at_work(2)
    second.terminate()
    run.at_work(1)
    (tmp_path / "enough").touch()
    assert run.finish() == ELASTIC


LOST = """\
attempt 0 of 2: started
order FORGET_VALUES
forked here
forked there
leaves asked=False enough=False with 1
exited with its node, not expected
release False 1
exited, expected
AGENT_ENDED
order FINISH_JOB
""".splitlines()
_ALONE = """\
order FORGET_VALUES
forked here
MEMBERSHIP_CHANGING
exited, expected
"""
ELASTIC = f"""\
attempt 0 of 1: started
{_ALONE}\
attempt 1 of 2: membership
order FORGET_VALUES
forked here
forked there
leaves asked=False enough=True with 1
order REJOIN_NODES
exited with its node, expected
MEMBERSHIP_CHANGING
exited, expected
attempt 2 of 1: membership
{_ALONE}\
attempt 3 of 2: membership
order FORGET_VALUES
forked here
forked there
leaves asked=True enough=True with 1
order REJOIN_NODES
exited with its node, expected
MEMBERSHIP_CHANGING
exited, expected
attempt 4 of 1: membership
order FORGET_VALUES
forked here
release True 0
order FINISH_JOB
exited, not expected
AGENT_ENDED
""".splitlines()
