"""Large payloads cross once: written into a memory file, and mapped by whoever reads it.

A memory file (memfd) has no name: it needs no room in /dev/shm, which containers keep at 64 MB, and it is
gone with the last process that holds it. The reader opens it through `/proc/<pid>/fd`, which the system
allows only to the same user. Where there is no memfd, or not enough memory, the payload is an ordinary
file in the runtime directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

import psutil

from nblaunch._cgroups import tightest_memory
from nblaunch.capture.pickling import Packed
from nblaunch.capture.tensors import Far
from nblaunch.protocol.messages import Payload

INLINE = 256 * 1024
"""Payloads of at most this many bytes travel inside their message."""

_COPIED = 8 * 1024 * 1024
"""Payloads of at most this many bytes are copied, not mapped: a process may have some 65,000 mappings."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

_ALIGNMENT = 64
_COPY_STEP = 64 * 1024 * 1024
_RESERVE = 0.95


class NoRoomError(MemoryError):
    """Neither memory nor disk has room for a payload."""


class Outgoing:
    """A payload on its way; its memory stays until `close`. A context manager."""

    def __init__(self, payload: Payload, release: Callable[[], None] | None = None) -> None:
        """Keep `payload` and what frees it."""
        self.payload = payload
        self._release = release

    def close(self) -> None:
        """Free what nobody has mapped."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def put(packed: Packed, directory: Callable[[], Path]) -> Outgoing:
    """Write `packed` where another process of this user can map it.

    `directory` names a private directory for the case that memory has no room. Raises `NoRoomError`
    with what was needed and what there is.
    """
    parts = packed.parts
    sizes = tuple(part.nbytes for part in parts)
    total = _layout(sizes)[1]
    if total <= INLINE:
        return Outgoing(Payload(sizes=sizes, inline=_joined(parts, sizes, total)))
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            fd = _take_memory(total, directory)
            if fd is not None:
                return _in_memory(fd, parts, sizes, total)
    return _on_disk(parts, sizes, total, directory())


def _take_memory(total: int, directory: Callable[[], Path]) -> int | None:
    """Return a memory file that can hold `total` bytes, None if memory has no room for it.

    The ranks of a machine often send at the same moment. If there is not enough for what all of them may be
    sending, they look one after the other, and each takes its share before the next one looks.
    """
    free = _free_memory() * _RESERVE
    if total > free:
        return None
    if total * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= free:
        return os.memfd_create("nblaunch", os.MFD_CLOEXEC)
    lock = os.open(directory() / "memory", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if total > _free_memory() * _RESERVE:
            return None
        fd = os.memfd_create("nblaunch", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, total)
        except BaseException:
            os.close(fd)
            raise
        return fd
    finally:
        os.close(lock)


def _in_memory(fd: int, parts: tuple[memoryview | Far, ...], sizes: tuple[int, ...], total: int) -> Outgoing:
    try:
        _write(fd, parts, sizes, total)
    except BaseException:
        os.close(fd)
        raise
    return Outgoing(Payload(sizes=sizes, pid=os.getpid(), fd=fd), lambda: os.close(fd))


def _on_disk(
    parts: tuple[memoryview | Far, ...], sizes: tuple[int, ...], total: int, directory: Path
) -> Outgoing:
    free = shutil.disk_usage(directory).free
    if total > free * _RESERVE:
        raise NoRoomError(_no_room(total, directory, free))
    fd, path = tempfile.mkstemp(prefix="payload-", dir=directory)
    try:
        # Blocks are allocated now: a full disk is an error here, not a SIGBUS in whoever maps the file.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, total)
        _write(fd, parts, sizes, total)
    except OSError as error:
        os.unlink(path)
        raise NoRoomError(_no_room(total, directory, shutil.disk_usage(directory).free)) from error
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return Outgoing(Payload(sizes=sizes, path=path), lambda: Path(path).unlink(missing_ok=True))


def _no_room(total: int, directory: Path, free: int) -> str:
    return (
        f"{total / 1e6:.0f} MB are to be sent; memory has {_free_memory() / 1e6:.0f} MB free and the disk "
        f"under {directory} has {free / 1e6:.0f} MB. Free memory, send less, or set TMPDIR to a larger disk."
    )


def get(payload: Payload, *, private: bool) -> tuple[memoryview, ...]:
    """Map a payload and return its parts; they may be written to.

    With `private` a write changes this process's copy only (and costs memory only then); without, the
    mapping is the one and only copy. The sender must still hold the payload when this is called.
    Raises `OSError` if it does not.
    """
    offsets, _ = _layout(payload.sizes)
    whole = joined(payload, private=private)
    return tuple(whole[offset : offset + size] for offset, size in zip(offsets, payload.sizes, strict=True))


def joined(payload: Payload, *, private: bool) -> memoryview:
    """Map a payload as `get` does, and return its parts in one, with the room between them."""
    total = _layout(payload.sizes)[1]
    if payload.inline is not None:
        whole = memoryview(payload.inline)
        if private or len(payload.sizes) > 1:
            whole = memoryview(bytearray(whole))
    else:
        path = payload.path or f"/proc/{payload.pid}/fd/{payload.fd}"
        fd = os.open(path, (os.O_RDONLY if private else os.O_RDWR) | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < total:
                msg = f"a payload of {total} bytes was announced, and {path} is shorter"
                raise OSError(msg)
            whole = _mapped(fd, total, private=private) if total > _COPIED else memoryview(_read(fd, total))
        finally:
            os.close(fd)
    return whole


def _mapped(fd: int, total: int, *, private: bool) -> memoryview:
    """Map a file; the mapping lives as long as a view of it, and holds no descriptor.

    `mmap.mmap` keeps a duplicate of the descriptor (up to Python 3.12 there is no way to ask for none), and a
    notebook that keeps many results would run out of them.
    """
    address = _libc.mmap(
        None,
        total,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE if private else mmap.MAP_SHARED,
        fd,
        0,
    )
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{total} bytes could not be mapped: {os.strerror(number)}")
    memory = (ctypes.c_ubyte * total).from_address(address)
    # Every view refers to this object. At the end of the process the system unmaps: threads may still read.
    weakref.finalize(memory, _libc.munmap, address, total).atexit = False
    return memoryview(memory).cast("B")


class Incoming:
    """A payload that arrives in pieces, from another machine; its memory stays until `close`."""

    def __init__(self, total: int, directory: Path) -> None:
        """Make room; raises `NoRoomError` or `OSError` if there is none."""
        self.path = ""
        if total <= _free_memory() * _RESERVE and hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("nblaunch", os.MFD_CLOEXEC)
        else:
            free = shutil.disk_usage(directory).free
            if total > free * _RESERVE:
                raise NoRoomError(_no_room(total, directory, free))
            self.fd, self.path = tempfile.mkstemp(prefix="payload-", dir=directory)
        os.ftruncate(self.fd, total)

    def write(self, data: memoryview, offset: int) -> None:
        """Take one piece."""
        while data.nbytes:
            count = os.pwrite(self.fd, data, offset)
            data, offset = data[count:], offset + count

    def payload(self, sizes: tuple[int, ...]) -> Payload:
        """Return the payload as a process of this machine gets it."""
        return Payload(sizes=sizes, pid=os.getpid(), fd=self.fd, path=self.path)

    def close(self) -> None:
        """Free what nobody has mapped."""
        os.close(self.fd)
        if self.path:
            Path(self.path).unlink(missing_ok=True)


def _read(fd: int, total: int) -> bytearray:
    data = bytearray(total)
    view, done = memoryview(data), 0
    while done < total:
        count = os.preadv(fd, [view[done:]], done)
        if count == 0:
            msg = f"a payload of {total} bytes ended after {done}"
            raise OSError(msg)
        done += count
    return data


def _layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where each part starts, and the length of all together."""
    offsets, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end


def _joined(parts: tuple[memoryview | Far, ...], sizes: tuple[int, ...], total: int) -> bytes:
    joined = bytearray(total)
    for part, offset in zip(parts, _layout(sizes)[0], strict=True):
        for piece in _pieces(part):
            joined[offset : offset + piece.nbytes] = piece
            offset += piece.nbytes  # noqa: PLW2901 - where the next piece goes
    return bytes(joined)


def _pieces(part: memoryview | Far) -> Iterator[memoryview]:
    """Yield a part as bytes, in pieces that are not too large to be copied at once."""
    if isinstance(part, Far):
        yield from part.pieces(_COPY_STEP)
        return
    flat = part.cast("B")
    for start in range(0, flat.nbytes, _COPY_STEP):
        yield flat[start : start + _COPY_STEP]


def _write(fd: int, parts: tuple[memoryview | Far, ...], sizes: tuple[int, ...], total: int) -> None:
    os.ftruncate(fd, total)
    for part, offset in zip(parts, _layout(sizes)[0], strict=True):
        place = offset
        for piece in _pieces(part):
            written = 0
            while written < piece.nbytes:
                written += os.pwrite(fd, piece[written:], place + written)
            place += written


def _free_memory() -> int:
    """Return the bytes that may still be used: of the machine, and of the tightest cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    container = tightest_memory()
    return free if container is None else min(free, container[1])
