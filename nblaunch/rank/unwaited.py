"""Telling of a failure without waiting for a device.

To print or copy a tensor on a GPU waits for all that its stream has been given. Where that is a collective
whose peers never come, it waits for ever, and the failure is never heard. So while a failure is made into a
record, a tensor whose device is busy is told by its shape, and whoever reads it in another way gets an
exception.

A name of torch's that is not public (`tests/unit/test_torch_names.py`): `_tensor_str._str`, where every
repr of a tensor ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nblaunch.job import tensors

# A healthy GPU is done with what it has been given a moment after the exception; a stuck one never is.
_SECONDS = 0.5
_LOOK_SECONDS = 0.002
_KINDS = ("cuda", "xpu")
_READING = frozenset(
    {
        *("__array__", "__bool__", "__complex__", "__float__", "__format__", "__index__", "__int__"),
        *("allclose", "cpu", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "to"),
        *("tolist", "type", "unique"),
    }
)
"""Functions and methods that wait for the device."""

# By its full name: `torch._tensor_str` is what `Tensor.__repr__` looks the function up in.
_printing: Any = torch._tensor_str  # noqa: SLF001 - see above


class DeviceBusyError(RuntimeError):
    """A tensor was to be read whose device has not come that far."""


@contextlib.contextmanager
def unwaited() -> Iterator[None]:
    """Within the block no tensor is waited for, but for a moment."""
    if not any(_is_initialized(kind) for kind in _KINDS):
        yield
        return
    devices = _Devices()
    printed: Callable[..., str] = _printing._str  # noqa: SLF001 - see above

    def _str(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if devices.idle(self.device):
            return printed(self, tensor_contents=tensor_contents)
        return by_shape(self)

    _printing._str = _str  # noqa: SLF001 - see above
    try:
        with _Refusing(devices), tensors.only_from(devices.idle):
            yield
    finally:
        _printing._str = printed  # noqa: SLF001 - see above


def by_shape(tensor: torch.Tensor) -> str:
    """Return what can be said of a tensor without its numbers."""
    return f"tensor(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r})"


def _is_initialized(kind: str) -> bool:
    return bool(getattr(getattr(torch, kind, None), "is_initialized", bool)())


class _Devices:
    """The devices of this process: whether each has done what it has been given."""

    def __init__(self) -> None:
        self._left = _SECONDS

    def idle(self, device: torch.device) -> bool:
        """Whether a tensor on `device` can be read at once; all questions together wait for `_SECONDS`."""
        if device.type in ("cpu", "meta"):
            return True
        try:
            stream = torch.get_device_module(device).current_stream(device)
            while not stream.query():
                if self._left <= 0:
                    return False
                time.sleep(_LOOK_SECONDS)
                self._left -= _LOOK_SECONDS
        except Exception:  # noqa: BLE001 - a device that is of no use any more, or that cannot be asked
            return False
        return True


class _Refusing(TorchFunctionMode):
    """Raises where a tensor of a busy device is to be read: by `.item()` in somebody's `__repr__`, say.

    Not a `TorchDispatchMode`, which would see everything: the first operator under one imports TorchDynamo.
    """

    def __init__(self, devices: _Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _READING:
            for each in args:
                if isinstance(each, torch.Tensor) and not self._devices.idle(each.device):
                    msg = f"{by_shape(each)} cannot be read: its device is busy, or of no use any more"
                    raise DeviceBusyError(msg)
        return func(*args, **(kwargs or {}))
