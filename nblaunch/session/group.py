"""A worker group: what the ranks say and the agent reports, brought together, job after job.

A group of one run has one job, is dispatched anew after a restart, and ends with it. A kept group (a
session's) goes on: its ranks keep their variables from job to job.

All methods named `_on_...`, `receive` and `tick` run on the hub's thread and are the only ones that
change anything; `state` is an immutable snapshot that any thread may read.
"""

from __future__ import annotations

import secrets
import threading
import time

import msgspec

from nblaunch._errors import LaunchError, RunFailedError
from nblaunch._protocol import (
    AttemptStarted,
    Entered,
    Exited,
    FailureRecord,
    FromRank,
    Healed,
    Hello,
    Leave,
    Message,
    Names,
    Noticed,
    Phase,
    Prepare,
    Raised,
    Returned,
    RunEnded,
    Where,
)
from nblaunch._reports import HangReport
from nblaunch._state import RunState, State, advance
from nblaunch.agent import runtime
from nblaunch.agent.elastic import AgentSettings, Worker
from nblaunch.agent.logs import read_text
from nblaunch.agent.thread import AgentThread
from nblaunch.diagnose.exits import explain_exit, oom_kills
from nblaunch.job import shared
from nblaunch.rank.inspection import fatal_path
from nblaunch.rank.main import Orders
from nblaunch.session.healing import Healing
from nblaunch.session.hub import Hub
from nblaunch.session.inquiry import Inquiry
from nblaunch.session.interruption import Interruption
from nblaunch.session.job import Job
from nblaunch.session.phases import Phases
from nblaunch.session.rank_logs import RankLogs

# How long the other ranks may take to say what happened to them once one has failed.
SETTLE_SECONDS = 0.1
# A rank's last words may still lie in the socket when its process is gone.
_LAST_WORDS_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 1.0
_JOIN_SECONDS = 5.0


class WorkerGroup:
    """N ranks under one agent; `keep` says whether they outlive a job."""

    def __init__(self, hub: Hub, settings: AgentSettings, *, keep: bool = False) -> None:
        """Prepare a group; `start` starts it."""
        self.group = secrets.token_hex(4)
        self.token = secrets.token_hex(16)
        self.attempt = 0
        self.keep = keep
        self.settings = settings
        self.state = RunState.fresh(settings.nproc, time=time.time())
        """The ranks themselves; what becomes of a job is in `job.state`."""
        self.job: Job | None = None
        self.names: dict[int, tuple[str, ...]] = {}
        """Of a kept group: the variables that each rank has."""
        self._notes: list[str] = []
        """Of a kept group: what has happened to its ranks and has not been told with a job yet."""
        self.closed = threading.Event()
        self.ready_once = threading.Event()
        self._hub = hub
        self._started = False
        self._prepare: Prepare | None = None
        self._ready: set[int] = set()
        self._logs = RankLogs()
        self._gone: dict[int, tuple[float, Exited]] = {}
        self._dead: set[int] = set()
        self._error: BaseException | None = None
        self._launch_failure: tuple[str, str] | None = None
        self._restart_at: float | None = None
        self._interruption = Interruption(lambda rank, message: hub.send(self, rank, message))
        self._healing = Healing(lambda rank, message: hub.send(self, rank, message))
        self._oom_before = oom_kills()
        self._phases = Phases()
        self._agent = AgentThread(settings, self._rank_arguments, self)
        # Last: an interrupt that comes while this is made must leave nothing behind.
        self._directory = runtime.make_directory("group-")

    # --- for the caller's thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the agent, which starts the ranks; does nothing the second time."""
        if not self._started:
            self._started = True
            self._hub.add(self)
            self._agent.start()

    def begin(self, job: Job | None, prepare: Prepare) -> None:
        """Give the ranks a job, to be dispatched once all of them are ready; None only makes them ready."""
        self._hub.call(lambda: self._begin(job, prepare))

    @property
    def ready(self) -> bool:
        """Whether all ranks of this attempt have come into being."""
        return len(self._ready) == self.state.world_size

    def where(self, seconds: float = _ANSWER_SECONDS) -> HangReport:
        """Ask every rank where it is; wait at most `seconds` for the answers."""
        job = self.job
        state = job.state if job is not None else self.state
        inquiry = Inquiry(rank.rank for rank in state.ranks.values() if rank.node and not rank.state.final)
        self._hub.call(lambda: self._interruption.ask(inquiry))
        inquiry.complete.wait(seconds)
        titles = job.titles if job is not None else {}
        return inquiry.report(job.state if job is not None else self.state, str(self._directory), titles)

    def looked_at(self, report: HangReport) -> None:
        """Keep a report of where the ranks are with what is known of the job."""
        job = self.job
        if job is not None:
            self._hub.call(lambda: job.keep(report))

    def notice(self, text: str) -> None:
        """Say something about the job that does not end it."""
        self._hub.call(lambda: self._fold(Noticed(text=text)))

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank at work; free those that are stuck in a collective."""
        self._hub.call(self._interrupt)

    def stop(self) -> None:
        """End the ranks: SIGTERM, then SIGKILL after the grace period."""
        self._agent.stop()

    def restart(self, reason: str) -> None:
        """End the ranks of a kept group, and start others."""
        self._hub.call(lambda: self._restart(reason))

    def hurry(self) -> None:
        """Skip what is left of the grace period."""
        self._agent.hurry()
        if self.keep:
            self.restart("it was interrupted twice")
        else:
            self._agent.stop()

    def leave(self) -> None:
        """Let the ranks of a kept group end in order."""
        self._hub.call(self._dismiss)

    def close(self) -> None:
        """Wait for the last of a group that has ended, and let go of its values."""
        self._agent.join(_JOIN_SECONDS if self.closed.is_set() else 0)
        # The group and its agent refer to each other; gigabytes must not wait until the collector comes.
        if self.closed.is_set():
            self.job = None

    # --- from the agent's thread -----------------------------------------------------------------

    def _rank_arguments(self, attempt: int) -> tuple[Orders]:
        spill = str(self._directory)
        return (Orders(self._hub.address, self.group, self.token, attempt, spill, self.keep),)

    def attempt_starting(self, number: int, world_size: int, reason: str) -> None:
        """Take note before the first process is forked: it may speak before the last one is."""
        done = threading.Event()

        def note() -> None:
            self._on_attempt(
                AttemptStarted(number=number, world_size=world_size, time=time.time(), reason=reason)
            )
            done.set()

        self._hub.call(note)
        while not done.wait(1.0):
            if not self._hub.usable:
                msg = "the hub, which carries the ranks' messages, has ended"
                raise LaunchError(msg, phase=Phase.CONNECT.value)

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        """Take note of the processes and their log files."""
        self._hub.call(lambda: self._on_workers(number, world_size, workers))

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Take note of a process that is gone."""
        exited = Exited(rank=rank, exitcode=exitcode, time=time.time(), expected=expected, reason=reason)
        self._hub.call(lambda: self._on_exit(exited))

    def others_stopped(self) -> None:
        """Take note that nobody is at work any more: those that have failed may go."""
        self._hub.call(self._send_leave)

    def agent_ended(self, error: BaseException | None) -> None:
        """Take note of the agent's end."""
        self._hub.call(lambda: self._on_agent_end(error))

    # --- on the hub's thread: a job's life -------------------------------------------------------

    def _begin(self, job: Job | None, prepare: Prepare) -> None:
        self.job = job
        if self._prepare is None:
            self._prepare = prepare
            for rank in self.state.ranks.values():
                if rank.node:
                    self._hub.send(self, rank.rank, prepare)
            self._phases.begin_process_group(self.state.world_size)
        if job is None:
            return
        job.logs = self._logs.begin_job(self.attempt)
        self._interruption.reset()
        if self.closed.is_set():
            self._finish(job)
            return
        job.state = job.state.seated(self.state.ranks)
        notes, self._notes = self._notes, []
        for note in notes:
            job.fold(Noticed(text=note))
        self._dispatch_when_ready()

    def _dispatch_when_ready(self) -> None:
        """Dispatch once every rank has its process group, and its log files are known."""
        if len(self._ready) < self.state.world_size or not self._logs.known:
            return
        self._phases.passed()
        self.ready_once.set()
        job = self.job
        if job is None or job.dispatched or job.settled or job.ended.is_set() or self._interruption.begun:
            return
        job.dispatched = True
        for rank in job.state.ranks:
            self._hub.send(self, rank, job.dispatch)
            # A rank that dies at once (`os._exit`) may not live to say that its job has begun.
            job.fold(Entered(rank=rank, phase=Phase.JOB))

    def _after(self, job: Job) -> None:
        """Do what follows from a change of the job's state."""
        if job.ended.is_set():
            return
        if job.state.finished:
            self._settled(job)
        elif job.state.failed and job.settle_at is None:
            job.settle_at = time.monotonic() + SETTLE_SECONDS

    def _settled(self, job: Job) -> None:
        """Every rank of the job has an outcome, or has had the time to say what happened to it."""
        if job.settled:
            return
        if self.keep:
            self._settled_and_kept(job)
            return
        job.settled, job.settle_at = True, None
        others = frozenset(rank.rank for rank in job.state.ranks.values() if not rank.state.final)
        self._agent.release(succeeded=job.succeeded, others=others)
        if not others:
            self._send_leave()
        if self._interruption.begun:
            self._agent.stop()  # also: no restart
        elif job.succeeded:
            # All values are here: the ranks leave while the user goes on.
            self._finish(job)

    def _settled_and_kept(self, job: Job) -> None:
        job.settle_at = None
        if not job.dispatched:
            self._agent.stop()  # they have not even come into being: others would not either
            return
        if self._dead:
            return  # the agent ends the others, and starts the group again
        if not job.state.finished:
            self._free(job)
            return
        job.settled, self._restart_at = True, None
        if job.succeeded:
            self._finish(job)
        else:
            self._restart_at = time.monotonic() + max(self.settings.grace, 1.0)
            self._healing.begin(self.state.ranks, self._interruption)

    def _free(self, job: Job) -> None:
        """Have the ranks that are still at work give up: a peer of theirs has."""
        if not self._interruption.begun:
            self._interruption.begin(job.state)
        if self._restart_at is None:
            self._restart_at = time.monotonic() + self.settings.grace

    def _finish(self, job: Job) -> None:
        """End the job: its result can be made."""
        job.error, job.launch_failure = job.error or self._error, self._launch_failure
        if not job.state.finished:
            job.fold(RunEnded(time=time.time(), stopped=job.error is None))
        job.ended.set()

    def _interrupt(self) -> None:
        job = self.job
        if job is None or job.ended.is_set():
            return
        self._interruption.begin(job.state)
        if self.keep and job.dispatched:
            self._restart_at = time.monotonic() + self.settings.grace
        elif self.keep:
            self._finish(job)
        elif not job.dispatched:
            self._agent.stop()  # nothing of the user's runs yet: there is nobody to wait for

    def _restart(self, reason: str) -> None:
        self._restart_at = None
        if not self.closed.is_set():
            self._note(reason)
            self._agent.restart()

    def _note(self, text: str) -> None:
        """Tell what has happened to the ranks with the job that is there, or else with the next one."""
        if self.job is not None and not self.job.ended.is_set():
            self.job.fold(Noticed(text=text))
        else:
            self._notes.append(text)

    def forget_notes(self) -> None:
        """Tell nothing of what has happened so far: whoever would be told knows."""
        self._hub.call(self._notes.clear)

    def _dismiss(self) -> None:
        self._agent.release(succeeded=True, others=frozenset())
        for rank in self.state.ranks:
            self._hub.send(self, rank, Leave())

    def _send_leave(self) -> None:
        job = self.job
        for rank in job.state.ranks.values() if job is not None else ():
            if rank.state is State.FAILED and rank.failure is not None:
                self._hub.send(self, rank.rank, Leave(exitcode=_as_exitcode(rank.failure.exitcode)))
            elif rank.state.final:
                self._hub.send(self, rank.rank, Leave())

    # --- on the hub's thread: what the ranks say -------------------------------------------------

    def receive(self, message: FromRank) -> None:
        """Fold a rank's message, after the output that came before it."""
        for printed in self._logs.before(message):
            self._fold(printed)
        match message:
            case Hello():
                if self._prepare is not None:
                    self._hub.send(self, message.rank, self._prepare)
            case Entered(phase=Phase.READY):
                self._ready.add(message.rank)
                self._phases.reached(Phase.PROCESS_GROUP, message.rank)
            case Names():
                self.names[message.rank] = message.names
                return
            case Healed():
                self._on_healed(message)
                return
            case Where():
                self._answered(message)
                return
            case Returned():
                if not self._take_value(message):
                    return
            case _:
                pass
        self._fold(self._interruption.as_stopped(message))
        if isinstance(message, Hello):
            self._phases.reached(Phase.CONNECT, message.rank)
            if self._prepare is not None:
                self._phases.begin_process_group(self.state.world_size)
            else:
                self._phases.wait_without_limit(self.state.world_size)
        self._dispatch_when_ready()

    def _answered(self, message: Where) -> None:
        job = self.job
        self._interruption.answered(message, job.state if job is not None else self.state)

    def _take_value(self, message: Returned) -> bool:
        """Map a value while its rank still holds it; return False if that came too late."""
        job = self.job
        if job is None or job.ended.is_set():
            return False
        try:
            job.values[message.rank] = shared.get(message.value, private=False)
        except (FileNotFoundError, ProcessLookupError):
            return False  # the process is gone; its exit says so
        except Exception as error:  # noqa: BLE001 - no descriptor left, no memory: the rank waits to be told
            failure = FailureRecord(
                type=f"{type(error).__module__}.{type(error).__qualname__}",
                message=f"the notebook could not take the value over: {error}",
                time=time.time(),
                phase=Phase.VALUE,
            )
            self.receive(Raised(rank=message.rank, failure=failure, offsets=message.offsets))
            return False
        return True

    def _on_healed(self, message: Healed) -> None:
        outcome = self._healing.healed(message)
        if outcome is None:
            return
        job, self._restart_at = self.job, None
        if outcome.failed:
            self._restart(f"its process group could not be formed again ({outcome.failed})")
            return
        if outcome.reformed:
            self._note(
                "process group re-formed; variables kept; groups you made yourself (new_group, DeviceMesh) "
                "are gone"
            )
        if job is not None and not job.ended.is_set():
            self._finish(job)

    # --- on the hub's thread: what the agent says ------------------------------------------------

    def tick(self, now: float) -> None:
        """Read logs; do what is due."""
        job = self.job
        if job is not None and not job.ended.is_set():
            for printed in self._logs.news(job.state.ranks):
                self._fold(printed)
        self._fold_exits(now)
        if job is not None and job.settle_at is not None and now >= job.settle_at:
            self._settled(job)
        self._interruption.tick(job.state if job is not None else self.state, self.state, now)
        self._healing.tick(now)
        if self._restart_at is not None and now >= self._restart_at:
            self._restart("ranks did not come back within the grace period")
        failure = self._phases.overdue(now, self.state)
        if failure is not None:
            self._launch_failure = failure
            self._agent.stop()

    def lost(self, error: Exception) -> None:
        """End the run: nobody hears its ranks any more."""
        self._error = RunFailedError(
            f"the ranks can no longer be heard, and have been ended: the hub's socket broke ({error}). "
            "The next run makes a new one."
        )
        self._agent.stop()

    def _on_attempt(self, message: AttemptStarted) -> None:
        self._hub.drain(_LAST_DRAIN_SECONDS)
        self._fold_exits(float("inf"))
        self._logs.close()
        self.attempt = message.number
        self._ready, self._gone, self._dead, self.names = set(), {}, set(), {}
        self._restart_at = None
        self._healing.abandon()
        self._phases = Phases()
        job = self.job
        if message.number > 0 and self.keep:
            self._note("the ranks were started anew: all of their variables are gone")
        if self.keep and job is not None and job.dispatched:
            # The ranks that had it are gone, and so is all that it could have been done with.
            self._finish(job)
        elif job is not None and not job.ended.is_set():
            job.begin_again()
        self._fold(message)

    def _on_workers(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        self._logs.begin(number, workers)
        pids = {worker.rank: worker.pid for worker in workers}
        self._fold(AttemptStarted(number=number, world_size=world_size, time=time.time(), pids=pids))
        # From now on: before, a fork server that imports torch from a slow disk has a limit of its own.
        self._phases.begin_connect()
        self._dispatch_when_ready()

    def _on_exit(self, exited: Exited) -> None:
        self._hub.drain()
        self._dead.add(exited.rank)
        if self.keep and not self.ready and not exited.expected:
            self._agent.stop()  # a rank that cannot even be started would not come into being again
        self._healing.abandon()
        self._gone[exited.rank] = (time.monotonic() + _LAST_WORDS_SECONDS, exited)
        self._fold_exits(time.monotonic())

    def _fold_exits(self, now: float) -> None:
        """Fold ends whose last words have had time to arrive, or that have no more to say."""
        job = self.job
        for rank, (due, exited) in list(self._gone.items()):
            known = job.state.ranks.get(rank) if job is not None and not job.ended.is_set() else None
            if known is not None and not known.state.final and now < due:
                continue
            del self._gone[rank]
            if known is None:
                self._note_exit(exited)
                self._fold(exited)
            elif not known.state.final:
                for printed in self._logs.rest(rank):
                    self._fold(printed)
                self._fold(self._explained(exited))
            else:
                self._fold(exited)

    def _note_exit(self, exited: Exited) -> None:
        """Keep why a rank of a kept group died between two jobs."""
        if self.keep and not exited.expected and not self.closed.is_set() and exited.exitcode != 0:
            self._note(f"rank {exited.rank} {self._explained(exited).reason}")

    def _explained(self, exited: Exited) -> Exited:
        if exited.expected or exited.reason:
            return exited
        dump = read_text(str(fatal_path(str(self._directory), exited.rank)))
        titles = self.job.titles if self.job is not None else {}
        why = explain_exit(exited.exitcode, dump, titles, oom_before=self._oom_before)
        return msgspec.structs.replace(exited, reason=why.reason, details=why.details)

    def _on_agent_end(self, error: BaseException | None) -> None:
        job = self.job
        try:
            self._hub.drain(_LAST_DRAIN_SECONDS)
            self._fold_exits(float("inf"))
            if job is not None and not job.ended.is_set():
                for printed in self._logs.rest_of_all():
                    self._fold(printed)
        except Exception as broken:  # noqa: BLE001 - whoever waits for the end must see it
            error = error or broken
        finally:
            self._error = self._error or error
            # Here and not in `close`: a caller who is interrupted once more may never come that far.
            self._hub.remove(self)
            self._logs.close()
            runtime.remove_tree(self._directory)
            self.closed.set()
            self.ready_once.set()
            if job is not None and not job.ended.is_set():
                self._finish(job)

    def _fold(self, message: Message) -> None:
        """Fold what is about the ranks themselves, and what is about the job."""
        if isinstance(message, Hello | Entered | AttemptStarted):
            self.state = advance(self.state, message)
        job = self.job
        if job is not None:
            before = job.state
            job.fold(message)
            if job.state is not before:
                self._after(job)


def _as_exitcode(code: int) -> int:
    """Return what a process can end with: `sys.exit(256)` would be a success."""
    return code & 0xFF or 1
