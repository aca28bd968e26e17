"""The thread on which an agent runs, and what torchelastic logs there."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from nblaunch._errors import NblaunchError
from nblaunch.elastic.agent import RankAgent, StoppedError
from nblaunch.elastic.forkserver import Server
from nblaunch.elastic.settings import AgentEvents, AgentSettings

THREAD_PREFIX = "nblaunch-agent"
_KEEP_ALIVE_PREFIX = "RendezvousKeepAliveTimer"


P = ParamSpec("P")


def _passed_on(
    order: Callable[Concatenate[RankAgent, P], None],
) -> Callable[Concatenate[AgentThread, P], None]:
    """Return a method that gives this order to the agent; once it has ended, the order does nothing."""

    @functools.wraps(order)
    def give(thread: AgentThread, /, *arguments: P.args, **keywords: P.kwargs) -> None:
        agent = thread.agent
        if agent is not None:
            order(agent, *arguments, **keywords)

    return give


class AgentThread:
    """Runs an agent to its end, on a thread of its own: on the main thread it would take over signals."""

    adopt = _passed_on(RankAgent.adopt)
    restart = _passed_on(RankAgent.restart)
    rejoin = _passed_on(RankAgent.rejoin)
    forget_orders = _passed_on(RankAgent.forget_orders)
    skip_grace = _passed_on(RankAgent.skip_grace)
    release = _passed_on(RankAgent.release)

    def __init__(
        self,
        settings: AgentSettings,
        arguments: Callable[[int], tuple[Any, ...]],
        events: AgentEvents,
        server: Server,
    ) -> None:
        """Make the agent, whose ranks `server` forks; `start` begins."""
        _quiet_torchelastic()
        self._events = events
        self.agent: RankAgent | None = RankAgent(settings, arguments, events, server)
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
        agent = self.agent
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
        self.agent = None
        # The agent, its rendezvous and the store's server threads refer to each other.
        gc.collect(1)
        self._events.agent_ended(error)

    def stop(self) -> None:
        """End the run from outside."""
        agent = self.agent
        if agent is not None:
            agent.stop()
        if self._begun.acquire(blocking=False):
            # An interrupt came before the thread was started.
            if agent is not None:
                agent.close()
            self.agent = None
            self._events.agent_ended(None)

    def all_alive(self) -> bool:
        """Whether no process of this attempt has ended."""
        agent = self.agent
        return agent is not None and agent.all_alive()

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
