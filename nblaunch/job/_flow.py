"""What a cell has defined so far, followed through its branches, loops and exceptions."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nblaunch.job._scopes import Body, Kind, Scope, Variable

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Flow:
    """What the cell itself has defined at one point of it.

    `sure` is defined whichever way the cell came here, `possible` on at least one way; `functions`
    says which bodies a variable may stand for. A `dead` point is never reached: joined with
    another, the other is all that counts.
    """

    sure: frozenset[Variable] = frozenset()
    possible: frozenset[Variable] = frozenset()
    functions: frozenset[tuple[Variable, Body]] = frozenset()
    dead: bool = False

    def __or__(self, other: Flow) -> Flow:
        """Return what is known where the two ways meet."""
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
        """Return what may run when `variable` is called, in the order of the cell."""
        found = [body for known, body in self.functions if known == variable]
        return sorted(found, key=lambda body: (body.node.lineno, body.node.col_offset))

    def storing(self, variable: Variable, bodies: Iterable[Body] = ()) -> Flow:
        """Return the flow after `variable` is given a value.

        A function's own variables are never the notebook's, so only what they may call is kept.
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
        """Say whether code that was followed from here can want nothing new when run from `later`."""
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
    """Visits a cell in the order in which it runs; `flow` is what is defined at the node visited."""

    def __init__(self) -> None:
        self.flow = Flow()
        # Every state since the last `try`: where an exception may come from.
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
        """Visit the body of a function; the flow goes on where it returns."""
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
        # `finally` runs twice: here with an exception on its way, then on the way on.
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
        # Any context manager may swallow an exception. Only `suppress` surely wants to; of the others it
        # is believed where the block could not end in any other way.
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
