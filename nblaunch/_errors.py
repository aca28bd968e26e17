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
`kind` names what has happened; the page about it is the last line that a notebook, a terminal or a traceback
shows (a note of the exception), and no part of its text.
"""

from __future__ import annotations

from typing import Any, ClassVar

from nblaunch._budget import shortened
from nblaunch._help import FailureKind

MESSAGE_LIMIT = 64 * 1024
"""Characters of one error message; a rank may raise an exception whose text is a whole data set."""


def shorten(text: str) -> str:
    """Return `text`, without its middle if it is longer than a message may be."""
    return shortened(text, MESSAGE_LIMIT, len)


class NblaunchError(Exception):
    """Base of every error that nblaunch raises on purpose.

    `kind` says what has happened, in one word that stays the same: `"cannot-be-sent"`. It is None where the
    failure is an exception of the user's own code, which needs no page of ours.

    >>> error = OptionError("nproc=0 was asked for")
    >>> str(error.kind), str(error)
    ('wrong-option', 'nproc=0 was asked for')
    >>> error.__notes__
    ['More: https://nblaunch.github.io/e/wrong-option']
    """

    kind: FailureKind | None = None
    _noted: ClassVar[bool] = True
    """Whether the error shows the page itself; one that fails a rank leaves that to the run's error."""

    def __init__(self, *args: object, kind: FailureKind | None = None) -> None:
        super().__init__(*args)
        if kind is not None and kind is not self.kind:
            self.kind = kind
        if self.kind is not None and self._noted:
            self.add_note(self.kind.line)

    def _render_traceback_(self) -> list[str]:
        """Show the message and notes alone in a notebook (an IPython protocol), without our own frames."""
        return self._last_lines()

    def _last_lines(self) -> list[str]:
        notes = [line for note in getattr(self, "__notes__", ()) for line in str(note).splitlines()]
        return [f"{type(self).__name__}: {self}", *notes]


class OptionError(NblaunchError, ValueError):
    """An option is wrong; nothing was started."""

    kind = FailureKind.WRONG_OPTION


class CaptureError(NblaunchError, TypeError):
    """A captured value cannot be sent to the ranks; nothing was started.

    `name` is the notebook variable, `path` leads from it to the part that cannot be sent
    (`model.trainer._lock`), `size` is that part's size in bytes where it is known.
    """

    kind = FailureKind.CANNOT_BE_SENT

    def __init__(
        self,
        message: str,
        *,
        name: str = "",
        path: str = "",
        size: int | None = None,
        kind: FailureKind | None = None,
    ) -> None:
        super().__init__(message, kind=kind)
        self.name = name
        self.path = path
        self.size = size


_OF_PHASE = {
    "connect": FailureKind.NO_ANSWER,
    "process group": FailureKind.PROCESS_GROUP,
    "rendezvous": FailureKind.RENDEZVOUS,
    "engine": FailureKind.ENGINE,
    "runtime": FailureKind.RUNTIME_ENDED,
}


class LaunchError(NblaunchError, RuntimeError):
    """The worker group could not be started; `phase` is the one that failed.

    Without a `kind` of its own, it has that of the phase.
    """

    kind = FailureKind.NOT_STARTED

    def __init__(self, message: str, *, phase: str = "", kind: FailureKind | None = None) -> None:
        super().__init__(message, kind=kind or _OF_PHASE.get(phase))
        self.phase = phase


class RunFailedError(NblaunchError, RuntimeError):
    """At least one rank failed.

    `result`, a `RunResult`, holds every rank's value, failure and output; `root_cause`, a `RankFailure`, is
    the first failure in time that is not the consequence of another. Where that rank's exception could be
    pickled it is the `__cause__`.
    """

    def __init__(
        self,
        message: str,
        *,
        result: Any = None,
        root_cause: Any = None,
        kind: FailureKind | None = None,
    ) -> None:
        super().__init__(shorten(message), kind=kind)
        self.result = result
        self.root_cause = root_cause

    def _render_traceback_(self) -> list[str]:
        """Show the rank's own traceback in place of the kernel's (an IPython protocol).

        The frames between the cell and the ranks are ours and of no use to the reader.
        """
        root = self.root_cause
        shown = (root.shown or root.traceback).rstrip("\n") if root is not None else ""
        return [*shown.splitlines(), "", *self._last_lines()] if shown else self._last_lines()


class RunTimeoutError(RunFailedError, TimeoutError):
    """The run took longer than its `timeout`; `hang_report`, a `HangReport`, says where the ranks were."""

    kind = FailureKind.HANG

    def __init__(
        self,
        message: str,
        *,
        result: Any = None,
        root_cause: Any = None,
        hang_report: Any = None,
        kind: FailureKind | None = None,
    ) -> None:
        super().__init__(message, result=result, root_cause=root_cause, kind=kind)
        self.hang_report = hang_report

    def _render_traceback_(self) -> list[str]:
        """Show where the ranks were (an IPython protocol)."""
        if self.hang_report is None:
            return super()._render_traceback_()
        return [*str(self.hang_report).splitlines(), "", *self._last_lines()]


class RunPreemptedError(NblaunchError):
    """The engine took the nodes back before the run ended: at a time limit, or for another job.

    `result`, a `RunResult`, holds the values of the ranks that had finished, and the output of all ranks.
    `on_preempt` registers what ranks save before.

    >>> try:                                                               # doctest: +SKIP
    ...     nblaunch.run(train, nnodes=2, on="slurm")
    ... except nblaunch.RunPreemptedError as error:
    ...     print(error.result.preempted)
    slurm job 17 is near its time limit
    """

    kind = FailureKind.PREEMPTED

    def __init__(self, message: str, *, result: Any = None, kind: FailureKind | None = None) -> None:
        super().__init__(shorten(message), kind=kind)
        self.result = result


class NonFiniteError(NblaunchError, FloatingPointError):
    """A loss, a gradient or the input of a collective is not finite; raised on the rank that has it first.

    `what` is named as the message has it ("the gradient of model.layers.3.weight"), `step` is the step in
    which it arose: that of `nblaunch.step`, else the number of optimizer steps before it. See `--watch nan`.
    """

    kind = FailureKind.NAN
    _noted = False

    def __init__(self, message: str, *, what: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.what = what
        self.step = step


class DesyncError(NblaunchError, RuntimeError):
    """The ranks' next collectives differ in kind, size or type; raised before this rank begins its own.

    `collectives` maps each of the ranks that have come to it to what it calls, `stacks` to where it does so,
    innermost line last. See `--watch desync`.
    """

    kind = FailureKind.DESYNC
    _noted = False

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
