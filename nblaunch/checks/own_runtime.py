"""Runtimes: the one that checks use, which ends with the doctor, and the one that this process has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator

from nblaunch._errors import LaunchError
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.checks.report import Finding, count_of, ok, warning
from nblaunch.client.local import OwnRuntime, local
from nblaunch.host.usage import own_memory
from nblaunch.protocol.client import DescribeSessions, TryFork
from nblaunch.protocol.reports import size

_ANSWER_SECONDS = 2.0


class DoctorRuntime:
    """A private directory and a runtime for checks alone, made on first use; `close` ends both.

    Checks use it on threads of their own, which may outlast it. What they make then is removed by `of`.
    """

    def __init__(self) -> None:
        """Make nothing yet."""
        self.directory = RuntimeDirectory()
        self.started: OwnRuntime | None = None
        self._over = threading.Event()
        self._use = threading.Lock()

    def of(self, find: Callable[[DoctorRuntime], Iterable[Finding]]) -> Callable[[], Iterable[Finding]]:
        """Return a check that uses this runtime; one that outlasts the doctor ends what it has made since."""

        def check() -> Iterator[Finding]:
            try:
                yield from find(self)
            finally:
                if self._over.is_set():
                    self.directory.remove()

        return check

    def fork(self, seconds: float, *, architectures: bool = False) -> tuple[str, ...]:
        """Have a process forked, which ends within `seconds`; return the `architectures` of its torch.

        Raises `LaunchError`, or an `OSError`, where the runtime cannot start, or cannot fork.
        """
        with self._use:
            if self._over.is_set():
                msg = "the doctor has ended"
                raise LaunchError(msg, phase="runtime")
            self.started = self.started or OwnRuntime(self.directory.root())
        request = TryFork(seconds=seconds, architectures=architectures)
        return self.started.ask_on_a_line(request).architectures

    def close(self) -> None:
        self._over.set()
        with self._use:
            if self.started is not None:
                self.started.keeper.send_signal(signal.SIGUSR1)
                self.started.finish()
            self.directory.remove()


def of_this_process() -> Iterator[Finding]:
    """Report the runtime of this process, if it has one; none is started."""
    name = "runtime"
    runtime = local().started
    if runtime is None or not runtime.alive:
        return
    try:
        pid = runtime.welcome.pid
        answer = runtime.ask(DescribeSessions(), _ANSWER_SECONDS)
    except (LaunchError, TimeoutError) as error:
        yield warning(name, str(error), "Restart the kernel, which ends it with all its ranks.")
        return
    memory = own_memory(pid)
    held = "" if memory is None else f"{size(memory)} of its own, "
    yield ok(name, f"process {pid}, {held}{count_of(len(answer.sessions), 'session')}")
