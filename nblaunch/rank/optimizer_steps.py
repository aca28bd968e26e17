"""Steps of optimizers: how many of a job a rank has taken, and which a GPU still has to run.

Ranks that an interrupt or a mistake stops, each at a line of its own, may be a step apart: their models then
differ, and go on so. `nblaunch.group.recovery` compares what they have counted.

A program runs ahead of its GPU: it may have queued an optimizer's step behind the collective that sums the
gradients. CUDA cannot take that back. When the collective is aborted the step runs, with gradients of this
rank alone or of some ranks, and the parameters and the optimizer's state are of no step of the training. This
was seen with torch 2.15 and NCCL 2.30 on an H200.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nblaunch.protocol.messages import StepsTaken

# Behind what the last step of each has queued.
_ends = weakref.WeakKeyDictionary[Optimizer, torch.cuda.Event]()


@dataclass(slots=True)
class _Counts:
    """The steps of an optimizer within this job."""

    number: int
    """In the order of the first ones, which is the same on all ranks."""
    optimizer: weakref.ref[Optimizer]
    rates_before: tuple[float, ...]
    begun: int = 0
    ended: int = 0
    untouched: bool = False
    """Whether the one that has begun is still at what comes before any change: its first closure."""


_MOST, _MOST_NAMED = 64, 4
_of_optimizer = weakref.WeakKeyDictionary[Optimizer, _Counts]()
# Also of those that are gone: a function that has returned on one rank only had its optimizer there, too.
_taken = deque[_Counts](maxlen=_MOST)


def follow() -> None:
    register_optimizer_step_pre_hook(_note_begin)
    register_optimizer_step_post_hook(_note_end)


def begin_job() -> None:
    _of_optimizer.clear()
    _taken.clear()


def taken(things: Iterable[tuple[str, Any]] = ()) -> tuple[StepsTaken, ...]:
    """Return the steps of this job; optimizers and their models have their names among these variables."""
    taken = list(_taken)
    named = list(things) if taken else []
    found = []
    for each in taken:
        optimizer = each.optimizer()
        # A look for names takes as long as a model has parameters.
        last = each.number > taken[-1].number - _MOST_NAMED
        known = names([optimizer], named) if last and optimizer is not None else ()
        rates = () if optimizer is None else _rates_of(optimizer)
        gone = optimizer is None
        begun = each.ended if each.untouched else each.begun
        found.append(StepsTaken(each.number, begun, each.ended, known, gone, each.rates_before, rates))
    return tuple(found)


def _steps_of(optimizer: Optimizer) -> _Counts:
    steps = _of_optimizer.get(optimizer)
    if steps is None:
        number = _taken[-1].number + 1 if _taken else 0
        rates = _rates_of(optimizer)
        _of_optimizer[optimizer] = steps = _Counts(number, weakref.ref(optimizer), rates)
        _taken.append(steps)
    return steps


def _rates_of(optimizer: Optimizer) -> tuple[float, ...]:
    """Return the learning rates of its groups; a tensor would be waited for."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return tuple(float(each) for each in rates if isinstance(each, float | int))


def _note_begin(
    optimizer: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        return None
    steps = _steps_of(optimizer)
    # One that raised is counted once.
    steps.begun = steps.ended + 1
    closure: Any = keywords.get("closure", args[1] if len(args) > 1 else None)
    # Others may change parameters before they call it.
    steps.untouched = callable(closure) and type(optimizer).__module__.startswith("torch.optim.")
    if not steps.untouched:
        return None

    @functools.wraps(closure)
    def noted() -> Any:
        loss = closure()
        steps.untouched = False
        return loss

    return (
        (args, keywords | {"closure": noted})
        if "closure" in keywords
        else ((args[0], noted, *args[2:]), keywords)
    )


def _note_end(optimizer: Optimizer, *_: object) -> None:
    # A compiler would break its graph at the event, and a capture would make the event a part of its own.
    if torch.compiler.is_compiling():
        return
    steps = _steps_of(optimizer)
    steps.begun = steps.ended = max(steps.begun, 1)
    steps.untouched = False
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
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
