"""Large payloads cross once: written into a memory file, which readers map.

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
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from nblaunch._cgroups import tightest_memory
from nblaunch.capture.pickling import Packed
from nblaunch.capture.tensors import pieces
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

_DESCRIPTORS = Path("/proc/self/fd")
_ALIGNMENT = 64
_COPY_STEP = 64 * 1024 * 1024
_RESERVE = 0.95


class NoRoomError(MemoryError):
    """Neither memory nor disk has room for a payload."""


class Outgoing(contextlib.ExitStack):
    """A payload that this process has made, or holds; `close` frees what no process has mapped."""

    def __init__(self, payload: Payload, release: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.payload = payload
        self.callback(release)


def put(packed: Packed, directory: Callable[[], Path]) -> Outgoing:
    """Write `packed` where another process of this user can map it.

    `directory` names a private directory for the case that memory has no room. Raises `NoRoomError`
    with what was needed and what there is.
    """
    sizes = tuple(part.nbytes for part in packed.parts)
    total = _layout(sizes)[1]
    if total <= INLINE:
        whole = bytearray(total)
        for offset, piece in _pieces(packed, sizes):
            whole[offset : offset + piece.nbytes] = piece
        return Outgoing(Payload(sizes=sizes, inline=bytes(whole)))
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            fd = _take_memory(total, directory)
            if fd is not None:
                return _in_memory(fd, packed, sizes, total)
    return _on_disk(packed, sizes, total, directory())


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


def _in_memory(fd: int, packed: Packed, sizes: tuple[int, ...], total: int) -> Outgoing:
    try:
        _write(fd, packed, sizes, total)
    except BaseException:
        os.close(fd)
        raise
    return Outgoing(
        Payload(sizes=sizes, pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino), lambda: os.close(fd)
    )


def _on_disk(packed: Packed, sizes: tuple[int, ...], total: int, directory: Path) -> Outgoing:
    fd, path = _file(total, directory)
    try:
        # Blocks are allocated now: a full disk is an error here, not a SIGBUS in a reader of the mapping.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, total)
        _write(fd, packed, sizes, total)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, OSError):
            raise _no_room(total, directory) from error
        raise
    finally:
        os.close(fd)
    return Outgoing(Payload(sizes=sizes, path=path), lambda: Path(path).unlink(missing_ok=True))


def _file(total: int, directory: Path) -> tuple[int, str]:
    if total > shutil.disk_usage(directory).free * _RESERVE:
        raise _no_room(total, directory)
    return tempfile.mkstemp(prefix="payload-", dir=directory)


def _no_room(total: int, directory: Path) -> NoRoomError:
    free = shutil.disk_usage(directory).free
    return NoRoomError(
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
        can_be_written = private or len(payload.sizes) > 1
        return memoryview(bytearray(payload.inline) if can_be_written else payload.inline)
    fd = _opened(payload, total, os.O_RDONLY if private else os.O_RDWR)
    try:
        return _mapped(fd, total, private=private) if total > _COPIED else memoryview(_read(fd, total))
    finally:
        os.close(fd)


def hold(payload: Payload, directory: Callable[[], Path]) -> Outgoing:
    """Open what another process has made, and map nothing: from now on this process is the one that holds it.

    Whatever becomes of its maker, it can be mapped until `close`. Without /proc there are only files on disk:
    they are linked into the private directory that `directory` names. Raises `OSError` as `get` does.
    """
    if payload.inline is not None:
        return Outgoing(payload)
    fd = _opened(payload, _layout(payload.sizes)[1], os.O_RDWR)
    if _DESCRIPTORS.is_dir():
        held = Payload(sizes=payload.sizes, pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino)
        return Outgoing(held, lambda: os.close(fd))
    os.close(fd)
    link = directory() / f"held-{secrets.token_hex(8)}"
    os.link(payload.path, link)
    return Outgoing(Payload(sizes=payload.sizes, path=str(link)), lambda: link.unlink(missing_ok=True))


def _opened(payload: Payload, total: int, flags: int) -> int:
    """Return a descriptor of the file that a payload is in; raise `OSError` if it is not all there."""
    path = payload.path or f"/proc/{payload.pid}/fd/{payload.fd}"
    fd = os.open(path, flags | os.O_CLOEXEC)
    found = os.fstat(fd)
    if payload.inode in (0, found.st_ino) and found.st_size >= total:
        return fd
    os.close(fd)
    if payload.inode not in (0, found.st_ino):
        msg = f"a payload of {total} bytes was in {path}, which its owner has closed since"
        raise FileNotFoundError(msg)
    msg = f"a payload of {total} bytes was announced, and {path} is shorter"
    raise OSError(msg)


def _mapped(fd: int, total: int, *, private: bool) -> memoryview:
    """Map a file; the mapping lives as long as a view of it, and holds no descriptor.

    `mmap.mmap` keeps a duplicate of the descriptor (up to Python 3.12 there is no way to ask for none), and a
    notebook that keeps many results would run out of them.
    """
    sharing = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _libc.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, sharing, fd, 0)
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
            self.fd, self.path = _file(total, directory)
        os.ftruncate(self.fd, total)

    def write(self, data: memoryview, offset: int) -> None:
        _write_at(self.fd, data, offset)

    def payload(self, sizes: tuple[int, ...]) -> Payload:
        return Payload(sizes=sizes, pid=os.getpid(), fd=self.fd, path=self.path)

    def close(self) -> None:
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


def _pieces(packed: Packed, sizes: tuple[int, ...]) -> Iterator[tuple[int, memoryview]]:
    """Yield all bytes, in pieces that are not too large to be copied at once, with where each begins."""
    for part, start in zip(packed.parts, _layout(sizes)[0], strict=True):
        offset = start
        for piece in pieces(part, _COPY_STEP):
            yield offset, piece
            offset += piece.nbytes


def _write(fd: int, packed: Packed, sizes: tuple[int, ...], total: int) -> None:
    os.ftruncate(fd, total)
    for offset, piece in _pieces(packed, sizes):
        _write_at(fd, piece, offset)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _free_memory() -> int:
    free = int(psutil.virtual_memory().available)
    container = tightest_memory()
    return free if container is None else min(free, container[1])
