"""A class that a cell defines on the ranks is one class in the notebook if all ranks define it alike."""

from __future__ import annotations

import inspect

import pytest

import nblaunch

CLASSES = """
import abc, collections, dataclasses, enum, typing
@dataclasses.dataclass
class Point:
    x: int = 1
    def doubled(self):
        return helper(self.x)
@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    x: int = 1
class Color(enum.Enum):
    RED = 1
class Pair(typing.NamedTuple):
    a: int = 1
class Base(abc.ABC):
    @abc.abstractmethod
    def get(self): ...
class Derived(Base):
    made = 0
    def __init__(self): super().__init__(); self.other = Point
    def get(self): return Derived
    def __eq__(self, other): return type(other) is type(self)
    __hash__ = None
class Own:
    def rank(self): return rank
    def __eq__(self, other): return type(other) is type(self)
    __hash__ = None
def helper(x):
    return 2 * x
"""


@pytest.fixture(scope="module")
def session(place):
    with place(2, display=False) as session:
        session.cell(CLASSES, namespace={})
        yield session


@pytest.mark.quick
@pytest.mark.parametrize(
    "made", ["Point()", "Slotted()", "Color.RED", "Derived()", "(Point(), [Color.RED])", "Point"]
)
def test_equal_values_of_two_ranks_are_equal(session, made):
    first, second = session.cell(made, namespace={})
    assert first == second
    assert type(first) is type(second)
    (third, _) = session.cell(made, namespace={})
    assert first == third


@pytest.mark.quick
def test_its_methods_work(session):
    first, second = session.cell("Point(rank + 1)", namespace={})
    assert (first.doubled(), second.doubled()) == (2, 4)
    assert session.cell("Derived()", namespace={})[1].get().__name__ == "Derived"


def test_a_class_whose_methods_use_what_differs_is_a_class_for_each_rank(session):
    first, second = session.cell("Own()", namespace={})
    assert first != second
    assert (first.rank(), second.rank()) == (0, 1)


def test_a_class_that_was_defined_anew_is_another_one(session):
    (before, _) = session.cell("class Again:\n    x = 1\nAgain()", namespace={})
    (after, _) = session.cell("class Again:\n    x = 2\nAgain()", namespace={})
    assert (type(before).x, type(after).x) == (1, 2)


def test_what_the_notebook_has_changed_in_the_class_stays(session):
    (point, _) = session.cell("Point()", namespace={})
    type(point).extra = "mine"
    (again, _) = session.cell("Point()", namespace={})
    assert again.extra == "mine"
    del type(point).extra


def test_an_object_that_comes_back_is_of_the_ranks_own_class(session):
    (point, _) = session.cell("Point(5)", namespace={})
    type(point).extra = "mine"
    session.push({"back": point})
    result = session.cell("type(back) is Point, back == Point(5), hasattr(Point, 'extra')", namespace={})
    assert result.values == [(True, True, False)] * 2
    del type(point).extra


def test_it_can_be_sent_again_when_the_notebook_has_forgotten_it(session):
    for _ in range(2):
        value = session.cell("class Short:\n    pass\nShort()", namespace={}).values[0]
        assert type(value).__name__ == "Short"
        del value
    assert type(session.cell("Short()", namespace={})[1]).__name__ == "Short"


def test_the_ranks_own_class_is_left_alone(session):
    session.cell("before = Point.doubled", namespace={})
    session.cell("Point()", namespace={})
    failed = session.cell("class Odd(Exception): pass\nraise Odd(Point())", namespace={}, check=False)
    assert isinstance(failed.root_cause.exception, Exception)
    result = session.cell("before is Point.doubled, Point.doubled.__globals__ is globals()", namespace={})
    assert result.values == [(True, True)] * 2


# --- every cell has its own lines ------------------------------------------------------------------


def test_the_source_of_an_earlier_cells_function_is_that_cells(session):
    source = "def f(x):\n    y = x + 1\n    return 1 / y\n"
    session.cell(source, namespace={})
    session.cell("a = 1\nb = 'another line'\nc = 'and another'", namespace={})
    assert session.cell("import inspect\ninspect.getsource(f)", namespace={}).values == [source] * 2
    root = session.cell("f(-1)", namespace={}, check=False).root_cause
    assert root.frame.source == "return 1 / y"
    assert "return 1 / y" in root.traceback
    assert "another line" not in root.traceback
    assert root.where == "session cell, line 3"
    assert inspect.isfunction(session.pull("f")["f"][0])


@pytest.mark.parametrize("body", ["return sys.exit, (9,)", "sys.exit(9)"])
def test_an_exception_that_exits_when_it_is_sent_or_loaded_is_a_failure_with_its_text(session, body):
    source = (
        f"import sys\nclass Odd(Exception):\n    def __reduce__(self):\n        {body}\n"
        "raise Odd('of its own')"
    )
    failed = session.cell(source, namespace={}, check=False)
    assert failed.root_cause.message == "of its own"
    assert failed.root_cause.exception is None
    assert [rank.exitcode for rank in failed.ranks] == [1, 1]
    assert session.cell("Point().x", namespace={}).values == [1, 1], "the ranks are still there"


def test_a_value_that_exits_when_it_is_loaded_fails_its_rank(session):
    failed = session.cell(
        "import sys\nclass Odd:\n    def __reduce__(self):\n        return sys.exit, (9,)\n"
        "Odd() if rank else 1",
        namespace={},
        check=False,
    )
    assert failed[0] == 1
    assert "rank 1 returned a value that the notebook cannot unpickle" in failed.root_cause.message
    assert "SystemExit(9)" in failed.root_cause.message


class Leaves:
    def __reduce__(self):
        import sys

        return sys.exit, (9,)


def test_a_variable_that_exits_when_it_is_loaded_fails_the_cell(session):
    with pytest.raises(nblaunch.RunFailedError, match=r"SystemExit\(9\)"):
        session.cell("leaves", namespace={"leaves": Leaves()})
    assert session.cell("1", namespace={}).values == [1, 1]
