"""What a session's ranks know of the notebook, point by point; `test_random_notebooks.py` mixes them."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
import threading
import weakref

import numpy as np
import pytest
from lanes import sampled

import nblaunch

TRAINING = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    y = 3 * x + 1
    def loss():
        return torch.nn.functional.mse_loss(model(x), y)
    def train(steps=200):
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        return round(loss().item(), 4)
    def evaluate():
        with torch.no_grad():
            return round(torch.nn.functional.mse_loss(model(x), y).item(), 4)
"""


class Notebook:
    """Variables, and cells that run here or on the ranks."""

    def __init__(self, session: nblaunch.Session) -> None:
        self.session = session
        self.variables = {"__name__": "__main__"}

    def __call__(self, source: str) -> None:
        """Run a cell in the notebook."""
        exec(compile(textwrap.dedent(source), "<notebook>", "exec"), self.variables)  # noqa: S102

    def ranks(self, source: str, **options) -> nblaunch.RunResult:
        """Run a cell on the ranks."""
        return self.session.cell(textwrap.dedent(source), namespace=self.variables, **options)

    def both(self, source: str) -> object:
        """Run a cell on the ranks; return the value, which is the same on both."""
        first, second = self.ranks(source).values
        assert first == second
        return first


@pytest.fixture(scope="module")
def module_session(place):
    # What torch makes when it is first used is not what the tests look for.
    exec(textwrap.dedent(TRAINING) + "train(1)", {"__name__": "__main__"})  # noqa: S102
    with place(2, display=False, grace=1.0) as opened:
        yield opened


@pytest.fixture
def notebook(module_session):
    module_session.cell(
        "for _name in [n for n in globals() if not n.startswith('_')]:\n"
        "    if _name not in ('In', 'Out', 'exit', 'quit', 'open', 'get_ipython'):\n"
        "        del globals()[_name]\n"
        "None",
        namespace={},
    )
    return Notebook(module_session)


# --- what was trained stays --------------------------------------------------------------------------


def test_a_helper_that_comes_later_finds_the_trained_model(notebook):
    notebook(TRAINING)
    trained = notebook.both("train()")
    assert trained < 0.01 < notebook.variables["evaluate"]()
    assert notebook.both("evaluate()") == trained
    assert notebook.both("train(0)") == trained


def test_a_def_that_is_run_again_keeps_what_its_globals_are_on_the_ranks(notebook):
    notebook("state = {'n': 0}\ndef bump():\n    state['n'] += 1\n    return state['n']")
    assert [notebook.both("bump()") for _ in range(2)] == [1, 2]
    notebook("def bump():\n    state['n'] += 10\n    return state['n']")
    assert notebook.both("bump()") == 12
    assert notebook.both("state['n']") == 12


def test_a_call_of_a_function_finds_what_the_ranks_have(notebook):
    notebook(TRAINING)
    trained = notebook.both("train()")
    assert notebook.session.run(notebook.variables["evaluate"]).values == [trained] * 2
    assert notebook.both("evaluate()") == trained


def test_functions_pushed_before_the_first_cell_are_the_notebooks(notebook, place):
    notebook("scale = 3\nseen = [1]\ndef scaled(x): return x * scale, seen[0]\nclass Scaler:\n    f = scaled")
    with place(2, display=False) as session:
        session.push({name: notebook.variables[name] for name in ("scaled", "Scaler")})
        notebook.session = session
        first = notebook.ranks("scaled(2), Scaler.f(2)")
        assert (first.values, first.warnings) == ([((6, 1), (6, 1))] * 2, ())
        assert notebook.both("scale = 10; scaled(2)") == (20, 1)
        assert notebook.both("scaled.__globals__ is globals()")


# --- one object is one object ------------------------------------------------------------------------


def test_an_optimizer_that_comes_later_steps_the_ranks_model(notebook):
    notebook(TRAINING)
    notebook.ranks("sum(each.numel() for each in model.parameters())")
    assert notebook.both("optimizer.param_groups[0]['params'][0] is model.weight") is True
    assert notebook.both("train()") < 0.01


@pytest.mark.quick
@pytest.mark.parametrize(
    ("first", "then", "check"),
    sampled(
        [
            ("a = [1]", "b = a", "b is a"),
            ("a = {'k': [1]}", "b = a['k']", "b is a['k']"),
            ("a = [1]", "b = {'inside': a}", "b['inside'] is a"),
            ("a = [1]", "def b():\n    return a", "b() is a"),
            ("a = [1]", "b = (lambda kept: lambda: kept)(a)", "b() is a"),
            ("class a: pass", "b = a()", "type(b) is a"),
            ("def a(): pass", "b = [a]", "b[0] is a"),
            ("import torch; a = torch.zeros(4)", "b = a[:2]", "b.fill_(3).data_ptr() == a.data_ptr()"),
            ("import torch; a = torch.nn.Linear(2, 2)", "b = a.weight", "b is a.weight"),
            ("import numpy; a = numpy.zeros(4)", "b = [a]", "b[0] is a"),
            ("import types; a = types.SimpleNamespace(k=[1])", "b = a.k", "b is a.k"),
        ],
        4,
    ),
    ids=lambda each: each.splitlines()[0][:40],
)
def test_what_the_ranks_have_is_referred_to_under_any_name(notebook, first, then, check):
    notebook(first)
    notebook.ranks("a; None")
    notebook(then)
    assert notebook.both(check) is True


def test_objects_stay_one_where_only_some_ranks_have_them(notebook):
    notebook("a = [1]\nb = {'a': a}")
    notebook.ranks("a.append(rank); None", ranks=[1])
    assert notebook.ranks("b['a'] is a, a").values == [(True, [1]), (True, [1, 1])]


# --- names -------------------------------------------------------------------------------------------


def test_a_name_bound_again_in_the_notebook_is_taken_also_by_functions(notebook):
    notebook("factor = 2\ndef scaled(value):\n    return value * factor")
    assert notebook.both("scaled(10)") == 20
    notebook("factor = 3")
    assert notebook.both("scaled(10)") == 30


@pytest.mark.quick
def test_what_the_ranks_bound_themselves_stays_and_a_notice_says_so_once(notebook):
    notebook("lr = 0.1")
    notebook.ranks("lr = lr * 2; None")
    notebook("lr = 0.01")
    first, second = notebook.ranks("lr"), notebook.ranks("lr")
    assert first.values == [0.2, 0.2] == second.values
    assert [text for text in first.warnings if text.startswith("lr ")] == [
        (
            "lr was assigned again in the notebook, but ranks 0-1 assigned it too and keep their own. "
            "To replace it: %distributed push lr"
        )
    ]
    assert second.warnings == ()


def test_what_one_rank_bound_stays_there_and_the_others_get_the_notebooks(notebook):
    notebook("uneven = 'notebook'\ndef reads():\n    return uneven")
    notebook.session.cell("if rank == 0:\n    uneven = 'own'", namespace={})
    assert notebook.ranks("uneven, reads()").values == [("own", "own"), ("notebook", "notebook")]


def test_a_push_wins_over_what_the_ranks_bound(notebook):
    notebook("lr = 0.1")
    notebook.ranks("lr = 5; None")
    notebook("lr = 0.01")
    notebook.session.push({"lr": notebook.variables["lr"]})
    assert notebook.both("lr") == 0.01
    notebook("lr = 0.001")
    assert notebook.both("lr") == 0.001


def test_a_small_number_that_a_failed_cell_bound_is_the_ranks_own(notebook):
    notebook("n = 1")
    notebook.ranks("n; None")
    notebook.ranks("n = 1\nraise ValueError", check=False)
    notebook("n = 2")
    assert notebook.both("n") == 1


def test_what_a_block_bound_to_what_it_was_is_the_ranks_own_where_the_block_has_run(notebook):
    notebook("a = b = True")
    notebook.ranks("a, b; None")
    notebook.ranks("if rank == 0:\n    a = True\nfor b in [b] * rank: pass")
    notebook("a = b = False")
    assert notebook.ranks("a, b").values == [(True, False), (False, True)]


def test_a_helper_that_was_missing_is_found_once_it_is_defined(notebook):
    notebook("def outer():\n    return helper() + 1")
    assert notebook.ranks("outer()", check=False).root_cause.type.endswith("NameError")
    notebook("def helper():\n    return 41")
    assert notebook.both("outer()") == 42


@pytest.mark.parametrize("name", ["rank", "device"])
def test_a_notebooks_variable_of_a_ranks_own_name_is_noticed(notebook, name):
    notebook(f"{name} = 'mine'\ndef reads():\n    return str({name})")
    cell = notebook.ranks(f"str({name}), reads()")
    assert all(direct == helper != "mine" for direct, helper in cell.values)
    assert [text.partition(":")[0] for text in cell.warnings] == [name]
    assert "mine" not in notebook.session.run(notebook.variables["reads"]).values


# --- changes in place --------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("made", "changed"),
    sampled(
        [
            ("it = {'lr': 0.1}", "it['lr'] = 0.01"),
            ("it = [1]", "it.append(2)"),
            ("it = {'deep': [[1]]}", "it['deep'][0].append(2)"),
            ("it = {1}", "it.add(2)"),
            ("it = bytearray(b'a')", "it += b'b'"),
            ("import numpy; it = numpy.zeros(3)", "it[0] = 1"),
            ("import numpy; it = numpy.zeros(1_000_000)", "it[:] = 1"),
            ("import torch; it = torch.zeros(3)", "it[0] = 1"),
            (
                "import torch; it = torch.nn.Linear(2, 2)",
                "it.load_state_dict(torch.nn.Linear(2, 2).state_dict())",
            ),
            ("class it:\n    def speak(self): return 1", "it.speak = lambda self: 2"),
            ("def it(): return it.count\nit.count = 1", "it.count = 2"),
            ("import types; it = types.SimpleNamespace(a=1)", "it.a = 2"),
            ("import collections; it = collections.deque([1])", "it.append(2)"),
            ("class It:\n    __slots__ = ('a',)\nit = It()\nit.a = 1", "it.a = 2"),
        ],
        4,
    ),
    ids=lambda each: each.replace("import ", "")[:40],
)
def test_a_change_in_place_is_noticed_until_it_is_pushed(notebook, made, changed):
    notebook(made)
    assert notebook.ranks("it; None").warnings == ()
    assert notebook.ranks("it; None").warnings == ()
    notebook(changed)
    for _ in range(2):
        (notice,) = notebook.ranks("it; None").warnings
        assert notice == (
            "it was changed in the notebook after it was sent; the ranks use what they have. "
            "To replace it: %distributed push it"
        )
    notebook.session.push({"it": notebook.variables["it"]})
    assert notebook.ranks("it; None").warnings == ()


def test_ranks_that_got_a_variable_at_different_times_are_named_when_it_was_changed_between(notebook):
    notebook("cfg, other = {'lr': 0.1}, (1, [2])\ndef reads(): return cfg['lr'], other[1][0]")
    notebook.ranks("reads()", ranks=[0])
    notebook("cfg['lr'] = 0.01; other[1][0] = 3")
    cell = notebook.ranks("reads()")
    assert list(cell.values) == [(0.1, 2), (0.01, 3)]
    why = "differs between ranks, as it was changed in the notebook after some got it"
    told = "To give all ranks the notebook's: %distributed push"
    assert list(cell.warnings) == [
        f"{name} {why}: rank 0 an older value, rank 1 the notebook's. {told} {name}"
        for name in ("cfg", "other")
    ]
    notebook("cfg['lr'] = 0.001")
    older = "rank 0 an older value, rank 1 another older value"
    assert f"cfg {why}: {older}. {told} cfg" in notebook.ranks("reads()").warnings
    notebook.session.push({"cfg": notebook.variables["cfg"], "other": notebook.variables["other"]})
    cell = notebook.ranks("reads()")
    assert (list(cell.values), cell.warnings) == ([(0.001, 3)] * 2, ())
    # The same older value on all of them is told as such, however they got it.
    notebook("cfg['lr'] = 1.0")
    (notice,) = notebook.ranks("reads()").warnings
    assert "the ranks use what they have" in notice


@pytest.mark.parametrize("made", ["It()", "It().step"], ids=["an object", "a bound method"])
def test_looking_for_changes_runs_no_code_of_the_users_but_pickles_own_hooks(notebook, monkeypatch, made):
    # In a module, which goes by reference: a list of the notebook would be sent, and be changed by that.
    ran: list[str] = []
    monkeypatch.setattr(os, "ran", ran, raising=False)
    notebook(f"""
        import os
        class It:
            def __init__(self): self.kept, self.cache = [1], [2]
            def __getstate__(self):
                os.ran.append("__getstate__")
                return {{"kept": self.kept}}
            def __getattr__(self, name):
                os.ran.append(name)
                raise AttributeError(name)
            def __eq__(self, other): os.ran.append("__eq__")
            def __hash__(self): os.ran.append("__hash__"); return 1
            def __len__(self): os.ran.append("__len__"); return 1
            def __iter__(self): os.ran.append("__iter__"); return iter(())
            @property
            def shown(self): os.ran.append("shown")
            def step(self): pass
        it = {made}
    """)
    notebook.ranks("it; None")
    ran.clear()
    assert notebook.ranks("it; None").warnings == ()
    assert set(ran) <= {"__getstate__", "__setstate__", "__reduce_ex__"}
    # What would not be sent is not compared.
    notebook("getattr(it, '__self__', it).cache.append(3)")
    assert notebook.ranks("it; None").warnings == ()
    notebook("getattr(it, '__self__', it).kept.append(3)")
    assert "it was changed" in notebook.ranks("it; None").warnings[0]


def test_looking_at_objects_is_no_change(notebook):
    notebook(TRAINING)
    notebook.ranks("train(1); None")
    notebook("model.eval().train(); repr(model); evaluate(); list(model.parameters()); x.sum()")
    assert notebook.ranks("train(1); None").warnings == ()


@pytest.mark.quick
def test_a_push_changes_the_object_that_the_ranks_have(notebook):
    notebook(TRAINING)
    notebook.ranks("train(1); kept = [model]; None")
    notebook("with torch.no_grad():\n    model.weight.fill_(7)")
    notebook.session.push({"model": notebook.variables["model"]})
    assert notebook.both("model.weight.item()") == 7
    assert (
        notebook.both("kept[0] is model and optimizer.param_groups[0]['params'][0] is model.weight") is True
    )


@pytest.mark.parametrize(
    ("made", "changed"),
    [
        (
            "import types\nclass Own(types.SimpleNamespace): pass\nit = Own(a=1, old=2)",
            "it.a = 7\ndel it.old",
        ),
        (
            "class Own(dict): __getattr__ = dict.__getitem__\nit = Own(a=1, old=2)",
            "it['a'] = 7\ndel it['old']",
        ),
        ("import collections\nclass Own(collections.deque): a = 7\nit = Own([1])", "it.append(2)"),
    ],
    ids=["SimpleNamespace's", "dict's", "deque's"],
)
def test_a_push_of_settings_is_seen_by_all_that_refers_to_them(notebook, made, changed):
    notebook(f"{made}\nother = it\nwithin = {{'it': it}}")
    notebook.ranks("kept = [it, other, within]; None")
    notebook(changed)
    it = notebook.variables["it"]
    notebook.session.push({"it": it})
    content = list(it) if hasattr(it, "__iter__") else vars(it)
    shown = "[(each.a, list(each) if hasattr(each, '__iter__') else vars(each))"
    assert notebook.both(f"{shown} for each in (it, kept[0], other, within['it'])]") == [(7, content)] * 4
    assert notebook.both("it is kept[0] is other is within['it']") is True


def test_a_push_that_cannot_be_taken_changes_nothing_and_says_why(notebook):
    notebook("import numpy\na = numpy.zeros(3)\nb = [1]")
    notebook.ranks("a.shape = 3, 1; b.append(2); None")
    notebook("a[0] = 1\nb.append(3)")
    with pytest.raises(
        nblaunch.RunFailedError, match=r"of shape \(3, 1\) on the ranks cannot take .* \(3,\)"
    ):
        notebook.session.push({"a": notebook.variables["a"], "b": notebook.variables["b"]})
    assert notebook.both("b") == [1, 2]


# --- all of it, or nothing ---------------------------------------------------------------------------

BREAKS_ON_ONE = """
    class Breaks:
        def __reduce__(self):
            return breaks, ()
    def breaks():
        import os
        if os.environ["RANK"] == "1":
            raise ValueError("not here")
    broken = Breaks()
"""


def test_variables_that_do_not_arrive_on_every_rank_arrive_on_none(notebook):
    notebook(BREAKS_ON_ONE)
    notebook("data = 'old'\ncount = [0]\ndef add():\n    count[0] += 1\n    return fresh\nfresh = 1")
    assert notebook.both("data") == "old"
    notebook("data = 'new'")
    failed = notebook.ranks("add(); broken; data", check=False)
    assert failed.root_cause.rank == 1
    assert failed.root_cause.message == "not here"
    assert (
        notebook.session.cell("data, 'count' in globals(), 'add' in globals()", namespace={}).values
        == [("old", False, False)] * 2
    )
    assert notebook.both("data") == "new"
    assert notebook.both("add()") == 1


def test_an_interrupt_while_variables_arrive_leaves_the_ranks_as_they_were(notebook, eventually):
    notebook(
        """
        class Slow:
            def __getstate__(self):
                return {}
            def __setstate__(self, state):
                import os, time
                open(began, "w").close()
                time.sleep(60)
        data = "old"
        """
    )
    assert notebook.both("data") == "old"
    began = f"{os.environ['TMPDIR']}/began-{os.getpid()}"
    notebook(f"began = {began!r}\ndata = 'new'\nslow = Slow()")

    def interrupt() -> None:
        eventually(lambda: os.path.exists(began), "a rank reads the variables")  # noqa: PTH110
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            notebook.ranks("slow, data")
    finally:
        thread.join()
        os.unlink(began)  # noqa: PTH108
    assert notebook.session.cell("data", namespace={}).values == ["old"] * 2
    assert notebook.both("data") == "new"


def test_a_ranks_own_variable_survives_a_payload_that_cannot_be_read(notebook):
    notebook(
        "lr = 0.1\ndef reads():\n    return lr\nclass Broken:\n    def __reduce__(self): return int, ('x',)"
    )
    notebook("zbroken = Broken()")
    notebook.session.cell("lr = 0.5", namespace={})
    notebook.ranks("reads(), zbroken", check=False)
    assert notebook.session.cell("lr", namespace={}).values == [0.5, 0.5]


# --- nothing is kept ---------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("within", ["[{}]", "(lambda it: lambda: it)({})"])
def test_the_notebook_frees_what_it_deletes(notebook, within):
    notebook.variables["array"] = np.ones(100_000)
    notebook("big = " + within.format("array"))
    alive = weakref.ref(notebook.variables.pop("array"))
    notebook.ranks("big; None")
    del notebook.variables["big"]
    gc.collect()
    assert alive() is None


def test_the_notebook_frees_objects_that_refer_to_each_other(notebook):
    notebook("class Node: pass\ntree = Node()\ntree.children = [Node()]\ntree.children[0].parent = tree")
    alive = weakref.ref(notebook.variables["tree"])
    notebook.ranks("tree; None")
    del notebook.variables["tree"]
    gc.collect()
    assert alive() is None


def test_a_rank_frees_what_its_cells_delete_and_gets_it_again(notebook):
    notebook("import weakref\nclass Thing: pass\nthing = Thing()\nthing.parts = [1]")
    notebook.ranks("seen = weakref.ref(thing); None")
    notebook.ranks("del thing")
    notebook.ranks("None")
    assert notebook.session.cell("seen() is None", namespace={}).values == [True, True]
    assert notebook.both("thing.parts") == [1]


def test_a_class_within_a_function_finds_the_notebooks_variables(notebook):
    notebook("width = 3\ndef make():\n    class Layer:\n        size = width\n    return Layer.size")
    assert notebook.both("make()") == 3
    assert notebook.session.run(notebook.variables["make"]).values == [3, 3]


def test_a_notebook_that_deletes_a_list_frees_what_is_in_it_with_the_cell(kernel):
    kernel.ok("%distributed start -n 1")
    kernel.ok("import numpy, weakref\nbig = [numpy.ones(10)]\nalive = weakref.ref(big[0])")
    kernel.ok("%%distributed\nbig; None")
    kernel.ok("del big")
    assert kernel.value("alive() is None")
    kernel.ok("%distributed stop")


def test_a_fresh_cell_notices_a_variable_of_a_ranks_own_name(kernel):
    kernel.ok("device = 'mine'\ndef reads(): return device")
    ran = kernel.ok("%%distributed -n 1 --out res\nstr(reads())")
    assert "device: on the ranks this is the rank's own device" in ran.text
    assert kernel.value("res.values") == ["cpu"]


def test_ranks_that_know_different_things_are_sent_a_large_value_once(notebook, place):
    notebook("few = [1]\nimport numpy\nlarge = numpy.ones(4 << 20)")  # 32 MB
    notebook.ranks("few; None", ranks=[0])
    before = [each.memory for each in notebook.session.status().ranks]
    assert notebook.both("large.sum()") == 4 << 20
    grown = [after.memory - then for after, then in zip(notebook.session.status().ranks, before, strict=True)]
    # What only one process of a machine has mapped counts as its own.
    mapped_alone = 32 << 20 if place.nodes > 1 else 0
    assert max(grown) < mapped_alone + (16 << 20)
