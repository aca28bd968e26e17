"""What a rank's own code calls to be seen: `nblaunch.step`, `nblaunch.log`, `nblaunch.diff`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from nblaunch import _notebook
from nblaunch._errors import NblaunchError
from nblaunch._help import FailureKind

if TYPE_CHECKING:
    from nblaunch.insight.difference import Difference


def step(number: int | None = None) -> int:
    """Begin a training step on this rank; return its number.

    Call it at the top of the training loop, in a distributed cell, or in a function or script that runs on
    ranks. Profiles, and what `--watch` says, then name the step. `number` is the number of the step, by
    default one more than the last one's; the first step of a job is 0.

    >>> for batch in loader:                                               # doctest: +SKIP
    ...     nblaunch.step()
    ...     train(batch)

    It costs less than a microsecond. A script that torchrun runs may call it, too. Raises `NblaunchError`
    elsewhere outside of a rank.
    """
    return int(_of_rank("step", "steps").begin(number))


def log(
    values: Mapping[str, object] | None = None, /, *, step: SupportsIndex | None = None, **named: object
) -> None:
    """Log numbers of a training step on this rank: the notebook draws them while the run lasts.

    Call it in a distributed cell, or in a function or script that runs on ranks. `values` is for names that
    are no Python names. `step` is by default the one that `nblaunch.step()` has begun, or, where that is not
    used, the number of calls before this one in the job.

    >>> nblaunch.log(step=i, loss=loss, lr=scheduler.get_last_lr()[0])     # doctest: +SKIP
    >>> nblaunch.log({"val/loss": 0.3}, step=i)                            # doctest: +SKIP
    >>> result.metrics["loss"].last                                        # doctest: +SKIP
    {'loss': {0: 0.41, 1: 0.43}}

    Numbers are ints, floats, bools, numpy scalars, and tensors and arrays with one element. A tensor on a GPU
    is not waited for: its number is copied behind the work that computes it, and read later. NaN and
    infinities are kept. `result.metrics` has every number, `--metrics-file` writes them to a file while the
    run lasts. They leave the rank about four times a second: a rank that is killed takes the last quarter of
    a second along.

    In a script that torchrun runs, as `--export` writes it, nothing is logged: nobody would draw it. Raises
    `NblaunchError` elsewhere outside of a rank, and in child processes of one. What is no number, a step
    that is no whole number, a name of more than 200 characters, or more than 500 names on a rank raise an
    error that is a `TypeError` as well; then nothing of the call is logged.
    """
    if not _under_torchrun():
        _of_rank("log", "rank_metrics").log(step, {**(values or {}), **named})


def diff(obj: Any, name: str = "obj", *, group: Any = None) -> Difference:
    """Compare an object of all ranks: equal, or where they differ first, and which ranks agree.

    A collective: every rank calls it, in a distributed cell, or in a function or script that runs on ranks,
    with its own `obj`. `name` is what the report calls it. `group` is the process group whose ranks are
    compared, by default all.

    `obj` may be a tensor, a module (its parameters, buffers and training flags), an optimizer, an array, and
    anything else that can be pickled; tensors are hashed on their device, and less than 1 MB moves. Bytes
    count: 0.0 and -0.0 differ. A DTensor's shards are compared by the ranks that hold the same one; what a
    rank has alone is not compared.

    Returns the same `Difference` on every rank, which is true if ranks differ. It works in a script that
    torchrun runs, too. Raises `NblaunchError` without a process group, and elsewhere outside of a rank.

    >>> found = nblaunch.diff(model, "model")                              # doctest: +SKIP
    >>> if found:                                                          # doctest: +SKIP
    ...     print(found)
    model: model.layers.3.weight[17, 4]: values differ. ranks 0-2,4-7 agree; rank 3 differs
        largest difference: 0.25 at model.layers.3.weight[17, 4]
        elements that differ: 1 of 4096
        ranks 0-2,4-7: 0.125
        rank 3: 0.375
    """
    found: Difference = _of_rank("diff", "diff").diff(obj, name, group)
    return found


def _of_rank(name: str, module: str) -> Any:
    """Return a module of the rank that this process is; raise `NblaunchError` if it is none."""
    if _under_torchrun():
        return importlib.import_module(f"nblaunch.probes.{module}")
    known = sys.modules.get(f"nblaunch.probes.{module}")
    if known is None or _notebook.inside_rank() is None:
        msg = (
            f"nblaunch.{name} was called in a process that is not a rank. Call it in a distributed cell, or "
            "in the function or script that runs on the ranks."
        )
        raise NblaunchError(msg, kind=FailureKind.NOT_ON_A_RANK)
    return known


def _under_torchrun() -> bool:
    """Whether torchrun has started this process, or a process of its ranks has."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "nblaunch.rank.main" not in sys.modules
