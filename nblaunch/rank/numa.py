"""Binding a rank to the CPUs near its GPU, once it has the environment that says which GPU that is.

torch binds before the rank's code runs, and asks CUDA where the GPU is: with the environment of the fork
server, which CUDA then keeps. It also insists on the program `numactl`, which a running process can do
without.

A name of torch's that is not public (`tests/unit/test_torch_names.py`):
`torch.numa.binding._get_logical_cpus_to_bind_to`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

_CPUS = "_get_logical_cpus_to_bind_to"


def options(mode: str) -> Any:
    """Return torch's own description of a mode.

    Raises `ImportError` for a torch that cannot bind, `ValueError` for a mode that it does not know.
    """
    torchs = _binding()
    return torchs.NumaOptions(affinity_mode=torchs.AffinityMode(mode))


def bind(mode: str, gpu_index: int) -> None:
    """Bind all threads of this process as `mode` has it for one of the GPUs that it sees."""
    cpus = getattr(_binding(), _CPUS)(gpu_index=gpu_index, numa_options=options(mode))
    if not cpus:
        msg = f"numa_binding={mode!r} was asked for, but this process may use no CPU near GPU {gpu_index}"
        raise RuntimeError(msg)
    before = os.sched_getaffinity(0)
    for thread in map(int, (path.name for path in Path("/proc/self/task").iterdir())):
        # One may have ended meanwhile; one that was bound elsewhere stays there.
        with contextlib.suppress(OSError):
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, cpus)


def _binding() -> ModuleType:
    module = importlib.import_module("torch.numa.binding")
    if not hasattr(module, _CPUS):
        msg = f"it has no torch.numa.binding.{_CPUS}"
        raise ImportError(msg)
    return module
