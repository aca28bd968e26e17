"""What a rank makes of Kineto's trace and of torch's flight recorder."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.insight.profile import TRACE_EPOCH
from nblaunch.probes.profiling import (
    UNKNOWN,
    FlightRecord,
    HubClock,
    TraceEvent,
    collective_calls,
    compute_intervals,
    of_rank,
)

US = 1000


def event(name, begin, end, cat="cpu_op", tid=1, **args):
    """Return an event of process 7, in microseconds."""
    raw = msgspec.Raw(json.dumps(args).encode())
    return TraceEvent("X", name, cat, 7, tid, float(begin), float(end - begin), args=raw)


def found(events):
    return sorted(((a - TRACE_EPOCH) // US, (b - TRACE_EPOCH) // US) for a, b in compute_intervals(events))


def record(number, created, name="gloo:all_reduce", **more):
    return FlightRecord(
        record_id=number,
        process_group=("0", "default_pg"),
        collective_seq_id=number,
        profiling_name=name,
        input_sizes=[[10, 2]],
        input_dtypes=["Float"],
        time_created_ns=TRACE_EPOCH + created * US,
        **more,
    )


def test_an_operator_around_a_collective_is_not_computing_but_its_parts_are():
    events = [
        event("Outer", 0, 100),
        event("aten::mm", 5, 20),
        event("c10d::allreduce_", 30, 90),
        event("aten::add", 92, 95),
        event("aten::mul", 120, 130, tid=2),
        event("gloo:all_reduce", 31, 89, "user_annotation", 3),
    ]
    assert found(events) == [(5, 20), (92, 95), (120, 130)]


def test_on_a_gpu_its_kernels_are_the_work_and_nccls_are_not():
    events = [
        event("aten::mm", 0, 5),
        event("gemm", 10, 20, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, "kernel"),
        event("Memcpy HtoD", 50, 60, "gpu_memcpy"),
    ]
    assert found(events) == [(10, 20), (50, 60)]


def test_glooss_calls_get_group_number_and_size_from_the_recorder():
    events = [event("gloo:all_reduce", 12 * n, 12 * n + 5, "user_annotation") for n in (1, 2)]
    first, second = collective_calls(events, [record(1, 10), record(2, 22)])
    assert (first.group, first.sequence, first.size) == ("default_pg", 1, 80)
    assert (first.called, first.began, first.ended) == tuple(TRACE_EPOCH + each * US for each in (10, 12, 17))
    assert second.sequence == 2


def test_a_call_that_the_recorder_has_forgotten_takes_no_others_place():
    events = [event("gloo:all_reduce", 120 * n, 120 * n + 5, "user_annotation") for n in (1, 2)]
    first, second = collective_calls(events, [record(7, 239)])
    assert (first.group, second.group, second.sequence) == (UNKNOWN, "default_pg", 7)


def test_a_kernel_of_nccl_says_itself_which_collective_it_is():
    about = {
        "Collective name": "_reduce_scatter_base",
        "In msg nelems": 1000,
        "dtype": "BFloat16",
        "Process Group Name": "3",
        "Process Group Description": "fsdp",
        "Seq": 12,
    }
    events = [
        event("ncclDevKernel_ReduceScatter", 10, 30, "kernel", **about),
        event("ncclDevKernel_SendRecv", 40, 50, "kernel", **{**about, "Collective name": "send"}),
    ]
    (call,) = collective_calls(events, [])
    assert (call.group, call.sequence, call.operation, call.size) == ("fsdp", 12, "reduce_scatter_base", 2000)


def test_events_become_those_of_a_process_named_after_the_rank():
    gpu = TraceEvent("X", "gemm", "kernel", 0, 7, 1.0, 1.0)
    flow = TraceEvent("s", "fwdbwd", "fwdbwd", 7, 1, 1.0, id=3)
    old = TraceEvent("M", "process_name", pid=7)
    kept, left = of_rank([event("aten::mm", 0, 1), gpu, flow, old], 5, "host", 7)
    names = {each.pid: json.loads(bytes(each.args))["name"] for each in kept if each.name == "process_name"}
    assert names == {5: "rank 5 (host)", 6_000_000: "rank 5 GPU 0"}
    assert [each.id for each in kept if each.ph == "s"] == ["5.3"]
    assert left == 0
    # Zero is a rank, too.
    assert json.loads(msgspec.json.encode(of_rank([event("a", 0, 1)], 0, "h", 7)[0][0]))["pid"] == 0


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_the_clock_is_right_at_both_ends_within_half_of_the_shortest_round_trip(before, after, trip):
    """The hub is anywhere between question and answer; of several answers the quickest counts."""
    looks, ends = [], ((10**10, before), (10**11, after))
    for moment, offset in ends:
        slow = (moment, moment + offset + 40 * trip, moment + 50 * trip)
        quick = (moment, moment + offset + trip, moment + trip)
        looks.append([slow, quick])
    clock = HubClock(looks)
    assert clock.error == trip / 2e9
    for moment, offset in ends:
        assert abs(clock.offset((2 * moment + trip) // 2) - offset) <= trip // 2 + 1
    middle = clock.offset((10**10 + 10**11 + trip) // 2)
    assert min(before, after) - trip <= middle <= max(before, after) + trip


def test_a_clock_without_answers_is_left_as_it_is():
    clock = HubClock([[], []])
    assert (clock.offset(5), clock.error) == (0, None)
