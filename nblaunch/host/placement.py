"""How many ranks a run gets, on which devices and with which backend; whether process options work here.

GPUs are counted by the driver's management library: this process's CUDA is left alone.

Names of torch's that are not public (`tests/unit/test_torch_names.py`): `torch.cuda._raw_device_count_nvml`,
`._raw_device_uuid_nvml` and, for ROCm, `._raw_device_count_amdsmi`, `._raw_device_uuid_amdsmi`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from nblaunch import _devices
from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch.options.table import nearest
from nblaunch.protocol.client import Placement

_DEFAULT_CPU_RANKS = 2
# torch's own; which of them are built into this torch is found out once it is loaded.
_TORCHS_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "fake")
_PLUGINS = "torch.backends"
"""Entry points that torch loads when it is imported; they may register backends of their own."""
_LOADED_LATE = "torch.distributed.backends"
"""Entry points that torch loads when a group asks for one: since 2.14 nccl-legacy and nccl2, for example."""
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Has NCCL 2.30 and later take several ranks on one GPU."""
_MOST_SHARING = 2
"""Ranks on one GPU that NCCL promises in its default configuration (guide of June 2026); more may hang."""
_DIVIDING = ("exclusive", "core-complex")
"""These divide the CPUs of a node among its GPUs, and a virtual local rank sees only one of those."""


def check_backend(backend: str, environ: Mapping[str, str], backends: Sequence[str] = ()) -> None:
    """Raise `OptionError` for a backend that torch does not know, before a rank is started to find out.

    `backend` is a name, or one for each device. Backends that a package registers when torch is imported are
    known to the ranks alone: where there is such a package, any name may be one. `backends` are those that
    another process knows.
    """
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    unknown = next((name for name in names if not _is_known(name, backends)), None)
    autoload = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    if unknown is None or (autoload and metadata.entry_points(group=_PLUGINS)):
        return
    known = known_backends(backends)
    guess = nearest(unknown, known)
    msg = (
        f"backend {unknown!r} was asked for, but torch has {', '.join(known)} here. "
        f"{f'Did you mean {guess!r}? ' if guess else ''}Use one of these; for a backend that your own code "
        "registers, start without a group (--no-init, init_process_group=False) and form it there."
    )
    raise OptionError(msg, kind=FailureKind.BACKEND)


def _is_known(name: str, backends: Sequence[str]) -> bool:
    # To look through the installed packages takes as long as all else that a run needs until its ranks start.
    return name in known_backends(backends, installed=name not in _TORCHS_BACKENDS)


def known_backends(backends: Sequence[str] = (), *, installed: bool = True) -> tuple[str, ...]:
    """Return the backends that a process group can have here, and these others; does not import torch.

    Those of `installed` packages, which torch loads late, are among them.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return _TORCHS_BACKENDS
    late = metadata.entry_points(group=_LOADED_LATE) if installed else ()
    named = sorted(each.name for each in late)
    registered = (*_TORCHS_BACKENDS, *distributed.Backend.backend_list, *named, *backends)
    absent = tuple(
        name for name in _TORCHS_BACKENDS if not getattr(distributed, f"is_{name}_available", lambda: True)()
    )
    # Without NCCL there is none of its other forms, which plugins of torch's own name.
    without = {*absent, *(name for name in named if "nccl" in absent and name.startswith("nccl"))}
    return tuple(name for name in dict.fromkeys(registered) if name != "undefined" and name not in without)


def place_ranks(
    nproc: int | str,
    backend: str,
    environ: Mapping[str, str],
    *,
    virtual_local_rank: bool = False,
    backends: Sequence[str] = (),
) -> Placement:
    """Decide the number of ranks, their devices and the backend.

    Raises `OptionError` for more nccl ranks than GPUs, or for GPUs where there are none.
    """
    there = _accelerator(environ, each_alone=virtual_local_rank)
    usable = there.count if there.backend else 0
    count, note = _number_of_ranks(nproc, usable, there)
    wanted = backend != "auto" and _wants(backend, there, backends)
    shared = _may_share(backend, there, environ)
    if backend == "auto":
        wanted = nproc != "cpu" and usable > 0 and (count <= usable or shared)
    elif wanted and (not usable or (count > usable and not shared)):
        if not set(_by_device(backend).values()) <= {*_TORCHS_BACKENDS}:
            check_backend(backend, environ, backends)  # of two reasons the nearer one
        raise OptionError(_too_many(count, backend, usable), kind=FailureKind.TOO_FEW_GPUS)
    if wanted:
        crowded = ""
        if count > usable:
            note = f"{count} ranks share {_gpus(usable)}"
            if count > usable * _MOST_SHARING and not _has_gloo(backend, there):
                crowded = (
                    f"{note}. NCCL promises {_MOST_SHARING} on each, and more may hang: set NCCL_MAX_CTAS, "
                    f"or lower nproc to {usable * _MOST_SHARING}."
                )
        # With gloo beside it a collective on a CPU tensor works as it does without an accelerator.
        automatic = f"cpu:gloo,{there.kind}:{there.backend}"
        chosen = automatic if backend == "auto" else backend
        return Placement(count, chosen, there.kind, usable, note, crowded)
    warning = ""
    if backend == "auto" and 0 < usable < count and nproc != "cpu":
        share = ", or --backend cpu:gloo,cuda:gloo to share" if there.kind == "cuda" else ""
        warning = (
            f"{count} ranks were asked for and {_gpus(usable)} {'is' if usable == 1 else 'are'} visible: all "
            f"ranks are on the CPU, since {there.backend} takes one rank for each GPU (-n {usable}{share})"
        )
    return Placement(count, "gloo" if backend == "auto" else backend, "cpu", 0, warning or note, warning)


@dataclass(frozen=True, slots=True)
class _Accelerator:
    """The accelerators of this torch: kind, number, and backend if there is one."""

    kind: str
    count: int
    backend: str


def _accelerator(environ: Mapping[str, str], *, each_alone: bool) -> _Accelerator:
    import torch

    current = torch.accelerator.current_accelerator()
    kind = "cuda" if current is None else current.type
    if kind == "cuda":
        return _Accelerator(kind, visible_gpus(environ, each_alone=each_alone), "nccl")
    seen = 0
    with contextlib.suppress(Exception):  # a plugin's own module may raise anything
        seen = torch.get_device_module(kind).device_count()
    return _Accelerator(kind, seen, _backend_of(kind))


def _backend_of(kind: str) -> str:
    """Return the backend that torch has for a kind of device; nothing where it cannot take its tensors.

    For mps torch names gloo, which knows the CPU and CUDA.
    """
    from torch import distributed

    with contextlib.suppress(Exception):  # none registered, or a torch without torch.distributed
        name = distributed.get_default_backend_for_device(kind)
        if kind in distributed.Backend.backend_capability.get(name, ()):
            return name
    return ""


def _number_of_ranks(nproc: int | str, usable: int, there: _Accelerator) -> tuple[int, str]:
    match nproc:
        case "gpu" if not usable:
            msg = "nproc='gpu' was asked for, but no GPU is visible here. Use nproc=2 (gloo on the CPU)."
            raise OptionError(msg, kind=FailureKind.TOO_FEW_GPUS)
        case "cpu":
            return os.cpu_count() or 1, ""
        case int():
            return nproc, ""
        case _ if usable:
            return usable, ""
        case _:
            why = f"torch has no backend for {there.kind}" if there.count else "no GPU is visible"
            number = _DEFAULT_CPU_RANKS
            return number, f"{why}: {number} ranks on the CPU (set -n for another number)"


def _by_device(backend: str) -> dict[str, str]:
    """Return the backend of each device; one that is for all devices under the empty name."""
    parts = (part.strip().rpartition(":") for part in backend.split(","))
    return {device: name for device, _, name in parts}


def _wants(backend: str, there: _Accelerator, backends: Sequence[str]) -> bool:
    """Whether ranks with this backend are on the accelerator; gloo alone means the CPU."""
    chosen = _by_device(backend)
    # An unknown backend is refused as such, not because there is no GPU.
    name = chosen.get(there.kind)
    named = name is not None and _is_known(name, backends)
    return named or (there.backend != "" and any(name.startswith(there.backend) for name in chosen.values()))


def _may_share(backend: str, there: _Accelerator, environ: Mapping[str, str]) -> bool:
    """Whether several ranks may have one device: with gloo, or with NCCL if the environment allows it."""
    return _has_gloo(backend, there) or (there.backend == "nccl" and _shares(environ))


def _has_gloo(backend: str, there: _Accelerator) -> bool:
    """Whether a backend other than the accelerator's own is named for it; nccl2 and nccl-lazy are NCCL."""
    chosen = _by_device(backend).get(there.kind)
    return chosen is not None and not (there.backend and chosen.startswith(there.backend))


def _shares(environ: Mapping[str, str]) -> bool:
    return environ.get(_SHARING, "0").strip() not in ("", "0")


def _too_many(count: int, backend: str, usable: int) -> str:
    name = "nccl" if "nccl" in backend else backend
    needs = "at least one" if "cuda:gloo" in backend else "one for each rank"
    return (
        f"{count} ranks with backend {name} were asked for, but only {_gpus(usable)} "
        f"{'are' if usable != 1 else 'is'} visible here, and {name} needs {needs}. "
        f"Lower nproc{f' to {usable}' if usable else ''}, or pass backend='gloo' to run on the CPU"
        f"{', or cpu:gloo,cuda:gloo to share GPUs' if usable else ''}."
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


# Counting GPUs.


def visible_gpus(environ: Mapping[str, str], *, each_alone: bool = False) -> int:
    """Return how many CUDA devices (ROCm's among them) ranks with this environment will see.

    With `each_alone`, how many there are for ranks that see one each: a process sees one MIG instance at
    most, but each rank can have another one.
    """
    import torch

    hip = torch.version.hip is not None
    choice = _devices.choice_of(environ, hip=hip)
    if choice is not None and not _devices.named_gpus(choice):
        return 0
    if choice is not None and _devices.is_mig(choice):
        named = len(_devices.named_gpus(choice)) if each_alone else 1
        return named if _is_built() else 0
    unchanged = all(environ.get(name) == os.environ.get(name) for name in _devices.VARIABLES)
    if unchanged and not torch.cuda.is_initialized():
        return _without_mig(torch.cuda.device_count(), choice)
    # The ranks' own choice; or one that was made here after CUDA had read the variable, which it does once.
    return _without_mig(_count_chosen(choice), choice)


def own_gpus(count: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return which GPUs of this machine the first `count` ranks have, unless NCCL lets ranks share them.

    A GPU is named by its UUID, or by its number if the driver does not tell that.
    """
    import torch

    hip = torch.version.hip is not None
    if _shares(environ):
        return ()
    choice, uuids = _devices.choice_of(environ, hip=hip), _uuids()
    if choice is not None and _devices.is_mig(choice):
        return tuple(_devices.named_gpus(choice)[:count])
    seen = range(count) if choice is None else _devices.ordinals(choice, _installed_here(), lambda: uuids)
    return tuple(uuids[number] if number < len(uuids) else str(number) for number in seen[:count])


def _count_chosen(choice: str | None) -> int:
    if not _is_built():
        return 0
    installed = _installed_here()
    return installed if choice is None else len(_devices.ordinals(choice, installed, _uuids))


def _installed_here() -> int:
    import torch

    installed = torch.cuda.device_count()
    # No driver, or another torch: what this process sees is the best guess.
    with contextlib.suppress(Exception):
        installed = max(_installed(), installed)
    return installed


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
    visible = range(len(instances)) if choice is None else _devices.ordinals(choice, len(instances), _uuids)
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
    # An error, such as "not supported": then it is no card that has MIG.
    if nvml.nvmlDeviceGetMigMode(card, ctypes.byref(mode), ctypes.byref(pending)) or not mode.value:
        return None
    if nvml.nvmlDeviceGetMaxMigDeviceCount(card, ctypes.byref(most)):
        return None
    instance = ctypes.c_void_p()
    return sum(
        int(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number, ctypes.byref(instance)) == 0)
        for number in range(most.value)
    )


# Whether process options work here.


def check_numa_binding(binding: str, gpus: int, nproc: int, *, virtual_local_rank: bool = False) -> None:
    """Raise `OptionError` where ranks have no GPU, or torch cannot bind."""
    import torch

    asked = f"numa_binding={binding!r} was asked for"
    if gpus < nproc:
        are = "is" if gpus == 1 else "are"
        has = f"{gpus} {are} visible here for {nproc} ranks" if gpus else "none is visible"
        msg = (
            f"{asked}, which binds each rank to the CPUs near its GPU, but {has}. "
            "Leave it out, or run on a machine with a GPU for each rank."
        )
        raise OptionError(msg, kind=FailureKind.TOO_FEW_GPUS)
    if virtual_local_rank and binding in _DIVIDING:
        msg = (
            f"{asked}, which divides CPUs among GPUs, but with virtual_local_rank each rank sees one GPU "
            "only. Use numa_binding='node' or 'socket', or leave one of the two out."
        )
        raise OptionError(msg)
    try:
        _devices.numa_options(binding)
    except (ImportError, ValueError, TypeError) as error:
        why = f"torch {torch.__version__} cannot do that ({error})"
        msg = f"{asked}, but {why}. Use torch 2.13, or leave it out."
        raise OptionError(msg, kind=FailureKind.TORCH_VERSION) from error


def write_architectures(path: str) -> None:
    """Write which GPUs this process's torch has code for."""
    import torch

    # The driver is asked how many GPUs there are, which is quicker than to initialise them.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    Path(path).write_text(json.dumps(torch.cuda.get_arch_list()))
