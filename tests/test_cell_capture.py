"""A cell finds on its ranks what it uses of the notebook, as copies; what cannot be sent is named."""

from __future__ import annotations

import re

import pytest


def on_ranks(kernel, setup, body, ranks=2):
    """Run `setup` in the notebook and `body` on ranks; return the values."""
    kernel.ok(setup)
    kernel.ok(f"%%distributed -n {ranks} --out res\n{body}")
    return kernel.value("res.values")


# --- what travels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "body", "value"),
    [
        ("x, y = 3, [1, {'a': 2}]", "x + len(y) + y[1]['a'] + rank", [7, 8]),
        ("def f(a, b=2, *, c=3): return a + b + c", "f(rank)", [5, 6]),
        ("def f(): return g() + 1\ndef g(): return h * 2\nh = 10", "f() + rank", [21, 22]),
        (
            "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)",
            "even(4)",
            [True] * 2,
        ),
        ("f = lambda x: x * k\nk = 4", "f(rank)", [0, 4]),
        (
            "def outer(k):\n    def inner(x): return x + k + m\n    return inner\nm = 1\nf = outer(10)",
            "f(rank)",
            [11, 12],
        ),
        ("import functools\ndef f(a, b): return a - b\ng = functools.partial(f, b=1)", "g(rank)", [-1, 0]),
        (
            "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a) * 2\n    return g\n"
            "@twice\ndef f(x): return x + 1",
            "f(rank)",
            [2, 4],
        ),
        (
            "import functools\n@functools.lru_cache\ndef fib(n): return n if n < 2 else fib(n-1) + fib(n-2)",
            "fib(20)",
            [6765] * 2,
        ),
        ("import functools\n@functools.cache\ndef f(x): return [x]", "f(rank) is f(rank)", [True] * 2),
        (
            "import functools\nclass A:\n    @functools.cached_property\n    def p(self): return [1]\na = A()",
            "a.p is a.p and a.p",
            [[1]] * 2,
        ),
        (
            "import functools\n@functools.singledispatch\ndef f(x): return 'any'\n@f.register\ndef _(x: int): return 'int'",
            "f(rank), f('')",
            [["int", "any"]] * 2,
        ),
        (
            "import contextlib\n@contextlib.contextmanager\ndef c(x):\n    yield x + 1",
            "with c(rank) as y: pass\ny",
            [1, 2],
        ),
        (
            "from typing import *\nT = TypeVar('T')\nclass P(Protocol):\n    def f(self) -> int: ...\n"
            "class D(TypedDict):\n    x: int\nN = NewType('N', int)\ndef f(x: T, p: P | None = None) -> D: return {'x': N(x)}",
            "f(rank)",
            [{"x": 0}, {"x": 1}],
        ),
        ("async def f(x): return x + 1", "await f(rank)", [1, 2]),
        ("def f(n):\n    yield from range(n)", "list(f(rank + 1))", [[0], [0, 1]]),
        (
            "class A:\n    k = 2\n    def __init__(self, x): self.x = x\n    def f(self): return self.x * self.k + h()\n"
            "def h(): return 1",
            "A(rank).f()",
            [1, 3],
        ),
        (
            "class A:\n    def f(self): return 1\nclass B(A):\n    def f(self): return super().f() + 1\nb = B()",
            "b.f()",
            [2, 2],
        ),
        (
            "class A:\n    def __init__(self): self.x = 5\n    def get(self): return self.x\nget = A().get",
            "get()",
            [5, 5],
        ),
        (
            "class A:\n    @property\n    def p(self): return 1\n    @staticmethod\n    def s(): return 2\n"
            "    @classmethod\n    def c(cls): return cls.__name__",
            "A().p, A.s(), A.c()",
            [[1, 2, "A"]] * 2,
        ),
        (
            "class Meta(type):\n    def __call__(cls, *a): return ('made', super().__call__(*a).x)\n"
            "class A(metaclass=Meta):\n    x = 1",
            "A()",
            [["made", 1]] * 2,
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2",
            "P(rank).y",
            [2, 2],
        ),
        (
            "from abc import ABC, abstractmethod\nclass A(ABC):\n    @abstractmethod\n    def f(self): ...\n"
            "class B(A):\n    def f(self): return 1",
            "B().f(), issubclass(B, A)",
            [[1, True]] * 2,
        ),
        ("class A:\n    x = 1\nA.x = 9", "A.x", [9, 9]),
        ("x = 1", "def f(): return x + rank\nf()", [1, 2]),
        ("x = 1", "[x + y for y in range(2)], {x: y for y in range(1)}", [[[1, 2], {"1": 0}]] * 2),
        ("x = 1", "class C:\n    y = x\nC.y", [1, 1]),
        ("x = 1", "x += rank\nx", [1, 2]),
        ("x = 1", "f'{x} {x!r:>3}'", ["1   1"] * 2),
        ("x = 'a b'", "lines = !echo $x {x}\nlines[0]", ["a b a b"] * 2),
        ("x = 1", "%time y = x + rank\ny", [1, 2]),
        ("x = 1", "try:\n    z\nexcept NameError:\n    z = x\nz", [1, 1]),
        ("x = 1\ndef f(): return eval('x') + 1", "x, f()", [[1, 2]] * 2),
        ("class A: pass\na = A()\na.me = a\nl = [a]; l.append(l)", "a.me is a and l[1] is l", [True] * 2),
    ],
)
def test_a_cell_finds_what_it_uses_of_the_notebook(kernel, setup, body, value):
    assert on_ranks(kernel, setup, body) == value


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
        ("import torch.nn.functional as F, torch", "F.relu(torch.tensor([-1., 1.])).tolist()", [[0.0, 1.0]] * 2),
        ("import email.mime.text\ndef f(): return email.mime.text.MIMEText('x').get_content_type()", "f()",
         ["text/plain"] * 2),
    ],
)  # fmt: skip
def test_a_cell_finds_the_notebooks_imports(kernel, setup, body, value):
    assert on_ranks(kernel, setup, body) == value


def test_what_was_one_object_in_the_notebook_is_one_object_on_a_rank(kernel):
    values = on_ranks(
        kernel,
        """
        import torch
        a = [1]
        b = {"same": a}
        whole = torch.zeros(100_000)
        part = whole[10:12]
        def keeps(): return a
        """,
        "part += 1\na.append(2)\nb['same'] is a, keeps() is a, whole.sum().item(), b",
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
        "first = scaled(5)\nfactor = 10 + rank\nsecond = scaled(5)\nset_factor(2)\nfirst, second, factor, scaled(5)",
    )
    assert values == [[5, 50, 2, 10], [5, 55, 2, 10]]
    assert kernel.value("[factor, scaled(5)]") == [1, 5]


def test_a_notebook_name_shadows_a_builtin_as_in_the_notebook(kernel):
    assert on_ranks(kernel, "sum, list = 5, 'mine'", "sum + rank, list") == [[5, "mine"], [6, "mine"]]


def test_the_cell_shadows_a_builtin_on_its_ranks_only(kernel):
    assert on_ranks(kernel, "", "len = 7\nmax = len + rank\nmax") == [7, 8]
    assert kernel.value("[len([1]), max(1, 2)]") == [1, 2]


def test_rank_local_rank_world_size_and_device_are_the_ranks_own(kernel):
    names = "rank, local_rank, world_size, device"
    kernel.ok(
        f"{names} = 'mine', 'my', 'own', 'names'\ndef who(): return (rank, local_rank, world_size, str(device))"
    )
    kernel.ok(
        "%%distributed -n 2 --out res\nwho(), (rank, local_rank, world_size, str(device)), type(device).__name__"
    )
    assert kernel.value("res.values") == [[[r, r, 2, "cpu"]] * 2 + ["device"] for r in range(2)]
    assert kernel.value(f"[{names}]") == ["mine", "my", "own", "names"]


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


@pytest.mark.parametrize(
    "body",
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
)
def test_a_name_that_the_cell_defines_first_or_never_loads_is_not_sent(kernel, body):
    kernel.ok("import threading\nlock = threading.Lock()")
    kernel.ok(f"%%distributed -n 2 --out res\n{body}")
    assert kernel.value("res.values") == [0, 1]


def test_a_name_that_a_cell_might_load_need_not_be_sendable(kernel):
    kernel.ok("import threading\nlock = threading.Lock()")
    kernel.ok("%%distributed -n 2 --out res\nif rank > 5:\n    x = 1\ndef never(): return lock\nrank")
    assert kernel.value("res.values") == [0, 1]


def test_what_a_notebook_function_does_not_use_is_not_sent(kernel):
    kernel.ok("import threading\nlock = threading.Lock()\ndef f(x): return x + 1\ndef g(): return lock")
    kernel.ok("%%distributed -n 2 --out res\nf(rank)")
    assert kernel.value("res.values") == [1, 2]


# --- what cannot be sent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "body", "path", "kind"),
    [
        ("lock = threading.Lock()", "lock", "lock", "_thread.lock"),
        ("model = types.SimpleNamespace(trainer=types.SimpleNamespace(_lock=threading.Lock()))", "model",
         "model.trainer._lock", "_thread.lock"),
        ("data = {'train': [1, threading.Lock()]}", "data", "data['train'][1]", "_thread.lock"),
        ("gen = (x for x in [1])", "list(gen)", "gen", "generator"),
        ("lock = threading.Lock()\ndef f(): return lock", "f()", "lock", "_thread.lock"),
        ("sock = socket.socket()", "sock", "sock", "socket.socket"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_named_before_anything_starts(kernel, tmp_path, setup, body, path, kind):
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
