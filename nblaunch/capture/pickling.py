"""Pickles with their large buffers beside them, and the notebook's own functions and classes.

`dumps` returns a `Packed`: a protocol-5 pickle stream and the buffers that it refers to.
`nblaunch.capture.shared_memory` moves those between processes; `loads` puts them together again without
copying a buffer.

Two things differ from plain cloudpickle:

* CPU tensors hand out their storage as a buffer, once per storage, so views of one tensor still share their
  memory on the other side; of a large storage only the range that they show is sent. CUDA tensors travel
  through the CPU (see `nblaunch.capture.tensors`).
* Functions of the notebook live in the rank's own `__main__`: if a cell changes a global that such a function
  reads, the function reads the new value, as in the notebook. On the way back nothing is written into the
  notebook: classes that came from there are sent by name, functions get globals of their own.
"""

from __future__ import annotations

import copyreg
import ctypes
import dis
import functools
import hashlib
import io
import pickle
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from nblaunch.capture import arrays, identity, push, recipes, tensors
from nblaunch.capture.parts import LEAVES, Made, annotation_names, class_name, global_names

OUT_OF_BAND = 4096
"""Buffers of fewer bytes stay inside the pickle stream."""
_RAISE = dis.opmap["RAISE_VARARGS"]
"""The instruction of a `raise`."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickle stream and its out-of-band buffers, each contiguous; a GPU's are copied when written."""

    stream: memoryview
    buffers: tuple[memoryview | tensors.Far, ...]
    filenames: frozenset[str] = frozenset()
    """The file names under which its code was compiled."""
    carried: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the notebook that its functions take along."""
    reads: frozenset[str] = frozenset()
    """The global names that these functions read, also those that do not travel."""
    detached: tuple[Any, ...] = ()
    """Tensors that arrive as leaves, without the graph that they have in the notebook."""
    keys: frozenset[int] = frozenset()
    """The objects that it refers to by key: the ranks have them."""
    places: Sequence[tuple[int, Any]] = ()
    """The objects that get a key: (place in the pickle, object)."""

    @property
    def parts(self) -> tuple[memoryview | tensors.Far, ...]:
        return (self.stream, *self.buffers)

    def is_same(self, other: Packed) -> bool:
        """Return whether both are equal and refer to the same memory, so that one serves for both."""
        ranges = [memory_range(buffer) for buffer in self.buffers]
        return (
            self.stream == other.stream
            and None not in ranges
            and ranges == [memory_range(buffer) for buffer in other.buffers]
        )

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.parts)


def memory_range(buffer: memoryview | tensors.Far) -> tuple[int, int] | None:
    """Return where a buffer is in memory and its length, None for one that cannot be written to."""
    if isinstance(buffer, tensors.Far):
        return buffer.address
    if buffer.readonly or not buffer.nbytes:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes


_NAMESPACE = 0
"""The key of the notebook's namespace, which no object has: on a rank it is the rank's own."""


def main_globals() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def _reduce_alone(obj: Any) -> Any:
    return arrays.reduce_alone(obj) if arrays.is_array(obj) else tensors.reduce(obj)


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Base of both directions: tensors by storage, and more types by value than cloudpickle has."""

    def __init__(
        self, *arguments: Any, storages: tensors.WholeStorages | None = None, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._reduce_memory = _reduce_alone if storages is None else storages.reduce
        self.filenames: set[str] = set()
        self.carried: dict[str, Any] = {}
        self.reads: set[str] = set()
        self.detached: list[Any] = []
        self._recomputed: set[int] = set()
        self.keys: set[int] = set()

    def places(self, root: object) -> Sequence[tuple[int, Any]]:  # noqa: ARG002 - sessions need it
        """Return the objects that have been written and get a key; `root` holds all of them."""
        return ()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            self.filenames.add(obj.co_filename)
        if tensors.is_tensor(obj):
            return self.reduce_tensor(obj)
        self._recomputed.update(tensors.recomputed_in(obj))
        reduced = self._reduce_memory(obj)
        if reduced is NotImplemented:
            reduced = recipes.reduce(obj)
        if reduced is NotImplemented and is_pandas(type(obj)):
            return _with_arrays_by_value(obj)
        if reduced is NotImplemented:
            reduced = super().reducer_override(obj)
            if type(obj) is types.FunctionType and obj.__closure__ is not None and isinstance(reduced, tuple):
                reduced = with_cells(obj.__closure__, reduced)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            _make_whole(obj, reduced)
            if reduced[0] in _TRACKED and (name := self._name_of(obj)):
                reduced = _named_class(reduced, name)
        return reduced

    def parts_of(self, tensor: Any) -> tuple[Any, Any, Any] | None:
        """Return what comes along with a tensor: see `tensors.parts_of`."""
        return tensors.parts_of(tensor)

    def reduce_tensor(self, tensor: Any) -> Any:
        if tensor.grad_fn is not None and id(tensor) not in self._recomputed:
            self.detached.append(tensor)
        parts = self.parts_of(tensor)
        reduced = self._reduce_memory(tensor)
        if parts is not None:
            reduced = tensors.with_parts(tensor, reduced, parts)
        if tensor.is_inference():
            reduced = tensors.as_inference(tensor, reduced)
        return super().reducer_override(tensor) if reduced is NotImplemented else reduced

    def _name_of(self, obj: type) -> str:
        """Return the name of a class that ranks have made, empty for any other."""
        return _names.get(obj, "")


def is_pandas(kind: type) -> bool:
    module: object = kind.__module__  # a metaclass may have put anything there
    return isinstance(module, str) and module.startswith("pandas.") and kind not in copyreg.dispatch_table


def _with_arrays_by_value(obj: Any) -> Any:
    """Have the arrays within an object of pandas arrive in memory of their own.

    pandas knows which of its objects share memory, and copies on a write; pickling loses that.
    """
    if isinstance(obj, type | types.FunctionType):
        return NotImplemented
    reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return _by_value(reduced) if isinstance(reduced, tuple) else reduced


def _by_value(part: Any) -> Any:
    if type(part) is tuple:
        return tuple(map(_by_value, part))
    if type(part) is dict:
        return {name: _by_value(value) for name, value in part.items()}
    return push.ByValue(part) if arrays.is_array(part) else part


def with_cells(cells: tuple[types.CellType, ...], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have a function be made with its cells, which are objects: functions share them.

    cloudpickle makes new cells for each function, and copies what is in them.
    """
    make, arguments, (attributes, slots), *others = reduced
    return (make, (*arguments[:-1], cells), (attributes, {**slots, "__closure__": None}), *others)


def _make_whole(cls: type, reduced: tuple[Any, ...]) -> None:
    """Have a class that is sent by value be made with its slots and its qualified name.

    cloudpickle sets `__slots__` afterwards, which makes no slots: objects of that class would have a
    `__dict__`, and could not be sent back to the notebook's class, which has none.
    """
    if reduced[0] in _TRACKED:
        # pickle keeps it in a class of which it has seen an object: on some ranks, and not on others.
        reduced[2][0].pop("__slotnames__", None)
        # Among the arguments it always is. Here it is if the base class has another string for it.
        reduced[2][0].pop("__module__", None)
        if class_name(type(cls)) == _OF_AUTOGRAD:
            # It makes one for each class, with a number that counts the classes of its process.
            reduced[2][0].pop("_backward_cls", None)
    if reduced[0] is _cloudpickle._make_skeleton_class:  # noqa: SLF001 - no public name
        names = reduced[1][3]
        names["__qualname__"] = cls.__qualname__
        if slots := vars(cls).get("__slots__"):
            names["__slots__"] = slots


class Known(Protocol):
    """The variables and objects that the ranks of a session have."""

    def key_of(self, obj: Any) -> int | None:
        """Return the key of an object that all of these ranks have."""

    def memories(self) -> Iterable[Any]:
        """Return the arrays, memories of arrays and storages that all of these ranks have."""

    def lacks(self, name: str, value: Any) -> bool:
        """Return whether the ranks need the variable `name` of the notebook, which is `value`."""

    def needs(self, names: Iterable[str], keys: Iterable[int] = ()) -> frozenset[str]:
        """Return which variables the ranks lack: of `names`, and of those that functions read.

        The functions are those to which the variables that the ranks have, and the objects with these keys,
        led when they were sent.
        """


class Outbound(_ValuePickler):
    """From the notebook to the ranks."""

    def __init__(
        self, *arguments: Any, namespace: dict[str, Any] | None, known: Known | None, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._namespace = main_globals() if namespace is None else namespace
        self._named = namespace is not None
        self._known = known
        self._notebook: set[int] = set()
        for each in (self._namespace, main_globals()):
            self._add_notebook(each)

    def _add_notebook(self, globals_: dict[str, Any]) -> None:
        self._notebook.add(id(globals_))
        # cloudpickle rebuilds functions of one module around one dictionary, kept here.
        self.globals_ref[id(globals_)] = Made((main_globals, ()))

    def reducer_override(self, obj: Any) -> Any:
        is_notebooks = self.is_notebooks(obj)  # first: it may find out which dictionary is the notebook
        reduced = super().reducer_override(obj)
        if is_notebooks and isinstance(reduced, tuple):
            return self._offering(obj, reduced)
        return tensors.reduce_device(obj) if reduced is NotImplemented else reduced

    def is_notebooks(self, obj: Any) -> bool:
        """Return whether a function reads its globals in the notebook, or a class its annotations.

        In a push before the first cell nothing says which dictionary that is but the functions themselves.
        """
        if type(obj) is not types.FunctionType:
            return isinstance(obj, type) and obj.__module__ == self._namespace.get("__name__")
        globals_ = obj.__globals__
        if not self._named and id(globals_) not in self._notebook and globals_.get("__name__") == "__main__":
            self._add_notebook(globals_)
        return id(globals_) in self._notebook

    def read_by(self, obj: Any) -> frozenset[str]:
        names = annotation_names(obj, self._namespace)
        return names if isinstance(obj, type) else names.union(global_names(obj))

    def needed_by(self, obj: Any) -> dict[str, Any]:
        names = self.read_by(obj)
        self.reads |= names
        globals_ = self._namespace if isinstance(obj, type) else obj.__globals__
        needed = {name: globals_[name] for name in names if name in globals_}
        if self._known is not None:
            needed = {name: value for name, value in needed.items() if self._known.lacks(name, value)}
        self.carried.update(needed)
        return needed

    def _offering(self, obj: Any, reduced: tuple[Any, ...]) -> Any:
        """Have an object offer the variables that it reads to the rank, which decides."""
        if len(reduced) < WITH_SETTER:
            return reduced
        make, arguments, state, elements, items, fill = reduced
        if not isinstance(obj, type):
            attributes, slots = state
            state = attributes, {**slots, "__globals__": {}}  # cloudpickle would set them
        needed = self.needed_by(obj)
        return make, arguments, (fill, state, needed), elements, items, _set_offering


WITH_SETTER = 6
"""So many parts has a reduction that says how the state is set."""


class Guarded(Outbound):
    """For objects that hold the notebook's namespace itself, which is each rank's own."""

    # Not in `Outbound`: pickle calls it for every single object.
    def persistent_id(self, obj: Any) -> int | None:
        """Return the key of an object that ranks have."""
        return _NAMESPACE if id(obj) in self._notebook else None


class _Identifying(Outbound):
    """To the ranks of a session: objects that they have are sent as keys."""

    _known: Known

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) in LEAVES:
            return None
        key = self._known.key_of(obj)
        if key is not None:
            self.keys.add(key)
        elif id(obj) in self._notebook:
            return _NAMESPACE
        return key

    def places(self, root: object) -> Sequence[tuple[int, Any]]:
        return identity.found_in(self.memo.copy(), root)


class _Refreshing(_Identifying):
    """Pushes: the content of objects that the ranks have goes along."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._contents: list[tuple[int, push.Content]] = []
        self._new: set[int] = set()

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) in LEAVES:
            return None
        key = self._known.key_of(obj)
        if key is None or key in self._new:
            return _NAMESPACE if id(obj) in self._notebook else None
        if key not in self.keys:
            content = push.content_of(obj)
            if content is None:
                self._new.add(key)
                return None
            self.keys.add(key)
            self._contents.append((key, content))
        return key

    def dump(self, obj: object) -> None:
        super().dump(obj)
        while self._contents:
            # Objects that these lead to have content of their own.
            contents, self._contents = self._contents, []
            super().dump(contents)
        super().dump([])


def _set_offering(obj: Any, state: tuple[Callable[[Any, Any], Any], Any, dict[str, Any]]) -> None:
    fill, own, offered = state
    fill(obj, own)
    getattr(_loading, "offer", _offer_to_main)(offered)


def _offer_to_main(offered: Mapping[str, Any]) -> None:
    for name, value in offered.items():
        main_globals().setdefault(name, value)


_loading = threading.local()


class Homebound(_ValuePickler):
    """From a rank to the notebook: classes that came from there go back by name.

    A class that a rank has made is sent by value, under a digest of its definition: classes of several ranks
    with one definition are one class in the notebook, and objects equal on the ranks are equal there.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj in received_classes:
            return known_class, (received_classes[obj],)
        tensors.refuse_bound(obj)
        return super().reducer_override(obj)

    def _name_of(self, obj: type) -> str:
        """Return the same name for classes of the same definition, if the definitions can be compared."""
        try:
            name = f"nblaunch-{_definition(obj)}"
        except Exception:  # noqa: BLE001 - whatever the objects raise: then no two classes are one
            name = str(_cloudpickle._get_or_create_tracker_id(obj))  # noqa: SLF001 - no public name
        # It may be sent back here: then it is this very class.
        made_classes.add(obj)
        _completed.add(obj)
        _by_name[name] = obj
        return name


class _Defining(Homebound):
    """Pickles a class to be compared: with all it refers to, and without names that are random."""

    def _name_of(self, obj: type) -> str:  # noqa: ARG002 - its definition alone is compared
        return "same"


_OF_AUTOGRAD = "torch.autograd.function.FunctionMeta"

_TRACKED = {
    _cloudpickle._make_skeleton_class: 4,  # noqa: SLF001 - what cloudpickle writes into a pickle
    _cloudpickle._make_skeleton_enum: 5,  # noqa: SLF001 - see above
}
"""How cloudpickle rebuilds a class, and which argument is the name by which it tracks the class."""

_DEFINITION_LIMIT = 64 * 1024 * 1024


def _definition(cls: type) -> str:
    """Return a digest of a class with all that its methods use. Raises what pickling raises."""
    digest, size = hashlib.sha256(), 0

    def add(buffer: pickle.PickleBuffer) -> bool:
        nonlocal size
        raw = buffer.raw()
        size += raw.nbytes
        if size > _DEFINITION_LIMIT:
            msg = "too large to compare"
            raise pickle.PicklingError(msg)
        digest.update(raw)
        return False

    stream = io.BytesIO()
    _Defining(stream, protocol=5, buffer_callback=add).dump(cls)
    digest.update(stream.getbuffer())
    return digest.hexdigest()


# Classes that ranks have made, in the process that made them and in those that got them. A completed class
# has its attributes.
_by_name: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_completed: weakref.WeakSet[type] = weakref.WeakSet()


def _named_class(reduced: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Return cloudpickle's reduction of a class, for a class that may exist already under `name`."""
    make, arguments, state, *_ = reduced
    place = _TRACKED[make]
    arguments = (*arguments[:place], name, *arguments[place + 1 :])
    return _class_of, (name, make, arguments), state, None, None, _set_class_state


def _class_of(name: str, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Return the class of that name; if there is none yet, make one without attributes."""
    known = _by_name.get(name)
    if known is None:
        known = _by_name[name] = make(*arguments)
        _names[known] = name
    return known


def _set_class_state(cls: type, state: Any) -> type:
    """Give a class its attributes, once: a class that is here already keeps its own."""
    if cls not in _completed:
        _cloudpickle._class_setstate(cls, state)  # noqa: SLF001 - no public name
        _completed.add(cls)
    return cls


received_classes: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""In a rank: classes that the notebook sent by value, and cloudpickle's name for each."""

made_classes: weakref.WeakSet[type] = weakref.WeakSet()
"""In a rank: classes of its own that it has sent to the notebook."""


def remember_received_classes() -> None:
    """Record which classes came from the notebook; call before any code of the job runs."""
    tracked = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS  # noqa: SLF001 - no public way
    received_classes.update({cls: name for cls, name in dict(tracked).items() if cls not in made_classes})


def keep_as_own(received: Collection[str]) -> None:
    """Count classes that were loaded from a save as the rank's own, but for those that the notebook has."""
    made_classes.update(cls for name, cls in _by_name.items() if name not in received)
    # Now: an idle rank pickles its variables, and would count as its own what did not come from the notebook.
    remember_received_classes()


def known_class_names() -> frozenset[str]:
    """Return the names of the classes that this notebook has sent, or got."""
    return frozenset(_cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID)  # noqa: SLF001 - no public way


def known_class(tracker_id: str) -> type:
    """Return the notebook's own class that was sent under `tracker_id`."""
    tracked: dict[str, type] = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID  # noqa: SLF001
    try:
        return tracked[tracker_id]
    except KeyError:
        msg = "a rank returned an object of a class that has been deleted from the notebook meanwhile"
        raise pickle.UnpicklingError(msg) from None


def dumps(
    value: object,
    namespace: dict[str, Any] | None = None,
    known: Known | None = None,
    *,
    trim: bool = False,
    push: bool = False,
) -> Packed:
    """Pickle `value` for the ranks; `namespace` is the notebook's, if that is not `__main__`'s.

    With `known`, the ranks of a session, objects that they have are sent as keys; with `push` their content
    goes along. With `trim` a view of a large tensor takes along only the part of its storage that it shows.
    Raises whatever the objects raise.
    """

    def packed(kind: type[Outbound], memories: Callable[..., arrays.WholeMemories]) -> Packed:
        return _pack(value, functools.partial(kind, namespace=namespace, known=known), memories)

    if known is not None:
        there = functools.partial(arrays.WholeMemories, known.key_of, known.memories)
        return packed(_Refreshing if push else _Identifying, there)
    memories = arrays.TrimmedMemories if trim else arrays.WholeMemories
    try:
        return packed(Outbound, memories)
    except Exception:  # noqa: BLE001 - whatever the objects raise
        # The namespace has much in it that cannot be sent: perhaps an object holds it.
        return packed(Guarded, memories)


def dumps_home(value: object) -> Packed:
    return _pack(value, Homebound, functools.partial(arrays.TrimmedMemories, writable=True))


def _pack(
    value: object, make: Callable[..., _ValuePickler], memories: Callable[..., arrays.WholeMemories]
) -> Packed:
    whole: list[Any] = []
    while True:
        try:
            return pack_once(value, make, memories(first=whole))
        except arrays.OverlapError as error:
            whole.append(error.root)


def pack_once(
    value: object,
    make: Callable[..., _ValuePickler],
    storages: arrays.WholeMemories,
    apart: Collection[tuple[int, int] | None] = (),
) -> Packed:
    """Pickle with the pickler that `make` returns. Raises `arrays.OverlapError`.

    Memory in the ranges `apart` (`memory_range`) is a buffer of its own, however small.
    """
    buffers: list[memoryview | tensors.Deferred] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if (deferred := storages.deferred(buffer)) is not None:
            buffers.append(deferred)
            return False
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it into the stream
            return True
        if raw.nbytes < OUT_OF_BAND and not (apart and memory_range(raw) in apart):
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    pickler = make(stream, protocol=5, buffer_callback=keep_inside, storages=storages)
    pickler.dump(value)
    taken = tuple(each if isinstance(each, memoryview) else each() for each in buffers)
    storages.forget()
    return Packed(
        # Neither this nor `getbuffer` copies. But from Python 3.13 on a BytesIO that is collected while
        # a buffer of it is in use prints an error.
        memoryview(stream.getvalue()),
        taken,
        frozenset(pickler.filenames),
        pickler.carried,
        frozenset(pickler.reads),
        tuple(pickler.detached),
        frozenset(pickler.keys),
        pickler.places(value),
    )


def loads(stream: memoryview | bytes, buffers: Sequence[memoryview] = (), device: str | None = None) -> Any:
    """Unpickle; tensors that were on a CUDA device come to `device`, or to the CPU.

    Without `device` this is the notebook, to which nothing comes by key. Only for bytes from an authenticated
    sender: unpickling runs code.
    """
    with _loading_on(device):
        if device is None:
            return pickle.loads(stream, buffers=buffers)  # noqa: S301 - the caller has authenticated the sender
        return _Loader(io.BytesIO(stream), buffers=buffers).load()


@contextmanager
def _loading_on(device: str | None) -> Iterator[None]:
    """Refuse an object that raises what is no `Exception`: it must end neither a rank nor the notebook."""
    try:
        with tensors.arriving_on(device):
            yield
    except BaseException as error:
        if isinstance(error, Exception) or _is_interrupt(error):
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        name = frame.f_code.co_name
        where = f" (in {name})" if name not in {loads.__name__, loads_known.__name__} else ""
        # Others may have a repr that raises.
        given = ", ".join(f"{each!r:.100}" for each in error.args if isinstance(each, str | int))
        msg = f"it raised {type(error).__name__}({given}) while it was loaded{where}"
        raise pickle.UnpicklingError(msg) from error


def _is_interrupt(error: BaseException) -> bool:
    """Whether SIGINT has raised this, and no object: it comes between any two instructions."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    raised = step is not None and step.tb_frame.f_code.co_code[step.tb_lasti] == _RAISE
    return type(error) is KeyboardInterrupt and not raised


class _Loader(pickle.Unpickler):
    """Finds objects by the notebook's keys; without `found` there is the namespace alone."""

    def __init__(self, *arguments: Any, found: Callable[[int], Any] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._found = found

    def persistent_load(self, key: int | str | tuple[Any, ...]) -> Any:
        if key == _NAMESPACE:
            return main_globals()
        if not isinstance(key, int):  # stands for itself, in a save
            return key
        if self._found is None:
            msg = "an object that the notebook sent to the ranks of a session alone"
            raise pickle.UnpicklingError(msg)
        return self._found(key)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A payload that a session's rank has unpickled."""

    value: Any
    places: Callable[[], Mapping[int, Any]]
    """Returns each object by its place in the pickle."""
    fills: Sequence[Callable[[], None]]
    """Each gives an object of the rank the content that was pushed."""


def loads_known(
    parts: Sequence[memoryview],
    device: str,
    found: Callable[[int], Any],
    offer: Callable[[Mapping[str, Any]], None],
    *,
    pushed: bool,
) -> Loaded:
    """Unpickle on a session's rank.

    `found(key)` returns an object that the rank has, `offer(globals)` takes the globals of a function.
    """
    stream, *buffers = parts
    loader = _Loader(io.BytesIO(stream), buffers=buffers, found=found)
    contents: list[tuple[int, push.Content]] = []
    _loading.offer = offer
    try:
        with _loading_on(device):
            value = loader.load()
            while pushed and (more := loader.load()):
                contents += more
    finally:
        del _loading.offer
    fills = [push.fill(found(key), content) for key, content in contents]
    return Loaded(value, loader.memo.copy, fills)


def dumps_plain(value: object) -> bytes:
    stream = io.BytesIO()
    Homebound(stream, protocol=5).dump(value)
    return stream.getvalue()
