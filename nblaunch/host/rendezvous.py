"""torch's rendezvous, from the options to the handlers: one node in memory, several nodes at an endpoint.

The endpoint is a store that the notebook hosts, or an etcd server (`etcd-v2`, or the older `etcd`).

This module is not in `nodes/`: only this package imports torchelastic, the agent makes its own rendezvous,
and a run of a single node may have an endpoint.

The store of an endpoint is bound to one address. torch keeps the state of a c10d or etcd-v2 rendezvous as a
pickle in it, and anybody who reaches the port can write there. So each state carries a code made with the
run's key, and none without it is unpickled. That of the older etcd rendezvous is JSON.

An etcd server and its keys outlive a run, so each run's rendezvous has a unique name. The notebook publishes
that name under the one that the user gave, with the address of its listener.

Names of torch's that are not public (`tests/unit/test_torch_names.py`):
`DynamicRendezvousHandler._create_tcp_store_server`, `._state_holder`, `._shared_tcp_store_server`,
`._bootstrap_store_info`, `._this_node`, `._stop_heartbeats`, `._op_executor`; `_RendezvousExitOp`;
`dynamic_rendezvous.get_method_name`;
`StaticTCPRendezvous._store`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import importlib.util
import inspect
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nblaunch._errors import LaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch.host.settings import AgentSettings, RendezvousConfig
from nblaunch.options.kinds import port_range
from nblaunch.options.launch import LaunchOptions

# From the options to the configuration; every contradiction is found before a process starts.

T = TypeVar("T")

_DEFAULT_PORT = 29400
_ETCD = ("etcd-v2", "etcd")
_ETCD_PORT = 2379
_LOOPBACK_NETWORK = "127."
_WHOLE_SECONDS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
_CAS_BACKOFF = "cas_backoff_max_seconds"
"""The longest random delay after another node has changed the state first; torch 2.15 and later."""
_ETCD_CONF = {
    "etcd-v2": ("protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "read_timeout"),
    "etcd": ("protocol", "cert", "key", "cacert", "etcd_prefix"),
}


def config_of(options: LaunchOptions, *, joining: bool = False) -> RendezvousConfig | None:
    """Return where the rendezvous is, None for a single node without an endpoint.

    `joining` is for a node that joins: the notebook decides how many there are. Raises `OptionError`.
    """
    static, etcd = options.rdzv_backend == "static", options.rdzv_backend in _ETCD
    _refuse_contradictions(options, joining=joining)
    endpoint = options.rdzv_endpoint
    if static and not endpoint:
        endpoint = f"{_bracketed(options.master_addr or '127.0.0.1')}:{options.master_port or 0}"
    if not endpoint:
        if joining:
            msg = "A node was to join, but not where. Give the notebook's --rdzv-endpoint HOST:PORT."
            raise OptionError(msg)
        return None
    host, port = _host_and_port(endpoint, _ETCD_PORT if etcd else _DEFAULT_PORT)
    least, most = options.nodes
    if (joining or most > 1 or etcd) and port == 0:
        msg = (
            f"{endpoint!r} was given for nodes to meet at, but they cannot know a port that is yet to "
            "be found. "
        )
        raise OptionError(msg + f"Give one: {_ETCD_PORT if etcd else _DEFAULT_PORT}, say.")
    return RendezvousConfig(
        backend=options.rdzv_backend,
        host=host,
        port=port,
        least=least,
        most=most,
        local_addr=options.local_addr or _own_address(host, port),
        hosting=not joining,
        node_rank=options.node_rank,
        conf=_conf(options.rdzv_conf, options.rdzv_backend),
        ports=port_range(options.ports),
    )


def _refuse_contradictions(options: LaunchOptions, *, joining: bool) -> None:
    backend, alone = options.rdzv_backend, options.nnodes == "1" and not joining
    static = backend == "static"
    if backend not in ("c10d", "static", *_ETCD):
        msg = (
            f"rdzv_backend={backend!r} was asked for, but nodes meet through c10d, static, etcd-v2 or etcd. "
            "Leave it out: c10d needs no server."
        )
    elif backend in _ETCD and not options.rdzv_endpoint:
        msg = (
            f"rdzv_backend={backend!r} was given without the address of the etcd server. Give "
            "rdzv_endpoint='HOST:2379', or leave rdzv_backend out: c10d needs no server."
        )
    elif backend in _ETCD and not all(map(importlib.util.find_spec, ("etcd", "urllib3"))):
        msg = (
            f"rdzv_backend={backend!r} needs python-etcd, which is not installed here. Install it: "
            "pip install 'nblaunch[etcd]'."
        )
    elif not static and (options.master_addr is not None or options.master_port is not None):
        msg = (
            f"master_addr and master_port were given, but a {backend} rendezvous finds the master by itself. "
            "Add rdzv_backend='static', or give rdzv_endpoint in their place."
        )
    elif not static and options.node_rank:
        msg = (
            f"node_rank={options.node_rank} was given, but a {backend} rendezvous numbers the nodes by "
            "itself. Leave it out, or add rdzv_backend='static'."
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
    """Raise `OptionError` if the endpoint is not an address of this machine, or its port is taken.

    An etcd server, on the other hand, must listen there already.
    """
    if rdzv.backend in _ETCD:
        with contextlib.suppress(OSError), socket.create_connection((rdzv.host, rdzv.port), _CONNECT_SECONDS):
            return
        raise OptionError(_no_etcd(rdzv), kind=FailureKind.PORT)
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
        raise OptionError(msg, kind=FailureKind.PORT) from error


def network_variables(address: str, environ: Container[str]) -> dict[str, str]:
    """Return what keeps gloo and NCCL on the network of the nodes; a variable in `environ` is the user's."""
    if address.startswith(_LOOPBACK_NETWORK) or address == "::1":
        return {}
    interfaces = psutil.net_if_addrs().items()
    having = [name for name, addresses in interfaces if address in [each.address for each in addresses]]
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: having[0] for name in names if having and name not in environ}


def _own_address(host: str, port: int) -> str:
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
        raise OptionError(msg, kind=FailureKind.PORT) from error


def _host_and_port(endpoint: str, default: int) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        return endpoint.strip("[]"), default
    return host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def join_seconds(options: LaunchOptions) -> float:
    """Return for how many seconds the runtime waits for a node that replaces a lost one."""
    return float(dict(_conf(options.rdzv_conf, options.rdzv_backend)).get("join_timeout", _JOIN_SECONDS))


def _conf(text: str, backend: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    for name in _WHOLE_SECONDS:
        if name in conf and not (conf[name].isdecimal() and int(conf[name])):
            msg = (
                f"rdzv_conf has {name}={conf[name]!r}, which must be a whole number above 0. Write {name}=60."
            )
            raise OptionError(msg)
    if _CAS_BACKOFF in conf:
        _check_cas_backoff(conf[_CAS_BACKOFF])
    of_etcd = _ETCD_CONF.get(backend, ())
    if of_etcd and conf.get("protocol", "http") not in ("http", "https"):
        msg = (
            f"rdzv_conf has protocol={conf['protocol']!r}, which must be http or https. Write protocol=https."
        )
        raise OptionError(msg)
    unknown = sorted(conf.keys() - {*_WHOLE_SECONDS, "read_timeout", _CAS_BACKOFF, *of_etcd})
    if unknown:
        why = "" if of_etcd else ": the notebook hosts the rendezvous"
        msg = (
            f"rdzv_conf has {unknown[0]!r}, which nblaunch does not know{why}. It takes "
            f"{', '.join((*_WHOLE_SECONDS, _CAS_BACKOFF, *of_etcd))}."
        )
        raise OptionError(msg)
    return tuple(conf.items())


def _check_cas_backoff(text: str) -> None:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        msg = f"rdzv_conf has {_CAS_BACKOFF}={text!r}, which must be seconds. Write {_CAS_BACKOFF}=0.5."
        raise OptionError(msg)
    if _CAS_BACKOFF not in inspect.signature(DynamicRendezvousHandler.from_backend).parameters:
        msg = (
            f"rdzv_conf has {_CAS_BACKOFF}, but the rendezvous of torch {torch.__version__} has no such "
            "setting. Use a newer torch (2.15 can), or leave it out."
        )
        raise OptionError(msg, kind=FailureKind.TORCH_VERSION)


# The stores through which nodes find each other: hosted on one address, or reached.

_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
_STORE_SECONDS = 60.0
_JOIN_SECONDS = 600


def first_free(ports: range, host: str, bind: Callable[[int], T]) -> T:
    """Return what `bind` returns for the first of these ports that is free (`port_range`).

    Raises its `OSError`, and `LaunchError` if all of several ports are taken.
    """
    for port in ports:
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or len(ports) == 1:
                raise
    msg = f"all ports from {ports[0]} to {ports[-1]} are taken at {host}. Give more of them (--ports)."
    raise LaunchError(msg, phase="rendezvous", kind=FailureKind.PORT)


def _listening(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def host_store(host: str, ports: range) -> dist.TCPStore:
    """Host a store on a socket that is bound to `host` alone; torch's listens on all addresses.

    Raises `LaunchError` if the port, or each of them, is taken.
    """
    try:
        listener = first_free(ports, host, lambda port: _listening(host, port))
    except OSError as error:
        msg = (
            f"the store of the rendezvous was to listen at {host}:{ports[0]}: {error.strerror}. Take "
            "another port, or give several (--ports FIRST-LAST)."
        )
        raise LaunchError(msg, phase="rendezvous", kind=FailureKind.PORT) from error
    bound = listener.getsockname()[1]
    return dist.TCPStore(
        host_name=host,
        port=bound,
        is_master=True,
        wait_for_workers=False,
        # The store owns the descriptor from here on.
        master_listen_fd=listener.detach(),
    )


def _alone(port: int) -> range:
    return range(port, port + 1)


def connect_store(rdzv: RendezvousConfig) -> dist.TCPStore:
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
            stopped.wait(_POLL_SECONDS)
        else:
            return


def read_listener(rdzv: RendezvousConfig, run_id: str, stopped: threading.Event) -> str:
    """Wait until the notebook has published the address of its listener, and return it."""
    if rdzv.backend in _ETCD:
        return _EtcdEntry(rdzv, run_id).read(stopped)["gate"]
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
        stopped.wait(_POLL_SECONDS)
    try:
        return str(json.loads(store.get(key))["gate"])
    except (ValueError, KeyError, TypeError) as error:
        msg = f"the store at {rdzv.host}:{rdzv.port} holds no valid nblaunch entry for run {run_id!r}"
        raise LaunchError(msg, phase="rendezvous") from error


def _listener_key(run_id: str) -> str:
    return f"nblaunch/{run_id}/gate"


class _EtcdEntry:
    """The notebook's entry in an etcd server: its listener's address, and the name of the rendezvous.

    The entry is signed with the run's key, so nobody else can direct nodes to another address.
    """

    def __init__(self, rdzv: RendezvousConfig, run_id: str) -> None:
        """Connect. Raises `LaunchError` if no etcd server answers."""
        self._rdzv, self._run_id = rdzv, run_id
        # Unlike the user's name, an etcd path cannot hold arbitrary characters.
        self._path = f"/nblaunch/{hashlib.blake2b(run_id.encode(), digest_size=16).hexdigest()}"
        self._client: Any = _connect_etcd(rdzv, "nblaunch")[1].client
        self.name = f"{re.sub(r'[^a-zA-Z0-9_.-]', '-', run_id)}-{secrets.token_hex(8)}"
        entry = {"gate": rdzv.listener, "name": self.name}
        self._text = json.dumps({**entry, "code": self._code(entry)})

    def publish(self) -> None:
        with _etcd_errors(self._rdzv):
            self._client.write(self._path, self._text)

    def read(self, stopped: threading.Event) -> dict[str, str]:
        """Wait for the notebook's entry and return it. Raises `LaunchError` if it does not come in time."""
        seconds = float(dict(self._rdzv.conf).get("join_timeout", _JOIN_SECONDS))
        deadline = time.monotonic() + seconds
        while True:
            with _etcd_errors(self._rdzv):
                found = self._found()
            if found is not None:
                return self._checked(found)
            if time.monotonic() > deadline or stopped.wait(_POLL_SECONDS):
                msg = (
                    f"etcd at {self._rdzv.host}:{self._rdzv.port} has no run of the name {self._run_id!r}: "
                    "the notebook publishes it while its cell runs. Run the cell, or correct --rdzv-id."
                )
                raise LaunchError(msg, phase="rendezvous")

    def _found(self) -> str | None:
        import etcd

        try:
            return str(self._client.read(self._path).value)
        except etcd.EtcdKeyNotFound:
            return None

    def _checked(self, text: str) -> dict[str, str]:
        try:
            found = json.loads(text)
            entry, code = {"gate": str(found["gate"]), "name": str(found["name"])}, str(found["code"])
        except (ValueError, KeyError, TypeError):
            entry, code = {}, ""
        if not hmac.compare_digest(code.encode(), self._code(entry).encode()):
            msg = (
                f"the entry of run {self._run_id!r} in etcd at {self._rdzv.host}:{self._rdzv.port} is not "
                "signed with this node's key. Copy the notebook's key file, or give another --rdzv-id on "
                "both sides."
            )
            raise LaunchError(msg, phase="rendezvous", kind=FailureKind.NODE_REFUSED)
        return entry

    def _code(self, entry: dict[str, str]) -> str:
        secret = hashlib.blake2b(self._rdzv.key, person=b"nblaunch-entry").digest()
        return hmac.digest(secret, json.dumps([self._run_id, entry]).encode(), "sha256").hex()

    def withdraw(self) -> None:
        """Delete what this node published, if etcd still answers."""
        with contextlib.suppress(Exception):  # the run is over, so an error concerns nobody
            self._client.delete(self._path, prevValue=self._text)


def _connect_etcd(rdzv: RendezvousConfig, name: str) -> tuple[RendezvousBackend, Any]:
    """Return torch's backend of the rendezvous `name`, and its store, which holds the etcd client."""
    from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend

    with _etcd_errors(rdzv):
        connected: tuple[RendezvousBackend, Any] = create_backend(_parameters(rdzv, name, _v2_names(rdzv)))
        return connected


def _v2_names(rdzv: RendezvousConfig) -> dict[str, str]:
    """Return the settings under the names of torch's etcd-v2; the older etcd has others."""
    renamed = {"cert": "ssl_cert", "key": "ssl_cert_key", "cacert": "ca_cert"}
    return {renamed.get(name, name) if rdzv.backend == "etcd" else name: text for name, text in rdzv.conf}


def _parameters(rdzv: RendezvousConfig, name: str, conf: dict[str, str]) -> RendezvousParameters:
    endpoint = f"{_bracketed(rdzv.host)}:{rdzv.port}"
    return RendezvousParameters(
        rdzv.backend, endpoint, name, rdzv.least, rdzv.most, local_addr=rdzv.local_addr, **conf
    )


@contextlib.contextmanager
def _etcd_errors(rdzv: RendezvousConfig) -> Iterator[None]:
    import etcd

    try:
        yield
    except (RendezvousConnectionError, etcd.EtcdException, OSError) as error:
        raise LaunchError(_no_etcd(rdzv), phase="rendezvous") from error


def _no_etcd(rdzv: RendezvousConfig) -> str:
    return (
        f"the nodes were to meet at {rdzv.host}:{rdzv.port}, but no etcd server with the v2 API answers "
        "there. Start one (etcd 3.4 or 3.5 with --enable-v2=true), or correct rdzv_endpoint."
    )


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
) -> LoopbackRendezvous | NodesRendezvous | StaticRendezvous | EtcdRendezvous:
    """Return the rendezvous of the settings; it gives up waiting once `stopped` is set.

    Raises `LaunchError` if the store can be neither hosted nor reached.
    """
    rdzv = settings.rdzv
    if rdzv is None:
        return LoopbackRendezvous.standalone(settings.run_id)
    if rdzv.backend in _ETCD:
        return _etcd_rendezvous(rdzv, settings.run_id, stopped)
    store = host_store(rdzv.host, _alone(rdzv.port)) if rdzv.hosting else connect_store(rdzv)
    if rdzv.hosting:
        store.set(_listener_key(settings.run_id), json.dumps({"gate": rdzv.listener}))
    if rdzv.backend == "static":
        return StaticRendezvous(rdzv, settings.run_id, store)
    backend = _SignedState(C10dRendezvousBackend(store, settings.run_id), rdzv.key, stopped)
    return NodesRendezvous.at(rdzv, settings.run_id, store, backend)


def _etcd_rendezvous(
    rdzv: RendezvousConfig, run_id: str, stopped: threading.Event
) -> NodesRendezvous | EtcdRendezvous:
    entry = _EtcdEntry(rdzv, run_id)
    name = entry.name if rdzv.hosting else entry.read(stopped)["name"]
    own = entry if rdzv.hosting else None
    if rdzv.backend == "etcd":
        return EtcdRendezvous(rdzv, name, stopped, own)
    backend, store = _connect_etcd(rdzv, name)
    return NodesRendezvous.at(rdzv, name, store, _SignedState(backend, rdzv.key, stopped), own)


def _method_name(depth: int = 2) -> str:
    """Return the name of the function that calls the caller."""
    frame = inspect.currentframe()
    while frame is not None and depth:
        frame, depth = frame.f_back, depth - 1
    return "" if frame is None else frame.f_code.co_name


# For the name of an event torch reads the source lines of the whole stack, twice: half of a rendezvous.
dynamic_rendezvous.get_method_name = _method_name


class _Handler(DynamicRendezvousHandler):
    """torch's c10d rendezvous, whose store for the ranks listens on the node's own address only."""

    def _address(self) -> str:
        return str(self._this_node.addr)

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts the ranks' store: always, whatever the environment says."""
        return True

    def _create_tcp_store_server(self, _master_addr: str, master_port: int) -> dist.TCPStore:
        return host_store(self._address(), _alone(master_port))

    def next_rendezvous(self) -> Any:
        """Join the rendezvous, and host the ranks' store where torch would not."""
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


class _SignedState(RendezvousBackend):
    """Signs the state that torch keeps in its backend; `stopped` ends `waiting_thread`'s wait for it."""

    def __init__(self, backend: RendezvousBackend, key: bytes, stopped: threading.Event) -> None:
        self._backend = backend
        self._secret = hashlib.blake2b(key, person=b"nblaunch-state").digest()
        self._stopped = stopped
        self.waiting_thread = 0

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> Any:
        """Return the state. Raises `RendezvousStateError` for one without the code."""
        if self._stopped.is_set() and threading.get_ident() == self.waiting_thread:
            msg = "the run was stopped"
            raise SignalException(msg, 15)  # type: ignore[arg-type]
        found = self._backend.get_state()
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> Any:
        found = self._backend.set_state(hmac.digest(self._secret, state, "sha256") + state, token)
        return None if found is None else (self._opened(found[0]), *found[1:])

    def _opened(self, signed: bytes) -> bytes:
        code, state = signed[:32], signed[32:]
        if not hmac.compare_digest(code, hmac.digest(self._secret, state, "sha256")):
            msg = "the state of the rendezvous was written by somebody who has not this run's key: refused"
            raise RendezvousStateError(msg)
        return state


class AttemptNumbers:
    """The number of each attempt, which the notebook's node decides, in the store of its round."""

    def _attempt_key(self) -> str:
        return "nblaunch/attempt"

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        store.set(self._attempt_key(), str(attempt))

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Wait until the notebook's ranks have been forked, and return the number of the attempt."""
        return int(_wait_for(store, self._attempt_key(), stopped))


class NodesRendezvous(AttemptNumbers, _Handler):
    """A c10d or etcd-v2 rendezvous of several nodes at an endpoint."""

    rdzv: RendezvousConfig
    _signed: _SignedState
    _entry: _EtcdEntry | None

    @classmethod
    def at(
        cls,
        rdzv: RendezvousConfig,
        run_id: str,
        store: dist.Store,
        backend: _SignedState,
        entry: _EtcdEntry | None = None,
    ) -> NodesRendezvous:
        """Make the rendezvous over the store at the endpoint; `entry` is published while it lasts."""
        conf = dict(rdzv.conf)
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
            **({_CAS_BACKOFF: float(conf[_CAS_BACKOFF])} if _CAS_BACKOFF in conf else {}),
        )
        handler.rdzv, handler._signed, handler._entry = rdzv, backend, entry
        return handler

    def next_rendezvous(self) -> Any:
        """Join the rendezvous. Raises `LaunchError` if they do not come in time."""
        if self._entry is not None:
            self._entry.publish()  # not earlier: nobody shuts down a rendezvous that never began
        # A new store for each round: the node that hosted the last one may be gone.
        self._forget_store()
        self._signed.waiting_thread = threading.get_ident()
        try:
            return super().next_rendezvous()
        except RendezvousTimeoutError as error:
            msg = _came_too_late(self.rdzv)
            raise LaunchError(msg, phase="rendezvous") from error.with_traceback(None)
        except RendezvousStateError as error:
            raise LaunchError(str(error), phase="rendezvous") from error.with_traceback(None)
        finally:
            self._signed.waiting_thread = 0

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join; 0 except for the notebook's agent, which acts for all."""
        return int(super().num_nodes_waiting()) if self.rdzv.hosting else 0

    def shutdown(self) -> bool:
        """Close the rendezvous, if this is the notebook's node; another one only leaves."""
        if self._entry is not None:
            self._entry.withdraw()
        if self.rdzv.hosting:
            return super().shutdown()
        # At once: the others would wait for the heartbeats of this node.
        with contextlib.suppress(RendezvousError):
            self._stop_heartbeats()
            self._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE_SECONDS)
        self._forget_store()
        return True


class StaticRendezvous(AttemptNumbers, StaticTCPRendezvous):
    """torch's static rendezvous, over a store that listens on the address of node 0 only."""

    def __init__(self, rdzv: RendezvousConfig, run_id: str, store: dist.TCPStore) -> None:
        seconds = int(dict(rdzv.conf).get("timeout", _JOIN_SECONDS))
        super().__init__(rdzv.host, store.port, rdzv.node_rank, rdzv.most, run_id, seconds)
        store.set_timeout(timedelta(seconds=seconds))
        self._store = store
        self._hosting = rdzv.hosting
        self._rounds = 0

    def next_rendezvous(self) -> Any:
        """Join the rendezvous, in a store without what NCCL's watchdog noted in an earlier attempt."""
        if self._hosting and self._store is not None:
            self._store.delete_key(_NCCL_TIMED_OUT)
        return super().next_rendezvous()

    def _attempt_key(self) -> str:
        # The store stays the same, and each node asks once in a round.
        self._rounds += 1
        return f"nblaunch/attempt/{self._rounds}"

    def shutdown(self) -> bool:
        self._store = None
        return True


class EtcdRendezvous(AttemptNumbers, RendezvousHandler):
    """torch's older etcd rendezvous; the ranks' store listens only on this run's address."""

    use_agent_store = True
    """Otherwise rank 0 would host the ranks' store, on all addresses."""

    def __init__(
        self,
        rdzv: RendezvousConfig,
        name: str,
        stopped: threading.Event,
        entry: _EtcdEntry | None,
    ) -> None:
        """Join the rendezvous `name`; `entry` is published while it lasts."""
        from torch.distributed.elastic.rendezvous.etcd_rendezvous import create_rdzv_handler

        # Its logger writes each step to stderr, past the root logger. Errors are raised as well.
        logging.getLogger(create_rdzv_handler.__module__).setLevel(logging.ERROR)
        self._rdzv, self._name, self._stopped, self._entry = rdzv, name, stopped, entry
        self._server: dist.TCPStore | None = None
        conf = {key: text for key, text in rdzv.conf if key != "join_timeout"}
        if (seconds := dict(rdzv.conf).get("join_timeout")) is not None:
            conf.setdefault("timeout", seconds)
        with _etcd_errors(rdzv):
            self._handler: Any = create_rdzv_handler(_parameters(rdzv, name, conf))

    def get_backend(self) -> str:
        return "etcd"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the rendezvous. Raises `LaunchError` if they do not come in time."""
        self._server = None
        if self._entry is not None:
            self._entry.publish()
        info: RendezvousInfo = self._joined().result()
        # Each round has its own key-value store.
        if info.rank == 0:
            # A new store for each round: NCCL's watchdog leaves a timeout there, under a fixed name.
            self._server = host_store(self._rdzv.local_addr, self._rdzv.ports)
            info.store.set(_STORE_KEY, json.dumps([self._rdzv.local_addr, self._server.port]))
        address, port = json.loads(_wait_for(info.store, _STORE_KEY, self._stopped))
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, port))

    def _joined(self) -> Future[RendezvousInfo]:
        """Run torch's rendezvous on another thread, since its wait cannot be stopped; return its outcome."""
        done: Future[RendezvousInfo] = Future()

        def join() -> None:
            try:
                done.set_result(self._handler.next_rendezvous())
            except RendezvousTimeoutError:
                done.set_exception(LaunchError(_came_too_late(self._rdzv), phase="rendezvous"))
            except BaseException as error:  # noqa: BLE001 - the agent's thread raises it
                done.set_exception(error)

        threading.Thread(target=join, name="nblaunch-etcd", daemon=True).start()
        while not wait([done], timeout=_POLL_SECONDS / 10).done:
            if self._stopped.is_set():
                msg = "the run was stopped"
                raise SignalException(msg, 15)  # type: ignore[arg-type]
        return done

    def is_closed(self) -> bool:
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join; 0 except for the notebook's agent, which acts for all."""
        return int(self._handler.num_nodes_waiting()) if self._rdzv.hosting else 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        """End the ranks' store; on the notebook's node, close the rendezvous."""
        self._server = None
        if self._entry is not None:
            self._entry.withdraw()
        return bool(self._handler.shutdown()) if self._rdzv.hosting else True


def _came_too_late(rdzv: RendezvousConfig) -> str:
    return (
        f"{rdzv.least} nodes were to meet at {rdzv.host}:{rdzv.port}, and not all of them came in time. "
        "Start the others (python -m nblaunch join), or give them more time: rdzv_conf='join_timeout=1200'."
    )


_STORE_KEY = "nblaunch/store"


def _wait_for(store: dist.Store, key: str, stopped: threading.Event) -> bytes:
    while not store.check([key]):
        if stopped.wait(0.02):
            msg = "the run was stopped"
            raise SignalException(msg, 15)  # type: ignore[arg-type]
    return bytes(store.get(key))


def _seconds(conf: dict[str, str], name: str) -> timedelta | None:
    value = conf.get(f"{name}_timeout")
    return None if value is None else timedelta(seconds=int(value))
