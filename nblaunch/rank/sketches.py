"""Sketches of a rank's variables: short numbers that tell later whether all ranks had a variable alike.

A rank that dies takes its variables along. One that was the same on all ranks can be copied from another; one
that was not must not be. So each rank of a session reports sketches with the names of its variables. After a
job these are cheap: small values whole, of all else the type and the shape. While the rank is idle, and for a
tenth of the time that its last job took, it sketches the others by their pickles, as a save compares them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nblaunch.protocol.variables import UNKNOWN, is_whole, numbered

_MOST_NAMES = 256
_MOST_PARTS, _MOST_DEPTH = 64, 3
_SMALL = 64
_LONG = 1000
# A pickle beyond this is not made in passing, nor are buffers beyond it read.
_MOST_BYTES = 64 << 20
_PIECE = 16 << 20
# Of how long the job took.
_SHARE, _LEAST_SECONDS = 0.1, 0.005


class _Checksum:
    """The checksum of one value, of a bounded number of parts."""

    def __init__(self) -> None:
        self.sum, self.whole, self._left = 0, True, _MOST_PARTS

    def add(self, value: Any, depth: int = 0) -> None:
        kind = type(value)
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            self.whole = False
            return
        if kind in _PLAIN:
            self._take(repr(value).encode())
        elif kind is int:
            whole = repr(value) if value.bit_length() < _LONG else hex(value)
            self._take(whole.encode())
        elif kind is str:
            self._take(b"s" + value.encode("utf-8", "surrogatepass"))
        elif kind is bytes:
            self._take(b"b" + value)
        elif kind in {list, tuple}:
            self._take(f"{kind.__name__} {len(value)}".encode())
            for each in value[: _MOST_PARTS + 1]:
                self.add(each, depth + 1)
        elif kind is dict:
            self._take(f"dict {len(value)}".encode())
            for key, each in list(value.items())[: _MOST_PARTS + 1]:
                self.add(key, depth + 1)
                self.add(each, depth + 1)
        elif kind is types.ModuleType:
            self._take(b"module " + value.__name__.encode())
        elif kind in {torch.Tensor, torch.nn.Parameter}:
            self._tensor(value)
        else:
            self._take(f"{kind.__module__}.{kind.__qualname__}".encode())
            self.whole = False

    def _take(self, data: bytes) -> None:
        self.sum = zlib.crc32(data, self.sum)

    def _tensor(self, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        self._take(f"{tensor.dtype} {shape} {tensor.device.type} {tensor.requires_grad}".encode())
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= _SMALL:
            self._take(repr(tensor.detach().tolist()).encode())
        else:
            self.whole = False


_PLAIN = frozenset({bool, float, complex, type(None), torch.dtype, torch.device, range, slice})


def sketch(value: object) -> int:
    """Return a cheap sketch of a value.

    >>> is_whole(sketch([1, "a"])), is_whole(sketch(object())), sketch(1) == sketch(2)
    (True, False, False)
    """
    checksum = _Checksum()
    try:
        checksum.add(value)
    except Exception:  # noqa: BLE001 - a value may raise anything when it is examined
        return UNKNOWN
    return numbered(checksum.sum, whole=checksum.whole)


class TooLargeError(Exception):
    """A pickle is larger than is made in passing."""


class _DigestFile(io.RawIOBase):
    """A file that keeps only the digest of what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.hash, self.size = hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        if self.size > _MOST_BYTES:
            raise TooLargeError
        self.hash.update(view)
        return view.nbytes


class Sketches:
    """The sketches of this rank's variables after its last job."""

    def __init__(self, pickler: Callable[..., Any]) -> None:
        """`pickler(file, **keywords)` makes what pickles a variable; called when a rank has the time."""
        self._pickler = pickler
        self._of: dict[str, int] = {}
        self._digests: dict[str, int] = {}
        self._waiting: list[str] = []
        self._until = float("inf")

    def begin(self, variables: Mapping[str, Any], seconds: float) -> None:
        """Sketch all after a job, which took so many `seconds`."""
        names = sorted(variables)[:_MOST_NAMES]
        self._of, self._digests = {name: sketch(variables[name]) for name in names}, {}
        self._waiting = [name for name in reversed(names) if not is_whole(self._of[name])]
        share = _SHARE * seconds
        self._until = time.monotonic() + (share if share >= _LEAST_SECONDS else 0.0)

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
        with contextlib.suppress(Exception):  # whatever the objects raise: nothing more is known then
            if name in variables:
                self._digests[name] = numbered(self._digest(variables[name]), whole=True)
        return not self._waiting

    def _digest(self, value: Any) -> int:
        file, buffers = _DigestFile(), list[Any]()
        self._pickler(file, buffers=buffers).dump(value)
        for each in buffers:
            if file.size + each.nbytes > _MOST_BYTES:
                raise TooLargeError
            for piece in [each] if isinstance(each, memoryview) else each.pieces(_PIECE):
                file.write(piece)
        return int.from_bytes(file.hash.digest()[:4], "little")
