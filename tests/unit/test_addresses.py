"""Each kind of failure has a name, a section of the documentation, and an address that never changes."""

from __future__ import annotations

import ast
import copy
import functools
import pickle
import re
import tomllib
import traceback
from pathlib import Path

import pytest

from nblaunch import _errors
from nblaunch._errors import (
    CaptureError,
    DesyncError,
    LaunchError,
    NblaunchError,
    NonFiniteError,
    OptionError,
    RunFailedError,
    RunPreemptedError,
    RunTimeoutError,
)
from nblaunch._help import DIRECTORY, DOCUMENTATION, FailureKind
from nblaunch.diagnose.failures import NODE_LOST, kind_of
from nblaunch.protocol.client import ErrorRecord
from nblaunch.protocol.messages import FailureRecord, HeldMemory, Phase

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "notebooks/docs/failures.md").read_text()
DEFAULTS = {"OptionError", "CaptureError", "RunTimeoutError", "RunPreemptedError"}
"""Errors whose class has a kind; `LaunchError` has one for each phase besides."""

NAMES = """
backend cannot-be-sent collective-timeout connection-lost crashed desync engine exited hang inside-a-rank
killed nan no-answer no-session no-such-variable node-lost node-refused not-installed not-on-a-rank
not-started not-writable open-files other-version out-of-memory packages port preempted process-group
process-limit rendezvous runtime-ended script-not-found session-busy session-ended session-name
session-taken shared-memory-full start-method too-few-gpus torch-version unknown-option value-not-sent
working-directory wrong-arguments wrong-option
"""


@functools.cache
def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "nblaunch").rglob("*.py"))}


def sections():
    """Return the sections of the page that have a name, by it."""
    parts = re.split(r"^\(([a-z-]+)\)=\n", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def calls(*names):
    """Return the calls of these names in the package, each with the place that a failing test names."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


# --- names and addresses ---------------------------------------------------------------------------


def test_the_addresses_are_these_for_ever():
    """Saved notebooks, logs and search engines keep them: add a name here, never rename or remove one."""
    assert sorted(FailureKind) == NAMES.split()
    assert {kind.address for kind in FailureKind} == {
        f"https://nblaunch.github.io/e/{name}" for name in NAMES.split()
    }


def test_the_base_of_the_addresses_is_written_in_one_place():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == DOCUMENTATION
    docstrings = {
        id(node.body[0].value)
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    having = [
        path.name
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
        if isinstance(node.value, str) and DOCUMENTATION.rstrip("/") in node.value
    ]
    assert having == ["_help.py"]


def test_every_kind_has_a_section_and_every_named_section_a_kind():
    assert sorted(sections()) == sorted(FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
def test_a_section_has_a_heading_the_message_as_it_is_shown_and_what_to_do(kind):
    heading, text = sections()[kind].split("\n", 1)
    assert heading.startswith("### ")
    blocks = re.findall(r"^```text\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert [block.splitlines()[-1] for block in blocks if "More:" in block] == [kind.line]
    assert len(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).split()) > 20


def test_every_kind_is_one_that_the_code_gives_an_error():
    used = {
        node.attr
        for path, tree in sources().items()
        if path.name != "_help.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "FailureKind"
    }
    assert used == set(FailureKind.__members__)


# --- errors and their kinds ------------------------------------------------------------------------


def test_every_error_that_starts_nothing_or_fails_to_start_has_a_kind():
    """By its class, by the phase of a `LaunchError`, or by its own `kind=`."""
    assert all(getattr(_errors, name).kind in FailureKind for name in DEFAULTS | {"LaunchError"})
    lacking = [
        place
        for place, call in calls("LaunchError")
        if not {"phase", "kind"} & {each.arg for each in call.keywords}
    ]
    assert lacking == []


def test_every_failed_run_that_no_rank_explains_has_a_kind():
    lacking = [
        place for place, call in calls("RunFailedError") if "kind" not in {each.arg for each in call.keywords}
    ]
    assert lacking == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OptionError("told"), "wrong-option"),
        (OptionError("told", kind=FailureKind.BACKEND), "backend"),
        (CaptureError("told", name="x"), "cannot-be-sent"),
        (LaunchError("told"), "not-started"),
        (LaunchError("told", phase=Phase.CONNECT.value), "no-answer"),
        (LaunchError("told", phase=Phase.PROCESS_GROUP.value), "process-group"),
        (LaunchError("told", phase=Phase.ENGINE.value), "engine"),
        (LaunchError("told", phase="rendezvous", kind=FailureKind.PORT), "port"),
        (RunFailedError("told", kind=FailureKind.KILLED), "killed"),
        (RunTimeoutError("told"), "hang"),
        (RunPreemptedError("told"), "preempted"),
        (NblaunchError("told", kind=FailureKind.SESSION_BUSY), "session-busy"),
    ],
    ids=lambda each: str(each) if isinstance(each, str) else type(each).__name__,
)
def test_an_error_shows_its_address_once_wherever_it_went_and_its_text_has_none(error, kind):
    sent = ErrorRecord.of(error).error()
    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), sent):
        assert (type(each), str(each), each.args, each.kind) == (type(error), "told", ("told",), kind)
        line = f"More: https://nblaunch.github.io/e/{kind}"
        assert each._render_traceback_()[-2:] == [f"{type(error).__name__}: told", line]
        assert traceback.format_exception(each)[-1].strip() == line
        assert "".join(traceback.format_exception(each)).count(f"/{DIRECTORY}/") == 1


def test_an_error_of_the_users_own_code_and_one_on_a_rank_show_no_address():
    """That of a rank is a part of the failed run's error, which shows it."""
    for error in (RunFailedError("told"), NblaunchError("told"), NonFiniteError("told"), DesyncError("told")):
        assert not hasattr(error, "__notes__")
        assert error._render_traceback_() == [f"{type(error).__name__}: told"]
    assert (NonFiniteError("told").kind, DesyncError("told").kind) == ("nan", "desync")


def test_notes_of_the_user_are_shown_as_well():
    error = OptionError("told")
    error.add_note("two\nlines")
    assert error._render_traceback_()[2:] == ["two", "lines"]


# --- what failed on a rank -------------------------------------------------------------------------


def dead(exitcode, message="ended"):
    return FailureRecord(type="ProcessExited", message=message, exitcode=exitcode)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (dead(-9), "killed"),
        (dead(-15), "killed"),
        (dead(-11), "crashed"),
        (dead(-6), "crashed"),
        (dead(-6, "was killed by SIGABRT (NCCL's watchdog: ALLREDUCE #1 timed out)"), "collective-timeout"),
        (dead(-7), "shared-memory-full"),
        (dead(3), "exited"),
        (dead(0), "exited"),
        (dead(-9, f"{NODE_LOST}: hB is gone"), "node-lost"),
        (FailureRecord(type="torch.OutOfMemoryError", message="CUDA out of memory"), "out-of-memory"),
        (FailureRecord(type="builtins.MemoryError", message=""), "out-of-memory"),
        (
            FailureRecord(type="builtins.RuntimeError", message="", held=(HeldMemory(size=1, what="x"),)),
            "out-of-memory",
        ),
        (FailureRecord(type="nblaunch._errors.NonFiniteError", message="the loss is NaN"), "nan"),
        (FailureRecord(type="nblaunch._errors.DesyncError", message="differs"), "desync"),
        (
            FailureRecord(type="builtins.RuntimeError", message="Timed out waiting 2000ms for recv"),
            "collective-timeout",
        ),
        (FailureRecord(type="builtins.TypeError", message="no", phase=Phase.VALUE), "value-not-sent"),
        (FailureRecord(type="builtins.ValueError", message="boom"), None),
        (FailureRecord(type="builtins.SystemExit", message="3", exitcode=3), None),
    ],
)
def test_the_failure_of_a_rank_has_the_kind_that_a_user_would_look_for(failure, kind):
    assert kind_of(failure) == kind
