"""Run a notebook cell, or a function, on N torch ranks and get N values back.

    %load_ext nblaunch

    %%distributed -n 2 --out res
    ...

    nblaunch.run(fn, nproc=2)

Importing this package loads neither torch nor IPython; the names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nblaunch._api import Session, run
    from nblaunch._errors import (
        CaptureError,
        LaunchError,
        NblaunchError,
        OptionError,
        RunFailedError,
        RunTimeoutError,
    )
    from nblaunch._results import (
        Event,
        Handle,
        RankFailure,
        RankResult,
        RankStatus,
        RunResult,
        SessionStatus,
    )
    from nblaunch.checks.doctor import doctor
    from nblaunch.checks.report import DoctorReport
    from nblaunch.options.launch import LaunchOptions
    from nblaunch.protocol.reports import HangReport
    from nblaunch.protocol.transcript import Display

__version__ = "0.1.0"

_HOMES = {
    "CaptureError": "_errors",
    "Display": "protocol.transcript",
    "DoctorReport": "checks.report",
    "Event": "_results",
    "Handle": "_results",
    "HangReport": "protocol.reports",
    "LaunchError": "_errors",
    "LaunchOptions": "options.launch",
    "NblaunchError": "_errors",
    "OptionError": "_errors",
    "RankFailure": "_results",
    "RankResult": "_results",
    "RankStatus": "_results",
    "RunFailedError": "_errors",
    "RunResult": "_results",
    "RunTimeoutError": "_errors",
    "Session": "_api",
    "SessionStatus": "_results",
    # Not in `_api`, which loads torch: a user asks the doctor when torch cannot be loaded.
    "doctor": "checks.doctor",
    "run": "_api",
}

__all__ = [
    "CaptureError",
    "Display",
    "DoctorReport",
    "Event",
    "Handle",
    "HangReport",
    "LaunchError",
    "LaunchOptions",
    "NblaunchError",
    "OptionError",
    "RankFailure",
    "RankResult",
    "RankStatus",
    "RunFailedError",
    "RunResult",
    "RunTimeoutError",
    "Session",
    "SessionStatus",
    "doctor",
    "run",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        msg = f"module 'nblaunch' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"nblaunch.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell: Any) -> None:
    """Register the magics: `%load_ext nblaunch`."""
    from nblaunch.group import runtime

    # It boots while this process imports torch, so the first cell need not wait for it.
    runtime.local().server.ensure_running()
    from nblaunch.magic.magics import register

    register(shell)
