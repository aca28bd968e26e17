"""The scopes of a cell, and its data flow: whose variable a name is, and what the cell has defined so far."""

from __future__ import annotations

import ast
import enum
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ComprehensionNode: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Kind(enum.Enum):
    """How a scope looks names up; comprehensions and lists of type parameters do it as functions do."""

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
        """The code that runs when the function is called."""
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
    """Return whether annotations are evaluated lazily."""
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return sys.version_info >= (3, 14) or any(
        node.module == "__future__" and any(alias.name == "annotations" for alias in node.names)
        for node in imports
    )


def extends_property(decorator: ast.expr, name: str) -> bool:
    """Return whether `decorator` is `@name.setter` or the like on a method called `name`."""
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


# Data flow: what a cell has defined so far, followed through its branches, loops and exceptions.


@dataclass(frozen=True, slots=True)
class Flow:
    """The variables that the cell itself has defined at one point of it.

    `sure` are defined on every path to this point, `possible` on at least one; `functions` are the bodies
    that a variable may stand for. A `dead` point is never reached: joined with another flow it is ignored.
    """

    sure: frozenset[Variable] = frozenset()
    possible: frozenset[Variable] = frozenset()
    functions: frozenset[tuple[Variable, Body]] = frozenset()
    dead: bool = False

    def __or__(self, other: Flow) -> Flow:
        """Return the flow where two paths meet."""
        if self.dead or self is other:
            return other
        if other.dead:
            return self
        return Flow(
            sure=self.sure & other.sure,
            possible=self.possible | other.possible,
            functions=self.functions | other.functions,
        )

    def bodies(self, variable: Variable) -> list[Body]:
        """Return the bodies that may run when `variable` is called, in the order of the cell."""
        found = [body for known, body in self.functions if known == variable]
        return sorted(found, key=lambda body: (body.node.lineno, body.node.col_offset))

    def storing(self, variable: Variable, bodies: Iterable[Body] = ()) -> Flow:
        """Return the flow after `variable` is given a value.

        A function's own variables are never the notebook's, so only the bodies they may call are kept.
        """
        kept = self.deleting(variable).functions
        defined = frozenset[Variable]() if variable.scope.kind is Kind.FUNCTION else {variable}
        return replace(
            self,
            sure=self.sure | defined,
            possible=self.possible | defined,
            functions=kept | {(variable, body) for body in bodies},
        )

    def deleting(self, variable: Variable) -> Flow:
        """Return the flow after `del variable`."""
        return replace(
            self,
            sure=self.sure - {variable},
            possible=self.possible - {variable},
            functions=frozenset(known for known in self.functions if known[0] != variable),
        )

    def leaving(self, scope: Scope) -> Flow:
        """Return the flow without the variables of `scope`: they end with it."""
        return replace(
            self,
            sure=frozenset(variable for variable in self.sure if variable.scope is not scope),
            possible=frozenset(variable for variable in self.possible if variable.scope is not scope),
            functions=frozenset(known for known in self.functions if known[0].scope is not scope),
        )

    def covers(self, later: Flow) -> bool:
        """Return whether code that was followed from here needs nothing new when followed from `later`."""
        return (
            self.sure <= later.sure and self.possible <= later.possible and later.functions <= self.functions
        )

    def changed_as(self, before: Flow, after: Flow) -> Flow:
        """Return this flow after code that turned `before` into `after`."""
        return replace(
            self,
            sure=self.sure - (before.sure - after.sure),
            possible=self.possible | after.possible,
            functions=self.functions | (after.functions - before.functions),
        )


DEAD = Flow(dead=True)


class FlowVisitor(ast.NodeVisitor, ABC):
    """Visits a cell in the order in which it runs; `flow` is that of the node visited."""

    def __init__(self) -> None:
        self.flow = Flow()
        # Every flow since the last `try`, any of which an exception may leave.
        self._reached = Flow()
        self._breaks, self._continues, self._returns = DEAD, DEAD, DEAD

    @abstractmethod
    def store(self, name: str) -> None:
        """Note that `name` is given a value."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Note that `name` loses its value."""

    def visit_all(self, nodes: Iterable[ast.AST]) -> None:
        """Visit `nodes`, one after the other."""
        for node in nodes:
            self.visit(node)
            self._reached |= self.flow

    def visit_body(self, nodes: Iterable[ast.AST]) -> None:
        """Visit the body of a function; the flow continues where it returns."""
        outer, self._returns = self._returns, DEAD
        self.visit_all(nodes)
        self.flow |= self._returns
        self._returns = outer

    # Branches

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        always = _constant(node.test)
        if always is None:
            self._visit_branches(node.body, node.orelse)
        else:
            self.visit_all(node.body if always else node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._visit_branches([node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._visit_branches(node.values[1:], [])

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        ends = DEAD
        for case in node.cases:
            before = self.flow
            self.visit_all([case.pattern, *([case.guard] if case.guard else [])])
            # A pattern that did not match may have bound some of its names.
            unmatched = DEAD if _always_matches(case) else before | self.flow
            self.visit_all(case.body)
            ends |= self.flow
            self.flow = unmatched
        self.flow |= ends

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        self._capture(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._capture(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        self._capture(node.rest)

    def _capture(self, name: str | None) -> None:
        if name is not None:
            self.store(name)

    def _visit_branches(self, *branches: Iterable[ast.AST]) -> None:
        before, ends = self.flow, DEAD
        for branch in branches:
            self.flow = before
            self.visit_all(branch)
            ends |= self.flow
        self.flow = ends

    # Loops and jumps

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._visit_loop([node.target, *node.body], node.orelse)

    visit_AsyncFor = visit_For  # noqa: N815  # the name is ast's

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._visit_loop(node.body, node.orelse, endless=_constant(node.test) is True)

    def visit_Break(self, _node: ast.Break) -> None:
        self._breaks |= self.flow
        self.flow = DEAD

    def visit_Continue(self, _node: ast.Continue) -> None:
        self._continues |= self.flow
        self.flow = DEAD

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        self._returns |= self.flow
        self.flow = DEAD

    def visit_Raise(self, node: ast.Raise) -> None:
        self.generic_visit(node)
        self.flow = DEAD

    def _visit_loop(
        self, body: Iterable[ast.AST], orelse: Iterable[ast.AST], *, endless: bool = False
    ) -> None:
        outer = self._breaks, self._continues
        self._breaks, self._continues = DEAD, DEAD
        before = self.flow
        self.visit_all(body)
        breaks = self._breaks
        self.flow = DEAD if endless else before | self.flow | self._continues
        self._breaks, self._continues = outer
        self.visit_all(orelse)
        self.flow |= breaks

    # Exceptions

    def visit_Try(self, node: ast.Try) -> None:
        self._visit_try(node)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self._visit_try(node)

    def _visit_try(self, node: ast.Try | ast.TryStar) -> None:
        outer, self._reached = self._reached, self.flow
        self.visit_all(node.body)
        raised = self._reached
        self.visit_all(node.orelse)
        ends = self.flow
        for handler in node.handlers:
            self.flow = raised
            self.visit(handler)
            ends |= self.flow
        # `finally` is visited twice: here with an exception under way, then without.
        self.flow = self._reached
        self.visit_all(node.finalbody)
        self._reached |= outer
        self.flow = ends
        self.visit_all(node.finalbody)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        self._capture(node.name)
        self.visit_all(node.body)
        if node.name is not None:
            self.forget(node.name)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        self.visit_all(node.items)
        outer, self._reached = self._reached, self.flow
        self.visit_all(node.body)
        # Any context manager may swallow an exception. `suppress` certainly means to; any other one is taken
        # to do so if the block can end in no other way.
        if self.flow.dead or any(_suppresses(item) for item in node.items):
            self.flow |= self._reached
        self._reached |= outer

    visit_AsyncWith = visit_With  # noqa: N815  # the name is ast's


def _constant(test: ast.expr) -> bool | None:
    return bool(test.value) if isinstance(test, ast.Constant) else None


def _always_matches(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _suppresses(item: ast.withitem) -> bool:
    match item.context_expr:
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress")):
            return True
    return False
