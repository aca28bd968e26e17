"""The doors through which code gets to ranks. One test body goes through all of them.

By default that is a session, where a job takes milliseconds; CI also takes fresh ranks, by cell and by `run`,
and a session whose two ranks are on two nodes. What is said of sessions only, and of all of them, has a
`place`: this machine, or two nodes.
"""

from __future__ import annotations

import ast
import json
import platform
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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


@dataclass(frozen=True)
class Place:
    """Where the ranks of sessions are: on this machine, or half of them on each of two nodes."""

    nodes: int = 1

    def __call__(self, ranks: int = RANKS, **options: Any) -> nblaunch.Session:
        """Open a session."""
        return nblaunch.Session(**self.options(ranks), **options)

    def options(self, ranks: int = RANKS) -> dict[str, Any]:
        """Return what gives a session so many ranks here."""
        if self.nodes == 1:
            return {"nproc": ranks}
        return {"nproc": ranks // self.nodes, "nnodes": self.nodes, "on": "process"}

    def line(self, ranks: int = RANKS) -> str:
        """Return the same for a line of `%distributed start`."""
        if self.nodes == 1:
            return f"-n {ranks}"
        return f"-n {ranks // self.nodes} --nnodes {self.nodes} --on process"

    def named(self, *ranks: int, of: int = RANKS) -> str:
        """Return how reports name some of these ranks."""
        if self.nodes == 1:
            return _numbers(ranks)
        each = of // self.nodes
        by_node = [[rank for rank in ranks if rank // each == number] for number in range(self.nodes)]
        return ", ".join(
            f"{_numbers(found)} on {platform.node()}-{number + 1}"
            for number, found in enumerate(by_node)
            if found
        )


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


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
    if name in PLACES:
        with PLACES[name](name="door") as session:
            yield SessionDoor(session)
    else:
        yield CellDoor(module_kernel()) if name == "cell" else RunDoor()


ON_NODES = {"test_session_cells.py"}
"""What CI runs on two nodes, too, but for what is marked `once`; the rest is left to the slow lane."""


def pytest_collection_modifyitems(items):
    for item in items:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        given = {each for each in params if isinstance(each, str)}
        if item.path.parent == Path(__file__).parent and "nodes" in given and item.path.name not in ON_NODES:
            item.add_marker("slow")


PLACES = {"session": Place(), "nodes": Place(2)}
SESSION, CELL, RUN, NODES = sampled(["session", "cell", "run", "nodes"])


@pytest.fixture(scope="module", params=sampled(["machine", "nodes"]))
def place(request):
    """Give `place(ranks, **options)`, which opens a session here, and in CI also on two nodes."""
    return Place(1 if request.param == "machine" else 2)


@pytest.fixture(scope="module", params=[SESSION, CELL, RUN, NODES])
def door(request):
    """Give `door(body, setup="")`, which returns what `body` is worth on each of two ranks."""
    yield from opened(request.param, lambda: request.getfixturevalue("module_kernel"))


@pytest.fixture(scope="module", params=[SESSION, CELL, NODES])
def cell_door(request):
    """Give the doors for cells: what is said of cells only, and not of functions."""
    yield from opened(request.param, lambda: request.getfixturevalue("module_kernel"))


@pytest.fixture(scope="module", params=[SESSION, RUN, NODES])
def call(request):
    """Give `call(function, *args)`, which returns what a function returns on each of two ranks."""

    def called(run: Callable[..., Any], function: Callable[..., Any], *args: Any) -> list[Any]:
        return list(run(function, args).values)

    if request.param in PLACES:
        with PLACES[request.param](name="call") as session:
            session.cell("import sys; print(); print(file=sys.stderr)")  # opens the files that it keeps open
            yield partial(called, session.run)
    else:
        yield partial(called, partial(nblaunch.run, nproc=RANKS))
