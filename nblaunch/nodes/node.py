"""A node: relays between its ranks and the notebook's worker group.

It is a member of this process's hub, and handles the events of its agent. It reads the ranks' log files, and
sends the new bytes of a rank before the rank's next message.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import zmq

from nblaunch import _inherited
from nblaunch._errors import LaunchError
from nblaunch._results import Event
from nblaunch._runtime_dir import remove_tree
from nblaunch.elastic.agent import AgentThread
from nblaunch.elastic.logs import MOST_BYTES, free
from nblaunch.elastic.settings import AgentSettings, Worker
from nblaunch.group.runtime import LocalRuntime
from nblaunch.group.stacks import ExitReasons
from nblaunch.nodes import messages as wire
from nblaunch.nodes.transfer import IncomingTransfer, OutgoingTransfer
from nblaunch.protocol.client import Placement
from nblaunch.protocol.messages import (
    CellJob,
    Dispatch,
    Exited,
    FromRank,
    Orders,
    Payload,
    Prepare,
    Returned,
    Stream,
    ToRank,
    decode_to_rank,
    encode,
)

_LOG_BYTES = 1 << 20
_END_SECONDS = 5.0


class NodeRelay:
    """Relays between this node's ranks and the notebook; on the hub's thread but for the agent's calls."""

    quiet = False

    def __init__(
        self,
        runtime: LocalRuntime,
        socket: zmq.Socket[bytes],
        settings: AgentSettings,
        prepare: Callable[[Prepare], Prepare],
    ) -> None:
        """Prepare; `start` starts the ranks. `prepare` adapts the notebook's `Prepare` to this machine."""
        self.group, self.token = secrets.token_hex(4), secrets.token_hex(16)
        self.attempt = -1
        self.ended = threading.Event()
        self.succeeded = False
        """Whether the notebook has released the ranks with all of their values."""
        self.left = ""
        """Why this node left before the run was over."""
        self._hub, self._socket, self._prepare = runtime.hub, socket, prepare
        self._directory = runtime.directory.make("group-")
        self._exit_reasons = ExitReasons(self._directory)
        self._outgoing, self._incoming = OutgoingTransfer(), IncomingTransfer(self._directory)
        self._payload: tuple[Payload, Payload] | None = None
        """The ticket of the present job's payload, and the payload."""
        self._titles: dict[str, str] = {}
        self._logs: dict[int, list[_Log]] = {}
        self._private_logs = settings.private_logs
        self._early: list[tuple[FromRank, bytes]] = []
        """Messages of an attempt whose processes the notebook does not know yet."""
        self._started = False
        self._finished = False
        self._processes = settings.processes
        self._agent = AgentThread(settings, self._rank_arguments, self, runtime.server)

    def start(self) -> None:
        """Meet the other nodes, and start the ranks."""
        self._hub.add(self)
        self._hub.call(lambda: self._hub.watch(self._socket, self._receive_orders))
        self._agent.start()

    def leave(self) -> None:
        """Ask the notebook to go on without this node; from any thread."""
        self._hub.call(lambda: self._send(wire.Leaving()))

    def stop(self, why: str) -> None:
        """End the ranks, and then this node; from any thread."""
        self.left = self.left or why
        self._agent.stop()

    def join(self) -> None:
        """Wait for the agent's thread, and close."""
        self._agent.join(_END_SECONDS)
        with contextlib.suppress(LaunchError):  # the hub has ended, and uses neither any more
            self._hub.run(self._close, _END_SECONDS)
        remove_tree(self._directory)

    def _close(self) -> None:
        self._hub.watch(self._socket, None)
        self._hub.remove(self)
        self._incoming.close()

    # --- from the notebook -------------------------------------------------------------------------

    def _receive_orders(self) -> None:
        while self._socket.poll(0):
            frames = self._socket.recv_multipart(copy=False)
            data = frames[1].buffer if len(frames) > 1 else memoryview(b"")
            self._obey(wire.decode_to_node(frames[0].bytes), data)

    def _obey(self, message: wire.ToNode, data: memoryview) -> None:
        match message:
            case wire.ForRank(attempt=attempt, rank=rank, data=encoded) if attempt == self.attempt:
                self._hub.send(self, rank, self._adapted(decode_to_rank(encoded, "the notebook")))
            case wire.Piece():
                self._incoming.receive(message, data)
            case wire.Release(succeeded=succeeded, others=others) if message.attempt == self.attempt:
                self.succeeded = succeeded
                self._agent.release(succeeded=succeeded, others=frozenset(others))
            case wire.Rejoin(attempt=attempt) if attempt == self.attempt:
                self._agent.rejoin()
            case wire.SkipGrace():
                self._agent.skip_grace()
            case wire.Finish(succeeded=succeeded):
                self.succeeded, self._finished = succeeded or self.succeeded, True
                if not self.succeeded:
                    self.stop("the run is over, and did not succeed")
            case wire.Refused(why=why):
                self.stop(why)
            case _:
                pass

    def _adapted(self, message: ToRank) -> ToRank:
        """Return a message as a rank of this machine gets it."""
        match message:
            case Prepare():
                return self._prepare(message)
            case Dispatch():
                return self._with_payload(message)
            case _:
                return message

    def _with_payload(self, dispatch: Dispatch) -> Dispatch:
        self._titles = {name: title for name, (title, _) in dispatch.sources.items()}
        if isinstance(dispatch.job, CellJob):
            self._titles[dispatch.job.filename] = dispatch.job.title
        if self._payload is None or self._payload[0] != dispatch.payload:
            if self._payload is not None:
                self._incoming.drop(self._payload[0])
            self._payload = dispatch.payload, self._incoming.claim(dispatch.payload)
        return msgspec.structs.replace(dispatch, payload=self._payload[1])

    def _send(self, message: wire.FromNode, data: memoryview | bytes | None = None) -> None:
        frames = [wire.encode(message), *([] if data is None else [data])]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, copy=data is None)

    # --- from the ranks ----------------------------------------------------------------------------

    def receive(self, message: FromRank, data: bytes) -> None:
        """Send a rank's message on, after the output that came before it."""
        if not self._started:
            self._early.append((message, data))
            return
        self._send_logs(message.rank)
        if isinstance(message, Returned):
            try:
                ticket, pieces = self._outgoing.pieces(message.value)
            except OSError:
                return  # the process is gone, and its exit will be reported
            for piece, part in pieces:
                self._send(piece, part)
            data = encode(msgspec.structs.replace(message, value=ticket))
        self._send(wire.RankMessage(attempt=self.attempt, data=data))

    def tick(self, now: float) -> None:  # noqa: ARG002 - as every member of a hub has it
        """Send new output."""
        for rank in self._logs:
            self._send_logs(rank)

    def lost(self, error: Exception) -> None:
        """End: no message of a rank arrives any more."""
        self.stop(f"the ranks' socket broke: {error}")

    def _send_logs(self, rank: int) -> None:
        for log in self._logs.get(rank, ()):
            for data in log.unread():
                self._send(wire.Wrote(attempt=self.attempt, rank=rank, stream=log.stream), data)

    # --- from the agent, on its thread -------------------------------------------------------------

    def _rank_arguments(self, attempt: int) -> tuple[Orders]:
        orders = Orders(
            self._hub.address,
            self.group,
            self.token,
            attempt,
            str(self._directory),
            fresh=self._processes.environ if self._processes.start_method == "spawn" else None,
            virtual_local_rank=self._processes.virtual_local_rank,
            numa_binding=self._processes.numa_binding,
        )
        return (orders,)

    def attempt_starting(self, number: int, world_size: int, reason: str) -> None:  # noqa: ARG002 - as called
        """Record the attempt before the first process is forked: it may send before the last one is."""

        def begin() -> None:
            self._close_logs()
            self.attempt, self._started, self._early = number, False, []
            # On this thread: an order for the new attempt must not be forgotten with the others.
            self._agent.forget_orders()

        self._hub.run(begin)

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:  # noqa: ARG002
        """Report the processes, and then what the first of them have sent meanwhile."""

        def report() -> None:
            records = tuple(wire.WorkerRecord(each.rank, each.local_rank, each.pid) for each in workers)
            self._send(wire.Workers(attempt=number, workers=records))
            self._logs = {
                each.rank: [
                    _Log(Stream.STDOUT, each.stdout, bounded=self._private_logs),
                    _Log(Stream.STDERR, each.stderr, bounded=self._private_logs),
                ]
                for each in workers
            }
            self._started = True
            early, self._early = self._early, []
            for message, data in early:
                self.receive(message, data)

        self._hub.call(report)

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Report the exit, after all that the rank has sent and printed."""

        def report() -> None:
            self._hub.drain()
            self._send_logs(rank)
            exited = Exited(rank=rank, exitcode=exitcode, time=0, expected=expected, reason=reason)
            exited = self._exit_reasons.explained(exited, self._titles)
            gone = wire.Gone(
                attempt=self.attempt,
                rank=rank,
                exitcode=exitcode,
                expected=expected,
                reason=exited.reason,
                details=exited.details,
            )
            self._send(gone)

        self._hub.call(report)

    def membership_changing(self) -> None:
        """Do nothing: the notebook has ordered it."""

    def ranks_ending(self) -> None:
        """Do nothing: the notebook sends `Abort` to all ranks, those of other nodes too."""

    def others_stopped(self) -> None:
        """Report it."""
        self._hub.call(lambda: self._send(wire.OthersStopped()))

    def recorded(self, event: Event) -> None:
        """Do nothing: a result has the events of the notebook's own agent, as torchrun's log has its own."""

    def agent_ended(self, error: BaseException | None) -> None:
        """Report it, and end."""
        if error is not None:
            self.left = self.left or f"{type(error).__name__}: {error}"

        def report() -> None:
            self._close_logs()
            if not self._finished:
                self._send(wire.NodeEnded(self.left))
            self.ended.set()

        self._hub.call(report)

    def _close_logs(self) -> None:
        for rank, logs in self._logs.items():
            self._send_logs(rank)
            for log in logs:
                log.close()
        self._logs = {}


class _Log:
    """A growing log file, sent up to `_position`."""

    def __init__(self, stream: Stream, path: str, *, bounded: bool) -> None:
        self.stream = stream
        self._path, self._bounded, self._freed = path, bounded, 0
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
        self._position = 0

    def unread(self) -> Iterator[bytes]:
        while data := os.pread(self._fd, _LOG_BYTES, self._position):
            self._position += len(data)
            yield data
        if self._bounded:
            self._freed = free(self._path, self._freed, self._position - MOST_BYTES)

    def close(self) -> None:
        os.close(self._fd)


def of_this_machine(prepare: Prepare, env: dict[str, str], placement: Placement) -> Prepare:
    """Return a `Prepare` with this machine's environment, directory and path."""
    return msgspec.structs.replace(
        prepare,
        environ=_inherited.encoded({**os.environ, **env}),
        cwd=_inherited.working_directory(),
        path=_inherited.search_path(sys.path),
        umask=_inherited.umask(),
        limits=_inherited.limits(placement.nproc),
        accelerators=placement.accelerators,
    )
