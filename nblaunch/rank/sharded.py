"""What of a save belongs to process groups: groups, meshes, DTensors, models of FSDP2.

A DTensor is saved as its shape and placements; its shards go through torch.distributed.checkpoint, which
reads them for any number of ranks. A model of FSDP2 is saved as the modules it was made of, whose parameters
are DTensors, and is wrapped again when it is there. Groups and meshes are made again before anything is
loaded, by all ranks in one order. A mesh of all ranks is one of all ranks again, also of another number.
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from nblaunch._errors import NblaunchError
from nblaunch.capture.saved import scaled
from nblaunch.rank import in_place, namespace

_TENSOR = "torch.distributed.tensor"
_FSDP = "torch.distributed.fsdp"
_FLAGS_OF_HOOKS = ("_hooks_with_kwargs", "_hooks_always_called")
_MANAGED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
FSDP2 = "models of FSDP2"
"""What the names begin with of what says how to wrap these again, among the variables of a save."""

Key = tuple[Any, ...]
"""Names a mesh or a group, the same on all ranks."""


class GroupObjects:
    """What one save, or one load, has met of these."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        """Know nothing yet."""
        self.rank, self.world_size, self.device = rank, world_size, device
        self.made: dict[Key, Any] = {}
        """Meshes and groups; while it is saved, those that pickles refer to."""
        self.partial = False
        """Whether the pickle refers to a group that another number of ranks does not have."""
        self.shards: dict[str, Any] = {}
        """DTensors by the number under which their shards are saved."""
        self.not_there = ""
        """Why a mesh or a group that was not made is not there."""
        self.own_shards = False
        """Whether DTensors are pickled with this rank's shard."""
        self.in_memory = False
        """Whether this is for ranks that were started again, of the groups that there are now."""
        self._placements: dict[Any, Any] = {}
        """One of those that are equal: which tensors share one differs between ranks."""

    # --- saving ---

    def reduce(self, obj: Any) -> Any:
        """Return how to rebuild one of these, `NotImplemented` for anything else."""
        if isinstance(obj, DeviceMesh):
            return _found, (self._mesh_key(obj),)
        if isinstance(obj, dist.ProcessGroup):
            return _found, (self._group_key(obj),)
        if isinstance(obj, DistributedDataParallel) and getattr(obj, "_comm_hooks", None):
            msg = "a DDP model with a communication hook cannot be saved: save its module, and wrap it again"
            raise pickle.PicklingError(msg)
        if isinstance(obj, DistributedDataParallel) and obj.device_ids:
            # Each rank has another number there.
            state = obj.__getstate__() | {"device_ids": [], "output_device": None}
            return _bare, (type(obj),), state, None, None, _set_ddp
        if isinstance(obj, torch.nn.Module):
            return self._module(obj)
        return NotImplemented

    def _mesh_key(self, mesh: DeviceMesh) -> Key:
        root = _root_of(mesh)
        names = tuple(mesh.mesh_dim_names or ())
        if root is not mesh:
            if not names or root[names] != mesh:
                msg = "a DeviceMesh that is made of dimensions of another one cannot be saved"
                raise pickle.PicklingError(msg)
            return ("dimensions", self._mesh_key(root), names)
        ranks = tuple(mesh.mesh.flatten().tolist())
        key = ("mesh", mesh.device_type, tuple(mesh.mesh.shape), ranks, names)
        self.made[key] = mesh
        self.partial |= ranks != tuple(range(self.world_size))
        return key

    def _group_key(self, group: Any) -> Key:
        if group is dist.group.WORLD:
            return ("default",)
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except KeyError:
            msg = "it is gone: the default process group was formed anew"
            raise pickle.PicklingError(msg) from None
        key = ("group", ranks, str(dist.get_backend_config(group)), str(group.group_desc))
        self.made[key] = group
        self.partial |= len(ranks) != self.world_size
        return key

    def tensor(self, tensor: Any) -> tuple[Any, ...]:
        """Return how to rebuild a DTensor, without its gradient."""
        placements, mesh = tuple(tensor.placements), _FoundMesh(self._mesh_key(tensor.device_mesh))
        own = (self._placements.setdefault((type(each), each), each) for each in placements)
        facts = _Facts(
            tuple(own),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.requires_grad and tensor.is_leaf,
            isinstance(tensor, torch.nn.Parameter),
        )
        if self.own_shards or any(each.is_partial() for each in placements):
            self.partial = True
            return _with_shard, (mesh, facts, tensor.to_local().detach())
        number = str(len(self.shards))
        self.shards[number] = tensor
        return _without_shard, (mesh, facts, number)

    def _module(self, module: Any) -> Any:
        attributes = module.__dict__
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            msg = "a model of FSDP1 cannot be saved: use FSDP2 (fully_shard), or save its state_dict"
            raise pickle.PicklingError(msg)
        if _MANAGED[0] not in attributes:
            return NotImplemented
        if self.own_shards:
            msg = "a model of FSDP2 that is not the same on all ranks cannot be saved"
            raise pickle.PicklingError(msg)
        if self.in_memory and (why := _why_not_in_memory(module)):
            raise pickle.PicklingError(why)
        kind = type(module)
        if fsdp := sys.modules.get(_FSDP):
            kind = kind.__bases__[1] if issubclass(kind, fsdp.FSDPModule) else kind
        state = {name: each for name, each in attributes.items() if not _is_fsdps(name)}
        gone: set[int] = set()
        for name, hooks in state.items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                mine = {key: hook for key, hook in hooks.items() if not _is_hook_of_fsdp(hook)}
                gone |= hooks.keys() - mine
                state[name] = type(hooks)(mine)
        for name, flags in state.items():
            if name.endswith(_FLAGS_OF_HOOKS):
                state[name] = type(flags)({key: flag for key, flag in flags.items() if key not in gone})
        return _bare, (kind,), state

    # --- loading ---

    def make(self, keys: Iterable[Key], saved_by: int) -> None:
        """Make meshes and groups; all ranks call this with the same keys."""
        for key in keys:
            match key:
                case ("mesh", kind, shape, ranks, names):
                    self.made[key] = self._made_mesh(kind, shape, ranks, names, saved_by)
                case ("group", ranks, backend, description) if saved_by == self.world_size:
                    self.made[key] = dist.new_group(list(ranks), backend=backend, group_desc=description)
                case ("group", ranks, backend, description) if len(ranks) == saved_by:
                    self.made[key] = dist.new_group(backend=backend, group_desc=description)
                case _:
                    pass

    def _made_mesh(
        self, kind: str, shape: Sequence[int], ranks: Sequence[int], names: Sequence[str], saved_by: int
    ) -> Any:
        if saved_by != self.world_size:
            new = scaled(shape, self.world_size) if len(ranks) == saved_by else None
            if new is None:
                return None
            shape, ranks = new, range(self.world_size)
        grid = torch.tensor(list(ranks)).view(tuple(shape))
        return DeviceMesh(kind, grid, mesh_dim_names=tuple(names) or None)

    def find(self, key: Key) -> Any:
        """Return a mesh or a group. Raises `UnpicklingError` for one that these ranks cannot have."""
        if key == ("default",):
            return dist.group.WORLD
        if key[0] == "dimensions":
            return self.find(key[1])[key[2]]
        found = self.made.get(key, renewed.get(key))
        if found is None:
            msg = f"a {key[0]} {self.not_there}"
            raise pickle.UnpicklingError(msg)
        return found


loading: GroupObjects | None = None
"""What the load that is under way knows."""
renewed: dict[Key, DeviceMesh] = {}
"""Meshes that this rank has got with the default group that was formed last, for what others refer to."""


def _found(key: Key) -> Any:
    assert loading is not None  # noqa: S101 - what unpickles these has set it
    return loading.find(key)


class _FoundMesh:
    """Stands for a mesh among the arguments of what rebuilds a DTensor: pickle's memo has it once."""

    def __init__(self, key: Key) -> None:
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (self.key,)


def is_dtensor(obj: Any) -> bool:
    """Return whether this is a DTensor; torch.distributed.tensor is not imported for it."""
    module = sys.modules.get(_TENSOR)
    return module is not None and isinstance(obj, module.DTensor)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What makes up a DTensor beside its shards."""

    placements: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool
    is_parameter: bool

    def made(self, mesh: Any, local: Any) -> Any:
        """Return the DTensor."""
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            found: Any = DTensor.from_local(
                local,
                mesh,
                self.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=self.stride,
            )
        if self.is_parameter:
            return torch.nn.Parameter(found, self.wants_grad)
        return found.requires_grad_(self.wants_grad)

    def empty(self, mesh: Any, device: torch.device) -> Any:
        """Return a DTensor of this rank's shape, whose elements are to be filled."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, _ = compute_local_shape_and_global_offset(torch.Size(self.shape), mesh, self.placements)
        return self.made(mesh, torch.empty(shape, dtype=self.dtype, device=device))


def _with_shard(mesh: Any, facts: _Facts, local: Any) -> Any:
    return facts.made(mesh, local)


def _without_shard(mesh: Any, facts: _Facts, number: str) -> Any:
    assert loading is not None  # noqa: S101 - see `_found`
    where = loading.device if mesh.device_type == loading.device.type else torch.device(mesh.device_type)
    loading.shards[number] = facts.empty(mesh, where)
    return loading.shards[number]


def _set_ddp(model: Any, state: dict[str, Any]) -> None:
    assert loading is not None  # noqa: S101 - see `_found`
    here: Any = loading.device.index  # None for a CPU
    model.__setstate__(state | {"device_ids": None if here is None else [here], "output_device": here})


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of which this one has dimensions, itself if of none."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()  # noqa: SLF001 - torch has no public way
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.8

    return _mesh_resources.get_root_mesh(mesh)


# FSDP2


def _is_fsdps(name: str) -> bool:
    # What `contract` keeps has a random name in each process.
    return name in _MANAGED or name.startswith(("__composable_api_state_key", "_composable_api_state_key"))


def _is_hook_of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # `_WrappedHook`
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith(_FSDP)


def _states_of_fsdp() -> Iterator[Any]:
    kind = getattr(sys.modules.get(f"{_FSDP}._fully_shard._fsdp_state"), "FSDPState", ())
    seen: list[Any] = []
    for reference in list(_composable_state._module_state_mapping.values()):  # noqa: SLF001 - torch has no public way
        state = reference()
        if isinstance(state, kind) and not any(state is each for each in seen):
            seen.append(state)
            yield state


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [each for each in groups if each is not None]


def reshard() -> None:
    """Have no model of FSDP2 hold its whole parameters, as it does after a forward without a backward."""
    for state in _states_of_fsdp():
        for group in _groups_of(state):
            group.reshard() if not group.is_sharded else None


def wrapped(modules: Container[int]) -> list[dict[str, Any]]:
    """Return how each of these modules of FSDP2 was wrapped, in order; they come by address."""
    states = [each for each in _states_of_fsdp() if id(each._modules[0]) in modules]  # noqa: SLF001 - FSDP2's own
    return [_wrapping(state, group) for state in states for group in (_groups_of(state) or [None])]


def _wrapping(state: Any, group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"modules": list(state._modules), "parameters": []}  # noqa: SLF001 - FSDP2's own
    if group is None:
        return found | {"mp_policy": state._mp_policy, "mesh": None}  # noqa: SLF001 - as above
    _refuse_unusual(group, state._mp_policy)  # noqa: SLF001 - as above
    info, after = group.mesh_info, group.post_forward_mesh_info
    again: bool | int | None = after is not None
    if state._auto_reshard_after_forward:  # noqa: SLF001 - as above
        again = None
    elif after is not None and after is not info:
        again = int(after.shard_mesh_size)
    for each in group.fsdp_params:
        known = each._module_info  # noqa: SLF001 - as above
        places = [(known.module, known.param_name)]
        places += zip(known.shared_modules, known.shared_param_names, strict=True)
        # Not what FSDP2 has: another one may have taken its place since the last forward.
        parameter = known.module._parameters[known.param_name]  # noqa: SLF001 - torch's own
        parallel = _tensor_parallel(each) if each.is_dtensor else None
        found["parameters"].append((parameter, each.fsdp_placement, places, parallel))
    return found | {
        "mesh": info.mesh,
        "reshard_after_forward": again,
        "mp_policy": state._mp_policy,  # noqa: SLF001 - as above
        "offload_policy": group.offload_policy,
    }


_USUAL: dict[str, object] = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reduce_scatter_unused_params": False,
    "gradient_divide_factor": None,
    "force_sum_reduction_for_comms": False,
    "_partial_reduce_output": None,
}
"""What a group of parameters has if nothing was set that changes gradients; releases have some of them."""


def _refuse_unusual(group: Any, precision: Any) -> None:
    """Raise `NblaunchError` for what changes gradients or precision, and would be lost without a word."""
    # Since torch 2.15 a function may choose each parameter's: it is called once, and not kept.
    if any(each.mp_policy != precision for each in group.fsdp_params):
        msg = "a model of FSDP2 with a param_dtype_override_fn cannot be saved: save its state_dict"
        raise NblaunchError(msg)
    for name, usual in _USUAL.items():
        if getattr(group, name, usual) != usual:
            msg = f"a model of FSDP2 whose {name} was set cannot be saved: save its state_dict"
            raise NblaunchError(msg)
    if any(getattr(each, "unsharded_accumulated_grad", None) is not None for each in group.fsdp_params):
        msg = "a model of FSDP2 has gradients that are not reduced yet: save it after the step"
        raise NblaunchError(msg)


def _why_not_in_memory(module: Any) -> str:
    """Return why a module cannot be wrapped by one rank alone as it is here, "" if it can."""
    if namespace.refuses(module):
        return "a model of FSDP2 whose process group is gone"
    for state in [module._get_fsdp_state()] if hasattr(module, "_get_fsdp_state") else []:  # noqa: SLF001 - FSDP2's own
        for group in _groups_of(state):
            try:
                _refuse_unusual(group, state._mp_policy)  # noqa: SLF001 - as above
            except NblaunchError as error:
                return str(error)
            if _has_mesh_of_its_own(group):
                return "a model of FSDP2 with a number as reshard_after_forward makes a mesh"
    return ""


def _has_mesh_of_its_own(group: Any) -> bool:
    after = group.post_forward_mesh_info
    return after is not None and after.mesh is not group.mesh_info.mesh


def _tensor_parallel(param: Any) -> tuple[Any, Any]:
    """Return the mesh and the placements that a parameter had before FSDP2 sharded it, too."""
    if getattr(param.mesh_info, "is_spmd_mesh", False):
        msg = "a model that fully_shard got with dp_mesh_dims cannot be saved: save its state_dict"
        raise NblaunchError(msg)
    spec = getattr(param, "_unsharded_dtensor_spec", None) or param._tp_spec  # noqa: SLF001 - as above, torch 2.8
    return spec.mesh, spec.placements


def wrap_again(wrappings: Sequence[Mapping[str, Any]]) -> None:
    """Wrap modules, whose parameters are DTensors, by FSDP2 as they were wrapped.

    It shards whole parameters, so these stand in for the DTensors meanwhile, without memory. That a parameter
    was put in its place is what FSDP2 looks for before the next forward (`load_state_dict(assign=True)`).
    """
    if not wrappings:
        return
    from torch.distributed.fsdp import fully_shard

    for each in wrappings:
        placements: dict[int, Any] = {}
        whole: list[Any] = []
        for parameter, placement, places, parallel in each["parameters"]:
            whole.append(_stand_in(parameter, parallel))
            placements[id(whole[-1])] = placement
            for module, name in places:
                module._parameters[name] = whole[-1]  # noqa: SLF001 - FSDP2 refuses `setattr`
        options = {name: each[name] for name in ("mesh", "mp_policy") if each.get(name) is not None}
        if each["mesh"] is not None:
            options["offload_policy"] = each["offload_policy"]
            options["reshard_after_forward"] = each["reshard_after_forward"]
            options["shard_placement_fn"] = lambda parameter, known=placements: known.get(id(parameter))
        modules = each["modules"]
        fully_shard(modules[0] if len(modules) == 1 else modules, **options)
        for parameter, _, places, _ in each["parameters"]:
            for module, name in places:
                module._parameters[name] = parameter  # noqa: SLF001 - as above


def _stand_in(parameter: Any, parallel: tuple[Any, Any] | None) -> Any:
    """Return a parameter before FSDP2 has sharded it; with tensor parallelism it was a DTensor already."""
    shape, stride, dtype = tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype
    if parallel is None:
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return torch.nn.Parameter(whole, parameter.requires_grad)
    mesh, placements = parallel
    facts = _Facts(placements, shape, stride, dtype, parameter.requires_grad, is_parameter=True)
    return facts.empty(mesh, torch.device("meta"))


# Meshes that outlive the default group: all ranks make those again that all have that went on.


def renew_meshes(
    tell: Callable[[Any], Sequence[Any]], *, joins: bool, renumbered: bool
) -> Callable[[object], bool]:
    """Give meshes groups of the default group that was formed anew; return what tells what goes on with them.

    All ranks call it. A mesh finds its groups by name when it is used, so all that refers to it goes on. A
    rank that `joins` has none yet; with one that is `renumbered`, whose shards are those of another rank,
    nothing goes on. A model of FSDP2 is left out where a rank that joins would lack shards. Of one that was
    within a step all ranks drop the gradients.
    """
    renewed.clear()
    met = GroupObjects(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu"))
    alive = [each for each in gc.get_objects() if type(each) is DeviceMesh and _has_groups(each)]
    roots = [
        (met._mesh_key(each), each)  # noqa: SLF001 - this module's own
        for each in alive
        if _root_of(each) is each and not renumbered
    ]
    told = tell(None if joins else in_order(key for key, _ in roots))
    joining = [rank for rank, each in enumerate(told) if each is None]
    keys = [set(map(key_from, each)) for each in told if each is not None]
    for key in in_order(set.intersection(*keys) if keys else ()):
        met.make([key], met.world_size)
        renewed[key] = met.made[key]
    going_on = set[int]()
    for key, root in roots:
        if key in renewed:
            going_on |= {id(each) for each in _take_groups(root, renewed[key], alive)}
    dead = {id(module) for module, _ in in_place.forget_steps(tell, joins=joins)}
    going_on |= _renew_models(going_on, dead, joining)
    # What these were found in keeps all of them alive.
    return lambda thing: id(thing) in going_on


def _renew_models(meshes: Container[int], dead: set[int], joining: Collection[int]) -> set[int]:
    """Give models of FSDP2, but for `dead` ones, the groups of these meshes; return their addresses."""
    going_on = set[int]()
    for state in _states_of_fsdp():
        groups, modules = _groups_of(state), state._modules  # noqa: SLF001 - FSDP2's own
        there = all(id(info.mesh) in meshes for each in groups for info in _infos_of(each))
        # A rank that joins is sent the models, with its shards.
        sent = all(_has_holders(each, joining) for each in groups) and not any(
            map(_why_not_in_memory, modules)
        )
        if not there or any(map(namespace.refuses, modules)) or (joining and not sent):
            dead |= set(map(id, modules))
    for state in _states_of_fsdp():
        modules = state._modules  # noqa: SLF001 - as above
        if all(id(part) not in dead for module in modules for part in module.modules()):
            going_on |= set(map(id, modules))
            for info in itertools.chain.from_iterable(map(_infos_of, _groups_of(state))):
                info.__post_init__()
    return going_on


def _infos_of(group: Any) -> list[Any]:
    """Return what FSDP2 knows of the mesh of a model, and of that in which it shards after a forward."""
    return [each for each in (group.mesh_info, group.post_forward_mesh_info) if each is not None]


def _has_groups(mesh: DeviceMesh) -> bool:
    return bool(getattr(mesh, "_dim_group_names", ()))


def _take_groups(root: DeviceMesh, new: Any, alive: Iterable[DeviceMesh]) -> Iterator[DeviceMesh]:
    """Have a mesh, and those of its dimensions, have the groups of a new one; yield these."""
    names = dict(zip(root._dim_group_names, new._dim_group_names, strict=True))  # noqa: SLF001 - see `_root_of`
    for each in alive:
        own = each._dim_group_names  # noqa: SLF001 - as above
        if _root_of(each) is root and names.keys() >= set(own):
            each._dim_group_names = [names[name] for name in own]  # noqa: SLF001 - as above
            yield each
    if hasattr(root, "_pg_registry"):  # later than torch 2.8
        root._pg_registry = new._pg_registry  # noqa: SLF001 - as above


def _has_holders(group: Any, joining: Collection[int]) -> bool:
    """Return whether other ranks have the shards of a model that ranks had which were started again."""
    tensors = [each.sharded_param for each in group.fsdp_params]
    return all(holder(each, rank, joining) is not None for each in tensors for rank in joining)


def holder(tensor: Any, rank: int, joining: Collection[int]) -> int | None:
    """Return which rank has the shard of a DTensor that a rank had which was started again, if any has."""
    mesh, root = tensor.device_mesh, _root_of(tensor.device_mesh)
    key = GroupObjects(rank, 0, torch.device("cpu"))._mesh_key(root)  # noqa: SLF001 - this module's own
    names = list(root.mesh_dim_names or ())
    known = mesh is root or set(mesh.mesh_dim_names or ()) <= set(names)
    if key not in renewed or not known or not _is_even(tensor):
        return None
    # A mesh of some dimensions has the row in which this rank is, which may be another one's.
    if rank not in root.mesh:
        return rank  # it has none
    place: list[Any] = (root.mesh == rank).nonzero()[0].tolist()
    dims = range(root.ndim) if mesh is root else [names.index(each) for each in mesh.mesh_dim_names]
    for dim, placement in zip(dims, tensor.placements, strict=True):
        if placement.is_replicate():
            place[dim] = slice(None)
    return next((each for each in root.mesh[tuple(place)].flatten().tolist() if each not in joining), None)


def _is_even(tensor: Any) -> bool:
    """Return whether this rank's shard is what torch makes of the shape, and not what a program chose."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.to_local().shape) == tuple(shape)


# Shards, by torch.distributed.checkpoint without its collectives: cells go on in the group meanwhile.


class Shards:
    """The shards of a rank that are to be written; several ranks may have the same, and one writes them."""

    def __init__(self, rank: int, tensors: Mapping[str, Any], copied: Callable[[Any], Any]) -> None:
        """Plan what this rank writes; `copied` copies what cells may change."""
        from torch.distributed.checkpoint import DefaultSavePlanner

        held = {name: tensor for name, tensor in tensors.items() if _is_first_holder(tensor)}
        local = {name: copied(tensor.to_local().detach()) for name, tensor in held.items()}

        class Planner(DefaultSavePlanner):
            def lookup_object(self, index: Any) -> Any:
                return local[index.fqn]

        self._planner = Planner()
        self._planner.set_up_planner(held, None, is_coordinator=rank == 0)
        self._plan = self._planner.create_local_plan()
        self._rank = rank
        self.bytes = {name: each.nbytes for name, each in local.items()}

    def write(self, directory: Path) -> None:
        """Write them, and what the first rank has to know of it."""
        writer = _writer(directory)
        writer.set_up_storage_writer(is_coordinator=self._rank == 0)
        plan = writer.prepare_global_plan([writer.prepare_local_plan(self._plan)] * (self._rank + 1))[-1]
        results = writer.write_data(plan, self._planner).wait()
        (directory / f"plan-{self._rank}").write_bytes(pickle.dumps((self._plan, results)))


def finish(directory: Path, world_size: int) -> None:
    """Write the list of all shards, once all ranks have written theirs."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    files = [directory / f"plan-{rank}" for rank in range(world_size)]
    told = [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - of our own ranks, in a private directory
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    _, metadata = planner.create_global_plan([plan for plan, _ in told])
    writer = _writer(directory)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [results for _, results in told])
    for file in files:
        file.unlink()


def _writer(directory: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    return FileSystemWriter(directory, sync_files=True)


def read(directory: Path, tensors: Mapping[str, Any]) -> None:
    """Fill DTensors with what was saved of them, whatever the ranks were that have saved it."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(action="ignore"), torch.no_grad():  # that it reads without a process group
        dcp.load(dict(tensors), checkpoint_id=directory, no_dist=True)


def _is_first_holder(tensor: Any) -> bool:
    here = tensor.device_mesh.get_coordinate()
    if here is None:
        return False
    pairs = zip(tensor.placements, here, strict=True)
    return all(place == 0 for placement, place in pairs if placement.is_replicate())


def key_from(told: Any) -> Key:
    """Return the key of a mesh or a group that was JSON on its way."""
    return tuple(key_from(each) if isinstance(each, list) else each for each in told)


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Return keys in an order that all ranks have."""
    return sorted(set(keys), key=repr)
