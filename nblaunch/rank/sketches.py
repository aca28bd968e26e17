"""Sketches of a rank's variables: short numbers that tell later whether all ranks had a variable alike.

A rank that dies takes its variables along. One that was the same on all ranks can be copied from another;
one that was not must not be. So each rank of a session reports sketches with the names of its variables.
After a job these are cheap: small values whole, of all else the type, the shape and some parts. While the
rank is idle, and for a tenth of the time that its last job took, it digests the pickles of the others, as a
save compares them, as far as that is quick.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import time
import types
import zlib
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch

from nblaunch.capture import tensors
from nblaunch.capture.parts import is_by_value
from nblaunch.protocol.variables import UNKNOWN, is_whole, mark_outdated, number_of

_MOST_NAMES = 256
_MOST_PARTS, _MOST_DEPTH = 64, 3
_SMALL = 64
_LONG, _LONG_TEXT = 1000, 64 << 10
# How much processor time a pickle may take that is made in passing. Other work on the machine does not count.
_MOST_SECONDS = 5.0
# A pickle beyond this is not made in passing, nor are buffers beyond that read.
_MOST_BYTES, _MOST_OF_BUFFERS = 64 << 20, 2 << 30
# What is read before the rank looks for an order.
_PIECE = 4 << 20
# Of how long the job took.
_SHARE, _LEAST_SECONDS = 0.1, 0.005


class _Checksum:
    """The checksum of one value, of a bounded number of parts."""

    __slots__ = ("_left", "_seen", "sum", "whole")

    def __init__(self) -> None:
        self.sum, self.whole, self._left = 0, True, _MOST_PARTS
        self._seen: set[int] = set()

    def add(self, value: Any, depth: int = 0) -> None:
        kind = type(value)
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            self.whole = False
        elif _is_plain(value):
            self.sum = zlib.crc32(f"{kind.__name__} {value!r} ".encode(), self.sum)
        elif kind is str or kind is bytes:
            self._text(kind.__name__, value)
        elif kind in _CONTAINERS:
            self._container(value, depth)
        elif kind in _TENSORS:
            self._tensor(value, depth)
        elif kind is torch.device:
            # Each rank has its own GPU, which pickles do not tell apart.
            self._take("device", value.type.encode())
            self.whole = self.whole and value.index is None
        elif kind is types.ModuleType:
            self._take("module", value.__name__.encode())
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            self._take(kind.__name__, f"{value.__module__}.{value.__qualname__}".encode())
            by_value = not isinstance(value, types.BuiltinFunctionType) and is_by_value(value)
            self.whole = self.whole and not by_value
        elif isinstance(value, PurePath):
            self._take(kind.__name__, str(value).encode())
        elif kind.__module__ == "numpy":
            self._of_numpy(value)
        else:
            self._take("object", f"{kind.__module__}.{kind.__qualname__}".encode())
            self.whole = False
            attributes = getattr(value, "__dict__", None)
            # A mesh knows which of its ranks this one is; a model has more parts than a cell has time for.
            of_torch = kind.__module__.startswith("torch.") or isinstance(value, torch.nn.Module)
            if type(attributes) is dict and not of_torch:
                self._items(attributes, depth)

    def _take(self, kind: str, data: bytes) -> None:
        self.sum = zlib.crc32(data, zlib.crc32(f"{kind} {len(data)} ".encode(), self.sum))

    def _text(self, kind: str, value: str | bytes) -> None:
        if len(value) > _LONG_TEXT:
            self.whole = False
            self._take(kind, str(len(value)).encode())
        for each in (value,) if len(value) <= _LONG_TEXT else (value[:_LONG], value[-_LONG:]):
            self._take(kind, each.encode("utf-8", "surrogatepass") if isinstance(each, str) else each)

    def _note(self, value: Any) -> None:
        """Note a part: one object in two places is not two that are equal, unless nothing can change it."""
        self.whole = self.whole and id(value) not in self._seen
        if type(value) is not tuple:
            self._seen.add(id(value))

    def _container(self, value: Any, depth: int) -> None:
        self._note(value)
        self._take(type(value).__name__, str(len(value)).encode())
        if isinstance(value, dict):
            self._items(value, depth)
            return
        if isinstance(value, list | tuple) and len(value) < self._left and all(map(_is_plain, value)):
            self._left -= len(value)
            self.sum = zlib.crc32(repr(value).encode(), self.sum)
            return
        first = list(itertools.islice(value, _MOST_PARTS + 1))
        if isinstance(value, set | frozenset):
            # Their order is another one on each machine.
            self.whole = self.whole and all(type(each) in _PLAIN | {int, str} for each in first)
            first.sort(key=repr)
        for each in first:
            self.add(each, depth + 1)

    def _items(self, items: dict[Any, Any], depth: int) -> None:
        for key, each in itertools.islice(items.items(), _MOST_PARTS + 1):
            self.add(key, depth + 1)
            self.add(each, depth + 1)

    def _tensor(self, tensor: torch.Tensor, depth: int) -> None:
        self._note(tensor)
        dtype, device, graph = tensor.dtype, tensor.device.type, tensor.requires_grad
        # To format a type takes torch as long as all the rest.
        name = _DTYPES.get(dtype) or _DTYPES.setdefault(dtype, str(dtype))
        self._take("tensor", f"{name} {tuple(tensor.shape)} {device} {graph}".encode())
        gradient, *hooks = tensors.parts_of(tensor) or (None, None, None)
        self.whole = self.whole and not (
            hooks != [None, None] or tensor.grad_fn is not None or tensor.__dict__
        )
        if gradient is not None:
            self.add(gradient, depth + 1)
        if device != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
            self.whole = False
            return
        step = max(tensor.numel() // _SMALL, 1)
        self.whole = self.whole and step == 1
        sample = tensor.detach() if graph else tensor
        if step > 1:
            sample = sample.view(-1)[::step][: 2 * _SMALL]
        if dtype not in _NUMPYS:
            sample = sample.contiguous().view(-1).view(torch.uint8)
        self._take("elements", sample.numpy().tobytes())

    def _of_numpy(self, value: Any) -> None:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        self._take("numpy", f"{type(value).__qualname__} {shape} {dtype}".encode())
        if shape is None or dtype is None or dtype.hasobject:
            self.whole = False
            return
        step = max(value.size // _SMALL, 1)
        self.whole = self.whole and step == 1
        self._take(
            "elements",
            repr(value.flat[::step][: 2 * _SMALL].tolist()).encode() if shape else repr(value).encode(),
        )


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMPYS = frozenset(
    {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8, torch.float16}
)
"""Types that NumPy has, too, and need no copy."""
_PLAIN = frozenset({bool, float, complex, type(None), torch.dtype, range, slice})
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_DTYPES: dict[torch.dtype, str] = {}
_KEPT = frozenset({bool, float, type(None), types.ModuleType})
"""Types of values that nothing can change, and that may be kept for a job longer."""


def _is_plain(value: object) -> bool:
    kind = type(value)
    return kind in _PLAIN or (isinstance(value, int) and kind is int and value.bit_length() < _LONG)


def _is_kept(value: object) -> bool:
    kind = type(value)
    return kind in _KEPT or (
        (kind is int and _is_plain(value)) or (isinstance(value, str) and kind is str and len(value) < _LONG)
    )


def sketch(value: object) -> int:
    """Return a cheap sketch of a value.

    >>> is_whole(sketch([1, "a"])), is_whole(sketch(object())), sketch(1) == sketch(2)
    (True, False, False)
    >>> sketch(torch.device("cuda:0")) == sketch(torch.device("cuda:1")), sketch(torch.device("cpu")) & 1
    (True, 0)
    """
    checksum = _Checksum()
    try:
        checksum.add(value)
    except Exception:  # noqa: BLE001 - a value may raise anything when it is examined
        return UNKNOWN
    return number_of(checksum.sum, whole=checksum.whole)


class TooLargeError(Exception):
    """A pickle is larger than is made in passing, or takes longer."""


class StoppedError(Exception):
    """The rank has got an order meanwhile."""


class _DigestFile(io.RawIOBase):
    """A file that keeps only the digest of what is written."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        super().__init__()
        self.hash, self.size, self._stop = hashlib.sha256(), 0, stop
        self._until = time.thread_time() + _MOST_SECONDS

    def check(self) -> None:
        """Raise if the rank has got an order. Called for each object, of which an optimizer has many."""
        if self._stop():
            raise StoppedError

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        if self.size > _MOST_BYTES or time.thread_time() > self._until:
            raise TooLargeError
        self.hash.update(view)
        return view.nbytes


class Sketches:
    """The sketches of this rank's variables after its last job."""

    def __init__(self, pickler: Callable[..., Any], stop: Callable[[], bool]) -> None:
        """`pickler(file, **keywords)` makes what pickles a variable; called when a rank has the time.

        `stop` tells whether it has no time any more; the pickler asks as it goes (`check`).
        """
        self._pickler, self._stop = pickler, stop
        self._of: dict[str, int] = {}
        self._digests: dict[str, int] = {}
        self._before: dict[str, tuple[int, int]] = {}
        """The address and the sketch of each after the last job."""
        self._kept: dict[str, object] = {}
        """Those that are the same value as long as they are the same object."""
        self._waiting: list[str] = []
        self._until = float("inf")

    def begin(self, variables: Mapping[str, Any], seconds: float) -> None:
        """Sketch all after a job, which took so many `seconds`."""
        names = sorted(variables)[:_MOST_NAMES]
        of, before, kept = dict[str, int](), self._before, self._kept
        self._before, self._kept = {}, {}
        for name in names:
            value = variables[name]
            same = name in kept and kept[name] is value
            of[name] = before[name][1] if same else sketch(value)
            self._before[name] = id(value), of[name]
            if same or _is_kept(value):
                self._kept[name] = value
        # Of an object that may have been changed since, an old digest still tells where ranks have others.
        still = [name for name in self._digests if before.get(name) == self._before.get(name, UNKNOWN)]
        self._of, self._digests = of, {name: mark_outdated(self._digests[name]) for name in still}
        self._wait_for(of)
        share = _SHARE * seconds
        self._until = time.monotonic() + (share if share >= _LEAST_SECONDS else 0.0)

    def _wait_for(self, of: dict[str, int]) -> None:
        self._waiting = [name for name in reversed(of) if not is_whole(of[name])]

    def of(self, names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sketches of these variables, and the digests of their pickles, if there are any."""
        digests = tuple(self._digests.get(name, UNKNOWN) for name in names) if self._digests else ()
        return tuple(self._of.get(name, UNKNOWN) for name in names), digests

    @property
    def waits(self) -> bool:
        """Whether there are variables that can be sketched by their pickles."""
        return bool(self._waiting)

    @property
    def hurries(self) -> bool:
        """Whether that may be done at once, and not only while the rank is idle."""
        return self.waits and time.monotonic() < self._until

    def go_on(self, variables: Mapping[str, Any]) -> bool:
        """Sketch one more variable by its pickle; return whether that was the last."""
        name = self._waiting.pop()
        # Whatever the objects raise: nothing more is known then.
        with contextlib.suppress(Exception, SystemExit):
            try:
                if name in variables:
                    self._digests[name] = number_of(self._digest(variables[name]), whole=True)
            except StoppedError:
                # Not every order is a job, after which all begins anew.
                self._waiting.append(name)
        return not self._waiting

    def begin_again(self) -> None:
        """Forget the digests: what belongs to process groups that were formed again has another pickle now.

        Some ranks may have made them before that, and others not.
        """
        self._digests = {}
        self._wait_for(self._of)

    def _digest(self, value: Any) -> int:
        file, buffers = _DigestFile(self._stop), list[Any]()
        self._pickler(file, buffers=buffers, check=file.check).dump(value)
        if sum(each.nbytes for each in buffers) > _MOST_OF_BUFFERS:
            raise TooLargeError
        for piece in itertools.chain.from_iterable(tensors.pieces(each, _PIECE) for each in buffers):
            file.check()
            file.hash.update(piece)
        return int.from_bytes(file.hash.digest()[:4], "little")
