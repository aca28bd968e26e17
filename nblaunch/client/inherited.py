"""The message by which processes become ranks of this one: what they inherit, as it is now."""

from __future__ import annotations

import os
import sys

from nblaunch import _inherited
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import Prepare


def prepare_of(options: LaunchOptions, *, timeout: float | None = None, script: bool = False) -> Prepare:
    """Return the message that makes processes ranks of this notebook, as it is now, but for their devices.

    A `script` finds what it finds under torchrun: its own directory in place of an interactive session's.
    Raises `LaunchError` where ranks in this process's directory could not work.
    """
    # torchrun leaves this in its environment, so its workers have it; here no handler is ever installed.
    signals = {"TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle}
    return Prepare(
        environ=_inherited.encoded({**os.environ, **options.env, **signals}),
        cwd=_inherited.working_directory(),
        path=_inherited.search_path(entry for entry in sys.path if entry or not script),
        argv=tuple(os.fsencode(each) for each in sys.argv[:1]) or (b"",),
        umask=_inherited.umask(),
        limits=_inherited.limits(),
        timeout=timeout,
    )
