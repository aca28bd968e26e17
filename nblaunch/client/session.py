"""A session: ranks that stay, and keep their variables from one job to the next."""

from __future__ import annotations

import contextlib
import functools
import itertools
import keyword
import os
import pickle
import platform
import queue
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from nblaunch import _notebook
from nblaunch._errors import LaunchError, NblaunchError, OptionError, RunFailedError
from nblaunch._help import FailureKind
from nblaunch._notebook import ask_rank
from nblaunch._registry import RuntimeEntry
from nblaunch._results import Outcome, Perform, RunResult, SessionStatus, held_by
from nblaunch.capture.capture import Captured, capture_call, capture_cell, capture_values, notebook_names
from nblaunch.capture.names import CellNames
from nblaunch.client.knowledge import Knowledge, KnowledgeView, notices
from nblaunch.client.line import ClientLine, deferring_interrupts
from nblaunch.client.local import Runtime, local
from nblaunch.client.preparation import (
    ClientJob,
    JobRanks,
    RankPayload,
    function_job,
    opening,
    refuse_inside_rank,
    with_whole_paths,
)
from nblaunch.client.run import SilentView, StaleError, run_job, watch_job
from nblaunch.client.scripts import is_script, refuse_in_session
from nblaunch.insight.comparing import Round, compare, size_of
from nblaunch.insight.difference import Difference
from nblaunch.options.launch import LaunchOptions, within
from nblaunch.protocol import client as wire
from nblaunch.protocol.messages import CellJob, FunctionJob, LastKnown, Objects, PullJob, PushJob, Revived
from nblaunch.protocol.reports import HangReport, format_ranks, session_busy, session_ended
from nblaunch.protocol.state import View

_CLOSE_SECONDS = 10.0
# Peers of a rank whose user reads a debugger's prompt wait for longer than torch's half an hour.
_COLLECTIVE_SECONDS = 86_400.0
# How long a job waits for a completion whose answer the notebook no longer expects: machines are busy.
_BRIEF_SECONDS = 30.0
_ANSWER_SECONDS = 0.5
_COMPLETE_SECONDS = 2.0
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*$")


def silent(title: str, backend: str) -> View:  # noqa: ARG001 - as every `watch` of a session
    return SilentView()


def start_session(
    options: LaunchOptions, *, name: str = "default", watch: Callable[[str, str], View] = silent
) -> LiveSession:
    """Start ranks and wait until they are ready; raises `LaunchError` if they cannot be started."""
    if options.nodes[1] > 1 and options.on is None:
        msg = (
            f"nnodes={options.nnodes!r}: without an engine a session has one node. Add --on (on=), or run "
            "the cell on fresh ranks (%%distributed --nnodes 2 ...)."
        )
        raise OptionError(msg)
    # Before a runtime is started, of which a rank has none.
    refuse_inside_rank()
    options = with_whole_paths(options, "metrics_file")
    runtime: Runtime = local().detached() if options.detach else local().runtime
    try:
        key = name if options.detach else f"{name} {runtime.number()}"
        logged = with_whole_paths(options, "log_dir")
        request = opening(logged, key, name=name, timeout=_COLLECTIVE_SECONDS, detached=options.detach)
        line, opened = _opened(runtime, request)
    except BaseException:
        if options.detach:
            runtime.stop()
        raise
    opened = msgspec.structs.replace(opened, session=key, options=options)
    notes = list(filter(None, (opened.unheeded, opened.placement.warning)))
    session = LiveSession(name, runtime, line, opened, watch, notes, detached=options.detach)
    try:
        session.start()
    except BaseException:
        session.close()
        raise
    return session


def attach_session(
    entry: RuntimeEntry, *, take: bool = False, watch: Callable[[str, str], View] = silent
) -> LiveSession:
    """Follow a detached session, and own it unless another client does; `take` takes it over."""
    runtime = local().attached(entry)
    try:
        line = runtime.take_line()
        answer = line.ask(wire.AttachSession(session=entry.name, take=take))
    except BaseException:
        runtime.abandon()
        raise
    notes = [_own_variables(entry.name)]
    return LiveSession(entry.name, runtime, line, answer, watch, notes, detached=True)


def _own_variables(name: str) -> str:
    """Return the notice for the first job that a client submits to the ranks of others."""
    return (
        f"attached to session {name!r}: the ranks' own variables count. %distributed push NAME sends the "
        "notebook's."
    )


class LiveSession:
    """Persistent ranks; one job at a time.

    A job is prepared (captured, and refused if it cannot run), then performed: `prepare_cell` and
    `prepare_call` return what performs it, on this thread or on that of a `Handle`.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the ranks, the connection to them, and who they are for
        self,
        name: str,
        runtime: Runtime,
        line: ClientLine,
        opened: wire.Opened,
        watch: Callable[[str, str], View],
        notes: list[str],
        *,
        detached: bool,
    ) -> None:
        """Submit jobs to ranks that are there, or are being started.

        `watch(title, backend)` makes what shows a job.
        """
        self.name = name
        self._key = opened.session
        self._ranks = JobRanks(runtime, opened.session, open=True)
        self.options = opened.options or LaunchOptions()
        self._grace = self.options.grace
        """That of the last job."""
        self.placement = opened.placement
        self.detached = detached
        """Whether the ranks outlive this process."""
        self.watch = watch
        self.failed_last = 0
        """The rank whose failure was the last root cause."""
        self._busy = threading.Lock()
        self._brief = False
        """Whether the user does not know of the job that holds `_busy`."""
        self._reading = threading.Lock()
        """Held while a thread reads from the session's connection."""
        self._runtime = runtime
        self._line = line
        self._attempt = opened.attempt
        self._names = {each.rank: each for each in opened.names}
        self.times_lost = 0
        """How often ranks have lost variables that did not come back."""
        self._reborn = opened.reborn
        """Ranks that were started again, before they have got variables from the others."""
        self._notes = notes
        """For the next job whose result the user sees."""
        self.after_job: Callable[[], None] = lambda: None
        """Called when a job of the user's has succeeded."""
        # Ranks that another client has sent objects know those by its keys.
        self._keys = itertools.count(self._runtime.number())
        self._knowledge = Knowledge(self._keys)
        self._jobs = 0
        self._ended, self.why_ended = False, ""
        self._held_by = opened.held_by
        """Another client, the owner."""
        self._watches_only = opened.watches_only
        self._owns = opened.held_by is None and not opened.watches_only
        """Whether this process is the owner; any client may submit to a session without one."""
        self._losses = 0
        """How often another client has taken the session over."""
        self._finalizer = weakref.finalize(
            self, _release_ranks, self._ranks, self._line, dismiss=not self.detached
        )
        self._finalizer.atexit = False

    @property
    def world_size(self) -> int:
        """The number of ranks; it changes when nodes come or are lost."""
        self._take_events()
        return self.placement.nproc

    @property
    def attempt(self) -> int:
        """The number of the attempt that the present ranks belong to."""
        self._take_events()
        return self._attempt

    @property
    def open(self) -> bool:
        """Whether there are ranks, or will be."""
        self._take_events()
        return not self._ended

    @property
    def owns(self) -> bool:
        """Whether this process is the owner. One that is not watches."""
        self._take_events()
        return self._owns

    @property
    def held_by(self) -> wire.ClientRecord | None:
        """Another client, the owner; None if this process does, or none."""
        self._take_events()
        return self._held_by

    @property
    def busy(self) -> bool:
        return self._busy.locked()

    # --- jobs --------------------------------------------------------------------------------------

    def prepare_call(  # noqa: PLR0913 - what a call is
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        options: LaunchOptions | None = None,
        anew: bool = False,
    ) -> Perform:
        """Capture a call of `fn`; it is made when the returned function is called.

        `options` are the call's own. With `anew` the ranks get copies also of what they have got before.
        """
        target: object = fn
        if is_script(target):
            raise refuse_in_session(target, self.name)
        work = function_job(target, args)
        namespace = _namespace_of(fn)
        job = self._job(work, work.name, ranks, options)
        if anew:
            job.payloads = (RankPayload(capture_call(fn, tuple(args), dict(kwargs or {}), namespace)),)
            return self._prepared(job)

        def capture(view: KnowledgeView) -> Captured:
            return capture_call(fn, tuple(args), dict(kwargs or {}), namespace, view)

        self._capture(job, capture, namespace)
        return self._prepared(job)

    def prepare_cell(
        self,
        work: CellJob,
        names: CellNames,
        namespace: dict[str, Any],
        *,
        ranks: Sequence[int] | None = None,
        options: LaunchOptions | None = None,
    ) -> Perform:
        """Capture what a cell uses; the cell runs when the returned function is called."""

        def capture(view: KnowledgeView) -> Captured:
            return capture_cell(names, namespace, known=view)

        job = self._job(work, "cell", ranks, options)
        self._capture(job, capture, namespace)
        return self._prepared(job)

    def push(self, variables: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> tuple[str, ...]:
        """Give the ranks variables; names that refer to one object go on referring to one. Return notices.

        An object that the ranks have from the notebook is filled with its present content, so that whatever
        refers to it there follows.
        """
        for name in variables:
            if not str(name).isidentifier() or keyword.iskeyword(name):
                msg = f"push: {name!r:.100} is not a valid Python identifier."
                raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
            if name not in notebook_names(variables):
                msg = f"push: each rank has its own {name}. Use another name."
                raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
        namespace = _notebook.namespace()
        if namespace is None:
            namespace = self._knowledge.namespace

        def capture(view: KnowledgeView) -> Captured:
            return capture_values(dict(variables), namespace, view)

        job = self._job(PushJob(), "push", ranks)
        job.internal = True
        self._capture(job, capture, namespace, variables)
        return self._perform(job).unwrap().warnings

    def pull(self, *names: str, ranks: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return each variable as a list in rank order. Raises `NblaunchError` for one that a rank lacks."""
        if not names:
            msg = "pull: there is no name. Name the variables: pull('loss', 'model')."
            raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
        job = self._job(PullJob(names=tuple(names)), "pull", ranks)
        job.internal = True
        outcome = self._perform(job)
        root = outcome.result.root_cause
        if root is not None and root.type.endswith("NameError"):
            lacking = [each.rank for each in outcome.result.failures]
            msg = f"pull: {root.message.replace('on this rank', f'({format_ranks(lacking)})')}"
            raise NblaunchError(msg, kind=FailureKind.NO_SUCH_VARIABLE) from None
        values = outcome.unwrap().values
        return {name: [of_rank[place] for of_rank in values] for place, name in enumerate(names)}

    def _internal(
        self,
        title: str,
        fn: Callable[..., Any],
        *args: object,
        rank: int = 0,
        brief: bool = False,
        query: bool = True,
    ) -> Outcome:
        """Call a function of ours on one rank, and show nothing: the user did not start a run."""
        job = self._query(title, [rank], fn, *args)
        job.brief, job.query = brief, query
        return self._perform(job)

    def _query(
        self, title: str, ranks: Sequence[int], fn: Callable[..., Any], *args: object, **keywords: object
    ) -> ClientJob:
        """Return a job that calls a function of ours, which only queries ranks."""
        job = self._job(FunctionJob(name=title), title, ranks)
        job.payloads, job.internal, job.query = (
            (RankPayload(capture_call(fn, args, keywords, None)),),
            True,
            True,
        )
        return job

    def ask_all(self, title: str, question: str, *args: object, **keywords: object) -> Outcome:
        """Have all ranks save or load; shown is what comes of it."""
        self._refuse_if_held()
        job = self._query(title, range(self.world_size), ask_rank, "saving", question, *args, **keywords)
        # Not a query, which another client's query would interrupt.
        job.query, job.options = False, replace(self.options, timeout=None)
        return self._perform(job)

    def take_restored(self, names: Iterable[str]) -> None:
        """Note that the ranks have these variables from a save."""
        self._knowledge.begin(self._attempt, self.world_size)
        self._knowledge.restored(names, _notebook.namespace() or {})

    def _revive(self) -> None:
        """Have ranks that were started again get variables from the others; while this job holds the ranks.

        Before anything is sent to them: they would get what the others have changed since.
        """
        self._take_events()
        while self._reborn and self.held_by is None and not self._watches_only:
            reborn, self._reborn = self._reborn, {}
            attempt = self._attempt
            try:
                found, failed = self._revived(attempt, reborn)
            except StaleError:
                self._take_events()
                continue
            except KeyboardInterrupt:
                self._reborn = reborn
                raise
            if self._attempt != attempt:
                continue
            came = {rank: known for rank, known in reborn.items() if rank not in failed}
            if found is not None and came:
                self._knowledge.revived(came, found)
                if text := _describe_revived(came, found):
                    self.note(text)
            for why in set(failed.values()):
                self.note(f"{format_ranks(failed)} got no variables from the other ranks: {why}")
            self.times_lost += bool(failed or (found is not None and found.lost))
            self._runtime.ask(wire.RanksRevived(session=self._key, ranks=tuple(reborn), attempt=attempt))

    def _revived(
        self, attempt: int, reborn: Mapping[int, LastKnown]
    ) -> tuple[Revived | None, Mapping[int, str]]:
        """Return what these ranks have got from others, and why some of them have got nothing."""
        token, ranks = secrets.token_hex(8), range(self.placement.nproc)
        outcome = self._ask_revival(attempt, ranks, "revive", token, reborn)
        if outcome.error is not None:
            return None, dict.fromkeys(reborn, _why_failed(outcome))
        found: Revived
        found, far, parts = next(filter(None, outcome.result.values))
        if far:
            buffers, sources = list(map(pickle.PickleBuffer, parts)), len(ranks) - len(reborn)
            outcome = self._ask_revival(attempt, far, "take", token, buffers, reborn, sources)
            if outcome.error is not None:
                return found, dict.fromkeys(far, _why_failed(outcome))
            for lost, keys in outcome.result.values:
                found = found.less(lost, keys)
        return found, {}

    def _ask_revival(self, attempt: int, ranks: Sequence[int], question: str, *args: object) -> Outcome:
        """Ask ranks of this attempt. Raises `StaleError` if it is over."""
        job = self._query("revive", ranks, ask_rank, "revival", question, *args)
        job.query, job.options, job.attempt = False, replace(self.options, timeout=None), attempt
        job.line, job.others, job.private = self._line, self._take, self.detached
        self._jobs += 1
        with self._reading:
            outcome = run_job(job, silent(job.title, job.backend))
        if isinstance(outcome.error, KeyboardInterrupt):
            raise outcome.error
        return outcome

    def note(self, text: str) -> None:
        """Say this with the next job whose result the user sees."""
        self._notes.append(text)

    def taken_notes(self) -> tuple[str, ...]:
        """Return what was to be said, which is said now."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def diff(self, *names: str, env: bool = False, ranks: Sequence[int] | None = None) -> Difference:
        """Compare variables of the ranks, and with `env` what they run in."""
        if not names and not env:
            msg = "diff: there is no name. Name the variables (diff('model', 'step')), or ask for env=True."
            raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
        wrong = next((name for name in names if not all(map(str.isidentifier, _steps_of(name)))), None)
        if wrong is not None:
            msg = (
                f"diff: {wrong!r:.100} is not the name of a variable or attribute. Write model or model.head."
            )
            raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
        self._refuse_if_busy()
        with self._busy:
            self._brief = False
            chosen, token, moved = self._chosen(ranks), secrets.token_hex(8), 0
            rounds = compare(chosen, names, env=env)
            asked = next(rounds)
            while True:
                answers = self._answers(token, asked)
                moved += sum(map(size_of, answers.values()))
                try:
                    asked = rounds.send(answers)
                except StopIteration as end:
                    report: Difference = end.value
                    return replace(report, moved=moved)
                except LookupError as error:
                    msg = f"diff: {error.args[0]}"
                    raise NblaunchError(msg, kind=FailureKind.NO_SUCH_VARIABLE) from None

    def _answers(self, token: str, asked: Round) -> dict[int, Any]:
        job = self._query("diff", asked.ranks, ask_rank, "shell", "answer_comparison", token, asked.ask)
        outcome = self._run(job)
        root = outcome.result.root_cause
        if root is not None and root.type == "builtins.LookupError":
            msg = f"diff: {root.message}"
            raise NblaunchError(msg, kind=FailureKind.NO_SUCH_VARIABLE)
        return dict(zip(asked.ranks, outcome.unwrap().values, strict=True))

    def _prepared(self, job: ClientJob) -> Perform:
        self._refuse_if_busy()
        return functools.partial(self._perform, job)

    def claim(self) -> None:
        """Take the ranks for a job in the background, on its thread; the job's end releases them."""
        while not self._busy.acquire(blocking=False):
            self._refuse_if_busy()
        self._brief = False

    def _refuse_if_busy(self) -> None:
        """Raise `NblaunchError` while a job of the user's runs; wait for the end of another one."""
        deadline = time.monotonic() + _BRIEF_SECONDS
        while self._brief and self.busy and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.busy:
            raise NblaunchError(session_busy(self.name), kind=FailureKind.SESSION_BUSY)

    def _perform(self, job: ClientJob, cancelled: threading.Event | None = None) -> Outcome:
        """Run a job while holding the ranks; `cancelled` is that of a job that has claimed them."""
        if cancelled is None:
            self._refuse_if_busy()
            # The one way to take and release a lock that no interrupt comes between.
            with self._busy:
                self._brief = job.brief
                outcome = self._run(job)
        else:
            try:
                outcome = self._run(job, cancelled)
            finally:
                self._busy.release()
        if not job.internal and outcome.error is None:
            try:
                self.after_job()
            except KeyboardInterrupt as error:
                return replace(outcome, error=error)
        return outcome

    def _run(
        self, job: ClientJob, cancelled: threading.Event | None = None, view: View | None = None
    ) -> Outcome:
        self._chosen(job.subset)
        self._refuse_if_ended()
        if not job.query:
            self._refuse_if_held()
        if job.options is not self.options:
            job.options = with_whole_paths(job.options, "metrics_file")
        view = view or (silent if job.internal else self.watch)(job.title, job.backend)
        job.line, job.others, job.private = self._line, self._take, self.detached
        while True:
            if not job.brief:
                self._revive()
            notes = [] if job.internal else self._notes
            # Since the capture, ranks may have been replaced, and their number may have changed.
            job.placement = self.placement
            job.subset = None if job.subset is None else self._chosen(job.subset)
            if job.captured_for is not None:
                self._capture_for_now(job)
            self._jobs += 1
            self._grace = job.options.grace

            def lost(before: int = self._losses) -> bool:
                return self._losses != before

            job.watching = lost
            job.notices = (*notices(view for view, _ in job.deliveries), *notes)
            try:
                with self._reading:
                    outcome = run_job(job, view, cancelled)
            except StaleError:
                self._take_events()
                continue
            notes.clear()
            if outcome.result.root_cause is not None and not job.internal:
                self.failed_last = outcome.result.root_cause.rank
            return outcome

    def _job(
        self,
        work: CellJob | FunctionJob | PushJob | PullJob,
        title: str,
        ranks: Sequence[int] | None = None,
        options: LaunchOptions | None = None,
    ) -> ClientJob:
        return ClientJob(
            title=title,
            options=self.options if options is None else within(self.options, options),
            placement=self.placement,
            ranks=self._ranks,
            work=work,
            subset=None if ranks is None else tuple(ranks),
        )

    def _take(self, event: object) -> None:
        match event:
            case wire.NamesChanged(session=self._key, names=names):
                self._names[names.rank] = names
                if names.lost:
                    self._knowledge.lost({names.rank: names.lost})
            case wire.RanksReplaced(session=self._key, attempt=attempt, world_size=size, backend=backend):
                self._attempt, self._names, self._reborn = attempt, {}, {}
                self.times_lost += 1
                backend = backend or self.placement.backend
                self.placement = replace(self.placement, nproc=size, backend=backend)
            case wire.RanksRenumbered(session=self._key):
                self._renumber(event)
            case wire.SessionEnded(session=self._key, why=why):
                self._ended, self.why_ended = True, why
                self._ranks.open = False
                self._runtime.send_notes()
            case wire.OwnerChanged(session=self._key, by=by):
                self._take_owner(by)

    def _renumber(self, event: wire.RanksRenumbered) -> None:
        known = self._names
        self._names = {
            rank: msgspec.structs.replace(known[before], rank=rank)
            for rank, before in event.kept.items()
            if before in known
        }
        failed = self.failed_last
        self.failed_last = next((rank for rank, before in event.kept.items() if before == failed), 0)
        self._knowledge.renumber(self._attempt, event.attempt, event.kept, event.world_size)
        self._attempt, self._reborn = event.attempt, event.reborn
        self.times_lost += any(
            rank not in self._reborn for rank in range(event.world_size) if rank not in event.kept
        )
        self.placement = replace(self.placement, nproc=event.world_size)

    def _take_owner(self, by: wire.ClientRecord | None) -> None:
        here = os.getpid(), platform.node()
        owned, self._owns = self._owns, by is not None and (by.pid, by.node) == here
        self._held_by = None if self._owns else by
        if owned and not self._owns:
            self._losses += 1
            # What the ranks have is no longer what this process has sent them.
            self._knowledge = Knowledge(self._keys)
            self._notes = [_own_variables(self.name)]

    def _take_events(self) -> None:
        """Take the events that have come since the last job; while a job runs, its thread takes them."""
        if self._line.closed:
            self._ended = True
        if self._line.closed or not self._line.pending():
            return
        # An interrupt between the lock and what releases it would leave it taken.
        with deferring_interrupts():
            if not self._reading.acquire(blocking=False):
                return
            try:
                while self._line.poll(0.0):
                    frame = self._line.next(0.0)
                    if frame is not None:
                        self._take(frame[2])
            except LaunchError:
                self._ended = True  # the runtime has
            finally:
                self._reading.release()

    def _refuse_if_ended(self) -> None:
        self._runtime.refuse_in_fork()
        if not self.open:
            raise LaunchError(
                session_ended(self.name, self.why_ended), phase="job", kind=FailureKind.SESSION_ENDED
            )

    def _refuse_if_held(self) -> None:
        if self._watches_only:
            raise NblaunchError(self._watches_only, kind=FailureKind.OTHER_VERSION)
        other = self.held_by
        if other is not None:
            in_notebook = _notebook.shell() is not None
            raise NblaunchError(
                held_by(self.name, other, in_notebook=in_notebook), kind=FailureKind.SESSION_TAKEN
            )

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks that take part. Raises `OptionError` for one that the session does not have."""
        if ranks is None:
            return tuple(range(self.world_size))
        chosen = tuple(sorted(set(ranks)))
        wrong = [rank for rank in chosen if not 0 <= rank < self.world_size]
        if wrong or not chosen:
            what = format_ranks(wrong) if wrong else "no rank at all"
            msg = (
                f"{what} of session {self.name!r} was asked for, but it has ranks 0 to "
                f"{self.world_size - 1}. Give some of these."
            )
            raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
        return chosen

    # --- what the ranks have -------------------------------------------------------------------------

    def _capture(
        self,
        job: ClientJob,
        capture: Callable[[KnowledgeView], Captured],
        namespace: dict[str, Any] | None,
        pushed: Mapping[str, Any] | None = None,
    ) -> None:
        """Capture once for all ranks that know the same; raises what `capture` raises."""
        chosen = self._chosen(job.subset)
        if self._reborn and not self.busy:
            with self._busy:
                self._brief = False
                self._revive()
        # Before what may be large is captured.
        self._refuse_if_held()
        job.captured_for = self._attempt, self._jobs
        self._knowledge.begin(self._attempt, self.world_size)
        payloads, deliveries = [], []
        for view in self._knowledge.views(chosen, self._names, namespace):
            captured = capture(view)
            view.find_changes()
            delivery = view.delivery(captured, pushed)
            # The objects themselves are the notebook's to keep or to free.
            captured = replace(captured, packed=replace(captured.packed, places=(), carried={}, detached=()))
            payloads.append(RankPayload(captured, view.ranks, delivery.objects))
            deliveries.append((view, delivery))
        job.payloads, job.deliveries = tuple(payloads), tuple(deliveries)
        # With the job it would be a cycle, which keeps what the job brings until it is collected.
        job.capture_again = functools.partial(
            self._capture, capture=capture, namespace=namespace, pushed=pushed
        )

    def _capture_for_now(self, job: ClientJob) -> None:
        """Capture again what a job brings if the ranks have changed since; have what arrives remembered."""
        while job.captured_for != (self._attempt, self._jobs):
            job.capture_again(job)
        job.attempt = self._attempt
        knowledge, deliveries = self._knowledge, job.deliveries

        def remember() -> None:
            for view, delivery in deliveries:
                knowledge.remember(view, delivery)

        waits = any(each.objects is not None and each.objects.wait for each in job.payloads)
        job.arrived = remember if waits else lambda: None
        if not waits:
            remember()
            return
        # Ranks that get nothing wait for those that do: the payload arrives on all of them, or on none.
        job.payloads = tuple(
            replace(each, objects=msgspec.structs.replace(each.objects or Objects(), wait=True))
            for each in job.payloads
        )

    def note_cell(self, names: Iterable[str]) -> None:
        """Note which variables a cell of the notebook has bound; forget objects that it has freed."""
        self._knowledge.bound_again(names)
        self._knowledge.sweep()

    def names(self) -> tuple[str, ...]:
        known = self._names.get(0)
        return known.names if known is not None else ()

    # --- what the runtime keeps of its jobs -------------------------------------------------------------

    @property
    def jobs(self) -> list[SessionJob]:
        """The jobs that were submitted to the session, the oldest first; the runtime keeps the last 50."""
        answer = self._runtime.ask(wire.ListJobs(session=self._key))
        return [
            SessionJob(
                **msgspec.structs.asdict(each),
                _ranks=self._ranks,
                _placement=self.placement,
                _private=self.detached,
            )
            for each in answer.jobs
        ]

    def follow(self, watch: Callable[[str, str], View] | None = None) -> Outcome | None:
        """Show the job that runs, until it has ended; None if there is none.

        An interrupt stops that, and the job goes on. `watch` makes what shows it, if that is not the
        session's own.
        """
        running = next((each for each in self.jobs if each.ended is None), None)
        if running is None:
            return None
        view = (watch or self.watch)(running.title, self.placement.backend)
        with contextlib.ExitStack() as used:
            line = self._line
            if self._reading.acquire(blocking=False):
                used.callback(self._reading.release)
            else:  # a job in the background has the session's own connection
                line = used.enter_context(self._runtime.line())
            job, snapshot = running._watched(line)  # noqa: SLF001 - of this module
            job.others = self._take
            return watch_job(job, snapshot, view)

    # --- a query of a rank between its cells -----------------------------------------------------------

    def inspect(self, name: str, *, rank: int = 0) -> str:
        """Return what `name?` shows on a rank. Raises `NblaunchError` if the rank has no such name."""
        text: str = self._internal("inspect", ask_rank, "shell", "describe", name, rank=rank).unwrap()[rank]
        if not text:
            msg = f"inspect: name {name!r} is not defined on rank {rank}."
            raise NblaunchError(msg, kind=FailureKind.NO_SUCH_VARIABLE)
        return text

    def complete(self, code: str, position: int) -> tuple[int, list[str]]:
        """Return how many characters before `position` rank 0 would replace, and by what.

        Where rank 0 does not answer in time, because it works, is stopped or is stuck, these are the names
        that it had after its last job.
        """
        if not self.open:
            return 0, []
        if self.busy or not self.owns or 0 in self._where(_ANSWER_SECONDS).silent:
            return self._known_names(code, position)
        answers: queue.SimpleQueue[tuple[int, list[str]] | None] = queue.SimpleQueue()

        def ask() -> None:
            answer = None
            with contextlib.suppress(NblaunchError):  # a job has begun meanwhile
                outcome = self._internal(
                    "complete", ask_rank, "shell", "complete", code, position, brief=True
                )
                answer = outcome.result[0] if outcome.error is None else None
            answers.put(answer)

        # On a thread of its own: a `__dir__` of the user's may take any time, and the notebook does not wait.
        threading.Thread(target=ask, name="nblaunch-complete", daemon=True).start()
        try:
            return answers.get(timeout=_COMPLETE_SECONDS) or (0, [])
        except queue.Empty:
            return self._known_names(code, position)

    def _known_names(self, code: str, position: int) -> tuple[int, list[str]]:
        begun = _NAME.search(code[:position])
        if begun is None:
            return 0, []
        return len(begun[0]), [name for name in self.names() if name.startswith(begun[0])]

    def debug(self, rank: int | None = None) -> None:
        """Debug the last exception of a rank, in that rank; without one, of the rank that failed last."""
        rank = self.failed_last if rank is None else rank
        outcome = self._internal("debug", ask_rank, "shell", "debug", rank=rank, query=False)
        root = outcome.result.root_cause
        if root is not None and root.type == "builtins.LookupError":
            msg = f"debug: {root.message}: rank {rank}. Name another rank (%distributed debug 1)."
            raise NblaunchError(msg)
        outcome.unwrap()

    # --- the ranks themselves ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt the job that is running, as the stop button does; the variables stay.

        Raises `NblaunchError` if another client is the owner.
        """
        if self.open:
            self._runtime.ask(wire.InterruptSession(session=self._key))

    def restart(self) -> None:
        self._refuse_if_ended()
        self._refuse_if_held()
        self._runtime.ask_on_a_line(wire.RestartSession(session=self._key))
        self.start()

    def stacks(self) -> HangReport:
        self._refuse_if_ended()
        return self._where()

    def _where(self, seconds: float = 1.0) -> HangReport:
        return self._runtime.ask_on_a_line(wire.StacksOf(session=self._key, seconds=seconds)).report

    def status(self) -> SessionStatus:
        if self.open:
            request = wire.DescribeSessions(session=self._key)
            for found in self._runtime.ask_on_a_line(request).sessions:
                return SessionStatus(**msgspec.structs.asdict(found))
        ranks = tuple(
            wire.RankStatus(rank=rank, state="gone", pid=None, device="", memory=None)
            for rank in range(self.world_size)
        )
        return SessionStatus(self.name, self.world_size, self.placement.backend, self._attempt, ranks)

    def close(self) -> None:
        """End the ranks and wait until they have exited; does nothing the second time, or in a fork.

        Ranks that this process does not own are others': they stay, and it stops watching.
        """
        self._finalizer.detach()
        watched, self._ended = self.detached and not self.owns, True
        self._ranks.open = False
        if not self._runtime.is_of(os.getpid()):
            return
        if watched:
            self._line.close()
            self._runtime.close()
            self._knowledge.close()
            return
        # Raised where the runtime has ended, and all ranks with it.
        with contextlib.suppress(LaunchError, TimeoutError), self._runtime.line() as line:
            grace = max(self.options.grace, self._grace)
            line.ask(wire.CloseSession(session=self._key), 4 * _CLOSE_SECONDS + grace)
        if self.detached:
            self._runtime.stop()
        # A job that was still running gets its end first.
        if self._reading.acquire(timeout=_CLOSE_SECONDS):
            self._line.close()
            self._reading.release()
        # The logs go with the last result that refers to them, not with this object.
        self._knowledge.close()

    def start(self) -> None:
        """Run an empty job, which begins once the ranks are ready."""
        job = self._job(FunctionJob(name="start"), "start")
        job.payloads, job.internal = (RankPayload(capture_call(type(None), (), {}, None)),), True
        # The timeout is for the user's jobs; starting has limits of its own.
        job.options = replace(self.options, timeout=None)
        # The wait for nodes may be long, so it is shown.
        view = SilentView() if self.options.on is None else self.watch("start", job.backend)
        with self._busy:
            error = self._run(job, view=view).error
        if isinstance(error, RunFailedError):
            msg = f"the ranks of session {self.name!r} could not be started: {error}"
            raise LaunchError(msg, phase="job", kind=error.kind) from error
        if error is not None:
            raise error


def _opened(runtime: Runtime, request: wire.OpenRanks) -> tuple[ClientLine, wire.Opened]:
    """Have a session's ranks started; return the connection to them, and where they are."""
    line = runtime.take_line()
    number = None
    try:
        try:
            with deferring_interrupts():
                number = line.begin(request)
            opened = line.answer_to(number)
        except KeyboardInterrupt:
            if number is not None:
                # What is not there yet could not be closed.
                line.answer_to(number)
                line.ask(wire.CloseSession(session=request.session))
            raise
    except BaseException:
        line.close()
        raise
    return line, opened


def _why_failed(outcome: Outcome) -> str:
    root = outcome.result.root_cause
    return str(outcome.error) if root is None else root.message


def _describe_revived(reborn: Mapping[int, LastKnown], found: Revived) -> str:
    """Return what ranks have got that were started again, or are new, and what is gone."""
    new = [rank for rank, known in reborn.items() if known.joins]
    back = [rank for rank in reborn if rank not in new]
    if not (back or found.shown or found.lost):
        return ""  # nodes that come before the first cell
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(found.lost.items()):
        reasons.setdefault(why, []).append(name)
    parts = [
        f"{', '.join(names)} had no copy and {'is' if len(names) == 1 else 'are'} gone ({why})"
        if back
        else f"{', '.join(names)} did not come ({why})"
        for why, names in reasons.items()
    ]
    notebooks = sorted(found.lost.keys() & (_notebook.namespace() or {}).keys())
    if notebooks:
        parts.append(
            f"of {', '.join(notebooks)} a cell sends the notebook's, which the other ranks may have changed"
        )
    if found.changed:
        parts.append(
            f"{', '.join(found.changed)} as the cell that was cut off left them on rank {found.source}"
        )
    if found.assumed:
        parts.append(f"{', '.join(found.assumed)} as the other ranks agree, not compared before")
    if not found.gradients:
        parts.append("without gradients, which differed")
    if found.anew:
        parts.append(f"{', '.join(found.anew)}: anew")
    came = f"{', '.join(found.shown) or 'no variable'} from rank {found.source}"
    who = [f"{format_ranks(back)} {'is' if len(back) == 1 else 'are'} back"] if back else []
    who += [f"{format_ranks(new)} {'has' if len(new) == 1 else 'have'} joined"] if new else []
    return "; ".join((f"{' and '.join(who)}: {came}", *parts))


def _steps_of(name: str) -> list[str]:
    """Return the names in a path, places in a list as names.

    >>> _steps_of("model.layers.3")
    ['model', 'layers', '_3']
    """
    first, *others = name.split(".")
    return [first, *(f"_{each}" if each.isdigit() else each for each in others)]


def _release_ranks(ranks: JobRanks, line: ClientLine, *, dismiss: bool) -> None:
    """End the ranks of a session that was garbage-collected, unless they are detached; never waits."""
    ranks.open = False
    if dismiss:
        ranks.runtime.note(wire.DismissSession(session=ranks.key))
    else:
        ranks.runtime.send_notes()
    line.close()


class SessionJob(wire.JobRecord, frozen=True, eq=False, kw_only=True):
    """A job of a session, as its runtime keeps it.

    `number`, `title`, `state` (one word), `started` and `ended` (seconds since the epoch, None while it
    runs), `given_by`, and `dropped`: what is no longer kept of it.
    """

    _ranks: JobRanks
    _placement: wire.Placement
    _private: bool

    def _watched(self, line: ClientLine) -> tuple[ClientJob, wire.JobSnapshot]:
        """Return the job as this process watches it, and its state by now."""
        snapshot = line.ask(wire.WatchJob(job=self.number))
        job = ClientJob(
            title=self.title,
            options=snapshot.options,
            placement=self._placement,
            ranks=self._ranks,
            private=self._private,
        )
        job.line = line
        return job, snapshot

    def result(self, *, check: bool = True) -> RunResult:
        """Wait for the end of the job and return its result; raises what the run raised.

        With `check=False` a failed run is returned. An interrupt (Ctrl-C, the notebook's stop button) ends
        the wait by `nblaunch.StoppedWatchingError`, and the job goes on.
        """
        with self._ranks.runtime.line() as line:
            return watch_job(*self._watched(line), SilentView()).unwrap(check=check)

    def __repr__(self) -> str:
        """Return title and state in one line."""
        return f"<SessionJob {self.title!r}: {self.state}>"


def _namespace_of(fn: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the variables of the notebook, or script, that a function belongs to."""
    globals_ = getattr(fn, "__globals__", None)
    if globals_ is not None and globals_.get("__name__") == "__main__":
        return dict(globals_) if type(globals_) is not dict else globals_
    return _notebook.namespace()
