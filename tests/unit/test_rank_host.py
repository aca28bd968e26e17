"""What a machine does with a group's ranks: the order in which they end, and what is told of them."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from servers import NoServer

from nblaunch.host import rank_host
from nblaunch.host.local_host import LocalHost
from nblaunch.host.process_stacks import signal_main_thread, stacks_of_silent
from nblaunch.host.rank_host import RankHost
from nblaunch.host.settings import AgentSettings, Worker
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol.client import Event

SECONDS = 10
A_JOB = messages.Dispatch(job=messages.FunctionJob(), payload=messages.Payload(()))
ON_GPUS = messages.Prepare(environ=(), cwd=b"/", path=(), device_type="cuda")


class Owner:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[messages.FromRank] = []
        self.gone: list[messages.Exited] = []

    def receive(self, message: messages.FromRank, _data: bytes) -> None:
        self.messages.append(message)

    def rank_gone(self, exited: messages.Exited) -> None:
        self.gone.append(exited)

    def attempt_starting(
        self, number: int, world_size: int, reason: str, *, kept: Mapping[int, int] | None = None
    ) -> None: ...

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None: ...

    def ranks_stopped(self, ranks: Iterable[int]) -> None: ...

    def membership_changing(self) -> None: ...

    def measured(self, usages: Mapping[int, messages.Usage]) -> None: ...

    def stacks_read(self, stacks: Mapping[int, str]) -> None: ...

    def lost(self, error: Exception) -> None: ...

    def recorded(self, event: Event) -> None: ...

    def agent_ended(self, error: BaseException | None) -> None: ...


class Scene:
    """A host whose two ranks have said hello."""

    def __init__(
        self, local: LocalHost, directory: Path, monkeypatch: pytest.MonkeyPatch, *, keep: bool = False
    ) -> None:
        self.owner, self.sent, self.hub = Owner(), list[tuple[int, messages.ToRank]](), local.hub
        settings = AgentSettings(
            nproc=2,
            options=LaunchOptions(max_restarts=0, monitor_interval=0.1, grace=1.0, shutdown_timeout=1),
            run_id="group",
            log_dir=directory,
            directed_at="127.0.0.1",
        )
        self.host = RankHost(local, settings, self.owner, directory, keep=keep)
        monkeypatch.setattr(self.hub, "send", lambda _host, rank, message: self.sent.append((rank, message)))
        self.host.attempt_starting(0, 2, "started")
        self.host.attempt_started(0, 2, tuple(Worker(rank, rank, 1) for rank in range(2)))
        for rank in range(2):
            hello = messages.Hello(
                rank=rank, token="", attempt=0, local_rank=rank, world_size=2, node="n", pid=1
            )
            self.say(hello)

    def say(self, message: messages.FromRank) -> None:
        self.hub.run(lambda: self.host.receive(message, b""))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    local = LocalHost(NoServer())
    made = Scene(local, tmp_path, monkeypatch)
    yield made
    made.host.stop()
    local.close()


@pytest.fixture
def kept_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    local = LocalHost(NoServer())
    made = Scene(local, tmp_path, monkeypatch, keep=True)
    yield made
    made.host.stop()
    local.close()


def test_all_ranks_let_go_of_nccl_before_one_is_killed(scene):
    scene.hub.run(lambda: [scene.host.send(rank, ON_GPUS) for rank in range(2)] and None)
    scene.sent.clear()
    ending = threading.Thread(target=scene.host.ranks_ending)
    began = time.monotonic()
    ending.start()
    while len(scene.sent) < 2:
        assert time.monotonic() < began + SECONDS
    assert scene.sent == [(0, messages.Abort()), (1, messages.Abort())]
    failure = messages.FailureRecord(
        type="torch.distributed.DistBackendError", message="aborted", traceback=""
    )
    scene.say(messages.Raised(rank=0, failure=failure))
    assert not any(isinstance(each, messages.Raised) for each in scene.owner.messages), (
        "the abort is what it is about"
    )
    scene.say(messages.Aborted(rank=0))
    assert ending.is_alive()
    scene.say(messages.Aborted(rank=1))
    ending.join(SECONDS)
    assert time.monotonic() - began < 1.9, "it waits for no more than the answers"


def test_a_rank_that_died_before_the_others_let_go_of_nccl_does_not_stand_for_them(scene):
    scene.hub.run(lambda: [scene.host.send(rank, ON_GPUS) for rank in range(2)] and None)
    scene.sent.clear()
    ending = threading.Thread(target=scene.host.ranks_ending)

    def together() -> None:
        # As the agent does when a second rank dies: both are queued before the hub's next turn.
        scene.host.worker_exited(1, -9, expected=False)
        ending.start()
        while not ending.ident:
            pass

    scene.hub.run(together)
    began = time.monotonic()
    while not scene.sent:
        assert time.monotonic() < began + SECONDS
    assert scene.sent == [(0, messages.Abort())]
    ending.join(0.2)
    assert ending.is_alive(), "rank 0 is still inside NCCL"
    scene.say(messages.Aborted(rank=0))
    ending.join(SECONDS)
    assert not ending.is_alive()


def test_a_rank_that_ends_as_a_script_does_is_waited_for_as_long_as_it_works(scene):
    agent = scene.host.agent
    assert agent is not None
    agent.release(succeeded=False, others=frozenset())
    assert agent._leave_by < time.monotonic() + SECONDS
    scene.say(messages.Finishing(rank=0, what="thread save"))
    assert agent._leave_by == math.inf


def test_a_session_s_rank_has_the_shutdown_timeout_and_no_longer(kept_scene):
    agent = kept_scene.host.agent
    agent.release(succeeded=True, others=frozenset())
    kept_scene.say(messages.Finishing(rank=0, what="thread save"))
    assert agent._leave_by < time.monotonic() + SECONDS


def test_ranks_at_work_are_measured_and_all_where_none_is(scene, kept_scene):
    measured = kept_scene.host._state
    assert list(measured().ranks) == [0, 1]
    kept_scene.hub.run(lambda: kept_scene.host.send(1, A_JOB) and None)
    assert list(measured().ranks) == [1]
    kept_scene.say(
        messages.Raised(rank=1, failure=messages.FailureRecord(type="E", message="", traceback=""))
    )
    assert list(measured().ranks) == [0, 1]
    # Those of a run have one from the beginning.
    assert list(scene.host._state().ranks) == [0, 1]


def test_a_measurement_that_began_before_the_ranks_were_prepared_knows_their_gpus(scene, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def measuring(_state, _report, gpus):
        seen.append(gpus)
        yield

    monkeypatch.setattr(rank_host, "measuring", measuring)
    scene.hub.run(lambda: scene.host.measure(wanted=True))
    scene.hub.run(lambda: [scene.host.send(rank, ON_GPUS) for rank in range(2)] and None)
    assert [each is None for each in seen] == [True, False]


def test_ranks_that_have_no_gpu_are_killed_at_once(scene):
    on_cpus = msgspec.structs.replace(ON_GPUS, device_type="cpu")
    scene.hub.run(lambda: scene.host.send(0, on_cpus) and None)
    scene.sent.clear()
    scene.host.ranks_ending()
    assert scene.sent == []


def test_an_exit_is_told_with_its_reason_after_all_that_the_rank_has_sent(scene):
    scene.hub.call(lambda: scene.host.receive(messages.Aborted(rank=1), b""))
    scene.host.worker_exited(1, -9, expected=False)
    scene.hub.run(lambda: None)
    assert scene.owner.messages[-1] == messages.Aborted(rank=1)
    (gone,) = scene.owner.gone
    assert (gone.rank, gone.exitcode) == (1, -9)
    assert "SIGKILL" in gone.reason
    assert list(scene.host.ranks) == [0]


BUSY = """
import sys, threading, time
from nblaunch.rank.stacks import dump_on_signal

def deep(calls):
    return calls and deep(calls - 1)

def work():
    while True:
        deep(200)

def asleep():
    print("ready", flush=True)
    time.sleep(1000)

dump_on_signal(sys.argv[1], 0)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
asleep()
"""


def test_a_rank_survives_that_its_stack_is_read_while_its_threads_run(tmp_path):
    """faulthandler takes no lock: frames of a thread that runs are freed while it reads them."""
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    with subprocess.Popen([sys.executable, program, tmp_path], stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            for _ in range(500):
                signal_main_thread(rank.pid, messages.DUMP_SIGNAL)
                time.sleep(0.0005)
            shown = stacks_of_silent({0: rank.pid}, str(tmp_path), {})[0]
            assert [line.rpartition(", in ")[2] for line in shown.splitlines()] == ["<module>", "asleep"]
            assert rank.poll() is None
        finally:
            rank.kill()
