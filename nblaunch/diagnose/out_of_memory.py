"""CUDA out of memory, in one paragraph: what was asked for, what is free, and who holds the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from nblaunch._protocol import DeviceMemory, FailureRecord
from nblaunch.diagnose.report import size

_OTHERS = "other processes"
_MUCH = 0.05
_SHOWN = 1 << 20
_FREE_IT = "Delete what you no longer need outside the ranks, then call torch.cuda.empty_cache()."
_JOIN_PIECES = (
    "Enough is reserved and unused, but in pieces: --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    "joins them."
)


def explain(failure: FailureRecord, rank: int, holders: Mapping[int, str], kernel: str) -> FailureRecord:
    """Return the failure of a rank, its message saying who holds the memory of its GPU.

    `holders` says of each process whose it is, `kernel` how it calls this one.
    """
    memory = failure.memory
    if memory is None:
        return failure
    what = failure.message.partition(".")[0]  # "CUDA out of memory", or HIP
    asked = (
        f"{what}. Tried to allocate {size(memory.asked)} on {memory.device} of rank {rank}, "
        f"where {size(memory.free)} of {size(memory.total)} are free{_limit(memory)}."
    )
    torchs = f"{size(memory.allocated)} allocated, {size(memory.reserved)} reserved"
    if memory.own is None:
        held = _not_named(memory, rank, torchs, kernel)
        kernels = reserved_here(memory.uuid)
    else:
        found = _by_holder(memory, holders)
        others = "".join(f", {who} {size(count)}" for who, count in found.items())
        held = f"Rank {rank} holds {size(memory.own)} (torch: {torchs}){others}."
        kernels = found.get(kernel, 0)
    return msgspec.structs.replace(failure, message=" ".join([asked, held, *_advice(memory, kernels)]))


def _limit(memory: DeviceMemory) -> str:
    if memory.limit is None or memory.reserved + memory.asked <= memory.limit:
        return ""
    return f", and torch may have {size(memory.limit)} in this rank (set_per_process_memory_fraction)"


def _by_holder(memory: DeviceMemory, holders: Mapping[int, str]) -> dict[str, int]:
    """Return what others hold, the largest part first; the processes that nobody knows come last."""
    found: dict[str, int] = {}
    for pid, count in memory.others.items():
        who = holders.get(pid, _OTHERS)
        found[who] = found.get(who, 0) + count
    shown = {who: count for who, count in found.items() if count >= _SHOWN}
    return dict(sorted(shown.items(), key=lambda each: (each[0] == _OTHERS, -each[1], each[0])))


def _not_named(memory: DeviceMemory, rank: int, torchs: str, kernel: str) -> str:
    """Say what is known where the driver does not name processes, as in many containers."""
    rest = max(memory.total - memory.free - memory.reserved, 0)
    text = f"Torch holds {size(memory.reserved)} in rank {rank} ({torchs})"
    if rest < _SHOWN:
        return f"{text}."
    mine = reserved_here(memory.uuid)
    part = f", {size(mine)} of it torch in {kernel}" if mine >= _SHOWN else ""
    return f"{text}; CUDA itself and other processes hold {size(rest)}{part}."


def _advice(memory: DeviceMemory, kernels: int) -> tuple[str, ...]:
    if kernels > memory.total * _MUCH:
        return (_FREE_IT,)
    return (_JOIN_PIECES,) if memory.reserved - memory.allocated >= memory.asked else ()


def reserved_here(uuid: str) -> int:
    """Return what torch holds in this very process on a GPU; initialises nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return int(torch.cuda.memory_reserved(index))
    return 0
