"""What was sent of each object, and whether the notebook has changed it since.

The pickler is the walk. The *frame* of an object is its own part of a pickle, in which objects that the ranks
have are keys. A digest of it is kept for each object that is sent, with the keys that it refers to and, for a
function, the global names that it reads. So what is compared is what would be sent: nothing that would travel
changes unseen, and what pickling leaves out gives no notice. Frames refer to each other by key, and hold no
object.

Of the user's code only pickling's own hooks run (`__reduce__`, `__getstate__`).

Not compared: the elements of a tensor (its version and its address are), arrays and containers beyond a size
but for a sample, what pickles differently each time, and what using an object fills: cached properties, weak
dictionaries.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import operator
import pickle
import types
import typing
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from nblaunch.capture import arrays, identity, tensors
from nblaunch.capture.parts import LEAVES, attributes_getter, class_attributes, is_leaf, mro_of, namespace_of
from nblaunch.capture.pickling import WITH_SETTER, Guarded, is_pandas

MOST_BYTES = 16 << 20
"""Of an array or a frame; beyond it, an array is compared by its shape and a sample."""
MOST_ELEMENTS = 200_000
"""Of a container; beyond it, one is compared by its length and a sample."""
_SAMPLE = 4096
_LARGE = 10_000
"""Elements of a container that is found equal more quickly than its digest is made."""
_SMALL = 1024
"""Characters or elements of a value that is kept to be compared."""
_MOST_VISITED = 20_000
_STATE = 2
"""Where a reduction has the state of the object."""
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
"""The garbage collector changes them, too."""
_CONTAINERS = frozenset({dict, list, set, frozenset, OrderedDict})
_FUNCTION_ATTRIBUTES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__annotations__",
)
_FUNCTION_PARTS = ("__code__", *_FUNCTION_ATTRIBUTES)
_BUILT_IN = (type, types.FunctionType, dict, list, set, frozenset, tuple, str, bytes, int, float, complex)
_NO_FRAME = LEAVES | {types.CodeType, types.ModuleType}


@dataclass(frozen=True, slots=True)
class ObjectFrame:
    """One object as it would be sent: a digest, None if it cannot be compared; holds no object."""

    digest: object
    children: tuple[int, ...] = ()
    """The keys of the objects that it refers to."""
    names: frozenset[str] = frozenset()
    """The global names that it reads."""


_UNKNOWN = ObjectFrame(None)
CHANGED = ObjectFrame("changed")
"""Of an object that is not as the ranks have it."""


class SentFrames:
    """The frames of the objects that some ranks have, as these were sent."""

    def __init__(self, table: identity.ObjectTable) -> None:
        self._table = table
        self._frames: dict[int, ObjectFrame] = {}
        self._names: dict[int, frozenset[str]] = {}
        """What `names` has found for one object."""
        self.shortcuts: dict[int, _Shortcut] = {}
        """For objects that were found unchanged."""

    def __contains__(self, key: int) -> bool:
        return key in self._frames

    def get(self, key: int) -> ObjectFrame | None:
        return self._frames.get(key)

    def update(self, frames: Mapping[int, ObjectFrame]) -> None:
        if not self._frames.keys().isdisjoint(frames):
            self._names.clear()
            self.shortcuts.clear()
        self._frames |= frames

    def copy(self) -> SentFrames:
        other = SentFrames(self._table)
        other._frames = dict(self._frames)
        return other

    def discard(self, keys: Iterable[int]) -> set[int]:
        return {key for key in keys if self._frames.pop(key, None) is not None}

    def names(self, keys: Iterable[int]) -> frozenset[str]:
        """Return the global names that functions read to which these objects led when they were sent."""
        found: frozenset[str] = frozenset()
        for key in keys:
            if key not in self._names:
                frames = (self._frames.get(each) for each in self.reached_from(key))
                self._names[key] = frozenset().union(*(frame.names for frame in frames if frame is not None))
            found |= self._names[key]
        return found

    def reached_from(self, key: int) -> set[int]:
        """Return the keys of the objects to which an object led when it was sent, with its own."""
        waiting, reached = [key], {key}
        while waiting:
            frame = self._frames.get(waiting.pop())
            for child in () if frame is None else frame.children:
                if child not in reached:
                    reached.add(child)
                    waiting.append(child)
        return reached


class Inspection:
    """One walk over objects of the notebook, beside the frames of what was sent."""

    def __init__(
        self, table: identity.ObjectTable, frames: SentFrames, namespace: dict[str, Any] | None
    ) -> None:
        """Functions of `namespace` are the notebook's, as those of `__main__` are."""
        self._table = table
        self._sent = frames
        self._namespace = namespace
        self._verdicts: dict[int, tuple[bool, tuple[int, ...]]] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        """By the key of a memory, the digests of its parts as it is now."""

    @functools.cached_property
    def _pickler(self) -> _FramePickler:
        return _FramePickler(self._key_of, self._namespace)

    def _key_of(self, obj: Any) -> int | None:
        # A value (a tuple, a dtype) may have a key as a variable, and has none within an object.
        key = self._table.key_of(obj)
        return key if key is not None and identity.has_identity(obj) else None

    def frame(self, obj: Any) -> ObjectFrame:
        return self._pickler.frame(obj)

    def arriving(self, new: Mapping[int, Any], filled: Iterable[int]) -> dict[int, ObjectFrame]:
        """Return the frames of new objects, and of those whose content has been pushed, by key."""
        frames = {key: self.frame(obj) for key, obj in new.items()}
        pushed = {key: self._table.get(key) for key in filled}
        frames |= {key: self.frame(obj) for key, obj in pushed.items()}
        for key, obj in new.items():
            if type(obj) is arrays.Memory and self._was_changed(obj.root(), frames):
                frames[key] = ObjectFrame((None,) * arrays.PARTS)
        for obj in pushed.values():
            self._refresh(frames, obj)
        for key, obj in new.items():
            # A new view of memory that the ranks have shows what is there.
            if not self._is_current(frames, obj):
                frames[key] = CHANGED
        return frames

    def _was_changed(self, array: Any, frames: Mapping[int, ObjectFrame]) -> bool:
        """Return whether the ranks have an array, and it has been changed."""
        key = self._key_of(array)
        sent = None if key is None or key in frames else self._sent.get(key)
        return sent is not None and _differs(sent, self.frame(array))

    def _memory_as_sent(
        self, frames: Mapping[int, ObjectFrame], root: Any
    ) -> tuple[int, list[Any], tuple[int, ...]] | None:
        """Return the key of an array's memory, and digests of its parts as they were sent and as they are."""
        memory = arrays.memory_of(root)
        key = None if memory is None else self._key_of(memory)
        sent = None if key is None else frames.get(key, self._sent.get(key))
        if key is None or sent is None or not isinstance(sent.digest, tuple):
            return None
        if key not in self._parts:
            self._parts[key] = arrays.digests(root)
        return key, list(sent.digest), self._parts[key]

    def _refresh(self, frames: dict[int, ObjectFrame], pushed: Any) -> None:
        """Compare what shares memory with pushed content with what it is now."""
        root, low, high = arrays.shown_by(pushed)
        found = None if root is None else self._memory_as_sent(frames, root)
        if found is None:
            return
        memory, sent, now = found
        for part in arrays.parts_within(root, low, high, wholly=True) if now else ():
            sent[part] = now[part]
        frames[memory] = ObjectFrame(tuple(sent))
        for key, obj in self._table.memories():
            other, first, end = arrays.shown_by(obj)
            if key not in self._sent or other is not root or type(obj) is arrays.Memory:
                continue
            if low <= first <= end <= high or self._is_current(frames, obj):
                frames[key] = self.frame(obj)

    def _is_current(self, frames: Mapping[int, ObjectFrame], obj: Any) -> bool:
        """Return whether the ranks have the bytes that a view shows, if they have its memory."""
        root, low, high = arrays.shown_by(obj)
        found = None if root is None else self._memory_as_sent(frames, root)
        if found is None or not found[-1]:
            return True
        _, sent, now = found
        return all(sent[part] == now[part] for part in arrays.parts_within(root, low, high, wholly=False))

    def changed(self, root: Any, sent: ObjectFrame | None = None) -> bool:
        """Return whether `root`, or an object that it leads to, has another frame than was sent.

        `sent` is the frame of a root that has none by its key: a tuple, a bound method.
        """
        if type(root) in _NO_FRAME:
            return False
        key = self._key_of(root)
        if key is None or key not in self._sent:
            now = self.frame(root)
            if sent is not None and _differs(sent, now):
                return True
            waiting = list(now.children)
        else:
            waiting = [key]
        return any(self._changed_within(each) for each in waiting)

    def _changed_within(self, root: int) -> bool:
        """Return whether an object with a key, or one to which it leads, has changed."""
        shortcut = self._sent.shortcuts.pop(root, None)
        if shortcut is None or not shortcut.holds(self._judged):
            waiting, seen = [root], {root}
            while waiting and len(seen) < _MOST_VISITED:
                changed, children = self._verdict(waiting.pop())
                if changed:
                    return True
                for child in children:
                    if child not in seen:
                        seen.add(child)
                        waiting.append(child)
            if not all(key in self._sent for key in seen):
                return False  # of what is about to be sent there is nothing to compare with
            shortcut = _Shortcut(self._table, self._sent, seen, self._key_of)
        self._sent.shortcuts[root] = shortcut
        return False

    def _verdict(self, key: int) -> tuple[bool, tuple[int, ...]]:
        """Return whether an object has changed, and what it refers to."""
        known = self._verdicts.get(key)
        if known is None:
            known = self._verdicts[key] = self._judged(key)
        return known

    def _judged(self, key: int) -> tuple[bool, tuple[int, ...]]:
        sent, obj = self._sent.get(key), self._table.get(key)
        if obj is None:
            return False, ()  # it is gone: the object that held it has another frame
        if sent is None:
            return False, self.frame(obj).children
        if type(sent.digest) is _Leaf:
            return not self._is_leaf_still(key, obj, sent.digest), ()
        if sent.digest is None:
            return False, sent.children
        return _differs(sent, self.frame(obj)), sent.children

    def _is_leaf_still(self, key: int, container: Any, digest: _Leaf) -> bool:
        large = type(container) in _CONTAINERS and _LARGE < len(container) <= MOST_ELEMENTS
        known_as, columns = self._table.attached.get(key, (None, ())) if large else (None, ())
        # One column after the other: each takes the memory of the last.
        if known_as == digest and all(map(operator.eq, columns, _columns(container))):
            return True
        same = digest == _leaf_digest(container)
        if large and same:
            self._table.attached[key] = digest, list(_columns(container))
        return same


def _differs(sent: ObjectFrame, now: ObjectFrame) -> bool:
    return sent.digest is not None and sent.digest != now.digest


class _Shortcut:
    """What to compare, mostly in C, to know that objects are as a whole walk found them: unchanged.

    An object whose parts are its attributes or elements is compared by the identity of these. That is sound
    for parts that have a key, as they are alive, and for small values, which are held here: a freed object's
    address is used again. A dictionary or a list is found through the object that holds it, depth by depth.
    """

    def __init__(
        self,
        table: identity.ObjectTable,
        sent: SentFrames,
        keys: Iterable[int],
        key_of: Callable[[Any], int | None],
    ) -> None:
        self._key_of = key_of
        self._get = table.get
        self._objects: list[weakref.ref[Any]] = []
        self._getters: list[Callable[[Any], Any]] = []
        self._leaves: list[weakref.ref[Any]] = []
        self._whole: list[int] = []
        self._held: dict[int, Any] = {}
        self._getter_of: dict[type, Callable[[Any], Any] | None] = {}
        containers: dict[int, tuple[int, Any]] = {}
        for key in keys:
            obj, frame = table.get(key), sent.get(key)
            if obj is None or frame is None:
                continue
            if tensors.is_plain_leaf(obj):
                self._leaves.append(weakref.ref(obj))
            elif not self._is_made_of_parts(obj):
                self._whole.append(key)
            elif type(obj) in _CONTAINERS:
                containers[id(obj)] = key, obj
        leaves = [reference() for reference in self._leaves]
        self._facts, self._gradients = tensors.quick_facts(leaves), tensors.gradients(leaves)
        self._roots: list[int] = []
        self._depths = self._made_depths(containers)
        self._getter_of.clear()  # a class is free to go

    def _is_made_of_parts(self, obj: Any) -> bool:
        """Return whether the identity of its parts tells if an object has changed; note its attributes."""
        kind = type(obj)
        if kind in _CONTAINERS and not obj:
            return True
        if kind is list:
            return self._can_hold(obj)
        if kind not in self._getter_of:
            self._getter_of[kind] = None if kind is dict else _attributes_getter(kind)
        getter = self._getter_of[kind]
        named = obj if getter is None else getter(obj)
        if type(named) is not dict or not all(type(name) is str for name in named):
            return False
        if not self._can_hold(named.values()):
            return False
        if getter is not None:
            self._objects.append(weakref.ref(obj))
            self._getters.append(getter)
        return True

    def _can_hold(self, parts: Iterable[Any]) -> bool:
        """Return whether all parts have a key or are small values, which are held from here on."""
        held = {id(part): part for part in parts if type(part) in LEAVES or self._key_of(part) is None}
        if len(held) > _SMALL or not all(map(_is_small_value, held.values())):
            return False
        self._held |= held
        return True

    def _made_depths(self, containers: dict[int, tuple[int, Any]]) -> list[_Depth]:
        """Return depths that have all containers; those that no object holds are roots."""
        outside = dict(containers)
        _depths(*self._tops(), outside)
        for address, (key, obj) in outside.items():
            if obj:
                self._roots.append(key)
            else:
                self._whole.append(key)
            del containers[address]
        return _depths(*self._tops(), containers)

    def _tops(self) -> tuple[list[Any], list[Any]]:
        """Return the dictionaries and the lists of the least depth."""
        roots = list(map(self._get, self._roots))
        attributes = list(map(operator.call, self._getters, map(operator.call, self._objects)))
        dicts = attributes + [root for root in roots if type(root) is dict]
        return dicts, [root for root in roots if type(root) is not dict]

    def holds(self, judged: Callable[[int], tuple[bool, tuple[int, ...]]]) -> bool:
        """Return whether nothing has changed; if not, only a whole walk can tell."""
        try:
            dicts, lists = self._tops()
            for depth in self._depths:
                parts = depth.parts(dicts, lists)
                if parts is None:
                    return False
                dicts, lists = depth.dicts(parts), depth.lists(parts)
            leaves = list(map(operator.call, self._leaves))
            if tensors.quick_facts(leaves) != self._facts or tensors.gradients(leaves) != self._gradients:
                return False
        except (AttributeError, TypeError):
            return False  # an object is gone
        return not any(judged(key)[0] for key in self._whole)


class _Depth:
    """Dictionaries and lists that objects hold, and those that these hold in turn."""

    def __init__(self, dicts: list[Any], lists: list[Any], containers: dict[int, tuple[int, Any]]) -> None:
        """Take those of `containers` out that are held here."""
        self._names, parts = _parted(dicts, lists)
        held: dict[str, list[int]] = {"empty": [], "dict": [], "list": []}
        for place, each in enumerate(parts):
            if containers.pop(id(each), None) is not None:
                held[type(each).__name__ if each else "empty"].append(place)
        self._empty, self.dicts, self.lists = map(_getter, held.values())
        self._ids = list(map(id, parts))
        self.is_last = not (held["dict"] or held["list"])

    def parts(self, dicts: list[Any], lists: list[Any]) -> list[Any] | None:
        """Return what these containers hold, None if it is not what they held before."""
        names, parts = _parted(dicts, lists)
        if names != self._names or list(map(id, parts)) != self._ids or any(self._empty(parts)):
            return None
        return parts


def _depths(dicts: list[Any], lists: list[Any], containers: dict[int, tuple[int, Any]]) -> list[_Depth]:
    depths: list[_Depth] = []
    while not depths or not depths[-1].is_last:
        depths.append(depth := _Depth(dicts, lists, containers))
        parts = _parted(dicts, lists)[1]
        dicts, lists = depth.dicts(parts), depth.lists(parts)
    return depths


def _parted(dicts: list[Any], lists: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the sizes and the names, and the parts, of containers."""
    parts = chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(lists))
    return [*map(len, dicts), *map(len, lists), *chain.from_iterable(dicts)], list(parts)


def _getter(places: list[int]) -> Callable[[list[Any]], Any]:
    if not places:
        return lambda _: ()
    return operator.itemgetter(*places, *places[:1])  # of a single place it would give the bare element


def _attributes_getter(kind: type) -> Callable[[Any], Any] | None:
    """Return what gives the attributes of an object that pickle takes apart into these; else None."""
    if kind is types.FunctionType:
        return _function_parts
    if kind is type:
        return _class_parts
    usual = all(
        inspect.getattr_static(kind, name, None) is object.__dict__.get(name)
        for name in ("__reduce__", "__reduce_ex__")
    )
    usual = usual and tensors.has_usual_state(kind) and kind not in copyreg.dispatch_table
    plain = usual and not issubclass(kind, _BUILT_IN) and kind.__weakrefoffset__ > 0
    plain = plain and not copyreg._slotnames(kind)  # type: ignore[attr-defined] # noqa: SLF001 - what pickle asks
    return attributes_getter(kind) if plain else None


def _function_parts(function: types.FunctionType) -> dict[str, Any]:
    return {**function.__dict__, **{name: getattr(function, name) for name in _FUNCTION_PARTS}}


def _class_parts(cls: type) -> dict[str, Any]:
    parts = dict(class_attributes(cls))
    _drop_bookkeeping(parts)
    return {**parts, "__bases__": cls.__bases__}


def _is_small_value(obj: Any, depth: int = 3) -> bool:
    """Return whether an object never changes, leads to nothing large, and can be kept alive."""
    kind = type(obj)
    if kind in (str, bytes):
        return len(obj) <= _SMALL
    if kind is tuple:
        return depth > 0 and len(obj) <= _SMALL and all(_is_small_value(each, depth - 1) for each in obj)
    if issubclass(kind, type | types.FunctionType):
        return not identity.has_identity(obj)
    return (
        kind in LEAVES
        or kind in (types.CodeType, types.ModuleType, types.BuiltinFunctionType)
        or (kind.__module__ == "torch" and not identity.has_identity(obj))
    )


class _Leaf(tuple[Any, ...]):
    """The digest of a container that holds values only: no key is looked for in it."""

    __slots__ = ()


def _leaf_digest(container: Any) -> _Leaf:
    """Return the digest of a container of numbers and texts; of any other, one that no such container has.

    C code alone runs for each element.
    """
    kind = type(container)
    if kind not in _CONTAINERS:
        return _Leaf()  # it holds something else by now
    if not container:
        return _Leaf((kind, 0))
    sink = _Digest()
    pickler = _ValuesOnly(sink, protocol=5)
    pickler.fast = True
    try:
        pickler.dump(list(_sample(container)) if len(container) > MOST_ELEMENTS else container)
    except OverflowError:
        pass  # what came before is compared, and the length
    except Exception:  # noqa: BLE001 - it holds other things
        return _Leaf()
    return _Leaf((kind, len(container), *sink.state()))


def _columns(container: Any) -> Iterator[list[Any]]:
    yield list(container)
    if isinstance(container, dict):
        yield list(container.values())


class _ValuesOnly(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if obj is complex or type(obj) in (OrderedDict, complex):
            return NotImplemented
        raise TypeError


def _sample(container: Any) -> Iterator[Any]:
    """Yield some elements of a large container, the first and the last among them."""
    elements = container.items() if isinstance(container, dict) else container
    step = len(container) // _SAMPLE
    yield from islice(elements, 0, len(container), step)
    yield from islice(reversed(elements), _SAMPLE) if hasattr(elements, "__reversed__") else ()


class _Digest:
    """A file that keeps a digest of what is written, up to a bound."""

    def __init__(self) -> None:
        self._crc = self._size = 0

    def write(self, data: Any) -> int:
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        self._size += size
        if self._size > MOST_BYTES:
            raise OverflowError
        self._crc = zlib.crc32(data, self._crc)
        return size

    def state(self) -> tuple[int, int]:
        return self._crc, self._size

    def reset(self) -> None:
        self._crc = self._size = 0


class _FramePickler(Guarded):
    """Pickles one object after the other, each with keys in place of those that have one.

    In pickle's fast mode: without a memo it does not matter which equal texts are one object.
    """

    def __init__(self, key_of: Callable[[Any], int | None], namespace: dict[str, Any] | None) -> None:
        self._digest = _Digest()
        add = self._add_buffer
        super().__init__(self._digest, protocol=5, buffer_callback=add, namespace=namespace, known=None)
        self.fast = True
        self._keyed = key_of
        self._begun = False
        self._children: list[int] = []
        self._names: set[str] = set()
        self._visited: dict[int, int] = {}

    def frame(self, obj: Any) -> ObjectFrame:
        kind = type(obj)
        if id(obj) in self._notebook:
            return _UNKNOWN  # it leads to all variables, which are known by name
        if kind in _CONTAINERS and (
            not obj or is_leaf(obj if len(obj) <= MOST_ELEMENTS else list(_sample(obj)))
        ):
            return ObjectFrame(_leaf_digest(obj))
        self._digest.reset()
        self._children, self._names, self._visited = [], set(), {id(obj): -1}
        self._begun = False
        try:
            own = self._own_state(obj)
        except Exception:  # noqa: BLE001 - whatever the objects raise; and what is too large
            own = None
        digest = None if kind in _WEAK else own
        return ObjectFrame(digest, tuple(dict.fromkeys(self._children)), frozenset(self._names))

    def _own_state(self, obj: Any) -> object:
        if tensors.is_tensor(obj):
            facts, parts = tensors.state_of(obj)
            if not parts:
                return facts
            self._begun = True
            self.dump(parts)
            return facts, self._digest.state()
        if tensors.is_storage(obj):
            return ("storage",)  # its tensors have versions
        if type(obj) is arrays.Memory:
            return arrays.digests(obj.root())
        if type(obj) in _CONTAINERS and len(obj) > MOST_ELEMENTS:
            self._begun = True
            self.dump((len(obj), list(_sample(obj))))
        else:
            self.dump(obj)
        return self._digest.state()

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind in LEAVES:
            return None
        if not self._begun:
            self._begun = True
            return None
        if (namespace := super().persistent_id(obj)) is not None:
            return namespace
        key = self._keyed(obj)
        if key is not None:
            self._children.append(key)
        elif isinstance(obj, type | types.FunctionType | types.CellType):
            return self._visited_again(obj)
        return key

    def _visited_again(self, obj: Any) -> int | None:
        """Return the number of an object without a key that is in the frame already, as a class may be."""
        number = self._visited.get(id(obj))
        if number is None:
            self._visited[id(obj)] = -len(self._visited) - 1
        return number

    def reducer_override(self, obj: Any) -> Any:
        if tensors.is_tensor(obj):
            # It has no key: pickling has made it for this.
            return tuple, ((str(obj.dtype), *obj.shape),)
        if type(obj) is types.FunctionType and self.is_notebooks(obj):
            return self._reduced_function(obj)
        if type(obj) is typing.ForwardRef:
            return str, (obj.__forward_arg__,)  # it keeps what it was evaluated to
        if arrays.is_array(obj) and obj.nbytes > MOST_BYTES and not obj.flags.forc:
            return tuple, ((str(obj.dtype), obj.shape, arrays.sample(obj, _SAMPLE)),)
        reduced = super().reducer_override(obj)
        if caches := _caches_of(type(obj)):
            usual = reduced is NotImplemented
            return _without(caches, obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if usual else reduced)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > _STATE:
            state = reduced[_STATE]
            _drop_bookkeeping(state[1][0] if self.is_notebooks(obj) else state[0])
        if isinstance(reduced, tuple) and len(reduced) == WITH_SETTER:
            # Pickle writes the object again for its setter, and needs the memo for that.
            return tuple, ((reduced[:_STATE], *reduced[_STATE:-1]),)
        return reduced

    def needed_by(self, obj: Any) -> dict[str, Any]:
        # Variables of their own, known by name.
        self._names |= self.read_by(obj)
        return {}

    def _reduced_function(self, function: types.FunctionType) -> Any:
        """Reduce a function of the notebook to all that is sent of it.

        cloudpickle's reduction looks through all modules for those that the function may use, which takes a
        millisecond.
        """
        self.needed_by(function)
        attributes = {name: getattr(function, name) for name in _FUNCTION_ATTRIBUTES}
        return tuple, ((function.__code__, attributes, function.__closure__, function.__dict__),)

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: it is copied into the pickle
            return True
        if raw.nbytes <= MOST_BYTES:
            self._digest.write(raw)
        else:
            numbers = memoryview(raw)
            step = raw.nbytes // _SAMPLE | 1  # odd: not always the same byte of a number
            self._digest.write(bytes(numbers[::step]) + bytes(numbers[-_SAMPLE:]))
        return False


def _caches_of(kind: type) -> frozenset[str]:
    """Return the attributes in which objects of a class keep what can be computed again."""
    if kind not in _caches:
        found = {
            name
            for each in mro_of(kind)
            for name, value in namespace_of(each).items()
            if isinstance(value, functools.cached_property)
        }
        if is_pandas(kind):
            found.add("_cache")
        _caches[kind] = frozenset(found)
    return _caches[kind]


_caches: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def _without(caches: frozenset[str], reduced: Any) -> Any:
    if not isinstance(reduced, tuple):
        return reduced

    def stripped(state: Any) -> Any:
        if type(state) is dict:
            return {name: value for name, value in state.items() if name not in caches} or None
        if type(state) is not tuple:
            return state
        return tuple(each for each in map(stripped, state) if each is not None)

    make, arguments, state, elements, items = (*reduced, None, None, None)[:5]
    return tuple, ((make, arguments, stripped(state), list(elements or ()), list(items or ())),)


def _drop_bookkeeping(state: dict[str, Any]) -> None:
    """Leave out of a class what Python writes into it when it is used: that is no change."""
    state.pop("__slotnames__", None)
    if not state.get("__annotations__", True):
        del state["__annotations__"]
