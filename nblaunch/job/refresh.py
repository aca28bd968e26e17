"""Pushing an object that the ranks have: its content replaces theirs, in the object that they have.

So whatever refers to it there goes on doing so: an optimizer keeps stepping the model whose weights were
pushed. What an object holds is sent by key where the ranks have it, and is refreshed in turn.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from nblaunch.job import tensors

Content = tuple[str, Any]
"""How an object is filled, and with what."""

_DICTS = (dict, OrderedDict, defaultdict)
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__module__", "__abstractmethods__", "_abc_impl"})


class RefreshError(TypeError):
    """A rank's object cannot take the pushed content; says why."""


class ByValue:
    """Pickles as a copy of a tensor, a storage or an array, though the ranks have it."""

    def __init__(self, obj: Any) -> None:
        """Stand for `obj`."""
        self.obj = obj

    def __reduce__(self) -> Any:
        """Reduce to the content of the object."""
        return tensors.reduce_by_value(self.obj)


def content_of(obj: Any) -> Content | None:
    """Return what fills another object like `obj`, None where only a new one will do."""
    kind = type(obj)
    if kind is list or kind is deque:
        return "list", list(obj)
    if kind in _DICTS:
        return "dict", dict(obj)
    if kind is set:
        return "set", list(obj)
    if kind is bytearray:
        return "list", bytes(obj)
    if tensors.is_tensor(obj) or tensors.is_storage(obj):
        return "tensor", ByValue(obj)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return "array", ByValue(obj)
    if kind is types.FunctionType:
        return "function", (obj.__code__, obj.__defaults__, obj.__kwdefaults__, dict(obj.__dict__))
    if isinstance(obj, type):
        plain = (types.GetSetDescriptorType, types.MemberDescriptorType)
        return "class", {
            name: value
            for name, value in vars(obj).items()
            if name not in _OF_CLASSES and not isinstance(value, plain)
        }
    return _state_of(obj)


def _state_of(obj: Any) -> Content | None:
    if isinstance(obj, list | dict | set | tuple | type(sys)):
        return None
    reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple) or reduced[0].__name__ != "__newobj__":
        return None
    state = reduced[2] if len(reduced) > 2 else None  # noqa: PLR2004 - the state's place, by pickle's protocol
    return "object", dict(state) if type(state) is dict else state


def fill(target: Any, content: Content) -> Callable[[], None]:
    """Return what fills `target`; raises `RefreshError` if it cannot be filled, and changes nothing yet."""
    how, data = content
    if how in ("tensor", "array"):
        return _fill_array(target, data)
    if how == "object" and type(data) is not dict and not hasattr(target, "__setstate__"):
        return lambda: _set_slots(target, data)
    return lambda: _FILL[how](target, data)


def _fill_list(target: Any, data: Any) -> None:
    target.clear()
    target.extend(data)


def _fill_dict(target: Any, data: Any) -> None:
    target.clear()
    target.update(data)


def _fill_function(target: Any, data: Any) -> None:
    target.__code__, target.__defaults__, target.__kwdefaults__, attributes = data
    _fill_dict(target.__dict__, attributes)


def _fill_class(target: Any, data: Any) -> None:
    for name in [name for name in vars(target) if name not in data and not name.startswith("__")]:
        delattr(target, name)
    for name, value in data.items():
        if vars(target).get(name) is not value and name not in ("__doc__", "__slots__"):
            setattr(target, name, value)


def _fill_object(target: Any, data: Any) -> None:
    if hasattr(target, "__setstate__"):
        target.__setstate__(data)
    else:
        _fill_dict(target.__dict__, data or {})


_FILL: dict[str, Callable[[Any, Any], None]] = {
    "list": _fill_list,
    "dict": _fill_dict,
    "set": _fill_dict,
    "function": _fill_function,
    "class": _fill_class,
    "object": _fill_object,
}


def _set_slots(target: Any, data: Any) -> None:
    attributes, slots = data if isinstance(data, tuple) else (data, {})
    if hasattr(target, "__dict__"):
        _fill_dict(target.__dict__, attributes or {})
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _fill_array(target: Any, data: Any) -> Callable[[], None]:
    same = type(target) is type(data) and (
        tensors.is_storage(target) or (target.shape == data.shape and target.dtype == data.dtype)
    )
    if tensors.is_storage(target):
        same = same and target.nbytes() == data.nbytes()
    if same:
        return lambda: tensors.copy_content(target, data)
    if tensors.is_plain_tensor(target) and tensors.is_tensor(data):
        return lambda: setattr(target, "data", data.detach())
    shown = f"{type(target).__module__}.{type(target).__qualname__}"
    msg = (
        f"a {shown} of shape {tuple(getattr(target, 'shape', ()))} on the ranks cannot take the pushed one "
        f"of shape {tuple(getattr(data, 'shape', ()))}. Assign it in a cell instead."
    )
    raise RefreshError(msg)
