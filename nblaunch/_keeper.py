"""How a keeper is started, by the process that it keeps a fork server or a runtime for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nblaunch._process_tree import this_python

FORK_SERVER_LOG = "forkserver.log"
"""What the keeper and the fork server print, in the private directory."""
RUNTIME_LOG = "runtime.log"
"""What the runtime prints."""

_CALLS_CUDA = "KINETO_USE_DAEMON"
"""Has torch initialise CUDA when it is imported, which no fork survives."""


def start(
    function: str,
    arguments: tuple[object, ...],
    *,
    root: Path,
    environ: Mapping[str, str],
    fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Have a new Python call a function of `elastic.keeper`, by name; it inherits `fds`. Nothing waits."""
    code = (
        f"import sys; sys.path[:] = {absolute_path()!r}; from nblaunch.elastic.keeper import {function}; "
        f"{function}{arguments!r}"
    )
    with (root / FORK_SERVER_LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
            [*this_python(), "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            pass_fds=fds,
            # The stop button's SIGINT goes to the kernel's process group: we are not in it.
            start_new_session=True,
        )


def environment() -> dict[str, str]:
    """Return the environment under which a fork server started now loads torch."""
    # torchrun's rule for more than one rank on a machine: one thread each where no number is set.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    environ.pop(_CALLS_CUDA, None)
    return environ


def absolute_path() -> list[str]:
    """Return this process's `sys.path` as it is to be in another one."""
    here = directory_or_root()
    return [os.path.normpath(Path(here, entry)) for entry in sys.path]


def directory_or_root() -> str:
    """Return the working directory, or the root directory where it has been removed: others refuse that."""
    try:
        return str(Path.cwd())
    except OSError:
        return os.sep
