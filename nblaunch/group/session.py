"""A session: ranks that stay, and keep their variables from one job to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import keyword
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nblaunch import _notebook
from nblaunch._errors import LaunchError, NblaunchError, OptionError, RunFailedError
from nblaunch._results import RunResult
from nblaunch.capture import pickling
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
from nblaunch.group.group import ConnectPeers, WorkerGroup
from nblaunch.group.knowledge import Knowledge, Sent, View, notices
from nblaunch.group.launcher import (
    Launch,
    Outcome,
    RankPayload,
    new_group,
    place_launch,
    prepare_of,
    run_job,
    settings_of,
    wait_for_gpus,
    warn_of_unheeded,
)
from nblaunch.group.lifecycle import Noted, RestartAsked, Trigger
from nblaunch.group.runtime import local
from nblaunch.group.scripts import is_script, refuse_in_session
from nblaunch.group.usage import RankStatus, SessionStatus, own_memory
from nblaunch.group.wait import SilentWatcher, Watcher
from nblaunch.options.launch import LaunchOptions, within
from nblaunch.protocol.messages import CellJob, FunctionJob, Objects, PullJob, PushJob
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import RankState, State

# A look into a rank between its cells: help, completion, the last exception's frames.

_ANSWER_SECONDS = 0.5
_COMPLETE_SECONDS = 2.0
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*$")


def inspect(session: LiveSession, name: str, *, rank: int = 0) -> str:
    """Return what `name?` shows on a rank. Raises `NblaunchError` if there is nothing of that name."""
    finished = session.internal("inspect", ask_shell, "describe", name, rank=rank)
    if finished.error is not None or finished.result is None:
        raise finished.error or NblaunchError("inspect ended without an answer")
    text: str = finished.result[rank]
    if not text:
        msg = f"inspect: name {name!r} is not defined on rank {rank}."
        raise NblaunchError(msg)
    return text


def complete(session: LiveSession, code: str, position: int) -> tuple[int, list[str]]:
    """Return how many characters before `position` rank 0 would replace, and by what.

    Where rank 0 cannot say in time, because it works, is stopped or is stuck, these are the names that it
    had after its last job.
    """
    if not session.open:
        return 0, []
    if session.busy or 0 in session.group.where(_ANSWER_SECONDS).silent:
        return _known(session, code, position)
    answers: queue.SimpleQueue[tuple[int, list[str]] | None] = queue.SimpleQueue()

    def ask() -> None:
        answer = None
        with contextlib.suppress(NblaunchError):  # a job has begun meanwhile
            finished = session.internal("complete", ask_shell, "complete", code, position, brief=True)
            if finished.error is None and finished.result is not None:
                answer = finished.result[0]
        answers.put(answer)

    # On a thread of its own: a `__dir__` of the user's may take any time, and the notebook does not wait.
    threading.Thread(target=ask, name="nblaunch-complete", daemon=True).start()
    try:
        return answers.get(timeout=_COMPLETE_SECONDS) or (0, [])
    except queue.Empty:
        return _known(session, code, position)


def _known(session: LiveSession, code: str, position: int) -> tuple[int, list[str]]:
    begun = _NAME.search(code[:position])
    if begun is None:
        return 0, []
    return len(begun[0]), [name for name in session.names() if name.startswith(begun[0])]


def debug(session: LiveSession, rank: int) -> None:
    """Look at the frames of the last exception of a rank, in that rank; the user types in the notebook."""
    finished = session.internal("debug", ask_shell, "debug", rank=rank)
    root = finished.result.root_cause if finished.result is not None else None
    if root is not None and root.type == "builtins.LookupError":
        msg = (
            f"debug was asked for, but {root.message}: rank {rank}. Name another rank (%distributed debug 1)."
        )
        raise NblaunchError(msg)
    if finished.error is not None:
        raise finished.error


# The session.


Watch = Callable[[str, str], Watcher]
Perform = Callable[[threading.Event | None], Outcome]
_UNLIMITED = 2**31 - 1
_CLOSE_SECONDS = 10.0
# How long a job waits for a completion whose answer the notebook no longer expects.
_BRIEF_SECONDS = 5.0
# Peers of a rank whose user reads a debugger's prompt wait for longer than torch's half an hour.
_COLLECTIVE_SECONDS = 86_400.0


def silent(title: str, backend: str) -> Watcher:  # noqa: ARG001 - as every `Watch`
    """Watch nothing."""
    return SilentWatcher()


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job is to be run; None is what the session does by itself."""

    title: str
    ranks: Sequence[int] | None = None
    options: LaunchOptions | None = None
    watch: Watch | None = None
    internal: bool = False
    """Nobody sees its result: what has happened to the ranks is told with the next job that is seen."""
    brief: bool = False
    """Whether the next job waits for this one, and is not refused: the user does not know of it."""
    cancelled: threading.Event | None = None
    """Of a job in the background, for which `claim` has been called."""


class LiveSession:
    """Ranks that are kept; one job at a time."""

    def __init__(
        self,
        options: LaunchOptions,
        connect_peers: ConnectPeers,
        *,
        name: str = "default",
        watch: Watch = silent,
    ) -> None:
        """Start the ranks and wait until they are ready; raises `LaunchError` if that cannot be."""
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
                f"a session was asked for with nnodes={options.nnodes!r}, but a session's ranks are on one "
                "node. Run the cell on fresh ranks (%%distributed --nnodes 2 ...), or leave nnodes out."
            )
            raise OptionError(msg)
        self.placement, environ = place_launch(options)
        self._prepare = prepare_of(options, self.placement, environ, timeout=_COLLECTIVE_SECONDS)
        descriptors.make_room(self.placement.nproc)
        runtime = local()
        runtime.server.ensure_running()
        wait_for_gpus(self.placement)
        settings = dataclasses.replace(
            settings_of(options, self.placement),
            max_restarts=options.max_restarts or _UNLIMITED,
        )
        made = new_group(runtime, settings, connect_peers, options.log_dir, keep=True)
        self.group, self._private = made.group, made.private
        warn_of_unheeded(self.group, environ)
        if self.placement.warning:
            self.group.post(Noted(self.placement.warning))
        self._finalizer = weakref.finalize(self, _end, self.group)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.placement.nproc

    @property
    def open(self) -> bool:
        """Whether there are ranks, or will be."""
        return not self.group.closed.is_set()

    # --- jobs --------------------------------------------------------------------------------------

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> Perform:
        """Capture a call of `fn`; it is made when what this returns is called."""
        target: object = fn
        if is_script(target):
            raise refuse_in_session(target, self.name)
        if not callable(target):
            msg = f"run() was given {fn!r:.200} to run, which is not callable. Pass a function."
            raise OptionError(msg)
        namespace = _namespace_of(fn)

        def capture(view: View) -> Captured:
            return capture_call(fn, tuple(args), dict(kwargs or {}), namespace, view)

        title = getattr(fn, "__qualname__", type(fn).__qualname__).replace("<locals>.", "")
        brought = _Brought(self, capture, namespace, self.chosen(ranks))
        return self._later(FunctionJob(name=title), brought, JobOptions(title, ranks))

    def prepared(  # noqa: PLR0913 - what a cell is
        self,
        job: CellJob,
        plain: str,
        namespace: dict[str, Any],
        transform: Callable[[str], str],
        *,
        ranks: Sequence[int] | None = None,
        options: LaunchOptions | None = None,
    ) -> Perform:
        """Capture what a cell uses; the cell itself runs when what this returns is called.

        `plain` is its source with magics transformed. Raises all that can be wrong with it.
        """

        def capture(view: View) -> Captured:
            return capture_cell(plain, namespace, transform, known=view)

        brought = _Brought(self, capture, namespace, self.chosen(ranks))
        return self._later(job, brought, JobOptions("cell", ranks, options))

    def push(self, variables: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Give the ranks variables; names that refer to one object go on referring to one.

        An object that the ranks have from the notebook is filled with its content of now, so that whatever
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

        def capture(view: View) -> Captured:
            return capture_values(dict(variables), namespace, view)

        brought = _Brought(self, capture, namespace, self.chosen(ranks), pushed=variables)
        self._check(self._perform(PushJob(), brought, JobOptions("push", ranks, watch=silent, internal=True)))

    def pull(self, *names: str, ranks: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return each variable as a list in rank order. Raises `NblaunchError` for one that a rank lacks."""
        if not names:
            msg = "pull was given no name. Name the variables: pull('loss', 'model')."
            raise OptionError(msg)
        chosen = self.chosen(ranks)
        job_options = JobOptions("pull", ranks, watch=silent, internal=True)
        finished = self._perform(PullJob(names=tuple(names)), _plain(()), job_options)
        result = finished.result
        if (
            result is not None
            and result.root_cause is not None
            and result.root_cause.type.endswith("NameError")
        ):
            lacking = [each.rank for each in result.failures]
            msg = f"pull: {result.root_cause.message} ({format_ranks(lacking)})"
            raise NblaunchError(msg) from None
        values = self._check(finished).values
        return {
            name: [values[index][place] for index in range(len(chosen))] for place, name in enumerate(names)
        }

    def _check(self, finished: Outcome) -> RunResult:
        if finished.error is not None:
            raise finished.error
        assert finished.result is not None  # noqa: S101 - without a result there is an error
        return finished.result

    def _later(self, job: CellJob | FunctionJob, brought: _Brought, job_options: JobOptions) -> Perform:
        self._wait_for_brief()
        self._refuse_if(at_work=self._busy.locked())
        return lambda cancelled: self._perform(
            job, brought, dataclasses.replace(job_options, cancelled=cancelled)
        )

    def claim(self) -> None:
        """Take the ranks for a job in the background, on its thread; its end gives them back."""
        self._wait_for_brief()
        self._refuse_if(at_work=not self._busy.acquire(blocking=False))
        self._brief = False

    def _wait_for_brief(self) -> None:
        deadline = time.monotonic() + _BRIEF_SECONDS
        while self._brief and self._busy.locked() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _perform(
        self,
        job: CellJob | FunctionJob | PushJob | PullJob,
        brought: _Brought | Captured,
        job_options: JobOptions,
    ) -> Outcome:
        if job_options.cancelled is None:
            self._wait_for_brief()
            self._refuse_if(at_work=self._busy.locked())
            # The one way to take a lock and to let it go that no interrupt comes between.
            with self._busy:
                self._brief = job_options.brief
                return self._carry_out(job, brought, job_options)
        try:
            return self._carry_out(job, brought, job_options)
        finally:
            self._busy.release()

    def _carry_out(
        self,
        job: CellJob | FunctionJob | PushJob | PullJob,
        brought: _Brought | Captured,
        job_options: JobOptions,
    ) -> Outcome:
        chosen = self.chosen(job_options.ranks)
        self._refuse_if_ended()
        launch = Launch(
            job=job,
            captured=brought if isinstance(brought, Captured) else brought.first,
            options=within(self.options, job_options.options) if job_options.options else self.options,
            placement=self.placement,
            environ={},
            title=job_options.title,
            cancelled=job_options.cancelled,
            internal=job_options.internal,
        )
        if isinstance(brought, _Brought):
            launch = brought.given_to(launch)
        backend = self.placement.backend if self.options.init_process_group else ""
        watcher = (job_options.watch or self.watch)(job_options.title, backend)
        subset = None if job_options.ranks is None else chosen
        self._jobs += 1
        finished = run_job(self.group, launch, self._prepare, watcher, private=self._private, ranks=subset)
        if (
            finished.result is not None
            and finished.result.root_cause is not None
            and not job_options.internal
        ):
            self.failed_last = finished.result.root_cause.rank
        return finished

    @property
    def state_of_ranks(self) -> tuple[int, int]:
        """Return a value that is another one once the ranks may have other things."""
        return self.group.attempt, self._jobs

    def views(self, chosen: tuple[int, ...], namespace: dict[str, Any] | None) -> list[View]:
        """Return what the chosen ranks know now, each group of ranks that know the same by itself."""
        self._knowledge.begin(self.group.attempt, self.world_size)
        self._knowledge.lost(self.group.take_lost())
        return self._knowledge.views(chosen, self.group.names, namespace)

    def sweep(self) -> None:
        """Let go of objects that the notebook has let go of."""
        self._knowledge.sweep()

    def remember(self, sent: Sequence[tuple[View, Sent]]) -> None:
        """Take into account that payloads have arrived."""
        for view, each in sent:
            self._knowledge.remember(view, each)

    def internal(
        self, title: str, fn: Callable[..., Any], *args: object, rank: int = 0, brief: bool = False
    ) -> Outcome:
        """Call `fn` of our own on one rank, and show nothing: the user has not asked for a run.

        One that is `brief` is waited for by the job that comes next, where another would be refused.
        """
        self.chosen([rank])
        captured = capture_call(fn, args, {}, None)
        return self._perform(
            FunctionJob(name=title),
            captured,
            JobOptions(title, [rank], watch=silent, internal=True, brief=brief),
        )

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._busy.locked()

    def _refuse_if(self, *, at_work: bool) -> None:
        if at_work:
            msg = (
                f"a job was given to session {self.name!r}, whose ranks are at work on another one. Wait for "
                "it (handle.result()), stop it (handle.cancel()), or use fresh ranks (--fresh)."
            )
            raise NblaunchError(msg)

    def _refuse_if_ended(self) -> None:
        if not self.open:
            msg = f"session {self.name!r} has ended. Start another one (%distributed start)."
            raise LaunchError(msg, phase="job")

    # --- what the ranks have -------------------------------------------------------------------------

    def chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks that take part. Raises `OptionError` for one that is none."""
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

    def names(self) -> tuple[str, ...]:
        """Return the names of the variables that rank 0 has."""
        known = self.group.names.get(0)
        return known.names if known is not None else ()

    # --- the ranks themselves ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt the job that is running, as the stop button does; the variables stay."""
        self.group.post(Trigger.INTERRUPT)

    def restart(self) -> None:
        """Start all ranks anew; all of their variables are gone."""
        self._refuse_if_ended()
        before = self.group.attempt
        self.group.post(RestartAsked("a restart was asked for"))
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

    def _word(self, node: str, job: Any) -> str:
        if not self.open:
            return "gone"
        if not node or not self.group.ready:
            return "starting"
        return "running" if job is not None and job.state is State.RUNNING else "idle"

    def close(self) -> None:
        """End the ranks and wait until they are gone; does nothing the second time."""
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
        self._private = None
        self._finalizer.detach()

    def _start(self) -> None:
        """Wait until the ranks are ready, by having them do something."""
        captured = capture_call(int, (), {}, None)
        launch = Launch(
            job=FunctionJob(name="start"),
            captured=captured,
            # The timeout is for what runs here; to come into being has limits of its own.
            options=dataclasses.replace(self.options, timeout=None),
            placement=self.placement,
            environ={},
            title="start",
            internal=True,
        )
        finished = run_job(self.group, launch, self._prepare, SilentWatcher(), private=self._private)
        error = finished.error
        if isinstance(error, RunFailedError) and not isinstance(error, LaunchError):
            msg = f"the ranks of session {self.name!r} could not be started: {error}"
            raise LaunchError(msg, phase="job") from error
        if error is not None:
            raise error


class _Brought:
    """What a job brings to a session's ranks, captured when this is made."""

    def __init__(
        self,
        session: LiveSession,
        capture: Callable[[View], Captured],
        namespace: dict[str, Any] | None,
        chosen: tuple[int, ...],
        pushed: Mapping[str, Any] | None = None,
    ) -> None:
        """Capture for each group of ranks that know the same; raises what `capture` raises."""
        self._session, self._chosen = session, chosen
        self._again = functools.partial(_Brought, session, capture, namespace, chosen, pushed)
        self._made_for = session.state_of_ranks
        self._rank_payloads: list[RankPayload] = []
        self._sent: list[tuple[View, Sent]] = []
        for view in session.views(chosen, namespace):
            captured = capture(view)
            view.look_for_changes()
            sent = view.sent(captured, pushed)
            # The objects themselves are the notebook's to keep, or not.
            packed = dataclasses.replace(captured.packed, places=(), carried={})
            captured = dataclasses.replace(captured, packed=packed)
            objects = None if sent.plain and not sent.objects.wait else sent.objects
            self._rank_payloads.append(RankPayload(view.ranks, captured, objects))
            self._sent.append((view, sent))
        self.first = self._rank_payloads[0].captured
        self._notices = notices(view for view, _ in self._sent)

    def given_to(self, launch: Launch) -> Launch:
        """Return the launch with all of this; captures once more if the ranks have other things by now."""
        if self._made_for != self._session.state_of_ranks:
            again: _Brought = self._again()
            return again.given_to(launch)
        sent, session = self._sent, self._session
        waits = any(
            rank_payload.objects is not None and rank_payload.objects.wait
            for rank_payload in self._rank_payloads
        )
        if not waits:
            session.remember(sent)
        rank_payloads = [
            _made_to_wait(rank_payload) if waits else rank_payload for rank_payload in self._rank_payloads
        ]
        return dataclasses.replace(
            launch,
            captured=self.first,
            rank_payloads=tuple(rank_payloads),
            arrived=functools.partial(session.remember, sent) if waits else launch.arrived,
            notices=self._notices,
        )


def _made_to_wait(rank_payload: RankPayload) -> RankPayload:
    """Have ranks that get nothing wait for those that do: the payload arrives on all of them, or on none."""
    objects = rank_payload.objects or Objects()
    return dataclasses.replace(rank_payload, objects=msgspec.structs.replace(objects, wait=True))


def _plain(value: object) -> Captured:
    """Return a payload that brings nothing of the notebook's."""
    return Captured(pickling.dumps(value), (), {})


def _namespace_of(fn: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the variables of the notebook, or script, that a function belongs to."""
    globals_ = getattr(fn, "__globals__", None)
    if globals_ is not None and globals_.get("__name__") == "__main__":
        return dict(globals_) if type(globals_) is not dict else globals_
    return _notebook.namespace()


def _waiting(known: RankState | None) -> str:
    return "" if known is None or known.state.final else known.waiting


def _end(group: WorkerGroup) -> None:
    """End the ranks of a session that nobody refers to any more."""
    group.post(Trigger.DISMISS)
