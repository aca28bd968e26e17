"""What torch knows of the CPUs near a GPU; the kernel asks whether it can bind, a rank asks for its CPUs.

A name of torch's that is not public (`tests/unit/test_torch_names.py`):
`torch.numa.binding._get_logical_cpus_to_bind_to`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_CPUS = "_get_logical_cpus_to_bind_to"


def numa_options(mode: str) -> Any:
    """Return torch's own description of a mode.

    Raises `ImportError` for a torch that cannot bind, `ValueError` for a mode that it does not know.
    """
    binding = _binding()
    return binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))


def cpus_near(gpu_index: int, mode: str) -> set[int]:
    """Return the CPUs that `mode` binds to for one of the GPUs that this process sees; asks CUDA."""
    found: set[int] = getattr(_binding(), _CPUS)(gpu_index=gpu_index, numa_options=numa_options(mode))
    return found


def _binding() -> ModuleType:
    module = importlib.import_module("torch.numa.binding")
    if not hasattr(module, _CPUS):
        msg = f"it has no torch.numa.binding.{_CPUS}"
        raise ImportError(msg)
    return module
