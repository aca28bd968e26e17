"""Whether an object of the notebook was changed in place since the ranks got it.

Such a change does not travel to the ranks of a session, so a cell that uses the object there gets a notice.
A print of each object that is sent is kept: its size and its elements' identities, or a digest of its
content. It does not cover deeper objects, which have prints of their own. No code of the user runs for it.

Not detected: changes of large arrays that leave a sample of their elements alone, of files and other things
outside memory, and of objects of C extensions that are large or cannot be pickled.
"""

from __future__ import annotations

import copyreg
import functools
import io
import itertools
import pickle
import sys
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from nblaunch.capture import tensors
from nblaunch.capture.identity import ObjectTable, is_by_value
from nblaunch.capture.unpicklable import stored_attributes

_MOST_ELEMENTS = 1000
_ENDS = 100
_MOST_BYTES = 256 * 1024
_SAMPLE = 4096
_MOST_VISITED = 20_000
_ATOMS = (int, float, complex, bool, str, bytes, type(None))
_PLAIN = frozenset(_ATOMS)
# A session looks at many of these, and searching them for attributes takes half of the time.
_BARE = frozenset({dict, list, tuple, set, frozenset})
_NO_CHILDREN = frozenset({*_ATOMS, types.CodeType, types.ModuleType, types.BuiltinFunctionType, range})
_NOT_COMPARED = {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__"}


class Prints:
    """The prints of the objects that one table knows."""

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self._prints: dict[int, object] = {}

    def of(self, obj: Any) -> object:
        """Return the print of an object as it is now."""
        try:
            return _print_of(obj, self._mark)
        except Exception:  # noqa: BLE001 - an object in an odd state: it has no print
            return None

    def update(self, prints: Mapping[int, object]) -> None:
        """Keep prints, by key."""
        self._prints |= prints

    def copy(self) -> Prints:
        """Return prints that can be changed without these."""
        other = Prints(self._table)
        other._prints = dict(self._prints)
        return other

    def discard(self, keys: Iterable[int]) -> None:
        """Forget prints."""
        for key in keys:
            self._prints.pop(key, None)

    def changed(self, root: Any) -> bool:
        """Return whether `root`, or an object that it leads to, has another print than the one kept."""
        for obj in self.walk(root):
            key = self._table.key_of(obj)
            if key is not None and key in self._prints and self._prints[key] != self.of(obj):
                return True
        return False

    def walk(self, *roots: Any) -> Iterator[Any]:
        """Yield the roots and what they lead to, up to a bound; no plain values, no classes of libraries."""
        waiting = [root for root in roots if type(root) not in _NO_CHILDREN]
        visited = set(map(id, waiting))
        while waiting:
            obj = waiting.pop()
            yield obj
            if len(visited) > _MOST_VISITED:
                continue
            for child in _referred_by(obj):
                if type(child) not in _NO_CHILDREN and id(child) not in visited and self._follows(child):
                    visited.add(id(child))
                    waiting.append(child)

    @staticmethod
    def _follows(child: Any) -> bool:
        if isinstance(child, dict | list | set | tuple) and not child:
            return False  # its length is in the print of the object that holds it
        # Classes of libraries do not change, and lead everywhere.
        return not isinstance(child, type) or is_by_value(child)

    def _mark(self, child: Any) -> object:
        """Return what distinguishes a child: its value, or the identity of an object."""
        if type(child) in _PLAIN:
            return type(child), hash(child)
        key = self._table.key_of(child)
        return ("address", id(child)) if key is None else ("key", key)


def _print_of(obj: Any, mark: Callable[[Any], object]) -> object:
    kind = type(obj)
    if isinstance(obj, list | tuple):
        return kind, len(obj), tuple(map(mark, _some(obj)))
    if isinstance(obj, dict):
        items = obj if len(obj) <= _MOST_ELEMENTS else list(obj)[-_ENDS:]
        return kind, len(obj), tuple((mark(name), mark(obj[name])) for name in items), _attributes(obj, mark)
    if isinstance(obj, set | frozenset):
        return kind, len(obj), frozenset(map(mark, obj)) if len(obj) <= _MOST_ELEMENTS else None
    if isinstance(obj, bytearray):
        return len(obj), zlib.crc32(obj[:_MOST_BYTES])
    if kind is types.FunctionType:
        named = tuple(map(mark, (obj.__kwdefaults__ or {}).values()))
        cells = tuple(tuple(map(mark, _contents(cell))) for cell in obj.__closure__ or ())
        defaults = tuple(map(mark, obj.__defaults__ or ()))
        return id(obj.__code__), defaults, named, cells, _attributes(obj, mark)
    if isinstance(obj, type):
        return tuple((name, mark(value)) for name, value in vars(obj).items() if name not in _NOT_COMPARED)
    array = _array_print(obj)
    if array is not None:
        return array
    if kind.__dictoffset__ or kind is types.MethodType or _has_slots(kind):
        return id(kind), _attributes(obj, mark)
    return _digest(obj)


def _has_slots(kind: type) -> bool:
    """Whether a class of Python's has slots; those of C classes have members that pickle ignores."""
    namespaces = (vars(each) for each in kind.__mro__ if "__slots__" in vars(each))
    return any(type(each) is types.MemberDescriptorType for names in namespaces for each in names.values())


def _some(sequence: Any) -> Iterable[Any]:
    if len(sequence) <= _MOST_ELEMENTS:
        return tuple(sequence)
    return (*sequence[:_ENDS], *sequence[-_ENDS:])


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()  # the variable is not defined yet


def _attributes(obj: Any, mark: Callable[[Any], object]) -> tuple[object, ...]:
    """Return marks of an object's attributes, with the length of a container."""
    return tuple(
        (name, mark(value), len(value) if isinstance(value, dict | list | set) else 0)
        for name, value in _stored(obj)
    )


def _stored(obj: Any) -> Iterable[tuple[str, Any]]:
    if type(obj) in _BARE:
        return ()
    return stored_attributes(obj.__func__ if type(obj) is types.MethodType else obj)


def _array_print(obj: Any) -> object:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor):
        version = None if obj.is_inference() else obj._version  # noqa: SLF001 - documented, under this name only
        address = None
        with suppress(RuntimeError):  # a sparse tensor, or one without storage
            address = obj.data_ptr()
        return version, tuple(obj.shape), str(obj.dtype), obj.requires_grad, address
    if torch is not None and isinstance(obj, torch.UntypedStorage):
        return ("storage",)  # its tensors have versions
    if numpy is not None and isinstance(obj, numpy.ndarray) and not obj.dtype.hasobject:
        is_small = obj.nbytes <= _MOST_BYTES
        if not is_small and not obj.flags.c_contiguous:
            return obj.shape, str(obj.dtype)  # a sample of it would copy all of it
        sample = obj if is_small else obj.reshape(-1)[:: max(obj.size // _SAMPLE, 1)]
        return obj.shape, str(obj.dtype), zlib.crc32(numpy.ascontiguousarray(sample).view(numpy.uint8).data)
    return None


class _Bounded(io.RawIOBase):
    """Takes a digest of the bytes written, up to a bound."""

    def __init__(self) -> None:
        self.digest = self.size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        if self.size > _MOST_BYTES:
            raise OverflowError
        self.digest = zlib.crc32(data, self.digest)
        return len(data)


def _digest(obj: Any) -> object:
    """Return a digest of a small object whose content only C code can read."""
    if sys.getsizeof(obj, _MOST_BYTES) >= _MOST_BYTES:
        return None
    sink = _Bounded()
    pickle.Pickler(sink, protocol=5).dump(obj)
    return sink.size, sink.digest


def _referred_by(obj: Any) -> Iterable[Any]:
    kind = type(obj)
    if kind in (list, tuple):
        return _some(obj)
    if kind is types.FunctionType:
        cells = itertools.chain.from_iterable(map(_contents, obj.__closure__ or ()))
        return [*cells, *(obj.__defaults__ or ())]
    if isinstance(obj, type):
        return [*obj.__bases__, *(value for value in vars(obj).values() if type(value) is types.FunctionType)]
    attributes = [value for _, value in _stored(obj)]
    if isinstance(obj, dict):
        return [*_some(list(obj.values())), *attributes]
    elements = _some(list(obj)) if isinstance(obj, list | tuple | set | frozenset) else ()
    return [*elements, *attributes, kind]  # a class of the notebook is checked with its objects


# Pushing an object that the ranks have: its content replaces theirs, in the object that they have. So all
# references to it there stay valid: an optimizer keeps stepping the model whose weights were pushed. Objects
# that it holds are sent by key if the ranks have them, and are refreshed in turn.


Content = tuple[str, Any]
"""How an object is filled, and with which data."""

_NOT_REFRESHED = {"__dict__", "__weakref__", "__module__", "__abstractmethods__", "_abc_impl"}


class RefreshError(TypeError):
    """A rank's object cannot take the pushed content; the message says why."""


class ByValue:
    """Pickles as a copy of a tensor, a storage or an array, although the ranks have it."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __reduce__(self) -> Any:
        """Reduce to the content of the object."""
        return tensors.reduce_by_value(self.obj)


def content_of(obj: Any) -> Content | None:
    """Return the content that fills another object like `obj`, None if only a new object will do."""
    kind = type(obj)
    if kind in (list, deque):
        return "list", list(obj)
    if kind in (dict, OrderedDict, defaultdict):
        return "dict", dict(obj)
    if kind is set:
        return "set", list(obj)
    if kind is bytearray:
        return "list", bytes(obj)
    numpy = sys.modules.get("numpy")
    if tensors.is_tensor(obj) or tensors.is_storage(obj) or (numpy is not None and kind is numpy.ndarray):
        return "array", ByValue(obj)
    if kind is types.FunctionType:
        return "function", (obj.__code__, obj.__defaults__, obj.__kwdefaults__, dict(obj.__dict__))
    if isinstance(obj, type):
        plain = (types.GetSetDescriptorType, types.MemberDescriptorType)
        return "class", {
            name: value
            for name, value in vars(obj).items()
            if name not in _NOT_REFRESHED and not isinstance(value, plain)
        }
    return _state_of(obj)


def _state_of(obj: Any) -> Content | None:
    if isinstance(obj, tuple | types.ModuleType):
        return None
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
    return "object", (dict(state) if type(state) is dict else state, list(elements or ()), dict(items or ()))


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
    state, elements, items = data
    if isinstance(target, list | dict | deque):  # of a class of its own
        target.clear()
    if elements:
        target.extend(elements)
    for name, value in items.items():
        target[name] = value
    # As pickle does, but that its class is asked: a settings object may answer to any name.
    if state is not None and hasattr(type(target), "__setstate__"):
        target.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if hasattr(target, "__dict__"):
        _fill_dict(target.__dict__, attributes or {})
    for name, value in (slots or {}).items():
        setattr(target, name, value)


_FILL: dict[str, Callable[[Any, Any], None]] = {
    "list": _fill_list,
    "dict": _fill_dict,
    "set": _fill_dict,
    "function": _fill_function,
    "class": _fill_class,
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
    shown = f"{type(target).__module__}.{type(target).__qualname__}"
    msg = (
        f"a {shown} of shape {tuple(getattr(target, 'shape', ()))} on the ranks cannot take the pushed one "
        f"of shape {tuple(getattr(data, 'shape', ()))}. Assign it in a cell instead."
    )
    raise RefreshError(msg)
