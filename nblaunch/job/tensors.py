"""How torch storages are pickled: as buffers, once per storage, and never as a CUDA handle.

torch is not imported here: an object is a storage only where torch has been imported already.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_arrival = threading.local()


def reduce(obj: Any) -> Any:
    """Return how to rebuild a torch storage, `NotImplemented` for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return NotImplemented
    if type(obj) is torch.storage.TypedStorage:
        # Every tensor makes a new typed wrapper; the untyped storage below is one object per memory,
        # so that pickle's own memo keeps aliases aliases.
        return _typed, (obj._untyped_storage, obj.dtype)  # noqa: SLF001 - torch warns on the public name
    if type(obj) is torch.Tensor and obj.dtype in torch.storage._new_dtypes():  # noqa: SLF001 - no public list
        return _with_typed_storage(torch, obj)
    if type(obj) is torch.UntypedStorage and obj.device.type in ("cpu", "cuda"):
        kind = obj.device.type
        here = obj if kind == "cpu" else obj.cpu()
        return _untyped, (_buffer(here), here.nbytes(), kind)
    return NotImplemented


def _with_typed_storage(torch: Any, tensor: Any) -> Any:
    """Return torch's own reduction of a tensor of a newer dtype (uint16, float8), mended.

    torch 2.13 pickles an untyped storage there, and unpickles a typed one: it cannot read what it wrote.
    """
    rebuild, (storage, *others), *state = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if type(storage) is torch.UntypedStorage:
        storage = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return (rebuild, (storage, *others), *state)


def _buffer(storage: Any) -> pickle.PickleBuffer:
    size = storage.nbytes()
    memory: Any = (ctypes.c_ubyte * size).from_address(storage.data_ptr()) if size else (ctypes.c_ubyte * 0)()
    memory.storage = storage  # lives as long as the buffer
    return pickle.PickleBuffer(memory)


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
    if kind == "cuda" and device is not None:
        return torch.UntypedStorage(size, device=device).copy_(storage, False)  # noqa: FBT003 - torch's
    return storage


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


@contextmanager
def arriving_on(device: str | None) -> Iterator[None]:
    """Within the block, storages that were on a CUDA device are rebuilt on `device` (None: the CPU)."""
    before = getattr(_arrival, "device", None)
    _arrival.device = device if device is not None and device.startswith("cuda") else None
    try:
        yield
    finally:
        _arrival.device = before


def is_tensor(obj: Any) -> bool:
    """Return whether `obj` is a torch tensor of any class."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def is_plain_tensor(obj: Any) -> bool:
    """Return whether `obj` is a tensor or a parameter, and of no other class."""
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter)


def is_storage(obj: Any) -> bool:
    """Return whether `obj` is the memory of tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.UntypedStorage)


def reduce_by_value(obj: Any) -> Any:
    """Return how to rebuild a copy of a tensor, a storage or an array, whose memory nobody else has."""
    if not is_tensor(obj):
        return reduce(obj) if is_storage(obj) else obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    import torch

    copied = obj.detach().clone()
    if isinstance(obj, torch.nn.Parameter):
        return torch.nn.Parameter, (copied, obj.requires_grad)
    return copied.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def copy_content(target: Any, data: Any) -> None:
    """Copy the elements of `data` into `target`, which is like it."""
    if not is_tensor(target):
        if is_storage(target):
            target.copy_(data, False)  # noqa: FBT003 - torch's
        else:
            target[...] = data
        return
    import torch

    with torch.no_grad():
        target.copy_(data)
        if target.is_leaf:
            target.requires_grad_(data.requires_grad)
