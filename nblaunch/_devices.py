"""Which GPUs a process sees, and which CPUs are near one of them.

The variables that choose GPUs are read here as the drivers and torch read them. torch's own functions read
the environment of the process that they run in. Ranks may have another one.

A name of torch's that is not public (`tests/unit/test_torch_names.py`):
`torch.numa.binding._get_logical_cpus_to_bind_to`.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
VARIABLES = (CUDA, HIP, ROCR)
_MIG = "MIG-"
_BY_NAME = ("GPU-", _MIG)
_CPUS = "_get_logical_cpus_to_bind_to"
_NCCL = "libnccl.so.2"


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that this process has loaded.

    `torch.cuda.nccl.version()` is that which torch was compiled with; another may be installed.
    """
    try:
        loaded = ctypes.CDLL(_NCCL, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        code = ctypes.c_int()
        loaded.ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):  # it is a part of torch's own library, or AMD's
        return tuple(importlib.import_module("torch.cuda.nccl").version())
    # As nccl.h codes it since 2.9.
    return code.value // 10_000, code.value // 100 % 100, code.value % 100


def choice_of(environ: Mapping[str, str], *, hip: bool) -> str | None:
    """Return what chooses among the installed GPUs, None where nothing does; `hip`: torch's build is ROCm's.

    ROCm applies `ROCR_VISIBLE_DEVICES` first and `HIP_VISIBLE_DEVICES`, which goes before CUDA's name for it,
    to what is left.
    """
    if not hip:
        return environ.get(CUDA)
    if HIP in environ:
        return environ[HIP]
    return environ.get(ROCR, environ.get(CUDA))


def named_gpus(choice: str) -> list[str]:
    """Return the GPUs that a variable names, as far as the driver reads it.

    It stops at the first entry that is none. One that is named twice makes the whole choice void.

    >>> [named_gpus(choice) for choice in ("2,0", "0,-1,1", "0,0", "GPU-1a,GPU-2b", "")]
    [['2', '0'], ['0'], [], ['GPU-1a', 'GPU-2b'], []]
    """
    found: list[str] = []
    prefix = next((each for each in _BY_NAME if choice.startswith(each)), None)
    for part in choice.split(","):
        if prefix is not None:
            name = part if part.startswith(prefix) else ""
        else:
            # As strtoul has it: `1gpu` is 1.
            number = re.match(r"\+?\d+", part.strip())
            name = str(int(number[0])) if number is not None else ""
        if name in found:
            return []
        if not name:
            break
        found.append(name)
    return found


def ordinals(choice: str, installed: int, uuids: Callable[[], Sequence[str]]) -> list[int]:
    """Return which of the installed GPUs a choice makes visible, in its order; MIG instances are not GPUs.

    >>> ordinals("1,0,7", 2, list), ordinals("GPU-b,GPU-a", 2, lambda: ["GPU-aa", "GPU-bb"])
    ([1, 0], [1, 0])
    """
    found: list[int] = []
    known: Sequence[str] | None = None
    for name in named_gpus(choice):
        if name.isdecimal():
            number = int(name)
        else:
            known = uuids() if known is None else known
            # ROCm's driver knows them without the prefix.
            matching = [
                index
                for index, uuid in enumerate(known)
                if uuid.startswith((name, name.removeprefix("GPU-")))
            ]
            number = matching[0] if len(matching) == 1 else installed
        if number >= installed:
            break
        if number in found:
            return []
        found.append(number)
    return found


def is_mig(choice: str) -> bool:
    """Return whether a choice names MIG instances, of which CUDA gives one to a process."""
    return choice.startswith(_MIG)


def some_alone(environ: Mapping[str, str], places: Sequence[int], *, hip: bool) -> dict[str, str]:
    """Return the variables with which a process sees only those of the GPUs that it sees under `environ`.

    Where a choice hides all GPUs, nothing changes.
    """
    # With ROCR's alone, HIP counts what that has left.
    choice = None if hip and HIP not in environ and ROCR in environ else choice_of(environ, hip=hip)
    if choice is None:
        return {HIP if hip else CUDA: ",".join(map(str, places))}
    if not choice.strip():
        return {}
    # What the driver would not read is left to it to refuse.
    named = named_gpus(choice)
    if max(places) >= len(named):
        named = [part.strip() for part in choice.split(",")]
    chosen = ",".join(named[place] for place in places)
    return {name: chosen for name in ((HIP, CUDA) if hip else (CUDA,)) if name in environ}


def numa_options(mode: str) -> Any:
    """Return torch's own description of a mode.

    Raises `ImportError` for a torch that cannot bind, `ValueError` for a mode that it does not know.
    """
    binding = _binding()
    return binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))


def cpus_near(gpu_index: int, mode: str) -> set[int]:
    """Return the CPUs that `mode` binds to for one of the GPUs that this process sees; asks CUDA."""
    cpus_of = getattr(_binding(), _CPUS)
    # Both are keyword-only. The first is `gpu_index` in torch 2.13, and `device_index` in 2.15.
    index, options = inspect.signature(cpus_of).parameters
    found: set[int] = cpus_of(**{index: gpu_index, options: numa_options(mode)})
    return found


def _binding() -> ModuleType:
    module = importlib.import_module("torch.numa.binding")
    if not hasattr(module, _CPUS):
        msg = f"it has no torch.numa.binding.{_CPUS}"
        raise ImportError(msg)
    return module
