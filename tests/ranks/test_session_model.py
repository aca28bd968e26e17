"""Random notebooks beside a plain-Python model of what a session's ranks know."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nblaunch

NAMES = ("a", "b", "c")
READS = {"f": ("a", "b"), "g": ("c",)}
"""Functions of the notebook, and the variables that each of them reads."""

SHAPE = '''
def shape(*roots):
    """Return the structure of objects, numbered where met first: equal shapes are equal sharing."""
    seen = {}
    def of(obj):
        if isinstance(obj, int):
            return obj
        if id(obj) in seen:
            return f"#{seen[id(obj)]}"
        seen[id(obj)] = len(seen)
        inside = obj if isinstance(obj, list) else list((obj if isinstance(obj, dict) else vars(obj)).items())
        if not isinstance(obj, list):
            inside = [each for pair in inside for each in pair if not isinstance(each, str)]
        return [type(obj).__name__, *map(of, inside)]
    return str([of(root) for root in roots])
'''
_made: dict[str, Any] = {}
exec(SHAPE, _made)  # noqa: S102 - the same text runs on the ranks
shape = _made["shape"]


def inside(obj: Any) -> list[Any]:
    """Return what an object holds."""
    if isinstance(obj, list):
        return list(obj)
    return list(obj.values()) if isinstance(obj, dict) else list(vars(obj).values())


def reached(roots: Iterator[Any]) -> dict[int, Any]:
    """Return all objects that these lead to, numbers left out."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        obj = waiting.pop()
        if not isinstance(obj, int) and id(obj) not in found:
            found[id(obj)] = obj
            waiting += inside(obj)
    return found


def marks(obj: Any) -> list[Any]:
    """Return what an object holds, objects by identity."""
    return [each if isinstance(each, int) else ("object", id(each)) for each in inside(obj)]


class ModelRank:
    """What one rank has. Sending is copying, with one memory of what has been copied already."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        self.came: dict[str, Any] = {}
        self.bound: dict[str, Any] = {}
        self.copies: dict[int, Any] = {}
        self.sent: dict[int, tuple[Any, list[Any]]] = {}

    def has_own(self, name: str) -> bool:
        return name in self.variables and self.variables[name] is not self.came.get(name, self)

    def declines(self, name: str, value: Any) -> bool:
        return name in self.bound and self.bound[name] is not value and self.has_own(name)

    def use(self, name: str, value: Any) -> None:
        """Bring a variable of the notebook's, if that is due."""
        if self.declines(name, value):
            self.bound[name] = value
        elif name not in self.variables or (name in self.bound and self.bound[name] is not value):
            self.bring(name, value)

    def bring(self, name: str, value: Any) -> None:
        new = [obj for obj in reached(iter([value])).values() if id(obj) not in self.copies]
        self.variables[name] = self.came[name] = copy.deepcopy(value, self.copies)
        self.bound[name] = value
        self.note(new)

    def note(self, objects: list[Any]) -> None:
        self.sent |= {id(obj): (obj, marks(obj)) for obj in objects}

    def is_stale(self, name: str, value: Any) -> bool:
        """Whether the notebook has changed this object in place, and the rank uses what came."""
        if self.bound.get(name, self) is not value or self.has_own(name) or name not in self.variables:
            return False
        known = (self.sent[key] for key in reached(iter([value])) if key in self.sent and key in self.copies)
        return any(marks(obj) != then for obj, then in known)

    def push(self, name: str, value: Any) -> None:
        objects = list(reached(iter([value])).values())
        for obj in objects:
            copied = self.copies.get(id(obj))
            if isinstance(copied, list):
                copied[:] = [copy.deepcopy(each, self.copies) for each in obj]
            elif copied is not None:
                target, source = (copied, obj) if isinstance(obj, dict) else (vars(copied), vars(obj))
                fresh = {key: copy.deepcopy(each, self.copies) for key, each in source.items()}
                target.clear()
                target.update(fresh)
        self.bring(name, value)
        self.note(objects)

    def forget(self) -> None:
        """Copies that nothing on the rank leads to are gone."""
        alive = reached(iter(self.variables.values()))
        self.copies = {key: each for key, each in self.copies.items() if id(each) in alive}


class Notebook:
    """A notebook with a session, and the model of its ranks beside it."""

    def __init__(self, session: nblaunch.Session) -> None:
        self.session = session
        self.variables: dict[str, Any] = {"__name__": "__main__"}
        self.ranks = [ModelRank(), ModelRank()]
        self.kept: list[Any] = []
        self.number = 0
        exec(SHAPE, self.variables)  # noqa: S102 - a cell of this notebook
        for name in READS:
            self.define(name)
        session.cell(
            "for _name in ('a', 'b', 'c', 'f', 'g', 'shape'): globals().pop(_name, None)", namespace={}
        )
        # Whatever an earlier notebook was told under these names is of no concern here.
        session._live._knowledge.close()
        session._live._knowledge._attempt = -1
        session.cell("None", namespace=self.variables)

    def fresh(self) -> int:
        self.number += 1
        return self.number

    # --- in the notebook ---

    def bind(self, name: str, kind: str) -> None:
        made = {
            "list": lambda n: [n],
            "dict": lambda n: {"k": n},
            "box": lambda n: types.SimpleNamespace(k=n),
        }
        self.keep(name, made[kind](self.fresh()))

    def alias(self, name: str, other: str) -> None:
        if other in self.variables:
            self.keep(name, self.variables[other])

    def nest(self, name: str, other: str) -> None:
        if other in self.variables:
            self.keep(name, [self.variables[other], self.fresh()])

    def keep(self, name: str, value: Any) -> None:
        self.variables[name] = value
        self.kept.append(value)  # the model knows objects by their address

    def change(self, name: str) -> None:
        value = self.variables.get(name)
        if isinstance(value, list):
            value.append(self.fresh())
        elif isinstance(value, dict):
            value["k"] = self.fresh()
        elif value is not None:
            value.k = self.fresh()

    def delete(self, name: str) -> None:
        self.variables.pop(name, None)

    def define(self, name: str) -> None:
        source = f"def {name}(): return shape({', '.join(READS[name])})"
        exec(source, self.variables)  # noqa: S102 - a cell of this notebook

    # --- on the ranks ---

    def use(self, names: tuple[str, ...], source: str, only: int | None = None, *, check: bool = True) -> Any:
        """Run a cell that uses variables; bring them to the model, and compare the notices."""
        ranks = range(2) if only is None else [only]
        taking = [self.ranks[rank] for rank in ranks]
        known = [name for name in names if name in self.variables]
        declined = {name for name in known for rank in taking if rank.declines(name, self.variables[name])}
        if check:
            for rank in taking:
                for name in known:
                    rank.use(name, self.variables[name])
        stale = {name for name in known for rank in taking if rank.is_stale(name, self.variables[name])}
        result = self.session.cell(source, namespace=self.variables, ranks=list(ranks), check=check)
        noticed = {text.split()[0] for text in result.warnings}
        if check:
            assert noticed & set(NAMES) == declined | stale
        return result

    def look(self, names: tuple[str, ...], only: int | None = None) -> None:
        names = tuple(name for name in names if self.is_there(name))
        if names:
            result = self.use(names, f"shape({', '.join(names)})", only)
            ranks = range(2) if only is None else [only]
            for rank in ranks:
                assert result[rank] == shape(*(self.ranks[rank].variables[name] for name in names))

    def is_there(self, name: str) -> bool:
        return name in self.variables or all(name in rank.variables for rank in self.ranks)

    def call(self, function: str) -> None:
        if all(self.is_there(name) for name in READS[function]):
            result = self.use(READS[function], f"{function}()")
            for rank, each in enumerate(self.ranks):
                assert result[rank] == shape(*(each.variables[name] for name in READS[function]))

    def mutate(self, name: str) -> None:
        if not self.is_there(name):
            return
        number = self.fresh()
        self.use(
            (name,),
            f"{name}.append({number}) if isinstance({name}, list) else "
            f"{name}.update(k={number}) if isinstance({name}, dict) else setattr({name}, 'k', {number})",
        )
        for rank in self.ranks:
            value = rank.variables[name]
            if isinstance(value, list):
                value.append(number)
            elif isinstance(value, dict):
                value["k"] = number
            else:
                value.k = number

    def rebind(self, name: str) -> None:
        number = self.fresh()
        self.session.cell(f"{name} = [{number}]\nNone", namespace=self.variables)
        for rank in self.ranks:
            rank.variables[name] = [number]

    def drop(self, name: str) -> None:
        self.session.cell(f"globals().pop('{name}', None); None", namespace=self.variables)
        for rank in self.ranks:
            rank.variables.pop(name, None)
            rank.came.pop(name, None)

    def push(self, name: str) -> None:
        if name in self.variables:
            self.session.push({name: self.variables[name]})
            for rank in self.ranks:
                rank.push(name, self.variables[name])

    def lose(self, name: str) -> None:
        """Use a variable in a cell whose variables do not all arrive: nothing of it has happened."""
        if name in self.variables:
            self.variables["broken"] = Broken()
            result = self.use((name,), f"({name}, broken)", check=False)
            assert result.root_cause.type == "builtins.ValueError"
            del self.variables["broken"]


class Broken:
    """Can be sent, and cannot be read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


name = st.sampled_from(NAMES)
steps = st.one_of(
    st.tuples(st.just("bind"), name, st.sampled_from(["list", "dict", "box"])),
    st.tuples(st.just("alias"), name, name),
    st.tuples(st.just("nest"), name, name),
    st.tuples(st.just("change"), name),
    st.tuples(st.just("delete"), name),
    st.tuples(st.just("define"), st.sampled_from(sorted(READS))),
    st.tuples(st.just("look"), st.lists(name, min_size=1, max_size=3, unique=True).map(tuple)),
    st.tuples(st.just("look"), st.tuples(name), st.sampled_from([0, 1])),
    st.tuples(st.just("call"), st.sampled_from(sorted(READS))),
    st.tuples(st.just("mutate"), name),
    st.tuples(st.just("rebind"), name),
    st.tuples(st.just("drop"), name),
    st.tuples(st.just("push"), name),
    st.tuples(st.just("lose"), name),
)


@pytest.fixture(scope="module")
def session(place):
    with place(2, display=False) as opened:
        yield opened


def examples(count):
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@examples(100 if os.environ.get("CI") else 25)
@given(st.lists(steps, min_size=1, max_size=14))
def test_a_random_notebook_and_its_ranks_are_what_the_nine_points_say(session, notebook):
    follow(session, notebook)


@pytest.mark.slow
@examples(2000)
@given(st.lists(steps, min_size=1, max_size=14))
def test_2000_random_notebooks_and_their_ranks_are_what_the_nine_points_say(session, notebook):
    follow(session, notebook)


def follow(session, notebook):
    book = Notebook(session)
    for name in NAMES:
        book.bind(name, "list")
    for step, *arguments in notebook:
        getattr(book, step)(*arguments)
        for rank in book.ranks:
            rank.forget()
    book.look(NAMES)
