"""Worker groups for clients: fresh ranks, a standby group in their place, a session's ranks; their nodes."""

from __future__ import annotations

import functools
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._inherited import JOIN_KEY, decoded
from nblaunch._runtime_dir import remove_tree
from nblaunch.group.group import MakeHosts, WorkerGroup
from nblaunch.group.local_runtime import LocalRuntime
from nblaunch.group.standby import GroupAndLogs
from nblaunch.host import descriptors, rendezvous
from nblaunch.host.forkserver import Server
from nblaunch.host.key import KEY_FILE, join_command, read_or_make_key
from nblaunch.host.process_options import process_settings
from nblaunch.host.rank_host import GroupHost, RankHost
from nblaunch.host.settings import AgentSettings
from nblaunch.nodes.byhand import JoinEngine
from nblaunch.nodes.engine import NodeRequest, engine_of, nodes_of, requested_nodes
from nblaunch.nodes.fleet import FleetSettings, NodeFleet
from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.protocol.client import Caller, JobOrder, OpenRanks
from nblaunch.protocol.messages import Phase
from nblaunch.runtime.place import PlacedRanks

_UNLIMITED = 2**31 - 1


class HeldNodes:
    """The nodes of a session or a run, which end with the last group that uses them; from any thread."""

    def __init__(self, fleet: NodeFleet, directory: Path, options: LaunchOptions, server: Server) -> None:
        """Hold a fleet that was made for a group with these options, and that has this directory."""
        self.fleet = fleet
        self._server = server
        self._directory = directory
        self._wanted = _nodes_wanted(options)
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._users = 0
        self._over = False

    def fit(self, options: LaunchOptions) -> bool:
        return self._wanted == _nodes_wanted(options) and not self._over

    def learn(self, order: JobOrder) -> None:
        if order.code is not None:
            self.fleet.code.learn(order.code)

    def use(self) -> Callable[[], None]:
        """Keep the nodes until the returned function is called: the last user ends them, and waits for that.

        Raises `LaunchError` if they have been ended.
        """
        with self._lock:
            if self._over:
                msg = "the session has just given its nodes back. Run the cell again."
                raise LaunchError(msg, phase=Phase.ENGINE.value, kind=FailureKind.SESSION_ENDED)
            self._users += 1
        uses, once = [True], threading.Lock()

        def leave() -> None:
            with once:  # the second caller waits for the end, too
                if uses and uses.pop():
                    self._leave()

        return leave

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
            self._over = self._over or last
        if last:
            self.close()

    def close(self) -> None:
        with self._ending:
            self._over = True
            self.fleet.close()
            # The keeper has adopted the children of node programs that are gone.
            self._server.sweep()
            remove_tree(self._directory)


def _nodes_wanted(options: LaunchOptions) -> tuple[object, ...]:
    of_engine = tuple(getattr(options, each.name) for each in OPTIONS if each.scope == "engine")
    return (*of_engine, options.nodes, options.nproc_per_node, options.local_addr, options.ports)


def _hold_nodes(local: LocalRuntime, request: OpenRanks, notify: Callable[[str], None]) -> HeldNodes:
    """Return nodes for a group; the engine is asked for them once it starts."""
    options, prepare = request.options, request.prepare
    environ, directory = decoded(prepare.environ), local.directory.make("nodes-")
    least, most = nodes_of(options, environ)
    conf = FleetSettings(least=least, most=most, options=options, environment=request.environment)
    wanted = requested_nodes(options, environ, os.fsdecode(prepare.cwd))
    fleet = NodeFleet(
        local.hub,
        engine_of(options),
        wanted,
        directory=directory,
        notify=notify,
        at_end=local.server.at_end,
        conf=conf,
    )
    held = HeldNodes(fleet, directory, options, local.server)
    local.hold(held)
    return held


class FreshRanks:
    """The ranks of one run: a standby group of their shape, if there is one, else others."""

    def __init__(self, local: LocalRuntime, request: OpenRanks, there: PlacedRanks, caller: Caller) -> None:
        self.notify: Callable[[str], None] = lambda _: None
        """Is called with the command by which other nodes join, if they need one."""
        self.nodes: HeldNodes | None = None
        """A session's, on which these ranks are to be."""
        self.place = there
        self._local = local
        self._request = request
        self._caller = caller
        self._shape: AgentSettings | None = None
        self._taken = False

    def take(self, order: JobOrder) -> GroupAndLogs:
        """Return the group, which may be started already; `used` must be called once the run is over."""
        local, request = self._local, self._request
        _make_way(local, self.place)
        # The job's own: its client has made the directory of logs meanwhile.
        options, settings = order.options, settings_of(order.options, self.place, self._caller, local)
        # Binding to a GPU's CPUs asks the device, which ranks that may never be used must leave alone.
        if options.log_dir is None and options.numa_binding is None and not settings.nodes:
            # Of the options, what its agent heeds before it adopts those of the run.
            of_node = {each.name: getattr(options, each.name) for each in OPTIONS if each.scope == "node"}
            shape = replace(
                LaunchOptions(**{**of_node, "nproc_per_node": settings.nproc}),
                max_restarts=options.max_restarts,
                monitor_interval=options.monitor_interval,
                shutdown_timeout=options.shutdown_timeout,
            )
            self._shape = replace(settings, options=shape)
        self._taken = True
        made = local.standby.take(self._shape)
        if made is not None:
            made.group.adopt(settings)
        else:
            made = _ranks_with(settings, local, request, self.place, self.notify, self.nodes, order).made
        local.will_leave(made.group)
        return made

    def used(self) -> None:
        if self._taken:
            shape = self._shape if self._request.standby else None
            self._local.standby.used(shape, functools.partial(_ahead, self._local))


@dataclass(frozen=True, slots=True)
class PersistentRanks:
    """The group of a session, which is not started yet, and its nodes, where an engine places them."""

    made: GroupAndLogs
    place: PlacedRanks
    nodes: HeldNodes | None = None
    leave: Callable[[], None] = lambda: None
    """Gives up the nodes, and waits until they have ended, unless another group uses them."""


def session_ranks(
    local: LocalRuntime,
    request: OpenRanks,
    there: PlacedRanks,
    caller: Caller,
    notify: Callable[[str], None],
) -> PersistentRanks:
    """Return the ranks of a session; `notify` will be called with what people must do for its nodes."""
    _make_way(local, there)
    settings = settings_of(request.options, there, caller, local)
    if request.options.on is None:
        # On nodes, how often its ranks are replaced has no limit; this is how often a node is.
        restarts = request.options.max_restarts or _UNLIMITED
        settings = replace(settings, options=replace(request.options, max_restarts=restarts))
    return _ranks_with(settings, local, request, there, notify, keep=True)


def _ranks_with(  # noqa: PLR0913, PLR0917 - ranks, and what they are on
    settings: AgentSettings,
    local: LocalRuntime,
    request: OpenRanks,
    there: PlacedRanks,
    notify: Callable[[str], None],
    nodes: HeldNodes | None = None,
    order: JobOrder | None = None,
    *,
    keep: bool = False,
) -> PersistentRanks:
    """Return ranks with these settings, which leave their nodes once the last rank is gone."""
    if settings.options.on is None:
        descriptors.make_room(settings.nproc)
        hosts = _hosts(local, there, request.join_key, notify)
        return PersistentRanks(new_group(local, settings, hosts, keep=keep), there)
    # Refuse more nodes than this process may be connected to.
    least, _ = nodes_of(settings.options, decoded(there.prepare.environ))
    descriptors.make_room_for_nodes(least, there.placement.nproc)
    nodes = nodes or _hold_nodes(local, request, notify)
    if order is not None:
        nodes.learn(order)
    leave, fleet = nodes.use(), nodes.fleet
    try:
        made = new_group(
            local, settings, lambda group, directory: (fleet.connect(group, directory),), keep=keep
        )
    except BaseException:
        leave()
        raise
    made.group.when_closed = lambda: threading.Thread(
        target=leave, name="nblaunch-nodes", daemon=True
    ).start()
    return PersistentRanks(made, there, nodes, leave)


def _make_way(local: LocalRuntime, there: PlacedRanks) -> None:
    """Wait until the ranks of earlier runs have exited, where they hold memory that these may need."""
    local.wait_until_left(lambda _: there.placement.device_type != "cpu")


def settings_of(
    options: LaunchOptions, there: PlacedRanks, caller: Caller, local: LocalRuntime
) -> AgentSettings:
    """Return the agent's settings, but for what each group has for itself."""
    environ, on_nodes = decoded(there.prepare.environ), options.on is not None
    rdzv = None if on_nodes else rendezvous.config_of(options)
    # Under what nodes have loaded torch is not known here.
    loaded_under = environ if on_nodes else local.server.loaded_under()
    return AgentSettings(
        nproc=there.placement.nproc,
        options=options if rdzv is None else replace(options, backend=there.placement.backend),
        run_id=options.rdzv_id or "" if rdzv is not None else "",
        log_dir=Path(),
        processes=process_settings(options, environ, loaded_under),
        rdzv=rdzv,
        caller=caller,
    )


def _hosts(
    local: LocalRuntime, there: PlacedRanks, join_key: str, notify: Callable[[str], None]
) -> MakeHosts:
    """Return what makes a group's host, and its nodes at an endpoint, by the caller's key or its file's."""
    file = decoded(there.prepare.environ).get(KEY_FILE, "")
    named = os.path.join(os.fsdecode(there.prepare.cwd), file) if file else ""  # noqa: PTH118 - as written
    keys = {JOIN_KEY: join_key, KEY_FILE: named}

    def make(group: WorkerGroup, directory: Path) -> Sequence[GroupHost]:
        settings, rdzv = group.settings, group.settings.rdzv
        if rdzv is None:
            settings = replace(settings, replaces=group.keep)
            return (RankHost(local, settings, group, directory, keep=group.keep),)
        key, made = read_or_make_key(keys, local.directory.root)
        rdzv = replace(rdzv, key=key)
        if rdzv.most == 1:
            return (RankHost(local, replace(settings, rdzv=rdzv), group, directory, keep=group.keep),)
        if made:
            notify(join_command(settings, rdzv, made))
        conf = FleetSettings(
            least=rdzv.least,
            most=rdzv.most,
            # A node that joins has no part in the choice of the backend.
            options=replace(settings.options, local_addr=rdzv.local_addr, backend=there.placement.backend),
            directed=False,
        )
        wanted = NodeRequest(least=0, most=0, nproc=0, name=settings.run_id, environ={}, cwd="", python="")
        fleet = NodeFleet(
            local.hub,
            JoinEngine,
            wanted,
            directory=directory,
            notify=notify,
            at_end=local.server.at_end,
            conf=conf,
            key=key,
        )
        nodes = fleet.connect(group, directory)
        settings = replace(settings, rdzv=replace(rdzv, listener=fleet.endpoint))
        try:
            nodes.own = RankHost(local, settings, group, directory, keep=group.keep)
        except BaseException:
            local.hub.call(lambda: nodes.close(succeeded=False))
            raise
        return nodes, nodes.own

    return make


def new_group(
    local: LocalRuntime, settings: AgentSettings, hosts: MakeHosts, *, keep: bool = False
) -> GroupAndLogs:
    """Make a group, which is not started yet; its logs lie in `log_dir`, or in a directory of its own."""
    log_dir = settings.options.log_dir
    private = None if log_dir else local.directory.make("logs-")
    run_id = settings.run_id or uuid.uuid4().hex[:12]
    directory = private or Path(log_dir or "")
    settings = replace(settings, run_id=run_id, log_dir=directory, private_logs=private is not None)
    try:
        group = WorkerGroup(local, settings, hosts, keep=keep)
    except BaseException:
        if private is not None:
            remove_tree(private)
        raise
    local.keep(group)
    return GroupAndLogs(group, private)


def _ahead(local: LocalRuntime, shape: AgentSettings) -> GroupAndLogs:
    descriptors.make_room(shape.nproc)
    local.server.ensure_running()
    made = new_group(
        local,
        shape,
        lambda group, directory: (RankHost(local, group.settings, group, directory, keep=False),),
    )
    made.group.start()
    return made
