"""Values that a script loads from files beside it: arrays, tensors, everything else pickled."""

from __future__ import annotations

import importlib.util
import io
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from nblaunch._errors import NblaunchError
from nblaunch.capture import recipes
from nblaunch.capture.unpicklable import find_culprit
from nblaunch.export.imports import Import
from nblaunch.export.literals import quoted

Own = Callable[[object], str | None]
"""Returns the name under which a script defines an object itself; None where it does not."""

_ORDERED_KEYS = 30


@dataclass(frozen=True, slots=True)
class Load:
    """Statements that load variables from a file."""

    names: tuple[str, ...]
    text: str
    imports: tuple[Import, ...]
    file: str
    write: Callable[[Path], None]
    uses: frozenset[str] = frozenset()
    """Definitions that must stand above it."""


def how_to_load(values: Mapping[str, object], own: Own, directory: str, *, device: bool) -> list[Load]:
    """Return how to load `values`; `directory` is the script's variable for where the files are.

    With `device` the script has a variable of that name, on which tensors of a GPU are to arrive. Raises
    `NblaunchError` for a value that cannot be saved.
    """
    arrays, tensors, rest = [], {}, {}
    for name, value in values.items():
        if _is_array(value):
            arrays.append(_array(name, value, directory))
        elif _is_saved_safely(value):
            tensors[name] = value
        else:
            rest[name] = value
    pickled = _Pickled(rest, own)
    # Memory that two of them share is shared in one pickle only.
    while shared := _sharing(tensors, pickled):
        rest |= {name: tensors.pop(name) for name in shared}
        pickled = _Pickled(rest, own)
    safe = [_safetensors(name, value, directory, device=device) for name, value in tensors.items()]
    return [*arrays, *safe, *([pickled.load(directory, device=device)] if rest else [])]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def _array(name: str, value: Any, directory: str) -> Load:
    def write(path: Path) -> None:
        import numpy as np

        np.save(path, value, allow_pickle=False)

    file = f"{name}.npy"
    text = f"# {_what(value)}, saved from the notebook with numpy.save.\n"
    text += f'{name} = np.load({directory} / "{file}")'
    return Load((name,), text, (Import("numpy", alias="np"),), file, write)


def _is_saved_safely(value: object) -> bool:
    """Return whether safetensors gives this back as it is: dense tensors with memory of their own."""
    torch = sys.modules.get("torch")
    if torch is None or importlib.util.find_spec("safetensors") is None:
        return False
    tensors = _tensors_in(value)
    own_memory = len({_address(each) for each in tensors}) == len(tensors)
    return bool(tensors) and own_memory and all(_is_plain(torch, each) for each in tensors)


def _tensors_in(value: Any) -> list[Any]:
    torch = sys.modules["torch"]
    if type(value) is torch.Tensor:
        return [value]
    if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict"):
        items = value.items()
        if all(type(key) is str and type(each) is torch.Tensor for key, each in items):
            return list(value.values())
    return []


def _is_plain(torch: Any, tensor: Any) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_complex()
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and 0 < tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def _sharing(tensors: Mapping[str, object], pickled: _Pickled) -> list[str]:
    owners: dict[int, set[str]] = {}
    for name, value in tensors.items():
        for tensor in _tensors_in(value):
            owners.setdefault(_address(tensor), set()).add(name)
    shared = [names for where, names in owners.items() if len(names) > 1 or where in pickled.storages]
    return sorted(set().union(*shared))


def _address(tensor: Any) -> int:
    """Return where a tensor's memory is; 0 where it has none of its own."""
    dense = tensor.layout is sys.modules["torch"].strided and not tensor.is_meta
    return int(tensor.untyped_storage().data_ptr()) if dense else 0


def _safetensors(name: str, value: Any, directory: str, *, device: bool) -> Load:
    single = not isinstance(value, dict)
    content: dict[str, Any] = {name: value} if single else dict(value)

    def write(path: Path) -> None:
        from safetensors.torch import save_file

        save_file(content, path)

    file = f"{name}.safetensors"
    where = ", device=str(device)" if device and any(each.is_cuda for each in content.values()) else ""
    what = _what(value) if single else f"{len(content)} tensors"
    text = f"# {what}, saved from the notebook with safetensors.\n"
    text += f'{name} = load_file({directory} / "{file}"{where})' + (f'["{name}"]' if single else "")
    if not single and 1 < len(content) <= _ORDERED_KEYS and list(content) != sorted(content):
        keys = ", ".join(map(quoted, content))
        text += f"\n# The file has an order of its own.\n{name} = {{key: {name}[key] for key in ({keys})}}"
    return Load((name,), text, (Import("safetensors.torch", "load_file"),), file, write)


def _what(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}"


class _ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles by reference what the script defines, by value what cannot be imported."""

    note: _Pickled

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            name = self.note.own(obj)
            if name is not None:
                self.note.uses.add(name.partition(".")[0])
                return name
            self.note.by_value.add(obj.__qualname__)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            self.note.tensors.append(obj)
        reduced = recipes.reduce_notebook_type(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class _Pickled:
    """Variables in one pickle, so that what they have in common stays in common."""

    def __init__(self, values: Mapping[str, object], own: Own) -> None:
        self.own = own
        self.uses: set[str] = set()
        self.by_value: set[str] = set()
        self.tensors: list[Any] = []
        self.storages: set[int] = set()
        self._names = tuple(values)
        self._pickler = type("Pickler", (_ScriptPickler,), {"note": self})
        self._data = b""
        if not values:
            return
        content = next(iter(values.values())) if len(values) == 1 else tuple(values.values())
        try:
            self._data = self._dumped(content)
            if self.tensors:
                self._data = self._dumped_by_torch(content)
                self.storages = set(map(_address, self.tensors))
        except Exception as error:
            raise self._unsavable(values, error) from error

    def _dumped(self, content: object) -> bytes:
        stream = io.BytesIO()
        self._pickler(stream, protocol=5).dump(content)
        return stream.getvalue()

    def _dumped_by_torch(self, content: object) -> bytes:
        import torch

        stream = io.BytesIO()
        torch.save(
            content,
            stream,
            pickle_module=types.SimpleNamespace(Pickler=self._pickler, __name__="cloudpickle"),
        )
        return stream.getvalue()

    def load(self, directory: str, *, device: bool) -> Load:
        """Return how to load them."""
        stem = self._names[0] if len(self._names) == 1 else "objects"
        targets = ", ".join(self._names)
        if self.tensors:
            arrival = "str(device)" if device else '"cpu"'
            gpus = sorted({str(each.device) for each in self.tensors if each.is_cuda})
            moved = ", ".join(f'"{gpu}": {arrival}' for gpu in gpus)
            place = f", map_location={{{moved}}}" if moved else ""
            by, file = Import("torch"), f"{stem}.pt"
            text = f'{targets} = torch.load({directory} / "{file}", weights_only=False{place})'
        else:
            by, file = Import("pickle"), f"{stem}.pickle"
            text = f'with ({directory} / "{file}").open("rb") as file:\n    {targets} = pickle.load(file)'
        saved_by = "torch.save" if self.tensors else "pickle"
        comment = f"# {len(self._data):,} bytes, saved from the notebook with {saved_by}."
        if self.by_value:
            names = ", ".join(name.replace("<locals>.", "") for name in sorted(self.by_value))
            comment += f"\n# Reading it needs cloudpickle, for code that has no source to be copied: {names}."

        def write(path: Path) -> None:
            path.write_bytes(self._data)

        return Load(self._names, f"{comment}\n{text}", (by,), file, write, frozenset(self.uses))

    def _unsavable(self, values: Mapping[str, object], error: Exception) -> NblaunchError:
        culprit = find_culprit(values, error, self._pickler)
        if culprit is None:
            return NblaunchError(
                f"{', '.join(values)} cannot be saved for a script: {type(error).__name__}: {error}"
            )
        return NblaunchError(
            f"{culprit.path}: {culprit.reason} ({culprit.type_name}). The cell uses {culprit.name}, which "
            "has no source that could be copied, and cannot be saved beside a script. Make it in the cell."
        )
