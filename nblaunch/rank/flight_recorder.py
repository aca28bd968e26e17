"""The collectives of this rank, as torch's flight recorders have them: gloo has one, NCCL has another.

NCCL's recorder asks CUDA about the events of open collectives, and holds the GIL meanwhile. The status of its
groups needs no CUDA call, so that is read first. The entries are read on a thread of their own, for which the
control thread waits with a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d

from nblaunch.protocol.messages import Collective

GLOO, NCCL = "gloo", "nccl"
_DUMPS = {GLOO: "_dump_fr_trace_json", NCCL: "_dump_nccl_trace_json"}
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""torch takes the first of these that is set."""
_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ENTRIES = "256"
_FILE = "nccl_trace_rank_"
_COALESCED = "coalesced"
# Ranks that disagreed in one collective may have begun a few more before they hang.
_RECENT = 64
# The answer takes milliseconds, unless some thread of this process holds CUDA's locks.
_ANSWER_SECONDS = 0.5

_oldest_alive: dict[str, int] = {GLOO: 0, NCCL: 0}
"""The number of the oldest group that may still be alive: each recorder counts groups by itself."""
_buried = -1
"""gloo's newest entry of what groups did before they were formed again in place, and count from the start."""
_asking: threading.Thread | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """How far NCCL is: the groups' last completed operations, and whether any has enqueued more."""

    done: tuple[int, ...]
    busy: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded collectives, oldest first; `pending` is how many operations are open, if known."""

    recent: tuple[Collective, ...]
    pending: int | None


def record_collectives() -> None:
    """Have the flight recorders remember the last collectives, unless the user chose their size.

    NCCL's writes a file when a collective times out: it is put beside the rank's log files, and removed with
    them.
    """
    if not any(name in os.environ for name in SIZE_VARIABLES):
        os.environ[SIZE_VARIABLES[0]] = _ENTRIES
    logs = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # noqa: PTH120 - may be empty
    if logs and not any(name in os.environ for name in _FILE_VARIABLES):
        os.environ[_FILE_VARIABLES[0]] = os.path.join(logs, _FILE)  # noqa: PTH118 - torch adds the rank


def nccl_status() -> Status:
    """Return how far NCCL is, without a call of CUDA."""
    alive = {number: each for number, each in _statuses(NCCL).items() if number >= _oldest_alive[NCCL]}
    done = tuple(completed for _, (_, completed) in sorted(alive.items()))
    return Status(done, any(enqueued != completed for enqueued, completed in alive.values()))


def is_busy() -> bool:
    """Whether NCCL has operations that have not ended, as far as is known."""
    if not nccl_status().busy:
        return False
    # The status is from its watchdog, which looks ten times a second; the events are exact.
    entries = _nccl_entries()
    return entries is None or _open(_alive(entries, NCCL)) > 0


def recorded(members: Mapping[str, tuple[int, ...]]) -> Recorded:
    """Return what both recorders have of groups that may be alive.

    `members` has the ranks of each group by its name.
    """
    recent: list[Collective] = []
    pending: list[int] = []
    for backend, found in ((GLOO, _entries(GLOO)), (NCCL, _nccl_entries())):
        if found is not None:
            entries = _alive(found, backend)
            recent += _collectives(entries, backend, members)
            pending.append(_open(entries))
    return Recorded(tuple(recent), sum(pending) if len(pending) == len(_DUMPS) else None)


def bury(*, but_the_newest: bool = False) -> None:
    """Ignore all groups so far: the open operations of an aborted one stay open in the recorder.

    The newest may be spared: the one that has just had a collective.
    """
    for backend in _DUMPS:
        newest = max(_statuses(backend), default=-1)
        _oldest_alive[backend] = max(_oldest_alive[backend], newest if but_the_newest else newest + 1)


def bury_entries() -> None:
    """Ignore what gloo's groups have done so far: they go on under their numbers, and count anew."""
    global _buried
    _buried = max((int(each["record_id"]) for each in _entries(GLOO) or ()), default=_buried)


def _statuses(backend: str) -> dict[int, tuple[int, int]]:
    """Return (last enqueued, last completed) for the number of each group that has had a collective."""
    with contextlib.suppress(Exception):  # a torch without NCCL, an older one: the stacks are enough
        dump = getattr(_distributed_c10d, _DUMPS[backend])
        status: dict[str, dict[str, str]] = json.loads(dump(includeCollectives=False)).get("pg_status", {})
        return {
            int(number): (int(each["last_enqueued_collective"]), int(each["last_completed_collective"]))
            for number, each in status.items()
        }
    return {}


def _entries(backend: str) -> list[dict[str, Any]] | None:
    """Return a recorder's entries, oldest first; None where there is no such recorder."""
    with contextlib.suppress(Exception):  # as above; or the CUDA context is broken
        return list(json.loads(getattr(_distributed_c10d, _DUMPS[backend])()).get("entries", ()))
    return None


def _nccl_entries() -> list[dict[str, Any]] | None:
    """Return the entries of NCCL's recorder; None if it does not answer in time."""
    global _asking
    if not any(number >= _oldest_alive[NCCL] for number in _statuses(NCCL)):
        return []  # nothing has been asked of NCCL
    if _asking is not None and _asking.is_alive():
        return None
    found: list[list[dict[str, Any]] | None] = []
    _asking = threading.Thread(
        target=lambda: found.append(_entries(NCCL)), name="nblaunch-recorder", daemon=True
    )
    _asking.start()
    _asking.join(_ANSWER_SECONDS)
    return found[0] if found else None


def _alive(entries: list[dict[str, Any]], backend: str) -> list[dict[str, Any]]:
    after = _buried if backend == GLOO else -1
    return [
        each
        for each in entries
        if int(each.get("pg_id", 0)) >= _oldest_alive[backend] and int(each.get("record_id", 0)) > after
    ]


def _open(entries: list[dict[str, Any]]) -> int:
    """Return how many operations have not ended."""
    # The sends and receives of one batch are never marked as ended: the entry for all of them is.
    batches = {_batch(each) for each in entries if _operation(each) == _COALESCED}
    return sum(not (_completed(each) or (each.get("is_p2p") and _batch(each) in batches)) for each in entries)


def _batch(entry: Mapping[str, Any]) -> tuple[object, object]:
    return entry.get("pg_id"), entry.get("p2p_seq_id")


def _operation(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "")).rpartition(":")[2]


def _completed(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _collectives(
    entries: list[dict[str, Any]], backend: str, members: Mapping[str, tuple[int, ...]]
) -> Iterator[Collective]:
    """Yield the collectives among these, oldest first."""
    by_group: dict[tuple[object, ...], list[Collective]] = {}
    newest: dict[tuple[object, ...], int] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        collective, number = _collective(entry, backend, members), int(entry.get("pg_id", 0))
        known = by_group.setdefault(collective.key, [])
        last = known[-1].sequence if known else 0
        if collective.operation == _COALESCED and collective.sequence <= last:
            continue  # a batch has the number of the collective before it
        if number < newest.setdefault(collective.key, number):
            continue  # a group of this name that is gone, used by an object that still refers to it
        if number > newest[collective.key] or (known and collective.sequence <= known[-1].sequence):
            # The program has replaced the group by one that counts from the start.
            known.clear()
        newest[collective.key] = number
        known.append(collective)
    for known in by_group.values():
        yield from known[-_RECENT:]


def _collective(entry: Mapping[str, Any], backend: str, members: Mapping[str, tuple[int, ...]]) -> Collective:
    number, description = entry.get("process_group") or ("", "")
    return Collective(
        group=str(description if description not in ("", "undefined") else number),
        sequence=int(entry.get("collective_seq_id", 0)),
        operation=_operation(entry),
        sizes=tuple(tuple(int(size) for size in sizes) for sizes in entry.get("input_sizes", ())),
        dtypes=tuple(str(dtype) for dtype in entry.get("input_dtypes", ())),
        completed=_completed(entry),
        backend=backend,
        ranks=members.get(str(number), ()),
    )
