"""Pushing an object that the ranks have: its content replaces theirs, in the object that they have.

So all references to it there stay valid: an optimizer keeps stepping the model whose weights were pushed.
Objects that it holds are sent by key if the ranks have them, and are refreshed in turn.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import cloudpickle

from nblaunch.capture import arrays, recipes, tensors
from nblaunch.capture.parts import attributes_of, class_attributes, type_name

Content = tuple[str, Any]
"""How an object is filled, and with which data."""


class RefreshError(TypeError):
    """A rank's object cannot take the pushed content; the message says why."""


class ByValue:
    """Pickles as a copy of a tensor, a storage or an array, although the ranks have it."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __reduce__(self) -> Any:
        if isinstance(self.obj, arrays.Memory):
            return self.obj.by_value()
        if arrays.is_array(self.obj):
            reduced = arrays.reduce_alone(self.obj)
            return self.obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduced is NotImplemented else reduced
        return tensors.reduce_by_value(self.obj)


def content_of(obj: Any) -> Content | None:
    """Return the content that fills another object like `obj`, None if only a new object will do."""
    kind = type(obj)
    if kind in (list, deque):
        return "list", list(obj)
    if kind in (dict, OrderedDict):
        return "dict", dict(obj)
    if kind is defaultdict:
        return "defaultdict", (obj.default_factory, dict(obj))
    if kind is set:
        return "set", list(obj)
    if kind is bytearray:
        return "list", bytes(obj)
    if kind is arrays.Memory:
        return "memory", ByValue(obj)
    if arrays.is_array(obj):
        return ("array", ByValue(obj)) if kind.__module__ == "numpy" and kind.__name__ == "ndarray" else None
    if tensors.is_tensor(obj) or tensors.is_storage(obj):
        return "array", ByValue(obj)
    if kind is types.FunctionType:
        facts = obj.__code__, obj.__defaults__, obj.__kwdefaults__, dict(obj.__dict__)
        return "function", (*facts, obj.__closure__)
    if kind is types.CellType:
        return "cell", (obj.cell_contents,)
    if isinstance(obj, type):
        attributes = {name: value for name, value in class_attributes(obj) if name != "__module__"}
        return "class", (attributes, obj.__bases__)
    return _state_of(obj)


def _state_of(obj: Any) -> Content | None:
    # What cloudpickle has a way of its own for (a property, a static method) holds more than its state.
    if isinstance(obj, tuple | types.ModuleType) or type(obj) in cloudpickle.Pickler.dispatch_table:
        return None
    reduced = recipes.reduce(obj)
    if reduced is NotImplemented:
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple):
        return None
    make, arguments, *rest = reduced
    # What is made of nothing has all its content in the rest: `types.SimpleNamespace` has.
    usual = make is copyreg.__newobj__  # type: ignore[attr-defined] # pickle's own, which PEP 307 describes
    if not usual and (make is not type(obj) or arguments or not rest):
        return None
    given: tuple[Any, ...] = (*rest, None, None, None)
    state, elements, items = given[:3]
    state = dict(state) if type(state) is dict else state
    # Its class goes along: what is behind that (`Net.lr = 2`) is a part of the object for its user.
    return "object", (state, list(elements or ()), dict(items or ()), type(obj))


def fill(target: Any, content: Content) -> Callable[[], None]:
    """Return a function that fills `target`; raise `RefreshError` if it cannot be filled."""
    how, data = content
    return _filled_array(target, data) if how == "array" else functools.partial(_FILL[how], target, data)


def _fill_list(target: Any, data: Any) -> None:
    target.clear()
    target.extend(data)


def _fill_dict(target: Any, data: Any) -> None:
    target.clear()
    target.update(data)


def _fill_defaultdict(target: Any, data: Any) -> None:
    target.default_factory, items = data
    _fill_dict(target, items)


def _fill_function(target: Any, data: Any) -> None:
    # Its cells are filled on their own.
    target.__code__, target.__defaults__, target.__kwdefaults__, attributes, _ = data
    _fill_dict(target.__dict__, attributes)


def _fill_class(target: Any, content: tuple[dict[str, Any], Any]) -> None:
    data, _ = content
    for name in [name for name in vars(target) if name not in data and not name.startswith("__")]:
        delattr(target, name)
    for name, value in data.items():
        if vars(target).get(name) is not value and name not in ("__doc__", "__slots__"):
            setattr(target, name, value)


def _fill_object(target: Any, data: Any) -> None:
    state, elements, items, _ = data
    if isinstance(target, list | dict | deque):  # of a class of its own
        target.clear()
    if elements:
        target.extend(elements)
    for name, value in items.items():
        target[name] = value
    # As pickle does, but that its class is asked: a settings object may answer to any name.
    if state is not None and hasattr(type(target), "__setstate__"):
        # As to a new object: many only add to the attributes that there are.
        (attributes_of(target) or {}).clear()
        target.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if hasattr(target, "__dict__"):
        _fill_dict(target.__dict__, attributes or {})
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _fill_memory(target: Any, data: Any) -> None:
    if data is not None:  # a file has its content
        arrays.bytes_of(target)[:] = data


_FILL: dict[str, Callable[[Any, Any], None]] = {
    "list": _fill_list,
    "dict": _fill_dict,
    "defaultdict": _fill_defaultdict,
    "set": _fill_dict,
    "function": _fill_function,
    "cell": recipes.fill_cell,
    "class": _fill_class,
    "memory": _fill_memory,
    "object": _fill_object,
}


def _filled_array(target: Any, data: Any) -> Callable[[], None]:
    same = type(target) is type(data) and (
        tensors.is_storage(target) or (target.shape == data.shape and target.dtype == data.dtype)
    )
    if tensors.is_storage(target):
        same = same and target.nbytes() == data.nbytes()
    if same:
        return lambda: tensors.copy_content(target, data)
    if tensors.is_plain_tensor(target) and tensors.is_tensor(data):
        return lambda: setattr(target, "data", data.detach())
    msg = (
        f"a {type_name(target)} of shape {tuple(getattr(target, 'shape', ()))} on the ranks cannot take the "
        f"pushed one of shape {tuple(getattr(data, 'shape', ()))}. Assign it in a cell instead."
    )
    raise RefreshError(msg)
