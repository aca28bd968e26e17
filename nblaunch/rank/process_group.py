"""The default process group of a rank, and the user's own calls of `init_process_group`.

torchelastic's agent already hosts a store for the ranks. A program that brings its own address
(`MASTER_ADDR`/`MASTER_PORT` set in the cell, `tcp://...`) would, under an agent, wait for a server that
nobody starts. So every group that is made through an address is made over the agent's store, each under
a prefix of its own: no group finds keys of an earlier one (an earlier attempt, an earlier call).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from nblaunch.protocol.messages import Tally
from nblaunch.rank import flight_recorder, in_place, optimizer_steps

_STORE_TIMEOUT = timedelta(seconds=300)
_NAMES_PER_RECOVERY = 1_000_000
# An abort takes NCCL a second or two: it frees memory, and joins its proxy threads.
_ABORT_SECONDS = 10.0
_SYNCHRONIZE_SECONDS, _MOMENT_SECONDS = 5.0, 0.5
# The process ends in any case.
_LEAVE_SECONDS = 3.0


class AbortError(RuntimeError):
    """NCCL does not abort its operations."""


class UnusableError(RuntimeError):
    """The CUDA context of this process is broken: every call of CUDA fails from now on."""


@dataclass(frozen=True, slots=True)
class Formed:
    """How the groups were formed again."""

    in_place: bool = False
    """Whether they go on, and all that refers to them; without that they are gone but for the default one."""
    lost: Sequence[tuple[object, str]] = ()
    """Models that do not go on with them, and why."""
    why_not: str = ""
    """What went wrong in forming them in place, if that was tried."""
    stepped: Sequence[Optimizer] = ()
    """Optimizers whose step the GPU ran behind an aborted collective."""


class Groups:
    """The groups of this process at some moment."""

    def __init__(self) -> None:
        # Copied at once: the control thread asks while the main thread may make or end groups.
        world = distributed_c10d._world  # noqa: SLF001 - what `get_process_group_ranks` reads, one by one
        self.default = dist.group.WORLD
        self.uses_nccl = _uses_nccl()
        """Whether the default one uses NCCL."""
        self.ranks = {group: tuple(ranks) for group, ranks in list(world.pg_group_ranks.items())}
        self.named = {str(name): group for group, name in list(world.pg_names.items())}
        self.names = {name: self.ranks.get(group, ()) for name, group in self.named.items()}
        """Name -> the group's ranks."""

    def counts(self) -> dict[tuple[str, str], int | None]:
        """Return how many operations were called, for each group by its name, and each of its backends.

        None where a backend does not count. Calls nothing that waits: the backends only tell their number.
        """
        return {
            (name, backend): number
            for name, group in self.named.items()
            for backend, number in _numbers(group).items()
        }

    def tally(self, group: str, backend: str, called: int | None, recorded: int | None = None) -> Tally:
        """Return what is known of a group, with the names of it that all ranks have."""
        title = flight_recorder.title(group, str(getattr(self.named[group], "group_desc", "")))
        return Tally(group, title, backend, self.names[group], called, recorded)


_original: Callable[..., None] = distributed_c10d.init_process_group
_calls: Counter[str] = Counter()
_ours: Any = None
_agent_store: dist.Store | None = None
# Taken when the rank starts, before the user's code can set these variables to an address of its own.
_agent_address: tuple[str, int] = ("127.0.0.1", 0)
# Not torchelastic's restart count: that of a node that joined late is another one.
_attempt = 0
_timeout: timedelta | None = None
_device = torch.device("cpu")
_formed_with: dict[str, Any] | None = None
"""The arguments of the default group, with which another one can take its place."""
_cut_here = False
"""Whether this rank has shut connections of the group by itself: it must be formed again."""
_before: dict[tuple[str, str], int | None] = {}
"""What the groups had been called for when the last job ended."""
_aborting: threading.Thread | None = None
_aborted: Groups | None = None
"""The groups as they were before an abort, with which torch forgets them."""
_stepped: list[Optimizer] = []
"""The optimizers whose step the GPU had not ended when an abort began."""


def connect() -> None:
    """Connect to the agent's store, over which the group will be formed."""
    _store("default", 0)


def form(backend: str, device: torch.device, timeout: float | None = None, *, joins: bool = False) -> None:
    """Form the default group of all ranks over the agent's store.

    `device_id` has NCCL connect the ranks at once. That costs every run the connection (a second or so, and
    some hundred MB of each GPU), also a run without a collective. It is worth it: otherwise NCCL would
    connect inside the first collective, and a rank whose peers do not come could neither report which
    collective it is in nor be freed. With it the first collective is recorded and can be aborted like any
    other, and an error of NCCL's ends the launch before the user's code begins. The price beside the time:
    torch makes other groups by splitting this one, so `new_group(use_local_synchronization=True)` waits for
    all ranks, unless groups are formed again in place (`in_place`).

    With `joins` it is formed by `form_again`, with ranks that form theirs again.
    """
    global _device, _formed_with, _ours, _timeout
    _device = device
    keywords: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if timeout is not None:
        _timeout = keywords["timeout"] = timedelta(seconds=timeout)
    _formed_with = {"backend": backend, **keywords}
    if joins:
        return
    _original(
        backend=backend,
        store=_store("default", 0),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        **keywords,
    )
    _ours = dist.group.WORLD


def form_again(number: int, device: torch.device, cut: Callable[[], None]) -> Formed:
    """Form the groups, which may be broken, again in place if that can be done.

    Else replace the default group by a new one of the same kind: groups that the program made itself
    (`new_group`, `DeviceMesh`) are gone with the old one. `cut` cuts the connections of the old groups.
    Raises `AbortError` if NCCL does not abort the old ones, `UnusableError` if CUDA cannot be used any more.
    """
    global _aborted, _cut_here, _ours, _stepped
    check_context(device, wait=False)
    _end_nccl()
    # After the abort: to NCCL a broken connection is an error, which its watchdog answers with an abort().
    cut()
    check_context(device)
    formed = replace(_form_again_in_place(number), stepped=_stepped)
    _stepped = []
    if not formed.in_place:
        backends = {backend for _, backend in groups().counts()}
        leave()
        flight_recorder.bury(backends)
        _ours = None
    _aborted = None
    _cut_here = False
    # No name is used again: a `DeviceMesh` that is gone looks its groups up by name, and would find others.
    distributed_c10d._world.group_count = number * _NAMES_PER_RECOVERY  # noqa: SLF001 - all ranks count alike
    if formed.in_place:
        flight_recorder.bury_entries(Groups().counts())
        _barrier(device)
        return formed
    # Exceptions hold the old group in cycles: its threads and connections stay until these are collected.
    gc.collect()
    if _formed_with is None:
        return formed
    arguments = {**_formed_with, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    _original(**arguments, store=_store("recovered", number))
    _know_all_ranks()
    _ours = dist.group.WORLD
    _barrier(device)
    # Groups are numbered in the order in which they are made, and the barrier is the last that is recorded.
    flight_recorder.bury({backend for _, backend in _before}, but_the_newest=True)
    return formed


def _form_again_in_place(number: int) -> Formed:
    if not in_place.torch_can():
        return Formed()
    # The groups keep the store that they were made with: it may have been cut, or be the program's own.
    usable = _agent_store is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        lost = in_place.form_again(_store("in place", number), number, rank, world_size, usable=usable)
    except in_place.NotInPlaceError as error:
        return Formed(why_not=str(error))
    return Formed() if lost is None else Formed(in_place=True, lost=lost)


def _barrier(device: torch.device) -> None:
    """Wait until all ranks have formed their groups; what is called from now on counts."""
    global _before
    # The program may have formed a default group without GPUs.
    on_gpu = device.type == "cuda" and _uses_nccl()
    dist.barrier(device_ids=[device.index or 0] if on_gpu else None)
    _before = Groups().counts()


def note_cut() -> None:
    """Note that this rank has shut connections of the group, which no longer works."""
    global _cut_here
    _cut_here = True


def is_cut() -> bool:
    """Whether it has, since the group was formed."""
    return _cut_here


def called() -> tuple[Tally, ...]:
    """Return what has been called since the last job ended, for the groups in which anything has been."""
    global _before
    now, before = Groups(), _before
    _before = now.counts()
    found = []
    for key, number in _before.items():
        earlier = before.get(key) or 0
        if number is not None and number != earlier:
            # A group that counts from the start has taken the place of another one.
            found.append(now.tally(*key, number - earlier if number > earlier else number))
    return tuple(found)


def groups() -> Groups:
    """Return the groups of this process; once they are aborted, as they were before."""
    return _aborted or Groups()


def uses_nccl() -> bool:
    """Whether the default group uses NCCL, or did so until it was aborted; asks torch for nothing else."""
    return _aborted.uses_nccl if _aborted is not None else _uses_nccl()


def rethrows_errors() -> bool:
    """Whether it uses the NCCL of which TORCH_NCCL_RETHROW_CUDA_ERRORS decides; nccl2 does not ask for it."""
    return _uses_nccl() and flight_recorder.LEGACY in _numbers(dist.group.WORLD)


def has_open_operations() -> bool:
    """Whether the GPUs have operations of NCCL that have not ended, as far as is known."""
    return uses_nccl() and flight_recorder.is_busy({backend for _, backend in groups().counts()})


def begin_abort(then: Callable[[], None] = lambda: None) -> None:
    """Have NCCL abort all operations of all groups; do not wait, since NCCL may wait for the device.

    Does nothing while such an abort is under way.
    """
    global _aborted, _aborting
    if _aborting is not None and _aborting.is_alive():
        return
    if _aborted is None and dist.is_initialized():
        _aborted = Groups()
    _aborting = threading.Thread(target=_abort, args=(then,), name="nblaunch-abort", daemon=True)
    _aborting.start()


def end_abort(seconds: float = _ABORT_SECONDS) -> bool:
    """Wait for an abort that is under way; return whether it has ended."""
    if _aborting is not None:
        _aborting.join(seconds)
        return not _aborting.is_alive()
    return True


def check_context(device: torch.device, *, wait: bool = True) -> None:
    """Raise `UnusableError` if CUDA cannot be used any more; `wait` a moment for its work under way."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return
    # A device-side assertion is known once the CUDA kernel has run, which may take any time.
    if found := _ask_cuda(torch.cuda.synchronize if wait else _query, device, _SYNCHRONIZE_SECONDS):
        raise UnusableError(found)


def is_busy(device: torch.device) -> bool:
    """Return whether the GPU has work of this rank's: a copy from it would wait for that."""
    try:
        return device.type == "cuda" and torch.cuda.is_initialized() and not _query(device)
    except RuntimeError:  # CUDA is broken: a copy raises, and does not wait
        return False


def gpu_is_done() -> bool:
    """Whether this rank's GPU has ended all work that it was given; waits a moment for that."""
    known = _device.type == "cuda" and torch.cuda.is_initialized()
    return known and _ask_cuda(torch.cuda.synchronize, _device, _MOMENT_SECONDS) == ""


def broken() -> str:
    """Return CUDA's error if this rank's context is broken, as far as CUDA says so within a moment."""
    known = _device.type == "cuda" and torch.cuda.is_initialized()
    return (_ask_cuda(_query, _device, _MOMENT_SECONDS) or "") if known else ""


def _query(device: torch.device) -> bool:
    return bool(torch.cuda.current_stream(device).query())


def _ask_cuda(call: Callable[[torch.device], object], device: torch.device, seconds: float) -> str | None:
    """Ask CUDA on a thread; return its error, "" without one, None without an answer within `seconds`."""
    found: list[str] = []

    def ask() -> None:
        try:
            call(device)
        except RuntimeError as error:
            found.append(str(error).partition("\n")[0])
        else:
            found.append("")

    thread = threading.Thread(target=ask, name="nblaunch-synchronize", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _end_nccl() -> None:
    """Have NCCL abort all groups: `destroy_process_group` would wait for open operations, without a bound."""
    if _uses_nccl():
        begin_abort()
    if not end_abort():
        msg = f"NCCL did not abort the old one within {_ABORT_SECONDS:g} s"
        raise AbortError(msg)
    if _uses_nccl() and _aborted is not None and _aborted.default is not dist.group.WORLD:
        # The abort that was waited for was of a group that the program has replaced since.
        begin_abort()
        end_abort()


def _abort(then: Callable[[], None]) -> None:
    global _stepped
    with contextlib.suppress(RuntimeError):  # CUDA is broken
        _stepped = optimizer_steps.unfinished() or _stepped
    with contextlib.suppress(Exception):  # a group that is broken already cannot be aborted
        if not in_place.revoke():
            distributed_c10d._abort_process_group()  # noqa: SLF001 - torch's only way to end a stuck NCCL call
    then()


def _numbers(group: Any) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for backend in in_place.backends_of(group):
        found[str(backend.name())] = None
        with contextlib.suppress(RuntimeError):  # it does not count
            number = backend._get_sequence_number_for_group()  # noqa: SLF001 - as torch's own debug wrapper
            found[str(backend.name())] = int(number)
    return found


def _uses_nccl() -> bool:
    return dist.is_initialized() and "nccl" in str(distributed_c10d.get_backend_config())


def _know_all_ranks() -> None:
    """Set the members of the default group in its options.

    torch (pytorch#192106; 2.13 still does) takes only the first NCCL or gloo group of a process for the one
    of all ranks. Splitting another one, as `init_device_mesh` does, ends in a SIGSEGV.
    """
    default = dist.group.WORLD
    if not isinstance(default, dist.ProcessGroup):
        return
    for backend in in_place.backends_of(default):
        with contextlib.suppress(Exception):  # a registered backend may have no such options
            options = backend.options
            if not options.global_ranks_in_group:
                options.global_ranks_in_group = list(range(default.size()))


def leave(*, abort: bool = False) -> None:
    """Leave the default process group, if there is one; with `abort`, abort NCCL's open operations first."""
    if abort and _uses_nccl():
        begin_abort()
        end_abort(_LEAVE_SECONDS)
    elif dist.is_initialized() and not abort:
        dist.destroy_process_group()


def accept_user_calls() -> None:
    """Make `init_process_group` replace the group that was made before the user's code ran."""
    distributed_c10d.init_process_group = _init_process_group
    dist.init_process_group = _init_process_group


@functools.wraps(_original)
def _init_process_group(*args: object, **keywords: object) -> None:
    global _aborted, _formed_with, _ours
    if _ours is not None:
        if dist.is_initialized() and dist.group.WORLD is _ours:
            dist.destroy_process_group()
        _ours = None
    call = inspect.signature(_original).bind(*args, **keywords)
    if _timeout is not None and call.arguments.get("timeout") is None:
        # In a session a collective may wait while the user reads a debugger's prompt.
        call.arguments["timeout"] = _timeout
    address = _address(call.arguments)
    if address is not None:
        where, rank, world_size = address
        call.arguments.pop("init_method", None)
        call.arguments["store"] = _store(where, _calls[where])
        call.arguments["rank"], call.arguments["world_size"] = rank, world_size
        _calls[where] += 1
    _original(*call.args, **call.kwargs)
    _aborted = None
    flight_recorder.count_from({})
    _know_all_ranks()
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
        return None  # torch's own error names what is missing
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
        _agent_store = dist.TCPStore(*_agent_address, is_master=False, timeout=_STORE_TIMEOUT)
    return dist.PrefixStore(f"nblaunch/{_attempt}/{where}/{number}", _agent_store)


def own_store(where: str = "watch") -> dist.Store:
    """Return the agent's store over a connection of its own, for a thread beside the main one."""
    store = dist.TCPStore(*_agent_address, is_master=False, timeout=_STORE_TIMEOUT)
    return dist.PrefixStore(f"nblaunch/{_attempt}/{where}", store)


def attempt() -> int:
    """Return the number of the attempt that this rank belongs to now."""
    return _attempt


def forget_store() -> int:
    """Connect again when the next group is formed: the connection to this port is about to be cut."""
    global _agent_store
    _agent_store = None
    return _agent_address[1]


def remember_agent_address(attempt: int) -> None:
    global _agent_address, _attempt
    _attempt = attempt
    _agent_address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def go_on_in(attempt: int) -> None:
    """Find the other ranks of another attempt when the next group is formed: some of them may be new."""
    global _attempt
    _attempt = attempt
    _calls.clear()
