"""A job of this process, before it is submitted: placed, captured, and written for the ranks."""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from nblaunch import _inherited, _notebook
from nblaunch._errors import LaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._inherited import JOIN_KEY
from nblaunch.capture import pickling, shared_memory
from nblaunch.capture.capture import Captured, called_name, capture_call
from nblaunch.capture.pickling import Packed
from nblaunch.capture.shared_memory import Outgoing
from nblaunch.client.inherited import prepare_of
from nblaunch.client.jobs import ClientJob, JobRanks, RankPayload
from nblaunch.client.local import local
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import DismissSession, NodeEnvironment, OpenRanks
from nblaunch.protocol.messages import (
    CellJob,
    CodeManifest,
    CodeTree,
    Dispatch,
    FunctionJob,
    Insight,
    Phase,
    PullJob,
    ScriptJob,
)

STANDBY_SWITCH = "NBLAUNCH_STANDBY"
"""`0` turns it off; `1` turns it on outside notebooks too, where programs seldom run the same job again."""


def refuse_inside_rank() -> None:
    """Raise `LaunchError` in a process that is itself a rank."""
    rank = _notebook.inside_rank()
    if rank is not None:
        msg = (
            f"a run was started inside rank {rank} of a run, but a rank cannot start ranks of its own. Start "
            "it in the notebook, outside the distributed cell."
        )
        raise LaunchError(msg, phase=Phase.FORK.value, kind=FailureKind.INSIDE_A_RANK)


def opening(options: LaunchOptions, key: str, *, script: bool = False, **how: Any) -> OpenRanks:
    """Return the request for ranks of this process, as it is now, which the runtime is to call `key`.

    Raises `OptionError` and `LaunchError` for what can be told without the runtime.
    """
    if sys.platform == "win32":
        msg = "torchelastic starts ranks on POSIX systems only, and this is Windows. Use WSL2."
        raise LaunchError(msg, phase=Phase.FORK.value)
    _inherited.check_start_method(options.start_method)
    # What the user's code has registered here; torch is not loaded for it.
    known = getattr(sys.modules.get("torch.distributed"), "Backend", None)
    return OpenRanks(
        session=key,
        options=options,
        prepare=prepare_of(options, timeout=how.pop("timeout", None), script=script),
        backends=() if known is None else tuple(known.backend_list),
        untouched=script,
        environment=environment_for(options),
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
    weakref.finalize(ranks, runtime.note, DismissSession(session=key)).atexit = False
    return ClientJob(title=title, options=options, placement=opened.placement, ranks=ranks)


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
) -> ClientJob:
    """Place and capture a call of `fn` on fresh ranks."""
    work = function_job(fn, args)
    job = fresh_job(work.name, options)
    captured = capture_call(fn, tuple(args), dict(kwargs or {}), _notebook.namespace())
    job.work, job.payloads = work, (RankPayload(captured),)
    return job


def code_of(job: ClientJob) -> CodeManifest | None:
    """Return the manifest of the notebook's own files that a job may import; None if it needs none.

    Raises `CaptureError` if the files are too large to send.
    """
    work = job.work
    if job.options.on is None or isinstance(work, PullJob) or (job.internal and not job.payloads):
        return None
    sources = [source for each in job.payloads for source in each.captured.sources.values()]
    scripts: tuple[str, ...] = ()
    match work:
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
        compiled=[file for each in job.payloads for file in each.captured.packed.filenames],
        scripts=scripts,
    )


def dispatches(
    job: ClientJob, sent: ExitStack, root: Callable[[], Path], code: CodeManifest | None
) -> tuple[tuple[tuple[int, ...], Dispatch], ...]:
    """Write payloads, which `sent` frees, below `root()` if memory has no room.

    Returns the messages and who gets each; the last is for all that have none of their own.
    """
    tree = None if code is None else CodeTree(code.tree, code.roots)
    insight = Insight() if job.internal or job.look else _insight(job.options)
    found: list[tuple[tuple[int, ...], Dispatch]] = []
    written: list[tuple[Packed, Outgoing]] = []
    for each in job.payloads or (RankPayload(Captured(pickling.dumps(()), (), {})),):
        captured = each.captured
        outgoing = next((there for packed, there in written if packed.is_same(captured.packed)), None)
        if outgoing is None:
            outgoing = sent.enter_context(shared_memory.put(captured.packed, root))
            written.append((captured.packed, outgoing))
        dispatch = Dispatch(
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


def _insight(options: LaunchOptions) -> Insight:
    """Return what is to be seen of a job with these options."""
    return Insight(
        profile=options.profile or options.profile_steps is not None,
        profile_steps=options.profile_steps,
        watch=options.watch,
        job=secrets.token_hex(8) if options.watch else "",
    )
