"""How processes are started, as options and environment ask; what cannot be done here, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nblaunch import _devices
from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch._inherited import encoded
from nblaunch.host import hooks
from nblaunch.host.placement import check_backend, check_numa_binding, visible_gpus
from nblaunch.host.settings import ProcessSettings
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import Placement

_SWITCHED_ON = "1"


def process_settings(
    options: LaunchOptions, environ: Mapping[str, str], loaded_under: Mapping[str, str]
) -> ProcessSettings:
    """Return how the agent is to start processes.

    `environ` is that of the ranks, `loaded_under` that under which the fork server has loaded torch.
    """
    method = options.start_method
    if method == "forkserver" and torch.backends.cuda.is_built():
        method = "spawn" if needs_new_python(environ, loaded_under) else method
    return ProcessSettings(
        start_method=method,
        watchdog=environ.get(hooks.SWITCH) == _SWITCHED_ON,
        timer_file=environ.get(hooks.FILE),
        environ=encoded(environ) if method == "spawn" else (),
    )


def check_process_options(
    options: LaunchOptions, placement: Placement, environ: Mapping[str, str], backends: Sequence[str] = ()
) -> None:
    """Raise `OptionError` for what cannot be carried out here; `backends` are more than torch has here."""
    if options.init_process_group:
        check_backend(placement.backend, environ, backends)
    hooks.check_handler(options.event_log_handler)
    hooks.find_logs_specs(options.logs_specs)
    hooks.check_line_filters((*options.duplicate_stdout_filters, *options.duplicate_stderr_filters))
    if options.numa_binding is not None:
        check_numa_binding(
            options.numa_binding,
            visible_gpus(environ),
            placement.nproc,
            virtual_local_rank=options.virtual_local_rank,
        )
    if options.virtual_local_rank and not placement.accelerators:
        _check_enough_devices(environ, placement)


def _check_enough_devices(environ: Mapping[str, str], placement: Placement) -> None:
    hip = torch.version.hip is not None
    chosen = _devices.choice_of(environ, hip=hip) or ""
    named = [part for part in chosen.split(",") if part.strip()]
    if named and len(named) < placement.nproc:
        variable = next(name for name in (_devices.HIP, *_devices.VARIABLES) if environ.get(name) == chosen)
        msg = (
            f"virtual_local_rank with {placement.nproc} ranks gives each one a GPU of its own, but "
            f"{variable}={chosen!r} names {len(named)}. Lower nproc, or leave it out."
        )
        raise OptionError(msg, kind=FailureKind.TOO_FEW_GPUS)


# Variables that a fork of the server takes no notice of, since it has loaded everything before.

READ_WHEN_LOADED = frozenset(
    {
        # the dynamic linker and the C library
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "LD_BIND_NOW", "DYLD_LIBRARY_PATH"),
        *("DYLD_INSERT_LIBRARIES", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_HWCAP_MASK"),
        *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_PERTURB_"),
        # Python
        *("PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONOPTIMIZE", "PYTHONDEVMODE", "PYTHONUTF8", "PYTHONHOME"),
        *("PYTHONTRACEMALLOC", "PYTHONFAULTHANDLER", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE"),
        *("PYTHONINTMAXSTRDIGITS", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHON_GIL", "PYTHON_JIT"),
        # OpenMP, MKL, OpenBLAS, NumPy
        *("OMP_PROC_BIND", "OMP_PLACES", "OMP_STACKSIZE", "OMP_WAIT_POLICY", "OMP_DYNAMIC", "OMP_SCHEDULE"),
        *("KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT", "MKL_CBWR"),
        *("MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_THREADING_LAYER", "MKL_ENABLE_INSTRUCTIONS"),
        *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "BLIS_NUM_THREADS"),
        # torch
        *("PYTORCH_JIT", "TORCH_CPP_LOG_LEVEL", "ATEN_CPU_CAPABILITY", "TORCH_SHOW_CPP_STACKTRACES"),
        "TORCH_DIST_USE_NCCL2",
    }
)
"""Variables that a program reads once, when it or a library is loaded: in the fork server, long ago."""
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_KINETO = "KINETO_USE_DAEMON"


def needs_new_python(environ: Mapping[str, str], loaded_under: Mapping[str, str]) -> bool:
    """Return whether a fork of the server would fail under `environ`, or CUDA be initialised too soon there.

    torch takes its allocator for CUDA when it is loaded, and raises where the variable is another one later.
    Kineto's daemon initialises CUDA when torch is loaded.
    """
    return environ.get(_KINETO) != loaded_under.get(_KINETO) or any(
        _backend_of(environ.get(name, "")) != _backend_of(loaded_under.get(name, "")) for name in _ALLOCATORS
    )


def _backend_of(settings: str) -> str:
    """Return the allocator in these settings; torch reads the others when CUDA is initialised."""
    pairs = (part.partition(":") for part in settings.replace(" ", "").split(","))
    return next((value for name, _, value in pairs if name == "backend"), "native")


def unheeded(environ: Mapping[str, str], loaded_under: Mapping[str, str]) -> str:
    """Return a warning about variables that forks of the server ignore, "" if there are none."""
    changed = sorted(
        name
        for name in READ_WHEN_LOADED & (environ.keys() | loaded_under.keys())
        if environ.get(name) != loaded_under.get(name)
    )
    if not changed:
        return ""
    return (
        f"no effect in the ranks: {', '.join(changed)}. A program reads such a variable only when it starts, "
        "and the ranks are forks of a server that started before the change. Use --start-method spawn, or "
        "set it before nblaunch is loaded."
    )
