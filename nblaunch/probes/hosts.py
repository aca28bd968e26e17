"""Compares collectives with those of ranks on other machines, beside the work: at most a few times a second.

Ranks of one machine share a table (`desync`). Of each group that has ranks elsewhere, too, a rank compares
itself with the group's first rank, through the store of the agent: each writes what it has last begun there.
So a difference between two machines is found within about 0.1 s, and not always before a collective that
differs has ended. If the main thread waits in one, it is freed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil
import torch.distributed as dist

_LEAST_SECONDS, _SECONDS_PER_RANK = 0.05, 0.002
_KEPT = 24
_JOIN_SECONDS = 1.0

BegunElsewhere = tuple[str, int, str, str, str]
"""A collective as a rank writes it: group, number, signature, words, stack."""


class OtherHosts:
    """A thread of this rank, from `begin` to `end`."""

    def __init__(
        self,
        rank: int,
        connect: Callable[[], dist.Store],
        free: Callable[[tuple[int, ...]], None],
        found: Callable[[BegunElsewhere, int, BegunElsewhere], None],
    ) -> None:
        """Call `found` once, with the own collective, another rank, and its collective."""
        self._rank, self._connect, self._free, self._found = rank, connect, free, found
        self._own: deque[BegunElsewhere] = deque(maxlen=_KEPT)
        self._firsts: set[int] = set()
        self._ends = threading.Event()
        self._changed = False
        self._groups, self._listening = 0, list[int]()
        self._thread = threading.Thread(target=self._compare, name="nblaunch-watch", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def begun(self, entry: BegunElsewhere, first: int) -> None:
        """Take in a collective that this rank is about to begin, in a group whose first rank is `first`."""
        self._own.append(entry)
        self._changed = True
        if first != self._rank:
            self._firsts.add(first)

    def end(self) -> None:
        self._ends.set()
        self._thread.join(_JOIN_SECONDS)

    def _compare(self) -> None:
        # The store ends with the run.
        with contextlib.suppress(Exception):
            store = self._connect()
            pause = max(_LEAST_SECONDS, _SECONDS_PER_RANK * int(os.environ["WORLD_SIZE"]))
            while not self._ends.wait(pause):
                self._write(store)
                if self._differs(store):
                    break
            # For those that come later.
            self._write(store)

    def _write(self, store: dist.Store) -> None:
        if self._changed:
            self._changed = False
            groups = len({each[0] for each in list(self._own)})
            if groups != self._groups:
                # A new group may listen on a port of its own.
                self._groups, self._listening = groups, _listening()
            store.set(str(self._rank), json.dumps([list(self._own), self._listening]))

    def _differs(self, store: dist.Store) -> bool:
        own = {each[:2]: each for each in list(self._own)}
        for first in sorted(self._firsts):
            for entry in _read(store, first)[0]:
                mine = own.get(entry[:2])
                if mine is not None and mine[2] != entry[2]:
                    self._found(mine, first, entry)
                    self._free(_between_ranks(self._ports(store)))
                    return True
        return False

    def _ports(self, store: dist.Store) -> set[int]:
        ranks = range(int(os.environ["WORLD_SIZE"]))
        return {port for rank in ranks for port in _read(store, rank)[1]} | set(_listening())


def _read(store: dist.Store, rank: int) -> tuple[list[BegunElsewhere], Sequence[int]]:
    if not store.check([str(rank)]):
        return [], ()
    entries, ports = json.loads(store.get(str(rank)))
    return [(each[0], each[1], each[2], each[3], each[4]) for each in entries], ports


def _listening() -> list[int]:
    """Return the ports on which this process listens: gloo's."""
    return [each.laddr[1] for each in _tcp() if each.status == psutil.CONN_LISTEN]


def _between_ranks(ports: set[int]) -> tuple[int, ...]:
    """Return the connections of this process that one of the ranks listens for."""
    return tuple(
        each.fd
        for each in _tcp()
        if each.status == psutil.CONN_ESTABLISHED
        and each.fd >= 0
        and (each.laddr[1] in ports or (each.raddr and each.raddr[1] in ports))
    )


def _tcp() -> Iterable[Any]:
    process = psutil.Process()
    # psutil 6 renamed it.
    listed: Iterable[Any] = (getattr(process, "net_connections", None) or process.connections)("tcp")
    return listed
