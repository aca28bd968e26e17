"""Finds the first loss, gradient or input of a collective that is not finite, on the rank that has it.

    backward()          its roots, the losses              before the backward pass
    collective          what this rank sends               before it is sent: no other rank has it yet
    optimizer.step()    the gradients                      before the parameters change

A check is one sum over a tensor: it is finite if all elements are. If it is not, a slow check tells what it
is: how many elements, of which parameter or variable. An infinity counts where it spreads (losses, gradients,
sums over ranks), not in a maximum or in a mask that is broadcast; a NaN counts everywhere.

Nobody waits for a GPU: there the sums stay on the device, in order, and are copied to the host beside the
work. They are read at the next check, and at the latest one optimizer step later. The error names the step in
which the sum was made, and where the user's code was.

With a GradScaler, infinite gradients are its own business: it skips that step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from nblaunch._errors import NonFiniteError
from nblaunch.probes.collectives import Call
from nblaunch.probes.held import alive
from nblaunch.probes.sites import Sites, variables

_MOST_WARNINGS = 20
_HALVES = (torch.float16, torch.bfloat16)
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_LOSS, _COLLECTIVE, _GRADIENT = "loss", "collective", "gradient"
# A rank whose own input was finite waits for the report of the one whose was not: the first one is the cause.
_OTHERS_FIRST_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """What has been checked, where, and in which step; `tensors` are empty where a GPU has checked.

    `words` name the collective, `name` the variable. `infinite` is whether infinities count.
    """

    kind: str
    step: int
    place: str
    tensors: Sequence[torch.Tensor] = ()
    words: str = ""
    name: str = ""
    in_backward: bool = False
    infinite: bool = True
    sent: bool = False
    """Whether this rank has checked its own part of these gradients before it was summed over ranks."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """What is not finite: `bad` of `of` elements, 0 if they were not counted."""

    what: str
    nan: bool
    bad: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A sum that a GPU computes: `ready` once `value`, on the host, has it."""

    seen: Seen
    value: torch.Tensor
    ready: Any
    step_number: int


class NonFinite:
    """Checks, from `begin` to `end`."""

    def __init__(
        self,
        sites: Sites,
        step: Callable[[], int],
        warn: Callable[[str], None] | None,
        guarded: Callable[[Callable[[], None]], None],
    ) -> None:
        """With `warn` what is found is told, once for each parameter or collective, and the rank goes on.

        `guarded` makes a call that fails for a reason of its own the end of the watch, not of the job.
        """
        self._sites, self._step, self._warn, self._guarded = sites, step, warn, guarded
        self._told: set[str] = set()
        self._backward: Any = None
        self._in_backward = 0
        self._hook: Any = None
        self._pending: deque[_Awaited] = deque()
        self._steps = 0
        self._sent = 0
        """How many elements of gradients have been checked in this backward pass, as they were sent."""

    def begin(self) -> None:
        self._hook = optimizers.register_optimizer_step_pre_hook(
            lambda optimizer, _arguments, _keywords: self._guarded(lambda: self._check_gradients(optimizer))
        )
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._watched_backward

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._backward is not None:
            torch.autograd.backward = self._backward

    def finish(self) -> None:
        """Read what GPUs have not answered yet: the job has ended by itself."""
        self._read(wait=True)

    # --- where torch comes by ------------------------------------------------------------------------

    def _watched_backward(self, *arguments: Any, **keywords: Any) -> Any:
        roots = arguments[0] if arguments else keywords.get("tensors")
        self._guarded(lambda: self._check_loss(roots))
        self._in_backward += 1
        try:
            return self._backward(*arguments, **keywords)
        finally:
            self._in_backward -= 1

    def _check_loss(self, roots: Any) -> None:
        given = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots or ())
        self._check([each for each in given if isinstance(each, torch.Tensor)], kind=_LOSS)

    def __call__(self, call: Call) -> None:
        """Check what this rank is about to send."""
        tensors = [each for each in call.sent() if each.is_floating_point() or each.is_complex()]
        if tensors:
            if self._in_backward and call.sums:
                self._sent += sum(each.numel() for each in tensors)
            self._check(tensors, kind=_COLLECTIVE, words=call.form.name, infinite=call.sums)

    def _check_gradients(self, optimizer: Any) -> None:
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a fused optimizer, which skips the step itself
        gradients = [
            each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None
        ]
        sent, self._sent = self._sent, 0
        self._read(wait=True, before=self._steps)
        # DDP has sent them all: each rank has checked its own part of the sum.
        if gradients and sum(each.numel() for each in gradients) > sent:
            self._check(gradients, kind=_GRADIENT, sent=sent > 0)
        self._steps += 1

    # --- checking ------------------------------------------------------------------------------------

    def _check(self, tensors: Sequence[torch.Tensor], **more: Any) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for each in tensors:
            plain = _plain(each)
            if plain is not None:
                by_device.setdefault(plain.device, []).append(plain)
        for device, found in by_device.items():
            if device.type == "cpu":
                if not math.isfinite(_sum(found)):
                    self._judge(self._seen(found, more, tensors=found))
            elif not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._ask(found, device, more)
        if self._pending:
            self._read(wait=False)

    def _seen(self, checked: Sequence[torch.Tensor], more: dict[str, Any], **others: Any) -> Seen:
        named = more["kind"] == _LOSS or bool(others)
        return Seen(
            step=self._step(),
            place=self._sites.place(),
            in_backward=self._in_backward > 0,
            name=self._variable(checked[0]) if named else "",
            **more,
            **others,
        )

    def _ask(self, tensors: Sequence[torch.Tensor], device: torch.device, more: dict[str, Any]) -> None:
        """Have the GPU check: the answer is copied to the host behind the work that computes it."""
        seen = self._seen(tensors, more)
        with torch.no_grad():
            answer = _sum(tensors) if seen.infinite else _not_a_number(tensors)
            value = torch.empty((), pin_memory=True)
            value.copy_(answer, non_blocking=True)
        ready = torch.get_device_module(device).Event()
        ready.record()
        self._pending.append(_Awaited(seen, value, ready, self._steps))

    def _read(self, *, wait: bool, before: int | None = None) -> None:
        """Read the answers that are there; with `wait` all, or those of checks `before` an optimizer step."""
        while self._pending:
            first = self._pending[0]
            if wait and (before is None or first.step_number < before):
                first.ready.synchronize()
            elif not first.ready.query():
                return
            self._pending.popleft()
            value = float(first.value)
            if not math.isfinite(value):
                self._judge(first.seen, nan=math.isnan(value))

    # --- what it is ----------------------------------------------------------------------------------

    def _judge(self, seen: Seen, *, nan: bool = True) -> None:
        """Raise, or warn, if elements are not finite: a sum may be infinite because it is too large.

        `nan` is what a GPU has reported of tensors that are gone.
        """
        with torch.no_grad():
            found = self._of_parameters(seen) if seen.kind == _GRADIENT or seen.in_backward else None
            if found is None:
                found = self._of_tensors(seen) if seen.tensors else self._of_gone(seen, nan=nan)
        if found is None or self._scaled(seen, found):
            return
        text = _text(seen, found)
        if self._warn is None:
            if seen.place and seen.place != self._sites.place():
                # A GPU has found it: the program is further on by now.
                text += f", {seen.place}"
            if seen.sent:
                time.sleep(_OTHERS_FIRST_SECONDS)
            raise NonFiniteError(text, what=found.what, step=seen.step)
        if found.what not in self._told and len(self._told) < _MOST_WARNINGS:
            self._told.add(found.what)
            self._warn(f"{text}, {seen.place}" if seen.place else text)

    def _scaled(self, seen: Seen, found: NotFinite) -> bool:
        """Whether a GradScaler deals with this: it scales the loss, and skips the step of such gradients."""
        scaled = not found.nan if seen.kind == _LOSS else seen.in_backward
        return scaled and any(each.is_enabled() for each in alive(torch.amp.GradScaler))

    def _of_parameters(self, seen: Seen) -> NotFinite | None:
        """Return the parameter whose gradient was the first that was not finite, if there is one.

        A backward pass goes from the last parameters to the first ones, and takes a NaN along.
        """
        places = {each.data_ptr() for each in seen.tensors} if seen.kind == _GRADIENT else None
        found: dict[bool, NotFinite] = {}
        for known, name, parameter in self._parameters():
            gradient = None if parameter.grad is None else _plain(parameter.grad)
            if gradient is None or (places and gradient.data_ptr() not in places):
                continue
            counted = _counted(f"the gradient of {name}", [gradient])
            if counted is not None:
                found[known] = counted
        # One without a name may be left over from an earlier cell.
        return found.get(True) or found.get(False)

    def _parameters(self) -> Iterator[tuple[bool, str, torch.nn.Parameter]]:
        """Yield the parameters of all models, by the names that the user's code has for them, if it has."""
        modules = list(alive(torch.nn.Module))
        inner = {id(child) for each in modules for child in each.children()}
        known = {
            id(value): name
            for name, value in reversed(list(variables(self._sites.frames())))
            if isinstance(value, torch.nn.Module)
        }
        for root in modules:
            if id(root) not in inner:
                wrapped = getattr(root, "module", root)
                model = known.get(id(wrapped)) or known.get(id(root))
                for path, parameter in root.named_parameters():
                    name = f"{model or type(wrapped).__name__}.{_own_path(path)}"
                    yield model is not None, name, parameter

    def _of_tensors(self, seen: Seen) -> NotFinite | None:
        found = _counted(self._name_of(seen), seen.tensors)
        return found if found is not None and (found.nan or seen.infinite) else None

    def _of_gone(self, seen: Seen, *, nan: bool) -> NotFinite | None:
        # A sum of squares of gradients may be infinite although they are not: then no parameter was found.
        return None if seen.kind == _GRADIENT and not nan else NotFinite(self._name_of(seen), nan=nan)

    def _name_of(self, seen: Seen) -> str:
        match seen.kind:
            case "loss":
                return f"the loss {seen.name}" if seen.name not in ("", "loss") else "the loss"
            case "gradient":
                return f"the gradient of {seen.name.removesuffix('.grad')}" if seen.name else "a gradient"
        return f"{seen.name}, the input of {seen.words}," if seen.name else f"the input of {seen.words}"

    def _variable(self, tensor: torch.Tensor) -> str:
        """Return the name of a variable in the user's code that holds a tensor, or has it as its gradient."""
        place = tensor.data_ptr()
        for name, value in variables(self._sites.frames()):
            if isinstance(value, torch.Tensor) and not name.startswith("_"):
                if value is tensor or _at(value) == (place, tensor.shape):
                    return name
                if value.is_leaf and value.grad is not None and _at(value.grad) == (place, tensor.shape):
                    return f"{name}.grad"
        return ""


def _text(seen: Seen, found: NotFinite) -> str:
    kind = "NaN" if found.nan else "infinite"
    counted = f" ({found.bad} of {found.of} elements)" if found.of > 1 else ""
    how = ""
    if seen.kind == _COLLECTIVE and seen.in_backward:
        how = f", as {seen.words} is about to send it"
    elif seen.sent:
        how = ", although what this rank has sent was finite"
    return f"{found.what} is {kind}{counted}{how}, in step {seen.step}"


def _counted(what: str, tensors: Iterable[torch.Tensor]) -> NotFinite | None:
    """Count the elements that are not finite; return None if all are finite."""
    bad = of = 0
    nan = False
    for each in tensors:
        finite = each.isfinite()
        of += each.numel()
        here = each.numel() - int(finite.sum())
        bad += here
        nan = nan or (here > 0 and bool(each.isnan().any()))
    return NotFinite(what, nan, bad, of) if bad else None


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor as one whose elements can be summed here: of a DTensor this rank's part; else None."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.is_floating_point() else None


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number that is finite if all elements are, and none of them is very large."""
    if len(tensors) == 1:
        only = tensors[0]
        return only.sum(dtype=torch.float32) if only.dtype in _HALVES else only.sum()
    return torch.nn.utils.get_total_norm(list(tensors))


def _not_a_number(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return NaN if there is one, else 0."""
    found = torch.stack([each.isnan().any() for each in tensors]).any()
    return 0.0 / (~found).to(torch.float32)


def _at(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return (tensor.data_ptr() if tensor.layout is torch.strided else 0), tensor.shape


def _own_path(path: str) -> str:
    """Return the path of a parameter without what wraps modules: DDP, FSDP, torch.compile."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)
