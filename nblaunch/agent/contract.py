"""What an agent is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class AgentEvents(Protocol):
    """What the agent tells; called on the agent's thread."""

    def attempt_starting(self, number: int, world_size: int, reason: str) -> None:
        """Take note: a worker group is about to be started."""

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        """Take note: its processes have been forked."""

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Take note: one of them is gone; `expected` if the agent itself stopped it, `reason` if known."""

    def others_stopped(self) -> None:
        """Take note: the ranks that were still at work are gone."""

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
