"""Any Python object is a value: what a rank returns arrives in the notebook as it was there."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.oldest

PLAIN = [
    "None",
    "rank",
    "rank + 0.5",
    "10**30 + rank",
    "complex(rank, 1)",
    "'text ' * rank",
    "'\\ud800 half a pair'",
    "b'\\x00' * rank",
    "bytearray(b'ab')",
    "{'rank': rank, 'nested': [{'deep': (rank, None, {rank})}]}",
    "{rank, 'a'}",
    "frozenset([rank])",
    "range(rank, 10)",
    "slice(rank)",
    "...",
    "__import__('pathlib').Path('a') / str(rank)",
    "__import__('datetime').datetime(2024, 1, 1 + rank)",
    "__import__('fractions').Fraction(rank, 3)",
    "__import__('collections').OrderedDict(a=rank)",
    "__import__('collections').Counter('aab')",
    "__import__('types').SimpleNamespace(a=rank)",
    "int",
    "len",
    "__import__('math')",
    "__import__('operator').itemgetter(rank)((5, 6, 7, 8, 9, 10, 11, 12))",
]


def test_plain_objects_come_back_equal_and_in_rank_order(kernel):
    kernel.ok(f"expressions = {PLAIN!r}")
    kernel.ok("%%distributed -n 2 --out res\n[eval(each, {'rank': rank}) for each in expressions]")
    wrong = kernel.value(
        """[
        (rank, each, repr(got))
        for rank, value in enumerate(res)
        for each, got in zip(expressions, value, strict=True)
        if type(got) is not type(eval(each)) or got != eval(each)
    ]""".replace("\n", " ")
    )
    assert wrong == []


ARRAYS = """
import numpy as np
def arrays(rank):
    base = np.arange(24).reshape(4, 6) + rank
    yield from (base.astype(kind) for kind in "?bBhHiIlLqQefdgFDGSUO")
    yield base.astype("datetime64[D]")
    yield base.astype(">i4")
    yield np.array([(1, 2.5, "ab")], dtype=[("a", "i4"), ("b", "f8"), ("c", "U2")])
    yield np.array(rank)
    yield np.zeros((0, 3))
    yield np.asfortranarray(base)
    yield base[::2, 1::2]
    yield base.T
    yield np.broadcast_to(base[0], (3, 6))
    yield np.ma.masked_array([1, 2, 3], mask=[0, rank % 2, 1])
    yield np.full((300, 400), rank, dtype="f4")
    yield np.arange(3_000_000, dtype="i8") * rank
"""


def test_arrays_of_every_kind_come_back_equal_and_writable(kernel):
    kernel.ok(ARRAYS)
    kernel.ok("%%distributed -n 2 --out res\nlist(arrays(rank))")
    kernel.ok("""
    import math
    for rank, value in enumerate(res):
        expected = list(arrays(rank))
        assert len(value) == len(expected)
        for got, want in zip(value, expected):
            assert type(got) is type(want), (type(got), type(want))
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(got, want)
            assert got.flags.f_contiguous == want.flags.f_contiguous or not want.flags.contiguous
            assert got.flags.writeable, got.dtype
            got[...] = got
    """)


TENSORS = """
import torch
KINDS = '''
bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
complex64 complex128 float8_e4m3fn float8_e5m2
'''.split()
def tensors(rank):
    base = torch.arange(24).reshape(4, 6) + rank
    yield from (base.to(getattr(torch, kind)) for kind in KINDS)
    yield torch.tensor(rank)
    yield torch.zeros(0, 3)
    yield base.t()
    yield torch.arange(6144.0).reshape(2, 3, 32, 32).to(memory_format=torch.channels_last)
    yield base[::2, 1::2]
    yield base[0].expand(3, 6)
    yield torch.nn.Parameter(torch.ones(2) * rank)
    yield torch.ones(2, requires_grad=True)
    yield torch.ones(2, dtype=torch.complex64).conj()
    yield torch.eye(3).to_sparse()
    yield torch.full((300, 400), float(rank))
    yield torch.arange(3_000_000) * rank
"""


def test_cpu_tensors_of_every_kind_come_back_equal_and_writable(kernel):
    kernel.ok(TENSORS)
    kernel.ok("%%distributed -n 2 --out res\nlist(tensors(rank))")
    kernel.ok("""
    for rank, value in enumerate(res):
        expected = list(tensors(rank))
        assert len(value) == len(expected)
        for got, want in zip(value, expected):
            assert type(got) is type(want)
            assert (got.dtype, got.shape, got.device, got.requires_grad, got.layout) == (
                want.dtype, want.shape, want.device, want.requires_grad, want.layout)
            a, b = (each.detach().to_dense() if each.is_sparse else each.detach() for each in (got, want))
            assert a.stride() == b.stride()
            assert torch.equal(a.resolve_conj().to(torch.complex128), b.resolve_conj().to(torch.complex128))
            if got.layout is torch.strided and 0 not in got.stride():
                with torch.no_grad():
                    got.copy_(got.clone())
    """)


def test_models_come_back_as_the_notebooks_own_class(kernel):
    kernel.ok("""
    import torch
    class Net(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layer = torch.nn.Linear(width, 1)
            self.register_buffer("seen", torch.zeros(1))
        def forward(self, x):
            return self.layer(x)
    net = Net(3)
    """)
    kernel.ok("""
    %%distributed -n 2 --out res
    net.seen += rank
    net, net.state_dict(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    """)
    kernel.ok("""
    back, state, sequential = res[1]
    assert type(back) is Net
    assert back(torch.ones(1, 3)).shape == (1, 1)
    assert torch.equal(back.layer.weight, net.layer.weight)
    assert torch.equal(state["layer.weight"], net.layer.weight)
    assert back.seen.item() == 1 and net.seen.item() == 0
    assert sequential(torch.ones(1, 2)).shape == (1, 2)
    """)


def test_objects_of_the_notebooks_classes_are_instances_of_those_classes(kernel):
    kernel.ok("""
    import enum
    from collections import namedtuple
    from dataclasses import dataclass, field
    from typing import Generic, NamedTuple, TypeVar

    T = TypeVar("T")
    @dataclass(frozen=True)
    class Point:
        x: int
        tags: list = field(default_factory=list)
    @dataclass(slots=True, order=True)
    class Slotted:
        x: int
    class Color(enum.Enum):
        RED = 1
        BLUE = 2
    class Flags(enum.IntFlag):
        A = 1
        B = 2
    class Pair(NamedTuple):
        a: int
        b: int = 0
    Old = namedtuple("Old", "a b")
    class Box(Generic[T]):
        def __init__(self, held): self.held = held
        def __eq__(self, other): return isinstance(other, Box) and self.held == other.held
    class Sub(Box[int]):
        def __init__(self, held):
            super().__init__(held)
        class Inner:
            pass
    class Failure(ValueError):
        def __init__(self, code): super().__init__(f"code {code}"); self.code = code
        def __reduce__(self): return Failure, (self.code,)
    """)
    kernel.ok("""
    %%distributed -n 2 --out res
    [Point(rank, [rank]), Slotted(rank), Color(rank + 1), Flags.A | Flags.B, Pair(rank), Old(rank, 2),
     Box(Box(rank)), Sub(rank), Sub.Inner(), Failure(rank), Point, Color]
    """)
    kernel.ok("""
    kinds = [Point, Slotted, Color, Flags, Pair, Old, Box, Sub, Sub.Inner, Failure]
    for rank, values in enumerate(res):
        for kind, value in zip(kinds, values):
            assert type(value) is kind, (kind, type(value))
        assert values[:3] == [Point(rank, [rank]), Slotted(rank), Color(rank + 1)]
        assert values[3:6] == [Flags.A | Flags.B, Pair(rank, 0), Old(rank, 2)]
        assert values[2] is Color(rank + 1)
        assert values[6].held.held == rank and isinstance(values[7], Box)
        assert values[9].code == rank
        assert values[10] is Point and values[11] is Color
    """)


def test_objects_of_a_class_made_in_the_cell_come_back(kernel):
    kernel.ok("""
    %%distributed -n 2 --out res
    from dataclasses import dataclass
    @dataclass
    class Made:
        x: int
        def doubled(self):
            return helper(self.x)
    def helper(x):
        return 2 * x
    Made(rank)
    """)
    assert kernel.value("[[each.x, each.doubled(), type(each).__name__] for each in res]") == [
        [0, 0, "Made"],
        [1, 2, "Made"],
    ]
    assert kernel.value("'Made' in dir() or 'helper' in dir()") is False


def test_functions_lambdas_and_closures_come_back_and_can_be_called(kernel):
    kernel.ok("offset = 100")
    kernel.ok("""
    %%distributed -n 2 --out res
    import functools
    base = rank
    def outer(a):
        def inner(b):
            return a + b + base + offset
        return inner
    lambda x: x + base, outer(10), functools.partial(outer(20), 1), outer
    """)
    assert kernel.value("[each[0](5) for each in res]") == [5, 6]
    assert kernel.value("[each[1](1) for each in res]") == [111, 112]
    assert kernel.value("[each[2]() for each in res]") == [121, 122]
    kernel.ok("offset = 0")
    assert kernel.value("res[1][3](1)(1)") == 103, "it has the rank's globals, a copy"
    assert kernel.value("'base' in dir()") is False


def test_a_value_that_the_notebook_cannot_read_fails_its_rank_alone(kernel, tmp_path):
    (tmp_path / "only_on_ranks.py").write_text("class Thing:\n    pass\n")
    error = kernel.fails(f"""
    %%distributed -n 2 --out res
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import only_on_ranks
    only_on_ranks.Thing() if rank == 1 else "fine"
    """)
    assert "rank 1" in error.evalue
    assert "only_on_ranks" in error.evalue
    assert kernel.value("[res[0], str(res.ranks[1].state), res.failures[0].phase]") == [
        "fine",
        "FAILED",
        "value transfer",
    ]


def test_a_value_whose_repr_raises_is_a_value_all_the_same(kernel):
    kernel.ok("class Shy:\n    def __repr__(self): raise RuntimeError('no')")
    ran = kernel.ok("%%distributed -n 2 --out res\nShy()")
    assert "Shy" in ran.text
    assert kernel.value("[type(each) is Shy for each in res]") == [True, True]
