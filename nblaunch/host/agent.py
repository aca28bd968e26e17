"""torchelastic's own agent, as nblaunch runs it, and the thread that it runs on.

Names of torch's that are not public, as of torch 2.8 to 2.15 (`tests/unit/test_torch_names.py` finds
those that a release has broken; `hooks` and `rendezvous` list their own): `LocalElasticAgent._start_workers`,
`._monitor_workers`, `._restart_workers`, `._assign_worker_ranks`, `._exit_barrier`, `._shutdown`,
`._setup_healthcheck`, `._remaining_restarts`, `._worker_group`, `._pcontext`, `._setup_local_watchdog`,
`._worker_watchdog`, `._log_watchdog_event`; `MultiprocessContext._pc`, `._ret_vals`;
`torch.multiprocessing.spawn.tempfile`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import Worker as AssignedRank
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record
from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nblaunch._errors import NblaunchError
from nblaunch._waker import Waker
from nblaunch.host import descriptors, forkserver, preload, rendezvous
from nblaunch.host.directed import DirectedRendezvous
from nblaunch.host.forkserver import Server
from nblaunch.host.hooks import (
    FILE,
    EventStream,
    FilteredLines,
    KeptLogs,
    LogsOfOne,
    Watchdog,
    line_prefixes,
)
from nblaunch.host.settings import AgentEvents, AgentSettings, Worker
from nblaunch.host.wire import AdoptRanks, CompleteRendezvous

_LOOPBACK = "127.0.0.1"
_EXIT_BARRIER_SECONDS = 5.0
_POLL_SECONDS = 1.0
_KILL_WAIT_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.1
THREAD_PREFIX = "nblaunch-agent"
_KEEP_ALIVE_PREFIX = "RendezvousKeepAliveTimer"

P = ParamSpec("P")


class RankAgent(LocalElasticAgent):
    """A `LocalElasticAgent` that reports what happens, and whose waits all have a limit.

    torchelastic decides when to restart and when to give up. Added here: a rank that ends without
    having been released is a failure whatever its exit code; ranks that outlive SIGTERM by the grace
    period are killed (torch waits 30 s, unconditionally); `stop` ends the run from another thread; events go
    to the run, and the watchdog cannot end the notebook. Where the settings say so, a rank that ends leaves
    the others as they are until an order comes: to replace it alone, or to start all anew.
    """

    def __init__(
        self,
        settings: AgentSettings,
        arguments: Callable[[int], tuple[Any, ...]],
        events: AgentEvents,
        server: Server,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare an agent; `arguments(attempt)` are those of `run_rank`, `server` forks the ranks.

        Where the runtime decides each rendezvous, the agent calls `waiting`, and then waits for
        `complete_rendezvous`.
        """
        self.settings = settings
        self._arguments = arguments
        self._events = events
        self._server = server
        self._stop = threading.Event()
        self._directed = (
            DirectedRendezvous(settings.run_id, waiting, self._stop) if settings.directed_at else None
        )
        self.rendezvous = self._directed or rendezvous.make_rendezvous(settings, self._stop)
        self._kept_logs = KeptLogs(settings.options.logs_specs, os.fspath(settings.log_dir))
        self._stream = EventStream(settings.options.event_log_handler, events.recorded)
        self._filtered: list[FilteredLines] = []
        spec = WorkerSpec(
            role=settings.options.role,
            local_world_size=settings.nproc,
            entrypoint=preload.run_rank,
            rdzv_handler=self.rendezvous,
            max_restarts=settings.options.max_restarts,
            monitor_interval=settings.options.monitor_interval,
            local_addr=settings.directed_at
            or (_LOOPBACK if settings.rdzv is None else settings.rdzv.local_addr),
        )
        spec.event_log_handler = self._stream.name
        method = forkserver.register()
        super().__init__(
            spec, self._kept_logs, start_method=method, exit_barrier_timeout=_EXIT_BARRIER_SECONDS
        )
        self._attempt = -1
        self._reason = "started"
        self._restart = threading.Event()
        self._rejoin = threading.Event()
        self._replace = threading.Event()
        self._adopted: AdoptRanks | None = None
        """The attempt in which ranks are to be replaced, where the runtime decides each."""
        self._ordered = threading.Event()
        """Set once a node that follows torch's rendezvous knows how its attempt goes on."""
        self._follows = self._directed is not None or (
            settings.rdzv is not None and not settings.rdzv.hosting
        )
        self._waker = Waker()
        self._grace_over = threading.Event()
        self._known_dead: set[int] = set()
        self._stopped: set[int] = set()
        self._others: frozenset[int] = frozenset()
        self._succeeded = False
        self._leave_by = float("inf")

    # --- called from other threads ---------------------------------------------------------------

    def stop(self) -> None:
        self._stop.set()
        self._waker.wake()

    def adopt(self, settings: AgentSettings) -> None:
        self.settings = settings

    def restart(self) -> None:
        """End this attempt's ranks as if one of them had failed: torchelastic starts others."""
        self._restart.set()
        self._ordered.set()
        self._waker.wake()

    def rejoin(self) -> None:
        self._rejoin.set()
        self._waker.wake()

    def replace_dead(self, order: AdoptRanks | None = None) -> None:
        """Start others in place of the ranks that have ended, or of those in `order`; the others go on."""
        self._adopted = order
        self._replace.set()
        self._waker.wake()

    def complete_rendezvous(self, directed: CompleteRendezvous) -> None:
        if self._directed is not None:
            self._directed.complete_rendezvous(directed)

    def forget_orders(self) -> None:
        """Forget what was ordered in the attempt before; a node that follows decides when that is."""
        for order in (self._restart, self._rejoin, self._replace, self._ordered):
            order.clear()

    def forget_replacement(self) -> None:
        """Forget that ranks are to be replaced: they are; what else was ordered is still to be done."""
        self._replace.clear()

    def all_alive(self) -> bool:
        """Whether no process of this attempt has ended, as far as the system knows."""
        sentinels = [process.sentinel for process in self._processes()]
        return bool(sentinels) and not connection.wait(sentinels, timeout=0)

    def skip_grace(self) -> None:
        self._grace_over.set()

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        """Let the ranks of this attempt end, and stop the `others`, which are still at work.

        From now on an exit code 0 is no failure; with `succeeded` no exit code is, since every value is
        here already.
        """
        self._others = others
        self._succeeded = succeeded
        self._ordered.set()
        self._leave_by = time.monotonic() + self.settings.options.shutdown_timeout
        for slot in self._slots():
            slot.released = True
        self._waker.wake()

    def let_finish(self) -> None:
        """Wait for released ranks without a limit: one that has failed ends as a script does."""
        self._leave_by = float("inf")

    # --- torchelastic's own steps ----------------------------------------------------------------

    def run(self, *arguments: Any, **keywords: Any) -> RunResult:
        """Run to the end, and record how the agent itself ended, as torchrun does once its agent has run."""
        with self._stream.registered():
            try:
                result: RunResult = super().run(*arguments, **keywords)
            except Exception:
                record(self.get_event_failed(), self._stream.name)
                raise
            record(self.get_event_succeeded(), self._stream.name)
            return result

    def close(self) -> None:
        self._waker.close()

    def _assign_worker_ranks(self, *arguments: Any, **keywords: Any) -> list[AssignedRank]:
        if self._directed is None:
            assigned: list[AssignedRank] = super()._assign_worker_ranks(*arguments, **keywords)
            return assigned
        directed = self._directed.directed
        size = directed.world_size
        return [
            AssignedRank(local_rank, rank, role_rank=rank, world_size=size, role_world_size=size)
            for local_rank, rank in enumerate(
                range(directed.base_rank, directed.base_rank + self.settings.nproc)
            )
        ]

    def _exit_barrier(self) -> None:
        # The barrier keeps the node alive that hosts the ranks' store. Here the runtime hosts it.
        if self._directed is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call] # torch's

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._raise_if_stopped()
        store: Any = worker_group.store
        numbers = self.rendezvous if isinstance(self.rendezvous, rendezvous.AttemptNumbers) else None
        if self._directed is not None:
            self._attempt = self._directed.directed.attempt
        elif self._follows and numbers is not None:
            # The nodes that join start theirs once the notebook's are there, under the same number.
            self._attempt = numbers.read_attempt(store, self._stop)
        else:
            self._attempt += 1
        world_size = worker_group.workers[0].world_size
        self._events.attempt_starting(self._attempt, world_size, self._reason)
        # Only now: until the hub knows of this attempt it may still release ranks of the one before.
        self._known_dead, self._stopped, self._others = set(), set(), frozenset()
        if not self._follows:
            self.forget_orders()
        self._grace_over.clear()
        self._succeeded, self._leave_by = False, float("inf")
        worker_group.spec.args = self._arguments(self._attempt)
        # A restart, perhaps because it was killed.
        self._server.ensure_running()
        # Each attempt needs them again, and the notebook may have opened others since the first.
        descriptors.make_room(self.settings.nproc, replaced=len(self._processes()))
        self._keep_error_files()
        try:
            with self._server.forking(abandon=self._stop):
                pids: dict[int, Any] = super()._start_workers(worker_group)
                context = self._started()
                self._filter_lines(worker_group, context)
        except forkserver.AbandonedError:
            self._raise_if_stopped()
            raise
        workers = self._workers_of(worker_group.workers)
        self._events.attempt_started(self._attempt, world_size, workers)
        if numbers is not None and not self._follows:
            numbers.post_attempt(store, self._attempt)
        self._reason = "membership"  # unless a failure is seen first
        return pids

    def _workers_of(self, ranks: Iterable[AssignedRank]) -> tuple[Worker, ...]:
        context, pids = self._started(), self._started().pids()
        return tuple(
            Worker(
                rank=rank.global_rank,
                local_rank=rank.local_rank,
                pid=pids[rank.local_rank],
                stdout=context.stdouts[rank.local_rank],
                stderr=context.stderrs[rank.local_rank],
            )
            for rank in ranks
        )

    def _fork_in_place_of(self, dead: Sequence[AssignedRank]) -> None:
        """Fork other ranks with the numbers of these, as another attempt in which the others go on."""
        order = self._adopted
        self._attempt = self._attempt + 1 if order is None else order.number
        world_size = self._worker_group.workers[0].world_size
        kept = [each.global_rank for each in self._worker_group.workers if each not in dead]
        descriptors.make_room(len(dead), replaced=len(dead))
        self._events.attempt_starting(
            self._attempt, world_size, "failure", kept={each: each for each in kept}
        )
        self._known_dead -= {each.local_rank for each in dead}
        arguments = self._arguments(self._attempt)
        self._keep_error_files()
        try:
            with self._server.forking(abandon=self._stop):
                for each in dead:
                    rank = 0 if order is None else order.base_rank + each.local_rank
                    environ = {} if order is None else order.of_rank(rank).environ
                    self._fork_again(each.local_rank, arguments, environ)
        except forkserver.AbandonedError:
            self._raise_if_stopped()
            raise
        for each in dead:
            each.id = self._started().pids()[each.local_rank]
            for filtered in self._filtered:
                filtered.follow(each.local_rank, getattr(self._started(), filtered.stream)[each.local_rank])
        self._events.attempt_started(self._attempt, world_size, self._workers_of(dead))

    def _fork_again(self, local_rank: int, arguments: tuple[Any, ...], changed: Mapping[str, str]) -> None:
        """Have one more process take the place of one that has ended, in all that torch has of it."""
        context: Any = self._started()
        environ = {**context.envs[local_rank], **changed}
        logs = LogsOfOne(context.stdouts[local_rank], context.stderrs[local_rank], self._attempt)
        other: Any = start_processes(
            name=context.name,
            entrypoint=context.entrypoint,
            args={0: arguments},
            envs={0: environ},
            logs_specs=logs,
            start_method=context.start_method,
        )
        processes, others = context._pc, other._pc  # noqa: SLF001 - see the module
        processes.sentinels.pop(processes.processes[local_rank].sentinel, None)
        processes.processes[local_rank] = others.processes[0]
        processes.error_files[local_rank] = others.error_files[0]
        processes.sentinels[others.processes[0].sentinel] = local_rank
        context._ret_vals[local_rank] = other._ret_vals[0]  # noqa: SLF001 - see the module
        for mine, its in (
            (context.stdouts, other.stdouts),
            (context.stderrs, other.stderrs),
            (context.error_files, other.error_files),
        ):
            mine[local_rank] = its[0]

    def _keep_error_files(self) -> None:
        """Have torch make the error files of ranks, which it removes at once, where a kill leaves nothing."""
        directory = self._server.directory.root()
        make = functools.partial(tempfile.NamedTemporaryFile, dir=directory)
        # `torch.multiprocessing` has a function of this name.
        spawn = importlib.import_module("torch.multiprocessing.spawn")
        vars(spawn)["tempfile"] = SimpleNamespace(NamedTemporaryFile=make)

    def _filter_lines(self, worker_group: WorkerGroup, context: PContext) -> None:
        wanted = self.settings.options
        prefixes = line_prefixes(
            wanted.log_line_prefix_template,
            wanted.role,
            {worker.local_rank: worker.global_rank for worker in worker_group.workers},
        )
        for stream, logs, words in (
            ("stdout", context.stdouts, wanted.duplicate_stdout_filters),
            ("stderr", context.stderrs, wanted.duplicate_stderr_filters),
        ):
            if words:
                path, thread = self._kept_logs.filtered(stream), threading.current_thread().name
                self._filtered.append(FilteredLines(f"{stream}s", path, logs, prefixes, words, thread))

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # A node that joins the rendezvous before the others know of its failure would look like one that came
        # late. With a directed rendezvous, the rendezvous itself waits for it.
        while self._follows and self._directed is None and not self._ordered.wait(_POLL_SECONDS / 10):
            self._raise_if_stopped()
        if self._reason == "membership":
            self._events.membership_changing()
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Ranks that are idle, or at work, cost nothing here.
        alive = [process.sentinel for process in self._processes() if process.exitcode is None]
        known = len(alive) + len(self._known_dead) == len(self._processes())
        if known or (alive and self._released()):
            seconds = max(min(_POLL_SECONDS, self._leave_by - time.monotonic()), 0.0)
            with contextlib.suppress(OSError):  # the end of a process may have been read meanwhile
                connection.wait([*alive, self._waker.fileno()], timeout=seconds)
                self._waker.clear()
        self._raise_if_stopped()
        if self._rejoin.is_set():
            # torchelastic starts the ranks again as after a failure, but here none is counted.
            self._reason = "membership"
            self._remaining_restarts += 1
            return RunResult(state=WorkerState.FAILED)
        if self._restart.is_set():
            return self._failed(worker_group)
        self._stop_others()
        exitcodes = self._exitcodes()
        if not self._released():
            dead = exitcodes.keys() - self._stopped
            return self._go_on_without(worker_group) if dead else RunResult(state=WorkerState.HEALTHY)
        if len(exitcodes) < len(self._processes()):
            # They are leaving. torch would wait for the last of them without a bound.
            if time.monotonic() > self._leave_by:
                self._terminate(self._processes())
            return RunResult(state=WorkerState.HEALTHY)
        self._report_exits()
        bad = any(code != 0 for local_rank, code in exitcodes.items() if local_rank not in self._stopped)
        # Of several nodes, the failure may be another one's.
        if (bad or self._follows or self.settings.rdzv is not None) and not self._succeeded:
            return self._failed(worker_group)
        if any(exitcodes.values()):
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        finished: RunResult = super()._monitor_workers(worker_group)
        return finished

    def _go_on_without(self, worker_group: WorkerGroup) -> RunResult:
        """Report ranks that have ended, and replace them once that is ordered; or end the others as well."""
        reported = len(self._known_dead)
        exitcodes = self._report_exits() if self.settings.replaces else {}
        # On nodes the runtime knows whether any rank is left.
        if not exitcodes or (self._directed is None and len(exitcodes) == len(self._processes())):
            return self._failed(worker_group)
        if len(self._known_dead) > reported:
            # Their children have their connections: peers would wait for these.
            self._server.sweep()
        if self._replace.is_set():
            order, dead = self._adopted, sorted(exitcodes)
            if order is not None:
                # Others may have ended since, of which the runtime hears in the new attempt.
                self._replace.clear()
                dead = [rank - order.base_rank for rank in order.replaced]
            self._fork_in_place_of([worker_group.workers[each] for each in dead])
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_others(self) -> None:
        """Stop the ranks that are still at work after a peer has failed, before that peer goes.

        In this order they are stopped each time. In the other, whether they see the peer's connections
        close first would be a race.
        """
        others, self._others = self._others, frozenset()
        if others:
            workers = zip(self._worker_group.workers, self._processes(), strict=True)
            self._terminate([process for worker, process in workers if worker.global_rank in others])
            self._events.others_stopped()

    def _failed(self, worker_group: WorkerGroup) -> RunResult:
        exitcodes = self._report_exits()
        if 0 < len(exitcodes) < len(self._processes()):
            # Peers that are in a collective with the dead rank raise now, and can still report it.
            self._stop.wait(_LAST_WORDS_SECONDS)
            exitcodes = self._exitcodes()
        self._reason = "failure"
        failures = {
            worker_group.workers[local_rank].global_rank: _process_failure(
                local_rank, self._processes()[local_rank].pid, code, self._started().error_files[local_rank]
            )
            for local_rank, code in exitcodes.items()
            if local_rank not in self._stopped and (code != 0 or not self._released())
        }
        self._terminate(self._processes())
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _shutdown(self, *arguments: Any, **keywords: Any) -> None:
        # torch 2.8 to 2.15 differ in the arguments; for either there is nobody left to shut down.
        self._terminate(self._processes())
        super()._shutdown(*arguments, **keywords)
        while self._filtered:
            self._filtered.pop().stop()
        self._server.sweep()

    def _setup_healthcheck(self) -> None:
        """Start no server that listens for health checks: nothing but the ranks' store listens."""

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
        return any(process.pid == pid for process in self._processes())

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            msg = "the run was stopped"
            raise SignalException(msg, signal.SIGTERM)

    # --- processes -------------------------------------------------------------------------------

    def _started(self) -> PContext:
        context = self._pcontext
        assert context is not None  # noqa: S101 - the ranks have been started
        return context

    def _processes(self) -> list[Any]:
        started = getattr(self._pcontext, "_pc", None)
        return list(started.processes) if started is not None else []

    def _slots(self) -> list[forkserver.ReturnSlot]:
        return list(getattr(self._pcontext, "_ret_vals", {}).values())

    def _released(self) -> bool:
        slots = self._slots()
        return bool(slots) and all(slot.released for slot in slots)

    def _exitcodes(self) -> dict[int, int]:
        codes = ((local_rank, process.exitcode) for local_rank, process in enumerate(self._processes()))
        return {local_rank: code for local_rank, code in codes if code is not None}

    def _report_exits(self, *, expected: bool = False) -> dict[int, int]:
        """Report the processes that have ended since the last call; return all exit codes."""
        exitcodes = self._exitcodes()
        reasons: dict[int, str] = getattr(self._worker_watchdog, "reasons", {})
        for local_rank, code in exitcodes.items():
            if local_rank in self._known_dead:
                continue
            self._known_dead.add(local_rank)
            rank = self._worker_group.workers[local_rank].global_rank
            process = self._processes()[local_rank]
            killed = reasons.get(process.pid, "") if code < 0 else ""
            reason = forkserver.LOST if process.lost else killed
            self._events.worker_exited(rank, code, expected=expected, reason=reason)
        return exitcodes

    def _terminate(self, processes: Sequence[Any]) -> None:
        """Send SIGTERM to those that live, SIGKILL to those that outlive the grace period; report it."""
        self._report_exits()
        alive = [process for process in processes if process.exitcode is None]
        self._stopped |= {index for index, process in enumerate(self._processes()) if process in alive}
        if alive:
            self._events.ranks_ending()
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
                # A stopped process (SIGSTOP, Ctrl-Z) handles nothing until it goes on.
                os.kill(process.pid, signal.SIGCONT)
        deadline = time.monotonic() + self.settings.options.grace
        while (left := deadline - time.monotonic()) > 0 and not self._grace_over.is_set():
            alive = [process for process in alive if process.exitcode is None]
            if not alive:
                break
            forkserver.wait_for([process.sentinel for process in alive], min(left, 0.05))
        for process in alive:
            if process.exitcode is None:
                forkserver.kill_group(process.pid)
        forkserver.wait_for([process.sentinel for process in alive], _KILL_WAIT_SECONDS)
        self._report_exits(expected=True)


def _process_failure(local_rank: int, pid: int, exitcode: int, error_file: str) -> ProcessFailure:
    """Return torchelastic's record of a failed rank, also where its error file is cut short (a full disk)."""
    try:
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=exitcode, error_file=error_file)
    except (ValueError, KeyError, TypeError):
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=exitcode, error_file="")


@functools.cache
def _modules_are_frozen() -> bool:
    # Once, as the collector walks through all that is frozen to count it: 20 ms in a runtime.
    return gc.get_freeze_count() > 0


def _forward(
    order: Callable[Concatenate[RankAgent, P], None],
) -> Callable[Concatenate[AgentThread, P], None]:
    """Return a method that gives this order to the agent; once it has ended, the order does nothing."""

    @functools.wraps(order)
    def pass_on(thread: AgentThread, /, *arguments: P.args, **keywords: P.kwargs) -> None:
        agent = thread.agent
        if agent is not None:
            order(agent, *arguments, **keywords)

    return pass_on


class AgentThread:
    """Runs an agent to its end, on a thread of its own: on the main thread it would take over signals."""

    adopt = _forward(RankAgent.adopt)
    restart = _forward(RankAgent.restart)
    rejoin = _forward(RankAgent.rejoin)
    regroup = _forward(RankAgent.replace_dead)
    complete_rendezvous = _forward(RankAgent.complete_rendezvous)
    forget_orders = _forward(RankAgent.forget_orders)
    forget_replacement = _forward(RankAgent.forget_replacement)
    skip_grace = _forward(RankAgent.skip_grace)
    release = _forward(RankAgent.release)
    let_finish = _forward(RankAgent.let_finish)

    def __init__(
        self,
        settings: AgentSettings,
        arguments: Callable[[int], tuple[Any, ...]],
        events: AgentEvents,
        server: Server,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        _quiet_torchelastic()
        self._events = events
        self.agent: RankAgent | None = RankAgent(settings, arguments, events, server, waiting)
        # The agent acquires it when it begins, or a stop that comes before.
        self._begun = threading.Lock()
        name = f"{THREAD_PREFIX}-{settings.run_id}"
        self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _supervise(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        error: BaseException | None = None
        agent = self.agent
        assert agent is not None  # noqa: S101 - only this thread releases it
        try:
            agent.run()
        except SignalException:
            pass  # it was stopped, and torchelastic has ended its ranks
        except BaseException as caught:  # noqa: BLE001 - it becomes the run's error
            error = caught
            if isinstance(caught, NblaunchError):
                # Its text is complete; its frames would hold the agent and its sockets with the user's error.
                error = caught.with_traceback(None)
                error.__context__ = None
        with contextlib.suppress(Exception):  # of a rendezvous that is over, nobody waits for a good end
            agent.rendezvous.shutdown()
        agent.close()
        del agent
        self.agent = None
        # The agent, its rendezvous and the store's server threads refer to each other. So do parts of jobs
        # that were released since: in a runtime all modules are frozen, and going through the rest is quick.
        gc.collect(2 if _modules_are_frozen() else 1)
        self._events.agent_ended(error)

    def stop(self) -> None:
        agent = self.agent
        if agent is not None:
            agent.stop()
        if self._begun.acquire(blocking=False):
            # An interrupt came before the thread was started.
            if agent is not None:
                agent.close()
            self.agent = None
            self._events.agent_ended(None)

    def all_alive(self) -> bool:
        agent = self.agent
        return agent is not None and agent.all_alive()

    def join(self, timeout: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout)


def join_all(timeout: float) -> None:
    """Wait for the threads of all agents, for `timeout` seconds at most; call before the interpreter ends.

    A daemon thread that comes back from C++ after that is ended by unwinding its stack, up to Python 3.13. In
    torch's stores that meets a destructor, and the process is aborted: "terminate called without an active
    exception".
    """
    deadline = time.monotonic() + timeout
    for each in threading.enumerate():
        if each.name.startswith(THREAD_PREFIX) and each is not threading.current_thread():
            each.join(max(deadline - time.monotonic(), 0.0))


def _quiet_torchelastic() -> None:
    """Keep torchelastic's log lines about our threads off the notebook; the user's own stay as they are."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logger = logging.getLogger(name)
            if _not_ours not in logger.filters:
                logger.addFilter(_not_ours)


def _not_ours(record: logging.LogRecord) -> bool:
    return not (record.threadName or "").startswith((THREAD_PREFIX, _KEEP_ALIVE_PREFIX))
