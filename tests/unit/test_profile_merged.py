"""Profiles of several ranks become one: on one clock, with steps, waits and stragglers."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.insight import intervals, timeline
from nblaunch.insight.profile import CollectiveCall, Profile, RankProfile, ends_together, repeated
from nblaunch.insight.trace import crc32_combined, joined, packed

MS = 1_000_000
MOST = 60
PAIRS = st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST)), max_size=8)
UNIONS = PAIRS.map(intervals.merged)


def moments(union):
    """Return the union as a set of unit intervals: what every function here must agree with."""
    return {moment for begin, end in union for moment in range(begin, end)}


@given(PAIRS)
def test_a_union_has_each_moment_once_and_in_order(pairs):
    found = intervals.merged(pairs)
    assert moments(found) == moments(pairs)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
    assert intervals.length(found) == len(moments(pairs))


@given(UNIONS, UNIONS)
def test_what_is_common_is_that_of_sets(one, other):
    assert moments(intervals.common(one, other)) == moments(one) & moments(other)


@given(UNIONS, st.integers(0, MOST), st.integers(0, MOST))
def test_clipped_is_what_lies_between(union, begin, end):
    assert moments(intervals.clipped(union, begin, end)) == moments(union) & set(range(begin, end))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_are_combined_as_zlib_has_them(one, other):
    assert crc32_combined(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


@given(st.lists(st.lists(st.integers(), max_size=3), max_size=4))
def test_parts_become_one_file_that_any_gzip_reads(parts):
    texts = [json.dumps(part)[1:-1].encode() for part in parts]
    whole = joined([packed(text) for text in texts])
    assert json.loads(gzip.decompress(whole))["traceEvents"] == [each for part in parts for each in part]
    # One member, as ui.perfetto.dev expects: nothing is left behind the first stream.
    reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
    reader.decompress(whole)
    assert (reader.eof, reader.unused_data) == (True, b"")


PARTS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@given(PARTS, st.integers(3, 6), st.lists(st.just(9), max_size=2))
def test_what_repeats_is_found_and_is_the_shortest(part, times, before):
    found = repeated([*before, *part * times])
    if len(before) * 2 > len(part) * times:
        return
    assert found is not None
    start, period, repeats = found
    whole = [*before, *part * times]
    assert len(part) % period == 0
    assert all(
        whole[place] == whole[place + period] for place in range(start, start + period * (repeats - 1))
    )


def test_where_nothing_repeats_nothing_is_found():
    assert repeated("abcdefgh") is None
    assert repeated("abab") is None
    assert repeated("") is None


def test_only_operations_that_end_on_all_ranks_together_are_waited_in():
    assert [ends_together(each) for each in ("all_reduce", "_reduce_scatter_base", "barrier")] == [True] * 3
    assert [ends_together(each) for each in ("broadcast", "reduce", "gather", "scatter")] == [False] * 4


def a_profile(  # noqa: PLR0913 - what profiles differ in
    late=5, ranks=4, steps=5, *, who=2, marks=True, error=1e-5
):
    """Return a profile in which rank `who` sleeps `late` ms in each step, beside 1 ms of work."""
    found = {}
    for rank in range(ranks):
        own_steps, calls, compute, now = [], [], [], 0
        for step in range(steps):
            begin = now
            entry = begin + MS + (late * MS if rank == who else 0)
            last = begin + MS + late * MS
            end = last + MS // 2
            compute.append((begin, begin + MS))
            calls.append(CollectiveCall("default_pg", step + 1, "all_reduce", 1000, entry, entry, end))
            own_steps.append((step, begin, end))
            now = end
        found[rank] = RankProfile(
            rank=rank, host="h", ended=now, steps=tuple(own_steps) if marks else (), compute=tuple(compute),
            calls=tuple(calls), clock_error=error,
        )  # fmt: skip
    return Profile(found, {})


@pytest.mark.parametrize("marks", [True, False], ids=["steps", "found"])
def test_the_straggler_is_named_with_how_much_where_and_what_it_did(marks):
    profile = a_profile(marks=marks)
    assert profile.steps_by == ("step" if marks else "collectives")
    assert profile.steps == (0, 1, 2, 3, 4)
    assert [each.rank for each in profile.straggler.values()] == [2] * 5
    last = profile.straggler[4]
    assert last.seconds == pytest.approx(0.005)
    assert (last.operation, last.before) == ("all_reduce 5", "5 ms outside of operators")


def test_the_first_step_is_not_the_slowest_because_ranks_began_apart():
    calls = [CollectiveCall("default_pg", 1, "all_reduce", 8, 90 * MS, 90 * MS, 91 * MS)]
    calls += [
        CollectiveCall("default_pg", 2, "all_reduce", 8, at * MS, at * MS, 112 * MS) for at in (95, 111)
    ]
    found = {
        rank: RankProfile(
            rank=rank,
            steps=((0, begin * MS, 91 * MS), (1, 91 * MS, 112 * MS)),
            calls=(calls[0], calls[1 + rank]),
        )
        for rank, begin in enumerate((0, 88))
    }
    slowest: Any = Profile(found, {}).slowest_step
    assert slowest == (1, pytest.approx(0.021), 1)


def test_a_row_says_how_long_a_rank_computed_communicated_waited_and_for_whom():
    profile = a_profile()
    (waits,) = [row for row in profile.summary if (row.step, row.rank) == (3, 0)]
    assert (waits.seconds, waits.compute, waits.communication) == pytest.approx((0.0065, 0.001, 0.0005))
    assert (waits.overlap, waits.waiting, waits.idle) == pytest.approx((0, 0.005, 0), abs=1e-9)
    assert waits.waits_for == 2
    (late,) = [row for row in profile.summary if (row.step, row.rank) == (3, 2)]
    assert (late.waiting, late.waits_for, late.idle) == (0, None, pytest.approx(0.005))


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 5))
def test_the_parts_of_a_row_are_its_duration(late, ranks, steps):
    for row in a_profile(late, ranks, steps, who=0).summary:
        parts = row.compute + row.communication - row.overlap + row.waiting + row.idle
        assert parts == pytest.approx(row.seconds)
        assert min(row.compute, row.communication, row.waiting, row.idle) >= -1e-12


def test_a_difference_within_the_error_of_the_clocks_names_nobody():
    assert a_profile(error=0.004).straggler
    assert not a_profile(error=0.006).straggler


def test_a_collective_overlapped_with_work_is_not_waiting():
    call = CollectiveCall("default_pg", 1, "all_reduce", 8, 0, 0, 10 * MS)
    one = RankProfile(rank=0, ended=10 * MS, compute=((0, 10 * MS),), calls=(call,))
    later = msgspec.structs.replace(call, called=6 * MS, began=6 * MS)
    other = RankProfile(rank=1, ended=10 * MS, calls=(later,))
    row = Profile({0: one, 1: other}, {}).summary[0]
    assert (row.waiting, row.overlap, row.idle) == pytest.approx((0, 0.004, 0))
    assert row.waits_for == 1


def test_a_wrong_clock_is_seen_by_collectives_that_end_together():
    profile = a_profile()
    assert profile.clock_check.violation == 0
    moved = {rank: profile._ranks[rank] for rank in profile.ranks}
    shift = 20 * MS
    moved[1] = msgspec.structs.replace(
        moved[1],
        calls=tuple(
            msgspec.structs.replace(c, called=c.called + shift, began=c.began + shift, ended=c.ended + shift)
            for c in moved[1].calls
        ),
    )
    check = Profile(moved, {}).clock_check
    assert check.violation > 0.01
    assert check.spread == pytest.approx(0.02)


def test_bandwidth_is_shown_beside_the_best_of_the_same_kind_and_size():
    (use,) = a_profile().collectives
    assert (use.operation, use.size, use.count) == ("all_reduce", 1000, 5)
    assert use.bandwidth == pytest.approx(1000 / 0.0005)
    assert use.best >= use.bandwidth * 0.999


def test_ranks_that_gave_nothing_are_named():
    profile = Profile({0: RankProfile(rank=0, ended=MS)}, {}, missing=[3, 1])
    assert profile.missing == (1, 3)
    assert "ranks 1,3: no profile, because it ended before it could be sent" in profile.warnings
    assert str(Profile({}, {}, missing=[0])).startswith("profile: 0 ranks")
    assert timeline.render(Profile({}, {}, missing=[0])).count("no profile") == 1


def test_a_profile_reaches_another_process_whole():
    profile = a_profile()
    assert pickle.loads(pickle.dumps(profile)).summary == profile.summary


def test_the_drawing_has_a_strip_for_each_rank_names_the_straggler_and_is_small():
    drawn = timeline.render(a_profile(ranks=8, steps=200))
    assert all(f"rank {rank}" in drawn for rank in range(8))
    assert "<strong>rank 2</strong> 5.00 ms late at all_reduce" in drawn
    assert "<script" not in drawn
    assert "190 steps more in result.profile.summary" in drawn
    assert len(drawn) < 60_000


def test_what_ranks_say_is_text_in_the_drawing():
    call = CollectiveCall("<img src=x>", 1, "all_reduce", 8, 0, 0, MS)
    later = msgspec.structs.replace(call, called=MS // 2)
    ranks = {
        0: RankProfile(rank=0, ended=MS, calls=(call,), warnings=("<b>&",)),
        1: RankProfile(rank=1, ended=MS, calls=(later,)),
    }
    drawn = timeline.render(Profile(ranks, {}))
    assert "<img" not in drawn
    assert "&lt;img src=x&gt;" in drawn
    assert "&lt;b&gt;&amp;" in drawn
