"""Which variables a cell has bound, also those that are bound to the very object that they had.

Where `ready` is True, `ready = True` leaves no trace, and whether it has run is decided within the cell: by
an `if`, by a loop over nothing, by the line that raised. So the cell itself notes it: behind each statement
that binds one of the names in question comes one that notes the name. Notes are reached through a builtin:
the cell's own variables stay as they are, also for a loop over `globals()`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_NOTES = "__bound__"
_BLOCKS = ("body", "orelse", "finalbody")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_Opening = ast.For | ast.AsyncFor | ast.With | ast.AsyncWith | ast.match_case
"""Statements that bind names where their body begins."""


class StoreNotes(ast.NodeTransformer):
    """Has a cell note which variables it binds, of those that `asked` returns.

    Not a transformer of IPython's: for one it walks over all nodes to give them lines, as `_at` has done.
    """

    def __init__(self, asked: Callable[[], Iterable[str]]) -> None:
        self._names = asked
        self._wanted: set[str] = set()
        """Those that a text has in which this job's cells may bind them."""
        self._in_expressions = False
        self._noted: dict[str, bool] = {}
        setattr(builtins, _NOTES, self._noted)

    def take(self) -> set[str]:
        noted = set(self._noted)
        self._noted.clear()
        self._wanted.clear()
        self._in_expressions = False
        return noted

    def see(self, text: str) -> None:
        """Take a text that will be parsed: only names that it has are noted."""
        # Python normalizes names that are not ASCII.
        self._wanted |= {name for name in self._names() if name in text or not text.isascii()}
        self._in_expressions |= ":=" in text

    def add_to(self, tree: Any) -> Any:
        """Return a tree, parsed from texts that were seen, with notes."""
        # A tree that is too deep may compile all the same.
        with contextlib.suppress(RecursionError):
            return self.visit(tree) if self._wanted else tree
        return tree

    def visit(self, node: ast.AST) -> Any:
        skipped = isinstance(node, _SCOPES) or (isinstance(node, ast.expr) and not self._in_expressions)
        return node if skipped else super().visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Put a note behind each statement of a block, and at its start where names are bound there."""
        super().generic_visit(node)
        for field in _BLOCKS:
            if isinstance(block := getattr(node, field, None), list):
                noted = [after for each in block for after in (each, *self._notes(each, _bound_by(each)))]
                setattr(node, field, noted)
        if isinstance(node, _Opening):
            node.body[:0] = self._notes(node.body[0], _bound_at_start(node))
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        """Turn `name := value` into `name := (value, notes.__setitem__("name", True))[0]`."""
        super().generic_visit(node)
        if node.target.id in self._wanted:
            note = ast.Attribute(ast.Name(_NOTES, ast.Load()), "__setitem__", ast.Load())
            entry: list[ast.expr] = [ast.Constant(node.target.id), ast.Constant(value=True)]
            both = ast.Tuple([node.value, ast.Call(note, entry, [])], ast.Load())
            node.value = _at(node, ast.Subscript(both, ast.Constant(0), ast.Load()))
        return node

    def _notes(self, statement: ast.stmt, names: Iterator[str]) -> list[ast.stmt]:
        notes = ast.Name(_NOTES, ast.Load())
        entries = [
            ast.Subscript(notes, ast.Constant(name), ast.Store()) for name in names if name in self._wanted
        ]
        return [_at(statement, ast.Assign([entry], ast.Constant(value=True))) for entry in entries]


def _at(place: ast.AST, node: Any) -> Any:
    return ast.fix_missing_locations(ast.copy_location(node, place))


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement has bound once it is done."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names):
            yield from (each.asname or each.name.partition(".")[0] for each in names)
        case ast.ImportFrom(names=names, module=module) if module != "__future__":
            yield from (each.asname or each.name for each in names)
        case ast.Assign(targets=targets):
            yield from _stored(*targets)
        case ast.AnnAssign(target=target, value=ast.expr()) | ast.AugAssign(target=target):
            yield from _stored(target)


def _bound_at_start(
    node: ast.For | ast.AsyncFor | ast.With | ast.AsyncWith | ast.match_case,
) -> Iterator[str]:
    """Yield the names that are bound where the body of a statement begins."""
    match node:
        case ast.For(target=target) | ast.AsyncFor(target=target):
            yield from _stored(target)
        case ast.With(items=items) | ast.AsyncWith(items=items):
            yield from _stored(*(each.optional_vars for each in items if each.optional_vars is not None))
        case ast.match_case(pattern=pattern):
            for each in ast.walk(pattern):
                if isinstance(each, ast.MatchAs | ast.MatchStar) and each.name is not None:
                    yield each.name
                elif isinstance(each, ast.MatchMapping) and each.rest is not None:
                    yield each.rest


def _stored(*targets: ast.expr) -> Iterator[str]:
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id
