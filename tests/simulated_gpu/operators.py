"""Operators of the simulated GPUs: device memory is host memory, so each runs on the CPU, on the same bytes.

`build` installs this file beside torch, with an entry point that torch calls when it is imported. Every
operator that torch has for the CUDA key is replaced, but for those that allocate, view or wait
(`_TORCHS_OWN`): these use cudart, whose stand-in is in cudart.c. Nothing happens where FAKE_GPUS is not set.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

_TORCHS_OWN = (
    "_copy_from",
    "_cudnn",
    "_local_scalar_dense",
    "_nested",
    "_sparse",
    "_to_copy",
    "_transform_bias",
    "as_strided",
    "empty",
    "is_set_to",
    "pin",
    "quant",
    "record_stream",
    "resize_",
    "set_",
    "sparse",
    "unfold",
    "view",
)
# What a kernel of the CPU raises for a value where one of the GPU asserts (IndexKernel.cu, Embedding.cu,
# NLLLoss.cu, MultinomialKernel.cu).
_ASSERTED = re.compile(r"out of (bounds|range)|probability tensor contains")
_libraries: list[Any] = []
"""Registrations last as long as their library object."""


def autoload() -> None:
    """Replace the operators of the CUDA key; torch calls this at the end of its own import."""
    if not os.environ.get("FAKE_GPUS"):
        return
    import torch

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    # torch 2.10 refuses a second kernel for an operator unless it is told to take it.
    known = torch.library.Library.impl.__code__.co_varnames
    override = {"allow_override": True} if "allow_override" in known else {}
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel", a thousand times
        for name in [*names, "aten::copy_"]:
            namespace, _, operator = name.partition("::")
            if namespace != "aten" or any(part in operator for part in _TORCHS_OWN):
                continue
            packet, _, overload = operator.partition(".")
            try:
                found = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(operator, _Operator(found), "CUDA", **override)
            except (AttributeError, RuntimeError):
                continue  # no operator of this build's, or one whose schema Python cannot express


class _Operator:
    """One operator of the CUDA key."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._written = [
            (position, argument.name, argument.kwarg_only)
            for position, argument in enumerate(operator._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        on_cpu = _Call(_alias, "cpu", args, kwargs)
        try:
            found = self._operator(*on_cpu.args, **on_cpu.kwargs)
        except (IndexError, RuntimeError) as error:
            if not isinstance(error, IndexError) and _ASSERTED.search(str(error)) is None:
                raise
            asserted = self._like_on_meta(args, kwargs)
            if asserted is None:
                raise
            found, on_meta = asserted
            result = on_meta.back(found, self._written, values=False)
        else:
            return on_cpu.back(found, self._written, values=True)
        _assert_later(on_meta.device)
        return result

    def _like_on_meta(self, args: Any, kwargs: Any) -> tuple[Any, _Call] | None:
        """Return a result of the right shape; None where the arguments are wrong whatever their values are.

        Those errors are raised by the call, on a GPU too.
        """
        on_meta = _Call(_meta, "meta", args, kwargs)
        try:
            return self._operator(*on_meta.args, **on_meta.kwargs), on_meta
        except (IndexError, RuntimeError, NotImplementedError):
            return None


class _Call:
    """The arguments of one call, brought to another device, and the way back."""

    def __init__(self, bring: Callable[[Any], Any], device: str, args: Any, kwargs: Any) -> None:
        import torch
        from torch.utils._pytree import tree_map

        found: Any = None
        self._given = (args, kwargs)

        def down(value: Any) -> Any:
            nonlocal found
            if isinstance(value, torch.Tensor) and value.is_cuda:
                found = value.device
                return bring(value)
            if isinstance(value, torch.device) and value.type == "cuda":
                found = value
                return torch.device(device)
            of_gpu = isinstance(value, torch.Generator) and value.device.type == "cuda"
            return None if of_gpu else value

        self.args, self.kwargs = tree_map(down, args), tree_map(down, kwargs)
        named = found is not None and found.index is not None
        self.device = found if named else torch.device("cuda", torch.cuda.current_device())

    def back(self, found: Any, written: Iterable[tuple[int, str, bool]], *, values: bool) -> Any:
        """Return the results on the GPU; those that were written into are the arguments themselves."""
        import torch
        from torch.utils._pytree import tree_map

        own = self._written_into(written, values=values)

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_cuda:
                return value
            if id(value) in own:
                return own[id(value)]
            made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.device)
            if value.numel() and values:
                _alias(made).copy_(value)
            return made

        return tree_map(up, found)

    def _written_into(self, written: Iterable[tuple[int, str, bool]], *, values: bool) -> dict[int, Any]:
        import torch

        args, kwargs = self._given
        own = {}
        for position, name, only_by_name in written:
            by_name = only_by_name or position >= len(args)
            there = kwargs.get(name) if by_name else args[position]
            here = self.kwargs.get(name) if by_name else self.args[position]
            many = isinstance(there, (list, tuple))
            for theirs, ours in zip(there, here, strict=True) if many else [(there, here)]:
                if not isinstance(theirs, torch.Tensor) or not theirs.is_cuda:
                    continue
                if theirs.size() != ours.size():  # out= of another size
                    theirs.resize_(ours.size())
                    if values:
                        _alias(theirs).copy_(ours)
                own[id(ours)] = theirs
        return own


def _alias(tensor: Any) -> Any:
    """Return a CPU tensor on the same memory, once the stream has come that far."""
    import torch

    torch.cuda.current_stream(tensor.device).synchronize()
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    made: Any = torch.empty(0, dtype=tensor.dtype).set_(
        whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    made._memory = (tensor, whole)  # as long as the alias is used
    return made.conj() if tensor.is_conj() else made


def _meta(tensor: Any) -> Any:
    """Return a tensor without memory, of the same shape and type."""
    import torch

    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _assert_later(device: Any) -> None:
    """Have the stream lose the context, as a kernel does that asserts: the next call to CUDA hears of it."""
    import torch

    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    runtime.fakecuda_assert_later(ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))
