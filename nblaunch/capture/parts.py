"""What an object is made of, and how a user writes the step to each part: `model.trainer`, `batches[0]`.

`parts_of` runs no code of the user's: no property, no `__getattr__`, `__iter__`, `__len__` or `__repr__`. It
asks only the descriptors that Python and torch themselves put on types.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
import typing
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from cloudpickle import cloudpickle as _cloudpickle

from nblaunch.capture import tensors

Part: TypeAlias = tuple[str, object]
"""How the step from the whole to the part is written, and the part."""

LEAVES = frozenset({int, float, complex, bool, str, bytes, types.NoneType})
"""Values that refer to nothing."""

_SEQUENCES: tuple[type[Any], ...] = (list, tuple, deque)
_SETS: tuple[type[Any], ...] = (set, frozenset)
_KEY_LIMIT = 60
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made the class, not C code
_C_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_NEVER_SENT = frozenset({"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__builtins__"})
TORCH_CHILDREN = ("_parameters", "_buffers", "_modules")
"""Where a torch module keeps what its user knows as its attributes."""

# `type`'s own descriptors: with a metaclass, `cls.__mro__` and the like may be a property.
mro_of = type.__dict__["__mro__"].__get__
_bases_of = type.__dict__["__bases__"].__get__
namespace_of = type.__dict__["__dict__"].__get__
_qualname_of = type.__dict__["__qualname__"].__get__
_module_of = type.__dict__["__module__"].__get__


def parts_of(whole: Any) -> Iterator[Part]:
    """Yield what an object leads to; a class, function or module that is sent by its name leads nowhere."""
    kind = type(whole)
    # Not `isinstance`, which reads `whole.__class__`: that may be a property.
    if issubclass(kind, (type, types.FunctionType, types.ModuleType)) and not is_by_value(whole):
        return
    if issubclass(kind, type):
        yield from _parts_of_class(whole)
        return
    if issubclass(kind, types.FunctionType):
        yield from _parts_of_function(whole)
    elif issubclass(kind, dict):
        yield from _items(whole)
    elif issubclass(kind, _SEQUENCES):
        yield from _elements(whole)
    elif issubclass(kind, _SETS):
        yield from ((" (an element)", element) for element in _iterate(whole))
    elif tensors.is_tensor(whole):
        steps = (".grad", "._backward_hooks", "._post_accumulate_grad_hooks")
        yield from zip(steps, tensors.parts_of(whole) or (), strict=False)
    elif _stored(_stored(whole, "dtype"), "hasobject"):
        yield from _array_elements(whole)
    yield from _parts_in_c(whole)
    yield from named_parts(whole, attributes(whole))
    if kind not in LEAVES and is_by_value(kind):
        yield ".__class__", kind


def is_leaf(container: Any) -> bool:
    values = container.values() if isinstance(container, dict) else ()
    return LEAVES.issuperset(map(type, container)) and LEAVES.issuperset(map(type, values))


def type_name(value: object) -> str:
    """Return the qualified name of a value's type, bare for builtins; runs none of its code."""
    return class_name(type(value))


def class_name(cls: type) -> str:
    """Return the qualified name of a class, bare for builtins; runs none of its code."""
    module, name = _module_of(cls), _qualname_of(cls)
    return f"{name}" if type(module) is not str or module == "builtins" else f"{module}.{name}"


def is_by_value(obj: type | types.FunctionType | types.ModuleType) -> bool:
    """Return whether cloudpickle sends this class, function or module itself, not a name to import it by."""
    if isinstance(obj, type) and not obj.__flags__ & _HEAP_TYPE:
        return False
    return not _cloudpickle._should_pickle_by_reference(obj)  # noqa: SLF001 - its own answer, never ours


@dataclass(frozen=True, slots=True)
class Made:
    """Unpickles as what this makes, as `__reduce__` says it."""

    reduced: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


# Attributes


def attributes_getter(kind: type) -> Callable[[Any], Any] | None:
    """Return what gives the `__dict__` of objects of this type, None if they have none of their own."""
    for each in mro_of(kind):
        descriptor = namespace_of(each).get("__dict__")
        if descriptor is not None:
            # Code of the user's may have put anything there.
            return descriptor.__get__ if type(descriptor) in _C_DESCRIPTORS else None
    return None


def attributes_of(obj: object) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, None if it has none of its own; runs no code of the user's."""
    getter = attributes_getter(type(obj))
    stored = None if getter is None else getter(obj)
    return stored if type(stored) is dict else None


def set_attributes(obj: object, attributes: Mapping[str, Any]) -> None:
    obj.__dict__.update(attributes)


def attributes(whole: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes in the `__dict__` and the slots of an object."""
    own = list((attributes_of(whole) or {}).items())
    yield from (each for each in own if each[0] not in _NEVER_SENT)
    for each in mro_of(type(whole)):
        namespace = namespace_of(each)
        # Types written in C have such descriptors as well, for members that pickle ignores.
        for name, descriptor in namespace.items() if "__slots__" in namespace else ():
            if issubclass(type(descriptor), types.MemberDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    yield name, descriptor.__get__(whole)


def named_parts(whole: object, named: Iterable[tuple[object, Any]]) -> Iterator[Part]:
    is_module = tensors.is_module(whole)
    for name, value in named:
        if is_module and name in TORCH_CHILDREN and issubclass(type(value), dict):
            # As the user writes it: `model.trainer`, not `model._modules['trainer']`.
            for child, part in list(dict.items(value)):
                yield (f"[{child}]" if child.isdigit() else f".{child}"), part
        elif type(name) is str and name.isidentifier():
            yield f".{name}", value
        else:
            yield f".__dict__[{_written_key(name)}]", value


def states_of(state: Any) -> tuple[Any, ...]:
    """Return the dictionaries of a pickled state: the attributes and the slots; any other state as it is."""
    kinds = list(map(type, state)) if type(state) is tuple else []
    return state if kinds in ([types.NoneType, dict], [dict, dict]) else (state,)


def _lookup(kind: type, name: str) -> Any:
    """Return what a class has under `name` for its instances, None if it has nothing."""
    return next((namespace_of(each)[name] for each in mro_of(kind) if name in namespace_of(each)), None)


def _stored(value: object, name: str) -> Any:
    """Return the attribute `name` of `value` where it is stored in C (`ndarray.nbytes`), else None."""
    descriptor = _lookup(type(value), name)
    return descriptor.__get__(value) if type(descriptor) in _C_DESCRIPTORS else None


def fact_of(value: Any, name: str) -> Any:
    """Return what Python itself keeps of an object, `__name__` or `__wrapped__`; None if it has none."""
    if issubclass(type(value), type):
        descriptor = type.__dict__.get(name)
        return _lookup(value, name) if descriptor is None else descriptor.__get__(value)
    return (attributes_of(value) or {}).get(name, _stored(value, name))


def size_of(value: Any) -> int:
    """Return the size of a text, of the data of an array or tensor, or of the object itself, in bytes."""
    for text in (str, bytes, bytearray):
        if issubclass(type(value), text):
            return text.__len__(value)
    nbytes = _stored(value, "nbytes")
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value)


_IN_C: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (functools.partial, ("func", "args", "keywords")),
    (types.MethodType, ("__self__", "__func__")),
    (types.BuiltinMethodType, ("__self__",)),
    (BaseException, ("args",)),
    (defaultdict, ("default_factory",)),
)
"""Types that keep parts of their objects in C, and under which names."""


def _parts_in_c(whole: object) -> Iterator[Part]:
    for kind, names in _IN_C:
        if issubclass(type(whole), kind):
            yield from ((f".{name}", kind.__dict__[name].__get__(whole)) for name in names)


# Containers


def _items(whole: dict[object, object]) -> Iterator[Part]:
    for key, value in list(dict.items(whole)):
        yield f"[{_written_key(key)}]", value
        if type(key) not in LEAVES:
            yield f" (key {_written_key(key)})", key


def _elements(whole: Iterable[object]) -> Iterator[Part]:
    fields = _lookup(type(whole), "_fields") if issubclass(type(whole), tuple) else None
    names = fields if type(fields) is tuple and all(type(name) is str for name in fields) else ()
    for index, element in enumerate(_iterate(whole)):
        yield (f".{names[index]}" if index < len(names) else f"[{index}]"), element


def _iterate(whole: Iterable[object]) -> list[object]:
    """Return the elements of `whole`, past an `__iter__` of its own."""
    kind = next(each for each in (*_SEQUENCES, *_SETS) if issubclass(type(whole), each))
    return list(kind.__iter__(whole))


def _array_elements(array: Any) -> Iterator[Part]:
    for place, element in sys.modules["numpy"].ndenumerate(array):
        yield "".join(f"[{index}]" for index in place), element


def _written_key(key: object) -> str:
    """Return how a dict's key is written, in a few characters and without its own `__repr__`."""
    if type(key) in LEAVES or (type(key) is tuple and LEAVES.issuperset(map(type, key))):
        text = repr(key)
        return text if len(text) <= _KEY_LIMIT else text[: _KEY_LIMIT - 1] + "…"
    return f"<{type_name(key)}>"


# Functions and classes


def _parts_of_function(function: types.FunctionType) -> Iterator[Part]:
    code = function.__code__
    yield from ((f" (closure variable {name})", value) for name, value in closure_of(function).items())
    for name in dict.fromkeys(global_names(function)):
        if name in function.__globals__:
            yield f" (global {name})", function.__globals__[name]
    defaults = function.__defaults__ or ()
    with_defaults = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    by_name = dict(zip(with_defaults, defaults, strict=True)) | (function.__kwdefaults__ or {})
    yield from ((f" (default of {name})", value) for name, value in by_name.items())


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell is empty until the variable is defined
            found[name] = cell.cell_contents
    return found


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


def class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class itself, but for those that Python makes for each class."""
    for name, value in list(namespace_of(cls).items()):
        if name not in _NEVER_SENT and type(value) not in _C_DESCRIPTORS:
            yield name, value


def _parts_of_class(cls: type) -> Iterator[Part]:
    for name, value in class_attributes(cls):
        yield from ((f".{name}", part) for part in functions_in(value))
    yield from ((f".__bases__[{index}]", base) for index, base in enumerate(_bases_of(cls)))


def functions_in(value: Any) -> tuple[object, ...]:
    """Return the functions inside a method as a class keeps it; any other value is returned as it is."""
    if issubclass(type(value), (staticmethod, classmethod)):
        return (value.__func__,)
    if issubclass(type(value), property):
        return value.fget, value.fset, value.fdel
    return (value,)


# The names in annotations that are text: `typing.get_type_hints` looks them up where the code runs.
# Dataclasses for argument parsers, and what `from __future__ import annotations` makes of any annotation.

_NAMED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, int, str, types.NoneType)
_OF_TYPES = frozenset({"typing", "typing_extensions", "types"})
_DEEPEST = 10


def annotation_names(obj: Any, namespace: Mapping[str, Any]) -> frozenset[str]:
    """Return the names in the annotations of a function or class that are text.

    Those that are data in the notebook are left out: `Literal["weights"]` means no variable.
    """
    names: set[str] = set()
    with suppress(Exception):  # from Python 3.14 on, this runs the annotations
        annotations = vars(obj).get("__annotations__") if isinstance(obj, type) else obj.__annotations__
        for each in (annotations or {}).values():
            names.update(_names_in(each))
    return frozenset(name for name in names if name not in namespace or _is_named(namespace[name]))


def _names_in(annotation: Any, depth: int = _DEEPEST) -> Iterator[str]:
    if type(annotation) is str:
        yield from _names_in_text(annotation)
    elif type(annotation) is typing.ForwardRef:
        yield from _names_in_text(annotation.__forward_arg__)
    elif depth:
        for each in typing.get_args(annotation):
            yield from _names_in(each, depth - 1)


@functools.lru_cache(maxsize=10_000)
def _names_in_text(text: str) -> frozenset[str]:
    """Return the names in an annotation, also in text within it: `Optional["Node"]`."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError, RecursionError):  # `Float[Tensor, "batch seq"]`
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and type(node.value) is str:
                names |= _names_in_text(node.value)
    return frozenset(names)


def _is_named(value: object) -> bool:
    """Return whether an annotation may mean this: a class, a module, a form of `typing`; no data."""
    return issubclass(type(value), _NAMED) or type(value).__module__ in _OF_TYPES
