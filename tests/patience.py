"""Waiting for what must happen, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE = 30.0
"""Seconds that something which must happen may take; only a failure waits as long."""


def eventually(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until `condition()` is true; fail, saying `what`, if it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


def waiting(file: Path, line: str = "") -> str:
    """Return a cell with this line that says that it has begun, and ends once there is a file."""
    return f"""
%%distributed {line}
import pathlib, time
print("has begun", flush=True)
while not pathlib.Path({str(file)!r}).exists():
    time.sleep(0.01)
"freed"
"""
