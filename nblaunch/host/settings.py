"""The agent's settings, and the events that it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import Caller, Event


class AttemptEvents(Protocol):
    """The events of an agent that a host passes on."""

    def attempt_starting(
        self, number: int, world_size: int, reason: str, *, kept: Mapping[int, int] | None = None
    ) -> None:
        """Handle the start of an attempt: its first rank may connect before its last one is forked.

        `kept` maps the numbers of ranks that go on in it to those that they have had.
        """

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        """Handle the end of forking: all processes are there."""

    def membership_changing(self) -> None:
        """Handle a membership change: all ranks are about to be restarted."""

    def recorded(self, event: Event) -> None:
        """Handle an event of torchelastic; called on any of the agent's threads."""

    def agent_ended(self, error: BaseException | None) -> None:
        """Handle the agent's end, on its thread; `error` is set if it failed."""


class AgentEvents(AttemptEvents, Protocol):
    """The agent's events; called on the agent's thread."""

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Handle a process's exit; `expected` if the agent itself stopped it, `reason` if known."""

    def ranks_ending(self) -> None:
        """Handle the end of an attempt: ranks that are still alive are about to be signalled."""

    def others_stopped(self) -> None:
        """Handle the exit of the ranks that were still at work."""


class Worker(msgspec.Struct, frozen=True):
    """A worker process: its ranks, and where its output goes on this machine."""

    rank: int
    local_rank: int
    pid: int
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How the ranks' processes start, besides the options; `start_method` is the one that is used."""

    start_method: str = "forkserver"
    watchdog: bool = False
    """Whether ranks that overrun an expiration timer are killed."""
    timer_file: str | None = None
    """The pipe for the ranks' timers; None: a private one, if there is a watchdog."""
    environ: tuple[bytes, ...] = field(default=(), repr=False)
    """`NAME=VALUE` for ranks that are new Pythons, which read some of it when they start."""


@dataclass(frozen=True, slots=True)
class RendezvousConfig:
    """Rendezvous configuration of this node. Addresses must be reachable from the other nodes."""

    backend: str
    host: str
    port: int
    least: int
    most: int
    local_addr: str
    hosting: bool
    """Whether this is the notebook's node, which hosts the store unless there is an etcd server."""
    node_rank: int = 0
    conf: tuple[tuple[str, str], ...] = ()
    key: bytes = field(default=b"", repr=False)
    listener: str = ""
    """The address of the listener for nodes, once there is one."""
    ports: range = range(1)
    """Where it may listen, and an etcd rendezvous' store for the ranks; port 0 stands for any."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What the agent of one worker group is told: the options, and what has been made of them."""

    nproc: int
    options: LaunchOptions
    run_id: str
    log_dir: Path
    private_logs: bool = field(default=False, kw_only=True)
    """Whether nobody has named that directory: its files are bounded, and go when no result needs them."""
    processes: ProcessSettings = field(default_factory=ProcessSettings)
    rdzv: RendezvousConfig | None = None
    """torch's rendezvous; None for a single node, and where the runtime decides who takes part."""
    directed_at: str = field(default="", kw_only=True)
    """This node's address, if the runtime decides each rendezvous of the agent."""
    caller: Caller = field(default_factory=Caller)
    replaces: bool = field(default=False, kw_only=True)
    """Whether a rank that has ended can be replaced alone: the others then wait for an order.

    So it is for a session's ranks, unless its nodes follow torch's rendezvous.
    """

    @property
    def nodes(self) -> bool:
        return self.rdzv is not None or self.options.on is not None
