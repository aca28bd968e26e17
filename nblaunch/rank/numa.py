"""Binding a rank to the CPUs near its GPU, once it has the environment that says which GPU that is.

torch binds before the rank's code runs, and asks CUDA where the GPU is: with the environment of the fork
server, which CUDA then keeps. It also insists on the program `numactl`, which a running process can do
without.

Names of torch's that are not public, in `torch.numa.binding` (`tests/unit/test_torch_names.py`):
`_get_logical_cpus_to_bind_to`, `_bind_all_threads_in_current_process_to_logical_cpus`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_CPUS, _BIND = "_get_logical_cpus_to_bind_to", "_bind_all_threads_in_current_process_to_logical_cpus"


def binding_module() -> ModuleType:
    """Return torch's module. Raises `ImportError` for a torch that cannot do what is done here."""
    module = importlib.import_module("torch.numa.binding")
    for name in (_CPUS, _BIND):
        if not hasattr(module, name):
            msg = f"it has no torch.numa.binding.{name}"
            raise ImportError(msg)
    return module


def options(mode: str) -> Any:
    """Return torch's own description of a mode. Raises `ValueError` for one that this torch does not know."""
    torchs = binding_module()
    return torchs.NumaOptions(affinity_mode=torchs.AffinityMode(mode))


def bind(mode: str, gpu_index: int) -> None:
    """Bind all threads of this process as `mode` has it for one of the GPUs that it sees."""
    torchs = binding_module()
    cpus = getattr(torchs, _CPUS)(gpu_index=gpu_index, numa_options=options(mode))
    if not cpus:
        msg = (
            f"numa_binding={mode!r} was asked for, but none of the CPUs near GPU {gpu_index} may be used here"
        )
        raise RuntimeError(msg)
    getattr(torchs, _BIND)(logical_cpu_indices=cpus)
