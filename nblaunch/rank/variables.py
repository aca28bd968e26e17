"""The variables of a rank: what is its own, what came from the notebook, and which of the two counts."""

from __future__ import annotations

import ast
import contextlib
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from nblaunch.rank import shell

_MOST_NAMES = 10_000
_GIVEN = frozenset({"rank", "local_rank", "world_size", "device"})
_MISSING = object()
_CERTAIN = (
    ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
)
"""Statements that bind names wherever they are executed."""


def _stored(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (each.asname or each.name.partition(".")[0] for each in names)
        case ast.AnnAssign(value=None):
            pass
        case ast.Assign(targets=targets):
            for target in targets:
                yield from _names_in(target)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            yield from _names_in(target)


def _names_in(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


class Variables:
    """The globals of the cells that run here.

    In a rank that is kept, a variable that the rank's own code has bound is the rank's own: what the
    notebook has under that name does not replace it. One that came from the notebook, and was not bound
    anew since, is replaced by what comes next.
    """

    def __init__(self, *, kept: bool) -> None:
        """Nothing is the rank's own yet; `kept` says whether anything can be."""
        self._kept = kept
        self._came: dict[str, object] = {}
        self._hidden = frozenset(shell.namespace()) | _GIVEN

    def own(self) -> dict[str, Any]:
        """Return the variables that this rank's own code has bound."""
        return {
            name: value
            for name, value in shell.namespace().items()
            if name not in self._hidden and value is not self._came.get(name, _MISSING)
        }

    @contextlib.contextmanager
    def protected(self) -> Iterator[None]:
        """Keep what is the rank's own while a payload is loaded: functions bring the globals they use."""
        if not self._kept:
            yield
            return
        namespace = shell.namespace()
        own, before = self.own(), dict(namespace)
        yield
        for name, value in list(namespace.items()):
            if name in own:
                namespace[name] = own[name]
            elif name not in before or before[name] is not value:
                self._came[name] = value

    def bring(self, captured: Mapping[str, object]) -> None:
        """Take what a cell uses of the notebook's variables."""
        namespace = shell.namespace()
        own = self.own() if self._kept else {}
        for name, value in captured.items():
            if name not in own:
                namespace[name] = self._came[name] = value

    def bound_by(self, source: str) -> None:
        """Take note of what a cell that has run to its end has bound for certain.

        Also where it is the very object that came from the notebook: small numbers are all the same one.
        """
        for statement in ast.parse(source).body:
            if isinstance(statement, _CERTAIN):
                for name in _stored(statement):
                    self._came.pop(name, None)

    def push(self, given: Mapping[str, object]) -> None:
        """Take variables that the notebook has pushed: they are the rank's own from here on."""
        shell.namespace().update(given)
        for name in given:
            self._came.pop(name, None)

    def pull(self, names: tuple[str, ...]) -> tuple[object, ...]:
        """Return these variables. Raises `NameError` for one that is not there, with the nearest that is."""
        namespace = shell.namespace()
        for name in names:
            if name not in namespace:
                near = difflib.get_close_matches(name, self.names(), n=1)
                meant = f" Did you mean {near[0]!r}?" if near else ""
                msg = f"name {name!r} is not defined on this rank.{meant}"
                raise NameError(msg, name=name)
        return tuple(namespace[name] for name in names)

    def names(self) -> tuple[str, ...]:
        """Return the names of all variables, those of IPython's own left out."""
        shown = (name for name in shell.namespace() if name not in self._hidden and not name.startswith("__"))
        return tuple(sorted(shown)[:_MOST_NAMES])
