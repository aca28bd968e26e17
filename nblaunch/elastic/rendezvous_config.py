"""From the options to the rendezvous of nodes; every contradiction is found before a process starts."""

from __future__ import annotations

import socket
from collections.abc import Callable

import psutil

from nblaunch._errors import OptionError
from nblaunch.elastic.settings import RendezvousConfig
from nblaunch.options.launch import LaunchOptions

_DEFAULT_PORT = 29400
_LOOPBACK = "127."
_WHOLE_SECONDS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)


def rdzv_of(options: LaunchOptions, *, joining: bool = False) -> RendezvousConfig | None:
    """Return where the nodes meet, None for one node that meets nobody.

    `joining` is for a node that joins: the notebook says how many there are. Raises `OptionError`.
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
    host, port = _parts(endpoint)
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


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address, None for the loopback one, or if none has."""
    with_it = [
        name for name, held in psutil.net_if_addrs().items() if address in [each.address for each in held]
    ]
    return None if not with_it or address.startswith(_LOOPBACK) or address == "::1" else with_it[0]


def network_variables(rdzv: RendezvousConfig, is_set: Callable[[str], bool]) -> dict[str, str]:
    """Return what keeps gloo and NCCL on the network on which the nodes meet, unless the user has chosen."""
    interface = interface_of(rdzv.local_addr)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if interface is not None and not is_set(name)}


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the way to `host`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        msg = (
            f"the nodes were to meet at {host!r}, which cannot be found: {error.strerror}. Correct the "
            "endpoint."
        )
        raise OptionError(msg) from error


def _parts(endpoint: str) -> tuple[str, int]:
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
    unknown = sorted(conf.keys() - {*_WHOLE_SECONDS, "read_timeout", "is_host", "rank"})
    if unknown or "is_host" in conf or "rank" in conf:
        name = [*unknown, "is_host", "rank"][0]
        msg = (
            f"rdzv_conf has {name!r}, which has no meaning here: the notebook hosts the rendezvous. It takes "
            f"{', '.join(_WHOLE_SECONDS)}."
        )
        raise OptionError(msg)
    return tuple(conf.items())
