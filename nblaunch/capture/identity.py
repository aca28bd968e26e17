"""Which object is which on both sides of a session: a key for every object that the ranks have got.

The notebook and each rank keep a table of the same keys. An object that the ranks have is sent as its key, so
another name for it, a container that holds it or an optimizer over it refers to the rank's own object when it
arrives.

A table keeps nothing alive. Most objects take a weak reference; lists, dictionaries and a few others do not.
The table holds those, and releases each one that has no other reference: on `sweep`, and whenever Python's
collector runs over its oldest generation (`gc.collect()` does), which also covers cycles.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nblaunch.capture.parts import LEAVES, attributes_of, is_by_value

MOST_OBJECTS = 200_000
"""How many objects of one payload get a key: in a larger structure, those found first."""

_VALUE_TYPES = LEAVES | frozenset(
    {tuple, frozenset, range, slice}
    | {types.EllipsisType, types.NotImplementedType, types.CodeType, types.ModuleType}
    | {types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType}
)
_MEMORY = frozenset({"ndarray", "memmap", "Memory", "UntypedStorage"})
_TORCH_VALUES = frozenset({"device", "dtype", "Size", "layout", "memory_format", "TypedStorage"})
_STOPS = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
)
_FOLLOWED = frozenset({list, dict, tuple, set})
_MOST_VISITED = 200_000
# Of the container that holds the object, of the local variable, and of the argument of `getrefcount`.
_OWN_REFERENCES = 3


def has_identity(obj: object) -> bool:
    """Return whether two names for `obj` must lead to one object: not for values and importable objects.

    >>> has_identity([1]), has_identity(1), has_identity(len), has_identity(int)
    (True, False, False, False)
    """
    kind = type(obj)
    if kind in _VALUE_TYPES or (kind.__module__ == "torch" and kind.__name__ in _TORCH_VALUES):
        return False
    return not isinstance(obj, type | types.FunctionType) or is_by_value(obj)


class _Weak(weakref.ref[Any]):
    """A weak reference that knows its entry."""

    __slots__ = ("address", "key")
    address: int
    key: int


class ObjectTable:
    """Objects by key, and keys by object, of one process."""

    def __init__(self) -> None:
        """Until `close` the garbage collector calls the table back."""
        self._entries: dict[int, _Weak | None] = {}
        self._held: dict[int, Any] = {}
        self._keys: dict[int, int] = {}
        self._lost: list[int] = []
        self._memories: set[int] = set()
        """Keys of objects that are, or were, memory of NumPy's or torch's."""
        self.attached: dict[int, Any] = {}
        """What is kept for an object as long as it is known, by key."""
        self._sweeping = threading.Lock()
        table = weakref.ref(self)

        def collecting(phase: str, info: dict[str, int]) -> None:
            this = table()
            if this is not None and phase == "start" and info["generation"] == 2:  # noqa: PLR2004 - the oldest
                this.sweep(cycles=True)

        self._collecting = collecting
        gc.callbacks.append(collecting)

    def close(self) -> None:
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)
        self.clear()

    def clear(self) -> None:
        self._entries, self._held, self._keys, self._lost, self.attached = {}, {}, {}, [], {}
        self._memories = set()

    def add(self, obj: Any, key: int) -> None:
        """Know `obj` by `key`, which no other object has."""
        address = id(obj)
        self._keys[address] = key
        if type(obj).__name__ in _MEMORY:
            self._memories.add(key)
        try:
            weak = _Weak(obj, self._died)
        except TypeError:
            self._entries[key] = None
            self._held[key] = obj
            return
        weak.address, weak.key = address, key
        self._entries[key] = weak

    def key_of(self, obj: Any) -> int | None:
        """Return the key of exactly this object."""
        key = self._keys.get(id(obj))
        return key if key is not None and self.get(key) is obj else None

    def get(self, key: int) -> Any:
        weak = self._entries.get(key)
        return self._held.get(key) if weak is None else weak()

    def memories(self) -> list[tuple[int, Any]]:
        """Return the arrays, memories of arrays and storages, with their keys."""
        found = [(key, obj) for key in list(self._memories) if (obj := self.get(key)) is not None]
        self._memories = {key for key, _ in found}
        return found

    def discard(self, keys: Iterable[int]) -> None:
        for key in keys:
            obj = self.get(key)
            if obj is not None and self._keys.get(id(obj)) == key:
                del self._keys[id(obj)]
            self._entries.pop(key, None)
            self._held.pop(key, None)
            self.attached.pop(key, None)

    def lost(self) -> tuple[int, ...]:
        """Return the keys of objects that have gone since the last call."""
        self.sweep()
        lost, self._lost = self._lost, []
        return tuple(lost)

    def alive(self) -> list[Any]:
        """Return all objects; they live as long as the list."""
        return [obj for key in list(self._entries) if (obj := self.get(key)) is not None]

    def sweep(self, *, cycles: bool = False) -> None:
        """Release objects that only this table holds; with `cycles` also those that hold each other."""
        # The collector may call this on any thread, also in the middle of a sweep.
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            while self._drop(self._sole()):
                pass
            if cycles:
                self._drop([key for key, _ in _orphans(list(self._held.items()), _referents)])
        finally:
            self._sweeping.release()

    def _sole(self) -> list[int]:
        found = []
        for key in list(self._held):
            obj = self._held.get(key)
            if sys.getrefcount(obj) == _OWN_REFERENCES:
                found.append(key)
        return found

    def _drop(self, keys: list[int]) -> bool:
        for key in keys:
            obj = self._held.pop(key, None)
            if obj is not None:
                self._keys.pop(id(obj), None)
                self._entries.pop(key, None)
                self.attached.pop(key, None)
                self._lost.append(key)
        return bool(keys)

    def _died(self, weak: weakref.ref[Any]) -> None:
        assert isinstance(weak, _Weak)  # noqa: S101 - `add` made it
        if self._entries.get(weak.key) is weak:
            del self._entries[weak.key]
            self.attached.pop(weak.key, None)
            self._lost.append(weak.key)
        if self._keys.get(weak.address) == weak.key:
            del self._keys[weak.address]


def _orphans(held: list[tuple[int, Any]], referents: Callable[[Any], Iterable[Any]]) -> list[tuple[int, Any]]:
    """Return which of the held objects are referred to only by one holder (besides `held`) and each other.

    This is the collector's method, without the references of the holder: count the references from within. An
    object with more references than those is alive, with all objects that it reaches.
    """
    waiting = [obj for _, obj in held]
    addresses = set(map(id, waiting))
    found: dict[int, Any] = {}
    within: Counter[int] = Counter()
    while waiting:
        obj = waiting.pop()
        if id(obj) in found:
            continue
        if len(found) >= _MOST_VISITED:
            return []
        found[id(obj)] = obj
        for each in referents(obj):
            within[id(each)] += 1
            waiting.append(each)
    obj = each = None
    alive = []
    for address in list(found):  # not `.items()`, whose iterator refers to the last item
        obj = found[address]
        own = _OWN_REFERENCES + (2 if address in addresses else 0)
        if sys.getrefcount(obj) - own > within[address]:
            alive.append(address)
    reached = set(alive)
    while alive:
        for each in referents(found[alive.pop()]):
            # Another thread may have put a new object into it meanwhile.
            if id(each) not in reached and id(each) in found:
                reached.add(id(each))
                alive.append(id(each))
    return [entry for entry in held if id(entry[1]) not in reached]


def _referents(obj: Any) -> Iterator[Any]:
    if _leads_everywhere(obj):
        return  # objects that it alone refers to count as alive
    if type(obj) is types.FunctionType:  # its globals lead everywhere, too
        found: Iterable[Any] = (obj.__closure__, obj.__defaults__, obj.__kwdefaults__, obj.__dict__)
    else:
        found = gc.get_referents(obj)
    for each in found:
        kind = type(each)
        if kind in _VALUE_TYPES and kind is not tuple:
            continue
        if kind in _FOLLOWED or (gc.is_tracked(each) and not _leads_everywhere(each)):
            yield each


def _leads_everywhere(obj: Any) -> bool:
    """Return whether an object may lead to all of a program: not so the notebook's functions and classes.

    A class whose methods use `super()` is in a cell of theirs, which takes no weak reference.
    """
    if isinstance(obj, type | types.FunctionType):
        return not is_by_value(obj)
    return isinstance(obj, _STOPS)


def found_in(memo: Mapping[int, tuple[int, Any]], root: object) -> list[tuple[int, Any]]:
    """Return the objects with an identity that a pickler has written, each with its place in the pickle.

    `memo` is a copy of the pickler's: address -> (place, object). The unpickler has the same places. Objects
    that only the pickler has are left out, since nothing can refer to them again: the state of an object,
    copied for it, and `root`, which holds the variables.
    """
    held = [entry for entry in memo.values() if type(entry[1]) not in LEAVES]
    # The pickler refers to each object, and so does its entry in the copy.
    addresses = {id(obj) for _, obj in held}
    # An object's own dictionary fills another one on the rank.
    attributes = {id(stored) for _, obj in held if (stored := attributes_of(obj)) is not None}
    temporary = {
        place
        for place, _ in _orphans(
            held, lambda obj: [each for each in gc.get_referents(obj) if id(each) in addresses]
        )
    }
    found = (
        entry
        for entry in held
        if entry[0] not in temporary
        and entry[1] is not root
        and id(entry[1]) not in attributes
        and has_identity(entry[1])
    )
    return list(itertools.islice(found, MOST_OBJECTS))
