"""Binding each rank to the CPUs near its GPU; torch does it in the rank, before anything else runs there."""

from __future__ import annotations

from typing import Any

import torch

from nblaunch._errors import OptionError


def check(binding: str, gpus: int, nproc: int) -> None:
    """Raise `OptionError` where ranks have no GPU, or torch cannot bind."""
    asked = f"numa_binding={binding!r} was asked for"
    if gpus < nproc:
        has = (
            f"{gpus} {'is' if gpus == 1 else 'are'} visible here for {nproc} ranks"
            if gpus
            else "none is visible"
        )
        msg = (
            f"{asked}, which binds each rank to the CPUs near its GPU, but {has}. "
            "Leave it out, or run on a machine with a GPU for each rank."
        )
        raise OptionError(msg)
    try:
        spec_options(binding)
    except (ImportError, ValueError, TypeError) as error:
        why = f"torch {torch.__version__} cannot do that ({error})"
        msg = f"{asked}, but {why}. Use torch 2.13, or leave it out."
        raise OptionError(msg) from error


def spec_options(binding: str | None) -> dict[str, Any]:
    """Return what a `WorkerSpec` is given."""
    if binding is None:
        return {}
    from torch.numa.binding import AffinityMode, NumaOptions

    return {"numa_options": NumaOptions(affinity_mode=AffinityMode(binding))}
