"""A tensor as hashes of its blocks, computed where the tensor is; nothing of it is copied to the host.

A block is 256 kB, in 64 pieces of 4 kB. A piece is 1,024 words of 32 bits; its hash is, in each of two lanes,
the sum of every word times a fixed random number of 64 bits that belongs to the word's place, modulo 2**64.
The upper half of such a sum is universal: two pieces that differ have equal sums in one lane with a
probability of at most 2**-32, in both of 2**-64 (Lemire and Kaser, "Strongly universal string hashing is
fast", 2014). It cannot be fooled by chance, by a changed order or by changed signs; it is no protection
against somebody who chooses the content. A block's digest is a BLAKE2b of its pieces' hashes.

Bytes count: 0.0 and -0.0 differ, and so do two NaNs with different bits. All bytes are read once, and once
more those of the few blocks that somebody asks about.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nblaunch.insight.comparing import BLOCK_BYTES, PIECE_BYTES, PIECES, ElementBytes

_WORDS = PIECE_BYTES // 4
_LANES = 2
_CHUNK_CPU, _CHUNK = BLOCK_BYTES, 64 * BLOCK_BYTES
"""What is hashed at once: in a CPU's cache; on a GPU with 4 times as much memory for products."""
_SMALL = 1 << 14
DIGEST = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CODES = {
    torch.float32: "f",
    torch.float64: "d",
    torch.float16: "e",
    torch.complex64: "F",
    torch.complex128: "D",
    torch.bool: "?",
    torch.uint8: "B",
    torch.int8: "b",
    torch.int16: "h",
    torch.int32: "i",
    torch.int64: "q",
    torch.uint16: "H",
    torch.uint32: "I",
    torch.uint64: "Q",
    torch.bfloat16: "f",
}
"""How elements are read on the other side, as in `struct`; `F` and `D` are complex numbers."""


def digest(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=DIGEST)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


@dataclass(slots=True)
class HashedTensor:
    """A tensor, as it was read; `source` must not change before the last question."""

    source: torch.Tensor
    shape: tuple[int, ...]
    size: int
    """Bytes of an element."""
    code: str
    digests: bytes = b""
    """Of all blocks, one after the other."""

    @property
    def blocks(self) -> int:
        return len(self.digests) // DIGEST

    def pieces(self, blocks: Sequence[int]) -> tuple[tuple[bytes, ...], ...]:
        """Read some blocks again; return the hashes of their pieces."""
        found = []
        for block in blocks:
            data = self._bytes(block * BLOCK_BYTES, BLOCK_BYTES)
            hashes = piece_hashes(data)
            width = _LANES * 8
            found.append(tuple(hashes[at : at + width] for at in range(0, len(hashes), width)))
        return tuple(found)

    def elements(self, pieces: Sequence[int]) -> tuple[ElementBytes, ...]:
        """Return the bytes of some pieces, and values of types that `struct` does not read."""
        found = []
        for piece in pieces:
            data = self._bytes(piece * PIECE_BYTES, PIECE_BYTES).cpu()
            values = b""
            if self.code and self.source.dtype in _CONVERTED:
                values = _raw(data.view(self.source.dtype).to(torch.float32).view(torch.uint8))
            found.append(ElementBytes(_raw(data), values))
        return tuple(found)

    def _bytes(self, start: int, count: int) -> torch.Tensor:
        """Return some bytes of the tensor, in the order of its elements."""
        plain = _plain(self.source)
        if plain.is_contiguous():
            return _as_bytes(plain)[start : start + count].clone()
        size = plain.element_size()
        first, last = start // size, min(-(-(start + count) // size), plain.numel())
        chosen = torch.arange(first, last, device=plain.device)
        places: list[torch.Tensor] = []
        for length in reversed(plain.shape):
            places.append(chosen % length)
            chosen = chosen // length
        return _as_bytes(plain[tuple(reversed(places))])[start - first * size :][:count]


_CONVERTED = {torch.bfloat16} | {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
CODES.update(dict.fromkeys(_CONVERTED, "f"))


def hashed(
    tensor: torch.Tensor, *, shape: tuple[int, ...] = (), size: int = 0, code: str = ""
) -> HashedTensor:
    """Read a dense tensor once, and return the hashes of its blocks.

    `shape`, `size` and `code` are given where `tensor` is the bytes of something else.
    """
    source = tensor.detach()
    source = source.resolve_conj().resolve_neg()
    found = HashedTensor(
        source,
        shape if size else tuple(source.shape),
        size or source.element_size(),
        code if size else CODES.get(source.dtype, ""),
    )
    size_of_all = source.numel() * source.element_size()
    if source.device.type == "cpu" and 0 < size_of_all <= _SMALL:
        # Sooner done than a few operations of torch; it is one block, so nobody needs more of it.
        found.digests = digest(_raw(_as_bytes(_plain(source).contiguous())))
        return found
    digests = bytearray()
    chunk = _CHUNK_CPU if source.device.type == "cpu" else _CHUNK
    width, rest = _LANES * 8 * PIECES, b""
    for part in _chunks(_plain(source), chunk):
        hashes = rest + piece_hashes(part)
        whole = len(hashes) // width * width
        for at in range(0, whole, width):
            digests += hashlib.blake2b(hashes[at : at + width], digest_size=DIGEST).digest()
        rest = hashes[whole:]
    if rest:
        digests += hashlib.blake2b(rest, digest_size=DIGEST).digest()
    found.digests = bytes(digests)
    return found


def piece_hashes(data: torch.Tensor) -> bytes:
    """Return the hashes of the pieces of a row of bytes, 16 bytes for each; the last piece may be shorter."""
    missing = -data.numel() % PIECE_BYTES
    if missing:
        data = torch.nn.functional.pad(data, (0, missing))
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32).view(-1, _WORDS)
    weights = weights_on(data.device)
    long = words.to(torch.int64)
    lanes = torch.stack([(long * weights[lane]).sum(1) for lane in range(_LANES)], 1)
    return _raw(lanes.cpu().view(torch.uint8))


def ranges(digests: bytes, start: int, stop: int, step: int) -> tuple[bytes, ...]:
    """Return a digest of each `step` of the digests from `start` to `stop`."""
    found = (digests[at * DIGEST : min(at + step, stop) * DIGEST] for at in range(start, stop, step))
    return tuple(each if len(each) == DIGEST else digest(each) for each in found if each)


@functools.cache
def weights_on(device: torch.device) -> torch.Tensor:
    """Return the numbers that words are multiplied by: the same on every rank and in every version."""
    stream = hashlib.shake_256(b"nblaunch.diff").digest(_LANES * _WORDS * 8)
    return torch.tensor(array("q", stream), dtype=torch.int64).view(_LANES, _WORDS).to(device)


def _chunks(source: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in the order of its elements, `size` at a time."""
    rest: torch.Tensor | None = None
    for whole in _rows(source, max(size, BLOCK_BYTES)):
        part = _as_bytes(whole)
        if rest is not None and rest.numel():
            part = torch.cat([rest, part])
        full = part.numel() // size * size
        for at in range(0, full, size):
            yield part[at : at + size]
        rest = part[full:]
    if rest is not None and rest.numel():
        yield rest


def _rows(source: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield a tensor in parts that are contiguous, so that no copy of all of it is made."""
    if source.is_contiguous():
        yield source
    elif source.numel() * source.element_size() <= size or not source.dim():
        yield source.contiguous()
    else:
        row = source[0].numel() * source.element_size()
        together = max(1, size // max(row, 1))
        for start in range(0, source.shape[0], together):
            part = source[start : start + together]
            if together == 1 and row > size:
                yield from _rows(part[0], size)
            else:
                yield part.contiguous()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _plain(source: torch.Tensor) -> torch.Tensor:
    """Return the same elements as integers, of which torch can do everything with every device."""
    if source.element_size() in _INTEGERS:
        return source.view(_INTEGERS[source.element_size()])
    return torch.view_as_real(source)


def _raw(data: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of bytes on the host."""
    flat = data.contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel()) if flat.numel() else b""
