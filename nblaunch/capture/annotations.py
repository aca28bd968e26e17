"""The names in annotations that are text: `typing.get_type_hints` looks them up where the code runs.

Dataclasses for argument parsers, and what `from __future__ import annotations` makes of any annotation.
"""

from __future__ import annotations

import ast
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_NAMED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, int, str, types.NoneType)
_OF_TYPES = frozenset({"typing", "typing_extensions", "types"})
_DEEPEST = 10


def annotation_names(obj: Any, namespace: Mapping[str, Any]) -> frozenset[str]:
    """Return the names in the annotations of a function or class that are text.

    Those that are data in the notebook are left out: `Literal["weights"]` means no variable.
    """
    names: set[str] = set()
    with suppress(Exception):  # from Python 3.14 on, this runs the annotations
        annotations = vars(obj).get("__annotations__") if isinstance(obj, type) else obj.__annotations__
        for each in (annotations or {}).values():
            names.update(_names_in(each))
    return frozenset(name for name in names if name not in namespace or _is_named(namespace[name]))


def _names_in(annotation: Any, depth: int = _DEEPEST) -> Iterator[str]:
    if type(annotation) is str:
        yield from _names_in_text(annotation)
    elif type(annotation) is typing.ForwardRef:
        yield from _names_in_text(annotation.__forward_arg__)
    elif depth:
        for each in typing.get_args(annotation):
            yield from _names_in(each, depth - 1)


@functools.lru_cache(maxsize=10_000)
def _names_in_text(text: str) -> frozenset[str]:
    """Return the names in an annotation, also in text within it: `Optional["Node"]`."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError, RecursionError):  # `Float[Tensor, "batch seq"]`
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and type(node.value) is str:
                names |= _names_in_text(node.value)
    return frozenset(names)


def _is_named(value: object) -> bool:
    """Return whether an annotation may mean this: a class, a module, a form of `typing`; no data."""
    return issubclass(type(value), _NAMED) or type(value).__module__ in _OF_TYPES
