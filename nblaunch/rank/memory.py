"""A rank's GPU memory: the peak of each job, what an allocation failed for, and what a failed job holds."""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from nblaunch.protocol.messages import DeviceMemory

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
    """Return whether this rank uses CUDA."""
    return bool(torch.cuda.is_initialized())


def reset_peak() -> None:
    """Reset the peak: it is that of the job that begins."""
    with contextlib.suppress(RuntimeError):  # an allocator of the program's own, which keeps no statistics
        for index in range(torch.cuda.device_count() if on_gpu() else 0):
            torch.cuda.reset_peak_memory_stats(index)


def peak() -> int | None:
    """Return the most bytes that torch has had allocated at a time on one GPU during the job.

    None where the rank has not used CUDA, or where the program's own allocator keeps no statistics. Asks the
    allocator alone, so a GPU in error does not matter.
    """
    if not on_gpu():
        return None
    # What `max_memory_allocated` reads, at a tenth of its cost: it flattens and sorts all statistics.
    stats = map(torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count()))
    try:
        return max((int(each["allocated_bytes"]["all"]["peak"]) for each in stats), default=None)
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


def free_frames(error: BaseException) -> None:
    """Free the variables of a failed job's frames, even if the exception is still referred to.

    Frames and exceptions refer to each other, so the memory would otherwise wait for a garbage collection
    that may never come. After a shortage the allocator's cache goes back to the driver as well: a fragmented
    cache is often part of the shortage.
    """
    short = False
    for each in chain(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            with contextlib.suppress(RuntimeError):  # a frame that still runs is one of nblaunch's
                frame.clear()
                # Before Python 3.13 this is a copy, made when the failure was recorded; reading it renews it.
                _ = frame.f_locals
        short = short or isinstance(each, torch.OutOfMemoryError)
    if short and on_gpu():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the GPU is in error: the next job will report it
            torch.cuda.empty_cache()


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
