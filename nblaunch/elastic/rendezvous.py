"""The rendezvous of nodes: torch's own, bound to one address, its state signed with the join key.

torch keeps the state of a c10d rendezvous as a pickle in a store that anybody who reaches its port can
write to. Here each state carries a code made with the join key, and none without it is unpickled.

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
from datetime import timedelta
from typing import Any, Protocol

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

from nblaunch._errors import LaunchError
from nblaunch.elastic.settings import AgentSettings, RendezvousConfig

# The stores through which nodes find each other: hosted on one address, or reached.

_STEP = 0.2
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


def reach_store(rdzv: RendezvousConfig) -> dist.TCPStore:
    """Connect to a store that another node hosts."""
    wait_for_port(rdzv.host, rdzv.port, _STORE_SECONDS, threading.Event())
    return dist.TCPStore(
        host_name=rdzv.host,
        port=rdzv.port,
        is_master=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
    )


def wait_for_port(host: str, port: int, seconds: float, stopped: threading.Event) -> None:
    """Wait until somebody listens there. Raises `LaunchError` if nobody does in time."""
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
            stopped.wait(_STEP)
        else:
            return


def read_listener(rdzv: RendezvousConfig, run_id: str, stopped: threading.Event) -> str:
    """Wait until the notebook has told where its nodes report to, and return that address."""
    seconds = float(dict(rdzv.conf).get("join_timeout", _JOIN_SECONDS))
    deadline = time.monotonic() + seconds
    wait_for_port(rdzv.host, rdzv.port, seconds, stopped)
    store = reach_store(rdzv)
    key = bulletin_key(run_id)
    while not store.check([key]):
        if time.monotonic() > deadline or stopped.is_set():
            msg = (
                f"there is a rendezvous at {rdzv.host}:{rdzv.port}, but no notebook has a run of the "
                f"name {run_id!r} there. Give --rdzv-id as the notebook has it."
            )
            raise LaunchError(msg, phase="rendezvous")
        stopped.wait(_STEP)
    try:
        told = json.loads(store.get(key))
        return str(told["gate"])
    except (ValueError, KeyError, TypeError) as error:
        msg = f"the store at {rdzv.host}:{rdzv.port} holds no valid nblaunch entry for run {run_id!r}"
        raise LaunchError(msg, phase="rendezvous") from error


def bulletin_key(run_id: str) -> str:
    """Return under which name the notebook tells where nodes report to."""
    return f"nblaunch/{run_id}/gate"


# The rendezvous itself.


_LOOPBACK = "127.0.0.1"
# Where NCCL's watchdog notes in a store that a collective has timed out, without the prefix of a group.
_NCCL_TIMED_OUT = "exception_dump"
# torch's own 5 s and 3 attempts: a node that was killed would hold up the others for a quarter of a minute.
_KEEP_ALIVE_SECONDS = 1
_KEEP_ALIVE_ATTEMPTS = 4


class Rendezvous(Protocol):
    """What the agent wants of a rendezvous, over and above what torch's agent does."""

    def next_rendezvous(self) -> Any:
        """Meet the other nodes."""

    def leave(self) -> None:
        """Make room at once, so that nobody waits for this node."""

    def shutdown(self) -> bool:
        """End."""

    def rejoin(self) -> None:
        """Have the agent believe that a node waits: it starts the ranks anew, and counts no failure."""

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        """Tell the other nodes the number of the attempt that is being started."""

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Wait until that is told, and return it."""


def make(settings: AgentSettings, stopped: threading.Event) -> Any:
    """Return the rendezvous that the settings ask for; it gives up waiting once `stopped` is set.

    Raises `LaunchError` if its store can be neither hosted nor reached.
    """
    rdzv = settings.rdzv
    if rdzv is None:
        return LoopbackRendezvous.standalone(settings.run_id)
    store = host_store(rdzv.host, rdzv.port) if rdzv.hosting else reach_store(rdzv)
    if rdzv.hosting:
        store.set(bulletin_key(settings.run_id), json.dumps({"gate": rdzv.listener}))
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
        """Say that the agent hosts the ranks' store: it does, whatever the environment says."""
        return True

    def _create_tcp_store_server(self, _master_addr: str, master_port: int) -> dist.TCPStore:
        return host_store(self._address(), master_port)

    def next_rendezvous(self) -> Any:
        """Meet, and host the ranks' store where torch would not."""
        self._asked_to_rejoin = False
        info: Any = super().next_rendezvous()
        if info.rank == 0 and self._shared_tcp_store_server is None:
            # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: ranks would wait for a store that nobody hosts. What it
            # is set for (addresses of a dead attempt) the ranks' own prefixes see to.
            where = info.bootstrap_store_info
            server = self._create_tcp_store_server(self._address(), self._free_port(where.master_port))
            self._shared_tcp_store_server = server
            where.master_addr, where.master_port = self._address(), server.port
        return info

    def _free_port(self, announced: int) -> int:
        """Return the port for a store that torch has not made: the other nodes know which was announced."""
        return announced

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to be let in."""
        return 1 if self._asked_to_rejoin else int(super().num_nodes_waiting())

    def rejoin(self) -> None:
        """Have the agent believe that a node waits."""
        self._asked_to_rejoin = True

    def leave(self) -> None:
        """Make room at once."""

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        """Tell nobody: there is one node."""

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Never called: the one node counts by itself."""
        raise NotImplementedError

    def shutdown(self) -> bool:
        """Close, and let go of the store's server and its threads."""
        closed = super().shutdown()
        self._shared_tcp_store_server = None
        self._bootstrap_store_info = None
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
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _free_port(self, announced: int) -> int:
        del announced
        return 0


class _Signed(C10dRendezvousBackend):
    """Keeps torch's state in the store, signed; whoever waits on it can be told to stop."""

    def __init__(self, store: dist.Store, run_id: str, key: bytes, stopped: threading.Event) -> None:
        super().__init__(store, run_id)
        self._secret = hashlib.blake2b(key, person=b"nblaunch-state").digest()
        self._stopped = stopped
        self.waiting_thread = 0

    def get_state(self) -> Any:
        """Return the state, if it is one of ours."""
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
        # Of each round anew: the node that hosted the last one may be gone.
        self._shared_tcp_store_server = self._bootstrap_store_info = None
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
        """Return how many nodes wait to be let in: the notebook's agent sees to these, for all."""
        return super().num_nodes_waiting() if self.rdzv.hosting else int(self._asked_to_rejoin)

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        """Tell the other nodes of this round which attempt it is."""
        store.set("nblaunch/attempt", str(attempt))

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Wait until the notebook's ranks are there, and return the number of the attempt."""
        return _wait_for_attempt(store, "nblaunch/attempt", stopped)

    def leave(self) -> None:
        """Make room at once."""
        with contextlib.suppress(RendezvousError):
            self._stop_heartbeats()
            self._op_executor.run(_RendezvousExitOp(), time.monotonic() + _STEP * 10)

    def shutdown(self) -> bool:
        """Close the rendezvous, if this is the notebook's; a node that leaves closes nothing."""
        if self.rdzv.hosting:
            return super().shutdown()
        self.leave()
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return True


class StaticRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, over a store that listens on the address of node 0 only."""

    def __init__(self, rdzv: RendezvousConfig, run_id: str, store: dist.TCPStore) -> None:
        """Take part as node `rdzv.node_rank`."""
        seconds = int(dict(rdzv.conf).get("timeout", _JOIN_SECONDS))
        super().__init__(rdzv.host, store.port, rdzv.node_rank, rdzv.most, run_id, seconds)
        store.set_timeout(timedelta(seconds=seconds))
        self._store = store
        self._hosting = rdzv.hosting
        self._posted = self._read = 0

    def next_rendezvous(self) -> Any:
        """Meet the other nodes, in a store without what NCCL's watchdog has noted in an earlier attempt."""
        if self._hosting and self._store is not None:
            self._store.delete_key(_NCCL_TIMED_OUT)
        return super().next_rendezvous()

    def rejoin(self) -> None:
        """Do nothing: its nodes never change."""

    def leave(self) -> None:
        """Do nothing: its nodes never change."""

    def post_attempt(self, store: dist.Store, attempt: int) -> None:
        """Tell the other nodes."""
        self._posted += 1
        store.set(f"nblaunch/attempt/{self._posted}", str(attempt))

    def read_attempt(self, store: dist.Store, stopped: threading.Event) -> int:
        """Wait until the notebook's ranks are there, and return the number of the attempt."""
        self._read += 1
        return _wait_for_attempt(store, f"nblaunch/attempt/{self._read}", stopped)

    def shutdown(self) -> bool:
        """Let go of the store."""
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
