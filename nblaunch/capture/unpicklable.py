"""The part of a notebook value that cannot be sent, and the path to it: `model.trainer._lock`.

`parts_of` takes an object apart as pickle would, without calling its properties. It uses only the descriptors
that Python itself puts on types, so an object whose `__getattr__`, `__iter__`, `__len__` or `__repr__` raises
or waits is taken apart like any other. Pickling's own hooks do run: `__reduce__` and `__getstate__`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import types
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

from cloudpickle import cloudpickle as _cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


T = TypeVar("T")
Part: TypeAlias = tuple[str, object]
"""How the step from the whole to the part is written, and the part."""

_CONTAINERS: tuple[type[Any], ...] = (list, tuple, deque, set, frozenset)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType, types.NotImplementedType)
_KEY_LIMIT = 60
_PICKLE_PROTOCOL = 4

# `type`'s own descriptors: with a metaclass, `cls.__mro__` and the like may be a property.
_mro_of = type.__dict__["__mro__"].__get__
_bases_of = type.__dict__["__bases__"].__get__
_namespace_of = type.__dict__["__dict__"].__get__
_qualname_of = type.__dict__["__qualname__"].__get__
_module_of = type.__dict__["__module__"].__get__

_C_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_NEVER_SENT = frozenset({"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__builtins__"})
# What `object.__getstate__` gives for an object with slots: its `__dict__`, if any, and the slots.
_STATES_WITH_SLOTS = ([type(None), dict], [dict, dict])
_TORCH_CHILDREN = frozenset({"_modules", "_parameters", "_buffers"})
_DEPTH_LIMIT = 50
_REASON_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Culprit:
    """The part that cannot be sent: `path` leads to it from the notebook variable `name`.

    `type_name` is qualified (`_thread.lock`), bare for builtins. `size` is in bytes: the data of an
    array or tensor, otherwise the object itself. `reason` is one line of the exception's text.
    """

    name: str
    path: str
    type_name: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Failed:
    """A part that cannot be sent, and where it was found."""

    path: str
    value: object
    error: Exception
    depth: int = 0


def find_culprit(
    roots: Mapping[str, object],
    can_send: Callable[[object], Exception | None],
    *,
    seconds: float = 5.0,
) -> Culprit | None:
    """Return the deepest part of `roots` that makes them fail `can_send`, or None if all pass.

    `can_send` returns the exception that pickling its argument raises, or None. The search follows the first
    root that fails, depth first, into its first part that fails as well, until a part fails none of whose
    parts fails. After `seconds` it returns the deepest part found by then. It raises nothing whatever the
    objects do, changes none of them and calls none of their properties.
    """
    search = _Search(can_send, time.monotonic() + seconds)
    for name, value in roots.items():
        error = search.error_of(value)
        if error is not None:
            root = _Failed(name, value, error)
            found = search.follow(root) or search.deepest or root
            return Culprit(
                name, found.path, type_name(found.value), _size_of(found.value), _reason(found.error)
            )
    return None


class _Search:
    """One search for the part to blame; remembers each object that it has tried."""

    def __init__(self, can_send: Callable[[object], Exception | None], deadline: float) -> None:
        self.deepest: _Failed | None = None
        self._can_send = can_send
        self._deadline = deadline
        # With the objects themselves: the id of a freed object may be reused.
        self._errors: dict[int, tuple[object, Exception | None]] = {}
        self._followed: set[int] = set()

    def follow(self, failed: _Failed) -> _Failed | None:
        """Return the deepest part to blame inside `failed`, or None in a circle."""
        if self.deepest is None or failed.depth > self.deepest.depth:
            self.deepest = failed
        self._followed.add(id(failed.value))
        is_innermost = True
        for part in self._failed_parts(failed):
            is_innermost = False
            if id(part.value) not in self._followed and (found := self.follow(part)):
                return found
        return failed if is_innermost else None

    def error_of(self, value: object) -> Exception | None:
        """Return why `value` cannot be sent, None if it can be."""
        if id(value) not in self._errors:
            try:
                error = self._can_send(value)
            except Exception as unexpected:  # noqa: BLE001  # user code, which may raise anything
                error = unexpected
            self._errors[id(value)] = (value, error)
        return self._errors[id(value)][1]

    def _failed_parts(self, whole: _Failed) -> Iterator[_Failed]:
        if whole.depth >= _DEPTH_LIMIT:
            return
        # An exception of an odd object that is taken apart ends the list of its parts, and nothing else.
        with suppress(Exception):
            for step, value in _parts_of(whole.value):
                if time.monotonic() > self._deadline:
                    return
                if not _is_atom(value) and (error := self.error_of(value)) is not None:
                    yield _Failed(whole.path + step, value, error, whole.depth + 1)


def _reason(error: Exception) -> str:
    text = ""
    with suppress(Exception):
        text = " ".join(str(error).split())
    text = text or type_name(error)
    return text if len(text) <= _REASON_LIMIT else text[: _REASON_LIMIT - 1] + "…"


def _size_of(value: object) -> int:
    """Return the size of `value` in bytes, 0 if it is not known."""
    with suppress(Exception):
        for text_type in (str, bytes, bytearray):
            if _is_a(value, text_type):
                return text_type.__len__(value)  # type: ignore[arg-type]  # is_a has looked
        if isinstance(nbytes := _static_attribute(value, "nbytes"), int):
            return nbytes
        return sys.getsizeof(value)
    return 0


# Taking objects apart, as pickle would.


def _is_atom(value: object) -> bool:
    return any(type(value) is atom for atom in _ATOMS)


def _is_a(value: object, kind: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    # `isinstance` reads `value.__class__`, which may be a property.
    return issubclass(type(value), kind)


def type_name(value: object) -> str:
    """Return the qualified name of a value's type, bare for builtins; runs none of its code."""
    module, name = _module_of(type(value)), _qualname_of(type(value))
    return f"{name}" if type(module) is not str or module == "builtins" else f"{module}.{name}"


def _static_attribute(value: object, name: str) -> object:
    """Return the attribute `name` of `value` where it is stored in C (`ndarray.nbytes`), else None."""
    _, descriptor = _lookup(type(value), name)
    return descriptor.__get__(value) if isinstance(descriptor, _C_DESCRIPTORS) else None


def _parts_of(whole: object) -> Iterator[Part]:
    if _is_a(whole, type):
        yield from _parts_of_class(whole)
    elif _is_a(whole, types.FunctionType):
        yield from _parts_of_function(whole)
    elif _is_a(whole, functools.partial):
        yield from _parts_of_partial(whole)
    elif _is_a(whole, types.MethodType):
        yield ".__self__", whole.__self__
        yield ".__func__", whole.__func__
    elif _is_a(whole, types.BuiltinMethodType) and not _is_a(whole.__self__, types.ModuleType):
        yield ".__self__", whole.__self__
    else:
        yield from _parts_of_instance(whole)


def _parts_of_instance(whole: object) -> Iterator[Part]:
    if _is_a(whole, dict):
        yield from _items(whole)
        if _is_a(whole, defaultdict):
            yield ".default_factory", _static_attribute(whole, "default_factory")
        yield from _attributes(whole)
    elif _is_a(whole, (list, tuple, deque)):
        yield from _elements(whole)
        yield from _attributes(whole)
    elif _is_a(whole, (set, frozenset)):
        yield from ((" (an element)", element) for element in _iterate(whole))
        yield from _attributes(whole)
    elif _is_a(whole, BaseException):
        yield ".args", _static_attribute(whole, "args")
        yield from _attributes(whole)
    elif isinstance(_static_attribute(whole, "nbytes"), int):
        yield from _array_parts(whole)
    else:
        yield from _state(whole)
    if _is_sent_whole(type(whole)):
        yield ".__class__", type(whole)


# Containers


def _items(whole: dict[object, object]) -> Iterator[Part]:
    for key, value in list(dict.items(whole)):
        yield f"[{_written_key(key)}]", value
        yield f" (key {_written_key(key)})", key


def _elements(whole: Iterable[object]) -> Iterator[Part]:
    _, fields = _lookup(type(whole), "_fields")
    is_named = _is_a(whole, tuple) and _is_a(fields, tuple) and all(type(name) is str for name in fields)
    steps = [f".{name}" for name in fields] if is_named else []
    for index, element in enumerate(_iterate(whole)):
        yield (steps[index] if index < len(steps) else f"[{index}]"), element


def _array_parts(array: object) -> Iterator[Part]:
    """Yield the elements of NumPy's arrays of objects; other arrays and tensors are all data."""
    if _static_attribute(_static_attribute(array, "dtype"), "hasobject"):
        _, tolist = _lookup(type(array), "tolist")
        yield from _elements(tolist(array))
    yield from _attributes(array)


def _iterate(whole: Iterable[object]) -> list[object]:
    """Return the elements of `whole`, past an `__iter__` of its own."""
    kind = next(each for each in _CONTAINERS if _is_a(whole, each))
    return list(kind.__iter__(whole))


def _written_key(key: object) -> str:
    """Return how a dict's key is written, in a few characters and without its own `__repr__`."""
    if _is_atom(key) or (type(key) is tuple and all(map(_is_atom, key))):
        text = repr(key)
        return text if len(text) <= _KEY_LIMIT else text[: _KEY_LIMIT - 1] + "…"
    return f"<{type_name(key)}>"


# Functions


def _parts_of_function(function: types.FunctionType) -> Iterator[Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell is empty until the variable is defined
            yield f" (closure variable {name})", cell.cell_contents
    for name in dict.fromkeys(global_names(function)):
        if name in function.__globals__:
            yield f" (global {name})", function.__globals__[name]
    defaults = function.__defaults__ or ()
    with_defaults = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    by_name = dict(zip(with_defaults, defaults, strict=True)) | (function.__kwdefaults__ or {})
    yield from ((f" (default of {name})", value) for name, value in by_name.items())
    yield from _attributes(function)


def global_names(function: types.FunctionType) -> Iterator[str]:
    """Yield the global names that are pickled with a function, also those that are not defined."""
    yield from _cloudpickle._extract_code_globals(function.__code__)  # noqa: SLF001 - the names it sends
    yield from _names_of_class_bodies(function.__code__)


def _names_of_class_bodies(code: types.CodeType) -> Iterator[str]:
    """Yield the names that classes within a function look up; cloudpickle follows functions only."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            if not each.co_flags & inspect.CO_OPTIMIZED:  # a class body, whose names are no local variables
                yield from each.co_names
            yield from _names_of_class_bodies(each)


def _parts_of_partial(whole: object) -> Iterator[Part]:
    func, args, keywords = (
        functools.partial.__dict__[name].__get__(whole) for name in ("func", "args", "keywords")
    )
    yield ".func", func
    yield from ((f".args{step}", value) for step, value in _elements(args))
    yield from ((f".keywords{step}", value) for step, value in _items(keywords))
    yield from _attributes(whole)


# Classes


def _is_sent_whole(cls: type) -> bool:
    """Return whether `cls` is pickled by value, as it cannot be imported on a rank."""
    return _module_of(cls) == "__main__" or "<locals>" in _qualname_of(cls)


def _parts_of_class(cls: type) -> Iterator[Part]:
    if not _is_sent_whole(cls):
        return
    for name, value in list(_namespace_of(cls).items()):
        if name in _NEVER_SENT or isinstance(value, _C_DESCRIPTORS):
            continue
        yield from ((f".{name}", part) for part in _unwrapped(value))
    yield from ((f".__bases__[{index}]", base) for index, base in enumerate(_bases_of(cls)))


def _unwrapped(value: object) -> tuple[object, ...]:
    """Return the functions inside a method as a class keeps it."""
    if _is_a(value, staticmethod) or _is_a(value, classmethod):
        return (value.__func__,)
    if _is_a(value, property):
        return value.fget, value.fset, value.fdel
    return (value,)


def _lookup(cls: type, name: str) -> tuple[type, Any]:
    """Return the class that defines `name` for instances of `cls`, and the value there; None if none does."""
    for each in _mro_of(cls):
        if name in _namespace_of(each):
            return each, _namespace_of(each)[name]
    return object, None


# Everything else


def _attributes(whole: object) -> Iterator[Part]:
    yield from _named(whole, stored_attributes(whole))


def _named(whole: object, attributes: Iterable[tuple[object, object]]) -> Iterator[Part]:
    is_torch_module = any(
        _qualname_of(each) == "Module" and f"{_module_of(each)}".startswith("torch.nn")
        for each in _mro_of(type(whole))
    )
    for name, value in attributes:
        if is_torch_module and name in _TORCH_CHILDREN and _is_a(value, dict):
            # As the user writes it: `model.trainer`, not `model._modules['trainer']`.
            for child, part in list(dict.items(value)):
                yield (f"[{child}]" if child.isdigit() else f".{child}"), part
        elif name not in _NEVER_SENT:
            yield _attribute_step(name), value


def _attribute_step(name: object) -> str:
    is_plain = type(name) is str and name.isidentifier()
    return f".{name}" if is_plain else f".__dict__[{_written_key(name)}]"


def stored_attributes(whole: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes in the `__dict__` and the slots of an object, and run no code of its own."""
    namespaces = [_namespace_of(each) for each in _mro_of(type(whole))]
    for namespace in namespaces:
        if "__dict__" in namespace:
            descriptor = namespace["__dict__"]
            stored = descriptor.__get__(whole) if isinstance(descriptor, _C_DESCRIPTORS) else None
            if _is_a(stored, dict):
                yield from list(dict.items(stored))
            break
    for namespace in namespaces:
        # Types written in C have such descriptors as well, for members that pickle ignores.
        slots = namespace.items() if "__slots__" in namespace else ()
        for name, descriptor in slots:
            if _is_a(descriptor, types.MemberDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    yield name, descriptor.__get__(whole)


def _state(whole: object) -> Iterator[Part]:
    """Yield what pickle takes from `whole`: its attributes, unless it has pickling hooks of its own."""
    reduced = _own_answer(whole, "__reduce_ex__", _PICKLE_PROTOCOL)
    if reduced is None:
        reduced = _own_answer(whole, "__reduce__")
    if _is_a(reduced, tuple):
        yield from _reduced_parts(whole, *reduced)
    elif reduced is None and (state := _own_answer(whole, "__getstate__")) is not None:
        yield from _state_parts(whole, state)
    elif reduced is None:
        yield from _attributes(whole)


def _own_answer(whole: object, method: str, *args: object) -> object:
    """Return the result of `method` of `whole`, or None if the method is `object`'s."""
    owner, found = _lookup(type(whole), method)
    return None if owner is object else found.__get__(whole, type(whole))(*args)


def _reduced_parts(
    whole: object, _rebuild: object, args: tuple[object, ...], state: object = None, *_: object
) -> Iterator[Part]:
    for index, arg in enumerate(_iterate(args)):
        if arg is not type(whole):
            yield _step_to(whole, arg) or f" (argument {index} of its __reduce__)", arg
    yield from _state_parts(whole, state)


def _state_parts(whole: object, state: object) -> Iterator[Part]:
    if _is_a(state, dict):
        yield from _named(whole, list(dict.items(state)))
    elif _is_a(state, tuple) and list(map(type, state)) in _STATES_WITH_SLOTS:
        for each in state:
            yield from _state_parts(whole, each)
    elif _is_a(state, list) or _is_a(state, tuple):
        for index, value in enumerate(_iterate(state)):
            yield _step_to(whole, value) or f" (its state)[{index}]", value
    elif state is not None:
        yield " (its state)", state


def _step_to(whole: object, part: object) -> str | None:
    """Return the attribute of `whole` that holds `part`."""
    return next((step for step, value in _attributes(whole) if value is part), None)
