"""How many GPUs ranks will see, asked of the driver's management library: this process's CUDA is left alone.

Names of torch's that are not public (`tests/unit/test_torch_names.py`): `torch.cuda._raw_device_count_nvml`,
`._raw_device_uuid_nvml` and, for ROCm, `._raw_device_count_amdsmi`, `._raw_device_uuid_amdsmi`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping, Sequence

from nblaunch import _visible


def count(environ: Mapping[str, str], *, each_alone: bool = False) -> int:
    """Return how many devices ranks with this environment will see.

    With `each_alone`, how many there are for ranks that see one each: a process sees one MIG instance at
    most, but each rank can have another one.
    """
    import torch

    hip = torch.version.hip is not None
    choice = _visible.chosen(environ, hip=hip)
    if choice is not None and not _visible.names(choice):
        return 0
    if choice is not None and _visible.is_mig(choice):
        named = len(_visible.names(choice)) if each_alone else 1
        return named if _is_built() else 0
    unchanged = all(environ.get(name) == os.environ.get(name) for name in _visible.VARIABLES)
    if unchanged and not torch.cuda.is_initialized():
        return _without_mig(torch.cuda.device_count(), choice)
    # The ranks' own choice; or one that was made here after CUDA had read the variable, which it does once.
    return _without_mig(_chosen(choice), choice)


def _chosen(choice: str | None) -> int:
    import torch

    if not _is_built():
        return 0
    installed = torch.cuda.device_count()
    with contextlib.suppress(
        Exception
    ):  # no driver, or another torch: what this process sees is the best guess
        installed = max(_installed(), installed)
    return installed if choice is None else len(_visible.ordinals(choice, installed, _uuids))


def _is_built() -> bool:
    import torch

    return torch.backends.cuda.is_built() or torch.cuda.device_count() > 0


def _installed() -> int:
    import torch

    if torch.version.hip is not None:
        return torch.cuda._raw_device_count_amdsmi()  # noqa: SLF001 - no public name counts them all
    return torch.cuda._raw_device_count_nvml()  # noqa: SLF001 - see above


def _uuids() -> Sequence[str]:
    import torch

    with contextlib.suppress(Exception):  # no driver, or another torch: then no name is known
        if torch.version.hip is not None:
            return torch.cuda._raw_device_uuid_amdsmi() or ()  # noqa: SLF001 - as above
        return torch.cuda._raw_device_uuid_nvml() or ()  # noqa: SLF001 - as above
    return ()


# --- MIG -------------------------------------------------------------------------------------------


def _without_mig(seen: int, choice: str | None) -> int:
    """Correct a count for cards in MIG mode, of which NVML and torch know nothing else.

    If there is a MIG instance on a visible card, CUDA gives a process the first of them and no other device.
    A card in MIG mode without instances is not there at all.
    """
    if not seen:
        return 0
    try:
        instances = _mig_instances()
    except Exception:  # noqa: BLE001 - no NVML, or one that does not know MIG
        return seen
    visible = range(len(instances)) if choice is None else _visible.ordinals(choice, len(instances), _uuids)
    found = [instances[index] for index in visible]
    if any(found):
        return 1
    return min(seen, sum(each is None for each in found))


def _mig_instances() -> list[int | None]:
    """Return how many MIG instances each card has, None for one that is not in MIG mode."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    cards = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(cards)):
        return []
    try:
        return [_instances_of(nvml, index) for index in range(cards.value)]
    finally:
        nvml.nvmlShutdown()


def _instances_of(nvml: ctypes.CDLL, index: int) -> int | None:
    card, mode, pending, most = ctypes.c_void_p(), ctypes.c_uint(0), ctypes.c_uint(0), ctypes.c_uint(0)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(card)):
        return None
    # Not supported, say: then it is no card that has MIG.
    if nvml.nvmlDeviceGetMigMode(card, ctypes.byref(mode), ctypes.byref(pending)) or not mode.value:
        return None
    if nvml.nvmlDeviceGetMaxMigDeviceCount(card, ctypes.byref(most)):
        return None
    instance = ctypes.c_void_p()
    return sum(
        int(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number, ctypes.byref(instance)) == 0)
        for number in range(most.value)
    )
