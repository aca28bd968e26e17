"""The doors through which code gets to ranks. One test body goes through all of them.

By default that is a session, where a job takes milliseconds; CI also takes fresh ranks, by cell and by `run`.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from lanes import sampled

import nblaunch

RANKS = 2

_BARE = """
for name in set(globals()) - kept_by_the_tests:
    del globals()[name]
"""

_JOB = """
import os
rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
"""


class Doors:
    """`door(body, setup)`: run `setup` in a notebook and `body` on two ranks; return the values, as JSON."""

    def __call__(self, body: str, setup: str = "") -> Any:
        values = self.values(textwrap.dedent(body), textwrap.dedent(setup))
        return json.loads(json.dumps(values, default=repr))

    def values(self, body: str, setup: str) -> list[Any]:
        raise NotImplementedError


class SessionDoor(Doors):
    """`Session.cell`; the ranks are shared by the tests of a module, and bare before each use."""

    def __init__(self, session: nblaunch.Session) -> None:
        self._session = session
        session.cell("import sys; print(); print(file=sys.stderr)")  # opens the files that it keeps open
        session.cell("kept_by_the_tests = {*globals(), 'kept_by_the_tests', 'name'}", namespace={})

    def values(self, body: str, setup: str) -> list[Any]:
        self._session.cell(_BARE, namespace={})
        return list(self._session.cell(body, namespace=notebook(setup)).values)


class CellDoor(Doors):
    """`%%distributed` on fresh ranks, in a kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def values(self, body: str, setup: str) -> list[Any]:
        self._kernel.ok(setup)
        self._kernel.ok(f"%%distributed -n {RANKS} --out res\n{body}")
        values = self._kernel.value("res.values")
        self._kernel.forget()
        return list(values)


class RunDoor(Doors):
    """`run`, of a function with the cell's statements, whose variables are those of its module."""

    def values(self, body: str, setup: str) -> list[Any]:
        namespace = notebook(setup)
        try:
            exec(compile(function(body), "<job>", "exec"), namespace)  # noqa: S102
        except SyntaxError:
            pytest.skip("only IPython understands this")
        return list(nblaunch.run(namespace["job"], nproc=RANKS).values)


def notebook(source: str) -> dict[str, Any]:
    """Return the variables of a notebook that has run `source`."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(source, variables)  # noqa: S102 - as a notebook does
    return variables


def function(body: str) -> ast.Module:
    """Return `async def job()`: the statements of a cell, whose last expression is returned."""
    statements = [*ast.parse(_JOB).body, *compile(body, "<cell>", "exec", _CELL).body]
    if isinstance(last := statements[-1], ast.Expr):
        statements[-1] = ast.Return(last.value)
    whole = ast.parse("async def job(): pass")
    job = whole.body[0]
    assert isinstance(job, ast.AsyncFunctionDef)
    assigned = {
        each.id
        for statement in statements
        for each in ast.walk(statement)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    job.body = [ast.Global(sorted(assigned)), *statements]
    return ast.fix_missing_locations(whole)


_CELL = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def opened(name: str, module_kernel: Callable[[], Any]) -> Iterator[Doors]:
    """Open a door, and close it."""
    if name == "session":
        with nblaunch.Session(RANKS, name="door") as session:
            yield SessionDoor(session)
    else:
        yield CellDoor(module_kernel()) if name == "cell" else RunDoor()


SESSION, CELL, RUN = sampled(["session", "cell", "run"])


@pytest.fixture(scope="module", params=[SESSION, CELL, RUN])
def door(request):
    """Give `door(body, setup="")`, which returns what `body` is worth on each of two ranks."""
    yield from opened(request.param, lambda: request.getfixturevalue("module_kernel"))


@pytest.fixture(scope="module", params=[SESSION, CELL])
def cell_door(request):
    """Give the doors for cells: what is said of cells only, and not of functions."""
    yield from opened(request.param, lambda: request.getfixturevalue("module_kernel"))


@pytest.fixture(scope="module", params=[SESSION, RUN])
def call(request):
    """Give `call(function, *args)`, which returns what a function returns on each of two ranks."""

    def called(run: Callable[..., Any], function: Callable[..., Any], *args: Any) -> list[Any]:
        return list(run(function, args).values)

    if request.param == "session":
        with nblaunch.Session(RANKS, name="call") as session:
            session.cell("import sys; print(); print(file=sys.stderr)")  # opens the files that it keeps open
            yield partial(called, session.run)
    else:
        yield partial(called, partial(nblaunch.run, nproc=RANKS))
