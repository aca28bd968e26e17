"""Runtimes: the one that checks use, which ends with the doctor, and the one that this process has."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from nblaunch._errors import LaunchError
from nblaunch._keeper import FORK_SERVER_LOG
from nblaunch.checks.report import Finding, count_of, ok, warning
from nblaunch.client.local import local
from nblaunch.elastic.forkserver import AbandonedError, RankProcess
from nblaunch.group.runtime import LocalRuntime
from nblaunch.group.usage import own_memory
from nblaunch.protocol.client import DescribeSessions
from nblaunch.protocol.reports import size

_ANSWER_SECONDS = 2.0


class DoctorRuntime(LocalRuntime):
    """A private directory and a fork server for checks alone, made on first use; `close` ends both.

    Checks use it on threads of their own, which may outlast it. What they make then is removed by `of`.
    """

    def __init__(self) -> None:
        """Make nothing yet."""
        super().__init__()
        self._over = threading.Event()
        self._use = threading.Lock()
        """Held by who needs the fork server, until it has forked or `_over` is set."""

    def of(self, find: Callable[[DoctorRuntime], Iterable[Finding]]) -> Callable[[], Iterable[Finding]]:
        """Return a check that uses this runtime; one that outlasts the doctor ends what it has made since."""

        def check() -> Iterator[Finding]:
            try:
                yield from find(self)
            finally:
                if self._over.is_set():
                    super(DoctorRuntime, self).close()

        return check

    def start(self) -> TextIO:
        """Start the fork server, without waiting for it; return its log, which it takes along if it ends."""
        with self._using():
            self.server.ensure_running()
            return (self.directory.root() / FORK_SERVER_LOG).open(errors="replace")

    def fork(self, target: Callable[..., object], *args: str, seconds: float) -> None:
        """Run a function in a fork of the fork server. Raises `LaunchError`, `TimeoutError`, an `OSError`."""
        process = RankProcess(target=target, args=args, name="nblaunch-doctor")
        with self._using(), self.server.forking(abandon=self._over):
            process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            msg = f"a process was forked, and did not end within {seconds:g} s"
            raise TimeoutError(msg)
        process.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        with self._use:
            if self._over.is_set():
                raise AbandonedError
            yield

    def close(self) -> None:
        """End the fork server and remove the directory."""
        self._over.set()
        with self._use:
            super().close()


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
