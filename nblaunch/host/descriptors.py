"""How many descriptors a run takes, and whether there are that many.

libzmq aborts the whole process when it accepts a connection and the limit is reached, so there must be room
before the first rank connects. Measured with torch 2.13: a rank takes up to seven descriptors of the runtime
(two pipes of its process, its connections to the hub and to the store, two log files, a mapped value), and
has about thirty of its own and one for each peer and process group. A rank on another node takes one in the
runtime, its connection to the store; its node takes three, for orders, payloads and the store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from nblaunch._inherited import (
    RANK_AT_ALL,
    RANK_PER_PEER,
    allows,
    check_descriptors,
    limits,
    too_few_descriptors,
)

RUNTIME_AT_ALL = 32
RUNTIME_PER_RANK = 7
RUNTIME_PER_NODE = 3
_LOGS_OF_NODES = 256
_PIPES = 2
_SCARCE = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}
# Room for what else is opened while ranks start, in the limit that is set.
_MARGIN = 64
# Programs that close all descriptors one by one take long over a limit of a billion.
_ENOUGH = 65_536


def make_room(nproc: int, *, replaced: int = 0) -> None:
    """Raise this process's soft limit if `nproc` more ranks need it; refuse if the hard one is too low.

    A soft limit that suffices stays as it is. One that was raised stays raised: ranks, and what has been
    opened meanwhile, may use the numbers above the old one. Of `replaced` ranks, which have ended, the
    pipes are still open, and are closed as the others start. Raises `LaunchError` with both numbers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(in_use(soft) - _PIPES * replaced, 0)
    needed = used + RUNTIME_AT_ALL + RUNTIME_PER_RANK * nproc
    check_descriptors(nproc, limits())
    if allows(soft, needed):
        return
    if not allows(hard, needed) or not _raise(needed + _MARGIN, soft, hard):
        what = f"for which this process needs about {needed} ({used} are open already)"
        raise too_few_descriptors(nproc, what, hard)


def make_room_for_nodes(nodes: int, nproc: int) -> None:
    """Raise this process's soft limit if `nodes` nodes with `nproc` ranks in total need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = in_use(soft)
    needed = used + RUNTIME_AT_ALL + _LOGS_OF_NODES + RUNTIME_PER_NODE * nodes + nproc
    if allows(soft, needed):
        return
    if not allows(hard, needed) or not _raise(needed + _MARGIN, soft, hard):
        what = f"on {nodes} nodes, for which this process needs about {needed} ({used} are open already)"
        raise too_few_descriptors(nproc, what, hard, "engine")


def room(hard: int) -> int:
    """Return how many ranks a runtime can start under a hard limit: for itself, and for each of them."""
    here = (hard - RUNTIME_AT_ALL) // RUNTIME_PER_RANK
    return max(min(here, (hard - RANK_AT_ALL) // RANK_PER_PEER), 0)


def in_use(limit: int) -> int:
    """Return how many descriptors this process has: `limit` if none is left to look with, 0 if unknown."""
    for listing in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(listing)) - 1
        except FileNotFoundError:
            continue
        except OSError:
            return limit
    return 0


def raise_soft_limit() -> None:
    """Raise this process's soft limit as far as anybody needs; for the keeper and what it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _raise(_ENOUGH, soft, hard)


def _raise(wanted: int, soft: int, hard: int) -> bool:
    """Return whether the soft limit is now `wanted`, or the hard one where that is lower."""
    wanted = wanted if allows(hard, wanted) else hard
    if not allows(soft, wanted):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return allows(resource.getrlimit(resource.RLIMIT_NOFILE)[0], wanted)


def scarcity(error: BaseException) -> int:
    """Return the number of an error that says that nothing of a kind is left, 0 for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    return number if number in _SCARCE else 0
