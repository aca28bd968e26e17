"""A rank's memory: what a job used of host and GPU, why an allocation failed, what a failed job holds."""

from __future__ import annotations

import contextlib
import gc
import re
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from nblaunch._resident import own_memory_here, resident_of, set_back_peak
from nblaunch.probes.held import PlacedVariables, largest
from nblaunch.protocol.messages import DeviceMemory, FrameRecord, HeldMemory, MemoryUse
from nblaunch.protocol.reports import is_ours, own_frame, place

Error = TypeVar("Error", BaseException, traceback.TracebackException)
_SIZE = r"(?P<number>[\d.]+) (?P<unit>bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED = re.compile(rf"(?:Tried to allocate|Requested size:) {_SIZE}")
_DEVICE = re.compile(r"GPU (\d+) has a total")
_TOTAL = re.compile(rf"total capacity of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_OTHER = re.compile(rf"Process (?P<pid>\d+) has {_SIZE} memory in use")
_LIMIT = re.compile(rf"{_SIZE} allowed;")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


def on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())


class HostMeter:
    """The memory of this process alone, and its peak since the job began.

    Now is what is private, less what the fork server still shares of it. How much that is, only a walk over
    all pages tells; it takes 0.7 ms, and 5 ms more for each GB. So a job that was shorter than a hundred
    times that is given what the last walk found: it may be a few MB less by now, as the rank writes to more
    of these pages. A rank of a standby group has walked before its job came.
    """

    def __init__(self) -> None:
        self._shared: int | None = None
        self._began = 0.0
        self._first_peak = 0
        self._last_walk = 0.0
        self._set_back = False

    def begin(self) -> None:
        self._began = time.monotonic()
        self._set_back = set_back_peak()
        known = None if self._set_back else resident_of()
        self._first_peak = known.peak if known is not None else 0

    def measure(self) -> tuple[int | None, int | None]:
        known = resident_of()
        if known is None:
            return None, None
        cost = max(_WALK_SECONDS + _WALK_SECONDS_PER_BYTE * known.private, self._last_walk)
        if self._shared is None or time.monotonic() - self._began >= _WORTH * cost:
            began = time.monotonic()
            own = own_memory_here()
            self._last_walk = time.monotonic() - began
            self._shared = None if own is None else max(known.private - own, 0)
        now = max(known.private - (self._shared or 0), 0)
        if self._set_back or known.peak > self._first_peak:
            return now, now + max(known.peak - known.now, 0)
        return now, now  # a sandbox without it: the peak of an earlier job stands


_WALK_SECONDS = 0.0007
_WALK_SECONDS_PER_BYTE = 5e-12
_WORTH = 100
_host = HostMeter()


def used() -> MemoryUse:
    return MemoryUse(*_host.measure(), allocated("current"), peak())


def reset_peak() -> None:
    _host.begin()
    with contextlib.suppress(RuntimeError):  # an allocator of the program's own, which keeps no statistics
        for index in range(torch.cuda.device_count() if on_gpu() else 0):
            torch.cuda.reset_peak_memory_stats(index)


def peak() -> int | None:
    """Return the most bytes that torch has had allocated at a time on one GPU during the job."""
    return allocated("peak")


def allocated(when: str) -> int | None:
    """Return the bytes that torch has allocated on the fullest GPU: those at `peak`, or the `current` ones.

    None where the rank has not used CUDA, or where the program's own allocator keeps no statistics. Asks the
    allocator alone, so a GPU in error does not matter.
    """
    if not on_gpu():
        return None
    # What `max_memory_allocated` reads, at a tenth of its cost: it flattens and sorts all statistics.
    stats = map(torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count()))
    try:
        return max((int(each["allocated_bytes"]["all"][when]) for each in stats), default=None)
    except (RuntimeError, KeyError):
        return None


def shortage(error: BaseException) -> DeviceMemory | None:
    """Return what CUDA's allocator could not give, and how the GPU's memory was used; None for other errors.

    The numbers are from the allocator's own message, which was true when it failed: unwinding may have freed
    memory since. The wording is that of torch 2.1 to 2.13; a number missing from the message is left out, or
    asked of the allocator.
    """
    if not isinstance(error, torch.OutOfMemoryError) or not on_gpu():
        return None
    text = str(error)
    asked = _bytes(_ASKED.search(text))
    if asked is None:
        return None  # the program's own
    named = _DEVICE.search(text)
    device = int(named[1]) if named else torch.cuda.current_device()
    free, total = _bytes(_FREE.search(text)), _bytes(_TOTAL.search(text))
    allocated, unused = _bytes(_ALLOCATED.search(text)), _bytes(_UNUSED.search(text))
    try:
        if free is None or total is None:
            free, total = torch.cuda.mem_get_info(device)
        if allocated is None or unused is None:
            allocated = torch.cuda.memory_allocated(device)
            unused = torch.cuda.memory_reserved(device) - allocated
    except RuntimeError:
        return None  # then torch's message must do
    return DeviceMemory(
        device=f"cuda:{device}",
        # Older drivers have none.
        uuid=str(getattr(torch.cuda.get_device_properties(device), "uuid", "")),
        asked=asked,
        free=free,
        total=total,
        limit=_bytes(_LIMIT.search(text)),
        allocated=allocated,
        reserved=allocated + unused,
        own=_bytes(_OWN.search(text)),
        others={int(each["pid"]): _bytes(each) or 0 for each in _OTHER.finditer(text)},
    )


def _bytes(found: re.Match[str] | None) -> int | None:
    return None if found is None else round(float(found["number"]) * _UNITS[found["unit"]])


_HOST = re.compile(r"DefaultCPUAllocator|can't allocate memory|Cannot allocate memory|not enough memory")


def held(error: BaseException, titles: Mapping[str, str]) -> tuple[HeldMemory, ...]:
    """Return what this rank holds of the memory that ran out, the largest first; nothing for other errors."""
    for each in chain(error):
        device = _short_of(each)
        if device is not None:
            return largest(_variables(each, titles), device=device, titles=titles)
    return ()


def _short_of(error: BaseException) -> str | None:
    """Return the GPU whose memory ran out, "" for that of the host, None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        named = _DEVICE.search(str(error))
        if named is None and not on_gpu():
            return None
        return f"cuda:{named[1] if named else torch.cuda.current_device()}"
    if isinstance(error, MemoryError):
        return ""
    if isinstance(error, RuntimeError | OSError) and _HOST.search(str(error)):
        return ""
    return None


def _variables(error: BaseException, titles: Mapping[str, str]) -> Iterator[PlacedVariables]:
    """Yield the variables of an exception's frames, the user's own innermost first, then global ones."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not is_ours(file):
            at = FrameRecord(titles.get(file, file), line, frame.f_code.co_name, "")
            frames.append((frame, at))
    own = [each for each in frames if own_frame([each[1]]) is not None]
    libraries = [each for each in frames if own_frame([each[1]]) is None]
    for frame, at in (*reversed(own), *reversed(libraries)):
        yield place(at), frame.f_locals
    for frame, _ in reversed(own):
        yield "", frame.f_globals


def free_frames(error: BaseException) -> None:
    """Free the variables of a failed job's frames, even if the exception is still referred to.

    Frames and exceptions refer to each other, so the memory would otherwise wait for a garbage collection
    that may never come. After a shortage the allocator's cache goes back to the driver as well: a fragmented
    cache is often part of the shortage.
    """
    short = False
    for each in chain(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            clear(frame)
        short = short or isinstance(each, torch.OutOfMemoryError)
    if short and on_gpu():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the GPU is in error: the next job will report it
            torch.cuda.empty_cache()


def clear(frame: types.FrameType) -> None:
    """Free the variables of a frame, unless it still runs."""
    with contextlib.suppress(RuntimeError):
        frame.clear()
        # Before Python 3.13 this is a copy, made when the failure was recorded; reading it renews it.
        _ = frame.f_locals


def chain(error: Error) -> Iterator[Error]:
    """Yield an exception and all that it refers to: its cause, its context, the members of a group."""
    pending: list[Any] = [error]
    seen: set[int] = set()
    while pending:
        each: Any = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            pending += (each.__cause__, each.__context__)
            if isinstance(each, BaseExceptionGroup | traceback.TracebackException):
                pending += each.exceptions or ()
