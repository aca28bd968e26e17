"""What ranks have logged: an append-only log that is shared, travels whole, and is a table in the end."""

from __future__ import annotations

import math
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from logged_points import batch, folded

from nblaunch import NblaunchError
from nblaunch._metrics import Metric, Metrics
from nblaunch.protocol.messages import AttemptStarted, Logged, encode
from nblaunch.protocol.metrics import MetricLog, logged, table
from nblaunch.protocol.state import RunState, advance, decode_folded, decode_state

RUN = (
    batch(1, ("loss", 0, 2.0), ("lr", 0, 0.1)),
    batch(0, ("loss", 0, 3.0)),
    batch(1, ("loss", 1, 1.5), ("grad/norm", 1, math.inf)),
)


def test_the_table_has_every_point_in_the_order_in_which_it_came():
    metrics = table(folded(*RUN).metrics)
    assert list(metrics) == [
        Metric(1, 0, 100.0, "loss", 2.0),
        Metric(1, 0, 100.0, "lr", 0.1),
        Metric(0, 0, 100.0, "loss", 3.0),
        Metric(1, 1, 101.0, "loss", 1.5),
        Metric(1, 1, 101.0, "grad/norm", math.inf),
    ]
    assert len(metrics) == 5
    assert metrics[-1].value == math.inf
    assert [each.step for each in metrics[1:3]] == [0, 0]
    assert metrics.names == ("loss", "lr", "grad/norm")
    assert metrics.ranks == (0, 1)
    assert metrics.last == {"loss": {0: 3.0, 1: 1.5}, "lr": {1: 0.1}, "grad/norm": {1: math.inf}}
    assert repr(metrics) == "<Metrics: 5 points of 2 ranks: loss, lr, grad/norm>"


def test_a_part_of_the_table_is_a_table():
    metrics = table(folded(*RUN).metrics)
    assert [each.value for each in metrics["loss"]] == [2.0, 3.0, 1.5]
    assert [each.value for each in metrics.of("loss", rank=1)] == [2.0, 1.5]
    assert metrics.of("lr", rank=0) == Metrics()
    assert repr(metrics["lr"]) == "<Metrics: 1 point of 1 rank: lr>"
    with pytest.raises(KeyError, match=r"no rank has logged 'los'; they have logged loss, lr, grad/norm"):
        metrics.of("los")
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert repr(Metrics()) == "<Metrics: nothing was logged>"


def test_without_pandas_the_table_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NblaunchError, match=r"needs pandas, which is not installed here\. Run `pip install"):
        Metrics().to_pandas()


@pytest.mark.full
def test_with_pandas_the_table_is_a_frame():
    pytest.importorskip("pandas")
    frame = table(folded(*RUN).metrics).to_pandas()
    assert list(frame.columns) == ["rank", "step", "time", "name", "value"]
    assert [str(kind) for kind in frame.dtypes][:3] == ["int64", "int64", "float64"]
    assert frame["value"].tolist() == [2.0, 0.1, 3.0, 1.5, math.inf]
    assert frame["name"].tolist()[-1] == "grad/norm"


def test_the_points_of_earlier_attempts_stay():
    again = AttemptStarted(number=1, world_size=2, time=9.0, reason="failure")
    state = folded(RUN[0], again, RUN[1], world=2)
    assert len(table(state.metrics)) == 3
    assert state.metrics.attempts == (1,)


@pytest.mark.parametrize(
    "broken",
    [
        {"values": b"1234567"},
        {"steps": b""},
        {"times": b"\0" * 16},
        {"which": b"\1\0"},
        {"names": ()},
        {"names": ("x" * 201,)},
        {"names": tuple(map(str, range(501)))},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_columns_that_do_not_fit_together_change_nothing(broken):
    whole: dict[str, Any] = {
        "names": ("a",),
        "which": b"\0\0",
        "steps": b"\0" * 8,
        "times": b"\0" * 8,
        "values": b"\0" * 8,
    }
    assert folded(Logged(rank=0, **whole)).metrics.points == 1
    state = RunState.fresh(2)
    assert advance(state, Logged(rank=0, **{**whole, **broken})) is state


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 64 * 64 - 1, 64 * 64, 64 * 64 + 1, 3 * 64 * 64 + 70])
def test_a_log_of_any_length_is_read_from_any_place(count):
    log = MetricLog()
    for number in range(count):
        log = logged(log, batch(0, ("loss", number, 0.0)))
    assert log.batches == log.points == count
    assert bool(log) is (count > 0)
    steps = [each.step for each in table(log)]
    assert steps == list(range(count))
    for first in {0, 1, 63, 64, 65, 4095, 4096, 4097, count - 1, count}:
        if 0 <= first <= count:
            assert len(list(log.since(first))) == count - first


def test_a_longer_log_shares_what_the_shorter_one_has():
    log = MetricLog()
    for number in range(64 * 64 + 65):
        log = logged(log, batch(0, ("loss", number, 0.0)))
    longer = logged(log, batch(1, ("loss", 0, 0.0)))
    assert longer.blocks is log.blocks
    assert longer.block is log.block
    assert log.batches == longer.batches - 1


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1), st.floats()), max_size=200))
def test_a_state_and_its_messages_travel_with_every_point(points):
    batches = [batch(rank, ("loss", step, value)) for rank, step, value in points]
    state = folded(*(decode_folded(encode(each)) for each in batches))
    back = decode_state(encode(state))
    assert repr(list(table(back.metrics))) == repr(list(table(state.metrics)))
    assert len(table(back.metrics)) == len(points)
    # Who follows from a snapshot folds the rest as the others do.
    assert advance(back, batch(0, ("loss", 1, 1.0))).metrics.batches == len(points) + 1
