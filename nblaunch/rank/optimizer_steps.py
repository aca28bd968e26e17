"""Steps of optimizers that a GPU still has to run when its collectives are aborted.

A program runs ahead of its GPU: it may have queued an optimizer's step behind the collective that sums the
gradients. CUDA cannot take that back. When the collective is aborted the step runs, with gradients of this
rank alone or of some ranks, and the parameters and the optimizer's state are of no step of the training. This
was seen with torch 2.15 and NCCL 2.30 on an H200.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

# Behind what the last step of each has queued.
_ends = weakref.WeakKeyDictionary[Optimizer, torch.cuda.Event]()


def follow() -> None:
    register_optimizer_step_post_hook(_note)


def _note(optimizer: Optimizer, *_: object) -> None:
    # A compiler would break its graph at the event, and a capture would make the event a part of its own.
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return
    if not torch.cuda.is_current_stream_capturing():
        # A new one each time: an event stays on the device on which it was recorded first.
        _ends[optimizer] = end = torch.cuda.Event()
        end.record()


def unfinished() -> list[Optimizer]:
    """Return the optimizers whose last step the GPU has not ended; raises torch's error if CUDA is broken."""
    return [optimizer for optimizer, end in list(_ends.items()) if not end.query()]


def names(optimizers: Sequence[Optimizer], things: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the names of these optimizers and their models among `things`, the variables."""
    stepped = {id(each) for each in optimizers}
    groups = [group for each in optimizers for group in each.param_groups]
    parameters = {id(parameter) for group in groups for parameter in group["params"]}
    found: dict[int, str] = {}
    for path, thing in things:
        # Of a model its variable alone, and not each module in it.
        whole = isinstance(thing, torch.nn.Module) and "." not in path
        if id(thing) in stepped or (whole and not parameters.isdisjoint(map(id, thing.parameters()))):
            found.setdefault(id(thing), path)
    unnamed = [f"a {type(each).__name__}" for each in optimizers if id(each) not in found]
    return (*found.values(), *unnamed)
