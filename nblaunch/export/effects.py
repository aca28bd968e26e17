"""What definitions do besides binding their name: decorators that register, `__init_subclass__`, calls.

The variables that such code changes have their content of today already. A script that makes the definitions
again gives it to them once more, below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from nblaunch.capture.dataflow import FunctionNode
from nblaunch.export.source import Definition


def run_by(node: ast.stmt, value: Any) -> dict[str, int]:
    """Return what runs when a statement is executed, which has made `value`: names, and how deep.

    At 2, what a function returns is called as well, as in `@register("name")`.
    """
    roots: list[ast.AST] = [each.func for each in _executed(node, 0) if isinstance(each, ast.Call)]
    twice: list[ast.AST] = []
    if isinstance(node, Definition):
        roots += node.decorator_list
        twice += [each for each in node.decorator_list if isinstance(each, ast.Call)]
        if isinstance(node, ast.ClassDef) and isinstance(value, type) and _is_hooked(value):
            roots += [*node.bases, *(each.value for each in node.keywords)]
    return {name: depth for depth, within in ((1, roots), (2, twice)) for name in _names(within)}


def _names(nodes: list[ast.AST]) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_hooked(cls: type) -> bool:
    ours = [each for each in cls.__mro__[1:] if each.__module__ == "__main__"]
    return any("__init_subclass__" in vars(each) for each in ours) or type(cls).__module__ == "__main__"


def _executed(node: ast.AST, depth: int) -> Iterator[ast.AST]:
    """Yield what is executed with a statement, and within functions in functions, as deep as `depth`."""
    yield node
    for name, field in ast.iter_fields(node):
        inside = depth - (name == "body" and isinstance(node, FunctionNode))
        for child in field if isinstance(field, list) else [field]:
            if inside >= 0 and isinstance(child, ast.AST):
                yield from _executed(child, inside)


def used_at_once(text: str, depth: int) -> frozenset[str]:
    """Return the names that a definition uses when it is called, `.attribute` for attributes.

    At a depth of 1, what the functions that it makes use later is not among them.
    """
    found: set[str] = set()
    for each in _executed(ast.parse(text), depth):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(f".{each.attr}")
    return frozenset(found)


def bound_globally(text: str) -> frozenset[str]:
    return frozenset(
        name for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Global) for name in each.names
    )


def set_again(target: str, value: Any, literal: str) -> str:
    """Return what gives a variable its value once more; a container stays the object that it is."""
    if type(value) is list:
        return f"{target}[:] = {literal}"
    if type(value) in (dict, set):
        filled = f"\n{target}.update({literal})" if value else ""
        return f"{target}.clear(){filled}"
    return f"{target} = {literal}"
