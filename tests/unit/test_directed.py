"""The rendezvous of nodes that the runtime directs: a round, a stop while it waits, a round again."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

import pytest
from servers import NoServer
from torch.distributed.elastic.multiprocessing import SignalException

from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.host.agent import RankAgent
from nblaunch.host.directed import DirectedRendezvous
from nblaunch.host.settings import AgentSettings
from nblaunch.host.wire import CompleteRendezvous
from nblaunch.options.launch import LaunchOptions

LATE = 10.0


def round_of(attempt: int) -> CompleteRendezvous:
    """Return a round in which this is the second of three nodes."""
    return CompleteRendezvous(
        group="g",
        attempt=attempt,
        node_rank=1,
        node_count=3,
        base_rank=8,
        world_size=24,
        store=("10.0.0.1", 29401),
    )


class Waits:
    """A rendezvous, on a thread that waits for its next round."""

    def __init__(self) -> None:
        self.stopped, self.asked = threading.Event(), threading.Event()
        self.handler = DirectedRendezvous("group", self.asked.set, self.stopped)
        self.found: list[object] = []

    def __enter__(self) -> Self:
        self.asked.clear()
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()
        assert self.asked.wait(LATE)
        return self

    def _wait(self) -> None:
        try:
            self.found.append(self.handler.next_rendezvous())
        except SignalException as error:
            self.found.append(error)

    def __exit__(self, *_: object) -> None:
        self.thread.join(LATE)
        assert not self.thread.is_alive()


def test_a_round_is_as_the_runtime_has_decided():
    waits = Waits()
    with pytest.raises(LookupError):
        _ = waits.handler.directed
    with waits:
        assert waits.found == []
        waits.handler.complete_rendezvous(round_of(5))
    info: Any = waits.found[0]
    store = info.bootstrap_store_info
    assert (info.rank, info.world_size, store.master_addr, store.master_port) == (1, 3, "10.0.0.1", 29401)
    assert waits.handler.directed == round_of(5)


def test_a_stop_ends_the_wait():
    with Waits() as waits:
        waits.stopped.set()
    assert isinstance(waits.found[0], SignalException)


def test_the_round_before_does_not_count_again():
    waits = Waits()
    with waits:
        waits.handler.complete_rendezvous(round_of(0))
    with waits:
        assert waits.found[1:] == []
        waits.handler.complete_rendezvous(round_of(1))
    assert waits.handler.directed == round_of(1)


class Silent:
    """Events of an agent that nobody follows."""

    def __getattr__(self, name):
        return lambda *_arguments, **_keywords: None


def meet(agent: RankAgent) -> None:
    with agent._stream.registered():
        agent._rendezvous(agent._worker_group)


def test_an_agent_numbers_its_ranks_without_asking_the_other_nodes(tmp_path):
    """One that has died since would hold it up: torch's own waits for all of them."""
    asked = threading.Event()
    settings = AgentSettings(
        nproc=2,
        options=LaunchOptions(max_restarts=1, monitor_interval=0.1, grace=1.0, shutdown_timeout=1),
        run_id="group",
        log_dir=tmp_path,
        directed_at="127.0.0.1",
    )
    server = NoServer(RuntimeDirectory(tmp_path))
    agent = RankAgent(settings, lambda _attempt: (), Silent(), server, asked.set)
    try:
        thread = threading.Thread(target=meet, args=[agent], daemon=True)
        thread.start()
        assert asked.wait(LATE)
        began = time.monotonic()
        agent.complete_rendezvous(round_of(0))
        thread.join(LATE)
        assert time.monotonic() - began < 1.0
        agent._exit_barrier()
        assert time.monotonic() - began < 1.0
        workers = agent._worker_group.workers
        assert [(each.local_rank, each.global_rank, each.role_rank) for each in workers] == [
            (0, 8, 8),
            (1, 9, 9),
        ]
        assert {(each.world_size, each.role_world_size) for each in workers} == {(24, 24)}
        group: Any = agent._worker_group
        assert (group.master_addr, group.master_port) == ("10.0.0.1", 29401)
    finally:
        agent.close()
