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

from nblaunch.capture.parts import is_by_value
from nblaunch.protocol.messages import LastKnown, Names

_MOST_NAMES = 256
_MOST_PARTS, _MOST_DEPTH = 64, 3
_SMALL = 64
_LONG = 1000
# A pickle beyond this is not made in passing, nor are buffers beyond it read.
_MOST_BYTES = 64 << 20
_PIECE = 16 << 20
# Of how long the job took.
_SHARE, _LEAST_SECONDS = 0.1, 0.005

UNKNOWN = 0
"""The sketch of a variable of which nothing is known."""


def is_whole(sketch: int) -> bool:
    """Return whether two values with this sketch are equal, and not only alike as far as was seen."""
    return sketch != UNKNOWN and sketch % 2 == 0


def _number(checksum: int, *, whole: bool) -> int:
    return (1 << 40) | checksum << 1 | (not whole)


class _Checksum:
    """The checksum of one value, of a bounded number of parts."""

    def __init__(self) -> None:
        self.sum, self.whole, self._left = 0, True, _MOST_PARTS
        self._seen: set[int] = set()

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
            self._note(value)
            self._take(f"{kind.__name__} {len(value)}".encode())
            for each in value[: _MOST_PARTS + 1]:
                self.add(each, depth + 1)
        elif kind is dict:
            self._note(value)
            self._take(f"dict {len(value)}".encode())
            for key, each in list(value.items())[: _MOST_PARTS + 1]:
                self.add(key, depth + 1)
                self.add(each, depth + 1)
        elif kind in {torch.Tensor, torch.nn.Parameter}:
            self._note(value)
            self._tensor(value, depth)
        else:
            self._named(value)

    def _named(self, value: Any) -> None:
        """Add what is the same wherever it is imported; of all else, the type."""
        kind = type(value)
        if kind is types.ModuleType:
            self._take(b"module " + value.__name__.encode())
        elif isinstance(value, type | types.FunctionType) and not is_by_value(value):
            self._take(f"{kind.__name__} {value.__module__}.{value.__qualname__}".encode())
        else:
            self._take(f"{kind.__module__}.{kind.__qualname__}".encode())
            self.whole = False

    def _note(self, value: Any) -> None:
        """Note a part: one object in two places is not two that are equal, unless nothing can change it."""
        self.whole &= id(value) not in self._seen
        if type(value) is not tuple:
            self._seen.add(id(value))

    def _take(self, data: bytes) -> None:
        # With their lengths: [1, 23] is not [12, 3].
        self.sum = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), self.sum))

    def _tensor(self, tensor: torch.Tensor, depth: int) -> None:
        shape = tuple(tensor.shape)
        self._take(f"{tensor.dtype} {shape} {tensor.device.type} {tensor.requires_grad}".encode())
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= _SMALL:
            self._take(repr(tensor.detach().tolist()).encode())
            if tensor.is_leaf and tensor.grad is not None:
                self.add(tensor.grad, depth + 1)
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
    return _number(checksum.sum, whole=checksum.whole)


def last_known(rank: int, names: Mapping[int, Names]) -> LastKnown:
    """Return what is known of the variables of a rank that has died, by the names that all ranks have told.

    >>> names = {each: Names(rank=each, names=("x", "y"), sketches=(4, 6 + 2 * each)) for each in range(2)}
    >>> last_known(1, names)
    LastKnown(equal=('x',), alike=(), others=('y',), never=())
    """
    own = names.get(rank)
    if own is None or len(own.sketches) != len(own.names):
        return LastKnown(others=() if own is None else own.names)
    of = {each: _numbers(known) for each, known in names.items()}
    found: dict[str, list[str]] = {"equal": [], "alike": [], "others": []}
    for name in own.names:
        known = [each.get(name, (UNKNOWN, UNKNOWN)) for each in of.values()]
        (number, *others), digests = {each for each, _ in known}, {each for _, each in known}
        kind = "equal" if is_whole(number) or (len(digests) == 1 and UNKNOWN not in digests) else "alike"
        differ = others or number == UNKNOWN or len(digests - {UNKNOWN}) > 1
        found["others" if differ else kind].append(name)
    never = sorted(set().union(*of.values()).difference(own.names))
    return LastKnown(**{kind: tuple(each) for kind, each in found.items()}, never=tuple(never))


def _numbers(known: Names) -> dict[str, tuple[int, int]]:
    digests = known.digests or (UNKNOWN,) * len(known.names)
    return dict(zip(known.names, zip(known.sketches, digests, strict=False), strict=False))


class TooLargeError(Exception):
    """A pickle is larger than is made in passing."""


class _Digest(io.RawIOBase):
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
                self._digests[name] = _number(self._digest(variables[name]), whole=True)
        return not self._waiting

    def _digest(self, value: Any) -> int:
        file, buffers = _Digest(), list[Any]()
        self._pickler(file, buffers=buffers).dump(value)
        for each in buffers:
            if file.size + each.nbytes > _MOST_BYTES:
                raise TooLargeError
            for piece in [each] if isinstance(each, memoryview) else each.pieces(_PIECE):
                file.write(piece)
        return int.from_bytes(file.hash.digest()[:4], "little")
