"""torchelastic's own events and metrics: in the result, in the notebook, and with the user's handlers."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys

import pytest
from torch.distributed.elastic import events as torch_events

import nblaunch
from nblaunch.client.local import local

STATUS = "torchelastic.worker.status"


def rank_number():
    return int(os.environ["RANK"])


def of_workers(result):
    return [(event.name, event.rank) for event in result.events if event.source == "WORKER"]


def test_the_events_of_a_run_are_those_that_torchelastic_records():
    result = nblaunch.run(rank_number, nproc=2, role="trainer")
    assert of_workers(result) == [
        *((f"{STATUS}.START", rank) for rank in range(2)),
        *((f"{STATUS}.SUCCEEDED", rank) for rank in range(2)),
    ]
    # As torchrun does: the agent says that it has ended well, whatever its ranks did.
    assert (result.events[-1].name, result.events[-1].source) == (f"{STATUS}.SUCCEEDED", "AGENT")
    for event in result.events:
        theirs = torch_events.Event.deserialize(event.json)
        assert (theirs.name, theirs.source.value, theirs.metadata) == (
            event.name,
            event.source,
            event.metadata,
        )
        assert theirs.serialize() == event.json
        assert event.metadata["role"] == "trainer"
    times = [event.timestamp for event in result.events]
    assert times == sorted(times)
    assert isinstance(result.events, tuple)
    assert isinstance(result.events[0], nblaunch.Event)
    assert result.attempts[0].started - 60 < times[0] <= times[-1]


@pytest.mark.quick
def test_a_failed_rank_and_those_stopped_because_of_it_are_in_the_events():
    def fails():
        if os.environ["RANK"] == "1":
            sys.exit(7)
        return 0

    result = nblaunch.run(fails, nproc=2, check=False)
    failed = [event for event in result.events if event.name == f"{STATUS}.FAILED"]
    assert [event.rank for event in failed] == [1]
    assert json.loads(failed[0].metadata["metadata"])["exit_code"] == [7]


def test_each_attempt_starts_its_ranks_anew():
    def once():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1)

    result = nblaunch.run(once, nproc=2, max_restarts=1)
    starts = [event for event in result.events if event.name == f"{STATUS}.START"]
    assert [(event.rank, event.metadata["agent_restarts"]) for event in starts] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


def test_runs_at_the_same_time_and_runs_of_others_do_not_mix():
    first = nblaunch.run(rank_number, nproc=2)
    stranger = torch_events.Event("mine", torch_events.EventSource.AGENT, metadata={"run_id": "mine"})
    torch_events.record(stranger, "null")
    second = nblaunch.run(rank_number, nproc=1)
    ids = [{event.metadata["run_id"] for event in result.events} for result in (first, second)]
    assert [len(each) for each in ids] == [1, 1]
    assert ids[0] != ids[1]
    assert of_workers(second) == [(f"{STATUS}.START", 0), (f"{STATUS}.SUCCEEDED", 0)]


def test_events_come_also_where_logging_is_off_and_torch_keeps_nothing_of_a_run(monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    logging.disable(logging.CRITICAL)
    try:
        loggers = set(logging.root.manager.loggerDict)
        result = nblaunch.run(rank_number, nproc=1)
        assert len(of_workers(result)) == 2
        assert set(logging.root.manager.loggerDict) == loggers
        assert [name for name in torch_events._events_loggers if name.startswith("nblaunch")] == []
    finally:
        logging.disable(logging.NOTSET)


def test_events_survive_pickling():
    result = nblaunch.run(rank_number, nproc=1)
    assert pickle.loads(pickle.dumps(result)).events == result.events


REGISTER = """
import logging
from torch.distributed.elastic import metrics
from torch.distributed.elastic.events import handlers

class Kept(logging.Handler):
    lines = []
    def emit(self, record):
        self.lines.append(record.getMessage())

class Broken(logging.Handler):
    def emit(self, record):
        raise RuntimeError(f"{record.name}: this handler is broken")

class Metrics(metrics.MetricHandler):
    names = []
    def emit(self, metric_data):
        self.names.append(metric_data.name)

handlers._log_handlers.update(mine=Kept(), broken=Broken())
metrics.configure(Metrics(), group="torchelastic")
"""
"""What a user's own code does with torch's tables, in the process of the agents."""


def test_handlers_of_the_users_own_get_events_and_metrics_and_one_that_fails_ends_no_run(poke, eventually):
    poke(REGISTER)
    result = nblaunch.run(rank_number, nproc=2, event_log_handler="mine")
    lines = [event.json for event in result.events]
    assert lines
    assert poke("Kept.lines") == lines
    eventually(lambda: any("success" in name for name in poke("Metrics.names")), "a metric of success")
    result = nblaunch.run(rank_number, nproc=2, event_log_handler="broken")
    assert result.values == [0, 1]
    assert len(of_workers(result)) == 4
    assert "this handler is broken" in (local().runtime.root / "runtime.log").read_text()


def test_the_console_handler_prints_what_torchrun_prints(script):
    ran = script(
        """
        import nblaunch
        result = nblaunch.run(lambda: None, nproc=1, event_log_handler="console")
        print(*[event.json for event in result.events], sep="\\n")
        """
    )
    assert ran.returncode == 0, ran.stderr
    shown = [line for line in ran.stderr.splitlines() if line.startswith("{")]
    assert shown == ran.stdout.splitlines()
    assert f"{STATUS}.SUCCEEDED" in ran.stderr


def test_an_unknown_handler_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("nblaunch._api.run_fresh", None)  # nothing may come that far
    with pytest.raises(nblaunch.OptionError, match=r"event_log_handler='nosuch'.* console, .*null"):
        nblaunch.run(rank_number, nproc=1, event_log_handler="nosuch")


def test_the_notebook_shows_the_last_runs_events_with_times_from_its_start(kernel):
    assert "no run has ended yet" in (kernel.ok("%distributed events").result or "")
    kernel.ok("%%distributed -n 2\nrank")
    shown = (kernel.ok("%distributed events").result or "").splitlines()
    assert shown[0].split() == ["seconds", "source", "rank", "event"]
    assert shown[1].split()[0] == "0.000"
    rows = [line.split() for line in shown if " WORKER " in line]
    assert [(row[2], row[3]) for row in rows] == [
        ("0", f"{STATUS}.START"), ("1", f"{STATUS}.START"),
        ("0", f"{STATUS}.SUCCEEDED"), ("1", f"{STATUS}.SUCCEEDED"),
    ]  # fmt: skip
    error = kernel.fails("%distributed events now")
    assert error.ename == "OptionError"


def test_a_session_has_the_events_of_its_ranks():
    with nblaunch.Session(nproc=2) as session:
        first = session.run(rank_number)
        assert of_workers(first) == [(f"{STATUS}.START", 0), (f"{STATUS}.START", 1)]
        session.restart()
        second = session.run(rank_number)
    assert [rank for _, rank in of_workers(second)] == [0, 1, 0, 1]
    assert of_workers(first) == [(f"{STATUS}.START", 0), (f"{STATUS}.START", 1)]
