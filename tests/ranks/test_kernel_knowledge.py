"""What a session's ranks know of a real notebook, whose module is `__main__`: all through the magics."""

from __future__ import annotations

import ast
import textwrap

import pytest
from lanes import sampled

DELETE_ALL = """
for _name in [n for n in globals() if n not in kept_by_the_tests]:
    del globals()[_name]
"""
OWN = "{0} was assigned again in the notebook, but ranks 0-1 assigned it too"
CHANGED = "{0} was changed in the notebook after it was sent"


class Notebook:
    """A kernel with an open session: cells that run in the notebook, and on the ranks."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __call__(self, source: str) -> None:
        """Run a cell in the notebook."""
        self.kernel.ok(source)

    def noticed(self, source: str, line: str = "") -> tuple[object, list[str]]:
        """Run a cell on the ranks; return its value, which is the same on both, and the notices."""
        ran = self.kernel.ok(f"%%distributed {line}\n{textwrap.dedent(source).strip()}\n")
        lines = ran.text.splitlines()
        notices = [
            each.removeprefix("note: ").partition(";")[0] for each in lines if each.startswith("note: ")
        ]
        whose = "ranks 0-1: " if "-n 1" not in line else "rank 0: "
        shown = [each.removeprefix(whose) for each in lines if each.startswith(whose)]
        return ast.literal_eval(shown[-1]) if shown else None, [
            each.split(" and keep")[0] for each in notices
        ]

    def ranks(self, source: str, line: str = "") -> object:
        """Run a cell on the ranks that gives no notice; return its value."""
        value, notices = self.noticed(source, line)
        assert notices == []
        return value


@pytest.fixture(scope="module")
def module_notebook(module_kernel):
    module_kernel.ok("%distributed start -n 2")
    module_kernel.ok("%%distributed\nkept_by_the_tests = {*globals(), 'kept_by_the_tests', '_name'}; None")
    yield Notebook(module_kernel)
    module_kernel.ok("%distributed stop")


@pytest.fixture
def notebook(module_notebook):
    module_notebook.kernel.ok(f"%%distributed\n{DELETE_ALL}")
    yield module_notebook
    module_notebook.kernel.forget()


def steps(notebook, *cells):
    """Run cells: a text in the notebook, a pair of source and value on the ranks, a third is the notice."""
    for cell in cells:
        if isinstance(cell, str):
            notebook(cell)
        else:
            source, value, *notice = cell
            assert notebook.noticed(source) == (value, notice), source


# --- rule 2: a name bound anew is taken ----------------------------------------------------------------


@pytest.mark.parametrize("same", ["0", "None"])
def test_a_variable_that_is_bound_again_to_the_same_object_is_noticed_where_the_ranks_have_their_own(
    notebook, same
):
    again = OWN.format("step")
    steps(
        notebook,
        f"step = {same}",
        ("step = [step, 5]; step[1]", 5),
        f"step = {same}",
        ("step[1]", 5, again),
        ("step[1]", 5),
        "%distributed push step",
        (f"step == {same}", True),
    )


def test_a_variable_that_is_bound_again_is_not_noticed_where_no_rank_has_its_own(notebook):
    steps(
        notebook,
        "step, mode = 0, 'eval'",
        ("step, mode", (0, "eval")),
        "step = 0\nif step:\n    mode = 'eval'",
        ("step, mode", (0, "eval")),
        ("step += 5; step", 5),
        ("step", 5),
        ("mode = 'own'; mode", "own"),
        "if step:\n    mode = 'eval'",
        ("mode", "own"),
    )


def test_what_auto_has_run_on_the_ranks_the_notebook_has_not_bound(notebook):
    steps(notebook, "step = 0", ("step", 0), ("step += 5; step", 5), "%distributed auto on", "step = 0")
    steps(notebook, "%distributed auto off", ("step", 0))


def test_a_cell_on_the_ranks_is_analysed_once(notebook):
    notebook(
        """
        from nblaunch.capture.names import _Analysis
        analysed, follow = [], _Analysis.follow
        _Analysis.follow = lambda self, tree: analysed.append(tree) or follow(self, tree)
        """
    )
    assert notebook.ranks("1 + 1") == 2
    notebook("_Analysis.follow = follow")
    # The first is of the cell that begins to count.
    assert notebook.kernel.value("len(analysed)") == 2


# --- what a rank binds is its own, wherever it does ----------------------------------------------------


@pytest.mark.parametrize(
    "bound",
    sampled(
        [
            "if it:\n    it = True",
            "for it in [it]: pass",
            "with suppress(KeyError):\n    it = True\n    {}[0]",
            "try:\n    {}[0]\nexcept KeyError:\n    it = True",
            "while it:\n    it = True\n    break",
            "match it:\n    case it: pass",
            "[it := True for _ in range(2)]",
            "import contextlib\nwith contextlib.nullcontext(it) as it: pass",
            "%%time\nit = True",
        ],
        ci=4,
    ),
    ids=lambda each: each.replace("\n", " ")[:30],
)
def test_a_name_that_a_block_binds_to_what_it_was_is_the_ranks_own(notebook, bound):
    steps(
        notebook,
        "from contextlib import suppress\nit = True",
        ("it, suppress.__name__", (True, "suppress")),
    )
    notebook.ranks(f"{bound}\n")
    steps(notebook, "it = False", ("it", True, OWN.format("it")), ("it", True))


def test_a_name_in_a_block_that_does_not_run_is_still_the_notebooks(notebook):
    steps(
        notebook,
        "a = b = c = d = True",
        ("a, b, c, d", (True,) * 4),
        (
            "if not a:\n    a = True\nfor b in []: pass\nwhile not c:\n    c = True\n[d := 1 for _ in ()]; 0",
            0,
        ),
    )
    notebook.kernel.fails("%%distributed\nx = [][0]; d = True")
    steps(notebook, "a = b = c = d = False", ("a, b, c, d", (False,) * 4))


def test_looking_at_what_a_cell_binds_leaves_its_variables_as_they_are(notebook):
    steps(
        notebook,
        "it = each = 1",
        ("it, each", (1, 1)),
        ("before = after = 0\nbefore = len(globals())\nit = 2\nafter = len(globals())\nafter - before", 0),
        ("for each in globals(): it = 3\nit", 3),
    )


# --- classes of a notebook are one object --------------------------------------------------------------


MODEL = """
import torch
class Net(torch.nn.Module):
    scale = 1.0
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x): return x * self.scale
net = Net()
"""


def test_what_the_ranks_do_to_a_model_class_holds_for_models_that_come_later(notebook):
    steps(
        notebook,
        MODEL,
        ("Net.scale = 5.0\nNet.kind = lambda self: 'ranks'\nnet(torch.ones(1)).item()", 5.0),
        "another = Net()",
        ("another(torch.ones(1)).item(), net(torch.ones(1)).item(), another.kind()", (5.0, 5.0, "ranks")),
    )


@pytest.mark.parametrize(
    ("made", "used", "before", "changed"),
    sampled(
        [
            ("class Cfg:\n    lr = 1", "Cfg.lr", 1, "Cfg.lr = 2"),
            ("class Net:\n    lr = 1\nnet = Net()", "net.lr", 1, "Net.lr = 2"),
            ("class Net:\n    def f(self): return 1\nnet = Net()", "net.f()", 1, "Net.f = lambda self: 2"),
            ("class Cfg:\n    opts = {'lr': 0.1}", "Cfg.opts['lr']", 0.1, "Cfg.opts['lr'] = 0.5"),
            (
                "class Cfg:\n    @staticmethod\n    def f(x=[1]): return x",
                "Cfg.f()",
                [1],
                "Cfg.f.__defaults__[0][0] = 2",
            ),
            (
                "class Cfg:\n    @property\n    def lr(self): return 1\nc = Cfg()",
                "c.lr",
                1,
                "Cfg.lr = property(lambda s: 2)",
            ),
            ("cfg = {'dim': -1}", "cfg['dim']", -1, "cfg['dim'] = -2"),
            ("cfg = {'x': 0.0}", "cfg['x']", 0.0, "cfg['x'] = -0.0"),
            ("cfg = [2**61 - 1]", "cfg[0]", 2**61 - 1, "cfg[0] = 0"),
            (
                "from functools import partial\ndef f(d): return d[0]\ng = partial(f, [1])",
                "g()",
                1,
                "g.args[0][0] = 2",
            ),
            ("def f(*, d=[1]): return d[0]", "f()", 1, "f.__kwdefaults__['d'][0] = 2"),
            ("it = [0] * 2000", "it[1000]", 0, "it[1000] = 1"),
            ("it = {f'w{i}': i for i in range(5000)}", "it['w3']", 3, "it['w3'] = -1"),
            ("it = set(range(2000))", "len(it)", 2000, "it.remove(1000)"),
            ("import random\nit = random.Random(1)", "it is None", False, "it.random()"),
            ("import io\nit = io.StringIO('a')", "it.getvalue()", "a", "it.write('b')"),
        ],
        ci=6,
    ),
    ids=lambda each: str(each).replace("\n", " ")[:30],
)
def test_a_change_behind_a_class_a_partial_or_a_default_is_noticed_and_can_be_pushed(
    notebook, made, used, before, changed
):
    name = used.partition(".")[0].partition("[")[0].partition("(")[0].partition(" ")[0]
    name = "it" if name == "len" else name
    steps(notebook, made, (used, before), (used, before), changed)
    value, notices = notebook.noticed(used)
    assert value == before
    assert [each.partition(" was changed")[0] for each in notices] == [name]
    notebook(f"%distributed push {name}")
    assert notebook.ranks(used) == ast.literal_eval(notebook.kernel.ok(f"print(repr({used}))").stdout)


@pytest.mark.parametrize(
    "cells",
    sampled(
        [
            [MODEL, ("m = Net(); 1", 1), ("m = Net(); 2", 2)],
            [
                "class Reg:\n    best = None",
                ("Reg.best = 0.99; Reg.best", 0.99),
                "r = Reg()",
                ("r.best", 0.99),
            ],
            [
                "shape = (3, 4); cfg = {'shape': shape, 'lr': 0.1}",
                ("shape, cfg['lr']", ((3, 4), 0.1)),
                ("cfg['lr']", 0.1),
            ],
            [
                "import torch, math\ndt = torch.bfloat16\nf = math.sqrt\ncfg = {'d': dt, 'f': f, (1,): 2}",
                ("str(dt), f(4.0), len(cfg)", ("torch.bfloat16", 2.0, 3)),
                ("len(cfg)", 3),
                ("len(cfg), f(4.0)", (3, 2.0)),
            ],
            [
                f"import torch\nact = torch.relu\n{MODEL}\nnet.act = act",
                ("h = act(torch.ones(1))\nwith torch.no_grad(): net.layer.weight.fill_(42.)\n1", 1),
                ("net.layer.weight.item()", 42.0),
            ],
            ["class A: pass\na = A()", ("isinstance(a, A)", True), ("isinstance(a, A)", True)],
        ],
        2,
    ),
    ids=["super()", "class attribute", "shape", "dtype", "act", "instance"],
)
def test_what_was_not_changed_gives_no_notice(notebook, cells):
    steps(notebook, *cells)


# --- functions of later names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    sampled(
        [
            "import functools\ng = functools.partial(f, 2)",
            "class C:\n    def m(self): return f(2)\ng = C().m",
            "g = (lambda kept: lambda: kept(2))(f)",
            "class C:\n    @property\n    def p(self): return f(2)\nc = C()\ndef g(): return c.p",
            "def g(*, f=f): return f(2)",
            "import functools\ng = functools.partial(functools.partial(f), x=2)",
            "from collections import defaultdict\nd = defaultdict(lambda: f(2))\ndef g(): return d[0]",
        ],
        ci=3,
    ),
    ids=["partial", "method", "closure", "property", "default", "partials", "factory"],
)
def test_a_name_that_is_defined_later_is_found_behind_whatever_holds_a_function(notebook, made):
    notebook(f"def f(x): return x * SCALE\n{made}")
    assert notebook.kernel.fails("%%distributed\ng()").evalue.count("NameError: name 'SCALE'")
    steps(notebook, "SCALE = 10", ("g()", 20), "SCALE = 7", ("SCALE", 7))


# --- names that IPython binds ----------------------------------------------------------------------------


@pytest.mark.parametrize("line", sampled(["", "--fresh -n 1"]))
def test_the_last_results_of_the_notebook_are_the_ranks(notebook, line):
    notebook("6 * 7")
    notebook("5 * 5")
    number = notebook.kernel.value("len(In) - 1")
    assert notebook.ranks("_, __", line) == (25, 42)
    assert notebook.ranks(f"Out[{number}], _{number}, Out[{number - 1}]", line) == (25, 25, 42)
    notebook("3 * 3")
    assert notebook.ranks(f"_, Out[{number}]", line) == (9, 25)
    assert notebook.ranks("_.ok, len(_), _.values[0]", line) == (True, 1 if line else 2, (9, 25))
    notebook("10")
    assert notebook.ranks("[In[-2], _i, sum(each == 10 for each in Out.values())]", line) == ["10", "10", 1]


def test_a_result_of_a_failed_run_can_be_looked_at_on_the_ranks(notebook):
    notebook.kernel.fails("%%distributed\n1 / 0")
    assert notebook.ranks("_.ok, _.root_cause.type") == (
        False,
        "builtins.ZeroDivisionError",
    )


def test_a_name_of_ipythons_that_a_rank_has_bound_is_its_own_without_a_notice(notebook):
    steps(
        notebook,
        "5 * 5",
        ("for _ in range(3): pass\n_", 2),
        "6 * 6",
        ("_", 2),
        ("_", 2),
        ("del _\n0", 0),
        "7 * 7",
        ("_", 49),
    )


NAMED = """
from gzip import open
def exit(): return 'mine'
quit = 3
def f(): return open.__module__, exit()
"""


@pytest.mark.parametrize("line", sampled(["", "--fresh -n 1"]))
def test_open_exit_and_quit_of_the_notebooks_own_are_meant(notebook, line):
    before = "open.__module__, type(exit).__name__, type(quit).__name__"
    assert notebook.ranks(before, line) == ("io", "ExitAutocall", "ExitAutocall")
    notebook(NAMED)
    assert notebook.ranks("f(), open.__module__, exit(), quit", line) == (("gzip", "mine"), "gzip", "mine", 3)
    if not line:
        steps(
            notebook,
            "quit = 4",
            ("quit", 4),
            ("quit = 5; quit", 5),
            "quit = 6",
            ("quit", 5, OWN.format("quit")),
        )
