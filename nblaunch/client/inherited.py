"""The message by which processes become ranks of this one: what they inherit, as it is now."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from nblaunch import _inherited
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import Placement
from nblaunch.protocol.messages import Prepare


def prepare_of(
    options: LaunchOptions,
    placement: Placement,
    environ: Mapping[str, str],
    *,
    timeout: float | None = None,
    script: bool = False,
) -> Prepare:
    """Return the message that makes processes ranks of this notebook, as it is now.

    A `script` finds what it finds under torchrun: its own directory in place of an interactive session's,
    and, unless it is to have a process group, devices that were not touched.
    Raises `LaunchError` where ranks with this process's limits, or in its directory, could not work.
    """
    if options.on is None:
        # The runtime has the limit of when it was started, the ranks the present one.
        _inherited.check_descriptors(placement.nproc)
    may_have_devices = placement.device_type != "cpu" or options.on is not None
    untouched = script and not options.init_process_group and may_have_devices
    # torchrun leaves this in its environment, so its workers have it; here no handler is ever installed.
    environ = {**environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle}
    return Prepare(
        environ=_inherited.encoded(environ),
        cwd=_inherited.working_directory(),
        path=_inherited.search_path(entry for entry in sys.path if entry or not script),
        argv=tuple(os.fsencode(each) for each in sys.argv[:1]) or (b"",),
        umask=_inherited.umask(),
        limits=_inherited.limits(placement.nproc),
        backend=placement.backend if options.init_process_group else None,
        device_type="" if untouched else placement.device_type,
        accelerators=placement.accelerators,
        timeout=timeout,
    )
