"""What notebooks make, and pickle alone cannot send, or not whole: it works on the ranks as in the notebook.

Hooks, gradients and graphs; what torch, NumPy, pydantic and typing make of the user's functions and
classes; and what is behind partials, methods, defaults and properties, where the rules of a session hold.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
from lanes import sampled

import nblaunch

RANKS = 2

START = """
import sys
print(); print(file=sys.stderr)
kept_by_the_tests = {*globals(), "kept_by_the_tests", "name"}
"""
"""The files that a session keeps open, and the variables of a bare rank."""

BARE = "for name in set(globals()) - kept_by_the_tests: del globals()[name]"


class KernelNotebook:
    """A notebook in a real kernel: `__main__` is the notebook."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def run(self, source: str) -> None:
        self.kernel.ok(textwrap.dedent(source))

    def cell(self, source: str, line: str = "") -> tuple[Any, list[str]]:
        """Run a cell on the ranks; return the value of rank 0, and the notices."""
        self.kernel.ok(f"%%distributed --out res {line}\n{textwrap.dedent(source)}")
        (values, notices) = self.kernel.value("[res.values, list(res.warnings)]")
        assert values == [values[0]] * RANKS
        return values[0], notices

    def fresh(self, source: str) -> tuple[Any, list[str]]:
        return self.cell(source, f"--fresh -n {RANKS}")

    def push(self, name: str) -> None:
        self.kernel.ok(f"%distributed push {name}")


class SessionNotebook:
    """A notebook of variables of its own, and a `Session`."""

    def __init__(self, session: nblaunch.Session) -> None:
        self.session = session
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    def run(self, source: str) -> None:
        exec(textwrap.dedent(source), self.namespace)  # noqa: S102 - as a notebook does

    def cell(self, source: str) -> tuple[Any, list[str]]:
        result = self.session.cell(textwrap.dedent(source), namespace=self.namespace)
        values = json.loads(json.dumps(result.values, default=repr))
        assert values == [values[0]] * RANKS
        return values[0], list(result.warnings)

    def push(self, name: str) -> None:
        self.session.push({name: self.namespace[name]})


@pytest.fixture(scope="module")
def session_kernel(module_kernel):
    """Start a session in the kernel that the tests here share."""
    module_kernel.ok(f"%distributed start -n {RANKS}")
    module_kernel.ok(f"%%distributed\n{START}")
    yield module_kernel
    module_kernel.ok("%distributed stop")


@pytest.fixture(scope="module")
def session():
    """Open a session without a kernel."""
    with nblaunch.Session(nproc=RANKS, name="sendable") as opened:
        opened.cell(START)
        yield opened


@pytest.fixture
def kernel(session_kernel):
    """Give a notebook in a kernel, with a session and without variables."""
    session_kernel.ok(f"%%distributed\n{BARE}")
    yield KernelNotebook(session_kernel)
    session_kernel.forget()


@pytest.fixture(scope="module", params=["kernel", pytest.param("session", marks=pytest.mark.slow)])
def opened(request):
    """Open a session, either way; return it, or its kernel."""
    return request.getfixturevalue("session_kernel" if request.param == "kernel" else "session")


@pytest.fixture
def notebook(opened, monkeypatch, tmp_path):
    """Give a notebook with a session, and without variables."""
    # torch sets it for good in a process that loads its compiler, as the first optimizer does.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if isinstance(opened, nblaunch.Session):
        opened.cell(BARE, namespace={})
        yield SessionNotebook(opened)
    else:
        opened.ok(f"%%distributed\n{BARE}")
        yield KernelNotebook(opened)
        opened.forget()


# --- behind partials, methods, defaults and properties: rules 2, 5 and 6 -----------------------------

PRELUDE = """
import dataclasses, functools
from collections import defaultdict
def factor(): return 2
def later():
    try:
        return LATER
    except NameError:
        return None
def used(part): return factor(), list(part), later()
"""

CARRIERS = {
    "partial": ("carrier = functools.partial(used, [1])", "carrier()", "carrier.args[0]"),
    "partial-keyword": (
        "carrier = functools.partial(used, part=[1])",
        "carrier()",
        "carrier.keywords['part']",
    ),
    "bound-method": (
        """
        class Holder:
            def __init__(self): self.part = [1]
            def method(self): return used(self.part)
        carrier = Holder().method
        del Holder
        """,
        "carrier()",
        "carrier.__self__.part",
    ),
    "property": (
        """
        class Holder:
            def __init__(self): self.part = [1]
            @property
            def shown(self): return used(self.part)
        carrier = Holder()
        del Holder
        """,
        "carrier.shown",
        "carrier.part",
    ),
    "static-method": (
        """
        class carrier:
            @staticmethod
            def method(part=[1]): return used(part)
        """,
        "carrier.method()",
        "carrier.method.__defaults__[0]",
    ),
    "class-attribute": (
        """
        class carrier:
            part = [1]
            @classmethod
            def method(cls): return used(cls.part)
        """,
        "carrier.method()",
        "carrier.part",
    ),
    "inherited": (
        """
        class Base:
            part = [1]
            def method(self): return used(self.part)
        class Derived(Base): pass
        carrier = Derived()
        del Base, Derived
        """,
        "carrier.method()",
        "type(carrier).part",
    ),
    "keyword-only-default": (
        "def carrier(*, part=[1]): return used(part)",
        "carrier()",
        "carrier.__kwdefaults__['part']",
    ),
    "default": ("def carrier(part=[1]): return used(part)", "carrier()", "carrier.__defaults__[0]"),
    "closure": (
        """
        def make(part):
            def inner(): return used(part)
            return inner
        carrier = make([1])
        """,
        "carrier()",
        "carrier.__closure__[0].cell_contents",
    ),
    "decorated": (
        """
        def twice(function):
            @functools.wraps(function)
            def wrapper(*args): return function(*args)
            return wrapper
        @twice
        def carrier(part=[1]): return used(part)
        """,
        "carrier()",
        "carrier.__wrapped__.__defaults__[0]",
    ),
    "function-attribute": (
        "def carrier(): return used(carrier.part)\ncarrier.part = [1]",
        "carrier()",
        "carrier.part",
    ),
    "field-default-factory": (
        """
        def fresh(part=[1]): return used(part)
        @dataclasses.dataclass
        class carrier:
            shown: object = dataclasses.field(default_factory=fresh)
        del fresh
        """,
        "carrier().shown",
        "carrier.__dataclass_fields__['shown'].default_factory.__defaults__[0]",
    ),
    "dict-default-factory": (
        """
        def fresh(part=[1]): return used(part)
        carrier = defaultdict(fresh)
        del fresh
        """,
        "carrier.default_factory()",
        "carrier.default_factory.__defaults__[0]",
    ),
    "cached-property": (
        """
        class Holder:
            def __init__(self): self.part = [1]
            @functools.cached_property
            def shown(self): return used(self.part)
        carrier = Holder
        holder = Holder()
        carrier.first = holder
        del Holder, holder
        """,
        "type(carrier.first).shown.func(carrier.first)",
        "carrier.first.part",
    ),
    "module": (
        """
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.part = [1]
            def forward(self): return used(self.part)
        carrier = Net()
        del Net
        """,
        "carrier()",
        "carrier.part",
    ),
}


@pytest.mark.parametrize("carrier", sampled(CARRIERS, ci=8))
def test_what_is_behind_it_is_taken_anew_noticed_and_found_later(notebook, carrier):
    setup, use, held = CARRIERS[carrier]
    notebook.run(PRELUDE)
    notebook.run(setup)
    assert notebook.cell(use) == ([2, [1], None], [])
    # Rule 6: what was missing; rule 2: what was defined again.
    notebook.run("LATER = 5")
    assert notebook.cell(use) == ([2, [1], 5], [])
    notebook.run("def factor(): return 3")
    assert notebook.cell(use) == ([3, [1], 5], [])
    # Rule 5: what was changed in place.
    notebook.run(f"{held}.append(2)")
    value, notices = notebook.cell(use)
    assert value == [3, [1], 5]
    assert [notice.partition(" was changed")[0] for notice in notices] == ["carrier"]
    notebook.push("carrier")
    assert notebook.cell(use) == ([3, [1, 2], 5], [])


# --- what libraries make of the user's functions and classes ------------------------------------------

SENT = {
    "a module with weight_norm": (
        """
        import torch
        from torch.nn.utils.parametrizations import weight_norm
        it = weight_norm(torch.nn.Linear(2, 1))
        opt = torch.optim.SGD(it.parameters(), lr=1.0)
        """,
        """
        before = it.weight.tolist()
        it(torch.ones(2)).backward()
        opt.step()
        it.weight.tolist() != before, type(it).__name__, isinstance(it, torch.nn.Linear)
        """,
        [True, "ParametrizedLinear", True],
    ),
    "a module with a parametrization of the notebook's": (
        """
        import torch
        class Symmetric(torch.nn.Module):
            def forward(self, X): return X.triu() + X.triu(1).T
        it = torch.nn.Sequential(torch.nn.Linear(3, 3))
        torch.nn.utils.parametrize.register_parametrization(it[0], "weight", Symmetric())
        """,
        "torch.equal(it[0].weight, it[0].weight.T), torch.nn.utils.parametrize.is_parametrized(it[0])",
        [True, True],
    ),
    "a validated function": (
        """
        import pydantic
        class Item(pydantic.BaseModel):
            n: int = 1
        @pydantic.validate_call(validate_return=True)
        def it(a: int, item: Item = Item()) -> int: return a + item.n
        """,
        """
        try:
            it("a")
        except pydantic.ValidationError as error:
            refused = error.errors()[0]["type"]
        it("3"), refused
        """,
        [4, "int_parsing"],
    ),
    "a custom operator": (
        """
        import torch
        @torch.library.custom_op("sendable::doubled", mutates_args=())
        def it(x: torch.Tensor) -> torch.Tensor: return x * 2
        @it.register_fake
        def _(x): return torch.empty_like(x)
        it.register_autograd(lambda ctx, grad: grad * 2)
        """,
        """
        x = torch.ones(2, requires_grad=True)
        it(x).sum().backward()
        shape = list(it(torch.empty(3, device="meta")).shape)
        x.grad.tolist(), torch.ops.sendable.doubled(torch.ones(1)).item(), shape
        """,
        [[2.0, 2.0], 2.0, [3]],
    ),
    "limits of numbers": (
        """
        import numpy, torch
        it = torch.finfo(torch.float16), torch.iinfo(torch.int8), numpy.finfo("float32"), numpy.iinfo("int16")
        """,
        "[str(each.max) for each in it]",
        ["65504.0", "127", "3.4028235e+38", "32767"],
    ),
    "a context variable": (
        """
        import contextvars
        it = contextvars.ContextVar("it", default=3)
        it.set(5)
        unset = contextvars.ContextVar("unset")
        """,
        "it.get(), it.name, unset.get(None)",
        [5, "it", None],
    ),
    "a scripted function": (
        """
        import torch
        @torch.jit.script
        def it(x): return x * 2
        """,
        "it(torch.ones(1)).item(), type(it).__name__",
        [2.0, "ScriptFunction"],
    ),
    "a vectorized function": (
        "import numpy\nit = numpy.vectorize(lambda a: a + 1)",
        "it([1, 2]).tolist()",
        [2, 3],
    ),
    "a loader whose persistent workers have run": (
        """
        import torch
        it = torch.utils.data.DataLoader([1.0, 2.0], num_workers=1, persistent_workers=True)
        for _ in it: pass
        """,
        """
        shown = [[batch.item() for batch in it] for _ in range(2)]
        it._iterator._shutdown_workers()
        shown
        """,
        [[1.0, 2.0], [1.0, 2.0]],
    ),
    "hints under the future import": (
        """
        from __future__ import annotations
        import dataclasses, typing
        from typing import Optional
        @dataclasses.dataclass
        class Inner:
            x: int = 0
        @dataclasses.dataclass
        class It:
            inner: Optional[Inner] = None
        class Plain:
            inner: "list[Inner]"
        def function(a: Inner) -> typing.Optional[Plain]: pass
        """,
        """
        hints = [typing.get_type_hints(each) for each in (It, Plain, function)]
        [sorted(each) for each in hints], hints[2]["a"].__name__
        """,
        [[["inner"], ["inner"], ["a", "return"]], "Inner"],
    ),
    "a dataclass for an argument parser": (
        """
        from __future__ import annotations
        import dataclasses, typing
        from transformers import HfArgumentParser
        @dataclasses.dataclass
        class It:
            lr: float = 0.1
            layers: typing.Optional[list[int]] = None
            name: str = dataclasses.field(default="a", kw_only=True)
        """,
        """
        parsed, = HfArgumentParser(It).parse_args_into_dataclasses(["--lr", "0.5"])
        lr = It.__dataclass_fields__["lr"]
        parsed.lr, parsed.layers, parsed.name, lr.default_factory is dataclasses.MISSING
        """,
        [0.5, None, "a", True],
    ),
    "the notebook's namespace": (
        "it = globals(); x = 1",
        "it is globals(), it['x'], x",
        [True, 1, 1],
    ),
    "a nested class": (
        """
        class It:
            class Inner:
                class Innermost: pass
        def make():
            class Local: pass
            return Local
        Local = make()
        """,
        "It.Inner.__qualname__, It.Inner.Innermost.__qualname__, Local.__qualname__",
        ["It.Inner", "It.Inner.Innermost", "make.<locals>.Local"],
    ),
    "an optimizer with more than torch pickles": (
        """
        import torch
        it = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])
        it.note = "kept"
        """,
        "it.step(lambda: torch.zeros(1, requires_grad=True).sum()); it.note",
        "kept",
    ),
}


@pytest.mark.parametrize("what", SENT)
def test_it_works_on_the_ranks_as_in_the_notebook(kernel, what):
    setup, use, value = SENT[what]
    kernel.run(setup)
    assert kernel.cell(use) == (value, [])
    # Untouched in the notebook, it gives no notice when it is used again.
    assert kernel.cell("'it' in globals() and it, 'It' in globals() and It; 0")[1] == []


@pytest.mark.parametrize("what", sampled(SENT, ci=3))
def test_it_works_on_fresh_ranks(kernel, what):
    setup, use, value = SENT[what]
    kernel.run(setup)
    assert kernel.fresh(use) == (value, [])


# --- compiled: each process that compiles loads a compiler --------------------------------------------


def test_compiled_functions_and_modules_are_compiled_again_with_their_options(kernel):
    kernel.run("""
        import torch
        @torch.compile(backend="eager", fullgraph=True)
        def function(x): return x * SCALE
        SCALE = 2
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1, 1, bias=False)
            @torch.compile(backend="eager", dynamic=True)
            def forward(self, x): return self.layer(x)
        net = Net()
        module = torch.compile(net.layer, backend="eager", fullgraph=True)
        inductor = torch.compile(lambda x: x, mode="reduce-overhead")
    """)
    use = """
        with torch.no_grad():
            net.layer.weight.fill_(3)
            found = function(torch.ones(1)).item(), net(torch.ones(1)).item(), module(torch.ones(1)).item()
        options = function.__closure__[function.__code__.co_freevars.index("self")].cell_contents
        chosen = inductor.__closure__[inductor.__code__.co_freevars.index("self")].cell_contents
        found, options.fullgraph, module.dynamo_ctx.fullgraph, chosen.compiler_config["triton.cudagraphs"]
    """
    expected = [[2.0, 3.0, 3.0], True, True, True]
    assert kernel.cell(use) == (expected, [])
    assert kernel.fresh(use) == (expected, [])
    kernel.run("SCALE = 5; _ = function(torch.ones(1)), module(torch.ones(1))")
    assert kernel.cell("function(torch.ones(1)).item()") == (5.0, [])
    assert kernel.cell("module is module, net.layer is module._orig_mod") == ([True, True], [])


# --- refused, with a way that works -------------------------------------------------------------------


def test_what_cannot_be_sent_is_refused_with_a_way_that_works(kernel, tmp_path):
    kernel.run("""
        import numpy, torch
        def add(a, b): return a + b
        added = numpy.frompyfunc(add, 2, 1)
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
        import threading
        lock = threading.Lock()
        box = {"lock": lock}
    """)
    said = kernel.kernel.fails("%%distributed\nadded(1, 2)").evalue
    assert said.endswith("Call np.frompyfunc in the cell: the function that it is given can be sent.")
    assert kernel.cell("int(numpy.frompyfunc(add, 2, 1)(1, 2))") == (3, [])
    said = kernel.kernel.fails("%%distributed\nscripted(torch.ones(2))").evalue
    assert said.endswith("Give torch.jit.save a file for it here, and torch.jit.load that file in the cell.")
    file = str(tmp_path / "scripted.pt")
    kernel.run(f"torch.jit.save(scripted, {file!r})")
    assert kernel.cell(f"list(torch.jit.load({file!r})(torch.ones(2)).shape)") == ([2], [])
    # A variable has no state that it could be left out of.
    assert kernel.kernel.fails("%%distributed\nlock").evalue.endswith("Make lock on the ranks instead.")
    said = kernel.kernel.fails("%%distributed\nbox").evalue
    assert "Make box['lock'] on the ranks instead, or leave it out of box's state" in said


# --- no code of the user's runs before a cell is sent ---------------------------------------------------


def test_naming_an_attribute_runs_none_of_the_users_code(notebook):
    notebook.run("""
        class EasyDict(dict):
            __getattr__ = dict.__getitem__
        cfg = EasyDict(lr=0.1)
        ran = []
        class Spy:
            def __getattr__(self, name):
                ran.append(name)
                raise AttributeError(name)
        class Called(Spy):
            def __call__(self): return self.lr
        spy, called = Spy(), Called()
        spy.lr = called.lr = 1
        del Spy, Called
    """)
    assert notebook.cell("cfg.lr, spy.lr, called()") == ([0.1, 1, 1], [])
    assert notebook.cell("cfg.lr, spy.lr, called()") == ([0.1, 1, 1], [])
    notebook.run("assert ran == []; spy.lr = 2")
    assert [notice.split()[0] for notice in notebook.cell("spy.lr")[1]] == ["spy"]
    notebook.push("spy")
    assert notebook.cell("spy.lr") == (2, [])
    notebook.run("assert ran == []")


def test_a_call_of_an_object_runs_none_of_its_lookups():
    ran = []

    class Called:
        def __getattr__(self, name):
            ran.append(name)
            raise AttributeError(name)

        def __call__(self):
            return 3

    assert list(nblaunch.run(Called(), nproc=1).values) == [3]
    assert ran == []


# --- hooks, gradients, graphs ---------------------------------------------------------------------------

HOOKED = """
    import torch
    calls = []
    layer = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1)
    before = layer.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    layer.register_forward_hook(lambda module, args, out: calls.append("forward"))
    layer.register_full_backward_hook(lambda module, into, out: calls.append("backward"))
    layer.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    layer.weight.register_post_accumulate_grad_hook(lambda weight: calls.append("grad"))
    opt = torch.optim.SGD(layer.parameters(), lr=1.0)
    opt.register_step_pre_hook(lambda *_: calls.append("step"))
    opt.register_step_post_hook(lambda *_: calls.append("stepped"))
    opt.register_state_dict_post_hook(lambda opt, state: {**state, "more": 1})
    layer(torch.full((1,), 100.0, requires_grad=True)).backward()
    calls.clear()
"""

STEP = """
    had = layer.weight.grad.item()
    layer.register_forward_hook(lambda module, args, out: calls.append("own"))
    opt.step()
    opt.zero_grad()
    layer(torch.full((1,), 100.0, requires_grad=True)).backward()
    had, layer.weight.item(), layer.weight.grad.item(), sorted(calls), opt.state_dict().get("more")
"""

STEPPED = [0.5, 0.5, 0.5, ["backward", "forward", "grad", "own", "pre", "step", "stepped"], 1]


def test_gradients_and_hooks_of_tensors_modules_and_optimizers_travel(notebook):
    notebook.run(HOOKED)
    assert notebook.cell(STEP) == (STEPPED, [])
    # A handle removes its hook there, too.
    assert notebook.cell("before.remove(); calls.clear(); layer(torch.ones(1)); calls") == (
        ["forward", "own"],
        [],
    )


def test_gradients_and_hooks_travel_to_fresh_ranks_and_home(kernel):
    kernel.run(HOOKED)
    assert kernel.fresh(STEP) == (STEPPED, [])
    kernel.kernel.ok(f"%%distributed --fresh -n {RANKS} --out res\nlayer, layer.weight.grad, opt, calls")
    kernel.run("""
        layer, grad, opt, calls = res.values[1]
        assert layer.weight.grad is grad
        assert opt.param_groups[0]["params"][0] is layer.weight
        opt.step()
        opt.zero_grad()
        layer(torch.full((1,), 100.0, requires_grad=True)).backward()
        assert sorted(calls) == ["backward", "forward", "grad", "pre", "step", "stepped"], calls
        assert (layer.weight.item(), layer.weight.grad.item()) == (0.5, 0.5)
    """)


def test_hooks_that_a_rank_registers_replace_none_that_came(kernel):
    kernel.run("""
        import torch
        from torch.utils.hooks import RemovableHandle
        calls, layer = [], torch.nn.Linear(1, 1)
        for number in range(3):
            layer.register_forward_hook(lambda *_, number=number: calls.append(number))
        known = RemovableHandle.next_id
    """)
    use = """
        for _ in range(known):
            layer.register_forward_hook(lambda *_: None)
        layer(torch.ones(1))
        calls
    """
    assert kernel.fresh(use) == ([0, 1, 2], [])


def test_a_scheduler_knows_its_optimizer_on_the_ranks(kernel):
    kernel.run("""
        import torch, warnings
        weight = torch.nn.Parameter(torch.ones(1))
        opt = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    """)
    use = """
        weight.grad = torch.ones(1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            {steps}
        [str(each.message)[:15] for each in seen], round(opt.param_groups[0]["lr"], 3), weight.item()
    """
    right, wrong = "opt.step(); scheduler.step()", "scheduler.step(); scheduler.step()"
    assert kernel.cell(use.format(steps=right)) == ([[], 0.1, 0.0], [])
    # What torch itself warns of is still said.
    assert kernel.fresh(use.format(steps=wrong)) == ([["Detected call o"], 0.01, 1.0], [])


LOST = "has lost its graph: on the ranks it is a leaf, and backward() ends there"

GRAPHS = """
    import torch
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 2).sum()
    losses = [(weight * 3).sum()]
    plain, detached = weight * 1, (weight * 2).detach()
    def read(): return loss.item()
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
    net = Net()
    net.hidden = net.layer(torch.ones(2))
"""


def test_a_tensor_that_loses_its_graph_is_named_once(notebook):
    notebook.run(GRAPHS)
    value, notices = notebook.cell("loss.grad_fn is None, loss.item()")
    assert (value, len(notices)) == ([True, 4.0], 1)
    assert notices[0].startswith(f"loss {LOST}. Compute it in the cell, or send loss.detach()")
    assert notebook.cell("loss.item(), read(), weight.requires_grad, detached.tolist()")[1] == []
    for name in ("losses", "net"):
        (notice,) = notebook.cell(f"{name} is not None")[1]
        assert notice.startswith(f"{name} holds a tensor that has lost its graph")
        assert notebook.cell(f"{name} is not None")[1] == []


def test_a_tensor_that_loses_its_graph_is_named_on_fresh_ranks_in_a_call_and_in_a_push(kernel):
    kernel.run(GRAPHS)
    assert kernel.fresh("weight.grad is None, detached.sum().item()") == ([True, 4.0], [])
    notices = kernel.fresh("read(), losses[0].item()")[1]
    assert [notice.partition(" that has lost")[0].partition(" has lost")[0] for notice in notices] == [
        "loss",
        "losses holds a tensor",
    ]
    kernel.run("""
        import nblaunch
        def function(given): return given["loss"].item()
        called = nblaunch.run(function, ({"loss": loss},), nproc=1)
    """)
    (notice,) = kernel.kernel.value("list(called.warnings)")
    assert notice.startswith("args[0] holds a tensor that has lost its graph")
    assert f"note: loss {LOST}" in kernel.kernel.ok("%distributed push loss").result


def test_a_weight_that_a_module_computes_before_each_call_has_lost_nothing(kernel):
    kernel.run("""
        import torch, warnings
        from torch.nn.utils import prune
        pruned = torch.nn.Sequential(torch.nn.Linear(2, 2))
        prune.l1_unstructured(pruned[0], "weight", 0.5)
        with warnings.catch_warnings(action="ignore"):
            older = torch.nn.utils.weight_norm(torch.nn.LSTM(2, 2), "weight_hh_l0")
        spectral = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
        _ = spectral(torch.ones(2))
    """)
    use = "[list(each(torch.ones(1, 2))[0].shape) for each in (pruned, older, spectral)]"
    assert kernel.cell(use) == ([[2], [1, 2], [2]], [])
    assert kernel.fresh(use) == ([[2], [1, 2], [2]], [])
