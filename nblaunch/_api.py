"""`nblaunch.run` and `nblaunch.Session`, put together from the layers: options, group, view."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from nblaunch import _notebook
from nblaunch._errors import OptionError, RunFailedError
from nblaunch._results import RunResult
from nblaunch.capture.capture import capture_call
from nblaunch.group import launcher, scripts
from nblaunch.group.background import Handle
from nblaunch.group.launcher import Launch
from nblaunch.group.scripts import Script, is_script
from nblaunch.group.session import LiveSession, silent
from nblaunch.group.usage import SessionStatus
from nblaunch.group.wait import SilentWatcher, Watcher
from nblaunch.nodes.members import connect_peers
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import CellJob, FunctionJob
from nblaunch.protocol.reports import HangReport
from nblaunch.view.display import watcher


def run(  # noqa: PLR0913 - the options of a run
    fn: Callable[..., Any] | str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | str | None = None,
    check: bool = True,
    display: bool | None = None,
    **options: Any,
) -> RunResult:
    """Run `fn(*args, **kwargs)`, or a script, on every rank of a fresh worker group and return all values.

    `fn` may be defined in the notebook, a module or a script without a `__main__` guard; a closure, a
    partial, a bound method, a callable object or a coroutine function. It is sent by value with all it
    refers to, so every rank works on copies. Each rank has torchrun's environment and, unless
    `init_process_group=False`, a default process group.

    `fn` may be the path of a script (a text or path-like), run as `__main__` as torchrun runs it: `args` are
    the texts that it reads in `sys.argv`, where `${local_rank}` stands for the rank's own. With `module=True`
    it is the name of a module, as for `python -m`; with `no_python=True` any program, run as a child of the
    rank. A value is the exit status 0, or with `pull=("model", "losses")` a dict of these globals of the
    script. A script makes its own process group, as under torchrun: there is a default one only with
    `init_process_group=True`.

    `nproc` is the number of ranks: an int, `"gpu"`, `"cpu"`, or `"auto"` (one per GPU, else 2). `args` and
    `kwargs` may hold tensors of any size: CPU tensors and arrays are written once into shared memory and
    mapped by every rank. `options` are those of `LaunchOptions`: `backend`, `env`, `timeout` (seconds),
    `grace` (seconds), `max_restarts`, `log_dir`, ...

    `display` shows the run while it lasts; by default in IPython only. With `check=False` a failed run is
    returned, not raised.

    Raises `OptionError` and `CaptureError` before any process starts, `LaunchError` if the ranks could not
    be started, `RunTimeoutError` after `timeout`, and `RunFailedError` if a rank failed; the last two hold
    what came back in `.result`.

    >>> def total(scale):                                                  # doctest: +SKIP
    ...     import torch, torch.distributed as dist
    ...     t = torch.ones(1) * scale * (dist.get_rank() + 1)
    ...     dist.all_reduce(t)
    ...     return t.item()
    >>> nblaunch.run(total, args=(10,), nproc=2).values                    # doctest: +SKIP
    [30.0, 30.0]
    >>> nblaunch.run("train.py", args=["--lr", "1e-3"], nproc=2).values    # doctest: +SKIP
    [0, 0]
    """
    if nproc is not None:
        options["nproc"] = nproc
    script = is_script(fn)
    if script:
        options.setdefault("init_process_group", False)
    launch_options = LaunchOptions.from_keywords(script=script, **options)
    shown = _notebook.shell() is not None if display is None else display

    def watch(title: str, backend: str, note: str) -> Watcher:
        return watcher(title, backend, note) if shown else SilentWatcher()

    return call(fn, args, kwargs, check=check, options=launch_options, watch=watch)


# `nblaunch.run`: a function or a script on N ranks.


def call(  # noqa: PLR0913 - the options of a run
    fn: Callable[..., Any] | Script,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    check: bool,
    options: LaunchOptions,
    watch: Callable[[str, str, str], Watcher],
) -> RunResult:
    """Run `fn` under `options`; `watch(title, backend, note)` makes what shows the run."""
    if is_script(fn):
        launch = scripts.launch(fn, args, kwargs, options)
    else:
        launch = _launch(fn, args, kwargs, options)
    shown_by = watch(launch.title, launch.backend, launch.placement.note)
    finished = launcher.run_fresh(launch, shown_by, connect_peers)
    failed = isinstance(finished.error, RunFailedError) and finished.result is not None
    if finished.error is not None and (check or not failed):
        raise finished.error
    assert finished.result is not None  # noqa: S101 - without a result there is an error
    return finished.result


def _launch(
    fn: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: LaunchOptions
) -> Launch:
    """Return a run of a function; its arguments are captured here."""
    if not callable(fn):
        msg = f"run() was given {fn!r:.200} to run, which is not callable. Pass a function or a script."
        raise OptionError(msg)
    placement, environ = launcher.place_launch(options)
    captured = capture_call(fn, tuple(args), dict(kwargs or {}), _notebook.namespace())
    name = getattr(fn, "__qualname__", type(fn).__qualname__).replace("<locals>.", "")
    return Launch(
        job=FunctionJob(name=name),
        captured=captured,
        options=options,
        placement=placement,
        environ=environ,
        title=name,
    )


# `nblaunch.Session`, put together from the layers: options, session, view.


class Session:
    """Ranks that stay, and keep their variables from one job to the next.

    `nproc` and `options` are those of `run()`; they hold as long as the session does. A Python exception, an
    interrupt or a deadlock costs no variable: a rank in C code is waited for, ranks that are stuck in a
    collective are freed, and the default process group is formed again if it may be broken. A rank that dies
    takes the others along: all are started anew, and `result.warnings` says so.

    Raises `OptionError` before any process starts, `LaunchError` if the ranks could not be started.

    >>> with nblaunch.Session(nproc=4) as session:                         # doctest: +SKIP
    ...     session.push({"scale": 10})
    ...     session.cell("import torch.distributed as dist; y = scale * dist.get_rank()")
    ...     session.pull("y")
    {'y': [0, 10, 20, 30]}
    """

    def __init__(
        self,
        nproc: int | str | None = None,
        *,
        display: bool | None = None,
        name: str = "default",
        **options: Any,
    ) -> None:
        """Start the ranks and wait until they are ready."""
        if nproc is not None:
            options["nproc"] = nproc
        shown = _notebook.shell() is not None if display is None else display
        self._live = LiveSession(
            LaunchOptions.from_keywords(**options),
            connect_peers,
            name=name,
            watch=watcher if shown else silent,
        )
        self._numbers = itertools.count(1)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        check: bool = True,
    ) -> RunResult:
        """Call `fn(*args, **kwargs)` on the ranks and return all values, as `nblaunch.run` does.

        `ranks` are those that take part; the others stay idle. Raises `RunFailedError` if a rank failed
        (with `check=False` the result is returned), `NblaunchError` while another job is running.
        """
        return _given_back(self._live.call(fn, args, kwargs, ranks=ranks)(None), check=check)

    def submit(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> Handle:
        """Call `fn` in the background: `handle.result()`, `.cancel()`, `.done()`, `await handle`."""
        return Handle(self._live.call(fn, args, kwargs, ranks=ranks), claim=self._live.claim)

    def cell(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        check: bool = True,
        namespace: dict[str, Any] | None = None,
    ) -> RunResult:
        """Run source code as a cell; its last expression is the value, and its variables stay.

        What it uses and the ranks do not have comes from the notebook, or from `namespace`. A value that
        cannot be sent is only shown, with a warning in `result.warnings`, and so is a model, an optimizer or
        a data loader, which `pull` brings: `result.values` then holds objects that say why when they are
        used.
        """
        return _given_back(
            self._live.prepared(
                # A file name of its own: for a function of an earlier cell, tracebacks and
                # `inspect.getsource` read the lines of that cell.
                CellJob(
                    source=source,
                    filename=f"<session cell {next(self._numbers)}>",
                    title="session cell",
                    first_line=1,
                    flags=_notebook.future_flags(),
                ),
                _plain(source),
                _notebook.namespace() or {} if namespace is None else namespace,
                _plain,
                ranks=ranks,
            )(None),
            check=check,
        )

    def push(self, mapping: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Give the ranks variables, large ones through shared memory, written once for all ranks.

        Raises `CaptureError` for a value that cannot be sent.
        """
        self._live.push(mapping, ranks=ranks)

    def pull(self, *names: str, ranks: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return variables, each as a list in rank order; raises `NblaunchError` if a rank lacks one."""
        return self._live.pull(*names, ranks=ranks)

    def interrupt(self) -> None:
        """Interrupt the job that is running, as the stop button does; the variables stay."""
        self._live.interrupt()

    def restart(self) -> None:
        """Start all ranks anew; all of their variables are gone."""
        self._live.restart()

    def status(self) -> SessionStatus:
        """Return what each rank is doing, and how much memory is its own."""
        return self._live.status()

    def stacks(self) -> HangReport:
        """Return where each rank is, ranks with the same stack together."""
        return self._live.stacks()

    def close(self) -> None:
        """End the ranks and wait until they are gone; does nothing the second time."""
        self._live.close()

    def __enter__(self) -> Self:
        """Use the session in a `with` statement, which closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        self.close()

    def __repr__(self) -> str:
        """Say what it is, in one line."""
        live = self._live
        state = "open" if live.open else "closed"
        return f"<Session {live.name!r}: {live.world_size} ranks, {live.placement.backend}, {state}>"


def _plain(source: str) -> str:
    running = _notebook.shell()
    if running is not None:
        return str(running.transform_cell(source))
    from IPython.core.inputtransformer2 import TransformerManager

    return str(TransformerManager().transform_cell(source))


def _given_back(finished: launcher.Outcome, *, check: bool) -> RunResult:
    failed = isinstance(finished.error, RunFailedError) and finished.result is not None
    if finished.error is not None and (check or not failed):
        raise finished.error
    assert finished.result is not None  # noqa: S101 - without a result there is an error
    return finished.result
