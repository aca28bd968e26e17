"""Worker groups for clients: fresh ranks, a standby group in their place, a session's ranks."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from nblaunch._inherited import JOIN_KEY, decoded
from nblaunch._runtime_dir import remove_tree
from nblaunch.elastic import descriptors, rendezvous
from nblaunch.elastic.process_options import process_settings
from nblaunch.elastic.settings import AgentSettings
from nblaunch.group.group import ConnectPeers, WorkerGroup
from nblaunch.group.job import Job
from nblaunch.group.runtime import LocalRuntime
from nblaunch.group.standby import GroupAndLogs
from nblaunch.nodes.key import KEY_FILE
from nblaunch.nodes.members import connect_peers
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import Caller, OpenSession, Placement, RunFresh
from nblaunch.protocol.messages import Prepare

_UNLIMITED = 2**31 - 1


class FreshRanks:
    """The ranks of one run: a standby group of their shape, if there is one, else others."""

    def __init__(
        self, local: LocalRuntime, request: RunFresh, caller: Caller, remark: Callable[[str], None]
    ) -> None:
        """`remark` will be called with the command by which other nodes join, if they need one."""
        self._local = local
        self._request = request
        self._caller = caller
        self._remark = remark
        self._shape: AgentSettings | None = None
        self._taken = False

    def take(self) -> GroupAndLogs:
        """Return the group, which may be started already; `used` must be called once the run is over."""
        local, request = self._local, self._request
        options, placement, prepare = request.order.options, request.placement, request.prepare
        local.server.ensure_running()
        _wait_for_gpus(local, placement)
        settings = settings_of(options, placement, decoded(prepare.environ), self._caller, local)
        # Binding to a GPU's CPUs asks the device, which ranks that may never be used must leave alone.
        if options.log_dir is None and options.numa_binding is None and settings.rdzv is None:
            self._shape = replace(settings, grace=0.0)
        self._taken = True
        made = local.standby.take(self._shape)
        if made is not None:
            made.group.adopt(settings)
        else:
            descriptors.make_room(settings.nproc)
            peers = _peers(local, prepare, request.join_key, self._remark)
            made = new_group(local, settings, peers, options.log_dir)
        local.will_leave(made.group)
        return made

    def used(self) -> None:
        """Record that the run is over: the next standby group may be prepared."""
        if self._taken:
            shape = self._shape if self._request.standby else None
            self._local.standby.used(shape, functools.partial(_ahead, self._local))


def session_group(local: LocalRuntime, request: OpenSession, caller: Caller) -> GroupAndLogs:
    """Return a group that stays, which is not started yet."""
    options, placement, prepare = request.options, request.placement, request.prepare
    descriptors.make_room(placement.nproc)
    local.server.ensure_running()
    _wait_for_gpus(local, placement)
    settings = settings_of(options, placement, decoded(prepare.environ), caller, local)
    settings = replace(settings, max_restarts=options.max_restarts or _UNLIMITED)
    # All its ranks are on one node: nobody joins, and nothing is to be remarked.
    peers = _peers(local, prepare, "", lambda _: None)
    return new_group(local, settings, peers, options.log_dir, keep=True)


def _wait_for_gpus(local: LocalRuntime, placement: Placement) -> None:
    """Wait until the ranks of earlier runs have exited, where they hold memory that these may need."""
    local.wait_until_left(lambda _: placement.device_type != "cpu")


def settings_of(
    options: LaunchOptions,
    placement: Placement,
    environ: Mapping[str, str],
    caller: Caller,
    local: LocalRuntime,
) -> AgentSettings:
    """Return the agent's settings, but for what each group has for itself; `environ` is the ranks'."""
    rdzv = rendezvous.config_of(options)
    if rdzv is not None:
        rdzv = replace(rdzv, ranks_backend=placement.backend)
    return AgentSettings(
        nproc=placement.nproc,
        role=options.role,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        grace=options.grace,
        shutdown_timeout=options.shutdown_timeout,
        run_id=(options.rdzv_id or uuid.uuid4().hex[:12]) if rdzv is not None else "",
        log_dir=Path(),
        processes=process_settings(options, environ, local.server.loaded_under()),
        rdzv=rdzv,
        caller=caller,
    )


def _peers(
    local: LocalRuntime, prepare: Prepare, join_key: str, remark: Callable[[str], None]
) -> ConnectPeers:
    """Return what connects other nodes to a group, by the caller's key or that in the caller's file."""
    file = decoded(prepare.environ).get(KEY_FILE, "")
    named = os.path.join(os.fsdecode(prepare.cwd), file) if file else ""  # noqa: PTH118 - as written
    keys = {JOIN_KEY: join_key, KEY_FILE: named}
    return functools.partial(connect_peers, environ=keys, root=local.directory.root, remark=remark)


def new_group(
    local: LocalRuntime,
    settings: AgentSettings,
    peers: ConnectPeers,
    log_dir: str | None = None,
    *,
    keep: bool = False,
) -> GroupAndLogs:
    """Make a group, which is not started yet; its logs lie in `log_dir`, or in a directory of its own."""
    private = None if log_dir else local.directory.make("logs-")
    run_id = settings.run_id or uuid.uuid4().hex[:12]
    directory = private or Path(log_dir or "")
    settings = replace(settings, run_id=run_id, log_dir=directory, private_logs=private is not None)
    try:
        group = WorkerGroup(local.hub, local.server, settings, peers, keep=keep)
    except BaseException:
        if private is not None:
            remove_tree(private)
        raise
    local.keep(group)
    return GroupAndLogs(group, private)


def _ahead(local: LocalRuntime, shape: AgentSettings) -> GroupAndLogs:
    """Start a standby group."""
    descriptors.make_room(shape.nproc)
    local.server.ensure_running()
    made = new_group(local, shape, lambda _hub, settings, _group, _directory: (settings, None))
    made.group.start()
    return made


def own_directory(job: Job, settings: AgentSettings) -> Path | None:
    """Return this run's directory: below it are attempts, below those ranks, below those files."""
    if settings.processes.logs_specs is not None:
        return settings.log_dir  # what is where below it only the user's class knows
    for ranks in job.logs.values():
        for each in ranks.values():
            return Path(each.stdout).parents[2]
    return None
