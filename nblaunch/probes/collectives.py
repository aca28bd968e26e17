"""Sees every collective of this process before it begins: Python's, those of DDP's reducer, FSDP's.

All of them go through the operators `c10d::...`. A kernel of ours at the dispatch key BackendSelect is called
for each, on any device, with and without autograd, also in inference mode; then it calls the kernel below.
It costs about 10 us for each collective. Sends and receives are not seen, nor is what a program asks of a
backend directly.

Names of torch that are not public (`tests/unit/test_torch_names.py`): the operators and their arguments, the
method `op` of a boxed ReduceOp, `DispatchKeySet.remove`, `Library._destroy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_KEY = "BackendSelect"


@dataclass(frozen=True, slots=True)
class Form:
    """How the arguments of one operator are read; a number is the place of an argument.

    `sent` holds what this rank gives, `sized` the tensors whose sizes are the same on all ranks, None where
    they need not be. Of a list of lists it is the first list, in `_tensors`.
    """

    name: str
    group: int
    sent: int | None
    sized: int | None
    operation: int | None = None
    root: int | None = None
    from_root: bool = False
    """Whether only the root sends."""


FORMS: Mapping[str, Form] = {
    "allreduce_": Form("all_reduce", 1, 0, 0, operation=2),
    "allreduce_coalesced_": Form("all_reduce_coalesced", 1, 0, 0, operation=2),
    "broadcast_": Form("broadcast", 1, 0, 0, root=2, from_root=True),
    "reduce_": Form("reduce", 1, 0, 0, operation=2, root=3),
    # The inputs may differ where the backend allows it; all ranks have the same list of outputs.
    "allgather_": Form("all_gather", 2, 1, 0),
    "_allgather_base_": Form("all_gather_into_tensor", 2, 1, 0),
    "allgather_coalesced_": Form("all_gather_coalesced", 2, 1, 1),
    "allgather_into_tensor_coalesced_": Form("all_gather_into_tensor_coalesced", 2, 1, 1),
    "reduce_scatter_": Form("reduce_scatter", 2, 1, 1, operation=3),
    "_reduce_scatter_base_": Form("reduce_scatter_tensor", 2, 1, 1, operation=3),
    "reduce_scatter_tensor_coalesced_": Form("reduce_scatter_tensor_coalesced", 2, 1, 1, operation=3),
    # Only the root has the lists; what is exchanged between two ranks has any size.
    "gather_": Form("gather", 2, 1, None, root=3),
    "scatter_": Form("scatter", 2, 1, None, root=3, from_root=True),
    "alltoall_": Form("all_to_all", 2, 1, None),
    "alltoall_base_": Form("all_to_all_single", 2, 1, None),
    "barrier": Form("barrier", 1, None, None),
}
"""By the name of the operator."""

# As `ReduceOp::RedOpType` numbers them.
_OPERATIONS = dict(enumerate(("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")))
_SUMMING = ("sum", "avg", "product", "premul_sum")
_NOT_FOUND = "?"


class Call:
    """A collective that is about to begin on this rank; `operation` is its reduction: `sum`, or empty.

    It is empty, too, where torch cannot be asked for it: 2.8 has no method for that.
    """

    __slots__ = ("arguments", "form", "group", "operation")

    def __init__(self, form: Form, arguments: Sequence[Any], group: Any) -> None:
        """Read the reduction, which takes as long as all the rest, once."""
        self.form, self.arguments, self.group = form, arguments, group
        ask = None if form.operation is None else getattr(arguments[form.operation], "op", None)
        self.operation = "" if ask is None else _OPERATIONS.get(ask(), _NOT_FOUND)

    @property
    def root(self) -> int | None:
        return None if self.form.root is None else int(self.arguments[self.form.root])

    @property
    def sums(self) -> bool:
        """Whether an infinity that one rank sends is a NaN, or an infinity, of all."""
        return self.operation in _SUMMING

    def sent(self) -> Sequence[torch.Tensor]:
        form = self.form
        if form.sent is None or (form.from_root and self.root != self.group.rank()):
            return ()
        return _tensors(self.arguments[form.sent])

    def sized(self) -> Sequence[torch.Tensor]:
        """Return the tensors whose sizes are the same on all ranks."""
        return () if self.form.sized is None else _tensors(self.arguments[self.form.sized])

    def dtype(self) -> torch.dtype | None:
        if self.form.sent is None:
            return None
        # A rank that only receives from the root has an empty list of inputs.
        found = _tensors(self.arguments[self.form.sent]) or _tensors(self.arguments[0])
        return found[0].dtype if found else None


def _tensors(given: Any) -> Sequence[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return (given,)
    if given and isinstance(given[0], list | tuple):
        return tuple(given[0])
    return tuple(given)


class Listening:
    """Calls a function before each collective, from `begin` to `end`."""

    def __init__(self, listener: Callable[[Call], None]) -> None:
        """Call `listener`. If it raises, the collective does not begin, and the program gets the error."""
        self._listener = listener
        self._library: Any = None

    def begin(self) -> None:
        self._library = torch.library.Library("c10d", "IMPL")
        try:
            for operator, form in _known():
                self._library.impl(operator, self._kernel(operator, form), _KEY, with_keyset=True)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            library._destroy()  # noqa: SLF001 - torch's own tests remove kernels in this way

    def _kernel(self, operator: str, form: Form) -> Callable[..., Any]:
        below = getattr(torch.ops.c10d, operator).default
        key = torch._C.DispatchKey.BackendSelect  # noqa: SLF001 - see above
        unbox, listener = dist.ProcessGroup.unbox, self._listener

        def kernel(keys: Any, *arguments: Any) -> Any:
            listener(Call(form, arguments, unbox(arguments[form.group])))
            return below.redispatch(keys.remove(key), *arguments)

        return kernel


def _known() -> Iterator[tuple[str, Form]]:
    for operator, form in FORMS.items():
        # An older torch lacks some of them.
        if hasattr(torch.ops.c10d, operator):
            yield operator, form
