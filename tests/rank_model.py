"""What a session's ranks know, by the nine rules: a model in plain Python of a notebook and of its ranks.

To send an object is to copy it, with one memory of all that has been copied already.
"""

from __future__ import annotations

import ast
import functools
import gc
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import looked
import numpy as np
import torch
from looked import has_identity, is_notebooks, taken_apart

VIEWS_SHARE = True
"""Whether a view of an array leads to the array."""
_STOPS = (types.ModuleType, types.BuiltinFunctionType)


def cell(source: str, namespace: dict[str, Any]) -> Any:
    """Run a cell; return the value of the expression in its last line."""
    *lines, last = source.splitlines()
    exec("\n".join(lines), namespace)  # noqa: S102 - as a notebook does
    try:
        return eval(last, namespace)  # noqa: S307 - see above
    except SyntaxError:
        exec(source, namespace)  # noqa: S102 - see above


@dataclass
class Sent:
    """An object as it was when the rank got it."""

    obj: Any
    marks: list[Any]
    parts: list[Any]


def marks(obj: Any) -> list[Any]:
    """Return what an object is made of: objects with an identity by that, all others by what they are."""
    facts, parts = taken_apart(obj)
    found = [facts]
    if isinstance(obj, torch.Tensor):
        found = [type(obj), obj._version, obj.requires_grad, id(obj.grad)]
    for part in parts:
        found.append(("object", id(part)) if has_identity(part) else marks(part))
    return found


def bound_in(source: str) -> set[str]:
    """Return the names that a cell binds by statements of its own."""
    found = set()
    for statement in ast.parse(source).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                names = (each for target in targets for each in ast.walk(target))
                found |= {
                    each.id
                    for each in names
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                }
    return found


class Reach:
    """All objects with an identity to which some lead, and the global names that their functions read."""

    def __init__(self, roots: Iterable[Any], sent: dict[int, Sent]) -> None:
        self.objects: dict[int, Any] = {}
        self.names: set[str] = set()
        waiting = list(roots)
        while waiting:
            obj = waiting.pop()
            if has_identity(obj):
                if id(obj) in self.objects:
                    continue
                self.objects[id(obj)] = obj
            known = sent.get(id(obj))
            parts = taken_apart(obj)[1] if known is None else known.parts
            if isinstance(obj, types.FunctionType) and is_notebooks(obj):
                code = parts[0]
                self.names |= looked.reads(code)
            waiting += parts
            if VIEWS_SHARE and isinstance(obj, np.ndarray) and isinstance(obj.base, np.ndarray):
                waiting.append(obj.base)


class Rank:
    """One rank: its variables, what came under which name, and what was sent of which object."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {"__name__": "__main__", "looked": looked}
        self.came: dict[str, Any] = {}
        self.bound: dict[str, Any] = {}
        self.anew: set[str] = set()
        """Names that the notebook has bound since, be it to the same object."""
        self.copies: dict[int, Any] = {}
        self.sent: dict[int, Sent] = {}
        self._memory: dict[int, Any] = {}

    # --- what the rank has ---

    def has(self, name: str) -> bool:
        return name in self.variables

    def has_own(self, name: str) -> bool:
        return name in self.variables and self.variables[name] is not self.came.get(name, self)

    def known(self) -> dict[int, Sent]:
        return {key: sent for key, sent in self.sent.items() if key in self.copies}

    def forget(self) -> list[Any]:
        """Forget the copies to which nothing leads on the rank, and return them."""
        alive, waiting = {}, [value for name, value in self.variables.items() if name != "__builtins__"]
        while waiting:
            obj = waiting.pop()
            if id(obj) in alive:
                continue
            alive[id(obj)] = obj
            if isinstance(obj, _STOPS) or (
                isinstance(obj, type | types.FunctionType) and not is_notebooks(obj)
            ):
                continue
            if obj is self.variables or obj is self.variables["__builtins__"]:
                continue
            waiting += [*gc.get_referents(obj), *(taken_apart(obj)[1] if has_identity(obj) else ())]
        gone = [copy for copy in self.copies.values() if id(copy) not in alive]
        self.copies = {key: copy for key, copy in self.copies.items() if id(copy) in alive}
        tensors = [copy for copy in self.copies.values() if isinstance(copy, torch.Tensor)]
        used = {each.untyped_storage().data_ptr() for each in tensors}
        self._memory = {key: pair for key, pair in self._memory.items() if pair[1].data_ptr() in used}
        return gone

    # --- what a cell brings ---

    def reached(self, names: Iterable[str], notebook: dict[str, Any]) -> set[str]:
        """Return the names that a cell uses, also through functions."""
        waiting, reached, known = list(names), set[str](), self.known()
        while waiting:
            name = waiting.pop()
            if name not in reached and name in notebook:
                reached.add(name)
                waiting += Reach([notebook[name]], known).names
        return reached

    def declines(self, name: str, value: Any) -> bool:
        """Whether the notebook has bound a name again that the rank has bound itself since it got it."""
        anew = name in self.bound and (self.bound[name] is not value or name in self.anew)
        return anew and self.has_own(name)

    def use(self, name: str, value: Any) -> None:
        """Bring a variable of the notebook's, if that is due."""
        if self.declines(name, value):
            self.bound[name] = value
            self.anew.discard(name)
        elif name not in self.variables or (name in self.bound and self.bound[name] is not value):
            self.bring(name, value)

    def bring(self, name: str, value: Any) -> None:
        new = [obj for key, obj in Reach([value], {}).objects.items() if key not in self.copies]
        self.variables[name] = self.came[name] = self.copied(value)
        self.bound[name] = value
        self.anew.discard(name)
        self.note(new)

    def note(self, objects: Iterable[Any]) -> None:
        self.sent |= {id(obj): Sent(obj, marks(obj), taken_apart(obj)[1]) for obj in objects}

    def stale_version(self, name: str, value: Any) -> dict[int, list[Any]] | None:
        """Return what came if the notebook has changed that in place since and the rank uses it, or None."""
        if self.bound.get(name, self) is not value or self.has_own(name) or name not in self.variables:
            return None
        known = self.known()
        sent = {key: known[key] for key in Reach([value], known).objects if key in known}
        if all(marks(each.obj) == each.marks for each in sent.values()):
            return None
        return {key: each.marks for key, each in sent.items()}

    def push(self, name: str, value: Any, notebook: dict[str, Any]) -> None:
        objects = Reach([value], {}).objects
        new = [obj for key, obj in objects.items() if key not in self.copies]
        for key, obj in objects.items():
            if key in self.copies:
                self.fill(self.copies[key], obj)
        self.bring(name, value)
        self.note(objects.values())
        read = {
            name for obj in new if isinstance(obj, types.FunctionType) for name in looked.reads(obj.__code__)
        }
        for each in self.reached(read, notebook):
            self.use(each, notebook[each])

    # --- copies ---

    def copied(self, obj: Any) -> Any:
        """Return the rank's own object for one of the notebook's."""
        if id(obj) in self.copies:
            return self.copies[id(obj)]
        kind = type(obj)
        if isinstance(obj, type | types.FunctionType) and not is_notebooks(obj):
            return obj
        for known, copy in self._COPIES.items():
            if issubclass(kind, known):
                return copy(self, obj)
        made = self.keep(obj, self.copied(kind).__new__(self.copied(kind)))
        vars(made).update({name: self.copied(value) for name, value in vars(obj).items()})
        return made

    def keep(self, obj: Any, copy: Any) -> Any:
        self.copies[id(obj)] = copy
        return copy

    def several(self, objects: Iterable[Any]) -> list[Any]:
        return [self.copied(each) for each in objects]

    def _container(self, obj: Any) -> Any:
        made = self.keep(obj, type(obj)())
        made.extend(self.several(obj))
        return made

    def _dict(self, obj: Any) -> Any:
        made = self.keep(obj, type(obj)())
        for name, value in obj.items():
            made[self.copied(name)] = self.copied(value)
        return made

    def _function(self, obj: Any) -> Any:
        # What is in a cell may lead back to the function.
        new = [each for each in obj.__closure__ or () if id(each) not in self.copies]
        self.copies |= {id(each): types.CellType() for each in new}
        cells = tuple(self.copies[id(each)] for each in obj.__closure__ or ()) or None
        made = self.keep(obj, types.FunctionType(obj.__code__, self.variables, obj.__name__, None, cells))
        for each in new:
            self._fill_cell(self.copies[id(each)], each)
        self._fill_function(made, obj)
        return made

    def _cell(self, obj: Any) -> Any:
        made = self.keep(obj, types.CellType())
        self._fill_cell(made, obj)
        return made

    def _class(self, obj: Any) -> Any:
        made = type(obj)(obj.__name__, tuple(self.several(obj.__bases__)), {"__module__": "__main__"})
        self.keep(obj, made)
        self._fill_class(made, obj)
        return made

    def _array(self, obj: Any) -> Any:
        if VIEWS_SHARE and isinstance(obj.base, np.ndarray):
            base = self.copied(obj.base)
            offset = obj.__array_interface__["data"][0] - obj.base.__array_interface__["data"][0]
            return self.keep(obj, np.ndarray(obj.shape, obj.dtype, base, offset, obj.strides))
        return self.keep(obj, obj.copy())

    def _tensor(self, obj: Any) -> Any:
        memory = obj.untyped_storage()
        if memory.data_ptr() not in self._memory:
            # The storage is kept: its address names it.
            self._memory[memory.data_ptr()] = (memory, memory.clone())
        mine = self._memory[memory.data_ptr()][1]
        made = torch.empty(0, dtype=obj.dtype).set_(mine, obj.storage_offset(), obj.shape, obj.stride())
        if isinstance(obj, torch.nn.Parameter):
            made = torch.nn.Parameter(made)
        self.keep(obj, made)
        made.requires_grad_(obj.requires_grad)
        made.grad = self.copied(obj.grad)
        return made

    def _optimizer(self, obj: Any) -> Any:
        kind: Any = type(obj)
        made = self.keep(obj, kind.__new__(kind))
        state = {name: self.copied(getattr(obj, name)) for name in ("defaults", "state", "param_groups")}
        made.__setstate__(state)
        return made

    def _partial(self, obj: Any) -> Any:
        made = functools.partial(self.copied(obj.func), *self.several(obj.args))
        made.keywords.update({name: self.copied(value) for name, value in obj.keywords.items()})
        return self.keep(obj, made)

    _COPIES: ClassVar[dict[type, Any]] = {
        **dict.fromkeys(
            (int, float, str, bytes, type(None), types.ModuleType, types.CodeType), lambda _, obj: obj
        ),
        types.BuiltinFunctionType: lambda _, obj: obj,
        types.FunctionType: _function,
        types.CellType: _cell,
        type: _class,
        np.ndarray: _array,
        torch.Tensor: _tensor,
        torch.optim.Optimizer: _optimizer,
        types.MethodType: lambda self, obj: types.MethodType(*self.several([obj.__func__, obj.__self__])),
        functools.partial: _partial,
        property: lambda self, obj: self.keep(obj, property(*self.several([obj.fget, obj.fset]))),
        staticmethod: lambda self, obj: self.keep(obj, staticmethod(self.copied(obj.__func__))),
        classmethod: lambda self, obj: self.keep(obj, classmethod(self.copied(obj.__func__))),
        tuple: lambda self, obj: tuple(self.several(obj)),
        bytearray: lambda self, obj: self.keep(obj, bytearray(obj)),
        set: lambda self, obj: self.keep(obj, set(obj)),
        list: _container,
        deque: _container,
        dict: _dict,
    }

    # --- pushes ---

    def fill(self, copy: Any, obj: Any) -> None:
        """Give the rank's object what the notebook's has."""
        match copy:
            case list() | deque() | bytearray():
                content = self.several(obj)
                copy.clear()
                copy.extend(content)
            case dict() | set():
                content = self._plain(obj)
                copy.clear()
                copy.update(content)
            case types.FunctionType():
                copy.__code__ = obj.__code__
                self._fill_function(copy, obj)
            case types.CellType():
                self._fill_cell(copy, obj)
            case type():
                self._fill_class(copy, obj)
            case np.ndarray():
                copy[...] = obj
            case torch.Tensor():
                copy.untyped_storage().copy_(obj.untyped_storage())
                copy.requires_grad_(obj.requires_grad)
                copy.grad = self.copied(obj.grad)
            case torch.optim.Optimizer():
                copy.param_groups = self.copied(obj.param_groups)
                copy.state = self.copied(obj.state)
            case functools.partial() | property() | staticmethod() | classmethod():
                pass
            case _:
                content = self._plain(vars(obj))
                vars(copy).clear()
                vars(copy).update(content)

    def _plain(self, obj: Any) -> Any:
        return set(obj) if isinstance(obj, set) else {name: self.copied(value) for name, value in obj.items()}

    def _fill_function(self, copy: Any, obj: Any) -> None:
        copy.__defaults__, copy.__kwdefaults__ = (
            self.copied(obj.__defaults__),
            self.copied(obj.__kwdefaults__),
        )
        content = self._plain(vars(obj))
        vars(copy).clear()
        vars(copy).update(content)

    def _fill_cell(self, copy: Any, obj: Any) -> None:
        try:
            copy.cell_contents = self.copied(obj.cell_contents)
        except ValueError:
            return

    def _fill_class(self, copy: Any, obj: Any) -> None:
        left_out = looked._OF_EVERY_CLASS
        for name in [name for name in vars(copy) if name not in left_out and name not in vars(obj)]:
            delattr(copy, name)
        for name, value in list(vars(obj).items()):
            if name not in left_out:
                setattr(copy, name, self.copied(value))
