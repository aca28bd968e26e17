"""Which of many failures is the cause: the first in time that is not the consequence of another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nblaunch._protocol import FailureRecord
from nblaunch._state import signal_name
from nblaunch.diagnose.exits import NCCL_WATCHDOG

# What gloo, NCCL and TCPStore say when it was the *other* side that went away. A rank that raises one
# of these while a peer failed for a reason of its own is a consequence, whatever the clocks say: the
# agent notices a killed rank up to one poll later than its peers notice the closed connection.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)( by (remote )?peer)?"
    r"|broken pipe|socket timeout|timed out waiting"
    r"|remote process exited|unhandled system error|peer disconnect|recvValue failed|failed to recv"
    r"|collective operation timeout|wait timeout|nccl communicator was aborted|operation was aborted"
    r"|connect timeout|connection to the (c10d|tcp) ?store"
    r"|application timeout caused pair closure",
    re.IGNORECASE,
)
_NCCL_WAITED = re.compile(r"timed out after|remote process exited|remote error|network error", re.IGNORECASE)
_CHAINED = re.compile(r"^[\w.]*(Dist\w*Error|RuntimeError): (?P<text>.*)$", re.MULTILINE)
_DEAD = "ProcessExited"
_COLLECTIVE_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError")


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank's failure and the rank whose failure explains it, if any."""

    rank: int
    failure: FailureRecord
    consequence_of: int | None = None


def explain(failures: Mapping[int, FailureRecord]) -> tuple[Explained, ...]:
    """Return the failures, causes first, each group in the order of time.

    >>> from nblaunch._protocol import FailureRecord
    >>> killed = FailureRecord(type="ProcessExited", message="was killed by SIGKILL", exitcode=-9, time=2.0)
    >>> closed = FailureRecord(type="builtins.RuntimeError", message="Connection closed by peer", time=1.0)
    >>> [(each.rank, each.consequence_of) for each in explain({0: closed, 1: killed})]
    [(1, None), (0, 1)]
    """
    in_time = sorted(failures.items(), key=lambda item: (item[1].time, item[0]))
    causes = [(rank, failure) for rank, failure in in_time if not blames_a_peer(failure)]
    if not causes:
        # Somebody's SIGTERM takes one rank; its peers then blame it, perhaps before the agent has noticed.
        dead = [(rank, failure) for rank, failure in in_time if failure.type == _DEAD]
        causes = (dead or in_time)[:1]
    known = {rank for rank, _ in causes}
    explained = [Explained(rank, failure) for rank, failure in causes]
    for rank, failure in in_time:
        if rank not in known:
            explained.append(Explained(rank, failure, consequence_of=causes[0][0]))
    return tuple(explained)


def blames_a_peer(failure: FailureRecord) -> bool:
    """Return whether a failure says that another rank went away."""
    if signal_name(failure.exitcode) == "SIGTERM":
        return True
    kind = failure.type.rpartition(".")[2]
    if kind == _DEAD and NCCL_WATCHDOG in failure.message:
        return _NCCL_WAITED.search(failure.message) is not None
    if kind in _COLLECTIVE_ERRORS and _PEER_GONE.search(failure.message) is not None:
        return True
    # `raise StepFailed from error`: the traceback says what it was made of.
    return any(_PEER_GONE.search(found["text"]) for found in _CHAINED.finditer(failure.traceback))
