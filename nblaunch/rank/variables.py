"""The variables of a rank: what is its own, what came from the notebook, and which of the two counts."""

from __future__ import annotations

import ast
import difflib
import pickle
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from nblaunch._protocol import Objects
from nblaunch.job import payload
from nblaunch.job.identity import ObjectTable
from nblaunch.rank import shell

_MOST_NAMES = 10_000
_GIVEN = frozenset({"rank", "local_rank", "world_size", "device"})
_REBOUND = object()
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
    """The globals of the cells that run here, and the objects that came from the notebook.

    In a rank that stays, a variable that the rank's own code has bound is the rank's own: what the notebook
    has under that name does not replace it. One that came from the notebook, and was not bound again since,
    is replaced by what comes next. Nothing else that is here changes because something comes.
    """

    def __init__(self, *, kept: bool) -> None:
        """Nothing is the rank's own yet; `kept` says whether anything can be."""
        self._kept = kept
        self._objects = ObjectTable()
        self._came: dict[str, object] = {}
        """Variables from the notebook, with the object that came; `_REBOUND` once there is another."""
        self._received: set[str] = set()
        """All names that ever came, whatever has become of them."""
        self._between_jobs: list[Any] = []
        """What the notebook believes to be here stays until the next job has found it."""
        self._hidden = frozenset(shell.namespace()) | _GIVEN

    # --- what comes ------------------------------------------------------------------------------------

    def found(self, key: int) -> Any:
        """Return an object that came earlier. Raises `UnpicklingError` if it is gone."""
        obj = self._objects.get(key)
        if obj is None:
            msg = "an object that the notebook sent earlier is no longer on this rank; push it again"
            raise pickle.UnpicklingError(msg)
        return obj

    def keep(self, loaded: payload.Loaded, objects: Objects) -> None:
        """Take the objects that have arrived; can be begun again where it was interrupted."""
        self.release()  # a payload that has been loaded has found what it refers to
        for fill in loaded.fills:
            fill()
        if objects.keys:
            places, keys = array("I", objects.places), array("Q", objects.keys)
            memo = loaded.places()
            for place, key in zip(places, keys, strict=True):
                self._objects.add(memo[place], key)
        self._objects.discard(array("Q", objects.gone))

    def bring(self, brought: Mapping[str, object]) -> None:
        """Take variables of the notebook, but for those that are the rank's own."""
        namespace = shell.namespace()
        for name, value in brought.items():
            if not self._kept or not self._is_own(name):
                namespace[name] = self._came[name] = value
                self._received.add(name)

    def _is_own(self, name: str) -> bool:
        namespace = shell.namespace()
        return name in namespace and (
            name not in self._came or self._came[name] is _REBOUND or namespace[name] is not self._came[name]
        )

    def push(self, given: Mapping[str, object]) -> None:
        """Take variables that the notebook has pushed, whatever is here."""
        shell.namespace().update(given)
        self._came.update(given)
        self._received.update(given)

    def bound_by(self, source: str, line: int | None = None) -> None:
        """Note what a cell has bound for certain: all of its statements, or those before the one at `line`.

        Also where it is the very object that came from the notebook: small numbers are all the same one.
        """
        for statement in ast.parse(source).body:
            if line is not None and (statement.end_lineno or 0) >= line:
                return
            if isinstance(statement, _CERTAIN):
                for name in _stored(statement):
                    if name in self._came:
                        self._came[name] = _REBOUND

    def settle(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """After a job, return which variables the rank has bound itself, and which objects it has lost."""
        self._let_go()
        self.release()
        lost = self._objects.lost()
        self._between_jobs = self._objects.alive()
        return tuple(sorted(filter(self._is_own, self._received))), lost

    def release(self) -> None:
        """Keep nothing for the notebook's sake: from here on cells decide what stays."""
        self._between_jobs = []

    def _let_go(self) -> None:
        """Keep nothing that came and is no longer there under its name."""
        namespace = shell.namespace()
        for name, value in list(self._came.items()):
            if name not in namespace:
                del self._came[name]
            elif namespace[name] is not value:
                self._came[name] = _REBOUND

    # --- what is there ---------------------------------------------------------------------------------

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


class Arrival:
    """Variables that functions bring: there while all is unpickled, and kept only if all of it arrives.

    What unpickles after a function may call it.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.offered: dict[str, object] = {}
        self._filled: list[str] = []

    def offer(self, offered: Mapping[str, object]) -> None:
        """Fill in what the rank lacks; the rest is decided when all has arrived."""
        namespace = shell.namespace()
        self.offered.update(offered)
        for name, value in offered.items():
            if name not in namespace:
                self._filled.append(name)
                namespace[name] = value

    def undo(self) -> None:
        """Take back what was filled in."""
        namespace = shell.namespace()
        while self._filled:
            namespace.pop(self._filled.pop(), None)
