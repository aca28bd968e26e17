"""The collectives of this rank, as torch's flight recorders have them: each backend has one of its own.

NCCL's recorder asks CUDA about the events of open collectives, and holds the GIL meanwhile. The status of its
groups needs no CUDA call, so that is read first. The entries are read on a thread of their own, for which the
control thread waits with a bound.

A recorder is asked for by the name that the backend gives itself: "nccl" is two backends (torch 2.15 makes
ProcessGroupNCCL2 of it, which calls itself nccl2), and the recorder of one is empty while the other works.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch._C import _distributed_c10d

from nblaunch.protocol.messages import Collective

GLOO = "gloo"
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""torch takes the first of these that is set."""
_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ENTRIES = "256"
_FILE = "nccl_trace_rank_"
_COALESCED = "coalesced"
_NUMBER = "collective_seq_id"
_TRANSFER = re.compile(r"(?P<what>\w+) \d+(?P<way>->|<-)(?P<other>\d+)")
LEGACY = "nccl"
"""ProcessGroupNCCL. ProcessGroupNCCL2 does not record which sends and receives are one batch: all that are
open count as one."""
# Ranks that disagreed in one collective may have begun a few more before they hang.
_RECENT = 64
# The answer takes milliseconds, unless some thread of this process holds CUDA's locks.
_ANSWER_SECONDS = 0.5

_oldest_alive: dict[str, int] = {}
"""The number of the oldest group of each backend that may still be alive: each recorder counts for itself."""
_buried: dict[str, int] = {}
"""Each backend's newest entry of what groups did before they were formed again in place."""
_begun: dict[str, dict[int, int]] = {}
"""What their groups had enqueued last by then."""
_counted: dict[tuple[str, str], int] = {}
"""Backend and name of a group -> its number then: gloo counts anew, NCCL goes on, each rank where it was."""
_asking: threading.Thread | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """How far the GPUs are: the groups' last completed operations, and whether any has enqueued more."""

    done: tuple[int, ...]
    busy: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded collectives, oldest first; `pending` is how many operations are open, if known."""

    recent: tuple[Collective, ...]
    pending: int | None
    read: frozenset[str]
    """The backends whose recorder has answered."""
    last: Mapping[tuple[str, str], int]
    """Backend and torch's name of each group that has an entry -> the number of its last collective."""
    older: frozenset[str]
    """Backends whose recorder knows of groups of which it has kept no entry."""
    under_way: tuple[Collective, ...] = ()
    """The open operations by backend, in the order in which they have begun; sends and receives too."""

    def count(self, backend: str, group: str, called: int | None) -> tuple[int | None, int | None]:
        """Return how many collectives of a group were called, and the number of the last that is recorded."""
        called = called and called - _counted.get((backend, group), 0)
        if backend not in self.read or not called:
            return called, 0 if backend in self.read else None
        last = self.last.get((backend, group), 0)
        if not last and backend in self.older:
            return called, called
        # gloo counts its sends and receives as well, and records none of them.
        return 0 if backend == GLOO and not last else called, last


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


def gpu_status(backends: Iterable[str]) -> Status:
    """Return how far the GPUs are in what these backends have enqueued, without a call of CUDA."""
    alive = [
        each
        for backend in sorted(set(backends) - {GLOO})
        for _, each in sorted((_statuses(backend) or {}).items())
    ]
    done = tuple(completed for _, completed in alive)
    return Status(done, any(enqueued != completed for enqueued, completed in alive))


def is_busy(backends: Iterable[str]) -> bool:
    """Whether the GPUs have operations of these backends that have not ended, as far as is known."""
    backends = set(backends) - {GLOO}
    if not gpu_status(backends).busy:
        return False
    # The status is from NCCL's watchdog, which looks ten times a second; the events are exact.
    found = {backend: _entries_in_time(backend) for backend in backends}
    return any(entries is None or _open(_alive(entries, backend)) > 0 for backend, entries in found.items())


def recorded(
    members: Mapping[str, tuple[int, ...]], backends: Iterable[str], gpus_are_done: Callable[[], bool]
) -> Recorded:
    """Return what the recorders of these backends have of groups that may be alive.

    `members` has the ranks of each group by its name. `gpus_are_done` tells whether the GPUs have ended all
    their work: nccl2's watchdog (torch 2.15) looks once a second, and until then all is open to its recorder.
    """
    recent: list[Collective] = []
    pending: list[int | None] = []
    under_way: list[Collective] = []
    last: dict[tuple[str, str], int] = {}
    read, older = set[str](), set[str]()
    for backend in sorted(set(backends)):
        found = _entries(backend) if backend == GLOO else _entries_in_time(backend)
        if found is None:
            pending.append(None)
            continue
        entries = _alive(found, backend)
        recent += _collectives(entries, backend, members)
        under_way += open_operations(entries, backend, members)
        last |= _last(entries, backend)
        numbers = {int(each.get("pg_id", 0)) for each in entries}
        dropped = [each for number, each in (_statuses(backend) or {}).items() if number not in numbers]
        read.add(backend)
        if dropped:
            older.add(backend)
        number = _open(entries) + sum(enqueued != completed for enqueued, completed in dropped)
        pending.append(0 if number and backend != GLOO and gpus_are_done() else number)
    counted = [each for each in pending if each is not None]
    return Recorded(
        recent=tuple(recent),
        pending=sum(counted) if len(counted) == len(pending) else None,
        read=frozenset(read),
        last=last,
        older=frozenset(older),
        under_way=tuple(under_way),
    )


def bury(backends: Iterable[str], *, but_the_newest: bool = False) -> None:
    """Ignore all groups so far: the open operations of an aborted one stay open in the recorder.

    The newest may be spared: the one that has just had a collective.
    """
    for backend in backends:
        newest = max(_statuses(backend) or (), default=-1)
        oldest = newest if but_the_newest else newest + 1
        _oldest_alive[backend] = max(_oldest_alive.get(backend, 0), oldest)


def bury_entries(counts: Mapping[tuple[str, str], int | None]) -> None:
    """Ignore what all groups have done so far: they go on, and count anew.

    `counts` has how many operations they say they were called for, by their names and their backends.
    """
    for backend in {backend for _, backend in counts}:
        newest = (int(each["record_id"]) for each in _entries(backend) or ())
        _buried[backend] = max(newest, default=_buried.get(backend, -1))
        _begun[backend] = {
            number: enqueued for number, (enqueued, _) in (_all_statuses(backend) or {}).items()
        }
    count_from(counts)


def count_from(counts: Mapping[tuple[str, str], int | None]) -> None:
    """Take these numbers of operations for none: all other groups have begun to count with 0."""
    _counted.clear()
    _counted.update({(backend, group): number or 0 for (group, backend), number in counts.items()})


def _dump(backend: str, **options: Any) -> dict[str, Any]:
    """Return what a backend's recorder has; raise where torch has none for it.

    Before torch 2.15 each recorder has a function of its own, as that of ProcessGroupNCCL has still.
    """
    by_name = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    found: dict[str, Any] | None = None
    if "backend" in (getattr(by_name, "__doc__", None) or ""):
        found = json.loads(by_name(backend=backend, **options))  # type: ignore[misc]
    if not (found or {}).get("pg_status"):
        of_gloo = by_name if backend == GLOO else None
        own = getattr(_distributed_c10d, f"_dump_{backend}_trace_json", of_gloo)
        found = found if own is None else json.loads(own(**options))
    # gloo's counts its groups as it begins: without one it is switched off. It has no sends and receives, so
    # no entries would mean nothing else there.
    if found is None or (backend == GLOO and not found.get("pg_config")):
        msg = f"torch {torch.__version__} has no flight recorder for {backend}"
        raise LookupError(msg)
    return found


def _statuses(backend: str) -> dict[int, tuple[int, int]] | None:
    """Return (last enqueued, last completed) by the number of each living, used group; None if unknown."""
    found, begun = _all_statuses(backend), _begun.get(backend, {})
    return found and {number: each for number, each in found.items() if begun.get(number) != each[0]}


def _all_statuses(backend: str) -> dict[int, tuple[int, int]] | None:
    """Return these of what groups did before they were formed again in place, too."""
    with contextlib.suppress(Exception):  # or an older one, with other words: no evidence
        status: dict[str, dict[str, str]] = _dump(backend, includeCollectives=False).get("pg_status", {})
        return {
            int(number): (int(each["last_enqueued_collective"]), int(each["last_completed_collective"]))
            for number, each in status.items()
            if int(number) >= _oldest_alive.get(backend, 0)
        }
    return None


def _entries(backend: str) -> list[dict[str, Any]] | None:
    """Return a recorder's entries, oldest first; None where there is no such recorder."""
    with contextlib.suppress(Exception):  # no recorder, or the CUDA context is broken
        return list(_dump(backend).get("entries", ()))
    return None


def _entries_in_time(backend: str) -> list[dict[str, Any]] | None:
    """Return the entries of a recorder that asks CUDA; None if it does not answer in time."""
    global _asking
    status = _statuses(backend)
    if not status:
        return None if status is None else []  # nothing has been asked of it
    if _asking is not None and _asking.is_alive():
        return None
    found: list[list[dict[str, Any]] | None] = []
    _asking = threading.Thread(
        target=lambda: found.append(_entries(backend)), name="nblaunch-recorder", daemon=True
    )
    _asking.start()
    _asking.join(_ANSWER_SECONDS)
    return found[0] if found else None


def _alive(entries: list[dict[str, Any]], backend: str) -> list[dict[str, Any]]:
    """Return the entries of living groups, with the numbers that all ranks have for them."""
    oldest, after = _oldest_alive.get(backend, 0), _buried.get(backend, -1)
    return [
        {**each, _NUMBER: int(each.get(_NUMBER, 0)) - _counted.get((backend, _name(each)), 0)}
        for each in entries
        if int(each.get("pg_id", 0)) >= oldest and int(each.get("record_id", 0)) > after
    ]


def _open(entries: list[dict[str, Any]]) -> int:
    # The sends and receives of one batch are never marked as ended: the entry for all of them is.
    batches = {_batch(each) for each in entries if _operation(each) == _COALESCED}
    return sum(not (_completed(each) or (each.get("is_p2p") and _batch(each) in batches)) for each in entries)


def _batch(entry: Mapping[str, Any]) -> tuple[object, object]:
    return entry.get("pg_id"), entry.get("p2p_seq_id")


def _operation(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "")).rpartition(":")[2]


def _name(entry: Mapping[str, Any]) -> str:
    return str((entry.get("process_group") or ("",))[0])


def _completed(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _last(entries: list[dict[str, Any]], backend: str) -> dict[tuple[str, str], int]:
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            key = backend, _name(entry)
            # A group of this name that is gone has a lower number, and may have counted further.
            number = int(entry.get("pg_id", 0)), int(entry.get(_NUMBER, 0))
            newest[key] = max(newest.get(key, number), number)
    return {key: sequence for key, (_, sequence) in newest.items()}


def open_operations(
    entries: list[dict[str, Any]], backend: str, members: Mapping[str, tuple[int, ...]]
) -> Iterator[Collective]:
    ended = {_batch(each) for each in entries if _operation(each) == _COALESCED and _completed(each)}
    found: dict[object, list[dict[str, Any]]] = {}
    for entry in entries:
        if _completed(entry) or _operation(entry) == _COALESCED:
            continue
        if not entry.get("is_p2p"):
            found[entry.get("record_id")] = [entry]
        elif backend != LEGACY:
            found.setdefault((entry.get("pg_id"),), []).append(entry)
        elif _batch(entry) not in ended:
            found.setdefault(_batch(entry), []).append(entry)
    for each in found.values():
        if each[0].get("is_p2p"):
            yield _transfer(each, backend, members)
        else:
            yield _collective(each[0], backend, members)


def _transfer(
    batch: list[dict[str, Any]], backend: str, members: Mapping[str, tuple[int, ...]]
) -> Collective:
    """Return sends and receives that end together; torch writes `send 0->1` and `recv 0<-1`."""
    one = _collective(batch[0], backend, members)
    found = [each for entry in batch if (each := _TRANSFER.fullmatch(_operation(entry)))]
    ends: dict[str, list[int]] = {"->": [], "<-": []}
    for each in found:
        if int(each["other"]) < len(one.ranks):
            ends[each["way"]].append(one.ranks[int(each["other"])])
    return msgspec.structs.replace(
        one,
        operation="/".join(dict.fromkeys(each["what"] for each in found)),
        sequence=int(batch[0].get("p2p_seq_id", 0)),
        sends=tuple(ends["->"]),
        receives=tuple(ends["<-"]),
    )


def _collectives(
    entries: list[dict[str, Any]], backend: str, members: Mapping[str, tuple[int, ...]]
) -> Iterator[Collective]:
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


def title(name: str, description: str) -> str:
    """Return what a reader calls a group: its description, where it has one."""
    return name if description in ("", "undefined") else description


def _collective(entry: Mapping[str, Any], backend: str, members: Mapping[str, tuple[int, ...]]) -> Collective:
    number, description = entry.get("process_group") or ("", "")
    return Collective(
        group=title(str(number), str(description)),
        sequence=int(entry.get(_NUMBER, 0)),
        operation=_operation(entry),
        sizes=tuple(tuple(int(size) for size in sizes) for sizes in entry.get("input_sizes", ())),
        dtypes=tuple(str(dtype) for dtype in entry.get("input_dtypes", ())),
        completed=_completed(entry),
        backend=backend,
        ranks=members.get(str(number), ()),
    )
