"""What notebooks define and cloudpickle cannot send: caches, cached properties, dispatch, new types.

The standard library pickles some of these by name, which a rank cannot look up in the notebook, and others
not at all, for a lock or a weak reference that means nothing elsewhere.
"""

from __future__ import annotations

import functools
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle as _cloudpickle

_CachedFunction: type = type(functools.cache(id))
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


def reduce(obj: Any) -> Any:
    """Return how to rebuild one of these, `NotImplemented` for anything else."""
    kind = type(obj)
    if kind is _CachedFunction and _is_notebooks_own(obj):
        return _cached_function, (obj.__wrapped__, obj.cache_parameters())
    if kind is functools.cached_property:
        return _cached_property, (obj.func, obj.attrname)
    if kind is typing.NewType and _is_notebooks_own(obj):
        return _new_type, (obj.__name__, obj.__supertype__, obj.__module__)
    # `functools.singledispatch` keeps both in the function that it makes.
    if kind in _WEAK:
        return kind, (dict(obj),)
    if kind is types.MappingProxyType:
        return kind, (dict(obj),)
    return NotImplemented


def _is_notebooks_own(obj: object) -> bool:
    return _cloudpickle._lookup_module_and_qualname(obj) is None  # noqa: SLF001 - as for functions and classes


def _cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made


def _cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _new_type(name: str, supertype: Any, module: str) -> Any:
    made = typing.NewType(name, supertype)  # type: ignore[misc] # not for a type checker
    made.__module__ = module
    return made
