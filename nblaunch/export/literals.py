"""Values as source text: numbers, texts, containers, paths, devices, settings."""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import enum
import math
import pathlib
import sys
import types
from collections.abc import Iterable
from typing import Any

from nblaunch.export.imports import Import

_MOST_CHARACTERS = 2000
_LINE = 88
_FEW_ELEMENTS = 16


class NoLiteralError(Exception):
    """A value has no literal, or one that is too large."""


class Writer:
    """Writes one value; `imports` and `names` are what the text refers to."""

    def __init__(self, owned: dict[str, Any]) -> None:
        """`owned` are the classes of the notebook that the script will define, by name."""
        self.imports: set[Import] = set()
        self.names: set[str] = set()
        self.mutable: set[int] = set()
        """What is written out and could be changed in place: two values may not have it in common."""
        self._owned = owned
        self._inside: set[int] = set()
        self._depth = 0

    def assignment(self, name: str, value: object) -> str:
        """Return `name = value`, on several lines where it is long. Raises `NoLiteralError`."""
        flat = self._flat(value)
        if len(flat) > _MOST_CHARACTERS:
            raise NoLiteralError
        if type(value) is str and "\n" in value and _fits_triple_quotes(value):
            return f'{name} = """\\\n{value}"""'
        line = f"{name} = {flat}"
        return line if len(line) <= _LINE else f"{name} = {self._long(value, '')}"

    def _flat(self, value: object) -> str:
        if id(value) in self._inside or self._depth > 20:  # noqa: PLR2004 - nobody writes more
            raise NoLiteralError
        self._inside.add(id(value))
        if (
            not isinstance(value, int | float | complex | str | bytes | tuple | frozenset | type)
            and value is not None
        ):
            self.mutable.add(id(value))
        self._depth += 1
        try:
            return self._written(value)
        finally:
            self._inside.discard(id(value))
            self._depth -= 1

    def _written(self, value: object) -> str:
        kind = type(value)
        if kind in (list, tuple, set, frozenset, dict):
            assert isinstance(value, list | tuple | set | frozenset | dict)  # noqa: S101 - said above
            if len(value) > _MOST_CHARACTERS:
                raise NoLiteralError
            opening, inner, closing = self._container(value)
            comma = "," if kind is tuple and len(inner) == 1 else ""
            return f"{opening}{', '.join(inner)}{comma}{closing}"
        if kind is float:
            assert isinstance(value, float)  # noqa: S101 - said above
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if value is None or value is ... or kind in (bool, int):
            return repr(value)
        if kind in (str, bytes):
            if len(value) > _MOST_CHARACTERS:  # type: ignore[arg-type] # both have a length
                raise NoLiteralError
            return _quoted(repr(value))
        if kind is complex:
            return repr(value) if repr(value).strip("(").rstrip("j)").replace("+", "").isdigit() else _no()
        return self._object(value)

    def _container(self, value: Any) -> tuple[str, list[str], str]:
        match value:
            case dict():
                return "{", [f"{self._flat(key)}: {self._flat(each)}" for key, each in value.items()], "}"
            case list():
                return "[", [self._flat(each) for each in value], "]"
            case tuple():
                return "(", [self._flat(each) for each in value], ")"
        inner = sorted(self._flat(each) for each in value)
        if isinstance(value, frozenset):
            return ("frozenset({", inner, "})") if inner else ("frozenset(", [], ")")
        return ("{", inner, "}") if inner else ("set(", [], ")")

    def _long(self, value: object, margin: str) -> str:
        """Return a container with each element on a line of its own."""
        flat = self._flat(value)
        if len(margin) + len(flat) <= _LINE - 12 or type(value) not in (list, tuple, set, frozenset, dict):
            return flat
        opening, inner, closing = self._container(value)
        if isinstance(value, dict):
            inner = [f"{self._flat(key)}: {self._long(each, margin + '    ')}" for key, each in value.items()]
        elif isinstance(value, list | tuple):
            if all(type(each) in (int, float, bool) for each in value):
                return f"{opening}\n{_filled(inner, margin + '    ')}\n{margin}{closing}"
            inner = [self._long(each, margin + "    ") for each in value]
        lines = "".join(f"{margin}    {each},\n" for each in inner)
        return f"{opening}\n{lines}{margin}{closing}"

    def _object(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, type | types.BuiltinFunctionType):
            name = str(getattr(value, "__name__", ""))
            return name if vars(builtins).get(name) is value else _no()
        if isinstance(value, enum.Enum) and self._is_owned(kind):
            return f"{kind.__qualname__}.{value.name}"
        if kind is type(pathlib.Path()):
            self.imports.add(Import("pathlib", "Path"))
            return f"Path({self._flat(str(value))})"
        if kind is range:
            return repr(value)
        if kind is types.SimpleNamespace or kind is argparse.Namespace:
            self.imports.add(Import(kind.__module__, kind.__name__))
            return self._call(kind.__name__, vars(value).items())
        if dataclasses.is_dataclass(value) and self._is_owned(kind):
            return self._dataclass(value)
        if (
            kind.__init__ is object.__init__
            and getattr(value, "__dict__", None) == {}
            and self._is_owned(kind)
        ):
            return f"{kind.__qualname__}()"
        return self._of_torch(value)

    def _is_owned(self, kind: type) -> bool:
        owned = self._owned.get(kind.__qualname__) is kind
        if owned:
            self.names.add(kind.__qualname__)
        return owned

    def _dataclass(self, value: Any) -> str:
        """Write the call that makes it, where that does nothing but keep its arguments."""
        fields = dataclasses.fields(value)
        own = type(value).__dict__
        simple = (
            "__init__" in own
            and hasattr(type(value), "__dataclass_params__")
            and not hasattr(value, "__post_init__")
        )
        names = {each.name for each in fields}
        if (
            not simple
            or not all(each.init for each in fields)
            or getattr(value, "__dict__", {}).keys() - names
        ):
            return _no()
        if not value.__dataclass_params__.init:
            return _no()
        return self._call(
            type(value).__qualname__, ((name.name, getattr(value, name.name)) for name in fields)
        )

    def _call(self, name: str, arguments: Iterable[tuple[str, object]]) -> str:
        pairs = list(arguments)
        if not all(each.isidentifier() for each, _ in pairs):
            return _no()
        return f"{name}({', '.join(f'{each}={self._flat(value)}' for each, value in pairs)})"

    def _of_torch(self, value: Any) -> str:
        torch = sys.modules.get("torch")
        numpy = sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.dtype):
            self.imports.add(Import("torch"))
            return str(value)
        if torch is not None and isinstance(value, torch.device):
            self.imports.add(Import("torch"))
            return f'torch.device("{value}")'
        if torch is not None and type(value) is torch.Tensor:
            return self._tensor(torch, value)
        if numpy is not None and type(value) is numpy.ndarray:
            return self._array(numpy, value)
        return _no()

    def _tensor(self, torch: Any, value: Any) -> str:
        usual = {torch.float32: "", torch.int64: "", torch.bool: ""}
        exact = {torch.float64, torch.int32, torch.int16, torch.int8, torch.uint8}
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
        if not plain or value.numel() > _FEW_ELEMENTS or value.dtype not in {*usual, *exact}:
            return _no()
        # A view shares its memory with another tensor, which a literal would not.
        if 0 in value.shape or value.untyped_storage().nbytes() != value.numel() * value.element_size():
            return _no()
        if not bool(torch.isfinite(value).all()):
            return _no()
        self.imports.add(Import("torch"))
        dtype = usual.get(value.dtype, f", dtype={value.dtype}")
        return f"torch.tensor({self._numbers(_shortest(torch, value))}{dtype})"

    def _array(self, numpy: Any, value: Any) -> str:
        usual = {"float64": "", "int64": "", "bool": ""}
        exact = {"float32", "int32", "uint8"}
        if value.size > _FEW_ELEMENTS or 0 in value.shape or value.dtype.name not in {*usual, *exact}:
            return _no()
        if value.base is not None or not value.dtype.isnative or not numpy.isfinite(value).all():
            return _no()
        self.imports.add(Import("numpy", alias="np"))
        dtype = usual.get(value.dtype.name, f", dtype=np.{value.dtype.name}")
        return f"np.array({self._numbers(value.tolist())}{dtype})"

    def _numbers(self, made: object) -> str:
        """Write lists that were made for this alone: nothing else can have them in common."""
        kept = set(self.mutable)
        text = self._flat(made)
        self.mutable = kept
        return text


def _shortest(torch: Any, tensor: Any) -> Any:
    """Return a tensor as lists, with as few digits as give the same: 0.1, not 0.10000000149011612."""
    numpy = sys.modules.get("numpy")
    exact = tensor.tolist()
    if numpy is None or tensor.dtype is not torch.float32:
        return exact
    numbers = [float(str(each)) for each in tensor.flatten().numpy()]
    shorter = numpy.array(numbers).reshape(tuple(tensor.shape)).tolist()
    return shorter if torch.equal(torch.tensor(shorter), tensor) else exact


def _no() -> str:
    raise NoLiteralError


def _quoted(written: str) -> str:
    """Return a `repr` in double quotes, as formatters write it."""
    prefix = "b" if written.startswith("b") else ""
    body = written[len(prefix) :]
    if body.startswith("'") and '"' not in body:
        return f'{prefix}"{body[1:-1]}"'
    return written


def _fits_triple_quotes(text: str) -> bool:
    plain = all(character.isprintable() or character == "\n" for character in text)
    tidy = not any(line.endswith(" ") for line in text.split("\n"))
    return plain and tidy and "\\" not in text and '"""' not in text and not text.endswith('"')


def _filled(words: list[str], margin: str) -> str:
    """Return numbers with as many on each line as fit."""
    lines = [margin]
    for word in words:
        if len(lines[-1]) + len(word) + 2 > _LINE and lines[-1] != margin:
            lines.append(margin)
        lines[-1] += f"{word}, "
    return "\n".join(line.rstrip() for line in lines)
