"""A worker group and its run: what the ranks say and the agent reports, brought together.

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
    CellJob,
    Dispatch,
    Entered,
    Exited,
    FailureRecord,
    FromRank,
    Hello,
    Leave,
    Measured,
    Message,
    Noticed,
    Phase,
    Prepare,
    Raised,
    Returned,
    RunEnded,
    Where,
)
from nblaunch._reports import HangReport, format_ranks
from nblaunch._state import RankState, RunState, State, advance, looked_at
from nblaunch.agent import runtime
from nblaunch.agent.elastic import AgentSettings, Worker
from nblaunch.agent.logs import read_text
from nblaunch.agent.thread import AgentThread
from nblaunch.diagnose.exits import explain_exit, oom_kills
from nblaunch.job import shared
from nblaunch.rank.inspection import fatal_path
from nblaunch.rank.main import Orders
from nblaunch.session.hub import Hub
from nblaunch.session.inquiry import Inquiry
from nblaunch.session.interruption import Interruption
from nblaunch.session.rank_logs import RankLogs

# How long the other ranks may take to say what happened to them once one has failed.
SETTLE_SECONDS = 0.1
# A rank's last words may still lie in the socket when its process is gone.
_LAST_WORDS_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
_LAST_DRAIN_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_CONNECT_SECONDS = 60.0
_PROCESS_GROUP_SECONDS = 120.0


class WorkerGroup:
    """N ranks under one agent, for one job."""

    def __init__(self, hub: Hub, settings: AgentSettings, prepare: Prepare, dispatch: Dispatch) -> None:
        """Prepare a group; `start` starts it."""
        self.group = secrets.token_hex(4)
        self.token = secrets.token_hex(16)
        self.attempt = 0
        self.state = RunState.fresh(settings.nproc, time=time.time())
        self.values: dict[int, tuple[memoryview, ...]] = {}
        self.logs = RankLogs()
        self.error: BaseException | None = None
        self.launch_failure: tuple[str, str] | None = None
        self.ended = threading.Event()
        self._hub = hub
        self._settings = settings
        self._prepare = prepare
        self._dispatch = dispatch
        self._ready: set[int] = set()
        self._gone: dict[int, tuple[float, Exited]] = {}
        self._leave_at: float | None = None
        self._left = False
        self._dispatched = False
        self._interruption = Interruption(lambda rank, message: hub.send(self, rank, message))
        self._oom_before = oom_kills()
        self._phase_deadline: tuple[Phase, float] | None = None
        self._agent = AgentThread(settings, self._rank_arguments, self)
        # Last: an interrupt that comes while this is made must leave nothing behind.
        self._directory = runtime.make_directory("group-")

    # --- for the caller's thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the agent, which starts the ranks."""
        self._hub.add(self)
        self._agent.start()

    def where(self, seconds: float = _ANSWER_SECONDS) -> HangReport:
        """Ask every rank where it is; wait at most `seconds` for the answers."""
        ranks = self.state.ranks.values()
        inquiry = Inquiry(rank.rank for rank in ranks if rank.node and not rank.state.final)
        self._hub.call(lambda: self._interruption.ask(inquiry))
        inquiry.complete.wait(seconds)
        return inquiry.report(self.state, str(self._directory), self._titles())

    def looked_at(self, report: HangReport) -> None:
        """Keep a report of where the ranks are with what is known of the run."""
        self._hub.call(lambda: self._keep(report))

    def measured(self, measured: Measured) -> None:
        """Keep what the ranks use with what is known of the run."""
        self._hub.call(lambda: self._fold(measured))

    def notice(self, text: str) -> None:
        """Say something about the run that does not end it."""
        self._hub.call(lambda: self._fold(Noticed(text=text)))

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank; free those that are stuck in a collective."""
        self._hub.call(self._interrupt)

    def stop(self) -> None:
        """End the ranks: SIGTERM, then SIGKILL after the grace period."""
        self._agent.stop()

    def hurry(self) -> None:
        """Skip what is left of the grace period."""
        self._agent.hurry()
        self._agent.stop()

    def close(self) -> None:
        """Wait for the last of the group, which has ended, and let go of its values."""
        self._agent.join(_JOIN_SECONDS if self.ended.is_set() else 0)
        # The group and its agent refer to each other; gigabytes must not wait until the collector comes.
        self.values = {}

    # --- from the agent's thread -----------------------------------------------------------------

    def _rank_arguments(self, attempt: int) -> tuple[Orders]:
        spill = str(self._directory)
        return (Orders(self._hub.address, self.group, self.token, attempt, spill),)

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

    def agent_ended(self, error: BaseException | None) -> None:
        """Take note of the agent's end."""
        self._hub.call(lambda: self._on_agent_end(error))

    # --- on the hub's thread ---------------------------------------------------------------------

    def receive(self, message: FromRank) -> None:
        """Fold a rank's message, after the output that came before it."""
        for printed in self.logs.before(message):
            self._fold(printed)
        match message:
            case Hello():
                self._hub.send(self, message.rank, self._prepare)
            case Entered(phase=Phase.READY):
                self._ready.add(message.rank)
            case Returned():
                if not self._take_value(message):
                    return
            case Where():
                self._interruption.answered(message, self.state)
                return
            case _:
                pass
        outcome = self._interruption.as_stopped(message)
        self._fold(outcome)
        self._after(outcome)

    def tick(self, now: float) -> None:
        """Read logs; do what is due."""
        for printed in self.logs.news(self.state.ranks):
            self._fold(printed)
        self._fold_exits(now)
        if self._leave_at is not None and now >= self._leave_at:
            self._let_go()
        self._interruption.tick(self.state, now)
        if self._phase_deadline is not None and now > self._phase_deadline[1]:
            self._phase_timed_out(self._phase_deadline[0])

    def lost(self, error: Exception) -> None:
        """End the run: nobody hears its ranks any more."""
        self.error = RunFailedError(
            f"the ranks can no longer be heard, and have been ended: the hub's socket broke ({error}). "
            "The next run makes a new one."
        )
        self._agent.stop()

    def _interrupt(self) -> None:
        self._interruption.begin(self.state)
        if not self._dispatched:
            self._agent.stop()  # nothing of the user's runs yet: there is nobody to wait for

    def _after(self, message: Message) -> None:
        self._dispatch_when_ready()
        if isinstance(message, Hello) and all(
            rank.state is not State.INIT and rank.node for rank in self.state.ranks.values()
        ):
            self._phase_deadline = (Phase.PROCESS_GROUP, time.monotonic() + _PROCESS_GROUP_SECONDS)
        if self.state.finished:
            self._let_go()
        elif self.state.failed and self._leave_at is None:
            self._leave_at = time.monotonic() + SETTLE_SECONDS

    def _dispatch_when_ready(self) -> None:
        """Dispatch once every rank has its process group, and its log files are known."""
        if len(self._ready) == self.state.world_size and self.logs.known and not self._left:
            if self._interruption.begun:
                return
            self._phase_deadline, self._dispatched = None, True
            self._ready.clear()
            for rank in self.state.ranks:
                self._hub.send(self, rank, self._dispatch)
                # A rank that dies at once (`os._exit`) may not live to say that its job has begun.
                self._fold(Entered(rank=rank, phase=Phase.JOB))

    def _let_go(self) -> None:
        """Tell every rank that has an outcome to end; the agent sees to the others."""
        if self._left:
            return
        self._left, self._leave_at = True, None
        succeeded = all(rank.state is State.SUCCEEDED for rank in self.state.ranks.values())
        others = frozenset(rank.rank for rank in self.state.ranks.values() if not rank.state.final)
        self._agent.release(succeeded=succeeded, others=others)
        if not others:
            self._send_leave()
        if self._interruption.begun:
            self._agent.stop()  # also: no restart

    def others_stopped(self) -> None:
        """Take note that nobody is at work any more: those that have failed may go."""
        self._hub.call(self._send_leave)

    def _send_leave(self) -> None:
        for rank in self.state.ranks.values():
            if rank.state is State.FAILED and rank.failure is not None:
                self._hub.send(self, rank.rank, Leave(exitcode=_as_exitcode(rank.failure.exitcode)))
            elif rank.state.final:
                self._hub.send(self, rank.rank, Leave())

    def _take_value(self, message: Returned) -> bool:
        """Map a value while its rank still holds it; return False if that came too late."""
        try:
            self.values[message.rank] = shared.get(message.value, private=False)
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

    def _on_attempt(self, message: AttemptStarted) -> None:
        self._hub.drain(_LAST_DRAIN_SECONDS)
        self._fold_exits(float("inf"))
        self.logs.close()
        self.attempt = message.number
        self._ready, self._gone = set(), {}
        self._leave_at, self._left, self._dispatched = None, False, False
        self.values = {}
        self._fold(message)
        self._phase_deadline = None

    def _on_workers(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        self.logs.begin(number, workers)
        pids = {worker.rank: worker.pid for worker in workers}
        self._fold(AttemptStarted(number=number, world_size=world_size, time=time.time(), pids=pids))
        if self._phase_deadline is None:
            # From now on: before, a fork server that imports torch from a slow disk has a limit of its own.
            self._phase_deadline = (Phase.CONNECT, time.monotonic() + _CONNECT_SECONDS)
        self._dispatch_when_ready()

    def _on_exit(self, exited: Exited) -> None:
        self._hub.drain()
        self._gone[exited.rank] = (time.monotonic() + _LAST_WORDS_SECONDS, exited)
        self._fold_exits(time.monotonic())

    def _fold_exits(self, now: float) -> None:
        """Fold ends whose last words have had time to arrive, or that have no more to say."""
        for rank, (due, exited) in list(self._gone.items()):
            known = self.state.ranks.get(rank)
            if known is not None and not known.state.final and now < due:
                continue
            del self._gone[rank]
            if known is None or not known.state.final:
                for printed in self.logs.rest(rank):
                    self._fold(printed)
                self._fold(self._explained(exited))
            else:
                self._fold(exited)
            self._after(exited)

    def _explained(self, exited: Exited) -> Exited:
        if exited.expected or exited.reason:
            return exited
        dump = read_text(str(fatal_path(str(self._directory), exited.rank)))
        why = explain_exit(exited.exitcode, dump, self._titles(), oom_before=self._oom_before)
        return msgspec.structs.replace(exited, reason=why.reason, details=why.details)

    def _titles(self) -> dict[str, str]:
        titles = {filename: title for filename, (title, _) in self._dispatch.sources.items()}
        job = self._dispatch.job
        if isinstance(job, CellJob):
            titles[job.filename] = job.title
        return titles

    def _phase_timed_out(self, phase: Phase) -> None:
        waiting = [rank for rank in self.state.ranks.values() if not self._passed(rank, phase)]
        seconds = _CONNECT_SECONDS if phase is Phase.CONNECT else _PROCESS_GROUP_SECONDS
        self._phase_deadline = None
        self.launch_failure = (
            phase.value,
            (
                f"phase '{phase}' did not finish in {seconds:.0f} s: "
                f"{format_ranks(rank.rank for rank in waiting)} did not come that far"
            ),
        )
        self._agent.stop()

    def _passed(self, rank: RankState, phase: Phase) -> bool:
        return bool(rank.node) if phase is Phase.CONNECT else rank.rank in self._ready

    def _on_agent_end(self, error: BaseException | None) -> None:
        try:
            self._hub.drain(_LAST_DRAIN_SECONDS)
            self._fold_exits(float("inf"))
            for printed in self.logs.rest_of_all():
                self._fold(printed)
        except Exception as broken:  # noqa: BLE001 - whoever waits for the end must see it
            error = error or broken
        finally:
            self.error = self.error or error
            self._fold(RunEnded(time=time.time(), stopped=self.error is None))
            # Here and not in `close`: a caller who is interrupted once more may never come that far.
            self._hub.remove(self)
            self.logs.close()
            runtime.remove_tree(self._directory)
            self.ended.set()

    def _keep(self, report: HangReport) -> None:
        self.state = looked_at(self.state, report)

    def _fold(self, message: Message) -> None:
        self.state = advance(self.state, message)


def _as_exitcode(code: int) -> int:
    """Return what a process can end with: `sys.exit(256)` would be a success."""
    return code & 0xFF or 1
