"""Options that torchelastic itself carries out: what they become, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nblaunch import _visible
from nblaunch._errors import OptionError
from nblaunch._options import LaunchOptions
from nblaunch.agent import devices, events, forkserver, log_files, numa, start_methods, watchdog
from nblaunch.agent.contract import ProcessSettings
from nblaunch.agent.devices import Placement
from nblaunch.session import surroundings

_SWITCHED_ON = "1"


def settings_of(options: LaunchOptions, environ: Mapping[str, str]) -> ProcessSettings:
    """Return what the agent is to know; `environ` is that of the ranks."""
    method = options.start_method
    built = torch.backends.cuda.is_built()
    if method == "forkserver" and built and surroundings.needs_new_python(environ, forkserver.loaded_under()):
        method = "spawn"
    return ProcessSettings(
        logs_specs=options.logs_specs,
        duplicate_stdout_filters=options.duplicate_stdout_filters,
        duplicate_stderr_filters=options.duplicate_stderr_filters,
        event_log_handler=options.event_log_handler,
        numa_binding=options.numa_binding,
        start_method=method,
        virtual_local_rank=options.virtual_local_rank,
        watchdog=environ.get(watchdog.SWITCH) == _SWITCHED_ON,
        timer_file=environ.get(watchdog.FILE),
        environ=surroundings.encoded(environ) if method == "spawn" else (),
    )


def check(options: LaunchOptions, placement: Placement, environ: Mapping[str, str]) -> None:
    """Raise `OptionError` for what cannot be carried out here; no process has started yet."""
    if options.init_process_group:
        devices.check_backend(placement.backend, environ)
    start_methods.check(options.start_method)
    events.check_handler(options.event_log_handler)
    log_files.find(options.logs_specs)
    log_files.check_filters((*options.duplicate_stdout_filters, *options.duplicate_stderr_filters))
    if options.numa_binding is not None:
        numa.check(
            options.numa_binding,
            devices.visible_gpus(environ),
            placement.nproc,
            virtual_local_rank=options.virtual_local_rank,
        )
    if options.virtual_local_rank and not placement.accelerators:
        _check_enough_devices(environ, placement)


def _check_enough_devices(environ: Mapping[str, str], placement: Placement) -> None:
    hip = torch.version.hip is not None
    chosen = _visible.chosen(environ, hip=hip) or ""
    named = [part for part in chosen.split(",") if part.strip()]
    if named and len(named) < placement.nproc:
        variable = next(name for name in (_visible.HIP, *_visible.VARIABLES) if environ.get(name) == chosen)
        msg = (
            f"virtual_local_rank was asked for with {placement.nproc} ranks, which gives each rank one GPU "
            f"of its own, but {variable}={chosen!r} names {len(named)}. Lower nproc, or leave it out."
        )
        raise OptionError(msg)
