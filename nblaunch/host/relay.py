"""A node's relays, between its ranks and the notebook's worker group.

A relay is a member of this process's hub, and handles the events of its agent. It reads the ranks' log files,
and sends a rank's new bytes before the rank's next message. A node has one relay for each group. Which nodes
take part in an attempt, the notebook decides (`CompleteRendezvous`), or torch's rendezvous, in which the
agent takes part.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import zmq

from nblaunch import _inherited
from nblaunch._errors import LaunchError
from nblaunch._runtime_dir import remove_tree
from nblaunch.diagnose.failures import value_lost
from nblaunch.host import wire
from nblaunch.host.code import NodeCode
from nblaunch.host.link import IncomingTransfer, OutgoingTransfer, payload_of, with_payload
from nblaunch.host.local_host import LocalHost
from nblaunch.host.logs import MOST_BYTES, LogFile
from nblaunch.host.rank_host import RankHost
from nblaunch.host.settings import AgentSettings, Worker
from nblaunch.protocol import messages
from nblaunch.protocol.client import Event, Placement

_END_SECONDS = 5.0


class NodeRelay:
    """Relays between this node's host of one group and the notebook.

    On the hub's thread, except where a method says otherwise.
    """

    def __init__(  # noqa: PLR0913 - what a group is, and what of this process and node it uses
        self,
        local: LocalHost,
        send: Callable[[wire.FromNode, memoryview | bytes | None], None],
        settings: AgentSettings,
        prepare: Callable[[messages.Prepare], messages.Prepare],
        *,
        code: NodeCode,
        opened: wire.OpenGroup,
        node: str,
        clock: float,
        note: str = "",
    ) -> None:
        """Prepare; `start` starts the ranks. `prepare` adapts the notebook's `Prepare` to this machine.

        `send` sends to the notebook, on the hub's thread. The notebook's name for this node is `node`, and
        its clock is ahead by `clock` seconds. `note` is a text about this machine's ranks for the user.
        """
        self.name = opened.group
        """The group's at the notebook."""
        self.ended = threading.Event()
        self.succeeded = False
        """Whether the notebook has released the ranks with all of their values."""
        self.left = ""
        """Why this node left before the run was over."""
        self.longest_end = settings.options.shutdown_timeout + settings.options.grace + _END_SECONDS
        """How many seconds the group may take to end after it was released or stopped."""
        self._hub, self._to_notebook, self._prepare, self._code = local.hub, send, prepare, code
        self._node, self._clock, self._note = node, clock, note
        self._directory = local.directory.make("group-")
        self._log_directory, self._private_logs = settings.log_dir, settings.private_logs
        self._outgoing, self._incoming = OutgoingTransfer(), IncomingTransfer(self._directory)
        self._logs: dict[int, dict[messages.Stream, LogFile]] = {}
        self._waits: list[bytes] = []
        """Messages of ranks to send with the hub's next turn, or before any other message."""
        self._clear()
        try:
            self._host = RankHost(
                local, settings, self, self._directory, keep=opened.keep, waiting=self._await_rendezvous
            )
        except BaseException:
            remove_tree(self._directory)
            raise

    def _clear(self) -> None:
        self._early: list[tuple[messages.FromRank, bytes]] = []
        """Messages of ranks before the notebook knows their processes."""
        self._tickets: dict[int, messages.Payload] = {}
        """The payload's ticket in each rank's last job."""
        self._claimed: dict[str, messages.Payload | Exception] = {}
        """The payloads of these tickets, by path."""
        self._held: dict[int, deque[messages.ToRank]] = {}
        """Messages that wait for each rank, behind a job whose payload is incomplete."""
        self._whole: set[messages.Payload] = set()
        """Tickets of held jobs whose payloads have arrived since."""
        self._saving: set[int] | None = None
        """Ranks that were ordered to save, and have not saved yet; None before the first order."""

    def start(self) -> None:
        """Join the rendezvous, and start the ranks; from any thread."""
        self._host.start()

    def stop(self, why: str) -> None:
        """End the ranks, and then the agent; from any thread."""
        self.left = self.left or why
        self._host.stop()

    def join(self) -> None:
        """Wait for the agent's thread, and close; not on the hub's thread."""
        self._host.join(_END_SECONDS)
        with contextlib.suppress(LaunchError):  # the hub has ended, and uses neither any more
            self._hub.run(self._close, _END_SECONDS)
        remove_tree(self._directory)
        if self._private_logs:
            remove_tree(self._log_directory)

    def _close(self) -> None:
        self._host.close(succeeded=self.succeeded)
        self._incoming.close()

    @property
    def saved(self) -> bool:
        """Whether all ranks here have saved after an order to; from any thread."""
        return not self._host.ranks or (self._saving is not None and not self._saving)

    def _await_rendezvous(self) -> None:
        note, self._note = self._note, ""
        self._hub.call(
            lambda: self._send(wire.AwaitingRendezvous(group=self.name, after=self._host.attempt, error=note))
        )

    # --- from the notebook -------------------------------------------------------------------------

    def obey(self, message: wire.ToNode, data: memoryview) -> None:
        """Carry out an order of the notebook; drop one for another attempt than the current one."""
        host, attempt = self._host, self._host.attempt
        match message:
            case wire.CompleteRendezvous():
                # Set now, not at the fork: the notebook may order the next restart at once.
                self._begin()
                host.begin(message.attempt)
                host.complete_rendezvous(message)
            case wire.AdoptRanks() if message.attempt == attempt:
                self._go_on_as(message)
            case wire.ForRanks(ranks=ranks, data=encoded) if message.attempt == attempt:
                to_rank = messages.decode_to_rank(encoded, "the notebook")
                for rank in ranks:
                    self._order(rank, to_rank)
            case wire.MeasureRanks(wanted=wanted):
                host.measure(wanted=wanted)
            case wire.Restart() if message.attempt == attempt:
                host.restart()
            case wire.EndGroup():
                host.stop()
            case wire.Piece():
                self._incoming.receive(message, data)
            case wire.Release(succeeded=succeeded) if message.attempt == attempt:
                self.succeeded = succeeded
                host.release(succeeded=succeeded, others=frozenset(message.others))
            case wire.SkipGrace():
                host.skip_grace()
            case wire.DumpStacks(ranks=ranks):
                host.read_stacks(frozenset(ranks))
            case _:
                pass

    def _go_on_as(self, message: wire.AdoptRanks) -> None:
        """Go on with the same ranks in another attempt; their agent does not notice."""
        self.flush()
        numbers = self._host.go_on_as(message)
        self._held, self._whole = {}, set()
        if self._saving is not None:
            self._saving = {numbers[rank] for rank in self._saving if rank in numbers}
        for rank in self._logs.keys() - numbers:
            for log in self._logs.pop(rank).values():
                log.close()
        for rank in self._tickets.keys() - numbers:
            self._drop_ticket(self._tickets.pop(rank))
        self._logs = {numbers[rank]: logs for rank, logs in self._logs.items()}
        self._tickets = {numbers[rank]: ticket for rank, ticket in self._tickets.items()}
        if message.replaced:
            self._host.regroup(message)

    def _order(self, rank: int, message: messages.ToRank) -> None:
        """Deliver a message, unless it waits behind a job whose payload is still on its way."""
        held = self._held.get(rank)
        match message:
            case messages.Interrupt(number=number) if held:
                self._take_back(rank, number)
            case messages.Leave() if held:
                del self._held[rank]
                self._deliver(rank, message)
            case messages.Abort() | messages.ReportWhere() | messages.ReportReached():
                self._deliver(rank, message)
            case messages.Preempt():
                self._saving = {*(self._saving or ()), rank}
                self._deliver(rank, message)
            case _ if held:
                held.append(message)
            case messages.Dispatch():
                self._held[rank] = deque([message])
                self._go_on(rank)
            case _:
                self._deliver(rank, message)

    def _go_on(self, rank: int) -> None:
        """Deliver a rank's held messages, up to a job whose payload is incomplete."""
        held = self._held[rank]
        while held:
            first = held[0]
            code = first.code if isinstance(first, messages.Dispatch) else None
            if code is not None and not self._code.is_settled(code.tree):
                self._code.when_settled(code.tree, functools.partial(self._code_is_here, rank, first))
                return
            if isinstance(first, messages.Dispatch) and first.payload not in self._whole:
                self._incoming.when_whole(first.payload, functools.partial(self._is_whole, first.payload))
                return
            self._deliver(rank, held.popleft())
        del self._held[rank]

    def _code_is_here(self, rank: int, message: messages.ToRank) -> None:
        held = self._held.get(rank)
        if held and held[0] is message:  # the job has not been taken back
            self._go_on(rank)

    def _deliver(self, rank: int, message: messages.ToRank) -> None:
        match message:
            case messages.Prepare():
                message = self._prepare(message)
            case messages.Dispatch():
                try:
                    message = self._with_payload(rank, message)
                except (OSError, MemoryError) as error:
                    now = time.time()
                    failure = value_lost(
                        error, now, f"the node could not take over what the job needs: {error}"
                    )
                    self._pass_on(messages.Raised(rank=rank, failure=failure))
                    return
            case _:
                pass
        self._host.send(rank, message)

    def _with_payload(self, rank: int, dispatch: messages.Dispatch) -> messages.Dispatch:
        """Return a job as a rank of this machine gets it. Raises the error of incomplete data."""
        ticket, before = dispatch.payload, self._tickets.get(rank)
        self._tickets[rank] = ticket
        if before is not None:
            self._drop_ticket(before)
        if dispatch.code is not None:
            dispatch = msgspec.structs.replace(dispatch, code=self._code.point_view(dispatch.code, self.name))
        if ticket.inline is not None:
            return dispatch
        if ticket.path not in self._claimed:
            try:
                self._claimed[ticket.path] = self._incoming.claim(ticket)
            except (OSError, MemoryError) as error:
                self._claimed[ticket.path] = error
        payload = self._claimed[ticket.path]
        if isinstance(payload, Exception):
            raise payload
        return msgspec.structs.replace(dispatch, payload=payload)

    def _drop_ticket(self, before: messages.Payload) -> None:
        """Drop the payload of a rank that has finished with it, if no other rank uses it."""
        if before not in self._tickets.values():
            self._incoming.drop(before)
            self._claimed.pop(before.path, None)

    def _is_whole(self, ticket: messages.Payload) -> None:
        self._whole.add(ticket)
        for rank in [each for each, held in self._held.items() if _waits_for(held, ticket)]:
            self._go_on(rank)
        self._whole.discard(ticket)

    def _take_back(self, rank: int, number: int) -> None:
        """End a job that the rank has not received, with the outcome of an interrupt."""
        held = self._held.pop(rank)
        dispatch = held[0]
        if isinstance(dispatch, messages.Dispatch) and not any(
            _waits_for(each, dispatch.payload) for each in self._held.values()
        ):
            self._incoming.drop(dispatch.payload)
        self._pass_on(messages.InterruptSeen(rank=rank, number=number))
        failure = messages.FailureRecord(
            type="builtins.KeyboardInterrupt",
            message="",
            traceback="KeyboardInterrupt\n",
            exception=pickle.dumps(KeyboardInterrupt()),
            time=time.time(),
        )
        self._pass_on(messages.Raised(rank=rank, failure=failure))

    def flush(self) -> None:
        if self._waits:
            data, self._waits = tuple(self._waits), []
            self._to_notebook(wire.RankMessages(group=self.name, attempt=self._host.attempt, data=data), None)

    def _send(self, message: wire.FromNode, data: memoryview | bytes | None = None) -> None:
        self.flush()
        self._to_notebook(message, data)

    # --- from the host ---------------------------------------------------------------------------

    def receive(self, message: messages.FromRank, data: bytes) -> None:
        """Send a rank's message on, after the output that came before it."""
        if isinstance(message, messages.Preempted):
            self._has_saved(message.rank)
        if message.rank in self._logs:
            self._pass_on(message, data)
        else:
            self._early.append((message, data))

    def _pass_on(self, message: messages.FromRank, data: bytes | None = None) -> None:
        """Send a message of a rank to the notebook; `data` are its bytes, if it is unchanged."""
        self._send_logs(message.rank)
        sent = self._translated(message)
        if isinstance(sent, messages.Returned | messages.Profiled):
            try:
                ticket, pieces = self._outgoing.pieces(payload_of(sent))
            except OSError:
                return  # the process is gone, and its exit will be reported
            for piece, part in pieces:
                self._send(msgspec.structs.replace(piece, group=self.name), part)
            sent = with_payload(sent, ticket)
        self._waits.append(data if data is not None and sent is message else messages.encode(sent))

    def _translated(self, message: messages.FromRank) -> messages.FromRank:
        """Return a message with the notebook's name for this node, and times of the notebook's clock."""
        match message:
            case messages.Hello():
                return msgspec.structs.replace(message, node=self._node)
            case messages.Started() | messages.Returned() if self._clock:
                return msgspec.structs.replace(message, time=message.time + self._clock)
            case messages.Raised(failure=failure) if self._clock:
                failure = msgspec.structs.replace(failure, time=failure.time + self._clock)
                return msgspec.structs.replace(message, failure=failure)
            case _:
                return message

    def _has_saved(self, rank: int) -> None:
        if self._saving is not None:
            self._saving = self._saving - {rank}

    def send_output(self) -> None:
        for rank in self._logs:
            self._send_logs(rank)

    def lost(self, error: Exception) -> None:
        self.stop(f"the ranks' socket broke: {error}")

    def _send_logs(self, rank: int) -> None:
        for stream, log in self._logs.get(rank, {}).items():
            for data in log.unread(log.size()):
                self._send(
                    wire.Wrote(group=self.name, attempt=self._host.attempt, rank=rank, stream=stream), data
                )
            if self._private_logs:
                log.free(log.position - MOST_BYTES)

    def attempt_starting(
        self,
        number: int,  # noqa: ARG002 - as called
        world_size: int,  # noqa: ARG002
        reason: str,  # noqa: ARG002
        *,
        kept: Mapping[int, int] | None = None,  # noqa: ARG002 - where ranks go on, the notebook decides it
    ) -> None:
        """End an attempt of torch's rendezvous; the next begins."""
        self._begin()

    def _begin(self) -> None:
        self.flush()
        self._close_logs()
        for ticket in set(self._tickets.values()):
            self._incoming.drop(ticket)
        self._clear()

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:  # noqa: ARG002
        records = tuple(Worker(each.rank, each.local_rank, each.pid) for each in workers)
        self._send(wire.Workers(group=self.name, attempt=number, workers=records))
        self._logs |= {
            each.rank: {
                messages.Stream.STDOUT: LogFile(each.stdout),
                messages.Stream.STDERR: LogFile(each.stderr),
            }
            for each in workers
        }
        early, self._early = self._early, []
        for message, data in early:
            self._pass_on(message, data)

    def rank_gone(self, exited: messages.Exited) -> None:
        self._send_logs(exited.rank)
        self._send(wire.Gone(group=self.name, attempt=self._host.attempt, exited=exited))
        self._has_saved(exited.rank)

    def ranks_stopped(self, ranks: Iterable[int]) -> None:  # noqa: ARG002 - the notebook knows them
        self._send(wire.OthersStopped(group=self.name))

    def measured(self, usages: Mapping[int, messages.Usage]) -> None:
        used = wire.RanksMeasured(group=self.name, attempt=self._host.attempt, usages=dict(usages))
        self._send(used)

    def stacks_read(self, stacks: Mapping[int, str]) -> None:
        for rank, text in stacks.items():
            self._send(wire.Dumped(group=self.name, rank=rank, text=text))

    def membership_changing(self) -> None:
        """Do nothing: the notebook decides it."""

    def recorded(self, event: Event) -> None:
        """Do nothing: a result has the events of the notebook's own agent, as torchrun's log has its own."""

    def agent_ended(self, error: BaseException | None) -> None:
        """Report it, and end; on the agent's thread."""
        if error is not None:
            self.left = self.left or f"{type(error).__name__}: {error}"

        def report() -> None:
            self._close_logs()
            self._send(wire.NodeEnded(group=self.name, error=self.left))
            self.ended.set()

        self._hub.call(report)

    def _close_logs(self) -> None:
        for rank, logs in self._logs.items():
            self._send_logs(rank)
            for log in logs.values():
                log.close()
        self._logs = {}


def _waits_for(held: deque[messages.ToRank], ticket: messages.Payload) -> bool:
    first = held[0] if held else None
    return isinstance(first, messages.Dispatch) and first.payload == ticket


def send_to_notebook(
    socket: zmq.Socket[bytes], message: wire.FromNode, data: memoryview | bytes | None = None
) -> None:
    frames = [wire.encode(message), *([] if data is None else [data])]
    with contextlib.suppress(zmq.ZMQError):  # the connection has ended, and this node ends with it
        socket.send_multipart(frames, zmq.NOBLOCK, copy=data is None)


def orders_of(socket: zmq.Socket[bytes]) -> Iterator[tuple[wire.ToNode, memoryview]]:
    while socket.poll(0):
        frames = socket.recv_multipart(copy=False)
        yield (
            wire.decode_to_node(frames[0].bytes),
            frames[1].buffer if len(frames) > 1 else memoryview(b""),
        )


def of_this_machine(
    prepare: messages.Prepare, env: Mapping[str, str], placement: Placement, cwd: bytes
) -> messages.Prepare:
    """Return a `Prepare` with this machine's environment and path, for ranks in `cwd`."""
    return msgspec.structs.replace(
        prepare,
        environ=_inherited.encoded({**os.environ, **env}),
        cwd=cwd,
        path=_inherited.search_path(sys.path),
        umask=_inherited.umask(),
        limits=_inherited.with_descriptors(_inherited.limits(), placement.nproc),
        accelerators=placement.accelerators,
    )
