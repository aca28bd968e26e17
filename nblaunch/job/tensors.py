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
