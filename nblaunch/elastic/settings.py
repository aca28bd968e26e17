"""What an agent is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nblaunch._results import Event


class AgentEvents(Protocol):
    """What the agent tells; called on the agent's thread."""

    def attempt_starting(self, number: int, world_size: int, reason: str) -> None:
        """Take note: a worker group is about to be started."""

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        """Take note: its processes have been forked."""

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Take note: one of them is gone; `expected` if the agent itself stopped it, `reason` if known."""

    def membership_changing(self) -> None:
        """Take note: a node comes or goes, and every rank is about to be ended and started anew."""

    def ranks_ending(self) -> None:
        """Take note: ranks that are still alive are about to be ended by a signal."""

    def others_stopped(self) -> None:
        """Take note: the ranks that were still at work are gone."""

    def recorded(self, event: Event) -> None:
        """Take note of an event of torchelastic's; called on any of the agent's threads."""

    def agent_ended(self, error: BaseException | None) -> None:
        """Take note: the agent is done; `error` is set if it broke."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process: its ranks, and where its output goes."""

    rank: int
    local_rank: int
    pid: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What torchelastic is told of the ranks' processes, logs and events; the defaults are its own."""

    logs_specs: str | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    event_log_handler: str = "null"
    numa_binding: str | None = None
    start_method: str = "forkserver"
    virtual_local_rank: bool = False
    watchdog: bool = False
    """Whether ranks that overrun an expiration timer are killed."""
    timer_file: str | None = None
    """Where ranks tell their timers; None: in private, if there is a watchdog."""
    environ: tuple[bytes, ...] = field(default=(), repr=False)
    """`NAME=VALUE` for ranks that are new Pythons, which read some of it when they start."""


@dataclass(frozen=True, slots=True)
class RendezvousConfig:
    """Where several nodes meet, and as whom this one comes; addresses are those that the others reach."""

    backend: str
    host: str
    port: int
    least: int
    most: int
    local_addr: str
    hosting: bool
    """Whether this process hosts the store: the notebook's does, a node that joins does not."""
    node_rank: int = 0
    conf: tuple[tuple[str, str], ...] = ()
    ranks_backend: str = ""
    """Backend of the ranks' default process group."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables that the ranks of all nodes get."""
    key: bytes = field(default=b"", repr=False)
    listener: str = ""
    """Where nodes report to, once there is such a place."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What the agent needs to know of the options."""

    nproc: int
    role: str
    max_restarts: int
    monitor_interval: float
    grace: float
    shutdown_timeout: int
    run_id: str
    log_dir: Path
    processes: ProcessSettings = field(default_factory=ProcessSettings)
    rdzv: RendezvousConfig | None = None
    """None: one node, which meets nobody."""
