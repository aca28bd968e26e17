"""`nblaunch.run` and `nblaunch.Session`, put together from the layers: options, client, view."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from nblaunch import _notebook
from nblaunch._results import Handle, RunResult, SessionInfo, SessionStatus
from nblaunch.capture.names import cell_names
from nblaunch.capture.saved import SavedSession
from nblaunch.client import directory, saves
from nblaunch.client.preparation import ClientJob, prepare_call
from nblaunch.client.run import SilentView, run_fresh
from nblaunch.client.scripts import is_script, prepare_script
from nblaunch.client.session import LiveSession, SessionJob, attach_session, silent
from nblaunch.insight.difference import Difference
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import CellJob
from nblaunch.protocol.reports import HangReport
from nblaunch.view.display import view_of


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
    `grace` (seconds), `max_restarts`, `log_dir`, ... With `on="slurm"`, `on="ssh=host1,host2"` or another
    engine, the engine places `nnodes` nodes, with `nproc` ranks on each.

    `display` shows the run while it lasts; by default only in IPython. With `check=False` a failed run is
    returned, not raised.

    Raises `OptionError` and `CaptureError` before any process starts, `LaunchError` if the ranks could not
    be started, `RunTimeoutError` after `timeout`, `RunPreemptedError` if the engine took the nodes back, and
    `RunFailedError` if a rank failed; the last three hold what came back in `.result`.

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
    prepare: Callable[..., ClientJob] = prepare_script if script else prepare_call
    job = prepare(fn, args, kwargs, launch_options)
    view = view_of(job.title, job.backend, job.placement.note) if _shows(display) else SilentView()
    return run_fresh(job, view).unwrap(check=check)


def _shows(display: bool | None) -> bool:  # noqa: FBT001 - as `run` and `Session` take it
    return _notebook.shell() is not None if display is None else display


def sessions() -> tuple[SessionInfo, ...]:
    """Return the sessions of this user on this machine, those of other kernels too.

    >>> for each in nblaunch.sessions():                                   # doctest: +SKIP
    ...     print(each)
    train: detached, since Nov 22 14:02, of kernel 4711 (train.ipynb): 4 ranks (nccl), 2.1 GB, idle
    """
    return directory.sessions()


class Session:
    """Ranks that stay, and keep their variables from one job to the next.

    `nproc` and `options` are those of `run()`; they hold as long as the session does. An exception, an
    interrupt or a deadlock costs no variable: a rank in C code is waited for, ranks that are stuck in a
    collective are freed, and the default process group is formed again if it may be broken. If a rank dies,
    all ranks are replaced, and `result.warnings` says so.

    With `detach=True` the ranks, their variables and running jobs outlive this process: `Session.attach`
    finds them, from any other process of the same user. They end with `close()`, after `linger` (seconds, or
    a text such as "8h"; by default "4h") without an attached process and a running job, or with the machine.

    With `on="slurm"`, `on="ssh=host1,host2"` or another engine, the engine places `nnodes` nodes, with
    `nproc` ranks on each. The session gives the nodes back when it ends. If the engine takes them back
    earlier, the running job raises `RunPreemptedError`.

    Raises `OptionError` before any process starts, and `LaunchError` if the ranks could not be started or the
    engine did not grant the nodes.

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
        if isinstance(options.get("restore"), os.PathLike):
            options["restore"] = os.fspath(options["restore"])
        watch = view_of if _shows(display) else silent
        self._begin(
            saves.start(LaunchOptions.from_keywords(of_session=True, **options), name=name, watch=watch)
        )

    def _begin(self, live: LiveSession) -> None:
        self._live = live
        # Functions that are loaded from a save have the file names of cells of another session.
        self._numbers = itertools.count(1 if live.options.restore is None else int(time.time()))

    @classmethod
    def attach(cls, name: str | None = None, *, take: bool = False, display: bool | None = None) -> Self:
        """Return a detached session of this user on this machine, the only one if `name` is None.

        Its ranks, their variables and its jobs are as they were left: `jobs` has them. Raises `NblaunchError`
        if there is no such session.

        One process gives a session jobs at a time: the first that attaches, or a later one with `take`. The
        others watch: they have its `jobs` with their results, `status()` and `stacks()`. What would give a
        job, replace ranks or interrupt them raises `NblaunchError`, which names the process that has the
        session. Once that process has closed it or has ended, the next one that gives a job has it.

        >>> session = nblaunch.Session.attach("train")                     # doctest: +SKIP
        >>> session.jobs[-1].result().values                               # doctest: +SKIP
        [0.11, 0.12]
        """
        watch = view_of if _shows(display) else silent
        session = cls.__new__(cls)
        session._begin(  # noqa: SLF001 - of this class
            attach_session(directory.find(name), take=take, watch=watch)
        )
        return session

    @property
    def detached(self) -> bool:
        """Whether the ranks outlive this process."""
        return self._live.detached

    @property
    def jobs(self) -> list[SessionJob]:
        """The jobs that the session was given, the oldest first: the last 50, from any process."""
        return self._live.jobs

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
        return self._live.prepare_call(fn, args, kwargs, ranks=ranks)(None).unwrap(check=check)

    def submit(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> Handle:
        """Call `fn` in the background: `handle.result()`, `.cancel()`, `.done()`, `await handle`.

        Raises `CaptureError` for what cannot be sent, and `NblaunchError` while another job is running. What
        the run raises, `handle.result()` raises.
        """
        return Handle(self._live.prepare_call(fn, args, kwargs, ranks=ranks), claim=self._live.claim)

    def cell(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        check: bool = True,
        namespace: dict[str, Any] | None = None,
    ) -> RunResult:
        """Run source code as a cell; its last expression is the value, and its variables stay.

        Variables that it uses and the ranks lack come from the notebook, or from `namespace`. A value that
        cannot be sent is only shown, with a warning in `result.warnings`, and so is a model, an optimizer or
        a data loader, which `pull` brings: `result.values` then holds objects that raise `NotSentError` when
        they are used.

        Raises what `run` raises, and `SyntaxError` for source that is none.

        >>> session.cell("x = rank * scale; x", namespace={"scale": 10}).values    # doctest: +SKIP
        [0, 10]
        """
        # A file name of its own: for a function of an earlier cell, tracebacks and `inspect.getsource` read
        # the lines of that cell.
        job = CellJob(
            source=source,
            filename=f"<session cell {next(self._numbers)}>",
            title="session cell",
            first_line=1,
            flags=_notebook.future_flags(),
        )
        variables = _notebook.namespace() or {} if namespace is None else namespace
        names = cell_names(_as_python(source), transform=_as_python)
        perform = self._live.prepare_cell(job, names, variables, ranks=ranks)
        return perform(None).unwrap(check=check)

    def push(self, mapping: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Give the ranks variables, large ones through shared memory, written once for all ranks.

        Raises `CaptureError` for a value that cannot be sent, `NblaunchError` while another job is running.
        Warns of a tensor whose graph does not travel.

        >>> session.push({"scale": 10, "weights": torch.ones(1 << 28)})    # doctest: +SKIP
        """
        for notice in self._live.push(mapping, ranks=ranks):
            warnings.warn(notice, stacklevel=2)

    def pull(self, *names: str, ranks: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return variables, each as a list in rank order.

        Raises `NblaunchError` if a rank lacks one, and while another job is running.

        >>> session.pull("rank", "loss")                                   # doctest: +SKIP
        {'rank': [0, 1], 'loss': [0.31, 0.29]}
        """
        return self._live.pull(*names, ranks=ranks)

    def save(
        self, path: str | os.PathLike[str], *, background: bool = False, strict: bool = False
    ) -> SavedSession:
        """Save the ranks' variables to a directory; `Session(restore=path)` begins with them.

        Each variable is equal on all ranks (saved once), sharded (DTensors, also of FSDP2, for any number of
        ranks), or a rank's own. Functions and classes of cells, random states, grad mode and default dtype
        come along. What cannot be saved is left out and named; with `strict=True` that raises
        `NblaunchError`. The directory appears once it is whole, in the place of an older save; only this
        user can read it.

        With `background=True` it is written while cells go on: `.whole` says whether it is there.

        Raises `NblaunchError` if it cannot be written, and while another job is running.

        >>> print(session.save("monday"))                                  # doctest: +SKIP
        /home/me/monday: 4021 MB of 4 ranks
          equal: batches, step
          sharded: model, opt
          each rank's own: loss, random state of torch
        """
        return saves.save(self._live, os.fspath(path), background=background, strict=strict)

    def diff(self, *names: str, env: bool = False, ranks: Sequence[int] | None = None) -> Difference:
        """Compare variables of the ranks: equal, or where they differ first, and which ranks agree.

        A name may lead to an attribute: `"model.head"`. A variable may be a tensor, a module, an optimizer,
        an array, or anything else that can be pickled; nothing large moves, and no process group is needed.
        `nblaunch.diff` says how they are compared. With `env=True` also what the ranks run in: versions of
        packages, environment variables, flags and seeds, a row for each that differs.

        Returns a `Difference`, which is true if ranks differ. Raises `NblaunchError` for a name that no rank
        has, and while another job is running.

        >>> print(session.diff("model", "step"))                           # doctest: +SKIP
        model: model.fc.weight[17, 4]: values differ. rank 0,2-3 agree; rank 1 differs
            largest difference: 0.25 at model.fc.weight[17, 4]
            ...
        step: equal on ranks 0-3
        """
        return self._live.diff(*names, env=env, ranks=ranks)

    def interrupt(self) -> None:
        """Interrupt the job that is running, as the stop button does; the variables stay.

        Raises `NblaunchError` if another process gives the jobs.
        """
        self._live.interrupt()

    def restart(self) -> None:
        """Replace all ranks by new ones, without variables.

        Raises `LaunchError` if they could not be started, and `NblaunchError` if another process gives the
        jobs.
        """
        self._live.restart()

    def status(self) -> SessionStatus:
        """Return what each rank is doing, and how much memory is its own, in bytes.

        >>> print(session.status())                                        # doctest: +SKIP
        session 'default': 2 ranks, gloo
          rank 0: idle, cpu, 18 MB
          rank 1: idle, cpu, 17 MB
        """
        return self._live.status()

    def stacks(self) -> HangReport:
        """Return where each rank is, ranks with the same stack together; also while a job runs.

        Raises `LaunchError` if the session has ended.
        """
        return self._live.stacks()

    def close(self) -> None:
        """End the ranks, for all processes, and wait until they have exited; does nothing the second time.

        Where another process has given the last jobs to a detached session, this one only stops watching.
        """
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
        """Return name, size, backend and state in one line."""
        live = self._live
        state = ("open" if live.held_by is None else "watched") if live.open else "closed"
        return f"<Session {live.name!r}: {live.world_size} ranks, {live.placement.backend}, {state}>"


def _as_python(source: str) -> str:
    """Return a cell's source with IPython's magics transformed."""
    running = _notebook.shell()
    if running is not None:
        return str(running.transform_cell(source))
    from IPython.core.inputtransformer2 import TransformerManager

    return str(TransformerManager().transform_cell(source))
