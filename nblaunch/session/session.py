"""A session: ranks that stay, and keep their variables from one job to the next."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nblaunch._errors import LaunchError, NblaunchError, OptionError, RunFailedError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import CellJob, FunctionJob, PullJob, PushJob
from nblaunch._reports import HangReport, format_ranks
from nblaunch._results import RunResult
from nblaunch._state import RunState, State
from nblaunch.agent import forkserver
from nblaunch.job import payload
from nblaunch.job.capture import Captured, capture_call, capture_cell
from nblaunch.rank import introspection
from nblaunch.session import engine, hub, notebook, outcome
from nblaunch.session.ending import Watcher
from nblaunch.session.group import WorkerGroup
from nblaunch.session.status import RankStatus, SessionStatus, own_memory

Watch = Callable[[str, str], Watcher]
_UNLIMITED = 2**31 - 1
_CLOSE_SECONDS = 10.0


class SilentWatcher:
    """Shows nothing."""

    shows_usage = False

    def open(self, state: RunState) -> None:
        """Show nothing."""

    def draw(self, state: RunState) -> None:
        """Show nothing."""

    def close(self, state: RunState) -> None:
        """Show nothing."""


def silent(title: str, backend: str) -> Watcher:  # noqa: ARG001 - as every `Watch`
    """Watch nothing."""
    return SilentWatcher()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A variable of the notebook's that ranks have: this object, these ranks."""

    value: object
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Wish:
    """How a job is to be run; None is what the session does by itself."""

    title: str
    ranks: Sequence[int] | None = None
    options: LaunchOptions | None = None
    watch: Watch | None = None
    cancelled: threading.Event | None = None


class LiveSession:
    """Ranks that are kept; one job at a time."""

    def __init__(self, options: LaunchOptions, *, name: str = "default", watch: Watch = silent) -> None:
        """Start the ranks and wait until they are ready; raises `LaunchError` if that cannot be."""
        self.name = name
        self.options = options
        self.watch = watch
        self._busy = threading.Lock()
        self._sent: dict[str, _Sent] = {}
        self._sent_to = 0
        self.placement, environ = engine.place(options)
        self._prepare = engine.prepare_of(options, self.placement, environ)
        forkserver.server.ensure_running()
        engine.wait_for_gpus(self.placement)
        settings = dataclasses.replace(
            engine.with_logs(engine.settings_of(options, self.placement), options),
            max_restarts=options.max_restarts or _UNLIMITED,
        )
        self._private = None if options.log_dir else outcome.LogDirectory(settings.log_dir)
        self.group = WorkerGroup(hub.get(), settings, keep=True)
        engine.keep(self.group)
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
        cancelled: threading.Event | None = None,
    ) -> engine.Outcome:
        """Call `fn` on the ranks."""
        target: object = fn
        if not callable(target):
            msg = f"run() was given {fn!r:.200} to run, which is not callable. Pass a function."
            raise OptionError(msg)
        captured = capture_call(fn, tuple(args), dict(kwargs or {}), notebook.namespace())
        title = getattr(fn, "__qualname__", type(fn).__qualname__).replace("<locals>.", "")
        return self._perform(FunctionJob(name=title), captured, _Wish(title, ranks, cancelled=cancelled))

    def prepared(  # noqa: PLR0913 - what a cell is
        self,
        job: CellJob,
        plain: str,
        namespace: dict[str, Any],
        transform: Callable[[str], str],
        *,
        ranks: Sequence[int] | None = None,
        options: LaunchOptions | None = None,
    ) -> Callable[[threading.Event | None], engine.Outcome]:
        """Capture what a cell uses; the cell itself runs when what this returns is called.

        `plain` is its source with magics transformed. Raises all that can be wrong with it.
        """
        chosen = self.chosen(ranks)
        if self._busy.locked():
            raise self._at_work()
        captured = capture_cell(plain, namespace, transform, without=self._known(namespace, chosen))
        sent = {name: namespace[name] for name in captured.names if name in namespace}

        def perform(cancelled: threading.Event | None) -> engine.Outcome:
            finished = self._perform(job, captured, _Wish("cell", ranks, options, cancelled=cancelled))
            self._remember(sent, chosen)
            return finished

        return perform

    def push(self, variables: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Give the ranks variables; names that refer to one object go on referring to one."""
        for name in variables:
            if not str(name).isidentifier():
                msg = f"push was given {name!r:.100} as a name, which is none. Give Python names."
                raise OptionError(msg)
        captured = capture_cell_values(dict(variables))
        for name in variables:
            self._sent.pop(name, None)
        self._check(self._perform(PushJob(), captured, _Wish("push", ranks, watch=silent)))

    def pull(self, *names: str, ranks: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return each variable as a list in rank order. Raises `NblaunchError` for one that a rank lacks."""
        if not names:
            msg = "pull was given no name. Name the variables: pull('loss', 'model')."
            raise OptionError(msg)
        chosen = self.chosen(ranks)
        captured = Captured(payload.dumps(()), (), {})
        finished = self._perform(PullJob(names=tuple(names)), captured, _Wish("pull", ranks, watch=silent))
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

    def _check(self, finished: engine.Outcome) -> RunResult:
        if finished.error is not None:
            raise finished.error
        assert finished.result is not None  # noqa: S101 - without a result there is an error
        return finished.result

    def _perform(
        self, job: CellJob | FunctionJob | PushJob | PullJob, captured: Captured, wish: _Wish
    ) -> engine.Outcome:
        chosen = self.chosen(wish.ranks)
        launch = engine.Launch(
            job=job,
            captured=captured,
            options=wish.options or self.options,
            placement=self.placement,
            environ={},
            title=wish.title,
            cancelled=wish.cancelled,
        )
        if not self._busy.acquire(blocking=False):
            raise self._at_work()
        try:
            if not self.open:
                msg = f"session {self.name!r} has ended. Start another one (%distributed start)."
                raise LaunchError(msg, phase="job")
            watcher = (wish.watch or self.watch)(wish.title, self.placement.backend)
            subset = None if wish.ranks is None else chosen
            return engine.conduct(
                self.group, launch, self._prepare, watcher, private=self._private, ranks=subset
            )
        finally:
            self._busy.release()

    def inspect(self, name: str, *, rank: int = 0) -> str:
        """Return what `name?` shows on a rank."""
        captured = capture_call(introspection.describe, (name,), {}, None)
        wish = _Wish("inspect", [rank], watch=silent)
        text: str = self._check(self._perform(FunctionJob(name="inspect"), captured, wish)).values[0]
        if not text:
            msg = f"inspect: name {name!r} is not defined on rank {rank}."
            raise NblaunchError(msg)
        return text

    def complete(self, code: str, position: int) -> tuple[int, list[str]]:
        """Return how many characters before `position` rank 0 would replace, and by what."""
        if self._busy.locked() or not self.open:
            return 0, []
        captured = capture_call(introspection.complete, (code, position), {}, None)
        wish = _Wish("complete", [0], self.options, watch=silent)
        found: tuple[int, list[str]] = self._check(
            self._perform(FunctionJob(name="complete"), captured, wish)
        ).values[0]
        return found

    def _at_work(self) -> NblaunchError:
        return NblaunchError(
            f"a job was given to session {self.name!r}, whose ranks are at work on another one. Wait for "
            "it (handle.result()), stop it (handle.cancel()), or use fresh ranks (--fresh)."
        )

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
        return self.group.names.get(0, ())

    def _known(self, namespace: Mapping[str, Any], chosen: tuple[int, ...]) -> frozenset[str]:
        """Return the names that need not be sent: the ranks' own, and what they have from the notebook."""
        if self._sent_to != self.group.attempt:
            # Other processes than those that were sent it.
            self._sent, self._sent_to = {}, self.group.attempt
        everywhere = frozenset.intersection(*(frozenset(self.group.names.get(rank, ())) for rank in chosen))
        known = set()
        for name in everywhere:
            sent = self._sent.get(name)
            same = sent is not None and sent.value is namespace.get(name) and sent.ranks.issuperset(chosen)
            if sent is None or same:
                known.add(name)
        return frozenset(known)

    def _remember(self, sent: Mapping[str, Any], chosen: tuple[int, ...]) -> None:
        for name, value in sent.items():
            before = self._sent.get(name)
            ranks = frozenset(chosen)
            if before is not None and before.value is value:
                ranks |= before.ranks
            self._sent[name] = _Sent(value, ranks)

    # --- the ranks themselves ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt the job that is running, as the stop button does; the variables stay."""
        self.group.interrupt()

    def restart(self) -> None:
        """Start all ranks anew; all of their variables are gone."""
        before = self.group.attempt
        self.group.restart("a restart was asked for")
        deadline = time.monotonic() + self.options.grace + _CLOSE_SECONDS
        while self.group.attempt == before and self.open and time.monotonic() < deadline:
            self.group.closed.wait(0.01)
        self._start()
        self.group.forget_notes()

    def stacks(self) -> HangReport:
        """Return where each rank is, and in which collective."""
        return self.group.where()

    def status(self) -> SessionStatus:
        """Return what each rank is doing, and the memory that is its own."""
        members, job = self.group.state, self.group.job
        running = job.state.ranks if job is not None and not job.ended.is_set() else {}
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
        self.group.leave()
        if not self.group.closed.wait(_CLOSE_SECONDS):
            self.group.stop()
            self.group.closed.wait(_CLOSE_SECONDS)
        self.group.close()
        self._sent = {}
        self._finalizer.detach()

    def _start(self) -> None:
        """Wait until the ranks are ready, by having them do something."""
        captured = capture_call(int, (), {}, None)
        launch = engine.Launch(
            job=FunctionJob(name="start"),
            captured=captured,
            options=self.options,
            placement=self.placement,
            environ={},
            title="start",
        )
        finished = engine.conduct(self.group, launch, self._prepare, SilentWatcher(), private=self._private)
        error = finished.error
        if isinstance(error, RunFailedError) and not isinstance(error, LaunchError):
            msg = f"the ranks of session {self.name!r} could not be started: {error}"
            raise LaunchError(msg, phase="job") from error
        if error is not None:
            raise error


def capture_cell_values(values: dict[str, Any]) -> Captured:
    """Capture variables that are to be pushed; raises `CaptureError` for one that cannot be sent."""
    source = "(" + ", ".join(values) + ",)" if values else "()"
    return capture_cell(source, values)


def _end(group: WorkerGroup) -> None:
    """End the ranks of a session that nobody refers to any more."""
    group.leave()
