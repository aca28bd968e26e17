"""torch's rendezvous, from the options to the handlers: of one node in memory, of several at an endpoint.

It is not in `nodes/`: only this package imports torchelastic, the agent makes its own rendezvous, and a run
of a single node may have an endpoint.

The store of an endpoint is bound to one address. torch keeps the state of a c10d rendezvous as a pickle in
it, and anybody who reaches the port can write there. So each state carries a code made with the run's key,
and none without it is unpickled.

Names of torch's that are not public (`tests/unit/test_torch_names.py`):
`DynamicRendezvousHandler._create_tcp_store_server`, `._state_holder`, `._shared_tcp_store_server`,
`._bootstrap_store_info`, `._this_node`, `._stop_heartbeats`, `._op_executor`; `_RendezvousExitOp`;
`StaticTCPRendezvous._store`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Container
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nblaunch._errors import LaunchError, OptionError
from nblaunch.elastic.settings import AgentSettings, RendezvousConfig
from nblaunch.options.launch import LaunchOptions

# From the options to the configuration; every contradiction is found before a process starts.

_DEFAULT_PORT = 29400
_LOOPBACK_NETWORK = "127."
_WHOLE_SECONDS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)


def config_of(options: LaunchOptions, *, joining: bool = False) -> RendezvousConfig | None:
    """Return where the nodes meet, None for a single node without an endpoint.

    `joining` is for a node that joins: the notebook decides how many there are. Raises `OptionError`.
    """
    static = options.rdzv_backend == "static"
    _refuse_contradictions(options, joining=joining)
    endpoint = options.rdzv_endpoint
    if static and not endpoint:
        endpoint = f"{_bracketed(options.master_addr or '127.0.0.1')}:{options.master_port or 0}"
    if not endpoint:
        if joining:
            msg = "A node was to join, but not where. Give the notebook's --rdzv-endpoint HOST:PORT."
            raise OptionError(msg)
        return None
    host, port = _host_and_port(endpoint)
    least, most = options.nodes
    if (joining or most > 1) and port == 0:
        msg = (
            f"{endpoint!r} was given for nodes to meet at, but they cannot know a port that is yet to "
            "be found. "
        )
        raise OptionError(msg + "Give one: 29400, say.")
    return RendezvousConfig(
        backend=options.rdzv_backend,
        host=host,
        port=port,
        least=least,
        most=most,
        local_addr=options.local_addr or _own_address(host, port),
        hosting=not joining,
        node_rank=options.node_rank,
        conf=_conf(options.rdzv_conf),
        env=tuple(options.env.items()),
    )


def _refuse_contradictions(options: LaunchOptions, *, joining: bool) -> None:
    static, alone = options.rdzv_backend == "static", options.nnodes == "1" and not joining
    if options.rdzv_backend not in ("c10d", "static"):
        etcd = options.rdzv_backend.startswith("etcd")
        msg = (
            f"rdzv_backend={options.rdzv_backend!r} was asked for, but nodes reach the notebook through c10d "
            "or static "
            f"here{'; etcd needs a server of its own, which nblaunch does not use' if etcd else ''}. Leave "
            "it out: c10d needs no server."
        )
    elif not static and (options.master_addr is not None or options.master_port is not None):
        msg = (
            "master_addr and master_port were given, but a c10d rendezvous finds the master by itself. Add "
            "rdzv_backend='static', or give rdzv_endpoint in their place."
        )
    elif not static and options.node_rank:
        msg = (
            f"node_rank={options.node_rank} was given, but a c10d rendezvous numbers the nodes by itself. "
            "Leave it out, or add rdzv_backend='static'."
        )
    elif not static and not alone and not joining and not options.rdzv_endpoint:
        msg = (
            f"nnodes={options.nnodes!r} was asked for, but the nodes have no place to meet. Give one on this "
            "machine: rdzv_endpoint='HOST:29400' (127.0.0.1:29400 for nodes on this machine alone)."
        )
    elif static and options.rdzv_endpoint and (options.master_addr or options.master_port is not None):
        msg = (
            "rdzv_endpoint and master_addr/master_port were given, which are the same place. Give one "
            "of them."
        )
    elif static and options.nodes[0] != options.nodes[1]:
        msg = (
            f"nnodes={options.nnodes!r} was asked for, but a static rendezvous has a fixed number. Take c10d."
        )
    elif static and not joining and options.node_rank:
        msg = (
            f"node_rank={options.node_rank} was given, but the notebook is node 0, to which the others "
            "report. Leave it out here; they join with --node-rank 1 and so on."
        )
    elif static and joining and not options.node_rank:
        msg = "A static rendezvous was asked for without a number for this node. Give --node-rank 1, or more."
    else:
        return
    raise OptionError(msg)


def refuse_taken(rdzv: RendezvousConfig) -> None:
    """Raise `OptionError` where the endpoint is not this machine's, or its port is taken."""
    try:
        family, *_, address = socket.getaddrinfo(rdzv.host, rdzv.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except OSError as error:
        msg = (
            f"the nodes were to meet at {rdzv.host}:{rdzv.port}, but the notebook cannot listen there: "
            f"{error.strerror}. Give an address of this machine, and a port that is free."
        )
        raise OptionError(msg) from error


def network_variables(rdzv: RendezvousConfig, environ: Container[str]) -> dict[str, str]:
    """Return what keeps gloo and NCCL on the network of the nodes; a variable in `environ` is the user's."""
    address = rdzv.local_addr
    if address.startswith(_LOOPBACK_NETWORK) or address == "::1":
        return {}
    interfaces = psutil.net_if_addrs().items()
    having = [name for name, addresses in interfaces if address in [each.address for each in addresses]]
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: having[0] for name in names if having and name not in environ}


def _own_address(host: str, port: int) -> str:
    """Return the address from which this machine reaches `host`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect(address)  # sends nothing
            return str(trial.getsockname()[0])
    except OSError as error:
        msg = (
            f"the nodes were to meet at {host!r}, which cannot be found: {error.strerror}. Correct the "
            "endpoint."
        )
        raise OptionError(msg) from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        return endpoint.strip("[]"), _DEFAULT_PORT
    return host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _conf(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    for name in _WHOLE_SECONDS:
        if name in conf and not (conf[name].isdecimal() and int(conf[name])):
            msg = (
                f"rdzv_conf has {name}={conf[name]!r}, which must be a whole number above 0. Write {name}=60."
            )
            raise OptionError(msg)
    unknown = sorted(conf.keys() - {*_WHOLE_SECONDS, "read_timeout"})
    if unknown:
        msg = (
            f"rdzv_conf has {unknown[0]!r}, which has no meaning here: the notebook hosts the rendezvous. It "
            f"takes {', '.join(_WHOLE_SECONDS)}."
        )
        raise OptionError(msg)
    return tuple(conf.items())


# The stores through which nodes find each other: hosted on one address, or reached.

_LOOK_SECONDS = 0.2
_STORE_SECONDS = 60.0
_JOIN_SECONDS = 600


def host_store(host: str, port: int) -> dist.TCPStore:
    """Host a store on a socket that is bound to `host` alone; torch's listens on all addresses.

    Raises `LaunchError` if the port is taken.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        msg = (
            f"the store of the rendezvous was to listen at {host}:{port}: {error.strerror}. Take "
            "another port."
        )
        raise LaunchError(msg, phase="rendezvous") from error
    bound = listener.getsockname()[1]
    return dist.TCPStore(
        host_name=host,
        port=bound,
        is_master=True,
        wait_for_workers=False,
        # The store owns the descriptor from here on.
        master_listen_fd=listener.detach(),
    )


def connect_store(rdzv: RendezvousConfig) -> dist.TCPStore:
    """Connect to a store that another node hosts."""
    _wait_for_port(rdzv.host, rdzv.port, _STORE_SECONDS, threading.Event())
    seconds = timedelta(seconds=_STORE_SECONDS)
    return dist.TCPStore(host_name=rdzv.host, port=rdzv.port, is_master=False, timeout=seconds)


def _wait_for_port(host: str, port: int, seconds: float, stopped: threading.Event) -> None:
    """Wait until a process listens there. Raises `LaunchError` if none does in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_STORE_SECONDS).close()
        except OSError as error:
            if time.monotonic() > deadline or stopped.is_set():
                msg = (
                    f"nobody answers at {host}:{port} ({error}), where the notebook hosts the rendezvous "
                    "while its cell runs. Run the cell, or correct --rdzv-endpoint."
                )
                raise LaunchError(msg, phase="rendezvous") from error
            stopped.wait(_LOOK_SECONDS)
        else:
            return


def read_listener(rdzv: RendezvousConfig, run_id: str, stopped: threading.Event) -> str:
    """Wait until the notebook has published the address of its listener, and return it."""
    seconds = float(dict(rdzv.conf).get("join_timeout", _JOIN_SECONDS))
    deadline = time.monotonic() + seconds
    _wait_for_port(rdzv.host, rdzv.port, seconds, stopped)
    store = connect_store(rdzv)
    key = _listener_key(run_id)
    while not store.check([key]):
        if time.monotonic() > deadline or stopped.is_set():
            msg = (
                f"there is a rendezvous at {rdzv.host}:{rdzv.port}, but no notebook has a run of the "
                f"name {run_id!r} there. Give --rdzv-id as the notebook has it."
            )
            raise LaunchError(msg, phase="rendezvous")
        stopped.wait(_LOOK_SECONDS)
    try:
        return str(json.loads(store.get(key))["gate"])
    except (ValueError, KeyError, TypeError) as error:
        msg = f"the store at {rdzv.host}:{rdzv.port} holds no valid nblaunch entry for run {run_id!r}"
        raise LaunchError(msg, phase="rendezvous") from error


def _listener_key(run_id: str) -> str:
    """Return under which name the store has the address of the notebook's listener."""
    return f"nblaunch/{run_id}/gate"


# The rendezvous handlers.

_LOOPBACK = "127.0.0.1"
# Where NCCL's watchdog notes in a store that a collective has timed out, without the prefix of a group.
_NCCL_TIMED_OUT = "exception_dump"
# With torch's own 5 s and 3 attempts a node that was killed would hold up the others for 15 s.
_KEEP_ALIVE_SECONDS = 1
_KEEP_ALIVE_ATTEMPTS = 4
_LEAVE_SECONDS = 2.0


def make_rendezvous(
    settings: AgentSettings, stopped: threading.Event
) -> LoopbackRendezvous | NodesRendezvous | StaticRendezvous:
    """Return the rendezvous of the settings; it gives up waiting once `stopped` is set.

    Beside torch's methods, each has `rejoin` (pretend that a node waits: the agent restarts the ranks, and
    counts no failure), and `post_attempt` and `read_attempt` for the number of an attempt, which the
    notebook's node decides. Raises `LaunchError` if the store can be neither hosted nor reached.
    """
    rdzv = settings.rdzv
    if rdzv is None:
        return LoopbackRendezvous.standalone(settings.run_id)
    store = host_store(rdzv.host, rdzv.port) if rdzv.hosting else connect_store(rdzv)
    if rdzv.hosting:
        store.set(_listener_key(settings.run_id), json.dumps({"gate": rdzv.listener}))
    if rdzv.backend == "static":
        return StaticRendezvous(rdzv, settings.run_id, store)
    return NodesRendezvous.at(rdzv, settings.run_id, store, stopped)


class _Handler(DynamicRendezvousHandler):
    """torch's c10d rendezvous, whose store for the ranks listens on the node's own address only."""

    _asked_to_rejoin = False

    def _address(self) -> str:
        return str(self._this_node.addr)

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts the ranks' store: always, whatever the environment says."""
        return True

    def _create_tcp_store_server(self, _master_addr: str, master_port: int) -> dist.TCPStore:
        return host_store(self._address(), master_port)

    def next_rendezvous(self) -> Any:
        """Meet, and host the ranks' store where torch would not."""
        self._asked_to_rejoin = False
        info: Any = super().next_rendezvous()
        if info.rank == 0 and self._shared_tcp_store_server is None:
            # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: ranks would wait for a store that nobody hosts. Users set
            # it against addresses of a dead attempt; here the prefixes of the ranks' store prevent these.
            where = info.bootstrap_store_info
            server = self._create_tcp_store_server(self._address(), self._free_port(where.master_port))
            self._shared_tcp_store_server = server
            where.master_addr, where.master_port = self._address(), server.port
        return info

    def _free_port(self, announced: int) -> int:
        """Return the port for a store that torch has not made: the other nodes know the announced one."""
        return announced

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join."""
        return 1 if self._asked_to_rejoin else int(super().num_nodes_waiting())

    def rejoin(self) -> None:
        """Pretend that a node waits."""
        self._asked_to_rejoin = True

    def _forget_store(self) -> None:
        """Refer to the ranks' store no more; its server and its threads end."""
        self._shared_tcp_store_server = self._bootstrap_store_info = None

    def shutdown(self) -> bool:
        """Close, and end the store's server and its threads."""
        closed = super().shutdown()
        self._forget_store()
        return bool(closed)


class LoopbackRendezvous(_Handler):
    """c10d standalone rendezvous of one node: nothing of it listens beyond 127.0.0.1."""

    @classmethod
    def standalone(cls, run_id: str) -> LoopbackRendezvous:
        """Make the rendezvous over a store inside this process: one node needs no server for it."""
        store = dist.HashStore()
        backend = C10dRendezvousBackend(store, run_id)
        timeout = RendezvousTimeout(join=timedelta(seconds=60))
        handler: LoopbackRendezvous = cls.from_backend(
            run_id, store, backend, 1, 1, local_addr=_LOOPBACK, timeout=timeout
        )
        return handler

    def next_rendezvous(self) -> Any:
        """Join at once: the 0 to 0.3 s that torch sleeps in round 0 spread the load of many nodes."""
        holder = self._state_holder
        if holder.state.round == 0:
            holder.state.round = 1
        # A new store for each attempt. NCCL's watchdog notes a timeout there under a name of its own, and the
        # monitors of a later attempt would take that for theirs, and end healthy ranks.
        self._forget_store()
        return super().next_rendezvous()

    def _free_port(self, announced: int) -> int:  # noqa: ARG002 - no other node knows it
        return 0

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        """Do nothing: no other node reads it."""

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Never called: a single node decides by itself."""
        raise NotImplementedError


class _Signed(C10dRendezvousBackend):
    """Keeps torch's state in the store, signed; `stopped` ends the wait of `waiting_thread` for it."""

    def __init__(self, store: dist.Store, run_id: str, key: bytes, stopped: threading.Event) -> None:
        super().__init__(store, run_id)
        self._secret = hashlib.blake2b(key, person=b"nblaunch-state").digest()
        self._stopped = stopped
        self.waiting_thread = 0

    def get_state(self) -> Any:
        """Return the state. Raises `RendezvousStateError` for one without the code."""
        if self._stopped.is_set() and threading.get_ident() == self.waiting_thread:
            msg = "the run was stopped"
            raise SignalException(msg, 15)  # type: ignore[arg-type]
        found = super().get_state()
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Store the state with its code."""
        found = super().set_state(hmac.digest(self._secret, state, "sha256") + state, token)
        return None if found is None else (self._opened(found[0]), *found[1:])

    def _opened(self, signed: bytes) -> bytes:
        code, state = signed[:32], signed[32:]
        if not hmac.compare_digest(code, hmac.digest(self._secret, state, "sha256")):
            msg = "the state of the rendezvous was written by somebody who has not this run's key: refused"
            raise RendezvousStateError(msg)
        return state


class NodesRendezvous(_Handler):
    """c10d rendezvous of several nodes at an endpoint."""

    rdzv: RendezvousConfig
    _signed: _Signed

    @classmethod
    def at(
        cls, rdzv: RendezvousConfig, run_id: str, store: dist.Store, stopped: threading.Event
    ) -> NodesRendezvous:
        """Make the rendezvous over the store at the endpoint."""
        conf = dict(rdzv.conf)
        backend = _Signed(store, run_id, rdzv.key, stopped)
        handler: NodesRendezvous = cls.from_backend(
            run_id,
            store,
            backend,
            rdzv.least,
            rdzv.most,
            local_addr=rdzv.local_addr,
            timeout=RendezvousTimeout(*(_seconds(conf, name) for name in ("join", "last_call", "close"))),
            keep_alive_interval=int(conf.get("keep_alive_interval", _KEEP_ALIVE_SECONDS)),
            keep_alive_max_attempt=int(conf.get("keep_alive_max_attempt", _KEEP_ALIVE_ATTEMPTS)),
        )
        handler.rdzv, handler._signed = rdzv, backend
        return handler

    def next_rendezvous(self) -> Any:
        """Meet the other nodes; raises `LaunchError` if they do not come in time."""
        # A new store for each round: the node that hosted the last one may be gone.
        self._forget_store()
        self._signed.waiting_thread = threading.get_ident()
        try:
            return super().next_rendezvous()
        except RendezvousTimeoutError as error:
            rdzv = self.rdzv
            msg = (
                f"{rdzv.least} nodes were to meet at {rdzv.host}:{rdzv.port}, and not all of them "
                "came in time. Start the others (python -m nblaunch join), or give them more time: "
                "rdzv_conf='join_timeout=1200'."
            )
            raise LaunchError(msg, phase="rendezvous") from error.with_traceback(None)
        finally:
            self._signed.waiting_thread = 0

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join: only the notebook's agent acts on these, for all nodes."""
        return super().num_nodes_waiting() if self.rdzv.hosting else int(self._asked_to_rejoin)

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        """Publish the number of the attempt, in the store of this round."""
        store.set("nblaunch/attempt", str(attempt))

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Wait until the notebook's ranks have been forked, and return the number of the attempt."""
        return _wait_for_attempt(store, "nblaunch/attempt", stopped)

    def shutdown(self) -> bool:
        """Close the rendezvous, if this is the notebook's node; another one only leaves."""
        if self.rdzv.hosting:
            return super().shutdown()
        # At once: the others would wait for the heartbeats of this node.
        with contextlib.suppress(RendezvousError):
            self._stop_heartbeats()
            self._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE_SECONDS)
        self._forget_store()
        return True


class StaticRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, over a store that listens on the address of node 0 only."""

    def __init__(self, rdzv: RendezvousConfig, run_id: str, store: dist.TCPStore) -> None:
        """Join as node `rdzv.node_rank`."""
        seconds = int(dict(rdzv.conf).get("timeout", _JOIN_SECONDS))
        super().__init__(rdzv.host, store.port, rdzv.node_rank, rdzv.most, run_id, seconds)
        store.set_timeout(timedelta(seconds=seconds))
        self._store = store
        self._hosting = rdzv.hosting
        self._posted = self._read = 0

    def next_rendezvous(self) -> Any:
        """Meet the other nodes, in a store without what NCCL's watchdog noted in an earlier attempt."""
        if self._hosting and self._store is not None:
            self._store.delete_key(_NCCL_TIMED_OUT)
        return super().next_rendezvous()

    def rejoin(self) -> None:
        """Do nothing: its nodes never change."""

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        """Publish the number of the attempt, under a name for each round: the store stays the same."""
        self._posted += 1
        store.set(f"nblaunch/attempt/{self._posted}", str(attempt))

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Wait until the notebook's ranks have been forked, and return the number of the attempt."""
        self._read += 1
        return _wait_for_attempt(store, f"nblaunch/attempt/{self._read}", stopped)

    def shutdown(self) -> bool:
        """Refer to the store no more."""
        self._store = None
        return True


def _wait_for_attempt(store: dist.Store, key: str, stopped: threading.Event) -> int:
    while not store.check([key]):
        if stopped.wait(0.02):
            msg = "the run was stopped"
            raise SignalException(msg, 15)  # type: ignore[arg-type]
    return int(store.get(key))


def _seconds(conf: dict[str, str], name: str) -> timedelta | None:
    value = conf.get(f"{name}_timeout")
    return None if value is None else timedelta(seconds=int(value))
