"""A session: ranks that stay, and keep their variables from one job to the next."""

from __future__ import annotations

import contextlib
import functools
import keyword
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from nblaunch import _notebook
from nblaunch._errors import LaunchError, NblaunchError, OptionError, RunFailedError
from nblaunch._results import Outcome, Perform, RankStatus, SessionStatus
from nblaunch.capture.capture import (
    RANK_NAMES,
    SHELL_NAMES,
    Captured,
    capture_call,
    capture_cell,
    capture_values,
)
from nblaunch.elastic import descriptors
from nblaunch.elastic.preload import ask_shell
from nblaunch.group.group import ConnectPeers
from nblaunch.group.inherited import prepare_of
from nblaunch.group.knowledge import Delivery, Knowledge, KnowledgeView, notices
from nblaunch.group.launcher import (
    Launch,
    RankPayload,
    function_job,
    new_group,
    place_launch,
    run_job,
    settings_of,
    wait_for_gpus,
    warn_of_unheeded,
)
from nblaunch.group.lifecycle import Noted, RestartAsked, Trigger
from nblaunch.group.runtime import local
from nblaunch.group.scripts import is_script, refuse_in_session
from nblaunch.group.standby import GroupAndLogs
from nblaunch.group.usage import own_memory
from nblaunch.group.wait import SilentView
from nblaunch.options.launch import LaunchOptions, within
from nblaunch.protocol.messages import CellJob, FunctionJob, Objects, PullJob, PushJob
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import RankState, State, View

_UNLIMITED = 2**31 - 1
_CLOSE_SECONDS = 10.0
# Peers of a rank whose user reads a debugger's prompt wait for longer than torch's half an hour.
_COLLECTIVE_SECONDS = 86_400.0
# How long a job waits for a completion whose answer the notebook no longer expects.
_BRIEF_SECONDS = 5.0
_ANSWER_SECONDS = 0.5
_COMPLETE_SECONDS = 2.0
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*$")


def silent(title: str, backend: str) -> View:  # noqa: ARG001 - as every `watch` of a session
    """Show nothing."""
    return SilentView()


@dataclass(frozen=True, slots=True)
class _Brought:
    """What a job brings to a session's ranks."""

    payloads: tuple[RankPayload, ...]
    deliveries: tuple[tuple[KnowledgeView, Delivery], ...]
    captured_for: tuple[int, int]
    """The attempt, and the number of jobs before this one."""
    again: Callable[[], _Brought]
    """Captures once more, for ranks that have other things by now."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A job for a session's ranks; `options` are a cell's own."""

    job: CellJob | FunctionJob | PushJob | PullJob
    title: str
    ranks: Sequence[int] | None
    brought: _Brought | Captured | None = None
    options: LaunchOptions | None = None
    internal: bool = False
    """Its result is never shown. Notices about the ranks are reported with the next job that is shown."""
    brief: bool = False
    """The next job waits for this one and is not refused: the user does not know of it."""


class LiveSession:
    """Ranks that are kept; one job at a time.

    A job is prepared (captured, and refused if it cannot run), then performed: `prepare_cell` and
    `prepare_call` return what performs it, on this thread or on that of a `Handle`.
    """

    def __init__(
        self,
        options: LaunchOptions,
        connect_peers: ConnectPeers,
        *,
        name: str = "default",
        watch: Callable[[str, str], View] = silent,
    ) -> None:
        """Start the ranks and wait until they are ready; raises `LaunchError` if they cannot be started.

        `watch(title, backend)` makes what shows a job.
        """
        self.name = name
        self.options = options
        self.watch = watch
        self.failed_last = 0
        """The rank whose failure was the last root cause."""
        self._busy = threading.Lock()
        self._brief = False
        """Whether the job that holds `_busy` is brief."""
        self._knowledge = Knowledge()
        self._jobs = 0
        if options.nodes[1] > 1:
            msg = (
                f"nnodes={options.nnodes!r}: a session's ranks are on one node. Run the cell on fresh ranks "
                "(%%distributed --nnodes 2 ...), or leave nnodes out."
            )
            raise OptionError(msg)
        self.placement, environ = place_launch(options)
        self._prepare = prepare_of(options, self.placement, environ, timeout=_COLLECTIVE_SECONDS)
        descriptors.make_room(self.placement.nproc)
        runtime = local()
        runtime.server.ensure_running()
        wait_for_gpus(self.placement)
        settings = replace(
            settings_of(options, self.placement), max_restarts=options.max_restarts or _UNLIMITED
        )
        self._made = new_group(runtime, settings, connect_peers, options.log_dir, keep=True)
        self.group = self._made.group
        warn_of_unheeded(self.group, environ)
        if self.placement.warning:
            self.group.post(Noted(self.placement.warning))
        self._finalizer = weakref.finalize(self, self.group.post, Trigger.DISMISS)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.placement.nproc

    @property
    def open(self) -> bool:
        """Whether there are ranks, or will be."""
        return not self.group.closed.is_set()

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._busy.locked()

    # --- jobs --------------------------------------------------------------------------------------

    def prepare_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> Perform:
        """Capture a call of `fn`; it is made when the returned function is called."""
        target: object = fn
        if is_script(target):
            raise refuse_in_session(target, self.name)
        job = function_job(target)
        namespace = _namespace_of(fn)

        def capture(view: KnowledgeView) -> Captured:
            return capture_call(fn, tuple(args), dict(kwargs or {}), namespace, view)

        return self._prepared(_Request(job, job.name, ranks, self._bring(capture, namespace, ranks)))

    def prepare_cell(  # noqa: PLR0913 - what a cell is
        self,
        job: CellJob,
        plain: str,
        namespace: dict[str, Any],
        transform: Callable[[str], str],
        *,
        ranks: Sequence[int] | None = None,
        options: LaunchOptions | None = None,
    ) -> Perform:
        """Capture what a cell uses; the cell runs when the returned function is called.

        `plain` is its source with magics transformed.
        """

        def capture(view: KnowledgeView) -> Captured:
            return capture_cell(plain, namespace, transform, known=view)

        brought = self._bring(capture, namespace, ranks)
        return self._prepared(_Request(job, "cell", ranks, brought, options))

    def push(self, variables: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Give the ranks variables; names that refer to one object go on referring to one.

        An object that the ranks have from the notebook is filled with its present content, so that whatever
        refers to it there follows.
        """
        for name in variables:
            if not str(name).isidentifier() or keyword.iskeyword(name):
                msg = f"push: {name!r:.100} is not a valid Python identifier."
                raise OptionError(msg)
            if name in RANK_NAMES or name in SHELL_NAMES:
                msg = f"push: each rank has its own {name}. Use another name."
                raise OptionError(msg)
        namespace = _notebook.namespace()
        if namespace is None:
            namespace = self._knowledge.namespace

        def capture(view: KnowledgeView) -> Captured:
            return capture_values(dict(variables), namespace, view)

        brought = self._bring(capture, namespace, ranks, variables)
        self._perform(_Request(PushJob(), "push", ranks, brought, internal=True)).unwrap()

    def pull(self, *names: str, ranks: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return each variable as a list in rank order. Raises `NblaunchError` for one that a rank lacks."""
        if not names:
            msg = "pull: there is no name. Name the variables: pull('loss', 'model')."
            raise OptionError(msg)
        outcome = self._perform(_Request(PullJob(names=tuple(names)), "pull", ranks, internal=True))
        root = outcome.result.root_cause
        if root is not None and root.type.endswith("NameError"):
            lacking = [each.rank for each in outcome.result.failures]
            msg = f"pull: {root.message} ({format_ranks(lacking)})"
            raise NblaunchError(msg) from None
        values = outcome.unwrap().values
        return {name: [of_rank[place] for of_rank in values] for place, name in enumerate(names)}

    def _internal(
        self, title: str, fn: Callable[..., Any], *args: object, rank: int = 0, brief: bool = False
    ) -> Outcome:
        """Call a function of ours on one rank, and show nothing: the user did not start a run."""
        captured = capture_call(fn, args, {}, None)
        request = _Request(FunctionJob(name=title), title, [rank], captured, internal=True, brief=brief)
        return self._perform(request)

    def _prepared(self, request: _Request) -> Perform:
        self._wait_for_brief()
        self._refuse_if(at_work=self.busy)
        return functools.partial(self._perform, request)

    def claim(self) -> None:
        """Take the ranks for a job in the background, on its thread; the job's end releases them."""
        self._wait_for_brief()
        self._refuse_if(at_work=not self._busy.acquire(blocking=False))
        self._brief = False

    def _wait_for_brief(self) -> None:
        deadline = time.monotonic() + _BRIEF_SECONDS
        while self._brief and self.busy and time.monotonic() < deadline:
            time.sleep(0.005)

    def _perform(self, request: _Request, cancelled: threading.Event | None = None) -> Outcome:
        """Run a job while holding the ranks; `cancelled` is that of a job that has claimed them."""
        if cancelled is None:
            self._wait_for_brief()
            self._refuse_if(at_work=self.busy)
            # The one way to take and release a lock that no interrupt comes between.
            with self._busy:
                self._brief = request.brief
                return self._run(request, None)
        try:
            return self._run(request, cancelled)
        finally:
            self._busy.release()

    def _run(self, request: _Request, cancelled: threading.Event | None) -> Outcome:
        chosen = self._chosen(request.ranks)
        self._refuse_if_ended()
        launch = self._launch(request.job, request.title, internal=request.internal)
        if request.options is not None:
            launch = replace(launch, options=within(self.options, request.options))
        if isinstance(request.brought, Captured):
            launch = replace(launch, payloads=(RankPayload(request.brought),))
        elif request.brought is not None:
            launch = self._with(launch, request.brought)
        watch = silent if request.internal else self.watch
        view = watch(request.title, launch.backend)
        subset = None if request.ranks is None else chosen
        self._jobs += 1
        outcome = run_job(self._made, launch, self._prepare, view, cancelled, ranks=subset)
        if outcome.result.root_cause is not None and not request.internal:
            self.failed_last = outcome.result.root_cause.rank
        return outcome

    def _launch(
        self, job: CellJob | FunctionJob | PushJob | PullJob, title: str, *, internal: bool
    ) -> Launch:
        return Launch(job, self.options, self.placement, {}, title, internal=internal)

    def _refuse_if(self, *, at_work: bool) -> None:
        if at_work:
            msg = (
                f"session {self.name!r} takes one job at a time, and is at work on another one. Wait for it "
                "(handle.result()), stop it (handle.cancel()), or use fresh ranks (--fresh)."
            )
            raise NblaunchError(msg)

    def _refuse_if_ended(self) -> None:
        if not self.open:
            msg = f"session {self.name!r} has ended. Start another one (%distributed start)."
            raise LaunchError(msg, phase="job")

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
            raise OptionError(msg)
        return chosen

    # --- what the ranks have -------------------------------------------------------------------------

    def _bring(
        self,
        capture: Callable[[KnowledgeView], Captured],
        namespace: dict[str, Any] | None,
        ranks: Sequence[int] | None,
        pushed: Mapping[str, Any] | None = None,
    ) -> _Brought:
        """Capture once for all ranks that know the same; raises what `capture` raises."""
        chosen = self._chosen(ranks)
        now = self.group.attempt, self._jobs
        self._knowledge.begin(self.group.attempt, self.world_size)
        self._knowledge.lost(self.group.take_lost())
        payloads, deliveries = [], []
        for view in self._knowledge.views(chosen, self.group.names, namespace):
            captured = capture(view)
            view.look_for_changes()
            delivery = view.delivery(captured, pushed)
            # The objects themselves are the notebook's to keep or to free.
            captured = replace(captured, packed=replace(captured.packed, places=(), carried={}))
            payloads.append(RankPayload(captured, view.ranks, delivery.objects))
            deliveries.append((view, delivery))
        again = functools.partial(self._bring, capture, namespace, ranks, pushed)
        return _Brought(tuple(payloads), tuple(deliveries), now, again)

    def _with(self, launch: Launch, brought: _Brought) -> Launch:
        """Return the launch with its payloads, captured again if the ranks have changed since."""
        while brought.captured_for != (self.group.attempt, self._jobs):
            brought = brought.again()
        # The group keeps its last job, and that keeps `remember`. So it must hold neither the session, which
        # would never be collected, nor the payloads, which hold the memory of what is sent.
        knowledge, deliveries = self._knowledge, brought.deliveries

        def remember() -> None:
            for view, delivery in deliveries:
                knowledge.remember(view, delivery)

        launch = replace(launch, notices=notices(view for view, _ in deliveries))
        if not any(each.objects is not None and each.objects.wait for each in brought.payloads):
            remember()
            return replace(launch, payloads=brought.payloads)
        # Ranks that get nothing wait for those that do: the payload arrives on all of them, or on none.
        waiting = [
            replace(each, objects=msgspec.structs.replace(each.objects or Objects(), wait=True))
            for each in brought.payloads
        ]
        return replace(launch, payloads=tuple(waiting), arrived=remember)

    def sweep(self) -> None:
        """Drop what is known of objects that the notebook has freed."""
        self._knowledge.sweep()

    def names(self) -> tuple[str, ...]:
        """Return the names of the variables that rank 0 has."""
        known = self.group.names.get(0)
        return known.names if known is not None else ()

    # --- a look into a rank between its cells ----------------------------------------------------------

    def inspect(self, name: str, *, rank: int = 0) -> str:
        """Return what `name?` shows on a rank. Raises `NblaunchError` if the rank has no such name."""
        text: str = self._internal("inspect", ask_shell, "describe", name, rank=rank).unwrap()[rank]
        if not text:
            msg = f"inspect: name {name!r} is not defined on rank {rank}."
            raise NblaunchError(msg)
        return text

    def complete(self, code: str, position: int) -> tuple[int, list[str]]:
        """Return how many characters before `position` rank 0 would replace, and by what.

        Where rank 0 does not answer in time, because it works, is stopped or is stuck, these are the names
        that it had after its last job.
        """
        if not self.open:
            return 0, []
        if self.busy or 0 in self.group.where(_ANSWER_SECONDS).silent:
            return self._known_names(code, position)
        answers: queue.SimpleQueue[tuple[int, list[str]] | None] = queue.SimpleQueue()

        def ask() -> None:
            answer = None
            with contextlib.suppress(NblaunchError):  # a job has begun meanwhile
                outcome = self._internal("complete", ask_shell, "complete", code, position, brief=True)
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
        outcome = self._internal("debug", ask_shell, "debug", rank=rank)
        root = outcome.result.root_cause
        if root is not None and root.type == "builtins.LookupError":
            msg = f"debug: {root.message}: rank {rank}. Name another rank (%distributed debug 1)."
            raise NblaunchError(msg)
        outcome.unwrap()

    # --- the ranks themselves ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt the job that is running, as the stop button does; the variables stay."""
        self.group.post(Trigger.INTERRUPT)

    def restart(self) -> None:
        """Replace all ranks by new ones, without variables."""
        self._refuse_if_ended()
        before = self.group.attempt
        self.group.post(RestartAsked("the session was restarted"))
        deadline = time.monotonic() + self.options.grace + _CLOSE_SECONDS
        while self.group.attempt == before and self.open and time.monotonic() < deadline:
            self.group.closed.wait(0.01)
        self._start()
        self.group.post(Trigger.FORGET_NOTES)

    def stacks(self) -> HangReport:
        """Return where each rank is, and in which collective."""
        self._refuse_if_ended()
        return self.group.where()

    def status(self) -> SessionStatus:
        """Return what each rank is doing, and the memory that is its own."""
        members, job = self.group.state, self.group.job
        running = job.state.ranks if job is not None and not job.ended.is_set() else {}
        doing = job.state.doing if job is not None and running else ""
        return SessionStatus(
            name=self.name,
            world_size=self.world_size,
            backend=self.placement.backend,
            attempt=self.group.attempt,
            ranks=tuple(
                RankStatus(
                    rank=rank,
                    state=self._word(known.node, running.get(rank)),
                    pid=known.pid,
                    device=known.device,
                    memory=own_memory(known.pid),
                    waiting=_waiting(running.get(rank)) or doing,
                )
                for rank, known in sorted(members.ranks.items())
            ),
        )

    def _word(self, node: str, job: RankState | None) -> str:
        if not self.open:
            return "gone"
        if not node or not self.group.ready:
            return "starting"
        return "running" if job is not None and job.state is State.RUNNING else "idle"

    def close(self) -> None:
        """End the ranks and wait until they have exited; does nothing the second time."""
        job = self.group.job
        if job is not None and not job.ended.is_set():
            self.group.post(Trigger.INTERRUPT)
            job.ended.wait(self.options.grace)
        self.group.post(Trigger.DISMISS)
        if not self.group.closed.wait(_CLOSE_SECONDS):
            self.group.stop()
            self.group.closed.wait(_CLOSE_SECONDS)
        self.group.close()
        # The logs go with the last result that refers to them, not with this object.
        self._knowledge.close()
        self._made = GroupAndLogs(self.group, None)
        self._finalizer.detach()

    def _start(self) -> None:
        """Run an empty job, which begins once the ranks are ready."""
        launch = replace(
            self._launch(FunctionJob(name="start"), "start", internal=True),
            payloads=(RankPayload(capture_call(int, (), {}, None)),),
            # The timeout is for the user's jobs; starting has limits of its own.
            options=replace(self.options, timeout=None),
        )
        error = run_job(self._made, launch, self._prepare, SilentView()).error
        if isinstance(error, RunFailedError):
            msg = f"the ranks of session {self.name!r} could not be started: {error}"
            raise LaunchError(msg, phase="job") from error
        if error is not None:
            raise error


def _namespace_of(fn: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the variables of the notebook, or script, that a function belongs to."""
    globals_ = getattr(fn, "__globals__", None)
    if globals_ is not None and globals_.get("__name__") == "__main__":
        return dict(globals_) if type(globals_) is not dict else globals_
    return _notebook.namespace()


def _waiting(known: RankState | None) -> str:
    return "" if known is None or known.state.final else known.waiting
