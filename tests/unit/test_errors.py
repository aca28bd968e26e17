"""Errors are the interface: a tree, with fields, that pickles, whose messages stay readable."""

from __future__ import annotations

import pickle
import re
import threading

import pytest

import nblaunch
from nblaunch import _errors
from nblaunch._errors import (
    MESSAGE_LIMIT,
    CaptureError,
    DesyncError,
    LaunchError,
    NblaunchError,
    NonFiniteError,
    OptionError,
    RunFailedError,
    RunPreemptedError,
    RunTimeoutError,
    shorten,
)
from nblaunch._results import RankFailure, RankResult, RankResults, RunResult
from nblaunch.diagnose.failures import reason
from nblaunch.options.command_line import parse_line
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import FailureRecord, Phase
from nblaunch.protocol.reports import HangReport
from nblaunch.protocol.state import State

MEGABYTE = 1_000_000
LONG = "x" * 20_000


def failure(**changes):
    fields = {
        "rank": 1,
        "exception": ValueError("boom"),
        "type": "builtins.ValueError",
        "message": "boom",
        "traceback": "Traceback (most recent call last):\nValueError: boom\n",
        "frames": (),
        "exitcode": 1,
        "signal": None,
        "time": 5.0,
        "phase": Phase.JOB,
    }
    return RankFailure(**{**fields, **changes})


def result(cause):
    rank = RankResult(
        rank=1, local_rank=1, node="n", device="cpu", state=State.FAILED, value=None, failure=cause,
        stdout="said\n", stderr="", displays=(), exitcode=1, attempt=0, started=1.0, ended=2.0, pid=7,
    )  # fmt: skip
    return RunResult(ranks=RankResults([rank]), world_size=2, failures=(cause,))


# --- the tree --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (OptionError, {NblaunchError, ValueError}),
        (CaptureError, {NblaunchError, TypeError}),
        (LaunchError, {NblaunchError, RuntimeError}),
        (RunFailedError, {NblaunchError, RuntimeError}),
        (RunTimeoutError, {RunFailedError, TimeoutError}),
        (RunPreemptedError, {NblaunchError}),
        (NonFiniteError, {NblaunchError, FloatingPointError}),
        (DesyncError, {NblaunchError, RuntimeError}),
    ],
)
def test_an_error_is_caught_by_its_family_and_by_pythons_name_for_it(error, bases):
    assert {base for base in bases if issubclass(error, base)} == bases
    assert issubclass(error, NblaunchError)
    assert getattr(nblaunch, error.__name__) is error


def test_the_tree_at_the_top_of_the_module_is_the_tree():
    drawn = re.findall(r"^\s*(?:x )?(\w+Error)(?:\((\w+)\))?", _errors.__doc__ or "", flags=re.MULTILINE)
    assert {name for name, _ in drawn} == {name for name in vars(_errors) if name.endswith("Error")}
    for name, builtin in drawn:
        assert not builtin or issubclass(getattr(_errors, name), getattr(__import__("builtins"), builtin))


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = nblaunch.runn


# --- pickling --------------------------------------------------------------------------------------


CAUSE = failure()
REPORT = HangReport(groups=(), collectives={}, findings=("rank 1 is late",), finished=(0,))


@pytest.mark.parametrize(
    "error",
    [
        NblaunchError("told"),
        OptionError("told"),
        CaptureError("told", name="model", path="model._lock", size=64),
        CaptureError("told"),
        LaunchError("told", phase="connect"),
        RunFailedError("told", result=result(CAUSE), root_cause=CAUSE),
        RunFailedError("told"),
        RunTimeoutError("told", result=result(CAUSE), root_cause=CAUSE, hang_report=REPORT),
        RunPreemptedError("told", result=result(CAUSE)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_from_pickle_with_its_fields(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == "told"
    assert vars(back).keys() == vars(error).keys()
    for name, value in vars(error).items():
        if name == "result" and value is not None:
            assert [each.stdout for each in back.result.ranks] == ["said\n"]
            assert repr(back.result) == repr(value)
        elif name == "root_cause" and value is not None:
            assert (back.root_cause.rank, repr(back.root_cause.exception)) == (1, "ValueError('boom')")
        else:
            assert getattr(back, name) == value


def test_a_failed_result_comes_back_from_pickle():
    back = pickle.loads(pickle.dumps(result(CAUSE)))
    assert (back.ok, back.world_size, back.root_cause.message) == (False, 2, "boom")
    with pytest.raises(ValueError, match="boom"):
        _ = back[1]


# --- messages stay readable ------------------------------------------------------------------------


def test_a_text_is_shortened_in_its_middle():
    assert shorten("short") == "short"
    text = shorten("begin" + "x" * MEGABYTE + "end")
    assert len(text) < MESSAGE_LIMIT + 100
    assert text.startswith("begin")
    assert text.endswith("end")
    assert re.search(r"\d+ characters left out", text)


def test_a_failed_run_of_a_megabyte_of_text_makes_a_short_message():
    huge = "x" * MEGABYTE
    record = FailureRecord(type="builtins.ValueError", message=huge)
    cause = failure(message=huge, exception=ValueError(huge), reason=str(reason(record)))
    error = RunFailedError(f"rank 1 failed: {cause.reason}{huge}", result=result(cause), root_cause=cause)
    assert len(str(error)) < 100_000
    assert len(cause.reason) < 10_000
    assert len(repr(error.result)) < 10_000


@pytest.mark.parametrize(
    "line",
    [f"--{LONG} 3", f"-n {'9' * len(LONG)}", f"--env {LONG}", LONG],
    ids=["flag", "number", "env", "word"],
)
def test_an_option_that_is_very_long_makes_a_short_message(line):
    for ask in (lambda: parse_line(line), lambda: LaunchOptions.from_keywords(nproc=2, **{line: True})):
        with pytest.raises(OptionError) as caught:
            ask()
        assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    "value",
    [
        {"k" * MEGABYTE: threading.Lock()},
        {"a": {"b" * MEGABYTE: [threading.Lock()]}},
        {("x" * MEGABYTE, 1): threading.Lock()},
    ],
    ids=["key", "deep-key", "tuple-key"],
)
def test_a_captured_value_with_a_huge_name_makes_a_short_message(value):
    with pytest.raises(CaptureError) as caught:
        nblaunch.run(print, (value,), nproc=2)
    assert len(str(caught.value)) < 100_000
    assert "lock" in str(caught.value)


def test_an_error_says_what_was_asked_what_is_true_and_what_to_do():
    with pytest.raises(OptionError) as option:
        nblaunch.run(print, nproc=0)
    assert re.search(r"nproc.*0.*\d", str(option.value))
    with pytest.raises(OptionError, match=r"not callable. Pass a function"):
        nblaunch.run(5, nproc=2)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"args\[0\].*Make args\[0\] on the ranks instead"):
        nblaunch.run(print, (threading.Lock(),), nproc=2)


def test_no_error_of_ours_shows_our_own_frames_in_a_notebook():
    error = RunFailedError("told", root_cause=CAUSE)
    assert error._render_traceback_() == [
        "Traceback (most recent call last):",
        "ValueError: boom",
        "",
        "RunFailedError: told",
    ]
    assert OptionError("told")._render_traceback_() == [
        "OptionError: told",
        "More: https://nblaunch.github.io/e/wrong-option",
    ]
    assert RunFailedError("told")._render_traceback_() == ["RunFailedError: told"]
    assert RunTimeoutError("told", hang_report=REPORT)._render_traceback_() == [
        "rank 1 is late",
        "[rank 0] had finished",
        "",
        "RunTimeoutError: told",
        "More: https://nblaunch.github.io/e/hang",
    ]
