"""Finds out that the ranks' next collectives differ, before this rank begins its own.

    rank 0: writes its row ── looks at the others' rows ── begins the collective
    rank 1:     writes its row ── looks at the others' rows: it differs, so it does not begin

The ranks of one machine have a file in the group's private directory, mapped by all: a row for each rank, a
slot for each of its last collectives. A slot has the group, the number of the collective within the group as
this rank counts, a signature of what must be the same on all ranks (kind, reduction, sizes, type, root), and
that and the user's stack as text.

Of ranks whose collectives differ, the one that writes last sees the others' slots, and never enters: so no
rank gets a result that needs its data. A slot is used again after `_SLOTS` collectives: of ranks that are
further apart, as with a broadcast for which the root waits for nobody, the difference is not seen.

A group's key differs from job to job, so a row is left as it is at the end: another rank may come later.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from nblaunch._errors import DesyncError
from nblaunch.probes.collectives import Call
from nblaunch.probes.hosts import BegunElsewhere, OtherHosts
from nblaunch.probes.sites import Sites
from nblaunch.protocol.messages import DEFAULT_GROUP
from nblaunch.protocol.reports import format_ranks

_SLOTS = 128
_SLOT_BYTES = 512
_ROW_BYTES = _SLOTS * _SLOT_BYTES
_HEAD = struct.Struct("<QQQ")
_SAME_COLLECTIVE = 16
_TAIL = struct.Struct("<HI")
_TEXT_AT = _HEAD.size + _TAIL.size
_TEXT_BYTES = _SLOT_BYTES - _TEXT_AT
_WORDS_BYTES = 200
_MOST_SHAPES = 6
_MOST_WORDS = 4096
# A rank that writes is done within microseconds, unless the system takes its core away.
_READ_AGAIN = 50
_READ_SECONDS = 0.002
# Others that are on their way to the same collective are named, too.
_OTHERS_SECONDS = 0.25
_OTHERS_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Announced:
    """What one rank calls, and where: the lines of its stack, the innermost last."""

    words: str
    stack: str

    @property
    def nearest(self) -> str:
        return self.stack.rpartition("\n")[2]


@dataclass(slots=True)
class Members:
    """A group, as this rank knows it: its key, the other ranks, and how many collectives it has begun."""

    key: int
    name: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    begun: int = 0
    gloo: bool = False


class RowsOfRanks:
    """The rows of the ranks of this machine, in a file that all of them map."""

    def __init__(self, path: Path, rows: int, rank: int) -> None:
        """Map `path`, with room for `rows`; raises `OSError` if the disk has no room."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Room that a disk has only promised would end the rank by SIGBUS when it is used.
            os.posix_fallocate(descriptor, 0, rows * _ROW_BYTES)
            self._map = mmap.mmap(descriptor, rows * _ROW_BYTES)
        finally:
            os.close(descriptor)
        self._own = rank * _ROW_BYTES

    def close(self) -> None:
        self._map.close()

    def write(self, head: bytes, slot: int, words: bytes, stack: bytes) -> None:
        text = b"%s\n%s" % (words[:_WORDS_BYTES], stack)
        text = text[:_TEXT_BYTES]
        at = self._own + slot * _SLOT_BYTES
        tail = _TAIL.pack(len(text), zlib.crc32(text, zlib.crc32(head)))
        self._map[at : at + _TEXT_AT + len(text)] = b"%s%s%s" % (head, tail, text)

    def differs(self, head: bytes, slot: int, others: Sequence[int]) -> bool:
        """Whether another rank is in the same collective with another signature."""
        table, same = self._map, head[:_SAME_COLLECTIVE]
        for rank in others:
            at = rank * _ROW_BYTES + slot * _SLOT_BYTES
            found = table[at : at + _HEAD.size]
            if found != head and found[:_SAME_COLLECTIVE] == same:
                whole = self._whole(at, same)
                if whole is not None and whole[: _HEAD.size] != head:
                    return True
        return False

    def announced(self, head: bytes, slot: int, ranks: Sequence[int]) -> dict[int, tuple[bytes, Announced]]:
        """Return by rank what it announced of the same collective: signature, and words."""
        found = {}
        for rank in ranks:
            whole = self._whole(rank * _ROW_BYTES + slot * _SLOT_BYTES, head[:_SAME_COLLECTIVE])
            if whole is not None:
                words, _, stack = whole[_TEXT_AT:].decode("utf-8", "replace").partition("\n")
                found[rank] = whole[: _HEAD.size], Announced(words, stack)
        return found

    def _whole(self, at: int, same: bytes) -> bytes | None:
        """Return a slot once its rank has written all of it; None if it is about another collective."""
        for _ in range(_READ_AGAIN):
            slot = self._map[at : at + _SLOT_BYTES]
            if slot[:_SAME_COLLECTIVE] != same:
                return None
            length, check = _TAIL.unpack_from(slot, _HEAD.size)
            text = slot[_TEXT_AT : _TEXT_AT + length]
            if zlib.crc32(text, zlib.crc32(slot[: _HEAD.size])) == check:
                return slot[: _TEXT_AT + length]
            time.sleep(_READ_SECONDS)
        return None


class Desync:
    """Compares each collective with those of the other ranks in the table."""

    def __init__(  # noqa: PLR0913 - what it compares, where, and whom it tells
        self,
        table: RowsOfRanks,
        rank: int,
        job: str,
        *,
        sites: Sites,
        step: Callable[[], int | None],
        warn: Callable[[str], None] | None,
    ) -> None:
        """With `warn` a difference is told, and the rank goes on; without, it raises `DesyncError`.

        `job` is the same on all ranks, and in no other job.
        """
        self._table, self._rank, self._job = table, rank, job
        self._sites, self._step, self._warn = sites, step, warn
        self._groups: dict[tuple[str, int, int], Members | None] = {}
        self._words: dict[tuple[object, ...], tuple[int, bytes]] = {}
        self._told: set[tuple[str, ...]] = set()
        self._names: dict[str, str] = {}
        self._elsewhere: OtherHosts | None = None
        self.found: DesyncError | None = None
        """What a comparison with another machine has found."""

    def __call__(self, call: Call) -> None:
        group = call.group
        key = (group.group_name, group.size(), group.rank())
        try:
            members = self._groups[key]
        except KeyError:
            members = self._groups[key] = self._members(group)
        if members is None:
            return
        signature, words = self._described(call, members)
        number = members.begun
        members.begun += 1
        slot = (members.key + number) % _SLOTS
        # Numbers from 1: an empty slot is no collective.
        head = _HEAD.pack(members.key, number + 1, signature)
        stack = self._sites.stack()
        self._table.write(head, slot, words, stack.encode())
        if self._elsewhere is not None:
            entry = (str(members.key), number, str(signature), words.decode(), stack[:_TEXT_BYTES])
            self._elsewhere.begun(entry, members.ranks[0])
            if self.found is not None and self._warn is None:
                raise self.found
        if members.others and self._table.differs(head, slot, members.others):
            self._found(members, head, slot, number)

    def check_elsewhere(
        self, connect: Callable[[], dist.Store], free: Callable[[tuple[int, ...]], None]
    ) -> None:
        """Compare with ranks on other machines, too, through the store that `connect` returns.

        `free` ends the collective in which the main thread waits, by these connections.
        """
        freed = free if self._warn is None else lambda _: None
        self._elsewhere = OtherHosts(self._rank, connect, freed, self._found_elsewhere)
        self._elsewhere.begin()

    def close(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.end()
        self._table.close()

    def _found_elsewhere(self, own: BegunElsewhere, other: int, entry: BegunElsewhere) -> None:
        announced = {
            self._rank: (own[2].encode(), Announced(own[3], own[4])),
            other: (entry[2].encode(), Announced(entry[3], entry[4])),
        }
        name = self._names.get(own[0], "a group")
        self.found = difference(name, own[1], self._step(), announced)
        if self._warn is not None:
            self._warn(str(self.found).partition("\n")[0])

    def _members(self, group: dist.ProcessGroup) -> Members | None:
        """Return a group's members; None for one that is being made, or whose ranks are not ours."""
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):
            return None
        if dist.get_rank() != self._rank:
            # The program has numbered the ranks itself: rows are by torchelastic's numbers.
            return None
        name = str(group.group_name)
        digest = hashlib.blake2b(repr((self._job, name, ranks)).encode(), digest_size=8).digest()
        whole = len(ranks) == dist.get_world_size()
        title = "the default group" if group == dist.group.WORLD else f"group {group.group_desc or name}"
        if group.group_desc == DEFAULT_GROUP:
            title = "the default group"
        key = int.from_bytes(digest, "little")
        name = self._names[str(key)] = title if whole else f"{title} of {format_ranks(ranks)}"
        return Members(
            key=key,
            name=name,
            ranks=ranks,
            others=tuple(rank for rank in ranks if rank != self._rank),
            gloo="gloo" in str(dist.get_backend_config(group)),
        )

    def _described(self, call: Call, members: Members) -> tuple[int, bytes]:
        """Return the signature of a collective, and its words."""
        sized = call.sized()
        if not sized and members.gloo and call.form.name in ("gather", "scatter"):
            # gloo has one size for all; NCCL may have others.
            sized = call.sent() if call.form.name == "gather" else call.arguments[0]
        key = (call.form.name, call.operation, call.root, call.dtype(), *(each.shape for each in sized))
        found = self._words.get(key)
        if found is None:
            # The number of elements counts, not the shape: (2, 3) and (6,) are the same to a backend.
            counts = (
                call.form.name,
                call.operation,
                call.root,
                str(call.dtype()),
                *(each.numel() for each in sized),
            )
            digest = hashlib.blake2b(repr(counts).encode(), digest_size=8).digest()
            words = _words(call, members, [tuple(each.shape) for each in sized])
            found = int.from_bytes(digest, "little"), words.encode()
            if len(self._words) > _MOST_WORDS:
                self._words.clear()
            self._words[key] = found
        return found

    def _found(self, members: Members, head: bytes, slot: int, number: int) -> None:
        announced = self._table.announced(head, slot, members.ranks)
        if self._warn is None:
            until = time.monotonic() + _OTHERS_SECONDS
            while len(announced) < len(members.ranks) and time.monotonic() < until:
                time.sleep(_OTHERS_POLL_SECONDS)
                announced |= self._table.announced(head, slot, members.ranks)
        step = self._step()
        found = difference(members.name, number, step, announced)
        if self._warn is None:
            raise found
        told = tuple(sorted({f"{each.words} {each.nearest}" for _, each in announced.values()}))
        if told not in self._told:
            self._told.add(told)
            self._warn(str(found).partition("\n")[0])


def difference(
    group: str, number: int, step: int | None, announced: Mapping[int, tuple[bytes, Announced]]
) -> DesyncError:
    """Return the error that says which ranks call what, and where."""
    alike: dict[bytes, list[int]] = {}
    for rank, (head, _) in sorted(announced.items()):
        alike.setdefault(head, []).append(rank)
    parts = []
    # Most ranks first: the others are the exception.
    for ranks in sorted(alike.values(), key=lambda each: (-len(each), each)):
        what = announced[ranks[0]][1]
        verb = "calls" if len(ranks) == 1 else "call"
        parts.append(f"{format_ranks(ranks)} {verb} {what.words}")
    where = f" in step {step}" if step is not None else ""
    lines = [
        f"collective {number + 1} of {group} differs{where}: {', but '.join(parts)}",
        *_stacks({rank: each for rank, (_, each) in announced.items()}),
        "All ranks of a group must call the same collectives, in the same order, with equal sizes and types.",
    ]
    return DesyncError(
        "\n".join(lines),
        collectives={rank: each.words for rank, (_, each) in sorted(announced.items())},
        stacks={rank: each.stack for rank, (_, each) in sorted(announced.items())},
        step=step,
    )


def _stacks(announced: Mapping[int, Announced]) -> Iterator[str]:
    by_stack: dict[str, list[int]] = {}
    for rank, each in sorted(announced.items()):
        by_stack.setdefault(each.stack, []).append(rank)
    for stack, ranks in by_stack.items():
        yield f"{format_ranks(ranks)}:"
        yield from (f"  {line}" for line in stack.splitlines())


def _words(call: Call, members: Members, shapes: Sequence[tuple[int, ...]]) -> str:
    """Return a collective as the reader knows it: `all_reduce(sum) of float32 [4, 3]`."""
    words = call.form.name
    if call.operation:
        words += f"({call.operation})"
    if call.root is not None:
        words += f" {'from' if call.form.from_root else 'to'} rank {members.ranks[call.root]}"
    dtype = call.dtype()
    if dtype is not None:
        words += f" of {str(dtype).removeprefix('torch.')}"
    shown = " ".join(str(list(shape)) for shape in shapes[:_MOST_SHAPES])
    if shown:
        words += f" {shown}"
    return f"{words} and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else words
