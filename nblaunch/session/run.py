"""`nblaunch.run`: a function on N ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nblaunch._errors import OptionError
from nblaunch._options import LaunchOptions
from nblaunch._protocol import FunctionJob
from nblaunch._results import RunResult
from nblaunch._state import RunState
from nblaunch.job.capture import capture_call
from nblaunch.session import engine, notebook


class Silent:
    """Shows nothing: the result has it all."""

    def open(self, state: RunState) -> None:
        """Show nothing."""

    def draw(self, state: RunState) -> None:
        """Show nothing."""

    def close(self, state: RunState) -> None:
        """Show nothing."""


def call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    check: bool,
    options: LaunchOptions,
    watch: Callable[[str, str], engine.Watcher],
) -> RunResult:
    """Run `fn` under `options`; `watch(title, backend)` makes whoever shows the run."""
    if not callable(fn):
        msg = f"run() was given {fn!r:.200} to run, which is not callable. Pass a function."
        raise OptionError(msg)
    placement, environ = engine.place(options)
    captured = capture_call(fn, tuple(args), dict(kwargs or {}), notebook.namespace())
    name = getattr(fn, "__qualname__", type(fn).__qualname__).replace("<locals>.", "")
    launch = engine.Launch(
        job=FunctionJob(name=name),
        captured=captured,
        options=options,
        placement=placement,
        environ=environ,
        title=name,
    )
    finished = engine.perform(launch, watch(name, placement.backend))
    if finished.error is not None and (check or finished.result is None or not _is_failure(finished.error)):
        _attach(finished)
        raise finished.error
    assert finished.result is not None  # noqa: S101 - without a result there is an error
    return finished.result


def _is_failure(error: BaseException) -> bool:
    from nblaunch._errors import RunFailedError  # noqa: PLC0415 - next to its only use

    return isinstance(error, RunFailedError)


def _attach(finished: engine.Outcome) -> None:
    """Give a timeout's error what came back until then."""
    if getattr(finished.error, "result", ...) is None:
        finished.error.result = finished.result  # type: ignore[union-attr]
