"""The part of a notebook value that cannot be sent, and the path to it: `model.trainer._lock`.

`parts_of` takes an object apart as pickle would, without calling its properties. It uses only the descriptors
that Python itself puts on types, so an object whose `__getattr__`, `__iter__`, `__len__` or `__repr__` raises
or waits is taken apart like any other. Pickling's own hooks do run: `__reduce__` and `__getstate__`.
"""

from __future__ import annotations

import dis
import functools
import sys
import time
import types
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

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

    name: str
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
        failed = search.try_part(_Failed(name, name, value, TypeError()))
        if failed is not None:
            return _culprit(search.follow(failed) or search.deepest or failed)
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

    def try_part(self, part: _Failed) -> _Failed | None:
        """Return `part` with its error, or None if it can be sent."""
        value = part.value
        if id(value) not in self._errors:
            try:
                error = self._can_send(value)
            except Exception as unexpected:  # noqa: BLE001  # user code, which may raise anything
                error = unexpected
            self._errors[id(value)] = (value, error)
        _, error = self._errors[id(value)]
        return None if error is None else _Failed(part.name, part.path, value, error, part.depth)

    def _failed_parts(self, whole: _Failed) -> Iterator[_Failed]:
        if whole.depth >= _DEPTH_LIMIT:
            return
        # An exception of an odd object that is taken apart ends the list of its parts, and nothing else.
        with suppress(Exception):
            for step, value in parts_of(whole.value):
                if time.monotonic() > self._deadline:
                    return
                part = _Failed(whole.name, whole.path + step, value, whole.error, whole.depth + 1)
                if not is_atom(value) and (failed := self.try_part(part)):
                    yield failed


def _culprit(failed: _Failed) -> Culprit:
    return Culprit(
        name=failed.name,
        path=failed.path,
        type_name=type_name(failed.value),
        size=_size(failed.value),
        reason=_reason(failed.error),
    )


def _reason(error: Exception) -> str:
    text = ""
    with suppress(Exception):
        text = " ".join(str(error).split())
    text = text or type_name(error)
    return text if len(text) <= _REASON_LIMIT else text[: _REASON_LIMIT - 1] + "…"


def _size(value: object) -> int:
    """Return the size of `value` in bytes, 0 if it is not known."""
    with suppress(Exception):
        for text_type in (str, bytes, bytearray):
            if is_a(value, text_type):
                return text_type.__len__(value)  # type: ignore[arg-type]  # is_a has looked
        if isinstance(nbytes := static_attribute(value, "nbytes"), int):
            return nbytes
        return sys.getsizeof(value)
    return 0


# Taking objects apart, as pickle would.


def is_atom(value: object) -> bool:
    """Return whether `value` is of a builtin type that can always be sent."""
    return any(type(value) is atom for atom in _ATOMS)


def is_a(value: object, kind: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Return `isinstance(value, kind)` without reading `value.__class__`, which may be a property."""
    return issubclass(type(value), kind)


def type_name(value: object) -> str:
    """Return the qualified name of the type of `value`, bare for a builtin."""
    module, name = _module_of(type(value)), _qualname_of(type(value))
    return f"{name}" if type(module) is not str or module == "builtins" else f"{module}.{name}"


def static_attribute(value: object, name: str) -> object:
    """Return the attribute `name` of `value` where it is stored in C (`ndarray.nbytes`), else None."""
    _, descriptor = _lookup(type(value), name)
    return descriptor.__get__(value) if isinstance(descriptor, _C_DESCRIPTORS) else None


def parts_of(whole: object) -> Iterator[Part]:
    """Yield the parts that are pickled with `whole`."""
    if is_a(whole, type):
        yield from _parts_of_class(whole)
    elif is_a(whole, types.FunctionType):
        yield from _parts_of_function(whole)
    elif is_a(whole, functools.partial):
        yield from _parts_of_partial(whole)
    elif is_a(whole, types.MethodType):
        yield ".__self__", whole.__self__
        yield ".__func__", whole.__func__
    elif is_a(whole, types.BuiltinMethodType) and not is_a(whole.__self__, types.ModuleType):
        yield ".__self__", whole.__self__
    else:
        yield from _parts_of_instance(whole)


def _parts_of_instance(whole: object) -> Iterator[Part]:
    if is_a(whole, dict):
        yield from _items(whole)
        if is_a(whole, defaultdict):
            yield ".default_factory", static_attribute(whole, "default_factory")
        yield from _attributes(whole)
    elif is_a(whole, (list, tuple, deque)):
        yield from _elements(whole)
        yield from _attributes(whole)
    elif is_a(whole, (set, frozenset)):
        yield from ((" (an element)", element) for element in _iterate(whole))
        yield from _attributes(whole)
    elif is_a(whole, BaseException):
        yield ".args", static_attribute(whole, "args")
        yield from _attributes(whole)
    elif isinstance(static_attribute(whole, "nbytes"), int):
        yield from _array_parts(whole)
    else:
        yield from _state(whole)
    if _is_sent_whole(type(whole)):
        yield ".__class__", type(whole)


# Containers


def _items(whole: dict[object, object]) -> Iterator[Part]:
    for key, value in list(dict.items(whole)):
        yield f"[{_key(key)}]", value
        yield f" (key {_key(key)})", key


def _elements(whole: Iterable[object]) -> Iterator[Part]:
    _, fields = _lookup(type(whole), "_fields")
    is_named = is_a(whole, tuple) and is_a(fields, tuple) and all(type(name) is str for name in fields)
    steps = [f".{name}" for name in fields] if is_named else []
    for index, element in enumerate(_iterate(whole)):
        yield (steps[index] if index < len(steps) else f"[{index}]"), element


def _array_parts(array: object) -> Iterator[Part]:
    """Yield the elements of NumPy's arrays of objects; other arrays and tensors are all data."""
    if static_attribute(static_attribute(array, "dtype"), "hasobject"):
        _, tolist = _lookup(type(array), "tolist")
        yield from _elements(tolist(array))
    yield from _attributes(array)


def _iterate(whole: Iterable[object]) -> list[object]:
    """Return the elements of `whole`, past an `__iter__` of its own."""
    kind = next(each for each in _CONTAINERS if is_a(whole, each))
    return list(kind.__iter__(whole))


def _key(key: object) -> str:
    """Return how a dict's key is written, in a few characters and without its own `__repr__`."""
    if is_atom(key) or (type(key) is tuple and all(map(is_atom, key))):
        text = repr(key)
        return text if len(text) <= _KEY_LIMIT else text[: _KEY_LIMIT - 1] + "…"
    return f"<{type_name(key)}>"


# Functions


def _parts_of_function(function: types.FunctionType) -> Iterator[Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell is empty until the variable is defined
            yield f" (closure variable {name})", cell.cell_contents
    for name in dict.fromkeys(_global_names(code)):
        if name in function.__globals__:
            yield f" (global {name})", function.__globals__[name]
    defaults = function.__defaults__ or ()
    with_defaults = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    by_name = dict(zip(with_defaults, defaults, strict=True)) | (function.__kwdefaults__ or {})
    yield from ((f" (default of {name})", value) for name, value in by_name.items())
    yield from _attributes(function)


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


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
    if is_a(value, staticmethod) or is_a(value, classmethod):
        return (value.__func__,)
    if is_a(value, property):
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
    """Yield the attributes in the `__dict__` and the slots of `whole`."""
    yield from _named(whole, _stored(whole))


def _named(whole: object, attributes: Iterable[tuple[object, object]]) -> Iterator[Part]:
    is_torch_module = any(
        _qualname_of(each) == "Module" and f"{_module_of(each)}".startswith("torch.nn")
        for each in _mro_of(type(whole))
    )
    for name, value in attributes:
        if is_torch_module and name in _TORCH_CHILDREN and is_a(value, dict):
            # As the user writes it: `model.trainer`, not `model._modules['trainer']`.
            yield from ((_child_step(child), part) for child, part in list(dict.items(value)))
        elif name not in _NEVER_SENT:
            yield _attribute_step(name), value


def _attribute_step(name: object) -> str:
    is_plain = type(name) is str and name.isidentifier()
    return f".{name}" if is_plain else f".__dict__[{_key(name)}]"


def _child_step(name: str) -> str:
    return f"[{name}]" if name.isdigit() else f".{name}"


def _stored(whole: object) -> Iterator[tuple[object, object]]:
    stored = static_attribute(whole, "__dict__")
    if is_a(stored, dict):
        yield from list(dict.items(stored))
    for each in _mro_of(type(whole)):
        namespace = _namespace_of(each)
        # Types written in C have such descriptors as well, for members that pickle ignores.
        slots = namespace.items() if "__slots__" in namespace else ()
        for name, descriptor in slots:
            if is_a(descriptor, types.MemberDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    yield name, descriptor.__get__(whole)


def _state(whole: object) -> Iterator[Part]:
    """Yield what pickle takes from `whole`: its attributes, unless it has pickling hooks of its own."""
    reduced = _own_answer(whole, "__reduce_ex__", _PICKLE_PROTOCOL)
    if reduced is None:
        reduced = _own_answer(whole, "__reduce__")
    if is_a(reduced, tuple):
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
    if is_a(state, dict):
        yield from _named(whole, list(dict.items(state)))
    elif is_a(state, tuple) and list(map(type, state)) in _STATES_WITH_SLOTS:
        for each in state:
            yield from _state_parts(whole, each)
    elif is_a(state, list) or is_a(state, tuple):
        for index, value in enumerate(_iterate(state)):
            yield _step_to(whole, value) or f" (its state)[{index}]", value
    elif state is not None:
        yield " (its state)", state


def _step_to(whole: object, part: object) -> str | None:
    """Return the attribute of `whole` that holds `part`."""
    return next((step for step, value in _attributes(whole) if value is part), None)
