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
    from nblaunch._api import run
    from nblaunch._errors import (
        CaptureError,
        LaunchError,
        NblaunchError,
        OptionError,
        RunFailedError,
        RunTimeoutError,
    )
    from nblaunch._events import Event
    from nblaunch._options import LaunchOptions
    from nblaunch._reports import HangReport
    from nblaunch._results import RankFailure, RankResult, RunResult
    from nblaunch._session_api import Session
    from nblaunch._transcript import Display
    from nblaunch.diagnose.doctor import doctor
    from nblaunch.diagnose.report import DoctorReport
    from nblaunch.session.background import Handle
    from nblaunch.session.status import RankStatus, SessionStatus

__version__ = "0.1.0"

_HOMES = {
    "CaptureError": "_errors",
    "Display": "_transcript",
    "DoctorReport": "diagnose.report",
    "Event": "_events",
    "Handle": "session.background",
    "HangReport": "_reports",
    "LaunchError": "_errors",
    "LaunchOptions": "_options",
    "NblaunchError": "_errors",
    "OptionError": "_errors",
    "RankFailure": "_results",
    "RankResult": "_results",
    "RankStatus": "session.status",
    "RunFailedError": "_errors",
    "RunResult": "_results",
    "RunTimeoutError": "_errors",
    "Session": "_session_api",
    "SessionStatus": "session.status",
    # Not in `_api`, which loads torch: a torch that cannot be loaded is what the doctor is asked about.
    "doctor": "diagnose.doctor",
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
    from nblaunch.agent import forkserver

    # It boots while this process imports torch, so that the first cell need not wait for it.
    forkserver.server.ensure_running()
    from nblaunch.magic.magics import register

    register(shell)
