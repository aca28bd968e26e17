"""What torchelastic has beside the ranks themselves: events, logs of certain lines, expiration timers.

torch's private names, in `LocalElasticAgent`: `._setup_local_watchdog`, `._worker_watchdog`,
`._log_watchdog_event`, `._start_workers`, `._shutdown`, `._pcontext`. `events` and `watchdog` list others.
"""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record

from nblaunch.agent import runtime
from nblaunch.agent.contract import AgentEvents, AgentSettings
from nblaunch.agent.events import EventStream
from nblaunch.agent.log_files import FilteredLines, KeptLogs
from nblaunch.agent.watchdog import FILE, Watchdog


class ObservedAgent(LocalElasticAgent):
    """A `LocalElasticAgent` that hands on its events, and whose watchdog cannot end the notebook."""

    def __init__(
        self, spec: WorkerSpec, settings: AgentSettings, events: AgentEvents, **keywords: Any
    ) -> None:
        """Prepare an agent; `keywords` are torch's own."""
        wanted = settings.processes
        self.settings = settings
        self._kept_logs = KeptLogs(wanted.logs_specs, os.fspath(settings.log_dir))
        self._stream = EventStream(wanted.event_log_handler, events.recorded)
        self._filtered: list[FilteredLines] = []
        spec.event_log_handler = self._stream.name
        super().__init__(spec, self._kept_logs, **keywords)

    def run(self, *arguments: Any, **keywords: Any) -> RunResult:
        """Run to the end, and record how the agent itself ended, as torchrun does once its agent has run."""
        with self._stream:
            try:
                result: RunResult = super().run(*arguments, **keywords)
            except Exception:
                record(self.get_event_failed(), self._stream.name)
                raise
            record(self.get_event_succeeded(), self._stream.name)
            return result

    def why_killed(self, pid: int) -> str:
        """Return why the watchdog has killed a process, empty if it has not."""
        reasons: dict[int, str] = getattr(self._worker_watchdog, "reasons", {})
        return reasons.get(pid, "")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context, wanted = self._pcontext, self.settings.processes
        assert context is not None  # noqa: S101 - set by the call above
        for stream, logs, words in (
            ("stdout", context.stdouts, wanted.duplicate_stdout_filters),
            ("stderr", context.stderrs, wanted.duplicate_stderr_filters),
        ):
            if words:
                path, thread = self._kept_logs.filtered(stream), threading.current_thread().name
                self._filtered.append(FilteredLines(path, logs, self.settings.role, words, thread))
        return pids

    def _shutdown(self, *arguments: Any, **keywords: Any) -> None:
        super()._shutdown(*arguments, **keywords)
        while self._filtered:
            self._filtered.pop().stop()

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        path, run_id = self.settings.processes.timer_file, self.settings.run_id
        if self.settings.processes.watchdog:
            path = path or os.fspath(runtime.root() / f"timer-{uuid.uuid4().hex}")
            thread = f"{threading.current_thread().name}-watchdog"
            self._worker_watchdog = Watchdog(path, run_id, thread, self._is_rank, self._log_watchdog_event)
            self._worker_watchdog.start()
        if path is not None:
            for environment in envs.values():
                environment[FILE] = path

    def _is_rank(self, pid: int) -> bool:
        # Not whether it lives: its exit code is read on the agent's thread, and only once.
        started = getattr(self._pcontext, "_pc", None)
        return started is not None and pid in started.pids()
