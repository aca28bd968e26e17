"""The stacks of a rank, as its control thread reads them, and how it ends a stuck collective."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import psutil
from torch.distributed import distributed_c10d

from nblaunch.protocol.messages import DUMP_SIGNAL, Connection, FrameRecord, Where, dump_path, fatal_path
from nblaunch.protocol.reports import is_import, is_ours
from nblaunch.rank import failure, flight_recorder, in_place, process_group, waits

_FORMING = frozenset({"init_process_group", "new_group", "new_subgroups", "split_group", "form_again"})
_COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_FRAMES = 200
_WAITS = re.compile(r"\.wait\(")
# Of the kernel's `struct tcp_info`: tcpi_bytes_acked and tcpi_bytes_received.
_TCP_INFO_SIZE, _BYTES_AT, _BYTES = 136, 120, struct.Struct("=QQ")


class RankInspector:
    """Reads the main thread's stack, collectives and connections; runs on the control thread."""

    def __init__(self, rank: int, titles: Mapping[str, str]) -> None:
        """`titles` maps file names of cells to what the reader calls them; it may change later."""
        self.rank = rank
        self._titles = titles
        self._main = threading.main_thread().ident

    def where(self, *, idle: bool) -> Where:
        """Return the main thread's stack, the last collective of each group, and the connections.

        An `idle` rank, which has ended its job, waits a moment for its GPU.
        """
        groups = process_group.groups()
        counts = groups.counts()
        backends = {backend for _, backend in counts}
        status = flight_recorder.gpu_status(backends)
        known = flight_recorder.recorded(groups.names, backends, lambda: idle and process_group.gpu_is_done())
        return Where(
            rank=self.rank,
            frames=tuple(self._frames()),
            collectives=tuple({each.key: each for each in known.recent}.values()),
            recent=known.recent,
            connections=tuple(_connections()),
            # Of a group that this rank has cut, something is always open: so it is formed again.
            pending=1 if process_group.is_cut() else known.pending,
            # The main thread waits for the device in any call that needs a result, such as `.item()`.
            inside=(groups.uses_nccl and (status.busy or known.pending is None)) or self._inside(),
            nccl=groups.uses_nccl,
            done=status.done,
            importing=self.importing(),
            broken=process_group.broken() if idle else "",
            in_backward=idle and in_place.left_in_backward,
            tallies=tuple(
                groups.tally(group, backend, *known.count(backend, group, number))
                for (group, backend), number in counts.items()
            ),
            waits=waits.waits(self.rank, self._stack(), known.under_way, groups, inside=self._inside()),
        )

    def collectives(self) -> int | None:
        default = distributed_c10d.GroupMember.WORLD
        if not isinstance(default, distributed_c10d.ProcessGroup):
            return None
        # As torch's own debug wrapper does.
        return int(default._get_sequence_number_for_group())  # type: ignore[attr-defined]  # noqa: SLF001

    def importing(self) -> bool:
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - the public way to read stacks
        while frame is not None and not is_import(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None

    def free(self, fds: tuple[int, ...]) -> None:
        """Abort NCCL's operations, and shut connections to other ranks: a waiting gloo collective raises."""
        self.abort(cutting((*fds, *self._waiting_for_store())))

    def abort(self, then: Callable[[], None]) -> None:
        """Have NCCL abort all operations; call `then` afterwards, perhaps on another thread."""
        if process_group.uses_nccl():
            process_group.begin_abort(then)
        else:
            then()

    def _waiting_for_store(self) -> Iterator[int]:
        """Yield the connection to the agent's store, if the main thread waits there for a group to form."""
        if any(frame.f_code.co_name in _FORMING for frame, _ in self._stack()):
            # By its port alone: the address may be written as IPv6 has it.
            port = process_group.forget_store()
            yield from (each.fd for each in _connections() if each.remote[1] == port)

    def _inside(self) -> bool:
        """Whether the main thread is in a call of torch.distributed, or waits for an operation of one."""
        stack = [(frame.f_code.co_filename, line) for frame, line in self._stack()]
        # The innermost line too: gloo's flight recorder has no sends and receives that are under way.
        waiting = any(_WAITS.search(linecache.getline(*innermost)) for innermost in stack[:1])
        return waiting or any(filename.endswith(_COLLECTIVES) for filename, _ in stack)

    def _stack(self) -> list[tuple[FrameType, int]]:
        """Return the main thread's frames with their lines, innermost first."""
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - the public way to read stacks
        walked = traceback.walk_stack(frame) if frame is not None else ()
        return [(each, line or 0) for each, line in walked]

    def _frames(self) -> Iterator[FrameRecord]:
        for summary in traceback.StackSummary.extract(self._stack(), limit=_FRAMES)[::-1]:
            if not is_ours(summary.filename):
                yield FrameRecord(
                    filename=self._titles.get(summary.filename, summary.filename),
                    line=summary.lineno or 0,
                    function=summary.name,
                    source=failure.encodable(summary.line or ""),
                )


def cutting(fds: tuple[int, ...]) -> Callable[[], None]:
    """Return a function that shuts these connections, even if their descriptors are reused by then."""
    connections = []
    for fd in fds:
        with contextlib.suppress(OSError):
            connections.append(socket.socket(fileno=os.dup(fd)))

    def cut() -> None:
        for connection in connections:
            with contextlib.suppress(OSError), connection:
                connection.shutdown(socket.SHUT_RDWR)

    return cut


def dump_on_signal(directory: str, rank: int) -> None:
    """Have `DUMP_SIGNAL`, and fatal signals, write stacks to files of this rank's.

    torchelastic has faulthandler write to stderr, where our own frames would hide the user's output.
    """
    file = dump_path(directory, rank).open("w")
    # Only that of the thread that gets the signal: of one that runs meanwhile, faulthandler reads frames that
    # are freed under its hands, which ends the process by SIGSEGV.
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=False)
    faulthandler.enable(file=fatal_path(directory, rank).open("w"), all_threads=True)


def _connections() -> Iterator[Connection]:
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process()
        # psutil 6 renamed it.
        list_connections = getattr(process, "net_connections", None) or process.connections
        for known in list_connections("tcp"):
            if known.status == psutil.CONN_ESTABLISHED and known.raddr and known.fd >= 0:
                yield Connection(tuple(known.laddr), tuple(known.raddr), known.fd, _arrived(known.fd))


def _arrived(fd: int) -> int:
    """Return how many bytes have arrived at the ends of a TCP connection; 0 where it is closed by now."""
    with contextlib.suppress(OSError, struct.error), socket.socket(fileno=os.dup(fd)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        return sum(_BYTES.unpack_from(info, _BYTES_AT))
    return 0
