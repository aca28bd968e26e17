"""The scopes of a cell, and its data flow: whose variable a name is, and what the cell has defined so far."""

from __future__ import annotations

import ast
import enum
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ComprehensionNode: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class ScopeKind(enum.Enum):
    """How a scope looks names up; comprehensions and lists of type parameters do it as functions do."""

    MODULE = enum.auto()
    FUNCTION = enum.auto()
    CLASS = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class LexicalScope:
    """A stretch of the cell with variables of its own."""

    kind: ScopeKind
    parent: LexicalScope | None = None
    bound: frozenset[str] = frozenset()
    declared_global: frozenset[str] = frozenset()

    @property
    def module(self) -> LexicalScope:
        """The outermost scope: the notebook's own variables."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def owner(self, name: str) -> LexicalScope:
        """Return the scope whose variable `name` is when it is written in this one."""
        scope: LexicalScope | None = self
        while scope is not None:
            if scope is self or scope.kind is ScopeKind.FUNCTION:
                if name in scope.declared_global:
                    break
                if name in scope.bound:
                    return scope
            scope = scope.parent
        return self.module


@dataclass(frozen=True, slots=True)
class Variable:
    """A name and the scope that it belongs to."""

    scope: LexicalScope
    name: str


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a function or lambda of the cell: code that runs later, or never."""

    node: FunctionNode
    scope: LexicalScope

    @property
    def nodes(self) -> Sequence[ast.AST]:
        return [self.node.body] if isinstance(self.node, ast.Lambda) else self.node.body


def scope_of(node: ast.AST, parent: LexicalScope | None = None) -> LexicalScope:
    """Return the scope of a module, a class body, a function's body or a comprehension.

    That of a comprehension is all of it but its first iterable.
    """
    match node:
        case ast.Module(body=body):
            return _scope(ScopeKind.MODULE, parent, body)
        case ast.ClassDef(body=body):
            return _scope(ScopeKind.CLASS, parent, body)
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            return _scope(ScopeKind.FUNCTION, parent, [*args_of(node), *body])
        case ast.Lambda(body=body):
            return _scope(ScopeKind.FUNCTION, parent, [*args_of(node), body])
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return _scope(ScopeKind.FUNCTION, parent, [generator.target for generator in node.generators])
    raise TypeError(node)


def _scope(kind: ScopeKind, parent: LexicalScope | None, nodes: Iterable[ast.AST]) -> LexicalScope:
    """Collect the names that `nodes` bind, leaving the scopes inside them out."""
    bound: set[str] = set()
    declared_global: set[str] = set()
    declared_nonlocal: set[str] = set()
    waiting = [(node, False) for node in nodes]
    while waiting:
        node, in_comprehension = waiting.pop()
        in_comprehension |= isinstance(node, ComprehensionNode)
        match node:
            case ast.Global(names=names):
                declared_global.update(names)
            case ast.Nonlocal(names=names):
                declared_nonlocal.update(names)
            case ast.NamedExpr(target=ast.Name(id=name)):
                bound.add(name)  # inside a comprehension, too: `:=` binds in the scope around it
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if not in_comprehension:
                bound.add(name)
            case ast.arg(arg=name):
                bound.add(name)
            case ast.alias():
                bound.add(imported_name(node))
            case (
                ast.FunctionDef(name=str(name))
                | ast.AsyncFunctionDef(name=str(name))
                | ast.ClassDef(name=str(name))
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                bound.add(name)
        waiting += [(child, in_comprehension) for child in _in_same_scope(node)]
    return LexicalScope(
        kind, parent, frozenset(bound - declared_global - declared_nonlocal), frozenset(declared_global)
    )


def _in_same_scope(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [*node.decorator_list, *defaults_of(node)]
        case ast.ClassDef():
            return [*node.decorator_list, *node.bases, *node.keywords]
        case ast.Lambda():
            return defaults_of(node)
        case ast.arg():
            return ()
    return ast.iter_child_nodes(node)


def args_of(node: FunctionNode) -> list[ast.arg]:
    args = node.args
    starred = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred]


def defaults_of(node: FunctionNode) -> list[ast.expr]:
    return [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]


def imported_name(alias: ast.alias) -> str:
    """Return the variable that an import makes; `import a.b` makes `a`."""
    return alias.asname or alias.name.partition(".")[0]


def are_annotations_lazy(tree: ast.Module) -> bool:
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
        defined = frozenset[Variable]() if variable.scope.kind is ScopeKind.FUNCTION else {variable}
        return replace(
            self,
            sure=self.sure | defined,
            possible=self.possible | defined,
            functions=kept | {(variable, body) for body in bodies},
        )

    def deleting(self, variable: Variable) -> Flow:
        return replace(
            self,
            sure=self.sure - {variable},
            possible=self.possible - {variable},
            functions=frozenset(known for known in self.functions if known[0] != variable),
        )

    def leaving(self, scope: LexicalScope) -> Flow:
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
        """Record that `name` is given a value."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Record that `name` loses its value."""

    def visit_all(self, nodes: Iterable[ast.AST]) -> None:
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

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        self.generic_visit(node)
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name is not None:
            self.store(name)

    visit_MatchStar = visit_MatchAs  # noqa: N815  # the names are ast's
    visit_MatchMapping = visit_MatchAs  # noqa: N815

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
        outer, before = (self._breaks, self._continues), self.flow
        self._breaks, self._continues = DEAD, DEAD
        self.visit_all(body)
        breaks = self._breaks
        self.flow = DEAD if endless else before | self.flow | self._continues
        self._breaks, self._continues = outer
        self.visit_all(orelse)
        self.flow |= breaks

    # Exceptions

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
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

    visit_TryStar = visit_Try  # noqa: N815  # the name is ast's

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is None:
            self.visit_all(node.body)
        else:
            self.store(node.name)
            self.visit_all(node.body)
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
