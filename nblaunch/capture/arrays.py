"""How NumPy arrays are pickled: views of one memory, and torch's tensors over it, share it on the other side.

An array that owns its memory is pickled by NumPy itself. A view refers to a `Memory`, which stands for the
memory of the array at the end of its chain of bases. Whether a tensor and an array share memory is decided by
its addresses, since `torch.from_numpy` leaves no other trace.

NumPy is not imported here: an object can be an array only if NumPy has been imported already.
"""

from __future__ import annotations

import copyreg
import ctypes
import mmap
import operator
import pickle
import sys
import types
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nblaunch.capture import tensors
from nblaunch.capture.parts import Made, attributes_of, set_attributes

_FILE = ("filename", "offset", "mode", "_mmap")
"""The attributes of a `numpy.memmap` that belong to its file."""
# Linux, admin-guide/mm/pagemap.rst: the bytes of an entry; in memory or swapped; a file's.
_ENTRY, _THERE, _OF_A_FILE = 8, 3 << 62, 1 << 61
PARTS = 64
_SAMPLED = 1 << 18
"""Bytes of a part; of a larger one, so many are compared."""


class Memory:
    """Stands for the memory of an array and of all its views; has the identity of that memory.

    The rank's side of it is an array: the last one in the chain of bases of these views.
    """

    __slots__ = ("__weakref__", "root", "whole")

    def __init__(self, root: Any) -> None:
        address = id(root)
        self.root = weakref.ref(root, lambda _: _memories.pop(address, None))
        self.whole = self.root
        """An array that shows all of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to an array that has it and travels as it is, else to the bytes."""
        root, whole = self.root(), self.whole()
        if whole is None or (_root_of_whole(whole) is not root and not _is_mapped(root)):
            return _memory, (_buffer(root),)
        return last_base, (whole,)

    def by_value(self) -> tuple[Any, ...]:
        """Return how to rebuild the bytes in memory of their own, or None for those of a file."""
        root = self.root()
        return (types.NoneType, ()) if _is_mapped(root) else (_memory, (_buffer(root),))


_memories: dict[int, Memory] = {}
"""By the address of the array at the end of the chain of bases, while that one is alive."""


def is_array(obj: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return hasattr(numpy, "memmap") and isinstance(obj, numpy.ndarray)  # it may be half imported


def last_base(array: Any) -> Any:
    """Return the array that an array is a view of in the end; itself for one that is no view."""
    numpy = sys.modules["numpy"]
    while True:
        base = array.base
        if type(base).__name__ == "DummyArray":  # of `as_strided` and `sliding_window_view`
            base = base.base
        if not isinstance(base, numpy.ndarray):
            return array
        array = base


def _root_of_whole(array: Any) -> Any:
    """Return the last base of an array of which NumPy's own pickle has all memory as it is; else None."""
    ndarray = sys.modules["numpy"].ndarray
    if type(array) is not ndarray:
        return None
    base, flags = array.base, array.flags
    if not (flags.forc and flags.writeable) or array.dtype.hasobject or not array.nbytes:
        return None
    if base is None:
        return array
    unpickled = type(base) is ndarray and base.nbytes == array.nbytes and type(base.base) is memoryview
    return base if unpickled else None


def _is_mapped(array: Any) -> bool:
    """Return whether `array` is a file's, which another process can map."""
    if type(array) is not sys.modules["numpy"].memmap or array._mmap is None or array.filename is None:  # noqa: SLF001 - no public name
        return False
    if isinstance(array.base, sys.modules["numpy"].ndarray):
        return False
    file = Path(array.filename)
    return file.is_file() and file.stat().st_size >= array.offset + array.nbytes


def _bounds(array: Any) -> tuple[int, int]:
    """Return the addresses of the first byte of an array, and of the byte behind the last one."""
    low = high = array.__array_interface__["data"][0]
    for length, step in zip(array.shape, array.strides, strict=True):
        if step < 0:
            low += (length - 1) * step
        else:
            high += (length - 1) * step
    return low, high + array.itemsize if array.size else low


def _buffer(array: Any, low: int = 0, high: int | None = None) -> pickle.PickleBuffer:
    """Return the memory of an array that begins and ends at these bytes; it can be written to."""
    first, end = _bounds(array)
    size = (end - first if high is None else high) - low
    memory: Any = (ctypes.c_ubyte * size).from_address(first + low)
    memory.array = array  # lives as long as the buffer
    return pickle.PickleBuffer(memory)


# What a pickle calls.


def _memory(buffer: Any) -> Any:
    import numpy as np

    view = memoryview(buffer)
    # Small buffers live inside the pickle stream, which cannot be written to.
    return np.frombuffer(bytearray(view) if view.readonly else view, np.uint8)


def bytes_of(memory: Any) -> Any:
    """Return the bytes of an array in one piece, or of a storage, as an array over them."""
    if tensors.is_storage(memory):
        return tensors.array_over(memory)
    return memory.ravel(order="K").view(sys.modules["numpy"].uint8)


def _view(  # noqa: PLR0913, PLR0917 - all that makes up a view
    memory: Any,
    shifts: Any,
    number: int,
    offset: int,
    shape: Any,
    strides: Any,
    dtype: Any,
    write: Any,
    kind: Any,
) -> Any:
    """Return an array over memory of which the first bytes may have been left out, see `tensors`."""
    import numpy as np

    offset -= shifts[number] if shifts else 0
    if dtype.hasobject:
        made = np.lib.stride_tricks.as_strided(
            memory.ravel(order="K")[offset // dtype.itemsize :], shape, strides
        )
    else:
        made = np.ndarray(shape, dtype, bytes_of(memory), offset, strides)
    if kind is np.memmap and memory.base is not None and hasattr(memory, "filename"):
        made = made.view(kind)
        for name in _FILE:
            setattr(made, name, getattr(memory, name))
    elif kind is not None:
        made = made.view(kind)
    if not write:
        made.flags.writeable = False
    return made


def _storage(memory: Any, shifts: Any, number: int, offset: int, size: int) -> Any:
    offset -= shifts[number] if shifts else 0
    return tensors.storage_over(bytes_of(memory)[offset : offset + size])


def _mapped(  # noqa: PLR0913, PLR0917 - all that makes up a memmap
    filename: Any, dtype: Any, mode: str, offset: int, shape: Any, order: Any, changed: Any
) -> Any:
    import numpy as np

    array: Any = np.memmap(filename, dtype, mode, offset, shape, order)  # type: ignore[call-overload]
    for start, page in changed:
        bytes_of(array)[start : start + len(page)] = np.frombuffer(page, np.uint8)
    return array


def _reduce_mapped(array: Any) -> tuple[Any, ...]:
    order = "C" if array.flags.c_contiguous else "F"
    mode = "r+" if array.mode == "w+" else array.mode  # the file is there by now, with its content
    changed = _changed_pages(array) if mode == "c" else ()
    return _mapped, (array.filename, array.dtype, mode, array.offset, array.shape, order, changed)


def _changed_pages(array: Any) -> tuple[tuple[int, bytes], ...]:
    """Return the pages of a private copy of a file that are no longer the file's: first byte and content."""
    import numpy as np

    here = bytes_of(array)
    before = here.__array_interface__["data"][0] % mmap.PAGESIZE
    pages = (before + here.size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek((here.__array_interface__["data"][0] - before) // mmap.PAGESIZE * _ENTRY)
        entries = np.frombuffer(pagemap.read(pages * _ENTRY), np.uint64)
    own = (entries & _THERE != 0) & (entries & _OF_A_FILE == 0)
    starts = [max(int(page) * mmap.PAGESIZE - before, 0) for page in np.flatnonzero(own)]
    ends = [(start + before) // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE - before for start in starts]
    return tuple((start, here[start:end].tobytes()) for start, end in zip(starts, ends, strict=True))


def is_taken_apart(kind: type) -> bool:
    """Return whether arrays of this class are their elements and attributes, as NumPy pickles them."""
    numpy = sys.modules["numpy"]
    if kind is numpy.ndarray:
        return True
    if kind is numpy.recarray:
        import numpy.rec  # which NumPy loads when it is used; a class of no module is sent by value
    masked = sys.modules.get("numpy.ma")
    if masked is not None and kind is masked.MaskedArray:
        return True
    inherited = all(
        getattr(kind, name) is getattr(numpy.ndarray, name)
        for name in ("__reduce__", "__reduce_ex__", "__setstate__")
    )
    return inherited and kind not in copyreg.dispatch_table and not copyreg._slotnames(kind)  # type: ignore[attr-defined] # noqa: SLF001 - what pickle asks


def reduce_alone(array: Any) -> Any:
    """Return how to rebuild an array of what it shows, `NotImplemented` for pickle's own way.

    That of an array of a file is the file.
    """
    kind, root = type(array), last_base(array)
    if _is_mapped(array):
        return _reduce_mapped(array)
    if _is_mapped(root):
        return _view, _place(array, root)
    numpy = sys.modules["numpy"]
    if kind is numpy.ndarray or not is_taken_apart(kind):
        return NotImplemented
    return _with_attributes(array, (numpy.ndarray.view, (array.view(numpy.ndarray), kind)))


def _place(array: Any, root: Any) -> tuple[Any, ...]:
    offset = array.__array_interface__["data"][0] - _bounds(root)[0]
    kind = None if type(array) is sys.modules["numpy"].ndarray else type(array)
    return root, None, 0, offset, array.shape, array.strides, array.dtype, array.flags.writeable, kind


def _with_attributes(array: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    attributes = attributes_of(array)
    if not attributes or isinstance(array, sys.modules["numpy"].memmap):
        return reduced
    return (*reduced, dict(attributes), None, None, set_attributes)


# Whether memory that the ranks have is as it was sent, in parts: a view shows some of them.


def shown_by(obj: Any) -> tuple[Any, int, int]:
    """Return the array whose memory an array shows, or a `Memory` is, and which bytes; else None."""
    root: Any = (
        obj.root() if type(obj) is Memory else last_base(obj) if is_array(obj) and obj.nbytes else None
    )
    if root is None:
        return None, 0, 0
    low, high = _bounds(root if type(obj) is Memory else obj)
    start = _bounds(root)[0]
    return root, low - start, high - start


def memory_of(root: Any) -> Memory | None:
    return _memories.get(id(root))


def digests(root: Any) -> tuple[int, ...]:
    """Return digests of the parts of an array's memory: none of a file's, which is the same for all."""
    if _is_mapped(root):
        return ()
    memory, step = memoryview(_buffer(root)).cast("B"), _part_size(root)
    stride = max(step // _SAMPLED, 1) | 1  # odd: not always the same byte of a number
    return tuple(
        zlib.crc32(bytes(memory[each : each + step : stride])) for each in range(0, len(memory), step)
    )


def parts_within(root: Any, low: int, high: int, *, wholly: bool) -> range:
    """Return the numbers of the parts that have one of these bytes, or have only these."""
    step = _part_size(root)
    if not wholly:
        return range(low // step, -(-high // step))
    return range(-(-low // step), -(-_size(root) // step) if high >= _size(root) else high // step)


def sample(array: Any, most: int) -> Any:
    along = max(int(most ** (1 / array.ndim)), 1)
    return array[tuple(slice(None, None, -(-length // along)) for length in array.shape)].copy()


def _size(root: Any) -> int:
    first, end = _bounds(root)
    return end - first


def _part_size(root: Any) -> int:
    return max(8, -(-_size(root) // PARTS))


# Which arrays, tensors and storages of one pickle, and of what the ranks have, are over one memory.


class OverlapError(Exception):
    """A part of the memory of `root` was pickled before the whole."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = root


class _Ranges:
    """Memory by address: arrays that end a chain of bases, and storages."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Any]] = []
        self._waiting: list[Any] = []

    def add(self, owner: Any) -> None:
        self._waiting.append(owner)

    def find(self, low: int, high: int) -> tuple[Any, bool]:
        """Return whose memory has all these bytes, or None; and whether any memory has some of them."""
        waiting, self._waiting = self._waiting, []
        for owner in waiting:
            first, end = range_of(owner)
            place = self._place(first)
            if place and self._entries[place - 1][1] >= end:
                continue
            while place < len(self._entries) and self._entries[place][1] <= end:
                del self._entries[place]
            self._entries.insert(place, (first, end, owner))
        place = self._place(low)
        if place:
            _, end, owner = self._entries[place - 1]
            if high <= end:
                return owner, True
            if low < end:
                return None, True
        return None, place < len(self._entries) and self._entries[place][0] < high

    def _place(self, address: int) -> int:
        return bisect_right(self._entries, address, key=operator.itemgetter(0))


def range_of(owner: Any) -> tuple[int, int]:
    if tensors.is_storage(owner):
        return owner.data_ptr(), owner.data_ptr() + owner.nbytes()
    return _bounds(owner)


def _is_foreign(array: Any) -> bool:
    """Return whether the memory of an array without an array as base is that of another object."""
    return array.base is not None and not _is_mapped(array)


class WholeMemories(tensors.WholeStorages):
    """Pickles arrays and tensors that share memory so that they share it on the other side."""

    def __init__(
        self,
        key_of: Callable[[Any], int | None] = lambda _: None,
        there: Callable[[], Iterable[Any]] = tuple,
        first: Iterable[Any] = (),
        *,
        writable: bool = False,
    ) -> None:
        """Prepare for one pickle.

        `key_of` and `there` know the arrays, memories and storages that the ranks have; `first` are arrays
        within whose memory other memory lies. With `writable`, arrays that cannot be written to can be there.
        """
        super().__init__()
        self._writable = writable
        self._key_of, self._there = key_of, there
        self._first = list(first)
        self._ranges = _Ranges()
        for root in self._first:
            self._ranges.add(root)
        self._must_search: bool | None = None if there is not tuple else False
        self._owners: dict[int, tuple[Any, Any]] = {}
        self._whole: dict[int, tuple[Any, Any]] = {}
        """Memory by its array, and the array of it that NumPy has pickled."""

    def forget(self) -> None:
        """Let go of all objects; call when the pickle is complete."""
        self._ranges = _Ranges()
        self._owners.clear()
        self._whole.clear()

    def reduce(self, obj: Any) -> Any:
        if is_array(obj):
            return self._array(obj)
        if tensors.is_borrowed(obj):
            owner = self._owner_of_storage(obj)
            if owner is not obj:
                offset = obj.data_ptr() - range_of(owner)[0]
                return _storage, (*self._memory(owner, offset, offset + obj.nbytes()), offset, obj.nbytes())
        return super().reduce(obj)

    def _array(self, array: Any) -> Any:
        whole = _root_of_whole(array)
        if whole is not None and not self._must_search:
            if self._must_search is None:
                self._prepare_search()
                return self._array(array)
            address = id(whole)
            if address not in _memories and address not in self._owners and address not in self._whole:
                return self._by_numpy(array, whole)
        if array.nbytes == 0 or not is_taken_apart(type(array)) or _is_mapped(array):
            return reduce_alone(array)
        root = last_base(array)
        if array.dtype.hasobject:
            return self._objects(array, root)
        owner = self._owner_of(root)
        if whole is not None and owner is whole and self._is_new(whole):
            return self._by_numpy(array, whole)
        low, high = _bounds(array)
        if self._writable and not array.flags.writeable and array.nbytes > high - low:
            return array.copy().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # its elements have memory in common
        first, end = range_of(owner)
        if not first <= low <= high <= end:
            return reduce_alone(array)  # `as_strided` has gone beyond the memory
        memory = self._memory(owner, low - first, high - first)
        kind = None if type(array) is sys.modules["numpy"].ndarray else type(array)
        offset = array.__array_interface__["data"][0] - first
        writeable = self._writable or array.flags.writeable
        facts = offset, array.shape, array.strides, array.dtype, writeable, kind
        return _with_attributes(array, (_view, (*memory, *facts)))

    def _by_numpy(self, array: Any, root: Any) -> Any:
        self._whole[id(root)] = root, array
        self._ranges.add(root)
        return NotImplemented

    def _is_new(self, root: Any) -> bool:
        """Return whether nothing stands for the memory of an array yet."""
        memory = _memories.get(id(root))
        return id(root) not in self._whole and (memory is None or self._key_of(memory) is None)

    def _objects(self, array: Any, root: Any) -> Any:
        """Reduce an array of objects: it can be a view only of an array of its own type."""
        offset = _bounds(array)[0] - _bounds(root)[0]
        view = array is not root and root.base is None and root.flags.forc
        if (
            not view
            or root.dtype != array.dtype
            or array.dtype.kind != "O"
            or type(root) is not type(array)
            or min(array.strides, default=0) < 0
            or offset % array.itemsize
        ):
            return reduce_alone(array)
        facts = offset, array.shape, array.strides, array.dtype, array.flags.writeable, None
        return _with_attributes(array, (_view, (root, None, 0, *facts)))

    def _prepare_search(self) -> None:
        self._must_search = False
        for each in self._there():
            owner: Any = each.root() if type(each) is Memory else each
            whole = _root_of_whole(owner) if is_array(owner) else None
            if whole is not None:
                self._whole[id(whole)] = whole, owner
                owner = whole
            elif tensors.is_borrowed(owner):
                self._must_search = True
            elif not is_array(owner) or not owner.nbytes or last_base(owner) is not owner:
                continue
            elif _is_foreign(owner):
                self._must_search = True
            self._ranges.add(owner)

    def _owner_of(self, root: Any) -> Any:
        """Return the array or the storage whose memory that of `root` is, or is a part of."""
        if id(root) not in self._owners:
            self._owners[id(root)] = root, self._found_owner(root)
        return self._owners[id(root)][1]

    def _found_owner(self, root: Any) -> Any:
        if tensors.is_tensor(root.base):
            storage = root.base.untyped_storage()
            return self._owner_of_storage(storage) if tensors.is_borrowed(storage) else storage
        memory = _memories.get(id(root))
        if self._key_of(root) is not None or (memory is not None and self._key_of(memory) is not None):
            return root
        if self._must_search is None:
            self._prepare_search()
        if self._must_search or _is_foreign(root):
            return self._search(root)
        self._ranges.add(root)
        return root

    def _search(self, owner: Any) -> Any:
        """Return whose memory that of `owner` is within; from now on others are found within it."""
        found, overlaps = self._ranges.find(*range_of(owner))
        if found is not None and found is not owner:
            return self._owner_of(found) if is_array(found) else found
        if overlaps and found is None and not any(owner is each for each in self._first):
            raise OverlapError(owner)
        self._ranges.add(owner)
        if tensors.is_storage(owner) or _is_foreign(owner):
            self._must_search = True
        return owner

    def _owner_of_storage(self, storage: Any) -> Any:
        """Return over whose memory a storage is: an array's, that of another storage, or its own."""
        if id(storage) not in self._owners:
            if self._must_search is None:
                self._prepare_search()
            self._owners[id(storage)] = storage, self._search(storage)
        return self._owners[id(storage)][1]

    def _memory(self, owner: Any, low: int, high: int) -> tuple[Any, Any, int]:  # noqa: ARG002 - of which no part is left out
        """Return what stands for the memory of an array or a storage, of which these bytes are shown."""
        if tensors.is_storage(owner):
            return owner, None, 0
        if id(owner) not in _memories:
            _memories[id(owner)] = Memory(owner)
        memory = _memories[id(owner)]
        if id(owner) in self._whole:
            memory.whole = weakref.ref(self._whole[id(owner)][1])
        elif _root_of_whole(owner) is None:
            self._whole[id(owner)] = owner, owner  # its bytes are pickled here, and by no other array
        return memory, None, 0


class TrimmedMemories(WholeMemories, tensors.TrimmedStorages):
    """Takes along, of large memory, only the range that the arrays and tensors of one pickle show."""

    def _is_new(self, root: Any) -> bool:
        return id(root) not in self._parts and super()._is_new(root)

    def _memory(self, owner: Any, low: int, high: int) -> tuple[Any, Any, int]:
        part = self._part_of(owner) if tensors.is_storage(owner) else self._part_of_array(owner)
        if part is None:
            return super()._memory(owner, low, high)
        part.show(low, high)
        return part, self._table, part.number

    def _part_of_array(self, root: Any) -> _ArrayPart | None:
        """Return the record of a large memory, None for any other, and for one that travels as it is."""
        if id(root) not in self._parts:
            first, end = _bounds(root)
            if end - first < tensors.LARGE or id(root) in self._whole or _is_mapped(root):
                return None
            self._add(id(root), _ArrayPart(root, end - first, len(self._parts)))
        part = self._parts[id(root)]
        assert isinstance(part, _ArrayPart)  # noqa: S101 - no storage has this address
        return part

    def _placed(self, storage: Any, width: int) -> tuple[Any, Any, int]:
        owner = self._owner_of_storage(storage) if tensors.is_borrowed(storage) else storage
        shift = storage.data_ptr() - range_of(owner)[0] if owner is not storage else 0
        if shift % width:
            return None, None, 0
        if tensors.is_storage(owner):
            part, memory, _ = super()._placed(owner, width)
            return part, memory, shift
        part = self._part_of_array(owner)
        return part, part and part.storage, shift


class _ArrayPart(tensors.StoragePart):
    """Memory of NumPy's of which a pickle takes the bytes from `start` to `high`."""

    def __init__(self, root: Any, size: int, number: int) -> None:
        self.root = root
        self.storage = Made((_whole_storage, (self,)))
        """One storage for all tensors over this memory."""
        super().__init__(number, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _memory, (self.placeholder,)

    def data(self) -> memoryview:
        if self.start >= self.high:
            return memoryview(b"")
        return memoryview(_buffer(self.root, self.start, self.high)).cast("B")


def _whole_storage(memory: Any) -> Any:
    return _storage(memory, None, 0, 0, memory.nbytes)
