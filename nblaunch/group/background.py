"""A run that goes on while the notebook does: its handle."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future

from nblaunch._errors import NblaunchError
from nblaunch._results import RunResult
from nblaunch.group.launcher import Outcome


class Handle:
    """A run in the background.

    `result(timeout)` waits and returns its `RunResult`, or raises what the run raised; `done()` says whether
    it is over; `cancel()` interrupts it. It can be awaited: `result = await handle`.
    """

    def __init__(
        self,
        perform: Callable[[threading.Event], Outcome],
        hand_over: Callable[[RunResult], None] | None = None,
        *,
        claim: Callable[[], None] | None = None,
    ) -> None:
        """Begin; `perform(cancelled)` runs on a thread of its own, and ends soon once `cancelled` is set.

        `hand_over` gets the result, also that of a failed run. What `claim` takes, `perform` gives back; what
        it raises is raised here.
        """
        self._future: Future[RunResult] = Future()
        self._cancelled = threading.Event()
        self._hand_over = hand_over
        # In the context of the cell that began it: what it shows belongs there, not to a later cell.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, perform), name="nblaunch-background", daemon=True
        )
        self._claim = claim
        self._claimed = threading.Event()
        self._refusal: BaseException | None = None
        try:
            self._thread.start()
            # The thread claims: nothing interrupts it between that and the `finally` that gives back.
            self._claimed.wait()
        except BaseException:
            # Nobody gets this handle: what has begun must not go on without one.
            self._cancelled.set()
            raise
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _run(self, perform: Callable[[threading.Event], Outcome]) -> None:
        try:
            if self._claim is not None:
                self._claim()
        except BaseException as refusal:  # noqa: BLE001 - it is the caller's
            self._refusal = refusal
            return
        finally:
            self._claimed.set()
        try:
            finished = perform(self._cancelled)
            if finished.result is not None and self._hand_over is not None:
                self._hand_over(finished.result)
        except BaseException as error:  # noqa: BLE001 - whoever waits is to get it
            self._future.set_exception(error)
            return
        if finished.error is not None:
            self._future.set_exception(finished.error)
        elif finished.result is not None:
            self._future.set_result(finished.result)
        else:
            self._future.set_exception(NblaunchError("the run ended without a result"))

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the end, at most `timeout` seconds, and return the result; raise what the run raised.

        Raises `TimeoutError` if it is not over by then; it goes on.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether the run is over."""
        return self._future.done()

    def cancel(self) -> None:
        """Interrupt the run, as the stop button does; returns at once."""
        self._cancelled.set()

    def __await__(self) -> Generator[object, None, RunResult]:
        """Wait without blocking the event loop."""
        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        """Say whether it is over."""
        if not self.done():
            return "<Handle of a run that goes on>"
        error = self._future.exception()
        return f"<Handle: {error!r:.200}>" if error is not None else f"<Handle: {self._future.result()!r}>"
