"""A rank's environment: the notebook's as it is now, under what torchelastic has set for this rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from nblaunch import _devices
from nblaunch.protocol.messages import Prepare

# The agent sets these; the notebook's own values of them never reach a rank.
AGENT_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_TIMER_FILE"),
)

_OPENBLAS_FUNCTIONS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "_64", "")
)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_HANDLES_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_RETHROWS = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
_ENDS_ALL_THE_SAME = "TORCH_NCCL_TEARDOWN_ON_TIMEOUT"
# The words of torch's getCvarBool.
_OFF, _ON = {"n", "no", "f", "false", "0"}, {"y", "yes", "t", "true", "1"}
_DEFAULTS = {
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "NCCL_SOCKET_IFNAME": _LOOPBACK,
    _HANDLES_ERRORS: "1",
    # With these rich draws its progress bars while they run, in colour: the panel is as good as a terminal.
    "TTY_COMPATIBLE": "1",
    "TTY_INTERACTIVE": "1",
}
"""Values where the notebook has set none."""
_SESSION_DEFAULTS = {
    # A session aborts NCCL by itself, and torch's own abort requires that the watchdog handles no errors. Nor
    # may the watchdog and its monitor end a process whose variables the user wants to keep: because a
    # debugger's prompt waits, because a peer was interrupted, or over a CUDA error that the rank reports
    # itself.
    _HANDLES_ERRORS: "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    _RETHROWS: "0",
}


def for_rank(entries: Iterable[bytes], *, keep: bool) -> dict[str, str]:
    """Return a rank's environment: the notebook's, as `NAME=VALUE`, under what the agent has set here."""
    agent = {name: os.environ[name] for name in AGENT_VARIABLES if name in os.environ}
    sent = (os.fsdecode(entry).partition("=") for entry in entries)
    wanted = {name: value for name, _, value in sent if name not in AGENT_VARIABLES}
    # torchrun's rule: one thread each if there is more than one rank; a single rank has all cores.
    threads = {"OMP_NUM_THREADS": "1"} if agent.get("LOCAL_WORLD_SIZE") != "1" else {}
    defaults = {**_DEFAULTS, **_SESSION_DEFAULTS} if keep else dict(_DEFAULTS)
    if wanted.get(_HANDLES_ERRORS, "0") != "0":
        defaults.pop(_RETHROWS, None)  # see `unheard_timeouts`
    return {**defaults, **threads, **wanted, **agent}


def unheard_timeouts() -> str:
    """Return a warning where ProcessGroupNCCL aborts what has timed out and tells nobody, "" elsewhere.

    With errors handled and not rethrown (pytorch#196187) the GPU goes on with what it has, which is wrong.
    """
    if (
        os.environ.get(_RETHROWS, "1").lower() not in _OFF
        or os.environ.get(_HANDLES_ERRORS) == "0"
        or (os.environ.get(_ENDS_ALL_THE_SAME, "0").lower() in _ON and torch.__version__ >= "2.15")
    ):
        return ""
    return (
        f"with {_RETHROWS}=0 a collective that times out is aborted, nobody is told, "
        "and its values are wrong. "
        f"Leave it out, or add {_ENDS_ALL_THE_SAME}=1, which torch heeds since 2.15, or {_HANDLES_ERRORS}=0."
    )


given: dict[str, str] = {}
"""The environment before the first job."""
_directory = ""
"""The working directory then."""
search_path: list[str] = []
"""What `sys.path` had then, and where the notebook's own modules are on another machine."""


def note_given() -> None:
    """Note what the rank has before its first job."""
    global _directory
    given.update(os.environ)
    _directory = _working_directory()
    search_path.extend(sys.path)


def new_directory() -> str:
    """Return the working directory, "" if that is still the first one."""
    here = _working_directory()
    return here if here != _directory else ""


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it has been removed
        return ""


def added_to_path() -> tuple[list[str], list[str]]:
    """Return what jobs have added to `sys.path`, in front of what was there and behind it."""
    begun = [at for at, each in enumerate(sys.path) if each in search_path]
    end = max(begun, default=-1)
    added = [(at, each) for at, each in enumerate(sys.path) if at not in begun]
    return [each for at, each in added if at < end], [each for at, each in added if at > end]


def follow(directory: str, front: list[str], back: list[str]) -> None:
    """Be in another rank's directory, with what it has added to `sys.path`."""
    if directory:
        with contextlib.suppress(OSError):  # this machine does not have it
            os.chdir(directory)
    sys.path[:] = [*front, *(each for each in sys.path if each not in [*front, *back]), *back]


def apply(prepare: Prepare, *, keep: bool) -> None:
    wanted = for_rank(prepare.environ, keep=keep)
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    # A directory that this user may not enter by its path is where the fork server is already.
    with contextlib.suppress(PermissionError):
        os.chdir(prepare.cwd)
    sys.path[:] = map(os.fsdecode, prepare.path)
    sys.argv[:] = map(os.fsdecode, prepare.argv)
    if prepare.umask is not None:
        os.umask(prepare.umask)
    for name, soft, hard in prepare.limits:
        _limit(getattr(resource, name), soft, hard)
    _set_threads(os.environ.get("OMP_NUM_THREADS"))
    _read_again()


def _limit(which: int, soft: int, hard: int) -> None:
    if resource.getrlimit(which) == (soft, hard):
        return
    try:
        resource.setrlimit(which, (soft, hard))
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))


def see_one_device_only(accelerators: int = 0) -> None:
    """Be local rank 0 with one GPU to see, as torchrun's --virtual-local-rank has it, also without GPUs.

    Where there are fewer `accelerators` than ranks, these share them.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    place = local_rank % accelerators if accelerators else local_rank
    os.environ.update(_devices.some_alone(os.environ, [place], hip=torch.version.hip is not None))
    os.environ["LOCAL_RANK"] = "0"


def _read_again() -> None:
    """Have torch and the C library read again what they read in the fork server."""
    time.tzset()
    dist.set_debug_level_from_env()
    if "TORCH_LOGS" in os.environ:
        with contextlib.suppress(Exception):  # a private name, for a convenience
            torch._logging._internal._init_logs()  # noqa: SLF001


def _set_threads(value: str | None) -> None:
    """Follow OMP_NUM_THREADS, although torch has read it already, when the fork server imported it."""
    with contextlib.suppress(ValueError):
        threads = int(value.partition(",")[0]) if value is not None else _cores()
        if threads > 0 and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
            _set_openblas_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", threads)))


def _cores() -> int:
    """Return torch's own default number of threads: one for each core that this process may use."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(logical, psutil.cpu_count(logical=False) or logical)


def _set_openblas_threads(threads: int) -> None:
    """Have NumPy's OpenBLAS, loaded in the fork server, follow too; builds name the function differently."""
    try:
        mapped = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for path in {line.split(maxsplit=5)[5] for line in mapped if "openblas" in line}:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _OPENBLAS_FUNCTIONS:
                if hasattr(library, name):
                    getattr(library, name)(threads)


def choose_device(prepare: Prepare) -> torch.device:
    """Return this rank's device, made current if it is an accelerator; the CPU where scripts choose."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if prepare.device_type in ("", "cpu") or prepare.accelerators == 0:
        return torch.device("cpu")
    device = torch.device(prepare.device_type, local_rank % prepare.accelerators)
    torch.get_device_module(device).set_device(device)
    return device


def bind_to_cpus(mode: str, gpu_index: int) -> None:
    """Bind all threads of this process as `mode` has it for one of the GPUs that it sees.

    torch would bind before the rank's code runs, and ask CUDA where the GPU is: with the environment of the
    fork server, which CUDA then keeps. It also requires the program `numactl`, which a running process can do
    without.
    """
    cpus = _devices.cpus_near(gpu_index, mode)
    if not cpus:
        msg = f"numa_binding={mode!r} was asked for, but this process may use no CPU near GPU {gpu_index}"
        raise RuntimeError(msg)
    before = os.sched_getaffinity(0)
    for thread in map(int, (path.name for path in Path("/proc/self/task").iterdir())):
        # One may have ended meanwhile; one that was bound elsewhere stays there.
        with contextlib.suppress(OSError):
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, cpus)
