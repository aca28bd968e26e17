"""A session's variables on a rank: its own, and those from the notebook; which of the two counts."""

from __future__ import annotations

import contextlib
import difflib
import os
import pickle
import re
import traceback
import types
import weakref
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nblaunch.capture import pickling
from nblaunch.capture.identity import ObjectTable
from nblaunch.capture.parts import parts_of
from nblaunch.protocol.messages import DeadVariable, Objects, StepsTaken
from nblaunch.rank import in_place, optimizer_steps, process_group, shell
from nblaunch.rank.stores import StoreNotes

_MOST_NAMES = 10_000
_RANK_NAMES = frozenset({"rank", "local_rank", "world_size", "device"})
_REBOUND = object()
_DUNDER = re.compile(r"__.*\w")


here: Variables | None = None
"""Those of this rank."""


class Variables:
    """The globals of the cells that run here, and the objects that came from the notebook.

    In a session, a variable that the rank's own code has bound is the rank's own: the notebook's variable of
    that name does not replace it. A variable that came from the notebook, and was not bound again since, is
    replaced by the next one that comes under its name. An arrival changes nothing else.
    """

    def __init__(self, *, kept: bool, directory: Path) -> None:
        """`kept` is true for a session's rank: only then are variables its own.

        `directory` is private, for what memory has no room for.
        """
        global here
        here = self
        self.directory = directory
        self._kept = kept
        self._objects = ObjectTable()
        self._came: dict[str, object] = {
            name: value for name, value in shell.namespace().items() if not _DUNDER.match(name)
        }
        """Variables from the notebook, with the object that came; `_REBOUND` once the rank has bound another.

        What the shell has put there (`_`, `Out`, `open`) is not the rank's own either.
        """
        self._received: set[str] = set()
        """All names that ever came."""
        self._between_jobs: list[Any] = []
        """Objects that the notebook believes to be here: they stay until the next job has found them."""
        self._hidden = frozenset(self._came)
        self._tenure = 0
        self._stores = StoreNotes(
            lambda: [name for name, value in self._came.items() if value is not _REBOUND]
        )
        if kept:
            shell.prepare().stores = self._stores

    def begin_tenure(self, tenure: int) -> None:
        """Forget the objects of a former owner; its variables stay."""
        if tenure != self._tenure:
            self._tenure = tenure
            self._objects.clear()
            self.release()

    def found(self, key: int) -> Any:
        """Return an object that came earlier. Raises `UnpicklingError` if it is gone."""
        obj = self._objects.get(key)
        if obj is None:
            msg = "an object that the notebook sent earlier is no longer on this rank; push it again"
            raise pickle.UnpicklingError(msg)
        return obj

    def keep(self, loaded: pickling.Loaded, objects: Objects) -> None:
        """Take the objects that have arrived; can be repeated after an interrupt."""
        self.release()  # a payload that has been loaded has found the objects that it refers to
        for fill in loaded.fills:
            fill()
        if objects.keys:
            places, keys = array("I", objects.places), array("Q", objects.keys)
            memo = loaded.places()
            for place, key in zip(places, keys, strict=True):
                self._objects.add(memo[place], key)
        self._objects.discard(array("Q", objects.gone))

    def bring(self, brought: Mapping[str, object]) -> None:
        """Take variables of the notebook, except those that are the rank's own."""
        namespace = shell.namespace()
        for name, value in brought.items():
            if not self._kept or not self._is_own(name):
                namespace[name] = self._came[name] = value
                self._received.add(name)

    def _is_own(self, name: str) -> bool:
        namespace = shell.namespace()
        return name in namespace and namespace[name] is not self._came.get(name, _REBOUND)

    def push(self, given: Mapping[str, object]) -> None:
        shell.namespace().update(given)
        self._came.update(given)
        self._received.update(given)

    def settle(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """After a job, return which variables the rank has bound itself, and which objects it has lost."""
        namespace = shell.namespace()
        bound = self._stores.take()
        # No object is kept that came and is no longer there under its name.
        self._came = {
            name: value if namespace[name] is value and name not in bound else _REBOUND
            for name, value in self._came.items()
            if name in namespace
        }
        self.release()
        lost = self._objects.lost()
        self._between_jobs = self._objects.alive()
        return tuple(sorted(filter(self._is_own, self._received))), lost

    def release(self) -> None:
        """Release the objects that were kept for the notebook: from here on variables decide what lives."""
        self._between_jobs = []

    def pull(self, names: tuple[str, ...]) -> tuple[object, ...]:
        """Return these variables. Raises `NameError` for a missing one, with the nearest name that exists."""
        namespace = shell.namespace()
        for name in names:
            if name not in namespace:
                near = difflib.get_close_matches(name, self.names(), n=1)
                meant = f" Did you mean {near[0]!r}?" if near else ""
                msg = f"name {name!r} is not defined on this rank.{meant}"
                raise NameError(msg, name=name)
        return tuple(namespace[name] for name in names)

    def names(self) -> tuple[str, ...]:
        """Return the names of all variables except IPython's own."""
        return tuple(sorted(self._shown())[:_MOST_NAMES])

    def _shown(self) -> list[str]:
        return [
            name
            for name in shell.namespace().keys() - _RANK_NAMES
            if (self._is_own(name) if name in self._hidden else not name.startswith("__"))
        ]

    # --- saved and loaded ---

    def to_save(self) -> dict[str, Any]:
        """Return all variables except IPython's own."""
        namespace = shell.namespace()
        return {name: namespace[name] for name in self._shown() if name.isidentifier()}

    def notebooks_code(self) -> list[str]:
        """Return the functions and classes from the notebook, by name: a `def` there replaces these."""
        return sorted(
            name
            for name, value in self.to_save().items()
            if name in self._came and not self._is_own(name) and isinstance(value, type | types.FunctionType)
        )

    def restored(self, values: Mapping[str, object], notebooks: Collection[str]) -> None:
        """Take variables that were saved: they are the rank's own, but for code of the notebook's."""
        shell.namespace().update(values)
        self._received.update(values)
        self._came.update({name: value if name in notebooks else _REBOUND for name, value in values.items()})

    def keys_of(self, addresses: Mapping[int, tuple[int, Any]]) -> dict[int, int]:
        """Return the keys of the notebook's objects, by other keys that came by address, with the object."""
        found = {place: self._objects.key_of(obj) for place, obj in addresses.values()}
        return {place: key for place, key in found.items() if key is not None}

    def came(self, names: Collection[str]) -> list[str]:
        """Return which of these variables came from the notebook, and were not bound again since."""
        return [name for name in names if name in self._came and not self._is_own(name)]

    def revived(
        self, values: Mapping[str, object], came: Collection[str], objects: Mapping[int, Any]
    ) -> None:
        """Take variables from another rank, and objects of the notebook, by their keys."""
        self.restored(values, came)
        for key, obj in objects.items():
            self._objects.add(obj, key)
        self._between_jobs = self._objects.alive()


class Arrival:
    """Variables that functions bring: there while a payload is unpickled, kept only if all of it arrives.

    An object that is unpickled after a function may call it.
    """

    def __init__(self) -> None:
        self.offered: dict[str, object] = {}
        self._filled: list[str] = []

    def offer(self, offered: Mapping[str, object]) -> None:
        """Fill in the variables that the rank lacks; the others are decided when all has arrived."""
        namespace = shell.namespace()
        self.offered.update(offered)
        for name, value in offered.items():
            if name not in namespace:
                self._filled.append(name)
                namespace[name] = value

    def undo(self) -> None:
        namespace = shell.namespace()
        while self._filled:
            namespace.pop(self._filled.pop(), None)


# Variables that die with the process group they were made for, and the statement that revives each.
#
# When the default group is formed again, all groups of the old one are gone with it. A model that was wrapped
# before (DDP, FSDP) goes on referring to one of these, and so do groups of `new_group` and a `DeviceMesh`.


_MOST_MEMBERS = 200
_MOST_NAMED = 20
_WHOLE = (types.MethodType, DistributedDataParallel, DeviceMesh, dist.ProcessGroup)
_OPTIONS = {
    "broadcast_buffers": True,
    "find_unused_parameters": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}
_ABOUT_GROUPS = re.compile(r"process group|connection (closed|reset)|gloo|nccl|socket", re.IGNORECASE)
_DISTRIBUTED = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")


class DeadModelError(RuntimeError):
    """A wrapped model was used whose process group is gone; the message has the statement that revives it."""


class _Refusal:
    """A forward pre-hook that raises: a dead model would blame a peer in its error, or wait for one."""

    def __init__(self, remedy: str, *, in_place: bool) -> None:
        self._remedy, self._in_place = remedy, in_place

    def __call__(self, *_: object) -> None:
        why = "process group is gone: it was formed again after an interrupt or a failure"
        if self._in_place:
            why = "last step was ended by an interrupt or a failure, and it cannot go on from there"
        msg = f"this model's {why}. Its parameters are kept. To revive it: {self._remedy}"
        raise DeadModelError(msg)


def refuses(module: torch.nn.Module) -> bool:
    """Return whether a model raises when it is used: its process group is gone."""
    return any(isinstance(each, _Refusal) for each in module._forward_pre_hooks.values())  # noqa: SLF001 - torch has no public way


class _Successor:
    """A forward pre-hook of a dead DDP's module: only its successor can call it, since the dead DDP refuses.

    The dead DDP may live on (the last traceback refers to it). From that call on its hooks must not reduce
    gradients; until then they must, so that a backward pass of the old graph fails and does not go on alone.
    """

    def __init__(self, dead: DistributedDataParallel) -> None:
        self._dead = weakref.ref(dead)
        self._handle = dead.module.register_forward_pre_hook(self)

    def __call__(self, *_: object) -> None:
        self._handle.remove()
        dead = self._dead()
        if dead is not None:
            with contextlib.suppress(Exception):
                dead.reducer._remove_autograd_hooks()  # noqa: SLF001 - what DDP itself calls


Found = list[tuple[DeadVariable, "weakref.ref[Any]"]]


class DeadVariables:
    """Variables that belong to process groups: `find` them before these end, `bury` them afterwards."""

    def __init__(self) -> None:
        self._hidden = frozenset(shell.namespace())
        """IPython's own names."""
        self._dead: Found = []
        self._of_default = weakref.WeakSet[DistributedDataParallel]()
        """The models that had the default group of that time, those to which no variable leads among them."""
        self._default: Callable[[], Any] = lambda: None
        """That group, if it is still there."""
        self._refusing = weakref.WeakSet[torch.nn.Module]()
        """The models that raise when they are used."""

    def find(self, *, renumbered: bool) -> Found:
        """Return the variables that are alive, with what will revive each; the groups must still exist.

        Where ranks have other numbers than these were made with, no line has the right ones.
        """
        seen = {id(thing()) for _, thing in self._dead}
        found: Found = []
        for path, thing in self._things():
            if id(thing) in seen:
                continue
            # A user's object may raise anything when it is examined, and must not end the session.
            with contextlib.suppress(Exception):
                remedy = self._remedy(path, thing)
                if renumbered and remedy is not None and not isinstance(thing, torch.nn.Module):
                    remedy = _OF_THOSE_LEFT
                if remedy is not None:
                    seen.add(id(thing))
                    found.append((DeadVariable(path, remedy), weakref.ref(thing)))
        default = process_group.groups().default
        self._default = (lambda: None) if default is None else weakref.ref(default)
        models = (each for each in in_place.ddp_models() if each.process_group is default)
        self._of_default = weakref.WeakSet(each for each in models if not refuses(each))
        return found

    def renew(self, found: Found, tell: Callable[[Any], Sequence[Any]]) -> Found:
        """Have DDP models of the old default group begin again with the new one; return the others.

        All ranks do so, with the same buckets: a rank that was started again gets the model from another.
        """
        ours = {
            dead.name: model
            for dead, reference in found
            if isinstance(model := reference(), DistributedDataParallel) and model in self._of_default
        }
        buckets = in_place.agree_on_buckets(ours, tell)
        begun = {name for name, model in ours.items() if in_place.begin_again(model, buckets.get(name, ()))}
        for model in set(self._of_default).difference(ours.values()):
            # No variable that is looked at leads to these on some rank: on all they get new buckets.
            in_place.begin_again(model, ())
        left = [(dead, reference) for dead, reference in found if dead.name not in begun]
        if in_place.renew_optimizers(self._default()):
            present = dict(self._things())
            left = [(dead, thing) for dead, thing in left if present.get(dead.name) is thing()]
        return left

    def bury(
        self, found: Found, *, lost: Sequence[tuple[object, str]] | None = None
    ) -> tuple[DeadVariable, ...]:
        """Note that these are dead now; have models raise when they are used.

        After groups were formed again in place only FSDP1 is, which cannot forget half a step, and what is
        `lost`, with the reason.
        """
        if lost is not None:
            found = [
                (DeadVariable(dead.name, f"{dead.remedy}; {why}" if why else dead.remedy), thing)
                for dead, thing in found
                if (why := _why_lost(thing(), lost)) is not None
            ]
            named = [thing() for _, thing in found]
            # No variable leads to these, and they refuse all the same.
            found += [
                (
                    DeadVariable(f"a {type(part).__name__}", f"make it again; {_UNFORGOTTEN}{why}"),
                    weakref.ref(part),
                )
                for part, why in lost
                if isinstance(part, torch.nn.Module)
                and part not in self._refusing
                and not any(each is part for each in named)
            ]
        for dead, reference in found:
            thing = reference()
            if isinstance(thing, torch.nn.Module):
                self._refusing.add(thing)
                thing.register_forward_pre_hook(
                    _Refusal(dead.remedy, in_place=lost is not None), prepend=True
                )
            if isinstance(thing, DistributedDataParallel):
                _Successor(thing)
        self._dead += found
        return tuple(dead for dead, _ in found)[:_MOST_NAMED]

    def stumbled_over(self, error: BaseException | None) -> tuple[DeadVariable, ...]:
        """Return the variables that are still dead, if the job may have failed because of them."""
        present = dict(self._things()) if self._dead else {}
        self._dead = [
            (dead, thing)
            for dead, thing in self._dead
            if thing() is not None and present.get(dead.name) is thing()
        ]
        if error is None or not self._dead or not _is_about_groups(error):
            return ()
        return tuple(dead for dead, _ in self._dead)[:_MOST_NAMED]

    def names_of(self, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
        try:
            found = optimizer_steps.names(optimizers, self._things()) if optimizers else ()
        except Exception:  # noqa: BLE001 - a user's model may raise anything when it is examined
            found = ("an optimizer",)
        return found[:_MOST_NAMED]

    def steps(self) -> tuple[StepsTaken, ...]:
        """Return the optimizers' steps of this job."""
        try:
            return optimizer_steps.taken(self._things())
        except Exception:  # noqa: BLE001 - as above
            return optimizer_steps.taken()

    def _things(self) -> Iterator[tuple[str, object]]:
        """Yield the variables, their attributes and what they contain, one level down, by path."""
        for name, value in list(shell.namespace().items()):
            if name in self._hidden or name.startswith("_"):
                continue
            yield name, value
            for suffix, member in _members_of(value):
                yield name + suffix, member

    def _remedy(self, path: str, thing: object) -> str | None:
        if isinstance(thing, DistributedDataParallel):
            wrapper = self._name_of(DistributedDataParallel, "DDP")
            return f"{path} = {wrapper}({path}.module{self._options(thing)}){self._hooks(path, thing)}"
        if isinstance(thing, torch.nn.Module):
            again = "FSDP: build it and its optimizer again, from a checkpoint"
            return again if _is_sharded(thing) else None
        if isinstance(thing, DeviceMesh):
            return f"{path} = {self._mesh(thing)}"
        if isinstance(thing, dist.ProcessGroup):
            distributed = self._name_of(dist, "dist")
            groups = process_group.groups()
            if thing is groups.default:
                return f"{path} = {distributed}.group.WORLD"
            ranks = groups.ranks.get(thing)
            return None if ranks is None else f"{path} = {distributed}.new_group(ranks={list(ranks)})"
        return None

    def _name_of(self, wanted: object, otherwise: str) -> str:
        """Return what the program calls a class or a module."""
        names = (
            name for name, value in shell.namespace().items() if value is wanted and not name.startswith("_")
        )
        return next(names, otherwise)

    def _options(self, model: DistributedDataParallel) -> str:
        chosen = [
            f", {name}={value}"
            for name, usual in _OPTIONS.items()
            if (value := getattr(model, name, usual)) != usual
        ]
        if getattr(model, "device_ids", None):
            own = model.device_ids == [getattr(shell.namespace().get("device"), "index", None)]
            # One line for all ranks, if all have done the same.
            chosen.insert(0, f", device_ids={'[device.index]' if own else model.device_ids}")
        if model.process_group is not process_group.groups().default:
            group = next((path for path, thing in self._things() if thing is model.process_group), "...")
            chosen.append(f", process_group={group}")
        return "".join(chosen)

    def _hooks(self, path: str, model: DistributedDataParallel) -> str:
        """Return what registers the communication hook again: without it gradients would be other ones."""
        again = ""
        for hook, state in getattr(model, "_comm_hooks", ()):
            own = next((name for name, thing in self._things() if thing is state), "...")
            known = "None" if state is None else own
            name = self._name_of(hook, getattr(hook, "__name__", "..."))
            again += f"; {path}.register_comm_hook({known}, {name})"
        return again

    def _mesh(self, mesh: DeviceMesh) -> str:
        names = f", mesh_dim_names={mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        if mesh.mesh.flatten().tolist() == list(range(int(os.environ["WORLD_SIZE"]))):
            init = self._name_of(dist.init_device_mesh, "init_device_mesh")
            return f"{init}({mesh.device_type!r}, {tuple(mesh.mesh.shape)}{names})"
        return f"{self._name_of(DeviceMesh, 'DeviceMesh')}({mesh.device_type!r}, {mesh.mesh.tolist()}{names})"


def _members_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield what the program can assign within an object, unless that is one whole for process groups."""
    with contextlib.suppress(Exception):  # a user's object may raise anything
        if isinstance(value, _WHOLE) or _is_sharded(value):
            return
        for step, member in islice(parts_of(value), _MOST_MEMBERS):
            if step.startswith((".", "[")):
                yield step, member


def _is_sharded(value: object) -> bool:
    # By name: importing FSDP takes time that only its users should pay.
    return any(kind.__name__ in {"FullyShardedDataParallel", "FSDPModule"} for kind in type(value).__mro__)


_OF_THOSE_LEFT = "make it of the ranks that are there now"
_UNFORGOTTEN = "it cannot forget its last step: "


def _why_lost(thing: object, lost: Sequence[tuple[object, str]]) -> str | None:
    """Return why a thing does not go on with the groups that it was made for; None if it does."""
    why = next((f"{_UNFORGOTTEN}{why}" for each, why in lost if each is thing), None)
    wrapped_whole = any(kind.__name__ == "FullyShardedDataParallel" for kind in type(thing).__mro__)
    return "" if why is None and wrapped_whole else why


def _is_about_groups(error: BaseException) -> bool:
    if isinstance(error, DeadModelError):
        return False  # its message has the remedy
    if _ABOUT_GROUPS.search(f"{type(error).__name__}: {error}"):
        return True
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(part in name for name in frames for part in _DISTRIBUTED)
