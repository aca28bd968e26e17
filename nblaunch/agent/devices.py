"""Which devices and which backend a run gets; counts GPUs without initialising CUDA."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from nblaunch._errors import OptionError
from nblaunch._option_row import nearest

_DEFAULT_CPU_RANKS = 2
# Those of torch itself; what is not built into this one is found out where torch is loaded.
_TORCHS_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "fake")
_PLUGINS = "torch.backends"
"""Entry points that torch loads when it is imported; they may register backends of their own."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How many ranks, on what, with which backend (None: no process group)."""

    nproc: int
    backend: str
    device_type: str
    accelerators: int
    note: str = ""


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return how many CUDA devices ranks with this environment will see."""
    import torch

    # Counts through NVML where it can, so that the kernel's CUDA state stays as it is.
    count = torch.cuda.device_count()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen != os.environ.get("CUDA_VISIBLE_DEVICES"):
        # The ranks' own choice; a kernel that was kept off the GPUs sees none of those they may use.
        named = len([part for part in chosen.split(",") if part.strip() not in ("", "-1")])
        installed = count
        with contextlib.suppress(Exception):  # no NVML
            # No public name counts them all.
            installed = max(torch.cuda._raw_device_count_nvml(), count)  # noqa: SLF001
        count = min(named, installed)
    return count


def check_backend(backend: str, environ: Mapping[str, str]) -> None:
    """Raise `OptionError` for a backend that torch does not know, before a rank is started to find out.

    `backend` is a name, or one for each device. Backends that a package registers when torch is imported are
    known to the ranks alone: where there is such a package, any name may be one.
    """
    known = known_backends()
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    unknown = next((name for name in names if name not in known), None)
    if unknown is None or _has_plugins(environ):
        return
    guess = nearest(unknown, known)
    msg = (
        f"backend {unknown!r} was asked for, but torch has {', '.join(known)} here. "
        f"{f'Did you mean {guess!r}? ' if guess else ''}Use one of these; for a backend that your own code "
        "registers, start without a group (--no-init, init_process_group=False) and form it there."
    )
    raise OptionError(msg)


def _has_plugins(environ: Mapping[str, str]) -> bool:
    autoload = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    return autoload and bool(metadata.entry_points(group=_PLUGINS))


def known_backends() -> tuple[str, ...]:
    """Return the backends that a process group can have here; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return _TORCHS_BACKENDS
    registered = (*_TORCHS_BACKENDS, *distributed.Backend.backend_list)
    return tuple(
        name
        for name in dict.fromkeys(registered)
        if name != "undefined" and getattr(distributed, f"is_{name}_available", lambda: True)()
    )


def place(nproc: int | str, backend: str, environ: Mapping[str, str]) -> Placement:
    """Decide the number of ranks, their devices and the backend.

    Raises `OptionError` for more nccl ranks than GPUs, or for GPUs where there are none.
    """
    gpus = visible_gpus(environ)
    note = ""
    match nproc:
        case "gpu" if gpus == 0:
            msg = "nproc='gpu' was asked for, but no GPU is visible here. Use nproc=2 (gloo on the CPU)."
            raise OptionError(msg)
        case "gpu":
            count = gpus
        case "cpu":
            count = os.cpu_count() or 1
        case int():
            count = nproc
        case _ if gpus:
            count = gpus
        case _:
            count = _DEFAULT_CPU_RANKS
            note = f"no GPU is visible: {count} ranks on the CPU (set -n for another number)"
    uses_nccl = "nccl" in backend or (backend == "auto" and 0 < count <= gpus and nproc != "cpu")
    if uses_nccl and count > gpus:
        msg = (
            f"{count} ranks with backend nccl were asked for, but only {gpus} "
            f"GPU{'s are' if gpus != 1 else ' is'} visible here, and nccl needs one for each rank. "
            f"Lower nproc{f' to {gpus}' if gpus else ''}, or pass backend='gloo' to run on the CPU."
        )
        raise OptionError(msg)
    # On GPUs with gloo beside nccl: a collective on a CPU tensor works there as it does without a GPU.
    automatic = "cpu:gloo,cuda:nccl" if uses_nccl else "gloo"
    chosen = automatic if backend == "auto" else backend
    return Placement(
        nproc=count,
        backend=chosen,
        device_type="cuda" if uses_nccl else "cpu",
        accelerators=gpus if uses_nccl else 0,
        note=note,
    )
