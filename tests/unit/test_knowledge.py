"""What a session's ranks know, while ranks come, go, and get other numbers."""

from __future__ import annotations

import gc
import weakref

from nblaunch.capture.identity import ObjectTable
from nblaunch.capture.walk import ObjectFrame
from nblaunch.client.knowledge import Delivery, Knowledge


class Thing:
    """What can be known."""


def given(knowledge: Knowledge, thing: Thing, *ranks: int) -> None:
    """Let these ranks know of a thing."""
    for view in knowledge.views(ranks, {}, {}):
        key = knowledge.key_for(thing)
        knowledge.remember(view, Delivery({}, {key: ObjectFrame(None)}, (), None))


def knows(knowledge: Knowledge, thing: Thing, world_size: int) -> list[int]:
    """Return the ranks that know of it."""
    found = [
        rank
        for view in knowledge.views(range(world_size), {}, {})
        for rank in view.ranks
        if view.key_of(thing)
    ]
    return sorted(found)


def test_ranks_that_go_on_know_what_they_knew_and_new_ones_know_nothing():
    knowledge, everywhere, somewhere = Knowledge(), Thing(), Thing()
    knowledge.begin(0, 4)
    given(knowledge, everywhere, 0, 1, 2, 3)
    given(knowledge, somewhere, 1, 2)
    knowledge.renumber(0, 1, {0: 2, 1: 3}, 3)
    knowledge.begin(1, 3)
    assert knows(knowledge, everywhere, 3) == [0, 1]
    assert knows(knowledge, somewhere, 3) == [0]
    given(knowledge, somewhere, 0, 1, 2)
    assert knows(knowledge, somewhere, 3) == [0, 1, 2]


def test_of_ranks_to_which_nothing_was_given_nothing_is_known_when_they_go_on():
    knowledge, thing = Knowledge(), Thing()
    knowledge.begin(0, 2)
    given(knowledge, thing, 0, 1)
    knowledge.renumber(1, 2, {0: 0}, 1)
    knowledge.begin(2, 1)
    assert knows(knowledge, thing, 1) == []


def test_a_class_is_freed_although_a_cell_of_its_methods_holds_it():
    namespace = {"__name__": "__main__"}
    exec("class A:\n    def __init__(self): super().__init__()", namespace)  # noqa: S102 - a cell of a notebook
    table, made = ObjectTable(), weakref.ref(namespace["A"])
    init = vars(namespace["A"])["__init__"]
    for key, each in enumerate([made(), init, init.__closure__[0]], 1):
        table.add(each, key)
    del each, init
    gc.collect()
    assert table.lost() == ()
    del namespace["A"]
    gc.collect()
    gc.collect()
    assert made() is None
    assert sorted(table.lost()) == [1, 2, 3]
    table.close()
