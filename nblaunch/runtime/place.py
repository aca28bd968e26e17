"""Where a run would be: ranks, devices, backend, and what cannot be done, before a process starts.

All that is the caller's is in the request: this process has another environment, path and directory.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from nblaunch import _inherited
from nblaunch.group.group import WorkerGroup
from nblaunch.group.local_runtime import LocalRuntime
from nblaunch.host import rendezvous
from nblaunch.host.placement import place_ranks
from nblaunch.host.process_options import check_process_options, process_settings, unheeded
from nblaunch.host.settings import RendezvousConfig
from nblaunch.nodes.engine import engine_of, nodes_of, refuse_contradictions, requested_nodes
from nblaunch.protocol.client import OpenRanks, Placement
from nblaunch.protocol.messages import Prepare


@dataclass(frozen=True, slots=True)
class PlacedRanks:
    """Where ranks will be, what makes processes these ranks, and a warning about their variables."""

    placement: Placement
    prepare: Prepare
    unheeded: str = ""


def place(request: OpenRanks, local: LocalRuntime) -> PlacedRanks:
    """Decide ranks, devices and backend. Raises `OptionError` for what cannot be done here.

    Raises `LaunchError` where ranks with the caller's limits could not work.
    """
    _extend_path(request.prepare.path)
    options, environ, added = request.options, _inherited.decoded(request.prepare.environ), {}
    refuse_contradictions(options, environ)
    if options.on is not None:
        return PlacedRanks(placement := _place_on_nodes(request, environ), _prepared(request, placement))
    rdzv = rendezvous.config_of(options)
    if rdzv is not None:
        local.wait_until_left(lambda group: _leaves(group, rdzv))
        rendezvous.refuse_taken(rdzv)
        added = rendezvous.network_variables(rdzv.local_addr, environ)
    placement = place_ranks(
        options.nproc_per_node,
        options.backend,
        environ,
        virtual_local_rank=options.virtual_local_rank,
        backends=request.backends,
    )
    check_process_options(options, placement, environ, request.backends)
    _inherited.check_descriptors(placement.nproc, request.prepare.limits)
    loaded_under = local.server.loaded_under()
    forked = process_settings(options, environ, loaded_under).start_method == "forkserver"
    return PlacedRanks(
        placement,
        _prepared(request, placement, added),
        unheeded(environ, loaded_under) if forked else "",
    )


def _prepared(request: OpenRanks, placement: Placement, added: Mapping[str, str] | None = None) -> Prepare:
    """Return what makes processes ranks of this place, with these variables besides."""
    options, prepare = request.options, request.prepare
    may_have_devices = placement.device_type != "cpu" or options.on is not None
    untouched = request.untouched and not options.init_process_group and may_have_devices
    return msgspec.structs.replace(
        prepare,
        environ=(*prepare.environ, *_inherited.encoded(added or {})),
        limits=_inherited.with_descriptors(prepare.limits, placement.nproc),
        backend=placement.backend if options.init_process_group else None,
        device_type="" if untouched else placement.device_type,
        accelerators=placement.accelerators,
    )


def _place_on_nodes(request: OpenRanks, environ: Mapping[str, str]) -> Placement:
    """Return the provisional placement; the nodes report their devices once they have joined."""
    options = request.options
    rendezvous.join_seconds(options)
    engine_of(options).check(requested_nodes(options, environ, os.fsdecode(request.prepare.cwd)))
    least, each = nodes_of(options, environ)[0], options.nproc_per_node
    backend = "gloo" if options.backend == "auto" else options.backend
    placement = Placement(least * each if isinstance(each, int) else least, backend, "cpu", 0)
    # Check only what holds on every machine: NCCL and GPUs depend on the nodes.
    anywhere = replace(options, numa_binding=None, virtual_local_rank=False)
    without = replace(placement, backend=re.sub(r"nccl[\w-]*", "gloo", backend))
    check_process_options(anywhere, without, environ, request.backends)
    return placement


def _extend_path(path: tuple[bytes, ...]) -> None:
    """Have entry points (event handlers, layouts of log files) found where the caller has them installed."""
    known = {os.path.abspath(entry) for entry in sys.path}  # noqa: PTH100 - as the caller's: not resolve()
    sys.path += [entry for entry in dict.fromkeys(map(os.fsdecode, path)) if entry not in known]


def _leaves(group: WorkerGroup, rdzv: RendezvousConfig) -> bool:
    """Whether a group that has done its job still holds the port of this rendezvous."""
    held = group.settings.rdzv
    done = group.job is None or group.job.ended.is_set()
    return done and held is not None and held.port == rdzv.port
