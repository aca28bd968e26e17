"""Whose variable is a name: the scopes of a cell, and what each of them binds."""

from __future__ import annotations

import ast
import enum
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ComprehensionNode: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Kind(enum.Enum):
    """How a scope looks names up; a comprehension and a list of type parameters do it as functions do."""

    MODULE = enum.auto()
    FUNCTION = enum.auto()
    CLASS = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """A stretch of the cell with variables of its own."""

    kind: Kind
    parent: Scope | None = None
    bound: frozenset[str] = frozenset()
    declared_global: frozenset[str] = frozenset()

    @property
    def module(self) -> Scope:
        """The outermost scope: the notebook's own variables."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def owner(self, name: str) -> Scope:
        """Return the scope whose variable `name` is when it is written in this one."""
        if name in self.declared_global:
            return self.module
        if name in self.bound:
            return self
        for scope in self._enclosing_functions():
            if name in scope.declared_global:
                return self.module
            if name in scope.bound:
                return scope
        return self.module

    def _enclosing_functions(self) -> Iterator[Scope]:
        scope = self.parent
        while scope is not None:
            if scope.kind is Kind.FUNCTION:
                yield scope
            scope = scope.parent


@dataclass(frozen=True, slots=True)
class Variable:
    """A name and the scope that it belongs to."""

    scope: Scope
    name: str


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a function or lambda of the cell: code that runs later, or never."""

    node: FunctionNode
    scope: Scope

    @property
    def nodes(self) -> list[ast.AST]:
        """What runs when the function is called."""
        return [self.node.body] if isinstance(self.node, ast.Lambda) else list(self.node.body)


class _Bindings(ast.NodeVisitor):
    """Collect the names that one scope binds, leaving the scopes inside it out."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.declared_global: set[str] = set()
        self.declared_nonlocal: set[str] = set()
        self._in_comprehension = False

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load) and not self._in_comprehension:
            self.bound.add(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        # `:=` inside a comprehension binds in the scope around it.
        self.bound.add(node.target.id)
        self.visit(node.value)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add(imported_name(node))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._bind(node.rest)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.declared_global.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.declared_nonlocal.update(node.names)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name)
        self._visit_all([*node.decorator_list, *defaults_of(node)])

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # the name is ast's

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all(defaults_of(node))

    def visit_ListComp(self, node: ComprehensionNode) -> None:
        outer, self._in_comprehension = self._in_comprehension, True
        self.generic_visit(node)
        self._in_comprehension = outer

    visit_SetComp = visit_ListComp  # noqa: N815  # the names are ast's
    visit_DictComp = visit_ListComp  # noqa: N815
    visit_GeneratorExp = visit_ListComp  # noqa: N815

    def _bind(self, name: str | None) -> None:
        if name is not None:
            self.bound.add(name)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def function_scope(node: FunctionNode, parent: Scope) -> Scope:
    """Return the scope of a function's body."""
    return _scope(Kind.FUNCTION, parent, Body(node, parent).nodes, extra=[arg.arg for arg in args_of(node)])


def module_scope(nodes: Iterable[ast.AST]) -> Scope:
    """Return the scope of statements that stand in no function or class."""
    return _scope(Kind.MODULE, None, nodes)


def class_scope(node: ast.ClassDef, parent: Scope) -> Scope:
    """Return the scope of a class body."""
    return _scope(Kind.CLASS, parent, node.body)


def comprehension_scope(node: ComprehensionNode, parent: Scope) -> Scope:
    """Return the scope of everything in a comprehension but its first iterable."""
    return _scope(Kind.FUNCTION, parent, [generator.target for generator in node.generators])


def type_parameter_scope(names: Iterable[str], parent: Scope) -> Scope:
    """Return the scope between a generic class or function and the one around it."""
    return Scope(Kind.FUNCTION, parent, frozenset(names))


def args_of(node: FunctionNode) -> list[ast.arg]:
    """Return a function's parameters."""
    args = node.args
    starred = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred]


def defaults_of(node: FunctionNode) -> list[ast.expr]:
    """Return the defaults of a function's parameters."""
    return [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]


def imported_name(alias: ast.alias) -> str:
    """Return the variable that an import makes; `import a.b` makes `a`."""
    return alias.asname or alias.name.partition(".")[0]


def are_annotations_lazy(tree: ast.Module) -> bool:
    """Say whether annotations are evaluated only when asked for."""
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return sys.version_info >= (3, 14) or any(
        node.module == "__future__" and any(alias.name == "annotations" for alias in node.names)
        for node in imports
    )


def extends_property(decorator: ast.expr, name: str) -> bool:
    """Say whether `decorator` is `@name.setter` or the like on a method called `name`."""
    match decorator:
        case ast.Attribute(value=ast.Name(id=extended)):
            return extended == name
    return False


def _scope(kind: Kind, parent: Scope | None, nodes: Iterable[ast.AST], extra: Iterable[str] = ()) -> Scope:
    bindings = _Bindings()
    for node in nodes:
        bindings.visit(node)
    elsewhere = bindings.declared_global | bindings.declared_nonlocal
    return Scope(
        kind=kind,
        parent=parent,
        bound=frozenset(bindings.bound.union(extra) - elsewhere),
        declared_global=frozenset(bindings.declared_global),
    )
