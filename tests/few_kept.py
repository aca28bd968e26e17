"""Runtimes that keep little of a detached session's jobs, so that a test sees the bounds."""

from __future__ import annotations

import functools
from typing import Any

VALUES = 4 << 20
"""The bytes of all values together."""
LOG = 4 << 20
"""The bytes of each log file."""
JOBS = 3


def live(*arguments):
    from nblaunch.runtime import archive, runtime_main  # not where a test imports this file

    few: Any = functools.partial(archive.Bounds, values=VALUES)
    archive.Bounds = few  # type: ignore[misc]
    runtime_main.live(*arguments)


def with_small_logs(*arguments):
    from nblaunch.host import logs
    from nblaunch.runtime import archive, runtime_main

    few: Any = functools.partial(archive.Bounds, jobs=JOBS)
    archive.Bounds = few  # type: ignore[misc]
    logs.MOST_BYTES = LOG
    runtime_main.live(*arguments)
