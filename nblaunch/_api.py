"""`nblaunch.run`, put together from the layers: options, session, view."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nblaunch._options import LaunchOptions
from nblaunch._results import RunResult
from nblaunch.session import notebook
from nblaunch.session import run as session_run
from nblaunch.session.ending import SilentWatcher, Watcher
from nblaunch.session.scripts import is_script
from nblaunch.view.watch import watcher


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
    shown = notebook.shell() is not None if display is None else display

    def watch(title: str, backend: str, note: str) -> Watcher:
        return watcher(title, backend, note) if shown else SilentWatcher()

    return session_run.call(fn, args, kwargs, check=check, options=launch_options, watch=watch)
