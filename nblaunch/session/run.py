"""`nblaunch.run`: a function or a script on N ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nblaunch._errors import OptionError, RunFailedError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import FunctionJob
from nblaunch._results import RunResult
from nblaunch.job.capture import capture_call
from nblaunch.session import engine, notebook, scripts
from nblaunch.session.ending import Watcher
from nblaunch.session.scripts import Script, is_script


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
    finished = engine.perform(launch, watch(launch.title, launch.backend, launch.placement.note))
    failed = isinstance(finished.error, RunFailedError) and finished.result is not None
    if finished.error is not None and (check or not failed):
        raise finished.error
    assert finished.result is not None  # noqa: S101 - without a result there is an error
    return finished.result


def _launch(
    fn: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: LaunchOptions
) -> engine.Launch:
    """Return a run of a function; its arguments are captured here."""
    if not callable(fn):
        msg = f"run() was given {fn!r:.200} to run, which is not callable. Pass a function or a script."
        raise OptionError(msg)
    placement, environ = engine.place(options)
    captured = capture_call(fn, tuple(args), dict(kwargs or {}), notebook.namespace())
    name = getattr(fn, "__qualname__", type(fn).__qualname__).replace("<locals>.", "")
    return engine.Launch(
        job=FunctionJob(name=name),
        captured=captured,
        options=options,
        placement=placement,
        environ=environ,
        title=name,
    )
