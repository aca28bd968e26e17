"""The doctor's look at torch: its build and backends. Nothing here asks CUDA for anything."""

from __future__ import annotations

import os
from collections.abc import Iterator

from nblaunch.diagnose.report import Finding, ok, problem, warning

_BACKENDS = ("gloo", "nccl", "ucc", "mpi", "xccl")
_REINSTALL = "Install it again, as https://pytorch.org/get-started says for this machine."
_SLOWED = ("NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1")


def build() -> Iterator[Finding]:
    """Say which torch this is and what its ranks can talk through."""
    why = why_no_torch()
    if why:
        yield problem("torch", f"cannot be imported: {why}", _REINSTALL)
        return
    import torch
    import torch.distributed as dist

    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    if torch.version.hip:
        made_for = f"ROCm {torch.version.hip}"
    summary = f"{torch.__version__}, made for {made_for}"
    if not dist.is_available():
        yield problem("torch", f"{summary}, without torch.distributed", _REINSTALL)
        return
    backends = [name for name in _BACKENDS if getattr(dist, f"is_{name}_available", bool)()]
    summary += f"; backends: {', '.join(backends) or 'none'}"
    if torch.cuda.is_initialized():
        summary += "; CUDA is initialised in this process, which ranks do not mind"
    if "gloo" not in backends:
        yield problem("torch", f"{summary}. Ranks on the CPU need gloo", _REINSTALL)
    else:
        yield ok("torch", summary)


def nccl() -> Iterator[Finding]:
    """Say which NCCL ranks on GPUs will use, and which variables change its ways."""
    if why_no_torch():
        return
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        yield ok("NCCL", "not in this torch; only ranks on GPUs need it")
        return
    # The number that torch was compiled with: no library is asked, no device touched.
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    slowed = [each for each in chosen if each in _SLOWED]
    summary = ", ".join([version, *chosen])
    if slowed:
        yield warning("NCCL", summary, f"{' and '.join(slowed)}: GPUs of one machine talk by slower ways.")
    else:
        yield ok("NCCL", summary)


def why_no_torch() -> str:
    """Return why torch cannot be imported; empty if it can."""
    try:
        import torch.distributed  # noqa: F401 - whether it can be is the question
    except Exception as error:  # noqa: BLE001 - missing, of the wrong version, a library that is not there ...
        return f"{type(error).__name__}: {error}"
    return ""
