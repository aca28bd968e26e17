"""A course whose ranks may be on several nodes: what the others do, and what becomes of it when they go.

The notebook's agent alone decides when the nodes meet anew; it says so here before the first rank is ended,
and the other nodes are told. So what ranks make of the end of their peers is never taken for a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from nblaunch._errors import LaunchError
from nblaunch.elastic.settings import AgentSettings, RendezvousConfig, Worker
from nblaunch.group.lifecycle import Lifecycle
from nblaunch.group.members import Nodes
from nblaunch.protocol import nodes as wire
from nblaunch.protocol.messages import Abort, AttemptStarted, Exited, FromRank, Phase
from nblaunch.protocol.state import RunState

# An abort takes NCCL a second or two; a rank that holds its interpreter does not hear of it.
_ABORT_SECONDS = 2.0


class MultiNodeLifecycle(Lifecycle):
    """What a group of several nodes has over and above one of one."""

    def receive(self, message: FromRank) -> None:
        """Take a message of a rank, wherever it is."""
        raise NotImplementedError  # the group does: it also knows logs, values and phases

    def _on_exit(self, exited: Exited) -> None:
        raise NotImplementedError  # likewise

    def _open_listener(self, rdzv: RendezvousConfig, directory: Path) -> AgentSettings:
        """Let nodes report to this process; return the settings with the address at which they do."""
        self._nodes = Nodes(self._hub, self.settings, self, directory)
        self.settings = replace(self.settings, rdzv=replace(rdzv, listener=self._nodes.listener.address))
        return self.settings

    # --- on other threads ------------------------------------------------------------------------

    def _here(self, state: RunState) -> RunState:
        """Return the state without process ids of other machines: here they are somebody else's."""
        away = self._elsewhere
        ranks = {
            rank: replace(each, pid=None) if rank in away else each for rank, each in state.ranks.items()
        }
        return replace(state, ranks=ranks) if away else state

    def _noted(self, note: Callable[[], None]) -> None:
        """Have the hub's thread do something, and wait until it has."""
        done = threading.Event()

        def note_it() -> None:
            try:
                note()
            finally:
                done.set()

        self._hub.call(note_it)
        while not done.wait(1.0):
            if not self._hub.usable:
                msg = "the hub, which carries the ranks' messages, has ended"
                raise LaunchError(msg, phase=Phase.CONNECT.value)

    def membership_changing(self) -> None:
        """Take note before the first rank is ended: what its peers make of that is no failure."""
        self._noted(self._on_change)

    def ranks_ending(self) -> None:
        """Have NCCL let go on every rank before the first is killed; waits for that with a bound.

        A kernel of NCCL's reads and writes the memory of other GPUs. Where the process that the memory
        belongs to goes first, that is an illegal access in the others, and can take down the links between
        the GPUs.
        """
        if self._prepare is None or self._prepare.device_type == "cpu":
            return
        self._hub.call(self._abort_everywhere)
        self._let_go.wait(_ABORT_SECONDS)

    def _abort_everywhere(self) -> None:
        if self._ending:
            return
        self._ending = True
        alive = [rank.rank for rank in self.state.ranks.values() if rank.node]
        self._holding = set(alive) - self._elsewhere - self._exits.ranks
        for rank in alive:
            self._send(rank, Abort())
        self._note_let_go()

    def _note_let_go(self, rank: int | None = None) -> None:
        self._holding.discard(-1 if rank is None else rank)
        if not self._holding:
            self._let_go.set()

    def others_stopped(self) -> None:
        """Take note that nobody is at work any more: those that have failed may go."""
        self._hub.call(lambda: self._send_leave(self.state.ranks.keys() - self._elsewhere))

    @property
    def _elsewhere(self) -> frozenset[int]:
        return self._nodes.ranks if self._nodes is not None else frozenset()

    # --- on the hub's thread: what other nodes say -----------------------------------------------

    def node_started(self, workers: tuple[Worker, ...]) -> None:
        """Take note of a node's processes."""
        self._logs.extend(workers)
        pids = {worker.rank: worker.pid for worker in workers}
        world_size = self.state.world_size
        self._fold(AttemptStarted(number=self.attempt, world_size=world_size, time=time.time(), pids=pids))
        self._dispatch_when_ready()

    def rank_gone(self, exited: Exited) -> None:
        """Take note of a process of another node that is gone."""
        self._on_exit(exited)

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        """Take note that none of these is at work any more: those that have failed may go."""
        self._send_leave(frozenset(ranks))

    def node_leaves(self, name: str, *, asked: bool) -> bool:
        """Go on without a node, if there are nodes enough; those that stay begin anew."""
        job, rdzv = self.job, self.settings.rdzv
        assert self._nodes is not None  # noqa: S101 - there was one
        assert rdzv is not None  # noqa: S101 - there was one
        idle = job is None or job.settled or job.ended.is_set() or self._interruption.begun
        if idle or 1 + self._nodes.count < rdzv.least or rdzv.least == rdzv.most:
            return False
        self._note(f"node {name} {'left' if asked else 'was lost'}; the others begin again without it")
        self._changing = True
        if job is not None:
            job.settle_at = None
        self._agent.rejoin()
        return True

    def _on_change(self) -> None:
        self._changing = True
        if self.job is not None:
            self.job.settle_at = None
        self._tell_nodes(wire.Rejoin(attempt=self.attempt))

    def _close_nodes(self, *, succeeded: bool) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close(succeeded=succeeded)
