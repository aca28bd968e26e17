"""Where a run would be: ranks, devices, backend, and what cannot be done, before a process starts.

All that is the caller's is in the request: this process has another environment, path and directory.
"""

from __future__ import annotations

import os
import sys

from nblaunch._inherited import decoded
from nblaunch.elastic import rendezvous
from nblaunch.elastic.placement import place_ranks
from nblaunch.elastic.process_options import check_process_options, process_settings, unheeded
from nblaunch.elastic.settings import RendezvousConfig
from nblaunch.group.group import WorkerGroup
from nblaunch.group.runtime import LocalRuntime
from nblaunch.protocol.client import Placed, PlaceRun


def place(request: PlaceRun, local: LocalRuntime) -> Placed:
    """Decide ranks, devices and backend. Raises `OptionError` for what cannot be done here."""
    _look_in(request.path)
    options, environ, added = request.options, decoded(request.environ), {}
    rdzv = rendezvous.config_of(options)
    if rdzv is not None:
        local.wait_until_left(lambda group: _leaves(group, rdzv))
        rendezvous.refuse_taken(rdzv)
        added = rendezvous.network_variables(rdzv, environ)
    placement = place_ranks(
        options.nproc_per_node,
        options.backend,
        environ,
        virtual_local_rank=options.virtual_local_rank,
        backends=request.backends,
    )
    check_process_options(options, placement, environ, request.backends)
    loaded_under = local.server.loaded_under()
    forked = process_settings(options, environ, loaded_under).start_method == "forkserver"
    return Placed(
        placement=placement, added=added, unheeded=unheeded(environ, loaded_under) if forked else ""
    )


def _look_in(path: tuple[bytes, ...]) -> None:
    """Have entry points (event handlers, layouts of log files) found where the caller has them installed."""
    known = {os.path.abspath(entry) for entry in sys.path}  # noqa: PTH100 - as the caller's: not resolve()
    sys.path += [entry for entry in dict.fromkeys(map(os.fsdecode, path)) if entry not in known]


def _leaves(group: WorkerGroup, rdzv: RendezvousConfig) -> bool:
    """Whether a group that has done its job still holds the port of this rendezvous."""
    held = group.settings.rdzv
    done = group.job is None or group.job.ended.is_set()
    return done and held is not None and held.port == rdzv.port
