"""Where the notebook's own functions, classes and other things without data come from: their source text."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import logging
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nblaunch.job._cell_text import Chunk, chunks
from nblaunch.job._imports import Import, imports_in
from nblaunch.job._magics import ipython_call
from nblaunch.job.names import CellNames, cell_names

_MADE_BY_CALLS = (
    *(types.FunctionType, type, functools.partial, typing.TypeVar, typing.ParamSpec, typing.NewType),
    *(types.GenericAlias, types.UnionType, logging.Logger, re.Pattern, functools.partialmethod),
)
"""What is made anew rather than saved: kinds that hold no data of their own."""


@dataclass(frozen=True, slots=True)
class Source:
    """The statement that makes a variable: its text, where it stood, and what it uses."""

    text: str
    place: tuple[int, int]
    names: CellNames


class NotebookSource:
    """The cells that a notebook has run, as Python."""

    def __init__(self, cells: Mapping[int, str]) -> None:
        """Read `cells`: execution number -> source, IPython's syntax transformed."""
        self.imports: list[Import] = []
        self._numbers: dict[str, int] = {}
        self._bindings: dict[str, tuple[int, Chunk]] = {}
        for number, text in sorted(cells.items()):
            for part in _with_bodies(text):
                self._numbers[part.strip("\n")] = number
                for chunk in _chunks(part):
                    for node in chunk.nodes:
                        self.imports += [each for inner in _run(node) for each in imports_in(inner)]
                    for name in _bound(chunk):
                        self._bindings[name] = (number, chunk)

    def place(self, name: str) -> tuple[int, int]:
        """Return where the notebook gave `name` its value; before everything else if that is unknown."""
        number, chunk = self._bindings.get(name, (0, None))
        return number, chunk.nodes[0].lineno if chunk is not None else 0

    def definition(self, name: str, value: object) -> Source | None:
        """Return the `def` or `class` that made `value`, if it is called `name`."""
        number, chunk = self._bindings.get(name, (0, None))
        node = chunk.node if chunk is not None else None
        is_def = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if chunk is not None and not is_def and hasattr(value, "__wrapped__"):
            return None  # `f = wrapped(f)`: the `def` alone is not all of it
        codes = [code for code in _codes(value) if _cell_of(code) is not None]
        found = {self._defined_at(name, code) for code in codes}
        if isinstance(value, type) and (len(found) > 1 or None in found):
            return None  # a method was put into the class, or another one for it, after its definition
        for source in found - {None}:
            return source
        if chunk is None or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return None
        # A class without methods, or what a decorator made of a function, cannot be asked where it is from.
        if (isinstance(value, type) and value.__module__ == "__main__") or node.decorator_list:
            return Source(chunk.text.strip("\n"), (number, node.lineno), cell_names(chunk.text))
        return None

    def _defined_at(self, name: str, code: types.CodeType) -> Source | None:
        text = _cell_of(code) or ""
        for chunk in _chunks(text):
            node = chunk.node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            within = first <= code.co_firstlineno <= (node.end_lineno or first)
            if within and node.name == name and (isinstance(node, ast.ClassDef) or code.co_name == name):
                number = self._numbers.get(text.strip("\n"), 0)
                return Source(chunk.text.strip("\n"), (number, node.lineno), cell_names(chunk.text))
        return None

    def statement(self, name: str, value: object, namespace: Mapping[str, object]) -> Source | None:
        """Return the assignment that made `value`, where running it again makes the same.

        That is so where it refers to nothing but functions, classes and modules.
        """
        number, chunk = self._bindings.get(name, (0, None))
        if chunk is None or not isinstance(value, _MADE_BY_CALLS):
            return None
        match chunk.node:
            case ast.Assign(targets=[ast.Name()], value=made) | ast.AnnAssign(target=ast.Name(), value=made):
                pass
            case _:
                return None
        names = cell_names(chunk.text)
        if any(self.place(each) > (number, chunk.nodes[0].lineno) for each in names.needed):
            return None  # what it was made of has been defined anew since
        used = [namespace[each] for each in names.needed & namespace.keys() if each != "__name__"]
        if name in names.needed or not all(
            isinstance(each, types.ModuleType) or callable(each) for each in used
        ):
            return None
        if isinstance(made, ast.Lambda) and getattr(value, "__name__", "") != "<lambda>":
            return None
        return Source(chunk.text.strip("\n"), (number, chunk.nodes[0].lineno), names)


def _cell_of(code: types.CodeType) -> str | None:
    """Return the source of the cell that code was compiled from."""
    entry = linecache.cache.get(code.co_filename)
    # Entries without a modification time are no files: IPython puts cells there.
    return "".join(entry[2]) if entry is not None and len(entry) == 4 and entry[1] is None else None  # noqa: PLR2004


def _codes(value: object) -> Iterator[types.CodeType]:
    """Yield the code of a function of the notebook, also of a wrapped one, or of a class's methods."""
    functions = [value]
    if isinstance(value, type):
        members = vars(value).values() if value.__module__ == "__main__" else []
        functions = [getattr(each, "fget", None) or getattr(each, "__func__", each) for each in members]
    for function in functions:
        with contextlib.suppress(ValueError):  # wrapped in a circle
            inner = inspect.unwrap(function) if callable(function) else function
            code = getattr(inner, "__code__", None)
            if isinstance(code, types.CodeType):
                yield code


def _with_bodies(text: str) -> list[str]:
    """Return a cell and, where it is a magic around a cell, that one."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            match ipython_call(node.value):
                case "run_cell_magic", ["time" | "capture" | "local", _, inner]:
                    return _with_bodies(inner)
    return [text]


def _chunks(text: str) -> list[Chunk]:
    try:
        return chunks(text)[0]
    except (SyntaxError, ValueError):
        return []


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run with `node`: not those inside of functions and classes."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _run(child)


def _bound(chunk: Chunk) -> Iterator[str]:
    for node in chunk.nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case _:
                for each in ast.walk(node):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        yield each.id
