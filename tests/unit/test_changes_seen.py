"""What the ranks have is compared with what the notebook has, also at a third look: a short way."""

from __future__ import annotations

import os
import re
import textwrap
from unittest import mock

import pytest
import torch
from lanes import sampled

from nblaunch.capture.capture import capture_cell
from nblaunch.capture.names import cell_names
from nblaunch.client.knowledge import Knowledge
from nblaunch.protocol.messages import Names


class Notebook:
    """A namespace whose variables one rank has got."""

    def __init__(self, source: str) -> None:
        self.variables: dict[str, object] = {"__name__": "__main__", "torch": torch}
        self.run(source)
        self.knowledge = Knowledge()
        self.knowledge.begin(0, 1)
        self.names: dict[int, Names] = {}

    def run(self, source: str) -> None:
        exec(textwrap.dedent(source), self.variables)  # noqa: S102 - a cell of the test's own

    def changed(self, cell: str) -> set[str]:
        """Send what a cell uses; return the variables that were changed since they were sent."""
        [view] = self.knowledge.views([0], self.names, self.variables)
        captured = capture_cell(cell_names(cell), self.variables, known=view)
        self.knowledge.remember(view, view.delivery(captured))
        view.find_changes()
        had = self.names[0].names if 0 in self.names else ()
        self.names[0] = Names(rank=0, names=(*had, *captured.names, *captured.packed.carried))
        return view.changed


MODEL = """
class Block(torch.nn.Module):
    scale = 2
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.options = {"rates": [0.1, 0.2], "names": {"first": "a"}, "none": {}}
        self.steps = []
        self.made = torch.ones(2) * 1
    def forward(self, x):
        return self.linear(x)
class Tied:
    __slots__ = ("__dict__",)
net = torch.nn.ModuleList(Block() for _ in range(3))
tied = Tied()
tied.net = net
"""

CHANGES = [
    "net[1].new = 1",
    "net[1].training = False",
    "net[1].training = 1",
    "del net[1].steps",
    "net[1].steps.append(1)",
    "net[1].steps = None",
    "net[1].steps = ()",
    "net[1].options['rates'][0] = 0.3",
    "net[1].options['rates'] = [0.1, 0.3]",
    "net[1].options['names']['first'] = 'b'",
    "net[1].options['names']['second'] = 'b'",
    "net[1].options['none']['first'] = 'b'",
    "net[1].made += 1",
    "net[1].made = net[0].made",
    "net[1].linear.weight.data = torch.ones(2, 2)",
    "net[1].linear.weight.requires_grad_(False)",
    "net[1].linear.weight.grad = torch.ones(2, 2)",
    "net[1].linear.weight.register_hook(print)",
    "net[1].linear.weight = torch.nn.Parameter(torch.ones(2, 2))",
    "net[1].linear = net[0].linear",
    "net[1].register_forward_hook(print)",
    "net.append(Block())",
    "Block.scale = 3",
    "Block.forward = lambda self, x: x",
    "Block.forward.__code__ = (lambda self, x: x).__code__",
    "Block.forward.__defaults__ = (1,)",
    "Block.forward.__kwdefaults__ = {'y': 1}",
    "Block.forward.__doc__ = 'new'",
    "Block.forward.note = 1",
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("looks", [1, 3])
def test_a_change_of_a_model_is_seen_and_nothing_else_is(change, looks):
    notebook = Notebook(MODEL)
    assert [notebook.changed("net, tied") for _ in range(looks)] == [set()] * looks
    notebook.run(change)
    assert notebook.changed("net, tied") == {"net", "tied"}


@pytest.mark.parametrize(
    "change",
    ["words['w50000'] = -2", "words['w3'] = 0.5", "words['new'] = words.pop('w3')", "del words['w7']"],
)
def test_a_change_anywhere_in_a_large_dictionary_is_seen(change):
    notebook = Notebook("words = {f'w{i}': -1 for i in range(100_000)}")
    assert [notebook.changed("words") for _ in range(3)] == [set()] * 3
    notebook.run(change)
    assert notebook.changed("words") == {"words"}


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("found = [1j]", "found.append(2j)"),
        ("found = {'a': 1j}", "found['a'] = 2j"),
        ("found = ['text' * 5_000_000]", "found.append('more')"),
        ("found = ['a', 'text' * 5_000_000]", "found[0] = 'b'"),
    ],
)
def test_a_change_in_a_container_of_numbers_and_texts_is_seen(source, change):
    notebook = Notebook(source)
    assert [notebook.changed("found") for _ in range(3)] == [set()] * 3
    notebook.run(change)
    assert notebook.changed("found") == {"found"}


def test_what_is_kept_to_compare_a_large_dictionary_goes_with_it():
    notebook = Notebook("words = {f'w{i}': -1 for i in range(20_000)}")
    for _ in range(3):
        notebook.changed("words")
    table = notebook.knowledge._table
    assert table.attached
    notebook.run("del words")
    notebook.knowledge.sweep()
    assert not table.attached


IMPORTS = """
import abc, argparse, array, configparser, contextlib, dataclasses, datetime, enum, functools, io, logging
import operator, pathlib, random, re, types, typing, uuid, weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
import numpy as np, pandas as pd
"""


def cases(text: str) -> dict[str, tuple[str, str]]:
    """Read cases: a line with a name and what uses `it`, and indented, how `it` is made."""
    found = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        header, made = block.split("\n", 1)
        name, used = header.split(": ", 1)
        found[name] = made, used
    return found


# A variable `it`, and code that uses it without changing it.
UNCHANGED = {
    "tuple": ("it = (1, [2], {3: 4})", "it[1], repr(it)"),
    "set of texts": ("it = {str(i) for i in range(100)}", "sorted(it), 'x' in it"),
    "frozenset": ("it = frozenset(map(str, range(100)))", "hash(it)"),
    "dict of texts": ("it = {'a' * 3: 'b' * 3, 1: [2]}", "it.get('aaa'), list(it.items())"),
    "defaultdict": ("it = defaultdict(list, a=[1])", "it['a'], it.get('b')"),
    "Counter": ("it = Counter('abca')", "it.most_common(), it['x']"),
    "OrderedDict": ("it = OrderedDict(a=[1])", "list(it), it == {}"),
    "ChainMap": ("it = ChainMap({'a': 1}, {'b': 2})", "it['b'], list(it)"),
    "deque": ("it = deque([1, [2]], 5)", "it[0], list(it)"),
    "UserDict": ("it = UserDict(a=1)", "it['a'], len(it)"),
    "array": ("it = array.array('d', [1, 2])", "it[0], it.tolist()"),
    "bytearray": ("it = bytearray(b'abc')", "bytes(it), it.find(b'b')"),
    "range": ("it = [range(3), slice(1, 2)]", "list(it[0])"),
    "StringIO": ("it = io.StringIO('abc')", "it.getvalue()"),
    "pattern": ("it = re.compile('a+')", "it.match('aa').group()"),
    "path": ("it = pathlib.Path('/a') / 'b'", "str(it), hash(it), it.name, it.parts, it.suffix"),
    "datetime": ("it = [datetime.datetime(2026, 1, 1), datetime.timedelta(1)]", "hash(it[0]), str(it)"),
    "Decimal": ("it = Decimal('1.10')", "hash(it), it + 1"),
    "Fraction": ("it = Fraction(1, 3)", "hash(it), it + 1"),
    "uuid": ("it = uuid.UUID(int=3)", "hash(it), it.hex"),
    "random": ("it = random.Random(3)", "it.getstate()"),
    "logger": ("it = logging.getLogger('a.b')", "it.isEnabledFor(10), it.debug('x'), it.level"),
    "exception": ("it = ValueError('a', 1)", "str(it), repr(it)"),
    "SimpleNamespace": ("it = types.SimpleNamespace(a=[1])", "it.a, repr(it), it == 1"),
    "itemgetter": ("it = operator.itemgetter('a')", "it({'a': 1})"),
    "argparse": ("it = argparse.Namespace(lr=0.1)", "vars(it), it.lr"),
    "annotated function": ("def it(x: int) -> 'str': return x", "__import__('typing').get_type_hints(it)"),
    "lambda": ("it = lambda x: x + 1", "it(1)"),
    "generator function": ("def it(): yield 1", "list(it())"),
    "coroutine function": ("async def it(): return 1", "it().close()"),
    "class with subclasses": ("class it: pass", "type('C', (it,), {})()"),
    "loop": ("it = [1]; it.append(it)", "repr(it)"),
    "array of numbers": ("it = np.arange(6.)", "it.sum(), it[1:], it.T, it.mean(), it.flags, repr(it)"),
    "array of objects": ("it = np.array([[1], 'a', None], object)", "it[0], it == 1"),
    "view": ("base = np.arange(6.); it = base[1:4]", "it.sum(), base.sum()"),
    "masked array": ("it = np.ma.masked_array([1, 2], [0, 1])", "it.sum(), it.mask"),
    "record array": ("it = np.rec.array([(1, 2.)], dtype=[('a', int), ('b', float)])", "it.a, it[0]"),
    "Generator": ("it = np.random.default_rng(3)", "it.bit_generator.state"),
    "poly": ("it = np.poly1d([1, 2])", "it(3), it.roots"),
    "groupby": ("it = pd.DataFrame({'a': [1, 1], 'b': [2, 3]}).groupby('a')", "it.sum(), it.groups, len(it)"),
    "parameter": ("it = torch.nn.Parameter(torch.ones(2))", "it.sum().backward; (it * 2).sum(), it.grad"),
    "sparse": ("it = torch.eye(3).to_sparse()", "it.to_dense(), it.is_coalesced()"),
    "generator of torch": ("it = torch.Generator().manual_seed(3)", "it.initial_seed()"),
    "device": ("it = [torch.device('cpu'), torch.float32, torch.Size([1])]", "str(it)"),
    "loss": ("it = torch.nn.CrossEntropyLoss()", "it(torch.ones(1, 2), torch.tensor([1]))"),
    "dataset": ("it = torch.utils.data.TensorDataset(torch.arange(4.))", "it[0], len(it)"),
    "scaler": ("it = torch.amp.GradScaler('cpu')", "it.is_enabled(), it.get_scale()"),
}
UNCHANGED |= cases("""
set of objects: len(it), list(it)
    class A: pass
    it = {A() for _ in range(20)}
dict by object: it[key], hash(key)
    class A: pass
    key = A()
    it = {key: 1}
namedtuple: it.a, it._asdict()
    P = namedtuple('P', 'a b')
    it = P(1, [2])
logger in an object: it.log.isEnabledFor(10), it.log.debug('x')
    class A: pass
    it = A()
    it.log = logging.getLogger('a.b')
weak dictionary: it[key]
    class A: pass
    key = A()
    it = weakref.WeakKeyDictionary({key: [1]})
ArgumentParser: it.parse_args([])
    it = argparse.ArgumentParser()
    it.add_argument('--lr')
ConfigParser: it['a'].getint('b')
    it = configparser.ConfigParser()
    it['a'] = {'b': '1'}
function: it(), it.__doc__, it.__annotations__
    def it(x=[1], *, y={2: 3}): return (x, y, z)
    z = 1
closure: it()
    def make(v):
        def f(): return v
        return f
    it = make([1])
recursive closure: it(3)
    def make():
        def f(n): return n and f(n - 1)
        return f
    it = make()
partial: it()
    def f(x): return x
    it = functools.partial(f, [1])
wraps: it(1)
    def f(x): return x
    @functools.wraps(f)
    def it(x): return f(x)
lru_cache: it(1), it(2), it.cache_info()
    @functools.lru_cache
    def it(x): return x
singledispatch: it(1), it('a'), it.dispatch(bool)
    @functools.singledispatch
    def it(x): return x
    @it.register
    def _(x: int): return -x
context manager: with it(): pass
    @contextlib.contextmanager
    def it(): yield 1
class: it().f(), repr(it)
    class it:
        n = 1
        def __init__(self):
            self.a = 1
        def f(self): return self.a
class with super: it(), hash(it)
    class B: pass
    class it(B):
        def __init__(self):
            super().__init__()
instance of super: it.x, A()
    class A:
        def __init__(self):
            super().__init__()
            self.x = [1]
    it = A()
class with slots: it.a, A(), __import__('copy').copy(it)
    class A:
        __slots__ = ('a', 'b')
    it = A()
    it.a = [1]
pickled class: __import__('copy').deepcopy(it), it.__reduce_ex__(4)
    class A: pass
    it = A()
properties: it.p, it.s(), it.c()
    class A:
        @property
        def p(self): return 1
        @staticmethod
        def s(): return 2
        @classmethod
        def c(cls): return 3
    it = A()
bound method: it()
    class A:
        def f(self): return [1]
    it = A().f
cached_property: it().p
    class A:
        @functools.cached_property
        def p(self): return [1]
    it = A
    A().p
cached_property of an object: it.p
    class A:
        @functools.cached_property
        def p(self): return [1]
    it = A()
cached_property and slots: it.p
    class A:
        __slots__ = ('a', '__dict__')
        @functools.cached_property
        def p(self): return [1]
    it = A()
    it.a = 1
metaclass: it.f(), it()
    class M(type):
        def f(cls): return 1
    class it(metaclass=M): pass
abstract class: it().f(), isinstance(it(), B), isinstance(3, B), issubclass(int, B)
    class B(abc.ABC):
        @abc.abstractmethod
        def f(self): ...
    class it(B):
        def f(self): return 1
protocol: isinstance(3, it), isinstance('a', it)
    @typing.runtime_checkable
    class it(typing.Protocol):
        def f(self): ...
generic: it[int](), it[str], typing.get_type_hints(it.f)
    T = typing.TypeVar('T')
    class it(typing.Generic[T]):
        def f(self, x: T) -> T: return x
generic instance: it.__orig_class__, A[str]()
    T = typing.TypeVar('T')
    class A(typing.Generic[T]): pass
    it = A[int]()
typed dictionary: it(a=1), typing.get_type_hints(it)
    class it(typing.TypedDict):
        a: int
named tuple class: it.a, it._replace(a=[])
    class P(typing.NamedTuple):
        a: list
    it = P([1])
enum: it.A, it(1), it['B'], list(it), hash(it.A)
    class it(enum.Enum):
        A = 1
        B = [2]
enum member: it[0].name, it[0] is E.A, hash(it[0])
    class E(enum.Enum):
        A = 1
    it = [E.A]
flag: F.A | F.B, F.A & it, ~it, F(3), str(it)
    class F(enum.Flag):
        A = 1
        B = 2
    it = F.A | F.B
dataclass: repr(it), it == A(), dataclasses.asdict(it), dataclasses.replace(it, a=2), dataclasses.fields(A)
    @dataclasses.dataclass
    class A:
        a: int = 1
        b: list = dataclasses.field(default_factory=list)
    it = A()
dataclass with slots: repr(it), hash(it), it < A(2), dataclasses.asdict(it)
    @dataclasses.dataclass(slots=True, frozen=True, order=True)
    class A:
        a: int = 1
    it = A()
descriptor: it().d
    class D:
        def __set_name__(self, o, n):
            self.n = n
        def __get__(self, i, o): return 1
    class it:
        d = D()
init_subclass: it(), B.__subclasses__()
    class B:
        def __init_subclass__(cls, **k):
            super().__init_subclass__(**k)
    class it(B): pass
callable object: it()
    class A:
        def __call__(self): return 1
    it = A()
own hash: A() in it
    class A:
        def __hash__(self): return 1
        def __eq__(self, o): return True
    it = {A(): [A()]}
getattr: it.a
    class A(dict):
        __getattr__ = dict.__getitem__
    it = A(a=[1])
lazy: it.x
    class A:
        def __getattr__(self, n):
            if n[0] == '_':
                raise AttributeError(n)
            return n
    it = A()
subclass of dict: it['a'], it.x, dict(it)
    class A(dict): pass
    it = A(a=[1])
    it.x = [2]
subclass of list: it[0], it.x
    class A(list): pass
    it = A([1])
    it.x = [2]
subclass of int: it + 1, hash(it)
    class A(int): pass
    it = A(3)
tree: it.child.parent
    class N: pass
    it = N()
    it.child = N()
    it.child.parent = it
Series: it['a'], it.a, it.sum(), it.index.is_unique, repr(it)
    it = pd.Series([1, 2], index=['a', 'b'])
DataFrame: it['a'], it.a, it.loc[0], it.describe(), it.groupby('b').a.sum(), it.head(), repr(it)
    it = pd.DataFrame({'a': [1, 2], 'b': ['x', 'y'], 'c': pd.Categorical(['u', 'v'])})
DataFrame sorted: it._repr_html_(), it.index.is_unique, it.sort_values('a'), it.merge(it), it.query('a > 1')
    it = pd.DataFrame({'a': [1, 2], 'b': ['x', 'y'], 'c': pd.Categorical(['u', 'v'])})
DatetimeIndex: it.loc['2026-01-02'], it.resample('D').sum()
    it = pd.Series([1, 2, 3], pd.date_range('2026', periods=3))
MultiIndex: it.loc['a'], it.unstack(), it.index.levels
    it = pd.Series([1, 2], pd.MultiIndex.from_product([['a'], [1, 2]]))
tensor: it.sum(), it[1:], it.numpy(), repr(it), it.view(2, 3), it.storage_offset()
    it = torch.arange(6.)
tensors of one memory: it[0].sum(), it[0].add(1)
    base = torch.zeros(4); it = [base[:2], base[2:], base.view(2, 2)]
module: it.eval()[:3](torch.ones(1, 2)), it.train(), it.state_dict(), it[3](torch.ones(1, 1, 2))
    nn = torch.nn
    it = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), nn.LSTM(2, 2))
module of a cell: Net(); it(torch.ones(1)); it.shape; it.act; repr(it)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.l = torch.nn.Linear(1, 1)
            self.act = torch.relu
            self.shape = (1, 2)
        def forward(self, x): return self.act(self.l(x))
    it = Net()
class of modules: m = it(); m(torch.ones(1)); m.state_dict(); repr(m)
    class it(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.l = torch.nn.Linear(1, 1)
        def forward(self, x): return self.l(x)
autograd function: it.apply(torch.ones(1, requires_grad=True)).sum().backward()
    class it(torch.autograd.Function):
        @staticmethod
        def forward(c, x): return x * 2
        @staticmethod
        def backward(c, g): return g
attention: it.eval()(torch.ones(1, 1, 4)); it.train(); list(it.parameters())
    it = torch.nn.TransformerEncoderLayer(4, 2, 4)
optimizer: it.state_dict(), repr(it), it.state[p], it.param_groups[0]['lr']
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    it = torch.optim.Adam([p])
    it.step()
scheduler: it.get_last_lr(), it.state_dict()
    p = torch.nn.Parameter(torch.ones(2))
    o = torch.optim.SGD([p], lr=1.0)
    it = torch.optim.lr_scheduler.StepLR(o, 3)
lambda scheduler: it.get_last_lr()
    p = torch.nn.Parameter(torch.ones(2))
    o = torch.optim.SGD([p], lr=1.0)
    it = torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9 ** e)
data loader: len(it), list(it)
    it = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4.0)), batch_size=2)
dataset of a cell: list(it)
    class D(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return float(i)
    it = torch.utils.data.DataLoader(D())
distribution: it.log_prob(torch.zeros(1)), it.sample(), it.mean
    it = torch.distributions.Normal(torch.zeros(1), torch.ones(1))
averaged model: it(torch.ones(1))
    it = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
""")
LIBRARIES = cases("""
sklearn: it.predict([[2]]), repr(it), it._repr_html_(), it.get_params(), it.score([[0], [1]], [0, 1])
    from sklearn.linear_model import LinearRegression
    it = LinearRegression().fit([[0], [1]], [0, 1])
sklearn pipeline: it.predict([[2]]), repr(it), it.get_params(), it[0]
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.tree import DecisionTreeClassifier
    it = make_pipeline(StandardScaler(), DecisionTreeClassifier(random_state=0)).fit([[0], [1]], [0, 1])
sklearn metadata: repr(it), it.get_params(), hash(it)
    from sklearn.svm import SVC
    it = SVC(probability=False)
pydantic: repr(it), it.model_dump(), it == M(), M.model_json_schema(), M(a=2), it.model_copy()
    import pydantic
    class M(pydantic.BaseModel):
        a: int = 1
        b: list = []
    it = M()
pydantic class: it(a=2), it.model_json_schema(), it.model_fields
    import pydantic
    class it(pydantic.BaseModel):
        a: int = 1
attrs: repr(it), it == A(), attrs.asdict(it), attrs.fields(A)
    import attrs
    @attrs.define
    class A:
        a: int = 1
    it = A()
transformers: it.eval()(torch.tensor([[1]])), it.train(), repr(it), it.config.to_dict(), it.num_parameters()
    import transformers
    c = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=10
    )
    it = transformers.BertModel(c)
transformers config: it.to_dict(), repr(it), it.hidden_size
    import transformers
    it = transformers.GPT2Config()
lightning: repr(it), it.hparams, L(), it.device
    import lightning
    class L(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters()
            self.l = torch.nn.Linear(1, 1)
    it = L()
torchmetrics: repr(it), hash(it), it.device
    import torchmetrics
    it = torchmetrics.MeanMetric()
""")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*UNCHANGED, *sampled(LIBRARIES, 0)])
def test_what_is_used_and_not_changed_is_not_noticed(case):
    made, used = (UNCHANGED | LIBRARIES)[case]
    looks = []
    with mock.patch.dict(os.environ):  # libraries set variables
        notebook = Notebook(IMPORTS)
        notebook.run(made)
        for _ in range(4):
            looks.append(notebook.changed("it"))
            notebook.run(used)
    assert looks == [set()] * 4
