"""`nblaunch.on_preempt`: registers, on a rank, what it saves before its node is taken back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from nblaunch import _notebook
from nblaunch._errors import NblaunchError
from nblaunch._help import FailureKind

Saving = TypeVar("Saving", bound=Callable[[float], object])


def on_preempt(fn: Saving, *, remove: bool = False) -> Saving:
    """Register `fn` on this rank, which calls it before its node is taken back; with `remove`, unregister it.

    Call it in a distributed cell, or in a function or script that runs on ranks. It returns `fn`, so it works
    as a decorator:

    >>> @nblaunch.on_preempt                                               # doctest: +SKIP
    ... def save(seconds_left):
    ...     torch.save(model.state_dict(), f"rank{rank}.pt")

    `seconds_left` is the time in seconds, a float, until the node is taken back. Ranks call their functions
    two minutes before the time limit of the allocation, or when a node gets SIGTERM or SIGUSR1. If less than
    four minutes are left when the nodes are granted, they do so after half of that time.

    Each rank calls each function once, in the order of registration, on its main thread. The running job is
    interrupted first, and ends with `RunPreemptedError`; a rank that is stuck in a collective is freed. An
    idle rank of a session calls them too, unless it has run no job since the last call. Their output is part
    of the job's. If one raises, the others still run, and `result.warnings` names the error.

    Do not use collectives in `fn`: the notice interrupts each rank at another point, so the other ranks may
    never enter the collective.

    A cell that runs again replaces the function that it registered. Functions stay registered until the
    ranks end. Raises `NblaunchError` outside of a rank, and if `fn` is not callable.
    """
    known = sys.modules.get("nblaunch.rank.preempt")
    if known is None or _notebook.inside_rank() is None:
        msg = (
            "on_preempt was called in a process that is not a rank, and only ranks are preempted. Call it in "
            "a distributed cell, or in the function or script that runs on the ranks."
        )
        raise NblaunchError(msg, kind=FailureKind.NOT_ON_A_RANK)
    given: object = fn
    if not callable(given):
        msg = f"on_preempt takes a function, but got {given!r:.100}. Pass a function of the seconds left."
        raise NblaunchError(msg, kind=FailureKind.NOT_ON_A_RANK)
    (known.forget if remove else known.add)(fn)
    return fn
