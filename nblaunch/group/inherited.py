"""What ranks inherit from this process besides variables: directory, path, umask, limits, environment."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from nblaunch._errors import LaunchError
from nblaunch.elastic import descriptors
from nblaunch.elastic.placement import Placement
from nblaunch.elastic.settings import JOIN_KEY
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import Prepare

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
    }
)
"""Variables that a program reads once, when it or a library is loaded: in the fork server, long ago."""


def working_directory() -> bytes:
    """Return the directory in which ranks begin. Raises `LaunchError` if it has been removed."""
    try:
        return os.fsencode(Path.cwd())
    except OSError as error:
        there = ""
        with contextlib.suppress(OSError):
            there = f" ({Path('/proc/self/cwd').readlink()})"
        msg = (
            f"Ranks begin in the working directory of this process, which is gone{there}: {error.strerror}. "
            "Change to one that exists: os.chdir(...)."
        )
        raise LaunchError(msg, phase="fork") from error


def umask() -> int | None:
    """Return this process's umask, None where it cannot be read without changing it for other threads."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return None


def limits(nproc: int) -> tuple[tuple[str, int, int], ...]:
    """Return each limit's name, soft and hard value, with enough descriptors for a rank."""
    found = []
    for name in sorted(each for each in dir(resource) if each.startswith("RLIMIT_")):
        soft, hard = resource.getrlimit(getattr(resource, name))
        if name == "RLIMIT_NOFILE":
            soft = descriptors.soft_limit_of_rank(nproc, soft, hard)
        found.append((name, soft, hard))
    return tuple(found)


def encoded(environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return an environment as it is sent to ranks: without the join key."""
    return tuple(os.fsencode(f"{name}={value}") for name, value in environ.items() if name != JOIN_KEY)


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
    """
    untouched = script and not options.init_process_group and placement.device_type != "cpu"
    # torchrun leaves this in its environment, so its workers have it; here no handler is ever installed.
    environ = {**environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle}
    return Prepare(
        environ=encoded(environ),
        cwd=working_directory(),
        path=tuple(os.fsencode(os.path.abspath(entry)) for entry in sys.path if entry or not script),  # noqa: PTH100 - not resolve(), which follows links
        argv=tuple(os.fsencode(each) for each in sys.argv[:1]) or (b"",),
        umask=umask(),
        limits=limits(placement.nproc),
        backend=placement.backend if options.init_process_group else None,
        device_type="" if untouched else placement.device_type,
        accelerators=placement.accelerators,
        timeout=timeout,
    )
