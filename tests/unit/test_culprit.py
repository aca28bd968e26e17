"""A value that cannot be sent is named by its deepest part, with the way to it."""

from __future__ import annotations

import functools
import socket
import sys
import textwrap
import threading
import time
import tracemalloc
from collections import OrderedDict, defaultdict, deque
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

from nblaunch.capture.parts import parts_of, size_of, type_name
from nblaunch.capture.pickling import Guarded
from nblaunch.capture.unpicklable import Culprit, find_culprit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK = threading.Lock()


def can_send(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
        return error
    return None


def culprit_of(roots: dict[str, object], **limits: float) -> Culprit | None:
    return find_culprit(roots, TypeError("all together"), cloudpickle.Pickler, **limits)


def culprit_in(value: object) -> Culprit:
    assert can_send(value) is not None
    culprit = culprit_of({"v": value})
    assert culprit is not None
    assert culprit.name == "v"
    return culprit


def path_in(value: object) -> str:
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
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None:
        """Do nothing."""


class Slotted:
    __slots__ = ("__hidden", "empty", "held")

    def __init__(self, held: object, hidden: object = 1) -> None:
        self.held = held
        self.__hidden = hidden


@dataclass
class Config:
    name: str = "config"
    held: object = None


class Point(NamedTuple):
    x: int
    held: object


class Reduced:
    def __init__(self, held: object) -> None:
        self.not_in_it = threading.Lock()
        self.held = held

    def __reduce__(self) -> tuple[object, ...]:
        return Reduced, (self.held,)


class Says:
    """Has the state, or is made anew from the arguments, that it is told."""

    told: dict[int, tuple[Any, Any]] = {}  # noqa: RUF012 # not in the object: no one is to find them there

    def __init__(self, state: object = None, *, reduced: str | tuple[object, ...] = ()) -> None:
        self.told[id(self)] = state, reduced

    def __getstate__(self) -> object:
        return self.told[id(self)][0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.told[id(self)][1] or super().__reduce_ex__(protocol)


class Refusing:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __reduce__(self) -> tuple[object, ...]:
        raise vars(self).get("error") or RuntimeError("not\nme,   please " + "!" * 1000)


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
    assert path_in(notebook(source)["v"]) == path


def test_a_name_that_is_only_an_attribute_is_no_global() -> None:
    """`box.lock` does not mention the variable `lock`."""
    v = notebook("def v(): return box.lock, box", box=Box(a=LOCK))["v"]
    assert path_in(v) == "v (global box).a"


def test_the_children_of_a_torch_module_are_written_as_attributes() -> None:
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
    assert list(parts_of(Box)) == list(parts_of(find_culprit)) == list(parts_of(threading)) == []


def test_the_first_root_that_fails_is_named() -> None:
    culprit = culprit_of({"fine": [1], "first": [LOCK], "second": LOCK})
    assert (culprit.name, culprit.path) == ("first", "first[0]")


def test_there_is_none_where_everything_can_be_sent() -> None:
    circle: list[object] = [1]
    circle.append(circle)
    assert culprit_of({"a": circle, "b": Box(a=circle)}) is None
    assert culprit_of({}) is None


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
    reason = culprit_in([Refusing(a=1)]).reason
    assert reason.startswith("not me, please !!!")
    assert len(reason) == 500
    assert "\n" not in reason


def test_an_exception_without_a_text_gives_its_type() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error in (FrozenInstanceError(), MuteError()):
        assert culprit_in([Refusing(error=error)]).reason.endswith(type(error).__qualname__)


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
    assert size_of(value) == size
    assert culprit_in([LOCK]).size == sys.getsizeof(LOCK)


def test_types_are_named_in_full() -> None:
    with socket.socket() as sock:
        assert culprit_in([sock]).type_name == "socket.socket"
    assert culprit_in([(each for each in [1])]).type_name == "generator"


class Hostile:
    """Raises whatever is asked of it."""

    def __init__(self, held: object) -> None:
        object.__setattr__(self, "held", held)

    def refuse(self, *_: object, **__: object) -> Any:
        pytest.fail("an object's own code was called")

    __getattr__ = __repr__ = __str__ = __eq__ = __len__ = __iter__ = __bool__ = __hash__ = refuse
    __contains__ = __dir__ = __format__ = __setattr__ = __delattr__ = refuse
    __class__ = nbytes = args = func = default_factory = property(refuse)


class Raising:
    """Raises whatever is asked of it."""

    def __init__(self, held: object) -> None:
        object.__setattr__(self, "held", held)

    def __getattribute__(self, name: str) -> Any:
        msg = "not now"
        raise OSError(msg)


class HostileDict(dict[object, object]):
    __iter__ = __len__ = __getitem__ = __contains__ = __eq__ = __bool__ = Hostile.refuse
    items = keys = values = get = Hostile.refuse
    __hash__ = None


class HostileList(list[object]):
    __iter__ = __len__ = __getitem__ = __contains__ = __eq__ = __bool__ = Hostile.refuse
    __hash__ = None


class HostileMeta(type):
    __repr__ = __instancecheck__ = __subclasscheck__ = Hostile.refuse
    __mro__ = __bases__ = property(Hostile.refuse)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda: notebook("class v: odd, held = hostile, lock", hostile=Hostile(1))["v"], ".held"),
        (lambda: Hostile(LOCK), ".held"),
        (lambda: HostileDict({"a": LOCK}), "['a']"),
        (lambda: HostileList([1, LOCK]), "[1]"),
    ],
)
def test_no_code_of_an_object_is_called(make: Callable[[], object], step: str) -> None:
    """Properties may open connections, `__eq__` may compare gigabytes."""
    assert [found for found, part in parts_of(make()) if part is LOCK] == [step]


def test_an_object_that_raises_whatever_it_is_asked_is_blamed_itself() -> None:
    odd: type = HostileMeta("Odd", (), {})
    assert type_name(object.__new__(odd)).endswith("Odd")
    culprit = culprit_in([Raising(LOCK)])
    assert (culprit.path, culprit.reason) == ("v[0]", "not now")


def test_an_object_that_exits_is_blamed() -> None:
    class Exiting:
        def __reduce__(self) -> tuple[object, ...]:
            sys.exit(3)

    culprit = culprit_of({"v": [1, Exiting()]})
    assert (culprit.path, culprit.reason) == ("v[1]", "SystemExit(3)")


def test_an_object_that_fails_late_is_blamed_and_not_its_last_part() -> None:
    """Pickling it ends after its parts were written."""

    def elements() -> Iterator[object]:
        yield [Box()]
        msg = "no more"
        raise OSError(msg)

    late = Says(reduced=(list, (), None, elements()))
    culprit = culprit_of({"v": Box(a=late)})
    assert (culprit.path, culprit.reason) == ("v.a", "no more")


def test_the_search_ends_in_time_and_names_the_variable() -> None:
    """A value may have more parts than there is time for."""

    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            time.sleep(0.02)
            return Box, ()

    fine, value = {"b": Box(a=1)}, [*(Slow() for _ in range(1000)), LOCK]
    started = time.monotonic()
    culprit = culprit_of({"fine": fine, "v": value}, seconds=0.2)
    assert time.monotonic() - started < 2
    assert (culprit.path, culprit.reason) == ("v", "all together")


def test_large_data_is_passed_over() -> None:
    """The bytes of arrays, tensors and texts are not looked at, so they are not copied either."""
    data = [np.zeros(1 << 24), torch.zeros(1 << 24), b"x" * (1 << 24), bytearray(1 << 24), [0.5] * (1 << 20)]
    tracemalloc.start()
    try:
        assert path_in_sent([*data, LOCK]) == "v[5]"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def path_in_sent(value: object, namespace: dict[str, Any] | None = None) -> str:
    culprit = find_culprit({"v": value}, TypeError(), Guarded, namespace=namespace, known=None)
    return culprit.path


def test_what_goes_by_key_is_not_taken_apart() -> None:
    """A rank has a namespace of its own; what else is in the notebook's does not travel."""
    names = notebook("def v(): return globals(), lock", other=(each for each in ()))
    assert path_in_sent({"names": names, "function": names["v"]}, names) == "v['function'] (global lock)"


def test_a_file_that_is_an_array_is_not_copied(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "file", np.uint8, "w+", shape=1 << 26)
    tracemalloc.start()
    try:
        assert path_in_sent([mapped, mapped[::2], LOCK]) == "v[2]"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_hooks_and_the_gradient_of_a_tensor_are_its_parts() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    hook = leaf.register_hook(LOCK.acquire)
    assert path_in_sent({"w": leaf}) == f"v['w']._backward_hooks[{hook.id}].__self__"


def test_the_search_ends_at_a_limited_depth() -> None:
    """A linked list is as deep as it is long."""
    deep: object = LOCK
    for _ in range(60):
        deep = [deep]
    culprit = culprit_in(deep)
    assert culprit.path == "v" + "[0]" * 50
    assert culprit.type_name == "list"


def test_each_object_is_tried_once() -> None:
    tried: list[int] = []

    class Counting:
        def __reduce__(self) -> tuple[object, ...]:
            tried.append(id(self))
            return Box, ()

    shared = Counting()
    culprit = culprit_of({"other": shared, "v": [shared] * 100 + [LOCK]})
    assert culprit.path == "v[100]"
    assert len(tried) == 1


def test_nothing_is_changed() -> None:
    generator = iter([1, 2, 3])
    value = Box(items=generator, queue=deque([1]), lock=LOCK, config=Config())
    before = dict(value.__dict__)
    assert path_in(value) == "v.lock"
    assert value.__dict__ == before
    assert list(generator) == [1, 2, 3]
    assert not LOCK.locked()
