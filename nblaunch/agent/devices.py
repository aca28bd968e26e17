"""Which devices and which backend a run gets; counts GPUs without initialising CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from nblaunch._errors import OptionError

_DEFAULT_CPU_RANKS = 2


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
