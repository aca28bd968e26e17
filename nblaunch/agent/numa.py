"""Binding each rank to the CPUs near its GPU: whether that can be done; `rank.numa` does it."""

from __future__ import annotations

import torch

from nblaunch._errors import OptionError
from nblaunch.rank import numa

_DIVIDING = ("exclusive", "core-complex")
"""These divide the CPUs of a node among its GPUs, and a virtual local rank sees only one of those."""


def check(binding: str, gpus: int, nproc: int, *, virtual_local_rank: bool = False) -> None:
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
    if virtual_local_rank and binding in _DIVIDING:
        msg = (
            f"{asked}, which divides CPUs among GPUs, but with virtual_local_rank each rank sees one GPU "
            "only. Use numa_binding='node' or 'socket', or leave one of the two out."
        )
        raise OptionError(msg)
    try:
        numa.options(binding)
    except (ImportError, ValueError, TypeError) as error:
        why = f"torch {torch.__version__} cannot do that ({error})"
        msg = f"{asked}, but {why}. Use torch 2.13, or leave it out."
        raise OptionError(msg) from error
