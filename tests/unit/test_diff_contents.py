"""What counts as equal: any two objects listed as two ranks list them, and compared."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from nblaunch.insight.comparing import BLOCK_BYTES, PIECE_BYTES, Ask, compare, size_of
from nblaunch.insight.difference import Difference
from nblaunch.probes import contents
from nblaunch.probes.blocks import HashedTensor, hashed
from nblaunch.probes.diff import Holding


def holding_of(obj: object) -> Holding:
    """Return a rank's part in a comparison of this object."""
    return Holding(lambda _: obj)


def compared(*objects: object, name: str = "x") -> Difference:
    """Compare objects as ranks would that have one each."""
    ranks = [holding_of(obj) for obj in objects]
    rounds = compare(range(len(objects)), (name,))
    asked, moved = next(rounds), 0
    while True:
        answers = {rank: ranks[rank].answer(asked.ask) for rank in asked.ranks}
        moved += sum(map(size_of, answers.values()))
        try:
            asked = rounds.send(answers)
        except StopIteration as end:
            report: Difference = end.value
            return dataclasses.replace(report, moved=moved)


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Stateful:
    def __init__(self, momentum):
        self.momentum, self.cache = momentum, object()

    def state_dict(self):
        return {"momentum": torch.tensor([0.0, self.momentum])}


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Locked:
    def __init__(self):
        self.lock, self.size = threading.Lock(), 3


def cyclic(last):
    first: list[object] = [1]
    first.append({"back": first, "last": last})
    return first


def model(change=0.0):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 2)))
    with torch.no_grad():
        net.get_submodule("2.0").get_parameter("weight")[1, 3] += change
    return net


def tied(head=None):
    torch.manual_seed(1)
    net = nn.Module()
    net.first = nn.Linear(2, 2)
    net.head = net.first if head is None else head
    return net


def generator(seed):
    made = torch.Generator()
    made.manual_seed(seed)
    return made


def frozen(array):
    array.flags.writeable = False
    return array


OBJECTS = {
    "numbers": (lambda: [1, 2.5, True, None, 3 + 1j], lambda: [1, 2.5, True, None, 3 + 2j], "x[4]"),
    "negative zero": (lambda: [0.0], lambda: [-0.0], "x[0]"),
    "an int for a bool": (lambda: [True], lambda: [1], "x[0]"),
    "texts": (lambda: ["a", "b" * 500], lambda: ["a", "b" * 499 + "c"], "x[1]"),
    "bytes": (lambda: {"raw": b"ab"}, lambda: {"raw": b"ac"}, "x['raw']"),
    "a dict": (lambda: {"a": 1, "b": [1, 2]}, lambda: {"b": [1, 3], "a": 1}, "x['b'][1]"),
    "keys of other types": (
        lambda: {1: 0, "1": 0, (1, "b"): 0, None: 0, Colour.RED: [1]},
        lambda: {1: 0, "1": 0, (1, "b"): 0, None: 0, Colour.RED: [2]},
        None,
    ),
    "subclasses": (
        lambda: [OrderedDict(a=1), defaultdict(list, k=[1]), Counter("aab"), deque([1, 2])],
        lambda: [OrderedDict(a=1), defaultdict(list, k=[1]), Counter("aab"), deque([1, 3])],
        "x[3][1]",
    ),
    "a set": (lambda: {"a", "b", 3, (1, 2)}, lambda: {"b", (1, 2), "a", 4}, None),
    "a dataclass": (Config, lambda: Config(layers=[1, 5]), "x.layers[1]"),
    "attributes that are no names": (
        lambda: SimpleNamespace(**{"a": 1, "b c": 2}),
        lambda: SimpleNamespace(**{"a": 1, "b c": 3}),
        "x.__dict__['b c']",
    ),
    "slots": (lambda: Slotted(1, [2]), lambda: Slotted(1, [3]), "x.b[0]"),
    "an enum": (lambda: (Colour.RED,), lambda: (Colour.BLUE,), "x[0]"),
    "a cycle": (lambda: cyclic(1), lambda: cyclic(2), "x[1]['last']"),
    "a function": (lambda: lambda v: v + 1, lambda: lambda v: v + 2, "x"),
    "a long list of numbers": (
        lambda: list(range(5000)),
        lambda: [*range(4000), -1, *range(4001, 5000)],
        "x[4000]",
    ),
    "a generator": (lambda: generator(1), lambda: generator(2), None),
    "random": (lambda: random.Random(1), lambda: random.Random(2), None),
    "a random generator of NumPy": (lambda: np.random.default_rng(1), lambda: np.random.default_rng(2), None),
    "an array": (lambda: np.arange(6.0).reshape(2, 3), lambda: np.array([[0, 1, 2], [3, 4, 9.0]]), "x[1, 2]"),
    "an array to read only": (lambda: frozen(np.arange(9)), lambda: frozen(np.arange(9) * 2), "x[1]"),
    "an array in Fortran's order": (
        lambda: np.arange(6.0).reshape(2, 3),
        lambda: np.asfortranarray(np.array([[0, 1, 2], [3, 4, 9.0]])),
        "x[1, 2]",
    ),
    "an array of texts": (lambda: np.array(["ab", "cd"]), lambda: np.array(["ab", "cx"]), "x[1]"),
    "an array of objects": (
        lambda: np.array([1, "a", None], dtype=object),
        lambda: np.array([1, "b", None], dtype=object),
        "x.flat[1]",
    ),
    "records": (
        lambda: np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.array([(1, 2.0), (3, 5.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "x[1]",
    ),
    "a scalar of NumPy": (lambda: [np.float32(1)], lambda: [np.float32(2)], "x[0]"),
    "a model": (model, lambda: model(0.5), "x.2.0.weight[1, 3]"),
    "a layer under two names": (tied, lambda: tied(nn.Linear(2, 2)), "x.head.weight[0, 0]"),
    "training": (model, lambda: model().eval(), "x.0.training"),
    "what has a state": (lambda: Stateful(1), lambda: Stateful(2), "x.state_dict()['momentum'][1]"),
    "a dtype": (lambda: [torch.float32], lambda: [torch.float64], "x[0]"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_of_equal_value_are_equal_and_the_first_part_that_differs_is_named(kind):
    make, other, path = OBJECTS[kind]
    one, two = make(), make()
    assert not compared(one, two), kind
    assert not compared(one, copy.deepcopy(two) if kind != "a generator" else two)
    found = compared(one, two, other())
    assert found.rows[0].groups == ((0, 1), (2,))
    if path is not None:
        assert found.rows[0].path == path


BASE = torch.arange(24).reshape(4, 6)
TENSORS = {
    "float64": BASE.double(),
    "float16": BASE.half(),
    "bfloat16": BASE.bfloat16(),
    "int8": BASE.to(torch.int8),
    "bool": BASE % 2 == 0,
    "complex64": BASE.to(torch.complex64),
    "complex128": BASE.to(torch.complex128),
    "float8": BASE.float().to(torch.float8_e4m3fn),
    "uint16": BASE.to(torch.uint16),
    "transposed": BASE.float().T.contiguous().T,
    "every other": BASE.float().repeat(1, 2)[:, ::2],
    "conjugate": BASE.to(torch.complex64).conj(),
    "odd bytes": torch.arange(25).to(torch.uint8)[1:].view(4, 6),
    "expanded": torch.tensor([3.0]).expand(4, 6),
}


def changed(tensor):
    """Return a copy of which one element is another one."""
    copied = tensor.clone().contiguous().resolve_conj()
    raw = copied.view(-1).view(torch.uint8)
    raw[11 * tensor.element_size()] ^= 1
    return copied


@pytest.mark.parametrize("kind", TENSORS)
def test_of_a_tensor_of_any_type_and_layout_the_element_is_named(kind):
    tensor = TENSORS[kind]
    assert not compared(tensor, tensor.clone())
    assert not compared(tensor, tensor.contiguous().clone(memory_format=torch.contiguous_format))
    row = compared(tensor, tensor, changed(tensor)).rows[0]
    assert (row.path, row.groups) == ("x[1, 5]", ((0, 1), (2,)))
    assert (row.differing, row.elements, row.exact) == (1, 24, True)
    if kind == "float64":
        assert row.shown == ("11", "11")  # the last bit of 53
    if kind == "bool":
        assert row.largest == 1.0


def test_the_largest_difference_is_found_with_its_place():
    one = torch.zeros(100, 100)
    two, three = one.clone(), one.clone()
    two[3, 4], two[50, 60], three[50, 60] = 0.5, 1.5, -2.0
    row = compared(one, two, three).rows[0]
    assert (row.path, row.largest, row.largest_at, row.differing) == ("x[3, 4]", 3.5, "x[50, 60]", 2)
    assert row.shown == ("0", "0.5", "0")


def test_of_a_tensor_that_differs_everywhere_bounds_are_given_and_little_moves():
    one = torch.randn(3_000_000)
    found = compared(one, one + 1)
    row = found.rows[0]
    assert found.moved < 1_000_000
    assert row.path == "x[0]"
    assert not row.exact
    assert row.largest == pytest.approx(1, rel=1e-5)
    assert "at least" in str(found)


def test_zeros_with_a_sign_and_nans_differ_by_their_bytes():
    row = compared(torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])).rows[0]
    assert (row.path, row.largest) == ("x[1]", 0.0)
    assert "not their bytes" in row.what
    nan = torch.tensor([float("nan")] * 3)
    assert not compared(nan, nan.clone())
    assert math.isnan(compared(nan, torch.zeros(3)).rows[0].largest or 0)


SPECIAL = {
    "empty": lambda: (torch.empty(0, 3), torch.empty(0, 4)),
    "of no dimension": lambda: (torch.tensor(1.0), torch.tensor(2.0)),
    "meta": lambda: (torch.empty(3, device="meta"), torch.empty(4, device="meta")),
    "sparse": lambda: (torch.eye(3).to_sparse(), torch.eye(3).mul(2).to_sparse()),
    "rows of sparse": lambda: (torch.eye(3).to_sparse_csr(), torch.eye(3).mul(2).to_sparse_csr()),
    "of another dtype": lambda: (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    "of another shape": lambda: (torch.zeros(3, 2), torch.zeros(2, 3)),
    "a frozen parameter": lambda: (
        nn.Parameter(torch.ones(1)),
        nn.Parameter(torch.ones(1), requires_grad=False),
    ),
    "quantized": lambda: (
        torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(torch.tensor([1.0, 3.0]), 0.1, 0, torch.qint8),
    ),
    "quantized in another way": lambda: (
        torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(torch.tensor([2.0, 4.0]), 0.2, 0, torch.qint8),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SPECIAL)
def test_tensors_of_every_kind_are_compared(kind):
    one, two = SPECIAL[kind]()
    assert not compared(one, one.clone() if kind != "a frozen parameter" else one)
    assert compared(one, two)


def test_long_texts_are_cut_so_that_their_ends_can_be_seen():
    paths = [f"/data/checkpoints/{'d' * 60}/run{number}/step-000100" for number in range(2)]
    shown = compared(*paths).rows[0].shown
    assert ["run0" in shown[0], "run1" in shown[1]] == [True, True]


def test_what_differs_in_type_or_is_missing_is_told():
    assert compared([1], (1,)).rows[0].shown == ("list", "tuple")
    row = compared({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}).rows[0]
    assert (row.path, row.what) == ("x['b']", "only on rank 0")
    row = compared([1, 2], [1, 2], [1, 2, 3]).rows[0]
    assert (row.path, row.what) == ("x[2]", "only on rank 2")


def test_what_cannot_be_taken_apart_is_named_and_the_rest_compared():
    one, two = Locked(), Locked()
    found = compared(one, two)
    assert not found
    assert found.rows[0].notes == ("x.lock was not compared (TypeError)",)
    two.size = 4
    assert compared(one, two).rows[0].path == "x.size"


def test_an_object_within_itself_many_times_over_is_listed_in_bounds(monkeypatch):
    monkeypatch.setattr(contents, "MOST_ENTRIES", 1000)

    def nested(last):
        found = [last]
        for _ in range(60):
            found = [found, found]
        return found

    assert not compared(nested(1), nested(1))
    assert compared(nested(1), nested(2)).rows[0].path != ""
    wide = list(map(str, range(3000)))
    assert not compared(wide, list(wide))
    assert "after the first 1000" in compared(wide, [*wide[:-1], "other"]).rows[0].path


def test_a_long_chain_needs_no_deep_recursion():
    chain, other = [], []
    for number in range(5_000):
        chain, other = [chain, number], [other, -1 if number == 0 else number]
    assert compared(chain, other).rows[0].what


def test_values_and_not_identities_count():
    shared = torch.ones(3)
    assert not compared([shared, shared], [shared.clone(), shared.clone()])


def test_blocks_notice_order_signs_and_pairs():
    tensor = torch.randn(1 << 17, dtype=torch.float64)
    known = hashed(tensor).digests
    for change in ([5, 6], [0, 1 << 16], [3, 3 + 512]):
        other = tensor.clone()
        other[change] = other[list(reversed(change))]
        assert hashed(other).digests != known
        other = tensor.clone()
        other[change] = -other[change]
        assert hashed(other).digests != known


def test_only_the_blocks_that_differ_are_read_again(monkeypatch):
    one = torch.zeros(1 << 20)
    two = one.clone()
    two[777_777] = 1
    read = []
    real = HashedTensor._bytes

    def counted(tensor, start, count):
        read.append(count)
        return real(tensor, start, count)

    monkeypatch.setattr(HashedTensor, "_bytes", counted)
    assert compared(one, two).rows[0].path == "x[777777]"
    assert 0 < sum(read) <= 2 * (BLOCK_BYTES + PIECE_BYTES)


def test_paths_are_looked_for_among_all_entries():
    holding = Holding(lambda _: {"a": 1})
    holding.answer(compare_outline())
    assert holding.answer(Ask("has", (0, "x['a']")))
    assert not holding.answer(Ask("has", (0, "x['b']")))


def compare_outline():
    return next(compare((0,), ("x",))).ask
