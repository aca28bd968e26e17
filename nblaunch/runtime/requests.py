"""The requests of clients: one method for each.

A method runs on the hub's thread and returns the answer, None for a request that has none, or, where it would
have to wait, a function that returns the answer on a thread of a pool; its None is `Done`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from nblaunch._errors import LaunchError, NblaunchError
from nblaunch._help import FailureKind
from nblaunch._registry import Owner, Registration
from nblaunch._results import EventLog
from nblaunch._runtime_dir import remove_tree
from nblaunch.group.lifecycle import Trigger
from nblaunch.group.local_runtime import LocalRuntime
from nblaunch.host.forkserver import try_fork
from nblaunch.protocol import client as wire
from nblaunch.protocol.messages import Noticed
from nblaunch.protocol.reports import session_ended
from nblaunch.protocol.state import decode_state
from nblaunch.runtime.archive import Archive, PastJob
from nblaunch.runtime.connections import ClientConnection, Connections
from nblaunch.runtime.jobs import RunningJob
from nblaunch.runtime.place import PlacedRanks, place
from nblaunch.runtime.runtime_session import RuntimeSession
from nblaunch.runtime.worker_groups import FreshRanks, session_ranks

_log = logging.getLogger("nblaunch")
_THREADS = 64
_RELEASED_EVENTS = 20
# How long a job waits for a query of a rank, which is interrupted then, and after that for its end.
_QUERY_SECONDS = 2.0
_QUERY_ENDS_SECONDS = 5.0
# Nodes that are lost together show within seconds; the ranks that are left then form a group.
_REGROUP_SECONDS = 5.0

_Served: TypeAlias = wire.AnswerToClient | Callable[[], wire.AnswerToClient | None] | None


class RequestHandler:
    """Serves the clients of a runtime."""

    def __init__(self, local: LocalRuntime, token: str, registration: Registration) -> None:
        """`token` is what clients need."""
        self.owner: ClientConnection | None = None
        """The process that has started the runtime."""
        self._closing = 0
        """How many sessions are being closed."""
        self.stopping = False
        """Whether a client has stopped the runtime."""
        self.unused = False
        """Whether it ends because it was unused for long enough: it accepts no client any more."""
        self._registration = registration
        self.changed = threading.Event()
        """Set when a client goes, a job of a detached session ends, or the runtime is stopped."""
        self._token = token
        self._owned = False
        self.sessions: dict[str, RuntimeSession] = {}
        self._fresh: dict[str, FreshRanks] = {}
        """The ranks of runs whose job has not come yet: none of them is started."""
        self._ended: list[RuntimeSession] = []
        """Sessions that are over, and to whose logs results refer."""
        self.jobs: dict[int, RunningJob] = {}
        self._waiting_jobs: dict[int, bool] = {}
        """Jobs that wait for their ranks' numbers, and whether each was interrupted meanwhile."""
        self.connections: Connections
        """The connections of its clients; set once this object exists, because they call its methods."""
        self._events: dict[int, EventLog] = {}
        """torchelastic's events of the last jobs to which no result refers."""
        self._local = local
        self._hub = local.hub
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="nblaunch-work")
        self._closed = False
        self._methods: dict[type, Callable[[ClientConnection, Any], _Served]] = {
            wire.OpenRanks: self._open,
            wire.SubmitJob: self._submit_job,
            wire.WatchJob: self._watch,
            wire.UnwatchJob: self._unwatch,
            wire.InterruptJob: self._interrupt_job,
            wire.InterruptSession: self._interrupt_session,
            wire.RanksRevived: self._ranks_revived,
            wire.Reply: self._reply,
            wire.CloseSession: self._close_session,
            wire.RestartSession: self._restart,
            wire.StacksOf: self._stacks_of,
            wire.DescribeSessions: self._describe,
            wire.ListJobs: self._list_jobs,
            wire.EventsOf: self._events_of,
            wire.LateOf: self._late_of,
            wire.AttachSession: self._attach,
            wire.TryFork: self._try_fork,
            wire.ListenAgain: self._listen_again,
            wire.Stop: self._stop_all,
            wire.Taken: self._taken,
        }

    # --- from the connections ------------------------------------------------------------------------

    def handle(self, connection: ClientConnection, number: int, request: wire.ClientRequest) -> None:
        self._refuse_if_unused()
        served = self._methods[type(request)](connection, request)
        if callable(served):
            self._submit(functools.partial(self._wait_for, served, connection, number))
        elif served is not None:
            connection.answer(number, served)

    def _submit(self, act: Callable[[], None]) -> None:
        """Call `act` on a thread of the pool. Raises `LaunchError` if it will not be called."""
        claimed = threading.Lock()

        def once() -> None:
            if claimed.acquire(blocking=False):
                act()

        try:
            self._pool.submit(once)
        except RuntimeError as error:
            # It may be queued all the same: the pool starts a thread after that, and the system may refuse.
            if not claimed.acquire(blocking=False):
                return
            if self._closed:
                msg = "nblaunch's runtime is ending. Run this again: the next use starts another one."
                raise LaunchError(msg, phase="runtime") from error
            msg = (
                f"nblaunch's runtime needs a thread for this, and the system refuses: {error}. Nothing was "
                "run. Raise the limit on processes (ulimit -u, pids.max of the container)."
            )
            raise LaunchError(msg, phase="runtime", kind=FailureKind.PROCESS_LIMIT) from error

    def _wait_for(
        self, served: Callable[[], wire.AnswerToClient | None], connection: ClientConnection, number: int
    ) -> None:
        """Answer a request once that is possible; on a thread of the pool."""
        try:
            answer = served() or wire.Done()
        except Exception as error:  # noqa: BLE001 - the client raises it
            if not isinstance(error, NblaunchError):
                _log.exception("a request could not be carried out")
            answer = wire.RequestFailed(error=wire.ErrorRecord.of(error))
        self._hub.call(functools.partial(connection.answer, number, answer))

    def note(self, note: wire.ClientNote) -> None:
        if isinstance(note, wire.ReleaseJob):
            self._results_gone(note.job, note.pid, 1)
        elif self._fresh.pop(note.session, None) is not None:
            pass  # a run that was not begun
        elif (session := self.sessions.pop(note.session, None)) is not None:
            session.group.post(Trigger.DISMISS)
            self._over(session)

    def welcome(self, connection: ClientConnection, _: wire.Introduce) -> wire.RuntimeWelcome:
        self._refuse_if_unused()
        owner, self._owned = not self._owned, True
        return wire.RuntimeWelcome(
            client=connection.number,
            pid=os.getpid(),
            token=self._token if owner else "",
        )

    def listen(self) -> None:
        root = self._local.directory.root()
        self.connections.listen(root / "client")
        self.connections.listen_for_notes(root / "notes")

    def listen_if_gone(self) -> None:
        with contextlib.suppress(OSError, NblaunchError):  # there is no room now; it is tried again
            root = self._local.directory.root()
            if not all((root / name).exists() for name in ("client", "notes")):
                self.listen()

    def lost(self, connection: ClientConnection) -> None:
        pid = connection.record.pid
        last = all(each.record.pid != pid for each in self.connections)
        for job in list(self.jobs.values()):
            given = job.owner is connection
            job.leave(connection)
            if given and job.order.internal:
                self._released(job.number)  # nobody else will release it
            if last and job.results[pid]:
                self._results_gone(job.number, pid, job.results[pid])
        for session in self.sessions.values():
            session.leave(connection)
        self.changed.set()

    def caught_up(self, connection: ClientConnection) -> None:
        for job in self.jobs.values():
            if connection in job.watchers:
                connection.event(job.refreshed(connection))

    def close(self) -> None:
        """End all sessions; on a thread that may wait."""
        threads = [threading.Thread(target=session.close) for session in self.sessions.values()]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- fresh ranks ---------------------------------------------------------------------------------

    def _run_fresh(self, connection: ClientConnection, order: wire.JobOrder, ranks: FreshRanks) -> _Served:
        # The job is there at once, so that an interrupt finds it.
        job = RunningJob(order, connection, connection.record, self._local.directory.root)
        self.jobs[job.number] = job
        # On the nodes of a session, where these ranks would have the same: nothing is asked for.
        held = (session.nodes for session in self.sessions.values())
        ranks.nodes = next((each for each in held if each is not None and each.fit(order.options)), None)
        ranks.notify = self._notifier(connection)
        return functools.partial(self._start_fresh, job, ranks)

    def _notifier(self, connection: ClientConnection) -> Callable[[str], None]:
        def notify(text: str) -> None:
            self._hub.call(lambda: connection.event(Noticed(text=text)))

        return notify

    def _start_fresh(self, job: RunningJob, ranks: FreshRanks) -> wire.AnswerToClient:
        try:
            made = ranks.take(job.order)
        except BaseException:
            ranks.used()
            self._hub.call(lambda: self._released(job.number))
            raise

        def over() -> None:
            made.group.close()
            ranks.used()

        def begin() -> None:
            job.private_logs = made.logs
            job.when_over.append(lambda: self._in_background(over))
            job.begin(self._hub, made.group, ranks.place.prepare)

        try:
            self._hub.run(begin)
        except BaseException:
            over()
            self._hub.call(lambda: self._released(job.number))
            raise
        return wire.Submitted()

    def _in_background(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the runtime ends
            self._pool.submit(act)

    # --- jobs ----------------------------------------------------------------------------------------

    def _submit_job(self, connection: ClientConnection, request: wire.SubmitJob) -> _Served:
        fresh = self._fresh.pop(request.session, None)
        if fresh is not None:
            return self._run_fresh(connection, request.order, fresh)
        session = self._session(request.session)
        session.refuse_other_versions(connection)
        if not request.order.query:
            session.refuse_unless_owner(connection)
            session.take_jobs_of(connection)
        # Clients do not know of jobs that only query a rank.
        query = session.running if session.running is not None and session.running.order.query else None
        if query is None and not session.group.life.regroup_awaited:
            return self._begin(session, connection, request)
        self._waiting_jobs[request.order.number] = False
        return functools.partial(self._submit_after, query, session, connection, request)

    def _submit_after(
        self,
        query: RunningJob | None,
        session: RuntimeSession,
        connection: ClientConnection,
        request: wire.SubmitJob,
    ) -> wire.AnswerToClient:
        """Submit a job to a session once a query of a rank has ended, and its ranks have their numbers.

        On a thread of the pool.
        """
        if query is not None and not query.ended.wait(_QUERY_SECONDS):
            self._hub.call(query.interrupt)
            query.ended.wait(_QUERY_ENDS_SECONDS)
        deadline = time.monotonic() + _REGROUP_SECONDS
        while session.group.life.regroup_awaited and time.monotonic() < deadline:
            if session.group.closed.wait(0.01):
                break
        answers: list[wire.AnswerToClient] = []
        self._hub.run(lambda: answers.append(self._begin_late(session, connection, request)))
        return answers[0]

    def _begin_late(
        self, session: RuntimeSession, connection: ClientConnection, request: wire.SubmitJob
    ) -> wire.AnswerToClient:
        interrupted = self._waiting_jobs.pop(request.order.number, False)
        if not request.order.query:
            # While it waited, another process may have taken the session.
            session.refuse_unless_owner(connection)
        answer = self._begin(session, connection, request)
        job = self.jobs.get(request.order.number)
        if interrupted and job is not None:
            job.interrupt()
        return answer

    def _begin(
        self, session: RuntimeSession, connection: ClientConnection, request: wire.SubmitJob
    ) -> wire.AnswerToClient:
        session.refuse_if_busy()
        if request.attempt is not None and request.attempt != session.group.attempt:
            return wire.Stale()
        if session.nodes is not None and decode_state(request.order.state).world_size != session.world_size:
            return wire.Stale()
        root = self._local.directory.root
        job = RunningJob(request.order, connection, connection.record, root, session.tenure)
        self.jobs[job.number] = job
        if session.nodes is not None:
            session.nodes.learn(request.order)
        session.submit(self._hub, job, self.jobs)
        return wire.Submitted()

    def _past(self, number: int) -> PastJob | None:
        found = (session.archive.get(number) for session in self.sessions.values())
        return next(filter(None, found), None)

    def _watch(self, connection: ClientConnection, request: wire.WatchJob) -> _Served:
        past = self._past(request.job)
        if past is not None:
            return past.snapshot
        job = self._job(request.job)
        job.watchers.add(connection)
        job.results[connection.record.pid] += 1
        return job.snapshot(connection)

    def _unwatch(self, connection: ClientConnection, request: wire.UnwatchJob) -> _Served:
        job = self.jobs.get(request.job)
        if job is not None:
            job.watchers.discard(connection)
            job.taken_by(connection)
        return wire.Done()

    def _interrupt_job(self, connection: ClientConnection, request: wire.InterruptJob) -> _Served:
        job = self.jobs.get(request.job)
        if request.job in self._waiting_jobs:
            self._waiting_jobs[request.job] = True
        # One that has lost the session may not know that yet.
        if job is not None and job.is_of(connection):
            job.interrupt()
        return None

    def _ranks_revived(self, _: ClientConnection, request: wire.RanksRevived) -> _Served:
        self._session(request.session).ranks_revived(request.ranks, request.attempt)
        return wire.Done()

    def _interrupt_session(self, connection: ClientConnection, request: wire.InterruptSession) -> _Served:
        session = self._session(request.session)
        session.refuse_unless_owner(connection)
        session.interrupt()
        return wire.Done()

    def _reply(self, connection: ClientConnection, request: wire.Reply) -> _Served:
        job = self.jobs.get(request.job)
        if job is not None and job.is_of(connection):
            job.reply(request.rank, request.answer)
        return None

    def _events_of(self, _: ClientConnection, request: wire.EventsOf) -> _Served:
        job = self.jobs.get(request.job) or self._past(request.job)
        events = job.events if job is not None else self._events.get(request.job)
        if events is None:
            raise NblaunchError(_unknown(request.job))
        return lambda: wire.JobEvents(events=events.all())

    def _late_of(self, _: ClientConnection, request: wire.LateOf) -> _Served:
        past = self._past(request.job)
        if past is not None:
            return wire.LateWarnings(texts=tuple(past.late))
        job = self._job(request.job)
        over = job.group is None or job.group.keep or job.group.closed.is_set()
        return wire.LateWarnings(texts=tuple(job.late), complete=over)

    def _taken(self, connection: ClientConnection, request: wire.Taken) -> _Served:
        job = self.jobs.get(request.job)
        if job is not None:
            job.taken_by(connection)
        for session in self.sessions.values():
            # Those that watch map them too: the owner may not have them yet.
            if session.other_owner(connection) is None:
                session.archive.taken(request.job)
        return None

    def _results_gone(self, number: int, pid: int, count: int) -> None:
        job = self.jobs.get(number)
        if job is not None:
            job.results -= Counter({pid: count})  # which keeps none that are 0
        if job is None or not job.results:
            self._released(number)

    def _released(self, number: int) -> None:
        if any(each.keeps(number) for each in self.sessions.values()):
            return
        job = self.jobs.get(number)
        if job is not None and job.group is not None and job.end is None:
            # Its client has left it alone: nothing of it goes before it has ended.
            job.when_over.append(functools.partial(self._released, number))
            return
        job = self.jobs.pop(number, None)
        if job is None:
            return
        job.drop_values()
        if not job.order.internal:
            self._events[number] = job.events
            while len(self._events) > _RELEASED_EVENTS:
                self._events.pop(next(iter(self._events)))
        if job.private_logs is not None:
            self._in_background(functools.partial(remove_tree, job.private_logs))
        job.let_go()
        ended, self._ended = self._ended, []
        for session in ended:
            self._over(session)

    def _job(self, number: int) -> RunningJob:
        job = self.jobs.get(number)
        if job is None:
            raise NblaunchError(_unknown(number))
        return job

    # --- sessions ------------------------------------------------------------------------------------

    def _open(self, connection: ClientConnection, request: wire.OpenRanks) -> _Served:
        caller = wire.Caller(connection.record.pid, connection.record.name)

        def make() -> wire.AnswerToClient:
            # First of all: a client whose runtime turns out to be ending asks another one: nothing is lost.
            self._local.server.ensure_running()
            there, attempt = place(request, self._local), 0
            if request.name:
                attempt = self._open_session(connection, request, there, caller)
            else:
                self._fresh[request.session] = FreshRanks(self._local, request, there, caller)
            return wire.Opened(placement=there.placement, unheeded=there.unheeded, attempt=attempt)

        return make

    def _open_session(
        self, connection: ClientConnection, request: wire.OpenRanks, there: PlacedRanks, caller: wire.Caller
    ) -> int:
        """Make the ranks of a session; return their attempt."""
        record = connection.record
        owner = Owner(record.pid, record.name, record.notebook)
        self._registration.add(request.name, owner, detached=request.detached)
        try:
            ranks = session_ranks(self._local, request, there, caller, self._notifier(connection))
        except BaseException:
            if request.detached:
                self._registration.remove()
            raise
        archive = Archive(self._local.directory.root(), keep=request.detached)
        session = RuntimeSession(request, ranks, connection, archive)
        session.unused = self.changed.set
        if request.detached:
            self._local.server.detach()
        self._hub.run(lambda: self._add_session(session, connection))
        return session.group.attempt

    def _add_session(self, session: RuntimeSession, connection: ClientConnection) -> None:
        if connection.closed:
            session.group.stop()
            if session.detached:
                self._stop()
            msg = f"the client that has asked for session {session.name!r} is gone"
            raise LaunchError(msg, phase="job")
        self.sessions[session.key] = session

    def _close_session(self, _: ClientConnection, request: wire.CloseSession) -> _Served:
        session = self.sessions.pop(request.session, None)
        if session is None:
            return wire.Done()
        self._closing += 1

        def close() -> None:
            try:
                session.close()
            finally:
                self._closing -= 1
            self._hub.call(lambda: self._over(session))
            if session.detached:
                # It was all that this runtime was for.
                self._stop()

        return close

    def _over(self, session: RuntimeSession) -> None:
        """Forget the jobs of a session that is over, and its private logs once no result refers to them."""
        session.archive.close()
        if session.made.logs is None:
            return
        if session.unreleased:
            self._ended.append(session)
        else:
            self._in_background(functools.partial(remove_tree, session.made.logs))

    def _restart(self, connection: ClientConnection, request: wire.RestartSession) -> _Served:
        session = self._session(request.session)
        session.refuse_unless_owner(connection)

        return session.restart

    def _stacks_of(self, _: ClientConnection, request: wire.StacksOf) -> _Served:
        session = self._session(request.session)
        return lambda: wire.StacksReport(report=session.group.where(request.seconds))

    def _describe(self, _: ClientConnection, request: wire.DescribeSessions) -> _Served:
        wanted = [each for name, each in self.sessions.items() if request.session in ("", name)]
        return lambda: wire.Sessions(sessions=tuple(each.record() for each in wanted))

    def _list_jobs(self, _: ClientConnection, request: wire.ListJobs) -> _Served:
        return wire.JobList(jobs=self._session(request.session).job_records())

    def _attach(self, connection: ClientConnection, request: wire.AttachSession) -> _Served:
        session = self._session(request.session)
        session.follow(connection, take=request.take)
        other = session.other_owner(connection)
        held_by = None if other is None else other.record

        def attached() -> wire.AnswerToClient:
            return wire.Opened(
                session=session.key,
                placement=session.placement,
                attempt=session.group.attempt,
                options=session.options,
                names=tuple(session.group.names.values()),
                reborn=session.group.reborn,
                held_by=held_by,
                watches_only=connection.why_it_only_watches(session.name),
            )

        return attached

    def _stop(self) -> None:
        self.stopping = True
        self.changed.set()

    def linger_left(self) -> float | None:
        """Return in how many seconds this runtime ends by itself, or None if it does not.

        Nobody would find one whose owner has gone before it opened a session that outlives it.
        """
        detached = any(session.detached for session in list(self.sessions.values()))
        if self.owner is not None and self.owner.closed and not detached and not self._closing:
            return 0.0
        left = [session.linger_left for session in list(self.sessions.values())]
        known = [each for each in left if each is not None]
        return max(known) if known and len(known) == len(left) else None

    def end_if_unused(self) -> None:
        left = self.linger_left()
        self.unused = left is not None and left <= 0

    def _refuse_if_unused(self) -> None:
        if self.unused:
            msg = (
                "the session has just ended: nobody has used it for its --linger time. Start another one "
                "(%distributed start)."
            )
            raise LaunchError(msg, phase="runtime", kind=FailureKind.SESSION_ENDED)

    def _try_fork(self, _: ClientConnection, request: wire.TryFork) -> _Served:
        server, seconds, wanted = self._local.server, request.seconds, request.architectures
        return lambda: wire.Forked(architectures=try_fork(server, seconds, architectures=wanted))

    def _listen_again(self, _: ClientConnection, __: wire.ListenAgain) -> _Served:
        self.listen()
        return wire.Done()

    def _stop_all(self, _: ClientConnection, __: wire.Stop) -> _Served:
        def stop() -> None:
            self.close()
            self._stop()

        return stop

    def _session(self, name: str) -> RuntimeSession:
        session = self.sessions.get(name)
        if session is None:
            raise LaunchError(session_ended(name), phase="job", kind=FailureKind.SESSION_ENDED)
        return session


def _unknown(number: int) -> str:
    return (
        f"job {number} is not known here: it was released, or never begun. Look in session.jobs for those "
        "that a detached session keeps."
    )
