"""Values that a script loads from files beside it: arrays, tensors, everything else pickled."""

from __future__ import annotations

import importlib.util
import io
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from nblaunch._errors import NblaunchError
from nblaunch.capture import pickling
from nblaunch.capture.unpicklable import find_culprit
from nblaunch.export.imports import Import

Own = Callable[[object], str | None]
"""Says under which name a script defines an object itself; None where it does not."""

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


def loads(values: Mapping[str, object], own: Own, directory: str, *, device: bool) -> list[Load]:
    """Return how to load `values`; `directory` is the script's variable for where the files are.

    With `device` the script has a variable of that name, on which tensors of a GPU are to arrive. Raises
    `NblaunchError` for a value that cannot be saved.
    """
    arrays = {name: value for name, value in values.items() if _is_array(value)}
    others = {name: value for name, value in values.items() if name not in arrays}
    tensors = {name: value for name, value in others.items() if _is_saved_safely(value)}
    pile = {name: value for name, value in others.items() if name not in tensors}
    pickled = _Pickled(pile, own)
    # Memory that two of them share is shared in one pickle only.
    while shared := _sharing(tensors, pickled):
        pile |= {name: tensors.pop(name) for name in shared}
        pickled = _Pickled(pile, own)
    found = [_array(name, value, directory) for name, value in arrays.items()]
    found += [_safetensors(name, value, directory, device=device) for name, value in tensors.items()]
    return [*found, pickled.load(directory, device=device)] if pile else found


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def _array(name: str, value: Any, directory: str) -> Load:
    def write(path: Path) -> None:
        import numpy as np

        np.save(path, value, allow_pickle=False)

    text = (
        f"# {_what(value)}, saved from the notebook with numpy.save.\n"
        f'{name} = np.load({directory} / "{name}.npy")'
    )
    return Load((name,), text, (Import("numpy", alias="np"),), f"{name}.npy", write)


def _is_saved_safely(value: object) -> bool:
    """Return whether safetensors gives this back as it is: dense tensors with memory of their own."""
    torch = sys.modules.get("torch")
    if torch is None or importlib.util.find_spec("safetensors") is None:
        return False
    tensors = _tensors_in(value)
    return (
        bool(tensors)
        and len({each.untyped_storage().data_ptr() for each in tensors}) == len(tensors)
        and all(_is_plain(torch, each) for each in tensors)
    )


def _tensors_in(value: Any) -> list[Any]:
    torch = sys.modules["torch"]
    if type(value) is torch.Tensor:
        return [value]
    if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict"):
        each = list(value.values())
        if all(type(key) is str for key in value) and all(type(one) is torch.Tensor for one in each):
            return each
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
    owners: dict[int, list[str]] = {}
    for name, value in tensors.items():
        for tensor in _tensors_in(value):
            owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return sorted(
        {
            name
            for where, names in owners.items()
            if len(names) > 1 or where in pickled.storages
            for name in names
        }
    )


def _safetensors(name: str, value: Any, directory: str, *, device: bool) -> Load:
    single = not isinstance(value, dict)
    content: dict[str, Any] = {name: value} if single else dict(value)

    def write(path: Path) -> None:
        from safetensors.torch import save_file

        save_file(content, path)

    where = ", device=str(device)" if device and any(each.is_cuda for each in content.values()) else ""
    call = f'load_file({directory} / "{name}.safetensors"{where})'
    what = _what(value) if single else f"{len(content)} tensors"
    text = f"# {what}, saved from the notebook with safetensors.\n"
    text += f'{name} = {call}["{name}"]' if single else f"{name} = {call}"
    if not single and 1 < len(content) <= _ORDERED_KEYS and list(content) != sorted(content):
        keys = ", ".join(f'"{key}"' if key.isprintable() and '"' not in key else repr(key) for key in content)
        text += f"\n# The file has an order of its own.\n{name} = {{key: {name}[key] for key in ({keys})}}"
    return Load((name,), text, (Import("safetensors.torch", "load_file"),), f"{name}.safetensors", write)


def _what(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles by reference what the script defines, by value what can be imported by nobody."""

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
            self.note.saw_tensor(obj)
        reduced = pickling.reduce_notebook_type(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class _Pickled:
    """Variables in one pickle, so that what they have in common stays in common."""

    def __init__(self, values: Mapping[str, object], own: Own) -> None:
        self.own = own
        self.uses: set[str] = set()
        self.by_value: set[str] = set()
        self.storages: set[int] = set()
        self._of_torch = False
        self._gpus: set[str] = set()
        self._names = tuple(values)
        self._data = b""
        if not values:
            return
        content = next(iter(values.values())) if len(values) == 1 else tuple(values.values())
        try:
            self._dump(content)
        except Exception as error:
            raise _unsavable(values, self._refusal, error) from error

    def saw_tensor(self, tensor: Any) -> None:
        """Take note of a tensor within."""
        self._of_torch = True
        if tensor.is_cuda:
            self._gpus.add(str(tensor.device))
        if tensor.layout is sys.modules["torch"].strided and not tensor.is_meta:
            self.storages.add(tensor.untyped_storage().data_ptr())

    def _dump(self, content: object) -> None:
        stream = io.BytesIO()
        kind = type("Pickler", (_Pickler,), {"note": self})
        kind(stream, protocol=5).dump(content)
        if self._of_torch:
            import torch

            stream = io.BytesIO()
            module = types.SimpleNamespace(Pickler=kind, __name__="cloudpickle")
            torch.save(content, stream, pickle_module=module)
        self._data = stream.getvalue()

    def _refusal(self, content: object) -> Exception | None:
        try:
            type("Pickler", (_Pickler,), {"note": self})(io.BytesIO(), protocol=5).dump(content)
        except Exception as error:  # noqa: BLE001 - whatever the objects raise
            return error
        return None

    def load(self, directory: str, *, device: bool) -> Load:
        """Return how to load them."""
        stem = self._names[0] if len(self._names) == 1 else "objects"
        targets = ", ".join(self._names)
        comment = f"# {len(self._data):,} bytes, saved from the notebook with "
        comment += "torch.save." if self._of_torch else "pickle."
        if self.by_value:
            told = ", ".join(name.replace("<locals>.", "") for name in sorted(self.by_value))
            comment += f"\n# Reading it needs cloudpickle, for code that has no source to be copied: {told}."
        if self._of_torch:
            arrival = "str(device)" if device else '"cpu"'
            moved = ", ".join(f'"{gpu}": {arrival}' for gpu in sorted(self._gpus))
            place = f", map_location={{{moved}}}" if moved else ""
            text = f'{targets} = torch.load({directory} / "{stem}.pt", weights_only=False{place})'
            imports, file = (Import("torch"),), f"{stem}.pt"
        else:
            file = f"{stem}.pickle"
            text = f'with ({directory} / "{file}").open("rb") as file:\n    {targets} = pickle.load(file)'
            imports = (Import("pickle"),)
        data = self._data
        return Load(
            self._names,
            f"{comment}\n{text}",
            imports,
            file,
            lambda path: _write(path, data),
            frozenset(self.uses),
        )


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _unsavable(
    values: Mapping[str, object], refusal: Callable[[object], Exception | None], error: Exception
) -> NblaunchError:
    culprit = find_culprit(values, refusal)
    if culprit is None:
        return NblaunchError(
            f"{_listed(values)} cannot be saved for a script: {type(error).__name__}: {error}"
        )
    msg = (
        f"{culprit.path}: {culprit.reason} ({culprit.type_name}). The cell uses {culprit.name}, which has no "
        "source that could be copied, and cannot be saved beside a script. Make it in the cell."
    )
    return NblaunchError(msg)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
