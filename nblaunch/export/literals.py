"""Values as source text: numbers, texts, containers, paths, devices, settings."""

from __future__ import annotations

import abc
import argparse
import builtins
import dataclasses
import enum
import math
import pathlib
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

from nblaunch.capture.identity import has_identity
from nblaunch.export.imports import LINE, Import

_MOST_CHARACTERS = 2000
_MOST_DEPTH = 20
_FEW_ELEMENTS = 16
_EXACT = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Types whose numbers Python writes exactly."""
_PLAIN: tuple[Any, ...] = (int, float, str, bytes, tuple)
"""Built-in types whose `__getnewargs__` is the value without its class."""

Own = Callable[[object], str | None]
"""Returns the name under which a script defines a function or class itself; None where it does not."""


class NoLiteralError(Exception):
    """A value has no literal, or one that is too large."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Bracketed:
    """Parts between brackets, each with what stands before it: `key: ` or `name=`."""

    opening: str
    parts: list[tuple[str, _Bracketed | str]]
    closing: str
    filled: bool = False
    """As many parts on a line as fit, where they need several lines."""

    def __str__(self) -> str:
        inner = ", ".join(f"{before}{part}" for before, part in self.parts)
        comma = "," if self.opening == "(" and len(self.parts) == 1 else ""
        return f"{self.opening}{inner}{comma}{self.closing}"


def _lay_out(text: _Bracketed | str, margin: str, taken: int) -> str:
    """Return a text on one line if it fits behind `taken` characters, else each part on a line of its own."""
    if isinstance(text, str) or not text.parts or taken + len(str(text)) <= LINE:
        return str(text)
    inner = f"{margin}    "
    if text.filled:
        words = f"{', '.join(str(part) for _, part in text.parts)},"
        lines = textwrap.fill(words, LINE - len(inner), break_long_words=False, break_on_hyphens=False)
        lines = textwrap.indent(lines, inner) + "\n"
    else:
        parts = [f"{before}{_lay_out(part, inner, len(inner + before) + 1)}" for before, part in text.parts]
        lines = "".join(f"{inner}{part},\n" for part in parts)
    return f"{text.opening}\n{lines}{margin}{text.closing}"


class LiteralWriter:
    """Writes one value; `imports` and `names` are what the text refers to."""

    def __init__(self, own: Own = lambda _: None) -> None:
        self.imports: set[Import] = set()
        self.names: set[str] = set()
        self.memory: set[int] = set()
        """The addresses of what could be changed in place: two values may not have these in common."""
        self._own = own
        self._around: list[int] = []

    def assignment(self, name: str, value: object) -> str:
        """Return `name = value`, on several lines where it is long. Raises `NoLiteralError`."""
        text = self._text(value)
        if len(str(text)) > _MOST_CHARACTERS:
            raise NoLiteralError
        if type(value) is str and "\n" in value and _fits_triple_quotes(value):
            return f'{name} = """\\\n{value}"""'
        return f"{name} = {_lay_out(text, '', len(name) + 3)}"

    def _text(self, value: object) -> _Bracketed | str:
        if id(value) in self._around or len(self._around) > _MOST_DEPTH:
            raise NoLiteralError
        if has_identity(value) and not isinstance(value, enum.Enum | pathlib.PurePath):
            self.memory.add(id(value))
        self._around.append(id(value))
        try:
            return self._write(value)
        finally:
            self._around.pop()

    def _write(self, value: Any) -> _Bracketed | str:
        kind = type(value)
        if kind in (list, tuple, set, frozenset, dict):
            return self._container(value) if len(value) <= _MOST_CHARACTERS else _no()
        if kind is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if value is None or value is ... or kind in (bool, int, range):
            return repr(value)
        if kind in (str, bytes):
            return quoted(value) if len(value) <= _MOST_CHARACTERS else _no()
        if kind is complex:
            return repr(value) if repr(value).strip("(").rstrip("j)").replace("+", "").isdigit() else _no()
        return self._object(value)

    def _container(self, value: Any) -> _Bracketed | str:
        if isinstance(value, dict):
            pairs = [(f"{self._text(key)}: ", self._text(each)) for key, each in value.items()]
            return _Bracketed("{", pairs, "}")
        parts = [("", self._text(each)) for each in value]
        if isinstance(value, list | tuple):
            opening, closing = "[]" if isinstance(value, list) else "()"
            filled = all(type(each) in (int, float, bool) for each in value)
            return _Bracketed(opening, parts, closing, filled)
        parts.sort(key=str)
        kind = type(value).__name__
        if not parts:
            return f"{kind}()"
        return _Bracketed("{", parts, "}") if kind == "set" else _Bracketed("frozenset({", parts, "})")

    def _object(self, value: Any) -> _Bracketed | str:
        kind = type(value)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            name = str(getattr(value, "__name__", ""))
            return name if vars(builtins).get(name) is value else self._own_name(value)
        if kind is type(pathlib.Path()):
            self.imports.add(Import("pathlib", "Path"))
            return f"Path({self._text(str(value))})"
        if kind is types.SimpleNamespace or kind is argparse.Namespace:
            self.imports.add(Import(kind.__module__, kind.__name__))
            return self._call(kind.__qualname__, vars(value))
        if kind.__module__ == "__main__":
            return self._instance(value)
        return self._torch_literal(value)

    def _own_name(self, definition: Any) -> str:
        name = self._own(definition) if definition.__module__ == "__main__" else None
        if name is None:
            raise NoLiteralError
        self.names.add(name.partition(".")[0])
        return name

    def _instance(self, value: Any) -> _Bracketed | str:
        """Write an object of a class of the notebook, where making it again runs no code of that class."""
        kind = type(value)
        name = self._own_name(kind)
        if isinstance(value, enum.Enum):
            return self._member(name, value)
        if dataclasses.is_dataclass(value):
            return self._dataclass(name, value)
        if type(kind) not in (type, abc.ABCMeta) or object.__getstate__(value) is not None:
            raise NoLiteralError
        plain: Any = next((each for each in _PLAIN if isinstance(value, each)), object)
        if (kind.__new__, kind.__init__) != (plain.__new__, object.__init__):
            raise NoLiteralError
        arguments = [] if plain is object else [("", self._text(plain.__getnewargs__(value)[0]))]
        return _Bracketed(f"{name}(", arguments, ")")

    def _member(self, name: str, value: Any) -> _Bracketed | str:
        """Write a member of an enumeration, or flags as their members."""
        members = type(value).__members__
        parts = str(value._name_).split("|")
        if all(part in members and part.isidentifier() for part in parts):
            return " | ".join(f"{name}.{part}" for part in parts)
        return _Bracketed(f"{name}(", [("", self._text(value._value_))], ")")

    def _dataclass(self, name: str, value: Any) -> _Bracketed:
        """Write the call that makes it, where that does nothing but keep its arguments."""
        kind, fields = type(value), dataclasses.fields(value)
        simple = {"__init__", "__dataclass_params__"} <= vars(kind).keys() and kind.__dataclass_params__.init
        if not simple or hasattr(value, "__post_init__") or not all(each.init for each in fields):
            raise NoLiteralError
        if getattr(value, "__dict__", {}).keys() - {each.name for each in fields}:
            raise NoLiteralError
        return self._call(name, {each.name: getattr(value, each.name) for each in fields})

    def _call(self, name: str, arguments: dict[str, object]) -> _Bracketed:
        if not all(key.isidentifier() for key in arguments):
            raise NoLiteralError
        parts = [(f"{key}=", self._text(value)) for key, value in arguments.items()]
        return _Bracketed(f"{name}(", parts, ")")

    def _torch_literal(self, value: Any) -> str:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.dtype | torch.device | torch.Tensor):
            self.imports.add(Import("torch"))
            if isinstance(value, torch.dtype):
                return str(value)
            if isinstance(value, torch.device):
                return f'torch.device("{value}")'
            return self._tensor(torch, value)
        if numpy is not None and type(value) is numpy.ndarray:
            self.imports.add(Import("numpy", alias="np"))
            return self._array(numpy, value)
        return _no()

    def _tensor(self, torch: Any, value: Any) -> str:
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
        dtype = str(value.dtype).removeprefix("torch.")
        if not plain or value.device.type != "cpu" or value.numel() > _FEW_ELEMENTS or dtype not in _EXACT:
            return _no()
        # A literal has no order of its own, and a view shares its memory with another tensor.
        if not value.is_contiguous():
            return _no()
        if 0 in value.shape or value.untyped_storage().nbytes() != value.numel() * value.element_size():
            return _no()
        if not bool(torch.isfinite(value).all()):
            return _no()
        self.memory.add(value.untyped_storage().data_ptr())
        shown = "" if dtype in ("float32", "int64", "bool") else f", dtype={value.dtype}"
        return f"torch.tensor({self._numbers(_shortest(torch, value))}{shown})"

    def _array(self, numpy: Any, value: Any) -> str:
        dtype = value.dtype.name
        if value.size > _FEW_ELEMENTS or 0 in value.shape or dtype not in _EXACT:
            return _no()
        if value.base is not None or not value.dtype.isnative or not numpy.isfinite(value).all():
            return _no()
        if not (value.flags.c_contiguous and value.flags.writeable):
            return _no()
        self.memory.add(value.ctypes.data)
        shown = "" if dtype in ("float64", "int64", "bool") else f", dtype=np.{dtype}"
        return f"np.array({self._numbers(value.tolist())}{shown})"

    def _numbers(self, made: object) -> str:
        """Write lists that were made for this alone: nothing else can have them in common."""
        kept = set(self.memory)
        text = self._text(made)
        self.memory = kept
        return str(text)


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


def quoted(text: str | bytes) -> str:
    written = repr(text)
    prefix = "b" if isinstance(text, bytes) else ""
    body = written[len(prefix) :]
    return f'{prefix}"{body[1:-1]}"' if body.startswith("'") and '"' not in body else written


def _fits_triple_quotes(text: str) -> bool:
    plain = all(character.isprintable() or character == "\n" for character in text)
    tidy = not any(line.endswith(" ") for line in text.split("\n"))
    return plain and tidy and "\\" not in text and '"""' not in text and not text.endswith('"')
