"""How torch storages are pickled: as buffers, once per storage, and never as a CUDA handle.

A storage on a GPU is copied piece by piece, when the payload is written: it is never in the host's memory
twice.

torch is not imported here: an object can be a storage only if torch has been imported already.
"""

from __future__ import annotations

import array
import copyreg
import ctypes
import inspect
import operator
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

ACCELERATORS = ("cuda", "xpu")
"""Kinds of device whose tensors travel through the CPU, and arrive on the rank's own device."""

_arrival = threading.local()
_outgoing = threading.local()


def reduce(obj: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return NotImplemented
    if type(obj) is torch.storage.TypedStorage:
        # Every tensor makes a new typed wrapper; the untyped storage below is one object per memory,
        # so that pickle's own memo keeps aliases aliases.
        return _typed, (obj._untyped_storage, obj.dtype)  # noqa: SLF001 - torch warns on the public name
    if type(obj) is torch.Tensor and obj.dtype in torch.storage._new_dtypes():  # noqa: SLF001 - no public list
        return _with_typed_storage(torch, obj)
    if is_readable_storage(obj):
        kind = obj.device.type
        here = obj if kind == "cpu" else obj.cpu()
        return _untyped, (_buffer(here), here.nbytes(), kind)
    return NotImplemented


@contextmanager
def only_from(readable: Callable[[Any], bool]) -> Iterator[None]:
    """Within the block, a storage on a device that is not `readable` raises `PicklingError`."""
    _outgoing.readable = readable
    try:
        yield
    finally:
        del _outgoing.readable


def refuse_bound(obj: Any) -> None:
    """Raise `PicklingError` for a module that loads only where its process group is: DDP."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None and isinstance(obj, parallel.DistributedDataParallel):
        msg = (
            "a DistributedDataParallel module loads only where its process group is, which is not in the "
            "notebook: take its .module, or .module.state_dict()"
        )
        raise pickle.PicklingError(msg)


def _with_typed_storage(torch: Any, tensor: Any) -> Any:
    """Return torch's own reduction of a tensor of a newer dtype (uint16, float8), corrected.

    torch 2.13 pickles an untyped storage there, and unpickles a typed one: it cannot read its own pickle.
    """
    rebuild, (storage, *others), *state = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if type(storage) is torch.UntypedStorage:
        storage = _typed(storage, torch.uint8)
    return (rebuild, (storage, *others), *state)


def _buffer(storage: Any) -> pickle.PickleBuffer:
    size = storage.nbytes()
    memory: Any = (ctypes.c_ubyte * size).from_address(storage.data_ptr()) if size else (ctypes.c_ubyte * 0)()
    memory.storage = storage  # lives as long as the buffer
    return pickle.PickleBuffer(memory)


def memory(size: int) -> memoryview:
    """Return memory that can be written to, and has not been."""
    import torch

    return memoryview(_buffer(torch.UntypedStorage(size))).cast("B")


def _untyped(buffer: Any, size: int, kind: str) -> Any:
    import torch

    if size == 0:
        storage = torch.UntypedStorage(0)
    else:
        view = memoryview(buffer)
        if view.readonly:
            # Small buffers live inside the pickle stream, which cannot be written to.
            view = memoryview(bytearray(view))
        storage = torch.frombuffer(view, dtype=torch.uint8, count=size).untyped_storage()
    device = getattr(_arrival, "device", None)
    if kind != "cpu" and device is not None:
        return torch.UntypedStorage(size, device=device).copy_(storage, False)  # noqa: FBT003 - torch's
    return storage


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


@contextmanager
def arriving_on(device: str | None) -> Iterator[None]:
    """Within the block, storages that were on an accelerator are rebuilt on `device` (None: the CPU)."""
    before = getattr(_arrival, "device", None)
    _arrival.device = device if device is not None and not device.startswith("cpu") else None
    try:
        yield
    finally:
        _arrival.device = before


def reduce_device(obj: Any) -> Any:
    """Return how to rebuild a `torch.device` as the rank's own, `NotImplemented` for anything else."""
    if type(obj).__name__ != "device":
        return NotImplemented  # first of all: pickle calls this for every object
    torch = sys.modules.get("torch")
    if torch is None or type(obj) is not getattr(torch, "device", None) or obj.type not in ACCELERATORS:
        return NotImplemented
    return _own_device, (obj.type, obj.index)


def _own_device(kind: str, index: int | None) -> Any:
    import torch

    device = torch.device(getattr(_arrival, "device", None) or "cpu")
    # Without an index it means the current device on the rank, too.
    return torch.device(kind) if index is None and device.type == kind else device


def state_of(tensor: Any) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """Return what tells whether a tensor was changed, and the objects that belong to it, None if none do."""
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001 - documented, under this name only
    address = None
    with suppress(RuntimeError):  # a sparse tensor, or one without storage
        address = tensor.data_ptr()
    facts = version, address, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    # torch.compile marks the parameters that it has seen: that is no change.
    own = {name: value for name, value in tensor.__dict__.items() if not name.startswith("_dynamo_")}
    parts = (parts_of(tensor), own or None)
    return facts, None if parts == (None, None) else parts


_quick_facts = operator.attrgetter(
    "_version", "requires_grad", "shape", "dtype", "_backward_hooks", "_post_accumulate_grad_hooks"
)
_gradient = operator.attrgetter("grad")


def is_plain_leaf(obj: Any) -> bool:
    """Return whether `obj` is a tensor without a graph and without attributes of its own."""
    if not is_plain_tensor(obj) or obj.__dict__ or obj.is_inference() or not obj.is_leaf:
        return False
    return obj.layout is sys.modules["torch"].strided


def quick_facts(leaves: list[Any]) -> list[Any]:
    """Return what is the same as before for tensors, all of them plain leaves, that were not changed."""
    if not leaves:
        return []
    import torch

    return [*map(_quick_facts, leaves), *map(torch.Tensor.data_ptr, leaves)]


def gradients(leaves: list[Any]) -> list[int]:
    """Return which gradients tensors have whose `quick_facts` are those of leaves."""
    return list(map(id, map(_gradient, leaves)))


def has_usual_state(kind: type) -> bool:
    """Return whether the state of objects of this class is their attributes."""
    found = inspect.getattr_static(kind, "__getstate__", None)
    torch = sys.modules.get("torch")
    # A module leaves out what `module.compile()` has made.
    modules = (
        None if torch is None or not hasattr(torch, "nn") else torch.nn.Module.__dict__.get("__getstate__")
    )
    return found is object.__dict__.get("__getstate__") or found is modules is not None


def is_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    # Not `isinstance`, which reads `obj.__class__`: that may be a property.
    return torch is not None and issubclass(type(obj), torch.Tensor)


def is_module(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and issubclass(type(obj), torch.nn.Module)


def is_plain_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter)


def is_storage(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(obj), torch.UntypedStorage)


def is_borrowed(obj: Any) -> bool:
    """Return whether `obj` is a storage over memory that torch has not made: it may be an array's."""
    # The name first of all: pickle asks this for every object.
    if type(obj).__name__ != "UntypedStorage" or not is_storage(obj):
        return False
    return bool(
        obj.device.type == "cpu" and obj.nbytes() and not obj.resizable() and not hasattr(obj, "is_copy")
    )


def storage_over(array: Any) -> Any:
    import torch

    storage: Any = torch.from_numpy(array).untyped_storage()
    storage.is_shared_with_arrays = True  # torch counts only its own users
    return storage


def array_over(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def is_readable_storage(obj: Any) -> bool:
    """Return whether `obj` is a storage whose bytes can be sent; raise if they cannot now."""
    if not is_storage(obj) or obj.device.type not in ("cpu", *ACCELERATORS):
        return False
    readable = getattr(_outgoing, "readable", None)
    if readable is not None and not readable(obj.device):
        msg = f"a tensor on {obj.device} cannot be read: the device is busy, or of no use any more"
        raise pickle.PicklingError(msg)
    return True


def reduce_by_value(obj: Any) -> Any:
    """Return how to rebuild a copy of a tensor or a storage, in memory of its own."""
    if not is_tensor(obj):
        return reduce(obj)
    import torch

    alone = _copy_apart(obj)
    if isinstance(obj, torch.nn.Parameter):
        return torch.nn.Parameter, (alone, obj.requires_grad)
    return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _copy_apart(tensor: Any) -> Any:
    """Return a tensor of the same elements over a storage that no other tensor has.

    It reads the memory of a contiguous CPU tensor in place; any other tensor is copied.
    """
    import torch

    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    if plain and tensor.nbytes and is_plain_tensor(tensor) and not tensor.is_quantized:
        memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        memory.tensor = tensor  # lives as long as the memory is read
        alone: Any = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        alone.untyped_storage().is_copy = True
    else:
        alone = tensor.detach().clone()
    return alone.requires_grad_() if tensor.requires_grad else alone


def copy_content(target: Any, data: Any) -> None:
    """Copy the elements of `data` into `target`, which is like it."""
    if not is_tensor(target):
        if is_storage(target):
            target.copy_(data, False)  # noqa: FBT003 - torch's
        else:
            writeable, target.flags.writeable = target.flags.writeable, True
            target[...] = data
            target.flags.writeable = writeable
        return
    import torch

    if target.is_inference():
        with torch.inference_mode():
            target.copy_(data)
        return
    with torch.no_grad():
        alike = target.device == data.device and target.stride() == data.stride()
        if alike and target.layout is torch.strided and _is_sole_user(torch, target):
            target.data = data.detach()  # the memory of the payload, not a copy of it
            torch.autograd.graph.increment_version(target)
        else:
            target.copy_(data)
        if target.is_leaf:
            target.requires_grad_(data.requires_grad)


def _is_sole_user(torch: Any, tensor: Any) -> bool:
    """Return whether only the Python object `tensor` refers to its memory.

    A view, an array of NumPy, a DLPack capsule, a collective at work and a graph that saved the tensor each
    add to a count. The counts of a new tensor differ between versions of torch.
    """
    if not is_plain_tensor(tensor) or hasattr(tensor.untyped_storage(), "is_shared_with_arrays"):
        return False
    return _users(torch, tensor) == _users(torch, torch.empty(1))


def _users(torch: Any, tensor: Any) -> tuple[int, ...]:
    storage = tensor.untyped_storage()
    in_torch = torch._C._storage_Use_Count(storage._cdata), tensor._use_count()  # noqa: SLF001 - no public counts
    return (*in_torch, sys.getrefcount(storage))


# What torch leaves out of a tensor's pickle, and what is part of the tensor for its user.


def parts_of(tensor: Any) -> tuple[Any, Any, Any] | None:
    """Return a leaf's gradient, its hooks, and those for when the gradient is there; None if it has none.

    A tensor with a graph arrives as a leaf; its gradient and its hooks belong to the graph.
    """
    if not tensor.is_leaf:
        return None
    gradient = tensor.grad
    hooks, later = _hooks(tensor._backward_hooks), _hooks(tensor._post_accumulate_grad_hooks)  # noqa: SLF001 - torch has no public way
    return None if gradient is hooks is later is None else (gradient, hooks, later)


_RECOMPUTED = ("_orig", "_g", "_v")


def recomputed_in(obj: Any) -> list[int]:
    """Return the addresses of the tensors that a module computes anew, before each call, from parameters.

    `torch.nn.utils.prune` and the older `weight_norm` and `spectral_norm` do: the graph of these is no loss.
    """
    attributes = obj.__dict__ if is_module(obj) else {}
    if not attributes.get("_forward_pre_hooks"):
        return []
    return [
        id(value)
        for name, value in attributes.items()
        if is_tensor(value) and any(name + ending in attributes["_parameters"] for ending in _RECOMPUTED)
    ]


def _hooks(hooks: Any) -> Any:
    """Return a tensor's hooks, None if it has none; those of torch's wrappers belong to a process group."""
    if not hooks or any(_is_torchs(hook) for hook in hooks.values()):
        return None
    return hooks


def _is_torchs(hook: Any) -> bool:
    function = hook.__func__ if type(hook) is types.MethodType else hook
    # An object's class: to look up an attribute of its own may run the user's code.
    owner = function if type(function) is types.FunctionType else type(function)
    return str(owner.__module__).startswith("torch.")


def with_parts(tensor: Any, reduced: Any, parts: tuple[Any, Any, Any]) -> Any:
    """Return the reduction of a tensor with its gradient and its hooks, which come after the tensor."""
    if reduced is NotImplemented:
        with warnings.catch_warnings(action="ignore"):  # that hooks are left out
            reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    make, arguments, *state = reduced
    return make, arguments, (state[0] if state else None, parts), None, None, _set_state


def as_inference(tensor: Any, reduced: Any) -> Any:
    """Return the reduction of a tensor that was made in inference mode, to be made there again."""
    if reduced is NotImplemented:
        reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced if type(reduced) is not tuple else (_in_inference_mode, reduced[:2], *reduced[2:])


def _in_inference_mode(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch

    with torch.inference_mode():
        return make(*arguments)


def _set_state(tensor: Any, state: tuple[Any, Any]) -> None:
    attributes, parts = state
    if attributes is not None:
        import torch

        torch._utils._set_obj_state(tensor, attributes)  # noqa: SLF001 - what torch itself calls
    set_parts(tensor, parts)


def set_parts(tensor: Any, parts: tuple[Any, Any, Any] | None) -> None:
    gradient, hooks, later = parts or (None, None, None)
    tensor.grad = gradient
    if hooks or tensor._backward_hooks:  # noqa: SLF001 - where `register_hook` keeps them
        tensor._backward_hooks = hooks  # noqa: SLF001 - see above
    if later or tensor._post_accumulate_grad_hooks:  # noqa: SLF001 - likewise
        tensor._post_accumulate_grad_hooks = later  # noqa: SLF001 - see above


# Which part of each storage a pickle takes along.

LARGE = 4096
"""Storages of fewer bytes travel whole."""


Deferred: TypeAlias = "Callable[[], memoryview | Far]"
"""Returns a buffer when the pickle is complete."""


class Far:
    """Bytes of a storage on an accelerator, from `low` to `high`, that are copied when they are needed.

    That may be later, on another thread: the copy waits for the work that the device has been given by now.
    """

    readonly = False

    def __init__(self, storage: Any, low: int, high: int) -> None:
        import torch

        self._storage, self._low, self.nbytes = storage, low, high - low
        module = torch.get_device_module(storage.device)
        self._module, self._written = module, module.current_stream(storage.device).record_event()

    @property
    def address(self) -> tuple[int, int]:
        return self._storage.data_ptr() + self._low, self.nbytes

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the bytes, at most `size` at a time; each piece is valid until the next one."""
        import torch

        device = self._storage.device
        host = torch.empty(min(size, self.nbytes), dtype=torch.uint8)
        whole = memoryview(_buffer(host.untyped_storage())).cast("B")
        with self._module.device(device):
            self._module.current_stream(device).wait_event(self._written)
            for start in range(0, self.nbytes, size):
                count = min(size, self.nbytes - start)
                piece = torch.empty(0, dtype=torch.uint8, device=device).set_(
                    self._storage, self._low + start, (count,), (1,)
                )
                host[:count].copy_(piece)
                yield whole[:count]


def pieces(data: memoryview | Far, size: int) -> Iterator[memoryview]:
    """Yield the bytes, at most `size` at a time; each piece is valid until the next one."""
    if isinstance(data, Far):
        yield from data.pieces(size)
        return
    flat = data.cast("B")
    for start in range(0, flat.nbytes, size):
        yield flat[start : start + size]


class WholeStorages:
    """Pickles storages whole; the bytes of those on an accelerator are taken when the pickle is complete."""

    def __init__(self) -> None:
        self._deferred: dict[int, tuple[pickle.PickleBuffer, Deferred]] = {}

    def defer(self, data: Deferred) -> pickle.PickleBuffer:
        """Return a placeholder for a buffer that `data` returns when the pickle is complete."""
        placeholder = pickle.PickleBuffer(bytearray(1))  # writable, as the buffer that replaces it
        self._deferred[id(placeholder)] = placeholder, data
        return placeholder

    def deferred(self, buffer: pickle.PickleBuffer) -> Deferred | None:
        """Return what `buffer` is a placeholder for, None if it is none."""
        _, data = self._deferred.get(id(buffer), (None, None))
        return data

    def reduce(self, obj: Any) -> Any:
        # The name first of all: pickle calls this for every object.
        if type(obj).__name__ != "UntypedStorage" or not is_storage(obj):
            return reduce(obj)
        if obj.device.type not in ACCELERATORS or obj.nbytes() < LARGE:
            return reduce(obj)
        far = Far(obj, 0, obj.nbytes())
        return _untyped, (self.defer(lambda: far), obj.nbytes(), obj.device.type)


# A storage begins at an address that is good for the CPU's vector instructions, on both sides.
_ALIGNED = 64


class TrimmedStorages(WholeStorages):
    """Pickles, of each large storage, only the range that the tensors of one pickle show.

    That range is known only when the pickle is complete. Tensors that share a storage share it on the other
    side, where it begins at a later byte. A table, which is a buffer as well, has the number of bytes for
    each storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, StoragePart] = {}
        self._table = _Table(self._parts)
        self._table.placeholder = self.defer(self._table.data)  # no circle: storages are freed at once

    def reduce(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "UntypedStorage"):
            return NotImplemented
        if isinstance(obj, torch.Tensor):
            return self._tensor(torch, obj)
        if type(obj) is torch.UntypedStorage and (part := self._part_of(obj)) is not None:
            # A bare storage, or that of an unknown kind of tensor. Its typed wrapper leads here too.
            part.show(0, obj.nbytes())
            return _same, (part,)
        return reduce(obj)

    def _part_of(self, storage: Any) -> StoragePart | None:
        """Return the record of a large storage, None for any other."""
        if storage.device.type not in ("cpu", *ACCELERATORS) or storage.nbytes() < LARGE:
            return None
        key = storage._cdata  # noqa: SLF001 - two Python objects may wrap one storage
        if key not in self._parts:
            self._add(key, _TensorPart(storage, len(self._parts)))
        return self._parts[key]

    def _add(self, key: int, part: StoragePart) -> None:
        self._parts[key] = part
        part.placeholder = self.defer(part.data)

    def _placed(self, storage: Any, width: int) -> tuple[StoragePart | None, Any, int]:  # noqa: ARG002 - see arrays
        """Return the part in which a storage is, what tensors are made of, and where the storage begins."""
        part = self._part_of(storage)
        return part, part, 0

    def _tensor(self, torch: Any, tensor: Any) -> Any:
        kind = type(tensor)
        if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__ or kind in copyreg.dispatch_table:
            return NotImplemented
        reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(reduced) is not tuple:
            return reduced
        rebuild, arguments, *state = reduced
        if rebuild is torch._tensor._rebuild_from_type_v2:  # noqa: SLF001 - what torch writes into a pickle
            inner, kind, inner_arguments, attributes = arguments
            inner, inner_arguments = self._within(torch, tensor, inner, inner_arguments)
            return (rebuild, (inner, kind, inner_arguments, attributes), *state)
        return (*self._within(torch, tensor, rebuild, arguments), *state)

    def _within(self, torch: Any, tensor: Any, rebuild: Any, arguments: Any) -> tuple[Any, Any]:
        """Return torch's reduction of a tensor, over the range of its storage that is sent."""
        rebuilds = (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3)  # noqa: SLF001 - see above
        if rebuild not in rebuilds:
            return rebuild, arguments
        storage, offset, size, stride, *others = arguments
        if type(storage) is torch.UntypedStorage:
            storage = _typed(storage, torch.uint8)  # see `_with_typed_storage`
        width = tensor.element_size()
        part, memory, shift = self._placed(storage._untyped_storage, width)  # noqa: SLF001 - see `reduce`
        if part is None:
            return rebuild, (storage, *arguments[1:])
        offset += shift // width
        if 0 not in size:
            last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
            part.show(offset * width, (last + 1) * width)
        where = (memory, self._table, part.number, storage.dtype, width)
        return _rebuilt_within, (rebuild, *where, offset, size, stride, *others)


class StoragePart:
    """Memory of which a pickle takes the bytes from `start` to `high`."""

    placeholder: pickle.PickleBuffer
    data: Callable[[], memoryview | Far]

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self._size = self.low = size
        self.high = 0

    def show(self, low: int, high: int) -> None:
        """Include a range; of a storage that was resized below its tensors, the whole."""
        if high > self._size:
            low, high = 0, self._size
        self.low, self.high = min(self.low, low), max(self.high, high)

    @property
    def start(self) -> int:
        """How many bytes at the beginning are left out."""
        return self.low // _ALIGNED * _ALIGNED if self.high else 0


class _TensorPart(StoragePart):
    """A storage as its tensors show it."""

    def __init__(self, storage: Any, number: int) -> None:
        super().__init__(number, storage.nbytes())
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        return _untyped_part, (self.placeholder, self.storage.device.type)

    def data(self) -> memoryview | Far:
        if self.start >= self.high:
            return memoryview(b"")
        if self.storage.device.type != "cpu":
            return Far(self.storage, self.start, self.high)
        return memoryview(_buffer(self.storage)).cast("B")[self.start : self.high]


class _Table:
    """For each storage of a pickle, by how many bytes it begins later on the other side."""

    placeholder: pickle.PickleBuffer

    def __init__(self, parts: dict[int, StoragePart]) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _shifts, (self.placeholder,)

    def data(self) -> memoryview:
        starts = array.array("q", [part.start for part in self._parts.values()])
        return memoryview(starts if any(starts) else b"").cast("B")


def _untyped_part(buffer: Any, kind: str) -> Any:
    return _untyped(buffer, memoryview(buffer).nbytes, kind)


def _same(storage: Any) -> Any:
    return storage


def _shifts(buffer: Any) -> array.array[int]:
    shifts = array.array("q")
    shifts.frombytes(buffer)
    return shifts


def _rebuilt_within(  # noqa: PLR0913, PLR0917 - torch's own arguments, and where the storage begins
    rebuild: Any, storage: Any, shifts: Any, number: int, dtype: Any, width: int, offset: int, *others: Any
) -> Any:
    """Rebuild a tensor over a storage that begins later than the one it was made of."""
    shift = shifts[number] if shifts else 0
    # An empty tensor may lie outside the range.
    return rebuild(_typed(storage, dtype), max(offset - shift // width, 0), *others)
