"""The thread on which an agent runs, and what torchelastic logs there."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from nblaunch._errors import NblaunchError
from nblaunch.elastic.agent import RankAgent, StoppedError
from nblaunch.elastic.settings import AgentEvents, AgentSettings

THREAD_PREFIX = "nblaunch-agent"
_KEEP_ALIVE_PREFIX = "RendezvousKeepAliveTimer"


class AgentThread:
    """Runs an agent to its end, on a thread of its own: on the main thread it would take over signals."""

    def __init__(
        self, settings: AgentSettings, arguments: Callable[[int], tuple[Any, ...]], events: AgentEvents
    ) -> None:
        """Start the agent."""
        _quiet_torchelastic()
        self._events = events
        self._settings = settings
        self._arguments = arguments
        self._agent: RankAgent | None = RankAgent(settings, arguments, events)
        # Taken by whoever comes first: the agent, or a stop before it has begun.
        self._begun = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}-{settings.run_id}", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        error: BaseException | None = None
        agent = self._agent
        assert agent is not None  # noqa: S101 - only this thread lets it go
        try:
            agent.run()
        except StoppedError:
            pass
        except BaseException as caught:  # noqa: BLE001 - it becomes the run's error
            error = caught
            if isinstance(caught, NblaunchError):
                # It says all there is; its frames would hold the agent and its sockets with the user's error.
                error = caught.with_traceback(None)
                error.__context__ = None
        with contextlib.suppress(Exception):  # of a rendezvous that is over, nobody waits for a good end
            agent.rendezvous.shutdown()
        agent.close()
        del agent
        self._agent = None
        # The agent, its rendezvous and the store's server threads refer to each other.
        gc.collect(1)
        self._events.agent_ended(error)

    def stop(self) -> None:
        """End the run from outside."""
        agent = self._agent
        if agent is not None:
            agent.stop()
        if self._begun.acquire(blocking=False):
            # An interrupt came before the thread was started.
            if agent is not None:
                agent.close()
            self._agent = None
            self._events.agent_ended(None)

    def all_alive(self) -> bool:
        """Whether no process of this attempt has ended."""
        agent = self._agent
        return agent is not None and agent.all_alive()

    def adopt(self, settings: AgentSettings) -> None:
        """Go on with these settings."""
        agent = self._agent
        if agent is not None:
            agent.settings = settings

    def restart(self) -> None:
        """End the worker group, and start another."""
        agent = self._agent
        if agent is not None:
            agent.restart()

    def rejoin(self) -> None:
        """Meet the other nodes anew."""
        agent = self._agent
        if agent is not None:
            agent.rejoin()

    def forget_orders(self) -> None:
        """Forget what was asked of the attempt before."""
        agent = self._agent
        if agent is not None:
            agent.forget_orders()

    def skip_grace(self) -> None:
        """Skip what is left of the grace period."""
        agent = self._agent
        if agent is not None:
            agent.skip_grace()

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        """Give the ranks leave to end, and stop the others."""
        agent = self._agent
        if agent is not None:
            agent.release(succeeded=succeeded, others=others)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; return whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def join_all(timeout: float) -> None:
    """Wait for the threads of all agents, for `timeout` seconds at most; call before the interpreter ends.

    A daemon thread that comes back from C++ after that is ended by unwinding its stack, up to Python 3.13. In
    torch's stores that meets a destructor, and the process is aborted: "terminate called without an active
    exception".
    """
    deadline = time.monotonic() + timeout
    for each in threading.enumerate():
        if each.name.startswith(THREAD_PREFIX) and each is not threading.current_thread():
            each.join(max(deadline - time.monotonic(), 0.0))


def _quiet_torchelastic() -> None:
    """Keep torchelastic's log lines about our threads off the notebook; the user's own stay as they are."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logger = logging.getLogger(name)
            if _not_ours not in logger.filters:
                logger.addFilter(_not_ours)


def _not_ours(record: logging.LogRecord) -> bool:
    return not (record.threadName or "").startswith((THREAD_PREFIX, _KEEP_ALIVE_PREFIX))
