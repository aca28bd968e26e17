"""The ranks of one group on this machine: their agent, their messages, their stacks and usage.

A worker group has a host in its own process, and nothing is encoded or copied between the two. On a node the
owner of a host is a relay, which sends what it is told over TCP. Either gets the same calls, in the same
order: a rank's exit comes after all that the rank has sent.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from nblaunch.host.agent import AgentThread
from nblaunch.host.local_host import LocalHost
from nblaunch.host.process_stacks import ExitReasons, stacks_of_silent
from nblaunch.host.settings import AgentSettings, AttemptEvents, Worker
from nblaunch.host.usage import SeenGpus, alive, measuring, own_memory
from nblaunch.host.wire import AdoptRanks
from nblaunch.protocol import messages
from nblaunch.protocol.client import Event
from nblaunch.protocol.state import RankState, RunState

_GONE = "  its process has ended"
# An abort takes NCCL a second or two; a rank that holds its interpreter does not answer.
_ABORT_SECONDS = 2.0


class GroupHost:
    """Ranks of a group, on this machine or on others; the group gives orders, which do nothing by default.

    Orders of the first part may be given on any thread, those of the second on the hub's; all but `join`
    return at once. Of several hosts of a group, each heeds what concerns its own ranks.
    """

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End the ranks, and then the agent, which may not have started."""

    def restart(self) -> None:
        """End the ranks, and start new ones."""

    def rejoin(self) -> None:
        """Repeat the rendezvous after a membership change, with other ranks."""

    def regroup(self) -> None:
        """Form the group again from the ranks that are left and new ones."""

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        """Expect the exits of the ranks, and stop the `others`."""

    def skip_grace(self) -> None:
        """Skip the rest of the grace period."""

    def adopt(self, settings: AgentSettings) -> None:
        """Use these settings from now on."""

    def all_alive(self) -> bool:
        """Whether no process of this attempt has ended."""
        return True

    def memory(self) -> dict[int, int | None]:
        """Return the private memory of ranks in bytes, of those that can be asked at once."""
        return {}

    def join(self, timeout: float) -> None:
        """Wait for the end, for `timeout` seconds at most."""

    def send(self, rank: int, message: messages.ToRank) -> bool:
        """Send to a rank; return whether this host has it."""
        del rank, message
        return False

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before."""

    def follow(self) -> None:
        """Have ranks end that follow the agent of another host, which repeats the rendezvous now."""

    def measure(self, *, wanted: bool) -> None:
        """Start or stop measuring the ranks; answered by `measured`."""

    def read_stacks(self, ranks: frozenset[int]) -> None:
        """Read the stacks of these ranks, which do not answer; answered by `stacks_read`."""

    def close(self, *, succeeded: bool) -> None:
        """End: the last rank is gone."""


class HostEvents(AttemptEvents, Protocol):
    """The owner of a host; called on the hub's thread, but for `recorded` and `agent_ended`."""

    def receive(self, message: messages.FromRank, data: bytes) -> None:
        """Handle a rank's message, and the bytes that hold it."""

    def rank_gone(self, exited: messages.Exited) -> None:
        """Handle a process's exit, after all that its rank has sent."""

    def ranks_stopped(self, ranks: Iterable[int]) -> None:
        """Handle the exit of those of these ranks that were still at work."""

    def measured(self, usages: Mapping[int, messages.Usage]) -> None:
        """Handle a measurement of ranks."""

    def stacks_read(self, stacks: Mapping[int, str]) -> None:
        """Handle the answer to `read_stacks`."""

    def lost(self, error: Exception) -> None:
        """Handle the end of the hub: no message of a rank arrives any more."""


class RankHost(AgentThread, GroupHost):
    """The host of this machine: its agent's thread, and a member of the hub.

    The agent calls it on its own thread; it calls its owner on the hub's.
    """

    quiet = True

    def __init__(  # noqa: PLR0913 - what it runs, and for whom
        self,
        local: LocalHost,
        settings: AgentSettings,
        owner: HostEvents,
        directory: Path,
        *,
        keep: bool,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `start` starts the ranks. `directory` is private, and the owner removes it.

        If the runtime decides each rendezvous, `waiting` is called on the agent's thread, and answered by
        `meet`.
        """
        super().__init__(settings, self._rank_arguments, self, local.server, waiting)
        self.group, self.token = secrets.token_hex(4), secrets.token_hex(16)
        self.attempt = -1
        self._hub, self._owner, self._directory, self._keep = local.hub, owner, directory, keep
        self._settings = settings
        self._exit_reasons = ExitReasons(directory)
        self._may_end, self._measuring = threading.Event(), contextlib.ExitStack()
        self._measures = False
        self._prepared: messages.Prepare | None = None
        """As ranks got it last."""
        self._dispatched: messages.Dispatch | None = None
        """The last job."""
        self._aborting: set[int] = set()
        """Ranks that are to be ended, but are still inside NCCL."""
        self._clear()

    def _clear(self) -> None:
        self.ranks: dict[int, RankState] = {}
        """The processes that have not ended."""
        self._workers: dict[int, Worker] = {}
        """Those of this attempt, by the numbers with which the agent has started them."""
        self._idle: set[int] = set()
        """Ranks that have no job, or have ended it."""
        self._shift = 0
        """The difference between the ranks' numbers and those that the agent knows."""
        self._ending = False

    @property
    def log_directory(self) -> Path:
        """The directory of this attempt's logs, with one for each rank. Raises `StopIteration` before any."""
        return Path(next(iter(self._workers.values())).stdout).parent.parent

    # --- orders ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._hub.add(self)
        super().start()

    def release(self, *, succeeded: bool, others: frozenset[int]) -> None:
        super().release(succeeded=succeeded, others=frozenset(rank - self._shift for rank in others))

    def all_alive(self) -> bool:
        # The system knows of a death before the agent does.
        return super().all_alive() and all(alive(each.pid) for each in list(self.ranks.values()))

    def memory(self) -> dict[int, int | None]:
        return {rank: own_memory(each.pid) for rank, each in list(self.ranks.items())}

    def close(self, *, succeeded: bool) -> None:  # noqa: ARG002 - as of every host
        self._measuring.close()
        self._hub.remove(self)

    def send(self, rank: int, message: messages.ToRank) -> bool:
        if rank not in self.ranks:
            return False
        match message:
            case messages.Prepare():
                first, self._prepared = self._prepared is None, message
                if first and self._measures:
                    # Only now is it known which GPUs the ranks see.
                    with contextlib.suppress(RuntimeError):  # the system refuses a thread
                        self.measure(wanted=True)
            case messages.Dispatch():
                self._dispatched = message
                self._idle.discard(rank)
            case _:
                pass
        self._hub.send(self, rank, message)
        return True

    def measure(self, *, wanted: bool) -> None:
        self._measures = wanted
        self._measuring.close()
        if wanted:
            alone, prepared = self._settings.options.virtual_local_rank, self._prepared
            seen = None if prepared is None else SeenGpus.by(prepared, alone=alone)
            self._measuring.enter_context(measuring(self._state, self._report, seen))

    @property
    def _titles(self) -> dict[str, str]:
        return {} if self._dispatched is None else self._dispatched.titles

    def _state(self) -> RunState:
        # While some are at work, to read the memory of the others would keep those waiting that matter.
        idle, ranks = self._idle.copy(), self.ranks.copy()
        at_work = {rank: each for rank, each in ranks.items() if rank not in idle}
        return replace(RunState.fresh(0), ranks=at_work or ranks)

    def _report(self, measured: messages.Measured) -> None:
        self._hub.call(lambda: self._owner.measured(measured.usages))

    def read_stacks(self, ranks: frozenset[int]) -> None:
        """Read the stacks of these ranks, which do not answer; on a thread, because it may block."""
        # Processes and their dump files have the numbers with which the ranks began.
        shift, known, titles = self._shift, self.ranks, self._titles
        pids = {rank - shift: pid for rank in ranks if rank in known and (pid := known[rank].pid)}
        gone = {rank: _GONE for rank in ranks if rank not in known and rank - shift in self._workers}

        def report(found: Mapping[int, str]) -> None:
            self._owner.stacks_read(gone | {rank + shift: text for rank, text in found.items()})

        try:
            read = functools.partial(stacks_of_silent, pids, str(self._directory), titles)
            self._hub.run_aside("nblaunch-stacks", read, report)
        except RuntimeError:  # the system refuses one
            self._owner.stacks_read(gone | dict.fromkeys(known, ""))

    # --- attempts, on the hub's thread -------------------------------------------------------------

    def begin(self, number: int) -> None:
        self.attempt = number
        self._clear()
        # On this thread: orders for the new attempt must not be dropped with the old ones.
        self.forget_orders()

    def go_on_as(self, order: AdoptRanks) -> Mapping[int, int]:
        """Have the ranks go on in another attempt, unnoticed by their agent; return their new numbers.

        Those that are to be replaced have none until then.
        """
        shift = order.base_rank - min(self._workers)
        self._workers = {
            rank: each for rank, each in self._workers.items() if rank + shift not in order.replaced
        }
        numbers = {rank + self._shift: rank + shift for rank in self._workers}
        for old, new in numbers.items():
            self._hub.send(self, old, order.of_rank(new))
        self.attempt, self._shift = order.number, shift
        # The `Hello` of one that has died since may have come after its exit.
        self.ranks = {
            numbers[rank]: replace(known, rank=numbers[rank])
            for rank, known in self.ranks.items()
            if rank in numbers
        }
        self._idle = {numbers[rank] for rank in self._idle if rank in numbers}
        return numbers

    # --- from the ranks, on the hub's thread -------------------------------------------------------

    def receive(self, message: messages.FromRank, data: bytes) -> None:
        """Hand a rank's message on, but for a failure that this host has caused."""
        match message:
            case messages.Hello(rank=rank):
                known = self.ranks.get(rank) or RankState(rank, message.local_rank, pid=message.pid)
                self.ranks[rank] = replace(known, node=message.node)
            case messages.Entered(rank=rank, device=device) if rank in self.ranks:
                self.ranks[rank] = replace(self.ranks[rank], device=device)
            case messages.Aborted(rank=rank):
                self._released(rank)
            case messages.Finishing() if not self._keep:
                self.let_finish()
            case messages.Raised() if self._ending:
                return  # the rank failed because of the abort
            case messages.Returned(rank=rank) | messages.Raised(rank=rank):
                self._idle.add(rank)
            case _:
                pass
        self._owner.receive(message, data)

    def _released(self, rank: int) -> None:
        self._aborting.discard(rank)
        if not self._aborting:
            self._may_end.set()

    def tick(self, now: float) -> None:
        """Do nothing: the owner has a clock of its own."""

    def lost(self, error: Exception) -> None:
        self._owner.lost(error)

    # --- from the agent, on its thread -------------------------------------------------------------

    def _rank_arguments(self, attempt: int) -> tuple[messages.Orders]:
        options, processes = self._settings.options, self._settings.processes
        # If a group starts again after days, a cleaner may have removed both.
        self._hub.be_reachable()
        self._directory.mkdir(mode=0o700, exist_ok=True)
        orders = messages.Orders(
            self._hub.address,
            self.group,
            self.token,
            attempt,
            spill=str(self._directory),
            keep=self._keep,
            fresh=processes.environ if processes.start_method == "spawn" else None,
            virtual_local_rank=options.virtual_local_rank,
            numa_binding=options.numa_binding,
        )
        return (orders,)

    def attempt_starting(
        self, number: int, world_size: int, reason: str, *, kept: Mapping[int, int] | None = None
    ) -> None:
        """Begin an attempt before the first process is forked, which may connect at once.

        One that the runtime has decided has begun with its message.
        """

        def starting() -> None:
            self._owner.attempt_starting(number, world_size, reason, kept=kept)
            if kept is None:
                self.begin(number)
                return
            # On this thread, as in `begin`: another death may order it for the new attempt at once.
            self.forget_replacement()
            self.go_on_as(
                AdoptRanks(
                    group=self.group,
                    attempt=self.attempt,
                    number=number,
                    node_rank=0,
                    node_count=1,
                    base_rank=min(self._workers),
                    world_size=world_size,
                    replaced=tuple(self._workers.keys() - kept),
                )
            )

        if number != self.attempt:
            self._hub.run(starting)

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:
        def started() -> None:
            self._workers |= {each.rank: each for each in workers}
            named = tuple(replace(each, rank=each.rank + self._shift) for each in workers)
            forked = {each.rank: RankState(each.rank, each.local_rank, pid=each.pid) for each in named}
            self.ranks = forked | self.ranks
            self._idle |= set(forked) if self._keep else set()
            self._owner.attempt_started(number, world_size, named)

        self._hub.run(started)

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Report the exit of a process, after all that its rank has sent, and why it has exited."""
        # Before the hub has time for it: which rank failed first is told by this.
        when = time.time()

        def report() -> None:
            self._hub.drain()
            number = rank + self._shift
            self.ranks.pop(number, None)
            known = self._workers.get(rank)
            exited = messages.Exited(
                rank=rank, exitcode=exitcode, time=when, expected=expected, reason=reason
            )
            exited = self._exit_reasons.explained(exited, self._titles, known.stderr if known else "")
            self._owner.rank_gone(replace(exited, rank=number))
            self._released(number)

        self._hub.call(report)

    def membership_changing(self) -> None:
        """Expect the end of all ranks before the first is ended: how their peers fail then is no failure."""
        self._hub.run(self._owner.membership_changing)

    def ranks_ending(self) -> None:
        """Have every rank release NCCL before the first is killed; waits for that with a bound.

        A kernel of NCCL's reads and writes the memory of other GPUs. Where the process that the memory
        belongs to goes first, that is an illegal access in the others, and can take down the links between
        the GPUs.
        """
        if self._prepared is None or self._prepared.device_type == "cpu":
            return
        may_end = threading.Event()

        def abort() -> None:
            # Only now: the exit of a rank that was reported before releases nobody.
            self._may_end = may_end
            self._ending, self._aborting = True, {rank for rank, each in self.ranks.items() if each.node}
            for rank in self._aborting:
                self._hub.send(self, rank, messages.Abort())
            if not self._aborting:
                may_end.set()

        self._hub.call(abort)
        may_end.wait(_ABORT_SECONDS)

    def others_stopped(self) -> None:
        self._hub.call(lambda: self._owner.ranks_stopped(rank + self._shift for rank in self._workers))

    def recorded(self, event: Event) -> None:
        self._owner.recorded(event)

    def agent_ended(self, error: BaseException | None) -> None:
        self._owner.agent_ended(error)
