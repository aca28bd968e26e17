"""Thousands of ranks are folded as a few are, and what one message costs does not grow with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_state import HISTORIES, WORLD, look_at

from nblaunch.protocol.messages import Arrived, Payload, Returned, Started, encode
from nblaunch.protocol.ranks import Blocks, RankSet
from nblaunch.protocol.state import Ranks, RankState, RunState, State, advance, decode_state

SOME = st.sets(st.integers(0, 200), max_size=20)
MANY = 65_536
TRIES = 10


# --- sets of ranks ---------------------------------------------------------------------------------


@given(SOME, SOME, st.integers(-3, 210))
def test_a_set_of_ranks_is_as_a_set_of_numbers(one, two, rank):
    ours, others = RankSet(one), RankSet(two)
    assert list(ours) == sorted(one)
    assert len(ours) == len(one)
    assert (rank in ours) is (rank in one)
    assert not ours.__contains__("0")
    for theirs in (others, two, frozenset(two)):
        both: dict[str, AbstractSet[int]] = {"or": ours | theirs, "sub": ours - theirs}
        assert both == {"or": one | two, "sub": one - two}
        assert (ours <= theirs) is (one <= two)
        assert (ours == theirs) is (one == two)
    assert ours.with_rank(7) == one | {7}
    assert list(ours) == sorted(one), "what it was made of stays"
    assert all(isinstance(each, RankSet) for each in (ours | two, ours - two, ours.with_rank(7)))


# --- values by rank --------------------------------------------------------------------------------

CHANGES = st.lists(st.dictionaries(st.sampled_from([0, 1, 63, 64, 127, 128, 199]), st.integers()), max_size=8)


@given(CHANGES, st.booleans())
def test_blocks_are_as_a_dict_and_each_change_leaves_what_was_before(changes, backwards):
    ranks = range(199, -1, -1) if backwards else range(200)
    plain = dict.fromkeys(ranks, 0)
    blocks = Blocks(plain)
    history = [(blocks, plain)]
    for news in changes:
        blocks, plain = blocks.changed(news), {**plain, **news}
        history.append((blocks, plain))
    for ours, theirs in history:
        assert ours == theirs
        assert list(ours.items()) == list(theirs.items())
        assert list(ours.values()) == list(theirs.values())
        assert list(ours) == list(theirs)
        assert [ours.get(rank, "none") for rank in range(-1, 201)] == [
            theirs.get(rank, "none") for rank in range(-1, 201)
        ]
        assert (200 in ours, 199 in ours) == (False, True)
        with pytest.raises(KeyError):
            ours[200]


# --- the fold --------------------------------------------------------------------------------------


@given(HISTORIES)
def test_the_fold_of_many_ranks_is_that_of_a_few(messages):
    few = many = RunState.fresh(WORLD)
    for message in messages:
        # As a large run has them, whatever was before.
        before = replace(many, ranks=many.ranks if isinstance(many.ranks, Ranks) else Ranks(many.ranks))
        after, many = advance(few, message), advance(before, message)
        assert (after is few) is (many is before), "one of them has published what changes nothing"
        few = after
        assert many == few
        assert list(many.ranks) == list(few.ranks)
        assert look_at(many) == look_at(few)
        assert many.begun == few.begun
        assert decode_state(encode(many)) == few


def test_what_many_ranks_are_on_the_wire_is_a_map_as_before():
    state = advance(RunState.fresh(200), Started(rank=70, time=1.0))
    assert isinstance(state.ranks, Ranks)
    assert encode(state) == encode(replace(state, ranks=dict(state.ranks)))


def test_a_few_ranks_stay_in_a_dict():
    assert type(advance(RunState.fresh(8), Started(rank=7, time=1.0)).ranks) is dict


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread: other processes take none of it."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def fold(state: RunState) -> None:
    value = Payload(sizes=(1,), inline=b"N")
    for rank in range(1000):
        for message in (
            Started(rank=rank, time=1.0),
            Arrived(rank=rank),
            Returned(rank=rank, value=value, time=2.0),
        ):
            state = advance(state, message)
            assert not state.finished
            assert not state.failed
            assert state.begun


def test_what_a_message_costs_does_not_grow_with_the_ranks():
    few, many = (advance(RunState.fresh(size), Started(rank=0, time=1.0)) for size in (1_100, MANY))
    quick = slow = math.inf
    for _ in range(TRIES):
        # In turn: a busy machine shares its caches, and then both are slow.
        quick, slow = min(quick, seconds(lambda: fold(few))), min(slow, seconds(lambda: fold(many)))
        # 1,000 ranks each: a copy of all, or a look at all, would make it much more, however often.
        if slow / quick < 3:
            return
    pytest.fail(f"of {MANY:,} ranks a message costs {slow / quick:.1f} times as much")


def test_how_many_have_ended_is_counted():
    state = RunState.fresh(100)
    for rank in range(100):
        assert not state.finished
        state = advance(state, Returned(rank=rank, value=Payload(sizes=(1,), inline=b"N"), time=1.0))
    assert state.finished
    assert not state.failed
    assert state.summary is State.SUCCEEDED
    assert all(isinstance(each, RankState) for each in state.ranks.values())
