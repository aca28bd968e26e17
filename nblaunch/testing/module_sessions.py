"""The sessions of a test module, and a test on their ranks."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

import pytest

from nblaunch._errors import NblaunchError, RunFailedError
from nblaunch._results import Outcome
from nblaunch.client.session import LiveSession, start_session
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.reports import format_ranks
from nblaunch.protocol.state import State
from nblaunch.testing import inside
from nblaunch.testing.asked import MADE_ON_RANKS, DistributedMark, argument_names
from nblaunch.testing.inside import Surroundings, Target
from nblaunch.testing.outcomes import Conclusion, conclude, concluded
from nblaunch.view.text import render_output

_REWRITTEN = "@pytest_ar"
"""The name that pytest gives itself in each module whose asserts it has rewritten."""
_SESSIONS = pytest.StashKey[dict[LaunchOptions, tuple[LiveSession, int]]]()
"""Of a module, by their options: each with the attempt whose ranks have been prepared."""


def run_test(item: pytest.Function, asked: DistributedMark) -> Conclusion | None:
    """Run a test on the ranks of its module's session; return how it ended, None if it passed."""
    target = _target(item)
    fixtures = {name: item.funcargs[name] for name in argument_names(item) if name not in MADE_ON_RANKS}
    try:
        session = _session(item, asked.options)
        perform = session.prepare_call(
            inside.call, (target,), fixtures, options=replace(asked.options, timeout=asked.timeout), anew=True
        )
    except NblaunchError as error:
        return concluded(error, target)
    try:
        outcome = perform(None)
    except BaseException:
        # An interrupt, or pytest-timeout: what the ranks are at, nobody waits for.
        _close(item, asked.options)
        raise
    _show_output(item, outcome)
    if not _are_as_before(outcome):
        _prepare_again(item, asked.options)
    return conclude(outcome, target)


def _target(item: pytest.Function) -> Target:
    classes = [each.name for each in item.listchain() if isinstance(each, pytest.Class)]
    return Target(
        module=item.module.__name__,
        path=str(item.path),
        qualname=(*classes, item.originalname),
        nodeid=item.nodeid,
        state=dict(vars(item.instance)) if item.cls is not None else None,
        made_here=tuple(name for name in argument_names(item) if name in MADE_ON_RANKS),
    )


def _session(item: pytest.Function, options: LaunchOptions) -> LiveSession:
    module = item.getparent(pytest.Module)
    assert module is not None  # noqa: S101 - every function is in one
    if _SESSIONS not in module.stash:
        module.stash[_SESSIONS] = {}
        module.addfinalizer(lambda: _close_all(module))
    sessions = module.stash[_SESSIONS]
    if options in sessions:
        session, attempt = sessions[options]
        if session.open and session.attempt != attempt:
            _prepare_again(item, options)
        if options in sessions and session.open:
            return session
        if options in sessions:
            _close(item, options)
    session = start_session(options, name="tests")
    try:
        _prepare(session, item)
    except BaseException:
        session.close()
        raise
    sessions[options] = (session, session.attempt)
    return session


def _prepare(session: LiveSession, item: pytest.Function) -> None:
    session.prepare_call(inside.prepare, (_surroundings(item),), anew=True)(None).unwrap()


def _prepare_again(item: pytest.Function, options: LaunchOptions) -> None:
    """Prepare ranks that are in the place of lost ones; without any, the next test opens a session."""
    module = item.getparent(pytest.Module)
    assert module is not None  # noqa: S101 - every function is in one
    session, _ = module.stash[_SESSIONS][options]
    attempt = session.attempt
    try:
        _prepare(session, item)
    except NblaunchError:
        _close(item, options)
    else:
        # Ranks that come after these are prepared once more.
        module.stash[_SESSIONS][options] = (session, attempt)


def _surroundings(item: pytest.Function) -> Surroundings:
    config = item.config
    files = {
        name: str(module.__file__)
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None)
        and not name.startswith("nblaunch.")  # ranks have these
        and (module is item.module or _REWRITTEN in vars(module) or name.rpartition(".")[2] == "conftest")
    }
    return Surroundings(
        files=files,
        rewritten=frozenset(name for name in files if _REWRITTEN in vars(sys.modules[name])),
        verbosity=config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
        traceback=config.getoption("tbstyle", "auto"),
        show_locals=bool(config.getoption("showlocals", default=False)),
    )


def _close(item: pytest.Function, options: LaunchOptions) -> None:
    module = item.getparent(pytest.Module)
    assert module is not None  # noqa: S101 - every function is in one
    session, _ = module.stash[_SESSIONS].pop(options)
    session.close()


def _close_all(module: pytest.Module) -> None:
    sessions = module.stash[_SESSIONS]
    del module.stash[_SESSIONS]
    with contextlib.ExitStack() as stack:
        for session, _ in sessions.values():
            stack.callback(session.close)


def _are_as_before(outcome: Outcome) -> bool:
    """Whether the ranks are as they were: each has returned or raised, and none had to be stopped."""
    if outcome.error is not None and type(outcome.error) is not RunFailedError:
        return False
    # Of a process that has ended there is no traceback.
    return all(
        each.state is State.SUCCEEDED or (each.failure is not None and each.failure.traceback)
        for each in outcome.result.ranks
    )


def _show_output(item: pytest.Function, outcome: Outcome) -> None:
    """Add what ranks printed to the test's report; equal lines stand once. With `-s` it is printed."""
    text = render_output(outcome.result.state)
    if not text:
        return
    if item.config.getoption("capture") == "no":
        print(text)  # noqa: T201 - `-s` asks for it
    else:
        everyone = format_ranks(each.rank for each in outcome.result.ranks)
        item.add_report_section("call", f"output of {everyone}", f"{text}\n")
