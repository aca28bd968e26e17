"""What `@pytest.mark.distributed` asks for, judged before a process starts."""

from __future__ import annotations

import inspect
import os
import unittest
from dataclasses import dataclass
from typing import Any

import pytest

from nblaunch._errors import OptionError
from nblaunch.options.launch import LaunchOptions

LONGEST = 300.0
"""Seconds that a test may take where nothing says otherwise, as in torch's tests of several processes."""
_MARGIN = 5.0
"""Seconds that a report takes, beside the ranks' grace; pytest-timeout ends a test without one."""
_MARK = "@pytest.mark.distributed"
MADE_ON_RANKS = frozenset({"monkeypatch"})
"""Fixtures that each rank has one of its own of."""
_PRINTED = (
    "What ranks print is in the report. In a test without the mark it is nblaunch.run(...).ranks[0].stdout."
)
_OF_THE_PROCESS = {
    **dict.fromkeys(("capsys", "capsysbinary", "capfd", "capfdbinary", "caplog", "capteesys"), _PRINTED),
    "request": "Ask it in a fixture, which runs in pytest's process, and return what the test needs.",
    "recwarn": "Use pytest.warns in the test.",
    "tmp_path_factory": "Make the directory in a fixture, or use tmp_path: a path can be sent.",
    **dict.fromkeys(("pytestconfig", "cache"), "Read what the test needs in a fixture."),
    **dict.fromkeys(("pytester", "testdir"), "Start pytest in a test without the mark."),
    **dict.fromkeys(
        ("record_property", "record_testsuite_property", "record_xml_attribute"),
        "Record it in a test without the mark.",
    ),
    "subtests": "Use parametrize.",
}
"""Fixtures that mean pytest's own process, and what to do instead."""


@dataclass(frozen=True, slots=True)
class DistributedMark:
    """The options of a test's ranks, and the seconds that it may take."""

    options: LaunchOptions
    timeout: float | None


def asked_by(item: pytest.Item, mark: pytest.Mark) -> DistributedMark:
    """Return what a test asks for. Raises `OptionError` where the mark or the test is wrong.

    >>> @pytest.mark.distributed(nproc=2, timeout=60, backend="gloo")          # doctest: +SKIP
    ... def test_sum(): ...
    """
    _refuse(item)
    keywords = dict(mark.kwargs)
    if len(mark.args) > 1 or (mark.args and "nproc" in keywords):
        given = ", ".join([*map(repr, mark.args), *(f"{name}={value!r}" for name, value in keywords.items())])
        msg = f"{_MARK}({given}) was asked for, but it takes one number of ranks: {_MARK}(nproc=2)."
        raise OptionError(msg)
    if mark.args:
        keywords["nproc"] = mark.args[0]
    for name in ("detach", "linger"):
        if name in keywords:
            msg = f"{name}= was asked for, but the ranks of tests end with their module. Leave it out."
            raise OptionError(msg)
    limited = "timeout" in keywords
    timeout = keywords.pop("timeout", None)
    options = LaunchOptions.from_keywords(of_session=True, **keywords)
    if not limited:
        timeout = _default_timeout(item, options.grace)
    return DistributedMark(options, LaunchOptions(timeout=timeout).timeout)


def _refuse(item: pytest.Item) -> None:
    """Raise `OptionError` for what cannot run on ranks."""
    if not isinstance(item, pytest.Function):
        msg = f"{_MARK} is for test functions, and this is a {type(item).__name__}. Take the mark away."
        raise OptionError(msg)
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        msg = f"{_MARK} cannot run a method of unittest.TestCase. Write a function, or a class of its own."
        raise OptionError(msg)
    function = inspect.unwrap(item.obj)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        msg = f"{_MARK} cannot run an async test. Write a plain function that calls asyncio.run."
        raise OptionError(msg)
    for name in argument_names(item):
        if name in _OF_THE_PROCESS:
            instead = _OF_THE_PROCESS[name]
            msg = f"the fixture {name!r} is of pytest's own process and cannot be sent to ranks. {instead}"
            raise OptionError(msg)


def argument_names(item: pytest.Function) -> tuple[str, ...]:
    """Return the names of the fixtures and parameters that a test takes itself.

    pytest's own call of a test reads them from the same place, which has no public name.
    """
    return tuple(item._fixtureinfo.argnames)  # noqa: SLF001 - see above


def _default_timeout(item: pytest.Item, grace: float) -> float:
    """Return the limit of a test that states none: a report comes before pytest-timeout ends the test."""
    limit = _of_pytest_timeout(item)
    return LONGEST if limit <= 0 else max(limit - grace - _MARGIN, limit / 2)


def _of_pytest_timeout(item: pytest.Item) -> float:
    """Return the seconds that pytest-timeout gives a test, 0 where it gives no limit or is not there."""
    if not item.config.pluginmanager.hasplugin("timeout"):
        return 0.0
    mark = item.get_closest_marker("timeout")
    given: tuple[Any, ...] = (
        mark and (mark.kwargs.get("timeout") or (mark.args[0] if mark.args else None)),
        item.config.getoption("timeout", None),
        os.environ.get("PYTEST_TIMEOUT"),
        item.config.getini("timeout"),
    )
    for each in given:
        if each not in (None, ""):
            try:
                return float(each)
            except ValueError:
                return 0.0
    return 0.0
