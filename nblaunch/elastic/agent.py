"""torchelastic's own agent, as nblaunch runs it.

Names of torch's that are not public, as of torch 2.8 to 2.13 (`tests/unit/test_torch_names.py` says which
torch broke them; `hooks` and `rendezvous` list their own): `LocalElasticAgent._start_workers`,
`._monitor_workers`, `._restart_workers`, `._shutdown`, `._setup_healthcheck`, `._remaining_restarts`,
`._worker_group`, `._pcontext`, `._setup_local_watchdog`, `._worker_watchdog`, `._log_watchdog_event`;
`MultiprocessContext._pc`, `._ret_vals`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nblaunch._waker import Waker
from nblaunch.elastic import descriptors, entry, forkserver, rendezvous
from nblaunch.elastic.forkserver import Server
from nblaunch.elastic.hooks import FILE, EventStream, Watchdog
from nblaunch.elastic.logs import FilteredLines, KeptLogs
from nblaunch.elastic.settings import AgentEvents, AgentSettings, Worker

# What torchelastic has beside the ranks themselves: events, logs of certain lines, expiration timers.


class ObservedAgent(LocalElasticAgent):
    """A `LocalElasticAgent` that hands on its events, and whose watchdog cannot end the notebook."""

    def __init__(
        self, spec: WorkerSpec, settings: AgentSettings, events: AgentEvents, server: Server, **keywords: Any
    ) -> None:
        """Prepare an agent; `keywords` are torch's own."""
        wanted = settings.processes
        self.settings = settings
        self._server = server
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
            path = path or os.fspath(self._server.directory.root() / f"timer-{uuid.uuid4().hex}")
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


# The agent.


StoppedError = SignalException
"""What ends an agent that was told to stop: torchelastic ends its ranks on the way out."""

_LOOPBACK = "127.0.0.1"
_EXIT_BARRIER_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_KILL_WAIT_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.1


class RankAgent(ObservedAgent):
    """`LocalElasticAgent` that tells what happens, and that cannot wait for ever.

    torchelastic decides when to restart and when to give up. Added here: a rank that ends without
    having been released is a failure whatever its exit code; ranks that outlive SIGTERM by the grace
    period are killed (torch waits 30 s, unconditionally); `stop` ends the run from another thread.
    """

    def __init__(
        self,
        settings: AgentSettings,
        arguments: Callable[[int], tuple[Any, ...]],
        events: AgentEvents,
        server: Server,
    ) -> None:
        """Prepare an agent; `arguments(attempt)` are those of `run_rank`, `server` forks the ranks."""
        self._stop = threading.Event()
        self.rendezvous = rendezvous.make_rendezvous(settings, self._stop)
        spec = WorkerSpec(
            role=settings.role,
            local_world_size=settings.nproc,
            entrypoint=entry.run_rank,
            rdzv_handler=self.rendezvous,
            max_restarts=settings.max_restarts,
            monitor_interval=settings.monitor_interval,
            local_addr=settings.rdzv.local_addr if settings.rdzv is not None else _LOOPBACK,
        )
        super().__init__(
            spec,
            settings,
            events,
            server,
            start_method=forkserver.register(),
            exit_barrier_timeout=_EXIT_BARRIER_SECONDS,
        )
        self._arguments = arguments
        self._events = events
        self._attempt = -1
        self._reason = "started"
        self._restart = threading.Event()
        self._rejoin = threading.Event()
        self._told = threading.Event()
        self._follows = settings.rdzv is not None and not settings.rdzv.hosting
        self._waker = Waker()
        self._grace_over = threading.Event()
        self._known_dead: set[int] = set()
        self._stopped: set[int] = set()
        self._others: frozenset[int] = frozenset()
        self._succeeded = False
        self._leave_by = float("inf")

    # --- called from other threads ---------------------------------------------------------------

    def stop(self) -> None:
        """End the run: SIGTERM to every rank, SIGKILL after the grace period."""
        self._stop.set()
        self._waker.wake()

    def adopt(self, settings: AgentSettings) -> None:
        """Go on with these settings."""
        self.settings = settings

    def restart(self) -> None:
        """End this attempt's ranks as if one of them had failed: torchelastic starts others."""
        self._restart.set()
        self._told.set()
        self._waker.wake()

    def rejoin(self) -> None:
        """Meet the other nodes anew: one of them comes or goes. The ranks are started again."""
        self._rejoin.set()
        self._told.set()
        self.rendezvous.rejoin()
        self._waker.wake()

    def forget_orders(self) -> None:
        """Forget what was asked of the attempt before; a node that follows says when that is."""
        self._restart.clear()
        self._rejoin.clear()
        self._told.clear()

    def all_alive(self) -> bool:
        """Whether no process of this attempt has ended, as far as the system has told."""
        sentinels = [process.sentinel for process in self._processes()]
        return bool(sentinels) and not connection.wait(sentinels, timeout=0)

    def skip_grace(self) -> None:
        """Skip what is left of the grace period."""
        self._grace_over.set()

    def release(self, *, succeeded: bool, others: frozenset[int] = frozenset()) -> None:
        """Give the ranks of this attempt leave to end, and stop the `others`, which are still at work.

        From now on an exit code 0 is no failure; with `succeeded` no exit code is, since every value is
        here already.
        """
        self._others = others
        self._succeeded = succeeded
        self._told.set()
        self._leave_by = time.monotonic() + self.settings.shutdown_timeout
        context = self._pcontext
        if context is not None:
            for slot in context._ret_vals.values():  # type: ignore[attr-defined]  # noqa: SLF001
                slot.released = True
        self._waker.wake()

    def close(self) -> None:
        """Let go of what the agent holds, once it has run."""
        self._waker.close()

    # --- torchelastic's own steps ----------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stop.is_set():
            self._interrupted()
        # The nodes that join start theirs once the notebook's are there, under the same number.
        store: Any = worker_group.store
        self._attempt = (
            self.rendezvous.read_attempt(store, self._stop) if self._follows else self._attempt + 1
        )
        world_size = worker_group.workers[0].world_size
        self._events.attempt_starting(self._attempt, world_size, self._reason)
        # Only now: until the hub has taken note it may still release ranks of the attempt before.
        self._known_dead, self._stopped, self._others = set(), set(), frozenset()
        if not self._follows:
            self.forget_orders()
        self._grace_over.clear()
        self._succeeded, self._leave_by = False, float("inf")
        worker_group.spec.args = self._arguments(self._attempt)
        # A restart, perhaps because it was killed.
        self._server.ensure_running()
        # Each attempt takes them anew, and the notebook may have opened others since the first.
        descriptors.make_room(self.settings.nproc, replaced=len(self._processes()))
        try:
            with self._server.forking(abandon=self._stop):
                pids: dict[int, Any] = super()._start_workers(worker_group)
        except forkserver.AbandonedError:
            self._interrupted()
        context = self._pcontext
        assert context is not None  # noqa: S101 - set by the call above
        workers = tuple(
            Worker(
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                pid=pids[worker.local_rank],
                stdout=context.stdouts[worker.local_rank],
                stderr=context.stderrs[worker.local_rank],
            )
            for worker in worker_group.workers
        )
        self._events.attempt_started(self._attempt, world_size, workers)
        if not self._follows:
            self.rendezvous.post_attempt(store, self._attempt)
        self._reason = "membership"  # unless a failure is seen first
        return pids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # A node that meets the others before they know of its failure would look like one that came late.
        while self._follows and not self._told.wait(_LOOK_SECONDS / 10):
            if self._stop.is_set():
                self._interrupted()
        if self._reason == "membership":
            self._events.membership_changing()
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Ranks that are idle, or at work, cost nothing here.
        alive = [process.sentinel for process in self._processes() if process.exitcode is None]
        if len(alive) == len(self._processes()) or (alive and self._released()):
            self._wait(alive, min(_LOOK_SECONDS, self._leave_by - time.monotonic()))
        if self._stop.is_set():
            self._interrupted()
        if self._rejoin.is_set():
            return RunResult(state=WorkerState.HEALTHY)
        if self._restart.is_set():
            return self._failed(worker_group)
        self._stop_others()
        exitcodes = self._exitcodes()
        released = self._released()
        if not released:
            dead = exitcodes.keys() - self._stopped
            return self._failed(worker_group) if dead else RunResult(state=WorkerState.HEALTHY)
        if len(exitcodes) < len(self._processes()):
            # They are leaving. torch would wait for the last of them without a bound.
            if time.monotonic() > self._leave_by:
                self._terminate(self._processes())
            return RunResult(state=WorkerState.HEALTHY)
        self._tell(exitcodes, expected=False)
        bad = any(code != 0 for local_rank, code in exitcodes.items() if local_rank not in self._stopped)
        # Of several nodes, the failure may be another one's.
        if (bad or self.settings.rdzv is not None) and not self._succeeded:
            return self._failed(worker_group)
        if any(exitcodes.values()):
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        finished: RunResult = super()._monitor_workers(worker_group)
        return finished

    def _wait(self, sentinels: Sequence[int], seconds: float) -> None:
        """Wait until a process behind `sentinels` has ended, or another thread calls; at most `seconds`."""
        with contextlib.suppress(OSError):  # the end of a process may have been read meanwhile
            connection.wait([*sentinels, self._waker.fileno()], timeout=max(seconds, 0.0))
            self._waker.clear()

    def _stop_others(self) -> None:
        """Stop the ranks that are still at work after a peer has failed, before that peer goes.

        In this order they are stopped each time. In the other, whether they see the peer's connections
        close first would be a race.
        """
        others, self._others = self._others, frozenset()
        if others:
            processes = [
                process
                for worker, process in zip(self._worker_group.workers, self._processes(), strict=True)
                if worker.global_rank in others
            ]
            self._terminate(processes)
            self._events.others_stopped()

    def _failed(self, worker_group: WorkerGroup) -> RunResult:
        """Stop the others of a group in which a rank has failed, and report all that failed."""
        exitcodes = self._exitcodes()
        self._tell(exitcodes, expected=False)
        if 0 < len(exitcodes) < len(self._processes()):
            # Peers that sit in a collective with the dead rank raise now; let them say so.
            self._stop.wait(_LAST_WORDS_SECONDS)
            exitcodes = self._exitcodes()
        self._reason = "failure"
        context = self._pcontext
        assert context is not None  # noqa: S101 - there are exit codes
        failures = {
            worker_group.workers[local_rank].global_rank: _process_failure(
                local_rank, self._processes()[local_rank].pid, code, context.error_files[local_rank]
            )
            for local_rank, code in exitcodes.items()
            if local_rank not in self._stopped and (code != 0 or not self._released())
        }
        self._terminate(self._processes())
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _shutdown(self, *arguments: Any, **keywords: Any) -> None:
        # torch 2.8 to 2.13 differ in the arguments; for either there is nobody left to shut down.
        self._terminate(self._processes())
        super()._shutdown(*arguments, **keywords)
        self._server.sweep()

    def _setup_healthcheck(self) -> None:
        """Start no server that listens for health checks: nothing but the ranks' store listens."""

    def _interrupted(self) -> NoReturn:
        msg = "the run was stopped"
        raise SignalException(msg, signal.SIGTERM)

    # --- processes -------------------------------------------------------------------------------

    def _processes(self) -> list[Any]:
        context = self._pcontext
        started = getattr(context, "_pc", None)
        return list(started.processes) if started is not None else []

    def _released(self) -> bool:
        slots = getattr(self._pcontext, "_ret_vals", {})
        return bool(slots) and all(slot.released for slot in slots.values())

    def _exitcodes(self) -> dict[int, int]:
        return {
            local_rank: process.exitcode
            for local_rank, process in enumerate(self._processes())
            if process.exitcode is not None
        }

    def _tell(self, exitcodes: Mapping[int, int], *, expected: bool) -> None:
        for local_rank, code in exitcodes.items():
            if local_rank not in self._known_dead:
                self._known_dead.add(local_rank)
                rank = self._worker_group.workers[local_rank].global_rank
                process = self._processes()[local_rank]
                killed = self.why_killed(process.pid) if code < 0 else ""
                reason = forkserver.LOST if process.lost else killed
                self._events.worker_exited(rank, code, expected=expected, reason=reason)

    def _terminate(self, processes: Sequence[Any]) -> None:
        """SIGTERM to those that live, SIGKILL to those that outlive the grace period, and tell."""
        self._tell(self._exitcodes(), expected=False)
        alive = [process for process in processes if process.exitcode is None]
        everyone = self._processes()
        self._stopped |= {index for index, process in enumerate(everyone) if process in alive}
        if alive:
            self._events.ranks_ending()
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
                # A stopped process (SIGSTOP, Ctrl-Z) hears nothing until it goes on.
                os.kill(process.pid, signal.SIGCONT)
        deadline = time.monotonic() + self.settings.grace
        while (left := deadline - time.monotonic()) > 0 and not self._grace_over.is_set():
            alive = [process for process in alive if process.exitcode is None]
            if not alive:
                break
            forkserver.wait_for([process.sentinel for process in alive], min(left, 0.05))
        for process in alive:
            if process.exitcode is None:
                forkserver.kill_group(process.pid)
        forkserver.wait_for([process.sentinel for process in alive], _KILL_WAIT_SECONDS)
        self._tell(self._exitcodes(), expected=True)


def _process_failure(local_rank: int, pid: int, exitcode: int, error_file: str) -> ProcessFailure:
    """Return torchelastic's record of a failed rank, also where its error file is cut short (a full disk)."""
    try:
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=exitcode, error_file=error_file)
    except (ValueError, KeyError, TypeError):
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=exitcode, error_file="")
