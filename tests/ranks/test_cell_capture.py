"""A cell finds on its ranks what it uses of the notebook, as copies; what cannot be sent is named."""

from __future__ import annotations

import re

import pytest
from lanes import sampled

pytestmark = pytest.mark.oldest


def on_ranks(kernel, setup, body, ranks=2):
    """Run `setup` in the notebook and `body` on ranks; return the values."""
    kernel.ok(setup)
    kernel.ok(f"%%distributed -n {ranks} --out res\n{body}")
    return kernel.value("res.values")


# --- what travels ----------------------------------------------------------------------------------


USES = {
    "variables": ("x, y = 3, [1, {'a': 2}]", "x + len(y) + y[1]['a'] + rank", [7, 8]),
    "a function": ("def f(a, b=2, *, c=3): return a + b + c", "f(rank)", [5, 6]),
    "what a function uses": (
        """
        def f(): return g() + 1
        def g(): return h * 2
        h = 10
        """,
        "f() + rank",
        [21, 22],
    ),
    "functions that call each other": (
        """
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        """,
        "even(4)",
        [True, True],
    ),
    "a lambda": ("f = lambda x: x * k\nk = 4", "f(rank)", [0, 4]),
    "a closure": (
        """
        def outer(k):
            def inner(x): return x + k + m
            return inner
        m = 1
        f = outer(10)
        """,
        "f(rank)",
        [11, 12],
    ),
    "a partial": (
        """
        import functools
        def f(a, b): return a - b
        g = functools.partial(f, b=1)
        """,
        "g(rank)",
        [-1, 0],
    ),
    "a decorated function": (
        """
        import functools
        def twice(f):
            @functools.wraps(f)
            def g(*a): return f(*a) * 2
            return g
        @twice
        def f(x): return x + 1
        """,
        "f(rank)",
        [2, 4],
    ),
    "a function with a cache": (
        """
        import functools
        @functools.lru_cache
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        """,
        "fib(20), fib.cache_info().hits",
        [[6765, 18]] * 2,
    ),
    "an endless cache": (
        """
        import functools
        @functools.cache
        def f(x): return [x]
        """,
        "f(rank) is f(rank)",
        [True, True],
    ),
    "a cached property": (
        """
        import functools
        class A:
            @functools.cached_property
            def p(self): return [1]
        a = A()
        """,
        "a.p is a.p and a.p",
        [[1], [1]],
    ),
    "a function by type": (
        """
        import functools
        @functools.singledispatch
        def f(x): return "any"
        @f.register
        def _(x: int): return "int"
        """,
        "f(rank), f('')",
        [["int", "any"]] * 2,
    ),
    "a context manager": (
        """
        import contextlib
        @contextlib.contextmanager
        def c(x):
            yield x + 1
        """,
        "with c(rank) as y: pass\ny",
        [1, 2],
    ),
    "types": (
        """
        from typing import *
        T = TypeVar("T")
        class P(Protocol):
            def f(self) -> int: ...
        class D(TypedDict):
            x: int
        N = NewType("N", int)
        def f(x: T, p: P | None = None) -> D: return {"x": N(x)}
        """,
        "f(rank)",
        [{"x": 0}, {"x": 1}],
    ),
    "a coroutine function": ("async def f(x): return x + 1", "await f(rank)", [1, 2]),
    "a generator function": (
        """
        def f(n):
            yield from range(n)
        """,
        "list(f(rank + 1))",
        [[0], [0, 1]],
    ),
    "a class and what its methods use": (
        """
        class A:
            k = 2
            def __init__(self, x): self.x = x
            def f(self): return self.x * self.k + h()
        def h(): return 1
        """,
        "A(rank).f()",
        [1, 3],
    ),
    "a class and its base": (
        """
        class A:
            def f(self): return 1
        class B(A):
            def f(self): return super().f() + 1
        b = B()
        """,
        "b.f()",
        [2, 2],
    ),
    "a bound method": (
        """
        class A:
            def __init__(self): self.x = 5
            def get(self): return self.x
        get = A().get
        """,
        "get()",
        [5, 5],
    ),
    "all kinds of methods": (
        """
        class A:
            @property
            def p(self): return 1
            @staticmethod
            def s(): return 2
            @classmethod
            def c(cls): return cls.__name__
        """,
        "A().p, A.s(), A.c()",
        [[1, 2, "A"]] * 2,
    ),
    "a metaclass": (
        """
        class Meta(type):
            def __call__(cls, *a): return ("made", super().__call__(*a).x)
        class A(metaclass=Meta):
            x = 1
        """,
        "A()",
        [["made", 1]] * 2,
    ),
    "a dataclass": (
        """
        from dataclasses import dataclass
        @dataclass
        class P:
            x: int
            y: int = 2
        """,
        "P(rank).y, P(rank) == P(rank)",
        [[2, True]] * 2,
    ),
    "an abstract class": (
        """
        from abc import ABC, abstractmethod
        class A(ABC):
            @abstractmethod
            def f(self): ...
        class B(A):
            def f(self): return 1
        """,
        "B().f(), issubclass(B, A)",
        [[1, True]] * 2,
    ),
    "a class with slots": (
        """
        class A:
            __slots__ = ("x",)
            def __init__(self): self.x = 1
        a = A()
        """,
        "a.x, hasattr(a, '__dict__')",
        [[1, False]] * 2,
    ),
    "a changed class": ("class A:\n    x = 1\nA.x = 9", "A.x", [9, 9]),
    "a variable in a function of the cell": ("x = 1", "def f(): return x + rank\nf()", [1, 2]),
    "a variable in comprehensions": ("x = 1", "[x + y for y in range(2)], {'x': x for y in range(1)}",
                                     [[[1, 2], {"x": 1}]] * 2),
    "a variable that is added to": ("x = 1", "x += rank\nx", [1, 2]),
    "a variable in a text": ("x = 1", "f'{x} {x!r:>3}'", ["1   1"] * 2),
    "a variable in a shell command": ("x = 'a b'", "lines = !echo $x {x}\nlines[0]", ["a b a b"] * 2),
    "a variable in a magic": ("x = 1", "%time y = x + rank\ny", [1, 2]),
    "a variable behind an exception": ("x = 1", "try:\n    z\nexcept NameError:\n    z = x\nz", [1, 1]),
    "an object that holds itself": (
        """
        class A: pass
        a = A()
        a.me = a
        l = [a]
        l.append(l)
        """,
        "a.me is a and l[1] is l",
        [True, True],
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.slow_at("cell", "run")
@pytest.mark.parametrize(("setup", "body", "value"), sampled(USES.values(), 12), ids=USES.keys())
def test_a_cell_finds_what_it_uses_of_the_notebook(door, setup, body, value):
    assert door(body, setup) == value


@pytest.mark.parametrize(
    ("setup", "body"),
    [
        ("x = 1", "class C:\n    y = x\nC.y"),
        ("x = 1\ndef f():\n    class C: y = x\n    return C.y", "f()"),
    ],
)
def test_a_class_body_in_a_cell_finds_a_variable_of_the_notebook(cell_door, setup, body):
    """One in a function of a module does not: cloudpickle looks for what functions load."""
    assert cell_door(body, setup) == [1, 1]


@pytest.mark.slow_at("cell", "run")
@pytest.mark.parametrize(
    ("setup", "body", "value"),
    [
        ("import numpy as np", "np.arange(rank + 1).tolist()", [[0], [0, 1]]),
        ("import xml.etree.ElementTree", "xml.etree.ElementTree.fromstring('<a/>').tag", ["a", "a"]),
        ("import xml.etree.ElementTree as ET", "ET.fromstring('<b/>').tag", ["b", "b"]),
        ("import os.path as p, json as j", "p.join('a', j.dumps(rank))", ["a/0", "a/1"]),
        ("from math import sqrt, pi as circle", "sqrt(4) + int(circle)", [5.0, 5.0]),
        ("from concurrent import futures\nimport concurrent.futures.thread", "futures.thread.__name__",
         ["concurrent.futures.thread"] * 2),
        ("import torch.nn.functional as F, torch", "F.relu(torch.tensor([-1.])).tolist()", [[0.0]] * 2),
        ("import email.mime.text\ndef f(): return email.mime.text.MIMEText('x').get_content_type()", "f()",
         ["text/plain"] * 2),
    ],
)  # fmt: skip
def test_a_cell_finds_the_notebooks_imports(door, setup, body, value):
    assert door(body, setup) == value


@pytest.mark.quick
def test_what_was_one_object_in_the_notebook_is_one_object_on_a_rank(door):
    values = door(
        "part += 1\na.append(2)\nb['same'] is a, keeps() is a, whole.sum().item(), b",
        """
        import torch
        a = [1]
        b = {"same": a}
        whole = torch.zeros(100_000)
        part = whole[10:12]
        def keeps(): return a
        """,
    )
    assert values == [[True, True, 2.0, {"same": [1, 2]}]] * 2


def test_arrays_and_tensors_that_a_cell_captures_are_writable_and_each_ranks_own(kernel):
    values = on_ranks(
        kernel,
        """
        import numpy as np, torch
        big, small = np.zeros(1_000_000), np.zeros(3)
        tensor, few = torch.zeros(1_000_000), torch.zeros(3)
        """,
        """
import torch.distributed as dist
for each in (big, small, tensor, few):
    each += rank + 1
dist.barrier()
[float(each.sum() / len(each)) for each in (big, small, tensor, few)]
""",
        ranks=4,
    )
    assert values == [[rank + 1.0] * 4 for rank in range(4)]
    assert kernel.value("[float(each.sum()) for each in (big, small, tensor, few)]") == [0.0] * 4


def test_a_notebook_function_sees_a_global_that_the_cell_has_changed(kernel):
    values = on_ranks(
        kernel,
        "factor = 1\ndef scaled(x): return x * factor\ndef set_factor(x):\n    global factor\n    factor = x",
        "first = scaled(5)\nfactor = 10 + rank\nsecond = scaled(5)\nset_factor(2)\n"
        "first, second, factor, scaled(5)",
    )
    assert values == [[5, 50, 2, 10], [5, 55, 2, 10]]
    assert kernel.value("[factor, scaled(5)]") == [1, 5]


def test_a_notebook_name_shadows_a_builtin_as_in_the_notebook(door):
    assert door("sum + rank, list", "sum, list = 5, 'mine'") == [[5, "mine"], [6, "mine"]]


def test_the_cell_shadows_a_builtin_on_its_ranks_only(kernel):
    assert on_ranks(kernel, "", "len = 7\nmax = len + rank\nmax") == [7, 8]
    assert kernel.value("[len([1]), max(1, 2)]") == [1, 2]


def test_rank_local_rank_world_size_and_device_are_the_ranks_own(kernel):
    names = "rank, local_rank, world_size, device"
    kernel.ok(f"{names} = 'mine', 'my', 'own', 'names'\ndef who(): return {names}")
    kernel.ok(f"%%distributed -n 2 --out res\n[[*each[:3], str(each[3])] for each in (who(), ({names}))]")
    assert kernel.value("res.values") == [[[r, r, 2, "cpu"]] * 2 for r in range(2)]
    assert kernel.value(f"[{names}]") == ["mine", "my", "own", "names"]


def test_the_notebooks_names_for_what_is_the_ranks_own_are_not_sent(kernel):
    kernel.ok("import threading\nrank = world_size = device = threading.Lock()")
    kernel.ok(
        "%%distributed -n 2 --out res\nwith open('/dev/null') as f: pass\nget_ipython\nrank, world_size"
    )
    assert kernel.value("res.values") == [[0, 2], [1, 2]]


def test_a_class_that_is_defined_anew_is_the_new_one_on_ranks(kernel):
    kernel.ok("class A:\n    def f(self): return 'old'\na = A()")
    kernel.ok("%%distributed -n 2 --out res\nA(), A().f()")
    kernel.ok("class A:\n    def f(self): return 'new'")
    kernel.ok("%%distributed -n 2 --out res2\nA(), A().f(), a.f()")
    assert kernel.value("[[each[1] for each in res], [each[1:] for each in res2]]") == [
        ["old", "old"],
        [["new", "old"]] * 2,
    ]
    assert kernel.value("[type(res[0][0]) is type(a), type(res2[0][0]) is A]") == [True, True]


def test_a_class_that_is_changed_between_runs_has_changed_on_ranks(kernel):
    kernel.ok("class A:\n    limit = 1")
    kernel.ok("%%distributed -n 2 --out res\nA.limit")
    kernel.ok("A.limit = 2")
    kernel.ok("%%distributed -n 2 --out res2\nA.limit")
    assert kernel.value("[res.values, res2.values]") == [[1, 1], [2, 2]]


# --- what stays ------------------------------------------------------------------------------------


def test_nothing_that_ranks_do_changes_the_notebook(kernel):
    kernel.ok("""
    import numpy as np, torch
    numbers, table = [1, 2], {"a": [1]}
    array, tensor = np.zeros(4), torch.zeros(200_000)
    class Counter:
        total = 0
        items = []
    def remember(x, seen=[]):
        seen.append(x)
        return seen
    def outer():
        count = 0
        def inner():
            nonlocal count
            count += 1
            return count
        return inner
    step = outer()
    counter, model = Counter(), torch.nn.Linear(2, 2)
    weights = model.weight.detach().clone()
    before = {*globals(), "before"}
    """)
    kernel.ok("""
    %%distributed -n 2 --out res
    numbers.append(3); table["a"].append(2); table["b"] = rank
    array += 1; tensor += 1
    Counter.total = 5; Counter.items.append(1); Counter.new = True; counter.mine = 1
    remember(rank); step(); step()
    with torch.no_grad(): model.weight.zero_()
    remember.note = "set on a rank"
    fresh_name = 1
    del numbers
    remember, step, counter, Counter, model
    """)
    kernel.ok("""
    assert numbers == [1, 2] and table == {"a": [1]}
    assert array.sum() == 0 and tensor.sum() == 0
    assert (Counter.total, Counter.items, hasattr(Counter, "new"), vars(counter)) == (0, [], False, {})
    assert remember.__defaults__ == ([],) and not hasattr(remember, "note")
    assert step() == 1
    assert torch.equal(model.weight, weights)
    assert set(globals()) - before <= {"res"} | {name for name in globals() if name.startswith("_")}
    """)


@pytest.mark.quick
@pytest.mark.slow_at("cell")
@pytest.mark.parametrize(
    "body",
    sampled(
        [
            "lock = rank\nlock",
            "for lock in range(rank + 1): pass\nlock",
            "def lock(): return rank\nlock()",
            "import math as lock\nrank",
            "with open('/dev/null') as lock: pass\nrank",
            "lock, other = rank, 1\nlock",
            "[lock for lock in [rank]][0]",
            "def f(lock): return lock\nf(rank)",
            "x = {'lock': rank}\nx['lock']",
            "'lock' and rank",
            "import types\ntypes.SimpleNamespace(lock=rank).lock",
            "if (lock := rank) is not None: lock\nlock",
        ],
        4,
    ),
)
def test_a_name_that_the_cell_defines_first_or_never_loads_is_not_sent(cell_door, body):
    assert cell_door(body, "import threading\nlock = threading.Lock()") == [0, 1]


def test_a_name_that_a_cell_might_load_need_not_be_sendable(cell_door):
    body = "if rank > 5:\n    x = 1\ndef never(): return lock\nrank"
    assert cell_door(body, "import threading\nlock = threading.Lock()") == [0, 1]


def test_what_a_notebook_function_does_not_use_is_not_sent(door):
    setup = "import threading\nlock = threading.Lock()\ndef f(x): return x + 1\ndef g(): return lock"
    assert door("f(rank)", setup) == [1, 2]


# --- what cannot be sent ---------------------------------------------------------------------------

FAILS_LATE = """
def elements():
    yield [object()]
    raise OSError("no more")
class Late:
    def __reduce__(self): return list, (), None, elements()
box = {"late": Late()}
"""


@pytest.mark.parametrize(
    ("setup", "body", "path", "kind"),
    sampled([
        ("lock = threading.Lock()", "lock", "lock", "_thread.lock"),
        ("model = types.SimpleNamespace(trainer=types.SimpleNamespace(_lock=threading.Lock()))", "model",
         "model.trainer._lock", "_thread.lock"),
        ("data = {'train': [1, threading.Lock()]}", "data", "data['train'][1]", "_thread.lock"),
        ("gen = (x for x in [1])", "list(gen)", "gen", "generator"),
        ("lock = threading.Lock()\ndef f(): return lock", "f()", "lock", "_thread.lock"),
        ("sock = socket.socket()", "sock", "sock", "socket.socket"),
        ("class Row: pass\nrows = [*(Row() for _ in range(20_000)), (x for x in [])]", "rows",
         "rows[20000]", "generator"),
        (FAILS_LATE, "box", "box['late']: no more", "Late"),
    ], 3),
)  # fmt: skip
def test_what_cannot_be_sent_is_named_before_anything_starts(  # noqa: PLR0913, PLR0917 - two are fixtures
    kernel, tmp_path, setup, body, path, kind
):
    kernel.ok(f"import socket, threading, types\n{setup}")
    error = kernel.fails(f"%%distributed -n 2 --log-dir {tmp_path / 'logs'}\n{body}")
    assert error.ename == "CaptureError"
    assert path in error.evalue
    assert kind in error.evalue
    assert re.search(r"\d+ bytes", error.evalue)
    assert not (tmp_path / "logs").exists(), "nothing was started"
    assert "/nblaunch/" not in error.traceback
    kernel.ok("if 'sock' in globals(): sock.close()")


def test_the_capture_error_says_path_and_size_to_programs_too(kernel):
    kernel.ok("""
    import threading, nblaunch, torch
    class Holder: pass
    holder = Holder()
    holder.parts = [torch.zeros(3), threading.Lock()]
    try:
        get_ipython().run_cell_magic("distributed", "-n 2", "holder")
    except nblaunch.CaptureError as caught:
        error = caught
    """)
    name, path, size, is_type_error = kernel.value(
        "[error.name, error.path, error.size, isinstance(error, TypeError)]"
    )
    assert (name, path, is_type_error) == ("holder", "holder.parts[1]", True)
    assert size > 0


# --- the world as it is now ------------------------------------------------------------------------


def test_a_module_that_is_edited_between_runs_is_seen(kernel, tmp_path):
    module = tmp_path / "edited_module.py"
    module.write_text("NUMBER = 1\n")
    kernel.ok(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport edited_module")
    kernel.ok("%%distributed -n 2 --out res\nedited_module.NUMBER")
    module.write_text("NUMBER = 2  # edited\n")
    kernel.ok("%%distributed -n 2 --out res2\nedited_module.NUMBER")
    kernel.ok("%%distributed -n 2 --out res3\nfrom edited_module import NUMBER\nNUMBER")
    values = kernel.value("[res.values, res2.values, res3.values]")
    kernel.ok("sys.path.pop(0); del sys.modules['edited_module']")
    assert values == [[1, 1], [2, 2], [2, 2]]


def test_the_working_directory_and_the_path_are_those_of_now(kernel, tmp_path):
    (tmp_path / "found_here.py").write_text("HERE = True\n")
    kernel.ok("%%distributed -n 2 --out res\nimport os\nos.getcwd()")
    kernel.ok(
        f"import os, sys\nold = os.getcwd()\nos.chdir({str(tmp_path)!r})\nsys.path.append({str(tmp_path)!r})"
    )
    kernel.ok("%%distributed -n 2 --out res2\nimport os, found_here\nos.getcwd(), found_here.HERE")
    kernel.ok("os.chdir(old); sys.path.pop()")
    assert kernel.value("[[each == old for each in res], res2.values]") == [
        [True, True],
        [[str(tmp_path), True]] * 2,
    ]


def test_a_module_beside_the_notebook_is_found(kernel, tmp_path):
    """The notebook's own directory stands in `sys.path` as an empty text."""
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    kernel.ok(f"import os\nold = os.getcwd()\nos.chdir({str(tmp_path)!r})")
    kernel.ok("%%distributed -n 2 --out res\nimport beside\nbeside.VALUE")
    kernel.ok("os.chdir(old)")
    assert kernel.value("res.values") == [5, 5]
