"""The default process group of a rank, and the user's own calls of `init_process_group`.

torchelastic's agent already hosts a store for the ranks. A program that brings its own address
(`MASTER_ADDR`/`MASTER_PORT` set in the cell, `tcp://...`) would, under an agent, wait for a server that
nobody starts. So every group that is made through an address is made over the agent's store, each under
a prefix of its own: keys of a group that is gone (an earlier attempt, an earlier call) are never met.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

_STORE_TIMEOUT = timedelta(seconds=300)
_NAMES_PER_HEAL = 1_000_000
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_original: Callable[..., None] = distributed_c10d.init_process_group
_calls: Counter[str] = Counter()
_ours: Any = None
_agent_store: dist.Store | None = None
_first_alive = 0
_formed_with: dict[str, Any] | None = None
"""What the default group was made with, so that another one can take its place."""


def form(backend: str, device: torch.device, timeout: float | None = None) -> None:
    """Form the default group of all ranks over the agent's store."""
    global _formed_with, _ours
    keywords: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if timeout is not None:
        keywords["timeout"] = timedelta(seconds=timeout)
    _original(
        backend=backend,
        store=_store("default", 0),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        **keywords,
    )
    _ours = dist.group.WORLD
    _formed_with = {"backend": backend, **keywords}


def form_again(number: int, device: torch.device) -> None:
    """Replace the default group, which may be broken, by a new one of the same kind; check it.

    Groups that the program made itself (`new_group`, `DeviceMesh`) are gone with the old one.
    """
    global _first_alive, _ours
    leave()
    _ours = None
    # No name is used again: a `DeviceMesh` that is gone looks its groups up by name, and would find others.
    distributed_c10d._world.group_count = number * _NAMES_PER_HEAL  # noqa: SLF001 - all ranks count alike
    # What was raised in the old group holds it in cycles: its threads and connections stay until they go.
    gc.collect()
    if _formed_with is None:
        return
    arguments = {**_formed_with, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    _original(**arguments, store=_store("healed", number))
    _ours = dist.group.WORLD
    dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)
    # Groups are numbered in the order in which they are made, and the barrier is the last that is recorded.
    _first_alive = max((int(entry.get("pg_id", 0)) for entry in recorded() or ()), default=0)


def recorded() -> list[dict[str, Any]] | None:
    """Return what the flight recorder remembers, oldest first; None where there is none."""
    try:
        found: dict[str, Any] = json.loads(_distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]  # noqa: SLF001
    except Exception:  # noqa: BLE001 - an older torch, or no recorder: the stacks are enough
        return None
    return list(found.get("entries", ()))


def first_alive() -> int:
    """Return the flight recorder's number of the oldest group that may still be alive."""
    return _first_alive


def prefer_loopback() -> None:
    """Keep gloo and NCCL off the network, unless the user chose an interface: one machine needs none."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _LOOPBACK)


def leave() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def accept_user_calls() -> None:
    """Make `init_process_group` replace the group that was made before the user's code ran."""
    distributed_c10d.init_process_group = _init_process_group
    dist.init_process_group = _init_process_group


@functools.wraps(_original)
def _init_process_group(*args: object, **keywords: object) -> None:
    global _formed_with, _ours
    if _ours is not None:
        if dist.is_initialized() and dist.group.WORLD is _ours:
            dist.destroy_process_group()
        _ours = None
    call = inspect.signature(_original).bind(*args, **keywords)
    address = _address(call.arguments)
    if address is not None:
        where, rank, world_size = address
        call.arguments.pop("init_method", None)
        call.arguments["store"] = _store(where, _calls[where])
        call.arguments["rank"], call.arguments["world_size"] = rank, world_size
        _calls[where] += 1
    _original(*call.args, **call.kwargs)
    same = ("backend", "timeout", "pg_options", "device_id")
    _formed_with = {name: call.arguments[name] for name in same if name in call.arguments}


def _address(arguments: dict[str, Any]) -> tuple[str, int, int] | None:
    """Return (address, rank, world size) of a call that meets its peers at an address, else None."""
    method = arguments.get("init_method") or "env://"
    scheme = urlsplit(method).scheme
    if arguments.get("store") is not None or scheme not in ("env", "tcp"):
        return None
    query = parse_qs(urlsplit(method).query)
    try:
        rank = _number(arguments.get("rank", -1), query.get("rank"), "RANK")
        world_size = _number(arguments.get("world_size", -1), query.get("world_size"), "WORLD_SIZE")
    except (KeyError, ValueError):
        return None  # torch says what is missing
    if scheme == "tcp":
        return method.partition("?")[0], rank, world_size
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", rank, world_size


def _number(argument: int | None, query: list[str] | None, variable: str) -> int:
    if argument is not None and argument >= 0:
        return int(argument)
    return int(query[0]) if query else int(os.environ[variable])


def _store(where: str, number: int) -> dist.Store:
    """Return the agent's store under a prefix that no other group has had."""
    global _agent_store
    if _agent_store is None:
        _agent_store = dist.TCPStore(
            _agent_address[0], _agent_address[1], is_master=False, timeout=_STORE_TIMEOUT
        )
    return dist.PrefixStore(f"nblaunch/{_attempt}/{where}/{number}", _agent_store)


# Taken when the rank starts, before the user's code can set these variables to an address of its own.
_agent_address: tuple[str, int] = ("127.0.0.1", 0)
# Not torchelastic's restart count: that of a node that joined late is another one.
_attempt = 0


def agent_address() -> tuple[str, int]:
    """Return where the agent's store is."""
    return _agent_address


def forget_store() -> None:
    """Connect anew when a group is formed next: the connection is about to be cut."""
    global _agent_store
    _agent_store = None


def remember_agent_address(attempt: int) -> None:
    """Note where the agent's store is, and which attempt this is."""
    global _agent_address, _attempt
    _attempt = attempt
    _agent_address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
