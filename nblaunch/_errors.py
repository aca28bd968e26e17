"""Everything nblaunch raises on purpose.

NblaunchError
  x OptionError(ValueError)         an option is wrong
  x CaptureError(TypeError)         a captured value cannot be sent
  x LaunchError(RuntimeError)       the group could not be started
  x RunFailedError(RuntimeError)    a rank failed; `__cause__` is the remote exception
    x RunTimeoutError(TimeoutError) the run took longer than `timeout`
  x RunPreemptedError               the engine took the nodes back before the run ended
  x NonFiniteError(FloatingPointError)  on a rank: `--watch nan` has found a NaN
  x DesyncError(RuntimeError)       on a rank: `--watch desync` has found that collectives differ

Each message names what was asked, what is true and what to do. All can be pickled, with their fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nblaunch._results import RankFailure, RunResult
    from nblaunch.protocol.reports import HangReport

MESSAGE_LIMIT = 64 * 1024
"""Characters of one error message; a rank may raise an exception whose text is a whole data set."""


def shorten(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Return `text`, without its middle if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


class NblaunchError(Exception):
    """Base of every error that nblaunch raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in a notebook (an IPython protocol), without our own frames."""
        return [f"{type(self).__name__}: {self}"]


class OptionError(NblaunchError, ValueError):
    """An option is wrong; nothing was started."""


class CaptureError(NblaunchError, TypeError):
    """A captured value cannot be sent to the ranks; nothing was started.

    `name` is the notebook variable, `path` leads from it to the part that cannot be sent
    (`model.trainer._lock`), `size` is that part's size in bytes where it is known.
    """

    def __init__(self, message: str, *, name: str = "", path: str = "", size: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.path = path
        self.size = size


class LaunchError(NblaunchError, RuntimeError):
    """The worker group could not be started; `phase` is the one that failed."""

    def __init__(self, message: str, *, phase: str = "") -> None:
        super().__init__(message)
        self.phase = phase


class RunFailedError(NblaunchError, RuntimeError):
    """At least one rank failed.

    `result` holds every rank's value, failure and output; `root_cause` is the first failure in
    time that is not the consequence of another. Where that rank's exception could be pickled it is
    the `__cause__`.
    """

    def __init__(
        self, message: str, *, result: RunResult | None = None, root_cause: RankFailure | None = None
    ) -> None:
        super().__init__(shorten(message))
        self.result = result
        self.root_cause = root_cause

    def _render_traceback_(self) -> list[str]:
        """Show the rank's own traceback in place of the kernel's (an IPython protocol).

        The frames between the cell and the ranks are ours and of no use to the reader.
        """
        last = f"{type(self).__name__}: {self}"
        root = self.root_cause
        shown = (root.shown or root.traceback).rstrip("\n") if root is not None else ""
        return [*shown.splitlines(), "", last] if shown else [last]


class RunTimeoutError(RunFailedError, TimeoutError):
    """The run took longer than its `timeout`; `hang_report` says where the ranks were."""

    def __init__(
        self,
        message: str,
        *,
        result: RunResult | None = None,
        root_cause: RankFailure | None = None,
        hang_report: HangReport | None = None,
    ) -> None:
        super().__init__(message, result=result, root_cause=root_cause)
        self.hang_report = hang_report

    def _render_traceback_(self) -> list[str]:
        """Show where the ranks were (an IPython protocol)."""
        if self.hang_report is None:
            return super()._render_traceback_()
        return [*str(self.hang_report).splitlines(), "", f"{type(self).__name__}: {self}"]


class RunPreemptedError(NblaunchError):
    """The engine took the nodes back before the run ended: at a time limit, or for another job.

    `result` holds the values of the ranks that had finished, and the output of all ranks. `on_preempt`
    registers what ranks save before.

    >>> try:                                                               # doctest: +SKIP
    ...     nblaunch.run(train, nnodes=2, on="slurm")
    ... except nblaunch.RunPreemptedError as error:
    ...     print(error.result.preempted)
    slurm job 17 is near its time limit
    """

    def __init__(self, message: str, *, result: RunResult | None = None) -> None:
        super().__init__(shorten(message))
        self.result = result


class NonFiniteError(NblaunchError, FloatingPointError):
    """A loss, a gradient or the input of a collective is not finite; raised on the rank that has it first.

    `what` is named as the message has it ("the gradient of model.layers.3.weight"), `step` is the step in
    which it arose: that of `nblaunch.step`, else the number of optimizer steps before it. See `--watch nan`.
    """

    def __init__(self, message: str, *, what: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.what = what
        self.step = step


class DesyncError(NblaunchError, RuntimeError):
    """The ranks' next collectives differ in kind, size or type; raised before this rank begins its own.

    `collectives` maps each of the ranks that have come to it to what it calls, `stacks` to where it does so,
    innermost line last. See `--watch desync`.
    """

    def __init__(
        self,
        message: str,
        *,
        collectives: dict[int, str] | None = None,
        stacks: dict[int, str] | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.collectives = collectives or {}
        self.stacks = stacks or {}
        self.step = step
