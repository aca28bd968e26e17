"""The rendezvous of nodes that an engine placed: the runtime decides who takes part in each attempt.

It needs no store. The runtime's message has all that an agent must know about the other nodes, so the agent
waits for none of them, and a node that dies meanwhile cannot block it. Only ranks use the ranks' store.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from nblaunch.host.wire import CompleteRendezvous

_POLL_SECONDS = 0.05


class DirectedRendezvous(RendezvousHandler):
    """Waits for the runtime's next round."""

    def __init__(self, run_id: str, waiting: Callable[[], None], stopped: threading.Event) -> None:
        """Call `waiting` on the agent's thread each time that it begins to wait for a round."""
        self._run_id, self._waiting, self._stopped = run_id, waiting, stopped
        self._decided = threading.Event()
        self._next: CompleteRendezvous | None = None
        self._directed: CompleteRendezvous | None = None

    def complete_rendezvous(self, directed: CompleteRendezvous) -> None:
        """Complete the rendezvous with this round; from any thread."""
        self._next = directed
        self._decided.set()

    @property
    def directed(self) -> CompleteRendezvous:
        """The current round. Raises `LookupError` before the first one."""
        if self._directed is None:
            msg = "the nodes have not met yet"
            raise LookupError(msg)
        return self._directed

    def get_backend(self) -> str:
        return "directed"

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks use the runtime's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. Raises `SignalException` if the run is stopped instead."""
        self._decided.clear()
        self._waiting()
        while not self._decided.wait(_POLL_SECONDS):
            if self._stopped.is_set():
                msg = "the run was stopped"
                raise SignalException(msg, signal.SIGTERM)
        self._directed = self._next
        host, port = self.directed.store
        # torch requires a store for the agents, which exchange nothing here.
        alone = dist.HashStore()
        return RendezvousInfo(
            alone, self.directed.node_rank, self.directed.node_count, RendezvousStoreInfo(host, port)
        )

    def is_closed(self) -> bool:
        """Return False: the runtime decides when the group ends."""
        return False

    def set_closed(self) -> None:
        """Do nothing: see `is_closed`."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the runtime orders restarts."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: there is nothing to clean up."""
        return True
