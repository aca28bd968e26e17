"""Where a rank is, seen from its control thread; and how a stuck collective is ended."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from nblaunch._frames import is_ours
from nblaunch._protocol import Collective, Connection, FrameRecord, Where
from nblaunch.rank import failure, process_group

RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
_RECORDER_ENTRIES = "256"
# Ranks that disagreed in one collective may have begun a few more before they hang.
_RECENT = 64
_FORMING = frozenset({"init_process_group", "new_group", "new_subgroups", "split_group"})
_COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_WAITS = re.compile(r"\.wait\(")
DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Has faulthandler write the stacks to a file, without the GIL, for a rank that cannot answer."""


def dump_path(directory: str, rank: int) -> Path:
    """Return where a rank's faulthandler writes."""
    return Path(directory) / f"stack-{rank}"


class RankInspector:
    """Looks at this process."""

    def __init__(self, rank: int, titles: Mapping[str, str]) -> None:
        """`titles` maps file names of cells to what the reader calls them; it may change later."""
        self._rank = rank
        self._titles = titles
        self._main = threading.main_thread().ident

    def where(self) -> Where:
        """Return the main thread's stack, the last collective of each group, and the connections."""
        entries = process_group.recorded()
        if entries is not None:
            entries = [entry for entry in entries if entry.get("pg_id", 0) >= process_group.first_alive()]
        recent = _collectives(entries)
        return Where(
            rank=self._rank,
            frames=tuple(self._frames()),
            collectives=tuple({each.group: each for each in recent}.values()),
            recent=recent,
            connections=tuple(_connections()),
            pending=None if entries is None else sum(not _completed(entry) for entry in entries),
            inside=self._inside(),
        )

    def collectives(self) -> int | None:
        """Return how many collectives of the default group this rank has begun, None where there is none."""
        default = distributed_c10d.GroupMember.WORLD
        if not isinstance(default, distributed_c10d.ProcessGroup):
            return None
        # As torch's own debug wrapper does.
        return int(default._get_sequence_number_for_group())  # type: ignore[attr-defined]  # noqa: SLF001

    def free(self, fds: tuple[int, ...], *, abort: bool) -> None:
        """Shut connections to other ranks: a gloo collective that waits on one raises at once.

        With `abort` end those of NCCL too; its abort may wait for the device, so it runs beside this thread.
        """
        for fd in (*fds, *self._waiting_for_store()):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        if abort and _uses_nccl():
            threading.Thread(target=_abort, name="nblaunch-abort", daemon=True).start()

    def _waiting_for_store(self) -> Iterator[int]:
        """Yield the connection to the agent's store, if a group is being formed whose members do not come."""
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - the public way to read stacks
        stack = traceback.walk_stack(frame) if frame is not None else ()
        if any(each.f_code.co_name in _FORMING for each, _ in stack):
            process_group.forget_store()
            # By its port alone: the address may be written as IPv6 has it.
            port = process_group.agent_address()[1]
            yield from (each.fd for each in _connections() if each.remote[1] == port)

    def _inside(self) -> bool:
        """Whether the main thread is in a call of torch.distributed, or waits for one that it has begun."""
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - the public way to read stacks
        if frame is None:
            return False
        # The innermost line: gloo's flight recorder does not know of sends and receives that are under way.
        if _uses_nccl():
            # The device is waited for in any call that needs a result, `.item()` for one.
            return _nccl_is_busy()
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        stack = (each.f_code.co_filename for each, _ in traceback.walk_stack(frame))
        return _WAITS.search(line) is not None or any(each.endswith(_COLLECTIVES) for each in stack)

    def _frames(self) -> Iterator[FrameRecord]:
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - the public way to read stacks
        if frame is None:
            return
        for summary in traceback.StackSummary.extract(traceback.walk_stack(frame), limit=200)[::-1]:
            if not is_ours(summary.filename):
                yield FrameRecord(
                    filename=self._titles.get(summary.filename, summary.filename),
                    line=summary.lineno or 0,
                    function=summary.name,
                    source=failure.encodable(summary.line or ""),
                )


def record_collectives() -> None:
    """Have torch's flight recorder remember the last collectives, unless the user chose its size."""
    os.environ.setdefault(RECORDER_VARIABLE, _RECORDER_ENTRIES)


def fatal_path(directory: str, rank: int) -> Path:
    """Return where a rank's stacks are written when it dies of SIGSEGV and the like."""
    return Path(directory) / f"fatal-{rank}"


def dump_on_signal(directory: str, rank: int) -> None:
    """Have `DUMP_SIGNAL`, and fatal signals, write the stacks to files of this rank's.

    torchelastic has faulthandler write to stderr, where our own frames would hide the user's output.
    """
    file = dump_path(directory, rank).open("w")
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=fatal_path(directory, rank).open("w"), all_threads=True)


def _completed(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _collectives(entries: list[dict[str, Any]] | None) -> tuple[Collective, ...]:
    """Return the collectives among these, oldest first."""
    by_group: dict[str, list[Collective]] = {}
    newest: dict[str, int] = {}
    for entry in entries or ():
        if entry.get("is_p2p"):
            continue
        collective, number = _collective(entry), int(entry.get("pg_id", 0))
        known = by_group.setdefault(collective.group, [])
        if number < newest.setdefault(collective.group, number):
            continue  # a group of this name that is gone, used by an object that still refers to it
        if number > newest[collective.group] or (known and collective.sequence <= known[-1].sequence):
            # The program has replaced the group by one that counts anew.
            known.clear()
        newest[collective.group] = number
        known.append(collective)
    return tuple(collective for known in by_group.values() for collective in known[-_RECENT:])


def _collective(entry: Mapping[str, Any]) -> Collective:
    number, description = entry.get("process_group") or ("", "")
    return Collective(
        group=str(description if description not in ("", "undefined") else number),
        sequence=int(entry.get("collective_seq_id", 0)),
        operation=str(entry.get("profiling_name", "")).rpartition(":")[2],
        sizes=tuple(tuple(int(size) for size in sizes) for sizes in entry.get("input_sizes", ())),
        dtypes=tuple(str(dtype) for dtype in entry.get("input_dtypes", ())),
        completed=_completed(entry),
    )


def _connections() -> Iterator[Connection]:
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process()
        # psutil 6 renamed it.
        list_connections = getattr(process, "net_connections", None) or process.connections
        for known in list_connections("tcp"):
            if known.status == psutil.CONN_ESTABLISHED and known.raddr and known.fd >= 0:
                yield Connection(local=tuple(known.laddr), remote=tuple(known.raddr), fd=known.fd)


def _uses_nccl() -> bool:
    if not distributed_c10d.is_initialized():
        return False
    return "nccl" in str(distributed_c10d.get_backend_config())


def _nccl_is_busy() -> bool:
    """Whether NCCL has operations that have not ended, or cannot say."""
    try:
        recorded = json.loads(_distributed_c10d._dump_nccl_trace_json())  # type: ignore[attr-defined]  # noqa: SLF001
    except Exception:  # noqa: BLE001 - a torch without NCCL's flight recorder
        return True
    return any(not _completed(entry) for entry in recorded.get("entries", ()))


def _abort() -> None:
    with contextlib.suppress(Exception):  # a group that is broken already cannot be broken off
        distributed_c10d._abort_process_group()  # noqa: SLF001 - torch's only way to end a stuck NCCL call
