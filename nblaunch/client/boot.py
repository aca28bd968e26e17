"""What a runtime's process calls, and ending one that does not answer."""

from __future__ import annotations

import os
import signal

from nblaunch._process_tree import start_ticks

LIVE = "nblaunch.runtime.main:live"
"""What the runtime's process calls, by name: a client does not import it."""


def stop_keeper(pid: int, started: int) -> bool:
    """Have a keeper end all that it keeps; return whether it was there.

    `started` is its `start_ticks`: a process that has the same number since gets no signal.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # a Python built on old headers, some sandboxes
        if start_ticks(pid) != started:
            return False
        os.kill(pid, signal.SIGUSR1)
        return True
    try:
        if start_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(process, signal.SIGUSR1)
    except ProcessLookupError:
        return False
    else:
        return True
    finally:
        os.close(process)
