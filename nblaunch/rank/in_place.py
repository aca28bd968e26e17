"""Process groups that are formed again behind the same object, with gloo and torch 2.14 or later.

Whatever refers to such a group goes on: DDP, FSDP2, a `DeviceMesh`, the groups that the program made. torch
calls this reconfiguring: a group is made with an option, connects its ranks only then, by handles that they
tell each other, and can do so again. torch has no default for the option, so the function that makes every
group is wrapped.

torch does not offer it for a group of several backends (pytorch#187467), which that of a rank with a GPU is;
a group of NCCL alone would refuse CPU tensors. A group in torch's debug mode DETAIL cannot do it either: its
wrapper hides gloo.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"
_OPTION = "enable_reconfigure"

# By this torch makes all groups.
_make: Callable[..., Any] = distributed_c10d._new_process_group_helper  # noqa: SLF001
# Names of the groups that were made with the option by this module, and not by the program itself.
_names: set[str] = set()

OwnGroups = Mapping[str, tuple[Sequence[int], str]]
"""What a rank tells the others of its groups, by name: their ranks, and its handle; empty if it cannot."""


def torch_can() -> bool:
    """Whether this torch can form a group again in place."""
    return _OPTION in inspect.signature(_make).parameters


def can(backend: str, *, detail: bool, torch: bool = True) -> bool:
    """Return whether a group of this backend can be formed again in place, if `torch` can.

    `detail` is whether its debug mode is DETAIL.

    >>> can("gloo", detail=False), can("cpu:gloo,cuda:nccl", detail=False)
    (True, False)
    """
    backends = {each.rpartition(":")[2] for each in backend.lower().split(",")}
    return torch and backends == {"gloo"} and not detail


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
    """Have torch make groups from now on so that they can be formed again in place."""
    if torch_can():
        distributed_c10d._new_process_group_helper = _new_process_group  # noqa: SLF001 - as above


@functools.wraps(_make)
def _new_process_group(*args: object, **keywords: object) -> Any:
    call = inspect.signature(_make).bind(*args, **keywords)
    name, asked = str(call.arguments["group_name"]), bool(call.arguments.get(_OPTION))
    _names.discard(name)
    detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
    if asked or not can(str(call.arguments["backend"]), detail=detail):
        return _make(*args, **keywords)
    call.arguments[_OPTION] = True
    group, store = made = _make(*call.args, **call.kwargs)
    # With a tag, torch returns the group that is there.
    if isinstance(group, dist.ProcessGroup) and group.group_name == name:
        _names.add(name)
        rank = call.arguments["group_rank"]
        store.set(f"handle/{rank}", _handle(group))
        _connect(
            group, 0, [store.get(f"handle/{each}").decode() for each in range(call.arguments["group_size"])]
        )
    return made


def form_again(
    store: dist.Store, number: int, rank: int, world_size: int, *, usable: bool
) -> list[object] | None:
    """Form all groups again, if all ranks can; `number` is that of the recovery, and `store` is for it alone.

    All ranks call it; where those of one rank are not `usable`, none does anything. Returns the models that
    cannot forget a step that did not end, None where nothing was done.
    """
    store.set(f"groups/{rank}", json.dumps(_tell(world_size) if usable else {}))
    told: list[OwnGroups] = [json.loads(store.get(f"groups/{each}")) for each in range(world_size)]
    if not all_can(told):
        return None
    named = {str(name): group for group, name in distributed_c10d._world.pg_names.items()}  # noqa: SLF001
    # Groups share ranks, so all take them in one order.
    for name, (ranks, _) in sorted(told[rank].items()):
        _connect(named[name], number, [told[each][name][1] for each in ranks])
    stuck: list[object] = []
    for model in _models():
        try:
            _reset(model)
        except Exception:  # noqa: BLE001 - FSDP2 refuses where another model has queued its reduction
            stuck += [model] if isinstance(model, DistributedDataParallel) else model._modules  # noqa: SLF001
    return stuck


def _tell(world_size: int) -> OwnGroups:
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        return {}
    world = distributed_c10d._world  # noqa: SLF001 - torch has no public way to its groups
    groups = {str(name): group for group, name in world.pg_names.items()}
    # A `new_group` that was interrupted has named its group, and has not said yet which ranks it has.
    if not groups.keys() <= _names or not all(group in world.pg_group_ranks for group in groups.values()):
        return {}
    return {name: (_in_order(world.pg_group_ranks[group]), _handle(group)) for name, group in groups.items()}


def _in_order(numbers: Mapping[int, int]) -> list[int]:
    """Return the ranks of a group in the order of their numbers within it."""
    return sorted(numbers, key=numbers.__getitem__)


def _torch(name: str) -> Callable[..., Any]:
    """Return a function that torch has from 2.14 on, and calls experimental."""
    function: Callable[..., Any] = getattr(distributed_c10d, name)
    return function


def _handle(group: Any) -> str:
    return str(_torch("_get_reconfigure_handle")(group))


def _connect(group: Any, number: int, handles: list[str]) -> None:
    _torch("_reconfigure")(number, handles, group).wait()


def _models() -> list[Any]:
    """Return all DDP models, and what FSDP2 keeps of modules: variables may refer to them in any depth."""
    state = getattr(sys.modules.get(_FSDP2), "FSDPState", None)
    kinds = _with_subclasses(DistributedDataParallel) | (set() if state is None else _with_subclasses(state))
    # An object refers to its type: Python would look at hundreds of thousands of objects three times as long.
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _reset(model: Any) -> None:
    """Have a model forget a step that did not end: its next one would wait for what is left of that."""
    if isinstance(model, DistributedDataParallel):
        # What torch itself calls with a group that has become smaller.
        model._update_process_group(model.process_group)  # noqa: SLF001
    elif model._is_root and not _is_idle(model):  # noqa: SLF001 - FSDP2's own is in the same private class
        model._reset_iter_state()  # noqa: SLF001 - it drops gradients: an idle model keeps them


def _is_idle(state: Any) -> bool:
    """Whether FSDP2 is between two steps: a forward without its backward leaves an order behind."""
    context, every = state._state_ctx, state._state_ctx.all_states  # noqa: SLF001 - as above
    begun = context.post_backward_final_callback_queued or state._comm_ctx.post_forward_order  # noqa: SLF001
    groups = [group for each in every for group in each._fsdp_param_groups]  # noqa: SLF001
    idle = all(each._training_state.name == "IDLE" for each in (*every, *groups))  # noqa: SLF001
    return not begun and idle and all(group.is_sharded for group in groups)
