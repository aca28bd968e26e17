"""Process groups that are formed again behind the same object, with gloo and NCCL and torch 2.14 or later.

Whatever refers to such a group goes on: DDP, FSDP2, a `DeviceMesh`, the groups that the program made. torch
calls this reconfiguring: a group is made with an option, connects its ranks only then, by handles that they
tell each other, and can do so again. torch has no default for the option, so the function that makes every
group is wrapped.

torch refuses to reconfigure a group of several backends (pytorch#187467), which that of a rank with a GPU is,
but not each of the backends by itself. Of NCCL only ProcessGroupNCCL2 can. Its split has no option, so groups
are made one by one instead of being split from the default one. A group in torch's debug mode DETAIL cannot
do it: its wrapper hides the backends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import itertools
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _composable_state, device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from nblaunch import _devices

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_OPTION = "enable_reconfigure"
_BEGIN_DDP, _ASSIGN = "_ddp_init_helper", "_compute_bucket_assignment_by_size"
# In a DDP model that has begun again, and in its pickle: the buckets with which it has.
_BUCKETS = "_nblaunch_buckets"
# torch registers "nccl" as one of two backends: who makes it tells which.
_MAKES_GLOO, _MAKES_NCCL = "_create_gloo_process_group", "_create_nccl2_process_group"
_NCCL_REVOKES = (2, 28)
# Below which severity torch's C++ logs nothing.
_LOGS, _LOG_LEVEL, _FATAL = "libc10.so", "FLAGS_caffe2_log_level", 3
# Hooks of programs have the numbers that torch gives them.
_FORGETS = -1
_CHECK_SECONDS = 1.0
# Above the numbers of all recoveries.
_FIRST = 1_000_000_000
# NCCL takes up to 6 s on many machines. Ranks that are not ready after a minute are replaced.
_CONNECT_SECONDS = 30.0
_OLD, _NEW = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT"
_OTHER_BUCKETS = (
    "its ranks have other models, or were in different steps, before and after DDP had arranged its buckets"
)
# NCCL would revoke what takes longer: the GPU goes on with wrong values, and only the next call raises.
_NO_LIMIT = timedelta(days=1)

# By this torch makes all groups.
_make: Callable[..., Any] = distributed_c10d._new_process_group_helper  # noqa: SLF001
_split_source: Callable[..., Any] = distributed_c10d._get_split_source  # noqa: SLF001
_split: Callable[..., Any] = distributed_c10d.split_group
_begin_ddp: Callable[..., None] = getattr(DistributedDataParallel, _BEGIN_DDP)
_assign: Callable[..., Any] = getattr(dist, _ASSIGN)
# Names of the groups that were made with the option by this module, and not by the program itself.
_names: set[str] = set()
_ddp_models = weakref.WeakKeyDictionary[DistributedDataParallel, int]()
"""DDP models, and their numbers in the order in which they were made."""
_made = 0
"""The number of the next one."""
_replaced = weakref.WeakKeyDictionary[DistributedDataParallel, Any]()
"""The reducer of a DDP model's last forward, if the model has begun again since: a step may still be its."""

left_in_backward = False
"""Whether this job has left a model within its backward pass; see `note_backward`."""

OwnGroups = Mapping[str, tuple[Sequence[int], Sequence[str]]]
"""What a rank tells the others of its groups, by name: their ranks, and the handles of its backends; empty if
it cannot."""
Buckets = Sequence[Sequence[int]]
"""The numbers of the parameters in each of a DDP model's buckets."""


class NotInPlaceError(RuntimeError):
    """Groups could be formed again in place, and some rank has failed to."""


def torch_can() -> bool:
    return _OPTION in inspect.signature(_make).parameters


def able() -> set[str]:
    plugins = distributed_c10d.Backend._plugins.items()  # noqa: SLF001 - torch names the backends only
    makers = {name.lower(): getattr(each.creator_fn, "__name__", "") for name, each in plugins}
    return {name for name, maker in makers.items() if maker in _makers()}


@functools.cache
def _makers() -> frozenset[str]:
    if not torch_can():
        return frozenset()
    # AMD's library, and NCCL before 2.28, cannot revoke what is under way.
    nccl = torch.version.cuda is not None and _devices.nccl_version() >= _NCCL_REVOKES
    return frozenset({_MAKES_GLOO, _MAKES_NCCL} if nccl else {_MAKES_GLOO})


def can(backends: Iterable[str], able: Collection[str], *, detail: bool) -> bool:
    """Return whether a group of these backends can be formed again in place, if those can that are `able`.

    `detail` is whether its debug mode is DETAIL.

    >>> can(["gloo", "nccl"], {"gloo"}, detail=False), can(["gloo", "nccl"], {"gloo", "nccl"}, detail=False)
    (False, True)
    """
    return set(backends) <= set(able) and not detail


def all_can(told: Sequence[OwnGroups]) -> bool:
    """Return whether all groups can be formed again in place: each is there on all of its ranks.

    A rank that joins has none. One that was interrupted within `new_group` may lack a group that others have.
    """
    whole = all(
        member < len(told) and name in told[member] and list(told[member][name][0]) == list(ranks)
        for groups in told
        for name, (ranks, _) in groups.items()
        for member in ranks
    )
    return whole and all(told)


def accept_groups() -> None:
    # The constructor calls it, and so does a copy that is unpickled.
    setattr(DistributedDataParallel, _BEGIN_DDP, _note_ddp)
    if not torch_can():
        return
    distributed_c10d._new_process_group_helper = _new_process_group  # noqa: SLF001 - as above
    distributed_c10d._get_split_source = _get_split_source  # type: ignore[assignment]  # noqa: SLF001
    # Both of these have imported it by name.
    distributed_c10d.split_group = dist.split_group = device_mesh.split_group = _split_group


@functools.wraps(_make)
def _new_process_group(*args: object, **keywords: object) -> Any:
    call = inspect.signature(_make).bind(*args, **keywords)
    name, asked = str(call.arguments["group_name"]), bool(call.arguments.get(_OPTION))
    _names.discard(name)
    # This registers backends as well.
    backends = distributed_c10d.BackendConfig(call.arguments["backend"]).get_device_backend_map().values()
    detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
    if asked or not can(backends, able(), detail=detail):
        return _make(*args, **keywords)
    call.arguments[_OPTION] = True
    group, store = made = _make(*call.args, **call.kwargs)
    # With a tag, torch returns the group that is there.
    if isinstance(group, dist.ProcessGroup) and group.group_name == name:
        _names.add(name)
        rank, size = call.arguments["group_rank"], call.arguments["group_size"]
        # A group of this name and store may have been made before, and destroyed.
        made_here = store.add(f"made/{rank}", 1)
        store.set(f"handles/{made_here}/{rank}", json.dumps(_handles(group)))
        handles = [json.loads(store.get(f"handles/{made_here}/{each}")) for each in range(size)]
        _connect(group, made_here * _FIRST, handles)
        for backend in _of_nccl(group):
            backend.set_timeout(max(call.arguments["timeout"], _NO_LIMIT))
            _rename_setting()
    return made


@functools.wraps(_split_source)
def _get_split_source(group: Any, *args: Any) -> Any:
    return None if str(group.group_name) in _names else _split_source(group, *args)


@functools.wraps(_split)
def _split_group(*args: object, **keywords: object) -> Any:
    asked = inspect.signature(_split).bind(*args, **keywords).arguments
    world = distributed_c10d._world  # noqa: SLF001 - as below
    parent = asked.get("parent_pg") or dist.group.WORLD
    if parent is None or str(parent.group_name) not in _names or not asked.get("split_ranks"):
        return _split(*args, **keywords)
    ranks = _in_order(world.pg_group_ranks[parent])
    parts = [[ranks[each] for each in part] for part in asked["split_ranks"]]
    own = [part for part in parts if dist.get_rank() in part]
    if not own:
        # Names count the groups: ranks that take no part count this one, too, as in torch's own.
        distributed_c10d._process_group_name(parts[0], use_hashed_name=True)  # noqa: SLF001 - as above
        return dist.GroupMember.NON_GROUP_MEMBER
    return dist.new_group(
        own[0],
        timeout=asked.get("timeout"),
        backend=asked.get("backend") or world.pg_map[parent][0],
        pg_options=asked.get("pg_options"),
        group_desc=asked.get("group_desc"),
        use_local_synchronization=True,  # the ranks outside the parent do not call it
        sort_ranks=False,
    )


@functools.wraps(_begin_ddp)
def _note_ddp(
    model: DistributedDataParallel,
    parameters: Sequence[torch.nn.Parameter],
    *more: object,
    **keywords: object,
) -> None:
    """Note the model; give one that begins again the buckets that it had."""
    global _made
    if model not in _ddp_models:
        _ddp_models[model] = _made
        _made += 1
    # These were true of the reducer that it had before.
    model._has_rebuilt_buckets = model._static_graph_delay_allreduce_enqueued = False  # noqa: SLF001
    buckets: Buckets = model.__dict__.get(_BUCKETS, ())
    if sorted(itertools.chain(*buckets)) != list(range(len(parameters))):
        _begin_ddp(model, parameters, *more, **keywords)
        return
    # Those of a new model are one for all, or those of the order in which its parameters were made.
    setattr(dist, _ASSIGN, lambda *_: (buckets[::-1], [model.bucket_bytes_cap] * len(buckets)))
    try:
        _begin_ddp(model, parameters, *more, **keywords)
    finally:
        setattr(dist, _ASSIGN, _assign)


def agree_on_buckets(
    models: Mapping[str, DistributedDataParallel], tell: Callable[[Any], Sequence[Any]]
) -> dict[str, Buckets]:
    """Return the buckets of models that are to begin again. All ranks call it.

    Ranks with different buckets would sum elements of different parameters. A rank that was started again has
    no models, and gets the buckets with each. Those of a model are left out where no rank has arranged them
    yet, or ranks differ. All are left out where a name may be that of another model on another rank: ranks
    have other names, or made the models in another order.
    """
    own: dict[str, Buckets] = dict.fromkeys(
        sorted(models, key=lambda name: _ddp_models.get(models[name], -1)), ()
    )
    for name, model in models.items():
        with contextlib.suppress(Exception):  # of torch: as if they were not arranged
            own[name] = _buckets_of(model)
    told = [each for each in tell(own) if each]
    alike = len({tuple(each) for each in told}) == 1
    names = told[0] if alike else ()
    known = {name: {tuple(map(tuple, each[name])) for each in told if each[name]} for name in names}
    return {name: buckets.pop() for name, buckets in known.items() if len(buckets) == 1}


def _buckets_of(model: DistributedDataParallel) -> Buckets:
    """Return the buckets that DDP has arranged when it knew in which order gradients are ready."""
    if not model._has_rebuilt_buckets:  # noqa: SLF001 - as above
        begun_with: Buckets = model.__dict__.get(_BUCKETS, ())
        return begun_with
    parameters, _ = model._build_params_for_reducer()  # noqa: SLF001 - as DDP itself does
    buckets = model.reducer._get_zeros_like_grad_buckets()  # noqa: SLF001 - as above
    numbers = {id(each): number for number, each in enumerate(parameters)}
    return [[numbers[id(each)] for each in bucket.parameters()] for bucket in buckets]


def numbers_of_models(objects: Iterable[tuple[int, Any]]) -> tuple[dict[int, int], int]:
    """Return the numbers of the DDP models among these objects, by their keys, and that of the next model."""
    models = ((key, each) for key, each in objects if isinstance(each, DistributedDataParallel))
    return {key: _ddp_models[model] for key, model in models if model in _ddp_models}, _made


def number_models(numbers: tuple[Mapping[int, int], int], objects: Mapping[int, Any]) -> None:
    """Give models that came from another rank, and those made later, their numbers there."""
    global _made
    of_keys, _made = numbers
    for key in of_keys.keys() & objects.keys():
        _ddp_models[objects[key]] = of_keys[key]


def ddp_models() -> list[DistributedDataParallel]:
    return list(_ddp_models)


def broadcast_buffers() -> Iterator[torch.Tensor]:
    """Yield the buffers that DDP takes from rank 0 before each forward pass, as those of BatchNorm.

    Until then each rank has its own.
    """
    for model in list(_ddp_models):
        if model.broadcast_buffers and model.process_group is dist.group.WORLD:
            yield from model.modules_buffers


def backends_of(group: Any) -> list[Any]:
    """Return the backends of a group, that for CPU tensors first; the group itself if it is one.

    That is what a backend written in Python is, and it has no device types.
    """
    found: list[Any] = []
    for kind in sorted(getattr(group, "_device_types", ()), key=str):
        with contextlib.suppress(RuntimeError):  # a kind of device that this group is not for
            backend = group._get_backend(kind)  # noqa: SLF001 - torch has no public way
            found += [] if backend in found else [backend]
    return found or [group]


def _rename_setting() -> None:
    """Give ProcessGroupNCCL2 a setting by its new name: of the old one torch 2.15 warns on standard error.

    ProcessGroupNCCL knows the old one alone.
    """
    if torch.__version__ >= "2.15" and _OLD in os.environ:
        os.environ.setdefault(_NEW, os.environ.pop(_OLD))


def _of_nccl(group: Any) -> list[Any]:
    return [each for each in backends_of(group) if "nccl" in each.name()]


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Have torch's C++ log no errors.

    A communicator that does not block answers a revoke with "in progress", which torch 2.15 takes for a
    failure, and writes of it on standard error, for each group and each rank.
    """
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(_LOGS, mode=os.RTLD_NOLOAD | os.RTLD_NOW), _LOG_LEVEL)
    except (OSError, ValueError):  # another torch has it elsewhere
        yield
        return
    before, level.value = level.value, max(level.value, _FATAL)
    try:
        yield
    finally:
        level.value = before


def revoke() -> bool:
    """Have NCCL end what is under way in all groups, which stay; where these cannot, only return False."""
    groups = list(distributed_c10d._world.pg_names)  # noqa: SLF001 - as below
    if not groups or not _are_ours(groups):
        return False
    failed: list[Exception] = []

    def end(backend: Any) -> None:
        try:
            backend.abort()
        except Exception as error:  # noqa: BLE001 - then all groups are aborted in torch's own way
            failed.append(error)

    # Side by side: NCCL may wait for a kernel that is in a stream behind that of another group.
    threads = [
        threading.Thread(target=end, args=(backend,), name="nblaunch-revoke", daemon=True)
        for group in groups
        for backend in _of_nccl(group)
    ]
    with _unlogged():
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return not failed


def form_again(
    store: dist.Store, number: int, rank: int, world_size: int, *, usable: bool
) -> list[tuple[object, str]] | None:
    """Form all groups again, if all ranks can; `number` is that of the recovery, and `store` is for it alone.

    All ranks call it; where those of one rank are not `usable`, none does anything. Returns the models that
    cannot forget a step that did not end, and why; None where nothing was done. Raises `NotInPlaceError` on
    all ranks if one fails.
    """
    tell = functools.partial(_told_by_all, store, rank, world_size)
    told: list[OwnGroups] = tell("groups", _tell(world_size) if usable else {})
    if not all_can(told):
        return None
    if why := _connect_all(number, rank, told):
        # The first has it: the others then wait for that one in vain.
        store.compare_set("failed", "", f"rank {rank}: {why}")
    roots = _fsdp_roots()
    steps = tell("ended", [_rebuilt(), [_is_within_step(root) for root in roots]])
    if store.check(["failed"]):
        raise NotInPlaceError(store.get("failed").decode())
    differ = _where_models_differ([each[0] for each in steps], told)
    if differ:
        # A model that was made anew lives on until its cycles are collected, on each rank at another time.
        gc.collect()
        differ = _where_models_differ(tell("collected", _rebuilt()), told)
    lost: list[tuple[object, str]] = []
    for model in list(_ddp_models):
        why = ""
        if _name_of(model.process_group) not in differ:
            forget_at_next_step(model)
        else:
            # Ranks rebuild buckets after their first backward. One that failed before that has others.
            of_default = model.process_group is dist.group.WORLD
            why = "" if of_default and begin_again(model, ()) else _OTHER_BUCKETS
        if why:
            lost.append((model, why))
            del _ddp_models[model]  # it refuses from now on
    return lost + _forget_begun(roots, [each[1] for each in steps])


def _told_by_all(store: dist.Store, rank: int, world_size: int, what: str, own: Any) -> list[Any]:
    store.set(f"{what}/{rank}", json.dumps(own))
    return [json.loads(store.get(f"{what}/{each}")) for each in range(world_size)]


def _rebuilt() -> dict[str, list[bool]]:
    """Return for the models of each group, in the order of their making, if they have arranged buckets."""
    found: dict[str, list[bool]] = {}
    for model in sorted(_ddp_models, key=_ddp_models.__getitem__):
        rebuilt = bool(model._has_rebuilt_buckets)  # noqa: SLF001 - torch's own
        found.setdefault(_name_of(model.process_group), []).append(rebuilt)
    return found


def _where_models_differ(rebuilt: Sequence[Mapping[str, list[bool]]], told: Sequence[OwnGroups]) -> set[str]:
    """Return the groups whose ranks have other models, or are in other steps with these.

    Where a rank has one model more, it is not known which of another rank's models is which of its own.
    """
    return {
        name
        for groups in told
        for name, (ranks, _) in groups.items()
        if any(rebuilt[each].get(name) != rebuilt[ranks[0]].get(name) for each in ranks)
    }


def _name_of(group: Any) -> str:
    return str(distributed_c10d._world.pg_names.get(group))  # noqa: SLF001 - as above


def forget_steps(tell: Callable[[Any], Sequence[Any]], *, joins: bool) -> list[tuple[object, str]]:
    """Have models of FSDP2 forget a step that did not end on some rank; return those that cannot, and why.

    All ranks call it. One that `joins` has no models yet.
    """
    roots = _fsdp_roots()
    told = tell(None if joins else [_is_within_step(root) for root in roots])
    return _forget_begun(roots, [each for each in told if each is not None])


def _forget_begun(roots: Sequence[Any], told: Sequence[Sequence[bool]]) -> list[tuple[object, str]]:
    lost: list[tuple[object, str]] = []
    # A rank that is not in the step, too, drops gradients: shards of one model must be of the same steps.
    for root, begun in zip(roots, begun_on_some(told, len(roots)), strict=True):
        if begun and (why := _forgotten(root, _forget_step)):
            lost += [(module, why) for module in root._modules]  # noqa: SLF001 - FSDP2's own
    return lost


def begun_on_some(told: Sequence[Sequence[bool]], number: int) -> list[bool]:
    """Return for each of a rank's models, of which it has this number, whether some rank is within a step.

    Ranks tell of their models in the order in which these were made. Where they have different numbers of
    them, all are taken together.

    >>> begun_on_some([[True, False], [False, False]], 2), begun_on_some([[False], [True, False]], 1)
    ([True, False], [True])
    """
    if {len(each) for each in told} == {number}:
        return [any(each) for each in zip(*told, strict=True)]
    return [any(map(any, told))] * number


def _connect_all(number: int, rank: int, told: Sequence[OwnGroups]) -> str:
    """Connect all groups; return the error, "" if there is none."""
    named = {str(name): group for group, name in distributed_c10d._world.pg_names.items()}  # noqa: SLF001
    try:
        # Groups share ranks, so all take them in one order.
        for name, (ranks, _) in sorted(told[rank].items()):
            handles = [told[each][name][1] for each in ranks]
            _connect(named[name], number, handles, timedelta(seconds=_CONNECT_SECONDS))
    except Exception as error:  # noqa: BLE001 - of torch, gloo or NCCL: all ranks then make new groups
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _tell(world_size: int) -> OwnGroups:
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        return {}
    world = distributed_c10d._world  # noqa: SLF001 - torch has no public way to its groups
    groups = {str(name): group for group, name in world.pg_names.items()}
    # A `new_group` that was interrupted has named its group, and has not set yet which ranks it has.
    if not _are_ours(groups.values()) or not all(group in world.pg_group_ranks for group in groups.values()):
        return {}
    return {name: (_in_order(world.pg_group_ranks[group]), _handles(group)) for name, group in groups.items()}


def _are_ours(groups: Iterable[Any]) -> bool:
    names = distributed_c10d._world.pg_names  # noqa: SLF001 - as above
    return {str(names.get(group)) for group in groups} <= _names


def _in_order(numbers: Mapping[int, int]) -> list[int]:
    return sorted(numbers, key=numbers.__getitem__)


def _handles(group: Any) -> list[str]:
    return [str(each.get_reconfigure_handle()) for each in backends_of(group)]


def _connect(
    group: Any, number: int, handles: Sequence[Sequence[str]], timeout: timedelta | None = None
) -> None:
    reconfigure: Callable[..., Any] = getattr(distributed_c10d, "_reconfigure")  # noqa: B009 - from 2.14 on
    for backend, of_backend in zip(backends_of(group), zip(*handles, strict=True), strict=True):
        reconfigure(number, list(of_backend), backend, timeout).wait()


def _fsdp_roots() -> list[Any]:
    """Return what FSDP2 keeps of its models, in the order in which these were made."""
    kept = [each() for each in list(_composable_state._module_state_mapping.values())]  # noqa: SLF001
    kind = getattr(sys.modules.get(_FSDP2), "FSDPState", ())
    return [each for each in kept if isinstance(each, kind) and each._is_root]  # noqa: SLF001


def _forgotten(model: Any, forget: Callable[[Any], None]) -> str:
    """Have a model forget a step that did not end: its next one would wait for what is left of that.

    Returns why it cannot, "" if it can.
    """
    try:
        forget(model)
    except Exception as error:  # noqa: BLE001
        # FSDP2 refuses (RuntimeError) where another model has queued its reduction. A model that is left in
        # the middle of a step, by whatever error, must not be used: the user is told, with the error.
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def begin_again(model: DistributedDataParallel, buckets: Buckets) -> bool:
    """Have a model begin again with the present default group, as one that is unpickled; return if it could.

    Without `buckets` it has those of a new model. Its communication hook would be gone.
    """
    if getattr(model, "_comm_hooks", None):
        return False
    try:
        before = model.reducer
        model.process_group = distributed_c10d._get_default_group()  # noqa: SLF001 - as DDP itself does
        setattr(model, _BUCKETS, buckets)
        model.__setstate__(model.__getstate__())
    except Exception:  # noqa: BLE001 - of torch: the model is named as one that is gone
        return False
    if _replaced.setdefault(model, before) is not before:
        before._remove_autograd_hooks()  # noqa: SLF001 - what DDP itself calls; it has seen no forward
    forget_at_next_step(model)
    return True


def renew_optimizers(before: Any) -> bool:
    """Give optimizers that share their states (ZeRO) the present default group for the one before.

    Each rank would take its part of a step, and could not tell it to the others. Returns if there were any.
    """
    kind = getattr(sys.modules.get(_ZERO), "ZeroRedundancyOptimizer", ())
    spread = [each for each in gc.get_objects() if issubclass(type(each), kind)] if kind else []
    renewed = [each for each in spread if each.process_group is before]
    for each in renewed:
        each.process_group = distributed_c10d._get_default_group()  # noqa: SLF001 - as DDP itself does
    return bool(renewed)


def forget_at_next_step(model: DistributedDataParallel) -> None:
    """Have a DDP model forget a step that did not end, once it begins another one.

    Not before: the forward and the backward of a step may be in two cells, with the mistake between them. A
    reducer that has forgotten the forward leaves each rank with gradients of its own, and says nothing.
    """
    hooks: Any = model._forward_pre_hooks  # noqa: SLF001 - its key is the same on all ranks, and not the next one
    hooks[_FORGETS] = _forget_reduction
    hooks.move_to_end(_FORGETS, last=False)


def _forget_reduction(model: DistributedDataParallel, *_: object) -> None:
    if not torch.is_grad_enabled():
        return
    model._forward_pre_hooks.pop(_FORGETS, None)  # noqa: SLF001 - as above
    if (before := _replaced.pop(model, None)) is not None:
        before._remove_autograd_hooks()  # noqa: SLF001 - as above
    of_default = model.process_group is dist.group.WORLD
    if model.static_graph and of_default and not model._has_rebuilt_buckets:  # noqa: SLF001 - as above
        # What it has counted in its first step cannot be reset.
        model.reducer._remove_autograd_hooks()  # noqa: SLF001 - as above
        model.__setstate__(model.__getstate__())
        return
    # What torch itself calls with a group that has become smaller.
    model._update_process_group(model.process_group)  # noqa: SLF001 - as above


def _forget_step(root: Any) -> None:
    root._reset_iter_state()  # noqa: SLF001 - FSDP2's own; before torch 2.15 it keeps gradients
    for state in root._state_ctx.all_states:  # noqa: SLF001 - as above
        for param in itertools.chain.from_iterable(each.fsdp_params for each in state._fsdp_param_groups):  # noqa: SLF001
            # Those of a step that ended early, or was not to be reduced, would be added to the next one's.
            for each in (param.sharded_param, getattr(param, "_unsharded_param", None)):
                if each is not None:
                    each.grad = None
            if getattr(param, "unsharded_accumulated_grad", None) is not None:
                param.unsharded_accumulated_grad = None


def note_backward() -> None:
    """Note, once a job has failed, whether it has left a model within its backward pass.

    The main thread calls this. DDP looks with a lock, which a backward pass on a thread of the program may
    hold while it waits for other ranks.
    """
    global left_in_backward
    found: list[bool] = []
    checking = threading.Thread(target=lambda: found.append(_is_left_in_backward()), daemon=True)
    with contextlib.suppress(RuntimeError):  # the system refuses a thread: the group is formed again
        checking.start()
        checking.join(_CHECK_SECONDS)
    left_in_backward = not found or found[0]


def _is_left_in_backward() -> bool:
    """Return whether a model is within a backward pass that has ended early: its next step would be wrong.

    FSDP2 would add the gradients that were not reduced to those of the next step. DDP would refuse it.
    """
    alive = [each for each in ddp_models() if each.process_group in distributed_c10d._world.pg_names]  # noqa: SLF001
    # Some forget it already, at their next step.
    left = (each for each in alive if _FORGETS not in each._forward_pre_hooks)  # noqa: SLF001 - torch's own
    return any(map(_has_unreduced, left)) or any(map(_is_in_backward, _fsdp_roots()))


def _has_unreduced(model: DistributedDataParallel) -> bool:
    try:
        model._check_reducer_finalized()  # noqa: SLF001 - DDP's own, which raises then
    except RuntimeError:
        return True
    return False


def _is_in_backward(root: Any) -> bool:
    return bool(getattr(root._state_ctx, "post_backward_final_callback_queued", False))  # noqa: SLF001


def _is_within_step(root: Any) -> bool:
    try:
        return not _is_idle(root)
    except Exception:  # noqa: BLE001 - what is not known is taken to be within one, on all ranks
        return True


def _is_idle(state: Any) -> bool:
    """Whether FSDP2 is between two steps: a forward without its backward leaves an order behind."""
    context, every = state._state_ctx, state._state_ctx.all_states  # noqa: SLF001 - as above
    begun = context.post_backward_final_callback_queued or state._comm_ctx.post_forward_order  # noqa: SLF001
    groups = [group for each in every for group in each._fsdp_param_groups]  # noqa: SLF001
    idle = all(each._training_state.name == "IDLE" for each in (*every, *groups))  # noqa: SLF001
    return not begun and idle and all(group.is_sharded for group in groups)
