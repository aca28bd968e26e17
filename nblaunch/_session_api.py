"""`nblaunch.Session`, put together from the layers: options, session, view."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from nblaunch._errors import RunFailedError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import CellJob
from nblaunch._reports import HangReport
from nblaunch._results import RunResult
from nblaunch.session import engine, notebook
from nblaunch.session.background import Handle
from nblaunch.session.session import LiveSession, silent
from nblaunch.session.status import SessionStatus
from nblaunch.view.watch import watcher


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
        shown = notebook.shell() is not None if display is None else display
        self._live = LiveSession(
            LaunchOptions.from_keywords(**options), name=name, watch=watcher if shown else silent
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
                    flags=notebook.future_flags(),
                ),
                _plain(source),
                notebook.namespace() or {} if namespace is None else namespace,
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
    running = notebook.shell()
    if running is not None:
        return str(running.transform_cell(source))
    from IPython.core.inputtransformer2 import TransformerManager

    return str(TransformerManager().transform_cell(source))


def _given_back(finished: engine.Outcome, *, check: bool) -> RunResult:
    failed = isinstance(finished.error, RunFailedError) and finished.result is not None
    if finished.error is not None and (check or not failed):
        raise finished.error
    assert finished.result is not None  # noqa: S101 - without a result there is an error
    return finished.result
