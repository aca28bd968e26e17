"""Random notebooks in a real kernel with a session, beside a model of its ranks (`rank_model.py`)."""

from __future__ import annotations

import itertools
import json
import queue
import textwrap
import time
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import looked
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from lanes import slow
from looked import change_of, is_notebooks
from rank_model import VIEWS_SHARE, Rank, bound_in, cell

from nblaunch.protocol.reports import format_ranks

NAMES = ("a", "b", "c", "d", "e")
_numbers = itertools.count()
IMPORTS = "import functools, gc, types, looked, numpy as np, torch; from collections import deque"
_MODULES = ("functools", "gc", "types", "looked", "np", "torch", "deque")

# {x} is the name that is bound, {o} another name, {n} a number.
MADE = {
    "list": "{x} = [{n}]",
    "none": "{x} = None",
    "number": "{x} = {n} % 3",
    "dict": "{x} = {{'k': {n}}}",
    "namespace": "{x} = types.SimpleNamespace(k={n})",
    "set": "{x} = {{{n}}}",
    "deque": "{x} = deque([{n}])",
    "array": "{x} = np.arange(4.) + {n}",
    "tensor": "{x} = torch.arange(4.) + {n}",
    "parameter": "{x} = torch.nn.Parameter(torch.ones(2) * {n})",
    "module": "{x} = torch.nn.Linear(1, 1)\nfor p in {x}.parameters(): torch.nn.init.ones_(p)\ndel p",
    "function": "def {x}(): return {n}",
    "reader": "def {x}(): return {o}",
    "binder": "def {x}():\n    global {o}\n    {o} = [{n}]",
    "default": "def {x}(v=[{n}]):\n    v.append({n})\n    return v",
    "keyword default": "def {x}(*, v={{'k': {n}}}): return v, {o}",
    "lambda": "{x} = lambda: ({o}, {n})",
    "class": """
        class {x}:
            n = {n}
            def __init__(self, k={n}):
                self.k = k
                type(self).n += 1
            def get(self): return self.k
        """,
    "class of kinds": """
        class {x}:
            n = [{n}]
            def __init__(self): self.k = {n}
            def get(self): return self.n, self.p, self.s(), self.m()
            @property
            def p(self): return self.k
            @staticmethod
            def s(v=[{n}]):
                v.append(1)
                return v
            @classmethod
            def m(cls): return {o}
        """,
    "network": """
        class {x}(torch.nn.Module):
            scale = {n}
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.ones(1) * {n})
            def get(self): return self.w.item() * self.scale
        """,
    "counter": """
        def make(v):
            def get(): return v
            def {x}():
                nonlocal v
                v += 1
                return v
            return {x}, get
        {x}, {o} = make({n})
        del make
        """,
}
# What is made of another variable, by its kind.
OF = {
    "alias": (lambda _: True, "{x} = {o}"),
    "in a list": (lambda _: True, "{x} = [{o}, {n}]"),
    "in a dict": (lambda _: True, "{x} = {{'k': {o}}}"),
    "in an object": (lambda _: True, "{x} = types.SimpleNamespace(k={o})"),
    "in a tuple": (lambda _: True, "{x} = ({o}, {n})"),
    "in a partial": (lambda _: True, "{x} = functools.partial(looked.at, {o})"),
    "in a default": (lambda _: True, "def {x}(v={o}): return v"),
    "in a keyword default": (lambda _: True, "def {x}(*, v={o}): return v"),
    "in a class": (lambda _: True, "class {x}:\n    k = {o}\n    def get(self): return self.k"),
    "in a closure": (
        lambda _: True,
        "def make(v):\n    def {x}(): return v, {n}\n    return {x}\n{x} = make({o})\ndel make",
    ),
    "instance": (lambda o: isinstance(o, type) and is_notebooks(o), "{x} = {o}()"),
    "subclass": (
        lambda o: isinstance(o, type) and is_notebooks(o),
        "class {x}({o}):\n    def __init__(self):\n        super().__init__()\n        self.z = {n}",
    ),
    "method": (lambda o: is_notebooks(type(o)) and hasattr(o, "get"), "{x} = {o}.get"),
    "partial": (lambda o: isinstance(o, types.FunctionType), "{x} = functools.partial({o})"),
    "view of an array": (lambda o: isinstance(o, np.ndarray) and o.size > 1, "{x} = {o}[1:]"),
    "view": (lambda o: isinstance(o, torch.Tensor) and o.is_leaf and not o.requires_grad, "{x} = {o}[1:]"),
    "optimizer": (
        lambda o: isinstance(o, torch.nn.Parameter),
        "{x} = torch.optim.SGD([{o}], lr={n}, momentum=0.5)",
    ),
    "optimizer of a model": (
        lambda o: isinstance(o, torch.nn.Module),
        "{x} = torch.optim.SGD({o}.parameters(), lr={n}, momentum=0.5)",
    ),
}


def told(notice: str) -> tuple[str, str]:
    """Return the variable that a notice names, and what was done with it or which rank has which value."""
    name, _, done = notice.split()[:3]
    if notice.startswith(f"{name} differs between ranks"):
        done = notice.partition(": ")[2].partition(". ")[0]
    return name, done


class Notebook:
    """A notebook in a kernel with a session, and the model of both beside it."""

    def __init__(self, kernel: Any, world_size: int = 2) -> None:
        self.kernel = kernel
        self.variables: dict[str, Any] = {"__name__": "__main__"}
        self.ranks = [Rank() for _ in range(world_size)]
        self.kept: list[Any] = []
        self.number = 0
        self.waiting: list[str] = []
        self.bound_by: dict[str, str] = {}
        # What an earlier notebook was told under these names is of no concern here.
        self.names = {name: f"{name}{next(_numbers)}" for name in NAMES}
        old = "[each for each in globals() if each[0] in 'abcde' and each[1:].isdigit()]"
        gone = f"for _name in {old}: del globals()[_name]"
        self.ask(f"{gone}\ngc.collect();")
        self.ask(f"%%distributed\n{gone}\ngc.collect();")
        exec(IMPORTS, self.variables)  # noqa: S102 - as the kernel did
        for rank in self.ranks:
            exec(IMPORTS, rank.variables)  # noqa: S102 - as the ranks did
            rank.variables["gc"] = types.SimpleNamespace(collect=int)  # the model forgets by itself

    def follow(self, steps: Iterable[tuple[Any, ...]]) -> None:
        """Make all variables, and do these steps."""
        for name in self.names.values():
            self.make(name, "list", name)
        for step, *arguments in steps:
            getattr(self, step)(*(self.named(each) for each in arguments))

    # --- the kernel ---

    def ask(self, source: str, expression: str = "0") -> Any:
        """Run a cell in the kernel; return the value of an expression behind it."""
        wanted = {"it": f"__import__('json').dumps({expression})"}
        client = self.kernel.client
        request = client.execute(source, user_expressions=wanted, allow_stdin=False, stop_on_error=False)
        content = self.replied(request)
        assert content["status"] == "ok", f"{content['ename']}: {content['evalue']}"
        return json.loads(eval(content["user_expressions"]["it"]["data"]["text/plain"]))  # noqa: S307 - a string

    def replied(self, request: str) -> Any:
        """Wait for the reply to a request."""
        client = self.kernel.client
        deadline = time.monotonic() + 60
        while True:
            reply = client.get_shell_msg(timeout=deadline - time.monotonic())
            if reply["parent_header"].get("msg_id") == request:
                break
        with suppress(queue.Empty):
            while True:
                client.get_iopub_msg(timeout=0)
        return reply["content"]

    def flush(self) -> None:
        """Run what the notebook's own cells have gathered."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.ask("\n".join(waiting) + "\nNone")

    def here(self, source: str) -> None:
        """Run a cell in the notebook."""
        note(f"\n# notebook\n{source}")
        self.waiting.append(source)
        exec(source, self.variables)  # noqa: S102 - as a notebook does
        for rank in self.ranks:
            rank.anew |= bound_in(source)
        self.kept += self.variables.values()  # the model knows objects by their address

    def there(self, source: str, uses: set[str], only: int | None = None) -> None:
        """Run a cell on the ranks, and compare its values and its notices with the model's."""
        self.flush()
        line = "%%distributed --out res" + ("" if only is None else f" --ranks {only}")
        note(f"\n{line}\n{source}")
        taking = range(len(self.ranks)) if only is None else [only]
        notices = self.bring(uses, taking)
        expected = [cell(source, self.ranks[rank].variables) for rank in taking]
        found, warnings = self.ask(f"{line}\n{source}", "[list(res.values), list(res.warnings)]")
        assert found == expected
        assert sorted(map(told, warnings)) == notices
        self.forget(self.ranks[rank] for rank in taking)

    def bring(self, uses: set[str], taking: Iterable[int]) -> list[tuple[str, str]]:
        """Have the model's ranks take what a cell brings; return the notices that are due."""
        ranks = {number: self.ranks[number] for number in taking}
        own = {"__name__", "__builtins__", *_MODULES}
        used = {number: rank.reached(uses, self.variables) - own for number, rank in ranks.items()}
        pairs = [
            (rank, name, self.variables[name]) for number, rank in ranks.items() for name in used[number]
        ]
        notices = {(name, "assigned") for rank, name, value in pairs if rank.declines(name, value)}
        for rank, name, value in pairs:
            rank.use(name, value)
        notices |= {(name, what) for _, name, _ in pairs if (what := self.changed(name, used))}
        return sorted(notices)

    def forget(self, ranks: Iterable[Rank]) -> None:
        """Have ranks forget what nothing leads to."""
        gone = [copy for rank in ranks for copy in rank.forget()]
        # A class is in a cycle: it is gone once a collection has found it between two jobs.
        if any(isinstance(copy, type) for copy in gone):
            for _ in range(2):
                self.ask("%%distributed\ngc.collect();")

    def changed(self, name: str, used: Mapping[int, set[str]]) -> str:
        """Return what is told of a variable that ranks use, "" if it has not been changed in place."""
        users = [rank for rank, names in used.items() if name in names and not self.ranks[rank].has_own(name)]
        sent = {rank: self.ranks[rank].stale_version(name, self.variables[name]) for rank in users}
        older = [rank for rank, version in sent.items() if version is not None]
        if not older:
            return ""
        if all(version == sent[older[0]] for version in sent.values()):
            return "changed"
        of_version = [[each for each in older if sent[each] == sent[rank]] for rank in older]
        groups = [ranks for rank, ranks in zip(older, of_version, strict=True) if rank == ranks[0]]
        words = [
            f"{format_ranks(each)} {'another' if at else 'an'} older value" for at, each in enumerate(groups)
        ]
        current = [rank for rank in users if rank not in older]
        return ", ".join([*words, *([f"{format_ranks(current)} the notebook's"] if current else [])])

    def named(self, argument: Any) -> Any:
        """Return an argument of a step with this notebook's names."""
        if isinstance(argument, tuple):
            return tuple(map(self.named, argument))
        return self.names.get(argument, argument)

    def is_there(self, name: str) -> bool:
        return name in self.variables or all(rank.has(name) for rank in self.ranks)

    def fresh(self) -> int:
        self.number += 1
        return self.number

    # --- in the notebook ---

    def make(self, name: str, kind: str, other: str) -> None:
        source = textwrap.dedent(MADE[kind]).strip("\n")
        self.bound_by[name] = source.format(x=name, o=other, n=self.fresh())
        self.here(self.bound_by[name])

    def make_of(self, name: str, kind: str, other: str) -> None:
        fits, source = OF[kind]
        if other in self.variables and fits(self.variables[other]) and (VIEWS_SHARE or "array" not in kind):
            self.here(source.format(x=name, o=other, n=self.fresh()))

    def again(self, name: str) -> None:
        """Run the cell that bound a name again."""
        if name in self.variables and name in self.bound_by:
            self.here(self.bound_by[name])

    def change(self, name: str, n: int) -> None:
        if name in self.variables:
            source = change_of(name, self.variables[name], 10 * self.fresh() + n)
            if source:
                self.here(source)

    def call_here(self, name: str) -> None:
        if callable(self.variables.get(name)):
            self.here(f"looked.called({name});")

    def delete(self, name: str) -> None:
        if name in self.variables:
            self.here(f"del {name}")

    # --- on the ranks ---

    def look(self, names: tuple[str, ...], only: int | None = None) -> None:
        names = tuple(name for name in names if self.is_there(name))
        if names:
            self.there(f"gc.collect()\nlooked.at({', '.join(names)})", set(names), only)

    def call(self, name: str, only: int | None = None) -> None:
        if self.is_there(name) and all(callable(self.meant(name, rank)) for rank in self.ranks):
            self.there(f"gc.collect()\nlooked.called({name})", {name}, only)

    def step(self, name: str) -> None:
        if self.is_there(name) and all(
            isinstance(self.meant(name, rank), torch.optim.Optimizer) for rank in self.ranks
        ):
            grads = f"for p in {name}.param_groups[0]['params']: p.grad = torch.ones_like(p)\ndel p"
            self.there(f"{grads}\n{name}.step()\ngc.collect()\nlooked.at({name})", {name})

    def mutate(self, name: str, n: int, only: int | None = None) -> None:
        if self.is_there(name):
            number = 10 * self.fresh() + n
            sources = {change_of(name, self.meant(name, rank), number) for rank in self.ranks}
            if len(sources) == 1 and (source := sources.pop()):
                self.there(f"{source}\ngc.collect()\nNone", {name}, only)

    def meant(self, name: str, rank: Rank) -> Any:
        """Return what a cell finds under a name that the notebook or the rank has."""
        here = self.variables.get(name)
        same = name not in self.variables or rank.bound.get(name, rank) is here
        return rank.variables[name] if rank.has(name) and (same or rank.has_own(name)) else here

    def rebind(self, name: str, only: int | None = None) -> None:
        self.there(f"{name} = [{self.fresh()}]\ngc.collect()\nNone", set(), only)

    def drop(self, name: str) -> None:
        if all(rank.has(name) for rank in self.ranks):
            self.there(f"del {name}\nNone", {name})

    def push(self, name: str) -> None:
        if name in self.variables:
            self.flush()
            note(f"\n%distributed push {name}")
            self.ask(f"%distributed push {name}")
            for rank in self.ranks:
                rank.push(name, self.variables[name], self.variables)
            self.forget(self.ranks)

    def lose(self, name: str) -> None:
        """Use a variable in a cell whose variables do not all arrive: nothing of it has happened."""
        if name in self.variables:
            self.flush()
            source = f"%%distributed\n({name}, broken)"
            note(f"\nbroken = looked.Broken()\n{source}\ndel broken")
            self.ask("broken = looked.Broken()")
            with pytest.raises(AssertionError, match="ValueError"):
                self.ask(source)
            self.ask("del broken")


name = st.sampled_from(NAMES)
number = st.integers(0, 9)
rank = st.sampled_from([None, 0, 1])
steps = st.one_of(
    st.tuples(st.just("make"), name, st.sampled_from(list(MADE)), name),
    st.tuples(st.just("make_of"), name, st.sampled_from(list(OF)), name),
    st.tuples(st.just("make_of"), name, st.sampled_from(list(OF)), name),
    st.tuples(st.just("change"), name, number),
    st.tuples(st.just("again"), name),
    st.tuples(st.just("call_here"), name),
    st.tuples(st.just("delete"), name),
    st.tuples(st.just("look"), st.lists(name, min_size=1, max_size=3, unique=True).map(tuple), rank),
    st.tuples(st.just("call"), name, rank),
    st.tuples(st.just("step"), name),
    st.tuples(st.just("mutate"), name, number, rank),
    st.tuples(st.just("rebind"), name, rank),
    st.tuples(st.just("drop"), name),
    st.tuples(st.just("push"), name),
    st.tuples(st.just("lose"), name),
)


def prepare(kernel, line="-n 2"):
    """Start a session; what is there by now is left out when rubbish is collected."""
    tests = str(Path(looked.__file__).parent)
    kernel.ok(f"import sys; sys.path.insert(0, {tests!r})\n{IMPORTS}")
    kernel.ok(f"%distributed start {line}")
    kernel.ok(f"%%distributed\n{IMPORTS}\ngc.collect(); gc.freeze();")
    kernel.ok("gc.collect(); gc.freeze();")


@pytest.fixture(scope="module")
def kernel(module_kernel, place):
    prepare(module_kernel, place.line())
    yield module_kernel
    module_kernel.ok("%distributed stop")


def random_examples(count):
    return settings(
        max_examples=count,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [12, slow(2000)])
def test_random_notebooks_and_their_ranks_are_what_the_nine_rules_say(kernel, count):
    @random_examples(count)
    @given(st.lists(steps, min_size=1, max_size=20))
    def random_notebooks(notebook):
        follow(kernel, notebook)

    random_notebooks()


def follow(kernel, notebook):
    book = Notebook(kernel)
    book.follow(notebook)
    book.look(tuple(book.names.values()))
    names = [name for name in book.names.values() if name in book.variables]
    book.flush()
    assert book.ask("", f"looked.at({', '.join(names)})") == looked.at(
        *(book.variables[name] for name in names)
    )
