"""What objects are made of, as text that is the same wherever they are: in a notebook, on a rank, in a model.

It is imported on ranks, to which functions of modules go by name: looking at objects brings nothing there.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_ATOMS = (int, float, complex, bool, str, bytes, type(None))
_VALUES = (*_ATOMS, tuple, types.MethodType, types.CodeType)
"""Two of these that are equal are one to their user: they have no identity."""
_OF_EVERY_CLASS = {
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "__static_attributes__",
    "__slotnames__",
}
_OF_EVERY_CLASS |= {"__firstlineno__", "__annotations__", "__abstractmethods__", "_abc_impl"}


def is_notebooks(obj: Any) -> bool:
    """Return whether a class or function comes from a cell."""
    return getattr(obj, "__module__", None) == "__main__"


def has_identity(obj: Any) -> bool:
    """Return whether it matters which of several equal objects this is."""
    if isinstance(obj, type | types.FunctionType):
        return is_notebooks(obj)
    return not isinstance(obj, (*_VALUES, types.BuiltinFunctionType, types.ModuleType))


def taken_apart(obj: Any) -> tuple[Any, list[Any]]:
    """Return what tells an object of its kind from another one, and the objects of which it is made."""
    kind = type(obj)
    if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)) and not is_notebooks(obj):
        return getattr(obj, "__qualname__", "?"), []
    for known, parts in _PARTS.items():
        if issubclass(kind, known):
            return parts(obj)
    attributes = vars(obj) if hasattr(obj, "__dict__") else {}
    return (kind.__qualname__, *attributes), [kind, *attributes.values()]


def _of_function(function: Any) -> tuple[Any, list[Any]]:
    return "def", [
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
        function.__dict__ or None,
        *(function.__closure__ or ()),
    ]


def _of_code(code: types.CodeType) -> tuple[Any, list[Any]]:
    facts = code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars
    return facts, [each for each in code.co_consts if each is not code]


def _of_class(cls: type) -> tuple[Any, list[Any]]:
    items = [(name, value) for name, value in vars(cls).items() if name not in _OF_EVERY_CLASS]
    items.sort()
    return (cls.__name__, *(name for name, _ in items)), [*cls.__bases__, *(value for _, value in items)]


def _of_cell(cell: types.CellType) -> tuple[Any, list[Any]]:
    try:
        return "cell", [cell.cell_contents]
    except ValueError:
        return "empty cell", []


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, list[Any]]:
    facts = type(tensor).__name__, tensor.tolist(), tensor.stride(), tensor.requires_grad
    return facts, [tensor.grad]


_PARTS: dict[type, Callable[[Any], tuple[Any, list[Any]]]] = {
    **dict.fromkeys(_ATOMS, lambda obj: (repr(obj), [])),
    types.ModuleType: lambda obj: (obj.__name__, []),
    types.FunctionType: _of_function,
    types.CodeType: _of_code,
    types.CellType: _of_cell,
    type: _of_class,
    np.ndarray: lambda obj: (("array", obj.tolist(), obj.strides), []),
    torch.Tensor: _of_tensor,
    torch.optim.Optimizer: lambda obj: (type(obj).__name__, [obj.param_groups, obj.state]),
    types.MethodType: lambda obj: ("method", [obj.__func__, obj.__self__]),
    functools.partial: lambda obj: ("partial", [obj.func, obj.args, obj.keywords]),
    property: lambda obj: ("property", [obj.fget, obj.fset]),
    staticmethod: lambda obj: ("staticmethod", [obj.__func__]),
    classmethod: lambda obj: ("classmethod", [obj.__func__]),
    list: lambda obj: ("list", list(obj)),
    tuple: lambda obj: ("tuple", list(obj)),
    deque: lambda obj: ("deque", list(obj)),
    bytearray: lambda obj: (repr(obj), []),
    set: lambda obj: (("set", *sorted(map(repr, obj))), []),
    dict: lambda obj: (type(obj).__name__, [each for pair in obj.items() for each in pair]),
}


class _Look:
    """One description: objects are numbered where they are met first, so equal texts are equal sharing."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._memory: list[tuple[int, int]] = []

    def at(self, obj: Any) -> str:
        if has_identity(obj):
            if id(obj) in self._numbers:
                return f"#{self._numbers[id(obj)]}"
            self._numbers[id(obj)] = len(self._numbers)
            self._alive.append(obj)
        if isinstance(obj, np.ndarray | torch.Tensor) and (extent := memory_of(obj)) is not None:
            self._memory.append(extent)
        facts, parts = taken_apart(obj)
        inside = ", ".join(map(self.at, parts))
        return f"{facts}({inside})" if parts else f"{facts}"

    def sharing(self) -> Iterator[int]:
        """Return for each array and tensor the first one with which it shares memory."""
        for low, high in self._memory:
            yield next(i for i, (first, last) in enumerate(self._memory) if first < high and low < last)


def memory_of(obj: Any) -> tuple[int, int] | None:
    """Return where the elements of an array or a tensor are, None if it has none."""
    if isinstance(obj, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(obj)
        return (low, high) if obj.size else None
    if not obj.numel():
        return None
    size = 1 + sum((length - 1) * stride for length, stride in zip(obj.shape, obj.stride(), strict=True))
    return obj.data_ptr(), obj.data_ptr() + size * obj.element_size()


def at(*roots: Any) -> str:
    """Return all that these objects are, as text."""
    look = _Look()
    found = [look.at(root) for root in roots]
    return "; ".join([*found, str(list(look.sharing()))])


def called(function: Callable[[], Any]) -> str:
    """Return all that is known of what a call returns, or the class of what it raises."""
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - whatever the notebook's functions raise
        return type(error).__name__
    return at(result)


def reads(code: types.CodeType) -> set[str]:
    """Return the global names that a function's code reads."""
    import dis

    names = {each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    inner = (reads(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return names.union(*inner)


class Broken:
    """Can be sent, and cannot be read."""

    def __reduce__(self) -> Any:
        """Reduce to what raises."""
        return int, ("no number",)


def change_of(path: str, obj: Any, n: int, depth: int = 2) -> str:
    """Return a statement that changes this object in place, empty if nothing can; an odd `n` goes deeper."""
    if depth and n % 2:
        inner = _inner(path, obj)
        if inner is not None and (deeper := change_of(*inner, n // 2, depth - 1)):
            return deeper
    match obj:
        case list() | deque():
            return f"{path}.append({n})"
        case dict():
            return f"{path}['k'] = {n}"
        case set():
            return f"{path}.add({n})"
        case np.ndarray():
            return f"{path}[0] = {n}"
        case torch.Tensor():
            return f"with torch.no_grad(): {path}[0] = {n}"
        case torch.optim.Optimizer():
            return f"{path}.param_groups[0]['lr'] = {n}"
        case types.FunctionType():
            return f"{path}.__defaults__ = ({n},)" if obj.__defaults__ else f"{path}.tag = {n}"
        case type():
            return f"{path}.n = {n}" if n % 3 else f"{path}.get = lambda self: {n}"
        case types.SimpleNamespace() | torch.nn.Module():
            return f"{path}.k = {n}"
        case _:
            return f"{path}.k = {n}" if is_notebooks(type(obj)) else ""


def _inner(path: str, obj: Any) -> tuple[str, Any] | None:
    match obj:
        case [first, *_] if isinstance(obj, list | tuple):
            return f"{path}[0]", first
        case {"k": inner}:
            return f"{path}['k']", inner
        case functools.partial(args=(first, *_)):
            return f"{path}.args[0]", first
        case types.FunctionType(__kwdefaults__={"v": inner}):
            return f"{path}.__kwdefaults__['v']", inner
        case types.MethodType():
            return f"{path}.__self__", obj.__self__
        case torch.nn.Linear():
            return f"{path}.weight", obj.weight
        case type() | types.SimpleNamespace() if "k" in vars(obj):
            return f"{path}.k", obj.k
        case type() if "n" in vars(obj):
            return f"{path}.n", vars(obj)["n"]
        case _ if is_notebooks(type(obj)):
            return f"type({path})", type(obj)
    return None
