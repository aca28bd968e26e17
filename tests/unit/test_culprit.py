"""A value that cannot be sent is named by its deepest part, with the way to it."""

from __future__ import annotations

import functools
import socket
import sys
import textwrap
import threading
import time
from collections import OrderedDict, defaultdict, deque
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

from nblaunch.capture.unpicklable import Culprit, find_culprit

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK = threading.Lock()


def can_send(value: object) -> Exception | None:
    """Pickle `value` as the payload does."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
        return error
    return None


def culprit_in(value: object) -> Culprit:
    """Return the culprit in a notebook variable called `v`."""
    assert can_send(value) is not None
    culprit = find_culprit({"v": value}, can_send)
    assert culprit is not None
    assert culprit.name == "v"
    return culprit


def path_in(value: object) -> str:
    """Return the way to the lock in `value`."""
    culprit = culprit_in(value)
    assert culprit.type_name == "_thread.lock"
    assert culprit.reason == "cannot pickle '_thread.lock' object"
    return culprit.path


def notebook(source: str, **names: object) -> dict[str, Any]:
    """Run `source` as a notebook would, in `__main__`; return its variables."""
    namespace = {"__name__": "__main__", "lock": LOCK, **names}
    exec(textwrap.dedent(source), namespace)  # noqa: S102  # so that its functions go by value
    return namespace


class Box:
    """Holds anything."""

    def __init__(self, **attributes: object) -> None:
        """Keep `attributes`."""
        self.__dict__.update(attributes)

    def method(self) -> None:
        """Do nothing."""


class Slotted:
    """Holds two things, without a `__dict__`."""

    __slots__ = ("__hidden", "empty", "held")

    def __init__(self, held: object, hidden: object = 1) -> None:
        """Keep both, leave `empty` empty."""
        self.held = held
        self.__hidden = hidden


@dataclass
class Config:
    """A plain dataclass."""

    name: str = "config"
    held: object = None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass that makes its own `__getstate__`."""

    name: str = "frozen"
    held: object = None


class Point(NamedTuple):
    """A tuple with names."""

    x: int
    held: object


class Stateful:
    """Leaves one lock out of its state, and one in."""

    def __init__(self) -> None:
        """Make both."""
        self.left_out = threading.Lock()
        self.kept = LOCK

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle."""
        return {"kept": self.kept}


class Reduced:
    """Is made anew from one of its locks."""

    def __init__(self, held: object) -> None:
        """Keep it, and one more."""
        self.not_in_it = threading.Lock()
        self.held = held

    def __reduce__(self) -> tuple[object, ...]:
        """Say how to make it anew."""
        return Reduced, (self.held,)


class Says:
    """Has the state, or is made anew from the arguments, that it is told."""

    def __init__(self, state: object = None, *, reduced: str | tuple[object, ...] = ()) -> None:
        """Keep both where no one looks for them."""
        self.__dict__[1] = state  # type: ignore[index]  # a dict takes any key
        self.__dict__[2] = reduced  # type: ignore[index]

    def __getstate__(self) -> object:
        """Return the state."""
        return vars(self)[1]  # type: ignore[index]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make it anew."""
        return vars(self)[2] or super().__reduce_ex__(protocol)  # type: ignore[index]


class Refusing:
    """Cannot be pickled, and says so itself."""

    def __init__(self, **attributes: object) -> None:
        """Keep `attributes`."""
        self.__dict__.update(attributes)

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse."""
        msg = "not\nme,   please " + "!" * 1000
        raise RuntimeError(msg)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "v"),
        ({"a": 1, "b": LOCK}, "v['b']"),
        ({"a": {1: [0, (1, LOCK)]}}, "v['a'][1][1][1]"),
        ({(1, "a"): LOCK}, "v[(1, 'a')]"),
        ({"k" * 100: LOCK}, "v['" + "k" * 58 + "…]"),
        ({Box: LOCK}, "v[<type>]"),
        ({LOCK: 1}, "v (key <_thread.lock>)"),
        ([LOCK], "v[0]"),
        (deque([1, LOCK]), "v[1]"),
        ({LOCK}, "v (an element)"),
        (frozenset({LOCK}), "v (an element)"),
        (OrderedDict(a=LOCK), "v['a']"),
        (defaultdict(LOCK.acquire), "v.default_factory.__self__"),
        (Point(1, LOCK), "v.held"),
        (Box(a=Box(b=[LOCK])), "v.a.b[0]"),
        (Box(**{"not a name": LOCK}), "v.__dict__['not a name']"),
        (Slotted(LOCK), "v.held"),
        (Slotted(1, LOCK), "v._Slotted__hidden"),
        (Config(held=LOCK), "v.held"),
        (Frozen(held=LOCK), "v.held"),
        (Stateful(), "v.kept"),
        (Reduced([LOCK]), "v.held[0]"),
        (Says({"a": LOCK}), "v.a"),
        (Says(({"a": 1}, {"b": LOCK})), "v.b"),
        (Says((None, {"b": LOCK})), "v.b"),
        (Says([1, LOCK]), "v (its state)[1]"),
        (Says({LOCK}), "v (its state) (an element)"),
        (Says(reduced=(Box, ([LOCK],))), "v (argument 0 of its __reduce__)[0]"),
        (Says(reduced=(Box, (Says, LOCK))), "v (argument 1 of its __reduce__)"),
        (Says(reduced=(Box, (), {"a": LOCK})), "v.a"),
        (ValueError("text", LOCK), "v.args[1]"),
        (functools.partial(print, LOCK), "v.args[0]"),
        (functools.partial(print, file=LOCK), "v.keywords['file']"),
        (functools.partial(Box(a=LOCK).method), "v.func.__self__.a"),
        (Box(a=LOCK).method, "v.__self__.a"),
        (LOCK.acquire, "v.__self__"),
        (np.array([1, LOCK], dtype=object), "v[1]"),
        (np.array([[1, 2], [3, [LOCK]]], dtype=object), "v[1][1][0]"),
    ],
)
def test_the_path_is_written_as_the_user_would_write_it(value: object, path: str) -> None:
    """Items, attributes, arguments."""
    assert path_in(value) == path


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("def v(): return lock", "v (global lock)"),
        ("def v(): return [lambda: lock]", "v (global lock)"),
        ("def v(): return helper()\ndef helper(): return lock", "v (global helper) (global lock)"),
        ("def v(a, b=lock): pass", "v (default of b)"),
        ("def v(*, b=lock): pass", "v (default of b)"),
        ("def v(): pass\nv.extra = lock", "v.extra"),
        ("def make(held):\n  return lambda: held\nv = make(lock)", "v (closure variable held)"),
        ("def make(held):\n  return lambda: held\nv = make([lock])", "v (closure variable held)[0]"),
        ("def make():\n  return lambda: (later, lock)\n  later = 1\nv = make()", "v (global lock)"),
        ("class v: held = lock", "v.held"),
        ("class v:\n  __slots__ = ('a',)\n  def method(self): lock", "v.method (global lock)"),
        ("class List(list): pass\nv = List()\nv.held = lock", "v.held"),
        ("class v:\n  def method(self): lock", "v.method (global lock)"),
        ("class v:\n  @classmethod\n  def method(cls): lock", "v.method (global lock)"),
        ("class v:\n  @property\n  def method(self): lock", "v.method (global lock)"),
        ("class A: held = lock\nclass v(A): pass", "v.__bases__[0].held"),
        ("class A:\n  def method(self): lock\nv = A()", "v.__class__.method (global lock)"),
        ("class A:\n  def method(self): A, lock\nv = [A()]", "v[0].__class__.method (global lock)"),
        (
            "import abc\nclass v(abc.ABC):\n  @abc.abstractmethod\n  def method(self): lock",
            "v.method (global lock)",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass A:\n  a: int\n  b: object\nv = A(1, lock)",
            "v.b",
        ),
        ("import types\nv = types.ModuleType('made_up')\nv.held = lock", "v.held"),
    ],
)
def test_functions_and_classes_of_the_notebook_are_taken_apart(source: str, path: str) -> None:
    """They travel by value, with what they close over and the globals they mention."""
    assert path_in(notebook(source)["v"]) == path


def test_a_name_that_is_only_an_attribute_is_no_global() -> None:
    """`box.lock` does not mention the variable `lock`."""
    v = notebook("def v(): return box.lock, box", box=Box(a=LOCK))["v"]
    assert path_in(v) == "v (global box).a"


def test_the_children_of_a_torch_module_are_written_as_attributes() -> None:
    """As in `model.trainer._lock`."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    model.trainer = torch.nn.Identity()
    vars(model.trainer)["_lock"] = LOCK
    assert path_in(model) == "v.trainer._lock"
    del model.trainer
    vars(model[1])["held"] = LOCK
    assert path_in(model) == "v[1].held"


def test_what_is_sent_by_its_name_is_not_taken_apart() -> None:
    """Where a name cannot be found on the ranks, it is the name that is wrong."""
    culprit = culprit_in(Says(LOCK, reduced="no_such_name"))
    assert culprit.path == "v"
    assert "no_such_name" in culprit.reason
    in_a_class_that_can_be_imported = find_culprit({"v": Box}, lambda _: TypeError())
    assert in_a_class_that_can_be_imported is not None
    assert in_a_class_that_can_be_imported.path == "v"


def test_the_first_root_that_fails_is_named() -> None:
    """Those before it can be sent."""
    culprit = find_culprit({"fine": [1], "first": [LOCK], "second": LOCK}, can_send)
    assert culprit is not None
    assert (culprit.name, culprit.path) == ("first", "first[0]")


def test_there_is_none_where_everything_can_be_sent() -> None:
    """Shared and circular objects included."""
    circle: list[object] = [1]
    circle.append(circle)
    assert find_culprit({"a": circle, "b": Box(a=circle)}, can_send) is None
    assert find_culprit({}, can_send) is None


def test_a_part_in_a_circle_is_not_blamed_for_its_neighbours() -> None:
    """The child fails only because its parent does."""
    parent = Box()
    vars(parent).update(child=Box(parent=parent), lock=LOCK)
    assert path_in(parent) == "v.lock"


def test_a_part_that_refuses_is_blamed_though_it_points_back() -> None:
    """There is nothing deeper than the circle, so its deepest part it is."""
    parent = Box()
    vars(parent).update(child=Refusing(parent=parent))
    assert culprit_in(parent).path == "v.child"


def test_the_reason_is_one_line_of_limited_length() -> None:
    """An exception may be as long as it likes."""
    reason = culprit_in([Refusing(a=1)]).reason
    assert reason.startswith("not me, please !!!")
    assert len(reason) == 500
    assert "\n" not in reason


def test_an_exception_without_a_text_gives_its_type() -> None:
    """Or one whose text cannot be had."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error in (FrozenInstanceError(), MuteError()):
        culprit = find_culprit({"v": LOCK}, lambda _, error=error: error)  # type: ignore[misc]
        assert culprit is not None
        assert culprit.reason.endswith(type(error).__qualname__)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (np.zeros(1000), 8000),
        (torch.zeros(10, 10), 400),
        ("x" * 77, 77),
        (b"x" * 77, 77),
        (bytearray(77), 77),
        (memoryview(b"x" * 77), 77),
        (Box(), sys.getsizeof(Box())),
    ],
)
def test_the_size_is_that_of_the_data(value: object, size: int) -> None:
    """An array says how much it holds, anything else what it takes itself."""
    culprit = find_culprit({"v": value}, lambda _: TypeError())
    assert culprit is not None
    assert culprit.size == size


def test_types_are_named_in_full() -> None:
    """A builtin has no module worth telling."""
    with socket.socket() as sock:
        assert culprit_in([sock]).type_name == "socket.socket"
    assert culprit_in([(each for each in [1])]).type_name == "generator"


class Hostile:
    """Raises whatever is asked of it."""

    def __init__(self, held: object) -> None:
        """Keep it where no one can see it."""
        object.__setattr__(self, "held", held)

    def refuse(self, *_: object, **__: object) -> Any:
        """Refuse."""
        pytest.fail("an object's own code was called")

    __getattr__ = __repr__ = __str__ = __eq__ = __len__ = __iter__ = __bool__ = __hash__ = refuse
    __contains__ = __dir__ = __format__ = __setattr__ = __delattr__ = refuse
    __class__ = nbytes = args = func = default_factory = property(refuse)


class HostileDict(dict[object, object]):
    """A dict that does not let anyone look into it."""

    __iter__ = __len__ = __getitem__ = __contains__ = __eq__ = __bool__ = Hostile.refuse
    items = keys = values = get = Hostile.refuse
    __hash__ = None


class HostileList(list[object]):
    """A list that does not let anyone look into it."""

    __iter__ = __len__ = __getitem__ = __contains__ = __eq__ = __bool__ = Hostile.refuse
    __hash__ = None


class HostileMeta(type):
    """A metaclass whose classes are as bad."""

    __eq__ = __hash__ = __getattribute__ = __repr__ = __instancecheck__ = Hostile.refuse
    __subclasscheck__ = Hostile.refuse


def contains_a_lock(value: object) -> Exception | None:
    """Tell what cannot be sent without asking it anything."""
    parts: list[object] = [value]
    for part in parts:
        if type(part) is type(LOCK):
            return TypeError("cannot pickle '_thread.lock' object")
        for cls, parts_of in {
            list: list.__iter__,
            dict: lambda each: iter(dict.values(each)),
        }.items():
            if issubclass(type(part), cls):
                parts.extend(parts_of(part))
        if type.__dict__["__dict__"].__get__(type(part)).get("__dict__") is not None:
            parts.extend(object.__getattribute__(part, "__dict__").values())
    return None


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Hostile(LOCK), "v.held"),
        (lambda: [Hostile(Hostile(LOCK))], "v[0].held.held"),
        (lambda: HostileDict({"a": LOCK}), "v['a']"),
        (lambda: HostileList([1, LOCK]), "v[1]"),
    ],
)
def test_no_code_of_an_object_is_called(make: Callable[[], object], path: str) -> None:
    """Properties may open connections, `__eq__` may compare gigabytes."""
    culprit = find_culprit({"v": make()}, contains_a_lock)
    assert culprit is not None
    assert culprit.path == path


def test_an_object_that_cannot_be_looked_into_is_blamed_itself() -> None:
    """Its type's name and its size are told all the same."""
    odd: type = HostileMeta("Odd", (), {})
    culprit = find_culprit({"v": object.__new__(odd)}, lambda _: TypeError("no"))
    assert culprit is not None
    assert culprit.type_name.endswith(".Odd")
    culprit = find_culprit({"v": Hostile(1)}, lambda _: TypeError("no"))
    assert culprit is not None
    assert culprit.path == "v"


def test_a_check_that_raises_counts_as_one_that_fails() -> None:
    """`can_send` runs the objects' own code."""

    def check(_: object) -> Exception | None:
        msg = "by accident"
        raise OSError(msg)

    culprit = find_culprit({"v": LOCK}, check)
    assert culprit is not None
    assert culprit.reason == "by accident"


def test_the_search_ends_in_time_with_the_best_so_far() -> None:
    """A value may have more parts than there is time for."""

    def slow(value: object) -> Exception | None:
        time.sleep(0.02)
        return can_send(value)

    value = {"a": [[Box(a=each) for each in range(1000)], LOCK], "b": [Box(b=LOCK)]}
    started = time.monotonic()
    culprit = find_culprit({"v": value}, slow, seconds=0.2)
    assert time.monotonic() - started < 2
    assert culprit is not None
    assert culprit.path.startswith("v['a']")


def test_without_any_time_the_variable_itself_is_named() -> None:
    """And why it cannot be sent."""
    culprit = find_culprit({"v": [LOCK]}, can_send, seconds=0)
    assert culprit is not None
    assert (culprit.path, culprit.type_name) == ("v", "list")
    assert culprit.reason == "cannot pickle '_thread.lock' object"


def test_the_search_ends_at_a_limited_depth() -> None:
    """A linked list is as deep as it is long."""
    deep: object = LOCK
    for _ in range(60):
        deep = [deep]
    culprit = culprit_in(deep)
    assert culprit.path == "v" + "[0]" * 50
    assert culprit.type_name == "list"


def test_each_object_is_tried_once() -> None:
    """However often it occurs."""
    tried: list[int] = []

    def check(value: object) -> Exception | None:
        tried.append(id(value))
        return can_send(value)

    shared = Box(a=1)
    culprit = find_culprit({"v": [shared] * 100 + [LOCK]}, check)
    assert culprit is not None
    assert culprit.path == "v[100]"
    assert len(tried) == len(set(tried)) == 3


def test_nothing_is_changed() -> None:
    """Neither the containers nor what is in them."""
    generator = iter([1, 2, 3])
    value = Box(items=generator, queue=deque([1]), lock=LOCK, config=Config())
    before = dict(value.__dict__)
    assert path_in(value) == "v.lock"
    assert value.__dict__ == before
    assert list(generator) == [1, 2, 3]
    assert not LOCK.locked()
