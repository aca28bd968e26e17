"""A job of this process: placed and captured, written for the ranks, and the fold of what comes of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nblaunch import _inherited, _notebook
from nblaunch._errors import LaunchError, NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._inherited import JOIN_KEY
from nblaunch._results import EventLog
from nblaunch.capture import pickling, shared_memory
from nblaunch.capture.capture import Captured, called_name, capture_call
from nblaunch.capture.pickling import Packed
from nblaunch.capture.shared_memory import Outgoing
from nblaunch.client.knowledge import Delivery, KnowledgeView
from nblaunch.client.line import ClientLine, SentRequest
from nblaunch.client.local import Runtime, local
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import client as wire
from nblaunch.protocol import messages
from nblaunch.protocol.state import Message, RunState, advance, decode_state

STANDBY_SWITCH = "NBLAUNCH_STANDBY"
"""`0` turns it off; `1` turns it on outside notebooks too, where programs seldom run the same job again."""


@dataclass(frozen=True, slots=True)
class RankPayload:
    """The payload of a job for `ranks`, and for all ranks that have no payload of their own."""

    captured: Captured
    ranks: frozenset[int] = frozenset()
    objects: messages.Objects | None = None


# Each release wakes the runtime, beside the next cell.
_MOST_WAITING = 8


@dataclass(eq=False)
class JobRanks:
    """Ranks that take jobs: a session's, or those of one run, which its job starts."""

    runtime: Runtime
    key: str
    """Their name in the runtime."""
    notices: tuple[str, ...] = ()
    """About their place, for the result of a run."""
    open: bool = False
    """Whether they are a session's that goes on."""

    def release(self, job: int, output: list[bool]) -> None:
        """Have the runtime release a job; in a session, one without `output` with those after it."""
        waits = self.open and not any(output)
        self.runtime.note(wire.ReleaseJob(job=job, pid=os.getpid()), _MOST_WAITING if waits else 0)


@dataclass(eq=False, kw_only=True)
class ClientJob:
    """A job that this process submits, or watches; used by one thread at a time.

    What ranks run is decided before it is submitted; where that was refused because the ranks are others by
    then, it begins again, under another number.
    """

    title: str
    options: LaunchOptions
    placement: wire.Placement
    work: (
        messages.CellJob | messages.FunctionJob | messages.ScriptJob | messages.PushJob | messages.PullJob
    ) = field(default_factory=messages.FunctionJob)
    subset: tuple[int, ...] | None = None
    """The ranks that take part; None: all."""
    payloads: tuple[RankPayload, ...] = ()
    """One for all ranks, or one for each group of ranks that know the same; without any, nothing is sent."""
    internal: bool = False
    """Its result is never shown. Notices about the ranks are reported with the next job that is shown."""
    brief: bool = False
    """The next job waits for this one and is not refused: the user does not know of it."""
    query: bool = False
    """It only queries a rank, which a client that watches may do too."""
    notices: tuple[str, ...] = ()

    # What a session's ranks know of the notebook, and what they know once they have this.
    deliveries: tuple[tuple[KnowledgeView, Delivery], ...] = ()
    captured_for: tuple[int, int] | None = None
    """The attempt, and the number of the session's jobs before this one; None: captured for any ranks."""
    capture_again: Callable[[ClientJob], object] = lambda _: None
    """Captures once more, for ranks that have other things by now."""
    arrived: Callable[[], object] = lambda: None
    """Called once the payloads have arrived on all ranks, and they keep them."""

    # How it is submitted.
    ranks: JobRanks
    line: ClientLine = field(init=False)
    attempt: int | None = None
    """The attempt that they have to be of, if that matters."""
    others: Callable[[object], None] = lambda _: None
    """Takes the events that are not the job's."""
    watching: Callable[[], bool] = lambda: False
    """Whether this process only watches it: another client submits jobs by now, or has submitted this one."""
    private: bool = False
    """Whether the runtime keeps values for other clients: what is written to them stays here."""

    # What has come of it.
    number: int = field(init=False)
    state: RunState = field(init=False)
    ended: bool = False
    end: wire.JobEnd = field(default_factory=wire.JobEnd)
    request: SentRequest[wire.Submitted | wire.Stale] | None = None
    """The request by which this process has submitted it."""
    questions: deque[messages.Asked] = field(default_factory=deque)
    """Questions of ranks to the user, the oldest first."""

    @property
    def backend(self) -> str:
        """Return the backend of the ranks' default process group, "" where none is formed."""
        return self.placement.backend if self.options.init_process_group else ""

    def begin(self) -> None:
        """Begin with a new number and nothing folded but the notices."""
        self.number, self.request = self.ranks.runtime.number(), None
        self.state = RunState.fresh(self.placement.nproc, self.subset, time=time.time())
        captured = (text for each in self.payloads for text in each.captured.notices)
        for text in dict.fromkeys((*self.notices, *captured)):
            self.fold(messages.Noticed(text=text))

    def fold(self, message: Message) -> None:
        self.state = advance(self.state, message)

    def take(self, event: object) -> None:
        """Take an event; those of other jobs change nothing."""
        match event:
            case wire.PayloadKept(job=self.number):
                self.arrived()
            case wire.Question(job=self.number, asked=asked):
                self.questions.append(asked)
            case wire.JobRefreshed(job=self.number, state=state, questions=questions):
                self.state, self.questions = decode_state(state), deque(questions)
            case wire.JobEnded(job=self.number, end=end):
                self.ended, self.end = True, end
            case messages.Noticed(text=text):
                print(text, flush=True)  # noqa: T201 - the run waits for the nodes that this is about

    @property
    def error(self) -> BaseException | None:
        """The error that ended the group."""
        return None if self.end.error is None else self.end.error.error()


class KeptJob:
    """What the runtime keeps of a job as long as a result refers to this: logs, events, late warnings."""

    def __init__(self, ranks: JobRanks, number: int) -> None:
        """Have the runtime release the job when this object is collected."""
        self._runtime = ranks.runtime
        self._number = number
        self._late: list[str] = []
        self._complete = False
        self._output = [True]
        self._finalizer = weakref.finalize(self, ranks.release, number, self._output)
        # A program that ends stops the runtime, which removes all logs.
        self._finalizer.atexit = False

    def note_output(self, state: RunState) -> None:
        """Note whether the job has written anything, which takes room until it is released."""
        written = [rank.transcript.written for each in state.attempts for rank in each.ranks.values()]
        self._output[:] = [any(written)]

    def __iter__(self) -> Iterator[str]:
        """Yield the warnings since the end of the job."""
        if not self._complete and self._runtime.is_of(os.getpid()):
            try:
                answer = self._runtime.ask(wire.LateOf(job=self._number))
            except NblaunchError:
                self._complete = True  # the runtime has ended
            else:
                self._late, self._complete = list(answer.texts), answer.complete
        return iter(self._late)


class RemoteEvents(EventLog):
    """torchelastic's events of a job, which the runtime has once the agent has ended."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        """Ask for them when they are looked at; the runtime has those of the last released jobs, too."""
        super().__init__()
        self._runtime: Runtime | None = runtime
        self._number = number

    def all(self) -> tuple[wire.Event, ...]:
        """Return the complete log: values arrive before the ranks have exited, which takes a moment."""
        runtime = self._runtime
        if runtime is not None and runtime.is_of(os.getpid()):
            # Where it cannot answer, the runtime has ended, or this was one of many runs.
            with contextlib.suppress(NblaunchError):
                self._events = list(runtime.ask_on_a_line(wire.EventsOf(job=self._number)).events)
            self._runtime = None
        return tuple(self._events)


# Before it is submitted.


def prepare_of(
    options: LaunchOptions, *, timeout: float | None = None, script: bool = False
) -> messages.Prepare:
    """Return the message that makes processes ranks of this notebook, as it is now, but for their devices.

    A `script` finds what it finds under torchrun: its own directory in place of an interactive session's.
    Raises `LaunchError` where ranks in this process's directory could not work.
    """
    # torchrun leaves this in its environment, so its workers have it; here no handler is ever installed.
    signals = {"TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle}
    return messages.Prepare(
        environ=_inherited.encoded({**os.environ, **options.env, **signals}),
        cwd=_inherited.working_directory(),
        path=_inherited.search_path(entry for entry in sys.path if entry or not script),
        argv=tuple(os.fsencode(each) for each in sys.argv[:1]) or (b"",),
        umask=_inherited.umask(),
        limits=_inherited.limits(),
        timeout=timeout,
    )


def refuse_inside_rank() -> None:
    rank = _notebook.inside_rank()
    if rank is not None:
        msg = (
            f"a run was started inside rank {rank} of a run, but a rank cannot start ranks of its own. Start "
            "it in the notebook, outside the distributed cell."
        )
        raise LaunchError(msg, phase=messages.Phase.FORK.value, kind=FailureKind.INSIDE_A_RANK)


def opening(options: LaunchOptions, key: str, *, script: bool = False, **how: Any) -> wire.OpenRanks:
    """Return the request for ranks of this process, as it is now, which the runtime is to call `key`.

    Raises `OptionError` and `LaunchError` for what can be told without the runtime.
    """
    if sys.platform == "win32":
        msg = "torchelastic starts ranks on POSIX systems only, and this is Windows. Use WSL2."
        raise LaunchError(msg, phase=messages.Phase.FORK.value)
    _inherited.check_start_method(options.start_method)
    environment = None
    if options.sync_env:
        from nblaunch.client.packages import environment_of

        environment = environment_of(sys.path, os.fsdecode(_inherited.working_directory()), os.environ)
    # What the user's code has registered here; torch is not loaded for it.
    known = getattr(sys.modules.get("torch.distributed"), "Backend", None)
    return wire.OpenRanks(
        session=key,
        options=options,
        prepare=prepare_of(options, timeout=how.pop("timeout", None), script=script),
        backends=() if known is None else tuple(known.backend_list),
        untouched=script,
        environment=environment,
        **how,
    )


def fresh_job(title: str, options: LaunchOptions, *, script: bool = False) -> ClientJob:
    """Return a job on fresh ranks, for which these have been decided, and nothing else."""
    refuse_inside_rank()
    key = secrets.token_hex(8)
    join_key = {**os.environ, **options.env}.get(JOIN_KEY, "")
    request = opening(options, key, script=script, standby=standby_wanted(), join_key=join_key)
    runtime, opened = local().ask(request)
    ranks = JobRanks(runtime, key, tuple(filter(None, (opened.placement.warning, opened.unheeded))))
    # A job that is never submitted: its cell cannot be captured, or another one was run.
    weakref.finalize(ranks, runtime.note, wire.DismissSession(session=key)).atexit = False
    return ClientJob(title=title, options=options, placement=opened.placement, ranks=ranks)


def with_whole_paths(options: LaunchOptions, *names: str) -> LaunchOptions:
    """Make the user's `log_dir` and `metrics_file` with this process's umask; return their absolute paths.

    Raises `OptionError` if one cannot be made.
    """
    changed: dict[str, Any] = {}
    for name in names:
        if not getattr(options, name):
            continue
        path = Path(getattr(options, name)).absolute()
        done, what = ("made", "directory") if name == "log_dir" else ("written", "file")
        try:
            (path if name == "log_dir" else path.parent).mkdir(parents=True, exist_ok=True)
            if name == "metrics_file":
                path.open("ab").close()
        except OSError as error:
            advice = f"Give a {what} that you can write to."
            msg = f"{name}={str(path)!r} cannot be {done}: {error.strerror}. {advice}"
            raise OptionError(msg, kind=FailureKind.NOT_WRITABLE) from error
        changed[name] = str(path)
    return replace(options, **changed) if changed else options


def standby_wanted() -> bool:
    """Whether this process prepares groups ahead at all."""
    switch = os.environ.get(STANDBY_SWITCH, "").strip().lower()
    if switch in ("0", "false", "off", "no"):
        return False
    return bool(switch) or getattr(_notebook.shell(), "kernel", None) is not None


def function_job(fn: object, args: Sequence[Any]) -> messages.FunctionJob:
    """Return the job that calls `fn`. Raises `OptionError` if `fn` is not callable or `args` no sequence."""
    if not callable(fn):
        msg = f"run(): {fn!r:.200} is not callable. Pass a function or a script."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    given: object = args
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        msg = f"run(): args={args!r:.200} is not a tuple or list. Pass args=({args!r:.200},)."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    return messages.FunctionJob(name=called_name(fn).replace("<locals>.", ""))


def prepare_call(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: LaunchOptions
) -> ClientJob:
    work = function_job(fn, args)
    job = fresh_job(work.name, options)
    captured = capture_call(fn, tuple(args), dict(kwargs or {}), _notebook.namespace())
    job.work, job.payloads = work, (RankPayload(captured),)
    return job


def code_of(job: ClientJob) -> messages.CodeManifest | None:
    """Return the manifest of the notebook's own files that a job may import; None if it needs none.

    Raises `CaptureError` if the files are too large to send.
    """
    work = job.work
    if job.options.on is None or isinstance(work, messages.PullJob) or (job.internal and not job.payloads):
        return None
    sources = [source for each in job.payloads for source in each.captured.sources.values()]
    scripts: tuple[str, ...] = ()
    match work:
        case messages.CellJob(source=source):
            sources.append(source)
        case messages.ScriptJob(module=True, name=name):
            sources.append(f"import {name}.__main__")
        case messages.ScriptJob(program=False, file=file) if file:
            scripts = (file,)
    directory = os.fsdecode(_inherited.working_directory())
    return local().files.manifest(
        sys.path,
        directory,
        sys.modules,
        sources,
        compiled=[file for each in job.payloads for file in each.captured.packed.filenames],
        scripts=scripts,
    )


def dispatches(
    job: ClientJob, sent: ExitStack, root: Callable[[], Path], code: messages.CodeManifest | None
) -> tuple[tuple[tuple[int, ...], messages.Dispatch], ...]:
    """Write payloads, which `sent` frees, below `root()` if memory has no room.

    Returns the messages and who gets each; the last is for all that have none of their own.
    """
    tree = None if code is None else messages.CodeTree(code.tree, code.roots)
    insight = messages.Insight() if job.internal or job.query else _insight(job.options)
    found: list[tuple[tuple[int, ...], messages.Dispatch]] = []
    written: list[tuple[Packed, Outgoing]] = []
    for each in job.payloads or (RankPayload(Captured(pickling.dumps(()), (), {})),):
        captured = each.captured
        outgoing = next((there for packed, there in written if packed.is_same(captured.packed)), None)
        if outgoing is None:
            outgoing = sent.enter_context(shared_memory.put(captured.packed, root))
            written.append((captured.packed, outgoing))
        dispatch = messages.Dispatch(
            job=job.work,
            payload=outgoing.payload,
            objects=each.objects,
            imports=captured.imports,
            code=tree,
            internal=job.internal,
            insight=insight,
            sources={name: (_notebook.title_of(name), source) for name, source in captured.sources.items()},
        )
        found.append((tuple(each.ranks), dispatch))
    _, last = found.pop()
    return (*found, ((), last))


def _insight(options: LaunchOptions) -> messages.Insight:
    return messages.Insight(
        profile=options.profile or options.profile_steps is not None,
        profile_steps=options.profile_steps,
        watch=options.watch,
        job=secrets.token_hex(8) if options.watch else "",
    )
