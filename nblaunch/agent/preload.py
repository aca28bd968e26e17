"""The fork server's own start: import what every rank needs, then serve.

Nothing here may start a thread, open a CUDA context or read the user's files: ranks are forks of this.
"""

from __future__ import annotations

import gc
import os
from multiprocessing import forkserver
from typing import NoReturn


def serve(listener_fd: int, alive_fd: int) -> NoReturn:
    """Import torch and IPython once, then fork a rank per request until killed."""
    # The keeper set the environment; OMP_NUM_THREADS must be there before torch is first imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import nblaunch.rank.main  # noqa: F401
    from nblaunch.rank import isolate, shell

    isolate.server_pid = os.getpid()
    shell.prepare()
    # Frozen objects are never visited by a rank's collector, so their pages stay shared.
    gc.collect()
    gc.freeze()
    forkserver.main(listener_fd, alive_fd, [])
    os._exit(0)
