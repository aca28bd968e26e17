"""How the processes of ranks come into being, and which ways there are not."""

from __future__ import annotations

import threading

import torch

from nblaunch._errors import OptionError


def check(method: str) -> None:
    """Raise `OptionError` for a way that does not work from here."""
    if method != "fork":
        return
    if torch.cuda.is_initialized():
        why = "CUDA is initialised in this process, and a process forked from it cannot use CUDA"
    else:
        why = (
            f"this process has {threading.active_count()} threads, and one forked from it has only one of "
            "them, with the locks that the others held at that moment: sooner or later a rank waits for ever"
        )
    msg = (
        f"start_method='fork' was asked for, but {why}. Use forkserver, the default: it forks as fast, "
        "from a process with torch loaded that has one thread and never touches CUDA."
    )
    raise OptionError(msg)
