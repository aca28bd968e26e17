"""What was sent of each object, and whether the notebook has changed it since.

The pickler is the walk. The *frame* of an object is its own part of a pickle, in which objects that the ranks
have are keys. A digest of it is kept for each object that is sent, with the keys that it refers to and, for a
function, the global names that it reads. So what is compared is what would be sent: nothing that would travel
changes unseen, and what pickling leaves out gives no notice. SentFrames refer to each other by key, and hold no
object.

Of the user's code only pickling's own hooks run (`__reduce__`, `__getstate__`).

Not compared: the elements of a tensor (its version and its address are), arrays and containers beyond a size
but for a sample, and what pickles differently each time.
"""

from __future__ import annotations

import pickle
import types
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nblaunch.capture import identity, tensors
from nblaunch.capture.pickling import Outbound, global_names

MOST_BYTES = 16 << 20
"""Of an array or a frame; beyond it, an array is compared by its shape and a sample."""
MOST_ELEMENTS = 200_000
"""Of a container; beyond it, one is compared by its length and a sample."""
_SAMPLE = 4096
_MOST_VISITED = 20_000
_STATE = 2
"""Where a reduction has the state of the object."""
_CONTAINERS = frozenset({dict, list, set, frozenset, OrderedDict})
_NO_FRAME = frozenset({int, float, complex, bool, str, bytes, type(None), types.CodeType, types.ModuleType})
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class ObjectFrame:
    """One object as it would be sent: a digest, None if it cannot be compared; holds no object."""

    digest: object
    children: tuple[int, ...] = ()
    """The keys of the objects that it refers to."""
    names: frozenset[str] = frozenset()
    """The global names that it reads."""


_UNKNOWN = ObjectFrame(None)


class SentFrames:
    """The frames of the objects that some ranks have, as these were sent."""

    def __init__(self, table: identity.ObjectTable) -> None:
        self._table = table
        self._frames: dict[int, ObjectFrame] = {}

    def __contains__(self, key: int) -> bool:
        """Return whether an object with this key was sent."""
        return key in self._frames

    def keys(self) -> set[int]:
        """Return the keys of all objects that have a frame."""
        return set(self._frames)

    def update(self, frames: Mapping[int, ObjectFrame]) -> None:
        """Keep frames, by key."""
        self._frames |= frames

    def copy(self) -> SentFrames:
        """Return frames that can be changed without these."""
        other = SentFrames(self._table)
        other._frames = dict(self._frames)
        return other

    def discard(self, keys: Iterable[int]) -> set[int]:
        """Forget frames; return the keys that were known."""
        return {key for key in keys if self._frames.pop(key, None) is not None}

    def names(self, keys: Iterable[int]) -> set[str]:
        """Return the global names that functions read to which these objects led when they were sent."""
        found: set[str] = set()
        waiting, seen = list(keys), set(keys)
        while waiting:
            frame = self._frames.get(waiting.pop())
            if frame is not None:
                found |= frame.names
                new = seen.symmetric_difference(seen.union(frame.children))
                seen |= new
                waiting += new
        return found


class Inspection:
    """One look at objects of the notebook, beside the frames of what was sent."""

    def __init__(
        self, table: identity.ObjectTable, frames: SentFrames, namespace: dict[str, Any] | None
    ) -> None:
        """Functions of `namespace` are the notebook's, as those of `__main__` are."""
        self._table = table
        self._sent = frames._frames  # noqa: SLF001 - of this module
        self._pickler = _FramePickler(self._key_of, namespace)
        self._verdicts: dict[int, tuple[bool, tuple[int, ...]]] = {}

    def _key_of(self, obj: Any) -> int | None:
        # A value (a tuple, a dtype) may have a key as a variable, and has none within an object.
        key = self._table.key_of(obj)
        return key if key is not None and identity.has_identity(obj) else None

    def frame(self, obj: Any) -> ObjectFrame:
        """Return the frame of an object as it is now."""
        return self._pickler.frame(obj)

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
        seen = set(waiting)
        while waiting and len(seen) < _MOST_VISITED:
            changed, children = self._verdict(waiting.pop())
            if changed:
                return True
            for child in children:
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
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
            return sent.digest != _leaf_digest(obj), ()
        if sent.digest is None:
            return False, sent.children
        return _differs(sent, self.frame(obj)), sent.children


def _differs(sent: ObjectFrame, now: ObjectFrame) -> bool:
    return sent.digest is not None and sent.digest != now.digest


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
    sink = _Digest()
    pickler = _ValuesOnly(sink, protocol=5)
    pickler.fast = True
    try:
        pickler.dump(list(_sample(container)) if len(container) > MOST_ELEMENTS else container)
    except Exception:  # noqa: BLE001 - it holds other things
        return _Leaf()
    return _Leaf((kind, len(container), *sink.state()))


class _ValuesOnly(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is OrderedDict:
            return NotImplemented
        raise TypeError


def _is_leaf(container: Any) -> bool:
    """Return whether a container holds numbers and texts only."""
    if len(container) > MOST_ELEMENTS:
        container = list(_sample(container))
    elements = container if not isinstance(container, dict) else (*container, *container.values())
    return _ATOMS.issuperset(map(type, elements))


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
        """Return the digest."""
        return self._crc, self._size

    def reset(self) -> None:
        """Begin another one."""
        self._crc = self._size = 0


class _FramePickler(Outbound):
    """Pickles one object after the other, each with keys in place of those that have one.

    In pickle's fast mode: without a memo it does not matter which equal texts are one object.
    """

    def __init__(
        self, key_of: Callable[[Any], int | None], namespace: dict[str, Any] | None
    ) -> None:
        self._digest = _Digest()
        add = self._add_buffer
        super().__init__(self._digest, protocol=5, buffer_callback=add, namespace=namespace, known=None)
        self.fast = True
        self._keyed = key_of
        self._begun = False
        self._children: list[int] = []
        self._names: set[str] = set()

    def frame(self, obj: Any) -> ObjectFrame:
        """Return the frame of an object; one without a digest if it cannot be compared."""
        kind = type(obj)
        if kind in _CONTAINERS and (not obj or _is_leaf(obj)):
            return ObjectFrame(_leaf_digest(obj))
        self._digest.reset()
        self._children, self._names = [], set()
        self._begun = False
        try:
            own = self._own_state(obj)
        except Exception:  # noqa: BLE001 - whatever the objects raise; and what is too large
            return ObjectFrame(None, tuple(dict.fromkeys(self._children)), frozenset(self._names))
        return ObjectFrame(own, tuple(dict.fromkeys(self._children)), frozenset(self._names))

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
        if type(obj) in _CONTAINERS and len(obj) > MOST_ELEMENTS:
            self._begun = True
            self.dump((len(obj), list(_sample(obj))))
        else:
            self.dump(obj)
        return self._digest.state()

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind in _ATOMS:
            return None
        if not self._begun:
            self._begun = True
            return None
        key = self._keyed(obj)
        if key is not None:
            self._children.append(key)
        return key

    def reducer_override(self, obj: Any) -> Any:
        if tensors.is_tensor(obj):
            # It has no key: pickling has made it for this.
            return tuple, ((str(obj.dtype), *obj.shape),)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > _STATE:
            _drop_bookkeeping(reduced[_STATE][0])
        return reduced

    def with_globals(self, function: types.FunctionType, reduced: tuple[Any, ...]) -> Any:
        """Leave the globals of a function out: they are variables of their own, known by name."""
        self._names.update(global_names(function))
        make, arguments, (attributes, slots), *_ = reduced
        return make, arguments, (attributes, {**slots, "__globals__": None, "_cloudpickle_submodules": None})

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: it is copied into the pickle
            return True
        if raw.nbytes <= MOST_BYTES:
            self._digest.write(raw)
        else:
            numbers = memoryview(raw)
            step = raw.nbytes // _SAMPLE | 1    # odd: not always the same byte of a number
            self._digest.write(bytes(numbers[::step]) + bytes(numbers[-_SAMPLE:]))
        return False


def _drop_bookkeeping(state: dict[str, Any]) -> None:
    """Leave out of a class what Python writes into it when it is used: that is no change."""
    state.pop("__slotnames__", None)
    if not state.get("__annotations__", True):
        del state["__annotations__"]
