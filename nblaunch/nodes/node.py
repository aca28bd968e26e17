"""A node's ranks, as the notebook's group sees them: what they say goes there, their orders come from there.

To the ranks this is a hub like the notebook's; to the agent it is whoever hears what happens. The log files
are read here, and each new byte is sent before what the rank said next.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Callable

import msgspec
import zmq

from nblaunch._errors import LaunchError
from nblaunch._results import Event
from nblaunch.capture.transfer import Arrival, OutgoingTransfer
from nblaunch.elastic.agent import AgentThread
from nblaunch.elastic.placement import Placement
from nblaunch.elastic.runtime_dir import remove_tree
from nblaunch.elastic.settings import AgentSettings, Worker
from nblaunch.group import inherited
from nblaunch.group.runtime import LocalRuntime
from nblaunch.group.stacks import ExitReasons
from nblaunch.protocol import nodes as wire
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
    decode_to_rank,
    encode,
)

_LOG_BYTES = 1 << 20
_END_SECONDS = 5.0


class NodeRelay:
    """Stands between this node's ranks and the notebook; on the hub's thread but for what the agent calls."""

    quiet = False

    def __init__(
        self,
        runtime: LocalRuntime,
        socket: zmq.Socket[bytes],
        settings: AgentSettings,
        prepare: Callable[[Prepare], Prepare],
    ) -> None:
        """Prepare; `start` starts the ranks. `prepare` makes the notebook's words fit this machine."""
        self.group, self.token = secrets.token_hex(4), secrets.token_hex(16)
        self.attempt = -1
        self.ended = threading.Event()
        self.succeeded = False
        """Whether the notebook has let the ranks go with all of their values."""
        self.left = ""
        """Why this node went before the run was over."""
        self._hub, self._socket, self._prepare = runtime.hub, socket, prepare
        self._directory = runtime.directory.make("group-")
        self._exit_reasons = ExitReasons(self._directory)
        self._outgoing, self._arrival = OutgoingTransfer(wire.PIECE_BYTES), Arrival(self._directory)
        self._present: tuple[Payload, Payload] | None = None
        self._titles: dict[str, str] = {}
        self._logs: dict[int, list[_Log]] = {}
        self._early: list[FromRank] = []
        self._started = False
        self._over = False
        self._processes = settings.processes
        self._agent = AgentThread(settings, self._rank_arguments, self, runtime.server)

    def start(self) -> None:
        """Meet the other nodes, and start the ranks."""
        self._hub.add(self)
        self._hub.call(lambda: self._hub.watch(self._socket, self._listen))
        self._agent.start()

    def leave(self) -> None:
        """Ask the notebook to go on without this node; from any thread."""
        self._hub.call(lambda: self._send(wire.Leaving()))

    def stop(self, why: str) -> None:
        """End the ranks, and then this; from any thread."""
        self.left = self.left or why
        self._agent.stop()

    def join(self) -> None:
        """Wait for the last of the agent, and say goodbye."""
        self._agent.join(_END_SECONDS)
        with contextlib.suppress(LaunchError):  # the hub has ended before: it does nothing more with these
            self._hub.run(self._close, _END_SECONDS)
        remove_tree(self._directory)

    def _close(self) -> None:
        self._hub.watch(self._socket, None)
        self._hub.remove(self)
        self._arrival.close()

    # --- what the notebook says ----------------------------------------------------------------------

    def _listen(self) -> None:
        while self._socket.poll(0):
            frames = self._socket.recv_multipart(copy=False)
            self._take(
                wire.decode_to_node(frames[0].bytes), frames[1].buffer if len(frames) > 1 else memoryview(b"")
            )

    def _take(self, message: wire.ToNode, data: memoryview) -> None:
        match message:
            case wire.ForRank(attempt=attempt, rank=rank, data=said) if attempt == self.attempt:
                self._tell(rank, said)
            case wire.Piece(number=number, offset=offset, total=total):
                self._arrival.take(number, offset, total, data)
            case wire.Release(succeeded=succeeded, others=others) if message.attempt == self.attempt:
                self.succeeded = succeeded
                self._agent.release(succeeded=succeeded, others=frozenset(others))
            case wire.Rejoin(attempt=attempt) if attempt == self.attempt:
                self._agent.rejoin()
            case wire.SkipGrace():
                self._agent.skip_grace()
            case wire.Finish(succeeded=succeeded):
                self._finish(succeeded=succeeded)
            case wire.Refused(why=why):
                self.stop(why)
            case _:
                pass

    def _finish(self, *, succeeded: bool) -> None:
        self.succeeded, self._over = succeeded or self.succeeded, True
        if not self.succeeded:
            self.stop("the run is over, and did not succeed")

    def _tell(self, rank: int, said: bytes) -> None:
        message = decode_to_rank(said, "the notebook")
        match message:
            case Prepare():
                message = self._prepare(message)
            case Dispatch():
                message = self._dispatched(message)
            case _:
                pass
        self._hub.send(self, rank, message)

    def _dispatched(self, dispatch: Dispatch) -> Dispatch:
        self._titles = {name: title for name, (title, _) in dispatch.sources.items()}
        if isinstance(dispatch.job, CellJob):
            self._titles[dispatch.job.filename] = dispatch.job.title
        if self._present is None or self._present[0] != dispatch.payload:
            if self._present is not None:
                self._arrival.drop(self._present[0])
            self._present = dispatch.payload, self._arrival.claim(dispatch.payload)
        return msgspec.structs.replace(dispatch, payload=self._present[1])

    def _send(self, message: wire.FromNode, data: memoryview | bytes | None = None) -> None:
        frames = [wire.encode(message), *([] if data is None else [data])]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(frames, copy=data is None)

    # --- what the ranks say --------------------------------------------------------------------------

    def receive(self, message: FromRank) -> None:
        """Pass a rank's message on, after the output that came before it."""
        if not self._started:
            self._early.append(message)
            return
        self._send_logs(message.rank)
        if isinstance(message, Returned):
            try:
                ticket, pieces = self._outgoing.pieces(message.value)
            except OSError:
                return  # its process is gone: its exit says so
            for number, offset, total, data in pieces:
                self._send(wire.Piece(number=number, offset=offset, total=total), data)
            message = msgspec.structs.replace(message, value=ticket)
        self._send(wire.RankMessage(attempt=self.attempt, data=encode(message)))

    def tick(self, now: float) -> None:  # noqa: ARG002 - as every member of a hub has it
        """Pass new output on."""
        for rank in self._logs:
            self._send_logs(rank)

    def lost(self, error: Exception) -> None:
        """End: nobody hears the ranks any more."""
        self.stop(f"the ranks' socket broke: {error}")

    def _send_logs(self, rank: int) -> None:
        for log in self._logs.get(rank, ()):
            for data in log.news():
                self._send(wire.Wrote(attempt=self.attempt, rank=rank, stream=log.stream), data)

    # --- what the agent says, on its thread ------------------------------------------------------------

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
        """Record the attempt before the first process is forked: it may speak before the last one is."""

        def begin() -> None:
            self._close_logs()
            self.attempt, self._started, self._early = number, False, []
            # On this thread, so that an order for the attempt that begins is not forgotten with the others.
            self._agent.forget_orders()

        self._hub.run(begin)

    def attempt_started(self, number: int, world_size: int, workers: tuple[Worker, ...]) -> None:  # noqa: ARG002
        """Tell the notebook, and pass on what the first of them have said meanwhile."""

        def note() -> None:
            records = tuple(wire.WorkerRecord(each.rank, each.local_rank, each.pid) for each in workers)
            self._send(wire.Workers(attempt=number, workers=records))
            self._logs = {
                each.rank: [_Log(Stream.STDOUT, each.stdout), _Log(Stream.STDERR, each.stderr)]
                for each in workers
            }
            self._started = True
            early, self._early = self._early, []
            for message in early:
                self.receive(message)

        self._hub.call(note)

    def worker_exited(self, rank: int, exitcode: int, *, expected: bool, reason: str = "") -> None:
        """Tell the notebook, after all that the rank has said and printed."""

        def note() -> None:
            self._hub.drain()
            self._send_logs(rank)
            exited = Exited(rank=rank, exitcode=exitcode, time=0, expected=expected, reason=reason)
            exited = self._exit_reasons.explained(exited, self._titles)
            self._send(
                wire.Gone(
                    attempt=self.attempt,
                    rank=rank,
                    exitcode=exitcode,
                    expected=expected,
                    reason=exited.reason,
                    details=exited.details,
                )
            )

        self._hub.call(note)

    def membership_changing(self) -> None:
        """Do nothing: the notebook knows, it has said so."""

    def ranks_ending(self) -> None:
        """Do nothing: the notebook has all ranks told, those of other nodes too."""

    def others_stopped(self) -> None:
        """Tell the notebook."""
        self._hub.call(lambda: self._send(wire.OthersStopped()))

    def recorded(self, event: Event) -> None:
        """Do nothing: a result has the events of the notebook's own agent, as torchrun's log has its own."""

    def agent_ended(self, error: BaseException | None) -> None:
        """Tell the notebook, and end."""
        if error is not None:
            self.left = self.left or f"{type(error).__name__}: {error}"

        def note() -> None:
            self._close_logs()
            if not self._over:
                self._send(wire.NodeEnded(self.left))
            self.ended.set()

        self._hub.call(note)

    def _close_logs(self) -> None:
        for rank, logs in self._logs.items():
            self._send_logs(rank)
            for log in logs:
                log.close()
        self._logs = {}


class _Log:
    """One log file, sent so far up to `_position`."""

    def __init__(self, stream: Stream, path: str) -> None:
        self.stream = stream
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
        self._position = 0

    def news(self) -> list[bytes]:
        found = []
        while data := os.pread(self._fd, _LOG_BYTES, self._position):
            self._position += len(data)
            found.append(data)
        return found

    def close(self) -> None:
        os.close(self._fd)


def of_this_machine(prepare: Prepare, env: dict[str, str], placement: Placement) -> Prepare:
    """Return what makes processes ranks of this machine: its own environment, directory and path."""
    return msgspec.structs.replace(
        prepare,
        environ=inherited.encoded({**os.environ, **env}),
        cwd=inherited.working_directory(),
        path=tuple(os.fsencode(os.path.abspath(entry)) for entry in sys.path),  # noqa: PTH100 - resolve() follows links
        umask=inherited.umask(),
        limits=inherited.limits(placement.nproc),
        accelerators=placement.accelerators,
    )
