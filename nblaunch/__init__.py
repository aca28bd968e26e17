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

from nblaunch._version import __version__ as __version__

if TYPE_CHECKING:
    from nblaunch._api import Session, run, sessions
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
    from nblaunch._insight import diff, log, step
    from nblaunch._metrics import Metrics
    from nblaunch._preempt import on_preempt
    from nblaunch._results import Handle, RankFailure, RankResult, RunResult, SessionInfo, SessionStatus
    from nblaunch.checks.doctor import doctor
    from nblaunch.checks.report import DoctorReport
    from nblaunch.client.run import StoppedWatchingError
    from nblaunch.client.session import SessionJob
    from nblaunch.insight.difference import Difference
    from nblaunch.insight.profile import Profile
    from nblaunch.insight.run_report import Report
    from nblaunch.options.launch import LaunchOptions
    from nblaunch.protocol.client import Event, RankStatus
    from nblaunch.protocol.messages import MemoryUse
    from nblaunch.protocol.reports import HangReport
    from nblaunch.protocol.transcript import Display

_NAMES = {
    "_api": ("Session", "run", "sessions"),
    "_errors": (
        *("CaptureError", "DesyncError", "LaunchError", "NblaunchError", "NonFiniteError", "OptionError"),
        *("RunFailedError", "RunPreemptedError", "RunTimeoutError"),
    ),
    "_insight": ("diff", "log", "step"),
    "_metrics": ("Metrics",),
    "_preempt": ("on_preempt",),
    "_results": (
        *("Handle", "RankFailure", "RankResult", "RunResult", "SessionInfo"),
        "SessionStatus",
    ),
    # It loads torch, which a user may ask it about because torch cannot be loaded.
    "checks.doctor": ("doctor",),
    "client.session": ("SessionJob",),
    "client.run": ("StoppedWatchingError",),
    "checks.report": ("DoctorReport",),
    "insight.difference": ("Difference",),
    "insight.profile": ("Profile",),
    "insight.run_report": ("Report",),
    "options.launch": ("LaunchOptions",),
    "protocol.client": ("Event", "RankStatus"),
    "protocol.messages": ("MemoryUse",),
    "protocol.reports": ("HangReport",),
    "protocol.transcript": ("Display",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "CaptureError",
    "DesyncError",
    "Difference",
    "Display",
    "DoctorReport",
    "Event",
    "Handle",
    "HangReport",
    "LaunchError",
    "LaunchOptions",
    "MemoryUse",
    "Metrics",
    "NblaunchError",
    "NonFiniteError",
    "OptionError",
    "Profile",
    "RankFailure",
    "RankResult",
    "RankStatus",
    "Report",
    "RunFailedError",
    "RunPreemptedError",
    "RunResult",
    "RunTimeoutError",
    "Session",
    "SessionInfo",
    "SessionJob",
    "SessionStatus",
    "StoppedWatchingError",
    "diff",
    "doctor",
    "log",
    "on_preempt",
    "run",
    "sessions",
    "step",
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
    from nblaunch.client.local import local

    # It starts while the user writes the first cell.
    _ = local().runtime
    from nblaunch.magic.magics import register
    from nblaunch.magic.sessions import tell_of_detached

    register(shell)
    tell_of_detached()
