"""What this rank holds when it runs out of memory: the largest tensors, arrays and byte strings, with names.

Nothing is recorded before: a tensor is found by the garbage collector, its name by a walk through the
variables. Which line made it is known only of CUDA tensors, and only where the program has asked torch to
record it (`torch.cuda.memory._record_memory_history()`); that costs each allocation its stack, so it is the
program's to ask for.

A tensor that only autograd holds, for the backward pass, is no object of Python's: on a GPU torch's snapshot
has it, without a name; on the CPU nothing has.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nblaunch._budget import clipped
from nblaunch.capture.arrays import last_base
from nblaunch.capture.parts import parts_of
from nblaunch.protocol.messages import FrameRecord, HeldMemory
from nblaunch.protocol.reports import is_ours, nearest_frame, place

_MOST_ROWS = 10
_MOST_VISITED = 200_000
_DEEPEST = 12
_LEAST = 1 << 20
"""Bytes; less is not worth a row."""
_NAME_CHARACTERS = 120

PlacedVariables = tuple[str, Mapping[str, object]]
"""Where variables are (`cell line 7 in train`), and the variables."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """One piece of memory: where it begins, and what is known of it."""

    key: tuple[str, int]
    size: int
    what: str
    name: str = ""
    root: str = ""
    where: str = ""
    made: str = ""


@dataclass(slots=True)
class HeldParts:
    """The parts that were found, each once, with the first name that was found for it."""

    parts: dict[tuple[str, int], HeldPart] = field(default_factory=dict)

    def add(self, part: HeldPart | None) -> None:
        """Add a part, unless a longer one begins at the same place."""
        if part is None or part.size < 1:
            return
        known = self.parts.get(part.key)
        if known is None:
            self.parts[part.key] = part
        elif not known.name and part.name:
            self.parts[part.key] = replace(known, name=part.name, root=part.root, where=part.where)


def largest(
    variables: Iterable[PlacedVariables], *, device: str = "", titles: Mapping[str, str] | None = None
) -> tuple[HeldMemory, ...]:
    """Return the largest parts of this process's memory that Python knows of, at most ten rows.

    `variables` are looked through in this order: the first name that leads to a part is its name. With
    `device` (`cuda:0`) only what is on that device counts, without it only what is in the host's memory.
    Parts that are alike, and in one container, share a row. `titles` maps file names of cells to what the
    reader calls them. Never raises `Exception`: memory is short.
    """
    found, cells = HeldParts(), dict(titles or {})
    # Each step needs memory, and what was found before stays.
    with contextlib.suppress(Exception):
        _named(found, variables)
    with contextlib.suppress(Exception):
        for each in alive(torch.Tensor):
            found.add(_of_tensor(each))
    with contextlib.suppress(Exception):
        for part in _recorded(device, cells):
            known = found.parts.get(part.key)
            found.parts[part.key] = part if known is None else replace(known, made=part.made)
    with contextlib.suppress(Exception):
        here = [part for part in found.parts.values() if part.key[0] == (device or "cpu")]
        return tuple(_rows(here))
    return ()


def _rows(parts: Sequence[HeldPart]) -> Iterator[HeldMemory]:
    """Yield the largest parts; those with one root or one line that are alike are one row."""
    groups: dict[tuple[str, ...], list[HeldPart]] = {}
    for part in parts:
        alike = ("", part.made) if part.made else (part.what, part.root, part.where)
        groups.setdefault(alike, []).append(part)
    by_size = sorted(groups.values(), key=lambda group: -sum(part.size for part in group))
    for group in by_size[:_MOST_ROWS]:
        total, first = sum(part.size for part in group), max(group, key=lambda part: part.size)
        if total < _LEAST:
            return
        named = next((part for part in group if part.name), first)
        name = named.name if len(group) == 1 else named.root or named.name
        yield HeldMemory(
            size=total,
            what=first.what,
            count=len(group),
            name=clipped(name.encode("utf-8", "backslashreplace").decode(), _NAME_CHARACTERS, len),
            where=named.where,
            made=first.made,
        )


# Parts, by kind.


def alive(kind: type) -> Iterator[Any]:
    """Yield the objects of a class that exist in this process."""
    # By type: `isinstance` asks an object for its class, and a lazy module would load what it stands for.
    return (each for each in gc.get_objects() if issubclass(type(each), kind))


def _of_tensor(tensor: torch.Tensor, **known: str) -> HeldPart | None:
    """Return a tensor's storage, under the shape of the tensor; None where it has none of its own."""
    with contextlib.suppress(Exception):  # of fake, functional, sparse ones, and of those already freed
        storage = tensor.untyped_storage()
        # A fake tensor names a device, and warns of being asked where it is; its storage is on none.
        if storage.device.type == "meta" or storage.data_ptr() == 0:
            return None
        device = str(tensor.device)
        shape = ", ".join(map(str, tensor.shape))
        what = f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"
        if tensor.numel() * tensor.element_size() < storage.nbytes():
            what = f"{what} (a part of its storage)"
        return HeldPart((device, storage.data_ptr()), storage.nbytes(), what, **known)
    return None


def _of_object(value: object, **known: str) -> HeldPart | None:
    """Return the host memory of an object of a type that may be large; None for other types."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return _of_tensor(value, **known)  # type: ignore[arg-type]
    if kind in (bytes, bytearray):
        size = kind.__len__(value)  # type: ignore[arg-type]
        return HeldPart(("cpu", id(value)), size, kind.__name__, **known) if size >= _LEAST else None
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _of_array(value, **known)
    return None


def _of_array(array: Any, **known: str) -> HeldPart | None:
    array = last_base(array)
    if array.base is not None and not isinstance(array.base, bytes | bytearray):
        return None  # a tensor's memory, or a file's
    shape = ", ".join(map(str, array.shape))
    key = ("cpu", int(array.__array_interface__["data"][0]))
    return HeldPart(key, int(array.nbytes), f"numpy {array.dtype}[{shape}]", **known)


# Names: a walk through what variables lead to, the nearest first.


def _named(found: HeldParts, variables: Iterable[PlacedVariables]) -> None:
    seen: set[int] = set()
    pending: deque[tuple[object, str, str, str, int]] = deque()
    for where, values in variables:
        for name, value in list(values.items()):
            if not name.startswith("__"):
                pending.append((value, name, name, where, 0))
    while pending and len(seen) < _MOST_VISITED:
        value, name, root, where, depth = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        part = _of_object(value, name=name, root=root, where=where)
        if part is not None:
            found.add(part)
        if depth < _DEEPEST:
            pending += ((inner, name + step, root, where, depth + 1) for step, inner in parts_of(value))


# The line that made it: of CUDA tensors, where torch records it.


def _recorded(device: str, titles: Mapping[str, str]) -> Iterator[HeldPart]:
    """Yield the allocations on a GPU whose stacks torch has recorded."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not torch.cuda.is_initialized():
        return
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != int(index):
            continue
        for block in segment["blocks"]:
            frames = block.get("frames") or ()
            if block["state"] == "active_allocated" and frames:
                size = int(block.get("requested_size") or block["size"])
                yield HeldPart((device, int(block["address"])), size, "memory", made=_line(frames, titles))


def _line(frames: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Return the user's own line of a stack, whose innermost frame comes first."""
    stack = [
        FrameRecord(titles.get(file, file), int(each["line"]), str(each["name"]), "")
        for each in reversed(frames)
        if ((file := str(each["filename"])) in titles or file.endswith(".py")) and not is_ours(file)
    ]
    nearest = nearest_frame(stack)
    return "" if nearest is None else place(nearest)
