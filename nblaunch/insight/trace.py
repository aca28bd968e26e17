"""One Chrome trace of many ranks, joined from parts that the ranks have compressed.

The format is that of the Trace Event Format's JSON object, which ui.perfetto.dev and chrome://tracing open.
Each rank compresses its events by itself, as deflate blocks that refer to nothing before them. So parts
become one gzip member without being unpacked: only their checksums are combined.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

_POLYNOMIAL = 0xEDB88320
_LEVEL = 1
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


class TracePart(msgspec.Struct, frozen=True):
    """Bytes of a trace: `data` are deflate blocks; `size` bytes with this checksum when unpacked."""

    data: bytes
    size: int
    crc: int


def packed(text: bytes) -> TracePart:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    data = packer.compress(text) + packer.flush(zlib.Z_FULL_FLUSH)
    return TracePart(data, len(text), zlib.crc32(text))


def joined(parts: Sequence[TracePart]) -> bytes:
    r"""Return a gzip file of the events in these parts, each part a JSON array without its brackets.

    >>> import gzip
    >>> gzip.decompress(joined([packed(b'{"ph": "X"}'), packed(b"")]))
    b'{"displayTimeUnit": "ms", "traceEvents": [\n{"ph": "X"}\n]}'
    """
    comma = packed(b",\n")
    pieces = [packed(b'{"displayTimeUnit": "ms", "traceEvents": [\n')]
    for number, part in enumerate(each for each in parts if each.size):
        pieces += [comma, part] if number else [part]
    pieces.append(packed(b"\n]}"))
    crc = size = 0
    for each in pieces:
        crc = crc32_combined(crc, each.crc, each.size)
        size += each.size
    end = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS).flush(zlib.Z_FINISH)
    return b"".join(
        [_HEADER, *(each.data for each in pieces), end, struct.pack("<II", crc, size & 0xFFFFFFFF)]
    )


def crc32_combined(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two texts, one behind the other, from their own; the second has `size` bytes.

    As zlib's `crc32_combine`, which Python does not offer: `size` zero bytes are added to the first, by
    squaring the matrix over GF(2) that adds one zero bit.
    """
    if size <= 0:
        return first
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    for _ in range(3):  # of one bit, two, four: eight bits are a byte
        matrix = _squared(matrix)
    while size:
        if size & 1:
            first = _times(matrix, first)
        size >>= 1
        matrix = _squared(matrix)
    return first ^ second


def _times(matrix: Sequence[int], vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _squared(matrix: Sequence[int]) -> list[int]:
    return [_times(matrix, column) for column in matrix]
