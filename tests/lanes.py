"""Which cases of a table the quick lane runs, and what a machine may leave out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Any, NoReturn

import hypothesis
import pytest


def examples(count: int) -> hypothesis.settings:
    """Return the settings of a property: `count` examples in CI, a quarter of them elsewhere."""
    return hypothesis.settings(
        max_examples=count if os.environ.get("CI") else max(count // 4, 10), deadline=None
    )


def sampled(cases: Iterable[Any], quick: int = 1, ci: int | None = None) -> list[Any]:
    """Return all cases for `parametrize`, those after the first `quick` marked `full`, after `ci` `slow`."""
    return [
        case if number < quick else slow(case) if ci is not None and number >= ci else full(case)
        for number, case in enumerate(cases)
    ]


def full(case: Any) -> Any:
    """Return a case that CI runs, and the quick lane does not."""
    return _marked(case, pytest.mark.full)


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    values, marks, name = case if hasattr(case, "marks") else (case, (), None)
    if not hasattr(case, "marks"):
        values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[*marks, mark], id=name)


def slow(case: Any) -> Any:
    """Return a case that neither the quick lane nor CI runs."""
    return _marked(case, pytest.mark.slow)


def left_out(why: str) -> NoReturn:
    """Skip a test that not every user or container can run; root in CI can run all."""
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(f"{why}: CI as root leaves nothing out", pytrace=False)
    pytest.skip(why)


def needs(*libraries: str) -> None:
    """Skip where a library is missing, or fail in CI: there nothing may be left out."""
    absent = [name for name in libraries if importlib.util.find_spec(name) is None]
    if absent and os.environ.get("CI"):
        pytest.fail(f"{', '.join(absent)} missing, and CI runs these tests", pytrace=False)
    if absent:
        pytest.skip(f"{', '.join(absent)} missing (see notebooks/docs/testing.md)")
