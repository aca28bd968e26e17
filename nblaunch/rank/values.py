"""A job's value: what is sent to the notebook, and its text, in which large tensors are summaries."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nblaunch._results import NotSent
from nblaunch.capture import pickling, shared_memory
from nblaunch.capture.parts import type_name
from nblaunch.capture.unpicklable import Culprit, find_culprit, reason_of

_SEARCH_SECONDS = 2.0
_INSTEAD = "Return plain data (numbers, tensors, a state_dict) instead"


class ValueNotSentError(TypeError):
    """The job succeeded, but its value cannot be pickled; the message names the part."""


def send(value: object, spill: Callable[[], Path]) -> shared_memory.Outgoing:
    try:
        return shared_memory.put(pickling.dumps_home(value), spill)
    except (Exception, SystemExit) as error:
        culprit = _culprit(value, error)
        inside = "" if culprit.path == "value" else f" with {culprit.path}, a {culprit.type_name}"
        msg = (
            f"the job returned a {type_name(value)}{inside}, which cannot be sent to the notebook: "
            f"{culprit.reason}. {_INSTEAD}."
        )
        raise ValueNotSentError(msg) from error


def send_or_stand_in(
    value: object, spill: Callable[[], Path], *, shown: str, rank: int, asked_for: bool
) -> tuple[shared_memory.Outgoing, str]:
    """Send the value of a cell, or a stand-in and why: a cell whose value cannot be sent has succeeded.

    `shown` is the value's repr. A model, an optimizer or a data loader is sent only if it was `asked_for`: in
    most cells the last line that has such a value is `model.eval()` or `model.to(device)`.
    """

    def stand_in(why: str) -> shared_memory.Outgoing:
        reason = f"{kind} is shown and was not sent from rank {rank}: {why}."
        return shared_memory.put(pickling.dumps_home(NotSent(shown, kind, reason)), spill)

    kind = type_name(value)
    if not asked_for and _is_machinery(value):
        why = (
            "a cell sends a model, an optimizer or a data loader only with --out NAME. Run the cell with "
            "--out, or bind it to a name on the ranks of a session and pull that (%distributed pull NAME, "
            "session.pull('NAME'))"
        )
        return stand_in(why), ""
    try:
        return shared_memory.put(pickling.dumps_home(value), spill), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the objects raise
        culprit = _culprit(value, error)
        part = culprit.type_name if culprit.path == "value" else f"{culprit.path}, {culprit.type_name},"
        why = f"{part} cannot be sent: {culprit.reason}. {_INSTEAD}"
        return stand_in(why), f"{why}."


def _is_machinery(value: object) -> bool:
    kinds: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer)
    data = sys.modules.get("torch.utils.data")
    if data is not None:
        kinds = (*kinds, data.DataLoader)
    return isinstance(value, kinds)


def _culprit(value: object, error: BaseException) -> Culprit:
    """Return which part of a value cannot be pickled, and why; the value itself if it is no part of it."""
    found = find_culprit({"value": value}, error, pickling.Homebound, seconds=_SEARCH_SECONDS)
    return found or Culprit("value", "value", type_name(value), 0, reason_of(error))


# The text of a value: large tensors and arrays by shape, type, place and statistics, since a wall of numbers
# is of no use. Small ones, and all that have a text of their own (sparse tensors, subclasses), look as they
# always do. Statistics that cannot be had are left out, and never fail a run.

LARGE = 1000
"""Elements; with more, torch and NumPy leave some out of their own text."""
# One value's statistics may take about 0.1 s. On a GPU, elements cost next to nothing.
_BUDGET_CPU, _BUDGET = 1 << 26, 1 << 31
# A part is read three times, and copied where its elements must be converted or chosen: in the CPU's cache,
# and never much of a GPU's memory.
_PART_CPU, _PART = 1 << 16, 1 << 24
_NOTHING = 1e-9

Printer = Callable[[Any, Any, bool], None]


@contextlib.contextmanager
def summarised(printers: dict[type, Printer]) -> Iterator[None]:
    """Have IPython's text of tensors and arrays, also of those within other values, be a summary.

    `printers` are those of the text formatter; what the user has registered there stays.
    """
    summaries = _Summaries()
    wanted: dict[type, Printer] = dict.fromkeys(
        (torch.Tensor, torch.nn.Parameter), _printer(summaries.tensor_text)
    )
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        wanted[numpy.ndarray] = _printer(summaries.array_text)
    added = {kind: printer for kind, printer in wanted.items() if kind not in printers}
    printers.update(added)
    try:
        yield
    finally:
        for kind in added:
            printers.pop(kind, None)


def _printer(summary_of: Callable[[Any], str | None]) -> Printer:
    """Return what writes an object's summary, or its own repr."""

    def write(value: Any, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - IPython's
        text = None
        with contextlib.suppress(Exception):  # then its own repr
            text = summary_of(value)
        # A text of several lines is indented as its surroundings.
        for number, line in enumerate((repr(value) if text is None else text).split("\n")):
            if number:
                printer.break_()
            printer.text(line)

    return write


class _Summaries:
    """Texts of the tensors and arrays in one value, whose statistics together have a budget."""

    def __init__(self) -> None:
        self._spent = 0.0

    def tensor_text(self, value: torch.Tensor) -> str | None:
        """Return a large dense tensor in one line; None for any other, a subclass's among them."""
        # A DTensor's statistics would be a collective.
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.is_meta or value.is_nested or value.numel() <= LARGE:
            return None
        parts = [_shape(value.shape), f"dtype={str(value.dtype).removeprefix('torch.')}", _device(value)]
        if value.requires_grad:
            parts.append("requires_grad=True")
        budget, part = (_BUDGET_CPU, _PART_CPU) if value.is_cpu else (_BUDGET, _PART)
        if self._pay(value.numel() / budget):
            axes = sorted(range(value.dim()), key=value.stride, reverse=True)
            pieces = _parts(value.detach().permute(axes), part, torch.split)
            parts += _statistics(value.numel(), pieces, _tensor_statistics)
        name = "Parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        return f"{name}({', '.join(parts)})"

    def array_text(self, value: Any) -> str | None:
        """Return a large array of numbers in one line; None for any other."""
        numpy = sys.modules["numpy"]
        if type(value) is not numpy.ndarray or value.size <= LARGE or value.dtype.kind not in "biufc":
            return None
        parts = [_shape(value.shape), f"dtype={value.dtype}"]
        if self._pay(value.size / _BUDGET_CPU):
            axes = sorted(range(value.ndim), key=lambda axis: abs(value.strides[axis]), reverse=True)
            pieces = _parts(value.transpose(axes), _PART_CPU, _split_array)
            with numpy.errstate(all="ignore"):
                parts += _statistics(value.size, pieces, _array_statistics)
        return f"array({', '.join(parts)})"

    def _pay(self, share: float) -> bool:
        if self._spent + share > 1:
            return False
        self._spent += share
        return True


def _shape(shape: tuple[int, ...]) -> str:
    return f"shape={tuple(int(size) for size in shape)}"


def _device(value: torch.Tensor) -> str:
    """Name the device; a rank's own GPU without its number, so that equal values of ranks read alike."""
    device = value.device
    if device.type != "cpu" and device.index == torch.get_device_module(device).current_device():
        return f"device={device.type}"
    return f"device={device}"


@dataclass(slots=True)
class _Statistics:
    """Of the finite elements: how many, their sum, the least and the greatest."""

    count: int
    total: float
    low: float = math.inf
    high: float = -math.inf


def _statistics(size: int, parts: Iterator[Any], of: Callable[[Any], _Statistics]) -> list[str]:
    """Return `min=..., max=..., mean=...`, and how many elements are finite where not all are."""
    found = []
    with contextlib.suppress(Exception):  # complex numbers have no order; some types no arithmetic
        found = [of(part) for part in parts]
    if not found:
        return []
    count = sum(each.count for each in found)
    shown = [] if count == size else [f"finite={count} of {size}"]
    if count:
        low, high = min(each.low for each in found), max(each.high for each in found)
        mean = sum(each.total for each in found) / count
        if abs(mean) < _NOTHING * max(abs(low), abs(high)):
            mean = 0.0  # a rounding error, which differs between machines
        means = [f"mean={_number(mean)}"] if math.isfinite(mean) else []  # sums can overflow
        shown = [f"min={_number(low)}", f"max={_number(high)}", *means, *shown]
    return shown


def _number(number: float) -> str:
    return str(int(number)) if isinstance(number, int) else f"{number + 0.0:.4g}"


def _parts(value: Any, limit: int, split: Callable[[Any, int, int], Any]) -> Iterator[Any]:
    """Yield views that have at most `limit` elements and together are all of `value`.

    Its axes are those of memory, the longest way first, so that a part lies in one piece.
    """
    size = math.prod(value.shape)
    if size <= limit:
        yield value
        return
    axis = next(axis for axis, length in enumerate(value.shape) if length > 1)
    for part in split(value, max(value.shape[axis] * limit // size, 1), axis):
        yield from _parts(part, limit, split)


def _split_array(value: Any, length: int, axis: int) -> Any:
    before = (slice(None),) * axis
    starts = range(0, value.shape[axis], length)
    return (value[(*before, slice(start, start + length))] for start in starts)


def _tensor_statistics(part: torch.Tensor) -> _Statistics:
    if part.dtype.is_complex:
        raise TypeError
    if part.dtype.itemsize == 1 or part.dtype in (torch.uint16, torch.uint32, torch.uint64):
        # Booleans, and types for which torch has little or no arithmetic.
        part = part.to(torch.float32 if part.dtype.is_floating_point else torch.int64)
    wide = torch.float32 if part.device.type == "mps" else torch.float64
    total = part.sum(dtype=wide).item()
    if math.isfinite(total):
        low, high = part.aminmax()
        return _Statistics(part.numel(), total, low.item(), high.item())
    kept = part[part.isfinite()]
    if not kept.numel():
        return _Statistics(0, 0.0)
    low, high = kept.aminmax()
    return _Statistics(kept.numel(), kept.sum(dtype=wide).item(), low.item(), high.item())


def _array_statistics(part: Any) -> _Statistics:
    numpy = sys.modules["numpy"]
    if part.dtype.kind == "c":
        raise TypeError
    total = float(part.sum(dtype=numpy.float64))
    if math.isfinite(total):
        return _Statistics(part.size, total, part.min().item(), part.max().item())
    kept = part[numpy.isfinite(part)]
    if not kept.size:
        return _Statistics(0, 0.0)
    return _Statistics(kept.size, float(kept.sum(dtype=numpy.float64)), kept.min().item(), kept.max().item())
