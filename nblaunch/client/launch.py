"""A job of this process, before it is given: placed, captured, and written for the ranks."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nblaunch import _inherited, _notebook
from nblaunch._errors import LaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch.capture import pickling, shared_memory
from nblaunch.capture.capture import Captured, called_name, capture_call
from nblaunch.capture.pickling import Packed
from nblaunch.capture.shared_memory import Outgoing
from nblaunch.client.local import Runtime, local
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import NodeEnvironment, Placement, PlaceRun
from nblaunch.protocol.messages import (
    CellJob,
    CodeManifest,
    CodeTree,
    Dispatch,
    FunctionJob,
    Insight,
    Objects,
    Phase,
    PullJob,
    PushJob,
    ScriptJob,
)

STANDBY_SWITCH = "NBLAUNCH_STANDBY"
"""`0` turns it off; `1` turns it on outside notebooks too, where programs seldom run the same job again."""


@dataclass(frozen=True, slots=True)
class RankPayload:
    """What `ranks` are sent with a job, and all others that have no payload of their own."""

    captured: Captured
    ranks: frozenset[int] = frozenset()
    objects: Objects | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A job with everything that is decided before a process starts."""

    job: CellJob | FunctionJob | ScriptJob | PushJob | PullJob
    options: LaunchOptions
    placement: Placement
    environ: dict[str, str]
    title: str
    payloads: tuple[RankPayload, ...] = ()
    """One for all ranks, or one for each group of ranks that know the same; without any, nothing is sent."""
    internal: bool = False
    """Whether its result is never shown."""
    look: bool = False
    """Whether it only looks into a rank."""
    arrived: Callable[[], None] = lambda: None
    """Called once the payloads have arrived on all ranks."""
    notices: tuple[str, ...] = ()
    unheeded: str = ""
    """A warning of variables that have no effect in the ranks."""

    @property
    def backend(self) -> str:
        """Return the backend of the ranks' default process group, "" where none is formed."""
        return self.placement.backend if self.options.init_process_group else ""


def refuse_inside_rank() -> None:
    """Raise `LaunchError` in a process that is itself a rank."""
    rank = _notebook.inside_rank()
    if rank is not None:
        msg = (
            f"a run was started inside rank {rank} of a run, but a rank cannot start ranks of its own. Start "
            "it in the notebook, outside the distributed cell."
        )
        raise LaunchError(msg, phase=Phase.FORK.value, kind=FailureKind.INSIDE_A_RANK)


def place_launch(
    options: LaunchOptions, runtime: Runtime | None = None
) -> tuple[Placement, dict[str, str], str]:
    """Decide ranks, devices and backend; return them, the ranks' environment, and a warning about it.

    `runtime` is where they will be: by default this process's own.
    """
    refuse_inside_rank()
    if sys.platform == "win32":
        msg = "torchelastic starts ranks on POSIX systems only, and this is Windows. Use WSL2."
        raise LaunchError(msg, phase=Phase.FORK.value)
    cwd = _inherited.working_directory()
    _inherited.check_start_method(options.start_method)
    environ = {**os.environ, **options.env}
    # What the user's code has registered here; torch is not loaded for it.
    known = getattr(sys.modules.get("torch.distributed"), "Backend", None)
    request = PlaceRun(
        options=options,
        environ=_inherited.encoded(environ),
        cwd=cwd,
        path=_inherited.search_path(sys.path),
        backends=() if known is None else tuple(known.backend_list),
    )
    placed = local().ask(request) if runtime is None else runtime.ask_on_a_line(request)
    return placed.placement, environ | placed.added, placed.unheeded


def environment_for(options: LaunchOptions) -> NodeEnvironment | None:
    """Return this process's Python environment if `--sync-env` is given, else None.

    Raises `OptionError` for packages that another machine cannot install.
    """
    if not options.sync_env:
        return None
    from nblaunch.client.packages import environment_of

    return environment_of(sys.path, os.fsdecode(_inherited.working_directory()), os.environ)


def with_log_dir(options: LaunchOptions) -> LaunchOptions:
    """Make the user's log directory, as this process's umask has it; return the options with its whole path.

    Raises `OptionError` if it cannot be made.
    """
    if not options.log_dir:
        return options
    directory = Path(options.log_dir).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = (
            f"log_dir={str(directory)!r} cannot be made: {error.strerror}. Give a directory that you can "
            "write to."
        )
        raise OptionError(msg, kind=FailureKind.NOT_WRITABLE) from error
    return replace(options, log_dir=str(directory))


def with_metrics_file(options: LaunchOptions) -> LaunchOptions:
    """Make the user's file of metrics, as this process's umask has it; return the options with its path.

    Raises `OptionError` if it cannot be written.
    """
    if not options.metrics_file:
        return options
    file = Path(options.metrics_file).absolute()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        msg = (
            f"metrics_file={str(file)!r} cannot be written: {error.strerror}. Give a file that you can write "
            "to."
        )
        raise OptionError(msg, kind=FailureKind.NOT_WRITABLE) from error
    return replace(options, metrics_file=str(file))


def standby_wanted() -> bool:
    """Whether this process prepares groups ahead at all."""
    switch = os.environ.get(STANDBY_SWITCH, "").strip().lower()
    if switch in ("0", "false", "off", "no"):
        return False
    return bool(switch) or getattr(_notebook.shell(), "kernel", None) is not None


def function_job(fn: object, args: Sequence[Any]) -> FunctionJob:
    """Return the job that calls `fn`. Raises `OptionError` if `fn` is not callable or `args` no sequence."""
    if not callable(fn):
        msg = f"run(): {fn!r:.200} is not callable. Pass a function or a script."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    given: object = args
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        msg = f"run(): args={args!r:.200} is not a tuple or list. Pass args=({args!r:.200},)."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    return FunctionJob(name=called_name(fn).replace("<locals>.", ""))


def prepare_call(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: LaunchOptions
) -> Launch:
    """Place and capture a call of `fn` on fresh ranks."""
    job = function_job(fn, args)
    placement, environ, unheeded = place_launch(options)
    captured = capture_call(fn, tuple(args), dict(kwargs or {}), _notebook.namespace())
    payloads = (RankPayload(captured),)
    return Launch(job, options, placement, environ, job.name, payloads, unheeded=unheeded)


def code_of(launch: Launch) -> CodeManifest | None:
    """Return the manifest of the notebook's own files that a job may import; None if it needs none.

    Raises `CaptureError` if the files are too large to send.
    """
    job = launch.job
    if launch.options.on is None or isinstance(job, PullJob) or (launch.internal and not launch.payloads):
        return None
    sources = [source for each in launch.payloads for source in each.captured.sources.values()]
    scripts: tuple[str, ...] = ()
    match job:
        case CellJob(source=source):
            sources.append(source)
        case ScriptJob(module=True, name=name):
            sources.append(f"import {name}.__main__")
        case ScriptJob(program=False, file=file) if file:
            scripts = (file,)
    directory = os.fsdecode(_inherited.working_directory())
    return local().files.manifest(
        sys.path,
        directory,
        sys.modules,
        sources,
        compiled=[file for each in launch.payloads for file in each.captured.packed.filenames],
        scripts=scripts,
    )


def dispatches(
    launch: Launch, sent: ExitStack, root: Callable[[], Path], code: CodeManifest | None
) -> tuple[tuple[tuple[int, ...], Dispatch], ...]:
    """Write payloads, which `sent` frees, below `root()` if memory has no room.

    Returns the messages and who gets each; the last is for all that have none of their own.
    """
    tree = None if code is None else CodeTree(code.tree, code.roots)
    insight = Insight() if launch.internal or launch.look else _insight(launch.options)
    found: list[tuple[tuple[int, ...], Dispatch]] = []
    written: list[tuple[Packed, Outgoing]] = []
    for each in launch.payloads or (RankPayload(Captured(pickling.dumps(()), (), {})),):
        captured = each.captured
        outgoing = next((there for packed, there in written if packed.is_same(captured.packed)), None)
        if outgoing is None:
            outgoing = sent.enter_context(shared_memory.put(captured.packed, root))
            written.append((captured.packed, outgoing))
        dispatch = Dispatch(
            job=launch.job,
            payload=outgoing.payload,
            objects=each.objects,
            imports=captured.imports,
            code=tree,
            internal=launch.internal,
            insight=insight,
            sources={name: (_notebook.title_of(name), source) for name, source in captured.sources.items()},
        )
        found.append((tuple(each.ranks), dispatch))
    _, last = found.pop()
    return (*found, ((), last))


def _insight(options: LaunchOptions) -> Insight:
    """Return what is to be seen of a job with these options."""
    return Insight(
        profile=options.profile or options.profile_steps is not None,
        profile_steps=options.profile_steps,
        watch=options.watch,
        job=secrets.token_hex(8) if options.watch else "",
    )
