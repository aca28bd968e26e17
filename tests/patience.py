"""Waiting for what must happen, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

PATIENCE = 10.0
"""Seconds that something which must happen may take; only a failure waits as long."""


def eventually(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until `condition()` is true; fail, saying `what`, if it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
