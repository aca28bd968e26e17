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
from nblaunch.capture import arrays, pickling, recipes, tensors
from nblaunch.capture.parts import Made, attributes_of, global_names, set_attributes
from nblaunch.capture.unpicklable import find_culprit
from nblaunch.export.imports import Import
from nblaunch.export.literals import Own, quoted

_ORDERED_KEYS = 30
_OURS = "nblaunch.capture."
"""What helps to load a pickle, and cannot be imported where the script runs."""

Range = tuple[int, int]
"""Where memory begins and ends."""


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
    later: frozenset[str] = frozenset()
    """What must be there when functions that are loaded run."""
    objects: frozenset[int] = frozenset()
    """The addresses of the objects in it."""
    ranges: tuple[Range, ...] = ()
    """The memory of the arrays and tensors in it."""

    def holds(self, address: int) -> bool:
        """Return whether an object, or the elements of an array, is saved there."""
        return address in self.objects or any(first <= address < end for first, end in self.ranges)


def how_to_load(
    values: Mapping[str, object],
    own: Own,
    directory: str,
    *,
    device: bool,
    called: Callable[[str], str] = str,
) -> list[Load]:
    """Return how to load `values`; `directory` is the script's variable for where the files are.

    With `device` the script has a variable of that name, on which tensors of a GPU are to arrive. `called` is
    what the user calls a variable. Raises `NblaunchError` for a value that cannot be saved.
    """
    apart: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in values.items():
        (apart if _is_array(value) or _is_saved_safely(value) else rest)[name] = value
    pickled = _Pickled(rest, own, called)
    # Memory that two of them share is shared in one pickle only.
    while shared := _sharing(apart, pickled):
        rest |= {name: apart.pop(name) for name in sorted(shared)}
        pickled = _Pickled(rest, own, called)
    loads = [
        _array(name, value, directory)
        if _is_array(value)
        else _safetensors(name, value, directory, device=device)
        for name, value in apart.items()
    ]
    return [*loads, *([pickled.load(directory, device=device)] if rest else [])]


def _is_array(value: Any) -> bool:
    """Return whether `numpy.save` keeps all of it."""
    plain = arrays.is_array(value) and type(value).__name__ == "ndarray"
    return plain and value.flags.writeable and not value.dtype.hasobject


def _array(name: str, value: Any, directory: str) -> Load:
    def write(path: Path) -> None:
        import numpy as np

        np.save(path, value, allow_pickle=False)

    file = f"{name}.npy"
    text = f"# {_what(value)}, saved from the notebook with numpy.save.\n"
    text += f'{name} = np.load({directory} / "{file}")'
    ranges = tuple(_ranges_of([value]))
    return Load((name,), text, (Import("numpy", alias="np"),), file, write, ranges=ranges)


def _is_saved_safely(value: object) -> bool:
    """Return whether safetensors gives this back as it is: dense tensors with memory of their own."""
    torch = sys.modules.get("torch")
    if torch is None or importlib.util.find_spec("safetensors") is None:
        return False
    tensors = _tensors_in(value)
    own_memory = len(set(_ranges_of(tensors))) == len(tensors)
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


def _sharing(apart: Mapping[str, Any], pickled: _Pickled) -> set[str]:
    """Return the variables whose memory is that of another one, too."""
    owners = [(each, "") for each in pickled.ranges]
    for name, value in apart.items():
        owners += [(each, name) for each in _ranges_of([value] if _is_array(value) else _tensors_in(value))]
    groups = _overlapping((first, end, name) for (first, end), name in sorted(owners))
    return {name for group in groups if len(set(group)) > 1 for name in group} - {""}


def _overlapping(placed: Iterable[tuple[int, int, Any]]) -> list[list[Any]]:
    """Return groups of what has ranges in common; `placed` comes in the order of where the ranges begin."""
    groups: list[list[Any]] = []
    furthest = 0
    for first, end, each in placed:
        if first >= furthest:
            groups.append([])
        groups[-1].append(each)
        furthest = max(furthest, end)
    return groups


def _ranges_of(values: Iterable[Any]) -> list[Range]:
    """Return the memory that arrays and tensors are parts of; nothing for those that have none."""
    ranges = [arrays.range_of(owner) for each in values if (owner := _owner(each)) is not None]
    return [(first, end) for first, end in ranges if first < end]


def _owner(value: Any) -> Any:
    if arrays.is_array(value):
        return arrays.last_base(value)
    has_storage = value.layout is sys.modules["torch"].strided and not value.is_meta
    return value.untyped_storage() if has_storage else None


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
    ranges = tuple(_ranges_of(content.values()))
    return Load((name,), text, (Import("safetensors.torch", "load_file"),), file, write, ranges=ranges)


def _what(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}"


class _ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles by reference what the script defines, by value what cannot be imported."""

    note: _Pickled

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # The functions read and bind the script's variables.
        self.globals_ref[id(pickling.main_globals())] = Made((vars, (sys.modules["__main__"],)))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and str(obj.__module__).startswith(_OURS):
            return recipes.class_by_value(obj)
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            name = self.note.own(obj)
            if name is not None:
                self.note.uses.add(name.partition(".")[0])
                return name
            self.note.by_value.add(obj.__qualname__)
        if type(obj) is types.FunctionType:
            return self._function(obj)
        reduced: Any = NotImplemented
        if tensors.is_tensor(obj):
            self.note.tensors.append(obj)
            reduced = self.note.reduced_tensor(obj)
            if (parts := tensors.parts_of(obj)) is not None:
                self.note.by_value.add("gradients and hooks")
                reduced = tensors.with_parts(obj, reduced, parts)
        elif arrays.is_array(obj):
            self.note.arrays.append(obj)
            reduced = self.note.reduced_array(obj)
        if reduced is NotImplemented:
            reduced = recipes.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def _function(self, function: types.FunctionType) -> Any:
        ours = str(function.__module__).startswith(_OURS)
        reduced = self._dynamic_function_reduce(function) if ours else super().reducer_override(function)
        if not isinstance(reduced, tuple):
            return reduced
        if function.__closure__ is not None:
            reduced = pickling.with_cells(function.__closure__, reduced)
        if function.__globals__ is pickling.main_globals():
            self.note.reads.update(global_names(function))
            make, arguments, (attributes, slots), *others = reduced
            reduced = (make, arguments, (attributes, {**slots, "__globals__": {}}), *others)
        return reduced


class _Pickled:
    """Variables in one pickle, so that what they have in common stays in common."""

    def __init__(self, values: Mapping[str, object], own: Own, called: Callable[[str], str]) -> None:
        self.own = own
        self.uses: set[str] = set()
        self.reads: set[str] = set()
        self.by_value: set[str] = set()
        self.tensors: list[Any] = []
        self.arrays: list[Any] = []
        self.ranges: list[Range] = []
        self._owners: dict[int, Any] = {}
        """The array over whose memory an array or tensor is made, by its address."""
        self._objects: frozenset[int] = frozenset()
        self._names = tuple(values)
        self._pickler = type("Pickler", (_ScriptPickler,), {"note": self})
        self._data = b""
        if not values:
            return
        content = next(iter(values.values())) if len(values) == 1 else tuple(values.values())
        try:
            self._data = self._dumped(content)
            self.ranges = _ranges_of([*self.tensors, *self.arrays])
            self._find_owners()
            if self.tensors:
                self._data = self._dumped_by_torch(content)
            elif self._owners:
                self._data = self._dumped(content)
        except Exception as error:
            raise self._unsavable({called(name): value for name, value in values.items()}, error) from error

    def _find_owners(self) -> None:
        """Find what shares its memory with an array; of tensors alone torch's own pickle takes care."""
        found = {id(each): each for each in [*self.arrays, *self.tensors]}
        placed = [
            (first, -end, type(each).__name__ == "Tensor", key)
            for key, each in found.items()
            for first, end in _ranges_of([each])
            if not (arrays.is_array(each) and each.dtype.hasobject)
        ]
        for group in _overlapping((first, -end, key) for first, end, _, key in sorted(placed)):
            roots = [arrays.last_base(found[key]) for key in group if arrays.is_array(found[key])]
            if roots and (len(group) > 1 or _file_of(roots[0])):
                self._owners |= dict.fromkeys([*group, id(roots[0])], roots[0])

    def reduced_array(self, array: Any) -> Any:
        """Return how to make an array that NumPy's own pickle would change.

        One that shares its memory, or a file's, with others, one that is read-only, or has attributes.
        """
        owner: Any = self._owners.get(id(array))
        if array is owner and (file := _file_of(array)):
            mode = "r+" if array.mode == "w+" else array.mode
            return type(array), (file, array.dtype, mode, array.offset, array.shape, "CF"[array.flags.fnc])
        kind, ndarray = type(array), sys.modules["numpy"].ndarray
        taken_apart = arrays.is_taken_apart(kind)
        attributes = attributes_of(array) if kind is not sys.modules["numpy"].memmap else None
        if owner is None or array is owner:
            changed = attributes or not array.flags.writeable
            if not changed or kind.__reduce__ is not ndarray.__reduce__ or not taken_apart:
                return NotImplemented
            elements: tuple[Any, ...] = array.view(ndarray).__reduce__()
        elif taken_apart:
            elements = self._view(owner, array)
        else:
            msg = "it shares its memory with an array, and has a pickle of its own"
            raise TypeError(msg)
        if not array.flags.writeable:
            elements = ndarray.view, (Made(elements), ndarray), False, None, None, ndarray.setflags
        if kind is not ndarray:
            elements = ndarray.view, (Made(elements), kind)
        if attributes:
            self.by_value.add("attributes of arrays")
            elements = (*elements, dict(attributes), None, None, set_attributes)
        return elements

    def reduced_tensor(self, tensor: Any) -> Any:
        """Return how to make a tensor that shares its memory with an array of this pickle."""
        owner = self._owners.get(id(tensor))
        if owner is None:
            return NotImplemented
        if type(tensor) is not sys.modules["torch"].Tensor or tensor.requires_grad:
            msg = "it shares its memory with an array, and is no plain tensor"
            raise TypeError(msg)
        return sys.modules["torch"].from_numpy, (Made(self._view(owner, tensor.numpy())),)

    def _view(self, owner: Any, view: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        (first, end), (first_of_view, end_of_view) = arrays.range_of(owner), arrays.range_of(view)
        if first_of_view < first or end_of_view > end:
            msg = "it shares a part of its memory with an array"
            raise TypeError(msg)
        if view.flags.writeable and not owner.flags.writeable:
            msg = "it can be written to, and shares its memory with an array that is read-only"
            raise TypeError(msg)
        offset = view.__array_interface__["data"][0] - first
        buffer = owner if owner.flags.c_contiguous else Made((sys.modules["numpy"].transpose, (owner,)))
        kind = sys.modules["numpy"].ndarray
        return kind, (view.shape, view.dtype, buffer, offset, view.strides)

    def _dumped(self, content: object) -> bytes:
        stream = io.BytesIO()
        self.tensors, self.arrays = [], []
        pickler = self._pickler(stream, protocol=5)
        pickler.dump(content)
        self._objects = frozenset(pickler.memo.copy())
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
            comment += f"\n# Reading it needs cloudpickle, for code that is not written here: {names}."
        if any(each.grad_fn is not None for each in self.tensors):
            comment += "\n# Tensors that have a graph in the notebook are leaves here."

        def write(path: Path) -> None:
            path.write_bytes(self._data)

        return Load(
            self._names,
            f"{comment}\n{text}",
            (by,),
            file,
            write,
            frozenset(self.uses),
            frozenset(self.reads),
            self._objects,
            tuple(self.ranges),
        )

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


def _file_of(array: Any) -> str:
    mapped = type(array) is sys.modules["numpy"].memmap and array.mode in ("r", "r+", "w+")
    return str(array.filename or "") if mapped else ""
